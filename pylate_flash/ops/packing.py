"""Sequences packed one after the other in [T, d], and cu_seqlens [N + 1], which tells where each begins.

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
    """Lay sequences of token embeddings one after the other.

    Parameters
    ----------
    sequences
        Tensors or arrays [L_i, d], with one d, dtype and device; L_i may be 0. At least one.

    Returns
    -------
    tuple of Tensor
        The tokens [T, d], through which gradients flow, and cu_seqlens [N + 1], int32 (int64 where T needs it), on the
        same device.

    Raises
    ------
    TypeError
        If this is no list, an item is neither a tensor nor an array, or there is more than one dtype.
    ValueError
        If there are none, torch cannot take an array as it lies, a sequence is not of shape [L_i, d], or they lie on
        several devices.

    Examples
    --------
    >>> values, cu_seqlens = pack([torch.ones(2, 4), torch.ones(0, 4), torch.ones(1, 4)])
    >>> values.shape, cu_seqlens
    (torch.Size([3, 4]), tensor([0, 2, 2, 3], dtype=torch.int32))
    """
    return packed("sequences", sequences)


def packed(name: str, sequences: Sequence[Tensor | np.ndarray]) -> tuple[Tensor, Tensor]:
    """`pack` of a list by its name; under a compiler, lengths may be symbols, and boundaries are int64."""
    check_list(name, sequences)
    tensors = tensors_of(name, sequences)
    values = torch.cat(tensors)
    bounds = [0, *accumulate(map(len, tensors))]
    dtype = torch.int64 if torch.compiler.is_compiling() or bounds[-1] >= 2**31 else torch.int32
    return values, torch.tensor(bounds, dtype=dtype, device="cpu").to(values.device, non_blocking=True)


def unpack(values: Tensor, cu_seqlens: Tensor) -> list[Tensor]:
    """The sequences that `pack` laid one after the other.

    Parameters
    ----------
    values
        [T, ...]: tokens, or anything else that there is one of per token.
    cu_seqlens
        [N + 1], int32 or int64, not decreasing, from 0 to T. On a GPU, the call waits for it.

    Returns
    -------
    list of Tensor
        N views [L_i, ...] of `values`, through which gradients flow.

    Raises
    ------
    TypeError
        If an argument is no dense tensor, or `cu_seqlens` neither int32 nor int64.
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
    """Packed tokens [T, d] as [N, longest, d], and their mask, for definitions; gradients flow through them."""
    cu_seqlens = cu_seqlens.to(values.device)
    lengths = cu_seqlens.diff().unsqueeze(1)
    positions = torch.arange(max([0, *lengths.flatten().tolist()]), device=values.device)
    tokens = (cu_seqlens[:-1].unsqueeze(1) + positions).clamp(max=len(values) - 1)
    return values[tokens], positions < lengths


def host_bounds(name: str, cu_seqlens: Tensor, total: int, of: str, most: int | None = None) -> np.ndarray:
    """The boundaries on the host, int64, after a check of their values: no sequence of `of` is longer than `most`."""
    return _host_bounds(name, cu_seqlens, total, of, most)[0]


def _host_bounds(name: str, cu_seqlens: Tensor, total: int, of: str, most: int | None) -> tuple[np.ndarray, int]:
    """`host_bounds`, and the length of the longest sequence."""
    bounds = cu_seqlens.cpu().numpy().astype(np.int64)
    # A fifth of the time of `numpy.diff`.
    lengths = bounds[1:] - bounds[:-1]
    falling = lengths.min(initial=0) < 0
    if falling or bounds[0] != 0 or bounds[-1] != total:
        counted = f"{_SEQUENCES[of][0]} of {of}" if name.startswith(of) else of
        raise ValueError(
            f"{name} must rise from 0 to the number of {counted}, {total}, got {bounds[0]} to {bounds[-1]}"
            + (", falling in between" if falling else "")
        )
    longest = int(lengths.max(initial=0))
    if most is not None and longest > most:
        raise ValueError(f"{name} has a sequence of length {longest}, more than {_SEQUENCES[of][1]} = {most}")
    return bounds, longest


# What sequences are made of, and the option that tells the length of the longest.
_SEQUENCES = {
    "queries": ("tokens", "max_query_length"),
    "documents": ("tokens", "max_document_length"),
    "x": ("points", "max_x_length"),
    "y": ("points", "max_y_length"),
}


def longest(name: str, cu_seqlens: Tensor, total: int, of: str, bound: int | None) -> int:
    """Length of the longest sequence, or a bound on it: `bound`, or found out. On the CPU, values are checked."""
    if bound is not None and (type(bound) is not int or not 0 <= bound <= LARGEST):
        check_integer(_SEQUENCES[of][1], bound)
    if is_readable(cu_seqlens):
        _, found = _host_bounds(name, cu_seqlens, total, of, bound)
        return found if bound is None else bound
    if bound is not None:
        return bound
    # A single sequence is all there is. Where nothing can be looked at, any bound will do.
    if cu_seqlens.shape[0] <= 2 or cu_seqlens.is_meta:
        return total
    # Of a compiler that knows no numbers, a symbol.
    return cu_seqlens.diff().max().item()  # type: ignore[return-value]


def host_bounds_of(problem: Problem, tensors: Tensors) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The boundaries of a packed call's queries, documents and candidates on the host, checked; waits for a GPU."""
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
