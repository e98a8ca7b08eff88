"""The best of many scores, by sorts in registers: some of every block of columns, and the best of these."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from . import tables
from .launch import kernel
from .reductions import keys_of, similarities_of, sorted_keys

_NO_KEY = tl.constexpr(2**63 - 1)


@kernel
def _best_kernel(
    scores_ptr, keys_ptr, left_ptr, best_ptr, columns_ptr, n_columns, n_blocks, k, row_step,
    FIRST: tl.constexpr, LAST: tl.constexpr, N_BITS: tl.constexpr,
):  # fmt: skip
    """The k best of every block of 2**N_BITS columns of a row: keys [rows, n_blocks, k] or, of a LAST one, scores.

    FIRST: of scores, where others are of keys, both `row_step` from one row to the next. A key has the score above its
    column: so all are different, and those of equal scores in the order of the columns. Grid: rows x blocks.
    """
    row = (tl.program_id(0) // n_blocks).to(tl.int64)
    block = tl.program_id(0) % n_blocks
    ranks = tl.arange(0, 1 << N_BITS)
    columns = (block << N_BITS) + ranks
    exists = columns < n_columns
    if FIRST:
        scores = tl.load(scores_ptr + row * row_step + columns, mask=exists, other=0.0)
        # The best is the least.
        keys = (keys_of(scores) ^ -1).to(tl.int64) << 32 | columns
        keys = tl.where(exists, keys, _NO_KEY)
    else:
        keys = tl.load(keys_ptr + row * row_step + columns, mask=exists, other=_NO_KEY)
    keys = sorted_keys(keys, N_BITS)
    at = (row * n_blocks + block) * k + ranks
    if LAST:
        tl.store(best_ptr + at, similarities_of((keys >> 32).to(tl.int32) ^ -1), mask=ranks < k)
        tl.store(columns_ptr + at, keys & 0xFFFFFFFF, mask=ranks < k)
    else:
        # Of the last block, there may be fewer.
        tl.store(left_ptr + at, keys, mask=ranks < k)


def k_best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest scores of every row [N, columns] (float32), and their columns (int64), both [N, k].

    The first of equal ones comes first, and NaN before all; -0.0 is 0.0. There are at least `k` columns, and `k` is at
    most half of those of a block (2**`tables.BEST_BITS`).
    """
    n_rows, n_columns = scores.shape
    best = scores.new_empty(n_rows, k)
    columns = torch.empty(n_rows, k, dtype=torch.int64, device=scores.device)
    if not k or not n_rows:
        return best, columns
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    keys, step = None, scores.stride(0)
    while True:
        last = n_columns <= 1 << tables.BEST_LAST_BITS
        bits = max(tables.BEST_LEAST_BITS, (n_columns - 1).bit_length()) if last else tables.BEST_BITS
        n_blocks = 1 if last else -(-n_columns >> bits)
        left = None if last else torch.empty(n_rows, n_blocks * k, dtype=torch.int64, device=scores.device)
        tensors = scores, keys, left, best, columns
        warps = max(1, min(8, 1 << bits >> tables.BEST_WARP_BITS))
        _best_kernel(
            (n_rows * n_blocks, 1, 1), tensors, (n_columns, n_blocks, k, step), (), (keys is None, last, bits),
            (warps, 1, None),
        )  # fmt: skip
        if last:
            return best, columns
        keys, n_columns, step = left, n_blocks * k, n_blocks * k
