"""The backward of soft MaxSim: every query row gets a part of every token, and every token one of every row.

The probabilities exp(beta * similarity - lse) are computed again. Programs that own document tokens sum their gradient;
with a budget for them, they leave partial sums of that of the queries too, and else other programs compute the
probabilities once more. Sums have an order: the same bits every time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..backward import common
from ..plan_backward import SoftGradientPlan, soft_gradient_plan
from ..rows import active_tokens, inverse_norms
from .documents import walk_rows
from .inputs import SoftTensors
from .queries import walk_documents

if TYPE_CHECKING:
    from ...problem import Problem, Tensors

SoftGradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def soft_backward(
    problem: Problem,
    tensors: Tensors,
    beta: Tensor,
    grad_scores: Tensor,
    lse: Tensor,
    needs: tuple[bool, bool, bool],
    max_scratch_bytes: int,
) -> SoftGradients:
    """Gradients of beta, `tensors.queries` and `tensors.documents`, in their types; None for what is not needed.

    Queries are padded [Nq, Lq, d], and rows of embeddings contiguous; no dimension is 0, but packed documents may be
    empty. Boundaries are on the device. `grad_scores` of `problem.scores_shape` is float32 with any strides, and `lse`
    contiguous, as `soft_forward` leaves it.
    """
    need_beta, need_queries, need_documents = needs
    inputs = _inputs(problem, tensors, beta, grad_scores, lse)
    problem = problem._replace(query_strides=inputs.queries.stride()[:2])
    plan = soft_gradient_plan(problem, need_queries and need_documents, max_scratch_bytes)
    grad_queries = grad_documents = slopes = total = None
    if need_queries:
        grad_queries = torch.empty_like(tensors.queries, memory_format=torch.contiguous_format)
    if need_documents or need_beta:
        sums = None
        if need_documents:
            grad_documents = torch.empty_like(tensors.documents, memory_format=torch.contiguous_format)
            sums = grad_documents
            if problem.normalize and plan.parts.split:
                sums = torch.empty_like(grad_documents, dtype=torch.float32)
            if tensors.documents_mask is not None:
                sums.zero_()
        number = plan.documents_at_once
        programs = plan.n_blocks * (problem.n_documents if problem.packed else problem.all_documents)
        if need_beta:
            slopes = torch.empty(programs, dtype=torch.float32, device=problem.device)
        total = _documents(problem, plan, inputs, (sums, slopes), number)
        if sums is not grad_documents:
            assert sums is not None
            assert grad_documents is not None
            assert inputs.documents_scale is not None
            common.finish_documents(problem, tensors.documents, inputs.documents_scale, sums, grad_documents)
    if grad_queries is not None:
        if total is None:
            total = _queries(problem, plan, inputs, grad_queries)
        if total is not None:
            finished = common.BackwardTensors(
                grad_scores, inputs.queries, inputs.documents, inputs.queries_scale, None, None, None, lse, None, (),
            )  # fmt: skip
            common.finish_queries(problem, finished, total, total.shape[0], grad_queries)
    return None if slopes is None else _slope(slopes, beta), grad_queries, grad_documents


def _inputs(problem: Problem, tensors: Tensors, beta: Tensor, grad_scores: Tensor, lse: Tensor) -> SoftTensors:
    queries, documents, queries_mask, documents_mask, _, cu_seqlens, candidates = tensors
    active = bounds = queries_scale = documents_scale = None
    if queries_mask is not None:
        queries = queries.masked_fill((queries_mask == 0).unsqueeze(-1), 0.0)
    if queries.stride(0) != problem.query_length * queries.stride(1):
        queries = queries.contiguous()
    if documents_mask is not None:
        active, bounds = active_tokens(documents_mask)
    if problem.normalize:
        queries_scale, documents_scale = inverse_norms(queries), inverse_norms(documents)
    return SoftTensors(
        queries, documents, active, bounds, queries_scale, documents_scale, cu_seqlens, candidates, beta, lse,
        _grad_rows(problem, queries_mask, candidates, grad_scores),
    )  # fmt: skip


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


def _documents(
    problem: Problem,
    plan: SoftGradientPlan,
    inputs: SoftTensors,
    results: tuple[Tensor | None, Tensor | None],
    number: int,
) -> Tensor | None:
    """Compute the documents' gradient and the slopes of beta, `number` documents of each group at a time.

    Returned are partial sums [n, rows, d] of the gradient of the queries, where the plan has them.
    """
    grad_documents, slopes = results
    rows, partials, total = problem.n_queries * problem.query_length, None, None
    if plan.once:
        shape = number * plan.n_blocks, rows, problem.size
        partials = torch.empty(*shape, dtype=torch.float32, device=problem.device)
    done = 0
    for first in range(0, problem.n_documents, number):
        count = min(number, problem.n_documents - first)
        programs = count * plan.n_blocks * (1 if problem.packed else problem.groups)
        of_launch = None if slopes is None else slopes[done : done + programs]
        parts = None if partials is None else partials[: count * plan.n_blocks]
        walk_rows(problem, plan, inputs, (grad_documents, parts, of_launch), first, count)
        done += programs
        if parts is not None and number < problem.n_documents:
            total = parts.sum(dim=0) if total is None else total.add_(parts.sum(dim=0))
    return partials if total is None else total.unsqueeze(0)


def _queries(problem: Problem, plan: SoftGradientPlan, inputs: SoftTensors, grad_queries: Tensor) -> Tensor | None:
    """Compute the gradient of the queries, or return sums [n, rows, d] of it."""
    whole = plan.n_splits == 1 and not (problem.normalize and plan.parts.split)
    sums = grad_queries
    if not whole:
        shape = plan.n_splits, problem.n_queries * problem.query_length, problem.size
        sums = torch.empty(*shape, dtype=torch.float32, device=problem.device)
    walk_documents(problem, plan, inputs, sums, whole)
    return None if whole else sums


def _slope(slopes: Tensor, beta: Tensor) -> Tensor:
    """The gradient of beta, from the sums of grad * p * log2(p): that of (1 / beta) lse is -entropy / beta**2."""
    return (slopes.sum(dtype=torch.float64) * math.log(2.0) / beta.double().square()).to(beta.dtype)
