"""The forward: two kernels over the same grouped layout, and the function that launches the right one.

Layout, for both: `queries` [Nq, Lq, d]; `documents` [G, K, Ld, d] with G = 1 (all queries against the same K documents)
or G = Nq (each query against its own K), or packed tokens [T, d] with cu_seqlens. The last dimension is contiguous,
the others have any stride.

`_stacked_kernel` makes one tall matrix of the query tokens, so that a tile of up to 256 rows spans several queries and
feeds the tensor cores, keeps it, and walks a run of documents. `_single_kernel` serves one short query at a time:
document tokens are the rows of the product and query tokens its columns, so that the running maximum is elementwise,
with no work across lanes, until the document ends.

Neither masks the tail of a document: token positions are clamped to the last token, and a token that is seen twice
changes neither the maximum nor the lowest index that attains it. Nor does either compare masked tokens: under a mask,
both walk the list of the active ones (`kernels.masks`), so that padding and skipped tokens are never loaded. Under
masking="zero" the masked ones take part afterwards, all at once, with a 0.

Packed documents are cut by their tokens and not by their number (`kernels.cuts`): `_stacked_kernel` walks the documents
of a cut, and takes its piece of one that is too long for a program. `_single_kernel`, whose programs walk two documents
at most, has programs of their own for the pieces.

An embedding of more than 256 bytes does not stay in shared memory: under SPLIT a similarity is summed over blocks of
the embedding, and both operands are read block by block, as in any matrix product.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cuts import (
    NO_WINNER,
    Cuts,
    document_position,
    documents_of_cut,
    find_piece,
    merge_pieces,
    owner_of,
    pieces_scratch,
    plan_cuts,
    reaches_into,
    tokens_of_piece,
)
from .launch import Launch, Launcher, Sequence
from .masks import active_tokens, bound_active_tokens
from .norms import inverse_norm, inverse_norms
from .overlap import wait_for_previous_kernel
from .reductions import larger, max_along
from .tiles import (
    SUMMED_EMBEDDING,
    architecture,
    copied_by_16_bytes,
    embedding_block,
    hopper_tile,
    single_tile,
    stacked_tile,
)

# Up to this many query tokens, one query is scored by `_single_kernel`.
_SINGLE_MAX_QUERY_LENGTH = 64
# Registers of a processor.
_REGISTERS = 1 << 16
# Rows whose maxima a kernel may sum; a query longer than `_GROUP` tokens is padded to a multiple of that.
_GROUPS = (1, 8, 16, 32, 64, 128)
_GROUP = 16
_SUMMED_EMBEDDING = tl.constexpr(SUMMED_EMBEDDING)


@triton.jit
def _winner_of(key, best):
    """The winning token, -1 where no gradient flows because the best similarity is -inf."""
    return tl.where((key == NO_WINNER) | (best == float("-inf")), -1, key)


@triton.jit
def _with_masked_zeros(best, winner, first_masked, document_length):
    """Best similarities and winners after the masked tokens, from `first_masked` on, have taken part with a 0."""
    zero_wins = (best < 0.0) | ((best == 0.0) & (first_masked < winner))
    zero_wins = zero_wins & (first_masked < document_length)
    return tl.where(zero_wins, 0.0, best), tl.where(zero_wins, -1, winner)


@triton.jit
def _document_range(
    documents_ptr, cu_seqlens_ptr, group, document, document_length, stride_group, stride_document, stride_token,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Address of a document's first token, and its number of tokens."""
    if PACKED:
        start = tl.load(cu_seqlens_ptr + document).to(tl.int64)
        length = (tl.load(cu_seqlens_ptr + document + 1).to(tl.int64) - start).to(tl.int32)
        return documents_ptr + start * stride_token, length
    offset = tl.cast(group, tl.int64) * stride_group + tl.cast(document, tl.int64) * stride_document
    return documents_ptr + offset, document_length


