"""Kernel entry points of the operations: bring tensors into the form that kernels take, and launch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..kernels.backward import Destination, finish_documents, maxsim_backward, write_gradients
from ..kernels.backward.residual import residual_backward
from ..kernels.chamfer import Side, chamfer_gradient, meet, settle
from ..kernels.config import INT32_MAX
from ..kernels.forward import Codes, maxsim_forward, quantized_forward, residual_forward, soft_forward, sparse_forward
from ..kernels.losses import ChunkedLoss, rescale
from ..kernels.metadata import list_metadata
from ..kernels.plan_backward import Chunks, chunks_of, halved
from ..kernels.plan_operations import decompressed_tokens
from ..kernels.rows import (
    Norms,
    active_tokens,
    cast_both,
    nonzero_rows,
    normalized_rows,
    norms_of,
    packed_again,
    pad,
)
from ..kernels.soft import soft_backward
from ..kernels.tables import HOPPER_MAX_SIZE
from ..kernels.xtr import SearchTensors, retrieve
from ..kernels.xtr_scores import score_retrieved
from ..problem import Comparison, Options, Pair, Problem, Results, Rule, Sets, Targets, Tensors, replaced
from .call_parts import active_counts, checked_masks, chunk_of, in_chunks, with_empty_score
from .checks import checked_problem
from .loss_call import LossResult
from .packing import host_bounds

__all__ = [
    "cast_both", "chamfer_gradients", "chamfer_nearest", "for_kernels", "gradients", "list_metadata", "loss",
    "maxsim_forward", "nonzero_rows", "normalized_rows", "pad", "quantized_forward", "rescale", "residual_backward",
    "residual_scores", "soft_forward", "soft_gradients", "sparse_forward", "with_codes", "xtr_scores",
]  # fmt: skip


def xtr_scores(problem: Problem, tensors: Tensors, rule: Rule, chunk_queries: int, out: Results) -> None:
    """Write XTR's scores and the other results to `out`, `chunk_queries` queries at a time; no size is 0."""
    problem, inputs = for_kernels(problem, tensors)
    active = bounds = None
    if inputs.documents_mask is not None:
        active, bounds = active_tokens(inputs.documents_mask)
    for chunk, part, results in in_chunks(problem, inputs, out, chunk_queries):
        retrieved = retrieve(chunk, SearchTensors(part.queries, part.documents, active, bounds), rule)
        score_retrieved(chunk, retrieved, bounds, part.queries_mask, rule, results)


def residual_scores(
    problem: Problem, tensors: Tensors, codes: Sequence[Tensor | None], bounds: np.ndarray | None = None
) -> tuple[Tensor, Tensor | None]:
    """Scores of residual codes, and argmax if the problem has one; `codes` are the fields of `Codes`, no size is 0.

    If there are more codes than are decompressed at a time, documents are scored in blocks. The host then needs the
    boundaries: `bounds` [Nd + 1], which may begin at any number, or else it reads them from the device. Calls that
    return an argmax, or that a CUDA graph captures, are not split.
    """
    inputs = Codes(*codes)  # type: ignore[arg-type]
    max_tokens = decompressed_tokens(problem, inputs.centroids.dtype, inputs.candidates is not None)
    capturing = problem.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if not 0 < max_tokens < problem.n_tokens or problem.with_argmax or capturing:
        return residual_forward(*with_codes(problem, tensors, codes))
    scores = torch.full(problem.scores_shape, problem.empty_score, dtype=torch.float32, device=problem.device)
    for documents, tokens in _blocks_of_documents(inputs.cu_seqlens, problem.n_tokens, max_tokens, bounds):
        block_cu_seqlens = inputs.cu_seqlens[documents.start : documents.stop + 1] - tokens.start
        sliced = {name: getattr(inputs, name)[tokens] for name in ("codes", "residuals", "scales")}
        block_inputs, block_tensors = (
            inputs._replace(**sliced, cu_seqlens=block_cu_seqlens),
            tensors._replace(documents_cu_seqlens=block_cu_seqlens),
        )
        n_documents, n_tokens = documents.stop - documents.start, tokens.stop - tokens.start
        block = problem._replace(n_documents=n_documents, n_tokens=n_tokens, document_length=n_tokens)
        scores[:, documents] = residual_forward(*with_codes(block, block_tensors, block_inputs))[0]
    return scores, None


