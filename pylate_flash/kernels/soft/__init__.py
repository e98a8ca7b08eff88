"""The backward of soft MaxSim: every query row gets a part of every token, and every token one of every row.

The probabilities exp(beta * similarity - lse) are computed again. Programs that own document tokens sum their gradient;
with a budget for them, they leave partial sums of that of the queries too, and else other programs compute the
probabilities once more. Sums have an order: the same bits every time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...problem import Problem, Tensors
from ..backward import common
from ..plan_backward import SoftGradientPlan, gradient_warps, soft_gradient_plan
from ..rows import active_tokens, inverse_norms
from . import kernels
from .kernels import SoftTensors

__all__ = ["soft_backward"]


def soft_backward(
    problem: Problem,
    tensors: Tensors,
    beta: Tensor,
    grad_scores: Tensor,
    lse: Tensor,
    needs: tuple[bool, bool, bool],
    max_scratch_bytes: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of beta, `tensors.queries` and `tensors.documents`, in their types; None for what is not needed.

    Queries are padded [Nq, Lq, d], and rows of embeddings contiguous; no dimension is 0, but packed documents may be
    empty. Boundaries are on the device. `grad_scores` of `problem.scores_shape` is float32 with any strides, and `lse`
    contiguous, as `soft_forward` leaves it.
    """
    need_beta, need_queries, need_documents = needs
    inputs = _inputs(problem, tensors, beta, grad_scores, lse)
    problem = problem._replace(query_strides=inputs.queries.stride()[:2])
    plan = soft_gradient_plan(problem, need_queries and need_documents, max_scratch_bytes)
    grad_queries = grad_documents = sums = slopes = total = None
    if need_queries:
        grad_queries = torch.empty_like(tensors.queries, memory_format=torch.contiguous_format)
    if need_beta:
        programs = plan.n_blocks * (problem.n_documents if problem.packed else problem.all_documents)
        slopes = torch.empty(programs, dtype=torch.float32, device=problem.device)
    if need_documents:
        grad_documents = sums = torch.empty_like(tensors.documents, memory_format=torch.contiguous_format)
        if problem.normalize and plan.parts.split:
            sums = torch.empty_like(grad_documents, dtype=torch.float32)
        if tensors.documents_mask is not None:
            sums.zero_()
    if need_documents or need_beta:
        total = _sum_documents(problem, plan, inputs, sums, slopes)
    if sums is not grad_documents:
        assert sums is not None
        assert grad_documents is not None
        assert inputs.documents_scale is not None
        common.finish_documents(problem, tensors.documents, inputs.documents_scale, sums, grad_documents)
    if grad_queries is not None:
        if total is None:
            total = _sum_queries(problem, plan, inputs, grad_queries)
        if total is not None:
            common.finish_queries(problem, inputs.queries, inputs.queries_scale, None, total, grad_queries)
    return None if slopes is None else _slope(slopes, beta), grad_queries, grad_documents


def _inputs(problem: Problem, tensors: Tensors, beta: Tensor, grad_scores: Tensor, lse: Tensor) -> SoftTensors:
    embeddings, mask, documents_mask = tensors.queries, tensors.queries_mask, tensors.documents_mask
    scales: tuple[Tensor | None, Tensor | None] = (None, None)
    active = bounds = None
    if mask is not None:
        embeddings = embeddings.masked_fill((mask == 0).unsqueeze(-1), 0.0)
    if embeddings.stride(0) != problem.query_length * embeddings.stride(1):
        embeddings = embeddings.contiguous()
    if documents_mask is not None:
        active, bounds = active_tokens(documents_mask)
    if problem.normalize:
        scales = inverse_norms(embeddings), inverse_norms(tensors.documents)
    grad_rows = _grad_rows(problem, mask, tensors.candidates_cu_seqlens, grad_scores)
    boundaries = tensors.documents_cu_seqlens, tensors.candidates_cu_seqlens
    return SoftTensors(embeddings, tensors.documents, active, bounds, *scales, *boundaries, beta, lse, grad_rows)


