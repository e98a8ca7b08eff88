"""Cross entropy of scores [n, N] of a chunk of queries, and its gradient.

What is left out of a denominator, by `exclude` or because it scores above its query's limit, has a probability of 0.
The symmetric loss needs, of every document, the softmax over all queries: `columns` [3, N] holds the highest score s of
each, the sum of e = exp((s - highest) * scale), and the sum of e * (s - highest), over the chunks that it has met.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import Kernel
from ..overlap import wait_for_previous_kernel
from .common import label_of, leave_totals, scale_of, store_tile, tile_of


@triton.jit
def _left_out(scores, limit, is_label, exclude_ptr, at, exists):
    """Whether documents are left out: never the label. `at` is where they stand in `exclude`."""
    out = scores > limit
    if exclude_ptr is not None:
        out = out | (tl.load(exclude_ptr + at, mask=exists, other=0) != 0)
    return out & (is_label == 0)


@triton.jit(do_not_specialize=["n_documents", "first_query", "n_all", "scale", "margin"])
def _losses_kernel(
    scores_ptr, labels_ptr, exclude_ptr, temperature_ptr, columns_ptr, row_ptr, values_ptr,
    n_documents, first_query, n_all, scale, margin,
    BLOCK: tl.constexpr,
    OWN_CANDIDATES: tl.constexpr,
    N_VALUES: tl.constexpr,
):  # fmt: skip
    """The values of a query (see `common`), and rows [3, n] for its gradient: highest score, log of the sum, limit.

    A program for each query of the chunk, whose first is query `first_query` of `n_all`. `margin` of -inf: no limit.
    """
    wait_for_previous_kernel()
    local = tl.program_id(0)
    query = first_query + local
    scores_ptr += local.to(tl.int64) * n_documents
    scale = scale_of(temperature_ptr, scale)
    label = label_of(query, query >= 0, labels_ptr, exclude_ptr, n_documents, OWN_CANDIDATES)
    right = tl.load(scores_ptr + label, mask=label >= 0, other=float("nan"))
    limit = right - margin
    row = query.to(tl.int64) * n_documents
    offsets = tl.arange(0, BLOCK)
    others = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in tl.range(0, n_documents, BLOCK):
        documents = first + offsets
        exists = documents < n_documents
        scores = tl.load(scores_ptr + documents, mask=exists, other=float("-inf"))
        is_label = documents == label
        out = _left_out(scores, limit, is_label, exclude_ptr, row + documents, exists)
        others = tl.maximum(others, tl.where(out | is_label, float("-inf"), scores))
    hardest = tl.max(others, axis=0)
    # The score of a label that does not exist is not a number, and no maximum.
    best = tl.maximum(hardest, right)
    sums = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, n_documents, BLOCK):
        documents = first + offsets
        exists = documents < n_documents
        scores = tl.load(scores_ptr + documents, mask=exists, other=float("-inf"))
        out = _left_out(scores, limit, documents == label, exclude_ptr, row + documents, exists)
        # Not a number where one of the scores is not, though the highest may be one.
        term = tl.where(out, 0.0, tl.exp((scores - best) * scale))
        sums += term
        if N_VALUES > 1:
            weighted += tl.where(term == 0.0, 0.0, term * (scores - best))
    total = tl.sum(sums, axis=0)
    loss = tl.log(total) - (right - best) * scale
    slope = tl.sum(weighted, axis=0) / total + best - right
    if columns_ptr is not None:
        column_ptr = columns_ptr + label
        highest = tl.load(column_ptr, mask=label >= 0, other=0.0)
        column_total = tl.load(column_ptr + n_documents, mask=label >= 0, other=1.0)
        column_weighted = tl.load(column_ptr + 2 * n_documents, mask=label >= 0, other=0.0)
        loss = 0.5 * (loss + tl.log(column_total) - (right - highest) * scale)
        slope = 0.5 * (slope + column_weighted / column_total + highest - right)
    n_rows = tl.num_programs(0)
    tl.store(row_ptr + local, best)
    tl.store(row_ptr + n_rows + local, tl.log(total))
    tl.store(row_ptr + 2 * n_rows + local, limit)
    values_ptr += query
    tl.store(values_ptr, loss)
    if N_VALUES > 1:
        tl.store(values_ptr + n_all, -slope * scale * scale)
    if N_VALUES > 2:
        some = hardest != float("-inf")
        tl.store(values_ptr + 2 * n_all, (right > hardest).to(tl.float32))
        tl.store(values_ptr + 3 * n_all, right)
        tl.store(values_ptr + 4 * n_all, tl.where(some, hardest, 0.0))
        tl.store(values_ptr + 5 * n_all, some.to(tl.float32))


@triton.jit(do_not_specialize=["n_queries", "n_documents", "first_query", "scale", "margin"])
def _columns_kernel(
    scores_ptr, labels_ptr, exclude_ptr, temperature_ptr, columns_ptr,
    n_queries, n_documents, first_query, scale, margin,
    TILE: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """Add a chunk's scores to the `columns`, which the FIRST chunk begins; a program for each TILE documents."""
    wait_for_previous_kernel()
    scale = scale_of(temperature_ptr, scale)
    documents = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = documents < n_documents
    if FIRST:
        best = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        weighted = tl.zeros([TILE], tl.float32)
    else:
        best = tl.load(columns_ptr + documents, mask=there, other=0.0)
        total = tl.load(columns_ptr + n_documents + documents, mask=there, other=0.0)
        weighted = tl.load(columns_ptr + 2 * n_documents + documents, mask=there, other=0.0)
    for first in tl.range(0, n_queries, TILE):
        rows = first + tl.arange(0, TILE)
        row_exists = rows < n_queries
        starts = rows.to(tl.int64) * n_documents
        label = label_of(first_query + rows, row_exists, labels_ptr, exclude_ptr, n_documents, False)
        right = tl.load(scores_ptr + starts + label, mask=label >= 0, other=float("nan"))
        exists = row_exists[:, None] & there[None, :]
        scores = tl.load(scores_ptr + starts[:, None] + documents[None, :], mask=exists, other=float("-inf"))
        at = (first_query + rows).to(tl.int64)[:, None] * n_documents + documents[None, :]
        is_label = documents[None, :] == label[:, None]
        out = _left_out(scores, (right - margin)[:, None], is_label, exclude_ptr, at, exists)
        out = out | (scores == float("-inf"))
        before = best
        best = tl.maximum(best, tl.max(tl.where(out, float("-inf"), scores), axis=0))
        # Nothing has been met before, or nothing yet.
        shrunk = tl.where(before == float("-inf"), 0.0, tl.exp((before - best) * scale))
        moved = tl.where(before == float("-inf"), 0.0, before - best)
        terms = tl.where(out, 0.0, tl.exp((scores - best[None, :]) * scale))
        weighted = shrunk * (weighted + moved * total)
        weighted += tl.sum(tl.where(terms == 0.0, 0.0, terms * (scores - best[None, :])), axis=0)
        total = shrunk * total + tl.sum(terms, axis=0)
    tl.store(columns_ptr + documents, best, mask=there)
    tl.store(columns_ptr + n_documents + documents, total, mask=there)
    tl.store(columns_ptr + 2 * n_documents + documents, weighted, mask=there)


