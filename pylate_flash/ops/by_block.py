"""Score documents whose embeddings are produced block by block, from hidden states, 8 bits or residual codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..problem import Options, Tensors, empty_results
from .compute import compute
from .tiles import group_runs, sequence_blocks


class DocumentBlock(NamedTuple):
    """Documents whose embeddings are produced together."""

    # Slices of all tokens, and of the documents of all groups.
    rows: slice
    documents: slice | tuple[()]
    # Indices into the source of the documents, the scores and, with per-query candidates, the queries (else None).
    place: tuple[slice, ...]
    scores: tuple[Any, ...]
    queries: slice | None


# Selects the whole tensor, without creating a view.
_ALL: tuple[()] = ()
ALL_DOCUMENTS = DocumentBlock(slice(None), _ALL, _ALL, _ALL, None)


def at(tensor: Tensor, index: Any) -> Tensor:
    """A block's part of a tensor."""
    return tensor if index is _ALL else tensor[index]


def document_blocks(tensors: Tensors, max_tokens: int) -> list[DocumentBlock]:
    """Blocks of at most `max_tokens` tokens, or of one document; only the shape of `tensors.documents` is used."""
    documents, cu_seqlens = tensors.documents, tensors.documents_cu_seqlens
    if documents.shape[:-1].numel() <= max_tokens:
        return [ALL_DOCUMENTS]
    blocks = []
    if cu_seqlens is not None:
        bounds, has_candidates = cu_seqlens.cpu().numpy().astype(np.int64), tensors.candidates_cu_seqlens is not None
        for start, end in sequence_blocks(bounds, max_tokens):
            span, rows = slice(start, end), slice(int(bounds[start]), int(bounds[end]))
            blocks.append(DocumentBlock(rows, span, (rows,), (span,) if has_candidates else (slice(None), span), None))
        return blocks
    *groups, count, length, _ = documents.shape
    # A block of several groups takes whole groups, so that its rows are contiguous.
    for span in group_runs(groups[0] if groups else 1, count, max_tokens // length):
        rows, n_documents = slice(span.start * length, span.stop * length), span.stop - span.start
        if groups:
            group, first = divmod(span.start, count)
            index = slice(group, group + max(1, n_documents // count)), slice(first, first + min(n_documents, count))
            blocks.append(DocumentBlock(rows, span, index, index, index[0]))
        else:
            blocks.append(DocumentBlock(rows, span, (span,), (slice(None), span), None))
    return blocks


def of_block(tensors: Tensors, block: DocumentBlock, embeddings: Tensor) -> Tensors:
    """The tensors of a block, given the embeddings [tokens of the block, d] of its documents."""
    documents = embeddings.view(*at(tensors.documents, block.place).shape[:-1], embeddings.shape[-1])
    tensors = tensors._replace(documents=documents)
    if block is ALL_DOCUMENTS:
        return tensors
    queries, _, queries_mask, documents_mask, _, bounds, candidates = tensors
    if bounds is not None:
        assert isinstance(block.documents, slice)
        start, end = block.documents.start, block.documents.stop
        return tensors._replace(
            documents_cu_seqlens=bounds[start : end + 1] - block.rows.start,
            candidates_cu_seqlens=None if candidates is None else candidates.clamp(start, end) - start,
        )
    if documents_mask is not None:
        documents_mask = documents_mask[block.place]
    if block.queries is not None:
        queries = queries[block.queries]
        queries_mask = None if queries_mask is None else queries_mask[block.queries]
    return Tensors(queries, documents, queries_mask, documents_mask)


def compute_by_block(
    tensors: Tensors,
    options: Options,
    with_argmax: bool,
    blocks: list[DocumentBlock],
    produce: Callable[[DocumentBlock], Tensor],
) -> tuple[Tensor, Tensor | None]:
    """`compute` for documents whose embeddings [tokens of a block, d] `produce` returns block by block."""
    if blocks == [ALL_DOCUMENTS]:
        return compute(of_block(tensors, ALL_DOCUMENTS, produce(ALL_DOCUMENTS)), options, with_argmax)
    scores, argmax = empty_results(tensors, options, with_argmax)
    for block in blocks:
        block_scores, block_argmax = compute(of_block(tensors, block, produce(block)), options, with_argmax)
        scores[block.scores].copy_(block_scores)
        if block_argmax is not None:
            argmax[block.documents].copy_(block_argmax)
    return scores, argmax if with_argmax else None
