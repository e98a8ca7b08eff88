"""The losses of scores [n, N] of a chunk of queries against a teacher's [Nq, N], and their gradients.

Divergence: q = softmax(scores * scale), p = softmax(teacher * teacher_scale), and the gradient of a query's loss is
(q - p) * scale. With NORMALIZE, where scores are (s - min) / (max - min + epsilon) first, `scale` of a query is divided
by that range, and the lowest and the highest score have another gradient: that of the range.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import Kernel
from ..overlap import wait_for_previous_kernel
from .common import leave_totals, scale_of, softmax_of, store_tile, tile_of

# What PyLate adds to the range of a query's scores before it divides by it.
_EPSILON = tl.constexpr(1e-8)
# A document after all others.
_NONE = tl.constexpr(2**31 - 1)


@triton.jit
def _extremes_of(scores_ptr, n_documents, BLOCK: tl.constexpr):
    """The lowest and the highest of a row."""
    offsets = tl.arange(0, BLOCK)
    smallest = tl.full([BLOCK], float("inf"), tl.float32)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in tl.range(0, n_documents, BLOCK):
        exists = first + offsets < n_documents
        scores = tl.load(scores_ptr + first + offsets, mask=exists, other=0.0)
        smallest = tl.where(exists, tl.minimum(smallest, scores), smallest)
        largest = tl.where(exists, tl.maximum(largest, scores), largest)
    return tl.min(smallest, axis=0), tl.max(largest, axis=0)


@triton.jit(do_not_specialize=["n_documents", "first_query", "n_all", "scale", "teacher_scale"])
def _divergence_kernel(
    scores_ptr, teacher_ptr, temperature_ptr, row_ptr, values_ptr,
    n_documents, first_query, n_all, scale, teacher_scale,
    BLOCK: tl.constexpr,
    NORMALIZE: tl.constexpr,
    N_VALUES: tl.constexpr,
):  # fmt: skip
    """The values of a query (see `common`), and rows [8, n] for its gradient; a program for each query of the chunk.

    Rows: highest score, logarithm of the sum, scale, both of the teacher's scores, and under NORMALIZE the gradient of
    the range, and where the highest and the lowest score stand.
    """
    wait_for_previous_kernel()
    local = tl.program_id(0)
    query = first_query + local
    scores_ptr += local.to(tl.int64) * n_documents
    teacher_ptr += query.to(tl.int64) * n_documents
    n_rows = tl.num_programs(0)
    temperature_scale = scale_of(temperature_ptr, scale)
    scale = temperature_scale
    lowest = 0.0
    if NORMALIZE:
        lowest, highest = _extremes_of(scores_ptr, n_documents, BLOCK)
        scale = scale / (highest - lowest + _EPSILON)
    best, log_sum = softmax_of(scores_ptr, n_documents, scale, BLOCK)
    teacher_best, teacher_log_sum = softmax_of(teacher_ptr, n_documents, teacher_scale, BLOCK)
    terms = tl.zeros([BLOCK], tl.float32)
    expected = tl.zeros([BLOCK], tl.float32)
    first_highest = tl.full([BLOCK], _NONE, tl.int32)
    first_lowest = tl.full([BLOCK], _NONE, tl.int32)
    for first in tl.range(0, n_documents, BLOCK):
        documents = first + tl.arange(0, BLOCK)
        exists = documents < n_documents
        scores = tl.load(scores_ptr + documents, mask=exists, other=0.0)
        teacher = tl.load(teacher_ptr + documents, mask=exists, other=float("-inf"))
        log_target = (teacher - teacher_best) * teacher_scale - teacher_log_sum
        target = tl.exp(log_target)
        log_q = (scores - best) * scale - log_sum
        # What the teacher rules out adds nothing.
        terms += tl.where(target == 0.0, 0.0, target * (log_target - log_q))
        if N_VALUES > 1 or NORMALIZE:
            difference = tl.where(exists, tl.exp(log_q) - target, 0.0)
            expected += tl.where(difference == 0.0, 0.0, difference * (scores - best) * scale)
        if NORMALIZE:
            first_highest = tl.minimum(first_highest, tl.where(exists & (scores == best), documents, _NONE))
            first_lowest = tl.minimum(first_lowest, tl.where(exists & (scores == lowest), documents, _NONE))
    slope = tl.sum(expected, axis=0)
    tl.store(row_ptr + local, best)
    tl.store(row_ptr + n_rows + local, log_sum)
    tl.store(row_ptr + 2 * n_rows + local, scale)
    tl.store(row_ptr + 3 * n_rows + local, teacher_best)
    tl.store(row_ptr + 4 * n_rows + local, teacher_log_sum)
    if NORMALIZE:
        tl.store(row_ptr + 5 * n_rows + local, slope / temperature_scale)
        tl.store(row_ptr + 6 * n_rows + local, tl.min(first_highest, axis=0).to(tl.float32))
        tl.store(row_ptr + 7 * n_rows + local, tl.min(first_lowest, axis=0).to(tl.float32))
    tl.store(values_ptr + query, tl.sum(terms, axis=0))
    if N_VALUES > 1:
        tl.store(values_ptr + n_all + query, -slope * temperature_scale)


@triton.jit(do_not_specialize=["n_queries", "n_documents", "first_query", "n_all", "teacher_scale", "share"])
def _divergence_gradient_kernel(
    scores_ptr, teacher_ptr, row_ptr, counts_ptr, grad_scores_ptr, values_ptr, loss_ptr, slope_ptr,
    n_queries, n_documents, first_query, n_all, teacher_scale, share,
    stride_query, stride_document,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMALIZE: tl.constexpr,
    N_VALUES: tl.constexpr,
):  # fmt: skip
    """grad_scores = (q - p) * scale * share / counts, and the range's; otherwise as that of the cross entropy."""
    wait_for_previous_kernel()
    if loss_ptr is not None and tl.program_id(0) == 0:
        leave_totals(values_ptr, loss_ptr, slope_ptr, None, n_all, share, N_VALUES, BLOCK)
    queries, documents, query_exists, exists = tile_of(n_queries, n_documents, TILE)
    starts = queries.to(tl.int64)[:, None] * n_documents
    scores = tl.load(scores_ptr + starts + documents[None, :], mask=exists, other=0.0)
    of_teacher = teacher_ptr + tl.cast(first_query, tl.int64) * n_documents
    teacher = tl.load(of_teacher + starts + documents[None, :], mask=exists, other=0.0)
    row_ptr += queries
    best = tl.load(row_ptr, mask=query_exists, other=0.0)[:, None]
    log_sum = tl.load(row_ptr + n_queries, mask=query_exists, other=0.0)[:, None]
    scale = tl.load(row_ptr + 2 * n_queries, mask=query_exists, other=0.0)
    teacher_best = tl.load(row_ptr + 3 * n_queries, mask=query_exists, other=0.0)[:, None]
    teacher_log_sum = tl.load(row_ptr + 4 * n_queries, mask=query_exists, other=0.0)[:, None]
    grad = tl.exp((scores - best) * scale[:, None] - log_sum)
    grad -= tl.exp((teacher - teacher_best) * teacher_scale - teacher_log_sum)
    if NORMALIZE:
        of_range = tl.load(row_ptr + 5 * n_queries, mask=query_exists, other=0.0)[:, None]
        highest = tl.load(row_ptr + 6 * n_queries, mask=query_exists, other=0.0)[:, None]
        lowest = tl.load(row_ptr + 7 * n_queries, mask=query_exists, other=0.0)[:, None]
        here = documents.to(tl.float32)[None, :]
        grad += of_range * ((here == lowest).to(tl.float32) - (here == highest).to(tl.float32))
    store_tile(
        grad, scale * share, counts_ptr, grad_scores_ptr, queries, documents, query_exists, exists, stride_query,
        stride_document,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_documents", "first_query"])
def _margin_mse_kernel(
    scores_ptr, teacher_ptr, row_ptr, values_ptr,
    n_documents, first_query,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss of a query, and for its gradient the sum of its errors, [n]; a program for each query of the chunk."""
    wait_for_previous_kernel()
    local = tl.program_id(0)
    query = first_query + local
    scores_ptr += local.to(tl.int64) * n_documents
    teacher_ptr += query.to(tl.int64) * n_documents
    margin = tl.load(scores_ptr) - tl.load(teacher_ptr)
    squares = tl.zeros([BLOCK], tl.float32)
    errors = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, n_documents, BLOCK):
        documents = first + tl.arange(0, BLOCK)
        exists = (documents > 0) & (documents < n_documents)
        scores = tl.load(scores_ptr + documents, mask=exists, other=0.0)
        teacher = tl.load(teacher_ptr + documents, mask=exists, other=0.0)
        error = tl.where(exists, margin - (scores - teacher), 0.0)
        squares += error * error
        errors += error
    tl.store(row_ptr + local, tl.sum(errors, axis=0))
    tl.store(values_ptr + query, tl.sum(squares, axis=0) / (n_documents - 1))


@triton.jit(do_not_specialize=["n_queries", "n_documents", "first_query", "n_all", "share"])
def _margin_mse_gradient_kernel(
    scores_ptr, teacher_ptr, row_ptr, counts_ptr, grad_scores_ptr, values_ptr, loss_ptr,
    n_queries, n_documents, first_query, n_all, share,
    stride_query, stride_document,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of the squared errors: of the positive, document 0, that of all of them."""
    wait_for_previous_kernel()
    if loss_ptr is not None and tl.program_id(0) == 0:
        leave_totals(values_ptr, loss_ptr, None, None, n_all, share, 1, BLOCK)
    queries, documents, query_exists, exists = tile_of(n_queries, n_documents, TILE)
    starts = queries.to(tl.int64) * n_documents
    scores_ptr += starts
    teacher_ptr += tl.cast(first_query, tl.int64) * n_documents + starts
    margin = tl.load(scores_ptr, mask=query_exists, other=0.0) - tl.load(teacher_ptr, mask=query_exists, other=0.0)
    scores = tl.load(scores_ptr[:, None] + documents[None, :], mask=exists, other=0.0)
    teacher = tl.load(teacher_ptr[:, None] + documents[None, :], mask=exists, other=0.0)
    errors = tl.load(row_ptr + queries, mask=query_exists, other=0.0)
    grad = tl.where(documents[None, :] == 0, errors[:, None], (scores - teacher) - margin[:, None])
    factor = tl.full([TILE], 2.0, tl.float32) * (share / (n_documents - 1))
    store_tile(
        grad, factor, counts_ptr, grad_scores_ptr, queries, documents, query_exists, exists, stride_query,
        stride_document,
    )  # fmt: skip


divergence = Kernel(_divergence_kernel, follows=True)
divergence_gradient = Kernel(_divergence_gradient_kernel, follows=True)
margin_mse = Kernel(_margin_mse_kernel, follows=True)
margin_mse_gradient = Kernel(_margin_mse_gradient_kernel, follows=True)
