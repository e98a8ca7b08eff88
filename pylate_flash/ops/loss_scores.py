"""Losses of scores by torch's operations: the definitions, which autograd differentiates, and what computes with them.

Wherever scores are there these are what runs: for the loss of each query, and after scores computed in blocks of plain
torch, a chunk of queries after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.plan_backward import chunks_of
from ..problem import CROSS_ENTROPY, DIVERGENCE, Comparison, Options, Targets, Tensors, accumulation_dtype
from .call_parts import part_of, rows_of
from .checks import check, checked_problem
from .compute import compute, compute_gradients
from .loss_call import LossResult, labels_of

# What PyLate adds to the range of a query's scores before it divides by it.
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

    `labels` None: document i is the right one of query i. A label out of range, or left out, makes the loss and its
    gradient NaN.
    """
    labels = torch.arange(scores.shape[0], device=scores.device) if labels is None else labels.long()
    found = _labelled(scores, labels, exclude, margin)
    # Twice, as no gradient of the temperature is to meet what is left out.
    logits = (scores.masked_fill(found.left_out, 0.0) / temperature).masked_fill(found.left_out, -torch.inf)
    # Not `nll_loss`, which stops the process at a label out of range on a GPU, and leaves -100 out.
    losses = -logits.log_softmax(dim=1).gather(1, found.at).squeeze(1)
    if symmetric:
        # Column i holds what all queries score the right document of query i.
        losses = (losses - logits.index_select(1, found.at.squeeze(1)).log_softmax(dim=0).diagonal()) / 2
    return reduced(losses * torch.where(found.valid, 1.0, torch.nan).to(scores.dtype), loss_reduction)


def kl_divergence_reference(
    scores: Tensor,
    teacher_scores: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    teacher_temperature: float = 1.0,
    normalize_scores: bool = False,
    loss_reduction: str = "mean",
) -> Tensor:
    """The definition of the loss of `maxsim_kl_divergence` over scores [Nq, N], in their type."""
    if normalize_scores:
        least, most = scores.min(dim=1, keepdim=True).values, scores.max(dim=1, keepdim=True).values
        scores = (scores - least) / (most - least + RANGE_EPSILON)
    log_q = (scores / temperature).log_softmax(dim=1)
    log_p = (teacher_scores.to(scores.dtype) / teacher_temperature).log_softmax(dim=1)
    p = log_p.exp()
    return reduced(torch.where(p == 0, 0.0, p * (log_p - log_q)).sum(dim=1), loss_reduction)


def margin_mse_reference(scores: Tensor, teacher_scores: Tensor, *, loss_reduction: str = "mean") -> Tensor:
    """The definition of the loss of `maxsim_margin_mse` over scores [Nq, N], in their type."""
    margins, wanted = (values[:, :1] - values[:, 1:] for values in (scores, teacher_scores.to(scores.dtype)))
    return reduced((margins - wanted).square().mean(dim=1), loss_reduction)


class _Labelled(NamedTuple):
    """Scores beside their labels: which may be right, which document is, and which are left out of the denominator."""

    valid: Tensor
    at: Tensor
    positives: Tensor
    is_label: Tensor
    left_out: Tensor


def _labelled(scores: Tensor, labels: Tensor, exclude: Tensor | None, margin: float | None) -> _Labelled:
    n_documents = scores.shape[1]
    at = labels.clamp(0, n_documents - 1).unsqueeze(1)
    valid = (labels >= 0) & (labels < n_documents)
    scores = scores.detach()
    left_out = torch.zeros_like(scores, dtype=torch.bool)
    if exclude is not None:
        left_out |= exclude
        valid &= ~exclude.gather(1, at).squeeze(1)
    positives = scores.gather(1, at).where(valid.unsqueeze(1), torch.nan)
    if margin is not None:
        left_out |= scores > positives - margin
    is_label = torch.arange(n_documents, device=scores.device) == at
    return _Labelled(valid, at, positives.squeeze(1), is_label, left_out & ~is_label)


class Compared(NamedTuple):
    """The losses [n] of queries, and of a cross entropy what its statistics are means of.

    `hits`: whether the right document scores higher than all others; `positives`: its score; `hardest`: the highest of
    the others, -inf where there is none.
    """

    losses: Tensor
    hits: Tensor | None = None
    positives: Tensor | None = None
    hardest: Tensor | None = None


def compared(scores: Tensor, targets: Targets, comparison: Comparison, own_candidates: bool) -> Compared:
    """Compare scores [n, N] with targets of as many queries."""
    how: dict[str, Any]
    temperature: float | Tensor = comparison.temperature
    if targets.temperature is not None:
        # Half a number is widened, as its square leaves the range of half.
        temperature = targets.temperature.to(accumulation_dtype(targets.temperature.dtype))
    if comparison.kind == CROSS_ENTROPY:
        labels = labels_of(targets.target, scores.shape[0], own_candidates, scores.device)
        how = {"exclude": targets.exclude, "margin": comparison.margin, "symmetric": comparison.symmetric}
        losses = cross_entropy_reference(scores, labels, **how, temperature=temperature, loss_reduction="none")
        if not comparison.with_statistics:
            return Compared(losses)
        _, _, positives, is_label, left_out = _labelled(scores, labels, targets.exclude, comparison.margin)
        hardest = scores.detach().masked_fill(left_out | is_label, -torch.inf).amax(dim=1)
        return Compared(losses, positives > hardest, positives, hardest)
    assert targets.target is not None
    if comparison.kind != DIVERGENCE:
        return Compared(margin_mse_reference(scores, targets.target, loss_reduction="none"))
    how = {"temperature": temperature, "teacher_temperature": comparison.teacher_temperature}
    how |= {"normalize_scores": comparison.normalize_scores, "loss_reduction": "none"}
    return Compared(kl_divergence_reference(scores, targets.target, **how))


