"""Losses over MaxSim scores: the cross entropy of contrastive training, and the divergence of distillation.

    cross entropy    mean over queries i of  -log q[i, label of i]
    divergence       mean over queries i of  sum over documents j of  p[i, j] log(p[i, j] / q[i, j])

with q[i] = softmax(scores[i] / temperature), and p[i] the softmax of a teacher's scores. (van den Oord et al.,
"Representation Learning with Contrastive Predictive Coding", 2018; Hinton et al., "Distilling the Knowledge in a Neural
Network", 2015.) The definitions take any scores, and autograd differentiates them; over `maxsim_reference` they are
what the operations here are tested against, and nothing else.

Where the kernels serve the scores, scores and loss are one node of autograd, whose backward starts at the loss: a step
on a batch of some hundred queries waits for the host, half as long again with torch's loss between two nodes. Elsewhere
torch's operations follow `maxsim`, which is also what `torch.compile` traces.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import FLOATING, check_choice, is_readable
from .dispatch import BACKWARDS, IMPLEMENTATIONS, choose
from .maxsim import (
    MASKINGS,
    _checked,
    _finish,
    _forward,
    _grouped,
    _is_plain,
    are_halves_of_one_size,
    goes_straight_to_the_kernel,
    gradients_of_scores,
    is_for_the_kernel,
    kernels,
    maxsim,
    needs_gradient,
    product_precision,
)

LOSS_REDUCTIONS = ("mean", "sum", "none")


def cross_entropy_reference(
    scores: Tensor, labels: Tensor | None = None, *, temperature: float = 1.0, loss_reduction: str = "mean"
) -> Tensor:
    """The definition of the loss of `maxsim_cross_entropy` over scores [Nq, N], in their type.

    `labels` None: document i is the right one of query i.
    """
    logits = scores / temperature
    labels = torch.arange(len(scores), device=scores.device) if labels is None else labels
    right = labels.unsqueeze(1) == torch.arange(scores.shape[1], device=scores.device)
    losses = logits.logsumexp(dim=1) - torch.where(right, logits, 0.0).sum(dim=1)
    # A label out of range makes the loss and its gradient NaN.
    losses = losses * torch.where(right.any(dim=1), 1.0, torch.nan)
    return losses if loss_reduction == "none" else getattr(losses, loss_reduction)()


def kl_divergence_reference(
    scores: Tensor, teacher_scores: Tensor, *, temperature: float = 1.0, loss_reduction: str = "mean"
) -> Tensor:
    """The definition of the loss of `maxsim_kl_divergence` over scores [Nq, N], in their type."""
    log_q = (scores / temperature).log_softmax(dim=1)
    p = teacher_scores.to(scores.dtype).softmax(dim=1)
    losses = torch.where(p > 0, p * (p.log() - log_q), 0.0).sum(dim=1)
    return losses if loss_reduction == "none" else getattr(losses, loss_reduction)()


def maxsim_cross_entropy(
    queries: Tensor,
    documents: Tensor,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    *,
    labels: Tensor | None = None,
    temperature: float = 1.0,
    loss_reduction: str = "mean",
    normalize: bool = False,
    reduction: str = "sum",
    masking: str = "exclude",
    empty_score: float = 0.0,
    implementation: str = "auto",
    backward: str = "auto",
) -> Tensor:
    """Cross entropy over MaxSim scores: the contrastive loss with in-batch negatives, or with candidates of its own.

    The value and the gradients are those of ``F.cross_entropy(maxsim(queries, documents, ...) / temperature, labels)``,
    with fewer launches.

    Parameters
    ----------
    queries
        [Nq, Lq, d].
    documents
        [Nd, Ld, d]: all are candidates of every query. [Nq, K, Ld, d]: each query has K of its own.
    queries_mask, documents_mask
        As in `maxsim`.
    labels
        [Nq], int64 or int32: which document, of Nd or of K, is the right one. A label out of range is an error on the
        CPU; on a GPU, where to look would be to wait, it makes the loss NaN. None: document i of query i, for
        Nd >= Nq; of K candidates the first.
    temperature
        Divides the scores. Positive.
    loss_reduction
        "mean" or "sum" over the queries, or "none".
    normalize, reduction, masking, empty_score, implementation, backward
        As in `maxsim`; `reduction` is that of the scores.

    Returns
    -------
    Tensor
        float32, a scalar, or with loss_reduction="none" [Nq]. On a GPU, the gradients may be computed with a scalar
        loss, and held until its backward; where none are wanted, `torch.no_grad` spares them.

    Raises
    ------
    TypeError, ValueError
        As in `maxsim`; if there is no document, `labels` do not fit, or `temperature` is no positive number.
    RuntimeError
        As in `maxsim`.

    Examples
    --------
    >>> import torch
    >>> queries = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    >>> maxsim_cross_entropy(queries, queries, temperature=0.5)
    tensor(0.1269)
    """
    scoring = _Scoring(normalize, reduction, masking, empty_score, implementation, backward)
    return _loss(
        queries, documents, queries_mask, documents_mask, labels, _Comparison(False, temperature, loss_reduction),
        scoring,
    )  # fmt: skip


def maxsim_kl_divergence(
    queries: Tensor,
    documents: Tensor,
    teacher_scores: Tensor,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    loss_reduction: str = "mean",
    normalize: bool = False,
    reduction: str = "sum",
    masking: str = "exclude",
    empty_score: float = 0.0,
    implementation: str = "auto",
    backward: str = "auto",
) -> Tensor:
    """Kullback-Leibler divergence of MaxSim scores from a teacher's: the loss of knowledge distillation.

    The value and the gradients are those of ``F.kl_div(log_softmax(maxsim(queries, documents, ...) / temperature),
    log_softmax(teacher_scores), reduction="batchmean", log_target=True)``, with fewer launches.

    Parameters
    ----------
    queries
        [Nq, Lq, d].
    documents
        [Nq, K, Ld, d]: K candidates of each query. [Nd, Ld, d]: all are candidates of every query.
    teacher_scores
        [Nq, K] or [Nq, Nd], floating: the teacher's scores or log-probabilities, whose softmax is the target. -inf
        rules a document out. No gradient flows to them.
    queries_mask, documents_mask
        As in `maxsim`.
    temperature
        Divides the scores, but not the teacher's. Positive.
    loss_reduction
        "mean" or "sum" over the queries, or "none".
    normalize, reduction, masking, empty_score, implementation, backward
        As in `maxsim`; `reduction` is that of the scores.

    Returns
    -------
    Tensor
        float32, a scalar, or with loss_reduction="none" [Nq]. On a GPU, the gradients may be computed with a scalar
        loss, and held until its backward; where none are wanted, `torch.no_grad` spares them.

    Raises
    ------
    TypeError, ValueError
        As in `maxsim`; if there is no document, `teacher_scores` do not fit or require a gradient, or `temperature` is
        no positive number.
    RuntimeError
        As in `maxsim`.

    Examples
    --------
    >>> import torch
    >>> queries = torch.tensor([[[1.0, 0.0]]])
    >>> candidates = torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]]]])
    >>> maxsim_kl_divergence(queries, candidates, torch.tensor([[1.0, 0.0]]))
    tensor(0.)
    """
    scoring = _Scoring(normalize, reduction, masking, empty_score, implementation, backward)
    return _loss(
        queries, documents, queries_mask, documents_mask, teacher_scores,
        _Comparison(True, temperature, loss_reduction), scoring,
    )  # fmt: skip


class _Comparison(NamedTuple):
    """Whether scores are compared with a teacher's or with labels, and how."""

    divergence: bool
    temperature: float
    loss_reduction: str


