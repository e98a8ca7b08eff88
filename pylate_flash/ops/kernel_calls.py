"""What the operations ask of the kernels: tensors brought into the form that these take."""

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
from ..kernels.described import look
from ..kernels.forward import Codes, maxsim_forward, quantized_forward, residual_forward, soft_forward, sparse_forward
from ..kernels.losses import ChunkedLoss, rescale
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
    through_normalized_rows,
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
    "cast_both", "chamfer_gradients", "chamfer_nearest", "for_kernels", "gradients", "look", "loss", "maxsim_forward",
    "nonzero_rows", "normalized_rows", "pad", "quantized_forward", "rescale", "residual_backward", "residual_scores",
    "soft_forward", "soft_gradients", "sparse_forward", "through_normalized_rows", "with_codes", "xtr_scores",
]  # fmt: skip


def xtr_scores(problem: Problem, tensors: Tensors, rule: Rule, number: int, to: Results) -> None:
    """Leave XTR's scores, and what comes with them, in `to`, `number` queries at a time; no size is 0."""
    problem, inputs = for_kernels(problem, tensors)
    active = bounds = None
    if inputs.documents_mask is not None:
        active, bounds = active_tokens(inputs.documents_mask)
    for chunk, part, results in in_chunks(problem, inputs, to, number):
        found = retrieve(chunk, SearchTensors(part.queries, part.documents, active, bounds), rule)
        score_retrieved(chunk, found, bounds, part.queries_mask, rule, results)


def residual_scores(
    problem: Problem, tensors: Tensors, codes: Sequence[Tensor | None], bounds: np.ndarray | None = None
) -> tuple[Tensor, Tensor | None]:
    """Scores of residual codes, and argmax if the problem has them; `codes` are those of `Codes`, no size is 0.

    Of more codes than are decompressed at a time, documents are scored in blocks, for which the host has to read where
    they begin, but from `bounds` [Nd + 1], if it has them, from any number on. A graph cannot, and calls that find
    argmax do not.
    """
    inputs = Codes(*codes)  # type: ignore[arg-type]
    most = decompressed_tokens(problem, inputs.centroids.dtype, inputs.candidates is not None)
    capturing = problem.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if not 0 < most < problem.n_tokens or problem.with_argmax or capturing:
        return residual_forward(*with_codes(problem, tensors, codes))
    scores = torch.full(problem.scores_shape, problem.empty_score, dtype=torch.float32, device=problem.device)
    for documents, tokens in _blocks_of_documents(inputs.cu_seqlens, problem.n_tokens, most, bounds):
        own = inputs.cu_seqlens[documents.start : documents.stop + 1] - tokens.start
        part = {name: getattr(inputs, name)[tokens] for name in ("codes", "residuals", "scales")}
        some, of_block = inputs._replace(**part, cu_seqlens=own), tensors._replace(documents_cu_seqlens=own)
        n_documents, n_tokens = documents.stop - documents.start, tokens.stop - tokens.start
        block = problem._replace(n_documents=n_documents, n_tokens=n_tokens, document_length=n_tokens)
        scores[:, documents] = residual_forward(*with_codes(block, of_block, some))[0]
    return scores, None


