"""Triton kernels: how the operations of `pylate_flash.ops` are computed on a GPU."""

from __future__ import annotations

from torch import Tensor

from .backward import bound_backward, maxsim_backward, maxsim_varlen_backward
from .forward import bound_maxsim, bound_maxsim_varlen, maxsim_forward, maxsim_varlen_forward
from .launch import on_device
from .tiles import architecture, fused_tile
from .units import through_unit_rows, unit_rows

__all__ = [
    "architecture",
    "bound_backward",
    "bound_maxsim",
    "bound_maxsim_varlen",
    "fused_forward",
    "fused_tile",
    "maxsim_backward",
    "maxsim_forward",
    "maxsim_varlen_backward",
    "maxsim_varlen_forward",
    "on_device",
    "through_unit_rows",
    "unit_rows",
]


def fused_forward(*arguments) -> Tensor:
    """`fused.fused_forward`, imported where it runs only: not every Triton has Gluon."""
    from .fused import fused_forward

    return fused_forward(*arguments)
