"""Sums of listed query rows: the gradient of each document token.

`_sum_kernel` sums the rows of a token. Tokens with many more rows than a segment (markers such as [CLS] win thousands)
are split at multiples of the segment size; other programs sum the rest, and `_combine_kernel` adds up the parts in
order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..launch import Region, Scratch, kernel, wait_for_previous_kernel
from ..plan_backward import ListsPlan
from ..rows import through_norm
from .common import BackwardTensors, Destination, group_of, joined, layout, quotient, token_of


class Lists(NamedTuple):
    """Inputs of lists of rows by token, for `number` documents from `first` on, and the output `starts`.

    `starts` [number, Ld + 1]: where the lists of tokens begin; for packed documents, [tokens + documents] of all of
    them, like `owners` [tokens], the documents that tokens belong to. `cu_seqlens` are the documents' boundaries.
    """

    first: int
    number: int
    starts: Tensor | Region
    owners: Tensor | None
    argmax: Tensor
    cu_seqlens: Tensor | None


@triton.jit
def _segment(tensors, flat, local, segment, n_rows, document_length, SEGMENT: tl.constexpr):
    """The token whose rows surround the `segment`-th multiple of SEGMENT in a document's list.

    Returns that multiple, the token, where its rows begin and end, and whether they extend SEGMENT or more before it,
    so that a separate program sums them from there on.
    """
    argmax_ptr, list_ptr, starts_ptr, cu_seqlens_ptr = tensors
    boundary = (segment + 1) * SEGMENT
    if cu_seqlens_ptr is not None:
        begin = tl.load(cu_seqlens_ptr + flat).to(tl.int64)
        starts_ptr += begin + flat
        length = (tl.load(cu_seqlens_ptr + flat + 1).to(tl.int64) - begin).to(tl.int32)
    else:
        starts_ptr += local * (document_length + 1)
        length = document_length
    exists = boundary < tl.load(starts_ptr + length).to(tl.int32)
    row = tl.load(list_ptr + local * n_rows + boundary, mask=exists, other=0).to(tl.int32)
    token = tl.load(argmax_ptr + flat * n_rows + row, mask=exists, other=0).to(tl.int32)
    start = tl.load(starts_ptr + token, mask=exists, other=0).to(tl.int32)
    end = tl.load(starts_ptr + token + 1, mask=exists, other=0).to(tl.int32)
    return boundary, token, start, end, exists & (boundary >= start + SEGMENT)


@triton.jit
def _store_token(
    total, token_index, source, documents_ptr, documents_scale_ptr, grad_documents_ptr, exists, config: tl.constexpr
):
    """Write the gradient [d] of a token (`token_of`) from its sum, or accumulate it (`add`), where `exists`."""
    dims = tl.arange(0, total.shape[0])
    mask = (dims < config.size) & exists
    if config.normalize:
        embedding = tl.load(documents_ptr + source + dims, mask=mask, other=0.0)
        scale = tl.load(documents_scale_ptr + token_index + tl.arange(0, 1), mask=exists, other=1.0)
        total = through_norm(total[None, :], embedding[None, :], scale, config.normalized)
        total = tl.reshape(total, mask.shape)
    grad_documents_ptr += token_index * config.size
    if config.add:
        total += tl.load(grad_documents_ptr + dims, mask=mask, other=0.0)
    tl.store(grad_documents_ptr + dims, total.to(grad_documents_ptr.dtype.element_ty), mask=mask)


@kernel(follows=True, config="size block block_rows segment normalize normalized add")
def _sum_kernel(
    grad_scores_ptr, queries_ptr, documents_ptr, queries_scale_ptr, documents_scale_ptr, cu_seqlens_ptr,
    candidates_ptr, owners_ptr, argmax_ptr, list_ptr, starts_ptr, parts_ptr, grad_documents_ptr,
    first_document, n_block_documents, n_segments, n_rows, n_group_queries, query_length, magic, shift, n_documents,
    document_length, next_query, next_document, n_groups,
    stride_query, stride_query_token, stride_group, stride_document, stride_token, config: tl.constexpr,
):  # fmt: skip
    """grad_documents[token] = sum of grad_score * queries[row] over the rows on its list, in their order.

    Programs: first `n_segments` per document for the rest of long lists, then one per token, which sums all of its list
    if there are no segments. Lists summed in several parts go to parts [local document, segment, 2, d]: index 0 is the
    sum of the token's own program, at the segment that follows it, and index 1 that of the segment's program.

    Rows are loaded in halves, as in `_gather_kernel`, while the list's next rows are loaded. `add`: accumulate into the
    existing float32 values; those of tokens without a list are not touched.
    """
    wait_for_previous_kernel()
    program = tl.program_id(0)
    n_extra = n_block_documents * n_segments
    if program < n_extra:
        local = (program // n_segments).to(tl.int64)
        flat = first_document + local
        tensors = argmax_ptr, list_ptr, starts_ptr, cu_seqlens_ptr
        boundary, token, start, end, is_active = _segment(
            tensors, flat, local, program % n_segments, n_rows, document_length, config.segment
        )
        low = boundary
        high = tl.where(is_active, tl.minimum(boundary + config.segment, end), boundary)
        in_parts = is_active
        exists = is_active
        part = program.to(tl.int64) * 2 + 1
    else:
        if cu_seqlens_ptr is not None:
            at = tl.load(cu_seqlens_ptr + first_document).to(tl.int64) + (program - n_extra)
            exists = at < tl.load(cu_seqlens_ptr + first_document + n_block_documents).to(tl.int64)
            flat = tl.load(owners_ptr + at, mask=exists, other=first_document).to(tl.int64)
            local = flat - first_document
            token = (at - tl.load(cu_seqlens_ptr + flat).to(tl.int64)).to(tl.int32)
            starts_at = at + flat
        else:
            local = ((program - n_extra) // document_length).to(tl.int64)
            flat = first_document + local
            token = (program - n_extra) % document_length
            exists = token >= 0
            starts_at = local * (document_length + 1) + token
        low = tl.load(starts_ptr + starts_at, mask=exists, other=0).to(tl.int32)
        end = tl.load(starts_ptr + starts_at + 1, mask=exists, other=0).to(tl.int32)
        if config.add:
            exists = exists & (end > low)
        boundary = tl.where(n_segments > 0, (tl.cdiv(low, config.segment) + 1) * config.segment, end)
        in_parts = end > boundary
        high = tl.minimum(end, boundary)
        part = (local * n_segments + boundary // config.segment - 1) * 2

    group, weights_ptr = group_of(
        flat, grad_scores_ptr, candidates_ptr, n_documents, n_group_queries, n_groups, next_query, next_document
    )
    queries_ptr += group * n_group_queries * stride_query
    list_ptr += local * n_rows
    dims = tl.arange(0, config.block)
    HALF: tl.constexpr = config.block // 2
    half_dims = tl.arange(0, HALF)
    left_sum = tl.zeros([config.block_rows, HALF], tl.float32)
    right_sum = tl.zeros([config.block_rows, HALF], tl.float32)
    positions = low + tl.arange(0, config.block_rows)
    next_rows = tl.load(list_ptr + positions, mask=positions < high, other=0)
    for position in tl.range(low, high, config.block_rows):
        positions = position + tl.arange(0, config.block_rows)
        mask, row = positions < high, next_rows.to(tl.int32)
        positions += config.block_rows
        next_rows = tl.load(list_ptr + positions, mask=positions < high, other=0)
        query = quotient(row, magic, shift)
        weight = tl.load(weights_ptr + query.to(tl.int64) * next_query, mask=mask, other=0.0)
        source = query.to(tl.int64) * stride_query + (row - query * query_length).to(tl.int64) * stride_query_token
        if queries_scale_ptr is not None:
            weight *= tl.load(queries_scale_ptr + group * n_rows + row, mask=mask, other=0.0)
        at = queries_ptr + half_dims[None, :] + source[:, None]
        if config.block == config.size:
            left = tl.load(at, mask=mask[:, None], other=0.0)
            right = tl.load(at + HALF, mask=mask[:, None], other=0.0)
        else:
            left = tl.load(at, mask=mask[:, None] & (half_dims < config.size)[None, :], other=0.0)
            right = tl.load(at + HALF, mask=mask[:, None] & (HALF + half_dims < config.size)[None, :], other=0.0)
        left_sum += weight[:, None] * left.to(tl.float32)
        right_sum += weight[:, None] * right.to(tl.float32)
    total = joined(tl.sum(left_sum, axis=0)[None, :], tl.sum(right_sum, axis=0)[None, :], 1, config.block)
    total = tl.reshape(total, [config.block])
    if in_parts:
        tl.store(parts_ptr + part * config.size + dims, total, mask=dims < config.size)
    else:
        token_index, source = token_of(
            flat, token, cu_seqlens_ptr, n_documents, document_length, stride_group, stride_document, stride_token
        )
        _store_token(total, token_index, source, documents_ptr, documents_scale_ptr, grad_documents_ptr, exists, config)


@kernel(follows=True, config="size block block_parts segment normalize normalized add")
def _combine_kernel(
    documents_ptr, documents_scale_ptr, cu_seqlens_ptr, argmax_ptr, list_ptr, starts_ptr, parts_ptr,
    grad_documents_ptr,
    first_document, n_rows, n_documents, document_length, n_segments,
    stride_group, stride_document, stride_token, config: tl.constexpr,
):  # fmt: skip
    """The gradient of every token whose list was summed in parts, from `parts`; one program per segment.

    It acts if its segment is the first that was not summed by the token's own program.
    """
    wait_for_previous_kernel()
    program = tl.program_id(0).to(tl.int64)
    local = program // n_segments
    flat = first_document + local
    tensors = argmax_ptr, list_ptr, starts_ptr, cu_seqlens_ptr
    boundary, token, start, end, is_active = _segment(
        tensors, flat, local, tl.program_id(0) % n_segments, n_rows, document_length, config.segment
    )
    if is_active & (boundary < start + 2 * config.segment):
        dims = tl.arange(0, config.block)
        parts_ptr += program * 2 * config.size
        total = tl.load(parts_ptr + dims, mask=dims < config.size, other=0.0)
        count = tl.cdiv(end - boundary, config.segment)
        for first in tl.range(0, count, config.block_parts):
            parts = first + tl.arange(0, config.block_parts)
            mask = (parts < count)[:, None] & (dims < config.size)[None, :]
            offsets = (parts * 2 + 1)[:, None] * config.size + dims[None, :]
            total += tl.sum(tl.load(parts_ptr + offsets, mask=mask, other=0.0), axis=0)
        token_index, source = token_of(
            flat, token, cu_seqlens_ptr, n_documents, document_length, stride_group, stride_document, stride_token
        )
        _store_token(
            total, token_index, source, documents_ptr, documents_scale_ptr, grad_documents_ptr, is_active, config
        )


def sum_lists(
    problem: Problem,
    plan: ListsPlan,
    inputs: BackwardTensors,
    lists: Lists,
    listed: Tensor | Region,
    destination: Destination,
    scratch: Scratch,
) -> None:
    """Write, or accumulate, the gradients of a block of documents from its rows by token, `listed` [number, rows]."""
    first, number, starts, owners, argmax, cu_seqlens = lists
    grad_documents, adds = destination.documents, destination.adds
    size, length, n_segments, strides = problem.size, problem.document_length, plan.n_segments, problem.document_strides
    block_embedding, num_warps, segment = plan.block_embedding, plan.num_warps, plan.segment
    normalize = problem.normalize and not destination.partial
    parts = scratch.empty(number * n_segments * 2 * size, torch.float32, problem.device)
    constants = size, block_embedding, plan.rows, segment, normalize, inputs.normalized, adds
    _sum_kernel(
        (number * n_segments + min(problem.n_tokens, number * length), 1, 1),
        (*inputs[:7], owners, argmax, listed, starts, parts, grad_documents),
        (first, number, n_segments, *layout(problem, inputs.grad_strides)),
        (*problem.query_strides, *strides),
        constants,
        (num_warps, 1, plan.registers),
    )
    if n_segments > 0:
        _combine_kernel(
            (number * n_segments, 1, 1),
            (inputs.documents, inputs.documents_scale, cu_seqlens, argmax, listed, starts, parts, grad_documents),
            (first, problem.rows, problem.n_documents, length, n_segments),
            strides,
            constants,
            (num_warps, 1, None),
        )
