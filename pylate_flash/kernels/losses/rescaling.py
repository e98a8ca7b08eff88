"""The gradients of a loss, multiplied in place by the gradient of the loss."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..launch import Kernel
from ..overlap import wait_for_previous_kernel
from ..tables import architecture

_BLOCK = 1024
# Programs per multiprocessor.
_PROGRAMS = 4


def rescale(factor: Tensor, first: Tensor | None, second: Tensor | None) -> None:
    """Multiply two contiguous tensors (None for none) by a float32 scalar; costs next to nothing where it is 1."""
    counts = (0 if first is None else first.numel(), 0 if second is None else second.numel())
    programs = min(_PROGRAMS * architecture(factor.device)[1], -(-max(counts) // _BLOCK)) or 1
    _rescale((programs, 1, 1), (factor, first, second), counts, (), (_BLOCK,), (4, 1, None))


@triton.jit(do_not_specialize=["n_first", "n_second"])
def _rescale_kernel(factor_ptr, first_ptr, second_ptr, n_first, n_second, BLOCK: tl.constexpr):
    """Multiply two tensors of so many elements (0 for none) by a factor on the device, unless it is 1."""
    wait_for_previous_kernel()
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        start = tl.program_id(0).to(tl.int64) * BLOCK
        if first_ptr is not None:
            for block in tl.range(start, n_first, step):
                at = block + tl.arange(0, BLOCK)
                values = tl.load(first_ptr + at, mask=at < n_first, other=0.0)
                tl.store(first_ptr + at, (values * factor).to(first_ptr.dtype.element_ty), mask=at < n_first)
        if second_ptr is not None:
            for block in tl.range(start, n_second, step):
                at = block + tl.arange(0, BLOCK)
                values = tl.load(second_ptr + at, mask=at < n_second, other=0.0)
                tl.store(second_ptr + at, (values * factor).to(second_ptr.dtype.element_ty), mask=at < n_second)


_rescale = Kernel(_rescale_kernel, follows=True)
