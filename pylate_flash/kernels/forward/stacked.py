"""The forward of stacked queries: one tall matrix of the tokens of all queries, which meets a run of documents.

A tile of up to 256 rows spans several queries and feeds the tensor cores. It stays on the chip while the program walks
the documents of its run; under SPLIT, where an embedding is too long for that, both operands are read block by block
instead, as in any matrix product. An embedding that a power of two would pad too much is held as two blocks, the second
of SECOND elements.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..grids import ForwardPlan
from ..launch import Kernel
from ..reductions import larger, max_along
from .common import SUMMED_EMBEDDING, document_range, numbers_of, winner_of, with_masked_zeros
from .cuts import NO_WINNER, document_position, documents_of_cut, reaches_into, tokens_of_piece
from .inputs import Inputs


@triton.jit(
    do_not_specialize=[
        "n_queries", "query_length", "padded_query_length", "n_documents", "document_length", "n_runs", "run",
        "empty_score", "whole",
    ]
)  # fmt: skip
def _stacked_kernel(
    queries_ptr, documents_ptr, queries_mask_ptr, active_ptr, bounds_ptr, queries_scale_ptr, documents_scale_ptr,
    cu_seqlens_ptr, offsets_ptr, sums_ptr, winners_ptr, pieces_ptr, keys_ptr,
    n_queries, query_length, padded_query_length, n_documents, document_length, n_runs, run, empty_score, whole,
    stride_query, stride_query_token, stride_group, stride_document, stride_document_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    PACKED: tl.constexpr,
    IN_PIECES: tl.constexpr,
    HAS_QUERIES_MASK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    HAS_DOCUMENTS_MASK: tl.constexpr,
    ZERO_MASKED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    WITH_WINNERS: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERY_UNIT: tl.constexpr,
    DOCUMENT_UNIT: tl.constexpr,
    OFFSET_UNIT: tl.constexpr,
):  # fmt: skip
    """Sums of maxima over groups of GROUP query rows, [G, Nq / G * groups per query, K], and winners [G, K, rows].

    `n_queries` counts the queries of one group of the layout. Programs that run together differ in their row block
    first, so they read the same documents, out of L2. A run is `run` documents or, of packed ones, the cut of that size
    (`kernels.cuts`); under IN_PIECES, documents of more than `whole` tokens are in pieces.
    """
    stride_query *= QUERY_UNIT
    stride_query_token *= QUERY_UNIT
    stride_group *= DOCUMENT_UNIT
    stride_document *= DOCUMENT_UNIT
    stride_document_token *= DOCUMENT_UNIT
    n_row_blocks = tl.cdiv(n_queries * padded_query_length, BLOCK_ROWS)
    row_block = tl.program_id(0) % n_row_blocks
    run_index = (tl.program_id(0) // n_row_blocks) % n_runs
    group = tl.program_id(0) // (n_row_blocks * n_runs)
    if PACKED:
        cut_start = run_index.to(tl.int64) * run
        first, last = documents_of_cut(cu_seqlens_ptr, n_documents, cut_start, run)
    else:
        first = run_index * run
        last = tl.minimum(first + run, n_documents)
    if IN_PIECES:
        first_whole = first
        first -= reaches_into(cu_seqlens_ptr, first - 1, cut_start, whole)

    rows = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    query = rows // padded_query_length
    token = rows % padded_query_length
    row_exists = (query < n_queries) & (token < query_length)
    global_row = (group * n_queries + query).to(tl.int64) * query_length + token
    row_active = row_exists
    if HAS_QUERIES_MASK:
        row_weight = tl.load(queries_mask_ptr + global_row, mask=row_exists, other=0)
        row_active = row_active & (row_weight != 0)
    dims = tl.arange(0, BLOCK_EMBEDDING)
    query_offset = (group * n_queries + query).to(tl.int64) * stride_query + token * stride_query_token
    query_rows = queries_ptr + query_offset[:, None] + dims[None, :]
    if not SPLIT:
        query_tile = tl.load(query_rows, mask=row_exists[:, None] & (dims < EMBEDDING)[None, :], other=0.0)
    if SECOND > 0:
        second_dims = BLOCK_EMBEDDING + tl.arange(0, SECOND)
        query_rows = queries_ptr + query_offset[:, None] + second_dims[None, :]
        second_exists = row_exists[:, None] & (second_dims < EMBEDDING)[None, :]
        second_query_tile = tl.load(query_rows, mask=second_exists, other=0.0)
    if NORMALIZE:
        row_scale = tl.load(queries_scale_ptr + global_row, mask=row_exists, other=0.0)

    # flatten: the two loops become one, so loads of the next document overlap the products of this one. Measured on an
    # H200 at the same tile: 0.493 to 0.428 ms at 1 x 1000, 1024 x 1024; 0.126 to 0.094 ms at 32 x 1024, 32 x 180.
    # From 0 on: of what is derived from a loop that begins at the result of a search, Triton 3.9 does not know how
    # addresses are aligned, and loads embeddings by single elements.
    for index in tl.range(0, last - first, flatten=not SPLIT):
        document = first + index
        base, length = document_range(
            documents_ptr, cu_seqlens_ptr, offsets_ptr, group, document, document_length,
            stride_group, stride_document, stride_document_token, PACKED, OFFSET_UNIT,
        )  # fmt: skip
        flat_document = group.to(tl.int64) * n_documents + document
        flat = flat_document * document_length
        if PACKED and NORMALIZE:
            flat = tl.load(cu_seqlens_ptr + document).to(tl.int64)
        if HAS_DOCUMENTS_MASK:
            length = tl.load(bounds_ptr + 2 * flat_document)
        if IN_PIECES:
            # From here on, a piece is a document.
            first_token, length = tokens_of_piece(cu_seqlens_ptr, document, cut_start, run, whole)
            base += first_token.to(tl.int64) * stride_document_token
            flat += first_token
        best = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        key = tl.full([BLOCK_ROWS], NO_WINNER, tl.int32)
        for start in tl.range(0, length, BLOCK_TOKENS):
            tokens = tl.minimum(start + tl.arange(0, BLOCK_TOKENS), length - 1)
            if HAS_DOCUMENTS_MASK:
                tokens = tl.load(active_ptr + flat + tokens)
            token_rows = base + tokens[None, :].to(tl.int64) * stride_document_token + dims[:, None]
            if SPLIT:
                similarities = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
                for sum_start in tl.static_range(0, EMBEDDING, SUMMED_EMBEDDING):
                    products = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
                    for dim in tl.range(sum_start, min(EMBEDDING, sum_start + SUMMED_EMBEDDING), BLOCK_EMBEDDING):
                        exists = dim + dims < EMBEDDING
                        part = tl.load(query_rows + dim, mask=row_exists[:, None] & exists[None, :], other=0.0)
                        tile = tl.load(token_rows + dim, mask=exists[:, None], other=0.0)
                        products = tl.dot(part, tile, products, input_precision=PRECISION)
                    similarities += products
            else:
                if BLOCK_EMBEDDING <= EMBEDDING:
                    tile = tl.load(token_rows)
                else:
                    tile = tl.load(token_rows, mask=(dims < EMBEDDING)[:, None], other=0.0)
                similarities = tl.dot(query_tile, tile, input_precision=PRECISION)
                if SECOND > 0:
                    token_rows = base + tokens[None, :].to(tl.int64) * stride_document_token + second_dims[:, None]
                    if BLOCK_EMBEDDING + SECOND == EMBEDDING:
                        tile = tl.load(token_rows)
                    else:
                        tile = tl.load(token_rows, mask=(second_dims < EMBEDDING)[:, None], other=0.0)
                    similarities = tl.dot(second_query_tile, tile, similarities, input_precision=PRECISION)
            if NORMALIZE:
                similarities *= tl.load(documents_scale_ptr + flat + tokens)[None, :]
            tile_best = max_along(similarities, 1)
            if WITH_WINNERS:
                won = (similarities == tile_best[:, None]) | (similarities != similarities)
                tile_key = tl.min(tl.where(won, tokens[None, :], NO_WINNER), axis=1)
                # A later tile must be strictly better, or the first NaN.
                later = (tile_best > best) | ((tile_best != tile_best) & (best == best))
                key = tl.where(later, tile_key, key)
            best = larger(best, tile_best)

        stored = row_exists
        if IN_PIECES:
            # Looked up again, as the loop has no registers to keep it in.
            is_whole = document_position(cu_seqlens_ptr, document)[1] <= whole
            stored = row_exists & is_whole
            if is_whole == 0:
                slot = 2 * run_index + (document >= first_whole).to(tl.int32)
                piece_row = (slot * n_row_blocks + row_block).to(tl.int64) * BLOCK_ROWS
                tl.store(pieces_ptr + piece_row + tl.arange(0, BLOCK_ROWS), best)
                if WITH_WINNERS:
                    tl.store(keys_ptr + piece_row + tl.arange(0, BLOCK_ROWS), key)
        counted = row_active & (length > 0)
        winner = winner_of(key, best)
        if ZERO_MASKED:
            best, winner = with_masked_zeros(best, winner, tl.load(bounds_ptr + 2 * flat_document + 1), document_length)
        if WITH_WINNERS:
            winners_row = flat_document * n_queries * query_length + query.to(tl.int64) * query_length + token
            winner = tl.where(counted, winner, -1)
            tl.store(winners_ptr + winners_row, winner.to(winners_ptr.dtype.element_ty), mask=stored)
        if NORMALIZE:
            best *= row_scale
        if WEIGHTED:
            best *= row_weight.to(tl.float32)
        best = tl.where(counted, best, 0.0)
        sums = tl.sum(tl.reshape(best, [BLOCK_ROWS // GROUP, GROUP]), axis=1)
        groups_per_query = padded_query_length // GROUP
        sum_row = row_block * (BLOCK_ROWS // GROUP) + tl.arange(0, BLOCK_ROWS // GROUP)
        if PACKED or HAS_DOCUMENTS_MASK:
            # One of the sums of a query is the score of an empty document; the others add nothing to it.
            sums = tl.where(length > 0, sums, tl.where(sum_row % groups_per_query == 0, empty_score, 0.0))
        sums_offset = (group * n_queries * groups_per_query + sum_row).to(tl.int64) * n_documents + document
        sum_exists = sum_row < n_queries * groups_per_query
        if IN_PIECES:
            sum_exists = sum_exists & is_whole
        tl.store(sums_ptr + sums_offset, sums, mask=sum_exists)


_stacked = Kernel(_stacked_kernel)


def score_stacked(problem: Problem, plan: ForwardPlan, inputs: Inputs, sums: Tensor, winners: Tensor | None) -> None:
    """Leave the sums [groups, queries, n_sums, n_documents] of every score, and the winners."""
    kind = problem.kind
    _stacked(
        (plan.row_blocks * plan.n_runs * (problem.groups if kind.cu_seqlens is None else 1), 1, 1),
        (
            inputs.queries, inputs.documents, inputs.queries_mask, inputs.active, inputs.bounds, inputs.queries_scale,
            inputs.documents_scale, inputs.cu_seqlens, inputs.offsets, sums, winners, inputs.pieces,
            inputs.piece_winners,
        ),
        (*numbers_of(problem, plan), plan.cuts.whole), plan.strides, plan.form.constants, plan.form.warps,
    )  # fmt: skip
