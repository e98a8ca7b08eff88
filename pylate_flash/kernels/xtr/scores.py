"""Scores of what query tokens retrieved: which document scores, its sum, its divisor, and whose gradient flows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...ops.xtr_retrieval import Pool, Retrieval
from .. import select
from ..launch import Kernel
from ..overlap import wait_for_previous_kernel
from ..tiles import power_of_two

# Documents x query tokens of a tile, and documents of it at most; programs of a processor that share the documents.
_TILE = 2048
_DOCUMENTS = 32
_PER_PROCESSOR = 2


@triton.jit(
    do_not_specialize=["n_rows", "query_length", "n_documents", "run", "stride_winners", "least", "empty_score"]
)
def _score_kernel(
    best_ptr, found_ptr, thresholds_ptr, n_equal_ptr, tallied_ptr, above_ptr, equal_ptr, counts_ptr, complete_ptr,
    mask_ptr, scores_ptr, divisors_ptr, winners_ptr,
    n_rows, query_length, n_documents, run, stride_winners, least, empty_score,
    BLOCK_DOCUMENTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    WITH_WHOLE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Of one query and a run of documents. Grid: queries, runs. As `ops.xtr._score_in_blocks`."""
    wait_for_previous_kernel()
    query = tl.program_id(0).to(tl.int64)
    tokens = tl.arange(0, BLOCK_ROWS)
    rows = query * query_length + tokens
    row_exists = tokens < query_length
    threshold = tl.load(thresholds_ptr + rows, mask=row_exists, other=0.0)[None, :]
    n_equal = tl.load(n_equal_ptr + rows, mask=row_exists, other=0)[None, :]
    tallied = tl.load(tallied_ptr + rows, mask=row_exists, other=0) != 0
    row_counts = row_exists
    if HAS_MASK:
        weight = tl.load(mask_ptr + rows, mask=row_exists, other=0)
        row_counts = row_counts & (weight != 0)
    first = tl.program_id(1) * run
    last = tl.minimum(first + run, n_documents)
    # Of equal tokens, those of earlier documents are retrieved first.
    before = tl.zeros([BLOCK_ROWS], tl.int32)
    earlier = tl.where(tl.max(tallied.to(tl.int32), axis=0) > 0, first, 0)
    for start in tl.range(0, earlier, BLOCK_DOCUMENTS):
        documents = start + tl.arange(0, BLOCK_DOCUMENTS)
        at = documents[:, None].to(tl.int64) * n_rows + rows[None, :]
        before += tl.sum(
            tl.load(equal_ptr + at, mask=(documents < first)[:, None] & tallied[None, :], other=0).to(tl.int32), axis=0
        )
    for start in tl.range(first, last, BLOCK_DOCUMENTS):
        documents = start + tl.arange(0, BLOCK_DOCUMENTS)
        exists = documents < last
        at = documents[:, None].to(tl.int64) * n_rows + rows[None, :]
        inside = exists[:, None] & row_exists[None, :]
        best = tl.load(best_ptr + at, mask=inside, other=0.0)
        winner = tl.load(found_ptr + at, mask=inside, other=0)
        above = tl.load(above_ptr + at, mask=inside & tallied[None, :], other=0).to(tl.int32)
        equal = tl.load(equal_ptr + at, mask=inside & tallied[None, :], other=0).to(tl.int32)
        n_active = tl.load(counts_ptr + documents, mask=exists, other=0)
        reached = before[None, :] + tl.cumsum(equal, axis=0)
        taken = above + tl.minimum(tl.maximum(n_equal - (reached - equal), 0), equal)
        before += tl.sum(equal, axis=0)
        nan = best != best
        # Where nothing was counted, all that reaches the threshold is retrieved.
        scores = nan | ((best >= threshold) & ((taken > 0) | ~tallied[None, :]))
        scores = scores & (n_active > 0)[:, None] & row_counts[None, :]
        if WITH_WHOLE:
            # A token that was not retrieved counts as 0, and wins over negative ones.
            complete = tl.load(complete_ptr + documents, mask=exists, other=0) != 0
            whole = tallied[None, :] & (taken >= n_active[:, None]) & complete[:, None]
            scores = scores & (whole | ~(best <= 0.0))
        best = tl.where(scores, best, 0.0)
        if WEIGHTED:
            best *= weight.to(tl.float32)[None, :]
        counted = scores
        if WITH_WHOLE:
            counted = best > 0.0
        divisor = tl.maximum(tl.sum(counted.to(tl.float32), axis=1), least)
        score = tl.where(n_active > 0, tl.sum(best, axis=1) / divisor, empty_score)
        to = query * n_documents + documents
        tl.store(scores_ptr + to, score, mask=exists)
        tl.store(divisors_ptr + to, divisor, mask=exists)
        tl.store(
            winners_ptr + documents[:, None].to(tl.int64) * stride_winners + rows[None, :],
            tl.where(scores, winner, -1), mask=inside,
        )  # fmt: skip


_score = Kernel(_score_kernel, follows=True)


def score_retrieved(
    found: Retrieval,
    pool: Pool,
    queries_mask: Tensor | None,
    least: float,
    empty_score: float,
    to: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Leave scores and divisors [Nq, Nd], and the winners [Nd, Nq * Lq] that count, others -1.

    `queries_mask` [Nq, Lq] is contiguous, bool or weights. The winners may be columns of more.
    """
    scores, divisors, winners = to
    (n_queries, n_documents), rows = scores.shape, found.best.shape[1]
    length = rows // n_queries
    block_rows = power_of_two(length)
    block_documents = max(1, min(_DOCUMENTS, _TILE // block_rows))
    slots = _PER_PROCESSOR * select.architecture(scores.device)[1]
    n_runs = max(1, min(slots // n_queries, -(-n_documents // block_documents)))
    run = -(-n_documents // n_runs)
    _score(
        (n_queries, -(-n_documents // run), 1),
        (*found, pool.counts, pool.complete, queries_mask, scores, divisors, winners),
        (rows, length, n_documents, run, winners.stride(0), least, empty_score),
        (),
        (
            block_documents, block_rows, pool.with_whole, queries_mask is not None,
            queries_mask is not None and queries_mask.is_floating_point(),
        ),
        (4, 1, None),
    )  # fmt: skip
