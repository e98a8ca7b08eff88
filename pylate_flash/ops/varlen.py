"""MaxSim over packed tokens: no padding of documents is stored, moved or scored.

Packed means that the tokens of all sequences lie one after the other in [T, d], and cu_seqlens [N + 1] tells where each
begins: sequence i is rows cu_seqlens[i] to cu_seqlens[i + 1].

The Triton kernels take packed documents as they are. Queries, which are short, they take padded to the longest, so
winners are [Nd, rows] as in `ops.blocked_varlen`, with a row for every place of a padded query.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .blocked_varlen import blocked_varlen_backward, blocked_varlen_forward
from .checks import (
    check_choice,
    check_differentiation,
    check_embeddings,
    check_same,
    is_readable,
    no_second_derivative,
)
from .dispatch import IMPLEMENTATIONS, choose
from .maxsim import (
    REDUCTIONS,
    _autocast,
    _is_plain,
    _winners_dtype,
    are_halves_of_one_size,
    goes_straight_to_the_kernel,
    kernels,
    needs_gradient,
    product_precision,
    rows_contiguous,
)
from .norms import inverse_norms, scales, through_norms


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
    ValueError
        If there are none, or one is not of shape [L_i, d].
    """
    if len(sequences) == 0:
        raise ValueError("sequences must hold at least one sequence, got none")
    tensors = [torch.as_tensor(sequence) for sequence in sequences]
    size = tensors[0].shape[-1] if tensors[0].dim() else 0
    for index, tensor in enumerate(tensors):
        if tensor.dim() != 2 or tensor.shape[1] != size:
            raise ValueError(
                f"sequences must have shape [L_i, d] with one d, got {list(tensor.shape)} at {index} "
                f"and {list(tensors[0].shape)} at 0"
            )
    lengths = np.fromiter((tensor.shape[0] for tensor in tensors), dtype=np.int64, count=len(tensors))
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    boundaries = torch.from_numpy(bounds.astype(np.int32 if bounds[-1] < 2**31 else np.int64))
    values = torch.cat(tensors)
    return values, boundaries.to(values.device, non_blocking=True)


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
        If an argument is no tensor, or `cu_seqlens` neither int32 nor int64.
    ValueError
        If `cu_seqlens` does not rise from 0 to T.

    Examples
    --------
    >>> import torch
    >>> values, cu_seqlens = pack([torch.ones(2, 1), torch.zeros(1, 1)])
    >>> [sequence.tolist() for sequence in unpack(values, cu_seqlens)]
    [[[1.0], [1.0]], [[0.0]]]
    """
    if not isinstance(values, Tensor):
        raise TypeError(f"values must be a torch.Tensor, got {type(values).__name__}")
    if values.dim() == 0:
        raise ValueError("values must have shape [T, ...], got []")
    _check_boundaries("cu_seqlens", cu_seqlens)
    bounds = _host_bounds("cu_seqlens", cu_seqlens, values.shape[0], "values")
    return list(values.split(np.diff(bounds).tolist()))


def maxsim_varlen_reference(
    queries: Tensor,
    documents: Tensor,
    queries_cu_seqlens: Tensor,
    documents_cu_seqlens: Tensor,
    *,
    candidates_cu_seqlens: Tensor | None = None,
    normalize: bool = False,
    reduction: str = "sum",
    empty_score: float = 0.0,
) -> Tensor:
    """The definition of `maxsim_varlen`: one query and one document at a time.

    As `maxsim_reference`, it checks nothing, and computes in float64 or float32.
    """

    def sequences(values: Tensor, cu_seqlens: Tensor) -> list[Tensor]:
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        if normalize:
            values = F.normalize(values, dim=-1)
        return [values[start:stop] for start, stop in pairwise(cu_seqlens.tolist())]

    def score(query: Tensor, document: Tensor) -> Tensor:
        if len(document) == 0:
            return document.new_tensor(empty_score)
        total = (query @ document.T).max(dim=1).values.sum()
        return total / max(1, len(query)) if reduction == "mean" else total

    split_queries, split_documents = sequences(queries, queries_cu_seqlens), sequences(documents, documents_cu_seqlens)
    if candidates_cu_seqlens is None:
        scores = [score(query, document) for query in split_queries for document in split_documents]
        shape: tuple[int, ...] = (len(split_queries), len(split_documents))
    else:
        owned = zip(split_queries, pairwise(candidates_cu_seqlens.tolist()), strict=True)
        scores = [score(query, document) for query, (first, last) in owned for document in split_documents[first:last]]
        shape = (len(split_documents),)
    return torch.stack(scores).view(shape) if scores else torch.zeros(shape, device=queries.device)


def maxsim_varlen(
    queries: Tensor,
    documents: Tensor,
    queries_cu_seqlens: Tensor,
    documents_cu_seqlens: Tensor,
    *,
    candidates_cu_seqlens: Tensor | None = None,
    max_query_length: int | None = None,
    max_document_length: int | None = None,
    normalize: bool = False,
    reduction: str = "sum",
    empty_score: float = 0.0,
    implementation: str = "auto",
) -> Tensor:
    """MaxSim scores of packed queries against packed documents, differentiable.

    Parameters
    ----------
    queries
        [Tq, d], float16, bfloat16, float32 or float64. Under autocast, the inputs take the autocast type.
    documents
        [Td, d], of the same dtype and on the same device.
    queries_cu_seqlens, documents_cu_seqlens
        [Nq + 1] and [Nd + 1], int32 or int64, not decreasing, from 0 to Tq and to Td, on any device. On the CPU their
        values are checked. On a GPU they are taken as they are, because to look at them would be to wait for it.
    candidates_cu_seqlens
        None: every query meets every document. [Nq + 1]: query i meets only the documents candidates_cu_seqlens[i] to
        candidates_cu_seqlens[i + 1]. On the CPU, or the call waits for the GPU.
    max_query_length, max_document_length
        Tokens of the longest query and document, or more. A call that is given both waits for nothing. Without them,
        it finds them out, and waits for the GPU if the boundaries lie there; without a gradient it can do without
        `max_document_length`, but not know whether a document is so long that it is worth cutting into pieces. Under
        `torch.compile`, give both.
    normalize, reduction, implementation
        As in `maxsim`.
    empty_score
        Score of a document without tokens. A query without tokens scores 0 against every other document.

    Returns
    -------
    Tensor
        float32: [Nq, Nd], or [Nd] with candidates. Precision, NaN, infinities, ties and gradients as in `maxsim`.

    Raises
    ------
    TypeError
        If an argument is no tensor of the dtype named above, or the dtypes differ.
    ValueError
        If shapes, devices or embedding sizes do not fit together, boundaries do not span the tokens, a sequence is
        longer than it may be, an option is none of its choices, or implementation="triton" cannot take the input.

    Examples
    --------
    >>> import torch
    >>> queries, queries_cu_seqlens = pack([torch.eye(2)])
    >>> documents, documents_cu_seqlens = pack([torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[0.0, -1.0]])])
    >>> maxsim_varlen(queries, documents, queries_cu_seqlens, documents_cu_seqlens)
    tensor([[ 1.5000, -1.0000]])
    """
    if (
        candidates_cu_seqlens is None
        and type(max_query_length) is int
        and type(max_document_length) is int
        and type(implementation) is str
        and reduction == "sum"
        and empty_score == 0.0
        and goes_straight_to_the_kernel(queries, documents)
        and not needs_gradient(queries, documents)
        and isinstance(queries_cu_seqlens, Tensor)
        and isinstance(documents_cu_seqlens, Tensor)
        and queries_cu_seqlens.is_cuda
        and documents_cu_seqlens.get_device() == documents.get_device()
    ):
        score = _launch_of(
            queries.shape, queries.stride(), queries.dtype, queries.device,
            documents.shape, documents.stride(), documents.dtype, documents.device, documents.data_ptr() % 16 == 0,
            queries_cu_seqlens.shape, queries_cu_seqlens.dtype,
            documents_cu_seqlens.shape, documents_cu_seqlens.stride(), documents_cu_seqlens.dtype,
            max_query_length, max_document_length, bool(normalize), implementation,
        )  # fmt: skip
        if score is not None:
            return score(queries, documents, documents_cu_seqlens)[0]
    queries, documents = _checked(queries, documents, queries_cu_seqlens, documents_cu_seqlens)
    max_candidates = 0
    if candidates_cu_seqlens is not None:
        _check_boundaries("candidates_cu_seqlens", candidates_cu_seqlens)
        entries = queries_cu_seqlens.shape[0]
        if candidates_cu_seqlens.shape[0] != entries:
            raise ValueError(
                f"candidates_cu_seqlens must have Nq + 1 = {entries} entries, got {candidates_cu_seqlens.shape[0]}"
            )
        n_documents = documents_cu_seqlens.shape[0] - 1
        max_candidates = _longest("candidates_cu_seqlens", candidates_cu_seqlens, n_documents, "documents", None)
    return _scores(
        queries,
        documents,
        queries_cu_seqlens,
        documents_cu_seqlens,
        candidates_cu_seqlens,
        max_candidates,
        max_query_length,
        max_document_length,
        normalize,
        reduction,
        empty_score,
        implementation,
    )


def maxsim_varlen_pairs(
    queries: Tensor,
    documents: Tensor,
    queries_cu_seqlens: Tensor,
    documents_cu_seqlens: Tensor,
    *,
    max_query_length: int | None = None,
    max_document_length: int | None = None,
    normalize: bool = False,
    reduction: str = "sum",
    empty_score: float = 0.0,
    implementation: str = "auto",
) -> Tensor:
    """MaxSim score of every packed query with the packed document of the same index, differentiable.

    Parameters
    ----------
    queries, documents
        [Tq, d] and [Td, d].
    queries_cu_seqlens, documents_cu_seqlens
        Both [N + 1].
    max_query_length, max_document_length, normalize, reduction, empty_score, implementation
        As in `maxsim_varlen`.

    Returns
    -------
    Tensor
        float32, [N].

    Raises
    ------
    TypeError, ValueError
        As in `maxsim_varlen`, and if there are not as many documents as queries.
    """
    queries, documents = _checked(queries, documents, queries_cu_seqlens, documents_cu_seqlens)
    entries = queries_cu_seqlens.shape[0]
    if documents_cu_seqlens.shape[0] != entries:
        raise ValueError(
            f"documents_cu_seqlens must have as many entries as queries_cu_seqlens, {entries}, "
            f"got {documents_cu_seqlens.shape[0]}"
        )
    return _scores(
        queries,
        documents,
        queries_cu_seqlens,
        documents_cu_seqlens,
        torch.arange(entries, dtype=torch.int32, device=queries.device),
        1,
        max_query_length,
        max_document_length,
        normalize,
        reduction,
        empty_score,
        implementation,
    )


def _checked(
    queries: Tensor, documents: Tensor, queries_cu_seqlens: Tensor, documents_cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries and documents after every check of types and shapes, in the autocast type under autocast."""
    check_embeddings("queries", queries, {2: "[Tq, d]"})
    check_embeddings("documents", documents, {2: "[Td, d]"})
    check_differentiation("maxsim_varlen", queries, documents)
    queries, documents = _autocast(queries, documents)
    check_same(queries, documents)
    _check_boundaries("queries_cu_seqlens", queries_cu_seqlens)
    _check_boundaries("documents_cu_seqlens", documents_cu_seqlens)
    return queries, documents


