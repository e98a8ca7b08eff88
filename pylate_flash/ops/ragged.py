"""MaxSim of lists: every document a tensor of its own, of its own length, as encoders return them.

`maxsim_ragged` is `maxsim_varlen` of the same sequences, packed, which is its definition. Where no gradient is needed,
the kernels read each document where it lies: they get a table of addresses, in one small copy, in place of a copy of
all tokens. What a list costs then is the host's time to ask every tensor for its address, length and type.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from ..kernels.select import IMPLEMENTATIONS, choose
from .checks import check_boundaries, check_choice, check_same, check_tensor
from .compute import compute
from .maxsim import autocast, checked, is_plain, needs_gradient, scores_of
from .packing import longest
from .problem import Options, Places, Tensors

_PLAIN_TYPES = {Tensor, torch.nn.Parameter}


class _Sequences(NamedTuple):
    """A list of tensors [L_i, size], contiguous, of one dtype and device, and their lengths [N], int64."""

    tensors: Sequence[Tensor]
    lengths: np.ndarray
    size: int

    @property
    def n_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def longest(self) -> int:
        return int(self.lengths.max())

    @property
    def bounds(self) -> np.ndarray:
        """Boundaries [N + 1] of the sequences, one after the other, int64."""
        return np.concatenate([[0], np.cumsum(self.lengths)])


def maxsim_ragged(
    queries: Tensor | Sequence[Tensor | np.ndarray],
    documents: Sequence[Tensor | np.ndarray],
    *,
    queries_mask: Tensor | None = None,
    candidates_cu_seqlens: Tensor | None = None,
    normalize: bool = False,
    reduction: str = "sum",
    empty_score: float = 0.0,
    implementation: str = "auto",
) -> Tensor:
    """MaxSim scores of lists of token embeddings, differentiable: `maxsim_varlen` without packing them first.

    Parameters
    ----------
    queries
        A list of tensors or numpy arrays [L_i, d], with one dtype and device, float16, bfloat16, float32 or float64;
        L_i may be 0. Or padded, [Nq, Lq, d]. Under autocast, the inputs take the autocast type.
    documents
        A list of tensors or arrays [L_j, d], of the same dtype. On the device of the queries, where kernels read them
        as they lie if neither a gradient nor `normalize` is asked for; else they are packed. Or on the CPU: they go to
        a GPU in one copy.
    queries_mask
        [Nq, Lq] of padded queries, which may hold weights, as in `maxsim`. None: all tokens are active.
    candidates_cu_seqlens, normalize, reduction, empty_score, implementation
        As in `maxsim_varlen`.

    Returns
    -------
    Tensor
        float32, on the queries' device: [Nq, Nd], or [Nd] with candidates. Precision, NaN, infinities, ties and
        gradients as in `maxsim`.

    Raises
    ------
    TypeError
        If an argument is no list of tensors or arrays, or their dtypes differ.
    ValueError
        If a list is empty, shapes, devices or embedding sizes do not fit together, boundaries do not span the
        documents, or an option is none of its choices.
    RuntimeError
        As in `maxsim`.

    Examples
    --------
    >>> import torch
    >>> documents = [torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[0.0, -1.0]])]
    >>> maxsim_ragged([torch.eye(2)], documents)
    tensor([[ 1.5000, -1.0000]])
    """
    options = Options(0, 0, 0, bool(normalize), reduction, "exclude", empty_score, implementation)
    return _scores("maxsim_ragged", queries, documents, queries_mask, candidates_cu_seqlens, options)


def maxsim_ragged_pairwise(
    queries: Tensor | Sequence[Tensor | np.ndarray],
    documents: Sequence[Tensor | np.ndarray],
    *,
    queries_mask: Tensor | None = None,
    normalize: bool = False,
    reduction: str = "sum",
    empty_score: float = 0.0,
    implementation: str = "auto",
) -> Tensor:
    """MaxSim score of every query of a list with the document of the same index, differentiable.

    Parameters
    ----------
    queries, documents
        N of each, as in `maxsim_ragged`.
    queries_mask, normalize, reduction, empty_score, implementation
        As in `maxsim_ragged`.

    Returns
    -------
    Tensor
        float32, [N], on the queries' device.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `maxsim_ragged`; ValueError also if there are not as many documents as queries.

    Examples
    --------
    >>> import torch
    >>> values = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])]
    >>> maxsim_ragged_pairwise(values, values)
    tensor([6., 9.])
    """
    _check_list("documents", documents)
    if not isinstance(queries, Tensor):
        _check_list("queries", queries)
    if len(queries) != len(documents):
        raise ValueError(f"documents must have one document per query, {len(queries)}, got {len(documents)} documents")
    candidates = torch.arange(len(documents) + 1, dtype=torch.int32)
    options = Options(0, 0, 0, bool(normalize), reduction, "exclude", empty_score, implementation)
    return _scores("maxsim_ragged_pairwise", queries, documents, queries_mask, candidates, options)


def _scores(
    operation: str,
    queries: Tensor | Sequence[Tensor | np.ndarray],
    documents: Sequence[Tensor | np.ndarray],
    queries_mask: Tensor | None,
    candidates: Tensor | None,
    options: Options,
) -> Tensor:
    check_choice("implementation", options.implementation, IMPLEMENTATIONS)
    found = _sequences("documents", documents)
    queries_cu_seqlens = None
    if isinstance(queries, Tensor):
        check_tensor("queries", queries, {3: "[Nq, Lq, d]"})
    elif queries_mask is not None:
        raise ValueError("queries_mask must be None where queries are a list, which has no padding to mask")
    else:
        of_queries = _sequences("queries", queries)
        queries = torch.cat(list(of_queries.tensors))
        queries_cu_seqlens = _boundaries(of_queries.bounds, queries.device)
        options = options._replace(max_query_length=of_queries.longest)
    if candidates is not None:
        check_boundaries("candidates_cu_seqlens", candidates)
        most = longest("candidates_cu_seqlens", candidates, len(found.tensors), "documents", None)
        options = options._replace(max_candidates=most)
    options = options._replace(max_document_length=found.longest)
    tensors = Tensors(queries, found.tensors[0], queries_mask, None, queries_cu_seqlens, None, candidates)
    if _read_where_they_lie(queries, found, options):
        return _scores_in_place(operation, tensors, found, options)
    values = _concatenated(found, queries.device)
    bounds = _boundaries(found.bounds, values.device)
    return scores_of(operation, tensors._replace(documents=values, documents_cu_seqlens=bounds), options)


def _read_where_they_lie(queries: Tensor, documents: _Sequences, options: Options) -> bool:
    """Whether kernels can take the documents as they are."""
    first = documents.tensors[0]
    return (
        not options.normalize  # the norms of all tokens are computed of packed ones
        and first.device == queries.device
        and choose(options.implementation, queries.device, queries.dtype, queries.shape[-1]) == "triton"
        and is_plain(queries, first)
        and _PLAIN_TYPES.issuperset(map(type, documents.tensors))
        and autocast(queries)[0] is queries
        and not needs_gradient(queries, *documents.tensors)
    )


def _scores_in_place(operation: str, tensors: Tensors, documents: _Sequences, options: Options) -> Tensor:
    """Scores by kernels that get the documents' addresses, and their boundaries as if they were packed."""
    queries, first = tensors[:2]
    check_same(queries, first)
    item, n = first.element_size(), len(documents.tensors)
    # Memory of this call's own to count from: it begins at a multiple of 16 bytes, and where is all that matters of it.
    origin = first.new_empty(1, documents.size)
    table = torch.empty(2 * n + 1, dtype=torch.int64, pin_memory=queries.is_cuda)
    entries = table.numpy()
    offsets = entries[:n]
    offsets[:] = np.fromiter(map(Tensor.data_ptr, documents.tensors), dtype=np.int64, count=n)
    # A document without tokens need not lie anywhere.
    offsets[documents.lengths == 0] = origin.data_ptr()
    offsets -= origin.data_ptr()
    unit = 16 // item if not np.bitwise_or.reduce(offsets) & 15 else 1
    offsets //= unit * item
    entries[n:] = documents.bounds
    if queries.is_cuda:
        table = table.to(queries.device, non_blocking=True)
    tensors = checked(operation, tensors._replace(documents=origin, documents_cu_seqlens=table[n:]), options)
    return compute(tensors, options, False, Places(table[:n], unit, documents.n_tokens))[0]


