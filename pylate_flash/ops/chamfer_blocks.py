"""Nearest points in blocks of plain torch: any device, any dtype, and never the whole [N, Lx, Ly] tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.tables import DIRECT_SIZE
from ..problem import Problem, accumulation_dtype
from .blocked import block_budget
from .blocked_varlen import padded_tokens, weighted_sums
from .packing import host_bounds

if TYPE_CHECKING:
    from .chamfer_compute import Sets


class Found(NamedTuple):
    """How near the nearest point of the other set is, and which it is, of every point of x [N, Lx] and of y [N, Ly].

    Squared distances or inner products, 0 and -1 where a point is masked, or has none to meet; the infinitely far do
    not win either.
    """

    x_values: Tensor
    y_values: Tensor
    x_winners: Tensor
    y_winners: Tensor


class _Half(NamedTuple):
    """Some sets of one side, padded."""

    # [n, L, d], zeros where a point is masked, or none, in the accumulation dtype.
    points: Tensor
    # [n, L], None: all.
    active: Tensor | None
    # Of packed sets, the row of each point.
    rows: Tensor | None


def nearest_in_blocks(problem: Problem, sets: Sets, squared: bool) -> Found:
    """The nearest points of both sides, values in the accumulation dtype; masks are bool, and no size is 0."""
    x_shape, y_shape = (problem.n_queries, problem.query_length), (problem.n_queries, problem.document_length)
    dtype = problem.scores_dtype
    found = Found(
        *(torch.zeros(shape, dtype=dtype, device=problem.device) for shape in (x_shape, y_shape)),
        *(torch.full(shape, -1, dtype=torch.int32, device=problem.device) for shape in (x_shape, y_shape)),
    )
    for pairs, x, y in _blocks(problem, sets):
        x_winners, y_winners = _winners(x, y, squared)
        for near, far, winners, at in ((x, y, x_winners, 0), (y, x, y_winners, 1)):
            # Packed sets are padded to the longest of the block only.
            found[2 + at][pairs, : winners.shape[1]] = winners.to(torch.int32)
            found[at][pairs, : winners.shape[1]] = _values(near, far, winners, squared)
    return found


def gradients_in_blocks(
    problem: Problem,
    sets: Sets,
    winners: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor],
    needs: tuple[bool, bool],
    squared: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and y, contiguous in their type; `weights` are those of `kernels.chamfer_gradients`."""
    found = [
        torch.zeros_like(points, memory_format=torch.contiguous_format) if need else None
        for points, need in zip(sets[:2], needs, strict=True)
    ]
    for pairs, *halves in _blocks(problem, sets):
        of_pairs = [side[pairs, : half.points.shape[1]].long() for side, half in zip(winners, halves, strict=True)]
        factors = [weight[pairs].view(-1, 1, 1).to(halves[0].points.dtype) for weight in weights]
        for at, grad in enumerate(found):
            if grad is None:
                continue
            # What each point of this side gets by its own winner, and what those of the other side send to theirs.
            own = _pulls(halves[at], halves[1 - at], of_pairs[at], squared) * factors[at]
            sent = halves[1 - at].points
            if squared:
                sent = -_pulls(halves[1 - at], halves[at], of_pairs[1 - at], squared)
            own += _received(sent * factors[1 - at], of_pairs[1 - at], own.shape[1])
            rows, active = halves[at].rows, halves[at].active
            if rows is None:
                grad[pairs] = own.to(grad.dtype)
            else:
                assert active is not None
                grad[rows[active]] = own[active].to(grad.dtype)
    return found[0], found[1]


def _blocks(problem: Problem, sets: Sets) -> Iterator[tuple[slice, _Half, _Half]]:
    """Some pairs at a time, few enough that all products of theirs fit into a block, or one alone."""
    budget = block_budget(problem.device)
    sides = [_bounds("x", *sets[::2]), _bounds("y", *sets[1::2])]
    for pairs, lengths in _runs_of_pairs(problem, sides, budget):
        x, y = (
            _half(points, mask, bounds, pairs, length)
            for points, mask, bounds, length in zip(sets[:2], sets[2:4], sides, lengths, strict=True)
        )
        yield pairs, x, y