def _blocks_of_documents(
    cu_seqlens: Tensor, n_tokens: int, most: int, bounds: np.ndarray | None
) -> list[tuple[slice, slice]]:
    """Consecutive documents with about `most` tokens, and these tokens; a document of no block has none.

    A block takes the documents that begin within three quarters of `most`: what the last one has beyond them fits into
    the rest, or is longer than that.

    Unless the host has them, they are found where the boundaries are, which of 8.8 million passages are 35 MB: the host
    reads a few for each block.
    """
    step = max(1, 3 * most // 4)
    if bounds is not None:
        firsts = np.searchsorted(bounds[:-1], bounds[0] + np.arange(0, n_tokens, step))
        first_documents, first_tokens = firsts.tolist(), (bounds[firsts] - bounds[0]).tolist()
    else:
        targets = torch.arange(0, n_tokens, step, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        found = torch.searchsorted(cu_seqlens[:-1], targets)
        falling = (cu_seqlens.diff() < 0).any()
        read = torch.cat([found, cu_seqlens[found], cu_seqlens[:1], cu_seqlens[-1:], falling.unsqueeze(0)]).tolist()
        first_documents, first_tokens = read[: len(targets)], read[len(targets) : -3]
        if read[-3:] != [0, n_tokens, 0]:
            host_bounds("cu_seqlens", cu_seqlens, n_tokens, "codes")
    edges = [*zip(first_documents, first_tokens, strict=True), (len(cu_seqlens) - 1, n_tokens)]
    return [
        (slice(first, last), slice(start, stop)) for (first, start), (last, stop) in pairwise(edges) if start < stop
    ]


def with_codes(problem: Problem, tensors: Tensors, codes: Sequence[Tensor | None]) -> tuple[Problem, Tensors, Codes]:
    """Both as kernels take them, and the codes contiguous."""
    inputs = Codes(*[None if tensor is None else tensor.contiguous() for tensor in codes])  # type: ignore[arg-type]
    aligned = {name: _aligned(getattr(inputs, name)) for name in ("residuals", "centroids", "bucket_weights")}
    inputs = inputs._replace(**aligned)
    return *for_kernels(problem, tensors._replace(documents=inputs.residuals)), inputs


def _aligned(rows: Tensor) -> Tensor:
    """The same rows where each can be loaded by words, or copied by 16 bytes if it is that long."""
    return rows.clone() if rows.data_ptr() % max(4, math.gcd(16, rows.stride(0) * rows.itemsize)) else rows


def gradients(
    problem: Problem, tensors: Tensors, grad_scores: Tensor, argmax: Tensor, need_queries: bool, need_documents: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of queries and documents, in their shapes and type; None for one that is not needed."""
    problem, inputs = _with_padded_queries(*for_kernels(problem, tensors))
    grad_queries, grad_documents = maxsim_backward(problem, inputs, grad_scores, argmax, need_queries, need_documents)
    return _as_passed(grad_queries, tensors, inputs), grad_documents


def soft_gradients(
    problem: Problem,
    tensors: Tensors,
    beta: Tensor,
    grad_scores: Tensor,
    lse: Tensor,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of beta, queries and documents, in their shapes and types; None for one that is not needed."""
    problem, inputs = _with_padded_queries(*for_kernels(problem, tensors))
    slope, queries, documents = soft_backward(problem, inputs, beta, grad_scores, lse, needs)
    return slope, _as_passed(queries, tensors, inputs), documents


def chamfer_nearest(problem: Problem, sets: Sets, squared: bool) -> tuple[Pair, Pair]:
    """How near the nearest point of the other side is to every point [N, L], float32, and its index; no size is 0.

    Squared distances or inner products, 0 and -1 where a point is masked, or has none to meet; of the infinitely far,
    the index is -1 too.
    """
    problem, reverse, x, y = _sides(problem, sets, True)
    x_keys, y_keys = meet(problem, x, y, squared)
    x_values, x_argmax = settle(problem, x, y, x_keys, squared)
    y_values, y_argmax = settle(reverse, y, x, y_keys, squared)
    return (x_values, y_values), (x_argmax, y_argmax)


def chamfer_gradients(
    problem: Problem, sets: Sets, argmax: Pair, weights: Pair, needs: tuple[bool, bool], squared: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and y; `weights` [N] are those of differences or of other points, by either way."""
    problem, reverse, x, y = _sides(problem, sets, False)
    argmax = argmax[0].contiguous(), argmax[1].contiguous()
    weights = weights[0].float().contiguous(), weights[1].float().contiguous()
    return (
        chamfer_gradient(problem, x, y, argmax, weights, squared) if needs[0] else None,
        chamfer_gradient(reverse, y, x, argmax[::-1], weights[::-1], squared) if needs[1] else None,
    )


def _sides(problem: Problem, sets: Sets, with_masks: bool) -> tuple[Problem, Problem, Side, Side]:
    """Both sides of contiguous rows, with boundaries on the device, and the problems of x with y, and of y with x."""
    x, y = (_side(*of_side, problem.device, with_masks) for of_side in (sets[::2], sets[1::2]))
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
    """The problem of x as the queries, each with a document of y of its own."""
    (*_, x_set, x_point, _), (*_, y_set, y_point, _) = (0, *x.points.stride()), (0, *y.points.stride())
    return problem._replace(
        query_length=lengths[0],
        document_length=lengths[1],
        query_strides=(x_set, x_point),
        document_strides=(y_set, 0, y_point),
        n_tokens=y.points.shape[:-1].numel(),
    )


def _with_padded_queries(problem: Problem, inputs: Tensors) -> tuple[Problem, Tensors]:
    """Both with the queries as [Nq, Lq, d]: packed ones that are not padded by now are all of one length."""
    if inputs.queries.dim() == 2:
        inputs = inputs._replace(queries=inputs.queries.unflatten(0, (problem.n_queries, problem.query_length)))
    return problem, inputs


def _as_passed(grad_queries: Tensor | None, tensors: Tensors, inputs: Tensors) -> Tensor | None:
    """The gradient of padded queries in the shape of those of the call."""
    if grad_queries is None or tensors.queries.dim() == 3:
        return grad_queries
    if grad_queries.shape[:2].numel() == tensors.queries.shape[0]:
        return grad_queries.view(tensors.queries.shape)
    assert inputs.queries_cu_seqlens is not None
    return packed_again(grad_queries, inputs.queries_cu_seqlens, tensors.queries.shape[0])


def loss(
    tensors: Tensors, targets: Targets, options: Options, comparison: Comparison, needs: tuple[bool, bool, bool]
) -> LossResult:
    """A loss that is reduced by kernels, a chunk of queries after the other; no size is 0.

    `needs`: whether the gradients of queries, documents and temperature are needed. Those of float16 embeddings are
    float32, and are to be cast after they were multiplied by that of the loss.
    """
    problem = checked_problem(tensors, options, needs[0] or needs[1])
    chunks = chunks_of(problem, comparison.max_scratch_bytes)
    problem, inputs = for_kernels(problem, tensors)
    if options.reduction == "mean":
        # The score of an empty document is not divided.
        problem = problem._replace(empty_score=0.0)
    while True:
        try:
            return _loss_in_chunks(problem, inputs, targets, options, comparison, needs, chunks)
        except torch.OutOfMemoryError:
            if chunks.queries == 1:
                raise
        # Out of the handler, which holds what was allocated.
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
    """`loss` of tensors as the kernels take them, so many queries at a time."""
    shape = problem.n_queries, problem.n_documents, chunks.queries
    own = tensors.documents.dim() == 4
    run = ChunkedLoss(comparison, targets, shape, own, needs[2], problem.device)
    if comparison.symmetric and chunks.number > 1:
        # All queries are met before the loss of one is known.
        without_argmax = problem._replace(kind=replaced(problem.kind, "with_argmax", False))
        for chunk in _parts(without_argmax, tensors, None, _NO_GRADIENTS, chunks):
            run.meet(_scores_of_chunk(*chunk[1:3], options)[0], chunk[0])
    gradients, norms = _empty(problem, tensors, chunks, needs), None
    if problem.normalize and problem.with_argmax:
        # Scores and gradients of all chunks ask for them.
        norms = norms_of(tensors.queries, tensors.documents)
    for chunk in _parts(problem, tensors, norms, gradients, chunks):
        # What is made there is free before the next chunk takes as much.
        _run_chunk(run, options, *chunk)
    if not problem.with_argmax:
        run.sum()
    grad_documents = gradients.documents
    if grad_documents is not None and gradients.partial:
        grad_documents = _finished(problem, tensors.documents, norms, grad_documents)
    return LossResult(run.loss, run.statistics, gradients.queries, grad_documents, run.slope)


_NO_GRADIENTS = Destination(None, None)


def _parts(
    problem: Problem, tensors: Tensors, norms: Norms | None, gradients: Destination, chunks: Chunks
) -> Iterator[tuple[int, Problem, Tensors, Norms | None, Destination]]:
    """Of each chunk its first query, its problem, and its part of the tensors, their norms and gradients."""
    if chunks.number == 1:
        yield 0, problem, tensors, norms, gradients
        return
    own, (grad_queries, grad_documents, partial, _) = tensors.documents.dim() == 4, gradients
    for first in range(0, problem.n_queries, chunks.queries):
        chunk = slice(first, first + chunks.queries)
        part, inputs = chunk_of(problem, tensors, chunk)
        of_part = norms and Norms(norms.queries[chunk], norms.documents[chunk] if own else norms.documents)
        destination = Destination(
            None if grad_queries is None else grad_queries[chunk],
            grad_documents[chunk] if own and grad_documents is not None else grad_documents,
            partial,
            partial and first > 0,
        )
        yield first, part, inputs, of_part, destination


def _run_chunk(
    run: ChunkedLoss,
    options: Options,
    first: int,
    problem: Problem,
    tensors: Tensors,
    norms: Norms | None,
    destination: Destination,
) -> None:
    """The losses of a chunk's queries, and their gradients."""
    scores, argmax, counts = _scores_of_chunk(problem, tensors, options, norms)
    if run.comparison.symmetric and problem.n_queries == run.n_queries:
        run.meet(scores, first)
    if argmax is None:
        run.compare(scores, first)
        return
    # What the gradient is divided by is in it.
    grad_scores = run.gradient(scores, first, counts)
    del scores
    write_gradients(problem, tensors, grad_scores, argmax, destination, norms)


def _scores_of_chunk(
    problem: Problem, tensors: Tensors, options: Options, norms: Norms | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scores, argmax if the problem has them, and for a mean what scores were divided by."""
    scores, argmax = maxsim_forward(problem, tensors, norms=norms)
    if options.reduction != "mean":
        return scores, argmax, None
    counts = active_counts(problem, tensors)
    return with_empty_score(scores / counts, tensors, options.empty_score), argmax, counts.float()


def _empty(problem: Problem, tensors: Tensors, chunks: Chunks, needs: tuple[bool, bool, bool]) -> Destination:
    """Memory for the gradients that are needed, contiguous.

    What several chunks add to is summed in float32. So is every gradient of float16 embeddings.
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


def _finished(problem: Problem, documents: Tensor, norms: Norms | None, total: Tensor) -> Tensor:
    """The gradient of documents from the sum of all chunks."""
    dtype = torch.float32 if problem.dtype == torch.float16 else problem.dtype
    if norms is None:
        return total.to(dtype)
    found = torch.empty_like(total, dtype=dtype)
    finish_documents(problem, documents, norms.documents, total, found)
    return found


def for_kernels(problem: Problem, tensors: Tensors) -> tuple[Problem, Tensors]:
    """Both as kernels take them: padded queries, contiguous rows and masks, boundaries on the device; no size is 0."""
    queries, documents, queries_mask, documents_mask, queries_bounds, bounds, candidates = tensors
    if documents.stride(-1) != 1:
        documents = documents.contiguous()
        problem = problem._replace(document_strides=(*(0, 0, *documents.stride())[-4:-1],), aligned=True)
    # Within a query, kernels count elements in 32 bits. Of long embeddings, query rows are copied 16 bytes at a time.
    unaligned = problem.size > HOPPER_MAX_SIZE and queries.data_ptr() % 16
    if unaligned or queries.stride(-1) != 1 or problem.query_length * queries.stride(-2) > INT32_MAX:
        queries = queries.clone(memory_format=torch.contiguous_format)
        # Of dimensions of one element, strides are still anything.
        query_strides = queries.stride()[:2]
        if queries.dim() == 2:
            query_strides = problem.query_length * queries.stride(0), queries.stride(0)
        problem = problem._replace(query_strides=query_strides)
    if not queries.is_cuda:
        # Under Triton's interpreter.
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
