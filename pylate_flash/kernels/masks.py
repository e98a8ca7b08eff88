"""A mask as a list of the tokens that it leaves, so that the forward neither loads nor multiplies the others."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Kernel, Region
from .tiles import power_of_two

_MAX_BLOCK = 1024


@triton.jit(do_not_specialize=["length"])
def _active_tokens_kernel(mask_ptr, tokens_ptr, bounds_ptr, length, BLOCK: tl.constexpr):
    """One document per program: its active positions, in order, their number, and the first masked position."""
    document = tl.program_id(0).to(tl.int64)
    count = 0
    first_masked = length
    for start in tl.range(0, length, BLOCK):
        positions = start + tl.arange(0, BLOCK)
        exists = positions < length
        active = (tl.load(mask_ptr + document * length + positions, mask=exists, other=0) != 0).to(tl.int32)
        places = count + tl.cumsum(active, axis=0) - 1
        tl.store(tokens_ptr + document * length + places, positions, mask=active != 0)
        count += tl.sum(active, axis=0)
        first_masked = tl.minimum(first_masked, tl.min(tl.where(exists & (active == 0), positions, length), axis=0))
    tl.store(bounds_ptr + document * 2, count)
    tl.store(bounds_ptr + document * 2 + 1, first_masked)


_active_tokens = Kernel(_active_tokens_kernel)


def active_tokens(mask: Tensor) -> tuple[Tensor, Region]:
    """Lists of active tokens from `mask` [.., L] of any type, active where it is not 0; contiguous, no size is 0.

    Returns
    -------
    Tensor
        Begins with the positions of the active tokens in rising order [.., L], int32, of which only the first `count`
        of each mask are written.
    Region
        Behind them [.., 2], int32: that count, and the first masked position (L where there is none).
    """
    length, size = mask.shape[-1], mask.numel()
    documents = size // length
    # Both in one allocation, the second from a multiple of 16 bytes on.
    size = -(-size // 4) * 4
    tokens = torch.empty(size + documents * 2, dtype=torch.int32, device=mask.device)
    bounds = Region(tokens, tokens.data_ptr() + 4 * size, documents * 2, torch.int32)
    _active_tokens(
        (documents, 1, 1),
        (mask, tokens, bounds),
        (length,),
        (),
        (_MAX_BLOCK if length > _MAX_BLOCK else power_of_two(length),),
        (4 if length > 256 else 1, 2, None),
    )
    return tokens, bounds
