"""The backward of soft MaxSim: every query row gets a contribution from every token, and vice versa.

The probabilities exp(beta * similarity - lse) are recomputed. Programs that own tokens of a document walk query rows,
with their gradient in registers; programs that own query rows walk documents, and recompute the probabilities once
more. Sums have a fixed order, so results are bitwise reproducible.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..problem import Problem, Tensors
from .backward.common import finish_documents, finish_queries, owner
from .config import precision_of
from .forward.common import document_range, split_products
from .launch import Region, kernel
from .plan_backward import gradient_warps, soft_gradient_plan
from .reductions import LOG2E
from .rows import active_tokens, norms_of, through_norm


class SoftTensors(NamedTuple):
    """The tensors that the kernels read, in argument order."""

    # [Nq * Lq, d], zeros where masked.
    queries: Tensor
    documents: Tensor
    # The active tokens of masked documents, and their counts (`kernels.rows`).
    active: Tensor | None
    bounds: Region | None
    # Inverse norms of embeddings to be normalized.
    queries_scale: Tensor | None
    documents_scale: Tensor | None
    cu_seqlens: Tensor | None
    candidates: Tensor | None
    beta: Tensor
    # log(sum(exp(beta * similarity))) [documents, rows].
    lse: Tensor
    # The gradient of each row's smooth maximum [documents, rows], 0 where a token is masked.
    grad_rows: Tensor


@triton.jit
def _factor(values, ROUNDED: tl.constexpr):
    """Cast a factor of the products of a gradient: float16 could not hold a scaled loss."""
    return values.to(tl.bfloat16) if ROUNDED else values.to(tl.float32)


@kernel(config="size block split owned block_tokens block_rows zero_masked rounded precision query_unit document_unit")
def _documents_kernel(
    queries_ptr, documents_ptr, active_ptr, bounds_ptr, queries_scale_ptr, documents_scale_ptr, cu_seqlens_ptr,
    candidates_ptr, beta_ptr, lse_ptr, grad_rows_ptr, grad_documents_ptr, slopes_ptr,
    n_documents, document_length, n_blocks, n_groups,
    stride_rows, stride_row, stride_group, stride_document, stride_document_token, config: tl.constexpr,
):  # fmt: skip
    """grad_documents[token] = sum over rows of grad * probability * queries[row], of the rows of one group.

    Grid: (blocks of tokens x documents of all groups, parts of an embedding). With scales, the output for a split
    embedding, in float32, is the gradient of the scaled embedding. `slopes` [programs] are the sums of grad *
    probability * log2(probability), for beta.

    Loads for a row of the tile are spread over all threads that hold a part of it, each of which computes its address:
    a single addition, as rows are contiguous.
    """
    # Rows of consecutive documents are adjacent: their number is a stride, too.
    n_rows = stride_rows
    stride_row *= config.query_unit
    stride_group *= config.document_unit
    stride_document *= config.document_unit
    stride_document_token *= config.document_unit
    block = tl.program_id(0) % n_blocks
    document = tl.program_id(0) // n_blocks
    group = (document // n_documents).to(tl.int64)
    flat_document = document.to(tl.int64)
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

    positions = block * config.block_tokens + tl.arange(0, config.block_tokens)
    token_exists = positions < length
    tokens = positions
    if active_ptr is not None:
        tokens = tl.load(active_ptr + flat + positions, mask=token_exists, other=0)
    token_rows = base + tokens.to(tl.int64) * stride_document_token
    owned = tl.arange(0, config.owned)
    if config.split:
        owned += tl.program_id(1) * config.owned
    inside = owned < config.size
    tile = tl.load(token_rows[:, None] + owned[None, :], mask=token_exists[:, None] & inside[None, :], other=0.0)
    if queries_scale_ptr is not None:
        token_scale = tl.load(documents_scale_ptr + flat + tokens, mask=token_exists, other=1.0)
    exponent_scale = tl.load(beta_ptr) * LOG2E
    total = tl.zeros([config.block_tokens, config.owned], tl.float32)
    slope = tl.zeros([config.block_tokens], tl.float32)
    if config.zero_masked:
        zeros_slope = tl.zeros([config.block_rows], tl.float32)
    lse_ptr += flat_document * n_rows
    grad_rows_ptr += flat_document * n_rows
    query_rows = queries_ptr + group * n_rows * stride_row
    # Loop-invariant offsets.
    row_offsets = tl.arange(0, config.block_rows).to(tl.int64) * stride_row
    walked = tl.where(block * config.block_tokens < length, n_rows, 0)
    for start in tl.range(0, walked, config.block_rows):
        rows = start + tl.arange(0, config.block_rows)
        row_exists = rows < n_rows
        row_starts = query_rows + tl.cast(start, tl.int64) * stride_row + row_offsets
        lse = tl.load(lse_ptr + rows, mask=row_exists, other=0.0)
        grad = tl.load(grad_rows_ptr + rows, mask=row_exists, other=0.0)
        query_tile = tl.load(
            row_starts[:, None] + owned[None, :], mask=row_exists[:, None] & inside[None, :], other=0.0
        )
        if config.split:
            exponents = split_products(token_rows, row_starts, token_exists, row_exists, config)
        else:
            exponents = tl.dot(tile, tl.trans(query_tile), input_precision=config.precision)
        row_factor = exponent_scale
        if queries_scale_ptr is not None:
            row_scale = tl.load(queries_scale_ptr + group * n_rows + rows, mask=row_exists, other=1.0)
            exponents *= token_scale[:, None]
            row_factor = row_scale[None, :] * exponent_scale
        exponents = exponents * row_factor - (lse * LOG2E)[None, :]
        probabilities = tl.exp2(exponents)
        # A masked row is all zeros, and its products with infinite tokens are NaN.
        grad_similarities = tl.where((grad != 0.0)[None, :], probabilities * grad[None, :], 0.0)
        if slopes_ptr is not None:
            slope += tl.sum(tl.where(grad_similarities == 0.0, 0.0, grad_similarities * exponents), axis=1)
            if config.zero_masked:
                zero = tl.exp2(-lse * LOG2E)
                zeros_slope -= tl.where((grad == 0.0) | (zero == 0.0), 0.0, grad * zero * (lse * LOG2E))
        if grad_documents_ptr is not None:
            if queries_scale_ptr is not None:
                grad_similarities *= row_scale[None, :]
            total = tl.dot(
                _factor(grad_similarities, config.rounded),
                _factor(query_tile, config.rounded),
                total,
                input_precision=config.precision,
            )
    if grad_documents_ptr is not None:
        if queries_scale_ptr is not None and not config.split:
            total = through_norm(total, tile, token_scale)
        offset = (flat + tokens)[:, None] * config.size + owned[None, :]
        tl.store(
            grad_documents_ptr + offset,
            total.to(grad_documents_ptr.dtype.element_ty),
            mask=token_exists[:, None] & inside[None, :],
        )
    if slopes_ptr is not None:
        all_slopes = tl.sum(tl.where(token_exists, slope, 0.0), axis=0)
        if config.zero_masked:
            # The first program of a document accounts for its masked tokens.
            masked = tl.where((block == 0) & (length > 0), document_length - length, 0).to(tl.float32)
            all_slopes += tl.where(masked > 0.0, masked * tl.sum(zeros_slope, axis=0), 0.0)
        # All parts of an embedding compute the same value.
        tl.store(slopes_ptr + tl.program_id(0), all_slopes, mask=tl.program_id(1) == 0)


@kernel(config="size block split owned block_rows block_tokens through_norm rounded precision query_unit document_unit")
def _queries_kernel(
    queries_ptr, documents_ptr, active_ptr, bounds_ptr, queries_scale_ptr, documents_scale_ptr, cu_seqlens_ptr,
    candidates_ptr, beta_ptr, lse_ptr, grad_rows_ptr, grad_queries_ptr,
    n_documents, document_length, n_groups, n_splits,
    stride_rows, stride_row, stride_group, stride_document, stride_document_token, config: tl.constexpr,
):  # fmt: skip
    """grad_queries[row] = sum over tokens of grad * probability * documents[token], [splits, rows of all, d].

    Grid: (blocks of rows x groups, splits of the documents, parts of an embedding). Without `through_norm`, the output
    with scales is the gradient of the scaled queries.
    """
    # Rows of consecutive documents are adjacent: their number is a stride, too.
    n_rows = stride_rows
    stride_row *= config.query_unit
    stride_document_token *= config.document_unit
    strides = stride_group * config.document_unit, stride_document * config.document_unit, stride_document_token
    n_row_blocks = tl.cdiv(n_rows, config.block_rows)
    group = (tl.program_id(0) // n_row_blocks).to(tl.int64)
    rows = tl.program_id(0) % n_row_blocks * config.block_rows + tl.arange(0, config.block_rows)
    row_exists = rows < n_rows
    global_row = group * n_rows + rows
    query_rows = queries_ptr + global_row * stride_row
    dims = tl.arange(0, config.block)
    if not config.split:
        query_mask = row_exists[:, None] & (dims < config.size)[None, :]
        query_tile = tl.load(query_rows[:, None] + dims[None, :], mask=query_mask, other=0.0)
    row_factor = tl.full([config.block_rows], LOG2E, tl.float32) * tl.load(beta_ptr)
    if queries_scale_ptr is not None:
        row_scale = tl.load(queries_scale_ptr + global_row, mask=row_exists, other=1.0)
        row_factor *= row_scale
    owned = tl.arange(0, config.owned)
    if config.split:
        owned += tl.program_id(2) * config.owned
    inside = owned < config.size

    # Loop-invariant offsets.
    token_offsets = tl.arange(0, config.block_tokens).to(tl.int64) * stride_document_token
    first = 0
    last = n_documents
    if candidates_ptr is not None:
        first = tl.load(candidates_ptr + group).to(tl.int32)
        last = tl.load(candidates_ptr + group + 1).to(tl.int32)
    share = tl.cdiv(last - first, n_splits)
    first += tl.program_id(1) * share
    last = tl.minimum(first + share, last)
    total = tl.zeros([config.block_rows, config.owned], tl.float32)
    # Both loops are flattened into one, as in the forward.
    for index in tl.range(0, last - first, flatten=not config.split):
        document = first + index
        base, length = document_range(documents_ptr, cu_seqlens_ptr, None, group, document, document_length, strides, 0)
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
        for start in tl.range(0, length, config.block_tokens):
            positions = start + tl.arange(0, config.block_tokens)
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
            if config.split:
                exponents = split_products(query_rows, token_rows, row_exists, token_exists, config)
            else:
                exponents = tl.dot(query_tile, tl.trans(tile), input_precision=config.precision)
            if queries_scale_ptr is not None:
                token_scale = tl.load(documents_scale_ptr + flat + tokens, mask=token_exists, other=1.0)
                exponents *= token_scale[None, :]
            exponents = exponents * row_factor[:, None] - lse[:, None]
            # A probability is at most 1. Tokens past the end are zeros: finite here, they contribute nothing.
            exponents = tl.minimum(exponents, 1.0, propagate_nan=tl.PropagateNan.ALL)
            # A masked row is all zeros, and its products with infinite tokens are NaN.
            grad_similarities = tl.where((grad != 0.0)[:, None], tl.exp2(exponents) * grad[:, None], 0.0)
            if queries_scale_ptr is not None:
                grad_similarities *= token_scale[None, :]
            total = tl.dot(
                _factor(grad_similarities, config.rounded),
                _factor(tile, config.rounded),
                total,
                input_precision=config.precision,
            )
    if config.through_norm:
        total = through_norm(total, query_tile, row_scale)
    offset = (tl.program_id(1).to(tl.int64) * n_groups * n_rows + global_row)[:, None] * config.size + owned[None, :]
    tl.store(
        grad_queries_ptr + offset,
        total.to(grad_queries_ptr.dtype.element_ty),
        mask=row_exists[:, None] & inside[None, :],
    )


def soft_backward(
    problem: Problem,
    tensors: Tensors,
    beta: Tensor,
    grad_scores: Tensor,
    lse: Tensor,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of beta, `tensors.queries` and `tensors.documents`, in their dtypes; None for those not needed.

    Queries are padded [Nq, Lq, d], and rows of embeddings contiguous; no dimension is 0, but packed documents may be
    empty. Boundaries are on the device. `grad_scores` of `problem.scores_shape` is float32 with any strides, and `lse`
    contiguous, as `soft_forward` returns it.
    """
    need_beta, need_queries, need_documents = needs
    inputs = _inputs(problem, tensors, beta, grad_scores, lse)
    row_stride = inputs.queries.stride(0)
    problem = problem._replace(query_strides=(problem.query_length * row_stride, row_stride))
    plan = soft_gradient_plan(problem)
    shape, kind = (problem.size, plan.parts.block, plan.parts.split, plan.parts.owned), problem.kind
    precision = precision_of(kind)
    grad_queries = grad_documents = sums = slopes = None
    if need_beta:
        slopes = torch.empty(plan.n_blocks * problem.all_documents, dtype=torch.float32, device=problem.device)
    if need_documents:
        grad_documents = sums = torch.empty_like(tensors.documents, memory_format=torch.contiguous_format)
        if problem.normalize and plan.parts.split:
            sums = torch.empty_like(grad_documents, dtype=torch.float32)
        if tensors.documents_mask is not None:
            sums.zero_()
    if need_documents or need_beta:
        tile = plan.documents
        _documents_kernel(
            (plan.n_blocks * problem.all_documents, plan.parts.number, 1),
            (*inputs, sums, slopes),
            (problem.n_documents, problem.document_length, plan.n_blocks, problem.groups),
            (problem.rows, *plan.strides),
            (*shape, tile.rows, tile.columns, kind.zero_masked, plan.rounded, precision, *plan.units),
            gradient_warps(tile),
        )
    if sums is not grad_documents:
        assert sums is not None
        assert grad_documents is not None
        assert inputs.documents_scale is not None
        finish_documents(problem, tensors.documents, inputs.documents_scale, sums, grad_documents)
    if need_queries:
        grad_queries = split_sums = torch.empty_like(tensors.queries, memory_format=torch.contiguous_format)
        tile, direct = plan.queries, plan.n_splits == 1 and not (problem.normalize and plan.parts.split)
        if not direct:
            # float32 gradients of the scaled queries.
            split_sums = grad_queries.new_empty(plan.n_splits, *grad_queries.shape, dtype=torch.float32)
        apply_norm = problem.normalize and direct
        _queries_kernel(
            (-(-problem.rows // tile.rows) * problem.groups, plan.n_splits, plan.parts.number),
            (*inputs, split_sums),
            (problem.n_documents, problem.document_length, problem.groups, plan.n_splits),
            (problem.rows, *plan.strides),
            (*shape, tile.rows, tile.columns, apply_norm, plan.rounded, precision, *plan.units),
            gradient_warps(tile),
        )
        if not direct:
            finish_queries(problem, inputs.queries, inputs.queries_scale, None, split_sums, grad_queries)
        if tensors.queries_mask is not None:
            # A probability of 0 times an infinite token is NaN.
            grad_queries.masked_fill_((tensors.queries_mask == 0).unsqueeze(-1), 0.0)
    grad_beta = None
    if slopes is not None:
        # From the sums of grad * p * log2(p): the gradient of (1 / beta) lse is -entropy / beta**2.
        grad_beta = (slopes.sum(dtype=torch.float64) * math.log(2.0) / beta.double().square()).to(beta.dtype)
    return grad_beta, grad_queries, grad_documents


def _inputs(problem: Problem, tensors: Tensors, beta: Tensor, grad_scores: Tensor, lse: Tensor) -> SoftTensors:
    embeddings, mask, documents_mask = tensors.queries, tensors.queries_mask, tensors.documents_mask
    scales: tuple[Tensor | None, Tensor | None] = (None, None)
    active = bounds = None
    if mask is not None:
        embeddings = embeddings.masked_fill((mask == 0).unsqueeze(-1), 0.0)
    # `flatten` copies if rows are not at equal distances.
    embeddings = embeddings.flatten(0, 1)
    if documents_mask is not None:
        active, bounds = active_tokens(documents_mask)
    if problem.normalize:
        scales = norms_of(embeddings, tensors.documents)
    grad_rows = _grad_rows(problem, mask, tensors.candidates_cu_seqlens, grad_scores)
    boundaries = tensors.documents_cu_seqlens, tensors.candidates_cu_seqlens
    return SoftTensors(embeddings, tensors.documents, active, bounds, *scales, *boundaries, beta, lse, grad_rows)


def _grad_rows(problem: Problem, queries_mask: Tensor | None, candidates: Tensor | None, grad_scores: Tensor) -> Tensor:
    """The gradient of every score times the weight of each row, [documents, rows], contiguous."""
    if candidates is not None:
        # [documents, 1 query, rows of it]
        grad, row_mask = grad_scores[:, None, None], None
        if queries_mask is not None:
            owners = torch.arange(problem.n_queries, device=problem.device)
            owners = owners.repeat_interleave(candidates.diff(), output_size=problem.n_documents)
            row_mask = queries_mask[owners].unsqueeze(1)
    elif problem.groups == 1:
        # [documents, queries, rows of each]
        grad, row_mask = grad_scores.T.unsqueeze(-1), queries_mask
    else:
        # [queries, documents, rows of the query]
        grad, row_mask = grad_scores.unsqueeze(-1), None if queries_mask is None else queries_mask.unsqueeze(1)
    if row_mask is None:
        rows = grad.expand(*grad.shape[:2], problem.query_length)
    else:
        weights = row_mask if problem.kind.weighted else row_mask != 0
        rows = (grad * weights).masked_fill_(row_mask == 0, 0.0)
    return rows.contiguous().view(problem.argmax_shape)
