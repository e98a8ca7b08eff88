"""Losses of scores [n, N] of a chunk of queries, and their gradients: cross entropy of labels, divergence of a teacher.

The target of a query is its label, or p = softmax(teacher * teacher_scale); the gradient of its loss is (q - target) *
scale, with q = softmax(scores * scale). What is left out of a cross entropy's denominator, by `exclude` or because it
scores above its query's limit, has a probability of 0. The symmetric one needs, of every document, the softmax over all
queries: `columns` [3, N] holds the highest score s of each, the sum of e = exp((s - highest) * scale), and the sum of
e * (s - highest), over the chunks that it has met. Under NORMALIZE, a divergence takes scores as
(s - min) / (max - min + epsilon): `scale` of a query is divided by that range, and the lowest and the highest score
have another gradient, that of the range.

Every query leaves `N_VALUES` values, in rows [N_VALUES, Nq] of one tensor: its loss; for a learned temperature the
derivative of the loss by it; and for statistics whether its right document scores highest, that document's score, the
highest of the others, and whether there is another. Whatever chunks the queries came in, the values are summed at the
end, in one order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import kernel, wait_for_previous_kernel

# Documents, or queries, that a program of the loss has in flight, and sides of a tile of the gradient. Not tuned: at
# 1024 x 1024 (32 x 180 tokens), waiting for the GPU alone, a step takes 5.40 ms with this loss, 5.42 with torch's.
BLOCK = 1024
TILE = 32
# Scores, padded to powers of two, of which one program computes all: of 32 x 32 in one launch in place of two.
WHOLE = 2048
# What PyLate adds to the range of a query's scores before it divides by it.
_EPSILON = tl.constexpr(1e-8)
# A document after all others.
_NONE = tl.constexpr(2**31 - 1)


@triton.jit
def _scale_of(temperature_ptr, scale):
    """One over the temperature: of the tensor if there is one, else `scale`."""
    if temperature_ptr is not None:
        scale = 1.0 / tl.load(temperature_ptr).to(tl.float32)
    return scale


@triton.jit
def _label_of(queries, exists, labels_ptr, exclude_ptr, n_documents, OWN_CANDIDATES: tl.constexpr):
    """The right documents of queries of the whole call; -1 where one is out of range, or excluded."""
    if labels_ptr is None:
        label = (queries * 0 if OWN_CANDIDATES else queries).to(tl.int64)
    else:
        label = tl.load(labels_ptr + queries, mask=exists, other=-1).to(tl.int64)
    valid = exists & (label >= 0) & (label < n_documents)
    if exclude_ptr is not None:
        valid = valid & (tl.load(exclude_ptr + queries.to(tl.int64) * n_documents + label, mask=valid, other=0) == 0)
    return tl.where(valid, label, -1)


@triton.jit
def _softmax_of(values_ptr, n_documents, scale, BLOCK: tl.constexpr):
    """The largest of a row, and the logarithm of sum exp((value - largest) * scale)."""
    offsets = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in tl.range(0, n_documents, BLOCK):
        values = tl.load(values_ptr + first + offsets, mask=first + offsets < n_documents, other=float("-inf"))
        largest = tl.maximum(largest, values)
    best = tl.max(largest, axis=0)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, n_documents, BLOCK):
        values = tl.load(values_ptr + first + offsets, mask=first + offsets < n_documents, other=float("-inf"))
        # Not a number where one of the values is not, though the largest may be one.
        sums += tl.exp((values - best) * scale)
    return best, tl.log(tl.sum(sums, axis=0))


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


@triton.jit
def _left_out(scores, limit, is_label, exclude_ptr, at, exists):
    """Whether documents are left out: never the label. `at` is where they stand in `exclude`."""
    out = scores > limit
    if exclude_ptr is not None:
        out = out | (tl.load(exclude_ptr + at, mask=exists, other=0) != 0)
    return out & (is_label == 0)


@triton.jit
def _leave_losses(tensors, n_queries, n_documents, first_query, n_all, scale, margin, config: tl.constexpr):
    """The values of queries (see above), and rows [3, n] for their gradient: highest score, log of the sum, limit.

    Of a chunk of `n_queries`, whose first is query `first_query` of `n_all`. `margin` of -inf: no limit.
    """
    ROWS: tl.constexpr = config.rows
    BLOCK: tl.constexpr = config.block
    scores_ptr, labels_ptr, exclude_ptr, temperature_ptr, columns_ptr, row_ptr, values_ptr = tensors
    local = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = local < n_queries
    query = first_query + local
    starts = scores_ptr + local.to(tl.int64) * n_documents
    scale = _scale_of(temperature_ptr, scale)
    label = _label_of(query, there, labels_ptr, exclude_ptr, n_documents, config.own_candidates)
    right = tl.load(starts + label, mask=label >= 0, other=float("nan"))
    limit = right - margin
    row = query.to(tl.int64)[:, None] * n_documents
    offsets = tl.arange(0, BLOCK)[None, :]
    others = tl.full([ROWS, BLOCK], float("-inf"), tl.float32)
    for first in tl.range(0, n_documents, BLOCK):
        documents = first + offsets
        exists = there[:, None] & (documents < n_documents)
        scores = tl.load(starts[:, None] + documents, mask=exists, other=float("-inf"))
        is_label = documents == label[:, None]
        out = _left_out(scores, limit[:, None], is_label, exclude_ptr, row + documents, exists)
        others = tl.maximum(others, tl.where(out | is_label, float("-inf"), scores))
    hardest = tl.max(others, axis=1)
    # The score of a label that does not exist is not a number, and no maximum.
    best = tl.maximum(hardest, right)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    weighted = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(0, n_documents, BLOCK):
        documents = first + offsets
        exists = there[:, None] & (documents < n_documents)
        scores = tl.load(starts[:, None] + documents, mask=exists, other=float("-inf"))
        out = _left_out(scores, limit[:, None], documents == label[:, None], exclude_ptr, row + documents, exists)
        # Not a number where one of the scores is not, though the highest may be one.
        term = tl.where(out, 0.0, tl.exp((scores - best[:, None]) * scale))
        sums += term
        if config.n_values > 1:
            weighted += tl.where(term == 0.0, 0.0, term * (scores - best[:, None]))
    total = tl.sum(sums, axis=1)
    loss = tl.log(total) - (right - best) * scale
    slope = tl.sum(weighted, axis=1) / total + best - right
    if columns_ptr is not None:
        column_ptr = columns_ptr + label
        highest = tl.load(column_ptr, mask=label >= 0, other=0.0)
        column_total = tl.load(column_ptr + n_documents, mask=label >= 0, other=1.0)
        column_weighted = tl.load(column_ptr + 2 * n_documents, mask=label >= 0, other=0.0)
        loss = 0.5 * (loss + tl.log(column_total) - (right - highest) * scale)
        slope = 0.5 * (slope + column_weighted / column_total + highest - right)
    tl.store(row_ptr + local, best, mask=there)
    tl.store(row_ptr + n_queries + local, tl.log(total), mask=there)
    tl.store(row_ptr + 2 * n_queries + local, limit, mask=there)
    values_ptr += query
    tl.store(values_ptr, loss, mask=there)
    if config.n_values > 1:
        tl.store(values_ptr + n_all, -slope * scale * scale, mask=there)
    if config.n_values > 2:
        some = hardest != float("-inf")
        tl.store(values_ptr + 2 * n_all, (right > hardest).to(tl.float32), mask=there)
        tl.store(values_ptr + 3 * n_all, right, mask=there)
        tl.store(values_ptr + 4 * n_all, tl.where(some, hardest, 0.0), mask=there)
        tl.store(values_ptr + 5 * n_all, some.to(tl.float32), mask=there)


@kernel(follows=True, config="rows block own_candidates n_values")
def losses_kernel(
    scores_ptr, labels_ptr, exclude_ptr, temperature_ptr, columns_ptr, row_ptr, values_ptr,
    n_queries, n_documents, first_query, n_all, scale, margin, config: tl.constexpr,
):  # fmt: skip
    """What `_leave_losses` says; a program for each query of the chunk."""
    wait_for_previous_kernel()
    tensors = scores_ptr, labels_ptr, exclude_ptr, temperature_ptr, columns_ptr, row_ptr, values_ptr
    _leave_losses(tensors, n_queries, n_documents, first_query, n_all, scale, margin, config)


@kernel(follows=True, config="block normalize n_values")
def divergence_kernel(
    scores_ptr, teacher_ptr, temperature_ptr, row_ptr, values_ptr,
    n_documents, first_query, n_all, scale, teacher_scale, config: tl.constexpr,
):  # fmt: skip
    """The values of a query (see above), and rows [8, n] for its gradient; a program for each query of the chunk.

    Rows: highest score, logarithm of the sum, scale, both of the teacher's scores, and under `normalize` the gradient
    of the range, and where the highest and the lowest score stand.
    """
    wait_for_previous_kernel()
    local = tl.program_id(0)
    query = first_query + local
    scores_ptr += local.to(tl.int64) * n_documents
    teacher_ptr += query.to(tl.int64) * n_documents
    n_rows = tl.num_programs(0)
    temperature_scale = _scale_of(temperature_ptr, scale)
    scale = temperature_scale
    lowest = 0.0
    if config.normalize:
        lowest, highest = _extremes_of(scores_ptr, n_documents, config.block)
        scale = scale / (highest - lowest + _EPSILON)
    best, log_sum = _softmax_of(scores_ptr, n_documents, scale, config.block)
    teacher_best, teacher_log_sum = _softmax_of(teacher_ptr, n_documents, teacher_scale, config.block)
    terms = tl.zeros([config.block], tl.float32)
    expected = tl.zeros([config.block], tl.float32)
    first_highest = tl.full([config.block], _NONE, tl.int32)
    first_lowest = tl.full([config.block], _NONE, tl.int32)
    for first in tl.range(0, n_documents, config.block):
        documents = first + tl.arange(0, config.block)
        exists = documents < n_documents
        scores = tl.load(scores_ptr + documents, mask=exists, other=0.0)
        teacher = tl.load(teacher_ptr + documents, mask=exists, other=float("-inf"))
        log_target = (teacher - teacher_best) * teacher_scale - teacher_log_sum
        target = tl.exp(log_target)
        log_q = (scores - best) * scale - log_sum
        # What the teacher rules out adds nothing.
        terms += tl.where(target == 0.0, 0.0, target * (log_target - log_q))
        if config.n_values > 1 or config.normalize:
            difference = tl.where(exists, tl.exp(log_q) - target, 0.0)
            expected += tl.where(difference == 0.0, 0.0, difference * (scores - best) * scale)
        if config.normalize:
            first_highest = tl.minimum(first_highest, tl.where(exists & (scores == best), documents, _NONE))
            first_lowest = tl.minimum(first_lowest, tl.where(exists & (scores == lowest), documents, _NONE))
    slope = tl.sum(expected, axis=0)
    tl.store(row_ptr + local, best)
    tl.store(row_ptr + n_rows + local, log_sum)
    tl.store(row_ptr + 2 * n_rows + local, scale)
    tl.store(row_ptr + 3 * n_rows + local, teacher_best)
    tl.store(row_ptr + 4 * n_rows + local, teacher_log_sum)
    if config.normalize:
        tl.store(row_ptr + 5 * n_rows + local, slope / temperature_scale)
        tl.store(row_ptr + 6 * n_rows + local, tl.min(first_highest, axis=0).to(tl.float32))
        tl.store(row_ptr + 7 * n_rows + local, tl.min(first_lowest, axis=0).to(tl.float32))
    tl.store(values_ptr + query, tl.sum(terms, axis=0))
    if config.n_values > 1:
        tl.store(values_ptr + n_all + query, -slope * temperature_scale)


@kernel(follows=True, config="tile first")
def columns_kernel(
    scores_ptr, labels_ptr, exclude_ptr, temperature_ptr, columns_ptr,
    n_queries, n_documents, first_query, scale, margin, config: tl.constexpr,
):  # fmt: skip
    """Add a chunk's scores to the `columns`, which the `first` chunk begins; a program for so many documents."""
    wait_for_previous_kernel()
    scale = _scale_of(temperature_ptr, scale)
    documents = tl.program_id(0) * config.tile + tl.arange(0, config.tile)
    there = documents < n_documents
    if config.first:
        best = tl.full([config.tile], float("-inf"), tl.float32)
        total = tl.zeros([config.tile], tl.float32)
        weighted = tl.zeros([config.tile], tl.float32)
    else:
        best = tl.load(columns_ptr + documents, mask=there, other=0.0)
        total = tl.load(columns_ptr + n_documents + documents, mask=there, other=0.0)
        weighted = tl.load(columns_ptr + 2 * n_documents + documents, mask=there, other=0.0)
    for first in tl.range(0, n_queries, config.tile):
        rows = first + tl.arange(0, config.tile)
        row_exists = rows < n_queries
        starts = rows.to(tl.int64) * n_documents
        label = _label_of(first_query + rows, row_exists, labels_ptr, exclude_ptr, n_documents, False)
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


