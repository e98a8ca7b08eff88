"""Scores of quantized documents: one tall matrix of the tokens of all queries, which meets a run of documents.

On Hopper GPUs, many rows of int8 and fp8 are scored by `kernels.forward.hopper`.

As in `kernels.forward.stacked`, the rows of a program stay on the chip while it walks the documents of its run.
Products are of 8 bits (int8 summed in int32, fp8 in float32), or of the queries' type, to which a tile of documents is
widened on the chip; that loses nothing. With q = a v and d = s w + m, of values v and w, the similarity is

    <q, d> = a (s <v, w> + m sum(v))

so a document token's scale s and offset m are applied to its column of the products, before the maximum, and the query
token's scale a, which is not negative, after it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..forward.common import SUMMED_EMBEDDING, document_range, numbers_of
from ..forward.cuts import documents_of_cut
from ..forward.inputs import Inputs
from ..grids import ForwardPlan
from ..launch import Kernel
from ..reductions import larger, max_along
from .rows import leave_values

# The values of affine documents are 0 to 255, and tensor cores multiply signed integers: 128 is taken from the values,
# and its product with the scale added to the offset.
_MIDDLE = tl.constexpr(128)


@triton.jit
def _token_tile(pointers, exists, PADDED: tl.constexpr, AFFINE: tl.constexpr, DTYPE: tl.constexpr):
    """A tile of the values of document tokens, less 128 where these are not signed, in the type of the products."""
    tile = tl.load(pointers, mask=exists, other=0.0) if PADDED else tl.load(pointers)
    if AFFINE:
        tile = (tile ^ _MIDDLE).to(tl.int8, bitcast=True)
    return tile.to(DTYPE)


@triton.jit(
    do_not_specialize=[
        "n_queries", "query_length", "padded_query_length", "n_documents", "document_length", "n_runs", "run",
        "empty_score",
    ]
)  # fmt: skip
def _quantized_kernel(
    queries_ptr, documents_ptr, queries_mask_ptr, active_ptr, bounds_ptr, values_ptr, queries_scale_ptr,
    documents_scale_ptr, documents_offset_ptr, cu_seqlens_ptr, candidates_ptr, sums_ptr,
    n_queries, query_length, padded_query_length, n_documents, document_length, n_runs, run, empty_score,
    stride_query, stride_query_token, stride_group, stride_document, stride_document_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_CANDIDATES: tl.constexpr,
    HAS_QUERIES_MASK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    HAS_DOCUMENTS_MASK: tl.constexpr,
    ZERO_MASKED: tl.constexpr,
    QUANTIZE_QUERIES: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_QUERIES_SCALE: tl.constexpr,
    AFFINE: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERY_UNIT: tl.constexpr,
    DOCUMENT_UNIT: tl.constexpr,
):  # fmt: skip
    """Sums of maxima over groups of GROUP query rows, [G, Nq / G * groups per query, K], or [groups per query, Nd] with
    candidates of packed documents.

    `n_queries` counts the queries of one group of the layout. Programs that run together differ in their row block
    first, so they read the same documents, out of L2. A run is `run` documents or, of packed ones that all queries
    meet, the cut of that size (`kernels.forward.cuts`), of whole documents.
    """
    PADDED: tl.constexpr = SPLIT or BLOCK_EMBEDDING > EMBEDDING
    stride_query *= QUERY_UNIT
    stride_query_token *= QUERY_UNIT
    stride_group *= DOCUMENT_UNIT
    stride_document *= DOCUMENT_UNIT
    stride_document_token *= DOCUMENT_UNIT
    n_row_blocks = tl.cdiv(n_queries * padded_query_length, BLOCK_ROWS)
    row_block = tl.program_id(0) % n_row_blocks
    run_index = (tl.program_id(0) // n_row_blocks) % n_runs
    group = tl.program_id(0) // (n_row_blocks * n_runs)
    if HAS_CANDIDATES:
        first = tl.load(candidates_ptr + group).to(tl.int32) + run_index * run
        last = tl.minimum(first + run, tl.load(candidates_ptr + group + 1).to(tl.int32))
    elif PACKED:
        first, last = documents_of_cut(cu_seqlens_ptr, n_documents, run_index.to(tl.int64) * run, run)
    else:
        first = run_index * run
        last = tl.minimum(first + run, n_documents)

    if QUANTIZE_QUERIES:
        leave_values(
            queries_ptr, values_ptr, queries_scale_ptr, row_block * BLOCK_ROWS, group, n_queries, query_length,
            padded_query_length, stride_query, stride_query_token, EMBEDDING, BLOCK_ROWS, NORMALIZE,
        )  # fmt: skip
        queries_ptr = values_ptr
        stride_query, stride_query_token = query_length * EMBEDDING, EMBEDDING
    DTYPE: tl.constexpr = queries_ptr.dtype.element_ty
    SUM: tl.constexpr = tl.int32 if tl.int8 == DTYPE else tl.float32
    rows = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    query = rows // padded_query_length
    token = rows % padded_query_length
    row_exists = (query < n_queries) & (token < query_length)
    global_row = (group * n_queries + query).to(tl.int64) * query_length + token
    row_active = row_exists
    if HAS_QUERIES_MASK:
        row_weight = tl.load(queries_mask_ptr + global_row, mask=row_exists, other=0)
        row_active = row_active & (row_weight != 0)
    if HAS_QUERIES_SCALE:
        row_scale = tl.load(queries_scale_ptr + global_row, mask=row_exists, other=0.0)
    dims = tl.arange(0, BLOCK_EMBEDDING)
    query_offset = (group * n_queries + query).to(tl.int64) * stride_query + token * stride_query_token
    query_rows = queries_ptr + query_offset[:, None] + dims[None, :]
    if not SPLIT:
        query_tile = tl.load(query_rows, mask=row_exists[:, None] & (dims < EMBEDDING)[None, :], other=0.0)
    if AFFINE:
        row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
        if SPLIT:
            for dim in tl.range(0, EMBEDDING, BLOCK_EMBEDDING):
                exists = row_exists[:, None] & (dim + dims < EMBEDDING)[None, :]
                row_sum += tl.sum(tl.load(query_rows + dim, mask=exists, other=0.0).to(tl.float32), axis=1)
        else:
            row_sum += tl.sum(query_tile.to(tl.float32), axis=1)

    # See `kernels.forward.stacked` for the form of the loop.
    for index in tl.range(0, last - first, flatten=not SPLIT):
        document = first + index
        base, length = document_range(
            documents_ptr, cu_seqlens_ptr, None, group, document, document_length,
            stride_group, stride_document, stride_document_token, PACKED, 0,
        )  # fmt: skip
        flat_document = group.to(tl.int64) * n_documents + document
        flat = flat_document * document_length
        if PACKED:
            flat = tl.load(cu_seqlens_ptr + document).to(tl.int64)
        if HAS_DOCUMENTS_MASK:
            length = tl.load(bounds_ptr + 2 * flat_document)
        best = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        for start in tl.range(0, length, BLOCK_TOKENS):
            tokens = tl.minimum(start + tl.arange(0, BLOCK_TOKENS), length - 1)
            if HAS_DOCUMENTS_MASK:
                tokens = tl.load(active_ptr + flat + tokens)
            # Before the products, beside which they are waited for.
            scale = tl.load(documents_scale_ptr + flat + tokens)
            if AFFINE:
                offset = tl.load(documents_offset_ptr + flat + tokens) + _MIDDLE * scale
            token_rows = base + tokens[None, :].to(tl.int64) * stride_document_token + dims[:, None]
            if SPLIT:
                similarities = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
                for sum_start in tl.static_range(0, EMBEDDING, SUMMED_EMBEDDING):
                    products = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], SUM)
                    for dim in tl.range(sum_start, min(EMBEDDING, sum_start + SUMMED_EMBEDDING), BLOCK_EMBEDDING):
                        exists = dim + dims < EMBEDDING
                        part = tl.load(query_rows + dim, mask=row_exists[:, None] & exists[None, :], other=0.0)
                        tile = _token_tile(token_rows + dim, exists[:, None], PADDED, AFFINE, DTYPE)
                        products = tl.dot(part, tile, products, input_precision=PRECISION, out_dtype=SUM)
                    similarities += products.to(tl.float32)
            else:
                tile = _token_tile(token_rows, (dims < EMBEDDING)[:, None], PADDED, AFFINE, DTYPE)
                similarities = tl.dot(query_tile, tile, input_precision=PRECISION, out_dtype=SUM).to(tl.float32)
            similarities *= scale[None, :]
            if AFFINE:
                similarities += row_sum[:, None] * offset[None, :]
            best = larger(best, max_along(similarities, 1))

        if ZERO_MASKED:
            masked = tl.load(bounds_ptr + 2 * flat_document + 1) < document_length
            best = tl.where(masked & (best < 0.0), 0.0, best)
        if HAS_QUERIES_SCALE:
            best *= row_scale
        if WEIGHTED:
            best *= row_weight.to(tl.float32)
        best = tl.where(row_active & (length > 0), best, 0.0)
        sums = tl.sum(tl.reshape(best, [BLOCK_ROWS // GROUP, GROUP]), axis=1)
        groups_per_query = padded_query_length // GROUP
        sum_row = row_block * (BLOCK_ROWS // GROUP) + tl.arange(0, BLOCK_ROWS // GROUP)
        if PACKED or HAS_DOCUMENTS_MASK:
            # One of the sums of a query is the score of an empty document; the others add nothing to it.
            sums = tl.where(length > 0, sums, tl.where(sum_row % groups_per_query == 0, empty_score, 0.0))
        sums_row = sum_row.to(tl.int64)
        if not HAS_CANDIDATES:
            sums_row += group.to(tl.int64) * n_queries * groups_per_query
        tl.store(sums_ptr + sums_row * n_documents + document, sums, mask=sum_row < n_queries * groups_per_query)


_quantized = Kernel(_quantized_kernel)


def score_quantized(
    problem: Problem,
    plan: ForwardPlan,
    inputs: Inputs,
    values: Tensor | None,
    documents_offset: Tensor | None,
    sums: Tensor,
) -> None:
    """Leave the sums [groups, queries, n_sums, n_documents] of every score, or [n_sums, Nd] of packed candidates.

    With `values`, queries are quantized there, and their scales where `inputs` has them.
    """
    groups = problem.groups if problem.has_candidates or not problem.packed else 1
    _quantized(
        (plan.row_blocks * plan.n_runs * groups, 1, 1),
        (
            inputs.queries, inputs.documents, inputs.queries_mask, inputs.active, inputs.bounds, values,
            inputs.queries_scale, inputs.documents_scale, documents_offset, inputs.cu_seqlens, inputs.candidates, sums,
        ),
        numbers_of(problem, plan), plan.strides, plan.form.constants, plan.form.warps,
    )  # fmt: skip
