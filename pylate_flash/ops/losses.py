"""Losses over MaxSim scores: the cross entropy of contrastive training, and the divergence of distillation.

    cross entropy    mean over queries i of  -log q[i, label of i]
    divergence       mean over queries i of  sum over documents j of  p[i, j] log(p[i, j] / q[i, j])

with q[i] = softmax(scores[i] / temperature), and p[i] the softmax of a teacher's scores. (van den Oord et al.,
"Representation Learning with Contrastive Predictive Coding", 2018; Hinton et al., "Distilling the Knowledge in a Neural
Network", 2015.) The definitions take any scores, and autograd differentiates them; over `maxsim_reference` they are
what the operations here are tested against, and nothing else.

Where the kernels serve, scores, loss and both gradients are one operator, `pylate_flash::maxsim_loss`: the gradients
are computed with the loss, and multiplied by its gradient in the backward. Not of float16, where a loss is scaled so
that small gradients are not lost in rounding, and the scale is not known before the backward; nor of a loss of each
query. There, and on other devices, torch's operations follow `maxsim`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.select import choose
from .checks import FLOATING, check_choice, is_readable, no_second_derivative
from .compute import kernels
from .maxsim import checked, is_plain, needs_gradient, scores_of
from .problem import Options, Tensors, check

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
    *,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    labels: Tensor | None = None,
    temperature: float = 1.0,
    loss_reduction: str = "mean",
    normalize: bool = False,
    reduction: str = "sum",
    masking: str = "exclude",
    empty_score: float = 0.0,
    implementation: str = "auto",
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
    normalize, reduction, masking, empty_score, implementation
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
    tensors = Tensors(queries, documents, queries_mask, documents_mask)
    options = Options(0, 0, 0, bool(normalize), reduction, masking, empty_score, implementation)
    return _loss(tensors, labels, options, _Comparison(False, temperature, loss_reduction))


def maxsim_kl_divergence(
    queries: Tensor,
    documents: Tensor,
    teacher_scores: Tensor,
    *,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    temperature: float = 1.0,
    loss_reduction: str = "mean",
    normalize: bool = False,
    reduction: str = "sum",
    masking: str = "exclude",
    empty_score: float = 0.0,
    implementation: str = "auto",
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
    normalize, reduction, masking, empty_score, implementation
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
    tensors = Tensors(queries, documents, queries_mask, documents_mask)
    options = Options(0, 0, 0, bool(normalize), reduction, masking, empty_score, implementation)
    return _loss(tensors, teacher_scores, options, _Comparison(True, temperature, loss_reduction))


class _Comparison(NamedTuple):
    """Whether scores are compared with a teacher's or with labels, and how."""

    divergence: bool
    temperature: float
    loss_reduction: str


def _loss(tensors: Tensors, target: Tensor | None, options: Options, comparison: _Comparison) -> Tensor:
    _check_comparison(comparison)
    tensors = checked("maxsim", tensors, options)
    queries, documents, queries_mask, documents_mask, *_ = tensors
    # The operators make every check; those of the target rely on this much.
    if queries.dim() != 3 or documents.dim() not in (3, 4) or not queries.is_floating_point():
        check(tensors)
    target = _checked_target(target, comparison.divergence, queries, documents)
    if (
        _chosen(options.implementation, queries.device, queries.dtype, queries.shape[-1]) == "blocked"
        or queries.dtype == torch.float16
        or comparison.loss_reduction == "none"
        or 0 in queries.shape
        or 0 in documents.shape
    ):
        return _compare(scores_of("maxsim", tensors, options), target, documents.dim() == 4, comparison)
    if target is not None:
        target = (target.float() if comparison.divergence else target).contiguous()
    return _maxsim_loss(queries, documents, queries_mask, documents_mask, target, *options[3:], *comparison)


@torch.compiler.assume_constant_result
def _chosen(implementation: str, device: torch.device, dtype: torch.dtype, size: int) -> str:
    """`choose`, into which a compiler that traces a loss need not look."""
    return choose(implementation, device, dtype, size)


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


_LIBRARY = torch.library.Library("pylate_flash", "FRAGMENT")
_CALL = (
    "Tensor queries, Tensor documents, Tensor? queries_mask, Tensor? documents_mask, Tensor? target, bool normalize, "
    "str reduction, str masking, float empty_score, str implementation, bool divergence, float temperature, "
    "str loss_reduction"
)
_LIBRARY.define(f"maxsim_loss({_CALL}) -> Tensor")
# What `maxsim_loss` is in a graph that has a backward: the loss and its gradients.
_LIBRARY.define(f"maxsim_loss_gradients({_CALL}, bool need_queries, bool need_documents) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(
    "maxsim_loss_backward(Tensor grad_loss, Tensor queries, Tensor documents, Tensor grad_queries, "
    "Tensor grad_documents) -> (Tensor, Tensor)"
)
_maxsim_loss = torch.ops.pylate_flash.maxsim_loss.default
_maxsim_loss_gradients = torch.ops.pylate_flash.maxsim_loss_gradients.default
_maxsim_loss_backward = torch.ops.pylate_flash.maxsim_loss_backward.default