def differentiated(
    scores: Tensor, targets: Targets, comparison: Comparison, own_candidates: bool
) -> tuple[Compared, Tensor, Tensor | None]:
    """What `compared` returns, the gradient of the sum of the losses, and its derivative by a learned temperature.

    `torch.func` has no gradient under the hooks of activation checkpointing.
    """
    learned = targets.temperature
    with _autograd():
        leaves = [scores.detach().requires_grad_()]
        if learned is not None:
            # The slope is a sum over all scores, for which a half temperature has too few bits.
            leaves.append(learned.detach().to(scores.dtype).requires_grad_())
            targets = targets._replace(temperature=leaves[1])
        found = compared(leaves[0], targets, comparison, own_candidates)
        gradients = torch.autograd.grad(found.losses.sum(), leaves, allow_unused=True, materialize_grads=True)
    found = found._replace(losses=found.losses.detach())
    return found, gradients[0], None if learned is None else gradients[1]


@contextmanager
def _autograd() -> Iterator[None]:
    """Autograd inside an operator, which runs below it; saved tensors are no business of checkpointing around it."""
    seen = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with torch.enable_grad(), seen, torch.autograd.graph.saved_tensors_hooks(_same, _same):
        yield


def _same(tensor: Tensor) -> Tensor:
    return tensor


def reduced(losses: Tensor, loss_reduction: str) -> Tensor:
    return losses if loss_reduction == "none" else losses.mean() if loss_reduction == "mean" else losses.sum()


def statistics_of(found: Compared) -> Tensor:
    """Share of hits, mean score of the right documents, mean of the hardest others of queries that have some: [3]."""
    assert found.hits is not None
    assert found.positives is not None
    assert found.hardest is not None
    some = found.hardest != -torch.inf
    hardest = found.hardest.where(some, 0.0).sum() / some.sum()
    return torch.stack([found.hits.to(hardest.dtype).mean(), found.positives.mean(), hardest])


def loss_in_blocks(
    tensors: Tensors, targets: Targets, options: Options, comparison: Comparison, needs: tuple[bool, bool, bool]
) -> LossResult:
    """A loss that is reduced, and what is needed of its gradients, as `kernel_calls.loss`; no size is 0.

    Half embeddings are widened first, so that their gradients are summed in float32 whatever the chunks. A symmetric
    loss compares all scores at once, and has one chunk.
    """
    # Before anything is widened.
    check(tensors)
    need_queries, need_documents, need_slope = needs
    queries, documents, dtype = tensors.queries, tensors.documents, tensors.queries.dtype
    wide = accumulation_dtype(dtype)
    tensors = tensors._replace(queries=queries.to(wide), documents=documents.to(wide))
    options = options._replace(implementation="blocked")
    problem = checked_problem(tensors, options, need_queries or need_documents)
    own, n_queries = documents.dim() == 4, problem.n_queries
    step = n_queries if comparison.symmetric else chunks_of(problem, comparison.max_scratch_bytes).queries
    share = 1.0 / n_queries if comparison.loss_reduction == "mean" else 1.0
    target = targets.target
    if comparison.kind == CROSS_ENTROPY:
        target = labels_of(target, n_queries, own, queries.device)
    results, slopes = [], []
    grad_queries = grad_documents = None
    for first in range(0, n_queries, step):
        chunk = slice(first, first + step)
        of_chunk = rows_of(tensors, chunk)
        compared_with = Targets(part_of(target, chunk), part_of(targets.exclude, chunk), targets.temperature)
        scores, argmax = compute(of_chunk, options, problem.with_argmax)
        if not any(needs):
            results.append(compared(scores, compared_with, comparison, own))
            continue
        result, grad_scores, slope = differentiated(scores, compared_with, comparison, own)
        results.append(result)
        if slope is not None:
            slopes.append(slope)
        if argmax is None:
            continue
        found = compute_gradients(of_chunk, options, grad_scores * share, argmax, need_queries, need_documents)
        if found[0] is not None:
            grad_queries = _placed(grad_queries, found[0], chunk, n_queries)
        if found[1] is not None and own:
            grad_documents = _placed(grad_documents, found[1], chunk, n_queries)
        elif found[1] is not None:
            grad_documents = found[1] if grad_documents is None else grad_documents.add_(found[1])
    result = _joined(results)
    held = torch.float32 if dtype == torch.float16 else dtype
    return LossResult(
        reduced(result.losses, comparison.loss_reduction),
        statistics_of(result) if comparison.with_statistics else None,
        None if grad_queries is None else grad_queries.to(held),
        None if grad_documents is None else grad_documents.to(held),
        torch.stack(slopes).sum() * share if need_slope else None,
    )


def _placed(total: Tensor | None, part: Tensor, chunk: slice, n_queries: int) -> Tensor:
    """A chunk's part [n, ...] in its place of the total [Nq, ...], which is not made where the part is all of it."""
    if len(part) == n_queries:
        return part
    if total is None:
        total = part.new_empty(n_queries, *part.shape[1:])
    total[chunk] = part
    return total


def _joined(results: list[Compared]) -> Compared:
    losses, *others = (None if of[0] is None else torch.cat(of) for of in zip(*results, strict=True))
    assert losses is not None
    return Compared(losses, *others)
