"""Shared code of the forward kernels: the tensors that they read and write, and device functions."""

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
# Initial argmax, before any token attains the maximum; larger than any token.
NO_ARGMAX = tl.constexpr(2**31 - 1)


class ForwardTensors(NamedTuple):
    """The tensors of a launch, on the device of the problem; None where the problem has none."""

    # Padded queries [Nq, Lq, d] with the problem's strides, padded or packed documents, and the mask of the queries.
    queries: Tensor
    documents: Tensor
    queries_mask: Tensor | None = None
    # Active tokens of masked documents; per document their count and the first masked position (`kernels.rows`).
    active: Tensor | None = None
    bounds: Tensor | Region | None = None
    # Inverse norms of embeddings to be normalised, or scales of 8-bit values.
    queries_scale: Tensor | None = None
    documents_scale: Tensor | None = None
    cu_seqlens: Tensor | None = None
    # Starts of packed documents that are not contiguous (`problem.DocumentOffsets`).
    offsets: Tensor | None = None
    # Boundaries of the packed documents of each query, or document indices [Nq, K].
    candidates: Tensor | None = None
    argmax: Tensor | None = None
    # Row maxima of every segment [segments, rows], and their argmax.
    segments: Tensor | None = None
    segment_argmax: Tensor | None = None
    # Output of quantized query rows, [Nq, Lq, d], whose scales go to `queries_scale`; offsets of affine documents.
    values: Tensor | None = None
    documents_offset: Tensor | None = None
    # The centroid index of every token, centroids and bucket weights, if `documents` are residuals.
    codes: Tensor | None = None
    centroids: Tensor | None = None
    bucket_weights: Tensor | None = None
    # Smooth maxima: the factor of similarities, and the output of log-sum-exps [documents, rows], if requested.
    beta: Tensor | None = None
    lse: Tensor | None = None
    # Positions of the query tokens chosen for each document, [Nq, K or Nd, k].
    query_tokens: Tensor | None = None
    # Products of query tokens and centroids, and bucket weights as bytes (`forward.short`).
    table: Tensor | None = None
    luts: Tensor | None = None


def numbers_of(problem: Problem, plan: ForwardPlan) -> tuple[float, ...]:
    """The scalar arguments of a kernel that stacks the tokens of all queries as one tall matrix."""
    return (
        problem.n_queries // problem.groups, problem.query_length, plan.padded, problem.n_documents,
        problem.document_length, plan.n_runs, plan.run, problem.empty_score,
    )  # fmt: skip


@triton.jit
def load_padded(pointers, inside, PADDED: tl.constexpr):
    """Load from the pointers; if PADDED, elements outside `inside` are 0."""
    return tl.load(pointers, mask=inside, other=0.0) if PADDED else tl.load(pointers)


@triton.jit
def split_products(left_rows, right_rows, left_exists, right_exists, config: tl.constexpr):
    """Products [left, right] of embeddings, read block by block from the start addresses of their rows."""
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
    """Update the row maxima [rows], and the first tokens that attain them, with a tile [rows, tokens]."""
    tile_best = max_along(similarities, 1)
    if WITH_ARGMAX:
        attains = (similarities == tile_best[:, None]) | (similarities != similarities)
        tile_key = tl.min(tl.where(attains, tokens[None, :], NO_ARGMAX), axis=1)
        # A later tile must be strictly better, or the first NaN.
        replaces = (tile_best > best) | ((tile_best != tile_best) & (best == best))
        key = tl.where(replaces, tile_key, key)
    return larger(best, tile_best), key


@triton.jit
def argmax_of(key, best):
    """The token of the maximum; -1 where no gradient flows because the maximum is -inf."""
    return tl.where((key == NO_ARGMAX) | (best == float("-inf")), -1, key)


@triton.jit
def with_masked_zeros(best, argmax, first_masked, document_length):
    """Row maxima and argmax after adding a 0 for the masked tokens, of which `first_masked` is the first."""
    zero_wins = (best < 0.0) | ((best == 0.0) & (first_masked < argmax))
    zero_wins = zero_wins & (first_masked < document_length)
    return tl.where(zero_wins, 0.0, best), tl.where(zero_wins, -1, argmax)


@triton.jit
def document_range(
    documents_ptr, cu_seqlens_ptr, offsets_ptr, group, document, document_length, strides, OFFSET_UNIT: tl.constexpr
):
    """Address of a document's first token, and its length, from the strides of groups, documents and tokens.

    Packed documents are contiguous or, if OFFSET_UNIT > 0, begin OFFSET_UNIT times their offset elements further on.
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


# Sums loaded at once, and scores per program.
_AT_ONCE, _SCORES = 8, 128


@kernel
def _sums_kernel(sums_ptr, scores_ptr, n_sums, n_columns, AT_ONCE: tl.constexpr, SCORES: tl.constexpr):
    """Add up sums [rows, n_sums, n_columns] to scores [rows, n_columns].

    The order of additions is the same for any number of scores; that of `torch.sum` depends on it. Grid: blocks of
    columns x rows.
    """
    blocks = tl.cdiv(n_columns, SCORES)
    row = tl.program_id(0).to(tl.int64) // blocks
    column = (tl.program_id(0) % blocks).to(tl.int64) * SCORES + tl.arange(0, SCORES)
    total = tl.zeros((SCORES,), tl.float32)
    for start in tl.range(0, n_sums, AT_ONCE):
        part = tl.zeros((SCORES,), tl.float32)
        for index in tl.static_range(AT_ONCE):
            offsets = (row * n_sums + start + index) * n_columns + column
            part += tl.load(sums_ptr + offsets, mask=(column < n_columns) & (start + index < n_sums), other=0.0)
        total += part
    tl.store(scores_ptr + row * n_columns + column, total, mask=column < n_columns)


def add_sums(problem: Problem, plan: ForwardPlan, sums: Tensor) -> Tensor:
    """Add up the partial sums of a kernel to scores."""
    scores = torch.empty(*problem.scores_shape, dtype=torch.float32, device=sums.device)
    # The stacked kernels write [queries, n_sums, n_documents]; the single kernel has the sums as its first dimension.
    n_columns = scores.numel() if plan.kernel == "single" else problem.n_documents
    programs = scores.numel() // n_columns * -(-n_columns // _SCORES)
    numbers = plan.n_sums, n_columns
    _sums_kernel((programs, 1, 1), (sums, scores), numbers, (), (_AT_ONCE, _SCORES), (4, 1, None))
    return scores
