"""What the kernels of the gradients of soft MaxSim read."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..launch import Region


class Inputs(NamedTuple):
    """The tensors that the kernels read, in their order, and what the host knows of them."""

    queries: Tensor
    documents: Tensor
    queries_mask: Tensor | None
    # The active tokens of masked documents, and their numbers (`kernels.masks`).
    active: Tensor | None
    bounds: Region | None
    # One over the norms of embeddings that are to be normalised.
    queries_scale: Tensor | None
    documents_scale: Tensor | None
    cu_seqlens: Tensor | None
    candidates: Tensor | None
    beta: Tensor
    # log(sum(exp(beta * similarity))) [documents, rows].
    lse: Tensor
    grad_scores: Tensor
    # From one query's score to the next one's, and from one document's.
    grad_strides: tuple[int, ...]

    @property
    def tensors(self) -> tuple[Tensor | Region | None, ...]:
        return self[:12]
