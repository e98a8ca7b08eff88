"""Launch a Triton kernel with less host time than Triton itself takes.

Triton looks a kernel up by a string of everything that it was specialised on, built anew at every launch: tens of
microseconds for a kernel of many arguments, as long as the kernel itself runs on a small problem. What the
specialisation depends on is known here, so a tuple of it finds the compiled kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_INT32_MAX = 2**31 - 1


class Launcher:
    """A Triton kernel whose arguments come in this order: tensors (or None), integers, strides, constants.

    Parameters
    ----------
    kernel
        The function under `triton.jit`. Its integers must be in `do_not_specialize`; its strides are specialised.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[tuple, Any] = {}

    def bind(
        self,
        grid: tuple[int, int, int],
        integers: tuple[int, ...],
        strides: tuple[int, ...],
        constants: tuple,
        num_warps: int,
        num_stages: int,
        max_registers: int | None = None,
    ) -> Callable[..., None]:
        """A launch of which only the tensors are open. Keep it: what it costs beyond Triton's launcher it costs once.

        Parameters
        ----------
        grid
            Programs along the three axes, each at least 1.
        integers, strides, constants
            The arguments after the tensors, in the kernel's order.
        num_warps, num_stages, max_registers
            Triton's launch options; the last is per thread.

        Returns
        -------
        Callable
            Takes the tensors, the first of them on the current device and none of another type from call to call, and
            launches on the current stream. Compiles what was never compiled.
        """
        rest = (*integers, *strides, *constants)
        # Triton tells apart 1, multiples of 16, and what needs 64 bits.
        specialised = (
            tuple([stride if stride == 1 else (stride % 16 == 0, stride > _INT32_MAX) for stride in strides]),
            tuple([integer > _INT32_MAX for integer in integers]),
        )
        runners: dict[tuple, Callable[..., None]] = {}

        def launch(*tensors: Tensor | None) -> None:
            pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
            aligned = tuple([pointer is None or pointer % 16 == 0 for pointer in pointers])
            runner = runners.get(aligned)
            if runner is not None:
                # An address needs no look-up of its memory, as a tensor does.
                runner(*pointers, *rest)
                return
            types = tuple([None if tensor is None else tensor.dtype for tensor in tensors])
            key = (tensors[0].device, types, aligned, specialised, constants, num_warps, num_stages, max_registers)  # type: ignore[union-attr]
            compiled = self._compiled.get(key)
            if compiled is None:
                # None under Triton's interpreter, which compiles nothing.
                options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": max_registers}
                compiled = self.kernel[grid](*tensors, *rest, **options)
                self._compiled[key] = compiled
            else:
                compiled[grid](*pointers, *rest)
            if compiled is not None:
                runners[aligned] = compiled[grid]

        return launch


class on_device:
    """Make the device of a tensor the current one, as a launch needs; free where it is already."""

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.get_device()
        self._before = -1

    def __enter__(self) -> None:
        if self._device >= 0 and torch.cuda.current_device() != self._device:
            self._before = torch.cuda.current_device()
            torch.cuda.set_device(self._device)

    def __exit__(self, *_: object) -> None:
        if self._before >= 0:
            torch.cuda.set_device(self._before)
