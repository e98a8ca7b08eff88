"""The forward of soft MaxSim: stacked queries, one tall matrix of their tokens, which meets a run of documents.

The sum of exponentials of a row is kept relative to the largest exponent so far, and rescaled when a larger one comes.
Many rows of half precision are scored by `forward.hopper` on a GPU that it runs on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..forward.common import add_sums, document_range, numbers_of
from ..forward.inputs import Inputs
from ..grids import ForwardPlan
from ..launch import Kernel
from ..rows import active_tokens, inverse_norms
from .common import LN2, LOG2E, split_products
from .plan import soft_forward_plan

if TYPE_CHECKING:
    from ...problem import Problem, Tensors


@triton.jit(
    do_not_specialize=[
        "n_queries", "query_length", "padded_query_length", "n_documents", "document_length", "n_runs", "run",
        "empty_score",
    ]
)  # fmt: skip
def _forward_kernel(
    queries_ptr, documents_ptr, queries_mask_ptr, active_ptr, bounds_ptr, queries_scale_ptr, documents_scale_ptr,
    cu_seqlens_ptr, candidates_ptr, beta_ptr, sums_ptr, lse_ptr,
    n_queries, query_length, padded_query_length, n_documents, document_length, n_runs, run, empty_score,
    stride_query, stride_query_token, stride_group, stride_document, stride_document_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_CANDIDATES: tl.constexpr,
    HAS_QUERIES_MASK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    HAS_DOCUMENTS_MASK: tl.constexpr,
    ZERO_MASKED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERY_UNIT: tl.constexpr,
    DOCUMENT_UNIT: tl.constexpr,
    WITH_LSE: tl.constexpr,
):  # fmt: skip
    """Sums over groups of GROUP query rows, [queries, groups per query, documents], and lse [documents, rows].

    `n_queries` counts the queries of one group of the layout. Programs that run together differ in their row block
    first, so they read the same documents, out of L2.
    """
    stride_query *= QUERY_UNIT
    stride_query_token *= QUERY_UNIT
    stride_group *= DOCUMENT_UNIT
    stride_document *= DOCUMENT_UNIT
    stride_document_token *= DOCUMENT_UNIT
    n_row_blocks = tl.cdiv(n_queries * padded_query_length, BLOCK_ROWS)
    row_block = tl.program_id(0) % n_row_blocks
    first = (tl.program_id(0) // n_row_blocks) % n_runs * run
    group = tl.program_id(0) // (n_row_blocks * n_runs)
    last = n_documents
    if HAS_CANDIDATES:
        first += tl.load(candidates_ptr + group).to(tl.int32)
        last = tl.load(candidates_ptr + group + 1).to(tl.int32)
    last = tl.minimum(first + run, last)

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
    inside = dims < EMBEDDING
    query_rows = queries_ptr + (group * n_queries + query).to(tl.int64) * stride_query + token * stride_query_token
    if not SPLIT:
        query_tile = tl.load(query_rows[:, None] + dims[None, :], mask=row_exists[:, None] & inside[None, :], other=0.0)
    beta = tl.load(beta_ptr)
    # From similarities to exponents of 2.
    row_factor = tl.full([BLOCK_ROWS], LOG2E, tl.float32) * beta
    if NORMALIZE:
        row_factor *= tl.load(queries_scale_ptr + global_row, mask=row_exists, other=1.0)

    # One loop of both, so that loads of the next document overlap the products of this one, as in `forward.stacked`.
    for index in tl.range(0, last - first, flatten=not SPLIT):
        document = first + index
        base, length = document_range(
            documents_ptr, cu_seqlens_ptr, None, group, document, document_length,
            stride_group, stride_document, stride_document_token, PACKED, 0,
        )  # fmt: skip
        flat_document = tl.cast(document, tl.int64)
        if PACKED:
            flat = tl.load(cu_seqlens_ptr + document).to(tl.int64)
        else:
            flat_document += group.to(tl.int64) * n_documents
            flat = flat_document * document_length
        if HAS_DOCUMENTS_MASK:
            length = tl.load(bounds_ptr + 2 * flat_document)
        largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        for start in tl.range(0, length, BLOCK_TOKENS):
            positions = start + tl.arange(0, BLOCK_TOKENS)
            token_exists = positions < length
            tokens = tl.minimum(positions, length - 1)
            if HAS_DOCUMENTS_MASK:
                tokens = tl.load(active_ptr + flat + tokens)
            token_rows = base + tokens.to(tl.int64) * stride_document_token
            if SPLIT:
                similarities = split_products(
                    query_rows, token_rows, row_exists, token_exists, EMBEDDING, BLOCK_EMBEDDING, BLOCK_ROWS,
                    BLOCK_TOKENS, PRECISION,
                )  # fmt: skip
            else:
                if BLOCK_EMBEDDING == EMBEDDING:
                    tile = tl.load(token_rows[None, :] + dims[:, None])
                else:
                    tile = tl.load(token_rows[None, :] + dims[:, None], mask=inside[:, None], other=0.0)
                similarities = tl.dot(query_tile, tile, input_precision=PRECISION)
            if NORMALIZE:
                similarities *= tl.load(documents_scale_ptr + flat + tokens)[None, :]
            similarities = tl.where(token_exists[None, :], similarities, float("-inf"))
            # The factor is positive: the largest similarity has the largest exponent. NaN reaches the sum either way.
            larger = tl.maximum(largest, tl.max(similarities, axis=1) * row_factor)
            # Of infinite exponents, the sum is infinite or 0 without a shift.
            shift = tl.where(tl.abs(larger) == float("inf"), 0.0, larger)
            exponentials = tl.exp2(similarities * row_factor[:, None] - shift[:, None])
            total = total * tl.exp2(largest - shift) + tl.sum(exponentials, axis=1)
            largest = larger
        if ZERO_MASKED:
            masked = (document_length - length).to(tl.float32)
            larger = tl.where(masked > 0.0, tl.maximum(largest, 0.0), largest)
            shift = tl.where(tl.abs(larger) == float("inf"), 0.0, larger)
            zeros = tl.where(masked > 0.0, masked * tl.exp2(-shift), 0.0)
            total = total * tl.exp2(largest - shift) + zeros
            largest = larger
        lse = (tl.log2(total) + tl.where(tl.abs(largest) == float("inf"), 0.0, largest)) * LN2
        if WITH_LSE:
            lse_row = flat_document * n_queries * query_length + query.to(tl.int64) * query_length + token
            tl.store(lse_ptr + lse_row, lse, mask=row_exists)
        best = lse / beta
        if WEIGHTED:
            best *= row_weight.to(tl.float32)
        best = tl.where(row_active & (length > 0), best, 0.0)
        sums = tl.sum(tl.reshape(best, [BLOCK_ROWS // GROUP, GROUP]), axis=1)
        groups_per_query = padded_query_length // GROUP
        sum_row = row_block * (BLOCK_ROWS // GROUP) + tl.arange(0, BLOCK_ROWS // GROUP)
        # One of the sums of a query is the score of an empty document; the others add nothing to it.
        sums = tl.where(length > 0, sums, tl.where(sum_row % groups_per_query == 0, empty_score, 0.0))
        sums_offset = sum_row.to(tl.int64)
        if not HAS_CANDIDATES:
            sums_offset += group.to(tl.int64) * n_queries * groups_per_query
        sum_exists = sum_row < n_queries * groups_per_query
        tl.store(sums_ptr + sums_offset * n_documents + document, sums, mask=sum_exists)


_forward = Kernel(_forward_kernel)


def soft_forward(problem: Problem, tensors: Tensors, beta: Tensor, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Scores, float32, of `problem.scores_shape`, and if asked for lse [documents, rows], float32.

    Tensors are as in `forward.maxsim_forward`; `beta` is a float32 tensor of one element.
    """
    plan = soft_forward_plan(problem)
    queries, documents, queries_mask, documents_mask, _, cu_seqlens, candidates = tensors
    active = bounds = queries_scale = documents_scale = lse = None
    if documents_mask is not None:
        active, bounds = active_tokens(documents_mask)
    if problem.normalize:
        queries_scale, documents_scale = inverse_norms(queries), inverse_norms(documents)
    if with_lse:
        lse = torch.empty(*problem.winners_shape, dtype=torch.float32, device=problem.device)
    n_queries = 1 if problem.has_candidates else problem.n_queries
    # The only sum of a score is the score.
    shape = problem.scores_shape if plan.n_sums == 1 else (n_queries, plan.n_sums, problem.n_documents)
    sums = torch.empty(*shape, dtype=torch.float32, device=problem.device)
    inputs = Inputs(
        queries, documents, queries_mask, active, bounds, queries_scale, documents_scale, cu_seqlens, None, candidates,
        None, None,
    )  # fmt: skip
    if plan.kernel == "hopper":
        # Not every Triton has what it is written in.
        from ..forward.hopper import score_hopper

        score_hopper(problem, plan, inputs, sums, None, beta, lse)
    else:
        _score(problem, plan, inputs, beta, sums, lse)
    return sums if plan.n_sums == 1 else add_sums(problem, plan, sums), lse


def _score(problem: Problem, plan: ForwardPlan, inputs: Inputs, beta: Tensor, sums: Tensor, lse: Tensor | None) -> None:
    """Leave the sums of every score, and if asked for lse."""
    _forward(
        (plan.row_blocks * plan.n_runs * problem.groups, 1, 1),
        (
            inputs.queries, inputs.documents, inputs.queries_mask, inputs.active, inputs.bounds, inputs.queries_scale,
            inputs.documents_scale, inputs.cu_seqlens, inputs.candidates, beta, sums, lse,
        ),
        numbers_of(problem, plan), plan.strides, (*plan.form.constants, lse is not None), plan.form.warps,
    )  # fmt: skip
