"""A mask as a list of the tokens that it leaves, so that the forward neither loads nor multiplies the others."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, Launcher

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


_active_tokens = Launcher(_active_tokens_kernel)


def active_tokens(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Lists of active tokens from `mask` [.., L], bool and contiguous, with no dimension of 0.

    Returns
    -------
    tuple of Tensor
        Positions of the active tokens in rising order [.., L], int32, of which only the first `count` are written; and
        [.., 2], int32: that count, and the first masked position (L where there is none).
    """
    length = mask.shape[-1]
    tokens = mask.new_empty(mask.shape, dtype=torch.int32)
    bounds = mask.new_empty((*mask.shape[:-1], 2), dtype=torch.int32)
    bound_active_tokens(mask.numel() // length, length, mask.device)(mask, tokens, bounds)
    return tokens, bounds


@functools.lru_cache(maxsize=1024)
def bound_active_tokens(n_documents: int, length: int, device: torch.device) -> Launch:
    """A launch for the mask of so many documents: takes it, the positions and the bounds."""
    return _active_tokens.bind(
        (n_documents, 1, 1),
        (length,),
        (),
        (min(_MAX_BLOCK, triton.next_power_of_2(length)),),
        num_warps=4 if length > 256 else 1,
        num_stages=2,
    )
