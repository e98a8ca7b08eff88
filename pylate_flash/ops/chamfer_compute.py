"""The computation of Chamfer distances and gradients on tensors: by Triton kernels, or in blocks of plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.plan import choose
from ..problem import Options, Problem, Tensors
from .chamfer_blocks import Found, gradients_in_blocks, nearest_in_blocks
from .checks import check_boundaries, check_embeddings, check_mask_layout, check_same, checked_mask, checked_problem
from .compute import kernels


class Sets(NamedTuple):
    """The tensors of a call: sets [N, Lx, d] and [N, Ly, d] with masks, or packed [Tx, d] and [Ty, d]."""

    x: Tensor
    y: Tensor
    x_mask: Tensor | None = None
    y_mask: Tensor | None = None
    x_cu_seqlens: Tensor | None = None
    y_cu_seqlens: Tensor | None = None


class ChamferOptions(NamedTuple):
    """The options of a call; the lengths are those of the longest sets, or more, where they are packed."""

    max_x_length: int
    max_y_length: int
    metric: str
    reduction: str
    empty_score: float
    implementation: str


def check_sets(sets: Sets) -> None:
    """Raise unless the tensors of a call fit together.

    Raises
    ------
    TypeError
        If a type is not one of those that it may be, or those of x and y differ.
    ValueError
        If shapes, devices or embedding sizes do not fit together.
    """
    x, y, x_mask, y_mask, x_cu_seqlens, y_cu_seqlens = sets
    packed = x_cu_seqlens is not None or y_cu_seqlens is not None
    check_embeddings("x", x, {2: "[Tx, d]"} if packed else {3: "[N, Lx, d]"})
    check_embeddings("y", y, {2: "[Ty, d]"} if packed else {3: "[N, Ly, d]"})
    check_same(x, y, names=("x", "y"))
    if packed:
        check_boundaries("x_cu_seqlens", x_cu_seqlens, x)
        check_boundaries("y_cu_seqlens", y_cu_seqlens, y)
        assert x_cu_seqlens is not None
        assert y_cu_seqlens is not None
        if x_cu_seqlens.shape != y_cu_seqlens.shape:
            raise ValueError(
                f"y_cu_seqlens must have as many entries as x_cu_seqlens, {x_cu_seqlens.shape[0]}, "
                f"got {y_cu_seqlens.shape[0]}"
            )
    elif x.shape[0] != y.shape[0]:
        raise ValueError(f"y must have one set for each set of x, {x.shape[0]}, got {y.shape[0]} sets")
    for name, mask, points in (("x_mask", x_mask, x), ("y_mask", y_mask, y)):
        if mask is not None:
            check_mask_layout(name, mask, points)


def problem_of_sets(sets: Sets, options: ChamferOptions) -> Problem:
    """The problem of a call, of which every set of y is a document that only its set of x meets."""
    x, y, x_mask, y_mask, x_cu_seqlens, y_cu_seqlens = sets
    if x_cu_seqlens is None:
        y_mask = None if y_mask is None else y_mask.unsqueeze(1)
        return checked_problem(Tensors(x, y.unsqueeze(1), x_mask, y_mask), Options())
    assert y_cu_seqlens is not None
    # Boundaries of candidates, of which nothing but their type and number is looked at.
    candidates = x_cu_seqlens
    lengths = Options(options.max_x_length, options.max_y_length, 1)
    return checked_problem(Tensors(x, y, None, None, x_cu_seqlens, y_cu_seqlens, candidates), lengths)


def compute_chamfer(sets: Sets, options: ChamferOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Distances or similarities [N], and the winners of x [N, Lx] and of y [N, Ly], int32, -1 for none."""
    check_sets(sets)
    problem = problem_of_sets(sets, options)
    implementation = choose(options.implementation, problem.device, problem.dtype, problem.size)
    if problem.is_empty or 0 in sets.x.shape:
        # All of x, or all of y, have no point.
        n, device = problem.n_queries, problem.device
        x_winners, y_winners = (
            torch.full((n, length), -1, dtype=torch.int32, device=device)
            for length in (problem.query_length, problem.document_length)
        )
        return torch.full((n,), options.empty_score, dtype=problem.scores_dtype, device=device), x_winners, y_winners
    squared = options.metric == "sqeuclidean"
    # Under autocast the inputs have the autocast type already; the products inside must not be rounded to it.
    with torch.autocast(problem.device.type, enabled=False):
        nearest = kernels().chamfer_nearest if implementation == "triton" else nearest_in_blocks
        found: Found = nearest(problem, with_bool_masks(sets), squared)
    counts = point_counts(problem, sets)
    sums = [values.sum(dim=1) for values in (found.x_values, found.y_values)]
    if options.reduction == "mean":
        sums = [_divided(total, count) for total, count in zip(sums, counts, strict=True)]
    scores = sums[0] + sums[1]
    for count in counts:
        if isinstance(count, Tensor):
            scores = scores.masked_fill(count == 0, options.empty_score)
    return scores, found.x_winners, found.y_winners


def compute_chamfer_gradients(
    sets: Sets,
    options: ChamferOptions,
    grad_scores: Tensor,
    winners: tuple[Tensor, Tensor],
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and y, contiguous in their type; None for one that is not needed."""
    problem = problem_of_sets(sets, options)
    if problem.is_empty or 0 in sets.x.shape:
        zeros = [torch.zeros_like(points, memory_format=torch.contiguous_format) for points in sets[:2]]
        return zeros[0] if needs[0] else None, zeros[1] if needs[1] else None
    squared = options.metric == "sqeuclidean"
    # The derivative of a squared distance is twice the difference.
    grad = grad_scores.to(torch.promote_types(problem.dtype, torch.float32)) * (2.0 if squared else 1.0)
    weights = [grad, grad]
    if options.reduction == "mean":
        weights = [_divided(grad, count) for count in point_counts(problem, sets)]
    implementation = choose(options.implementation, problem.device, problem.dtype, problem.size)
    gradients = kernels().chamfer_gradients if implementation == "triton" else gradients_in_blocks
    with torch.autocast(problem.device.type, enabled=False):
        return gradients(problem, sets, winners, (weights[0], weights[1]), needs, squared)


def with_bool_masks(sets: Sets) -> Sets:
    """The same with masks of bool, after a look at their values, where that waits for nothing."""
    return sets._replace(x_mask=checked_mask("x_mask", sets.x_mask), y_mask=checked_mask("y_mask", sets.y_mask))


def point_counts(problem: Problem, sets: Sets) -> tuple[Tensor | int, Tensor | int]:
    """The number of active points of every set of x and of y [N], or the one number of all sets."""

    def of(points: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | int:
        if cu_seqlens is not None:
            return cu_seqlens.diff().to(problem.device, non_blocking=True)
        return points.shape[1] if mask is None else (mask != 0).sum(dim=1)

    return of(*sets[::2]), of(*sets[1::2])


def _divided(values: Tensor, count: Tensor | int) -> Tensor:
    return values / (count if isinstance(count, int) else count.clamp(min=1))
