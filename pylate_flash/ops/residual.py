"""MaxSim of documents stored as residual codes, decompressed during scoring.

`maxsim_residual_reference` is the definition: decompress, then score. The operator `pylate_flash::maxsim_residual`
computes the same from the codes, with Triton kernels (`kernels.forward`) that write no decompressed embedding to
memory; without kernels, documents are decompressed block by block and scored like any others.
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
    """The definition: decompresses to the dtype of the queries, and scores with `maxsim_reference` in float64.

    Arguments and result are those of `maxsim_residual`, except that it checks nothing and returns float64.
    """
    values, mask = padded(documents.decompress(queries.dtype).double(), documents.cu_seqlens)
    if candidates is not None:
        # -1 selects the appended last document, which has no tokens.
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
    """MaxSim scores of queries against documents stored as residual codes, differentiable with respect to queries.

    Parameters
    ----------
    queries
        [Nq, Lq, d], float16, bfloat16, float32 or float64. Under autocast, they take the autocast type.
    documents
        Nd documents, on the device of the queries (`ResidualCodec.compress`, `read_fast_plaid`). Decompressed
        embeddings are normalised, and rounded to the dtype of the queries.
    candidates
        None: every query is scored against every document. [Nq, K], int32 or int64: query i is scored only against
        documents candidates[i], as in reranking; -1 is no document. Other values are an error on the CPU. On a GPU,
        where checking would synchronize, they are not checked.
    empty_score
        Score of a document without tokens, and of candidate -1. A query with no active token scores 0 against others.
    precision
        "int8": on a GPU, without gradients, short queries and bucket weights may be rounded to 8 bits, and centroid
        products to 16, which is several times faster. On Cranfield, the relative change of scores is 1.3e-4 on average
        with 4 bits (weights 1e-4, queries 7e-5, centroids 3e-5) and 7e-5 with 2 bits, and at most 9e-4 and 6e-4.
        Rounding decompressed embeddings to bfloat16 changes them by up to 6e-4 as well. For 5 to 64 queries of 32
        tokens, embeddings and their scales may be rounded to float16 instead, which changes scores of random codes by
        at most 1.6e-4, relatively.
        "full": the scores of the decompressed embeddings.
    queries_mask, reduction, implementation
        As in `maxsim`.

    Returns
    -------
    Tensor
        [Nq, Nd] or [Nq, K]; dtype, precision, NaN, ties and the gradient of the queries as in `maxsim` of the
        decompressed embeddings.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `maxsim`; also if `documents` is not `ResidualCodes`, or a candidate is not a valid document.

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
    """`maxsim_residual` without gradients, with document boundaries on the host [Nd + 1], from any first value on.

    For many queries, documents are decompressed chunk by chunk, and reading the chunk boundaries from the GPU would
    synchronize.
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
    # Any upper bound on the document length will do.
    length = call.codes.shape[0]
    return Options(0, length, 0, False, call.reduction, "exclude", call.empty_score, call.implementation)


def _tensors(call: _Call) -> Tensors:
    """The tensors of the call, with a placeholder in the shape of the decompressed documents."""
    documents = call.scales.unsqueeze(1).expand(-1, call.centroids.shape[1])
    return Tensors(call.queries, documents, call.queries_mask, documents_cu_seqlens=call.cu_seqlens)


def _shape(call: _Call) -> tuple[int, int]:
    """Shape of the scores."""
    n_documents = call.cu_seqlens.shape[0] - 1 if call.candidates is None else call.candidates.shape[1]
    return call.queries.shape[0], n_documents


def _check(arguments: tuple, called: str) -> tuple:
    call = _Call(*arguments)
    check_embeddings("queries", call.queries, {3: "[Nq, Lq, d]"})
    check_choice("precision", call.precision, ("int8", "full"))
    # Documents are already checked, and autocast does not apply to them.
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
    """The problem, and whether kernels serve it; with candidates, each query is a group of K documents."""
    problem = checked_problem(_tensors(call), _options(call), with_argmax, quantized=True)
    if call.precision == "int8" and not with_argmax:
        problem = problem._replace(kind=replaced(problem.kind, "quantize_queries", True))
    if call.candidates is not None:
        problem = problem._replace(groups=problem.n_queries, n_documents=call.candidates.shape[1])
    chosen = choose(call.implementation, problem.device, problem.dtype, problem.size)
    return problem, chosen == "triton" and not (problem.is_empty or problem.n_documents == 0)


def _compute(arguments: tuple, with_argmax: bool, bounds: np.ndarray | None = None) -> tuple[Tensor, Tensor | None]:
    """Scores, and with `with_argmax` the int32 argmax of every document of every group."""
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
        # `empty_score` is not divided by the token count.
        empty = call.cu_seqlens.diff() == 0
        if call.candidates is not None:
            # -1 selects the appended last document, which has no tokens.
            empty = F.pad(empty, (0, 1), value=True)[call.candidates]
        scores = scores.masked_fill(empty, call.empty_score)
    return scores, argmax


def _compute_gradients(grad_scores: Tensor, saved: Sequence[Tensor], arguments: tuple, needs: tuple) -> tuple[Tensor]:
    """The gradient of the queries, contiguous and in their dtype."""
    call, (argmax,) = _Call(*arguments), saved
    problem, by_kernels = _problem_of(call, False)
    if by_kernels:
        if call.reduction == "mean":
            grad_scores = grad_scores / active_counts(problem, _tensors(call))
        inputs = kernels().with_codes(problem, _tensors(call), call[2:9])
        return (kernels().residual_backward(*inputs, grad_scores, argmax),)
    tensors, options, blocks, produce = _by_block(call)
    grads = grad_scores if call.candidates is None else grad_scores.flatten()
    total = torch.zeros_like(tensors.queries, memory_format=torch.contiguous_format)
    for block in blocks:
        part = of_block(tensors, block, produce(block))
        grad, _ = compute_gradients(part, options, at(grads, block.scores), at(argmax, block.documents), True, False)
        assert grad is not None
        total += grad
    return (total.to(call.queries.dtype),)


def _by_block(call: _Call) -> tuple[Tensors, Options, list[DocumentBlock], Callable[[DocumentBlock], Tensor]]:
    """The call on packed documents, in blocks to decompress that fit the budget of `block_budget`.

    Candidates are numbered query by query.
    """
    documents, (n_queries, n_documents) = ResidualCodes(*call[2:8]), _shape(call)
    bounds = host_bounds("cu_seqlens", call.cu_seqlens, len(call.codes), "codes")
    starts, groups, lengths = bounds[:-1], None, np.diff(bounds)
    if call.candidates is not None:
        # -1 selects the appended last document, which has no tokens.
        candidates = call.candidates.cpu().numpy().ravel()
        starts, lengths = np.append(starts, 0)[candidates], np.append(lengths, 0)[candidates]
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        groups = torch.from_numpy(np.arange(n_queries + 1) * n_documents)
    # Conversion of the rounded embeddings is exact, and sums have more precision.
    dtype = accumulation_dtype(call.queries.dtype)

    def decompressed(block: DocumentBlock) -> Tensor:
        tokens: slice | Tensor = block.rows
        if groups is not None:
            chosen = slice(None) if block.documents == () else block.documents
            offsets = np.arange(bounds[-1])[block.rows] - np.repeat(bounds[:-1][chosen], lengths[chosen])
            tokens = torch.from_numpy(np.repeat(starts[chosen], lengths[chosen]) + offsets).to(call.codes.device)
        return documents.decompress_tokens(tokens, call.queries.dtype).to(dtype)

    # Only the shape is used.
    tokens = call.codes.new_empty(0).expand(int(bounds[-1]), 0)
    tensors = Tensors(call.queries.to(dtype), tokens, call.queries_mask, None, None, torch.from_numpy(bounds), groups)
    options = _options(call)._replace(
        max_document_length=int(lengths.max(initial=0)), max_candidates=n_documents, implementation="blocked"
    )
    blocks = document_blocks(tensors, max(1, block_budget(call.queries.device) // documents.size))
    return tensors, options, blocks, decompressed


def _shapes(*arguments) -> tuple[Tensor, Tensor]:
    call = _Call(*arguments)
    check(_tensors(call), quantized=True)
    (n_queries, n_documents), rows = _shape(call), call.queries.shape[1]
    scores = call.queries.new_empty(_shape(call), dtype=accumulation_dtype(call.queries.dtype))
    shape = (n_documents, n_queries * rows) if call.candidates is None else (n_queries * n_documents, rows)
    return scores, scores.new_empty(shape, dtype=torch.int32)


_SCHEMA = (
    "Tensor queries, Tensor? queries_mask, Tensor codes, Tensor residuals, Tensor centroids, Tensor bucket_weights, "
    "Tensor cu_seqlens, Tensor scales, Tensor? candidates, str reduction, float empty_score, str precision, "
    "str implementation"
)
_maxsim_residual = Operation(
    "maxsim_residual", _SCHEMA, ("queries",), ("argmax",), _check, _compute, _compute_gradients, _shapes
)
