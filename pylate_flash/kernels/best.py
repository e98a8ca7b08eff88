"""Top-k of many scores: radix select of the k-th largest, digit by digit, in registers."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from . import tables
from .launch import kernel
from .reductions import keys_of, similarities_of

# Sorts after the key of every score.
_NO_KEY = tl.constexpr(2**63 - 1)
_RANKED = tl.constexpr(64)


@kernel
def _best_kernel(
    scores_ptr, columns_ptr, best_ptr, indices_ptr, n_columns, n_blocks, k, row_step,
    BLOCK: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Sorted top k of each block of columns of a row of scores: scores and columns [rows, n_blocks, k].

    `columns_ptr` holds the original columns of scores that an earlier pass selected. Ties are in column order.
    Grid: rows x blocks.
    """
    row = (tl.program_id(0) // n_blocks).to(tl.int64)
    block = tl.program_id(0) % n_blocks
    columns = block * BLOCK + tl.arange(0, BLOCK)
    exists = columns < n_columns
    n_best = tl.minimum(k, n_columns - block * BLOCK)
    keys = keys_of(tl.load(scores_ptr + row * row_step + columns, mask=exists, other=0.0))
    # `equal`: scores whose 8-bit digits so far are those of the k-th largest; `remaining`: how many of them to select.
    equal, remaining = exists, n_best
    above = columns < 0
    digits = tl.arange(0, 256)
    for step in tl.static_range(4):
        # Flip the sign bit, so that digits are ordered as unsigned integers.
        digit = ((keys ^ -0x80000000) >> (24 - 8 * step)) & 255
        counts = tl.histogram(digit, 256, mask=equal)
        larger = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        at_kth = (larger < remaining) & (remaining <= larger + counts)
        kth_digit = tl.sum(tl.where(at_kth, digits, 0), 0)
        remaining -= tl.sum(tl.where(at_kth, larger, 0), 0)
        above = above | (equal & (digit > kth_digit))
        equal = equal & (digit == kth_digit)
    # Of the scores equal to the k-th largest, select the first ones.
    chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= remaining))
    slots = tl.cumsum(chosen.to(tl.int32), 0) - 1
    indices_ptr += (row * n_blocks + block) * k
    best_ptr += (row * n_blocks + block) * k
    # A sort key is the inverted score, so that the best comes first, above the column, so that all keys differ.
    tl.store(indices_ptr + slots, (keys ^ -1).to(tl.int64) << 32 | columns, mask=chosen)
    tl.debug_barrier()
    ranks = tl.arange(0, K)
    own_keys = tl.load(indices_ptr + ranks, mask=ranks < n_best, other=_NO_KEY)
    rank = tl.zeros([K], tl.int32)
    for start in tl.range(0, n_best, _RANKED):
        compared = start + tl.arange(0, _RANKED)
        compared = tl.load(indices_ptr + compared, mask=compared < n_best, other=_NO_KEY)
        rank += tl.sum((compared[None, :] < own_keys[:, None]).to(tl.int32), axis=1)
    column = own_keys & 0xFFFFFFFF
    if columns_ptr is not None:
        column = tl.load(columns_ptr + row * row_step + column, mask=ranks < n_best, other=0)
    tl.debug_barrier()
    tl.store(best_ptr + rank, similarities_of((own_keys >> 32).to(tl.int32) ^ -1), mask=ranks < n_best)
    tl.store(indices_ptr + rank, column, mask=ranks < n_best)


def k_best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest scores of every row [N, columns] (float32), and their columns (int64), both [N, k].

    Ties are in column order, NaN comes first, and -0.0 equals 0.0. There are at least `k` columns, and `k` is at most
    `tables.BEST_MOST`.
    """
    n_rows, n_columns = scores.shape
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    columns, row_step = None, scores.stride(0)
    padded_k = tables.power_of_two(max(k, 64))
    while True:
        block = min(tables.BEST_BLOCK, max(tables.BEST_LEAST_BLOCK, tables.power_of_two(n_columns)))
        n_blocks = max(1, -(-n_columns // block))
        best = scores.new_empty(n_rows, n_blocks * k)
        indices = torch.empty(n_rows, n_blocks * k, dtype=torch.int64, device=scores.device)
        if k and n_rows:
            _best_kernel(
                (n_rows * n_blocks, 1, 1), (scores, columns, best, indices), (n_columns, n_blocks, k, row_step), (),
                (block, padded_k), (block // tables.BEST_PER_WARP, 1, None),
            )  # fmt: skip
        if n_blocks == 1:
            return best, indices
        # The last block may contribute fewer.
        n_columns = (n_blocks - 1) * k + min(k, n_columns - (n_blocks - 1) * block)
        scores, columns, row_step = best, indices, n_blocks * k
