"""Kernels of Chamfer distances: nearest points of the other set, in both directions at once, and the gradient.

The nearness of two points is their inner product, or minus their squared distance: for points of few coordinates from
their differences, which lose nothing however near they are; for longer ones half of it, <x, y> - |x|^2 / 2 - |y|^2 / 2.

`meet` computes it once for all points of two sets, and reduces each tile to the maxima of its rows and of its columns.
Row maxima stay in registers while a program walks the points of y; column maxima go to memory after every tile, as
keys: integers that combine nearness and position, so that the largest key is the nearest point, and the first of equal
ones. So the order of programs does not matter, and results are bitwise reproducible. `settle` recomputes the distance
to a winner from the two points themselves: a difference of norms and products would lose to cancellation what a
difference of coordinates keeps. The gradient of a set is summed by programs that own its points (`chamfer_gradient`),
over lists of the points that chose each of them, in list order.
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

# Below every key: the point has been compared with none.
_NO_KEY = tl.constexpr(-(2**63))
# Points per program of `settle`, and elements of a point per step.
_SETTLED_POINTS = 64
_SETTLED_SIZE = 64
# Gradient: elements of listed points in flight per warp, and elements of a point per warp.
_IN_FLIGHT = 512
_WARP_SIZE = 256


class Side(NamedTuple):
    """One side of the pairs of sets: the x or the y of every pair."""

    # [N, L, d], or packed [T, d], of contiguous rows.
    points: Tensor
    # Indices of the active points of masked sets, and their counts (`rows.active_tokens`).
    active: Tensor | None = None
    counts: Region | None = None
    # Boundaries of packed sets, [N + 1], on the device.
    cu_seqlens: Tensor | None = None


@triton.jit
def _set_of(pair, points_ptr, counts_ptr, cu_seqlens_ptr, length, stride_set, stride_point):
    """Pointer to the points of a pair's set, number of active points, and index of its first point among all sets."""
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
    """Indices of the points of a set at these positions among its active ones."""
    points = positions
    if active_ptr is not None:
        points = tl.load(active_ptr + start + positions)
    return points


@triton.jit
def _keys_at(values, positions):
    """int64 keys of float32 values at positions from 0 on: NaN is largest, and of equal values the first."""
    return (keys_of(values).to(tl.int64) << 32) | (0x7FFFFFFF - positions).to(tl.int64)


