"""Splits of packed documents into equal shares of work, computed on the device from their boundaries alone.

A document costs its tokens plus `DOCUMENT_COST`. With documents laid end to end at these costs, document j begins at
position cu_seqlens[j] + j * DOCUMENT_COST, and split i covers positions i * per_split to (i + 1) * per_split. A
document belongs to the split in which it begins, so all splits are about equal work, whatever the lengths.

A document of more than `longest_whole` tokens is itself split: each split that it overlaps scores its tokens there, a
segment. Such a document is longer than a split, so a split has at most two segments: one of a document that begins
before it (segment 2 * i), and one of a document that begins in it (segment 2 * i + 1). Row maxima of the segments, and
their argmax counted from the first token of a segment, go to scratch [segments, rows], which `merge_segments` reduces
to scores. A maximum of maxima is exact, so scores do not depend on the splits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..launch import kernel
from ..plan import ForwardPlan
from ..reductions import larger, max_along
from ..tables import DOCUMENT_COST, power_of_two
from .common import NO_ARGMAX, ForwardTensors

_DOCUMENT_COST = tl.constexpr(DOCUMENT_COST)
# Entries that a search compares per round.
_SEARCH_WIDTH = tl.constexpr(256)
# Segments and rows per step of the merge, and programs that share the queries of a document in segments.
_MERGED_SEGMENTS = 16
_MERGED_ROWS = 64
_MERGING_PROGRAMS = 16


@triton.jit
def lower_bound(values_ptr, size, targets, COST: tl.constexpr):
    """For each target, count the entries j < size with values[j] + j * COST below it; that sum must not decrease.

    Each round compares `_SEARCH_WIDTH` entries: three rounds of loads for 16 million entries, where a binary search
    takes 24, each as long as the memory latency.
    """
    low = (targets * 0).to(tl.int32)
    remaining = low + size
    probes = tl.arange(0, _SEARCH_WIDTH)
    while tl.max(remaining, axis=0) > 0:
        step = tl.cdiv(remaining, _SEARCH_WIDTH)
        entries = low[:, None] + (probes[None, :] + 1) * step[:, None] - 1
        exists = entries < (low + remaining)[:, None]
        exists = exists & (remaining > 0)[:, None]
        values = tl.load(values_ptr + entries, mask=exists, other=0).to(tl.int64) + entries.to(tl.int64) * COST
        below = tl.sum((exists & (values < targets[:, None])).to(tl.int32), axis=1)
        # The probe after the last one below the target is not below it, if it exists.
        remaining = tl.minimum(tl.maximum(step - 1, 0), remaining - below * step)
        low += below * step
    return low


@triton.jit
def documents_of_split(cu_seqlens_ptr, n_documents, split_start, per_split):
    """First document that begins in a split, and one past the last."""
    bounds = lower_bound(cu_seqlens_ptr, n_documents, split_start + tl.arange(0, 2) * per_split, _DOCUMENT_COST)
    # With a min and a max instead, Triton 3.8 knows no alignment of the documents and copies 4 bytes at a time.
    return tl.split(bounds)


@triton.jit
def document_position(cu_seqlens_ptr, document):
    """Position at which a document begins, and its number of tokens."""
    start = tl.load(cu_seqlens_ptr + document).to(tl.int64)
    length = (tl.load(cu_seqlens_ptr + document + 1).to(tl.int64) - start).to(tl.int32)
    return start + tl.cast(document, tl.int64) * _DOCUMENT_COST, length


@triton.jit
def reaches_into(cu_seqlens_ptr, document, split_start, longest_whole):
    """1 if `document`, which begins before a split, has a segment in it, else 0; -1 stands for no document."""
    position, length = document_position(cu_seqlens_ptr, tl.maximum(document, 0))
    return ((document >= 0) & (length > longest_whole) & (position + length > split_start)).to(tl.int32)


@triton.jit
def tokens_of_segment(cu_seqlens_ptr, document, split_start, per_split, longest_whole):
    """First token and number of tokens of a document that a split scores: all tokens, or those of its segment."""
    position, length = document_position(cu_seqlens_ptr, document)
    first = tl.maximum(split_start - position, 0).to(tl.int32)
    last = tl.minimum(split_start + per_split - position, length).to(tl.int32)
    unsegmented = length <= longest_whole
    return tl.where(unsegmented, 0, first), tl.where(unsegmented, length, last - first)


@triton.jit
def find_segment(cu_seqlens_ptr, n_documents, segment, per_split, longest_whole):
    """Document, first token and number of tokens of a segment; 0 tokens if the segment does not exist."""
    split_start = (segment // 2).to(tl.int64) * per_split
    target = split_start + (segment % 2) * per_split
    document = tl.max(lower_bound(cu_seqlens_ptr, n_documents, target + tl.arange(0, 1), _DOCUMENT_COST), axis=0) - 1
    exists = document >= 0
    document = tl.maximum(document, 0)
    position, length = document_position(cu_seqlens_ptr, document)
    # The last document that begins before the end of a split need not begin in it.
    exists = exists & (length > longest_whole) & ((segment % 2 == 0) | (position >= split_start))
    first, length = tokens_of_segment(cu_seqlens_ptr, document, split_start, per_split, longest_whole)
    return document, first, tl.where(exists, tl.maximum(length, 0), 0)


@triton.jit
def owner_of(candidates_ptr, n_queries, document):
    """The query that owns a document: the last i with candidates[i] <= document."""
    return (
        tl.max(lower_bound(candidates_ptr, n_queries + 1, tl.cast(document, tl.int64) + 1 + tl.arange(0, 1), 0), axis=0)
        - 1
    )


@kernel(config="block_segments block_rows has_candidates has_queries_mask weighted normalize with_argmax")
def _merge_kernel(
    best_ptr, keys_ptr, queries_mask_ptr, queries_scale_ptr, cu_seqlens_ptr, candidates_ptr, scores_ptr, argmax_ptr,
    n_queries, query_length, n_documents, n_programs, per_split, longest_whole, rows, rows_per_query,
    config: tl.constexpr,
):  # fmt: skip
    """Write scores and argmax of the document in segments that begins in a split, if there is one.

    `n_programs` programs per split share the queries; with candidates there is one, as a document has one query.
    """
    index = tl.program_id(0) // n_programs
    document, _, segment_length = find_segment(cu_seqlens_ptr, n_documents, 2 * index + 1, per_split, longest_whole)
    if segment_length > 0:
        position, length = document_position(cu_seqlens_ptr, document)
        # Offset of the document from the start of the split: segment i begins at token i * per_split - document_offset.
        document_offset = (position - index.to(tl.int64) * per_split).to(tl.int32)
        n_segments = tl.cdiv(document_offset + length, per_split)
        first_query = tl.program_id(0) % n_programs
        last_query = n_queries
        if config.has_candidates:
            first_query = owner_of(candidates_ptr, n_queries, document)
            last_query = first_query + 1
        for query in tl.range(first_query, last_query, n_programs):
            score = tl.cast(document, tl.int64)
            argmax_row = tl.cast(document, tl.int64)
            first_row = 0
            if not config.has_candidates:
                score += tl.cast(query, tl.int64) * n_documents
                argmax_row = argmax_row * n_queries + query
                first_row = query * rows_per_query
            total = tl.zeros([config.block_rows], tl.float32)
            for start in tl.range(0, query_length, config.block_rows):
                tokens = start + tl.arange(0, config.block_rows)
                exists = tokens < query_length
                best = tl.full([config.block_rows], float("-inf"), tl.float32)
                key = tl.full([config.block_rows], NO_ARGMAX, tl.int32)
                for first_segment in tl.range(0, n_segments, config.block_segments):
                    # Clamp to the last segment.
                    segments = tl.minimum(first_segment + tl.arange(0, config.block_segments), n_segments - 1)
                    # The document's first segment is the second of its split; the others are the first of theirs.
                    slots = 2 * (index + segments) + (segments == 0).to(tl.int32)
                    offsets = slots.to(tl.int64)[:, None] * rows + (first_row + tokens)[None, :]
                    segment_best = tl.load(best_ptr + offsets, mask=exists[None, :], other=0.0)
                    block_best = max_along(segment_best, 0)
                    if config.with_argmax:
                        segment_key = tl.load(keys_ptr + offsets, mask=exists[None, :], other=0)
                        attains = (segment_best == block_best[None, :]) | (segment_best != segment_best)
                        attains = attains & (segment_key != NO_ARGMAX)
                        segment_key += tl.maximum(segments * per_split - document_offset, 0)[:, None]
                        block_key = tl.min(tl.where(attains, segment_key, NO_ARGMAX), axis=0)
                        # A later segment must be strictly better, or have the first NaN.
                        replaces = (block_best > best) | ((block_best != block_best) & (best == best))
                        key = tl.where(replaces, block_key, key)
                    best = larger(best, block_best)
                active = exists
                global_row = tl.cast(query, tl.int64) * query_length + tokens
                if config.has_queries_mask:
                    weight = tl.load(queries_mask_ptr + global_row, mask=exists, other=0)
                    active = active & (weight != 0)
                if config.with_argmax:
                    argmax = tl.where(active & (key != NO_ARGMAX) & (best != float("-inf")), key, -1)
                    argmax = argmax.to(argmax_ptr.dtype.element_ty)
                    tl.store(argmax_ptr + argmax_row * query_length + tokens, argmax, mask=exists)
                if config.normalize:
                    best *= tl.load(queries_scale_ptr + global_row, mask=exists, other=0.0)
                if config.weighted:
                    best *= weight.to(tl.float32)
                total += tl.where(active, best, 0.0)
            tl.store(scores_ptr + score, tl.sum(total, axis=0))


def merge_segments(problem: Problem, plan: ForwardPlan, tensors: ForwardTensors, scores: Tensor) -> None:
    """Write the scores and argmax of the documents that are in segments."""
    # Most splits have nothing to merge, and should not cost a program per query.
    programs = 1 if problem.has_candidates else min(problem.n_queries, _MERGING_PROGRAMS)
    # A segment of the single kernel has the rows of one query; those of stacked kernels have all queries, padded.
    rows_per_query = 0 if plan.kernel == "single" else plan.padded
    _merge_kernel(
        (plan.splits.number * programs, 1, 1),
        (
            tensors.segments, tensors.segment_argmax, tensors.queries_mask, tensors.queries_scale, tensors.cu_seqlens,
            tensors.candidates, scores, tensors.argmax,
        ),
        (
            problem.n_queries, problem.query_length, problem.n_documents, programs, plan.splits.per_split,
            plan.splits.whole, plan.row_blocks * plan.block_rows, rows_per_query,
        ),
        (),
        (
            _MERGED_SEGMENTS, min(_MERGED_ROWS, power_of_two(problem.query_length)), problem.has_candidates,
            problem.kind.queries_mask is not None, problem.kind.weighted, problem.normalize, problem.with_argmax,
        ),
        (4, 1, None),
    )  # fmt: skip
