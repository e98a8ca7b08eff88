"""The forward of chosen query tokens: document tokens are the rows of the product, the chosen ones its columns.

The rows of the query are gathered where they lie, once for every document. The running maximum is elementwise, with no
work across lanes, until the document ends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem, Tensors
from ..forward.common import document_range, winner_of, with_masked_zeros
from ..forward.cuts import NO_WINNER
from ..launch import Kernel
from ..reductions import larger, max_along
from ..rows import active_tokens, inverse_norms
from ..soft.common import split_products
from .plan import sparse_plan

# Places of chosen tokens that a program compares its own with at once.
_COMPARED = tl.constexpr(16)


@triton.jit(
    do_not_specialize=[
        "n_queries", "query_length", "n_documents", "document_length", "n_chosen", "stride_chosen_query",
        "stride_chosen_document", "empty_score",
    ]
)  # fmt: skip
def _sparse_kernel(
    queries_ptr, documents_ptr, query_tokens_ptr, queries_mask_ptr, active_ptr, bounds_ptr, queries_scale_ptr,
    documents_scale_ptr, cu_seqlens_ptr, scores_ptr, winners_ptr,
    n_queries, query_length, n_documents, document_length, n_chosen, stride_chosen_query, stride_chosen_document,
    empty_score,
    stride_query, stride_query_token, stride_group, stride_document, stride_document_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_QUERIES_MASK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    HAS_DOCUMENTS_MASK: tl.constexpr,
    ZERO_MASKED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    WITH_WINNERS: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERY_UNIT: tl.constexpr,
    DOCUMENT_UNIT: tl.constexpr,
):  # fmt: skip
    """The score of one query and one document, and where they are asked for the winners of the chosen tokens.

    Grid: queries x documents. Under CANDIDATES, every query has documents of its own; else the programs that run
    together share a document.
    """
    stride_query *= QUERY_UNIT
    stride_query_token *= QUERY_UNIT
    stride_group *= DOCUMENT_UNIT
    stride_document *= DOCUMENT_UNIT
    stride_document_token *= DOCUMENT_UNIT
    if CANDIDATES:
        query = (tl.program_id(0) // n_documents).to(tl.int64)
        document = (tl.program_id(0) % n_documents).to(tl.int64)
        flat_document = query * n_documents + document
        first_row = flat_document * query_length
    else:
        document = (tl.program_id(0) // n_queries).to(tl.int64)
        query = (tl.program_id(0) % n_queries).to(tl.int64)
        flat_document = document
        first_row = (document * n_queries + query) * query_length
    base, length = document_range(
        documents_ptr, cu_seqlens_ptr, None, query, document, document_length, stride_group, stride_document,
        stride_document_token, PACKED, 0,
    )  # fmt: skip
    flat = flat_document * document_length
    if PACKED:
        flat = tl.load(cu_seqlens_ptr + document).to(tl.int64)
    if HAS_DOCUMENTS_MASK:
        length = tl.load(bounds_ptr + 2 * flat_document)
    query_tokens_ptr += query * stride_chosen_query + document * stride_chosen_document
    slots = tl.arange(0, BLOCK_COLUMNS)
    dims = tl.arange(0, BLOCK_EMBEDDING)
    inside = dims < EMBEDDING

    total = 0.0
    for first in tl.range(0, n_chosen, BLOCK_COLUMNS):
        columns = first + slots
        chosen = tl.load(query_tokens_ptr + columns, mask=columns < n_chosen, other=-1)
        counted = (chosen >= 0) & (chosen < query_length)
        # A token that is named twice counts where it is named first. So few are compared at once that the comparisons
        # take fewer registers than the products do.
        for start in tl.range(0, tl.minimum(first + BLOCK_COLUMNS, n_chosen), _COMPARED):
            others = start + tl.arange(0, _COMPARED)
            other = tl.load(query_tokens_ptr + others, mask=others < n_chosen, other=-1)
            again = (other[None, :] == chosen[:, None]) & (others[None, :] < columns[:, None])
            counted = counted & (tl.max(again.to(tl.int32), axis=1) == 0)
        token = tl.where(counted, chosen, 0).to(tl.int64)
        if HAS_QUERIES_MASK:
            weight = tl.load(queries_mask_ptr + query * query_length + token, mask=counted, other=0)
            counted = counted & (weight != 0)
        query_columns = queries_ptr + query * stride_query + token * stride_query_token
        if not SPLIT:
            query_tile = tl.load(
                query_columns[None, :] + dims[:, None], mask=counted[None, :] & inside[:, None], other=0.0
            )
        best = tl.full([BLOCK_TOKENS, BLOCK_COLUMNS], float("-inf"), tl.float32)
        if WITH_WINNERS:
            key = tl.full([BLOCK_TOKENS, BLOCK_COLUMNS], NO_WINNER, tl.int32)
        for start in tl.range(0, length, BLOCK_TOKENS):
            tokens = tl.minimum(start + tl.arange(0, BLOCK_TOKENS), length - 1)
            if HAS_DOCUMENTS_MASK:
                tokens = tl.load(active_ptr + flat + tokens)
            token_rows = base + tokens.to(tl.int64) * stride_document_token
            if SPLIT:
                similarities = split_products(
                    token_rows, query_columns, tokens >= 0, counted, EMBEDDING, BLOCK_EMBEDDING, BLOCK_TOKENS,
                    BLOCK_COLUMNS, PRECISION,
                )  # fmt: skip
            else:
                if BLOCK_EMBEDDING == EMBEDDING:
                    tile = tl.load(token_rows[:, None] + dims[None, :])
                else:
                    tile = tl.load(token_rows[:, None] + dims[None, :], mask=inside[None, :], other=0.0)
                similarities = tl.dot(tile, query_tile, input_precision=PRECISION)
            if NORMALIZE:
                similarities *= tl.load(documents_scale_ptr + flat + tokens)[:, None]
            if WITH_WINNERS:
                later = (similarities > best) | ((similarities != similarities) & (best == best))
                key = tl.where(later, tokens[:, None], key)
            best = larger(best, similarities)

        column_best = max_along(best, 0)
        winner = tl.full([BLOCK_COLUMNS], -1, tl.int32)
        if WITH_WINNERS:
            won = (best == column_best[None, :]) | (best != best)
            winner = winner_of(tl.min(tl.where(won, key, NO_WINNER), axis=0), column_best)
        if ZERO_MASKED:
            first_masked = tl.load(bounds_ptr + 2 * flat_document + 1)
            column_best, winner = with_masked_zeros(column_best, winner, first_masked, document_length)
        counted = counted & (length > 0)
        if WITH_WINNERS:
            tl.store(winners_ptr + first_row + token, winner.to(winners_ptr.dtype.element_ty), mask=counted)
        if NORMALIZE:
            column_best *= tl.load(queries_scale_ptr + query * query_length + token, mask=counted, other=0.0)
        if WEIGHTED:
            column_best *= weight.to(tl.float32)
        total += tl.sum(tl.where(counted, column_best, 0.0), axis=0)
    if PACKED or HAS_DOCUMENTS_MASK:
        total = tl.where(length > 0, total, empty_score)
    tl.store(scores_ptr + query * n_documents + document, total)


_sparse = Kernel(_sparse_kernel)


def sparse_forward(problem: Problem, tensors: Tensors, query_tokens: Tensor, winners: Tensor | None) -> Tensor:
    """Scores [Nq, K] or [Nq, Nd], float32; winners of the chosen tokens are written into `winners`, if any.

    Tensors are as in `forward.maxsim_forward`, with padded queries; packed documents are met by all of them.
    `query_tokens` [Nq, K or Nd, k], int32 or int64 with contiguous rows, holds positions of query tokens; what is no
    position chooses none. No size is 0, but packed documents may be empty.
    """
    n_chosen, kind = query_tokens.shape[2], problem.kind
    plan = sparse_plan(problem, n_chosen)
    queries, documents, queries_mask, documents_mask, _, cu_seqlens, _ = tensors
    active = bounds = queries_scale = documents_scale = None
    if documents_mask is not None:
        active, bounds = active_tokens(documents_mask)
    if problem.normalize:
        queries_scale, documents_scale = inverse_norms(queries), inverse_norms(documents)
    scores = torch.empty(*problem.scores_shape, dtype=torch.float32, device=problem.device)
    _sparse(
        (plan.programs, 1, 1),
        (
            queries, documents, query_tokens, queries_mask, active, bounds, queries_scale, documents_scale,
            cu_seqlens, scores, winners,
        ),
        (
            problem.n_queries, problem.query_length, problem.n_documents, problem.document_length, n_chosen,
            *query_tokens.stride()[:2], problem.empty_score,
        ),
        plan.strides,
        (
            problem.size, plan.operands.block, plan.operands.split, plan.tile.rows, plan.tile.columns,
            documents.dim() == 4, problem.packed, queries_mask is not None, kind.weighted, documents_mask is not None,
            kind.zero_masked, problem.normalize, winners is not None, kind.precision, *plan.units,
        ),
        (plan.tile.num_warps, plan.tile.num_stages, None),
    )  # fmt: skip
    return scores
