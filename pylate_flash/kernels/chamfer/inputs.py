"""What the kernels of Chamfer distances read of one of the two sets, and how they find a pair's points in it."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..launch import Region


class Side(NamedTuple):
    """The sets of one side, one of each pair."""

    # [N, L, d], or packed [T, d], of contiguous rows.
    points: Tensor
    # The active points of masked sets, and their numbers (`kernels.rows`).
    active: Tensor | None = None
    counts: Region | None = None
    # [N + 1] on the device, of packed sets.
    cu_seqlens: Tensor | None = None


@triton.jit
def set_of(pair, points_ptr, counts_ptr, cu_seqlens_ptr, length, stride_set, stride_point, PACKED: tl.constexpr):
    """Where the points of a pair's set lie, how many are active, and its first among the points of all sets."""
    if PACKED:
        start = tl.load(cu_seqlens_ptr + pair).to(tl.int64)
        count = (tl.load(cu_seqlens_ptr + pair + 1).to(tl.int64) - start).to(tl.int32)
        points_ptr += start * stride_point
    else:
        start = pair * length
        count = length
        points_ptr += pair * stride_set
    if counts_ptr is not None:
        count = tl.load(counts_ptr + 2 * pair)
    return points_ptr, count, start


@triton.jit
def points_at(positions, active_ptr, start):
    """The points of a set at these positions among its active ones."""
    points = positions
    if active_ptr is not None:
        points = tl.load(active_ptr + start + positions)
    return points
