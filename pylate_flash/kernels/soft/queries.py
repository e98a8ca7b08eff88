"""Gradient of the queries of soft MaxSim, where programs of its own compute it: they own rows, and walk documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from ..forward.common import document_range, split_products
from ..launch import Kernel
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
        "n_documents", "document_length", "n_groups", "n_splits",
    ]
)  # fmt: skip
def _queries_kernel(
    queries_ptr, documents_ptr, active_ptr, bounds_ptr, queries_scale_ptr, documents_scale_ptr, cu_seqlens_ptr,
    candidates_ptr, beta_ptr, lse_ptr, grad_rows_ptr, grad_queries_ptr,
    n_documents, document_length, n_groups, n_splits,
    n_rows, stride_row, stride_group, stride_document, stride_document_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    SPLIT: tl.constexpr,
    OWNED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_CANDIDATES: tl.constexpr,
    HAS_DOCUMENTS_MASK: tl.constexpr,
    NORMALIZE: tl.constexpr,
    THROUGH_NORM: tl.constexpr,
    ROUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERY_UNIT: tl.constexpr,
    DOCUMENT_UNIT: tl.constexpr,
):  # fmt: skip
    """grad_queries[row] = sum over tokens of grad * probability * documents[token], [splits, rows of all, d].

    Grid: (blocks of rows x groups, splits of the documents, parts of an embedding). Without THROUGH_NORM, what is left
    under NORMALIZE is the gradient of the scaled queries.
    """
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
    if NORMALIZE:
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
    if HAS_CANDIDATES:
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
            stride_group, stride_document, stride_document_token, PACKED, 0,
        )  # fmt: skip
        flat_document = tl.cast(document, tl.int64)
        if PACKED:
            flat = tl.load(cu_seqlens_ptr + document).to(tl.int64)
        else:
            flat_document += group * n_documents
            flat = flat_document * document_length
        if HAS_DOCUMENTS_MASK:
            length = tl.load(bounds_ptr + 2 * flat_document)
        lse = tl.load(lse_ptr + flat_document * n_rows + rows, mask=row_exists, other=0.0) * LOG2E
        grad = tl.load(grad_rows_ptr + flat_document * n_rows + rows, mask=row_exists, other=0.0)
        for start in tl.range(0, length, BLOCK_TOKENS):
            positions = start + tl.arange(0, BLOCK_TOKENS)
            token_exists = positions < length
            if HAS_DOCUMENTS_MASK:
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
            if NORMALIZE:
                token_scale = tl.load(documents_scale_ptr + flat + tokens, mask=token_exists, other=1.0)
                exponents *= token_scale[None, :]
            exponents = exponents * row_factor[:, None] - lse[:, None]
            # A probability is at most 1. What is left here of a token past the end, of zeros, is finite, and adds none.
            exponents = tl.minimum(exponents, 1.0, propagate_nan=tl.PropagateNan.ALL)
            # A row that takes no part, of zeros, meets infinite tokens too.
            flows = tl.where((grad != 0.0)[:, None], tl.exp2(exponents) * grad[:, None], 0.0)
            if NORMALIZE:
                flows *= token_scale[None, :]
            total = tl.dot(factor(flows, ROUNDED), factor(tile, ROUNDED), total, input_precision=PRECISION)
    if THROUGH_NORM:
        total = through_norm(total, query_tile, row_scale)
    offset = (tl.program_id(1).to(tl.int64) * n_groups * n_rows + global_row)[:, None] * EMBEDDING + owned[None, :]
    tl.store(
        grad_queries_ptr + offset, total.to(grad_queries_ptr.dtype.element_ty),
        mask=row_exists[:, None] & inside[None, :],
    )  # fmt: skip


_queries = Kernel(_queries_kernel)


def walk_documents(
    problem: Problem, plan: SoftGradientPlan, inputs: SoftTensors, grad_queries: Tensor, whole: bool
) -> None:
    """The gradient of the queries, `whole`, or sums of it in float32, [splits, rows, d], of scaled queries."""
    kind, tile = problem.kind, plan.queries
    _queries(
        (-(-problem.rows // tile.rows) * problem.groups, plan.n_splits, plan.parts.number),
        (*inputs, grad_queries),
        (problem.n_documents, problem.document_length, problem.groups, plan.n_splits),
        (problem.rows, *plan.strides),
        (
            problem.size, plan.parts.block, plan.parts.split, plan.parts.owned, tile.rows, tile.columns,
            problem.packed, problem.has_candidates, kind.documents_mask is not None, problem.normalize,
            problem.normalize and whole, plan.rounded, kind.precision, *plan.units,
        ),
        gradient_warps(tile),
    )  # fmt: skip
