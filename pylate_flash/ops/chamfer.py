"""Chamfer distance between sets of points: distances from each point to the nearest one of the other set, both ways.

    distance[n] = mean over x of  min over y of  |x - y|^2   +   mean over y of  min over x of  |y - x|^2

With inner products instead of squared distances, and maxima instead of minima, it is a similarity: MaxSim both ways.
One pass over all products finds the nearest points of both sides (`kernels.chamfer`, `ops.chamfer_blocks`). The
gradient flows between a point and its nearest one, so the forward saves both argmax, [N, Lx] and [N, Ly].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.choice import IMPLEMENTATIONS, choose
from ..problem import Options, Problem, Sets, Tensors, accumulation_dtype, problem_of
from .chamfer_blocks import gradients_in_blocks, nearest_in_blocks
from .checks import (
    check_boundaries,
    check_choice,
    check_embeddings,
    check_mask_layout,
    check_same,
    check_tensor,
    checked_mask,
    checked_number,
    no_second_derivative,
)
from .compute import kernels, without_autocast
from .maxsim_operator import REDUCTIONS, autocast
from .operator import Operation
from .packing import longest

METRICS = ("sqeuclidean", "inner_product")


class ChamferOptions(NamedTuple):
    """The options of a call; for packed sets, the lengths are upper bounds of the longest sets."""

    max_x_length: int
    max_y_length: int
    metric: str
    reduction: str
    empty_score: float
    implementation: str


def chamfer_reference(
    x: Tensor,
    y: Tensor,
    *,
    x_mask: Tensor | None = None,
    y_mask: Tensor | None = None,
    metric: str = "sqeuclidean",
    reduction: str = "mean",
    empty_score: float = 0.0,
) -> Tensor:
    """The definition of `chamfer`, in plain torch, computed in the dtype of `maxsim_reference`."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    x_active = torch.ones_like(x[..., 0], dtype=torch.bool) if x_mask is None else x_mask != 0
    y_active = torch.ones_like(y[..., 0], dtype=torch.bool) if y_mask is None else y_mask != 0
    # The values of masked points must not matter, even if they are NaN.
    x, y = x.to(dtype).masked_fill(~x_active.unsqueeze(-1), 0.0), y.to(dtype).masked_fill(~y_active.unsqueeze(-1), 0.0)
    similarities = x @ y.transpose(1, 2)
    if metric == "sqeuclidean":
        similarities = -(x.unsqueeze(2) - y.unsqueeze(1)).square().sum(dim=-1)

    def one_way(similarities: Tensor, active: Tensor, other_active: Tensor) -> Tensor:
        similarities = similarities.masked_fill(~other_active.unsqueeze(1), -torch.inf)
        # Pad with a point that never wins, because max needs at least one element.
        best = F.pad(similarities, (0, 1), value=-torch.inf).max(dim=-1).values
        total = best.masked_fill(~(active & other_active.any(dim=1, keepdim=True)), 0.0).sum(dim=1)
        return total / active.sum(dim=1).clamp(min=1) if reduction == "mean" else total

    total = one_way(similarities, x_active, y_active) + one_way(similarities.transpose(1, 2), y_active, x_active)
    total = -total if metric == "sqeuclidean" else total
    return total.masked_fill(~(x_active.any(dim=1) & y_active.any(dim=1)), empty_score)


