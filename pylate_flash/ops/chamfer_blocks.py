"""Nearest points in plain torch, one block of pairs of sets at a time, without materializing [N, Lx, Ly]."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.tables import DIRECT_SIZE
from ..problem import Pair, Problem, Sets, accumulation_dtype
from .blocked import sums_by_argmax
from .packing import host_bounds
from .products import block_budget
from .tiles import padded_tokens, runs


class _Side(NamedTuple):
    """One side of a block of pairs: `points` [n, L, d] in the accumulation dtype, 0 where not `active` [n, L]."""

    points: Tensor
    active: Tensor | None
    # Their slice of all sets or, packed, of all points, which are the active ones.
    at: slice


def nearest_in_blocks(problem: Problem, sets: Sets, squared: bool) -> tuple[Pair, Pair]:
    """Values in the accumulation dtype, and argmax, like `kernels.chamfer_nearest`; masks are bool, no size is 0."""
    n, device, lengths = problem.n_queries, problem.device, (problem.query_length, problem.document_length)
    values = tuple([torch.zeros(n, length, dtype=problem.scores_dtype, device=device) for length in lengths])
    argmax = tuple([torch.full((n, length), -1, dtype=torch.int32, device=device) for length in lengths])
    for pairs, x, y in _blocks(problem, sets):
        for side, (near, far, index) in enumerate(zip((x, y), (y, x), _argmax(x, y, squared), strict=True)):
            argmax[side][pairs, : index.shape[1]] = index.to(torch.int32)
            values[side][pairs, : index.shape[1]] = _values(near, far, index, squared)
    return values, argmax  # type: ignore[return-value]


def gradients_in_blocks(
    problem: Problem, sets: Sets, argmax: Pair, weights: Pair, needs: tuple[bool, bool], squared: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and y, contiguous, of their dtype; `weights` as in `kernels.chamfer_gradients`."""
    gradients = [
        torch.zeros_like(points, memory_format=torch.contiguous_format) if need else None
        for points, need in zip(sets[:2], needs, strict=True)
    ]
    for pairs, *sides in _blocks(problem, sets):
        index = [
            full_argmax[pairs, : side.points.shape[1]].long() for full_argmax, side in zip(argmax, sides, strict=True)
        ]
        factors = [weight[pairs].view(-1, 1, 1).to(problem.scores_dtype) for weight in weights]
        for i, grad in enumerate(gradients):
            if grad is None:
                continue
            near, far = sides[i], sides[1 - i]
            # Contributions to each point from its own argmax, then from points of the other side whose argmax it is.
            grad_block = _pulls(near, far, index[i], squared) * factors[i]
            sent = -_pulls(far, near, index[1 - i], squared) if squared else far.points
            grad_block += _received(sent * factors[1 - i], index[1 - i], grad_block.shape[1])
            target = grad[near.at]
            if grad.dim() == 2:
                grad_block = grad_block.flatten(0, 1) if near.active is None else grad_block[near.active]
            target.copy_(grad_block)
    return gradients[0], gradients[1]


