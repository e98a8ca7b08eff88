"""Triton kernels: how the operations of `pylate_flash.ops` are computed on a GPU."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .backward import bound_backward, maxsim_backward, maxsim_varlen_backward
from .forward import bound_maxsim, bound_maxsim_varlen, maxsim_forward, maxsim_varlen_forward
from .launch import Launch, on_device
from .losses import Comparison, bound_loss, bound_rescale, bound_step
from .tiles import has_gluon
from .units import bound_through_units, bound_units, through_unit_rows, unit_rows

__all__ = [
    "Comparison",
    "bound_backward",
    "bound_fused",
    "bound_loss",
    "bound_maxsim",
    "bound_maxsim_varlen",
    "bound_projection",
    "bound_rescale",
    "bound_step",
    "bound_through_units",
    "bound_units",
    "maxsim_backward",
    "maxsim_forward",
    "maxsim_varlen_backward",
    "maxsim_varlen_forward",
    "on_device",
    "through_unit_rows",
    "unit_rows",
]


def bound_fused(*arguments) -> Callable[..., Tensor] | None:
    """`fused.bound_fused`, imported where it may run only: not every Triton has Gluon."""
    if not has_gluon():
        return None
    from .fused import bound_fused

    return bound_fused(*arguments)


def bound_projection(*arguments) -> Launch | None:
    """`fused.bound_projection`, likewise."""
    if not has_gluon():
        return None
    from .fused import bound_projection

    return bound_projection(*arguments)
