"""Gradient of the documents of soft MaxSim: a program owns tokens of a document, and walks the query rows.

The tokens' gradient stays in registers. Where there is memory for it, what the same probabilities give the gradient of
the queries is left as partial sums, one of each program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from ..backward.common import owner
from ..forward.common import split_products
from ..launch import Kernel, Region
from ..plan_backward import gradient_warps
from ..reductions import LOG2E
from ..rows import through_norm
from .common import factor

if TYPE_CHECKING:
    from ...problem import Problem
    from ..plan_backward import SoftGradientPlan
    from .inputs import SoftTensors


@triton.jit(
    do_not_specialize=[
        "n_documents", "document_length", "first_document", "n_launched", "n_blocks", "n_groups",
    ]
)  # fmt: skip
def _documents_kernel(
    queries_ptr, documents_ptr, active_ptr, bounds_ptr, queries_scale_ptr, documents_scale_ptr, cu_seqlens_ptr,
    candidates_ptr, beta_ptr, lse_ptr, grad_rows_ptr, grad_documents_ptr, partials_ptr, slopes_ptr,
    n_documents, document_length, first_document, n_launched, n_blocks, n_groups,
    n_rows, stride_row, stride_group, stride_document, stride_document_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    SPLIT: tl.constexpr,
    OWNED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_CANDIDATES: tl.constexpr,
    HAS_DOCUMENTS_MASK: tl.constexpr,
    ZERO_MASKED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ROUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERY_UNIT: tl.constexpr,
    DOCUMENT_UNIT: tl.constexpr,
):  # fmt: skip
    """grad_documents[token] = sum over rows of grad * probability * queries[row], of the rows of one group.

    Grid: (blocks of tokens x documents of this launch x groups, parts of an embedding). Of a split embedding under
    NORMALIZE, what is left in float32 is the gradient of the scaled one. `partials` [documents of the launch x blocks,
    rows of all groups, d], float32, if any, are those of the queries, and `slopes` [programs] the sums of
    grad * probability * log2(probability), for beta. EVEN: the last block of rows is full.

    What is loaded for a row of the tile is spread over all threads that hold a part of it, each of which computes its
    address: it is one addition, as rows are contiguous.
    """
    stride_row *= QUERY_UNIT
    stride_group *= DOCUMENT_UNIT
    stride_document *= DOCUMENT_UNIT
    stride_document_token *= DOCUMENT_UNIT
    block = tl.program_id(0) % n_blocks
    launched = (tl.program_id(0) // n_blocks) % n_launched
    group = (tl.program_id(0) // (n_blocks * n_launched)).to(tl.int64)
    flat_document = group * n_documents + first_document + launched
    if HAS_CANDIDATES:
        group = owner(candidates_ptr, n_groups, flat_document).to(tl.int64)
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
        if NORMALIZE:
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
            if NORMALIZE:
                partial_flows *= token_scale[:, None]
            partial = tl.dot(tl.trans(factor(partial_flows, ROUNDED)), factor(tile, ROUNDED), input_precision=PRECISION)
            part = (launched * n_blocks + block).to(tl.int64) * n_groups * n_rows
            offset = (part + group * n_rows + rows)[:, None] * EMBEDDING + owned[None, :]
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
        all_slopes = tl.sum(tl.where(token_exists, slope, 0.0), axis=0)
        if ZERO_MASKED:
            # The masked tokens of a document that has others are those of its first program.
            masked = tl.where((block == 0) & (length > 0), document_length - length, 0).to(tl.float32)
            all_slopes += tl.where(masked > 0.0, masked * tl.sum(zeros_slope, axis=0), 0.0)
        # Of an embedding in parts, all programs have the same.
        tl.store(slopes_ptr + tl.program_id(0), all_slopes, mask=tl.program_id(1) == 0)


_documents = Kernel(_documents_kernel)


def walk_rows(
    problem: Problem,
    plan: SoftGradientPlan,
    inputs: SoftTensors,
    results: tuple[Tensor | Region | None, Tensor | None, Tensor | None],
    first: int,
    number: int,
) -> None:
    """The gradient of `number` documents of each group from the `first` on, of all tokens that are active.

    `results`: the gradient, partial sums of that of the queries, and what that of beta is a sum of; or None.
    """
    kind, tile, groups = problem.kind, plan.documents, 1 if problem.packed else problem.groups
    _documents(
        (plan.n_blocks * number * groups, plan.parts.number, 1),
        (*inputs, *results),
        (problem.n_documents, problem.document_length, first, number, plan.n_blocks, problem.groups),
        (problem.rows, *plan.strides),
        (
            problem.size, plan.parts.block, plan.parts.split, plan.parts.owned, tile.rows, tile.columns,
            problem.rows % tile.columns == 0, problem.packed, problem.has_candidates, kind.documents_mask is not None,
            kind.zero_masked, problem.normalize, plan.rounded, kind.precision, *plan.units,
        ),
        gradient_warps(tile),
    )  # fmt: skip
