"""Losses of scores [n, N] of a chunk of queries, and their gradients: cross entropy, and divergence from a teacher.

The target of a query is its label, or p = softmax(teacher * teacher_scale); the gradient of its loss is (q - target) *
scale, with q = softmax(scores * scale). Documents left out of a cross entropy's denominator, by `exclude` or because
they score above their query's limit, have a probability of 0. The symmetric loss needs, for every document, the softmax
over all queries: `columns` [3, N] holds each one's highest score s, the sum of e = exp((s - highest) * scale), and the
sum of e * (s - highest), over the chunks so far. With NORMALIZE, a divergence takes scores as
(s - min) / (max - min + epsilon): `scale` of a query is divided by that range, and the lowest and the highest score
also get the gradient of the range.

Every query writes `N_VALUES` values, in rows [N_VALUES, Nq] of one tensor: its loss; for a learned temperature the
derivative of the loss with respect to it; and for statistics whether its label scores highest, the label's score, the
highest other score, and whether there is another. However the queries were chunked, the values are summed at the end,
in one order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import kernel, wait_for_previous_kernel

# Documents, or queries, that a program of the loss has in flight, and sides of a tile of the gradient. Not tuned: at
# 1024 x 1024 (32 x 180 tokens), waiting for the GPU alone, a step takes 5.40 ms with this loss, 5.42 with torch's.
BLOCK = 1024
TILE = 32
# Maximum scores, padded to powers of two, that one program computes alone: 32 x 32 in one launch in place of two.
WHOLE = 2048
# PyLate's epsilon, added to the range of a query's scores before dividing by it.
_EPSILON = tl.constexpr(1e-8)
# An index after all documents.
_NONE = tl.constexpr(2**31 - 1)


@triton.jit
def _scale_of(temperature_ptr, scale):
    """One over the temperature: that of the tensor if there is one, else `scale`."""
    if temperature_ptr is not None:
        scale = 1.0 / tl.load(temperature_ptr).to(tl.float32)
    return scale


@triton.jit
def _label_of(queries, exists, labels_ptr, exclude_ptr, n_documents, OWN_CANDIDATES: tl.constexpr):
    """The labels of queries, numbered in the whole call; -1 if out of range or excluded."""
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
    """The largest value of a row, and the logarithm of sum exp((value - largest) * scale)."""
    offsets = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in tl.range(0, n_documents, BLOCK):
        values = tl.load(values_ptr + first + offsets, mask=first + offsets < n_documents, other=float("-inf"))
        largest = tl.maximum(largest, values)
    best = tl.max(largest, axis=0)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, n_documents, BLOCK):
        values = tl.load(values_ptr + first + offsets, mask=first + offsets < n_documents, other=float("-inf"))
        # NaN if any value is NaN, even if `best` is not.
        sums += tl.exp((values - best) * scale)
    return best, tl.log(tl.sum(sums, axis=0))


@triton.jit
def _extremes_of(scores_ptr, n_documents, BLOCK: tl.constexpr):
    """The lowest and the highest score of a row."""
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
def _left_out(scores, limit, is_label, exclude_ptr, offsets, exists):
    """Mask of the documents left out, never the label. `offsets` are their positions in `exclude`."""
    is_excluded = scores > limit
    if exclude_ptr is not None:
        is_excluded = is_excluded | (tl.load(exclude_ptr + offsets, mask=exists, other=0) != 0)
    return is_excluded & (is_label == 0)


@triton.jit
def _leave_losses(tensors, n_queries, n_documents, first_query, n_all, scale, margin, config: tl.constexpr):
    """Write the values of queries (see above), and rows [3, n] for the gradient: highest score, log of the sum, limit.

    For a chunk of `n_queries`, whose first is query `first_query` of `n_all`. `margin` of -inf: no limit.
    """
    ROWS: tl.constexpr = config.rows
    BLOCK: tl.constexpr = config.block
    scores_ptr, labels_ptr, exclude_ptr, temperature_ptr, columns_ptr, row_ptr, values_ptr = tensors
    local = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    query_exists = local < n_queries
    query = first_query + local
    starts = scores_ptr + local.to(tl.int64) * n_documents
    scale = _scale_of(temperature_ptr, scale)
    label = _label_of(query, query_exists, labels_ptr, exclude_ptr, n_documents, config.own_candidates)
    label_score = tl.load(starts + label, mask=label >= 0, other=float("nan"))
    limit = label_score - margin
    row = query.to(tl.int64)[:, None] * n_documents
    offsets = tl.arange(0, BLOCK)[None, :]
    other_scores = tl.full([ROWS, BLOCK], float("-inf"), tl.float32)
    for first in tl.range(0, n_documents, BLOCK):
        documents = first + offsets
        exists = query_exists[:, None] & (documents < n_documents)
        scores = tl.load(starts[:, None] + documents, mask=exists, other=float("-inf"))
        is_label = documents == label[:, None]
        is_excluded = _left_out(scores, limit[:, None], is_label, exclude_ptr, row + documents, exists)
        other_scores = tl.maximum(other_scores, tl.where(is_excluded | is_label, float("-inf"), scores))
    hardest = tl.max(other_scores, axis=1)
    # The score of a missing label is NaN, which the maximum ignores.
    best = tl.maximum(hardest, label_score)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    weighted = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(0, n_documents, BLOCK):
        documents = first + offsets
        exists = query_exists[:, None] & (documents < n_documents)
        scores = tl.load(starts[:, None] + documents, mask=exists, other=float("-inf"))
        is_excluded = _left_out(
            scores, limit[:, None], documents == label[:, None], exclude_ptr, row + documents, exists
        )
        # NaN if any score is NaN, even if `best` is not.
        term = tl.where(is_excluded, 0.0, tl.exp((scores - best[:, None]) * scale))
        sums += term
        if config.n_values > 1:
            weighted += tl.where(term == 0.0, 0.0, term * (scores - best[:, None]))
    total = tl.sum(sums, axis=1)
    loss = tl.log(total) - (label_score - best) * scale
    slope = tl.sum(weighted, axis=1) / total + best - label_score
    if columns_ptr is not None:
        column_ptr = columns_ptr + label
        highest = tl.load(column_ptr, mask=label >= 0, other=0.0)
        column_total = tl.load(column_ptr + n_documents, mask=label >= 0, other=1.0)
        column_weighted = tl.load(column_ptr + 2 * n_documents, mask=label >= 0, other=0.0)
        loss = 0.5 * (loss + tl.log(column_total) - (label_score - highest) * scale)
        slope = 0.5 * (slope + column_weighted / column_total + highest - label_score)
    tl.store(row_ptr + local, best, mask=query_exists)
    tl.store(row_ptr + n_queries + local, tl.log(total), mask=query_exists)
    tl.store(row_ptr + 2 * n_queries + local, limit, mask=query_exists)
    values_ptr += query
    tl.store(values_ptr, loss, mask=query_exists)
    if config.n_values > 1:
        tl.store(values_ptr + n_all, -slope * scale * scale, mask=query_exists)
    if config.n_values > 2:
        has_other = hardest != float("-inf")
        tl.store(values_ptr + 2 * n_all, (label_score > hardest).to(tl.float32), mask=query_exists)
        tl.store(values_ptr + 3 * n_all, label_score, mask=query_exists)
        tl.store(values_ptr + 4 * n_all, tl.where(has_other, hardest, 0.0), mask=query_exists)
        tl.store(values_ptr + 5 * n_all, has_other.to(tl.float32), mask=query_exists)


@kernel(follows=True, config="rows block own_candidates n_values")
def losses_kernel(
    scores_ptr, labels_ptr, exclude_ptr, temperature_ptr, columns_ptr, row_ptr, values_ptr,
    n_queries, n_documents, first_query, n_all, scale, margin, config: tl.constexpr,
):  # fmt: skip
    """`_leave_losses`, one program per query of the chunk."""
    wait_for_previous_kernel()
    tensors = scores_ptr, labels_ptr, exclude_ptr, temperature_ptr, columns_ptr, row_ptr, values_ptr
    _leave_losses(tensors, n_queries, n_documents, first_query, n_all, scale, margin, config)


@kernel(follows=True, config="block normalize n_values")
def divergence_kernel(
    scores_ptr, teacher_ptr, temperature_ptr, row_ptr, values_ptr,
    n_documents, first_query, n_all, scale, teacher_scale, config: tl.constexpr,
):  # fmt: skip
    """The values of a query (see above), and rows [8, n] for its gradient; one program per query of the chunk.

    Rows: highest score, logarithm of the sum, scale, the first two of the teacher's scores, and with `normalize` the
    gradient of the range, and the indices of the highest and the lowest score.
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
        # Documents with a teacher probability of 0 add nothing.
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
    """Accumulate a chunk's scores in `columns`, initialized by the `first` chunk; one program per `tile` documents."""
    wait_for_previous_kernel()
    scale = _scale_of(temperature_ptr, scale)
    documents = tl.program_id(0) * config.tile + tl.arange(0, config.tile)
    document_exists = documents < n_documents
    if config.first:
        best = tl.full([config.tile], float("-inf"), tl.float32)
        total = tl.zeros([config.tile], tl.float32)
        weighted = tl.zeros([config.tile], tl.float32)
    else:
        best = tl.load(columns_ptr + documents, mask=document_exists, other=0.0)
        total = tl.load(columns_ptr + n_documents + documents, mask=document_exists, other=0.0)
        weighted = tl.load(columns_ptr + 2 * n_documents + documents, mask=document_exists, other=0.0)
    for first in tl.range(0, n_queries, config.tile):
        rows = first + tl.arange(0, config.tile)
        row_exists = rows < n_queries
        starts = rows.to(tl.int64) * n_documents
        label = _label_of(first_query + rows, row_exists, labels_ptr, exclude_ptr, n_documents, False)
        label_scores = tl.load(scores_ptr + starts + label, mask=label >= 0, other=float("nan"))
        exists = row_exists[:, None] & document_exists[None, :]
        scores = tl.load(scores_ptr + starts[:, None] + documents[None, :], mask=exists, other=float("-inf"))
        exclude_offsets = (first_query + rows).to(tl.int64)[:, None] * n_documents + documents[None, :]
        is_label = documents[None, :] == label[:, None]
        is_excluded = _left_out(
            scores, (label_scores - margin)[:, None], is_label, exclude_ptr, exclude_offsets, exists
        )
        is_excluded = is_excluded | (scores == float("-inf"))
        previous_best = best
        best = tl.maximum(best, tl.max(tl.where(is_excluded, float("-inf"), scores), axis=0))
        # Avoids -inf - -inf if there were no scores so far.
        decay = tl.where(previous_best == float("-inf"), 0.0, tl.exp((previous_best - best) * scale))
        shift = tl.where(previous_best == float("-inf"), 0.0, previous_best - best)
        terms = tl.where(is_excluded, 0.0, tl.exp((scores - best[None, :]) * scale))
        weighted = decay * (weighted + shift * total)
        weighted += tl.sum(tl.where(terms == 0.0, 0.0, terms * (scores - best[None, :])), axis=0)
        total = decay * total + tl.sum(terms, axis=0)
    tl.store(columns_ptr + documents, best, mask=document_exists)
    tl.store(columns_ptr + n_documents + documents, total, mask=document_exists)
    tl.store(columns_ptr + 2 * n_documents + documents, weighted, mask=document_exists)


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
    """Write the loss, its derivative with respect to the temperature, and statistics, from all queries' values."""
    tl.store(loss_ptr, _sum_of(values_ptr, n_queries, BLOCK) * share)
    if slope_ptr is not None:
        tl.store(slope_ptr, _sum_of(values_ptr + n_queries, n_queries, BLOCK) * share)
    if N_VALUES > 2:
        hits = _sum_of(values_ptr + 2 * n_queries, n_queries, BLOCK)
        positives = _sum_of(values_ptr + 3 * n_queries, n_queries, BLOCK)
        hardest = _sum_of(values_ptr + 4 * n_queries, n_queries, BLOCK)
        n_with_others = _sum_of(values_ptr + 5 * n_queries, n_queries, BLOCK)
        tl.store(statistics_ptr, hits / n_queries)
        tl.store(statistics_ptr + 1, positives / n_queries)
        tl.store(statistics_ptr + 2, hardest / n_with_others)