def _blocks(problem: Problem, sets: Sets) -> Iterator[tuple[slice, _Side, _Side]]:
    """Yield blocks of consecutive pairs that fit into `block_budget`, or single pairs, with both sides."""
    x_bounds = y_bounds = None
    n, budget = problem.n_queries, block_budget(problem.device) // max(problem.size, problem.query_length)
    step = max(1, budget // problem.document_length)
    ranges = [(start, min(start + step, n)) for start in range(0, n, step)]
    if sets.x_cu_seqlens is not None and sets.y_cu_seqlens is not None:
        x_bounds = host_bounds("x_cu_seqlens", sets.x_cu_seqlens, len(sets.x), "x")
        y_bounds = host_bounds("y_cu_seqlens", sets.y_cu_seqlens, len(sets.y), "y")
        ranges = runs(np.diff(y_bounds), budget)
    for start, stop in ranges:
        pairs = slice(start, stop)
        x, y = _side(sets.x, sets.x_mask, x_bounds, pairs), _side(sets.y, sets.y_mask, y_bounds, pairs)
        if x.points.numel() and y.points.numel():
            yield pairs, x, y


def _side(points: Tensor, mask: Tensor | None, bounds: np.ndarray | None, pairs: slice) -> _Side:
    dtype = accumulation_dtype(points.dtype)
    if bounds is None:
        points, active = points[pairs].to(dtype), None if mask is None else mask[pairs] != 0
        return _Side(points if active is None else points.masked_fill(~active.unsqueeze(-1), 0.0), active, pairs)
    positions = slice(int(bounds[pairs.start]), int(bounds[pairs.stop]))
    tokens, active = padded_tokens(bounds - bounds[pairs.start], np.arange(pairs.start, pairs.stop), points.device)
    points = points[positions].to(dtype)
    points = points[tokens] if len(points) else points.new_zeros(*tokens.shape, points.shape[1])
    return _Side(points if active is None else points.masked_fill_(~active.unsqueeze(-1), 0.0), active, positions)


def _argmax(x: _Side, y: _Side, squared: bool) -> Pair:
    """The index of the nearest point of the other side [n, L], -1 where none is at a finite distance."""
    (n, length, _), n_far = x.points.shape, y.points.shape[1]
    step = max(1, block_budget(x.points.device) // (n * n_far))
    x_argmax = torch.empty(n, length, dtype=torch.int64, device=x.points.device)
    y_argmax = torch.full((n, n_far), -1, dtype=torch.int64, device=x.points.device)
    best = y.points.new_full((n, n_far), -torch.inf)
    for first in range(0, length, step):
        rows = slice(first, first + step)
        near = _nearness(x.points[:, rows], y.points, squared)
        if y.active is not None:
            near.masked_fill_(~y.active.unsqueeze(1), -torch.inf)
        if x.active is not None:
            near.masked_fill_(~x.active[:, rows].unsqueeze(2), -torch.inf)
        # max returns the first of equal values.
        values, index = near.max(dim=2)
        x_argmax[:, rows] = index.masked_fill_(values == -torch.inf, -1)
        values, index = near.max(dim=1)
        is_nearer = (values > best) | (values.isnan() & ~best.isnan())
        best, y_argmax = torch.where(is_nearer, values, best), torch.where(is_nearer, index + first, y_argmax)
    return x_argmax, y_argmax


def _nearness(x: Tensor, y: Tensor, squared: bool) -> Tensor:
    """Inner products [n, rows, Ly], or minus half the squared distances, from differences if dimensions are few."""
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


def _values(near: _Side, far: _Side, argmax: Tensor, squared: bool) -> Tensor:
    """Distances or products of `near` with the points of `argmax` [n, L]; 0 where a point is masked or meets none."""
    pulls = _pulls(near, far, argmax, squared)
    values = (pulls.square_() if squared else pulls.mul_(near.points)).sum(dim=-1)
    values.masked_fill_(argmax < 0, torch.inf if squared else -torch.inf)
    if near.active is not None:
        values.masked_fill_(~near.active, 0.0)
    return values if far.active is None else values.masked_fill_(~far.active.any(dim=1, keepdim=True), 0.0)


def _pulls(near: _Side, far: _Side, argmax: Tensor, squared: bool) -> Tensor:
    """For each point, the difference to its nearest point, or the nearest point itself; 0 where it has none."""
    nearest = far.points.gather(1, argmax.clamp(min=0).unsqueeze(-1).expand(-1, -1, far.points.shape[-1]))
    return (near.points - nearest if squared else nearest).masked_fill_((argmax < 0).unsqueeze(-1), 0.0)


def _received(sent: Tensor, argmax: Tensor, length: int) -> Tensor:
    """Scatter-add `sent` [n, L, d] to the points `argmax` [n, L], in the order of the senders: [n, length, d]."""
    n, senders, size = sent.shape
    first = torch.arange(n, device=sent.device).unsqueeze(1) * senders
    sums = sums_by_argmax(sent.reshape(-1, size), first, argmax, sent.new_ones(n, senders), length)
    return sums.view(n, length, size)
