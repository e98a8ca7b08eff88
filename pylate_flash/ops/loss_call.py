"""Arguments of a loss over MaxSim beside those of the scores: targets and options, with every check."""

from __future__ import annotations

import math
import numbers
from typing import NamedTuple

import torch
from torch import Tensor

from ..problem import CROSS_ENTROPY, MARGIN_MSE, Comparison, Targets, Tensors
from .checks import (
    FLOATING,
    check_beside,
    check_choice,
    check_detached,
    check_integer,
    check_positive,
    checked_flag,
    is_readable,
)

LOSS_REDUCTIONS = ("mean", "sum", "none")


class LossResult(NamedTuple):
    """A loss and, if requested, its statistics [3], its gradients, and its derivative by the temperature (`slope`)."""

    loss: Tensor
    statistics: Tensor | None = None
    grad_queries: Tensor | None = None
    grad_documents: Tensor | None = None
    slope: Tensor | None = None


def checked_comparison(comparison: Comparison) -> Comparison:
    """The options as the operator takes them; raises TypeError or ValueError for an invalid one."""
    check_positive("temperature", comparison.temperature)
    check_positive("teacher_temperature", comparison.teacher_temperature)
    margin, budget = comparison.margin, comparison.max_scratch_bytes
    if margin is not None:
        if isinstance(margin, bool) or not isinstance(margin, numbers.Real):
            raise TypeError(f"margin must be a number or None, got {type(margin).__name__}")
        if not math.isfinite(margin):
            raise ValueError(f"margin must be finite, got {margin}")
    if budget is not None:
        check_integer("max_scratch_bytes", budget, 1)
    check_choice("loss_reduction", comparison.loss_reduction, LOSS_REDUCTIONS)
    # Numbers may have other types, such as NumPy's.
    return Comparison(
        comparison.kind,
        float(comparison.temperature),
        None if margin is None else float(margin),
        checked_flag("symmetric", comparison.symmetric),
        float(comparison.teacher_temperature),
        checked_flag("normalize_scores", comparison.normalize_scores),
        comparison.loss_reduction,
        checked_flag("with_statistics", comparison.with_statistics),
        budget,
    )


def checked_targets(targets: Targets, comparison: Comparison, tensors: Tensors) -> Targets:
    """Check that the targets fit queries and documents of valid ranks, and reshape the temperature to a scalar.

    Raises
    ------
    TypeError, ValueError
        If a target has an invalid type, shape or device, or an invalid value, where checking values needs no
        synchronization.
    """
    queries, documents = tensors.queries, tensors.documents
    bounds = tensors.documents_cu_seqlens
    n_documents = documents.shape[-3] if bounds is None else bounds.shape[0] - 1
    shape = queries.shape[0], n_documents
    min_documents = 2 if comparison.kind == MARGIN_MSE else 1
    if n_documents < min_documents:
        kind = "a positive and a negative for margin MSE" if min_documents == 2 else "at least one for a loss"
        raise ValueError(f"documents must be {kind}, got {n_documents or 'none'}")
    target, exclude, temperature = targets
    if comparison.symmetric and documents.dim() == 4:
        raise ValueError(
            "symmetric must be False where each query has documents of its own, as no other query meets them, got True "
            f"with documents of shape {list(documents.shape)}"
        )
    if comparison.kind != CROSS_ENTROPY:
        check_beside("teacher_scores", target, "queries", queries, FLOATING, shape)
        assert target is not None
        check_detached("teacher_scores", target)
    elif target is not None:
        check_beside("labels", target, "queries", queries, (torch.int64, torch.int32), shape[:1], " or None")
        if target.numel() and is_readable(target):
            low, high = target.min().item(), target.max().item()
            if low < 0 or high >= n_documents:
                raise ValueError(f"labels must be from 0 to {n_documents - 1}, got values from {low} to {high}")
    elif documents.dim() != 4 and shape[0] > n_documents:
        raise ValueError(
            f"labels must be given where there are fewer documents than queries, got None for {shape[0]} queries "
            f"and {n_documents} documents"
        )
    if exclude is not None:
        check_beside("exclude", exclude, "queries", queries, (torch.bool,), shape, " or None")
        if exclude.numel() and is_readable(exclude) and (target is None or is_readable(target)):
            labels = labels_of(target, shape[0], documents.dim() == 4, queries.device).unsqueeze(1)
            conflicts = exclude.gather(1, labels).squeeze(1)
            if conflicts.any():
                query = int(conflicts.int().argmax())
                raise ValueError(f"exclude must be False for each query's label, got True for that of query {query}")
    if temperature is not None:
        check_positive("temperature", temperature, queries)
        temperature = temperature.reshape(())
    return Targets(target, exclude, temperature)


def labels_of(target: Tensor | None, n_queries: int, own_candidates: bool, device: torch.device) -> Tensor:
    """Labels [Nq], int64; `target` None: document i of query i, or the first of its own candidates."""
    if target is not None:
        return target.long()
    indices = torch.arange(n_queries, device=device)
    return torch.zeros_like(indices) if own_candidates else indices