@triton.jit(
    do_not_specialize=[
        "n_queries", "query_length", "padded_query_length", "n_documents", "document_length", "n_runs", "run", "whole"
    ]
)  # fmt: skip
def _stacked_kernel(
    queries_ptr, documents_ptr, queries_mask_ptr, active_ptr, bounds_ptr, queries_scale_ptr, documents_scale_ptr,
    cu_seqlens_ptr, sums_ptr, winners_ptr, pieces_ptr, keys_ptr,
    n_queries, query_length, padded_query_length, n_documents, document_length, n_runs, run, whole,
    stride_query, stride_query_token, stride_group, stride_document, stride_document_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    PACKED: tl.constexpr,
    IN_PIECES: tl.constexpr,
    HAS_QUERIES_MASK: tl.constexpr,
    HAS_DOCUMENTS_MASK: tl.constexpr,
    ZERO_MASKED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    WITH_WINNERS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of maxima over groups of GROUP query rows, [G, Nq / G * groups per query, K], and winners [G, K, rows].

    `n_queries` counts the queries of one group of the layout. Programs that run together differ in their row block
    first, so they read the same documents, out of L2. A run is `run` documents or, of packed ones, the cut of that size
    (`kernels.cuts`); under IN_PIECES, documents of more than `whole` tokens are in pieces.
    """
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
        row_active = row_active & (tl.load(queries_mask_ptr + global_row, mask=row_exists, other=0) != 0)
    dims = tl.arange(0, BLOCK_EMBEDDING)
    query_offset = (group * n_queries + query).to(tl.int64) * stride_query + token * stride_query_token
    query_rows = queries_ptr + query_offset[:, None] + dims[None, :]
    if not SPLIT:
        query_tile = tl.load(query_rows, mask=row_exists[:, None] & (dims < EMBEDDING)[None, :], other=0.0)
    if NORMALIZE:
        row_scale = tl.load(queries_scale_ptr + global_row, mask=row_exists, other=0.0)

    # flatten: the two loops become one, so loads of the next document overlap the products of this one. Measured on an
    # H200 at the same tile: 0.493 to 0.428 ms at 1 x 1000, 1024 x 1024; 0.126 to 0.094 ms at 32 x 1024, 32 x 180.
    for document in tl.range(first, last, flatten=not SPLIT):
        base, length = _document_range(
            documents_ptr, cu_seqlens_ptr, group, document, document_length,
            stride_group, stride_document, stride_document_token, PACKED,
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
                for sum_start in tl.static_range(0, EMBEDDING, _SUMMED_EMBEDDING):
                    products = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
                    for dim in tl.range(sum_start, min(EMBEDDING, sum_start + _SUMMED_EMBEDDING), BLOCK_EMBEDDING):
                        exists = dim + dims < EMBEDDING
                        part = tl.load(query_rows + dim, mask=row_exists[:, None] & exists[None, :], other=0.0)
                        tile = tl.load(token_rows + dim, mask=exists[:, None], other=0.0)
                        products = tl.dot(part, tile, products, input_precision=PRECISION)
                    similarities += products
            else:
                if BLOCK_EMBEDDING == EMBEDDING:
                    tile = tl.load(token_rows)
                else:
                    tile = tl.load(token_rows, mask=(dims < EMBEDDING)[:, None], other=0.0)
                similarities = tl.dot(query_tile, tile, input_precision=PRECISION)
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
        winner = _winner_of(key, best)
        if ZERO_MASKED:
            best, winner = _with_masked_zeros(
                best, winner, tl.load(bounds_ptr + 2 * flat_document + 1), document_length
            )
        if WITH_WINNERS:
            winners_row = flat_document * n_queries * query_length + query.to(tl.int64) * query_length + token
            winner = tl.where(counted, winner, -1)
            tl.store(winners_ptr + winners_row, winner.to(winners_ptr.dtype.element_ty), mask=stored)
        if NORMALIZE:
            best *= row_scale
        best = tl.where(counted, best, 0.0)
        sums = tl.sum(tl.reshape(best, [BLOCK_ROWS // GROUP, GROUP]), axis=1)
        groups_per_query = padded_query_length // GROUP
        sum_row = row_block * (BLOCK_ROWS // GROUP) + tl.arange(0, BLOCK_ROWS // GROUP)
        sums_offset = (group * n_queries * groups_per_query + sum_row).to(tl.int64) * n_documents + document
        sum_exists = sum_row < n_queries * groups_per_query
        if IN_PIECES:
            sum_exists = sum_exists & is_whole
        tl.store(sums_ptr + sums_offset, sums, mask=sum_exists)


@triton.jit(
    do_not_specialize=[
        "n_queries", "query_length", "n_documents", "document_length", "per_query", "run", "stride_sums",
        "n_pieces", "cut", "whole",
    ]
)  # fmt: skip
def _single_kernel(
    queries_ptr, documents_ptr, queries_mask_ptr, active_ptr, bounds_ptr, cu_seqlens_ptr, candidates_ptr,
    sums_ptr, winners_ptr, pieces_ptr, keys_ptr,
    n_queries, query_length, n_documents, document_length, per_query, run, stride_sums, n_pieces, cut, whole,
    stride_query, stride_query_token, stride_group, stride_document, stride_document_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    PACKED: tl.constexpr,
    IN_PIECES: tl.constexpr,
    HAS_CANDIDATES: tl.constexpr,
    HAS_QUERIES_MASK: tl.constexpr,
    HAS_DOCUMENTS_MASK: tl.constexpr,
    ZERO_MASKED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    WITH_WINNERS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of maxima over BLOCK_COLUMNS tokens of one query, [blocks of columns, Nq, K or documents], and winners.

    Grid: (queries x runs of documents, blocks of a query's tokens). With HAS_CANDIDATES, query i owns the documents
    `candidates[i]` to `candidates[i + 1]` of the packed ones, `per_query` at most; otherwise those of its group.
    Under IN_PIECES, the first `n_pieces` programs of the first axis take a piece each of the documents of more than
    `whole` tokens, and the other programs leave those out.
    """
    n_runs = tl.cdiv(per_query, run)
    program = tl.program_id(0)
    if IN_PIECES:
        program = tl.maximum(program - n_pieces, 0)
    query = program // n_runs
    first = program % n_runs * run
    last = n_documents
    sums_ptr += tl.program_id(1).to(tl.int64) * stride_sums
    if HAS_CANDIDATES:
        owned = tl.load(candidates_ptr + query).to(tl.int32)
        first += owned
        last = tl.load(candidates_ptr + query + 1).to(tl.int32)
    else:
        sums_ptr += query.to(tl.int64) * n_documents
    last = tl.minimum(first + run, last)
    if IN_PIECES:
        piece = tl.program_id(0)
        is_piece = piece < n_pieces
        piece_first = n_pieces * 0
        piece_length = piece_first
        if is_piece:
            first, piece_first, piece_length = find_piece(cu_seqlens_ptr, n_documents, piece, cut, whole)
            last = first + (piece_length > 0).to(tl.int32)
            if HAS_CANDIDATES:
                query = owner_of(candidates_ptr, n_queries, first)

    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    column_exists = columns < query_length
    global_column = query.to(tl.int64) * query_length + columns
    column_active = column_exists
    if HAS_QUERIES_MASK:
        column_active = column_active & (tl.load(queries_mask_ptr + global_column, mask=column_exists, other=0) != 0)
    dims = tl.arange(0, BLOCK_EMBEDDING)
    query_columns = (
        queries_ptr + query.to(tl.int64) * stride_query + columns[None, :] * stride_query_token + dims[:, None]
    )
    if not SPLIT:
        query_tile = tl.load(query_columns, mask=column_exists[None, :] & (dims < EMBEDDING)[:, None], other=0.0)
    if NORMALIZE:
        column_squares = tl.zeros([BLOCK_COLUMNS], tl.float32)
        for dim in tl.range(0, EMBEDDING, BLOCK_EMBEDDING):
            exists = column_exists[None, :] & (dim + dims < EMBEDDING)[:, None]
            part = tl.load(query_columns + dim, mask=exists, other=0.0).to(tl.float32)
            column_squares += tl.sum(part * part, axis=0)
        column_scale = inverse_norm(column_squares)

    for document in tl.range(first, last):
        base, length = _document_range(
            documents_ptr, cu_seqlens_ptr, query, document, document_length,
            stride_group, stride_document, stride_document_token, PACKED,
        )  # fmt: skip
        flat_document = tl.cast(document, tl.int64)
        if not HAS_CANDIDATES:
            flat_document += query.to(tl.int64) * n_documents
        flat = flat_document * document_length
        if HAS_DOCUMENTS_MASK:
            length = tl.load(bounds_ptr + 2 * flat_document)
        if IN_PIECES:
            # A piece is a document here, and a document in pieces has no tokens.
            is_whole = length <= whole
            base += piece_first.to(tl.int64) * stride_document_token
            length = tl.where(is_piece, piece_length, tl.where(is_whole, length, 0))
        best = tl.full([BLOCK_TOKENS, BLOCK_COLUMNS], float("-inf"), tl.float32)
        if WITH_WINNERS:
            key = tl.full([BLOCK_TOKENS, BLOCK_COLUMNS], NO_WINNER, tl.int32)
        for start in tl.range(0, length, BLOCK_TOKENS):
            tokens = tl.minimum(start + tl.arange(0, BLOCK_TOKENS), length - 1)
            if HAS_DOCUMENTS_MASK:
                tokens = tl.load(active_ptr + flat + tokens)
            token_rows = base + tokens[:, None].to(tl.int64) * stride_document_token + dims[None, :]
            squares = tl.zeros([BLOCK_TOKENS], tl.float32)
            if SPLIT:
                similarities = tl.zeros([BLOCK_TOKENS, BLOCK_COLUMNS], tl.float32)
                for sum_start in tl.static_range(0, EMBEDDING, _SUMMED_EMBEDDING):
                    products = tl.zeros([BLOCK_TOKENS, BLOCK_COLUMNS], tl.float32)
                    for dim in tl.range(sum_start, min(EMBEDDING, sum_start + _SUMMED_EMBEDDING), BLOCK_EMBEDDING):
                        exists = dim + dims < EMBEDDING
                        part = tl.load(query_columns + dim, mask=column_exists[None, :] & exists[:, None], other=0.0)
                        tile = tl.load(token_rows + dim, mask=exists[None, :], other=0.0)
                        products = tl.dot(tile, part, products, input_precision=PRECISION)
                        if NORMALIZE:
                            squares += tl.sum(tile.to(tl.float32) * tile.to(tl.float32), axis=1)
                    similarities += products
            else:
                if BLOCK_EMBEDDING == EMBEDDING:
                    tile = tl.load(token_rows)
                else:
                    tile = tl.load(token_rows, mask=(dims < EMBEDDING)[None, :], other=0.0)
                similarities = tl.dot(tile, query_tile, input_precision=PRECISION)
                if NORMALIZE:
                    squares = tl.sum(tile.to(tl.float32) * tile.to(tl.float32), axis=1)
            if NORMALIZE:
                similarities *= inverse_norm(squares)[:, None]
            if WITH_WINNERS:
                later = (similarities > best) | ((similarities != similarities) & (best == best))
                key = tl.where(later, tokens[:, None], key)
            best = larger(best, similarities)

        column_best = max_along(best, 0)
        counted = column_active & (length > 0)
        winner = tl.full([BLOCK_COLUMNS], -1, tl.int32)
        if WITH_WINNERS:
            won = (best == column_best[None, :]) | (best != best)
            column_key = tl.min(tl.where(won, key, NO_WINNER), axis=0)
            winner = _winner_of(column_key, column_best)
        stored = column_exists
        if IN_PIECES:
            stored = column_exists & is_whole
            piece_columns = piece.to(tl.int64) * tl.num_programs(1) * BLOCK_COLUMNS + columns
            tl.store(pieces_ptr + piece_columns, column_best, mask=column_exists & is_piece)
            if WITH_WINNERS:
                tl.store(keys_ptr + piece_columns, column_key, mask=column_exists & is_piece)
        if ZERO_MASKED:
            column_best, winner = _with_masked_zeros(
                column_best, winner, tl.load(bounds_ptr + 2 * flat_document + 1), document_length
            )
        if WITH_WINNERS:
            winner = tl.where(counted, winner, -1)
            winners_row = flat_document * query_length + columns
            tl.store(winners_ptr + winners_row, winner.to(winners_ptr.dtype.element_ty), mask=stored)
        if NORMALIZE:
            column_best *= column_scale
        total = tl.sum(tl.where(counted, column_best, 0.0), axis=0)
        if IN_PIECES:
            tl.store(sums_ptr + document, total, mask=is_whole)
        else:
            tl.store(sums_ptr + document, total)


@triton.jit(do_not_specialize=["n_documents", "n_sums", "to_query", "to_sum"])
def _add_sums_kernel(sums_ptr, scores_ptr, n_documents, n_sums, to_query, to_sum, BLOCK: tl.constexpr):
    """scores[query] [n_documents] = its sums, `to_sum` elements from one to the next, in order; blocks x queries."""
    wait_for_previous_kernel()
    n_blocks = tl.cdiv(n_documents, BLOCK)
    query = (tl.program_id(0) // n_blocks).to(tl.int64)
    documents = tl.program_id(0) % n_blocks * BLOCK + tl.arange(0, BLOCK)
    exists = documents < n_documents
    sums_ptr += query * to_query + documents
    total = tl.zeros([BLOCK], tl.float32)
    for index in tl.range(0, n_sums):
        total += tl.load(sums_ptr + tl.cast(index, tl.int64) * to_sum, mask=exists, other=0.0)
    tl.store(scores_ptr + query * n_documents + documents, total, mask=exists)


_stacked = Launcher(_stacked_kernel)
_single = Launcher(_single_kernel)
_add_sums = Launcher(_add_sums_kernel, follows=True)


def maxsim_forward(
    queries: Tensor,
    documents: Tensor,
    queries_mask: Tensor | None,
    documents_mask: Tensor | None,
    normalize: bool,
    zero_masked: bool,
    with_winners: bool,
    precision: str,
) -> tuple[Tensor, Tensor | None]:
    """Scores of `queries` [Nq, Lq, d] against `documents` [G, K, Ld, d]; no dimension is 0.

    Masks are bool and contiguous, of the shape of their embeddings less d.
    Returns float32 scores [Nq, K] and, if asked, winners [G, K, Nq / G * Lq] (int16 where Ld fits, else int32).
    """
    score = bound_maxsim(
        queries.shape, queries.stride(), queries.dtype, queries.device, documents.shape, documents.stride(),
        documents.data_ptr() % 16 == 0, queries_mask is not None, documents_mask is not None, with_winners, normalize,
        zero_masked, precision,
    )  # fmt: skip
    return score(queries, documents, None, queries_mask, documents_mask)


# Of queries, documents and, if these are packed, where each begins; and both masks: scores, and winners or None.
Score = Callable[..., tuple[Tensor, Tensor | None]]


@functools.lru_cache(maxsize=4096)
def bound_maxsim(
    shape: torch.Size,
    query_strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    documents_shape: tuple[int, ...],
    document_strides: tuple[int, ...],
    aligned: bool,
    has_queries_mask: bool,
    has_documents_mask: bool,
    with_winners: bool,
    normalize: bool,
    zero_masked: bool,
    precision: str,
) -> Score:
    """`maxsim_forward` with everything decided but the values.

    The function returned takes the documents, and their mask, in any view of [G, K, Ld, d].
    """
    groups, candidates, length, _ = documents_shape
    layout = (shape, query_strides, dtype, device)
    of_documents = (candidates, length, document_strides[:3])
    masks = (has_queries_mask, has_documents_mask)
    options = (0, 0, with_winners, normalize, zero_masked, precision)
    winners = (groups, candidates, shape[0] // groups * shape[1]) if with_winners else None
    if groups == shape[0] and shape[1] <= _SINGLE_MAX_QUERY_LENGTH:
        single = _bound_single(*layout, *of_documents, 0, *masks, None, None, *options)
        return _whole_single(single[0], single[1], winners, winners_dtype(length))
    stacked = _bound_stacked(*layout, groups, *of_documents, aligned, *masks, None, *options)
    return _whole_stacked(stacked, shape[0], candidates, winners, winners_dtype(length), normalize)


class Slots(NamedTuple):
    """Where the tensors of a forward are in the table of its launches; `none` is always None."""

    queries: int
    documents: int
    queries_mask: int
    documents_mask: int
    none: int
    scores: int
    winners: int


def add_maxsim(
    sequence: Sequence,
    shape: torch.Size,
    query_strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    documents_shape: tuple[int, ...],
    document_strides: tuple[int, ...],
    aligned: bool,
    has_queries_mask: bool,
    has_documents_mask: bool,
    zero_masked: bool,
    precision: str,
    slots: Slots,
) -> None:
    """Add the scores [Nq, K] and winners of `bound_maxsim`, of embeddings that are not normalised."""
    groups, candidates, length, _ = documents_shape
    n_queries, n_documents = shape[0], groups * candidates
    layout = (shape, query_strides, dtype, device)
    of_documents = (candidates, length, document_strides[:3])
    masks = (has_queries_mask, has_documents_mask)
    options = (0, 0, True, False, zero_masked, precision)
    none, scores = slots.none, slots.scores
    tokens = bounds = none
    if has_documents_mask:
        tokens = sequence.region(n_documents * length, torch.int32)
        bounds = sequence.region(n_documents * 2, torch.int32)
        sequence.add(bound_active_tokens(n_documents, length, device), slots.documents_mask, tokens, bounds)
    if groups == n_queries and shape[1] <= _SINGLE_MAX_QUERY_LENGTH:
        launch, sums_shape, _, _ = _bound_single(*layout, *of_documents, 0, *masks, None, None, *options)
        n_sums, to_query, to_sum = sums_shape[0], candidates, n_queries * candidates
        n_before, n_after = 2, 2
    else:
        launch, n_sums, _, _, no_pieces = _bound_stacked(
            *layout, groups, *of_documents, aligned, *masks, None, *options
        )
        to_query, to_sum = n_sums * candidates, candidates
        n_before, n_after = 3, len(no_pieces)
    sums = scores if n_sums == 1 else sequence.region(n_sums * n_queries * candidates, torch.float32)
    sequence.add(
        launch, slots.queries, slots.documents, slots.queries_mask, tokens, bounds, *(none,) * n_before, sums,
        slots.winners, *(none,) * n_after,
    )  # fmt: skip
    if n_sums > 1:
        block = min(1024, triton.next_power_of_2(candidates))
        add = _add_sums.bind(
            (n_queries * triton.cdiv(candidates, block), 1, 1), (candidates, n_sums, to_query, to_sum), (), (block,), 4,
            num_stages=1,
        )  # fmt: skip
        sequence.add(add, sums, scores)


def bound_maxsim_varlen(
    shape: torch.Size,
    query_strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    tokens: int,
    token_stride: int,
    aligned: bool,
    n_documents: int,
    cu_seqlens_dtype: torch.dtype,
    max_document_length: int,
    normalize: bool,
    precision: str,
) -> Score | None:
    """The same for `maxsim_varlen_forward` of queries [Nq, Lq, d], without mask or winners.

    None where a document may be in pieces.
    """
    layout = (shape, query_strides, dtype, device)
    of_documents = (n_documents, 0, (0, 0, token_stride))
    options = (tokens, max_document_length, False, normalize, False, precision)
    if shape[0] == 1 and shape[1] <= _SINGLE_MAX_QUERY_LENGTH:
        single = _bound_single(*layout, *of_documents, 0, False, False, cu_seqlens_dtype, None, *options)
        return _whole_single(single[0], single[1], None, None) if single[2] is None else None
    stacked = _bound_stacked(*layout, 1, *of_documents, aligned, False, False, cu_seqlens_dtype, *options)
    return _whole_stacked(stacked, shape[0], n_documents, None, None, normalize) if stacked.cuts is None else None


def _whole_single(
    launch: Launch,
    sums_shape: tuple[int, ...],
    winners_shape: tuple[int, ...] | None,
    winners_dtype: torch.dtype | None,
) -> Score:
    """A launch of `_single_kernel` for documents that are whole."""

    def score(
        queries: Tensor,
        documents: Tensor,
        cu_seqlens: Tensor | None = None,
        queries_mask: Tensor | None = None,
        documents_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        # Its programs, which meet every query token once, take norms themselves.
        active = (None, None) if documents_mask is None else active_tokens(documents_mask)
        winners = None if winners_shape is None else queries.new_empty(winners_shape, dtype=winners_dtype)
        sums = queries.new_empty(sums_shape, dtype=torch.float32)
        launch(queries, documents, queries_mask, *active, cu_seqlens, None, sums, winners, None, None)
        return (sums[0] if sums_shape[0] == 1 else sums.sum(dim=0)), winners

    return score


def _whole_stacked(
    bound: _Stacked,
    n_queries: int,
    n_documents: int,
    winners_shape: tuple[int, ...] | None,
    winners_dtype: torch.dtype | None,
    normalize: bool,
) -> Score:
    """The same of `_stacked_kernel`, or of its Hopper version."""
    launch, sums_per_query, _, _, no_pieces = bound

    def score(
        queries: Tensor,
        documents: Tensor,
        cu_seqlens: Tensor | None = None,
        queries_mask: Tensor | None = None,
        documents_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        active = (None, None) if documents_mask is None else active_tokens(documents_mask)
        # Norms of their own are read once per token; here a token would be squared once per block of rows.
        scales = (inverse_norms(queries), inverse_norms(documents)) if normalize else (None, None)
        winners = None if winners_shape is None else queries.new_empty(winners_shape, dtype=winners_dtype)
        sums = queries.new_empty((n_queries * sums_per_query, n_documents), dtype=torch.float32)
        launch(queries, documents, queries_mask, *active, *scales, cu_seqlens, sums, winners, *no_pieces)
        if sums_per_query > 1:
            sums = sums.view(n_queries, sums_per_query, n_documents).sum(dim=1)
        return sums, winners

    return score


def maxsim_varlen_forward(
    queries: Tensor,
    queries_mask: Tensor | None,
    documents: Tensor,
    cu_seqlens: Tensor,
    candidates: Tensor | None,
    max_candidates: int,
    max_document_length: int,
    normalize: bool,
    with_winners: bool,
    precision: str,
) -> tuple[Tensor, Tensor | None]:
    """Scores of `queries` [Nq, Lq, d] against packed `documents` [T, d] with `cu_seqlens` [Nd + 1].

    Returns float32 scores [Nq, Nd], or with `candidates` [Nq + 1] (query i owns documents candidates[i] to
    candidates[i + 1], at most `max_candidates` of them) [Nd]; and, if asked, winners [Nd, Nq * Lq], or [Nd, Lq] with
    candidates (int16 where `max_document_length`, or a longer one, fits, else int32). No dimension is 0; a document may
    be empty, and scores 0.
    """
    n_documents = cu_seqlens.shape[0] - 1
    winners = None
    if with_winners:
        rows = queries.shape[1] * (queries.shape[0] if candidates is None else 1)
        winners = queries.new_empty((n_documents, rows), dtype=winners_dtype(max_document_length))
    arguments = (queries, documents, queries_mask, cu_seqlens, winners, max_document_length, normalize, precision)
    if candidates is not None:
        return _launch_single(*arguments, candidates, max_candidates), winners
    short = queries.shape[0] == 1 and queries.shape[1] <= _SINGLE_MAX_QUERY_LENGTH
    return (_launch_single if short else _launch_stacked)(*arguments), winners


def _launch_stacked(
    queries: Tensor,
    documents: Tensor,
    queries_mask: Tensor | None,
    cu_seqlens: Tensor,
    winners: Tensor | None,
    max_document_length: int,
    normalize: bool,
    precision: str,
) -> Tensor:
    n_queries, n_documents = queries.shape[0], cu_seqlens.shape[0] - 1
    launch, sums_per_query, cuts, rows, no_pieces = _bound_stacked(
        queries.shape, queries.stride(), queries.dtype, queries.device, 1, n_documents, 0, (0, 0, documents.stride(0)),
        documents.data_ptr() % 16 == 0, queries_mask is not None, False, cu_seqlens.dtype, documents.shape[0],
        max_document_length, winners is not None, normalize, False, precision,
    )  # fmt: skip
    scales = (inverse_norms(queries), inverse_norms(documents)) if normalize else (None, None)
    sums = queries.new_empty((n_queries * sums_per_query, n_documents), dtype=torch.float32)
    pieces = None if cuts is None else pieces_scratch(cuts, rows, winners is not None, queries.device)
    launch(
        queries, documents, queries_mask, None, None, *scales, cu_seqlens, sums, winners,
        *(no_pieces if pieces is None else pieces),
    )  # fmt: skip
    scores = sums if sums_per_query == 1 else sums.view(n_queries, sums_per_query, n_documents).sum(dim=1)
    if cuts is not None and pieces is not None:
        rows_per_query = _padded_query_length(queries.shape[1])[0]
        merge_pieces(
            pieces, cuts, rows, queries.shape, queries_mask, scales[0], cu_seqlens, None, rows_per_query, scores,
            winners,
        )  # fmt: skip
    return scores


def _launch_single(
    queries: Tensor,
    documents: Tensor,
    queries_mask: Tensor | None,
    cu_seqlens: Tensor,
    winners: Tensor | None,
    max_document_length: int,
    normalize: bool,
    precision: str,
    candidates: Tensor | None = None,
    max_candidates: int = 0,
) -> Tensor:
    launch, shape, cuts, rows = _bound_single(
        queries.shape, queries.stride(), queries.dtype, queries.device, cu_seqlens.shape[0] - 1, 0,
        (0, 0, documents.stride(0)), max_candidates, queries_mask is not None, False, cu_seqlens.dtype,
        None if candidates is None else candidates.dtype, documents.shape[0], max_document_length,
        winners is not None, normalize, False, precision,
    )  # fmt: skip
    sums = queries.new_empty(shape, dtype=torch.float32)
    pieces = (None, None) if cuts is None else pieces_scratch(cuts, rows, winners is not None, queries.device)
    launch(queries, documents, queries_mask, None, None, cu_seqlens, candidates, sums, winners, *pieces)
    scores = sums[0] if shape[0] == 1 else sums.sum(dim=0)
    if cuts is not None:
        queries_scale = inverse_norms(queries) if normalize else None
        merge_pieces(
            pieces, cuts, rows, queries.shape, queries_mask, queries_scale, cu_seqlens, candidates, 0, scores, winners
        )  # fmt: skip
    return scores


def winners_dtype(longest: int) -> torch.dtype:
    return torch.int16 if longest <= 32767 else torch.int32


@functools.cache
def _hopper() -> Launcher:
    """The Hopper version of `_stacked_kernel`, imported where it runs only: not every Triton has Gluon."""
    from .hopper import hopper

    return hopper


# The two functions below decide how a launch is cut up. They are cached, because deciding takes longer than launching;
# every type that a tensor of the launch may have is among their arguments.


class _Stacked(NamedTuple):
    """A launch of stacked queries, and the sums that it leaves per query and document.

    Then, where documents may be in pieces, the cuts and the rows of a piece; and the launch's last tensors, if not.
    """

    launch: Launch
    sums_per_query: int
    cuts: Cuts | None
    rows: int
    no_pieces: tuple[None, ...]


@functools.lru_cache(maxsize=4096)
def _bound_stacked(
    shape: torch.Size,
    query_strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    groups: int,
    n_documents: int,
    document_length: int,
    strides: tuple[int, ...],
    aligned: bool,
    has_queries_mask: bool,
    has_documents_mask: bool,
    cu_seqlens_dtype: torch.dtype | None,
    n_tokens: int,
    max_document_length: int,
    with_winners: bool,
    normalize: bool,
    zero_masked: bool,
    precision: str,
) -> _Stacked:
    """A launch of `_stacked_kernel` or of its Hopper version. Of packed documents there are `n_tokens`."""
    capability, processors = architecture(device)
    query_length, size = shape[1:]
    n_queries = shape[0] // groups
    padded, group = _padded_query_length(query_length)
    rows = n_queries * padded
    packed = cu_seqlens_dtype is not None
    flags = (has_queries_mask, has_documents_mask, zero_masked and has_documents_mask, normalize, with_winners)
    integers = (n_queries, query_length, padded, n_documents, document_length)
    strides = (*query_strides[:2], *strides)

    wide = hopper_tile(capability, size, dtype.itemsize, rows, document_length, with_winners)
    if wide is not None and aligned and copied_by_16_bytes(size, strides[2:]):
        row_blocks = triton.cdiv(rows, wide.rows)
        if packed:
            cuts = plan_cuts(n_tokens, n_documents, row_blocks, processors, per_processor=1, largest=16384)
            run, whole, n_runs = cuts
        else:
            run = _run_length(n_documents, row_blocks * groups, processors, per_processor=1, longest=64)
            n_runs, whole = triton.cdiv(n_documents, run), max_document_length
        if max_document_length <= whole:
            group = min(group, wide.rows // wide.parts)
            block_embedding = max(16, triton.next_power_of_2(size))
            launch = _hopper().bind(
                (row_blocks * n_runs * groups, 1, 1),
                (*integers, n_runs, run),
                strides,
                (size, block_embedding, *wide[:2], group, wide.num_stages, wide.parts, packed, *flags),
                num_warps=4,
                num_stages=1,
            )
            # The Hopper kernel takes documents whole.
            return _Stacked(launch, padded // group, None, 0, ())

    block_embedding, split = embedding_block(size, dtype.itemsize)
    tile = stacked_tile(capability, size, dtype.itemsize, rows, with_winners)
    group = min(group, tile.rows)
    row_blocks = triton.cdiv(rows, tile.rows)
    whole, in_pieces = 0, False
    if packed:
        cuts = plan_cuts(n_tokens, n_documents, row_blocks, processors, per_processor=2, largest=4096)
        run, whole, n_runs = cuts
        in_pieces = max_document_length > whole
    else:
        run = _run_length(n_documents, row_blocks * groups, processors, per_processor=2, longest=16)
        n_runs = triton.cdiv(n_documents, run)
    registers = None
    if in_pieces and not split and not normalize and dtype.itemsize == 2:
        # Two programs share a processor. Left alone, ptxas takes a few registers more for the pieces than that leaves.
        registers = _REGISTERS // (2 * 32 * tile.num_warps)
    launch = _stacked.bind(
        (row_blocks * n_runs * groups, 1, 1),
        (*integers, n_runs, run, whole),
        strides,
        (size, block_embedding, tile.rows, tile.columns, group, split, packed, in_pieces, *flags, precision),
        tile.num_warps,
        tile.num_stages,
        max_registers=registers,
    )
    return _Stacked(launch, padded // group, cuts if in_pieces else None, row_blocks * tile.rows, (None, None))


@functools.lru_cache(maxsize=4096)
def _bound_single(
    shape: torch.Size,
    query_strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    n_documents: int,
    document_length: int,
    strides: tuple[int, ...],
    max_candidates: int,
    has_queries_mask: bool,
    has_documents_mask: bool,
    cu_seqlens_dtype: torch.dtype | None,
    candidates_dtype: torch.dtype | None,
    n_tokens: int,
    max_document_length: int,
    with_winners: bool,
    normalize: bool,
    zero_masked: bool,
    precision: str,
) -> tuple[Launch, tuple[int, ...], Cuts | None, int]:
    """A launch of `_single_kernel`, and the shape of the sums that it leaves, which are to be added up over dim 0.

    And, where documents may be in pieces, the cuts and the rows of a piece. Of packed documents there are `n_tokens`.
    """
    capability, processors = architecture(device)
    n_queries, query_length, size = shape
    per_query = n_documents if candidates_dtype is None else max_candidates
    block_embedding, split = embedding_block(size, dtype.itemsize)
    tile = single_tile(capability, size, dtype.itemsize, query_length, cu_seqlens_dtype is not None)
    column_blocks = triton.cdiv(query_length, tile.columns)
    run = _run_length(per_query, n_queries * column_blocks, processors, per_processor=4, longest=2)
    sums = (n_queries, n_documents) if candidates_dtype is None else (n_documents,)
    cuts, in_pieces = Cuts(0, 0, 0), False
    if cu_seqlens_dtype is not None:
        cuts = plan_cuts(n_tokens, n_documents, column_blocks, processors, per_processor=4, largest=4096)
        in_pieces = max_document_length > cuts.whole
    n_pieces = 2 * cuts.number if in_pieces else 0
    launch = _single.bind(
        (n_pieces + triton.cdiv(per_query, run) * n_queries, column_blocks, 1),
        (
            n_queries, query_length, n_documents, document_length, per_query, run, math.prod(sums),
            n_pieces, cuts.cut, cuts.whole,
        ),
        (*query_strides[:2], *strides),
        (
            size, block_embedding, tile.rows, tile.columns, split, cu_seqlens_dtype is not None, in_pieces,
            candidates_dtype is not None, has_queries_mask, has_documents_mask, zero_masked and has_documents_mask,
            normalize, with_winners, precision,
        ),
        tile.num_warps,
        tile.num_stages,
    )  # fmt: skip
    return launch, (column_blocks, *sums), cuts if in_pieces else None, column_blocks * tile.columns


def _padded_query_length(query_length: int) -> tuple[int, int]:
    """Rows that a query takes when stacked, and the largest of `_GROUPS` that divides them.

    Every sum that the kernel takes so lies within one query, and is all of it for the lengths in use. There are few
    groups, because each is compiled for itself.
    """
    if query_length <= _GROUP:
        padded = min(group for group in _GROUPS if query_length <= group)
    else:
        padded = triton.cdiv(query_length, _GROUP) * _GROUP
    return padded, max(group for group in _GROUPS if padded % group == 0)


def _run_length(documents: int, programs: int, processors: int, per_processor: int, longest: int) -> int:
    """Documents that one program walks: about `longest`, or fewer so that every processor gets work.

    `programs` programs share each run, and `per_processor` of them fit on a processor at a time. The runs are cut so
    that the programs fill whole waves: a few programs more than a wave would take as long as a second one.
    """
    slots = per_processor * processors
    waves = -(-documents * programs // (slots * longest))
    return -(-documents // max(1, slots * waves // programs))