class _Scoring(NamedTuple):
    """The options of `maxsim`."""

    normalize: bool
    reduction: str
    masking: str
    empty_score: float
    implementation: str
    backward: str


def _loss(
    queries: Tensor,
    documents: Tensor,
    queries_mask: Tensor | None,
    documents_mask: Tensor | None,
    target: Tensor | None,
    comparison: _Comparison,
    scoring: _Scoring,
) -> Tensor:
    if goes_straight_to_the_kernel(queries, documents) and (
        step := _step(queries, documents, queries_mask, documents_mask, target, comparison, scoring)
    ):
        return _stepped(step, queries, documents, queries_mask, documents_mask, target, comparison, scoring)
    normalize, reduction, masking, empty_score, implementation, backward = scoring
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    check_choice("backward", backward, BACKWARDS)
    queries, documents, queries_mask, documents_mask = _checked(
        queries, documents, queries_mask, documents_mask, reduction, masking
    )
    _check_comparison(comparison)
    target = _checked_target(target, comparison.divergence, queries, documents)
    if _is_plain(queries, documents) and (
        choose(implementation, queries.device, queries.dtype, queries.shape[-1]) == "triton"
    ):
        if target is not None:
            target = target.to(torch.float32 if comparison.divergence else torch.int64).contiguous()
        # Once more, with the tensors of the types that they have by now.
        if is_for_the_kernel(queries, documents) and (
            step := _step(queries, documents, queries_mask, documents_mask, target, comparison, scoring)
        ):
            return _stepped(step, queries, documents, queries_mask, documents_mask, target, comparison, scoring)
        with_gradient = needs_gradient(queries, documents)
        return _Loss.apply(queries, documents, target, queries_mask, documents_mask, comparison, scoring, with_gradient)
    scores = maxsim(
        queries, documents, queries_mask, documents_mask, normalize=normalize, reduction=reduction, masking=masking,
        empty_score=empty_score, implementation=implementation, backward=backward,
    )  # fmt: skip
    return _compare(scores, target, documents.dim() == 4, comparison)


