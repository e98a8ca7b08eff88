"""What the kernels of the gradients of soft MaxSim read."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..launch import Region


class SoftTensors(NamedTuple):
    """The tensors that the kernels read, in their order."""

    # [Nq, Lq, d], rows at equal distances, zeros where a token is masked.
    queries: Tensor
    documents: Tensor
    # The active tokens of masked documents, and their numbers (`kernels.rows`).
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
    # What the gradient of a row's smooth maximum is multiplied by, [documents, rows], 0 where a token is masked.
    grad_rows: Tensor
