"""The computation of scores and gradients on tensors: by Triton kernels, or in blocks of plain torch."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..kernels.plan import choose
from ..problem import DocumentOffsets, Options, Problem, Tensors
from .blocked import Reduction, blocked_backward, blocked_forward, maxima
from .checks import checked_mask, checked_problem
from .tiles import operands_of

Gradients = tuple[Tensor | None, Tensor | None]


def compute(
    tensors: Tensors, options: Options, with_winners: bool, offsets: DocumentOffsets | None = None
) -> tuple[Tensor, Tensor | None]:
    """Scores, and the winners [documents, rows], if asked for. Only kernels take `offsets`."""
    problem = checked_problem(tensors, options, with_winners, offsets)
    implementation = choose(options.implementation, problem.device, problem.dtype, problem.size)
    if implementation == "triton" and not problem.is_empty:
        scores, winners = kernels().scores(problem, tensors, None if offsets is None else offsets.starts)
    else:
        winners = None
        if with_winners:
            winners = torch.full(problem.winners_shape, -1, dtype=problem.winners_dtype, device=problem.device)
        scores = in_blocks(problem, tensors, functools.partial(maxima, with_argmax=with_winners), winners)
    if options.reduction == "mean":
        # The score of an empty document is not divided.
        scores = with_empty_score(scores / active_counts(problem, tensors), tensors, options.empty_score)
    return scores, winners


def compute_gradients(
    tensors: Tensors,
    options: Options,
    grad_scores: Tensor,
    winners: Tensor,
    need_queries: bool,
    need_documents: bool,
) -> Gradients:
    """The gradients of queries and documents, contiguous in their type; None for one that is not needed."""
    problem = checked_problem(tensors, options)
    if options.reduction == "mean":
        grad_scores = grad_scores / active_counts(problem, tensors)
    if problem.is_empty or 0 in tensors.queries.shape:
        zeros = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in tensors[:2]]
        return zeros[0] if need_queries else None, zeros[1] if need_documents else None
    implementation = choose(options.implementation, problem.device, problem.dtype, problem.size)
    compute = kernels().gradients if implementation == "triton" else _gradients_in_blocks
    return compute(problem, tensors, grad_scores, winners, need_queries, need_documents)


def with_empty_score(scores: Tensor, tensors: Tensors, empty_score: float) -> Tensor:
    """The scores, `empty_score` where a document has no active token."""
    if empty_score == 0.0:
        return scores
    if tensors.documents_cu_seqlens is not None:
        empty = tensors.documents_cu_seqlens.diff().to(scores.device, non_blocking=True) == 0
    elif tensors.documents_mask is not None:
        empty = (tensors.documents_mask == 0).all(dim=-1)
    elif tensors.documents.shape[-2] > 0:
        return scores
    else:
        empty = torch.ones_like(scores, dtype=torch.bool)
    return scores.masked_fill(empty, empty_score)


def active_counts(problem: Problem, tensors: Tensors) -> Tensor:
    """The number of active tokens of each score's query, at least 1, to divide the scores by."""
    if tensors.queries_mask is not None:
        counts = (tensors.queries_mask != 0).sum(dim=-1)
    elif tensors.queries_cu_seqlens is not None:
        counts = tensors.queries_cu_seqlens.diff().to(problem.device, non_blocking=True)
    else:
        counts = torch.full((problem.n_queries,), problem.query_length, device=problem.device)
    counts = counts.clamp(min=1)
    if tensors.candidates_cu_seqlens is None:
        return counts.unsqueeze(1)
    owned = tensors.candidates_cu_seqlens.diff().to(problem.device, non_blocking=True)
    return counts.repeat_interleave(owned, output_size=problem.n_documents)


@functools.cache
def kernels() -> ModuleType:
    """What computes by kernels, imported when first needed, because Triton is not everywhere."""
    from . import kernel_calls

    return kernel_calls


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Computation in the types of its tensors, which have followed autocast already."""
    # To enter autocast takes as long as a launch.
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def checked_masks(tensors: Tensors) -> tuple[Tensor | None, Tensor | None]:
    """Both masks after a look at their values, where that waits for nothing."""
    return (
        checked_mask("queries_mask", tensors.queries_mask, weights=True),
        checked_mask("documents_mask", tensors.documents_mask),
    )


def in_blocks(
    problem: Problem, tensors: Tensors, reduce: Reduction, saved: Tensor | None, together: bool = True
) -> Tensor:
    """Scores by `blocked_forward`; a query or a document may be without tokens, or all of them."""
    with without_autocast(problem.device):
        empty = problem.is_empty or 0 in tensors.queries.shape
        operands = None if empty else operands_of(problem, tensors)
        dtype = problem.scores_dtype if operands is None else operands.dtype
        # No view of it is returned, as autograd lets nobody write into a view that its function returns.
        scores = torch.zeros(problem.scores_shape, dtype=dtype, device=problem.device)
        if operands is not None:
            blocked_forward(operands, reduce, scores, saved, together)
    return with_empty_score(scores.to(problem.scores_dtype), tensors, problem.empty_score)


def _gradients_in_blocks(
    problem: Problem, tensors: Tensors, grad_scores: Tensor, winners: Tensor, need_queries: bool, need_documents: bool
) -> Gradients:
    operands = operands_of(problem, tensors)
    grad_queries, grad_documents = blocked_backward(operands, grad_scores, winners, need_queries, need_documents)
    return (
        None if grad_queries is None else grad_queries.to(problem.dtype).view(tensors.queries.shape),
        None if grad_documents is None else grad_documents.to(problem.dtype),
    )
