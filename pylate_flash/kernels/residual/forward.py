"""Scores of residual codes: one tall matrix of the tokens of all queries, which meets a run of documents.

As in `kernels.forward.stacked`, the rows of a program stay on the chip while it walks the documents of its run. A tile
of document tokens is decompressed there, and rounded to the type of the queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from ..forward.common import SUMMED_EMBEDDING, winner_of
from ..forward.cuts import NO_WINNER, documents_of_cut
from ..grids import ForwardPlan
from ..launch import Kernel
from ..reductions import larger, max_along
from .decompress import decompressed

if TYPE_CHECKING:
    from ...problem import Problem, Tensors
    from . import Codes


@triton.jit(
    do_not_specialize=[
        "n_queries", "query_length", "padded_query_length", "n_documents", "n_runs", "run", "empty_score",
    ]
)  # fmt: skip
def _residual_kernel(
    queries_ptr, queries_mask_ptr, codes_ptr, residuals_ptr, centroids_ptr, weights_ptr, cu_seqlens_ptr, scales_ptr,
    candidates_ptr, sums_ptr, winners_ptr,
    n_queries, query_length, padded_query_length, n_documents, n_runs, run, empty_score,
    stride_query, stride_query_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    NBITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_CANDIDATES: tl.constexpr,
    HAS_QUERIES_MASK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    WITH_WINNERS: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERY_UNIT: tl.constexpr,
):  # fmt: skip
    """Sums of maxima over groups of GROUP query rows, [G, Nq / G * groups per query, K], and winners [G, K, rows].

    `n_queries` counts the queries of one group: all of them, or one that meets its own `n_documents` candidates, the
    numbers of which are in `candidates_ptr`, -1 for none. Programs that run together differ in their row block first,
    so they read the same documents, out of L2. A run is `run` candidates, or the cut of that size.
    """
    DTYPE: tl.constexpr = queries_ptr.dtype.element_ty
    PADDED: tl.constexpr = SPLIT or BLOCK_EMBEDDING > EMBEDDING
    stride_query *= QUERY_UNIT
    stride_query_token *= QUERY_UNIT
    n_row_blocks = tl.cdiv(n_queries * padded_query_length, BLOCK_ROWS)
    row_block = tl.program_id(0) % n_row_blocks
    run_index = (tl.program_id(0) // n_row_blocks) % n_runs
    group = (tl.program_id(0) // (n_row_blocks * n_runs)).to(tl.int64)
    if HAS_CANDIDATES:
        first = run_index * run
        last = tl.minimum(first + run, n_documents)
        candidates_ptr += group * n_documents
    else:
        first, last = documents_of_cut(cu_seqlens_ptr, n_documents, run_index.to(tl.int64) * run, run)

    rows = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    query = rows // padded_query_length
    token = rows % padded_query_length
    row_exists = (query < n_queries) & (token < query_length)
    global_row = (group * n_queries + query) * query_length + token
    row_active = row_exists
    if HAS_QUERIES_MASK:
        row_weight = tl.load(queries_mask_ptr + global_row, mask=row_exists, other=0)
        row_active = row_active & (row_weight != 0)
    dims = tl.arange(0, BLOCK_EMBEDDING)
    query_offset = (group * n_queries + query) * stride_query + token * stride_query_token
    query_rows = queries_ptr + query_offset[:, None] + dims[None, :]
    if not SPLIT:
        query_tile = tl.load(query_rows, mask=row_exists[:, None] & (dims < EMBEDDING)[None, :], other=0.0)

    # See `kernels.forward.stacked` for the form of the loop.
    for index in tl.range(0, last - first, flatten=not SPLIT):
        place = first + index
        document = place
        if HAS_CANDIDATES:
            document = tl.load(candidates_ptr + place).to(tl.int32)
        start_of = tl.load(cu_seqlens_ptr + tl.maximum(document, 0)).to(tl.int64)
        length = (tl.load(cu_seqlens_ptr + document + 1).to(tl.int64) - start_of).to(tl.int32)
        if HAS_CANDIDATES:
            length = tl.where(document < 0, 0, length)
        document_codes = codes_ptr + start_of
        document_scales = scales_ptr + start_of
        document_residuals = residuals_ptr + start_of * (EMBEDDING * NBITS // 8)
        best = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        key = tl.full([BLOCK_ROWS], NO_WINNER, tl.int32)
        for start in tl.range(0, length, BLOCK_TOKENS):
            tokens = tl.minimum(start + tl.arange(0, BLOCK_TOKENS), length - 1)
            exists = tokens >= 0
            codes = tl.load(document_codes + tokens).to(tl.int64)
            scale = tl.load(document_scales + tokens)
            if SPLIT:
                similarities = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
                for sum_start in tl.static_range(0, EMBEDDING, SUMMED_EMBEDDING):
                    products = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
                    for dim in tl.range(sum_start, min(EMBEDDING, sum_start + SUMMED_EMBEDDING), BLOCK_EMBEDDING):
                        inside = row_exists[:, None] & (dim + dims < EMBEDDING)[None, :]
                        part = tl.load(query_rows + dim, mask=inside, other=0.0)
                        tile = decompressed(
                            document_residuals, centroids_ptr, weights_ptr, tokens, codes, scale, exists, dim,
                            EMBEDDING, BLOCK_EMBEDDING, NBITS, PADDED, DTYPE,
                        )  # fmt: skip
                        products = tl.dot(part, tl.trans(tile), products, input_precision=PRECISION)
                    similarities += products
            else:
                tile = decompressed(
                    document_residuals, centroids_ptr, weights_ptr, tokens, codes, scale, exists, 0,
                    EMBEDDING, BLOCK_EMBEDDING, NBITS, PADDED, DTYPE,
                )  # fmt: skip
                similarities = tl.dot(query_tile, tl.trans(tile), input_precision=PRECISION)
            tile_best = max_along(similarities, 1)
            if WITH_WINNERS:
                won = (similarities == tile_best[:, None]) | (similarities != similarities)
                tile_key = tl.min(tl.where(won, tokens[None, :], NO_WINNER), axis=1)
                # A later tile must be strictly better, or the first NaN.
                later = (tile_best > best) | ((tile_best != tile_best) & (best == best))
                key = tl.where(later, tile_key, key)
            best = larger(best, tile_best)

        counted = row_active & (length > 0)
        flat_document = group * n_documents + place
        if WITH_WINNERS:
            winner = tl.where(counted, winner_of(key, best), -1)
            winners_row = (flat_document * n_queries + query) * query_length + token
            tl.store(winners_ptr + winners_row, winner.to(winners_ptr.dtype.element_ty), mask=row_exists)
        if WEIGHTED:
            best *= row_weight.to(tl.float32)
        best = tl.where(counted, best, 0.0)
        sums = tl.sum(tl.reshape(best, [BLOCK_ROWS // GROUP, GROUP]), axis=1)
        groups_per_query = padded_query_length // GROUP
        sum_row = row_block * (BLOCK_ROWS // GROUP) + tl.arange(0, BLOCK_ROWS // GROUP)
        # One of the sums of a query is the score of an empty document; the others add nothing to it.
        sums = tl.where(length > 0, sums, tl.where(sum_row % groups_per_query == 0, empty_score, 0.0))
        sums_row = group * n_queries * groups_per_query + sum_row
        tl.store(sums_ptr + sums_row * n_documents + place, sums, mask=sum_row < n_queries * groups_per_query)


_residual = Kernel(_residual_kernel)


def score_residual(
    problem: Problem, plan: ForwardPlan, tensors: Tensors, codes: Codes, sums: Tensor, winners: Tensor | None
) -> None:
    """Leave the sums [groups, queries, n_sums, n_documents] of every score, and the winners."""
    _residual(
        (plan.row_blocks * plan.n_runs * problem.groups, 1, 1),
        (tensors.queries, tensors.queries_mask, *codes, sums, winners),
        (
            problem.n_queries // problem.groups, problem.query_length, plan.padded, problem.n_documents, plan.n_runs,
            plan.run, problem.empty_score,
        ),
        plan.strides, plan.form.constants, plan.form.warps,
    )  # fmt: skip
