"""What the kernels of the gradients of soft MaxSim read."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..launch import Region


class Inputs(NamedTuple):
    """The tensors in the kernels' order, and what the host knows of them."""

    # Queries, documents, the mask of queries, the active tokens of masked documents and their numbers
    # (`kernels.masks`), one over the norms of both, boundaries of packed documents and of candidates, beta, lse
    # [documents, rows] and the gradient of the scores.
    tensors: tuple[Tensor | Region | None, ...]
    # From one query's score to the next one's, and from one document's.
    grad_strides: tuple[int, ...]