@kernel(follows=True, config="n_values block")
def total_kernel(values_ptr, loss_ptr, slope_ptr, statistics_ptr, n_queries, share, config: tl.constexpr):
    """`_leave_totals`, by one program."""
    wait_for_previous_kernel()
    _leave_totals(values_ptr, loss_ptr, slope_ptr, statistics_ptr, n_queries, share, config.n_values, config.block)


@triton.jit
def _leave_gradient(tile, tensors, n_queries, n_documents, first_query, scale, share, strides, config: tl.constexpr):
    """grad_scores = (softmax(scores * scale) - target) * scale * share / counts, for one tile.

    `target` holds labels or, with a teacher, its scores, and `scale` is theirs then. `counts` [n] may be None.
    `labelled` [N]: for each document, the number of queries that it is the label of, for the columns.
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
    offsets = queries.to(tl.int64)[:, None] * n_documents + documents[None, :]
    scores = tl.load(scores_ptr + offsets, mask=exists, other=0.0)
    if config.has_teacher:
        teacher = tl.load(target_ptr + tl.cast(first_query, tl.int64) * n_documents + offsets, mask=exists, other=0.0)
        row_ptr += queries
        best = tl.load(row_ptr, mask=query_exists, other=0.0)[:, None]
        lse = tl.load(row_ptr + n_queries, mask=query_exists, other=0.0)[:, None]
        scale_of_query = tl.load(row_ptr + 2 * n_queries, mask=query_exists, other=0.0)
        teacher_best = tl.load(row_ptr + 3 * n_queries, mask=query_exists, other=0.0)[:, None]
        teacher_log_sum = tl.load(row_ptr + 4 * n_queries, mask=query_exists, other=0.0)[:, None]
        grad = tl.exp((scores - best) * scale_of_query[:, None] - lse)
        grad -= tl.exp((teacher - teacher_best) * scale - teacher_log_sum)
        if config.normalize:
            range_slope = tl.load(row_ptr + 5 * n_queries, mask=query_exists, other=0.0)[:, None]
            highest = tl.load(row_ptr + 6 * n_queries, mask=query_exists, other=0.0)[:, None]
            lowest = tl.load(row_ptr + 7 * n_queries, mask=query_exists, other=0.0)[:, None]
            document_ids = documents.to(tl.float32)[None, :]
            grad += range_slope * ((document_ids == lowest).to(tl.float32) - (document_ids == highest).to(tl.float32))
        factor = scale_of_query * share
    else:
        best = tl.load(row_ptr + queries, mask=query_exists, other=0.0)
        lse = tl.load(row_ptr + n_queries + queries, mask=query_exists, other=0.0)
        limit = tl.load(row_ptr + 2 * n_queries + queries, mask=query_exists, other=0.0)
        label = _label_of(
            first_query + queries, query_exists, target_ptr, exclude_ptr, n_documents, config.own_candidates
        )
        is_label = documents[None, :] == label[:, None]
        exclude_offsets = offsets + tl.cast(first_query, tl.int64) * n_documents
        dropped = _left_out(scores, limit[:, None], is_label, exclude_ptr, exclude_offsets, exists)
        grad = tl.where(dropped, 0.0, tl.exp((scores - best[:, None]) * scale - lse[:, None])) - is_label.to(tl.float32)
        if columns_ptr is not None:
            document_exists = documents < n_documents
            highest = tl.load(columns_ptr + documents, mask=document_exists, other=0.0)
            column_sum = tl.log(tl.load(columns_ptr + n_documents + documents, mask=document_exists, other=1.0))
            labelled = tl.load(labelled_ptr + documents, mask=document_exists, other=0.0)
            column = tl.exp((scores - highest[None, :]) * scale - column_sum[None, :]) * labelled[None, :]
            # Documents that are no query's label have no column loss, and their column sum may be invalid.
            column = tl.where(dropped | (labelled == 0.0)[None, :], 0.0, column)
            grad = 0.5 * (grad + column - is_label.to(tl.float32))
        grad = tl.where((label >= 0)[:, None], grad, float("nan"))
        factor = tl.full([config.tile], 1.0, tl.float32) * (scale * share)
    if counts_ptr is not None:
        factor = factor / tl.load(counts_ptr + queries, mask=query_exists, other=1.0)
    out_offsets = queries.to(tl.int64)[:, None] * strides[0] + documents.to(tl.int64)[None, :] * strides[1]
    tl.store(grad_scores_ptr + out_offsets, grad * factor[:, None], mask=exists)


@kernel(follows=True, config="tile block own_candidates has_teacher normalize n_values")
def gradient_kernel(
    scores_ptr, target_ptr, exclude_ptr, temperature_ptr, columns_ptr, labelled_ptr, row_ptr, counts_ptr,
    grad_scores_ptr, values_ptr, loss_ptr, slope_ptr, statistics_ptr,
    n_queries, n_documents, first_query, n_all, scale, share,
    stride_query, stride_document, config: tl.constexpr,
):  # fmt: skip
    """`_leave_gradient`, one program per tile.

    With `loss`, passed for the last chunk, the first program also writes the totals, which saves their launch.
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
    """A full cross entropy, and its gradient, if requested, by one program that holds all scores."""
    wait_for_previous_kernel()
    tensors = scores_ptr, labels_ptr, exclude_ptr, temperature_ptr, columns_ptr, row_ptr, values_ptr
    _leave_losses(tensors, n_queries, n_documents, 0, n_queries, scale, margin, config)
    # Make the writes of all threads visible before they are read.
    tl.debug_barrier()
    _leave_totals(values_ptr, loss_ptr, slope_ptr, statistics_ptr, n_queries, share, config.n_values, config.rows)
    if grad_scores_ptr is not None:
        gradient_tensors = (
            scores_ptr, labels_ptr, exclude_ptr, temperature_ptr, columns_ptr, labelled_ptr, row_ptr, counts_ptr,
            grad_scores_ptr,
        )  # fmt: skip
        strides = stride_query, stride_document
        for tile in tl.range(0, tl.cdiv(n_queries, config.tile) * tl.cdiv(n_documents, config.tile)):
            _leave_gradient(tile, gradient_tensors, n_queries, n_documents, 0, scale, share, strides, config)
