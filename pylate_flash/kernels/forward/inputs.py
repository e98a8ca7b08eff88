"""What the forward's kernels read, and the scratch that pieces of documents leave their best similarities in."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..launch import Region


class Inputs(NamedTuple):
    """Tensors on the device of the problem; None where the problem has none."""

    # Padded [Nq, Lq, d] by the problem's strides, padded or packed documents, and what is active of the queries.
    queries: Tensor
    documents: Tensor
    queries_mask: Tensor | None
    # The active tokens of masked documents, and their numbers (`kernels.rows`).
    active: Tensor | None
    bounds: Tensor | Region | None
    # One over the norms of embeddings that are to be normalised.
    queries_scale: Tensor | None
    documents_scale: Tensor | None
    cu_seqlens: Tensor | None
    # Where packed documents begin that do not follow each other (`problem.Places`).
    offsets: Tensor | None
    candidates: Tensor | None
    # The best similarities of every piece [pieces, rows], and their winners.
    pieces: Tensor | None
    piece_winners: Tensor | None
