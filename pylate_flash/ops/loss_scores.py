"""Losses of scores by torch's operations, which autograd differentiates."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..problem import CROSS_ENTROPY, DIVERGENCE, Comparison, Targets, accumulation_dtype
from .loss_call import labels_of

# What PyLate adds to the range of a query's scores before it divides by it.
RANGE_EPSILON = 1e-8


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
    if comparison.kind == CROSS_ENTROPY:
        labels = labels_of(targets.target, scores.shape[0], own_candidates, scores.device)
        return _cross_entropy(scores, labels, targets, comparison)
    assert targets.target is not None
    compare = _divergence if comparison.kind == DIVERGENCE else _margin_mse
    return Compared(compare(scores, targets.target.to(scores.dtype), targets, comparison))


def temperature_of(targets: Targets, comparison: Comparison) -> Tensor | float:
    """What scores are divided by; half a tensor is widened, as its square leaves the range of half."""
    if targets.temperature is None:
        return comparison.temperature
    return targets.temperature.to(accumulation_dtype(targets.temperature.dtype))


class _Labelled(NamedTuple):
    """Scores beside their labels: which may be right, which document is, and which are left out of the denominator."""

    valid: Tensor
    at: Tensor
    positives: Tensor
    is_label: Tensor
    left_out: Tensor


def _labelled(scores: Tensor, labels: Tensor, targets: Targets, comparison: Comparison) -> _Labelled:
    n_documents = scores.shape[1]
    at = labels.clamp(0, n_documents - 1).unsqueeze(1)
    valid = (labels >= 0) & (labels < n_documents)
    left_out = torch.zeros_like(scores, dtype=torch.bool)
    if targets.exclude is not None:
        left_out |= targets.exclude
        valid &= ~targets.exclude.gather(1, at).squeeze(1)
    positives = scores.gather(1, at).where(valid.unsqueeze(1), torch.nan)
    if comparison.margin is not None:
        left_out |= scores > positives - comparison.margin
    is_label = torch.arange(n_documents, device=scores.device) == at
    return _Labelled(valid, at, positives.squeeze(1), is_label, left_out & ~is_label)


def _logits(scores: Tensor, left_out: Tensor, targets: Targets, comparison: Comparison) -> Tensor:
    # Twice, as no gradient of the temperature is to meet what is left out.
    scores = scores.masked_fill(left_out, 0.0) / temperature_of(targets, comparison)
    return scores.masked_fill(left_out, -torch.inf)


def _cross_entropy(scores: Tensor, labels: Tensor, targets: Targets, comparison: Comparison) -> Compared:
    valid, at, positives, is_label, left_out = _labelled(scores, labels, targets, comparison)
    logits = _logits(scores, left_out, targets, comparison)
    # Not `nll_loss`, which stops the process at a label out of range on a GPU, and leaves -100 out.
    losses = -logits.log_softmax(dim=1).gather(1, at).squeeze(1)
    if comparison.symmetric:
        # Column i holds what all queries score the right document of query i.
        losses = (losses - logits.index_select(1, at.squeeze(1)).log_softmax(dim=0).diagonal()) / 2
    losses = losses * torch.where(valid, 1.0, torch.nan).to(scores.dtype)
    if not comparison.with_statistics:
        return Compared(losses)
    positives, hardest = positives.detach(), scores.detach().masked_fill(left_out | is_label, -torch.inf).amax(dim=1)
    return Compared(losses, positives > hardest, positives, hardest)


def _divergence(scores: Tensor, teacher: Tensor, targets: Targets, comparison: Comparison) -> Tensor:
    if comparison.normalize_scores:
        least, most = scores.min(dim=1, keepdim=True).values, scores.max(dim=1, keepdim=True).values
        scores = (scores - least) / (most - least + RANGE_EPSILON)
    log_q = (scores / temperature_of(targets, comparison)).log_softmax(dim=1)
    log_p = (teacher / comparison.teacher_temperature).log_softmax(dim=1)
    p = log_p.exp()
    return torch.where(p == 0, 0.0, p * (log_p - log_q)).sum(dim=1)


def _margin_mse(scores: Tensor, teacher: Tensor, targets: Targets, comparison: Comparison) -> Tensor:
    margins, wanted = (values[:, :1] - values[:, 1:] for values in (scores, teacher))
    return (margins - wanted).square().mean(dim=1)


def gradient_of(
    scores: Tensor, targets: Targets, comparison: Comparison, own_candidates: bool
) -> tuple[Tensor, Tensor]:
    """The gradient [n, N] of the sum of the losses of `compared`, and its derivative by the temperature.

    Written out, as operators compute where autograd does not see.
    """
    temperature = temperature_of(targets, comparison)
    if comparison.kind == CROSS_ENTROPY:
        labels = labels_of(targets.target, scores.shape[0], own_candidates, scores.device)
        valid, at, _, is_label, left_out = _labelled(scores, labels, targets, comparison)
        logits, right = _logits(scores, left_out, targets, comparison), is_label.to(scores.dtype)
        gradient = logits.softmax(dim=1) - right
        if comparison.symmetric:
            # Of no query's label, a column may be empty, and its softmax no number.
            columns = torch.where(right.any(dim=0), logits.softmax(dim=0) * right.sum(dim=0), 0.0)
            gradient = (gradient + columns - right) / 2
        gradient = gradient * torch.where(valid, 1.0, torch.nan).to(scores.dtype).unsqueeze(1)
        return gradient / temperature, _slope(gradient, scores.masked_fill(left_out, 0.0), temperature)
    assert targets.target is not None
    teacher = targets.target.to(scores.dtype)
    if comparison.kind != DIVERGENCE:
        errors = (scores[:, :1] - scores[:, 1:]) - (teacher[:, :1] - teacher[:, 1:])
        gradient = torch.cat([errors.sum(dim=1, keepdim=True), -errors], dim=1) * (2 / errors.shape[1])
        return gradient, gradient.new_zeros(())
    least, most = scores.min(dim=1, keepdim=True), scores.max(dim=1, keepdim=True)
    extent = most.values - least.values + RANGE_EPSILON
    relative = scores - most.values
    if comparison.normalize_scores:
        relative = relative / extent
    p = (teacher / comparison.teacher_temperature).softmax(dim=1)
    gradient = (relative / temperature).softmax(dim=1) - p
    slope = _slope(gradient, relative, temperature)
    if comparison.normalize_scores:
        of_range = torch.where(gradient == 0, 0.0, gradient * relative).sum(dim=1, keepdim=True)
        gradient = gradient.scatter_add(1, least.indices, of_range).scatter_add(1, most.indices, -of_range) / extent
    return gradient / temperature, slope


def _slope(gradient: Tensor, values: Tensor, temperature: Tensor | float) -> Tensor:
    """The derivative by the temperature of a loss of values / temperature, whose gradient by these is `gradient`."""
    products = torch.where(gradient == 0, 0.0, gradient.double() * values.double())
    return (-products.sum() / temperature**2).to(values.dtype)


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
