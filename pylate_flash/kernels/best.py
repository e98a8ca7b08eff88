"""The best of many scores: what is above the least of them, digit by digit, in registers."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from . import tables
from .launch import kernel
from .reductions import keys_of, similarities_of

# Behind all keys of scores.
_NO_KEY = tl.constexpr(2**63 - 1)
_RANKED = tl.constexpr(64)


@kernel
def _best_kernel(
    scores_ptr, columns_ptr, best_ptr, found_ptr, n_columns, n_blocks, k, row_step, BLOCK: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """The k best of every block of columns of a row of scores, in order: scores and columns [rows, n_blocks, k].

    `columns_ptr` says which columns the scores are of, where they are what is left of others; equal ones are in the
    order of their columns. Grid: rows x blocks.
    """
    row = (tl.program_id(0) // n_blocks).to(tl.int64)
    block = tl.program_id(0) % n_blocks
    columns = block * BLOCK + tl.arange(0, BLOCK)
    exists = columns < n_columns
    wanted = tl.minimum(k, n_columns - block * BLOCK)
    keys = keys_of(tl.load(scores_ptr + row * row_step + columns, mask=exists, other=0.0))
    # Those that may be the least wanted one have its digits of 8 bits so far, and so many of them are wanted.
    equal, left = exists, wanted
    above = columns < 0
    digits = tl.arange(0, 256)
    for step in tl.static_range(4):
        # The sign tells the larger ones.
        digit = ((keys ^ -0x80000000) >> (24 - 8 * step)) & 255
        counts = tl.histogram(digit, 256, mask=equal)
        larger = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        here = (larger < left) & (left <= larger + counts)
        least = tl.sum(tl.where(here, digits, 0), 0)
        left -= tl.sum(tl.where(here, larger, 0), 0)
        above = above | (equal & (digit > least))
        equal = equal & (digit == least)
    # Of those that equal it, the first ones.
    chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= left))
    places = tl.cumsum(chosen.to(tl.int32), 0) - 1
    found_ptr += (row * n_blocks + block) * k
    best_ptr += (row * n_blocks + block) * k
    # A key has the score above its place, the best first: so all are different.
    tl.store(found_ptr + places, (keys ^ -1).to(tl.int64) << 32 | columns, mask=chosen)
    tl.debug_barrier()
    ranks = tl.arange(0, K)
    own = tl.load(found_ptr + ranks, mask=ranks < wanted, other=_NO_KEY)
    rank = tl.zeros([K], tl.int32)
    for start in tl.range(0, wanted, _RANKED):
        others = start + tl.arange(0, _RANKED)
        others = tl.load(found_ptr + others, mask=others < wanted, other=_NO_KEY)
        rank += tl.sum((others[None, :] < own[:, None]).to(tl.int32), axis=1)
    column = own & 0xFFFFFFFF
    if columns_ptr is not None:
        column = tl.load(columns_ptr + row * row_step + column, mask=ranks < wanted, other=0)
    tl.debug_barrier()
    tl.store(best_ptr + rank, similarities_of((own >> 32).to(tl.int32) ^ -1), mask=ranks < wanted)
    tl.store(found_ptr + rank, column, mask=ranks < wanted)


def k_best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest scores of every row [N, columns] (float32), and their columns (int64), both [N, k].

    The first of equal ones comes first, and NaN before all; -0.0 is 0.0. There are at least `k` columns, and `k` is at
    most `tables.BEST_MOST`.
    """
    n_rows, n_columns = scores.shape
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    columns, row_step = None, scores.stride(0)
    ranked = tables.power_of_two(max(k, 64))
    while True:
        block = min(tables.BEST_BLOCK, max(tables.BEST_LEAST_BLOCK, tables.power_of_two(n_columns)))
        n_blocks = max(1, -(-n_columns // block))
        best = scores.new_empty(n_rows, n_blocks * k)
        found = torch.empty(n_rows, n_blocks * k, dtype=torch.int64, device=scores.device)
        if k and n_rows:
            _best_kernel(
                (n_rows * n_blocks, 1, 1), (scores, columns, best, found), (n_columns, n_blocks, k, row_step), (),
                (block, ranked), (block // tables.BEST_PER_WARP, 1, None),
            )  # fmt: skip
        if n_blocks == 1:
            return best, found
        # Of the last block, there may be fewer.
        n_columns = (n_blocks - 1) * k + min(k, n_columns - (n_blocks - 1) * block)
        scores, columns, row_step = best, found, n_blocks * k
