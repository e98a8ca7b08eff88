"""Chamfer distance between sets of points: of every point to the nearest one of the other set, both ways.

    distance[n] = mean over x of  min over y of  |x - y|^2   +   mean over y of  min over x of  |y - x|^2

With inner products in place of squared distances, and maxima in place of minima, it is a similarity: MaxSim both ways.
`chamfer_reference` is the definition, in plain torch. `chamfer` and `chamfer_varlen` compute the same without its
[N, Lx, Ly] tensor: by Triton kernels on CUDA (`kernels.chamfer`), which find the nearest points of both sides in one
pass over all products, and in blocks of plain torch elsewhere (`ops.chamfer_blocks`).

The gradient flows between a point and its nearest one, so the forward keeps these winners, [N, Lx] and [N, Ly].

The operator `pylate_flash::chamfer` is the one way in, eager and compiled, for padded and packed sets alike: it takes
the fields of `Sets` and of `ChamferOptions`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.plan import IMPLEMENTATIONS
from ..problem import accumulation_dtype
from .chamfer_compute import ChamferOptions, Sets, check_sets, compute_chamfer, compute_chamfer_gradients
from .checks import (
    check_boundaries,
    check_choice,
    check_differentiation,
    check_tensor,
    checked_number,
    no_second_derivative,
)
from .maxsim import REDUCTIONS, autocast
from .operator import Operation
from .packing import longest

METRICS = ("sqeuclidean", "inner_product")


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
    """The definition of `chamfer`, in plain torch: builds all differences, and autograd differentiates it.

    Arguments and result are those of `chamfer`, except that it checks nothing, and computes in, and returns, the type
    that the inputs widen to: float64 for float64 inputs, else float32.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x_on = torch.ones_like(x[..., 0], dtype=torch.bool) if x_mask is None else x_mask != 0
    y_on = torch.ones_like(y[..., 0], dtype=torch.bool) if y_mask is None else y_mask != 0
    # What a masked point is, a NaN even, does not matter.
    x, y = x.to(wide).masked_fill(~x_on.unsqueeze(-1), 0.0), y.to(wide).masked_fill(~y_on.unsqueeze(-1), 0.0)
    near = x @ y.transpose(1, 2)
    if metric == "sqeuclidean":
        near = -(x.unsqueeze(2) - y.unsqueeze(1)).square().sum(dim=-1)

    def one_way(near: Tensor, on: Tensor, others: Tensor) -> Tensor:
        near = near.masked_fill(~others.unsqueeze(1), -torch.inf)
        # One more point, which never wins, as there is no maximum of none.
        best = F.pad(near, (0, 1), value=-torch.inf).max(dim=-1).values
        total = best.masked_fill(~(on & others.any(dim=1, keepdim=True)), 0.0).sum(dim=1)
        return total / on.sum(dim=1).clamp(min=1) if reduction == "mean" else total

    total = one_way(near, x_on, y_on) + one_way(near.transpose(1, 2), y_on, x_on)
    total = -total if metric == "sqeuclidean" else total
    return total.masked_fill(~(x_on.any(dim=1) & y_on.any(dim=1)), empty_score)


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

    Each point meets the nearest one of the other set; the sum, or mean, of how near these are is taken over either set,
    and both are added. Memory does not grow with Lx * Ly.

    Parameters
    ----------
    x
        [N, Lx, d], float16, bfloat16, float32 or float64: points, or embeddings. Under autocast, inner products take
        the autocast type; squared distances keep that of the points, the wider one if those of x and y differ.
    y
        [N, Ly, d], of the same dtype and on the same device.
    x_mask, y_mask
        [N, Lx] and [N, Ly], bool or 0/1 of the dtypes of masks in `maxsim`, 1 where a point is active; active points
        need not be a prefix. None: all. Other values are an error on the CPU, and count as 1 on a GPU.
    metric
        "sqeuclidean": squared Euclidean distances, the nearest point has the smallest one, and the result is a
        distance. "inner_product": the nearest point has the largest one, and the result is a similarity, with
        reduction="sum" the sum of `maxsim_pairwise` both ways.
    reduction
        "mean": either sum is divided by the number of active points of its set. "sum": it is not.
    empty_score
        What a pair scores of which a set, or either, has no active point.
    implementation
        "auto", or by name: "triton" (CUDA, compute capability >= 8.0, at most 4096 dimensions, no float64) or
        "blocked" (plain torch in blocks).

    Returns
    -------
    Tensor
        [N], float32, or float64 for float64 inputs. How near a winner is, is computed from the two points in that type:
        distances of near points lose nothing to cancellation. Up to 8 dimensions, so is who wins. From 9 on, that is
        decided by |x|^2 + |y|^2 - 2 <x, y>, where half inputs multiply in their own type and accumulate in float32,
        and float32 inputs follow `torch.get_float32_matmul_precision()`: of points whose squared distances differ by
        less than about 1e-6 of their squared norms (1e-3 below "highest"), any may win. NaN in an active point gives
        NaN, an infinite one a result that is not finite. Ties go to the lowest index, and the gradient flows between a
        point and its winner only. Distances and gradients are bitwise reproducible.

    Raises
    ------
    TypeError
        If an argument is no dense tensor, of another dtype than named above, or the two dtypes differ.
    ValueError
        If shapes, devices or embedding sizes do not fit together, a mask holds values that it may not, or requires a
        gradient, an option is none of its choices, or implementation="triton" cannot take the input.
    RuntimeError
        If the call is differentiated by `torch.func`, in forward mode, or twice.

    Examples
    --------
    >>> import torch
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
        [Tx, d] and [Ty, d], of the types that `chamfer` takes.
    x_cu_seqlens, y_cu_seqlens
        Both [N + 1], int32 or int64, not decreasing, from 0 to Tx and to Ty, on any device: set i is the points
        x_cu_seqlens[i] to x_cu_seqlens[i + 1]. On the CPU their values are checked. On a GPU they are taken as they
        are, because to look at them would be to wait for it.
    max_x_length, max_y_length
        Points of the longest sets, or more. A call that is given both waits for nothing. Without them, it finds them
        out, and waits for the GPU if the boundaries lie there. Under `torch.compile`, give both.
    metric, reduction, empty_score, implementation
        As in `chamfer`.

    Returns
    -------
    Tensor
        [N]; type, precision, NaN, ties and gradients as in `chamfer`.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `chamfer`; ValueError also if boundaries do not span the points, there are not as many of y as of x, or a
        set is longer than it may be.

    Examples
    --------
    >>> import torch
    >>> from pylate_flash import pack
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
    """The arguments after checks of the options and of what the operator would not take; autocast."""
    sets, options = _call(arguments)
    check_choice("metric", options.metric, METRICS)
    check_choice("reduction", options.reduction, REDUCTIONS)
    check_choice("implementation", options.implementation, IMPLEMENTATIONS)
    options = options._replace(empty_score=checked_number("empty_score", options.empty_score))
    check_tensor("x", sets.x)
    check_tensor("y", sets.y)
    for name, mask in (("x_mask", sets.x_mask), ("y_mask", sets.y_mask)):
        if mask is not None:
            check_tensor(name, mask, otherwise=" or None")
    check_differentiation(called, sets.x, sets.y)
    return *_cast(sets.x, sets.y, options.metric), *sets[2:], *options


