"""What the operations ask of the kernels: tensors brought into the form that these take, on their device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.backward import maxsim_backward
from ..kernels.forward import maxsim_forward
from ..kernels.launch import on_device
from ..kernels.losses import Comparison, losses_of, rescale, sum_and_gradient_of, sum_of
from ..kernels.normalized import normalized_rows, through_normalized_rows
from ..kernels.padding import packed_again, pad
from .compute import active_counts, checked_masks, with_empty_score
from .problem import Options, Problem, Tensors, problem_of, replaced

__all__ = [
    "gradients", "loss", "normalized_rows", "on_device", "rescale_gradients", "scores", "through_normalized_rows",
]  # fmt: skip


def scores(problem: Problem, tensors: Tensors, offsets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Scores, and winners if the problem has them; no size is 0. `offsets` are those of `Places`."""
    with on_device(tensors.queries):
        return maxsim_forward(*_for_kernels(problem, tensors), offsets)


def gradients(
    problem: Problem, tensors: Tensors, grad_scores: Tensor, winners: Tensor, need_queries: bool, need_documents: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of queries and documents, in their shapes and type; None for one that is not needed."""
    with on_device(tensors.queries):
        problem, given = _for_kernels(problem, tensors)
        queries = given.queries
        if queries.dim() == 2:
            # All of one length.
            given = given._replace(queries=queries.unflatten(0, (problem.n_queries, problem.query_length)))
        grad_queries, grad_documents = maxsim_backward(
            problem, given, grad_scores, winners, need_queries, need_documents
        )
        if grad_queries is not None and tensors.queries.dim() == 2:
            if queries.dim() == 2:
                grad_queries = grad_queries.view(queries.shape)
            else:
                assert given.queries_cu_seqlens is not None
                grad_queries = packed_again(grad_queries, given.queries_cu_seqlens, tensors.queries.shape[0])
    return grad_queries, grad_documents


def loss(
    tensors: Tensors,
    target: Tensor | None,
    options: Options,
    comparison: tuple[bool, float, str],
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A loss of the scores of a padded call by kernels, and the gradients of queries and documents that are needed.

    `comparison`: whether the target is a teacher's scores (float32 of the scores' shape) or labels (or None); the
    temperature; and how losses are reduced, "mean" or "sum".
    """
    divergence, temperature, loss_reduction = comparison
    compared = Comparison(divergence, tensors.documents.dim() == 4, temperature, loss_reduction)
    with_gradient, mean, counts = needs[0] or needs[1], options.reduction == "mean", None
    with on_device(tensors.queries):
        problem = problem_of(tensors, options, with_gradient)
        if mean:
            # The score of an empty document is not divided.
            problem = problem._replace(empty_score=0.0)
            counts = active_counts(problem, tensors)
        problem, given = _for_kernels(problem, tensors)
        scores, winners = maxsim_forward(problem, given)
        if counts is not None:
            scores = with_empty_score(scores / counts, tensors, options.empty_score)
            counts = counts.float()
        losses = losses_of(scores, target, compared)
        if not with_gradient:
            return sum_of(scores, losses, compared), None, None
        # What the gradient is divided by is in it.
        loss, grad_scores = sum_and_gradient_of(scores, target, losses, counts, compared)
        del scores, losses
        assert winners is not None
        return loss, *maxsim_backward(problem, given, grad_scores, winners, *needs)


def rescale_gradients(grad_loss: Tensor, grad_queries: Tensor | None, grad_documents: Tensor | None) -> None:
    """Multiply the gradients that `loss` returned by that of the loss."""
    with on_device(grad_loss):
        rescale(grad_loss, grad_queries, grad_documents)


def _for_kernels(problem: Problem, tensors: Tensors) -> tuple[Problem, Tensors]:
    """Both with padded queries, contiguous rows and masks, and boundaries on the device."""
    queries, documents, queries_mask, documents_mask, queries_bounds, bounds, candidates = tensors
    if (
        queries.is_cuda
        and queries.stride(-1) == documents.stride(-1) == 1
        and bounds is None
        and (queries_mask is None or queries_mask.is_contiguous())
        and (documents_mask is None or documents_mask.is_contiguous())
    ):
        return problem, tensors
    if documents.stride(-1) != 1:
        documents = documents.contiguous()
        problem = problem._replace(document_strides=(*(0, 0, *documents.stride())[-4:-1],), aligned=True)
    if queries.stride(-1) != 1:
        queries = queries.contiguous()
        strides = (
            queries.stride() if queries.dim() == 3 else (problem.query_length * queries.stride(0), queries.stride(0))
        )
        problem = problem._replace(query_strides=strides[:2])
    if not queries.is_cuda:
        # Under Triton's interpreter.
        queries_mask, documents_mask = checked_masks(tensors)
        dtype = None if queries_mask is None else queries_mask.dtype
        problem = problem._replace(kind=replaced(problem.kind, "queries_mask", dtype))
    if queries_mask is not None:
        queries_mask = queries_mask.contiguous()
    if documents_mask is not None:
        documents_mask = documents_mask.contiguous()
    if bounds is not None:
        bounds = _on_device(bounds, problem.device)
        if candidates is not None:
            candidates = _on_device(candidates, problem.device)
        if queries_bounds is not None and queries.shape[0] != problem.n_queries * problem.query_length:
            queries_bounds = _on_device(queries_bounds, problem.device)
            queries, queries_mask = pad(queries, queries_bounds, problem.query_length)
            kind = replaced(problem.kind, "queries_mask", torch.bool)
            problem = problem._replace(query_strides=queries.stride()[:2], kind=kind)
    return problem, Tensors(queries, documents, queries_mask, documents_mask, queries_bounds, bounds, candidates)


def _on_device(boundaries: Tensor, device: torch.device) -> Tensor:
    if boundaries.device != device:
        boundaries = boundaries.to(device, non_blocking=True)
    return boundaries.contiguous()