@triton.jit
def _sum_of(values_ptr, n_queries, BLOCK: tl.constexpr):
    """The sum of values [n_queries], always in the same order."""
    offsets = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, n_queries, BLOCK):
        sums += tl.load(values_ptr + first + offsets, mask=first + offsets < n_queries, other=0.0)
    return tl.sum(sums, axis=0)


@triton.jit
def _leave_totals(
    values_ptr, loss_ptr, slope_ptr, statistics_ptr, n_queries, share, N_VALUES: tl.constexpr, BLOCK: tl.constexpr
):
    """The loss, its derivative by the temperature, and statistics, from the values of all queries."""
    tl.store(loss_ptr, _sum_of(values_ptr, n_queries, BLOCK) * share)
    if slope_ptr is not None:
        tl.store(slope_ptr, _sum_of(values_ptr + n_queries, n_queries, BLOCK) * share)
    if N_VALUES > 2:
        hits = _sum_of(values_ptr + 2 * n_queries, n_queries, BLOCK)
        positives = _sum_of(values_ptr + 3 * n_queries, n_queries, BLOCK)
        hardest = _sum_of(values_ptr + 4 * n_queries, n_queries, BLOCK)
        some = _sum_of(values_ptr + 5 * n_queries, n_queries, BLOCK)
        tl.store(statistics_ptr, hits / n_queries)
        tl.store(statistics_ptr + 1, positives / n_queries)
        tl.store(statistics_ptr + 2, hardest / some)


