"""Packed documents cut into equal shares of work, on the device, with nothing known there but their boundaries.

A document costs its tokens and `DOCUMENT_COST` more. Laid one after the other at these costs, document j begins at the
position cu_seqlens[j] + j * DOCUMENT_COST, and cut number i is the positions i * cut to (i + 1) * cut. A document
belongs to the cut in which it begins, so every cut is about equal work, whatever the lengths.

A document of more than `whole` tokens is itself cut: each cut that it reaches into takes its tokens there, a piece. As
such a document is longer than a cut, a cut has at most two pieces: one of a document that began before it (piece
2 * i), and one of a document that begins in it (piece 2 * i + 1). The best similarities of the pieces, and winners
counted from a piece's first token, lie in a scratch [pieces, rows], and `merge_pieces` makes scores of them. The
maximum of maxima is exact, so a score does not depend on the cuts.
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
from .common import NO_WINNER, ForwardTensors

_DOCUMENT_COST = tl.constexpr(DOCUMENT_COST)
# Entries that a search compares at once.
_SEARCH_WIDTH = tl.constexpr(256)
# Pieces and rows that the merge takes at a time, and programs that share the queries of a document in pieces.
_MERGED_PIECES = 16
_MERGED_ROWS = 64
_MERGING_PROGRAMS = 16


@triton.jit
def lower_bound(values_ptr, size, targets, COST: tl.constexpr):
    """For each target, the number of entries j < size with values[j] + j * COST below it; that sum does not fall.

    Compares `_SEARCH_WIDTH` entries at a time: three rounds of loads for 16 million entries, where a binary search
    takes 24, each as long as the memory's latency.
    """
    low = (targets * 0).to(tl.int32)
    left = low + size
    probes = tl.arange(0, _SEARCH_WIDTH)
    while tl.max(left, axis=0) > 0:
        step = tl.cdiv(left, _SEARCH_WIDTH)
        entries = low[:, None] + (probes[None, :] + 1) * step[:, None] - 1
        exists = entries < (low + left)[:, None]
        exists = exists & (left > 0)[:, None]
        values = tl.load(values_ptr + entries, mask=exists, other=0).to(tl.int64) + entries.to(tl.int64) * COST
        below = tl.sum((exists & (values < targets[:, None])).to(tl.int32), axis=1)
        # The entry after the last one that is below is not, unless it does not exist.
        left = tl.minimum(tl.maximum(step - 1, 0), left - below * step)
        low += below * step
    return low


@triton.jit
def documents_of_cut(cu_seqlens_ptr, n_documents, cut_start, cut):
    """First of the documents that begin in a cut, and one past the last."""
    bounds = lower_bound(cu_seqlens_ptr, n_documents, cut_start + tl.arange(0, 2) * cut, _DOCUMENT_COST)
    return tl.min(bounds, axis=0), tl.max(bounds, axis=0)


@triton.jit
def document_position(cu_seqlens_ptr, document):
    """Where a document begins among the positions, and its number of tokens."""
    start = tl.load(cu_seqlens_ptr + document).to(tl.int64)
    length = (tl.load(cu_seqlens_ptr + document + 1).to(tl.int64) - start).to(tl.int32)
    return start + tl.cast(document, tl.int64) * _DOCUMENT_COST, length


@triton.jit
def reaches_into(cu_seqlens_ptr, document, cut_start, whole):
    """1 if `document`, which begins before a cut, is cut into pieces and has one there; else 0. -1 is no document."""
    position, length = document_position(cu_seqlens_ptr, tl.maximum(document, 0))
    return ((document >= 0) & (length > whole) & (position + length > cut_start)).to(tl.int32)


@triton.jit
def tokens_of_piece(cu_seqlens_ptr, document, cut_start, cut, whole):
    """First of the tokens of a document that a cut takes, and their number: all of them, or those that lie in it."""
    position, length = document_position(cu_seqlens_ptr, document)
    first = tl.maximum(cut_start - position, 0).to(tl.int32)
    last = tl.minimum(cut_start + cut - position, length).to(tl.int32)
    is_whole = length <= whole
    return tl.where(is_whole, 0, first), tl.where(is_whole, length, last - first)


@triton.jit
def find_piece(cu_seqlens_ptr, n_documents, piece, cut, whole):
    """Document, first token and number of tokens of a piece; no tokens where that piece does not exist."""
    cut_start = (piece // 2).to(tl.int64) * cut
    target = cut_start + (piece % 2) * cut
    document = tl.max(lower_bound(cu_seqlens_ptr, n_documents, target + tl.arange(0, 1), _DOCUMENT_COST), axis=0) - 1
    exists = document >= 0
    document = tl.maximum(document, 0)
    position, length = document_position(cu_seqlens_ptr, document)
    # The last document to begin before the end of a cut need not begin in it.
    exists = exists & (length > whole) & ((piece % 2 == 0) | (position >= cut_start))
    first, length = tokens_of_piece(cu_seqlens_ptr, document, cut_start, cut, whole)
    return document, first, tl.where(exists, tl.maximum(length, 0), 0)


@triton.jit
def owner_of(candidates_ptr, n_queries, document):
    """The query that owns a document: the last i with candidates[i] <= document."""
    return (
        tl.max(lower_bound(candidates_ptr, n_queries + 1, tl.cast(document, tl.int64) + 1 + tl.arange(0, 1), 0), axis=0)
        - 1
    )


@kernel(config="block_pieces block_rows has_candidates has_queries_mask weighted normalize with_winners")
def _merge_kernel(
    best_ptr, keys_ptr, queries_mask_ptr, queries_scale_ptr, cu_seqlens_ptr, candidates_ptr, scores_ptr, winners_ptr,
    n_queries, query_length, n_documents, n_programs, cut, whole, rows, rows_per_query, config: tl.constexpr,
):  # fmt: skip
    """Scores and winners of the document that begins in a cut and is in pieces, if there is one.

    `n_programs` programs per cut share the queries; with candidates there is one, as a document has one query.
    """
    index = tl.program_id(0) // n_programs
    document, _, piece_length = find_piece(cu_seqlens_ptr, n_documents, 2 * index + 1, cut, whole)
    if piece_length > 0:
        position, length = document_position(cu_seqlens_ptr, document)
        # Tokens from the beginning of the cut on, so that piece i begins at token i * cut - before.
        before = (position - index.to(tl.int64) * cut).to(tl.int32)
        n_pieces = tl.cdiv(before + length, cut)
        first_query = tl.program_id(0) % n_programs
        last_query = n_queries
        if config.has_candidates:
            first_query = owner_of(candidates_ptr, n_queries, document)
            last_query = first_query + 1
        for query in tl.range(first_query, last_query, n_programs):
            score = tl.cast(document, tl.int64)
            winners_row = tl.cast(document, tl.int64)
            first_row = 0
            if not config.has_candidates:
                score += tl.cast(query, tl.int64) * n_documents
                winners_row = winners_row * n_queries + query
                first_row = query * rows_per_query
            total = tl.zeros([config.block_rows], tl.float32)
            for start in tl.range(0, query_length, config.block_rows):
                tokens = start + tl.arange(0, config.block_rows)
                exists = tokens < query_length
                best = tl.full([config.block_rows], float("-inf"), tl.float32)
                key = tl.full([config.block_rows], NO_WINNER, tl.int32)
                for first_piece in tl.range(0, n_pieces, config.block_pieces):
                    # The last piece again, rather than one that does not exist.
                    pieces = tl.minimum(first_piece + tl.arange(0, config.block_pieces), n_pieces - 1)
                    # The first is the second piece of its cut; every other one is the first piece of its own.
                    slots = 2 * (index + pieces) + (pieces == 0).to(tl.int32)
                    offsets = slots.to(tl.int64)[:, None] * rows + (first_row + tokens)[None, :]
                    piece_best = tl.load(best_ptr + offsets, mask=exists[None, :], other=0.0)
                    block_best = max_along(piece_best, 0)
                    if config.with_winners:
                        piece_key = tl.load(keys_ptr + offsets, mask=exists[None, :], other=0)
                        won = (piece_best == block_best[None, :]) | (piece_best != piece_best)
                        won = won & (piece_key != NO_WINNER)
                        piece_key += tl.maximum(pieces * cut - before, 0)[:, None]
                        block_key = tl.min(tl.where(won, piece_key, NO_WINNER), axis=0)
                        # Later pieces must be strictly better, or have the first NaN.
                        later = (block_best > best) | ((block_best != block_best) & (best == best))
                        key = tl.where(later, block_key, key)
                    best = larger(best, block_best)
                active = exists
                global_row = tl.cast(query, tl.int64) * query_length + tokens
                if config.has_queries_mask:
                    weight = tl.load(queries_mask_ptr + global_row, mask=exists, other=0)
                    active = active & (weight != 0)
                if config.with_winners:
                    winner = tl.where(active & (key != NO_WINNER) & (best != float("-inf")), key, -1)
                    winner = winner.to(winners_ptr.dtype.element_ty)
                    tl.store(winners_ptr + winners_row * query_length + tokens, winner, mask=exists)
                if config.normalize:
                    best *= tl.load(queries_scale_ptr + global_row, mask=exists, other=0.0)
                if config.weighted:
                    best *= weight.to(tl.float32)
                total += tl.where(active, best, 0.0)
            tl.store(scores_ptr + score, tl.sum(total, axis=0))


def merge_pieces(problem: Problem, plan: ForwardPlan, tensors: ForwardTensors, scores: Tensor) -> None:
    """Write the scores and winners of the documents that are in pieces."""
    # Most cuts have nothing to merge, and are not to cost a program per query.
    programs = 1 if problem.has_candidates else min(problem.n_queries, _MERGING_PROGRAMS)
    # Of the single kernel, a piece has the rows of one query; of the stacked ones, those of all, each padded.
    rows_per_query = 0 if plan.kernel == "single" else plan.padded
    _merge_kernel(
        (plan.cuts.number * programs, 1, 1),
        (
            tensors.pieces, tensors.piece_winners, tensors.queries_mask, tensors.queries_scale, tensors.cu_seqlens,
            tensors.candidates, scores, tensors.winners,
        ),
        (
            problem.n_queries, problem.query_length, problem.n_documents, programs, plan.cuts.cut, plan.cuts.whole,
            plan.row_blocks * plan.block_rows, rows_per_query,
        ),
        (),
        (
            _MERGED_PIECES, min(_MERGED_ROWS, power_of_two(problem.query_length)), problem.has_candidates,
            problem.kind.queries_mask is not None, problem.kind.weighted, problem.normalize, problem.with_winners,
        ),
        (4, 1, None),
    )  # fmt: skip
