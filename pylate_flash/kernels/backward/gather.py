"""Gradient of the queries: the sum of the argmax document rows, in the order of the documents.

Concurrent programs walk the same documents, so the rows come out of L1 and L2. If there are too few query rows to fill
the GPU, several programs split the documents, and `_finish_kernel` adds up their sums in order.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..launch import Region, kernel, wait_for_previous_kernel
from ..plan_backward import GatherPlan
from ..rows import through_norm
from .common import BackwardTensors, finish_queries, joined
from .sorting import list_rows


@kernel(follows=True, config="size block block_rows block_documents split normalized row_bits block_tokens")
def _gather_kernel(
    grad_scores_ptr, queries_ptr, documents_ptr, queries_scale_ptr, documents_scale_ptr, cu_seqlens_ptr,
    candidates_ptr, argmax_ptr, queries_weight_ptr, grad_queries_ptr, list_ptr, starts_ptr,
    n_rows, query_length, n_documents, document_length, n_splits, next_query, next_document, n_listed,
    stride_query, stride_query_token, stride_group, stride_document, stride_token, config: tl.constexpr,
):  # fmt: skip
    """grad_queries[row] = sum over documents of grad_score * documents[argmax], [Nq * Lq, d]; the rows of one group.

    Grid: (blocks of rows x groups, splits of the documents). With a list, `n_listed` programs come first, each of which
    lists the rows of a document (`list_rows`).

    `block_documents` documents are in flight at once. With `split`, the sums stay in float32, [splits, Nq * Lq, d], and
    `_finish_kernel` applies the Jacobian and weights.

    A row is loaded in halves: at d = 128 by 8 threads instead of 16, so that a thread looks up half as many rows,
    which takes as many instructions as summing them does.
    """
    wait_for_previous_kernel()
    program = tl.program_id(0)
    if list_ptr is not None and program < n_listed:
        list_rows(program, argmax_ptr, list_ptr, starts_ptr, 0, n_rows, document_length, config)
    else:
        if list_ptr is not None:
            program -= n_listed
        n_blocks = tl.cdiv(n_rows, config.block_rows)
        group = (program // n_blocks).to(tl.int64)
        first_row = program % n_blocks * config.block_rows
        lanes = tl.arange(0, config.block_rows * config.block_documents)
        rows = first_row + lanes % config.block_rows
        row_exists = rows < n_rows
        query = group * (n_rows // query_length) + rows // query_length
        dims = tl.arange(0, config.block)
        dim_exists = dims < config.size

        origin = group * n_documents
        first = origin
        last = origin + n_documents
        if candidates_ptr is not None:
            origin = group * 0
            first = tl.load(candidates_ptr + group).to(tl.int64)
            last = tl.load(candidates_ptr + group + 1).to(tl.int64)
        share = tl.cdiv(last - first, n_splits)
        first += tl.program_id(1) * share
        count = tl.maximum(tl.minimum(share, last - first), 0).to(tl.int32)
        query_offset = query * next_query
        HALF: tl.constexpr = config.block // 2
        half_dims = tl.arange(0, HALF)
        documents_ptr += group * stride_group
        low = tl.zeros([config.block_rows * config.block_documents, HALF], tl.float32)
        high = tl.zeros([config.block_rows * config.block_documents, HALF], tl.float32)
        for step in tl.range(0, count, config.block_documents):
            if config.block_documents == 1:
                document = first + step
                exists = row_exists
            else:
                ahead = step + lanes // config.block_rows
                document = first + ahead
                exists = row_exists & (ahead < count)
            argmax = tl.load(argmax_ptr + document * n_rows + rows, mask=exists, other=-1).to(tl.int32)
            won = argmax >= 0
            weight = tl.load(grad_scores_ptr + (document - origin) * next_document + query_offset, mask=won, other=0.0)
            offset = argmax.to(tl.int64) * stride_token
            if cu_seqlens_ptr is not None:
                # Clamped to the end of the last document, as some of the documents in flight may be past it.
                begin = tl.load(cu_seqlens_ptr + tl.minimum(document, last)).to(tl.int64)
                base = documents_ptr + begin * stride_token
            else:
                begin = document * document_length
                base = documents_ptr + (document - origin) * stride_document
            if documents_scale_ptr is not None:
                weight *= tl.load(documents_scale_ptr + begin + argmax, mask=won, other=0.0)
            if config.block_documents > 1:
                base = base[:, None]
            pointers = base + half_dims[None, :] + offset[:, None]
            if config.block == config.size:
                left = tl.load(pointers, mask=won[:, None], other=0.0)
                right = tl.load(pointers + HALF, mask=won[:, None], other=0.0)
            else:
                left = tl.load(pointers, mask=won[:, None] & (half_dims < config.size)[None, :], other=0.0)
                right = tl.load(
                    pointers + HALF, mask=won[:, None] & (HALF + half_dims < config.size)[None, :], other=0.0
                )
            low += weight[:, None] * left.to(tl.float32)
            high += weight[:, None] * right.to(tl.float32)

        total = joined(low, high, config.block_rows * config.block_documents, config.block)
        if config.block_documents > 1:
            total = tl.sum(tl.reshape(total, [config.block_documents, config.block_rows, config.block]), axis=0)
        rows = first_row + tl.arange(0, config.block_rows)
        mask = (rows < n_rows)[:, None] & dim_exists[None, :]
        if queries_scale_ptr is not None and not config.split:
            query = group * (n_rows // query_length) + rows // query_length
            source = query * stride_query + rows % query_length * stride_query_token
            embeddings = tl.load(queries_ptr + source[:, None] + dims[None, :], mask=mask, other=0.0)
            scale = tl.load(queries_scale_ptr + group * n_rows + rows, mask=rows < n_rows, other=1.0)
            total = through_norm(total, embeddings, scale, config.normalized)
        if queries_weight_ptr is not None:
            total *= tl.load(queries_weight_ptr + group * n_rows + rows, mask=rows < n_rows, other=0.0)[:, None]
        offset = group * n_rows + rows
        if config.split:
            offset += tl.program_id(1).to(tl.int64) * (tl.num_programs(0) // n_blocks) * n_rows
        tl.store(
            grad_queries_ptr + offset[:, None] * config.size + dims[None, :],
            total.to(grad_queries_ptr.dtype.element_ty),
            mask=mask,
        )


def gather_queries(
    problem: Problem,
    inputs: BackwardTensors,
    grad_queries: Tensor,
    plan: GatherPlan,
    lists: tuple[Region | None, Region | None] = (None, None),
    row_bits: int = 0,
) -> None:
    """Compute the gradient of the queries and, without splits, also the `lists` and starts of 2**row_bits rows."""
    n_splits, split, length = plan.n_splits, plan.n_splits > 1, problem.document_length
    n_listed, listed = (problem.all_documents, (row_bits, 1 << length.bit_length())) if row_bits else (0, (0, 0))
    sums, weight = grad_queries, inputs.queries_weight
    if split:
        shape, weight = (n_splits, problem.n_queries * problem.query_length, problem.size), None
        sums = torch.empty(*shape, dtype=torch.float32, device=problem.device)
    sizes = problem.rows, problem.query_length, problem.n_documents, length
    constants = problem.size, plan.block_embedding, plan.rows, plan.documents, split, inputs.normalized
    _gather_kernel(
        (n_listed + plan.programs, n_splits, 1),
        (*inputs[:8], weight, sums, *lists),
        (*sizes, n_splits, *inputs.grad_strides, n_listed),
        (*problem.query_strides, *problem.document_strides),
        (*constants, *listed),
        # Listing takes more registers.
        (plan.num_warps, 3, None if row_bits else plan.registers),
    )
    if split:
        finish_queries(
            problem, inputs.queries, inputs.queries_scale, inputs.queries_weight, sums, grad_queries, inputs.normalized
        )
