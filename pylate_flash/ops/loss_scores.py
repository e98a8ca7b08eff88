"""Losses of scores by torch's operations, which autograd differentiates."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .loss_call import CROSS_ENTROPY, DIVERGENCE, Comparison, Targets, labels_of

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
        labels = labels_of(targets.target, len(scores), own_candidates, scores.device)
        return _cross_entropy(scores, labels, targets, comparison)
    assert targets.target is not None
    compare = _divergence if comparison.kind == DIVERGENCE else _margin_mse
    return Compared(compare(scores, targets.target.to(scores.dtype), targets, comparison))


def temperature_of(targets: Targets, comparison: Comparison) -> Tensor | float:
    return comparison.temperature if targets.temperature is None else targets.temperature


def _cross_entropy(scores: Tensor, labels: Tensor, targets: Targets, comparison: Comparison) -> Compared:
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
    left_out &= ~is_label
    logits = scores.masked_fill(left_out, 0.0) / temperature_of(targets, comparison)
    logits = logits.masked_fill(left_out, -torch.inf)
    # Not `nll_loss`, which stops the process at a label out of range on a GPU, and leaves -100 out.
    losses = -logits.log_softmax(dim=1).gather(1, at).squeeze(1)
    if comparison.symmetric:
        # Column i holds what all queries score the right document of query i.
        losses = (losses - logits.index_select(1, at.squeeze(1)).log_softmax(dim=0).diagonal()) / 2
    losses = losses * torch.where(valid, 1.0, torch.nan).to(scores.dtype)
    if not comparison.with_statistics:
        return Compared(losses)
    with torch.no_grad():
        hardest = scores.masked_fill(left_out | is_label, -torch.inf).amax(dim=1)
        return Compared(losses, positives.squeeze(1) > hardest, positives.detach().squeeze(1), hardest)


def _divergence(scores: Tensor, teacher: Tensor, targets: Targets, comparison: Comparison) -> Tensor:
    if comparison.normalize_scores:
        least, most = (extreme(dim=1, keepdim=True).values for extreme in (scores.min, scores.max))
        scores = (scores - least) / (most - least + RANGE_EPSILON)
    log_q = (scores / temperature_of(targets, comparison)).log_softmax(dim=1)
    log_p = (teacher / comparison.teacher_temperature).log_softmax(dim=1)
    p = log_p.exp()
    return torch.where(p == 0, 0.0, p * (log_p - log_q)).sum(dim=1)


def _margin_mse(scores: Tensor, teacher: Tensor, targets: Targets, comparison: Comparison) -> Tensor:
    margins, wanted = (values[:, :1] - values[:, 1:] for values in (scores, teacher))
    return (margins - wanted).square().mean(dim=1)


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
