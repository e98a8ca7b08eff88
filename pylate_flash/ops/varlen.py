"""MaxSim over packed tokens with the operator of `maxsim`: no document padding is stored, moved or scored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.choice import IMPLEMENTATIONS, choose
from ..problem import DocumentOffsets, Options, Tensors, rounded_total
from .checks import FLOATING, check_boundaries, check_choice, check_tensor, checked_flag, is_readable
from .compute import compute
from .maxsim_operator import call_of, reference_scores, scores_of, scores_of_arguments, with_lengths
from .operator import is_plain, needs_gradient
from .quantization import QuantizedEmbeddings
from .quantized import candidates_in_place, scores_of_quantized


def maxsim_varlen_reference(
    queries: Tensor, documents: Tensor, queries_cu_seqlens: Tensor, documents_cu_seqlens: Tensor, **options: Any
) -> Tensor:
    """The definition of `maxsim_varlen`: that of `maxsim` on padded tokens, without argument checks."""
    return reference_scores(
        queries, documents, queries_cu_seqlens=queries_cu_seqlens, documents_cu_seqlens=documents_cu_seqlens, **options
    )


def maxsim_varlen(
    queries: Tensor,
    documents: Tensor | QuantizedEmbeddings,
    queries_cu_seqlens: Tensor,
    documents_cu_seqlens: Tensor,
    *,
    candidates_cu_seqlens: Tensor | None = None,
    max_query_length: int | None = None,
    max_document_length: int | None = None,
    normalize: bool = False,
    reduction: str = "sum",
    empty_score: float = 0.0,
    quantize_queries: bool = True,
    implementation: str = "auto",
) -> Tensor:
    """MaxSim scores of packed queries against packed documents, differentiable.

    Parameters
    ----------
    queries
        [Tq, d], float16, bfloat16, float32 or float64. Under autocast, the inputs take the autocast type.
    documents
        [Td, d], of the same dtype and on the same device, or quantized to 8 bits (`quantize`), as in `maxsim`.
    queries_cu_seqlens, documents_cu_seqlens
        [Nq + 1] and [Nd + 1], int32 or int64, non-decreasing, from 0 to Tq and to Td, on any device. Values are checked
        on the CPU only: on a GPU, checking would synchronize.
    candidates_cu_seqlens
        None: every query is scored against every document. [Nq + 1]: query i is scored only against documents
        candidates_cu_seqlens[i] to candidates_cu_seqlens[i + 1]. Same requirements as the other boundaries.
    max_query_length, max_document_length
        Upper bounds on the query and document lengths. A call that gets both never synchronizes. Otherwise the lengths
        are computed, which synchronizes if the boundaries are on the GPU; without gradients, `max_document_length` is
        not needed, but then no document is considered long enough, relative to the others, to be split into segments.
        Under `torch.compile`, pass both.
    normalize, reduction, quantize_queries, implementation
        As in `maxsim`.
    empty_score
        Score of a document without tokens. A query without tokens scores 0 against every other document.

    Returns
    -------
    Tensor
        [Nq, Nd], or [Nd] with candidates. Type, precision, NaN, infinities, ties and gradients as in `maxsim`.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `maxsim`; ValueError also if boundaries do not span the tokens, or a sequence exceeds its maximum length.

    Examples
    --------
    >>> queries, queries_cu_seqlens = pack([torch.eye(2)])
    >>> documents, documents_cu_seqlens = pack([torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[0.0, -1.0]])])
    >>> maxsim_varlen(queries, documents, queries_cu_seqlens, documents_cu_seqlens)
    tensor([[ 1.5000, -1.0000]])
    """
    settings = max_query_length, max_document_length, 0, checked_flag("normalize", normalize), reduction, "exclude"
    rest = None, None, queries_cu_seqlens, documents_cu_seqlens, candidates_cu_seqlens, *settings, empty_score
    if isinstance(documents, QuantizedEmbeddings):
        tensors, options = call_of(_with_lengths((queries, documents.values, *rest, implementation)))
        return scores_of_quantized("maxsim_varlen", tensors, options, documents, quantize_queries)
    checked_flag("quantize_queries", quantize_queries)
    arguments = queries, documents, *rest, implementation
    single_query = isinstance(queries_cu_seqlens, Tensor) and queries_cu_seqlens.numel() == 2
    if (single_query or max_query_length is not None) and not is_readable(documents_cu_seqlens):
        # Boundaries on a GPU are never read.
        return scores_of_arguments(arguments, "maxsim_varlen", _with_lengths)
    return scores_of_arguments(_beside(_with_lengths(arguments), max_document_length is None), "maxsim_varlen")


def _with_lengths(arguments: tuple) -> tuple:
    """The operator's arguments, with lengths filled in, from those of `maxsim_varlen`."""
    tensors, options = call_of(arguments)
    check_tensor("queries", tensors.queries, {2: "[Tq, d]"})
    check_tensor("documents", tensors.documents, {2: "[Td, d]"})
    return *tensors, *with_lengths(tensors, options, options.max_query_length, options.max_document_length)


