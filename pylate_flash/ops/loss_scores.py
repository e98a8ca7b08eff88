"""Losses of scores in plain torch: the reference definitions, differentiable by autograd, and the blocked losses.

These run whenever the scores are materialized: for per-query losses, and after scores computed in blocks of plain
torch, one chunk of queries at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.plan_backward import chunks_of
from ..problem import CROSS_ENTROPY, DIVERGENCE, Comparison, Options, Targets, Tensors, accumulation_dtype
from .call_parts import part_of, rows_of
from .checks import check, checked_problem
from .compute import compute, compute_gradients
from .loss_call import LossResult, labels_of

# Epsilon that PyLate adds to the range of a query's scores, which it divides by.
RANGE_EPSILON = 1e-8


def cross_entropy_reference(
    scores: Tensor,
    labels: Tensor | None = None,
    *,
    exclude: Tensor | None = None,
    margin: float | None = None,
    temperature: float | Tensor = 1.0,
    symmetric: bool = False,
    loss_reduction: str = "mean",
) -> Tensor:
    """The definition of the loss of `maxsim_cross_entropy` over scores [Nq, N], in their type.

    `labels` None: document i is the positive of query i. A label that is out of range, or excluded, makes the loss and
    its gradient NaN.
    """
    labels = torch.arange(scores.shape[0], device=scores.device) if labels is None else labels.long()
    labelled = _labelled(scores, labels, exclude, margin)
    # Masked twice, to keep excluded scores out of the gradient of the temperature.
    logits = (scores.masked_fill(labelled.left_out, 0.0) / temperature).masked_fill(labelled.left_out, -torch.inf)
    # Not `nll_loss`: on a GPU it aborts the process for a label out of range, and it ignores -100.
    losses = -logits.log_softmax(dim=1).gather(1, labelled.at).squeeze(1)
    if symmetric:
        # Column i holds the scores of all queries for the positive of query i.
        losses = (losses - logits.index_select(1, labelled.at.squeeze(1)).log_softmax(dim=0).diagonal()) / 2
    return reduced(losses * torch.where(labelled.valid, 1.0, torch.nan).to(scores.dtype), loss_reduction)


def kl_divergence_reference(
    scores: Tensor,
    teacher_scores: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    teacher_temperature: float | Tensor = 1.0,
    normalize_scores: bool = False,
    loss_reduction: str = "mean",
) -> Tensor:
    """The definition of the loss of `maxsim_kl_divergence` over scores [Nq, N], in their type."""
    if normalize_scores:
        low, high = scores.min(dim=1, keepdim=True).values, scores.max(dim=1, keepdim=True).values
        scores = (scores - low) / (high - low + RANGE_EPSILON)
    log_q = (scores / temperature).log_softmax(dim=1)
    log_p = (teacher_scores.to(scores.dtype) / teacher_temperature).log_softmax(dim=1)
    p = log_p.exp()
    return reduced(torch.where(p == 0, 0.0, p * (log_p - log_q)).sum(dim=1), loss_reduction)


def margin_mse_reference(scores: Tensor, teacher_scores: Tensor, *, loss_reduction: str = "mean") -> Tensor:
    """The definition of the loss of `maxsim_margin_mse` over scores [Nq, N], in their type."""
    margins, teacher_margins = (values[:, :1] - values[:, 1:] for values in (scores, teacher_scores.to(scores.dtype)))
    return reduced((margins - teacher_margins).square().mean(dim=1), loss_reduction)


class _Labelled(NamedTuple):
    """Whether labels are valid [n], indices [n, 1] and scores [n] of positives, masks [n, N] of labels and left out."""

    valid: Tensor
    at: Tensor
    positives: Tensor
    is_label: Tensor
    left_out: Tensor


def _labelled(scores: Tensor, labels: Tensor, exclude: Tensor | None, margin: float | None) -> _Labelled:
    n_documents = scores.shape[1]
    index = labels.clamp(0, n_documents - 1).unsqueeze(1)
    valid = (labels >= 0) & (labels < n_documents)
    scores = scores.detach()
    left_out = torch.zeros_like(scores, dtype=torch.bool)
    if exclude is not None:
        left_out |= exclude
        valid &= ~exclude.gather(1, index).squeeze(1)
    positives = scores.gather(1, index).where(valid.unsqueeze(1), torch.nan)
    if margin is not None:
        left_out |= scores > positives - margin
    is_label = torch.arange(n_documents, device=scores.device) == index
    return _Labelled(valid, index, positives.squeeze(1), is_label, left_out & ~is_label)


class Compared(NamedTuple):
    """Per-query losses [n] and, for a cross entropy with statistics, the values [n] that these average.

    `hits`: whether the positive scores higher than all other documents; `positives`: its score; `hardest`: the highest
    score of the others, -inf if there are none.
    """

    losses: Tensor
    hits: Tensor | None = None
    positives: Tensor | None = None
    hardest: Tensor | None = None


def compared(scores: Tensor, targets: Targets, comparison: Comparison, own_candidates: bool) -> Compared:
    """Per-query losses of scores [n, N], given the targets of these n queries."""
    kwargs: dict[str, Any]
    temperature: float | Tensor = comparison.temperature
    if targets.temperature is not None:
        # A half temperature is widened, because its square may leave the range of half.
        temperature = targets.temperature.to(accumulation_dtype(targets.temperature.dtype))
    if comparison.kind == CROSS_ENTROPY:
        labels = labels_of(targets.target, scores.shape[0], own_candidates, scores.device)
        kwargs = {"exclude": targets.exclude, "margin": comparison.margin, "symmetric": comparison.symmetric}
        losses = cross_entropy_reference(scores, labels, **kwargs, temperature=temperature, loss_reduction="none")
        if not comparison.with_statistics:
            return Compared(losses)
        _, _, positives, is_label, left_out = _labelled(scores, labels, targets.exclude, comparison.margin)
        hardest = scores.detach().masked_fill(left_out | is_label, -torch.inf).amax(dim=1)
        return Compared(losses, positives > hardest, positives, hardest)
    assert targets.target is not None
    if comparison.kind != DIVERGENCE:
        return Compared(margin_mse_reference(scores, targets.target, loss_reduction="none"))
    kwargs = {"temperature": temperature, "teacher_temperature": comparison.teacher_temperature}
    kwargs |= {"normalize_scores": comparison.normalize_scores, "loss_reduction": "none"}
    return Compared(kl_divergence_reference(scores, targets.target, **kwargs))


def differentiated(
    scores: Tensor, targets: Targets, comparison: Comparison, own_candidates: bool
) -> tuple[Compared, Tensor, Tensor | None]:
    """The result of `compared`, the gradient of the summed losses, and their derivative by a learned temperature.

    Not by `torch.func`, which cannot differentiate under the hooks of activation checkpointing.
    """
    learned = targets.temperature
    # Enable autograd inside an operator, which runs below it; hide saved tensors from the hooks of checkpointing.
    autograd_enabled = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with torch.enable_grad(), autograd_enabled, torch.autograd.graph.saved_tensors_hooks(_same, _same):
        leaves = [scores.detach().requires_grad_()]
        if learned is not None:
            # The slope sums over all scores, for which half has too few bits.
            leaves.append(learned.detach().to(scores.dtype).requires_grad_())
            targets = targets._replace(temperature=leaves[1])
        result = compared(leaves[0], targets, comparison, own_candidates)
        gradients = torch.autograd.grad(result.losses.sum(), leaves, allow_unused=True, materialize_grads=True)
    result = result._replace(losses=result.losses.detach())
    return result, gradients[0], None if learned is None else gradients[1]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def reduced(losses: Tensor, loss_reduction: str) -> Tensor:
    return losses if loss_reduction == "none" else losses.mean() if loss_reduction == "mean" else losses.sum()


def statistics_of(result: Compared) -> Tensor:
    """[3]: the share of hits, the mean score of positives, and the mean hardest negative of queries that have one."""
    assert result.hits is not None
    assert result.positives is not None
    assert result.hardest is not None
    has_others = result.hardest != -torch.inf
    hardest = result.hardest.where(has_others, 0.0).sum() / has_others.sum()
    return torch.stack([result.hits.to(hardest.dtype).mean(), result.positives.mean(), hardest])


def loss_in_blocks(
    tensors: Tensors, targets: Targets, options: Options, comparison: Comparison, needs: tuple[bool, bool, bool]
) -> LossResult:
    """A reduced loss and the gradients that are needed, as `kernel_calls.loss`; no size is 0.

    Half embeddings are widened first, so that their gradients accumulate in float32 whatever the chunks. A symmetric
    loss needs all scores at once, so it takes a single chunk.
    """
    # Check before the embeddings are widened.
    check(tensors)
    need_queries, need_documents, need_slope = needs
    queries, documents, dtype = tensors.queries, tensors.documents, tensors.queries.dtype
    acc_dtype = accumulation_dtype(dtype)
    tensors = tensors._replace(queries=queries.to(acc_dtype), documents=documents.to(acc_dtype))
    options = options._replace(implementation="blocked")
    problem = checked_problem(tensors, options, need_queries or need_documents)
    own_candidates, n_queries = documents.dim() == 4, problem.n_queries
    step = n_queries if comparison.symmetric else chunks_of(problem, comparison.max_scratch_bytes).queries
    weight = 1.0 / n_queries if comparison.loss_reduction == "mean" else 1.0
    target = targets.target
    if comparison.kind == CROSS_ENTROPY:
        target = labels_of(target, n_queries, own_candidates, queries.device)
    results, slopes = [], []
    grad_queries = grad_documents = None
    for first in range(0, n_queries, step):
        chunk = slice(first, first + step)
        chunk_tensors = rows_of(tensors, chunk)
        chunk_targets = Targets(part_of(target, chunk), part_of(targets.exclude, chunk), targets.temperature)
        scores, argmax = compute(chunk_tensors, options, problem.with_argmax)
        if not any(needs):
            results.append(compared(scores, chunk_targets, comparison, own_candidates))
            continue
        result, grad_scores, slope = differentiated(scores, chunk_targets, comparison, own_candidates)
        results.append(result)
        if slope is not None:
            slopes.append(slope)
        if argmax is None:
            continue
        grads = compute_gradients(chunk_tensors, options, grad_scores * weight, argmax, need_queries, need_documents)
        if grads[0] is not None:
            grad_queries = _placed(grad_queries, grads[0], chunk, n_queries)
        if grads[1] is not None and own_candidates:
            grad_documents = _placed(grad_documents, grads[1], chunk, n_queries)
        elif grads[1] is not None:
            grad_documents = grads[1] if grad_documents is None else grad_documents.add_(grads[1])
    losses, *rest = (None if fields[0] is None else torch.cat(fields) for fields in zip(*results, strict=True))
    assert losses is not None
    result = Compared(losses, *rest)
    grad_dtype = torch.float32 if dtype == torch.float16 else dtype
    return LossResult(
        reduced(result.losses, comparison.loss_reduction),
        statistics_of(result) if comparison.with_statistics else None,
        None if grad_queries is None else grad_queries.to(grad_dtype),
        None if grad_documents is None else grad_documents.to(grad_dtype),
        torch.stack(slopes).sum() * weight if need_slope else None,
    )


def _placed(total: Tensor | None, part: Tensor, chunk: slice, n_queries: int) -> Tensor:
    """Copy a chunk's part [n, ...] into the total [Nq, ...], allocated on first use; a full part is returned as is."""
    if len(part) == n_queries:
        return part
    if total is None:
        total = part.new_empty(n_queries, *part.shape[1:])
    total[chunk] = part
    return total
