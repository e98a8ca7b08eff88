"""A list of sequences, as an operation takes it: every tensor is looked at once, and beside the kernels in C.

Of ten thousand tensors, one question to each takes half a millisecond to one, and a statement of Python more, while the
kernel that scores them takes a fifth of one. So where there are kernels, all that has to be known of every tensor is
asked at once, by a function of our own (`kernels.described`).
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
    # Those that tell what types there are, and whether one needs a gradient: of tensors that are alike, the first.
    examples: Sequence[Tensor]
    # int64: lengths [N], and boundaries [N + 1] of the sequences one after the other.
    lengths: np.ndarray
    bounds: np.ndarray
    shortest: int
    longest: int
    # Where they begin [N], int64, if that was asked along with the rest.
    known_addresses: np.ndarray | None

    @property
    def size(self) -> int:
        return self.tensors[0].shape[1]

    @property
    def addresses(self) -> np.ndarray:
        """Where they begin [N], int64."""
        if self.known_addresses is not None:
            return self.known_addresses
        return np.fromiter(map(Tensor.data_ptr, self.tensors), dtype=np.int64, count=len(self.tensors))


def _sequences(tensors: Sequence[Tensor], examples: Sequence[Tensor], lengths: np.ndarray) -> Sequences:
    bounds = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return Sequences(tensors, examples, lengths, bounds, int(lengths.min()), int(lengths.max()), None)


def sequences_of(name: str, values: Sequence[Tensor | np.ndarray] | Sequences) -> Sequences:
    """The tensors of a list, and their lengths, after a check of each, unless that was made before."""
    if isinstance(values, Sequences):
        return values
    check_list(name, values)
    try:
        found = _alike(values)
    except RuntimeError:
        # A sparse or nested tensor has no strides, or no shape, to compare.
        found = None
    if found is None:
        tensors = [tensor.contiguous() for tensor in tensors_of(name, values)]
        found = _sequences(tensors, tensors, np.array([len(tensor) for tensor in tensors], dtype=np.int64))
    # All others are like it.
    check_embeddings(name, found.tensors[0], {2: "[L, d]"})
    return found


def _alike(values: Sequence[object]) -> Sequences | None:
    """Tensors that need no further look, as all of them are contiguous rows like the first's; else None."""
    first = values[0]
    if type(first) not in PLAIN_TYPES or torch.compiler.is_compiling():
        return None
    first = cast("Tensor", first)
    if first.dim() != 2 or first.shape[1] == 0:
        return None
    tensors = cast("Sequence[Tensor]", values)
    if kernels_run_on(first.device, first.dtype) is None and describer() is not None:
        found = kernels().look(values)
        if found is None:
            return None
        lengths, addresses, bounds, shortest, longest = found
        return Sequences(tensors, tensors[:1], lengths, bounds, shortest, longest, addresses)
    if not all(is_like(first, value) for value in values):
        return None
    elements = np.fromiter(map(Tensor.numel, tensors), dtype=np.int64, count=len(tensors))
    return _sequences(tensors, tensors[:1], elements // first.shape[1])


def is_like(first: Tensor, other: object) -> bool:
    """Whether this is a tensor of the type, dtype, device and embedding size d of `first` [L, d], in contiguous rows.

    Contiguous rows have strides (d, 1), and as all are d long, nothing else does. It needs a gradient if `first` does.
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
