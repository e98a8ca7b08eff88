"""MaxSim of documents that are residual codes, decompressed while they are scored.

`maxsim_residual_reference` is the definition: decompress, then score. The operator `pylate_flash::maxsim_residual`
computes the same on the codes, by Triton kernels (`kernels.forward`), in which no decompressed embedding goes to
memory; elsewhere documents are decompressed a block at a time, and scored as any others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.choice import choose
from ..problem import Options, Problem, Tensors, accumulation_dtype, replaced
from .by_block import DocumentBlock, at, compute_by_block, document_blocks, of_block
from .call_parts import active_counts
from .checks import check, check_choice, check_embeddings, check_indices, check_tensor, checked_problem
from .compute import compute_gradients, kernels
from .maxsim import maxsim_reference
from .maxsim_operator import checked
from .operator import Operation
from .packing import host_bounds, padded
from .products import block_budget
from .residual_codes import ResidualCodes


def maxsim_residual_reference(
    queries: Tensor, documents: ResidualCodes, *, candidates: Tensor | None = None, **options: Any
) -> Tensor:
    """The definition: decompresses to the type of the queries, and scores as `maxsim_reference` does, in float64.

    Arguments and result are those of `maxsim_residual`, except that it checks nothing and returns float64.
    """
    values, mask = padded(documents.decompress(queries.dtype).double(), documents.cu_seqlens)
    if candidates is not None:
        # -1 is the last document, which has no token.
        values, mask = F.pad(values, (0, 0, 0, 0, 0, 1))[candidates], F.pad(mask, (0, 0, 0, 1))[candidates]
    return maxsim_reference(queries.double(), values, documents_mask=mask, **options)


def maxsim_residual(
    queries: Tensor,
    documents: ResidualCodes,
    *,
    queries_mask: Tensor | None = None,
    candidates: Tensor | None = None,
    reduction: str = "sum",
    empty_score: float = 0.0,
    precision: str = "int8",
    implementation: str = "auto",
) -> Tensor:
    """MaxSim scores of queries against documents that are residual codes, differentiable by the queries.

    Parameters
    ----------
    queries
        [Nq, Lq, d], float16, bfloat16, float32 or float64. Under autocast, they take the autocast type.
    documents
        Nd documents, on the device of the queries (`ResidualCodec.compress`, `read_fast_plaid`). Decompressed, they are
        normalised, and rounded to the type of the queries.
    candidates
        None: every query meets every document. [Nq, K], int32 or int64: query i meets only documents candidates[i], as
        when a search is reranked; -1 stands for no document. Other values are an error on the CPU. On a GPU, where to
        look would be to wait, they are taken as they are.
    empty_score
        Score of a document without tokens, and of no document. A query with no active token scores 0 against others.
    precision
        "int8": on a GPU, where there is no gradient to take, short queries and bucket weights may be rounded to 8 bits,
        and products of centroids to 16, which is several times faster. On Cranfield it changes scores by 1.3e-4 of them
        on average with 4 bits (weights by 1e-4, queries by 7e-5, centroids by 3e-5) and 7e-5 with 2, by 9e-4 and 6e-4
        at most. Decompressed, embeddings rounded to bfloat16 change them by up to 6e-4 as well. For 5 to 64
        queries of 32 tokens, embeddings and their scales may be rounded to float16 instead, which changes scores of
        random codes by 1.6e-4 of them at most.
        "full": what the decompressed embeddings score.
    queries_mask, reduction, implementation
        As in `maxsim`.

    Returns
    -------
    Tensor
        [Nq, Nd] or [Nq, K]; type, precision, NaN, ties and the gradient of the queries as in `maxsim` of the
        decompressed embeddings.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `maxsim`; also if `documents` are no `ResidualCodes`, or a candidate is no document.

    Examples
    --------
    >>> codec = ResidualCodec(torch.eye(8), torch.tensor([-0.1, 0.0, 0.1]), torch.tensor([-0.2, 0.0, 0.0, 0.2]))
    >>> documents = codec.compress(torch.eye(8), torch.tensor([0, 3, 8]))
    >>> maxsim_residual(torch.eye(8).view(2, 4, 8), documents)
    tensor([[3., 1.],
            [0., 4.]])
    """
    if not isinstance(documents, ResidualCodes):
        raise TypeError(f"documents must be ResidualCodes, got {type(documents).__name__}")
    arguments = (
        queries, queries_mask, documents.codes, documents.residuals, documents.centroids, documents.bucket_weights,
        documents.cu_seqlens, documents.scales, candidates, reduction, empty_score, precision, implementation,
    )  # fmt: skip
    return _maxsim_residual(arguments, "maxsim_residual")


def maxsim_residual_by_bounds(
    queries: Tensor, documents: ResidualCodes, bounds: np.ndarray, queries_mask: Tensor | None, empty_score: float
) -> Tensor:
    """`maxsim_residual` without gradients, of documents whose boundaries the host has, from any number on [Nd + 1].

    For many queries, codes are decompressed for some documents after the others, and to read where these begin would be
    to wait for the GPU.
    """
    arguments = (
        queries, queries_mask, documents.codes, documents.residuals, documents.centroids, documents.bucket_weights,
        documents.cu_seqlens, documents.scales, None, "sum", empty_score, "int8", "auto",
    )  # fmt: skip
    return _compute(_check(arguments, "maxsim_residual"), False, bounds)[0]


class _Call(NamedTuple):
    """The arguments of the operator."""

    queries: Tensor
    queries_mask: Tensor | None
    codes: Tensor
    residuals: Tensor
    centroids: Tensor
    bucket_weights: Tensor
    cu_seqlens: Tensor
    scales: Tensor
    candidates: Tensor | None
    reduction: str
    empty_score: float
    precision: str
    implementation: str


def _options(call: _Call) -> Options:
    # Any bound on the length of a document will do.
    length = call.codes.shape[0]
    return Options(0, length, 0, False, call.reduction, "exclude", call.empty_score, call.implementation)


def _tensors(call: _Call) -> Tensors:
    """With what has the shape of the decompressed documents in their place."""
    shaped = call.scales.unsqueeze(1).expand(-1, call.centroids.shape[1])
    return Tensors(call.queries, shaped, call.queries_mask, documents_cu_seqlens=call.cu_seqlens)


def _shape(call: _Call) -> tuple[int, int]:
    """That of the scores."""
    met = call.cu_seqlens.shape[0] - 1 if call.candidates is None else call.candidates.shape[1]
    return call.queries.shape[0], met


def _check(arguments: tuple, called: str) -> tuple:
    call = _Call(*arguments)
    check_embeddings("queries", call.queries, {3: "[Nq, Lq, d]"})
    check_choice("precision", call.precision, ("int8", "full"))
    # The documents are checked already, and autocast has no say in their type.
    (queries, *_), options = checked(Tensors(call.queries, call.queries, call.queries_mask), _options(call))
    if call.candidates is not None:
        _check_candidates(call.candidates, call.cu_seqlens, queries)
    return call._replace(queries=queries, empty_score=options.empty_score)


def _check_candidates(candidates: Tensor, cu_seqlens: Tensor, queries: Tensor) -> None:
    check_tensor("candidates", candidates, {2: "[Nq, K]"})
    if candidates.shape[0] != queries.shape[0]:
        raise ValueError(
            f"candidates must have one row per query, Nq = {queries.shape[0]}, got {list(candidates.shape)}"
        )
    check_indices("candidates", candidates, "numbers of documents", len(cu_seqlens) - 1, "documents", cu_seqlens)


def _problem_of(call: _Call, with_argmax: bool) -> tuple[Problem, bool]:
    """The problem, and whether kernels serve it; where there are candidates, every query is a group of as many."""
    problem = checked_problem(_tensors(call), _options(call), with_argmax, quantized=True)
    if call.precision == "int8" and not with_argmax:
        problem = problem._replace(kind=replaced(problem.kind, "quantize_queries", True))
    if call.candidates is not None:
        problem = problem._replace(groups=problem.n_queries, n_documents=call.candidates.shape[1])
    chosen = choose(call.implementation, problem.device, problem.dtype, problem.size)
    return problem, chosen == "triton" and not (problem.is_empty or problem.n_documents == 0)


def _compute(arguments: tuple, with_argmax: bool, bounds: np.ndarray | None = None) -> tuple[Tensor, Tensor | None]:
    """Scores, and argmax, int32, of every document of every group, if asked for."""
    call = _Call(*arguments)
    problem, by_kernels = _problem_of(call, with_argmax)
    if not by_kernels:
        tensors, options, blocks, produce = _by_block(call)
        scores, argmax = compute_by_block(tensors, options, with_argmax, blocks, produce)
        return scores.view(_shape(call)).clone(), None if argmax is None else argmax.int()
    scores, argmax = kernels().residual_scores(problem, _tensors(call), call[2:9], bounds)
    if call.reduction == "mean":
        scores = scores / active_counts(problem, _tensors(call))
    if call.reduction == "mean" and call.empty_score != 0.0:
        # The score of an empty document is not divided.
        empty = call.cu_seqlens.diff() == 0
        if call.candidates is not None:
            # -1 is the last document, which has no token.
            empty = F.pad(empty, (0, 1), value=True)[call.candidates]
        scores = scores.masked_fill(empty, call.empty_score)
    return scores, argmax


def _compute_gradients(grad_scores: Tensor, saved: Sequence[Tensor], arguments: tuple, needs: tuple) -> tuple[Tensor]:
    """The gradient of the queries, contiguous and in their type."""
    call, (argmax,) = _Call(*arguments), saved
    problem, by_kernels = _problem_of(call, False)
    if by_kernels:
        if call.reduction == "mean":
            grad_scores = grad_scores / active_counts(problem, _tensors(call))
        inputs = kernels().with_codes(problem, _tensors(call), call[2:9])
        return (kernels().residual_backward(*inputs, grad_scores, argmax),)
    tensors, options, blocks, produce = _by_block(call)
    flow = grad_scores if call.candidates is None else grad_scores.flatten()
    total = torch.zeros_like(tensors.queries, memory_format=torch.contiguous_format)
    for block in blocks:
        part = of_block(tensors, block, produce(block))
        grad, _ = compute_gradients(part, options, at(flow, block.scores), at(argmax, block.documents), True, False)
        assert grad is not None
        total += grad
    return (total.to(call.queries.dtype),)


def _by_block(call: _Call) -> tuple[Tensors, Options, list[DocumentBlock], Callable[[DocumentBlock], Tensor]]:
    """The call as one of packed documents, decompressed as many at a time as similarities are held at once.

    Those of candidates are counted query by query.
    """
    documents, (n_queries, met) = ResidualCodes(*call[2:8]), _shape(call)
    bounds = host_bounds("cu_seqlens", call.cu_seqlens, len(call.codes), "codes")
    starts, owned, lengths = bounds[:-1], None, np.diff(bounds)
    if call.candidates is not None:
        # -1 is the last document, which has no token.
        candidates = call.candidates.cpu().numpy().ravel()
        starts, lengths = np.append(starts, 0)[candidates], np.append(lengths, 0)[candidates]
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        owned = torch.from_numpy(np.arange(n_queries + 1) * met)
    # Nothing is lost of what was rounded, and sums are of more bits.
    wide = accumulation_dtype(call.queries.dtype)

    def decompressed(block: DocumentBlock) -> Tensor:
        tokens: slice | Tensor = block.rows
        if owned is not None:
            some = slice(None) if block.documents == () else block.documents
            own = np.arange(bounds[-1])[block.rows] - np.repeat(bounds[:-1][some], lengths[some])
            tokens = torch.from_numpy(np.repeat(starts[some], lengths[some]) + own).to(call.codes.device)
        return documents.decompress_tokens(tokens, call.queries.dtype).to(wide)

    # Of their shape only.
    tokens = call.codes.new_empty(0).expand(int(bounds[-1]), 0)
    tensors = Tensors(call.queries.to(wide), tokens, call.queries_mask, None, None, torch.from_numpy(bounds), owned)
    options = _options(call)._replace(
        max_document_length=int(lengths.max(initial=0)), max_candidates=met, implementation="blocked"
    )
    blocks = document_blocks(tensors, max(1, block_budget(call.queries.device) // documents.size))
    return tensors, options, blocks, decompressed


def _shapes(*arguments) -> tuple[Tensor, Tensor]:
    call = _Call(*arguments)
    check(_tensors(call), quantized=True)
    (n_queries, met), rows = _shape(call), call.queries.shape[1]
    scores = call.queries.new_empty(_shape(call), dtype=accumulation_dtype(call.queries.dtype))
    shape = (met, n_queries * rows) if call.candidates is None else (n_queries * met, rows)
    return scores, scores.new_empty(shape, dtype=torch.int32)


_SCHEMA = (
    "Tensor queries, Tensor? queries_mask, Tensor codes, Tensor residuals, Tensor centroids, Tensor bucket_weights, "
    "Tensor cu_seqlens, Tensor scales, Tensor? candidates, str reduction, float empty_score, str precision, "
    "str implementation"
)
_maxsim_residual = Operation(
    "maxsim_residual", _SCHEMA, ("queries",), ("argmax",), _check, _compute, _compute_gradients, _shapes
)
