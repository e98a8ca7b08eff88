"""The kernels of Chamfer distances: which point of the other set is nearest, both ways at once, and their gradient.

How near two points are is their inner product, or minus half their squared distance: of points of few coordinates by
their differences, which lose nothing however near they are, and of longer ones as <x, y> - |x|^2 / 2 - |y|^2 / 2.

`meet` computes it once for all points of two sets, and takes from a tile the maxima of its rows and of its columns.
Those of rows stay in registers while a program walks the points of y; those of columns go to memory with every tile, as
keys: integers of how near a point is and of its place, of which the largest is the best, and of equal ones the first.
So the order in which programs bring theirs does not matter, and the same bits win every time. `settle` computes how
near a winner is from the two points themselves: a difference of norms and products would lose to cancellation what a
difference of coordinates keeps. The gradient of a set is summed by programs that own its points (`chamfer_gradient`),
of the points listed by whom they chose, in the order of the list.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..problem import Problem
from .backward.lists import rows_by_token
from .forward.common import split_products
from .forward.splits import NO_ARGMAX
from .launch import Region, kernel
from .plan_operations import meeting_plan
from .reductions import keys_of, larger, max_along, similarities_of
from .rows import half_squares
from .tables import power_of_two

# Less than every key: of a point that has met none.
_NO_KEY = tl.constexpr(-(2**63))
# Points whose distances a program of `settle` computes, and elements of a point at a time.
_SETTLED_POINTS = 64
_SETTLED_SIZE = 64
# Of the gradient: elements of listed points in flight in a warp, and of a point for each warp.
_IN_FLIGHT = 512
_WARP_SIZE = 256


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
def _set_of(pair, points_ptr, counts_ptr, cu_seqlens_ptr, length, stride_set, stride_point):
    """Where the points of a pair's set lie, how many are active, and its first among the points of all sets."""
    if cu_seqlens_ptr is not None:
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
def _points_at(positions, active_ptr, start):
    """The points of a set at these positions among its active ones."""
    points = positions
    if active_ptr is not None:
        points = tl.load(active_ptr + start + positions)
    return points


@triton.jit
def _keys_at(values, positions):
    """int64 keys of float32 values, NaN above all, at positions from 0 on."""
    return (keys_of(values).to(tl.int64) << 32) | (0x7FFFFFFF - positions).to(tl.int64)


