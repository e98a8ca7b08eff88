"""The kernels of the gradients of soft MaxSim: one owns tokens of a document and walks query rows, one the reverse.

What they own has its gradient in registers. Where there is memory for it, what the first kernel's probabilities give
the gradient of the queries is left as partial sums, one of each program, and the second has nothing to do.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..backward.common import owner
from ..forward.common import document_range, split_products
from ..launch import Region, kernel
from ..reductions import LOG2E
from ..rows import through_norm


class SoftTensors(NamedTuple):
    """The tensors that the kernels read, in their order."""

    # [Nq, Lq, d], rows at equal distances, zeros where a token is masked.
    queries: Tensor
    documents: Tensor
    # The active tokens of masked documents, and their numbers (`kernels.rows`).
    active: Tensor | None
    bounds: Region | None
    # One over the norms of embeddings that are to be normalised.
    queries_scale: Tensor | None
    documents_scale: Tensor | None
    cu_seqlens: Tensor | None
    candidates: Tensor | None
    beta: Tensor
    # log(sum(exp(beta * similarity))) [documents, rows].
    lse: Tensor
    # What the gradient of a row's smooth maximum is multiplied by, [documents, rows], 0 where a token is masked.
    grad_rows: Tensor


@triton.jit
def _factor(values, ROUNDED: tl.constexpr):
    """Values as they are multiplied for a gradient: float16 could not hold what a loss is scaled by."""
    return values.to(tl.bfloat16) if ROUNDED else values.to(tl.float32)


@kernel
def documents_kernel(
    queries_ptr, documents_ptr, active_ptr, bounds_ptr, queries_scale_ptr, documents_scale_ptr, cu_seqlens_ptr,
    candidates_ptr, beta_ptr, lse_ptr, grad_rows_ptr, grad_documents_ptr, partials_ptr, slopes_ptr,
    n_documents, document_length, first_document, n_launched, n_blocks, n_groups,
    stride_rows, stride_row, stride_group, stride_document, stride_document_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    SPLIT: tl.constexpr,
    OWNED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    ZERO_MASKED: tl.constexpr,
    ROUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERY_UNIT: tl.constexpr,
    DOCUMENT_UNIT: tl.constexpr,
):  # fmt: skip
    """grad_documents[token] = sum over rows of grad * probability * queries[row], of the rows of one group.

    Grid: (blocks of tokens x documents of this launch x groups, parts of an embedding). With scales, what is left of a
    split embedding, in float32, is the gradient of the scaled one. `partials` [documents of the launch x blocks, rows
    of all groups, d], float32, if any, are those of the queries, and `slopes` [programs] the sums of grad * probability
    * log2(probability), for beta. EVEN: the last block of rows is full.

    What is loaded for a row of the tile is spread over all threads that hold a part of it, each of which computes its
    address: it is one addition, as rows are contiguous.
    """
    # Rows of all documents lie one after the other: their number is a stride, too.
    n_rows = stride_rows
    stride_row *= QUERY_UNIT
    stride_group *= DOCUMENT_UNIT
    stride_document *= DOCUMENT_UNIT
    stride_document_token *= DOCUMENT_UNIT
    block = tl.program_id(0) % n_blocks
    launched = (tl.program_id(0) // n_blocks) % n_launched
    group = (tl.program_id(0) // (n_blocks * n_launched)).to(tl.int64)
    flat_document = group * n_documents + first_document + launched
    if candidates_ptr is not None:
        group = owner(candidates_ptr, n_groups, flat_document).to(tl.int64)
    if cu_seqlens_ptr is not None:
        flat = tl.load(cu_seqlens_ptr + flat_document).to(tl.int64)
        length = (tl.load(cu_seqlens_ptr + flat_document + 1).to(tl.int64) - flat).to(tl.int32)
        base = documents_ptr + flat * stride_document_token
    else:
        flat = flat_document * document_length
        length = document_length
        base = documents_ptr + group * stride_group + (flat_document - group * n_documents) * stride_document
    if active_ptr is not None:
        length = tl.load(bounds_ptr + 2 * flat_document)

    positions = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    token_exists = positions < length
    tokens = positions
    if active_ptr is not None:
        tokens = tl.load(active_ptr + flat + positions, mask=token_exists, other=0)
    token_rows = base + tokens.to(tl.int64) * stride_document_token
    owned = tl.arange(0, OWNED)
    if SPLIT:
        owned += tl.program_id(1) * OWNED
    inside = owned < EMBEDDING
    tile = tl.load(token_rows[:, None] + owned[None, :], mask=token_exists[:, None] & inside[None, :], other=0.0)
    if queries_scale_ptr is not None:
        token_scale = tl.load(documents_scale_ptr + flat + tokens, mask=token_exists, other=1.0)
    to_exponent = tl.load(beta_ptr) * LOG2E
    total = tl.zeros([BLOCK_TOKENS, OWNED], tl.float32)
    slope = tl.zeros([BLOCK_TOKENS], tl.float32)
    if ZERO_MASKED:
        zeros_slope = tl.zeros([BLOCK_ROWS], tl.float32)
    lse_ptr += flat_document * n_rows
    grad_rows_ptr += flat_document * n_rows
    query_rows = queries_ptr + group * n_rows * stride_row
    # What is the same for every tile is not computed for each.
    row_offsets = tl.arange(0, BLOCK_ROWS).to(tl.int64) * stride_row
    walked = n_rows
    if partials_ptr is None:
        # Else a program of no token has zeros to leave.
        walked = tl.where(block * BLOCK_TOKENS < length, n_rows, 0)
    for start in tl.range(0, walked, BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        row_exists = rows < n_rows
        row_starts = query_rows + tl.cast(start, tl.int64) * stride_row + row_offsets
        if EVEN:
            lse = tl.load(lse_ptr + rows)
            grad = tl.load(grad_rows_ptr + rows)
        else:
            lse = tl.load(lse_ptr + rows, mask=row_exists, other=0.0)
            grad = tl.load(grad_rows_ptr + rows, mask=row_exists, other=0.0)
        if EVEN and OWNED == EMBEDDING:
            of_queries = tl.load(row_starts[:, None] + owned[None, :])
        else:
            of_queries = tl.load(
                row_starts[:, None] + owned[None, :], mask=row_exists[:, None] & inside[None, :], other=0.0
            )
        if SPLIT:
            exponents = split_products(
                token_rows, row_starts, token_exists, row_exists, EMBEDDING, BLOCK_EMBEDDING, BLOCK_TOKENS, BLOCK_ROWS,
                PRECISION,
            )  # fmt: skip
        else:
            exponents = tl.dot(tile, tl.trans(of_queries), input_precision=PRECISION)
        row_factor = to_exponent
        if queries_scale_ptr is not None:
            row_scale = tl.load(queries_scale_ptr + group * n_rows + rows, mask=row_exists, other=1.0)
            exponents *= token_scale[:, None]
            row_factor = row_scale[None, :] * to_exponent
        exponents = exponents * row_factor - (lse * LOG2E)[None, :]
        probabilities = tl.exp2(exponents)
        # A row that takes no part, of zeros, meets infinite tokens too.
        flows = tl.where((grad != 0.0)[None, :], probabilities * grad[None, :], 0.0)
        if slopes_ptr is not None:
            slope += tl.sum(tl.where(flows == 0.0, 0.0, flows * exponents), axis=1)
            if ZERO_MASKED:
                zero = tl.exp2(-lse * LOG2E)
                zeros_slope -= tl.where((grad == 0.0) | (zero == 0.0), 0.0, grad * zero * (lse * LOG2E))
        if partials_ptr is not None:
            partial_flows = tl.where(token_exists[:, None], flows, 0.0)
            if queries_scale_ptr is not None:
                partial_flows *= token_scale[:, None]
            partial = tl.dot(
                tl.trans(_factor(partial_flows, ROUNDED)), _factor(tile, ROUNDED), input_precision=PRECISION
            )
            part = (launched * n_blocks + block).to(tl.int64) * n_groups * n_rows
            offset = (part + group * n_rows + rows)[:, None] * EMBEDDING + owned[None, :]
            tl.store(partials_ptr + offset, partial, mask=row_exists[:, None] & inside[None, :])
        if grad_documents_ptr is not None:
            if queries_scale_ptr is not None:
                flows *= row_scale[None, :]
            total = tl.dot(_factor(flows, ROUNDED), _factor(of_queries, ROUNDED), total, input_precision=PRECISION)
    if grad_documents_ptr is not None:
        if queries_scale_ptr is not None and not SPLIT:
            total = through_norm(total, tile, token_scale)
        offset = (flat + tokens)[:, None] * EMBEDDING + owned[None, :]
        tl.store(
            grad_documents_ptr + offset,
            total.to(grad_documents_ptr.dtype.element_ty),
            mask=token_exists[:, None] & inside[None, :],
        )
    if slopes_ptr is not None:
        all_slopes = tl.sum(tl.where(token_exists, slope, 0.0), axis=0)
        if ZERO_MASKED:
            # The masked tokens of a document that has others are those of its first program.
            masked = tl.where((block == 0) & (length > 0), document_length - length, 0).to(tl.float32)
            all_slopes += tl.where(masked > 0.0, masked * tl.sum(zeros_slope, axis=0), 0.0)
        # Of an embedding in parts, all programs have the same.
        tl.store(slopes_ptr + tl.program_id(0), all_slopes, mask=tl.program_id(1) == 0)


@kernel
def queries_kernel(
    queries_ptr, documents_ptr, active_ptr, bounds_ptr, queries_scale_ptr, documents_scale_ptr, cu_seqlens_ptr,
    candidates_ptr, beta_ptr, lse_ptr, grad_rows_ptr, grad_queries_ptr,
    n_documents, document_length, n_groups, n_splits,
    stride_rows, stride_row, stride_group, stride_document, stride_document_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    SPLIT: tl.constexpr,
    OWNED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    THROUGH_NORM: tl.constexpr,
    ROUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERY_UNIT: tl.constexpr,
    DOCUMENT_UNIT: tl.constexpr,
):  # fmt: skip
    """grad_queries[row] = sum over tokens of grad * probability * documents[token], [splits, rows of all, d].

    Grid: (blocks of rows x groups, splits of the documents, parts of an embedding). Without THROUGH_NORM, what is left
    with scales is the gradient of the scaled queries.
    """
    # Rows of all documents lie one after the other: their number is a stride, too.
    n_rows = stride_rows
    stride_row *= QUERY_UNIT
    stride_group *= DOCUMENT_UNIT
    stride_document *= DOCUMENT_UNIT
    stride_document_token *= DOCUMENT_UNIT
    n_row_blocks = tl.cdiv(n_rows, BLOCK_ROWS)
    group = (tl.program_id(0) // n_row_blocks).to(tl.int64)
    rows = tl.program_id(0) % n_row_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_exists = rows < n_rows
    global_row = group * n_rows + rows
    query_rows = queries_ptr + global_row * stride_row
    dims = tl.arange(0, BLOCK_EMBEDDING)
    if not SPLIT:
        query_mask = row_exists[:, None] & (dims < EMBEDDING)[None, :]
        query_tile = tl.load(query_rows[:, None] + dims[None, :], mask=query_mask, other=0.0)
    row_factor = tl.full([BLOCK_ROWS], LOG2E, tl.float32) * tl.load(beta_ptr)
    if queries_scale_ptr is not None:
        row_scale = tl.load(queries_scale_ptr + global_row, mask=row_exists, other=1.0)
        row_factor *= row_scale
    owned = tl.arange(0, OWNED)
    if SPLIT:
        owned += tl.program_id(2) * OWNED
    inside = owned < EMBEDDING

    # What is the same for every tile is not computed for each.
    token_offsets = tl.arange(0, BLOCK_TOKENS).to(tl.int64) * stride_document_token
    first = 0
    last = n_documents
    if candidates_ptr is not None:
        first = tl.load(candidates_ptr + group).to(tl.int32)
        last = tl.load(candidates_ptr + group + 1).to(tl.int32)
    share = tl.cdiv(last - first, n_splits)
    first += tl.program_id(1) * share
    last = tl.minimum(first + share, last)
    total = tl.zeros([BLOCK_ROWS, OWNED], tl.float32)
    # One loop of both, as in the forward.
    for index in tl.range(0, last - first, flatten=not SPLIT):
        document = first + index
        base, length = document_range(
            documents_ptr, cu_seqlens_ptr, None, group, document, document_length,
            stride_group, stride_document, stride_document_token, cu_seqlens_ptr is not None, 0,
        )  # fmt: skip
        flat_document = tl.cast(document, tl.int64)
        if cu_seqlens_ptr is not None:
            flat = tl.load(cu_seqlens_ptr + document).to(tl.int64)
        else:
            flat_document += group * n_documents
            flat = flat_document * document_length
        if active_ptr is not None:
            length = tl.load(bounds_ptr + 2 * flat_document)
        lse = tl.load(lse_ptr + flat_document * n_rows + rows, mask=row_exists, other=0.0) * LOG2E
        grad = tl.load(grad_rows_ptr + flat_document * n_rows + rows, mask=row_exists, other=0.0)
        for start in tl.range(0, length, BLOCK_TOKENS):
            positions = start + tl.arange(0, BLOCK_TOKENS)
            token_exists = positions < length
            if active_ptr is not None:
                tokens = tl.load(active_ptr + flat + positions, mask=token_exists, other=0)
                token_rows = base + tokens.to(tl.int64) * stride_document_token
            else:
                tokens = positions
                token_rows = base + tl.cast(start, tl.int64) * stride_document_token + token_offsets
            tile = tl.load(
                token_rows[:, None] + owned[None, :], mask=token_exists[:, None] & inside[None, :], other=0.0
            )
            if SPLIT:
                exponents = split_products(
                    query_rows, token_rows, row_exists, token_exists, EMBEDDING, BLOCK_EMBEDDING, BLOCK_ROWS,
                    BLOCK_TOKENS, PRECISION,
                )  # fmt: skip
            else:
                exponents = tl.dot(query_tile, tl.trans(tile), input_precision=PRECISION)
            if queries_scale_ptr is not None:
                token_scale = tl.load(documents_scale_ptr + flat + tokens, mask=token_exists, other=1.0)
                exponents *= token_scale[None, :]
            exponents = exponents * row_factor[:, None] - lse[:, None]
            # A probability is at most 1. What is left here of a token past the end, of zeros, is finite, and adds none.
            exponents = tl.minimum(exponents, 1.0, propagate_nan=tl.PropagateNan.ALL)
            # A row that takes no part, of zeros, meets infinite tokens too.
            flows = tl.where((grad != 0.0)[:, None], tl.exp2(exponents) * grad[:, None], 0.0)
            if queries_scale_ptr is not None:
                flows *= token_scale[None, :]
            total = tl.dot(_factor(flows, ROUNDED), _factor(tile, ROUNDED), total, input_precision=PRECISION)
    if THROUGH_NORM:
        total = through_norm(total, query_tile, row_scale)
    offset = (tl.program_id(1).to(tl.int64) * n_groups * n_rows + global_row)[:, None] * EMBEDDING + owned[None, :]
    tl.store(
        grad_queries_ptr + offset,
        total.to(grad_queries_ptr.dtype.element_ty),
        mask=row_exists[:, None] & inside[None, :],
    )
