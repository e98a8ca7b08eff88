"""Nearest points in blocks of plain torch: any device, any dtype, any layout, and never the whole [N, Lx, Ly] tensor.

Sets of x are queries, and every set of y is the one document of its set of x.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.tables import DIRECT_SIZE
from ..problem import Problem
from .blocked import sums_by_winner
from .packing import host_bounds
from .tiles import Block, Operands, blocks

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
    """Some sets of one side [n, L, d], padded, in the accumulation dtype, and which of their points are active."""

    points: Tensor
    active: Tensor | None


def nearest_in_blocks(problem: Problem, sets: Sets, squared: bool) -> Found:
    """The nearest points of both sides, values in the accumulation dtype; masks are bool, and no size is 0."""
    given, n = _operands(problem, sets), problem.n_queries
    lengths = problem.query_length, problem.document_length
    found = Found(
        *(torch.zeros(n, length, dtype=given.dtype, device=given.device) for length in lengths),
        *(torch.full((n, length), -1, dtype=torch.int32, device=given.device) for length in lengths),
    )
    for block in blocks(given):
        x, y = _halves(given, block)
        x_winners = torch.empty(x.points.shape[:2], dtype=torch.int64, device=given.device)
        y_winners = torch.full(y.points.shape[:2], -1, dtype=torch.int64, device=given.device)
        best = torch.full(y_winners.shape, -torch.inf, dtype=given.dtype, device=given.device)
        first = 0
        for part in block.parts:
            inside = slice(first, first + part.rows.shape[1])
            near = _nearness(x.points[:, inside], y.points, squared)
            if y.active is not None:
                near.masked_fill_(~y.active.unsqueeze(1), -torch.inf)
            if x.active is not None:
                near.masked_fill_(~x.active[:, inside].unsqueeze(2), -torch.inf)
            # Of equal values, the first is the maximum.
            values, index = near.max(dim=2)
            x_winners[:, inside] = index.masked_fill_(values == -torch.inf, -1)
            values, index = near.max(dim=1)
            later = (values > best) | (values.isnan() & ~best.isnan())
            best, y_winners = torch.where(later, values, best), torch.where(later, index + first, y_winners)
            first = inside.stop
        for half, other, winners, at in ((x, y, x_winners, 0), (y, x, y_winners, 1)):
            found[2 + at][block.documents, : winners.shape[1]] = winners.to(torch.int32)
            found[at][block.documents, : winners.shape[1]] = _values(half, other, winners, squared)
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
    given = _operands(problem, sets)
    grad_x, grad_y = (
        torch.zeros_like(points, memory_format=torch.contiguous_format) if need else None
        for points, need in zip((given.queries, given.documents), needs, strict=True)
    )
    for block in blocks(given):
        halves, pairs = _halves(given, block), block.documents
        of_pairs = [side[pairs, : half.points.shape[1]].long() for side, half in zip(winners, halves, strict=True)]
        factors = [weight[pairs].view(-1, 1, 1).to(given.dtype) for weight in weights]
        for at, grad in enumerate((grad_x, grad_y)):
            if grad is None:
                continue
            # What each point of this side gets by its own winner, and what those of the other side send to theirs.
            own = _pulls(halves[at], halves[1 - at], of_pairs[at], squared) * factors[at]
            sent = halves[1 - at].points
            if squared:
                sent = -_pulls(halves[1 - at], halves[at], of_pairs[1 - at], squared)
            own += _received(sent * factors[1 - at], of_pairs[1 - at], own.shape[1])
            if at == 1:
                place = given.of_documents(grad, pairs)
                own = own[block.active] if block.is_ragged else own.flatten(0, 1)
            else:
                place, exist = grad[block.parts[0].of.start : block.parts[-1].of.stop], _exist(given, pairs)
                own = own.flatten(0, 1) if exist is None else own[exist]
            place.copy_(own.view(place.shape))
    return (
        None if grad_x is None else grad_x.view(sets.x.shape), None if grad_y is None else grad_y.view(sets.y.shape),
    )  # fmt: skip


def _operands(problem: Problem, sets: Sets) -> Operands:
    n, x, y = problem.n_queries, sets.x, sets.y
    pairs, bounds = np.arange(n + 1), None
    if sets.x_cu_seqlens is None or sets.y_cu_seqlens is None:
        rows = pairs * problem.query_length
        x, y = x.flatten(0, 1), y.unsqueeze(1)
    else:
        rows = host_bounds("x_cu_seqlens", sets.x_cu_seqlens, len(x), "x")
        bounds = host_bounds("y_cu_seqlens", sets.y_cu_seqlens, len(y), "y")
    x_mask = None if sets.x_mask is None else sets.x_mask.flatten() != 0
    y_mask = None if sets.y_mask is None else sets.y_mask.unsqueeze(1) != 0
    return Operands(x, y, x_mask, y_mask, None, None, rows, bounds, pairs, problem.query_length, None, False)


def _halves(given: Operands, block: Block) -> tuple[_Half, _Half]:
    """The sets of a block, zeros where a point is masked."""
    masks = [part.weights for part in block.parts]
    x_mask = None if masks[0] is None else torch.cat([mask for mask in masks if mask is not None], dim=1)
    x = torch.cat([part.rows for part in block.parts], dim=1)
    y, _ = block.batched
    return _half(given, x, x_mask), _half(given, y, block.active)


def _half(given: Operands, points: Tensor, active: Tensor | None) -> _Half:
    points = points.to(given.dtype)
    return _Half(points if active is None else points.masked_fill(~active.unsqueeze(-1), 0.0), active)


def _exist(given: Operands, pairs: slice) -> Tensor | None:
    """Which of the padded points of x exist, of sets of several lengths."""
    lengths = np.diff(given.query_bounds[pairs.start : pairs.stop + 1])
    if lengths.min() == lengths.max():
        return None
    return torch.from_numpy(np.arange(lengths.max()) < lengths[:, None]).to(given.device)


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
    first = torch.arange(n, device=sent.device).unsqueeze(1) * senders
    return sums_by_winner(sent.reshape(-1, size), first, winners, sent.new_ones(n, senders), length).view(
        n, length, size
    )