def chamfer(
    x: Tensor,
    y: Tensor,
    *,
    x_mask: Tensor | None = None,
    y_mask: Tensor | None = None,
    metric: str = "sqeuclidean",
    reduction: str = "mean",
    empty_score: float = 0.0,
    implementation: str = "auto",
) -> Tensor:
    """Chamfer distance between every set of x and the set of y of the same index, differentiable.

    Each point is matched with the nearest one of the other set; the distances are summed or averaged over each set, and
    both results are added. Memory does not grow with Lx * Ly.

    Parameters
    ----------
    x
        [N, Lx, d], float16, bfloat16, float32 or float64: points, or embeddings. Under autocast, inner products use the
        autocast dtype; squared distances keep the dtype of the points, the wider one if x and y differ.
    y
        [N, Ly, d], of the same dtype and on the same device.
    x_mask, y_mask
        [N, Lx] and [N, Ly], bool or 0/1, 1 where a point is active, or None, as `documents_mask` of `maxsim`.
    metric
        "sqeuclidean": the nearest point has the smallest squared Euclidean distance, and the result is a distance.
        "inner_product": the nearest point has the largest inner product, and the result is a similarity, with
        reduction="sum" the sum of `maxsim_pairwise` both ways.
    reduction
        "mean": each sum is divided by the number of active points of its set. "sum": it is not.
    empty_score
        Score of a pair in which one set, or both, has no active point.
    implementation
        "auto", "triton" or "blocked", as in `maxsim`.

    Returns
    -------
    Tensor
        [N], float32, or float64 for float64 inputs. The distance to a winner is computed from the two points in that
        dtype, without cancellation for nearby points. Up to 8 dimensions, winners are chosen by the same distances.
        From 9 on, they are chosen by ``|x|^2 + |y|^2 - 2 <x, y>``, where half inputs multiply in their own dtype and
        accumulate in float32, and float32 inputs follow torch's setting, as in `maxsim`: among points whose squared
        distances differ by less than about 1e-6 of their squared norms (1e-3 where products are in TF32), any may win.
        NaN in an active point gives NaN, an infinite one a result that is not finite. Ties go to the lowest index, and
        the gradient flows only between a point and its winner. Distances and gradients are bitwise reproducible.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `maxsim`; ValueError also if x and y have different numbers of sets.

    Examples
    --------
    >>> x = torch.tensor([[[0.0, 0.0], [1.0, 0.0]]])
    >>> y = torch.tensor([[[0.0, 1.0], [1.0, 0.0], [3.0, 0.0]]])
    >>> chamfer(x, y, reduction="sum")
    tensor([6.])
    >>> chamfer(x, y, metric="inner_product", reduction="sum")
    tensor([7.])
    """
    options = ChamferOptions(0, 0, metric, reduction, empty_score, implementation)
    return _chamfer((*Sets(x, y, x_mask, y_mask), *options), "chamfer")


def chamfer_varlen(
    x: Tensor,
    y: Tensor,
    x_cu_seqlens: Tensor,
    y_cu_seqlens: Tensor,
    *,
    max_x_length: int | None = None,
    max_y_length: int | None = None,
    metric: str = "sqeuclidean",
    reduction: str = "mean",
    empty_score: float = 0.0,
    implementation: str = "auto",
) -> Tensor:
    """Chamfer distance between every packed set of x and the packed set of y of the same index, differentiable.

    Parameters
    ----------
    x, y
        [Tx, d] and [Ty, d], of the dtypes that `chamfer` takes.
    x_cu_seqlens, y_cu_seqlens
        Both [N + 1], int32 or int64, non-decreasing, from 0 to Tx and to Ty, on any device: set i is the points
        x_cu_seqlens[i] to x_cu_seqlens[i + 1]. On the CPU their values are checked. On a GPU they are not, because
        reading them would synchronize.
    max_x_length, max_y_length
        Numbers of points of the longest sets, or upper bounds. A call with both never synchronizes. Without them, it
        computes them, and synchronizes if the boundaries are on a GPU. Under `torch.compile`, pass both.
    metric, reduction, empty_score, implementation
        As in `chamfer`.

    Returns
    -------
    Tensor
        [N]; dtype, precision, NaN, ties and gradients as in `chamfer`.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `chamfer`; ValueError also if boundaries do not span the points or differ in number, or a set is longer
        than its maximum length; and in the backward on a GPU, if the sets padded to the longest would have 2**31
        points or more.

    Examples
    --------
    >>> x, x_cu_seqlens = pack([torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0]])])
    >>> y, y_cu_seqlens = pack([torch.tensor([[1.0]]), torch.tensor([[1.0], [4.0]])])
    >>> chamfer_varlen(x, y, x_cu_seqlens, y_cu_seqlens)
    tensor([2.0000, 4.5000])
    """
    check_tensor("x", x, {2: "[Tx, d]"})
    check_tensor("y", y, {2: "[Ty, d]"})
    check_boundaries("x_cu_seqlens", x_cu_seqlens, x)
    check_boundaries("y_cu_seqlens", y_cu_seqlens, y)
    lengths = (
        longest("x_cu_seqlens", x_cu_seqlens, x.shape[0], "x", max_x_length),
        longest("y_cu_seqlens", y_cu_seqlens, y.shape[0], "y", max_y_length),
    )
    options = ChamferOptions(*lengths, metric, reduction, empty_score, implementation)
    return _chamfer((*Sets(x, y, None, None, x_cu_seqlens, y_cu_seqlens), *options), "chamfer_varlen")


