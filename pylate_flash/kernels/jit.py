"""Kernels by the order of arguments that `launch.Kernel` has: tensors, numbers, strides, constants."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton


def kernel(function: Callable[..., None], jit: Callable[..., Any] = triton.jit) -> Any:
    """`jit` of a kernel that is specialised on its constants and strides, and on no other number.

    Tensors are called `..._ptr`, described matrices `..._desc`, and strides `stride_...`: whether they are multiples of
    16 tells how wide loads are. A number that it was compiled for would compile it again.
    """
    numbers = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if not (parameter.name.endswith(("_ptr", "_desc")) or parameter.name.startswith("stride_"))
        and "constexpr" not in str(parameter.annotation)
    ]
    return jit(do_not_specialize=numbers)(function)