def _sequences(name: str, values: Sequence[Tensor | np.ndarray]) -> _Sequences:
    """The tensors of a list, and their lengths, after a check of each."""
    _check_list(name, values)
    if _PLAIN_TYPES.issuperset(map(type, values)):
        found = _alike(cast("Sequence[Tensor]", values))
        if found is not None:
            return found
    tensors = [_tensor(f"{name}[{index}]", value) for index, value in enumerate(values)]
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        if tensor.shape[1] != first.shape[1]:
            raise ValueError(
                f"{name} must have one embedding size, got {tensor.shape[1]} at {index} and {first.shape[1]} at 0"
            )
        if tensor.dtype != first.dtype:
            raise TypeError(f"{name} must have one dtype, got {tensor.dtype} at {index} and {first.dtype} at 0")
        if tensor.device != first.device:
            raise ValueError(f"{name} must lie on one device, got {tensor.device} at {index} and {first.device} at 0")
    lengths = np.array([tensor.shape[0] for tensor in tensors], dtype=np.int64)
    return _Sequences([tensor.contiguous() for tensor in tensors], lengths, first.shape[1])


def _alike(tensors: Sequence[Tensor]) -> _Sequences | None:
    """Tensors that need no further look, as all of them are contiguous rows of one size, dtype and device; else None.

    Ten thousand tensors answer a question in half a millisecond to one; of their shapes, in more than two. The strides
    (size, 1) of what is contiguous tell the shape as well, but for windows of a single row that overlap.
    """
    strides = set(map(Tensor.stride, tensors))
    size = tensors[0].shape[-1] if tensors[0].dim() == 2 else 0
    if (
        size == 0
        or strides != {(size, 1)}
        or not all(map(Tensor.is_contiguous, tensors))
        or len(set(map(attrgetter("dtype"), tensors))) > 1
        or len(set(map(Tensor.get_device, tensors))) > 1
    ):
        return None
    elements = np.fromiter(map(Tensor.numel, tensors), dtype=np.int64, count=len(tensors))
    return None if (elements % size).any() else _Sequences(tensors, elements // size, size)


def _tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor | np.ndarray):
        raise TypeError(f"{name} must be a torch.Tensor or a numpy.ndarray, got {type(value).__name__}")
    tensor = torch.as_tensor(value)
    if tensor.dim() != 2:
        raise ValueError(f"{name} must have shape [L, d], got {list(tensor.shape)}")
    return tensor


def _check_list(name: str, values: object) -> None:
    """Raise unless these may be a list of sequences."""
    if isinstance(values, str | Tensor) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a list of tensors or arrays [L_i, d], got {type(values).__name__}")
    if len(values) == 0:
        raise ValueError(f"{name} must hold at least one sequence, got none")


def _concatenated(documents: _Sequences, device: torch.device) -> Tensor:
    """All tokens [T, d]; from the CPU to a GPU in one copy, out of pinned memory if there is no gradient to record."""
    tensors = list(documents.tensors)
    first = tensors[0]
    if first.device.type != "cpu" or device.type != "cuda":
        return torch.cat(tensors)
    if needs_gradient(*tensors):
        return torch.cat(tensors).to(device)
    staged = torch.empty(documents.n_tokens, documents.size, dtype=first.dtype, pin_memory=True)
    return torch.cat(tensors, out=staged).to(device, non_blocking=True)


def _boundaries(bounds: np.ndarray, device: torch.device) -> Tensor:
    dtype = np.int32 if bounds[-1] < 2**31 else np.int64
    return torch.from_numpy(bounds.astype(dtype)).to(device, non_blocking=True)
