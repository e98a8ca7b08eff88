"""Gradient of the documents by comparison of the argmax: each row is added directly to its argmax token.

The argmax of every row is compared with those of the other rows. The first row of every token pulls the rows with the
same argmax, in order, and writes their sum. This needs no list, and no program for tokens without rows, which are
many if there are few rows; work is quadratic in the number of rows.
"""

from __future__ import annotations

import triton.language as tl

from ...problem import Problem
from .. import plan_backward
from ..launch import kernel, wait_for_previous_kernel
from ..rows import through_norm
from .common import BackwardTensors, Destination, group_of, layout, quotient, token_of


@kernel(follows=True, config="size block block_rows chunk normalize normalized add")
def _compare_kernel(
    grad_scores_ptr, queries_ptr, documents_ptr, queries_scale_ptr, documents_scale_ptr, cu_seqlens_ptr,
    candidates_ptr, argmax_ptr, grad_documents_ptr,
    n_rows, n_group_queries, query_length, magic, shift, n_documents, document_length, next_query, next_document,
    n_groups,
    stride_query, stride_query_token, stride_group, stride_document, stride_token, config: tl.constexpr,
):  # fmt: skip
    """grad_documents[argmax of a row] = sum of grad_score * queries[row] over the rows with the same argmax.

    Grid: blocks of rows x documents. Only the first row of an argmax, the leader, sums and writes (`add`: accumulates).
    """
    wait_for_previous_kernel()
    n_blocks = tl.cdiv(n_rows, config.block_rows)
    flat = (tl.program_id(0) // n_blocks).to(tl.int64)
    first_row = tl.program_id(0) % n_blocks * config.block_rows
    rows = first_row + tl.arange(0, config.block_rows)
    lanes = tl.arange(0, config.chunk)
    argmax_ptr += flat * n_rows
    argmax = tl.load(argmax_ptr + rows, mask=rows < n_rows, other=-1).to(tl.int32)
    leads = argmax >= 0
    # With many rows, leaders are mostly among the first, and the other rows soon meet them here.
    start = first_row * 0
    while (start < first_row + config.block_rows) & (tl.max(leads.to(tl.int32), axis=0) > 0):
        other_rows = start + lanes
        other_argmax = tl.load(argmax_ptr + other_rows, mask=other_rows < n_rows, other=-1).to(tl.int32)
        earlier = (argmax[:, None] == other_argmax[None, :]) & (other_rows[None, :] < rows[:, None])
        leads = leads & (tl.max(earlier.to(tl.int32), axis=1) == 0)
        start += config.chunk
    if tl.max(leads.to(tl.int32), axis=0) > 0:
        group, weights_ptr = group_of(
            flat, grad_scores_ptr, candidates_ptr, n_documents, n_group_queries, n_groups, next_query, next_document
        )
        queries_ptr += group * n_group_queries * stride_query
        dims = tl.arange(0, config.block)
        dim_exists = dims < config.size
        total = tl.zeros([config.block_rows, config.block], tl.float32)
        for start in tl.range(first_row, n_rows, config.chunk):
            other_rows = start + lanes
            other_argmax = tl.load(argmax_ptr + other_rows, mask=other_rows < n_rows, other=-1).to(tl.int32)
            same = leads[:, None] & (argmax[:, None] == other_argmax[None, :])
            # The next row with the same argmax; `chunk` if there is none.
            position = tl.min(tl.where(same, lanes[None, :], config.chunk), axis=1)
            while tl.min(position, axis=0) < config.chunk:
                valid = position < config.chunk
                row = start + position
                query = quotient(row, magic, shift)
                weight = tl.load(weights_ptr + query.to(tl.int64) * next_query, mask=valid, other=0.0)
                if queries_scale_ptr is not None:
                    weight *= tl.load(queries_scale_ptr + group * n_rows + row, mask=valid, other=0.0)
                source = query.to(tl.int64) * stride_query
                source += (row - query * query_length).to(tl.int64) * stride_query_token
                mask = valid[:, None] & dim_exists[None, :]
                values = tl.load(queries_ptr + source[:, None] + dims[None, :], mask=mask, other=0.0)
                total += values.to(tl.float32) * weight[:, None]
                later = same & (lanes[None, :] > position[:, None])
                position = tl.min(tl.where(later, lanes[None, :], config.chunk), axis=1)
        token_indices, source = token_of(
            flat, argmax, cu_seqlens_ptr, n_documents, document_length, stride_group, stride_document, stride_token
        )
        mask = leads[:, None] & dim_exists[None, :]
        if config.normalize:
            embeddings = tl.load(documents_ptr + source[:, None] + dims[None, :], mask=mask, other=0.0)
            scale = tl.load(documents_scale_ptr + token_indices, mask=leads, other=1.0)
            total = through_norm(total, embeddings, scale, config.normalized)
        targets = grad_documents_ptr + token_indices[:, None] * config.size + dims[None, :]
        if config.add:
            total += tl.load(targets, mask=mask, other=0.0)
        tl.store(targets, total.to(grad_documents_ptr.dtype.element_ty), mask=mask)


def compare_argmax(problem: Problem, inputs: BackwardTensors, destination: Destination) -> None:
    """Write the gradient of the documents to a zeroed tensor, or accumulate it into another, without scratch."""
    plan = plan_backward.compare_plan(problem)
    normalize = problem.normalize and not destination.partial
    _compare_kernel(
        (-(-problem.rows // plan.rows) * problem.all_documents, 1, 1),
        (*inputs[:8], destination.documents),
        layout(problem, inputs.grad_strides),
        (*problem.query_strides, *problem.document_strides),
        (problem.size, plan.block_embedding, plan.rows, plan.compared, normalize, inputs.normalized, destination.adds),
        (plan.num_warps, 1, None),
    )
