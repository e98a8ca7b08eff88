"""The MaxSim backward: every query token gathers one row from, and scatters one row to, its argmax document token.

Layout as in `Problem`; `argmax` is [documents of all groups, rows], with rows = Nq / groups * Lq, and -1 where no
gradient flows. Everything is summed in float32 registers and written once, in the dtype of the embeddings, with the
Jacobian of `normalize` already applied. Sums have a fixed order, so gradients are bitwise reproducible.

`gather` computes the gradient of the queries; `lists` or, for few rows, `compare` that of the documents.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...problem import Problem, Tensors
from .. import plan_backward
from ..rows import Norms, norms_of
from .common import BackwardTensors, Destination, finish_documents
from .compare import compare_argmax
from .gather import gather_queries
from .lists import sum_by_lists

__all__ = ["Destination", "finish_documents", "maxsim_backward", "write_gradients"]


def maxsim_backward(
    problem: Problem,
    tensors: Tensors,
    grad_scores: Tensor,
    argmax: Tensor,
    need_queries: bool,
    need_documents: bool,
    norms: Norms | None = None,
    normalized: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `tensors.queries` and `tensors.documents`, contiguous, in their dtype; None for those not needed.

    The arguments are those of `write_gradients`.
    """
    grad_queries = grad_documents = None
    if need_queries:
        grad_queries = torch.empty_like(tensors.queries, memory_format=torch.contiguous_format)
    if need_documents:
        grad_documents = torch.empty_like(tensors.documents, memory_format=torch.contiguous_format)
    destination = Destination(grad_queries, grad_documents)
    write_gradients(problem, tensors, grad_scores, argmax, destination, norms, normalized)
    return grad_queries, grad_documents


def write_gradients(
    problem: Problem,
    tensors: Tensors,
    grad_scores: Tensor,
    argmax: Tensor,
    destination: Destination,
    norms: Norms | None = None,
    normalized: bool = False,
) -> None:
    """Compute the gradients of `tensors.queries` and `tensors.documents` into their `destination`.

    Queries are padded [Nq, Lq, d], and rows of embeddings contiguous; no dimension is 0, but packed documents may be
    empty. Boundaries are on the device, which is the current one. `grad_scores` of `problem.scores_shape` is float32
    with any strides, and `argmax` contiguous, of `problem.argmax_shape` in any view; for packed documents it counts
    from the start of their document. If the kind is `weighted`, `tensors.queries_mask` [Nq, Lq] holds the weights of
    the maxima in a score. `norms` are those of queries and documents, if already computed. If `normalized`, queries and
    documents are divided by theirs already, and the gradients are those of what they were before.
    """
    queries, documents = tensors.queries, tensors.documents
    queries_scale, documents_scale, weight = None, None, None
    if problem.normalize:
        queries_scale, documents_scale = norms or norms_of(queries, documents)
    if problem.kind.weighted:
        weight = tensors.queries_mask.float().contiguous()  # type: ignore[union-attr]
    grad_strides = grad_scores.stride()
    if problem.has_candidates:
        grad_strides = (0, *grad_strides)
    scales, boundaries = (queries_scale, documents_scale), (tensors.documents_cu_seqlens, tensors.candidates_cu_seqlens)
    inputs = BackwardTensors(
        grad_scores, queries, documents, *scales, *boundaries, argmax, weight, grad_strides, normalized
    )  # fmt: skip
    # Rows that are normalised already enter the sums of the other side without a scale.
    for_queries = inputs._replace(documents_scale=None) if normalized else inputs
    gathered = False
    if destination.documents is not None:
        scale = None if normalized else queries_scale
        if weight is not None:
            scale = weight if scale is None else scale * weight
        for_documents = inputs._replace(queries_scale=scale)
        if plan_backward.backward_plan(problem).kernel == "lists":
            gathered = sum_by_lists(problem, for_documents, destination, for_queries)
        else:
            if not destination.adds:
                destination.documents.zero_()
            compare_argmax(problem, for_documents, destination)
    if destination.queries is not None and not gathered:
        gather_queries(problem, for_queries, destination.queries, plan_backward.gather_plan(problem))
