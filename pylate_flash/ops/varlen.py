"""MaxSim over packed tokens: no padding is stored, moved or scored. Forward only.

Packed means that the tokens of all sequences lie one after the other in [T, d], and cu_seqlens [N + 1] tells where each
begins: sequence i is rows cu_seqlens[i] to cu_seqlens[i + 1].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .blocked import inner_products
from .checks import check_choice, check_embeddings, check_same
from .dispatch import IMPLEMENTATIONS, choose
from .maxsim import kernels, maxsim_reference, product_precision, rows_contiguous

# Similarities held at once by the blocked implementation, as in `ops.blocked`.
_BLOCK_CPU = 1 << 20
_BLOCK_OTHER = 1 << 26


def pack(sequences: Sequence[Tensor | np.ndarray]) -> tuple[Tensor, Tensor]:
    """Lay sequences of token embeddings one after the other.

    Parameters
    ----------
    sequences
        Tensors or arrays [L_i, d], with one d, dtype and device; L_i may be 0. At least one.

    Returns
    -------
    tuple of Tensor
        The tokens [T, d], and cu_seqlens [N + 1], int32, on the same device.

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
    boundaries = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    values = torch.cat(tensors)
    return values, boundaries.to(values.device)


def maxsim_varlen_reference(
    queries: Tensor,
    documents: Tensor,
    queries_cu_seqlens: Tensor,
    documents_cu_seqlens: Tensor,
    *,
    candidates_cu_seqlens: Tensor | None = None,
    empty_score: float = 0.0,
) -> Tensor:
    """The definition of `maxsim_varlen`: `maxsim_reference` of one query and one document at a time."""

    def split(tokens: Tensor, cu_seqlens: Tensor) -> list[Tensor]:
        bounds = cu_seqlens.tolist()
        return [tokens[first:last].unsqueeze(0) for first, last in zip(bounds[:-1], bounds[1:], strict=True)]

    split_queries, split_documents = split(queries, queries_cu_seqlens), split(documents, documents_cu_seqlens)
    if candidates_cu_seqlens is None:
        pairs = [(query, document) for query in split_queries for document in split_documents]
        shape: tuple[int, ...] = (len(split_queries), len(split_documents))
    else:
        owners = torch.repeat_interleave(torch.arange(len(split_queries)), candidates_cu_seqlens.cpu().diff()).tolist()
        pairs = [(split_queries[owner], document) for owner, document in zip(owners, split_documents, strict=True)]
        shape = (len(split_documents),)
    scores = [maxsim_reference(query, document, empty_score=empty_score).reshape(()) for query, document in pairs]
    return torch.stack(scores).view(shape) if scores else torch.zeros(shape, device=queries.device)


