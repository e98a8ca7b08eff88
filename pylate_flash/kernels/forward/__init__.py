"""The forward: scores of queries and documents, and the argmax that a gradient needs.

No kernel masks the tail of a document: token positions are clamped to the last token, and a repeated token changes
neither the maximum nor the lowest index that attains it. No kernel tests for masked tokens either: under a mask, it
walks the list of active tokens (`kernels.rows`), so padding and skipped tokens are never loaded. Under masking="zero",
all masked tokens are added afterwards, at once, as a single 0.

Packed documents are split by number of tokens, not by number of documents (`splits`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...problem import Problem, Tensors, replaced
from ..decompose import decompose
from ..plan import ForwardPlan, forward_plan
from ..plan_operations import decompressed_tokens, quantized_plan, residual_plan, soft_forward_plan, sparse_plan
from ..rows import Norms, active_tokens, inverse_norms, norms_of
from ..tables import LONGEST_WHOLE
from .codes import decompressed_embeddings
from .common import ForwardTensors, add_sums
from .few_bits import with_table
from .quantized_rows import divided_by_norms, quantize_rows
from .short import score_short
from .single import score_single
from .splits import merge_segments
from .stacked import score_stacked

__all__ = ["Codes", "maxsim_forward", "quantized_forward", "residual_forward", "soft_forward", "sparse_forward"]


def maxsim_forward(
    problem: Problem, tensors: Tensors, offsets: Tensor | None = None, norms: Norms | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return scores, float32, of `problem.scores_shape`, and the argmax of `problem.argmax_shape`, or None without it.

    Queries are padded, or packed with one common length. All tensors are on the device and have contiguous rows; masks
    and boundaries are contiguous. No dimension is 0, but a document may be empty. `offsets` are the starts of packed
    documents that are not normalised (`problem.DocumentOffsets`). `norms` are those of queries and documents, if known.
    """
    plan = forward_plan(problem)
    device, argmax, in_segments = problem.device, None, plan.config.in_segments
    if problem.with_argmax:
        argmax = torch.empty(*problem.argmax_shape, dtype=problem.argmax_dtype, device=device)
    inputs = _forward_tensors(tensors, offsets, argmax)
    if plan.decomposed is not None:
        known_norms = (norms or norms_of(tensors.queries, tensors.documents)) if problem.normalize else None
        problem = plan.decomposed
        queries, documents, scales = decompose(
            tensors.queries, tensors.documents, problem.size, known_norms, tensors.documents_cu_seqlens
        )
        inputs = _with_norms(problem, inputs._replace(queries=queries, documents=documents), scales)
    elif problem.normalize and plan.config.kernel != "single":
        # A separate pass squares each token once; the kernel would do so once per row block. The single kernel reads
        # every token once and computes norms itself.
        inputs = _with_norms(problem, inputs, norms)
    elif problem.normalize and in_segments:
        inputs = inputs._replace(queries_scale=inverse_norms(tensors.queries) if norms is None else norms.queries)
    if in_segments:
        shape = 2 * plan.splits.number, plan.row_blocks * plan.block_rows
        inputs = inputs._replace(segments=torch.empty(shape, dtype=torch.float32, device=device))
        if problem.with_argmax:
            inputs = inputs._replace(segment_argmax=torch.empty(shape, dtype=torch.int32, device=device))
    scores = _score(problem, plan, inputs)
    if in_segments:
        merge_segments(problem, plan, inputs, scores)
    return scores, argmax


