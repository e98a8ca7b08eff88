"""Triton kernels: how the operations of `pylate_flash.ops` are computed on a GPU."""

from __future__ import annotations

from .backward import bound_backward, maxsim_backward, maxsim_varlen_backward
from .forward import bound_maxsim, bound_maxsim_varlen, maxsim_forward, maxsim_varlen_forward
from .launch import on_device
from .norms import inverse_norms

__all__ = [
    "bound_backward",
    "bound_maxsim",
    "bound_maxsim_varlen",
    "inverse_norms",
    "maxsim_backward",
    "maxsim_forward",
    "maxsim_varlen_backward",
    "maxsim_varlen_forward",
    "on_device",
]