def _compare(scores: Tensor, target: Tensor | None, own_candidates: bool, comparison: _Comparison) -> Tensor:
    """The loss of scores [Nq, N] by torch's operations."""
    divergence, temperature, loss_reduction = comparison
    log_q = (scores / temperature).log_softmax(dim=-1)
    if divergence:
        log_p = target.to(scores.dtype).log_softmax(dim=-1)  # type: ignore[union-attr]
        p = log_p.exp()
        losses = torch.where(p == 0, 0.0, p * (log_p - log_q)).sum(dim=-1)
    else:
        if target is None:
            target = torch.arange(scores.shape[0], device=scores.device)
            target = torch.zeros_like(target) if own_candidates else target
        # Not `nll_loss`, which stops the process at a label out of range on a GPU, and leaves -100 out.
        exists = (target >= 0) & (target < scores.shape[1])
        losses = -log_q.gather(1, target.long().clamp(0, scores.shape[1] - 1).unsqueeze(1)).squeeze(1)
        losses = losses * torch.where(exists, 1.0, torch.nan).to(scores.dtype)
    return losses if loss_reduction == "none" else losses.mean() if loss_reduction == "mean" else losses.sum()


def _stepped(
    step: _Launches,
    queries: Tensor,
    documents: Tensor,
    queries_mask: Tensor | None,
    documents_mask: Tensor | None,
    target: Tensor | None,
    comparison: _Comparison,
    scoring: _Scoring,
) -> Tensor:
    """Scores, loss and gradients in one sequence of launches, then the node of autograd, while the GPU computes.

    Not in the backward: it runs in another thread, whose caches are cold, and the same launches take it twice as long.
    """
    found = step.compute(queries, documents, queries_mask, documents_mask, target)
    return _Step.apply(
        queries, documents, target, queries_mask, documents_mask, found, step.rescale, comparison, scoring
    )


def _check_comparison(comparison: _Comparison) -> None:
    _, temperature, loss_reduction = comparison
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise TypeError(f"temperature must be a number, got {type(temperature).__name__}")
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    check_choice("loss_reduction", loss_reduction, LOSS_REDUCTIONS)