def soft_forward(problem: Problem, tensors: Tensors, beta: Tensor, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Return scores, float32, of `problem.scores_shape`, and lse [documents, rows], float32, or None without it.

    Tensors are as in `maxsim_forward`; `beta` is a float32 tensor of one element.
    """
    inputs, lse = _with_norms(problem, _forward_tensors(tensors)._replace(beta=beta)), None
    if with_lse:
        lse = torch.empty(*problem.argmax_shape, dtype=torch.float32, device=problem.device)
    return _score(problem, soft_forward_plan(problem), inputs._replace(lse=lse)), lse


def sparse_forward(problem: Problem, tensors: Tensors, query_tokens: Tensor, argmax: Tensor | None) -> Tensor:
    """Return scores [Nq, K] or [Nq, Nd], float32, and write the argmax of the chosen tokens to `argmax`, if given.

    Tensors are as in `maxsim_forward`, with padded queries; packed documents are scored against every query.
    `query_tokens` [Nq, K or Nd, k], int32 or int64 with contiguous rows, holds positions of query tokens; an
    out-of-range position selects no token. No dimension is 0, but packed documents may be empty.
    """
    plan = sparse_plan(problem, query_tokens.shape[2], shared=tensors.documents.dim() < 4)
    inputs = _forward_tensors(tensors, argmax=argmax)._replace(query_tokens=query_tokens)
    return _score(problem, plan, _with_norms(problem, inputs))


def quantized_forward(
    problem: Problem, tensors: Tensors, scales: Tensor, offsets: Tensor | None, starts: Tensor | None = None
) -> Tensor:
    """Return scores, float32, of `problem.scores_shape`, for documents given as quantized values, scales and offsets.

    Tensors are as in `maxsim_forward`; no dimension is 0, but a document may be empty. `starts` are the first rows of
    packed candidates (`problem.DocumentOffsets`).
    """
    plan, kind, queries = quantized_plan(problem), problem.kind, tensors.queries
    # Scales and offsets of packed rows may be interleaved with the values.
    keep_strides = plan.kernel == "short" and not kind.normalize and scales.dim() == 1
    if not keep_strides or (offsets is not None and offsets.stride() != scales.stride()):
        scales, offsets = scales.contiguous(), None if offsets is None else offsets.contiguous()
    values = queries_scale = None
    in_registers = plan.kernel == "short" or (plan.kernel == "hopper" and plan.config.quantize_rows)
    if kind.quantize_queries and not in_registers:
        dtype = torch.int8 if kind.quantized == torch.uint8 else kind.quantized
        shape = problem.n_queries, problem.query_length
        values = torch.empty(*shape, problem.size, dtype=dtype, device=problem.device)
        queries_scale = torch.empty(*shape, dtype=torch.float32, device=problem.device)
        if not plan.config.quantize_rows:
            quantize_rows(queries, problem.query_strides, values, queries_scale, kind.normalize)
            queries, values = values, None
    elif kind.normalize and not kind.quantize_queries:
        queries_scale = inverse_norms(queries)
    if kind.normalize:
        scales, offsets = divided_by_norms(tensors.documents, problem.document_strides, scales, offsets)
    inputs = _forward_tensors(tensors._replace(queries=queries), starts)._replace(
        queries_scale=queries_scale, documents_scale=scales, documents_offset=offsets, values=values
    )
    return _score(problem, plan, inputs)


class Codes(NamedTuple):
    """The tensors of `ops.residual_codes.ResidualCodes`, contiguous, and the candidates [Nq, K], or None."""

    codes: Tensor
    residuals: Tensor
    centroids: Tensor
    bucket_weights: Tensor
    cu_seqlens: Tensor
    scales: Tensor
    candidates: Tensor | None

    @property
    def nbits(self) -> int:
        return self.bucket_weights.shape[0].bit_length() - 1


def residual_forward(problem: Problem, tensors: Tensors, codes: Codes) -> tuple[Tensor, Tensor | None]:
    """Return scores, float32, [Nq, Nd] or [Nq, K], and argmax, int32, [Nd, Nq * Lq] or [Nq * K, Lq], or None.

    Queries are padded [Nq, Lq, d] with contiguous rows. With candidates, every query is a group of the problem, and
    `problem.n_documents` is the number of candidates per query. No dimension is 0, but a document may be empty.
    """
    n_centroids, dtype, listed = len(codes.centroids), codes.centroids.dtype, codes.candidates is not None
    if problem.n_tokens <= decompressed_tokens(problem, dtype, listed):
        embeddings, size = decompressed_embeddings(problem, codes, codes.nbits), problem.size
        kind = replaced(problem.kind, "quantize_queries", False)
        problem = problem._replace(kind=kind, document_strides=(0, 0, size), aligned=True)
        if not problem.with_argmax:
            # document_length bounds no document here: take the longest for which programs still take whole documents.
            problem = problem._replace(document_length=min(problem.document_length, LONGEST_WHOLE))
        scores, argmax = maxsim_forward(problem, tensors._replace(documents=embeddings))
        return scores, None if argmax is None else argmax.int()
    n_tokens = len(codes.codes)
    tokens_met = problem.n_documents * n_tokens // (len(codes.cu_seqlens) - 1) if listed else n_tokens
    plan = residual_plan(problem, codes.nbits, n_centroids, dtype, tokens_met, listed)
    argmax = None
    if problem.with_argmax:
        shape = problem.groups * problem.n_documents, problem.rows
        argmax = torch.empty(*shape, dtype=torch.int32, device=problem.device)
    # The remaining fields of Codes have the same names in ForwardTensors.
    fields = {name: tensor for name, tensor in codes._asdict().items() if name not in ("residuals", "scales")}
    inputs = ForwardTensors(tensors.queries, codes.residuals, tensors.queries_mask, argmax=argmax, **fields)
    inputs = inputs._replace(documents_scale=codes.scales)
    if plan.kernel == "short":
        inputs = with_table(problem, plan, inputs)
    return _score(problem, plan, inputs), argmax


def _forward_tensors(tensors: Tensors, offsets: Tensor | None = None, argmax: Tensor | None = None) -> ForwardTensors:
    """Convert the tensors of a call; a documents mask becomes lists of active tokens."""
    queries, documents, queries_mask, documents_mask, _, cu_seqlens, candidates = tensors
    active, bounds = (None, None) if documents_mask is None else active_tokens(documents_mask)
    return ForwardTensors(
        queries, documents, queries_mask, active, bounds, None, None, cu_seqlens, offsets, candidates, argmax
    )


def _with_norms(problem: Problem, inputs: ForwardTensors, norms: Norms | None = None) -> ForwardTensors:
    if not problem.normalize:
        return inputs
    queries_scale, documents_scale = norms or norms_of(inputs.queries, inputs.documents)
    return inputs._replace(queries_scale=queries_scale, documents_scale=documents_scale)


def _score(problem: Problem, plan: ForwardPlan, inputs: ForwardTensors) -> Tensor:
    """Launch the kernel of the plan and return its scores; scores of documents in segments are left unset."""
    # With one sum per score, the sums are the scores. (Sizes are unpacked: a tuple takes the host twice as long.)
    shape = problem.scores_shape if plan.n_sums == 1 else (plan.n_sums, *problem.scores_shape)
    sums = torch.empty(*shape, dtype=torch.float32, device=problem.device)
    kernel = plan.config.kernel
    score = _hopper() if kernel == "hopper" else _PLAIN[kernel]
    score(problem, plan, inputs, sums)
    return sums if plan.n_sums == 1 else add_sums(problem, plan, sums)


# Launch functions of the kernels that every Triton version compiles.
_PLAIN = {"single": score_single, "stacked": score_stacked, "short": score_short}


@functools.cache
def _hopper() -> Callable[..., None]:
    """Import the launch function of the Hopper kernel on first use: not every Triton version has Gluon."""
    from .hopper import score_hopper

    return score_hopper