def _check_boundaries(name: str, cu_seqlens: object) -> None:
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(f"{name} must have shape [N + 1], got {list(cu_seqlens.shape)}")


def _host_bounds(name: str, cu_seqlens: Tensor, total: int, of: str, longest: int | None = None) -> np.ndarray:
    """The boundaries on the host, int64, after checking their values, and lengths against the `longest` of `of`."""
    bounds = cu_seqlens.cpu().numpy().astype(np.int64)
    lengths = np.diff(bounds)
    counted = f"tokens of {of}" if name in ("queries_cu_seqlens", "documents_cu_seqlens") else of
    falling = bool((lengths < 0).any())
    if falling or bounds[0] != 0 or bounds[-1] != total:
        raise ValueError(
            f"{name} must rise from 0 to the number of {counted}, {total}, got {bounds[0]} to {bounds[-1]}"
            + (", falling in between" if falling else "")
        )
    if longest is not None and lengths.max(initial=0) > longest:
        raise ValueError(f"{name} has a sequence of length {lengths.max()}, more than {_LONGEST[of]} = {longest}")
    return bounds


# What the option is called that tells the longest.
_LONGEST = {"queries": "max_query_length", "documents": "max_document_length"}


def _longest(name: str, cu_seqlens: Tensor, total: int, of: str, given: int | None) -> int:
    """Length of the longest sequence, or a bound on it: `given`, or found out. On the CPU, values are checked."""
    if given is not None and given < 0:
        raise ValueError(f"{_LONGEST[of]} must be at least 0, got {given}")
    if is_readable(cu_seqlens):
        lengths = np.diff(_host_bounds(name, cu_seqlens, total, of, given))
        return given if given is not None else int(lengths.max(initial=0))
    if given is not None:
        return given
    # A single sequence is all there is. Where nothing can be looked at, any bound will do.
    if cu_seqlens.shape[0] <= 2 or cu_seqlens.is_meta:
        return total
    return int(cu_seqlens.diff().max())