@kernel(config="size block block_x block_y groups direct split squared precision x_unit y_unit")
def _meet_kernel(
    x_ptr, x_active_ptr, x_counts_ptr, x_bounds_ptr, y_ptr, y_active_ptr, y_counts_ptr, y_bounds_ptr, x_halves_ptr,
    y_halves_ptr, x_keys_ptr, y_keys_ptr,
    x_length, y_length, n_row_blocks, n_shares, share,
    stride_x, stride_x_point, stride_y, stride_y_point, config: tl.constexpr,
):  # fmt: skip
    """keys[point] = the largest of what is there and of the key of the nearest point of the other set.

    Keys lie by set and position among its active points, and hold such positions; of NaN, that of a point of its tile,
    not after it. Grid: shares of y x blocks of x x pairs. Beyond the last point of a set, it is met again, which no
    maximum notices.
    """
    stride_x *= config.x_unit
    stride_x_point *= config.x_unit
    stride_y *= config.y_unit
    stride_y_point *= config.y_unit
    program = tl.program_id(0)
    pair = (program // (n_shares * n_row_blocks)).to(tl.int64)
    x_ptr, x_count, x_start = _set_of(pair, x_ptr, x_counts_ptr, x_bounds_ptr, x_length, stride_x, stride_x_point)
    y_ptr, y_count, y_start = _set_of(pair, y_ptr, y_counts_ptr, y_bounds_ptr, y_length, stride_y, stride_y_point)
    first_row = program // n_shares % n_row_blocks * config.block_x
    first = program % n_shares * share
    last = tl.minimum(first + share, y_count)
    if (first_row < x_count) & (first < last):
        row_slots, slots = tl.arange(0, config.block_x), tl.arange(0, config.block_y)
        rows = _points_at(tl.minimum(first_row + row_slots, x_count - 1), x_active_ptr, x_start)
        x_rows = x_ptr + rows.to(tl.int64) * stride_x_point
        dims = tl.arange(0, config.block)
        if config.direct:
            coordinates = (tl.load(x_rows).to(tl.float32),)
            for dim in tl.static_range(1, config.size):
                more = (tl.load(x_rows + dim).to(tl.float32),)
                coordinates = coordinates + more  # type: ignore[assignment]  # noqa: RUF005
        elif not config.split:
            x_tile = tl.load(x_rows[:, None] + dims[None, :], mask=(dims < config.size)[None, :], other=0.0)
        if config.squared and not config.direct:
            x_halves = tl.load(x_halves_ptr + x_start + rows)
        # Every groups-th column is of one group, in a thread of its own.
        N_STEPS: tl.constexpr = config.block_y // config.groups
        places = tl.arange(0, N_STEPS)[:, None] * config.groups + tl.arange(0, config.groups)[None, :]
        best = tl.full([config.block_x, config.groups], float("-inf"), tl.float32)
        position = tl.full([config.block_x, config.groups], NO_ARGMAX, tl.int32)
        for start in tl.range(first, last, config.block_y):
            # [N_STEPS, block_x, groups]
            if config.direct:
                columns = _points_at(tl.minimum(start + places, y_count - 1), y_active_ptr, y_start)
                y_rows = y_ptr + columns.to(tl.int64) * stride_y_point
                near = tl.zeros([N_STEPS, config.block_x, config.groups], tl.float32)
                for dim in tl.static_range(0, config.size):
                    others = tl.load(y_rows + dim).to(tl.float32)[:, None, :]
                    if config.squared:
                        difference = coordinates[dim][None, :, None] - others
                        near -= difference * difference
                    else:
                        near += coordinates[dim][None, :, None] * others
            else:
                columns = _points_at(tl.minimum(start + slots, y_count - 1), y_active_ptr, y_start)
                y_rows = y_ptr + columns.to(tl.int64) * stride_y_point
                if config.split:
                    products = split_products(x_rows, y_rows, row_slots >= 0, slots >= 0, config)
                else:
                    y_tile = tl.load(y_rows[None, :] + dims[:, None], mask=(dims < config.size)[:, None], other=0.0)
                    products = tl.dot(x_tile, y_tile, input_precision=config.precision)
                if config.squared:
                    products -= tl.load(y_halves_ptr + y_start + columns)[None, :]
                    products -= x_halves[:, None]
                near = tl.permute(tl.reshape(products, [config.block_x, N_STEPS, config.groups]), (1, 0, 2))

            # Where a maximum is NaN, all win, and the first of them is told: `settle` looks for the NaN from there.
            tile_best = max_along(near, 0)
            won = ~(near < tile_best[None, :, :])
            place = tl.min(tl.where(won, places[:, None, :], config.block_y), axis=0)
            # A later tile must be strictly better, or the first NaN.
            later = (tile_best > best) | ((tile_best != tile_best) & (best == best))
            position = tl.where(later, start + place, position)
            best = larger(best, tile_best)

            tile_best = max_along(near, 1)
            won = ~(near < tile_best[:, None, :])
            place = tl.min(tl.where(won, row_slots[None, :, None], config.block_x), axis=1)
            keys = _keys_at(tile_best, tl.minimum(first_row + place, x_count - 1))
            at = start + places
            tl.atomic_max(y_keys_ptr + y_start + at, keys, mask=at < y_count, sem="relaxed")

        row_best = max_along(best, 1)
        won = (best == row_best[:, None]) | (best != best)
        place = tl.min(tl.where(won, position, NO_ARGMAX), axis=1)
        at = first_row + row_slots
        keys = _keys_at(row_best, tl.minimum(place, y_count - 1))
        tl.atomic_max(x_keys_ptr + x_start + at, keys, mask=at < x_count, sem="relaxed")


def meet(problem: Problem, x: Side, y: Side, squared: bool) -> tuple[Tensor, Tensor]:
    """Keys of the nearest points, int64, by set and position among its active points; `_NO_KEY` of those of no pair.

    No dimension is 0, but packed sets may be empty.
    """
    plan = meeting_plan(problem)
    x_keys, y_keys = (
        torch.full((side.points.shape[:-1].numel(),), _NO_KEY.value, dtype=torch.int64, device=problem.device)
        for side in (x, y)
    )
    halves: tuple[Tensor | None, ...] = None, None
    if squared and not plan.direct:
        halves = half_squares(x.points, y.points)
    tile = plan.tile
    shape = problem.size, plan.block, tile.rows, tile.columns, plan.groups
    _meet_kernel(
        (plan.row_blocks * plan.n_shares * problem.n_queries, 1, 1),
        (*x, *y, *halves, x_keys, y_keys),
        (problem.query_length, problem.document_length, plan.row_blocks, plan.n_shares, plan.share),
        plan.strides,
        (*shape, plan.direct, plan.split, squared, plan.precision, *plan.units),
        (tile.num_warps, tile.num_stages, None),
    )
    return x_keys, y_keys


@triton.jit
def _value_of(x_rows, y_rows, exists, config: tl.constexpr):
    """Squared distances, or inner products, of the points of pairs of rows that exist, else 0."""
    value = tl.zeros([config.block_points], tl.float32)
    for start in tl.range(0, config.size, config.block):
        dims = start + tl.arange(0, config.block)
        mask = exists[:, None] & (dims < config.size)[None, :]
        x_part = tl.load(x_rows[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        y_part = tl.load(y_rows[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        if config.squared:
            x_part -= y_part
            y_part = x_part
        value += tl.sum(x_part * y_part, axis=1)
    return value


@kernel(config="size block block_points searched squared")
def _settle_kernel(
    x_ptr, x_active_ptr, x_counts_ptr, x_bounds_ptr, y_ptr, y_active_ptr, y_counts_ptr, y_bounds_ptr, keys_ptr,
    values_ptr, argmax_ptr,
    x_length, y_length, n_blocks,
    stride_x, stride_x_point, stride_y, stride_y_point, config: tl.constexpr,
):  # fmt: skip
    """values [N, x_length] and argmax, of the points of x that have met one; nothing is written for others."""
    pair = (tl.program_id(0) // n_blocks).to(tl.int64)
    x_ptr, x_count, x_start = _set_of(pair, x_ptr, x_counts_ptr, x_bounds_ptr, x_length, stride_x, stride_x_point)
    y_ptr, y_count, y_start = _set_of(pair, y_ptr, y_counts_ptr, y_bounds_ptr, y_length, stride_y, stride_y_point)
    if (x_count > 0) & (y_count > 0):
        at = tl.program_id(0) % n_blocks * config.block_points + tl.arange(0, config.block_points)
        keys = tl.load(keys_ptr + x_start + at, mask=at < x_count, other=_NO_KEY)
        met = keys != _NO_KEY
        near = similarities_of((keys >> 32).to(tl.int32))
        position = 0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32)
        # None is near where the nearest is infinitely far.
        won = met & (near != float("-inf"))
        points = _points_at(tl.where(met, at, 0), x_active_ptr, x_start)
        x_rows = x_ptr + points.to(tl.int64) * stride_x_point
        position = tl.where(won, position, 0)
        # Of NaN, a point of its tile is known, not after it.
        nan = won & (near != near)
        lost = nan
        ahead = 0
        while (ahead < config.searched) & (tl.max(lost.to(tl.int32), axis=0) > 0):
            candidate = tl.minimum(position + ahead, y_count - 1)
            y_rows = y_ptr + _points_at(candidate, y_active_ptr, y_start).to(tl.int64) * stride_y_point
            value = _value_of(x_rows, y_rows, lost, config)
            found = lost & (value != value)
            position = tl.where(found, candidate, position)
            lost = lost & ~found
            ahead += 1
        argmax = _points_at(position, y_active_ptr, y_start)
        y_rows = y_ptr + argmax.to(tl.int64) * stride_y_point
        value = _value_of(x_rows, y_rows, won, config)
        value = tl.where(nan, float("nan"), value)
        value = tl.where(won, value, float("inf") if config.squared else float("-inf"))
        to = pair * x_length + points
        tl.store(values_ptr + to, value, mask=met)
        tl.store(argmax_ptr + to, tl.where(won, argmax, -1), mask=met)


def settle(problem: Problem, x: Side, y: Side, keys: Tensor, squared: bool) -> tuple[Tensor, Tensor]:
    """How near the nearest point of y is, squared distance or inner product, float32, and which it is, int32 [N, Lx].

    Of every point of x: 0 and -1 where it has met none, and -1 where none is at a finite distance. `keys` are those of
    x, of `meet`.
    """
    shape = problem.n_queries, problem.query_length
    values = torch.empty(*shape, dtype=torch.float32, device=problem.device)
    argmax = torch.empty(*shape, dtype=torch.int32, device=problem.device)
    if problem.packed or not (x.active is None and y.active is None):
        # Else all points have met one.
        values.zero_()
        argmax.fill_(-1)
    n_blocks, tile = -(-problem.query_length // _SETTLED_POINTS), meeting_plan(problem).tile
    block = min(_SETTLED_SIZE, power_of_two(problem.size))
    _settle_kernel(
        (n_blocks * problem.n_queries, 1, 1),
        (*x, *y, keys, values, argmax),
        (problem.query_length, problem.document_length, n_blocks),
        (*problem.query_strides, problem.document_strides[0], problem.document_strides[2]),
        (problem.size, block, _SETTLED_POINTS, max(tile.rows, tile.columns), squared),
        (4, 2, None),
    )
    return values, argmax


@kernel(config="size block block_listed squared")
def _gradient_kernel(
    x_ptr, x_bounds_ptr, y_ptr, y_bounds_ptr, x_argmax_ptr, x_weights_ptr, y_weights_ptr, listed_ptr, starts_ptr,
    grad_ptr,
    x_length, y_length,
    stride_x, stride_x_point, stride_y, stride_y_point, config: tl.constexpr,
):  # fmt: skip
    """grad[point of x], contiguous: what its winner gives by the weight of x, and those that chose it by that of y.

    Grid: a program for each of `x_length` points of every pair. `weights` [N] multiply differences x - y, if `squared`,
    or the other point.
    """
    pair = (tl.program_id(0) // x_length).to(tl.int64)
    point = tl.program_id(0) % x_length
    x_ptr, x_count, x_start = _set_of(pair, x_ptr, None, x_bounds_ptr, x_length, stride_x, stride_x_point)
    y_ptr, _, _ = _set_of(pair, y_ptr, None, y_bounds_ptr, y_length, stride_y, stride_y_point)
    if point < x_count:
        dims = tl.arange(0, config.block)
        inside = dims < config.size
        own = tl.load(x_ptr + point.to(tl.int64) * stride_x_point + dims, mask=inside, other=0.0).to(tl.float32)
        total = tl.zeros([config.block], tl.float32)
        argmax = tl.load(x_argmax_ptr + pair * x_length + point)
        if argmax >= 0:
            other = tl.load(y_ptr + argmax.to(tl.int64) * stride_y_point + dims, mask=inside, other=0.0).to(tl.float32)
            if config.squared:
                other = own - other
            total += tl.load(x_weights_ptr + pair) * other

        starts_ptr += x_start + pair + point
        low = tl.load(starts_ptr).to(tl.int32)
        high = tl.load(starts_ptr + 1).to(tl.int32)
        if low < high:
            listed_ptr += pair * y_length
            sums = tl.zeros([config.block_listed, config.block], tl.float32)
            for position in tl.range(low, high, config.block_listed):
                positions = position + tl.arange(0, config.block_listed)
                exists = positions < high
                chosen_by = tl.load(listed_ptr + positions, mask=exists, other=0).to(tl.int64)
                mask = exists[:, None] & inside[None, :]
                others = tl.load(y_ptr + chosen_by[:, None] * stride_y_point + dims[None, :], mask=mask, other=0.0)
                others = others.to(tl.float32)
                if config.squared:
                    others = tl.where(mask, own[None, :] - others, 0.0)
                sums += others
            total += tl.load(y_weights_ptr + pair) * tl.sum(sums, axis=0)
        to = (x_start + point) * config.size + dims
        tl.store(grad_ptr + to, total.to(grad_ptr.dtype.element_ty), mask=inside)


def chamfer_gradient(
    problem: Problem, x: Side, y: Side, argmax: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], squared: bool
) -> Tensor:
    """The gradient of x, contiguous, in its type.

    `argmax` are those of x [N, Lx] and of y [N, Ly], contiguous, and `weights` [N], float32, what the differences, or
    the other points, of each are multiplied by. No dimension is 0, but packed sets may be empty.
    """
    # As documents, the points of x are chosen by the rows that are those of y.
    reverse = problem._replace(
        query_length=problem.document_length,
        document_length=problem.query_length,
        n_documents=problem.n_queries if problem.packed else 1,
        n_tokens=x.points.shape[:-1].numel(),
    )
    listed, starts = rows_by_token(reverse, argmax[1], x.cu_seqlens)
    grad = torch.empty_like(x.points, memory_format=torch.contiguous_format)
    block = power_of_two(problem.size)
    warps = max(1, min(8, block // _WARP_SIZE))
    _gradient_kernel(
        (problem.n_queries * problem.query_length, 1, 1),
        (x.points, x.cu_seqlens, y.points, y.cu_seqlens, argmax[0], *weights, listed, starts, grad),
        (problem.query_length, problem.document_length),
        (*problem.query_strides, problem.document_strides[0], problem.document_strides[2]),
        (problem.size, block, max(1, min(32, warps * _IN_FLIGHT // block)), squared),
        (warps, 1, None),
    )
    return grad