def _cast(x: Tensor, y: Tensor, metric: str) -> tuple[Tensor, ...]:
    """Both as autocast has them: squared distances of rounded points would be far off."""
    if metric == "inner_product":
        return autocast(x, y)
    device = x.device.type
    both = x.is_floating_point() and y.is_floating_point() and x.dtype != y.dtype
    if not both or device == "meta" or not torch.is_autocast_enabled(device):
        return x, y
    wide = torch.promote_types(x.dtype, y.dtype)
    return x.to(wide), y.to(wide)


_N_TENSORS = len(Sets._fields)


def _call(arguments: tuple) -> tuple[Sets, ChamferOptions]:
    return Sets(*arguments[:_N_TENSORS]), ChamferOptions(*arguments[_N_TENSORS:])


def _compute(arguments: tuple, _: bool) -> tuple[Tensor, Tensor, Tensor]:
    return compute_chamfer(*_call(arguments))


def _compute_gradients(
    grad_scores: Tensor, kept: Sequence[Tensor], arguments: tuple, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    return compute_chamfer_gradients(*_call(arguments), grad_scores, (kept[0], kept[1]), needs)


def _shapes(*arguments) -> tuple[Tensor, Tensor, Tensor]:
    sets, options = _call(arguments)
    check_sets(sets)
    if sets.x_cu_seqlens is None:
        n, lengths = sets.x.shape[0], (sets.x.shape[1], sets.y.shape[1])
    else:
        n, lengths = sets.x_cu_seqlens.shape[0] - 1, (options.max_x_length, options.max_y_length)
    winners = [sets.x.new_empty((n, length), dtype=torch.int32) for length in lengths]
    return sets.x.new_empty(n, dtype=accumulation_dtype(sets.x.dtype)), winners[0], winners[1]


_chamfer = Operation(
    "chamfer",
    "Tensor x, Tensor y, Tensor? x_mask, Tensor? y_mask, Tensor? x_cu_seqlens, Tensor? y_cu_seqlens, "
    "SymInt max_x_length, SymInt max_y_length, str metric, str reduction, float empty_score, str implementation",
    ("x", "y"), ("x_winners", "y_winners"), _check, _compute, _compute_gradients, _shapes,
    no_second_derivative("chamfer", "its gradient is not differentiated again"),
)  # fmt: skip
