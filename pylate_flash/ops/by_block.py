"""Scores of documents whose embeddings are made a block at a time: of hidden states, 8 bits or residual codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..problem import Options, Tensors, empty_results
from .compute import compute
from .tiles import group_runs, sequence_blocks


class DocumentBlock(NamedTuple):
    """Documents whose embeddings are made at once."""

    # Among all tokens, and among the documents of all groups.
    rows: slice
    documents: slice | tuple[()]
    # In what documents are made of, in the scores, and, where documents have queries of their own, in these; else None.
    place: tuple[slice, ...]
    scores: tuple[Any, ...]
    queries: slice | None


# All of a tensor, without a view of it.
_ALL: tuple[()] = ()
ALL_DOCUMENTS = DocumentBlock(slice(None), _ALL, _ALL, _ALL, None)


def at(tensor: Tensor, place: Any) -> Tensor:
    """What a block has of a tensor."""
    return tensor if place is _ALL else tensor[place]


def document_blocks(tensors: Tensors, most: int) -> list[DocumentBlock]:
    """All documents in blocks of at most `most` tokens, or of one document; of `documents`, only the shape matters."""
    documents, cu_seqlens = tensors.documents, tensors.documents_cu_seqlens
    if documents.shape[:-1].numel() <= most:
        return [ALL_DOCUMENTS]
    blocks = []
    if cu_seqlens is not None:
        bounds, own = cu_seqlens.cpu().numpy().astype(np.int64), tensors.candidates_cu_seqlens is not None
        for start, end in sequence_blocks(bounds, most):
            some, rows = slice(start, end), slice(int(bounds[start]), int(bounds[end]))
            blocks.append(DocumentBlock(rows, some, (rows,), (some,) if own else (slice(None), some), None))
        return blocks
    *groups, count, length, _ = documents.shape
    # Several groups come whole, so that the rows of a block are adjacent.
    for some in group_runs(groups[0] if groups else 1, count, most // length):
        rows, number = slice(some.start * length, some.stop * length), some.stop - some.start
        if groups:
            group, first = divmod(some.start, count)
            place = slice(group, group + max(1, number // count)), slice(first, first + min(number, count))
            blocks.append(DocumentBlock(rows, some, place, place, place[0]))
        else:
            blocks.append(DocumentBlock(rows, some, (some,), (slice(None), some), None))
    return blocks


def of_block(tensors: Tensors, block: DocumentBlock, embeddings: Tensor) -> Tensors:
    """The tensors of a block, of the embeddings [tokens of the block, d] of its documents."""
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
    """`compute` of documents whose embeddings [tokens of a block, d] are produced one block after the other."""
    if blocks == [ALL_DOCUMENTS]:
        return compute(of_block(tensors, ALL_DOCUMENTS, produce(ALL_DOCUMENTS)), options, with_argmax)
    scores, argmax = empty_results(tensors, options, with_argmax)
    for block in blocks:
        some, won = compute(of_block(tensors, block, produce(block)), options, with_argmax)
        scores[block.scores].copy_(some)
        if won is not None:
            argmax[block.documents].copy_(won)
    return scores, argmax if with_argmax else None