def _blocks_of_documents(
    cu_seqlens: Tensor, n_tokens: int, max_tokens: int, bounds: np.ndarray | None
) -> list[tuple[slice, slice]]:
    """Blocks of consecutive documents with about `max_tokens` tokens, and the tokens; documents in no block are empty.

    A block takes the documents that begin within the first three quarters of `max_tokens`: the tail of the last one
    fits into the remaining quarter, unless it is longer than that.

    Without `bounds`, blocks are computed on the device of `cu_seqlens` (35 MB for 8.8 million passages), and the host
    reads a few values per block.
    """
    step = max(1, 3 * max_tokens // 4)
    if bounds is not None:
        firsts = np.searchsorted(bounds[:-1], bounds[0] + np.arange(0, n_tokens, step))
        first_documents, first_tokens = firsts.tolist(), (bounds[firsts] - bounds[0]).tolist()
    else:
        targets = torch.arange(0, n_tokens, step, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        starts = torch.searchsorted(cu_seqlens[:-1], targets)
        decreasing = (cu_seqlens.diff() < 0).any()
        values = torch.cat(
            [starts, cu_seqlens[starts], cu_seqlens[:1], cu_seqlens[-1:], decreasing.unsqueeze(0)]
        ).tolist()
        first_documents, first_tokens = values[: len(targets)], values[len(targets) : -3]
        if values[-3:] != [0, n_tokens, 0]:
            host_bounds("cu_seqlens", cu_seqlens, n_tokens, "codes")
    edges = [*zip(first_documents, first_tokens, strict=True), (len(cu_seqlens) - 1, n_tokens)]
    return [
        (slice(first, last), slice(start, stop)) for (first, start), (last, stop) in pairwise(edges) if start < stop
    ]


def with_codes(problem: Problem, tensors: Tensors, codes: Sequence[Tensor | None]) -> tuple[Problem, Tensors, Codes]:
    """Problem and tensors in the form that kernels take, and the codes, contiguous."""
    inputs = Codes(*[None if tensor is None else tensor.contiguous() for tensor in codes])  # type: ignore[arg-type]
    aligned = {name: _aligned(getattr(inputs, name)) for name in ("residuals", "centroids", "bucket_weights")}
    inputs = inputs._replace(**aligned)
    return *for_kernels(problem, tensors._replace(documents=inputs.residuals)), inputs


def _aligned(rows: Tensor) -> Tensor:
    """Rows aligned for loads of 4 bytes, or for copies of up to 16 bytes as the stride allows; cloned if needed."""
    return rows.clone() if rows.data_ptr() % max(4, math.gcd(16, rows.stride(0) * rows.itemsize)) else rows


def gradients(
    problem: Problem,
    tensors: Tensors,
    grad_scores: Tensor,
    argmax: Tensor,
    need_queries: bool,
    need_documents: bool,
    norms: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of queries and documents, of their shapes and dtype; None for one that is not needed.

    With `norms`, the inverse norms that queries and documents were multiplied by, the gradients are those of the
    embeddings before that.
    """
    problem, inputs = _with_padded_queries(*for_kernels(problem, tensors))
    inverse_norms = None if norms is None else Norms(*norms)
    if inverse_norms is not None and inputs.queries.shape[:2].numel() != inverse_norms.queries.numel():
        # The queries were padded.
        assert inputs.queries_cu_seqlens is not None
        padded, _ = pad(inverse_norms.queries.unsqueeze(1), inputs.queries_cu_seqlens, problem.query_length)
        inverse_norms = inverse_norms._replace(queries=padded)
    grad_queries, grad_documents = maxsim_backward(
        problem, inputs, grad_scores, argmax, need_queries, need_documents, inverse_norms, norms is not None
    )
    return _as_passed(grad_queries, tensors, inputs), grad_documents


def soft_gradients(
    problem: Problem,
    tensors: Tensors,
    beta: Tensor,
    grad_scores: Tensor,
    lse: Tensor,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of beta, queries and documents, of their shapes and dtypes; None for one that is not needed."""
    problem, inputs = _with_padded_queries(*for_kernels(problem, tensors))
    slope, queries, documents = soft_backward(problem, inputs, beta, grad_scores, lse, needs)
    return slope, _as_passed(queries, tensors, inputs), documents


def chamfer_nearest(problem: Problem, sets: Sets, squared: bool) -> tuple[Pair, Pair]:
    """For each point [N, L], the value of the nearest point of the other side, float32, and its index; no size is 0.

    The value is a squared distance or an inner product. It is 0, and the index -1, where a point is masked or the other
    set has no active point. The index is also -1 if no point is at a finite distance.
    """
    problem, reverse, x, y = _sides(problem, sets, True)
    x_keys, y_keys = meet(problem, x, y, squared)
    x_values, x_argmax = settle(problem, x, y, x_keys, squared)
    y_values, y_argmax = settle(reverse, y, x, y_keys, squared)
    return (x_values, y_values), (x_argmax, y_argmax)


def chamfer_gradients(
    problem: Problem, sets: Sets, argmax: Pair, weights: Pair, needs: tuple[bool, bool], squared: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and y; `weights` [N], per direction, scale the differences, or the nearest points."""
    problem, reverse, x, y = _sides(problem, sets, False)
    argmax = argmax[0].contiguous(), argmax[1].contiguous()
    weights = weights[0].float().contiguous(), weights[1].float().contiguous()
    return (
        chamfer_gradient(problem, x, y, argmax, weights, squared) if needs[0] else None,
        chamfer_gradient(reverse, y, x, argmax[::-1], weights[::-1], squared) if needs[1] else None,
    )


def _sides(problem: Problem, sets: Sets, with_masks: bool) -> tuple[Problem, Problem, Side, Side]:
    """Both sides with contiguous rows and boundaries on the device, and the problems of x against y and y against x."""
    x, y = (_side(*side_tensors, problem.device, with_masks) for side_tensors in (sets[::2], sets[1::2]))
    lengths = problem.query_length, problem.document_length
    return _meeting(problem, lengths, x, y), _meeting(problem, lengths[::-1], y, x), x, y


def _side(
    points: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, device: torch.device, with_masks: bool
) -> Side:
    points = points if points.stride(-1) == 1 else points.contiguous()
    active = counts = None
    if mask is not None and with_masks:
        active, counts = active_tokens(mask.contiguous())
    return Side(points, active, counts, None if cu_seqlens is None else _on_device(cu_seqlens, device))


def _meeting(problem: Problem, lengths: tuple[int, int], x: Side, y: Side) -> Problem:
    """The problem whose queries are the sets of x, each with the set of y as its only candidate."""
    (*_, x_set, x_point, _), (*_, y_set, y_point, _) = (0, *x.points.stride()), (0, *y.points.stride())
    return problem._replace(
        query_length=lengths[0],
        document_length=lengths[1],
        query_strides=(x_set, x_point),
        document_strides=(y_set, 0, y_point),
        n_tokens=y.points.shape[:-1].numel(),
    )


def _with_padded_queries(problem: Problem, inputs: Tensors) -> tuple[Problem, Tensors]:
    """View queries as [Nq, Lq, d]: packed queries that `for_kernels` did not pad all have the same length."""
    if inputs.queries.dim() == 2:
        inputs = inputs._replace(queries=inputs.queries.unflatten(0, (problem.n_queries, problem.query_length)))
    return problem, inputs


def _as_passed(grad_queries: Tensor | None, tensors: Tensors, inputs: Tensors) -> Tensor | None:
    """The gradient of padded queries in the shape of the call's queries."""
    if grad_queries is None or tensors.queries.dim() == 3:
        return grad_queries
    if grad_queries.shape[:2].numel() == tensors.queries.shape[0]:
        return grad_queries.view(tensors.queries.shape)
    assert inputs.queries_cu_seqlens is not None
    return packed_again(grad_queries, inputs.queries_cu_seqlens, tensors.queries.shape[0])


def loss(
    tensors: Tensors, targets: Targets, options: Options, comparison: Comparison, needs: tuple[bool, bool, bool]
) -> LossResult:
    """A reduced loss by kernels, one chunk of queries at a time; no size is 0.

    `needs`: whether the gradients of queries, documents and temperature are needed. Those of float16 embeddings are
    float32; the caller casts them after scaling them by the gradient of the loss.
    """
    problem = checked_problem(tensors, options, needs[0] or needs[1])
    chunks = chunks_of(problem, comparison.max_scratch_bytes)
    problem, inputs = for_kernels(problem, tensors)
    if options.reduction == "mean":
        # The empty score is set after the division.
        problem = problem._replace(empty_score=0.0)
    while True:
        try:
            return _loss_in_chunks(problem, inputs, targets, options, comparison, needs, chunks)
        except torch.OutOfMemoryError:
            if chunks.queries == 1:
                raise
        # Outside the handler, whose traceback keeps the failed attempt's tensors alive.
        chunks = halved(chunks, problem.n_queries)


def _loss_in_chunks(
    problem: Problem,
    tensors: Tensors,
    targets: Targets,
    options: Options,
    comparison: Comparison,
    needs: tuple[bool, bool, bool],
    chunks: Chunks,
) -> LossResult:
    """`loss` in the given chunks, of tensors in the form that kernels take."""
    shape = problem.n_queries, problem.n_documents, chunks.queries
    own_candidates = tensors.documents.dim() == 4
    chunked_loss = ChunkedLoss(comparison, targets, shape, own_candidates, needs[2], problem.device)
    if comparison.symmetric and chunks.number > 1:
        # The loss of any query depends on the scores of all queries, so a first pass takes them all in.
        without_argmax = problem._replace(kind=replaced(problem.kind, "with_argmax", False))
        for chunk in _parts(without_argmax, tensors, None, _NO_GRADIENTS, chunks):
            chunked_loss.meet(_scores_of_chunk(*chunk[1:3], options)[0], chunk[0])
    gradients, norms = _empty(problem, tensors, chunks, needs), None
    if problem.normalize and problem.with_argmax:
        # Shared by the scores and gradients of all chunks.
        norms = norms_of(tensors.queries, tensors.documents)
    for chunk in _parts(problem, tensors, norms, gradients, chunks):
        # A separate function, so that its temporaries are freed before the next chunk allocates.
        _run_chunk(chunked_loss, options, *chunk)
    if not problem.with_argmax:
        chunked_loss.sum()
    grad_documents = gradients.documents
    if grad_documents is not None and gradients.partial:
        grad_documents = _finished(problem, tensors.documents, norms, grad_documents)
    return LossResult(chunked_loss.loss, chunked_loss.statistics, gradients.queries, grad_documents, chunked_loss.slope)


_NO_GRADIENTS = Destination(None, None)


def _parts(
    problem: Problem, tensors: Tensors, norms: Norms | None, gradients: Destination, chunks: Chunks
) -> Iterator[tuple[int, Problem, Tensors, Norms | None, Destination]]:
    """Yield each chunk's first query, problem, and slices of tensors, norms and gradients."""
    if chunks.number == 1:
        yield 0, problem, tensors, norms, gradients
        return
    own_candidates, (grad_queries, grad_documents, partial, _) = tensors.documents.dim() == 4, gradients
    for first in range(0, problem.n_queries, chunks.queries):
        chunk = slice(first, first + chunks.queries)
        chunk_problem, chunk_tensors = chunk_of(problem, tensors, chunk)
        chunk_norms = norms and Norms(
            norms.queries[chunk], norms.documents[chunk] if own_candidates else norms.documents
        )
        destination = Destination(
            None if grad_queries is None else grad_queries[chunk],
            grad_documents[chunk] if own_candidates and grad_documents is not None else grad_documents,
            partial,
            partial and first > 0,
        )
        yield first, chunk_problem, chunk_tensors, chunk_norms, destination


def _run_chunk(
    chunked_loss: ChunkedLoss,
    options: Options,
    first: int,
    problem: Problem,
    tensors: Tensors,
    norms: Norms | None,
    destination: Destination,
) -> None:
    """Compute the losses and gradients of a chunk's queries."""
    scores, argmax, counts = _scores_of_chunk(problem, tensors, options, norms)
    if chunked_loss.comparison.symmetric and problem.n_queries == chunked_loss.n_queries:
        chunked_loss.meet(scores, first)
    if argmax is None:
        chunked_loss.compare(scores, first)
        return
    # It already includes the division by `counts`.
    grad_scores = chunked_loss.gradient(scores, first, counts)
    del scores
    write_gradients(problem, tensors, grad_scores, argmax, destination, norms)


def _scores_of_chunk(
    problem: Problem, tensors: Tensors, options: Options, norms: Norms | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scores, argmax if the problem has one, and, for a mean, the counts that scores were divided by."""
    scores, argmax = maxsim_forward(problem, tensors, norms=norms)
    if options.reduction != "mean":
        return scores, argmax, None
    counts = active_counts(problem, tensors)
    return with_empty_score(scores / counts, tensors, options.empty_score), argmax, counts.float()


def _empty(problem: Problem, tensors: Tensors, chunks: Chunks, needs: tuple[bool, bool, bool]) -> Destination:
    """Allocate the gradients that are needed, contiguous.

    Gradients that several chunks add to, and those of float16 embeddings, are float32.
    """
    partial = chunks.number > 1 and tensors.documents.dim() != 4
    dtype = torch.float32 if problem.dtype == torch.float16 else problem.dtype
    grad_queries = grad_documents = None
    if needs[0]:
        grad_queries = torch.empty_like(tensors.queries, dtype=dtype, memory_format=torch.contiguous_format)
    if needs[1]:
        dtype = torch.float32 if partial else dtype
        grad_documents = torch.empty_like(tensors.documents, dtype=dtype, memory_format=torch.contiguous_format)
    return Destination(grad_queries, grad_documents, partial)


def _finished(problem: Problem, documents: Tensor, norms: Norms | None, grad_sum: Tensor) -> Tensor:
    """The gradient of documents from the sum over all chunks."""
    dtype = torch.float32 if problem.dtype == torch.float16 else problem.dtype
    if norms is None:
        return grad_sum.to(dtype)
    grad_documents = torch.empty_like(grad_sum, dtype=dtype)
    finish_documents(problem, documents, norms.documents, grad_sum, grad_documents)
    return grad_documents


def for_kernels(problem: Problem, tensors: Tensors) -> tuple[Problem, Tensors]:
    """Prepare inputs for kernels: padded queries, contiguous rows and masks, boundaries on the device; no size is 0."""
    queries, documents, queries_mask, documents_mask, queries_bounds, bounds, candidates = tensors
    if documents.stride(-1) != 1:
        documents = documents.contiguous()
        problem = problem._replace(document_strides=(*(0, 0, *documents.stride())[-4:-1],), aligned=True)
    # Kernels use 32-bit offsets within a query. Query rows of long embeddings are copied 16 bytes at a time.
    unaligned = problem.size > HOPPER_MAX_SIZE and queries.data_ptr() % 16
    if unaligned or queries.stride(-1) != 1 or problem.query_length * queries.stride(-2) > INT32_MAX:
        queries = queries.clone(memory_format=torch.contiguous_format)
        # A clone keeps arbitrary strides for dimensions of size 1.
        query_strides = queries.stride()[:2]
        if queries.dim() == 2:
            query_strides = problem.query_length * queries.stride(0), queries.stride(0)
        problem = problem._replace(query_strides=query_strides)
    if not queries.is_cuda:
        # Triton's interpreter: the values of masks can be checked.
        queries_mask, documents_mask = checked_masks(tensors)
        dtype = None if queries_mask is None else queries_mask.dtype
        problem = problem._replace(kind=replaced(problem.kind, "queries_mask", dtype))
    if queries_mask is not None:
        queries_mask = queries_mask.contiguous()
    if documents_mask is not None:
        documents_mask = documents_mask.contiguous()
    if bounds is not None:
        bounds = _on_device(bounds, problem.device)
        if candidates is not None:
            candidates = _on_device(candidates, problem.device)
        if queries_bounds is not None and queries.shape[0] != problem.n_queries * problem.query_length:
            queries_bounds = _on_device(queries_bounds, problem.device)
            queries, queries_mask = pad(queries, queries_bounds, problem.query_length)
            kind = replaced(problem.kind, "queries_mask", torch.bool)
            problem = problem._replace(query_strides=queries.stride()[:2], kind=kind)
    return problem, Tensors(queries, documents, queries_mask, documents_mask, queries_bounds, bounds, candidates)


def _on_device(boundaries: Tensor, device: torch.device) -> Tensor:
    return boundaries.to(device, non_blocking=True).contiguous()