def _check(arguments: tuple, called: str) -> tuple:
    sets, options = _call(arguments)
    check_choice("metric", options.metric, METRICS)
    check_choice("reduction", options.reduction, REDUCTIONS)
    check_choice("implementation", options.implementation, IMPLEMENTATIONS)
    options = options._replace(empty_score=checked_number("empty_score", options.empty_score))
    check_tensor("x", sets.x)
    check_tensor("y", sets.y)
    x, y = _cast(sets.x, sets.y, options.metric)
    sets = sets._replace(x=x, y=y)
    check_sets(sets)
    return *sets, *options


def _cast(x: Tensor, y: Tensor, metric: str) -> tuple[Tensor, ...]:
    """Autocast inner products; else only widen to one dtype, as distances of rounded points would be far off."""
    if metric == "inner_product":
        return autocast(x, y)
    device = x.device.type
    differ = x.is_floating_point() and y.is_floating_point() and x.dtype != y.dtype
    if not differ or device == "meta" or not torch.is_autocast_enabled(device):
        return x, y
    dtype = torch.promote_types(x.dtype, y.dtype)
    return x.to(dtype), y.to(dtype)


def check_sets(sets: Sets) -> None:
    """Raise TypeError or ValueError, naming the argument, unless the tensors of a call fit together."""
    x, y, x_mask, y_mask, x_cu_seqlens, y_cu_seqlens = sets
    packed = x_cu_seqlens is not None or y_cu_seqlens is not None
    check_embeddings("x", x, {2: "[Tx, d]"} if packed else {3: "[N, Lx, d]"})
    check_embeddings("y", y, {2: "[Ty, d]"} if packed else {3: "[N, Ly, d]"})
    check_same(x, y, names=("x", "y"))
    if packed:
        x_entries = check_boundaries("x_cu_seqlens", x_cu_seqlens, x)
        y_entries = check_boundaries("y_cu_seqlens", y_cu_seqlens, y)
        if y_entries != x_entries:
            raise ValueError(f"y_cu_seqlens must have as many entries as x_cu_seqlens, {x_entries}, got {y_entries}")
    elif x.shape[0] != y.shape[0]:
        raise ValueError(f"y must have one set for each set of x, {x.shape[0]}, got {y.shape[0]} sets")
    check_mask_layout("x_mask", x_mask, x)
    check_mask_layout("y_mask", y_mask, y)


def problem_of_sets(sets: Sets, options: ChamferOptions) -> Problem:
    """The problem of sets that fit together: each set of x is a query, with the set of y as its only candidate."""
    x, y, x_mask, y_mask, x_cu_seqlens, y_cu_seqlens = sets
    if x_cu_seqlens is None:
        y_mask = None if y_mask is None else y_mask.unsqueeze(1)
        return problem_of(Tensors(x, y.unsqueeze(1), x_mask, y_mask), Options())
    # candidates_cu_seqlens is a stand-in: only its dtype and length are used.
    tensors = Tensors(x, y, None, None, x_cu_seqlens, y_cu_seqlens, candidates_cu_seqlens=x_cu_seqlens)
    return problem_of(tensors, Options(options.max_x_length, options.max_y_length, 1))


