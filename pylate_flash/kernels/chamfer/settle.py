"""What every point's nearest one is, and how near, from the two points themselves.

A difference of norms and products would lose to cancellation what a difference of coordinates keeps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..jit import kernel
from ..launch import Kernel
from ..plan_operations import meeting_plan
from ..tables import power_of_two
from .inputs import Side, points_at, set_of
from .keys import NO_KEY, value_and_position

if TYPE_CHECKING:
    from ...problem import Problem

_BLOCK_POINTS = 64
_BLOCK_SIZE = 64
_NO_KEY = tl.constexpr(NO_KEY)


@triton.jit
def _value_of(
    x_rows, y_rows, exists,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_POINTS: tl.constexpr,
    SQUARED: tl.constexpr,
):  # fmt: skip
    """Squared distances, or inner products, of the points of pairs of rows that exist, else 0."""
    value = tl.zeros([BLOCK_POINTS], tl.float32)
    for start in tl.range(0, SIZE, BLOCK_SIZE):
        dims = start + tl.arange(0, BLOCK_SIZE)
        mask = exists[:, None] & (dims < SIZE)[None, :]
        x_part = tl.load(x_rows[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        y_part = tl.load(y_rows[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        if SQUARED:
            x_part -= y_part
            y_part = x_part
        value += tl.sum(x_part * y_part, axis=1)
    return value


@kernel
def _settle_kernel(
    x_ptr, x_active_ptr, x_counts_ptr, x_bounds_ptr, y_ptr, y_active_ptr, y_counts_ptr, y_bounds_ptr,
    keys_ptr, values_ptr, winners_ptr,
    x_length, y_length, n_blocks,
    stride_x, stride_x_point, stride_y, stride_y_point,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_POINTS: tl.constexpr,
    SEARCHED: tl.constexpr,
    SQUARED: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """values [N, x_length] and winners, of the points of x that have met one; nothing is written for others."""
    pair = (tl.program_id(0) // n_blocks).to(tl.int64)
    x_ptr, x_count, x_start = set_of(
        pair, x_ptr, x_counts_ptr, x_bounds_ptr, x_length, stride_x, stride_x_point, PACKED
    )
    y_ptr, y_count, y_start = set_of(
        pair, y_ptr, y_counts_ptr, y_bounds_ptr, y_length, stride_y, stride_y_point, PACKED
    )
    if (x_count > 0) & (y_count > 0):
        at = tl.program_id(0) % n_blocks * BLOCK_POINTS + tl.arange(0, BLOCK_POINTS)
        keys = tl.load(keys_ptr + x_start + at, mask=at < x_count, other=_NO_KEY)
        met = keys != _NO_KEY
        near, position = value_and_position(keys)
        # None is near where the nearest is infinitely far.
        won = met & (near != float("-inf"))
        points = points_at(tl.where(met, at, 0), x_active_ptr, x_start)
        x_rows = x_ptr + points.to(tl.int64) * stride_x_point
        position = tl.where(won, position, 0)
        # Of NaN, a point of its tile is known, not after it.
        nan = won & (near != near)
        lost = nan
        ahead = 0
        while (ahead < SEARCHED) & (tl.max(lost.to(tl.int32), axis=0) > 0):
            candidate = tl.minimum(position + ahead, y_count - 1)
            y_rows = y_ptr + points_at(candidate, y_active_ptr, y_start).to(tl.int64) * stride_y_point
            value = _value_of(x_rows, y_rows, lost, SIZE, BLOCK_SIZE, BLOCK_POINTS, SQUARED)
            found = lost & (value != value)
            position = tl.where(found, candidate, position)
            lost = lost & ~found
            ahead += 1
        winner = points_at(position, y_active_ptr, y_start)
        y_rows = y_ptr + winner.to(tl.int64) * stride_y_point
        value = _value_of(x_rows, y_rows, won, SIZE, BLOCK_SIZE, BLOCK_POINTS, SQUARED)
        value = tl.where(nan, float("nan"), value)
        value = tl.where(won, value, float("inf") if SQUARED else float("-inf"))
        to = pair * x_length + points
        tl.store(values_ptr + to, value, mask=met)
        tl.store(winners_ptr + to, tl.where(won, winner, -1), mask=met)


_settle = Kernel(_settle_kernel)


def settle(problem: Problem, x: Side, y: Side, keys: Tensor, squared: bool) -> tuple[Tensor, Tensor]:
    """How near the nearest point of y is, squared distance or inner product, float32, and which it is, int32 [N, Lx].

    Of every point of x: 0 and -1 where it has met none, and -1 where none is at a finite distance. `keys` are those of
    x, of `meet`.
    """
    shape = problem.n_queries, problem.query_length
    values = torch.empty(*shape, dtype=torch.float32, device=problem.device)
    winners = torch.empty(*shape, dtype=torch.int32, device=problem.device)
    if problem.packed or not (x.active is None and y.active is None):
        # Else all points have met one.
        values.zero_()
        winners.fill_(-1)
    n_blocks = -(-problem.query_length // _BLOCK_POINTS)
    tile = meeting_plan(problem).tile
    _settle(
        (n_blocks * problem.n_queries, 1, 1),
        (*x, *y, keys, values, winners),
        (problem.query_length, problem.document_length, n_blocks),
        (*problem.query_strides, problem.document_strides[0], problem.document_strides[2]),
        (
            problem.size, min(_BLOCK_SIZE, power_of_two(problem.size)), _BLOCK_POINTS, max(tile.rows, tile.columns),
            squared, problem.packed,
        ),
        (4, 2, None),
    )  # fmt: skip
    return values, winners
