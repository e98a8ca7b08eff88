"""Lists of sequences as arguments of an operation: each tensor is inspected once, in C where kernels run.

For ten thousand tensors, querying one attribute each takes half a millisecond to one, and a statement of Python takes
longer, while the kernel that scores them takes a fifth of a millisecond. So where kernels run, a C extension
(`kernels.metadata`) collects all that is needed of every tensor in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from ..kernels.tables import kernels_run_on
from .checks import check_embeddings, check_list, tensors_of
from .compute import kernels
from .operator import PLAIN_TYPES, describer


class Sequences(NamedTuple):
    """A list of N tensors [L_i, size], contiguous, of one dtype and device."""

    tensors: Sequence[Tensor]
    # Tensors that represent all dtypes, and whether one requires a gradient: just the first if all are alike.
    examples: Sequence[Tensor]
    # int64: lengths [N], and boundaries [N + 1] of the concatenated sequences.
    lengths: np.ndarray
    bounds: np.ndarray
    shortest: int
    longest: int
    # Addresses [N], int64, if they were collected along with the lengths.
    known_addresses: np.ndarray | None

    @property
    def size(self) -> int:
        return self.tensors[0].shape[1]

    @property
    def addresses(self) -> np.ndarray:
        """Addresses of the tensors [N], int64."""
        if self.known_addresses is not None:
            return self.known_addresses
        return np.fromiter(map(Tensor.data_ptr, self.tensors), dtype=np.int64, count=len(self.tensors))


def _sequences(tensors: Sequence[Tensor], examples: Sequence[Tensor], lengths: np.ndarray) -> Sequences:
    bounds = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return Sequences(tensors, examples, lengths, bounds, int(lengths.min()), int(lengths.max()), None)


def sequences_of(name: str, values: Sequence[Tensor | np.ndarray] | Sequences) -> Sequences:
    """The tensors of a list and their lengths, after a check of each; `Sequences` pass through unchecked."""
    if isinstance(values, Sequences):
        return values
    check_list(name, values)
    try:
        sequences = _alike(values)
    except RuntimeError:
        # A sparse or nested tensor has no strides, or no shape.
        sequences = None
    if sequences is None:
        tensors = [tensor.contiguous() for tensor in tensors_of(name, values)]
        sequences = _sequences(tensors, tensors, np.array([len(tensor) for tensor in tensors], dtype=np.int64))
    # All tensors are like the first.
    check_embeddings(name, sequences.tensors[0], {2: "[L, d]"})
    return sequences


def _alike(values: Sequence[object]) -> Sequences | None:
    """The sequences if all tensors are contiguous rows and alike, so that they need no further checks; else None."""
    if not isinstance(values, list | tuple):
        # Another sequence may create its items when asked for them, and only a reference keeps their memory.
        values = tuple(values)
    first = values[0]
    if type(first) not in PLAIN_TYPES or torch.compiler.is_compiling():
        return None
    first = cast("Tensor", first)
    if first.dim() != 2 or first.shape[1] == 0:
        return None
    tensors = cast("Sequence[Tensor]", values)
    if kernels_run_on(first.device, first.dtype) is None and describer() is not None:
        summary = kernels().list_metadata(values)
        if summary is None:
            return None
        lengths, addresses, bounds, shortest, longest = summary
        return Sequences(tensors, tensors[:1], lengths, bounds, shortest, longest, addresses)
    if not all(is_like(first, value) for value in values):
        return None
    elements = np.fromiter(map(Tensor.numel, tensors), dtype=np.int64, count=len(tensors))
    return _sequences(tensors, tensors[:1], elements // first.shape[1])


def is_like(first: Tensor, other: object) -> bool:
    """Whether `other` has contiguous rows, and the type, dtype, device, embedding size and requires_grad of `first`.

    Rows of size d are contiguous exactly if the strides are (d, 1).
    """
    return (
        type(other) is type(first)
        and isinstance(other, Tensor)
        and other.dtype is first.dtype
        and other.dim() == 2
        and other.shape[1] == first.shape[1]
        and other.stride() == (first.shape[1], 1)
        and other.device == first.device
        and other.requires_grad is first.requires_grad
    )