def _scores(
    queries: Tensor,
    documents: Tensor,
    queries_cu_seqlens: Tensor,
    documents_cu_seqlens: Tensor,
    candidates_cu_seqlens: Tensor | None,
    max_candidates: int,
    max_query_length: int | None,
    max_document_length: int | None,
    normalize: bool,
    reduction: str,
    empty_score: float,
    implementation: str,
) -> Tensor:
    """`maxsim_varlen` after the checks of types and shapes, with at most `max_candidates` documents per query."""
    check_choice("reduction", reduction, REDUCTIONS)
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    max_query_length = _longest("queries_cu_seqlens", queries_cu_seqlens, queries.shape[0], "queries", max_query_length)
    with_winners = needs_gradient(queries, documents)
    if max_document_length is None and not with_winners and documents_cu_seqlens.device.type == "cuda":
        # A bound that costs nothing.
        max_document_length = documents.shape[0]
    max_document_length = _longest(
        "documents_cu_seqlens", documents_cu_seqlens, documents.shape[0], "documents", max_document_length
    )
    # The dispatcher takes longer than a small kernel; what does not need it goes past it.
    direct = not with_winners and _is_plain(queries, documents) and max_query_length > 0
    scores = (_compute if direct else _maxsim_varlen)(
        queries,
        documents,
        queries_cu_seqlens,
        documents_cu_seqlens,
        candidates_cu_seqlens,
        max_query_length,
        max_document_length,
        max_candidates,
        normalize,
        with_winners,
        implementation,
    )[0]
    if reduction == "mean":
        lengths = queries_cu_seqlens.diff().clamp(min=1).to(scores.device, non_blocking=True)
        if candidates_cu_seqlens is None:
            lengths = lengths.unsqueeze(1)
        elif max_candidates != 1 or lengths.shape != scores.shape:
            owned = candidates_cu_seqlens.diff().to(scores.device, non_blocking=True)
            lengths = lengths.repeat_interleave(owned, output_size=scores.shape[0])
        scores = scores / lengths
    if empty_score != 0.0:
        empty = documents_cu_seqlens.diff().to(scores.device, non_blocking=True) == 0
        scores = scores.masked_fill(empty, empty_score)
    return scores


