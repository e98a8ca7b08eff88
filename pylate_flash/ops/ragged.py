"""MaxSim of lists: each document is a separate tensor with its own length, as encoders return them.

`maxsim_ragged` is defined as `maxsim_varlen` of the same sequences, packed. If no gradient is needed, kernels read each
document in place: one small copy of a table of addresses replaces a copy of all tokens. The remaining cost of a list is
the host time to query the address, length and dtype of every tensor (`lists`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.choice import IMPLEMENTATIONS, choose
from ..problem import DocumentOffsets, Options, Tensors, accumulation_dtype
from .checks import (
    check_boundaries,
    check_choice,
    check_list,
    check_none,
    check_same,
    check_tensor,
    checked_flag,
    is_readable,
)
from .compute import compute, kernels
from .lists import Sequences, sequences_of
from .maxsim_operator import autocast, checked, most_candidates, scores_of, with_lengths
from .operator import is_plain, needs_gradient
from .packing import packed
from .products import inner_products
from .staging import concatenate


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
        A list of tensors or arrays [L_j, d], of the same dtype. On the device of the queries, kernels read them in
        place if neither a gradient nor `normalize` is requested; otherwise they are packed. On the CPU, they are copied
        to a GPU in one copy.
    queries_mask
        [Nq, Lq] of padded queries, which may hold weights, as in `maxsim`. None: all tokens are active.
    candidates_cu_seqlens, normalize, reduction, empty_score, implementation
        As in `maxsim_varlen`.

    Returns
    -------
    Tensor
        [Nq, Nd], or [Nd] with candidates, on the queries' device. Type, precision, NaN, infinities, ties and
        gradients as in `maxsim`.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `maxsim_varlen`; also if an argument is not a non-empty list of tensors or arrays.

    Examples
    --------
    >>> documents = [torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[0.0, -1.0]])]
    >>> maxsim_ragged([torch.eye(2)], documents)
    tensor([[ 1.5000, -1.0000]])
    """
    options = Options(0, 0, 0, checked_flag("normalize", normalize), reduction, "exclude", empty_score, implementation)
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
        [N], on the queries' device.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `maxsim_ragged`; ValueError also if the numbers of documents and queries differ.

    Examples
    --------
    >>> values = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])]
    >>> maxsim_ragged_pairwise(values, values)
    tensor([6., 9.])
    """
    check_list("documents", documents)
    if isinstance(queries, Tensor):
        check_tensor("queries", queries, {3: "[N, Lq, d]"})
    else:
        check_list("queries", queries)
    if len(queries) != len(documents):
        raise ValueError(f"documents must have one document per query, {len(queries)}, got {len(documents)} documents")
    options = Options(0, 0, 0, checked_flag("normalize", normalize), reduction, "exclude", empty_score, implementation)
    candidates = torch.arange(len(documents) + 1, dtype=torch.int32, device="cpu")
    operation = "maxsim_ragged_pairwise"
    if isinstance(queries, Tensor) or queries_mask is not None or torch.compiler.is_compiling():
        return _scores(operation, queries, documents, queries_mask, candidates, options)
    document_sequences, query_sequences = sequences_of("documents", documents), sequences_of("queries", queries)
    examples = *query_sequences.examples, *document_sequences.examples
    query, document = examples[0], examples[-1]
    use_pairs = query.device.type == "cpu" and _implementation(query, options) == "blocked"
    if use_pairs and _why_not_in_place(examples, options) is None:
        check_same(query, document)
        checked(Tensors(query, document), options)
        return _scores_of_pairs(query_sequences, document_sequences, options)
    return _scores(operation, query_sequences, document_sequences, None, candidates, options)


def _implementation(query: Tensor, options: Options) -> str:
    check_choice("implementation", options.implementation, IMPLEMENTATIONS)
    return choose(options.implementation, query.device, query.dtype, query.shape[-1])


def _why_not_in_place(examples: Sequence[Tensor], options: Options) -> str | None:
    """Why sequences cannot be scored in place, or None; `examples` represent all of them, a query first."""
    query, document = examples[0], examples[-1]
    if options.normalize:
        return "the norms of all tokens are computed of packed ones"
    if document.device != query.device:
        return "they lie on another device than the queries"
    if not is_plain(*examples):
        return "they are not plain tensors, or the call is compiled or transformed"
    if autocast(query)[0] is not query:
        return "autocast casts them"
    if needs_gradient(*examples):
        return "a gradient is asked for"
    return None


def _scores_of_pairs(queries: Sequences, documents: Sequences, options: Options) -> Tensor:
    """Scores [N] of N query-document pairs in plain torch, with one product per pair, read in place.

    Packing the sequences and padding them for a batched product takes longer than one call per pair, even for short
    sequences: 2000 pairs of 8 to 32 and 20 to 180 tokens (d = 128, one core) take 0.06 s this way, 0.05 s of it in the
    products, against 0.14 s batched; pairs of 4 to 8 and 10 to 20 tokens take 0.02 s against 0.045 s.
    """
    first = queries.tensors[0]
    empty_score = torch.full((), float(options.empty_score), dtype=accumulation_dtype(first.dtype), device=first.device)
    pairs = zip(queries.tensors, documents.tensors, documents.lengths.tolist(), strict=True)
    scores = torch.stack(
        [inner_products(*pair).amax(dim=1).sum() if length else empty_score for *pair, length in pairs]
    )
    if options.reduction != "mean":
        return scores
    active = torch.from_numpy(queries.lengths.clip(min=1))
    return torch.where(torch.from_numpy(documents.lengths > 0), scores / active, scores)


class ListCall(NamedTuple):
    """A call on lists: packed, as the operator takes it, or in place with `offsets`, as the kernels take it."""

    tensors: Tensors
    options: Options
    offsets: DocumentOffsets | None
    # The reason why documents are packed, or None.
    packed_because: str | None
    # The documents that are read in place: kernels get their addresses alone, and some may be copies made for the call.
    documents: Sequences | None = None


def call_of_lists(
    operation: str,
    queries: Tensor | Sequence[Tensor | np.ndarray] | Sequences,
    documents: Sequence[Tensor | np.ndarray] | Sequences,
    queries_mask: Tensor | None,
    candidates: Tensor | None,
    options: Options,
) -> ListCall:
    """Check a call on lists, and convert it to tensors; this includes every check that needs the lists."""
    document_sequences, query_sequences = sequences_of("documents", documents), None
    if isinstance(queries, Tensor):
        check_tensor("queries", queries, {3: "[Nq, Lq, d]"})
        examples: Sequence[Tensor] = [queries]
    else:
        check_none("queries are a list", queries_mask=queries_mask)
        query_sequences = sequences_of("queries", queries)
        examples = query_sequences.examples
        options = options._replace(max_query_length=query_sequences.longest)
    if candidates is not None:
        check_boundaries("candidates_cu_seqlens", candidates, document_sequences.tensors[0])
        options = options._replace(max_candidates=most_candidates(candidates, len(document_sequences.tensors)))
    options = options._replace(max_document_length=document_sequences.longest)
    reason = _why_not_in_place([*examples, *document_sequences.examples], options)
    if _implementation(examples[0], options) != "triton":
        reason = "no kernel serves the call"
    tensors = Tensors(examples[0], document_sequences.examples[0], queries_mask, None, None, None, candidates)
    if reason is None:
        in_place = _in_place(operation, tensors, query_sequences, document_sequences, options)
        return ListCall(*in_place, None, document_sequences)
    return ListCall(_packed(tensors, query_sequences, document_sequences), options, None, reason)


def _scores(operation: str, *arguments: Any) -> Tensor:
    if torch.compiler.is_compiling():
        return _scores_in_a_graph(operation, *arguments)
    call = call_of_lists(operation, *arguments)
    if call.offsets is None:
        return scores_of(operation, call.tensors, call.options)
    return compute(call.tensors, call.options, False, call.offsets)[0]


def _scores_in_a_graph(
    operation: str,
    queries: Tensor | Sequence[Tensor | np.ndarray],
    documents: Sequence[Tensor | np.ndarray],
    queries_mask: Tensor | None,
    candidates: Tensor | None,
    options: Options,
) -> Tensor:
    """The scores of a call under `torch.compile`: lists are packed, and lengths may be symbolic."""
    values, bounds = packed("documents", documents)
    queries_bounds, longest_query = None, None
    if isinstance(queries, Tensor):
        check_tensor("queries", queries, {3: "[Nq, Lq, d]"})
    else:
        check_none("queries are a list", queries_mask=queries_mask)
        longest_query = max(map(len, queries))
        queries, queries_bounds = packed("queries", queries)
    if values.device.type == "cpu":
        values, bounds = values.to(queries.device), bounds.to(queries.device)
    tensors = Tensors(queries, values, queries_mask, None, queries_bounds, bounds, candidates)
    return scores_of(operation, tensors, with_lengths(tensors, options, longest_query, max(map(len, documents))))


def _packed(tensors: Tensors, queries: Sequences | None, documents: Sequences) -> Tensors:
    """The tensors of a call with its lists packed; queries that are already a tensor are kept."""
    values, queries_bounds = (tensors.queries, None) if queries is None else _together(queries)
    # Documents on the host move to the queries' device; elsewhere, the device is the caller's choice.
    documents_on_host = tensors.documents.device.type == "cpu"
    document_values = concatenate(documents.tensors, values.device if documents_on_host and values.is_cuda else None)
    return tensors._replace(
        queries=values,
        documents=document_values,
        queries_cu_seqlens=None if queries_bounds is None else _boundaries(queries_bounds, values.device),
        documents_cu_seqlens=_boundaries(documents.bounds, document_values.device),
    )


def _together(queries: Sequences) -> tuple[Tensor, np.ndarray | None]:
    """Queries of one length as [Nq, Lq, d], else packed [Tq, d] with their boundaries on the host."""
    tensors = queries.tensors
    if len(tensors) == 1:
        return tensors[0].unsqueeze(0), None
    values = torch.cat(list(tensors))
    if queries.shortest == queries.longest:
        return values.view(len(tensors), queries.longest, queries.size), None
    return values, queries.bounds


def _in_place(
    operation: str, tensors: Tensors, queries: Sequences | None, documents: Sequences, options: Options
) -> tuple[Tensors, Options, DocumentOffsets]:
    """A call whose kernels get sequence addresses: documents are read in place, and a kernel pads the queries.

    Document boundaries are those of packed documents.
    """
    query, document, queries_mask, *_, candidates = tensors
    check_same(query, document)
    # The base address of the offsets: memory owned by this call, 16-byte aligned; its contents are never read.
    origin = document.new_empty(1, documents.size)
    starts, unit = _offsets(documents, origin)
    arrays = {"starts": starts, "bounds": documents.bounds}
    padded_queries = queries if queries is not None and len(queries.tensors) > 1 and queries.longest > 0 else None
    if padded_queries is not None:
        arrays["queries_offsets"], queries_unit = _offsets(padded_queries, origin)
        arrays["queries_bounds"] = padded_queries.bounds
    if candidates is not None and is_readable(candidates):
        arrays["candidates"] = candidates.numpy()
    table = _in_one_copy(arrays, query.device)
    if padded_queries is not None:
        query, mask = kernels().pad(
            origin, table["queries_bounds"], padded_queries.longest, table["queries_offsets"], queries_unit
        )
        queries_mask = None if padded_queries.shortest == padded_queries.longest else mask
    elif queries is not None:
        query = _together(queries)[0]
    tensors = Tensors(query, origin, queries_mask, None, None, table["bounds"], table.get("candidates", candidates))
    offsets = DocumentOffsets(table["starts"], unit, int(arrays["bounds"][-1]))
    return *checked(tensors, options), offsets


def _offsets(sequences: Sequences, origin: Tensor) -> tuple[np.ndarray, int]:
    """Offsets of the sequences from `origin`, and their unit, as in `DocumentOffsets`."""
    item = origin.element_size()
    offsets = sequences.addresses - origin.data_ptr()
    if sequences.shortest == 0:
        # An empty sequence may have any address.
        offsets[sequences.lengths == 0] = 0
    unit = 16 // item if not np.bitwise_or.reduce(offsets) & 15 else 1
    # Units are powers of two.
    offsets >>= (unit * item).bit_length() - 1
    return offsets, unit


def _in_one_copy(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Copy int64 host arrays to a device in one transfer, each aligned to 16 bytes."""
    pieces = [piece for array in arrays.values() for piece in (array, _FILL[: len(array) % 2])]
    sizes = [len(piece) for piece in pieces]
    table = torch.empty(sum(sizes), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    np.concatenate(pieces, out=table.numpy())
    return dict(zip(arrays, table.to(device, non_blocking=True).split_with_sizes(sizes)[::2], strict=True))


# Pads an odd number of int64 values to a multiple of 16 bytes.
_FILL = np.zeros(1, dtype=np.int64)


def _boundaries(bounds: np.ndarray, device: torch.device) -> Tensor:
    dtype = np.int32 if bounds[-1] < 2**31 else np.int64
    return torch.from_numpy(bounds.astype(dtype)).to(device, non_blocking=True)
