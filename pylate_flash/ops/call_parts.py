"""Slice a call into chunks of queries, and apply its masks and boundaries to scores; for plain torch and kernels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..problem import Problem, Results, Tensors
from .checks import checked_mask


def chunk_of(problem: Problem, tensors: Tensors, chunk: slice) -> tuple[Problem, Tensors]:
    """The problem and tensors of a chunk of queries."""
    tensors = rows_of(tensors, chunk)
    problem = problem._replace(n_queries=len(tensors.queries))
    if tensors.documents.dim() == 4:
        n_tokens, address = tensors.documents.shape[:-1].numel(), tensors.documents.data_ptr()
        problem = problem._replace(groups=problem.n_queries, n_tokens=n_tokens, aligned=address % 16 == 0)
    return problem, tensors


def in_chunks(
    problem: Problem, tensors: Tensors, out: Results, chunk_queries: int
) -> Iterator[tuple[Problem, Tensors, Results]]:
    """Yield the call in chunks of `chunk_queries` queries, with the slices of `out` for their results."""
    if chunk_queries >= problem.n_queries:
        yield problem, tensors, out
        return
    length = problem.query_length
    for first in range(0, problem.n_queries, chunk_queries):
        chunk, columns = slice(first, first + chunk_queries), slice(first * length, (first + chunk_queries) * length)
        results = Results(out.scores[chunk], out.argmax[:, columns], out.divisors[chunk])
        yield *chunk_of(problem, tensors, chunk), results


def rows_of(tensors: Tensors, chunk: slice) -> Tensors:
    """The tensors of a chunk of queries."""
    queries, documents, queries_mask, documents_mask, *packing = tensors
    if documents.dim() == 4:
        documents, documents_mask = documents[chunk], part_of(documents_mask, chunk)
    return Tensors(queries[chunk], documents, part_of(queries_mask, chunk), documents_mask, *packing)


def part_of(tensor: Tensor | None, chunk: slice) -> Tensor | None:
    return None if tensor is None else tensor[chunk]


def with_empty_score(scores: Tensor, tensors: Tensors, empty_score: float) -> Tensor:
    """Replace the scores of documents that have no active token by `empty_score`."""
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
    """The number of active query tokens, at least 1, that divides each score; broadcasts to the scores."""
    if tensors.queries_mask is not None:
        counts = (tensors.queries_mask != 0).sum(dim=-1)
    elif tensors.queries_cu_seqlens is not None:
        counts = tensors.queries_cu_seqlens.diff().to(problem.device, non_blocking=True)
    else:
        counts = torch.full((problem.n_queries,), problem.query_length, device=problem.device)
    counts = counts.clamp(min=1)
    if tensors.candidates_cu_seqlens is None:
        return counts.unsqueeze(1)
    n_candidates = tensors.candidates_cu_seqlens.diff().to(problem.device, non_blocking=True)
    return counts.repeat_interleave(n_candidates, output_size=problem.n_documents)


def checked_masks(tensors: Tensors) -> tuple[Tensor | None, Tensor | None]:
    """Both masks, with their values checked where that needs no synchronization."""
    return (
        checked_mask("queries_mask", tensors.queries_mask, weights=True),
        checked_mask("documents_mask", tensors.documents_mask),
    )
