"""Losses over MaxSim in blocks of plain torch, a chunk of queries after the other, with their gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.plan_backward import chunks_of
from ..problem import CROSS_ENTROPY, Comparison, Options, Targets, Tensors, accumulation_dtype
from .checks import check, checked_problem
from .compute import compute, compute_gradients
from .loss_call import Found, labels_of
from .loss_scores import Compared, compared, differentiated, reduced, statistics_of


def loss_in_blocks(
    tensors: Tensors, targets: Targets, options: Options, comparison: Comparison, needs: tuple[bool, bool, bool]
) -> Found:
    """A loss that is reduced, and what is needed of its gradients, as `kernel_calls.loss`; no size is 0.

    Half embeddings are widened first, so that their gradients are summed in float32 whatever the chunks. A symmetric
    loss compares all scores at once, and has one chunk.
    """
    # Before anything is widened.
    check(tensors)
    need_queries, need_documents, need_slope = needs
    queries, documents, dtype = tensors.queries, tensors.documents, tensors.queries.dtype
    wide = accumulation_dtype(dtype)
    tensors = tensors._replace(queries=queries.to(wide), documents=documents.to(wide))
    options = options._replace(implementation="blocked")
    problem = checked_problem(tensors, options, need_queries or need_documents)
    own, n_queries = documents.dim() == 4, problem.n_queries
    step = n_queries if comparison.symmetric else chunks_of(problem, comparison.max_scratch_bytes).queries
    share = 1.0 / n_queries if comparison.loss_reduction == "mean" else 1.0
    target = targets.target
    if comparison.kind == CROSS_ENTROPY:
        target = labels_of(target, n_queries, own, queries.device)
    results, slopes = [], []
    grad_queries = grad_documents = None
    for first in range(0, n_queries, step):
        chunk = slice(first, first + step)
        of_chunk = rows_of(tensors, chunk)
        compared_with = Targets(_part(target, chunk), _part(targets.exclude, chunk), targets.temperature)
        scores, winners = compute(of_chunk, options, problem.with_winners)
        if not any(needs):
            results.append(compared(scores, compared_with, comparison, own))
            continue
        result, grad_scores, slope = differentiated(scores, compared_with, comparison, own)
        results.append(result)
        if slope is not None:
            slopes.append(slope)
        if winners is None:
            continue
        found = compute_gradients(of_chunk, options, grad_scores * share, winners, need_queries, need_documents)
        if found[0] is not None:
            grad_queries = _placed(grad_queries, found[0], chunk, n_queries)
        if found[1] is not None and own:
            grad_documents = _placed(grad_documents, found[1], chunk, n_queries)
        elif found[1] is not None:
            grad_documents = found[1] if grad_documents is None else grad_documents.add_(found[1])
    result = _joined(results)
    held = torch.float32 if dtype == torch.float16 else dtype
    return Found(
        reduced(result.losses, comparison.loss_reduction),
        statistics_of(result) if comparison.with_statistics else scores.new_empty(0),
        None if grad_queries is None else grad_queries.to(held),
        None if grad_documents is None else grad_documents.to(held),
        torch.stack(slopes).sum() * share if need_slope else None,
    )


def _placed(total: Tensor | None, part: Tensor, chunk: slice, n_queries: int) -> Tensor:
    """A chunk's part [n, ...] in its place of the total [Nq, ...], which is not made where the part is all of it."""
    if len(part) == n_queries:
        return part
    if total is None:
        total = part.new_empty(n_queries, *part.shape[1:])
    total[chunk] = part
    return total


def _joined(results: list[Compared]) -> Compared:
    losses, *others = (None if of[0] is None else torch.cat(of) for of in zip(*results, strict=True))
    assert losses is not None
    return Compared(losses, *others)


def rows_of(tensors: Tensors, chunk: slice) -> Tensors:
    """The tensors of a chunk of queries."""
    queries, documents, queries_mask, documents_mask, *packing = tensors
    if documents.dim() == 4:
        documents, documents_mask = documents[chunk], _part(documents_mask, chunk)
    return Tensors(queries[chunk], documents, _part(queries_mask, chunk), documents_mask, *packing)


def _part(tensor: Tensor | None, chunk: slice) -> Tensor | None:
    return None if tensor is None else tensor[chunk]