@functools.lru_cache(maxsize=4096)
def _launch_of(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    documents_shape: torch.Size,
    documents_strides: tuple[int, ...],
    documents_dtype: torch.dtype,
    documents_device: torch.device,
    aligned: bool,
    queries_entries: torch.Size,
    queries_bounds_dtype: torch.dtype,
    documents_entries: torch.Size,
    documents_bounds_strides: tuple[int, ...],
    documents_bounds_dtype: torch.dtype,
    max_query_length: int,
    max_document_length: int,
    normalize: bool,
    implementation: str,
) -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    """The kernels' launch for such tensors, as in `ops.maxsim`: queries of one length, and every document whole.

    None where an error is due, or the longer way: it checks, pads and merges.
    """
    integers = (torch.int32, torch.int64)
    if (
        len(shape) != 2
        or len(documents_shape) != 2
        or documents_dtype != dtype
        or documents_device != device
        or not are_halves_of_one_size(shape, strides, dtype, documents_shape, documents_strides)
        or queries_bounds_dtype not in integers
        or documents_bounds_dtype not in integers
        or len(queries_entries) != 1
        or len(documents_entries) != 1
        or documents_bounds_strides[0] != 1
        or queries_entries[0] < 2
        or documents_entries[0] < 2
        or max_query_length < 1
        or max_document_length < 0
        or shape[0] != (queries_entries[0] - 1) * max_query_length
        or implementation not in ("auto", "triton")
        or choose(implementation, device, dtype, shape[1]) != "triton"
    ):
        return None
    n_queries, size = queries_entries[0] - 1, shape[1]
    # The kernels read queries by their strides, so the packed ones need no other shape.
    return kernels().bound_maxsim_varlen(
        torch.Size((n_queries, max_query_length, size)), (max_query_length * strides[0], strides[0], 1), dtype, device,
        documents_shape[0], documents_strides[0], aligned, documents_entries[0] - 1, documents_bounds_dtype,
        max_document_length, normalize, product_precision(dtype),
    )  # fmt: skip