@triton.jit(do_not_specialize=["n_queries", "n_documents", "first_query", "n_all", "scale", "share"])
def _gradient_kernel(
    scores_ptr, labels_ptr, exclude_ptr, temperature_ptr, columns_ptr, labelled_ptr, row_ptr, counts_ptr,
    grad_scores_ptr, values_ptr, loss_ptr, slope_ptr, statistics_ptr,
    n_queries, n_documents, first_query, n_all, scale, share,
    stride_query, stride_document,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    OWN_CANDIDATES: tl.constexpr,
    N_VALUES: tl.constexpr,
):  # fmt: skip
    """grad_scores = (softmax(scores * scale) - target) * scale * share / counts; a program for each tile.

    `counts` [n] may be None. `labelled` [N]: of how many queries each document is the label, for the columns. With
    `loss`, which the last chunk has, the first program also leaves the totals, and spares their launch.
    """
    wait_for_previous_kernel()
    if loss_ptr is not None and tl.program_id(0) == 0:
        leave_totals(values_ptr, loss_ptr, slope_ptr, statistics_ptr, n_all, share, N_VALUES, BLOCK)
    queries, documents, query_exists, exists = tile_of(n_queries, n_documents, TILE)
    scale = scale_of(temperature_ptr, scale)
    at = queries.to(tl.int64)[:, None] * n_documents + documents[None, :]
    scores = tl.load(scores_ptr + at, mask=exists, other=0.0)
    best = tl.load(row_ptr + queries, mask=query_exists, other=0.0)
    log_sum = tl.load(row_ptr + n_queries + queries, mask=query_exists, other=0.0)
    limit = tl.load(row_ptr + 2 * n_queries + queries, mask=query_exists, other=0.0)
    label = label_of(first_query + queries, query_exists, labels_ptr, exclude_ptr, n_documents, OWN_CANDIDATES)
    is_label = documents[None, :] == label[:, None]
    in_all = at + tl.cast(first_query, tl.int64) * n_documents
    out = _left_out(scores, limit[:, None], is_label, exclude_ptr, in_all, exists)
    grad = tl.where(out, 0.0, tl.exp((scores - best[:, None]) * scale - log_sum[:, None])) - is_label.to(tl.float32)
    if columns_ptr is not None:
        there = documents < n_documents
        highest = tl.load(columns_ptr + documents, mask=there, other=0.0)
        column_sum = tl.log(tl.load(columns_ptr + n_documents + documents, mask=there, other=1.0))
        labelled = tl.load(labelled_ptr + documents, mask=there, other=0.0)
        column = tl.exp((scores - highest[None, :]) * scale - column_sum[None, :]) * labelled[None, :]
        # What is no query's label has no column, nor need it have a sum.
        column = tl.where(out | (labelled == 0.0)[None, :], 0.0, column)
        grad = 0.5 * (grad + column - is_label.to(tl.float32))
    grad = tl.where((label >= 0)[:, None], grad, float("nan"))
    factor = tl.full([TILE], 1.0, tl.float32) * (scale * share)
    store_tile(
        grad, factor, counts_ptr, grad_scores_ptr, queries, documents, query_exists, exists, stride_query,
        stride_document,
    )  # fmt: skip


losses = Kernel(_losses_kernel, follows=True)
columns = Kernel(_columns_kernel, follows=True)
gradient = Kernel(_gradient_kernel, follows=True)
