"""Sequences packed into one tensor [T, d], with boundaries cu_seqlens [N + 1].

Sequence i is rows cu_seqlens[i] to cu_seqlens[i + 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ..problem import Problem, Tensors
from .checks import LARGEST, check_boundaries, check_integer, check_list, check_tensor, is_readable, tensors_of


def pack(sequences: Sequence[Tensor | np.ndarray]) -> tuple[Tensor, Tensor]:
    """Concatenate sequences of token embeddings.

    Parameters
    ----------
    sequences
        Tensors or arrays [L_i, d], with the same d, dtype and device; L_i may be 0. At least one.

    Returns
    -------
    tuple of Tensor
        The tokens [T, d], differentiable, and cu_seqlens [N + 1], int32 (int64 if T requires it), on the same device.

    Raises
    ------
    TypeError
        If `sequences` is not a list, an item is neither a tensor nor an array, or dtypes differ.
    ValueError
        If the list is empty, torch cannot wrap an array without a copy, a sequence is not of shape [L_i, d], or devices
        differ.

    Examples
    --------
    >>> values, cu_seqlens = pack([torch.ones(2, 4), torch.ones(0, 4), torch.ones(1, 4)])
    >>> values.shape, cu_seqlens
    (torch.Size([3, 4]), tensor([0, 2, 2, 3], dtype=torch.int32))
    """
    return packed("sequences", sequences)


def packed(name: str, sequences: Sequence[Tensor | np.ndarray]) -> tuple[Tensor, Tensor]:
    """`pack` of the argument `name`; under a compiler, lengths may be symbolic, and boundaries are int64."""
    check_list(name, sequences)
    tensors = tensors_of(name, sequences)
    values = torch.cat(tensors)
    bounds = [0, *accumulate(map(len, tensors))]
    dtype = torch.int64 if torch.compiler.is_compiling() or bounds[-1] >= 2**31 else torch.int32
    return values, torch.tensor(bounds, dtype=dtype, device="cpu").to(values.device, non_blocking=True)


def unpack(values: Tensor, cu_seqlens: Tensor) -> list[Tensor]:
    """Split packed values into their sequences; the inverse of `pack`.

    Parameters
    ----------
    values
        [T, ...]: tokens, or any other per-token values.
    cu_seqlens
        [N + 1], int32 or int64, non-decreasing, from 0 to T. On a GPU, the call synchronizes.

    Returns
    -------
    list of Tensor
        N views [L_i, ...] of `values`, differentiable.

    Raises
    ------
    TypeError
        If an argument is not a dense tensor, or `cu_seqlens` is neither int32 nor int64.
    ValueError
        If `cu_seqlens` does not rise from 0 to T.

    Examples
    --------
    >>> values, cu_seqlens = pack([torch.ones(2, 1), torch.zeros(1, 1)])
    >>> [sequence.tolist() for sequence in unpack(values, cu_seqlens)]
    [[[1.0], [1.0]], [[0.0]]]
    """
    check_tensor("values", values)
    if values.dim() == 0:
        raise ValueError("values must have shape [T, ...], got []")
    check_boundaries("cu_seqlens", cu_seqlens, values)
    bounds = host_bounds("cu_seqlens", cu_seqlens, values.shape[0], "values")
    return list(values.split(np.diff(bounds).tolist()))


def padded(values: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Packed tokens [T, d] padded to [N, longest, d], and their mask; differentiable, for reference definitions."""
    cu_seqlens = cu_seqlens.to(values.device)
    lengths = cu_seqlens.diff().unsqueeze(1)
    positions = torch.arange(max([0, *lengths.flatten().tolist()]), device=values.device)
    tokens = (cu_seqlens[:-1].unsqueeze(1) + positions).clamp(max=len(values) - 1)
    return values[tokens], positions < lengths


def host_bounds(name: str, cu_seqlens: Tensor, total: int, kind: str, limit: int | None = None) -> np.ndarray:
    """The checked boundaries on the host, int64; no sequence of `kind` is longer than `limit`."""
    return _host_bounds(name, cu_seqlens, total, kind, limit)[0]


def _host_bounds(name: str, cu_seqlens: Tensor, total: int, kind: str, limit: int | None) -> tuple[np.ndarray, int]:
    """`host_bounds`, and the length of the longest sequence."""
    bounds = cu_seqlens.cpu().numpy().astype(np.int64)
    # Takes a fifth of the time of `numpy.diff`.
    lengths = bounds[1:] - bounds[:-1]
    falling = lengths.min(initial=0) < 0
    if falling or bounds[0] != 0 or bounds[-1] != total:
        counted = f"{_SEQUENCES[kind][0]} of {kind}" if name.startswith(kind) else kind
        raise ValueError(
            f"{name} must rise from 0 to the number of {counted}, {total}, got {bounds[0]} to {bounds[-1]}"
            + (", falling in between" if falling else "")
        )
    longest = int(lengths.max(initial=0))
    if limit is not None and longest > limit:
        raise ValueError(f"{name} has a sequence of length {longest}, more than {_SEQUENCES[kind][1]} = {limit}")
    return bounds, longest


# Per kind of sequences: the name of their elements, and the option with their maximum length.
_SEQUENCES = {
    "queries": ("tokens", "max_query_length"),
    "documents": ("tokens", "max_document_length"),
    "x": ("points", "max_x_length"),
    "y": ("points", "max_y_length"),
}


def longest(name: str, cu_seqlens: Tensor, total: int, kind: str, bound: int | None) -> int:
    """An upper bound on the sequence lengths: `bound`, or the maximum if None. Values on the CPU are checked."""
    if bound is not None and (type(bound) is not int or not 0 <= bound <= LARGEST):
        check_integer(_SEQUENCES[kind][1], bound)
    if is_readable(cu_seqlens):
        _, length = _host_bounds(name, cu_seqlens, total, kind, bound)
        return length if bound is None else min(bound, total)
    if bound is not None:
        return bound
    # A single sequence has all tokens. On the meta device, any bound will do.
    if cu_seqlens.shape[0] <= 2 or cu_seqlens.is_meta:
        return total
    # A symbolic integer under a compiler.
    return cu_seqlens.diff().max().item()  # type: ignore[return-value]


def host_bounds_of(problem: Problem, tensors: Tensors) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Checked host boundaries of a packed call's queries, documents and candidates; synchronizes with a GPU."""
    *_, queries, documents, candidates = tensors
    assert documents is not None
    length, n_documents = problem.query_length, problem.n_documents
    return (
        np.arange(problem.n_queries + 1) * length
        if queries is None
        else host_bounds("queries_cu_seqlens", queries, len(tensors.queries), "queries", length),
        host_bounds("documents_cu_seqlens", documents, problem.n_tokens, "documents", problem.document_length),
        None if candidates is None else host_bounds("candidates_cu_seqlens", candidates, n_documents, "documents"),
    )