@kernel(follows=True, config="n_values block")
def total_kernel(values_ptr, loss_ptr, slope_ptr, statistics_ptr, n_queries, share, config: tl.constexpr):
    """What `_leave_totals` says; one program."""
    wait_for_previous_kernel()
    _leave_totals(values_ptr, loss_ptr, slope_ptr, statistics_ptr, n_queries, share, config.n_values, config.block)


@triton.jit
def _leave_gradient(tile, tensors, n_queries, n_documents, first_query, scale, share, strides, config: tl.constexpr):
    """grad_scores = (softmax(scores * scale) - target) * scale * share / counts, of a tile of them.

    `target` are labels or, with a teacher, its scores, of which `scale` is then. `counts` [n] may be None. `labelled`
    [N]: of how many queries each document is the label, for the columns.
    """
    (
        scores_ptr, target_ptr, exclude_ptr, temperature_ptr, columns_ptr, labelled_ptr, row_ptr, counts_ptr,
        grad_scores_ptr,
    ) = tensors  # fmt: skip
    n_blocks = tl.cdiv(n_documents, config.tile)
    queries = tile // n_blocks * config.tile + tl.arange(0, config.tile)
    documents = tile % n_blocks * config.tile + tl.arange(0, config.tile)
    query_exists = queries < n_queries
    exists = query_exists[:, None] & (documents < n_documents)[None, :]
    scale = _scale_of(temperature_ptr, scale)
    at = queries.to(tl.int64)[:, None] * n_documents + documents[None, :]
    scores = tl.load(scores_ptr + at, mask=exists, other=0.0)
    if config.has_teacher:
        teacher = tl.load(target_ptr + tl.cast(first_query, tl.int64) * n_documents + at, mask=exists, other=0.0)
        row_ptr += queries
        best = tl.load(row_ptr, mask=query_exists, other=0.0)[:, None]
        log_sum = tl.load(row_ptr + n_queries, mask=query_exists, other=0.0)[:, None]
        scale_of_query = tl.load(row_ptr + 2 * n_queries, mask=query_exists, other=0.0)
        teacher_best = tl.load(row_ptr + 3 * n_queries, mask=query_exists, other=0.0)[:, None]
        teacher_log_sum = tl.load(row_ptr + 4 * n_queries, mask=query_exists, other=0.0)[:, None]
        grad = tl.exp((scores - best) * scale_of_query[:, None] - log_sum)
        grad -= tl.exp((teacher - teacher_best) * scale - teacher_log_sum)
        if config.normalize:
            of_range = tl.load(row_ptr + 5 * n_queries, mask=query_exists, other=0.0)[:, None]
            highest = tl.load(row_ptr + 6 * n_queries, mask=query_exists, other=0.0)[:, None]
            lowest = tl.load(row_ptr + 7 * n_queries, mask=query_exists, other=0.0)[:, None]
            here = documents.to(tl.float32)[None, :]
            grad += of_range * ((here == lowest).to(tl.float32) - (here == highest).to(tl.float32))
        factor = scale_of_query * share
    else:
        best = tl.load(row_ptr + queries, mask=query_exists, other=0.0)
        log_sum = tl.load(row_ptr + n_queries + queries, mask=query_exists, other=0.0)
        limit = tl.load(row_ptr + 2 * n_queries + queries, mask=query_exists, other=0.0)
        label = _label_of(
            first_query + queries, query_exists, target_ptr, exclude_ptr, n_documents, config.own_candidates
        )
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
        factor = tl.full([config.tile], 1.0, tl.float32) * (scale * share)
    if counts_ptr is not None:
        factor = factor / tl.load(counts_ptr + queries, mask=query_exists, other=1.0)
    to = queries.to(tl.int64)[:, None] * strides[0] + documents.to(tl.int64)[None, :] * strides[1]
    tl.store(grad_scores_ptr + to, grad * factor[:, None], mask=exists)