@kernel(config="size block block_x block_y groups direct split squared precision x_unit y_unit")
def _meet_kernel(
    x_ptr, x_active_ptr, x_counts_ptr, x_bounds_ptr, y_ptr, y_active_ptr, y_counts_ptr, y_bounds_ptr, x_halves_ptr,
    y_halves_ptr, x_keys_ptr, y_keys_ptr,
    x_length, y_length, n_row_blocks, n_shares, share,
    stride_x, stride_x_point, stride_y, stride_y_point, config: tl.constexpr,
):  # fmt: skip
    """keys[point] = max(keys[point], key of the nearest point of the other set).

    Keys are indexed by set and position among its active points, and hold such positions; for NaN, that of a point of
    its tile, not after it. Grid: shares of y x blocks of x x pairs. Past the end of a set, its last point is repeated,
    which changes no maximum.
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
        row_offsets, column_offsets = tl.arange(0, config.block_x), tl.arange(0, config.block_y)
        rows = _points_at(tl.minimum(first_row + row_offsets, x_count - 1), x_active_ptr, x_start)
        x_rows = x_ptr + rows.to(tl.int64) * stride_x_point
        dims = tl.arange(0, config.block)
        if config.direct:
            coordinates = (tl.load(x_rows).to(tl.float32),)
            for dim in tl.static_range(1, config.size):
                coordinate = (tl.load(x_rows + dim).to(tl.float32),)
                coordinates = coordinates + coordinate  # type: ignore[assignment]  # noqa: RUF005
        elif not config.split:
            x_tile = tl.load(x_rows[:, None] + dims[None, :], mask=(dims < config.size)[None, :], other=0.0)
        if config.squared and not config.direct:
            x_halves = tl.load(x_halves_ptr + x_start + rows)
        # Every groups-th column belongs to one group, which lies in one thread.
        N_STEPS: tl.constexpr = config.block_y // config.groups
        grouped_offsets = tl.arange(0, N_STEPS)[:, None] * config.groups + tl.arange(0, config.groups)[None, :]
        best = tl.full([config.block_x, config.groups], float("-inf"), tl.float32)
        position = tl.full([config.block_x, config.groups], NO_ARGMAX, tl.int32)
        for start in tl.range(first, last, config.block_y):
            # [N_STEPS, block_x, groups]
            if config.direct:
                columns = _points_at(tl.minimum(start + grouped_offsets, y_count - 1), y_active_ptr, y_start)
                y_rows = y_ptr + columns.to(tl.int64) * stride_y_point
                nearness = tl.zeros([N_STEPS, config.block_x, config.groups], tl.float32)
                for dim in tl.static_range(0, config.size):
                    y_coordinate = tl.load(y_rows + dim).to(tl.float32)[:, None, :]
                    if config.squared:
                        difference = coordinates[dim][None, :, None] - y_coordinate
                        nearness -= difference * difference
                    else:
                        nearness += coordinates[dim][None, :, None] * y_coordinate
            else:
                columns = _points_at(tl.minimum(start + column_offsets, y_count - 1), y_active_ptr, y_start)
                y_rows = y_ptr + columns.to(tl.int64) * stride_y_point
                if config.split:
                    products = split_products(x_rows, y_rows, row_offsets >= 0, column_offsets >= 0, config)
                else:
                    y_tile = tl.load(y_rows[None, :] + dims[:, None], mask=(dims < config.size)[:, None], other=0.0)
                    products = tl.dot(x_tile, y_tile, input_precision=config.precision)
                if config.squared:
                    products -= tl.load(y_halves_ptr + y_start + columns)[None, :]
                    products -= x_halves[:, None]
                nearness = tl.permute(tl.reshape(products, [config.block_x, N_STEPS, config.groups]), (1, 0, 2))

            # If a maximum is NaN, all points match, and the first is taken: `settle` searches for the NaN from there.
            tile_best = max_along(nearness, 0)
            is_max = ~(nearness < tile_best[None, :, :])
            winner = tl.min(tl.where(is_max, grouped_offsets[:, None, :], config.block_y), axis=0)
            # A later tile must be strictly better, or the first NaN.
            better = (tile_best > best) | ((tile_best != tile_best) & (best == best))
            position = tl.where(better, start + winner, position)
            best = larger(best, tile_best)

            tile_best = max_along(nearness, 1)
            is_max = ~(nearness < tile_best[:, None, :])
            winner = tl.min(tl.where(is_max, row_offsets[None, :, None], config.block_x), axis=1)
            keys = _keys_at(tile_best, tl.minimum(first_row + winner, x_count - 1))
            positions = start + grouped_offsets
            tl.atomic_max(y_keys_ptr + y_start + positions, keys, mask=positions < y_count, sem="relaxed")

        row_best = max_along(best, 1)
        is_max = (best == row_best[:, None]) | (best != best)
        winner = tl.min(tl.where(is_max, position, NO_ARGMAX), axis=1)
        positions = first_row + row_offsets
        keys = _keys_at(row_best, tl.minimum(winner, y_count - 1))
        tl.atomic_max(x_keys_ptr + x_start + positions, keys, mask=positions < x_count, sem="relaxed")


def meet(problem: Problem, x: Side, y: Side, squared: bool) -> tuple[Tensor, Tensor]:
    """int64 keys of the nearest points, by set and position among its active points; `_NO_KEY` without any.

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
    """Squared distances, or inner products, of pairs of rows; 0 for pairs that do not exist."""
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
    """values [N, x_length] and argmax of the points of x that have a key; nothing is written for other points."""
    pair = (tl.program_id(0) // n_blocks).to(tl.int64)
    x_ptr, x_count, x_start = _set_of(pair, x_ptr, x_counts_ptr, x_bounds_ptr, x_length, stride_x, stride_x_point)
    y_ptr, y_count, y_start = _set_of(pair, y_ptr, y_counts_ptr, y_bounds_ptr, y_length, stride_y, stride_y_point)
    if (x_count > 0) & (y_count > 0):
        x_positions = tl.program_id(0) % n_blocks * config.block_points + tl.arange(0, config.block_points)
        keys = tl.load(keys_ptr + x_start + x_positions, mask=x_positions < x_count, other=_NO_KEY)
        met = keys != _NO_KEY
        nearness = similarities_of((keys >> 32).to(tl.int32))
        y_positions = 0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32)
        # There is no winner if even the nearest point is infinitely far.
        has_winner = met & (nearness != float("-inf"))
        points = _points_at(tl.where(met, x_positions, 0), x_active_ptr, x_start)
        x_rows = x_ptr + points.to(tl.int64) * stride_x_point
        y_positions = tl.where(has_winner, y_positions, 0)
        # For NaN, the key holds a point of its tile, not after it: search from there.
        nan = has_winner & (nearness != nearness)
        searching = nan
        step = 0
        while (step < config.searched) & (tl.max(searching.to(tl.int32), axis=0) > 0):
            candidate = tl.minimum(y_positions + step, y_count - 1)
            y_rows = y_ptr + _points_at(candidate, y_active_ptr, y_start).to(tl.int64) * stride_y_point
            value = _value_of(x_rows, y_rows, searching, config)
            is_nan = searching & (value != value)
            y_positions = tl.where(is_nan, candidate, y_positions)
            searching = searching & ~is_nan
            step += 1
        argmax = _points_at(y_positions, y_active_ptr, y_start)
        y_rows = y_ptr + argmax.to(tl.int64) * stride_y_point
        value = _value_of(x_rows, y_rows, has_winner, config)
        value = tl.where(nan, float("nan"), value)
        value = tl.where(has_winner, value, float("inf") if config.squared else float("-inf"))
        out_offsets = pair * x_length + points
        tl.store(values_ptr + out_offsets, value, mask=met)
        tl.store(argmax_ptr + out_offsets, tl.where(has_winner, argmax, -1), mask=met)