def _beside(arguments: tuple, round_length: bool) -> tuple:
    """The arguments with their checked boundaries moved to the GPU of the embeddings, where kernels read them.

    The call can then reuse a recorded launch. If `round_length` and no gradient is needed, the document length is
    rounded up to a bound, so that more lengths share one.
    """
    tensors, options = call_of(arguments)
    queries, documents, *_ = tensors
    implementation, dtype = options.implementation, queries.dtype
    if not (queries.is_cuda and dtype in FLOATING and is_plain(*tensors)):
        return arguments
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    if choose(implementation, queries.device, dtype, queries.shape[-1]) == "triton":
        bounds = [None if cu is None else cu.to(queries.device, non_blocking=True) for cu in tensors[4:]]
        if round_length and not needs_gradient(queries, documents):
            options = options._replace(max_document_length=rounded_total(options.max_document_length))
        return *tensors[:4], *bounds, *options
    return arguments


def maxsim_in_place(
    queries: Tensor,
    rows: Tensor | QuantizedEmbeddings,
    queries_cu_seqlens: Tensor,
    documents_cu_seqlens: Tensor,
    starts: Tensor,
    candidates_cu_seqlens: Tensor | None,
    max_query_length: int,
    max_document_length: int,
    max_candidates: int,
    n_tokens: int,
    empty_score: float,
    implementation: str = "auto",
) -> Tensor:
    """`maxsim_varlen` of documents read in place from a larger tensor; kernels only, no gradients.

    Document i starts at row `starts[i]` (int64) of `rows` [T, d]; `documents_cu_seqlens` are the boundaries that the
    documents would have if packed, `n_tokens` in total. Quantized documents must be candidates.
    """
    values = rows.values if isinstance(rows, QuantizedEmbeddings) else rows
    tensors = Tensors(queries, values, None, None, queries_cu_seqlens, documents_cu_seqlens, candidates_cu_seqlens)
    lengths = max_query_length, max_document_length, max_candidates
    options = Options(*lengths, empty_score=empty_score, implementation=implementation)
    if isinstance(rows, QuantizedEmbeddings):
        return candidates_in_place(tensors, options, rows, starts, n_tokens)
    size, item = rows.shape[1], rows.element_size()
    unit = 16 // item if not (size * item | rows.data_ptr()) % 16 else 1
    return compute(tensors, options, False, DocumentOffsets(starts * (size // unit), unit, n_tokens))[0]


def maxsim_varlen_pairwise(
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
        [Tq, d] and [Td, d], of the types that `maxsim` takes.
    queries_cu_seqlens, documents_cu_seqlens
        Both [N + 1], as in `maxsim_varlen`.
    max_query_length, max_document_length, normalize, reduction, empty_score, implementation
        As in `maxsim_varlen`.

    Returns
    -------
    Tensor
        [N].

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `maxsim_varlen`; ValueError also if the numbers of documents and queries differ.

    Examples
    --------
    >>> values, cu_seqlens = pack([torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])])
    >>> maxsim_varlen_pairwise(values, values, cu_seqlens, cu_seqlens)
    tensor([6., 9.])
    """
    check_tensor("queries", queries, {2: "[Tq, d]"})
    check_tensor("documents", documents, {2: "[Td, d]"})
    n_entries = check_boundaries("queries_cu_seqlens", queries_cu_seqlens, queries)
    n_found = check_boundaries("documents_cu_seqlens", documents_cu_seqlens, documents)
    if n_found != n_entries:
        raise ValueError(
            f"documents_cu_seqlens must have as many entries as queries_cu_seqlens, {n_entries}, got {n_found}"
        )
    candidates = torch.arange(n_entries, dtype=torch.int32, device=documents.device)
    tensors = Tensors(queries, documents, None, None, queries_cu_seqlens, documents_cu_seqlens, candidates)
    options = Options(0, 0, 0, checked_flag("normalize", normalize), reduction, "exclude", empty_score, implementation)
    options = with_lengths(tensors, options, max_query_length, max_document_length, max_candidates=1)
    return scores_of("maxsim_varlen_pairwise", tensors, options)
