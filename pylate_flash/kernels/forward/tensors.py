"""What the forward's kernels read, and what they leave besides sums."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..launch import Region


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
    winners: Tensor | None = None
    # The best similarities of every piece [pieces, rows], and their winners.
    pieces: Tensor | None = None
    piece_winners: Tensor | None = None
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