def settle(problem: Problem, x: Side, y: Side, keys: Tensor, squared: bool) -> tuple[Tensor, Tensor]:
    """Squared distance to, or inner product with, the nearest point of y, float32, and its index, int32, both [N, Lx].

    A point of x without any point of y gets 0 and -1; the index is also -1 if none is at a finite distance. `keys` are
    those of x, from `meet`.
    """
    shape = problem.n_queries, problem.query_length
    values = torch.empty(*shape, dtype=torch.float32, device=problem.device)
    argmax = torch.empty(*shape, dtype=torch.int32, device=problem.device)
    if problem.packed or not (x.active is None and y.active is None):
        # Otherwise every point has a key, and is written.
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
    """grad[point of x], contiguous: its winner times the weight of x, plus the points that chose it times that of y.

    Grid: one program for each of `x_length` points of every pair. `weights` [N] multiply differences x - y if
    `squared`, else the other point.
    """
    pair = (tl.program_id(0) // x_length).to(tl.int64)
    point = tl.program_id(0) % x_length
    x_ptr, x_count, x_start = _set_of(pair, x_ptr, None, x_bounds_ptr, x_length, stride_x, stride_x_point)
    y_ptr, _, _ = _set_of(pair, y_ptr, None, y_bounds_ptr, y_length, stride_y, stride_y_point)
    if point < x_count:
        dims = tl.arange(0, config.block)
        inside = dims < config.size
        x_row = tl.load(x_ptr + point.to(tl.int64) * stride_x_point + dims, mask=inside, other=0.0).to(tl.float32)
        total = tl.zeros([config.block], tl.float32)
        argmax = tl.load(x_argmax_ptr + pair * x_length + point)
        if argmax >= 0:
            winner = tl.load(y_ptr + argmax.to(tl.int64) * stride_y_point + dims, mask=inside, other=0.0).to(tl.float32)
            if config.squared:
                winner = x_row - winner
            total += tl.load(x_weights_ptr + pair) * winner

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
                y_tile = tl.load(y_ptr + chosen_by[:, None] * stride_y_point + dims[None, :], mask=mask, other=0.0)
                y_tile = y_tile.to(tl.float32)
                if config.squared:
                    y_tile = tl.where(mask, x_row[None, :] - y_tile, 0.0)
                sums += y_tile
            total += tl.load(y_weights_ptr + pair) * tl.sum(sums, axis=0)
        out_offsets = (x_start + point) * config.size + dims
        tl.store(grad_ptr + out_offsets, total.to(grad_ptr.dtype.element_ty), mask=inside)


def chamfer_gradient(
    problem: Problem, x: Side, y: Side, argmax: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], squared: bool
) -> Tensor:
    """The gradient of x, contiguous, in its dtype.

    `argmax` of x [N, Lx] and of y [N, Ly] are contiguous; `weights` [N], float32, of x and of y multiply the
    differences, or the other points. No dimension is 0, but packed sets may be empty.
    """
    # Points of x take the role of document tokens, chosen by points of y as query rows.
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
