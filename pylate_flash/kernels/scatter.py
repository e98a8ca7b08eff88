"""Gradient of the documents without lists: rows go straight to the tokens that they chose, in a gradient of zeros.

"onehot" compares the winners of all rows with each other. The first row of every winner pulls the rows that have the
same winner, in their order, and writes their sum. There is no list, and no program for a token that nobody chose, of
which few rows leave many; work grows with rows squared.
"atomic" adds every row to a float32 sum in memory, in any order: not reproducible.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .gradients import Problem, Slot, finish_documents, group_of, quotient, through_norm
from .launch import Launcher, Sequence
from .overlap import wait_for_previous_kernel

# Rows that pull in one program, at d = 128 of one warp, and winners that they are compared with at once. Two rows in
# flight for each of them take 168 registers instead of 105, so that two thirds as many programs run side by side.
_BLOCK_ROWS = 8
_CHUNK = 32


@triton.jit(
    do_not_specialize=[
        "n_rows", "n_group_queries", "query_length", "magic", "shift", "n_documents", "document_length",
        "stride_grad_query", "stride_grad_document", "n_groups",
    ]
)  # fmt: skip
def _onehot_kernel(
    grad_scores_ptr, queries_ptr, documents_ptr, queries_scale_ptr, documents_scale_ptr, cu_seqlens_ptr,
    candidates_ptr, winners_ptr, grad_documents_ptr,
    n_rows, n_group_queries, query_length, magic, shift, n_documents, document_length, stride_grad_query,
    stride_grad_document, n_groups,
    stride_query, stride_query_token, stride_group, stride_document, stride_document_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_CANDIDATES: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """grad_documents[winner of a row] = sum of grad_score * queries[row] over the rows of the same winner.

    Grid: blocks of rows x documents. Only the first row of a winner, which leads, sums and writes.
    """
    wait_for_previous_kernel()
    n_blocks = tl.cdiv(n_rows, BLOCK_ROWS)
    flat = (tl.program_id(0) // n_blocks).to(tl.int64)
    first_row = tl.program_id(0) % n_blocks * BLOCK_ROWS
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    slots = tl.arange(0, CHUNK)
    winners_ptr += flat * n_rows
    winner = tl.load(winners_ptr + rows, mask=rows < n_rows, other=-1).to(tl.int32)
    leads = winner >= 0
    # Of many rows, those that lead are mostly among the first, and the others soon meet them here.
    start = first_row * 0
    while (start < first_row + BLOCK_ROWS) & (tl.max(leads.to(tl.int32), axis=0) > 0):
        others = start + slots
        chosen = tl.load(winners_ptr + others, mask=others < n_rows, other=-1).to(tl.int32)
        earlier = (winner[:, None] == chosen[None, :]) & (others[None, :] < rows[:, None])
        leads = leads & (tl.max(earlier.to(tl.int32), axis=1) == 0)
        start += CHUNK
    if tl.max(leads.to(tl.int32), axis=0) > 0:
        group, weights_ptr = group_of(
            flat, grad_scores_ptr, candidates_ptr, n_documents, n_group_queries, n_groups, stride_grad_query,
            stride_grad_document, HAS_CANDIDATES,
        )  # fmt: skip
        queries_ptr += group * n_group_queries * stride_query
        dims = tl.arange(0, BLOCK_EMBEDDING)
        dim_exists = dims < EMBEDDING
        total = tl.zeros([BLOCK_ROWS, BLOCK_EMBEDDING], tl.float32)
        for start in tl.range(first_row, n_rows, CHUNK):
            others = start + slots
            chosen = tl.load(winners_ptr + others, mask=others < n_rows, other=-1).to(tl.int32)
            same = leads[:, None] & (winner[:, None] == chosen[None, :])
            # The next row of the same winner, CHUNK if there is none.
            position = tl.min(tl.where(same, slots[None, :], CHUNK), axis=1)
            while tl.min(position, axis=0) < CHUNK:
                found = position < CHUNK
                row = start + position
                query = quotient(row, magic, shift)
                weight = tl.load(weights_ptr + query.to(tl.int64) * stride_grad_query, mask=found, other=0.0)
                if NORMALIZE:
                    weight *= tl.load(queries_scale_ptr + group * n_rows + row, mask=found, other=0.0)
                source = query.to(tl.int64) * stride_query
                source += (row - query * query_length).to(tl.int64) * stride_query_token
                mask = found[:, None] & dim_exists[None, :]
                values = tl.load(queries_ptr + source[:, None] + dims[None, :], mask=mask, other=0.0)
                total += values.to(tl.float32) * weight[:, None]
                later = same & (slots[None, :] > position[:, None])
                position = tl.min(tl.where(later, slots[None, :], CHUNK), axis=1)
        if PACKED:
            at = tl.load(cu_seqlens_ptr + flat).to(tl.int64) + winner
            source = at * stride_document_token
        else:
            at = flat * document_length + winner
            source = (flat // n_documents) * stride_group + (flat % n_documents) * stride_document
            source += winner.to(tl.int64) * stride_document_token
        mask = leads[:, None] & dim_exists[None, :]
        if NORMALIZE:
            embeddings = tl.load(documents_ptr + source[:, None] + dims[None, :], mask=mask, other=0.0)
            scale = tl.load(documents_scale_ptr + at, mask=leads, other=1.0)
            total = through_norm(total, embeddings, scale)
        tl.store(
            grad_documents_ptr + at[:, None] * EMBEDDING + dims[None, :],
            total.to(grad_documents_ptr.dtype.element_ty),
            mask=mask,
        )


@triton.jit(
    do_not_specialize=[
        "n_rows", "n_group_queries", "query_length", "magic", "shift", "n_documents", "document_length",
        "stride_grad_query", "stride_grad_document", "n_groups",
    ]
)  # fmt: skip
def _atomic_kernel(
    grad_scores_ptr, queries_ptr, queries_scale_ptr, cu_seqlens_ptr, candidates_ptr, winners_ptr, sums_ptr,
    n_rows, n_group_queries, query_length, magic, shift, n_documents, document_length, stride_grad_query,
    stride_grad_document, n_groups,
    stride_query, stride_query_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_CANDIDATES: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """sums[winner] += grad_score * queries[row], in float32 and in any order; grid: blocks of rows x documents."""
    wait_for_previous_kernel()
    n_blocks = tl.cdiv(n_rows, BLOCK_ROWS)
    flat = (tl.program_id(0) // n_blocks).to(tl.int64)
    rows = tl.program_id(0) % n_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_EMBEDDING)
    begin = flat * document_length
    if PACKED:
        begin = tl.load(cu_seqlens_ptr + flat).to(tl.int64)
    group, weights_ptr = group_of(
        flat, grad_scores_ptr, candidates_ptr, n_documents, n_group_queries, n_groups, stride_grad_query,
        stride_grad_document, HAS_CANDIDATES,
    )  # fmt: skip
    winner = tl.load(winners_ptr + flat * n_rows + rows, mask=rows < n_rows, other=-1).to(tl.int32)
    won = winner >= 0
    query = quotient(rows, magic, shift)
    weight = tl.load(weights_ptr + query.to(tl.int64) * stride_grad_query, mask=won, other=0.0)
    if NORMALIZE:
        weight *= tl.load(queries_scale_ptr + group * n_rows + rows, mask=won, other=0.0)
    at = (group * n_group_queries + query) * stride_query
    at += (rows - query * query_length).to(tl.int64) * stride_query_token
    mask = won[:, None] & (dims < EMBEDDING)[None, :]
    tile = tl.load(queries_ptr + at[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    to = sums_ptr + (begin + winner)[:, None] * EMBEDDING + dims[None, :]
    tl.atomic_add(to, tile * weight[:, None], mask=mask, sem="relaxed")


_onehot = Launcher(_onehot_kernel, follows=True)
_atomic = Launcher(_atomic_kernel, follows=True)


def add_products(problem: Problem, sequence: Sequence) -> None:
    """Add the gradient of the documents by comparison of winners, to a gradient of zeros, without scratch."""
    block = problem.block_embedding
    num_warps = max(1, min(8, block // 128))
    block_rows = min(_BLOCK_ROWS, num_warps * 2048 // block)
    launch = _onehot.bind(
        (triton.cdiv(problem.rows, block_rows) * problem.documents, 1, 1),
        problem.layout,
        (*problem.query_strides[:2], *problem.document_strides),
        (problem.size, block, block_rows, _CHUNK, problem.packed, problem.has_candidates, problem.normalize),
        num_warps,
        num_stages=1,
    )
    sequence.add(
        launch, Slot.GRAD_SCORES, Slot.QUERIES, Slot.DOCUMENTS, Slot.QUERIES_SCALE, Slot.DOCUMENTS_SCALE,
        Slot.CU_SEQLENS, Slot.CANDIDATES, Slot.WINNERS, Slot.GRAD_DOCUMENTS,
    )  # fmt: skip


def sums_are_the_gradient(problem: Problem) -> bool:
    """Whether the sums that "atomic" adds to are the gradient itself, and need not be finished."""
    return problem.dtype == torch.float32 and not problem.normalize


def add_atomics(problem: Problem, sequence: Sequence) -> None:
    """Add the gradient of the documents by atomic additions to sums of zeros."""
    block = problem.block_embedding
    num_warps = 4 if block <= 512 else 8
    block_rows = max(2, min(32, num_warps * 32 * 32 // block))
    launch = _atomic.bind(
        (triton.cdiv(problem.rows, block_rows) * problem.documents, 1, 1),
        problem.layout,
        problem.query_strides[:2],
        (problem.size, block, block_rows, problem.packed, problem.has_candidates, problem.normalize),
        num_warps,
        num_stages=1,
    )  # fmt: skip
    sequence.add(
        launch, Slot.GRAD_SCORES, Slot.QUERIES, Slot.QUERIES_SCALE, Slot.CU_SEQLENS, Slot.CANDIDATES, Slot.WINNERS,
        Slot.SUMS,
    )  # fmt: skip
    if not sums_are_the_gradient(problem):
        sequence.add(finish_documents(problem), Slot.SUMS, Slot.DOCUMENTS, Slot.DOCUMENTS_SCALE, Slot.GRAD_DOCUMENTS)