_LIBRARY = torch.library.Library("pylate_flash", "FRAGMENT")
_LIBRARY.define(
    "maxsim_varlen(Tensor queries, Tensor documents, Tensor queries_cu_seqlens, Tensor documents_cu_seqlens, "
    "Tensor? candidates_cu_seqlens, SymInt max_query_length, SymInt max_document_length, SymInt max_candidates, "
    "bool normalize, bool with_winners, str implementation) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "maxsim_varlen_backward(Tensor grad_scores, Tensor queries, Tensor documents, Tensor queries_cu_seqlens, "
    "Tensor documents_cu_seqlens, Tensor? candidates_cu_seqlens, Tensor winners, SymInt max_query_length, "
    "SymInt max_document_length, bool normalize, bool need_queries, bool need_documents, str implementation) "
    "-> (Tensor, Tensor)"
)
_maxsim_varlen = torch.ops.pylate_flash.maxsim_varlen.default
_maxsim_varlen_backward = torch.ops.pylate_flash.maxsim_varlen_backward.default


def _forward(
    queries: Tensor,
    documents: Tensor,
    queries_cu_seqlens: Tensor,
    documents_cu_seqlens: Tensor,
    candidates_cu_seqlens: Tensor | None,
    max_query_length: int,
    max_document_length: int,
    max_candidates: int,
    normalize: bool,
    with_winners: bool,
    implementation: str,
    queries_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Scores [Nq, Nd], or [Nd] with candidates, float32, and winners [Nd, rows], an empty tensor unless asked for.

    A `queries_mask` [Nq, max_query_length] (bool) says which tokens to leave out where every query has that length.
    """
    arguments = (
        queries, documents, queries_cu_seqlens, documents_cu_seqlens, candidates_cu_seqlens, max_query_length,
        max_document_length, max_candidates, normalize, with_winners, implementation,
    )  # fmt: skip
    # Without tokens there is nothing to compute.
    if 0 in (queries.shape[0], documents.shape[0], max_query_length):
        choose(implementation, queries.device, queries.dtype, queries.shape[-1])
        scores, winners = _forward_shapes(*arguments)
        return scores.zero_(), winners.fill_(-1)
    scores, found = _compute(*arguments, queries_mask)
    if found is None:
        return scores, queries.new_empty(0, dtype=torch.int16)
    return scores, found.to(_winners_dtype(max_document_length))


def _compute(
    queries: Tensor,
    documents: Tensor,
    queries_cu_seqlens: Tensor,
    documents_cu_seqlens: Tensor,
    candidates_cu_seqlens: Tensor | None,
    max_query_length: int,
    max_document_length: int,
    max_candidates: int,
    normalize: bool,
    with_winners: bool,
    implementation: str,
    queries_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `_forward`, where nothing is empty; without winners the second is None."""
    if choose(implementation, queries.device, queries.dtype, queries.shape[1]) == "triton":
        padded, mask = _padded(queries, queries_cu_seqlens, max_query_length)
        if queries_mask is not None:
            mask = queries_mask.contiguous()
        with kernels().on_device(queries):
            return kernels().maxsim_varlen_forward(
                rows_contiguous(padded),
                mask,
                rows_contiguous(documents),
                _on_device(documents_cu_seqlens, queries.device),
                None if candidates_cu_seqlens is None else _on_device(candidates_cu_seqlens, queries.device),
                max_candidates,
                max_document_length,
                normalize,
                with_winners,
                product_precision(queries.dtype),
            )
    # Under autocast the inputs have the autocast type already; the products inside must not be rounded to it.
    with torch.autocast(queries.device.type, enabled=False):
        queries_scale, documents_scale = scales(queries, documents, normalize)
        bounds = _all_host_bounds(
            queries, documents, queries_cu_seqlens, documents_cu_seqlens, candidates_cu_seqlens,
            max_query_length, max_document_length,
        )  # fmt: skip
        return blocked_varlen_forward(
            queries, documents, queries_scale, documents_scale, *bounds, max_query_length, with_winners, queries_mask
        )


def _backward(
    grad_scores: Tensor,
    queries: Tensor,
    documents: Tensor,
    queries_cu_seqlens: Tensor,
    documents_cu_seqlens: Tensor,
    candidates_cu_seqlens: Tensor | None,
    winners: Tensor,
    max_query_length: int,
    max_document_length: int,
    normalize: bool,
    need_queries: bool,
    need_documents: bool,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of queries and documents, in their type; an empty tensor for one that is not needed."""
    if 0 in queries.shape or 0 in documents.shape or 0 in winners.shape:
        grads = _backward_shapes(
            grad_scores, queries, documents, queries_cu_seqlens, documents_cu_seqlens, candidates_cu_seqlens, winners,
            max_query_length, max_document_length, normalize, need_queries, need_documents, implementation,
        )  # fmt: skip
        return grads[0].zero_(), grads[1].zero_()
    implementation = choose(implementation, queries.device, queries.dtype, queries.shape[1])
    if implementation == "triton":
        grad_queries, grad_documents = _backward_by_kernels(
            grad_scores, queries, documents, queries_cu_seqlens, documents_cu_seqlens, candidates_cu_seqlens, winners,
            max_query_length, max_document_length, normalize, need_queries, need_documents,
        )  # fmt: skip
    else:
        queries_scale, documents_scale = scales(queries, documents, normalize)
        bounds = _all_host_bounds(
            queries, documents, queries_cu_seqlens, documents_cu_seqlens, candidates_cu_seqlens,
            max_query_length, max_document_length,
        )  # fmt: skip
        grad_queries, grad_documents = blocked_varlen_backward(
            grad_scores, queries, documents, winners, queries_scale, documents_scale, *bounds, max_query_length,
            need_queries, need_documents,
        )  # fmt: skip
    return (
        queries.new_empty(0) if grad_queries is None else grad_queries,
        documents.new_empty(0) if grad_documents is None else grad_documents,
    )


def _backward_by_kernels(
    grad_scores: Tensor,
    queries: Tensor,
    documents: Tensor,
    queries_cu_seqlens: Tensor,
    documents_cu_seqlens: Tensor,
    candidates_cu_seqlens: Tensor | None,
    winners: Tensor,
    max_query_length: int,
    max_document_length: int,
    normalize: bool,
    need_queries: bool,
    need_documents: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """`_backward` by the Triton kernels; nothing waits for the GPU."""
    device = queries.device
    queries_scale, documents_scale = None, None
    padded, tokens = queries, documents
    if normalize:
        # The kernels take embeddings as they are, and half ones are not to be rounded again.
        queries_scale, documents_scale = inverse_norms(queries), inverse_norms(documents)
        padded, tokens = padded * queries_scale.unsqueeze(1), tokens * documents_scale.unsqueeze(1)
    padded, _ = _padded(padded, queries_cu_seqlens, max_query_length)
    with kernels().on_device(queries):
        grad_queries, grad_documents = kernels().maxsim_varlen_backward(
            grad_scores.contiguous(),
            rows_contiguous(padded),
            rows_contiguous(tokens),
            _on_device(documents_cu_seqlens, device),
            winners,
            None if candidates_cu_seqlens is None else _on_device(candidates_cu_seqlens, device),
            max_document_length,
            need_queries,
            need_documents,
        )
    if grad_queries is not None:
        grad_queries = _unpadded(grad_queries, queries_cu_seqlens, queries.shape[0])
        grad_queries = through_norms(grad_queries, queries, queries_scale)
    if grad_documents is not None:
        grad_documents = through_norms(grad_documents, documents, documents_scale)
    return grad_queries, grad_documents


def _padded(queries: Tensor, cu_seqlens: Tensor, longest: int) -> tuple[Tensor, Tensor | None]:
    """Queries [Nq, longest, d] and their mask, None where all have one length."""
    n_queries = cu_seqlens.shape[0] - 1
    if queries.shape[0] == n_queries * longest:
        return queries.view(n_queries, longest, queries.shape[1]), None
    bounds = _on_device(cu_seqlens, queries.device)
    places = torch.arange(longest, device=queries.device)
    # A padding token may be any token, as the mask leaves it out.
    tokens = (bounds[:-1].unsqueeze(1) + places).clamp_(max=queries.shape[0] - 1)
    return queries[tokens], places < bounds.diff().unsqueeze(1)


def _unpadded(padded: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    """The `total` packed rows [T, d] of padded ones [N, longest, d]."""
    n_sequences, longest, _ = padded.shape
    if total == n_sequences * longest:
        return padded.flatten(0, 1)
    bounds = _on_device(cu_seqlens, padded.device)
    tokens = torch.arange(total, dtype=bounds.dtype, device=padded.device)
    sequence = torch.searchsorted(bounds, tokens, right=True) - 1
    return padded[sequence, (tokens - bounds[sequence]).clamp_(max=longest - 1)]


def _on_device(boundaries: Tensor, device: torch.device) -> Tensor:
    return boundaries.to(device, non_blocking=True).contiguous()


def _all_host_bounds(
    queries: Tensor,
    documents: Tensor,
    queries_cu_seqlens: Tensor,
    documents_cu_seqlens: Tensor,
    candidates_cu_seqlens: Tensor | None,
    max_query_length: int,
    max_document_length: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """All boundaries on the host, checked."""
    n_documents = documents_cu_seqlens.shape[0] - 1
    return (
        _host_bounds("queries_cu_seqlens", queries_cu_seqlens, queries.shape[0], "queries", max_query_length),
        _host_bounds(
            "documents_cu_seqlens", documents_cu_seqlens, documents.shape[0], "documents", max_document_length
        ),
        None
        if candidates_cu_seqlens is None
        else _host_bounds("candidates_cu_seqlens", candidates_cu_seqlens, n_documents, "documents"),
    )


def _forward_shapes(
    queries, documents, queries_cu_seqlens, documents_cu_seqlens, candidates_cu_seqlens, max_query_length,
    max_document_length, max_candidates, normalize, with_winners, implementation,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Uninitialised outputs of the forward."""
    n_queries, n_documents = queries_cu_seqlens.shape[0] - 1, documents_cu_seqlens.shape[0] - 1
    in_batch = candidates_cu_seqlens is None
    scores = queries.new_empty((n_queries, n_documents) if in_batch else (n_documents,), dtype=torch.float32)
    if not with_winners:
        return scores, queries.new_empty(0, dtype=torch.int16)
    rows = max_query_length * (n_queries if in_batch else 1)
    return scores, queries.new_empty(n_documents, rows, dtype=_winners_dtype(max_document_length))


def _backward_shapes(
    grad_scores, queries, documents, queries_cu_seqlens, documents_cu_seqlens, candidates_cu_seqlens, winners,
    max_query_length, max_document_length, normalize, need_queries, need_documents, implementation,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return (
        torch.empty_like(queries, memory_format=torch.contiguous_format) if need_queries else queries.new_empty(0),
        torch.empty_like(documents, memory_format=torch.contiguous_format)
        if need_documents
        else documents.new_empty(0),
    )


def _save_for_backward(ctx, inputs, output) -> None:
    queries, documents, *boundaries, max_query_length, max_document_length, _, normalize, with_winners, name = inputs
    if not with_winners and (queries.requires_grad or documents.requires_grad):
        raise RuntimeError("pylate_flash::maxsim_varlen: a gradient needs with_winners=True")
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(queries, documents, *boundaries, output[1])
    ctx.options = max_query_length, max_document_length, normalize
    ctx.implementation = name


def _gradient(ctx, grad_scores, _):
    need_queries, need_documents = ctx.needs_input_grad[:2]
    grad_queries, grad_documents = _maxsim_varlen_backward(
        grad_scores, *ctx.saved_tensors, *ctx.options, need_queries, need_documents, ctx.implementation
    )
    return (
        grad_queries if need_queries else None,
        grad_documents if need_documents else None,
        *(None for _ in range(9)),
    )


_LIBRARY.impl("maxsim_varlen", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("maxsim_varlen_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("pylate_flash::maxsim_varlen", _forward_shapes)
torch.library.register_fake("pylate_flash::maxsim_varlen_backward", _backward_shapes)
torch.library.register_autograd("pylate_flash::maxsim_varlen", _gradient, setup_context=_save_for_backward)
torch.library.register_autograd("pylate_flash::maxsim_varlen_backward", no_second_derivative("maxsim_varlen"))
