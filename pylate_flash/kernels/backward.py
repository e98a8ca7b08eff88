"""The backward: every query token takes one row from, and sends one row to, the document token that won.

No product is taken. `_gather_kernel` sums, for a block of query rows, the winning document rows over the documents in
their order. For the other gradient the winners are grouped by destination (a stable sort per document), and
`_collect_kernel` sums each destination's query rows in that order. Both accumulate in float32 registers and write every
row once, so the result is bitwise reproducible, and neither uses atomics.

Layout as in `kernels.forward`; `winners` is [G, K, rows] with rows = Nq / G * Lq, and -1 where no gradient flows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launcher

# Winners that are sorted at once; a sorted one takes about 20 bytes of scratch.
_SORT_BUDGET = 1 << 22
# Query rows that one program sums, and the largest part of their embeddings that it takes.
_GATHERED_ROWS = 32
_MAX_EMBEDDING_BLOCK = 128


@triton.jit(do_not_specialize=["n_rows", "query_length", "n_documents", "document_length"])
def _gather_kernel(
    grad_scores_ptr, documents_ptr, documents_scale_ptr, winners_ptr, grad_queries_ptr,
    n_rows, query_length, n_documents, document_length,
    stride_group, stride_document, stride_document_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """grad_queries[row] = sum over documents of grad_score * documents[winner], rows of one group of the layout."""
    n_blocks = tl.cdiv(n_rows, BLOCK_ROWS)
    group = (tl.program_id(0) // n_blocks).to(tl.int64)
    rows = tl.program_id(0) % n_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_exists = rows < n_rows
    queries = group * (n_rows // query_length) + rows // query_length
    dims = tl.program_id(1) * BLOCK_EMBEDDING + tl.arange(0, BLOCK_EMBEDDING)
    dim_exists = dims < EMBEDDING
    total = tl.zeros([BLOCK_ROWS, BLOCK_EMBEDDING], tl.float32)
    for document in tl.range(0, n_documents):
        flat = group * n_documents + document
        winner = tl.load(winners_ptr + flat * n_rows + rows, mask=row_exists, other=-1).to(tl.int32)
        won = winner >= 0
        weight = tl.load(grad_scores_ptr + queries * n_documents + document, mask=won, other=0.0)
        if NORMALIZE:
            weight *= tl.load(documents_scale_ptr + flat * document_length + winner, mask=won, other=0.0)
        base = documents_ptr + group * stride_group + tl.cast(document, tl.int64) * stride_document
        tile = tl.load(
            base + winner.to(tl.int64)[:, None] * stride_document_token + dims[None, :],
            mask=won[:, None] & dim_exists[None, :],
            other=0.0,
        )
        total += weight[:, None] * tile.to(tl.float32)
    offset = (group * n_rows + rows)[:, None] * EMBEDDING + dims[None, :]
    tl.store(
        grad_queries_ptr + offset,
        total.to(grad_queries_ptr.dtype.element_ty),
        mask=row_exists[:, None] & dim_exists[None, :],
    )


@triton.jit(do_not_specialize=["first_document", "n_rows", "query_length", "n_documents", "document_length"])
def _collect_kernel(
    grad_scores_ptr, queries_ptr, queries_scale_ptr, order_ptr, starts_ptr, grad_documents_ptr,
    first_document, n_rows, query_length, n_documents, document_length,
    stride_query, stride_query_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_SOURCES: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """grad_documents[j, t] = sum of grad_score * queries[row] over the rows that t won, in the order of the rows.

    `order` [documents of the chunk, rows] lists each document's rows by the token that won them, and `starts`
    [documents of the chunk, Ld + 1] tells where each token's rows begin. Documents count over all groups.
    """
    local = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0)
    flat = first_document + local
    group = flat // n_documents
    document = flat % n_documents
    first = tl.load(starts_ptr + local * (document_length + 1) + token).to(tl.int32)
    last = tl.load(starts_ptr + local * (document_length + 1) + token + 1).to(tl.int32)
    dims = tl.program_id(2) * BLOCK_EMBEDDING + tl.arange(0, BLOCK_EMBEDDING)
    dim_exists = dims < EMBEDDING
    total = tl.zeros([BLOCK_SOURCES, BLOCK_EMBEDDING], tl.float32)
    for start in tl.range(first, last, BLOCK_SOURCES):
        sources = start + tl.arange(0, BLOCK_SOURCES)
        exists = sources < last
        row = tl.load(order_ptr + local * n_rows + sources, mask=exists, other=0).to(tl.int64)
        query = group * (n_rows // query_length) + row // query_length
        weight = tl.load(grad_scores_ptr + query * n_documents + document, mask=exists, other=0.0)
        if NORMALIZE:
            weight *= tl.load(queries_scale_ptr + group * n_rows + row, mask=exists, other=0.0)
        tile = tl.load(
            queries_ptr
            + query[:, None] * stride_query
            + (row % query_length)[:, None] * stride_query_token
            + dims[None, :],
            mask=exists[:, None] & dim_exists[None, :],
            other=0.0,
        )
        total += weight[:, None] * tile.to(tl.float32)
    offset = (flat * document_length + token) * EMBEDDING + dims
    tl.store(
        grad_documents_ptr + offset,
        tl.sum(total, axis=0).to(grad_documents_ptr.dtype.element_ty),
        mask=dim_exists,
    )


def _embedding_block(size: int) -> int:
    return min(_MAX_EMBEDDING_BLOCK, triton.next_power_of_2(size))


_gather = Launcher(_gather_kernel)
_collect = Launcher(_collect_kernel)


def maxsim_backward(
    grad_scores: Tensor,
    queries: Tensor,
    documents: Tensor,
    winners: Tensor,
    queries_scale: Tensor | None,
    documents_scale: Tensor | None,
    need_queries: bool,
    need_documents: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients [Nq, Lq, d] and [G, K, Ld, d] of the embeddings, or of the scaled ones, from `grad_scores` [Nq, K].

    In the type of the embeddings, or in float32 where there are scales, as their Jacobian is yet to come.
    """
    dtype = queries.dtype if queries_scale is None else torch.float32
    return (
        _backward_queries(grad_scores, queries, documents, winners, documents_scale, dtype) if need_queries else None,
        _backward_documents(grad_scores, queries, documents, winners, queries_scale, dtype) if need_documents else None,
    )


