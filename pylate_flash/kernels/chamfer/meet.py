"""The kernel in which two sets meet: the nearest of y for every point of x, and of x for every point of y, at once.

How near two points are is their inner product, or minus half their squared distance: of points of few coordinates by
their differences, which lose nothing however near they are, and of longer ones as <x, y> - |x|^2 / 2 - |y|^2 / 2.

A tile has maxima of its rows and of its columns. Those of rows stay in registers while a program walks the points of y;
those of columns go to memory with every tile, as integers with their place, of which memory keeps the largest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton.language as tl
from torch import Tensor

from ..forward.common import split_products
from ..forward.cuts import NO_WINNER
from ..jit import kernel
from ..launch import Kernel
from ..plan_operations import meeting_plan
from ..reductions import larger, max_along
from ..rows import half_squares
from .inputs import Side, points_at, set_of
from .keys import NO_KEY, keys_at

if TYPE_CHECKING:
    from ...problem import Problem


@kernel
def _meet_kernel(
    x_ptr, x_active_ptr, x_counts_ptr, x_bounds_ptr, y_ptr, y_active_ptr, y_counts_ptr, y_bounds_ptr,
    x_halves_ptr, y_halves_ptr, x_keys_ptr, y_keys_ptr,
    x_length, y_length, n_row_blocks, n_shares, share,
    stride_x, stride_x_point, stride_y, stride_y_point,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    GROUPS: tl.constexpr,
    DIRECT: tl.constexpr,
    SPLIT: tl.constexpr,
    SQUARED: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    X_UNIT: tl.constexpr,
    Y_UNIT: tl.constexpr,
):  # fmt: skip
    """keys[point] = the largest of what is there and of the key of the nearest point of the other set.

    Keys lie by set and position among its active points, and hold such positions; of NaN, that of a point of its tile,
    not after it. Grid: shares of y x blocks of x x pairs. Beyond the last point of a set, it is met again, which no
    maximum notices.
    """
    stride_x *= X_UNIT
    stride_x_point *= X_UNIT
    stride_y *= Y_UNIT
    stride_y_point *= Y_UNIT
    program = tl.program_id(0)
    pair = (program // (n_shares * n_row_blocks)).to(tl.int64)
    x_ptr, x_count, x_start = set_of(
        pair, x_ptr, x_counts_ptr, x_bounds_ptr, x_length, stride_x, stride_x_point, PACKED
    )
    y_ptr, y_count, y_start = set_of(
        pair, y_ptr, y_counts_ptr, y_bounds_ptr, y_length, stride_y, stride_y_point, PACKED
    )
    first_row = program // n_shares % n_row_blocks * BLOCK_X
    first = program % n_shares * share
    last = tl.minimum(first + share, y_count)
    if (first_row < x_count) & (first < last):
        row_slots, slots = tl.arange(0, BLOCK_X), tl.arange(0, BLOCK_Y)
        rows = points_at(tl.minimum(first_row + row_slots, x_count - 1), x_active_ptr, x_start)
        x_rows = x_ptr + rows.to(tl.int64) * stride_x_point
        dims = tl.arange(0, BLOCK_SIZE)
        if DIRECT:
            coordinates = (tl.load(x_rows).to(tl.float32),)
            for dim in tl.static_range(1, SIZE):
                coordinates = coordinates + (tl.load(x_rows + dim).to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
        elif not SPLIT:
            x_tile = tl.load(x_rows[:, None] + dims[None, :], mask=(dims < SIZE)[None, :], other=0.0)
        if SQUARED and not DIRECT:
            x_halves = tl.load(x_halves_ptr + x_start + rows)
        # Every GROUPS-th column is of one group, in a thread of its own.
        N_STEPS: tl.constexpr = BLOCK_Y // GROUPS
        places = tl.arange(0, N_STEPS)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
        best = tl.full([BLOCK_X, GROUPS], float("-inf"), tl.float32)
        position = tl.full([BLOCK_X, GROUPS], NO_WINNER, tl.int32)
        for start in tl.range(first, last, BLOCK_Y):
            # [N_STEPS, BLOCK_X, GROUPS]
            if DIRECT:
                columns = points_at(tl.minimum(start + places, y_count - 1), y_active_ptr, y_start)
                y_rows = y_ptr + columns.to(tl.int64) * stride_y_point
                near = tl.zeros([N_STEPS, BLOCK_X, GROUPS], tl.float32)
                for dim in tl.static_range(0, SIZE):
                    others = tl.load(y_rows + dim).to(tl.float32)[:, None, :]
                    if SQUARED:
                        difference = coordinates[dim][None, :, None] - others
                        near -= difference * difference
                    else:
                        near += coordinates[dim][None, :, None] * others
            else:
                columns = points_at(tl.minimum(start + slots, y_count - 1), y_active_ptr, y_start)
                y_rows = y_ptr + columns.to(tl.int64) * stride_y_point
                if SPLIT:
                    products = split_products(
                        x_rows, y_rows, row_slots >= 0, slots >= 0, SIZE, BLOCK_SIZE, BLOCK_X, BLOCK_Y, PRECISION
                    )
                else:
                    y_tile = tl.load(y_rows[None, :] + dims[:, None], mask=(dims < SIZE)[:, None], other=0.0)
                    products = tl.dot(x_tile, y_tile, input_precision=PRECISION)
                if SQUARED:
                    products -= tl.load(y_halves_ptr + y_start + columns)[None, :]
                    products -= x_halves[:, None]
                near = tl.permute(tl.reshape(products, [BLOCK_X, N_STEPS, GROUPS]), (1, 0, 2))

            # Where a maximum is NaN, all win, and the first of them is told: `settle` looks for the NaN from there.
            tile_best = max_along(near, 0)
            won = ~(near < tile_best[None, :, :])
            place = tl.min(tl.where(won, places[:, None, :], BLOCK_Y), axis=0)
            # A later tile must be strictly better, or the first NaN.
            later = (tile_best > best) | ((tile_best != tile_best) & (best == best))
            position = tl.where(later, start + place, position)
            best = larger(best, tile_best)

            tile_best = max_along(near, 1)
            won = ~(near < tile_best[:, None, :])
            place = tl.min(tl.where(won, row_slots[None, :, None], BLOCK_X), axis=1)
            keys = keys_at(tile_best, tl.minimum(first_row + place, x_count - 1))
            at = start + places
            tl.atomic_max(y_keys_ptr + y_start + at, keys, mask=at < y_count, sem="relaxed")

        row_best = max_along(best, 1)
        won = (best == row_best[:, None]) | (best != best)
        place = tl.min(tl.where(won, position, NO_WINNER), axis=1)
        at = first_row + row_slots
        keys = keys_at(row_best, tl.minimum(place, y_count - 1))
        tl.atomic_max(x_keys_ptr + x_start + at, keys, mask=at < x_count, sem="relaxed")


_meet = Kernel(_meet_kernel)


def meet(problem: Problem, x: Side, y: Side, squared: bool) -> tuple[Tensor, Tensor]:
    """Keys of the nearest points, int64, by set and position among its active points; `NO_KEY` of those of no pair.

    No dimension is 0, but packed sets may be empty.
    """
    plan = meeting_plan(problem)
    x_keys, y_keys = (
        torch.full((side.points.shape[:-1].numel(),), NO_KEY, dtype=torch.int64, device=problem.device)
        for side in (x, y)
    )
    halves: tuple[Tensor | None, ...] = None, None
    if squared and not plan.direct:
        halves = half_squares(x.points), half_squares(y.points)
    tile = plan.tile
    _meet(
        (plan.row_blocks * plan.n_shares * problem.n_queries, 1, 1),
        (*x, *y, *halves, x_keys, y_keys),
        (problem.query_length, problem.document_length, plan.row_blocks, plan.n_shares, plan.share),
        plan.strides,
        (
            problem.size, plan.block, tile.rows, tile.columns, plan.groups, plan.direct, plan.split, squared,
            problem.packed, plan.precision, *plan.units,
        ),
        (tile.num_warps, tile.num_stages, None),
    )  # fmt: skip
    return x_keys, y_keys
