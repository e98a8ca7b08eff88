"""The computation of soft scores and their gradients on tensors: by Triton kernels, or in blocks of plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.plan import choose
from ..problem import Options, Problem, Tensors
from .checks import checked_problem
from .compute import active_counts, kernels, with_empty_score, without_autocast
from .soft_blocks import soft_blocked_backward, soft_blocked_forward
from .tiles import operands_of

SoftGradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def compute_soft(tensors: Tensors, options: Options, beta: Tensor, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Scores, and if asked for log(sum(exp(beta * similarity))) over the tokens, [documents, rows]."""
    problem = checked_problem(tensors, options)
    mean = options.reduction == "mean"
    if mean:
        # The score of an empty document is not divided.
        problem = problem._replace(empty_score=0.0)
    lse = None
    if problem.is_empty or 0 in tensors.queries.shape:
        scores = torch.zeros(problem.scores_shape, dtype=problem.scores_dtype, device=problem.device)
        scores = with_empty_score(scores, tensors, problem.empty_score)
        if with_lse:
            lse = torch.zeros(problem.winners_shape, dtype=beta.dtype, device=problem.device)
    elif _implementation(problem, options) == "triton":
        scores, lse = kernels().soft_scores(problem, tensors, beta, with_lse)
    else:
        with without_autocast(problem.device):
            if with_lse:
                lse = torch.zeros(problem.winners_shape, dtype=beta.dtype, device=problem.device)
            given = operands_of(problem, tensors)
            scores = torch.zeros(problem.scores_shape, dtype=given.dtype, device=problem.device)
            soft_blocked_forward(given, beta, scores, lse)
            scores = with_empty_score(scores.to(problem.scores_dtype), tensors, problem.empty_score)
    if mean:
        scores = with_empty_score(scores / active_counts(problem, tensors), tensors, options.empty_score)
    return scores, lse


def compute_soft_gradients(
    tensors: Tensors,
    options: Options,
    beta: Tensor,
    grad_scores: Tensor,
    lse: Tensor,
    needs: tuple[bool, bool, bool],
    max_scratch_bytes: int,
) -> SoftGradients:
    """The gradients of beta, queries and documents, contiguous in their types; None for one that is not needed."""
    problem = checked_problem(tensors, options)
    if options.reduction == "mean":
        grad_scores = grad_scores / active_counts(problem, tensors)
    if problem.is_empty or 0 in tensors.queries.shape:
        zeros = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (beta, *tensors[:2])]
        return tuple(zero if need else None for zero, need in zip(zeros, needs, strict=True))  # type: ignore[return-value]
    if _implementation(problem, options) == "triton":
        return kernels().soft_gradients(problem, tensors, beta, grad_scores, lse, needs, max_scratch_bytes)
    with without_autocast(problem.device):
        given = operands_of(problem, tensors)
        slope, *found = soft_blocked_backward(given, beta, grad_scores, lse, needs)
    of_queries, of_documents = (
        None if gradient is None else gradient.to(problem.dtype).view(tensor.shape)
        for gradient, tensor in zip(found, tensors[:2], strict=True)
    )
    return slope, of_queries, of_documents


def _implementation(problem: Problem, options: Options) -> str:
    return choose(options.implementation, problem.device, problem.dtype, problem.size)