def _grad_rows(problem: Problem, queries_mask: Tensor | None, candidates: Tensor | None, grad_scores: Tensor) -> Tensor:
    """The gradient of every score times the weight of each row, [documents, rows], contiguous."""
    if candidates is not None:
        # [documents, 1 query, rows of it]
        grad, of_rows = grad_scores[:, None, None], None
        if queries_mask is not None:
            owners = torch.arange(problem.n_queries, device=problem.device)
            owners = owners.repeat_interleave(candidates.diff(), output_size=problem.n_documents)
            of_rows = queries_mask[owners].unsqueeze(1)
    elif problem.groups == 1:
        # [documents, queries, rows of each]
        grad, of_rows = grad_scores.T.unsqueeze(-1), queries_mask
    else:
        # [queries, documents, rows of the query]
        grad, of_rows = grad_scores.unsqueeze(-1), None if queries_mask is None else queries_mask.unsqueeze(1)
    if of_rows is None:
        rows = grad.expand(*grad.shape[:2], problem.query_length)
    else:
        weights = of_rows if problem.kind.weighted else of_rows != 0
        rows = (grad * weights).masked_fill_(of_rows == 0, 0.0)
    return rows.contiguous().view(problem.winners_shape)


def _sum_documents(
    problem: Problem, plan: SoftGradientPlan, inputs: SoftTensors, grad_documents: Tensor | None, slopes: Tensor | None
) -> Tensor | None:
    """Compute the documents' gradient and the slopes of beta, as many documents of each group at a time as planned.

    Returned are partial sums [n, rows, d] of the gradient of the queries, where the plan has them.
    """
    tile, at_once, kind = plan.documents, plan.documents_at_once, problem.kind
    sizes = problem.size, plan.parts.block, plan.parts.split, plan.parts.owned, tile.rows, tile.columns
    even = problem.rows % tile.columns == 0
    rows, partials, total, done = problem.n_queries * problem.query_length, None, None, 0
    if plan.once:
        shape = at_once * plan.n_blocks, rows, problem.size
        partials = torch.empty(*shape, dtype=torch.float32, device=problem.device)
    for first in range(0, problem.n_documents, at_once):
        count = min(at_once, problem.n_documents - first)
        programs = count * plan.n_blocks * (1 if problem.packed else problem.groups)
        of_launch = None if slopes is None else slopes[done : done + programs]
        parts = None if partials is None else partials[: count * plan.n_blocks]
        kernels.documents_kernel(
            (programs, plan.parts.number, 1),
            (*inputs, grad_documents, parts, of_launch),
            (problem.n_documents, problem.document_length, first, count, plan.n_blocks, problem.groups),
            (problem.rows, *plan.strides),
            (*sizes, even, kind.zero_masked, plan.rounded, kind.precision, *plan.units),
            gradient_warps(tile),
        )
        done += programs
        if parts is not None and at_once < problem.n_documents:
            total = parts.sum(dim=0) if total is None else total.add_(parts.sum(dim=0))
    return partials if total is None else total.unsqueeze(0)


def _sum_queries(problem: Problem, plan: SoftGradientPlan, inputs: SoftTensors, grad_queries: Tensor) -> Tensor | None:
    """Compute the gradient of the queries, or return sums [n, rows, d] of it, in float32 and of scaled queries."""
    tile, sums = plan.queries, grad_queries
    sizes = problem.size, plan.parts.block, plan.parts.split, plan.parts.owned, tile.rows, tile.columns
    whole = plan.n_splits == 1 and not (problem.normalize and plan.parts.split)
    if not whole:
        shape = plan.n_splits, problem.n_queries * problem.query_length, problem.size
        sums = torch.empty(*shape, dtype=torch.float32, device=problem.device)
    kernels.queries_kernel(
        (-(-problem.rows // tile.rows) * problem.groups, plan.n_splits, plan.parts.number),
        (*inputs, sums),
        (problem.n_documents, problem.document_length, problem.groups, plan.n_splits),
        (problem.rows, *plan.strides),
        (*sizes, problem.normalize and whole, plan.rounded, problem.kind.precision, *plan.units),
        gradient_warps(tile),
    )
    return None if whole else sums


def _slope(slopes: Tensor, beta: Tensor) -> Tensor:
    """The gradient of beta, from the sums of grad * p * log2(p): that of (1 / beta) lse is -entropy / beta**2."""
    return (slopes.sum(dtype=torch.float64) * math.log(2.0) / beta.double().square()).to(beta.dtype)