def maxsim_varlen(
    queries: Tensor,
    documents: Tensor,
    queries_cu_seqlens: Tensor,
    documents_cu_seqlens: Tensor,
    *,
    candidates_cu_seqlens: Tensor | None = None,
    max_query_length: int | None = None,
    empty_score: float = 0.0,
    implementation: str = "auto",
) -> Tensor:
    """MaxSim scores of packed queries against packed documents, without a gradient.

    Parameters
    ----------
    queries
        [Tq, d], float16, bfloat16, float32 or float64.
    documents
        [Td, d], of the same dtype and on the same device.
    queries_cu_seqlens, documents_cu_seqlens
        [Nq + 1] and [Nd + 1], int32 or int64, not decreasing, from 0 to Tq and to Td, on any device. On the CPU their
        values are checked. On a GPU they are taken as they are, because to look at them would be to wait for it.
    candidates_cu_seqlens
        None: every query meets every document. [Nq + 1]: query i meets only the documents candidates_cu_seqlens[i] to
        candidates_cu_seqlens[i + 1]. On the CPU, or the call waits for the GPU.
    max_query_length
        Tokens of the longest query; without it, the call waits for the GPU if `queries_cu_seqlens` lies there. On the
        CPU it is found out in any case.
    empty_score
        Score of a document without tokens. A query without tokens scores 0.
    implementation
        As in `maxsim`.

    Returns
    -------
    Tensor
        float32: [Nq, Nd], or [Nd] with candidates. Precision, NaN and infinities as in `maxsim`.

    Raises
    ------
    TypeError
        If an argument is no tensor of the dtype named above, or the dtypes differ.
    ValueError
        If shapes, devices or embedding sizes do not fit together, or boundaries do not span the tokens.
    RuntimeError
        If a gradient would be needed.
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    check_embeddings("queries", queries, {2: "[Tq, d]"})
    check_embeddings("documents", documents, {2: "[Td, d]"})
    check_same(queries, documents)
    if torch.is_grad_enabled() and (queries.requires_grad or documents.requires_grad):
        raise RuntimeError("maxsim_varlen has no gradient: call it under torch.no_grad(), or pad and call maxsim")
    _check_boundaries("queries_cu_seqlens", queries_cu_seqlens, queries.shape[0], "queries")
    _check_boundaries("documents_cu_seqlens", documents_cu_seqlens, documents.shape[0], "documents")
    n_queries, n_documents = queries_cu_seqlens.shape[0] - 1, documents_cu_seqlens.shape[0] - 1
    if candidates_cu_seqlens is not None:
        candidates_cu_seqlens = _check_boundaries(
            "candidates_cu_seqlens", candidates_cu_seqlens, n_documents, "documents"
        ).cpu()
        if candidates_cu_seqlens.shape[0] != n_queries + 1:
            raise ValueError(
                f"candidates_cu_seqlens must have Nq + 1 = {n_queries + 1} entries, got {len(candidates_cu_seqlens)}"
            )
    shape = (n_queries, n_documents) if candidates_cu_seqlens is None else (n_documents,)
    if n_queries == 0 or n_documents == 0 or queries.shape[0] == 0 or documents.shape[0] == 0:
        scores = torch.zeros(shape, device=queries.device)
    elif choose(implementation, queries.device, queries.dtype, queries.shape[1]) == "blocked":
        scores = _blocked(
            queries,
            documents,
            _host(queries_cu_seqlens),
            _host(documents_cu_seqlens),
            None if candidates_cu_seqlens is None else _host(candidates_cu_seqlens),
        )
    else:
        scores = _kernel(
            queries, documents, queries_cu_seqlens, documents_cu_seqlens, candidates_cu_seqlens, max_query_length
        )
    if empty_score != 0.0:
        scores = scores.masked_fill((documents_cu_seqlens.diff() == 0).to(scores.device), empty_score)
    return scores


def _check_boundaries(name: str, cu_seqlens: object, total: int, of: str) -> Tensor:
    """`cu_seqlens` after checking it; its values are looked at on the CPU only."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(f"{name} must have shape [N + 1], got {list(cu_seqlens.shape)}")
    if cu_seqlens.device.type == "cpu":
        bounds = cu_seqlens.numpy()
        falling = bool((bounds[1:] < bounds[:-1]).any())
        if falling or bounds[0] != 0 or bounds[-1] != total:
            raise ValueError(
                f"{name} must rise from 0 to the number of {of}, {total}, got {bounds[0]} to {bounds[-1]}"
                + (", falling in between" if falling else "")
            )
    return cu_seqlens


def _host(cu_seqlens: Tensor) -> np.ndarray:
    return cu_seqlens.cpu().numpy().astype(np.int64)


