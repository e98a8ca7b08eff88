"""MaxSim of selected query tokens: each document is scored by only those tokens of a query chosen for it.

    score[i, j] = sum over s in query_tokens[i, j] of  max over active t of  <queries[i, s], documents[j, t]>

Reranking with pruned queries computes this. Products of tokens that are not chosen are skipped: the kernel
(`kernels.forward.single`) gathers the query rows for each document. The gradient is that of `maxsim` with argmax -1
for tokens that are not chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem import Options, Tensors
from .blocked import maxima
from .call_parts import with_empty_score
from .checks import (
    check_choice,
    check_indices,
    check_layout,
    check_tensor,
    checked_flag,
    checked_number,
    checked_problem,
)
from .compute import compute_gradients, kernels, scores_by
from .maxsim import maxsim_reference
from .maxsim_operator import (
    N_TENSORS,
    OPTIONS_SCHEMA,
    REDUCTIONS,
    TENSORS_SCHEMA,
    call_of,
    checked,
    checked_shapes,
    with_lengths,
)
from .operator import Operation
from .packing import padded
from .products import block_budget
from .tiles import Block, Operands


def maxsim_sparse_queries_reference(
    queries: Tensor,
    documents: Tensor,
    query_tokens: Tensor,
    *,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    documents_cu_seqlens: Tensor | None = None,
    max_document_length: int | None = None,
    **options: Any,
) -> Tensor:
    """The definition of `maxsim_sparse_queries`: `maxsim_reference` of each pair with other query tokens masked."""
    if documents_cu_seqlens is not None:
        # Packed documents have no masked tokens.
        options["masking"] = "exclude"
        documents, documents_mask = padded(documents, documents_cu_seqlens)
    chosen = _chosen(query_tokens, queries)
    pairs = chosen.shape[:2]
    queries_active = queries.new_ones(queries.shape[:2]) if queries_mask is None else queries_mask
    documents_active = None if documents_mask is None else documents_mask.expand(*pairs, -1).flatten(0, 1).unsqueeze(1)
    scores = maxsim_reference(
        queries.unsqueeze(1).expand(*pairs, -1, -1).flatten(0, 1),
        documents.expand(*pairs, -1, -1).flatten(0, 1).unsqueeze(1),
        queries_mask=(queries_active.unsqueeze(1) * chosen).flatten(0, 1),
        documents_mask=documents_active,
        **options,
    )
    return scores.view(pairs)


def maxsim_sparse_queries(
    queries: Tensor,
    documents: Tensor,
    query_tokens: Tensor,
    *,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    documents_cu_seqlens: Tensor | None = None,
    max_document_length: int | None = None,
    normalize: bool = False,
    reduction: str = "sum",
    masking: str = "exclude",
    empty_score: float = 0.0,
    implementation: str = "auto",
) -> Tensor:
    """MaxSim scores of the query tokens chosen for each document, differentiable.

    Parameters
    ----------
    queries
        [Nq, Lq, d], of the types that `maxsim` takes.
    documents
        [Nd, Ld, d]: every query is scored against every document. [Nq, K, Ld, d]: each query against its own K
        candidates. [Td, d] with `documents_cu_seqlens`: every query against all documents, packed without padding.
    query_tokens
        Positions, 0 to Lq - 1, of the query tokens that score a document, int32 or int64: [Nq, Nd, k], per pair, or
        [Nq, K, k] with candidates; [Nd, k]: the same positions in every query. -1 chooses no token, so documents may
        have fewer than k. A duplicate position counts once. Other values are an error on the CPU. On a GPU, where
        checking would synchronize, they choose no token.
    queries_mask, documents_mask
        [Nq, Lq], which may hold weights, and [Nd, Ld] or [Nq, K, Ld], as in `maxsim`: a masked token contributes
        nothing even if chosen. Packed documents have no mask.
    documents_cu_seqlens, max_document_length
        [Nd + 1], and an upper bound on the document length, as in `maxsim_varlen`: if a gradient is needed and the
        bound is None, the call synchronizes with the GPU to compute it.
    normalize, masking, empty_score, implementation
        As in `maxsim`.
    reduction
        "sum" over the chosen tokens that are active, or "mean": divided by their number.

    Returns
    -------
    Tensor
        [Nq, Nd] or [Nq, K]; type, precision, NaN, ties and gradients as in `maxsim`. A document for which no query
        token is chosen scores 0, or `empty_score` if it has no active token. Scores and gradients are bitwise
        reproducible.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `maxsim`, and for boundaries as in `maxsim_varlen`; also if query_tokens has another dtype, shape or
        device than listed above, or holds invalid values, or if packed documents have a mask, or if a GPU would compute
        2**31 scores or more in one call.

    Examples
    --------
    >>> queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> documents = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, -1.0], [-1.0, 0.0]]])
    >>> maxsim_sparse_queries(queries, documents, torch.tensor([[1, 0], [1, -1]]))
    tensor([[1.5000, 0.0000]])
    >>> maxsim_sparse_queries(queries, documents, torch.tensor([[0], [0]]))
    tensor([[1., 0.]])
    """
    check_tensor("queries", queries, {3: "[Nq, Lq, d]"})
    packed = documents_cu_seqlens is not None
    layouts = {2: "[Td, d]"} if packed else {3: "[Nd, Ld, d]", 4: "[Nq, K, Ld, d]"}
    check_tensor("documents", documents, layouts)
    options = Options(0, 0, 0, checked_flag("normalize", normalize), reduction, masking, empty_score, implementation)
    check_tensor("query_tokens", query_tokens)
    tensors = Tensors(queries, documents, queries_mask, documents_mask, None, documents_cu_seqlens)
    check_layout(tensors, None, max_document_length)
    if packed:
        options = with_lengths(tensors, options, None, max_document_length)
    check_choice("reduction", reduction, REDUCTIONS)
    if reduction == "sum":
        return _sparse_queries((*tensors, query_tokens, *options), "maxsim_sparse_queries")
    # `empty_score` is not divided by the token count.
    empty_score = checked_number("empty_score", empty_score)
    options = options._replace(reduction="sum", empty_score=0.0)
    sums = _sparse_queries((*tensors, query_tokens, *options), "maxsim_sparse_queries")
    counted = _chosen(query_tokens, queries)
    if queries_mask is not None:
        counted = counted & (queries_mask != 0).unsqueeze(1)
    return with_empty_score(sums / counted.sum(dim=-1).clamp(min=1), tensors, empty_score)


def _chosen(query_tokens: Tensor, queries: Tensor) -> Tensor:
    """[Nq, Nd or K, Lq], bool: whether a query token is chosen for a document."""
    n_queries, length = queries.shape[:2]
    query_tokens = _positions(query_tokens, queries).long()
    chosen = query_tokens.new_zeros(*query_tokens.shape[:-1], length + 1, dtype=torch.bool)
    # The last column collects positions that choose no token.
    chosen.scatter_(-1, torch.where(query_tokens < 0, length, query_tokens), True)
    return chosen[..., :length].expand(n_queries, -1, -1)


def _positions(query_tokens: Tensor, queries: Tensor) -> Tensor:
    """`query_tokens` with -1 where no token is chosen, including positions past the end of a query."""
    return torch.where((query_tokens >= 0) & (query_tokens < queries.shape[1]), query_tokens, -1)


def _check_query_tokens(query_tokens: Tensor, tensors: Tensors) -> None:
    """Raise unless `query_tokens` has a valid shape and holds positions of query tokens."""
    queries, documents = tensors[:2]
    n_queries, shape, cu_seqlens = queries.shape[0], query_tokens.shape, tensors.documents_cu_seqlens
    n_documents = documents.shape[-3] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shared = documents.dim() < 4
    if shape[:-1] != (n_queries, n_documents) and not (shared and shape[:-1] == (n_documents,)):
        raise ValueError(
            f"query_tokens must have shape [{n_queries}, {n_documents}, k]"
            f"{f' or [{n_documents}, k]' if shared else ''}, got {list(shape)}"
        )
    check_indices("query_tokens", query_tokens, "positions", queries.shape[1], "queries", queries)


def _call(arguments: Sequence[Any]) -> tuple[Tensors, Tensor, Options]:
    tensors, options = call_of((*arguments[:N_TENSORS], *arguments[N_TENSORS + 1 :]))
    return tensors, arguments[N_TENSORS], options


def _check(arguments: tuple, called: str) -> tuple:
    tensors, query_tokens, options = _call(arguments)
    tensors, options = checked(tensors, options)
    return *tensors, query_tokens, *options


def _compute(arguments: tuple, with_argmax: bool) -> tuple[Tensor, Tensor | None]:
    tensors, query_tokens, options = _call(arguments)
    problem = checked_problem(tensors, options, with_argmax)
    _check_query_tokens(query_tokens, tensors)
    if query_tokens.shape[-1] == 0:
        query_tokens = F.pad(query_tokens, (0, 1), value=-1)
    query_tokens = query_tokens.expand(problem.n_queries, -1, -1)

    def by_kernels(*inputs: Any) -> tuple[Tensor, Tensor | None]:
        argmax = None
        if with_argmax:
            argmax = torch.full(problem.argmax_shape, -1, dtype=problem.argmax_dtype, device=problem.device)
        rows = query_tokens if query_tokens.stride(-1) == 1 else query_tokens.contiguous()
        return kernels().sparse_forward(*inputs, rows, argmax), argmax

    def in_blocks(operands: Operands, scores: Tensor, argmax: Tensor | None) -> None:
        _in_blocks(operands, _positions(query_tokens, tensors.queries), scores, argmax)

    saved = (-1, problem.argmax_dtype) if with_argmax else None
    return scores_by(problem, tensors, options, by_kernels, in_blocks, saved)


def _in_blocks(operands: Operands, query_tokens: Tensor, scores: Tensor, argmax: Tensor | None) -> None:
    """Write scores [Nq, Nd or K], and to `argmax`, prefilled with -1, the tokens that receive a gradient.

    `query_tokens` [Nq, Nd or K, k] holds -1 where no token is chosen.
    """
    (n_queries, count, k), length, grouped = query_tokens.shape, operands.query_length, operands.candidates is not None
    budget = block_budget(operands.device) // operands.queries.shape[-1]
    step = max(1, budget // k)
    for start in range(0, operands.n_documents, count):
        runs = [
            documents
            for first in range(start, start + count, step)
            for documents in operands.runs(first, min(first + step, start + count), budget)
            if operands.longest(documents.start, documents.stop)
        ]
        for documents in runs:
            block = Block(operands, documents, documents.stop - documents.start)
            columns = slice(documents.start - start, documents.stop - start)
            for query in [start // count] if grouped else range(n_queries):
                chosen = query_tokens[query, columns].sort(dim=-1).values
                counted = chosen >= 0
                counted[:, 1:] &= chosen[:, 1:] != chosen[:, :-1]
                chosen = chosen.clamp(min=0).long()
                rows = chosen + query * length
                best, tokens = maxima(block, operands.part(rows, rows.shape, counted), argmax is not None)
                scores[query, columns] = best.sum(dim=1)
                if argmax is not None and tokens is not None:
                    # The last column collects duplicates and unused slots.
                    token_columns = argmax.new_full((len(chosen), length + 1), -1)
                    token_columns.scatter_(1, torch.where(counted, chosen, length), tokens.to(argmax.dtype))
                    first_row = 0 if grouped else query * length
                    argmax[documents, first_row : first_row + length] = token_columns[:, :length]


def _compute_gradients(
    grad_scores: Tensor, saved: Sequence[Tensor], arguments: tuple, needs: tuple[bool, bool]
) -> tuple[Tensor | None, ...]:
    tensors, _, options = _call(arguments)
    return compute_gradients(tensors, options, grad_scores, saved[0], *needs)


def _shapes(*arguments) -> tuple[Tensor, Tensor]:
    tensors, query_tokens, options = _call(arguments)
    results = checked_shapes(tensors, options)
    _check_query_tokens(query_tokens, tensors)
    return results


_SCHEMA = f"{TENSORS_SCHEMA}, Tensor query_tokens, {OPTIONS_SCHEMA}"
_sparse_queries = Operation(
    "maxsim_sparse_queries",
    _SCHEMA,
    ("queries", "documents"),
    ("argmax",),
    _check,
    _compute,
    _compute_gradients,
    _shapes,
)
