"""The gradients of a loss, multiplied by the gradient of the loss."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Kernel
from ..overlap import wait_for_previous_kernel
from ..tables import architecture

_BLOCK = 1024
# Programs per multiprocessor.
_PROGRAMS = 4


def rescale(
    factor: Tensor, first: Tensor | None, second: Tensor | None, dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[Tensor | None, Tensor | None]:
    """Two contiguous tensors (None for none) times a float32 scalar, in place where they have their `dtypes`.

    What stays in its place costs next to nothing where the factor is 1.
    """
    given = first, second
    targets = [
        tensor if tensor is None or tensor.dtype == dtype else torch.empty_like(tensor, dtype=dtype)
        for tensor, dtype in zip(given, dtypes, strict=True)
    ]
    counts = (0 if first is None else first.numel(), 0 if second is None else second.numel())
    programs = min(_PROGRAMS * architecture(factor.device)[1], -(-max(counts) // _BLOCK)) or 1
    in_place = targets[0] is first, targets[1] is second
    _rescale((programs, 1, 1), (factor, *given, *targets), counts, (), (_BLOCK, *in_place), (4, 1, None))
    return targets[0], targets[1]


@triton.jit
def _times(source_ptr, target_ptr, number, factor, BLOCK: tl.constexpr):
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for block in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, number, step):
        at = block + tl.arange(0, BLOCK)
        values = tl.load(source_ptr + at, mask=at < number, other=0.0)
        tl.store(target_ptr + at, (values * factor).to(target_ptr.dtype.element_ty), mask=at < number)


@triton.jit(do_not_specialize=["n_first", "n_second"])
def _rescale_kernel(
    factor_ptr, first_ptr, second_ptr, first_target_ptr, second_target_ptr, n_first, n_second,
    BLOCK: tl.constexpr,
    FIRST_IN_PLACE: tl.constexpr,
    SECOND_IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Two tensors of so many elements times a factor on the device; in place, a factor of 1 is left out."""
    wait_for_previous_kernel()
    factor = tl.load(factor_ptr)
    # What is compiled, then what is computed.
    if first_ptr is not None:  # noqa: SIM102
        if not FIRST_IN_PLACE or factor != 1.0:
            _times(first_ptr, first_target_ptr, n_first, factor, BLOCK)
    if second_ptr is not None:  # noqa: SIM102
        if not SECOND_IN_PLACE or factor != 1.0:
            _times(second_ptr, second_target_ptr, n_second, factor, BLOCK)


_rescale = Kernel(_rescale_kernel, follows=True)