def compute_chamfer(sets: Sets, options: ChamferOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Distances or similarities [N], and the argmax of x [N, Lx] and of y [N, Ly], int32, -1 for none."""
    problem = problem_of_sets(sets, options)
    implementation = choose(options.implementation, problem.device, problem.dtype, problem.size)
    if problem.is_empty or 0 in sets.x.shape:
        # All sets of x, or all sets of y, are empty.
        scores, x_argmax, y_argmax = _empty_results(sets, options)
        return scores.fill_(options.empty_score), x_argmax.fill_(-1), y_argmax.fill_(-1)
    masked = sets._replace(x_mask=checked_mask("x_mask", sets.x_mask), y_mask=checked_mask("y_mask", sets.y_mask))
    with without_autocast(problem.device):
        nearest = kernels().chamfer_nearest if implementation == "triton" else nearest_in_blocks
        values, argmax = nearest(problem, masked, options.metric == "sqeuclidean")
    counts = _counts(problem, sets)
    sums = [nearest_values.sum(dim=1) for nearest_values in values]
    if options.reduction == "mean":
        sums = [_divided(total, count) for total, count in zip(sums, counts, strict=True)]
    scores = sums[0] + sums[1]
    for count in counts:
        if isinstance(count, Tensor):
            scores = scores.masked_fill(count == 0, options.empty_score)
    return scores, argmax[0], argmax[1]


def _compute_gradients(
    grad_scores: Tensor, argmax: Sequence[Tensor], arguments: tuple, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and y, contiguous, of their dtype; None for one that is not needed."""
    sets, options = _call(arguments)
    problem = problem_of_sets(sets, options)
    if problem.is_empty or 0 in sets.x.shape:
        zeros = [torch.zeros_like(points, memory_format=torch.contiguous_format) for points in sets[:2]]
        return zeros[0] if needs[0] else None, zeros[1] if needs[1] else None
    squared = options.metric == "sqeuclidean"
    # The derivative of a squared distance is twice the difference.
    grad = grad_scores.to(problem.scores_dtype) * (2.0 if squared else 1.0)
    weights = grad, grad
    if options.reduction == "mean":
        x_counts, y_counts = _counts(problem, sets)
        weights = _divided(grad, x_counts), _divided(grad, y_counts)
    implementation = choose(options.implementation, problem.device, problem.dtype, problem.size)
    gradients = kernels().chamfer_gradients if implementation == "triton" else gradients_in_blocks
    with without_autocast(problem.device):
        return gradients(problem, sets, (argmax[0], argmax[1]), weights, needs, squared)


def _counts(problem: Problem, sets: Sets) -> tuple[Tensor | int, Tensor | int]:
    """The number of active points of each set of x and of y [N], or an int where all sets have the same."""

    def of(points: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | int:
        if cu_seqlens is not None:
            return cu_seqlens.diff().to(problem.device, non_blocking=True)
        return points.shape[1] if mask is None else (mask != 0).sum(dim=1)

    return of(*sets[::2]), of(*sets[1::2])


def _divided(values: Tensor, count: Tensor | int) -> Tensor:
    return values / (count if isinstance(count, int) else count.clamp(min=1))


def _empty_results(sets: Sets, options: ChamferOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised results; sizes may be symbolic."""
    n, lengths = sets.x.shape[0], (sets.x.shape[1], sets.y.shape[1])
    if sets.x_cu_seqlens is not None:
        n, lengths = sets.x_cu_seqlens.shape[0] - 1, (options.max_x_length, options.max_y_length)
    x_argmax, y_argmax = (sets.x.new_empty((n, length), dtype=torch.int32) for length in lengths)
    return sets.x.new_empty(n, dtype=accumulation_dtype(sets.x.dtype)), x_argmax, y_argmax


def _call(arguments: tuple) -> tuple[Sets, ChamferOptions]:
    return Sets(*arguments[:6]), ChamferOptions(*arguments[6:])


_chamfer = Operation(
    "chamfer",
    "Tensor x, Tensor y, Tensor? x_mask, Tensor? y_mask, Tensor? x_cu_seqlens, Tensor? y_cu_seqlens, "
    "SymInt max_x_length, SymInt max_y_length, str metric, str reduction, float empty_score, str implementation",
    ("x", "y"),
    ("x_argmax", "y_argmax"),
    _check,
    lambda arguments, _: compute_chamfer(*_call(arguments)),
    _compute_gradients,
    lambda *arguments: _empty_results(*_call(arguments)),
    no_second_derivative("chamfer", "its gradient is not differentiated again"),
)
