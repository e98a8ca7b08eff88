"""Triton kernels: how the operations of `pylate_flash.ops` are computed on a GPU."""

from __future__ import annotations

from .launch import on_device
from .maxsim import maxsim_forward, maxsim_varlen_forward
from .maxsim_backward import maxsim_backward_documents, maxsim_backward_queries

__all__ = [
    "maxsim_backward_documents",
    "maxsim_backward_queries",
    "maxsim_forward",
    "maxsim_varlen_forward",
    "on_device",
]
