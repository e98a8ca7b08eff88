"""The backward: every query token takes one row from, and sends one row to, the document token that won.

Layout as in `Problem`; `argmax` is [documents of all groups, rows], with rows = Nq / groups * Lq, and -1 where no
gradient flows. Everything is summed in float32 registers and written once, in the type of the embeddings, with the
Jacobian of `normalize` applied on the way. The same bits every time: sums have an order.

`gather` computes the gradient of the queries, and `lists` or `compare`, for few rows, that of the documents.
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
    problem: Problem, tensors: Tensors, grad_scores: Tensor, argmax: Tensor, need_queries: bool, need_documents: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `tensors.queries` and `tensors.documents`, contiguous, in their type; None for what is not needed.

    The arguments are those of `write_gradients`.
    """
    grad_queries = grad_documents = None
    if need_queries:
        grad_queries = torch.empty_like(tensors.queries, memory_format=torch.contiguous_format)
    if need_documents:
        grad_documents = torch.empty_like(tensors.documents, memory_format=torch.contiguous_format)
    write_gradients(problem, tensors, grad_scores, argmax, Destination(grad_queries, grad_documents))
    return grad_queries, grad_documents


def write_gradients(
    problem: Problem,
    tensors: Tensors,
    grad_scores: Tensor,
    argmax: Tensor,
    destination: Destination,
    norms: Norms | None = None,
) -> None:
    """Compute the gradients of `tensors.queries` and `tensors.documents` into their `destination`.

    Queries are padded [Nq, Lq, d], and rows of embeddings contiguous; no dimension is 0, but packed documents may be
    empty. Boundaries are on the device, which is the current one. `grad_scores` of `problem.scores_shape` is float32
    with any strides, and `argmax` contiguous, of `problem.argmax_shape` in any view; those of packed documents count
    from the start of their document. Where the kind is `weighted`, `tensors.queries_mask` [Nq, Lq] holds factors of the
    maxima that a score is the sum of. `norms` are those of queries and documents, where they are known.
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
    inputs = BackwardTensors(grad_scores, queries, documents, *scales, *boundaries, argmax, weight, grad_strides)
    gathered = False
    if destination.documents is not None:
        weighted = inputs
        if weight is not None:
            scale = weight if queries_scale is None else queries_scale * weight
            weighted = inputs._replace(queries_scale=scale)
        if plan_backward.backward_plan(problem).kernel == "lists":
            gathered = sum_by_lists(problem, weighted, destination, inputs)
        else:
            if not destination.adds:
                destination.documents.zero_()
            compare_argmax(problem, weighted, destination)
    if destination.queries is not None and not gathered:
        gather_queries(problem, inputs, destination.queries, plan_backward.gather_plan(problem))