def _kernel(
    queries: Tensor,
    documents: Tensor,
    queries_cu_seqlens: Tensor,
    documents_cu_seqlens: Tensor,
    candidates: Tensor | None,
    max_query_length: int | None,
) -> Tensor:
    """Scores by the Triton kernels, which take packed documents, and queries padded to one length: they are short."""
    device, n_queries = queries.device, queries_cu_seqlens.shape[0] - 1
    if max_query_length is None or queries_cu_seqlens.device.type == "cpu":
        longest = int(queries_cu_seqlens.diff().max())
    else:
        longest = max_query_length
    mask = None
    if queries.shape[0] == n_queries * longest:
        padded = queries.unflatten(0, (n_queries, longest))
    else:
        bounds = queries_cu_seqlens.to(device, non_blocking=True)
        lengths, positions = bounds.diff().unsqueeze(1), torch.arange(longest, device=device)
        mask = positions < lengths
        # A padding token may be any token, as the mask leaves it out.
        padded = queries[(bounds[:-1].unsqueeze(1) + positions).clamp_(max=queries.shape[0] - 1)]
    with kernels().on_device(queries):
        return kernels().maxsim_varlen_forward(
            rows_contiguous(padded),
            mask,
            rows_contiguous(documents),
            documents_cu_seqlens.to(device, non_blocking=True).contiguous(),
            None if candidates is None else candidates.to(device, non_blocking=True),
            0 if candidates is None else int(candidates.diff().max()),
            product_precision(queries.dtype),
        )


def _blocked(
    queries: Tensor,
    documents: Tensor,
    query_bounds: np.ndarray,
    document_bounds: np.ndarray,
    candidate_bounds: np.ndarray | None,
) -> Tensor:
    """Scores in blocks of plain torch: one product per block of queries and documents, then a maximum per document."""
    dtype = torch.float64 if queries.dtype == torch.float64 else torch.float32
    budget = _BLOCK_CPU if queries.device.type == "cpu" else _BLOCK_OTHER
    n_queries, n_documents = len(query_bounds) - 1, len(document_bounds) - 1
    if candidate_bounds is None:
        scores = torch.zeros(n_queries, n_documents, device=queries.device)
        tasks = [(first, last, 0, n_documents) for first, last in _runs(query_bounds, budget // 256)]
    else:
        scores = torch.zeros(n_documents, device=queries.device)
        tasks = [(i, i + 1, *candidate_bounds[i : i + 2].tolist()) for i in range(n_queries)]
    for first_query, last_query, first_document, last_document in tasks:
        block_queries = queries[query_bounds[first_query] : query_bounds[last_query]]
        if block_queries.shape[0] == 0 or first_document == last_document:
            continue
        owners = _owners(query_bounds[first_query : last_query + 1], queries.device)
        for first, last in _runs(document_bounds[first_document : last_document + 1], budget // block_queries.shape[0]):
            first, last = first + first_document, last + first_document
            tokens = documents[document_bounds[first] : document_bounds[last]]
            similarities = inner_products(tokens, block_queries)
            positions = _owners(document_bounds[first : last + 1], queries.device).unsqueeze(1)
            best = torch.full((last - first, block_queries.shape[0]), -torch.inf, dtype=dtype, device=queries.device)
            best.scatter_reduce_(0, positions.expand_as(similarities), similarities, "amax")
            empty = torch.from_numpy(np.diff(document_bounds[first : last + 1]) == 0).to(queries.device)
            best.masked_fill_(empty.unsqueeze(1), 0.0)
            sums = torch.zeros(last_query - first_query, last - first, dtype=dtype, device=queries.device)
            sums.index_add_(0, owners, best.T)
            if candidate_bounds is None:
                scores[first_query:last_query, first:last] = sums
            else:
                scores[first:last] = sums[0]
    return scores


def _owners(bounds: np.ndarray, device: torch.device) -> Tensor:
    """For every token between the boundaries, the index of its sequence, counted from the first boundary."""
    return torch.from_numpy(np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))).to(device)


def _runs(bounds: np.ndarray, budget: int) -> list[tuple[int, int]]:
    """Consecutive sequences whose tokens fit into `budget` together; a longer sequence stands alone."""
    runs, first = [], 0
    while first < len(bounds) - 1:
        last = int(np.searchsorted(bounds, bounds[first] + max(1, budget), side="right")) - 1
        last = max(last, first + 1)
        runs.append((first, last))
        first = last
    return runs
