"""What the forward's kernels share: the tensors that they read and leave, and functions."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..launch import Region, kernel
from ..plan import ForwardPlan
from ..reductions import larger, max_along
from ..tables import SUMMED_EMBEDDING as _SUMMED

SUMMED_EMBEDDING = tl.constexpr(_SUMMED)
# The argmax while no token is it yet; larger than any token.
NO_ARGMAX = tl.constexpr(2**31 - 1)


class ForwardTensors(NamedTuple):
    """Tensors on the device of the problem; None where the problem has none."""

    # Padded [Nq, Lq, d] by the problem's strides, padded or packed documents, and what is active of the queries.
    queries: Tensor
    documents: Tensor
    queries_mask: Tensor | None = None
    # The active tokens of masked documents, and their numbers (`kernels.rows`).
    active: Tensor | None = None
    bounds: Tensor | Region | None = None
    # One over the norms of embeddings that are to be normalised, or what values in 8 bits are multiplied by.
    queries_scale: Tensor | None = None
    documents_scale: Tensor | None = None
    cu_seqlens: Tensor | None = None
    # Where packed documents begin that do not follow each other (`problem.DocumentOffsets`).
    offsets: Tensor | None = None
    # Boundaries of the packed documents of each query, or the numbers of documents [Nq, K].
    candidates: Tensor | None = None
    argmax: Tensor | None = None
    # The best similarities of every segment [segments, rows], and their argmax.
    segments: Tensor | None = None
    segment_argmax: Tensor | None = None
    # Where query rows are quantized to, [Nq, Lq, d], with their scales in `queries_scale`; offsets of affine documents.
    values: Tensor | None = None
    documents_offset: Tensor | None = None
    # The centroid of every token, centroids and bucket weights, where `documents` are residuals.
    codes: Tensor | None = None
    centroids: Tensor | None = None
    bucket_weights: Tensor | None = None
    # Of smooth maxima, what similarities are multiplied by, and where the logarithms [documents, rows] go, if anywhere.
    beta: Tensor | None = None
    lse: Tensor | None = None
    # Positions of the query tokens that meet each document, [Nq, K or Nd, k].
    query_tokens: Tensor | None = None
    # What centroids add to similarities, and bucket weights in bytes (`forward.short`).
    table: Tensor | None = None
    luts: Tensor | None = None


def numbers_of(problem: Problem, plan: ForwardPlan) -> tuple[float, ...]:
    """The numbers that a kernel takes for which the tokens of all queries are one tall matrix."""
    return (
        problem.n_queries // problem.groups, problem.query_length, plan.padded, problem.n_documents,
        problem.document_length, plan.n_runs, plan.run, problem.empty_score,
    )  # fmt: skip


@triton.jit
def load_padded(pointers, inside, PADDED: tl.constexpr):
    """What lies at the pointers; where it is PADDED, zeros outside."""
    return tl.load(pointers, mask=inside, other=0.0) if PADDED else tl.load(pointers)


@triton.jit
def split_products(left_rows, right_rows, left_exists, right_exists, config: tl.constexpr):
    """Products [left, right] of embeddings that are read block by block, from where the rows begin."""
    dims = tl.arange(0, config.block)
    similarities = tl.zeros([left_rows.shape[0], right_rows.shape[0]], tl.float32)
    for sum_start in tl.static_range(0, config.size, SUMMED_EMBEDDING):
        products = tl.zeros([left_rows.shape[0], right_rows.shape[0]], tl.float32)
        for dim in tl.range(sum_start, min(config.size, sum_start + SUMMED_EMBEDDING), config.block):
            inside = dim + dims < config.size
            exists = left_exists[:, None] & inside[None, :]
            left = tl.load(left_rows[:, None] + (dim + dims)[None, :], mask=exists, other=0.0)
            exists = inside[:, None]
            if right_exists is not None:
                exists = right_exists[None, :] & exists
            right = tl.load(right_rows[None, :] + (dim + dims)[:, None], mask=exists, other=0.0)
            products = tl.dot(left, right, products, input_precision=config.precision)
        similarities += products
    return similarities


@triton.jit
def with_maxima(similarities, tokens, best, key, WITH_ARGMAX: tl.constexpr):
    """Best similarities [rows], and the first tokens that attain them, with those of a tile [rows, tokens]."""
    tile_best = max_along(similarities, 1)
    if WITH_ARGMAX:
        won = (similarities == tile_best[:, None]) | (similarities != similarities)
        tile_key = tl.min(tl.where(won, tokens[None, :], NO_ARGMAX), axis=1)
        # A later tile must be strictly better, or the first NaN.
        later = (tile_best > best) | ((tile_best != tile_best) & (best == best))
        key = tl.where(later, tile_key, key)
    return larger(best, tile_best), key


@triton.jit
def argmax_of(key, best):
    """The winning token, -1 where no gradient flows because the best similarity is -inf."""
    return tl.where((key == NO_ARGMAX) | (best == float("-inf")), -1, key)


@triton.jit
def with_masked_zeros(best, argmax, first_masked, document_length):
    """Best similarities and argmax after the masked tokens, from `first_masked` on, have taken part with a 0."""
    zero_wins = (best < 0.0) | ((best == 0.0) & (first_masked < argmax))
    zero_wins = zero_wins & (first_masked < document_length)
    return tl.where(zero_wins, 0.0, best), tl.where(zero_wins, -1, argmax)


@triton.jit
def document_range(
    documents_ptr, cu_seqlens_ptr, offsets_ptr, group, document, document_length, strides, OFFSET_UNIT: tl.constexpr
):
    """Address of a document's first token, and its number of tokens, by the strides of groups, documents and tokens.

    Packed documents follow each other or, with an OFFSET_UNIT, begin so many elements times their offset further on.
    """
    stride_group, stride_document, stride_token = strides
    if cu_seqlens_ptr is not None:
        start = tl.load(cu_seqlens_ptr + document).to(tl.int64)
        length = (tl.load(cu_seqlens_ptr + document + 1).to(tl.int64) - start).to(tl.int32)
        offset = start * stride_token
        if OFFSET_UNIT > 0:
            offset = tl.load(offsets_ptr + document) * OFFSET_UNIT
        return documents_ptr + offset, length
    offset = tl.cast(group, tl.int64) * stride_group + tl.cast(document, tl.int64) * stride_document
    return documents_ptr + offset, document_length


# Sums that are loaded at once, and scores of a program.
_AT_ONCE, _SCORES = 8, 128


@kernel
def _sums_kernel(sums_ptr, scores_ptr, n_sums, n_columns, AT_ONCE: tl.constexpr, SCORES: tl.constexpr):
    """Scores [rows, n_columns] from sums [rows, n_sums, n_columns].

    They are added in an order that is the same for any number of scores, which torch's depends on. Grid: blocks of
    columns x rows.
    """
    blocks = tl.cdiv(n_columns, SCORES)
    row = tl.program_id(0).to(tl.int64) // blocks
    column = (tl.program_id(0) % blocks).to(tl.int64) * SCORES + tl.arange(0, SCORES)
    total = tl.zeros((SCORES,), tl.float32)
    for start in tl.range(0, n_sums, AT_ONCE):
        part = tl.zeros((SCORES,), tl.float32)
        for number in tl.static_range(AT_ONCE):
            at = (row * n_sums + start + number) * n_columns + column
            part += tl.load(sums_ptr + at, mask=(column < n_columns) & (start + number < n_sums), other=0.0)
        total += part
    tl.store(scores_ptr + row * n_columns + column, total, mask=column < n_columns)


def add_sums(problem: Problem, plan: ForwardPlan, sums: Tensor) -> Tensor:
    """The scores, from the sums that a kernel has left of each."""
    scores = torch.empty(*problem.scores_shape, dtype=torch.float32, device=sums.device)
    # The stacked ones leave [queries, n_sums, n_documents], the single one its sums first of all.
    n_columns = scores.numel() if plan.kernel == "single" else problem.n_documents
    programs = scores.numel() // n_columns * -(-n_columns // _SCORES)
    numbers = plan.n_sums, n_columns
    _sums_kernel((programs, 1, 1), (sums, scores), numbers, (), (_AT_ONCE, _SCORES), (4, 1, None))
    return scores