def _checked_target(target: Tensor | None, divergence: bool, queries: Tensor, documents: Tensor) -> Tensor | None:
    """Labels or a teacher's scores after every check."""
    shape = queries.shape[0], documents.shape[-3]
    if shape[1] == 0:
        raise ValueError("documents must be at least one for a loss, got none")
    if target is None and not divergence:
        if documents.dim() == 3 and shape[0] > shape[1]:
            raise ValueError(
                f"labels must be given where there are fewer documents than queries, got None for {shape[0]} queries "
                f"and {shape[1]} documents"
            )
        return None
    name = "teacher_scores" if divergence else "labels"
    expected = shape if divergence else shape[:1]
    if not isinstance(target, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor{'' if divergence else ' or None'}, got {type(target).__name__}")
    if tuple(target.shape) != expected:
        raise ValueError(f"{name} must have shape {list(expected)}, got {list(target.shape)}")
    if target.device != queries.device:
        raise ValueError(f"{name} must be on the device of queries, {queries.device}, got {target.device}")
    if divergence:
        if target.dtype not in FLOATING:
            raise TypeError(f"teacher_scores must be float16, bfloat16, float32 or float64, got {target.dtype}")
        if target.requires_grad:
            raise ValueError("teacher_scores must not require a gradient, as none flows to them: detach them")
    else:
        if target.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"labels must be int64 or int32, got {target.dtype}")
        if target.numel() and is_readable(target):
            least, most = target.min().item(), target.max().item()
            if least < 0 or most >= shape[1]:
                raise ValueError(f"labels must be from 0 to {shape[1] - 1}, got values from {least} to {most}")
    return target


class _Loss(torch.autograd.Function):
    """Scores and loss by kernels. Keeps the winners, the scores, and what the softmax of each query needs."""

    @staticmethod
    def forward(
        ctx, queries, documents, target, queries_mask, documents_mask, comparison, scoring, with_gradient
    ):  # fmt: skip
        normalize, reduction, masking, empty_score, *ctx.names = scoring
        ctx.normalize = normalize
        grouped_mask = None if documents_mask is None else _grouped(documents_mask, 3)
        scores, winners = _forward(
            queries, _grouped(documents), queries_mask, grouped_mask, normalize, masking == "zero", with_gradient,
            *ctx.names,
        )  # fmt: skip
        scores = _finish(scores, queries, documents, queries_mask, documents_mask, reduction, empty_score).contiguous()
        counts = None
        if reduction == "mean" and queries_mask is None:
            counts = scores.new_full((queries.shape[0],), queries.shape[1])
        elif reduction == "mean":
            counts = queries_mask.sum(dim=-1, dtype=torch.float32).clamp_(min=1)
        compared = _compared(comparison, target is not None, documents.dim() == 4)
        ctx.bound = kernels().bound_loss(tuple(scores.shape), queries.device, compared)
        with kernels().on_device(queries):
            loss, statistics = ctx.bound.forward(scores, target)
        ctx.save_for_backward(queries, documents, winners, scores, target, statistics, counts)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        queries, documents, winners, scores, target, statistics, counts = ctx.saved_tensors
        with kernels().on_device(queries):
            grad_scores = ctx.bound.gradient(grad_loss, scores, target, statistics, counts)
        options = ctx.normalize, *ctx.names
        gradients = gradients_of_scores(grad_scores, queries, documents, winners, None, options, ctx.needs_input_grad)
        return *gradients, *(None,) * 6


def _compared(comparison: _Comparison, has_target: bool, own_candidates: bool) -> Any:
    """The same in the kernels' terms."""
    divergence, temperature, loss_reduction = comparison
    return kernels().Comparison(divergence, has_target, own_candidates, temperature, loss_reduction)


class _Step(torch.autograd.Function):
    """A loss `found` with its gradients; the backward multiplies them by the gradient of the loss.

    They are all that is kept. The backward gives them away, so a second one (retain_graph=True) computes them again.
    """

    @staticmethod
    def forward(ctx, queries, documents, target, queries_mask, documents_mask, found, rescale, comparison, scoring):
        loss, *ctx.gradients = found
        ctx.save_for_backward(queries, documents, target, queries_mask, documents_mask)
        ctx.rescale = rescale
        ctx.options = comparison, scoring
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is not None and not torch.is_grad_enabled():
            ctx.rescale(grad_loss, *gradients)
        else:
            queries, documents, *others = ctx.saved_tensors
            create_graph = torch.is_grad_enabled()
            needed = [tensor for tensor in (queries, documents) if tensor.requires_grad]
            with torch.enable_grad():
                loss = _Loss.apply(queries, documents, *others, *ctx.options, True)
                found = iter(torch.autograd.grad(loss, needed, grad_loss, create_graph=create_graph))
            gradients = [next(found) if tensor.requires_grad else None for tensor in (queries, documents)]
        return *gradients, *(None,) * 7


class _Launches(NamedTuple):
    """Of a step: what computes loss and gradients, and what multiplies the gradients by that of the loss."""

    compute: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]
    rescale: Callable[[Tensor, Tensor | None, Tensor | None], None]


