"""Gradient of the documents of soft MaxSim: a program owns tokens of a document, and walks the query rows.

The tokens' gradient stays in registers. Where there is memory for it, what the same probabilities give the gradient of
the queries is left as partial sums, one of each program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from ..backward.common import group_of, through_norm
from ..launch import Kernel, Region
from .common import LOG2E, factor, split_products

if TYPE_CHECKING:
    from ...ops.problem import Problem
    from .inputs import Inputs
    from .plan import GradientPlan


@triton.jit(
    do_not_specialize=[
        "n_rows", "query_length", "n_documents", "document_length", "first_document", "n_launched", "n_blocks",
        "n_groups", "stride_grad_query", "stride_grad_document",
    ]
)  # fmt: skip
def _documents_kernel(
    queries_ptr, documents_ptr, queries_mask_ptr, active_ptr, bounds_ptr, queries_scale_ptr, documents_scale_ptr,
    cu_seqlens_ptr, candidates_ptr, beta_ptr, lse_ptr, grad_scores_ptr, grad_documents_ptr, partials_ptr, slopes_ptr,
    n_rows, query_length, n_documents, document_length, first_document, n_launched, n_blocks, n_groups,
    stride_grad_query, stride_grad_document,
    stride_query, stride_query_token, stride_group, stride_document, stride_document_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    SPLIT: tl.constexpr,
    OWNED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_CANDIDATES: tl.constexpr,
    HAS_QUERIES_MASK: tl.constexpr,
    HAS_DOCUMENTS_MASK: tl.constexpr,
    ZERO_MASKED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ROUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERY_UNIT: tl.constexpr,
    DOCUMENT_UNIT: tl.constexpr,
):  # fmt: skip
    """grad_documents[token] = sum over rows of grad_score * probability * queries[row], of the rows of one group.

    Grid: (blocks of tokens x documents of this launch x groups, parts of an embedding). Of a split embedding under
    NORMALIZE, what is left in float32 is the gradient of the scaled one. `partials` [documents of the launch x blocks,
    rows of all groups, d], float32, if any, are those of the queries, and `slopes` [programs] the sums of
    grad_score * probability * log2(probability), for beta.
    """
    stride_query *= QUERY_UNIT
    stride_query_token *= QUERY_UNIT
    stride_group *= DOCUMENT_UNIT
    stride_document *= DOCUMENT_UNIT
    stride_document_token *= DOCUMENT_UNIT
    block = tl.program_id(0) % n_blocks
    launched = (tl.program_id(0) // n_blocks) % n_launched
    flat_document = (tl.program_id(0) // (n_blocks * n_launched)).to(tl.int64) * n_documents
    flat_document += first_document + launched
    n_queries = n_rows // query_length
    group, grad_scores_ptr = group_of(
        flat_document, grad_scores_ptr, candidates_ptr, n_documents, n_queries, n_groups, stride_grad_query,
        stride_grad_document, HAS_CANDIDATES,
    )  # fmt: skip
    if PACKED:
        flat = tl.load(cu_seqlens_ptr + flat_document).to(tl.int64)
        length = (tl.load(cu_seqlens_ptr + flat_document + 1).to(tl.int64) - flat).to(tl.int32)
        base = documents_ptr + flat * stride_document_token
    else:
        flat = flat_document * document_length
        length = document_length
        base = documents_ptr + group * stride_group + (flat_document - group * n_documents) * stride_document
    if HAS_DOCUMENTS_MASK:
        length = tl.load(bounds_ptr + 2 * flat_document)

    positions = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    token_exists = positions < length
    tokens = positions
    if HAS_DOCUMENTS_MASK:
        tokens = tl.load(active_ptr + flat + positions, mask=token_exists, other=0)
    token_rows = base + tokens.to(tl.int64) * stride_document_token
    owned = tl.arange(0, OWNED)
    if SPLIT:
        owned += tl.program_id(1) * OWNED
    inside = owned < EMBEDDING
    tile = tl.load(token_rows[:, None] + owned[None, :], mask=token_exists[:, None] & inside[None, :], other=0.0)
    if NORMALIZE:
        token_scale = tl.load(documents_scale_ptr + flat + tokens, mask=token_exists, other=1.0)
    to_exponent = tl.load(beta_ptr) * LOG2E
    total = tl.zeros([BLOCK_TOKENS, OWNED], tl.float32)
    slope = tl.zeros([BLOCK_ROWS], tl.float32)
    walked = n_rows
    if partials_ptr is None:
        # Else a program of no token has zeros to leave.
        walked = tl.where(block * BLOCK_TOKENS < length, n_rows, 0)
    for start in tl.range(0, walked, BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        row_exists = rows < n_rows
        query = rows // query_length
        global_row = group * n_rows + rows
        row_active = row_exists
        if HAS_QUERIES_MASK:
            weight = tl.load(queries_mask_ptr + global_row, mask=row_exists, other=0).to(tl.float32)
            row_active = row_active & (weight != 0.0)
        query_rows = queries_ptr + (group * n_queries + query) * stride_query + rows % query_length * stride_query_token
        of_queries = tl.load(
            query_rows[:, None] + owned[None, :], mask=row_active[:, None] & inside[None, :], other=0.0
        )
        if SPLIT:
            exponents = split_products(
                token_rows, query_rows, token_exists, row_active, EMBEDDING, BLOCK_EMBEDDING, BLOCK_TOKENS, BLOCK_ROWS,
                PRECISION,
            )  # fmt: skip
        else:
            exponents = tl.dot(tile, tl.trans(of_queries), input_precision=PRECISION)
        lse = tl.load(lse_ptr + flat_document * n_rows + rows, mask=row_active, other=0.0) * LOG2E
        grad = tl.load(grad_scores_ptr + query * stride_grad_query, mask=row_active, other=0.0)
        if HAS_QUERIES_MASK:
            grad *= weight
        row_factor = to_exponent
        if NORMALIZE:
            row_scale = tl.load(queries_scale_ptr + global_row, mask=row_active, other=1.0)
            exponents *= token_scale[:, None]
            row_factor = row_scale[None, :] * to_exponent
        exponents = exponents * row_factor - lse[None, :]
        # A row that takes no part, of zeros, meets an infinite token too.
        probabilities = tl.where(token_exists[:, None] & row_active[None, :], tl.exp2(exponents), 0.0)
        if slopes_ptr is not None:
            slope += grad * tl.sum(tl.where(probabilities == 0.0, 0.0, probabilities * exponents), axis=0)
            if ZERO_MASKED:
                # The masked tokens are those of the first program.
                masked = tl.where((block == 0) & (length > 0), document_length - length, 0).to(tl.float32)
                zero = tl.where(row_active, tl.exp2(-lse), 0.0)
                slope += grad * tl.where((zero == 0.0) | (masked == 0.0), 0.0, -zero * lse * masked)
        flows = probabilities * grad[None, :]
        if partials_ptr is not None:
            partial_flows = flows
            if NORMALIZE:
                partial_flows *= token_scale[:, None]
            partial = tl.dot(tl.trans(factor(partial_flows, ROUNDED)), factor(tile, ROUNDED), input_precision=PRECISION)
            part = (launched * n_blocks + block).to(tl.int64) * n_groups * n_rows
            offset = (part + global_row)[:, None] * EMBEDDING + owned[None, :]
            tl.store(partials_ptr + offset, partial, mask=row_exists[:, None] & inside[None, :])
        if grad_documents_ptr is not None:
            if NORMALIZE:
                flows *= row_scale[None, :]
            total = tl.dot(factor(flows, ROUNDED), factor(of_queries, ROUNDED), total, input_precision=PRECISION)
    if grad_documents_ptr is not None:
        if NORMALIZE and not SPLIT:
            total = through_norm(total, tile, token_scale)
        offset = (flat + tokens)[:, None] * EMBEDDING + owned[None, :]
        tl.store(
            grad_documents_ptr + offset, total.to(grad_documents_ptr.dtype.element_ty),
            mask=token_exists[:, None] & inside[None, :],
        )  # fmt: skip
    if slopes_ptr is not None:
        # Of an embedding in parts, all programs have the same.
        tl.store(slopes_ptr + tl.program_id(0), tl.sum(slope, axis=0), mask=tl.program_id(1) == 0)


_documents = Kernel(_documents_kernel)


def walk_rows(
    problem: Problem,
    plan: GradientPlan,
    inputs: Inputs,
    results: tuple[Tensor | Region | None, Tensor | None, Tensor | None],
    first: int,
    number: int,
) -> None:
    """The gradient of `number` documents of each group from the `first` on, of all tokens that are active.

    `results`: the gradient, partial sums of that of the queries, and what that of beta is a sum of; or None.
    """
    kind, tile, groups = problem.kind, plan.documents, 1 if problem.packed else problem.groups
    _documents(
        (plan.n_blocks * number * groups, plan.operands.parts, 1),
        (*inputs.tensors, *results),
        (
            problem.rows, problem.query_length, problem.n_documents, problem.document_length, first, number,
            plan.n_blocks, problem.groups, *inputs.grad_strides,
        ),
        plan.strides,
        (
            problem.size, plan.operands.block, plan.operands.split, plan.operands.owned, tile.rows, tile.columns,
            problem.packed, problem.has_candidates, kind.queries_mask is not None, kind.documents_mask is not None,
            kind.zero_masked, problem.normalize, plan.rounded, kind.precision, *plan.units,
        ),
        (tile.num_warps, tile.num_stages, None),
    )  # fmt: skip