def _backward_queries(
    grad_scores: Tensor, queries: Tensor, documents: Tensor, winners: Tensor, documents_scale: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Gradient [Nq, Lq, d] of the (scaled) queries in `dtype`."""
    groups, candidates, length, size = documents.shape
    rows = winners.shape[-1]
    grad_queries = torch.empty(queries.shape, dtype=dtype, device=queries.device)
    block_embedding = _embedding_block(size)
    _gather.bind(
        (triton.cdiv(rows, _GATHERED_ROWS) * groups, triton.cdiv(size, block_embedding), 1),
        (rows, queries.shape[1], candidates, length),
        documents.stride()[:3],
        (size, block_embedding, _GATHERED_ROWS, documents_scale is not None),
        num_warps=4,
        num_stages=3,
    )(grad_scores, documents, documents_scale, winners, grad_queries)
    return grad_queries


def _backward_documents(
    grad_scores: Tensor, queries: Tensor, documents: Tensor, winners: Tensor, queries_scale: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Gradient [G, K, Ld, d] of the (scaled) documents in `dtype`."""
    groups, candidates, length, size = documents.shape
    rows = winners.shape[-1]
    grad_documents = torch.empty(documents.shape, dtype=dtype, device=queries.device)
    winners = winners.view(groups * candidates, rows)
    tokens = torch.arange(length + 1, dtype=winners.dtype, device=winners.device)
    block_embedding = _embedding_block(size)
    step = max(1, min(winners.shape[0], _SORT_BUDGET // rows, 65535))
    for first in range(0, winners.shape[0], step):
        sorted_winners, order = torch.sort(winners[first : first + step], dim=-1, stable=True)
        starts = torch.searchsorted(sorted_winners, tokens.expand(order.shape[0], -1).contiguous(), out_int32=True)
        _collect.bind(
            (length, order.shape[0], triton.cdiv(size, block_embedding)),
            (first, rows, queries.shape[1], candidates, length),
            (queries.stride(0), queries.stride(1)),
            (size, block_embedding, 8, queries_scale is not None),
            num_warps=1,
            num_stages=3,
        )(grad_scores, queries, queries_scale, order, starts, grad_documents)
    return grad_documents