def _runs_of_pairs(
    problem: Problem, sides: list[np.ndarray | None], budget: int
) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Consecutive pairs, and the lengths that they are padded to: those of the longest of them."""
    whole = problem.query_length, problem.document_length
    sizes = [
        np.full(problem.n_queries, length) if bounds is None else np.diff(bounds)
        for bounds, length in zip(sides, whole, strict=True)
    ]
    first, longest = 0, (1, 1)
    for pair, lengths in enumerate(zip(*(size.tolist() for size in sizes), strict=True)):
        wider = max(longest[0], lengths[0]), max(longest[1], lengths[1])
        if pair > first and (pair + 1 - first) * max(wider[0] * wider[1], problem.size) > budget:
            yield slice(first, pair), longest
            first, wider = pair, (max(1, lengths[0]), max(1, lengths[1]))
        longest = wider
    if first < problem.n_queries:
        yield slice(first, problem.n_queries), longest


def _bounds(name: str, points: Tensor, _mask: Tensor | None, cu_seqlens: Tensor | None) -> np.ndarray | None:
    if cu_seqlens is None:
        return None
    return host_bounds(f"{name}_cu_seqlens", cu_seqlens, points.shape[0], name)


def _half(points: Tensor, mask: Tensor | None, bounds: np.ndarray | None, pairs: slice, length: int) -> _Half:
    rows: Tensor | None = None
    active: Tensor | None = None
    if bounds is not None:
        rows, active = padded_tokens(bounds, np.arange(pairs.start, pairs.stop), points.device, length)
        values = points[rows]
    else:
        values = points[pairs]
        if mask is not None:
            active = mask[pairs] != 0
    values = values.to(accumulation_dtype(points.dtype))
    if active is not None:
        values = values.masked_fill(~active.unsqueeze(-1), 0.0)
    return _Half(values, active, rows)


def _winners(x: _Half, y: _Half, squared: bool) -> tuple[Tensor, Tensor]:
    """The nearest points, of x [n, Lx] and y [n, Ly], int64, -1 for none; some points of x meet all of y at a time."""
    n, x_length, _ = x.points.shape
    y_length = y.points.shape[1]
    x_winners = torch.empty(n, x_length, dtype=torch.int64, device=x.points.device)
    best = torch.full((n, y_length), -torch.inf, dtype=x.points.dtype, device=x.points.device)
    y_winners = torch.full((n, y_length), -1, dtype=torch.int64, device=x.points.device)
    step = max(1, block_budget(x.points.device) // (n * y_length))
    for first in range(0, x_length, step):
        part = slice(first, first + step)
        near = _nearness(x.points[:, part], y.points, squared)
        if y.active is not None:
            near.masked_fill_(~y.active.unsqueeze(1), -torch.inf)
        if x.active is not None:
            near.masked_fill_(~x.active[:, part].unsqueeze(2), -torch.inf)
        # Of equal values, the first is the maximum.
        values, index = near.max(dim=2)
        x_winners[:, part] = index.masked_fill_(values == -torch.inf, -1)
        values, index = near.max(dim=1)
        later = (values > best) | (values.isnan() & ~best.isnan())
        best = torch.where(later, values, best)
        y_winners = torch.where(later, index + first, y_winners)
    return x_winners, y_winners


def _nearness(x: Tensor, y: Tensor, squared: bool) -> Tensor:
    """Inner products [n, rows, Ly], or minus half the squared distances: of few coordinates, by their differences."""
    if not squared:
        return x @ y.transpose(1, 2)
    if x.shape[-1] > DIRECT_SIZE:
        halves = [0.5 * points.square().sum(dim=-1) for points in (x, y)]
        return torch.baddbmm(halves[1].unsqueeze(1), x, y.transpose(1, 2), beta=-1.0).sub_(halves[0].unsqueeze(2))
    near = x.new_zeros(x.shape[0], x.shape[1], y.shape[1])
    for dim in range(x.shape[-1]):
        difference = x[:, :, dim].unsqueeze(2) - y[:, :, dim].unsqueeze(1)
        near.addcmul_(difference, difference, value=-0.5)
    return near


def _values(near: _Half, far: _Half, winners: Tensor, squared: bool) -> Tensor:
    """How near the winners [n, L] are to the points of `near`, from the two points themselves."""
    others = _picked(far.points, winners)
    values = ((near.points - others).square_() if squared else near.points * others).sum(dim=-1)
    values = values.masked_fill(winners < 0, torch.inf if squared else -torch.inf)
    alone = torch.zeros_like(winners, dtype=torch.bool)
    if near.active is not None:
        alone |= ~near.active
    if far.active is not None:
        alone |= ~far.active.any(dim=1, keepdim=True)
    return values.masked_fill_(alone, 0.0)


def _pulls(near: _Half, far: _Half, winners: Tensor, squared: bool) -> Tensor:
    """What the winner of every point gives it a gradient by: its difference from it, or the winner; zeros of none."""
    others = _picked(far.points, winners)
    return (near.points - others if squared else others).masked_fill_((winners < 0).unsqueeze(-1), 0.0)


def _picked(points: Tensor, winners: Tensor) -> Tensor:
    """The winners [n, L] of points [n, L', d], or any where there is none."""
    return points.gather(1, winners.clamp(min=0).unsqueeze(-1).expand(-1, -1, points.shape[-1]))


def _received(sent: Tensor, winners: Tensor, length: int) -> Tensor:
    """Sums [n, length, d] of what is sent [n, L, d] to the winners [n, L], in the order of the senders."""
    n, senders, size = sent.shape
    first = torch.arange(n, device=sent.device).unsqueeze(1) * length
    everyone = torch.arange(n * senders, device=sent.device).view(n, senders)
    sums = weighted_sums(
        sent.reshape(-1, size), everyone, sent.new_ones(n, senders), winners + first, winners >= 0, n * length
    )
    return sums.view(n, length, size)
