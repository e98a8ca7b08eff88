"""Shared by the kernels of the backward: their inputs, index arithmetic, and the reduction of split sums."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from .. import plan_backward
from ..launch import kernel, wait_for_previous_kernel
from ..rows import row_addresses, rows_of_block, through_norm


class BackwardTensors(NamedTuple):
    """The tensors that the backward kernels read, in argument order, and metadata for the host."""

    grad_scores: Tensor
    queries: Tensor
    documents: Tensor
    # Factors of query and document rows in the sums: inverse norms, or None. For the gradient of the documents,
    # `queries_scale` includes the weights of the queries' tokens.
    queries_scale: Tensor | None
    documents_scale: Tensor | None
    documents_cu_seqlens: Tensor | None
    candidates_cu_seqlens: Tensor | None
    argmax: Tensor
    # The weights of the queries' tokens, float32 and contiguous, or None.
    queries_weight: Tensor | None
    # Strides of the scores, from one query to the next, and from one document to the next.
    grad_strides: tuple[int, ...]
    # Whether the embeddings are normalised already: then inverse norms serve the Jacobian alone.
    normalized: bool


class Destination(NamedTuple):
    """Outputs: contiguous tensors of the shapes of queries and documents, of any floating dtype, or None if not needed.

    `partial`: the documents' gradient is summed in float32 over several calls, so the Jacobian of `normalize` is
    applied later (`finish_documents`). `adds`: accumulate into the existing values.
    """

    queries: Tensor | None
    documents: Tensor | None
    partial: bool = False
    adds: bool = False


def layout(problem: Problem, grad_strides: tuple[int, ...]) -> tuple[int, ...]:
    """The scalar arguments that locate the rows of a document, from `n_rows` to `n_groups`."""
    groups, length = problem.groups, problem.query_length
    n_group_queries = problem.n_queries // groups
    return (
        n_group_queries * length, n_group_queries, length, *division(length), problem.n_documents,
        problem.document_length, *grad_strides, groups,
    )  # fmt: skip


@triton.jit
def quotient(value, magic, shift):
    """value // divisor for 0 <= value < 2**31, by a product and a shift instead of a division, see `division`."""
    return ((value.to(tl.uint32).to(tl.uint64) * magic.to(tl.uint32).to(tl.uint64)) >> shift.to(tl.uint64)).to(tl.int32)


def division(divisor: int) -> tuple[int, int]:
    """The factor, just above 2**shift / divisor and below 2**32, and shift by which `quotient` divides exactly."""
    shift = 31 + (divisor - 1).bit_length()
    return (1 << shift) // divisor + 1, shift


@triton.jit
def owner(bounds_ptr, count, value):
    """The sequence, of `count`, with boundaries bounds[i] <= value < bounds[i + 1]."""
    low = count * 0
    high = count - 1
    while low < high:
        middle = (low + high + 1) // 2
        above = tl.load(bounds_ptr + middle).to(tl.int64) > value
        high = tl.where(above, middle - 1, high)
        low = tl.where(above, low, middle)
    return low


@triton.jit
def group_of(flat, grad_scores_ptr, candidates_ptr, n_documents, n_group_queries, n_groups, next_query, next_document):
    """The group of a document, and the address of its score with the group's first query."""
    if candidates_ptr is not None:
        group = owner(candidates_ptr, n_groups, flat).to(tl.int64)
        offset = flat * next_document
    else:
        group = flat // n_documents
        offset = group * n_group_queries * next_query + (flat - group * n_documents) * next_document
    return group, grad_scores_ptr + offset


@triton.jit
def token_of(flat, token, cu_seqlens_ptr, n_documents, document_length, stride_group, stride_document, stride_token):
    """The index of a document's token among those of all documents, and the offset of its embedding."""
    if cu_seqlens_ptr is not None:
        index = tl.load(cu_seqlens_ptr + flat).to(tl.int64) + token
        source = index * stride_token
    else:
        index = flat * document_length + token
        source = (flat // n_documents) * stride_group + (flat % n_documents) * stride_document
        source += token.to(tl.int64) * stride_token
    return index, source


@triton.jit
def joined(low, high, ROWS: tl.constexpr, BLOCK_EMBEDDING: tl.constexpr):
    """Rows [ROWS, BLOCK_EMBEDDING] from their halves."""
    return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [ROWS, BLOCK_EMBEDDING])


@kernel(follows=True, config="size block block_rows normalized")
def _finish_kernel(
    parts_ptr, embeddings_ptr, scales_ptr, weights_ptr, grad_ptr,
    n_rows, n_parts, n_sequences, length,
    stride_group, stride_sequence, stride_token, config: tl.constexpr,
):  # fmt: skip
    """grad[row] from the sum, in order, of parts [n_parts, n_rows, d] in float32; rows [groups, sequences, length].

    Scales [n_rows], if any, are inverse norms of the embeddings, whose Jacobian is applied to the sum; weights, if any,
    multiply the result.
    """
    wait_for_previous_kernel()
    rows, exists = rows_of_block(tl.program_id(0), n_rows, config.block_rows)
    dims = tl.arange(0, config.block)
    mask = exists[:, None] & (dims < config.size)[None, :]
    offset = rows[:, None].to(tl.int64) * config.size + dims[None, :]
    total = tl.zeros([config.block_rows, config.block], tl.float32)
    for part in tl.range(0, n_parts):
        total += tl.load(parts_ptr + tl.cast(part, tl.int64) * n_rows * config.size + offset, mask=mask, other=0.0)
    if scales_ptr is not None:
        source = row_addresses(rows, n_sequences, length, stride_group, stride_sequence, stride_token)
        embeddings = tl.load(embeddings_ptr + source[:, None] + dims[None, :], mask=mask, other=0.0)
        scale = tl.load(scales_ptr + rows, mask=exists, other=1.0)
        total = through_norm(total, embeddings, scale, config.normalized)
    if weights_ptr is not None:
        total *= tl.load(weights_ptr + rows, mask=exists, other=0.0)[:, None]
    tl.store(grad_ptr + offset, total.to(grad_ptr.dtype.element_ty), mask=mask)


def finish_queries(
    problem: Problem,
    queries: Tensor,
    scale: Tensor | None,
    weight: Tensor | None,
    sums: Tensor,
    grad_queries: Tensor,
    normalized: bool = False,
) -> None:
    """Add up the `sums` [n, rows, d] of every query row, in order.

    `scale`, `weight` and `normalized`: see `BackwardTensors`.
    """
    sizes = problem.n_queries * problem.query_length, sums.shape[0], problem.n_queries, problem.query_length
    _finish(problem, (sums, queries, scale, weight, grad_queries), sizes, (0, *problem.query_strides), normalized)


def finish_documents(
    problem: Problem, documents: Tensor, documents_scale: Tensor, sums: Tensor, grad_documents: Tensor
) -> None:
    """Apply the Jacobian of `normalize` to the complete float32 `sums` of the documents' gradient."""
    lengths = (1, problem.n_tokens) if problem.packed else (problem.n_documents, problem.document_length)
    tensors = sums, documents, documents_scale, None, grad_documents
    _finish(problem, tensors, (problem.n_tokens, 1, *lengths), problem.document_strides, False)


def _finish(
    problem: Problem,
    tensors: tuple[Tensor | None, ...],
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    normalized: bool,
) -> None:
    plan = plan_backward.finish_plan(problem)
    constants = problem.size, plan.block_embedding, plan.rows, normalized
    _finish_kernel((-(-sizes[0] // plan.rows), 1, 1), tensors, sizes, strides, constants, (plan.num_warps, 3, None))
