"""XTR scores of retrieved tokens: which documents score, their sums and divisors, and the argmax for gradients."""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from ..problem import Problem, Results, Rule
from . import tables
from .launch import Region, kernel, wait_for_previous_kernel
from .reductions import similarities_of
from .tables import power_of_two

# Documents x query tokens of a tile, and maximum documents of it; programs per SM that share the documents.
_TILE = 2048
_DOCUMENTS = 32
_PER_SM = 2
# Documents whose masked tokens are counted at a time.
_COUNTED = 1024


class Retrieved(NamedTuple):
    """The retrieval of all rows.

    Attributes
    ----------
    best, argmax
        [Nd, rows]: the best similarity of a row with a document, NaN if any is, and the lowest index that attains it.
    state
        [4, rows], int32: the keys of the thresholds; -1; for tallied rows, how many of the tokens equal to the
        threshold are retrieved; whether a row is tallied.
    counts
        [2, Nd, rows]: for tallied rows, a document's tokens above the threshold, and equal to it.
    """

    best: Tensor
    argmax: Tensor
    state: Tensor
    counts: Tensor


@kernel(follows=True, config="block_documents block_rows counted with_whole weighted")
def _score_kernel(
    best_ptr, retrieved_ptr, state_ptr, counts_ptr, bounds_ptr, mask_ptr, scores_ptr, divisors_ptr, argmax_ptr,
    n_rows, query_length, n_documents, document_length, run, k, argmax_stride, least, empty_score,
    config: tl.constexpr,
):  # fmt: skip
    """Scores of one query and a run of documents, as `ops.xtr` computes them in blocks. Grid: queries, runs."""
    wait_for_previous_kernel()
    query = tl.program_id(0).to(tl.int64)
    tokens = tl.arange(0, config.block_rows)
    rows = query * query_length + tokens
    row_exists = tokens < query_length
    threshold = similarities_of(tl.load(state_ptr + rows, mask=row_exists, other=0))[None, :]
    n_equal = tl.load(state_ptr + 2 * n_rows + rows, mask=row_exists, other=0)[None, :]
    tallied = tl.load(state_ptr + 3 * n_rows + rows, mask=row_exists, other=0) != 0
    any_tallied = tl.max(tallied.to(tl.int32), axis=0) > 0
    equal_ptr = counts_ptr + tl.cast(n_documents, tl.int64) * n_rows
    row_counts = row_exists
    if mask_ptr is not None:
        weight = tl.load(mask_ptr + rows, mask=row_exists, other=0)
        row_counts = row_counts & (weight != 0)
    first = tl.program_id(1) * run
    last = tl.minimum(first + run, n_documents)
    # Of tokens equal to the threshold, those of earlier documents are retrieved first.
    n_equal_before = tl.zeros([config.block_rows], tl.int32)
    for start in tl.range(0, tl.where(any_tallied, first, 0), config.block_documents):
        documents = start + tl.arange(0, config.block_documents)
        offsets = documents[:, None].to(tl.int64) * n_rows + rows[None, :]
        n_equal_before += tl.sum(
            tl.load(equal_ptr + offsets, mask=(documents < first)[:, None] & tallied[None, :], other=0).to(tl.int32),
            axis=0,
        )
    if config.with_whole and bounds_ptr is not None:
        # Masked tokens are retrieved after all active ones, in their order.
        n_active_in_all = tl.zeros([config.counted], tl.int64)
        n_masked_before = tl.zeros([config.counted], tl.int64)
        for start in tl.range(0, tl.where(any_tallied, n_documents, 0), config.counted):
            documents = start + tl.arange(0, config.counted)
            n_active = tl.load(bounds_ptr + 2 * documents.to(tl.int64), mask=documents < n_documents, other=0)
            n_active_in_all += n_active
            n_masked_before += tl.where(documents < first, document_length - n_active, 0)
        n_masked_retrieved = k - tl.sum(n_active_in_all, axis=0)
        masked_before = tl.sum(n_masked_before, axis=0)
    for start in tl.range(first, last, config.block_documents):
        documents = start + tl.arange(0, config.block_documents)
        exists = documents < last
        offsets = documents[:, None].to(tl.int64) * n_rows + rows[None, :]
        inside = exists[:, None] & row_exists[None, :]
        best = tl.load(best_ptr + offsets, mask=inside, other=0.0)
        argmax = tl.load(retrieved_ptr + offsets, mask=inside, other=0)
        above = tl.load(counts_ptr + offsets, mask=inside & tallied[None, :], other=0).to(tl.int32)
        equal = tl.load(equal_ptr + offsets, mask=inside & tallied[None, :], other=0).to(tl.int32)
        n_active = tl.where(exists, document_length, 0)
        if bounds_ptr is not None:
            n_active = tl.load(bounds_ptr + 2 * documents.to(tl.int64), mask=exists, other=0)
        reached = n_equal_before[None, :] + tl.cumsum(equal, axis=0)
        n_retrieved = above + tl.minimum(tl.maximum(n_equal - (reached - equal), 0), equal)
        n_equal_before += tl.sum(equal, axis=0)
        nan = best != best
        # In rows that are not tallied, every token that reaches the threshold is retrieved.
        is_scoring = nan | ((best >= threshold) & ((n_retrieved > 0) | ~tallied[None, :]))
        is_scoring = is_scoring & (n_active > 0)[:, None] & row_counts[None, :]
        if config.with_whole:
            # A token that was not retrieved counts as 0, and wins over negative ones.
            all_retrieved = tallied[None, :] & (n_retrieved >= n_active[:, None])
            if bounds_ptr is not None:
                n_masked = tl.where(exists, document_length - n_active, 0).to(tl.int64)
                complete = (n_masked == 0) | (masked_before + tl.cumsum(n_masked, axis=0) <= n_masked_retrieved)
                masked_before += tl.sum(n_masked, axis=0)
                all_retrieved = all_retrieved & complete[:, None]
            is_scoring = is_scoring & (all_retrieved | ~(best <= 0.0))
        best = tl.where(is_scoring, best, 0.0)
        if config.weighted:
            best *= weight.to(tl.float32)[None, :]
        in_divisor = is_scoring
        if config.with_whole:
            in_divisor = best > 0.0
        divisor = tl.maximum(tl.sum(in_divisor.to(tl.float32), axis=1), least)
        score = tl.where(n_active > 0, tl.sum(best, axis=1) / divisor, empty_score)
        out_offsets = query * n_documents + documents
        tl.store(scores_ptr + out_offsets, score, mask=exists)
        tl.store(divisors_ptr + out_offsets, divisor, mask=exists)
        out_offsets = documents[:, None].to(tl.int64) * argmax_stride + rows[None, :]
        tl.store(argmax_ptr + out_offsets, tl.where(is_scoring, argmax, -1), mask=inside)