def _step(
    queries: Tensor,
    documents: Tensor,
    queries_mask: Tensor | None,
    documents_mask: Tensor | None,
    target: Tensor | None,
    comparison: _Comparison,
    scoring: _Scoring,
) -> _Launches | None:
    """The launches that serve such tensors, `is_for_the_kernel`, if there is nothing else to a step on them.

    The checks take twice as long as a launch and depend on no value, so they are made once for tensors of a kind.
    """
    normalize, reduction, masking, empty_score, implementation, backward = scoring
    if not (
        needs_gradient(queries, documents)
        and type(comparison.temperature) in (float, int)
        and type(comparison.loss_reduction) is type(implementation) is str
        and not normalize
        and reduction == "sum"
        and masking in MASKINGS
        and (documents_mask is None or empty_score == 0.0)
        and backward == "auto"
    ):
        return None
    return _launches_of(
        queries.shape, queries.stride(), queries.dtype, queries.device, queries.requires_grad,
        documents.shape, documents.stride(), documents.dtype, documents.device, documents.requires_grad,
        documents.data_ptr() % 16 == 0, _kind(queries_mask), _kind(documents_mask), _kind(target), masking == "zero",
        comparison, implementation,
    )  # fmt: skip


# The shape, type and device of a contiguous tensor that requires no gradient; () stands for another.
_Kind = tuple[torch.Size, torch.dtype, torch.device] | tuple[()] | None


def _kind(tensor: Tensor | None) -> _Kind:
    if tensor is None:
        return None
    if type(tensor) is not Tensor or tensor.requires_grad or not tensor.is_contiguous():
        return ()
    return tensor.shape, tensor.dtype, tensor.device


# As many as `kernels` keeps.
@functools.lru_cache(maxsize=256)
def _launches_of(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    need_queries: bool,
    documents_shape: torch.Size,
    documents_strides: tuple[int, ...],
    documents_dtype: torch.dtype,
    documents_device: torch.device,
    need_documents: bool,
    aligned: bool,
    queries_mask: _Kind,
    documents_mask: _Kind,
    target: _Kind,
    zero_masked: bool,
    comparison: _Comparison,
    implementation: str,
) -> _Launches | None:
    """The launches for such tensors, or None where an error is due or they do not serve.

    They do not serve float16: a loss is scaled there so that small gradients are not lost in rounding, and the scale is
    not known before the backward.
    """
    divergence, temperature, loss_reduction = comparison
    own_candidates = len(documents_shape) == 4
    if (
        len(shape) != 3
        or len(documents_shape) not in (3, 4)
        or (own_candidates and documents_shape[0] != shape[0])
        or dtype != torch.bfloat16
        or documents_dtype != dtype
        or documents_device != device
        or not are_halves_of_one_size(shape, strides, dtype, documents_shape, documents_strides)
        or implementation not in ("auto", "triton")
        or choose(implementation, device, dtype, shape[-1]) != "triton"
        or not 0.0 < temperature < math.inf
        or loss_reduction not in ("mean", "sum")
    ):
        return None
    for mask, expected in ((queries_mask, shape[:-1]), (documents_mask, documents_shape[:-1])):
        if mask is not None and mask != (expected, torch.bool, device):
            return None
    if target is None:
        if divergence or (not own_candidates and shape[0] > documents_shape[0]):
            return None
    elif divergence:
        if target != ((shape[0], documents_shape[-3]), torch.float32, device):
            return None
    elif target != (shape[:1], torch.int64, device):
        return None
    sizes = [math.prod(shape) * need_queries, math.prod(documents_shape) * need_documents]
    if not own_candidates:
        documents_shape, documents_strides = (1, *documents_shape), (0, *documents_strides)  # type: ignore[assignment]
    compute = kernels().bound_step(
        shape, strides, dtype, device, documents_shape, documents_strides, aligned, queries_mask is not None,
        documents_mask is not None, zero_masked and documents_mask is not None, need_queries, need_documents,
        product_precision(dtype),
        _compared(comparison, target is not None, own_candidates),
    )  # fmt: skip
    return _Launches(compute, kernels().bound_rescale(*sizes, device))