_N_TENSORS = 5


def _computed(tensors: tuple, options: tuple, needs: tuple[bool, bool]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The loss and the gradients that are needed, from the operator's arguments: tensors, and what follows them."""
    queries, documents, queries_mask, documents_mask, target = tensors
    return kernels().loss(
        Tensors(queries, documents, queries_mask, documents_mask), target, Options(0, 0, 0, *options[:-3]),
        options[-3:], needs,
    )  # fmt: skip


def _loss_alone(*arguments) -> Tensor:
    return _computed(arguments[:_N_TENSORS], arguments[_N_TENSORS:], (False, False))[0]


def _loss_and_gradients(*arguments) -> tuple[Tensor, ...]:
    loss, *gradients = _computed(arguments[:_N_TENSORS], arguments[_N_TENSORS:-2], arguments[-2:])
    return loss, *[loss.new_empty(0) if gradient is None else gradient for gradient in gradients]


class _MaxsimLoss(torch.autograd.Function):
    """The operator where a gradient is needed: computes the gradients with the loss, and keeps them.

    The backward multiplies them by the gradient of the loss and gives them away, so that a second one
    (retain_graph=True) computes them again. They are not computed in the backward, which runs in another thread, whose
    caches are cold: the same launches take the host twice as long there.
    """

    @staticmethod
    def forward(ctx, options, *tensors):
        needs, ctx.plain = ctx.needs_input_grad[1:3], is_plain(*tensors[:2])
        if ctx.plain:
            loss, *ctx.gradients = _computed(tensors, options, needs)
        else:
            loss, *ctx.gradients = _maxsim_loss_gradients(*tensors, *options, *needs)
        ctx.save_for_backward(*tensors)
        ctx.options = options
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        gradients, eager = ctx.gradients, ctx.plain and is_plain(grad_loss)
        if eager:
            ctx.gradients = None
            if gradients is None:
                gradients = _computed(ctx.saved_tensors, ctx.options, ctx.needs_input_grad[1:3])[1:]
        if eager and not torch.is_grad_enabled():
            kernels().rescale_gradients(grad_loss, *gradients)
        else:
            given = [grad_loss.new_empty(0) if gradient is None else gradient for gradient in gradients]
            found = _maxsim_loss_backward(grad_loss, *ctx.saved_tensors[:2], *given)
            needs = ctx.needs_input_grad[1:3]
            gradients = [gradient if need else None for gradient, need in zip(found, needs, strict=True)]
        return None, *gradients, *_NO_GRADIENTS


# Of masks and target.
_NO_GRADIENTS = (None,) * (_N_TENSORS - 2)


def _differentiable(*arguments) -> Tensor:
    """The operator for tensors that may require a gradient."""
    if needs_gradient(*arguments[:2]):
        return _MaxsimLoss.apply(arguments[_N_TENSORS:], *arguments[:_N_TENSORS])
    if is_plain(*arguments[:2]):
        return _loss_alone(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return _maxsim_loss(*arguments)


def _loss_shape(*arguments) -> Tensor:
    check(Tensors(*arguments[:4]))
    return arguments[0].new_empty((), dtype=torch.float32)


def _gradient_shapes(*arguments) -> tuple[Tensor, ...]:
    queries, documents, *_, need_queries, need_documents = arguments
    loss = _loss_shape(*arguments)
    return loss, *(
        torch.empty_like(tensor, memory_format=torch.contiguous_format) if need else loss.new_empty(0)
        for tensor, need in ((queries, need_queries), (documents, need_documents))
    )


_LIBRARY.impl("maxsim_loss", _loss_alone, "CompositeExplicitAutograd")
_LIBRARY.impl("maxsim_loss", _differentiable, "Autograd")
_LIBRARY.impl("maxsim_loss_gradients", _loss_and_gradients, "CompositeExplicitAutograd")
_LIBRARY.impl(
    "maxsim_loss_backward",
    lambda grad_loss, queries, documents, *gradients: tuple(
        [(gradient * grad_loss).to(gradient.dtype) for gradient in gradients]
    ),
    "CompositeExplicitAutograd",
)
torch.library.register_fake("pylate_flash::maxsim_loss", lambda queries, *_: queries.new_empty((), dtype=torch.float32))
torch.library.register_fake("pylate_flash::maxsim_loss_gradients", _gradient_shapes)
torch.library.register_fake(
    "pylate_flash::maxsim_loss_backward",
    lambda grad_loss, queries, documents, *gradients: tuple([torch.empty_like(gradient) for gradient in gradients]),
)
torch.library.register_autograd("pylate_flash::maxsim_loss_backward", no_second_derivative("maxsim"))
