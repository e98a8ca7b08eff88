"""The computation of soft scores and their gradients on tensors: by Triton kernels, or in blocks of plain torch."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..kernels.plan import choose
from ..problem import Options, Problem, Tensors
from .checks import checked_problem
from .compute import active_counts, in_blocks, kernels, with_empty_score, without_autocast
from .soft_blocks import log_sums, soft_blocked_backward
from .tiles import operands_of

SoftGradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def compute_soft(tensors: Tensors, options: Options, beta: Tensor, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Scores, and if asked for log(sum(exp(beta * similarity))) over the tokens, [documents, rows]."""
    problem = checked_problem(tensors, options)
    if _implementation(problem, options) == "triton" and not (problem.is_empty or 0 in tensors.queries.shape):
        scores, lse = kernels().soft_scores(problem, tensors, beta, with_lse)
    else:
        lse = torch.zeros(problem.winners_shape, dtype=beta.dtype, device=problem.device) if with_lse else None
        scores = in_blocks(problem, tensors, partial(log_sums, beta=beta), lse, together=False)
    if options.reduction == "mean":
        # The score of an empty document is not divided.
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