def score_retrieved(
    problem: Problem,
    retrieved: Retrieved,
    bounds: Region | None,
    queries_mask: Tensor | None,
    rule: Rule,
    results: Results,
) -> None:
    """Write the scores, divisors and argmax of what rows retrieve to `results`.

    `bounds` are those of masked documents (`kernels.rows`). `queries_mask` [Nq, Lq] is contiguous, bool or weights.
    """
    n_queries, n_documents, length = problem.n_queries, problem.n_documents, problem.query_length
    block_rows = power_of_two(length)
    block_documents = max(1, min(_DOCUMENTS, _TILE // block_rows))
    slots = _PER_SM * tables.architecture(problem.device)[1]
    n_runs = max(1, min(slots // n_queries, -(-n_documents // block_documents)))
    run = -(-n_documents // n_runs)
    weighted = queries_mask is not None and queries_mask.is_floating_point()
    sizes = problem.rows, length, n_documents, problem.document_length
    _score_kernel(
        (n_queries, -(-n_documents // run), 1),
        (*retrieved, bounds, queries_mask, results.scores, results.divisors, results.argmax),
        (*sizes, run, rule.k, results.argmax.stride(0), rule.least, problem.empty_score),
        (),
        (block_documents, block_rows, _COUNTED, rule.with_whole, weighted),
        (4, 1, None),
    )