@kernel(follows=True, config="tile block own_candidates has_teacher normalize n_values")
def gradient_kernel(
    scores_ptr, target_ptr, exclude_ptr, temperature_ptr, columns_ptr, labelled_ptr, row_ptr, counts_ptr,
    grad_scores_ptr, values_ptr, loss_ptr, slope_ptr, statistics_ptr,
    n_queries, n_documents, first_query, n_all, scale, share,
    stride_query, stride_document, config: tl.constexpr,
):  # fmt: skip
    """What `_leave_gradient` says; a program for each tile.

    With `loss`, which the last chunk has, the first program also leaves the totals, and spares their launch.
    """
    wait_for_previous_kernel()
    if loss_ptr is not None and tl.program_id(0) == 0:
        _leave_totals(values_ptr, loss_ptr, slope_ptr, statistics_ptr, n_all, share, config.n_values, config.block)
    tensors = (
        scores_ptr, target_ptr, exclude_ptr, temperature_ptr, columns_ptr, labelled_ptr, row_ptr, counts_ptr,
        grad_scores_ptr,
    )  # fmt: skip
    strides = stride_query, stride_document
    _leave_gradient(tl.program_id(0), tensors, n_queries, n_documents, first_query, scale, share, strides, config)


@kernel(follows=True, config="rows block tile own_candidates has_teacher normalize n_values")
def whole_kernel(
    scores_ptr, labels_ptr, exclude_ptr, temperature_ptr, columns_ptr, labelled_ptr, row_ptr, counts_ptr,
    grad_scores_ptr, values_ptr, loss_ptr, slope_ptr, statistics_ptr,
    n_queries, n_documents, scale, margin, share,
    stride_query, stride_document, config: tl.constexpr,
):  # fmt: skip
    """All of a cross entropy, and its gradient, if asked for; one program, of so few scores that it holds them all."""
    wait_for_previous_kernel()
    tensors = scores_ptr, labels_ptr, exclude_ptr, temperature_ptr, columns_ptr, row_ptr, values_ptr
    _leave_losses(tensors, n_queries, n_documents, 0, n_queries, scale, margin, config)
    # What threads have left, others read.
    tl.debug_barrier()
    _leave_totals(values_ptr, loss_ptr, slope_ptr, statistics_ptr, n_queries, share, config.n_values, config.rows)
    if grad_scores_ptr is not None:
        read = (
            scores_ptr, labels_ptr, exclude_ptr, temperature_ptr, columns_ptr, labelled_ptr, row_ptr, counts_ptr,
            grad_scores_ptr,
        )  # fmt: skip
        strides = stride_query, stride_document
        for tile in tl.range(0, tl.cdiv(n_queries, config.tile) * tl.cdiv(n_documents, config.tile)):
            _leave_gradient(tile, read, n_queries, n_documents, 0, scale, share, strides, config)
