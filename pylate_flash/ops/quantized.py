"""MaxSim of quantized documents: the path of `maxsim` and `maxsim_varlen` for `QuantizedEmbeddings`.

A Triton kernel (`kernels.forward`) computes on the 8-bit values; without kernels, documents are dequantized block by
block and scored like any others. (torch has no public int8 matrix product on the CPU.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.choice import choose
from ..problem import DocumentOffsets, Options, Problem, Tensors, accumulation_dtype, empty_results, replaced
from .by_block import DocumentBlock, at, compute_by_block, document_blocks
from .call_parts import active_counts, with_empty_score
from .checks import check, checked_flag, checked_problem
from .compute import kernels
from .maxsim_operator import OPTIONS_SCHEMA, TENSORS_SCHEMA, checked, reference_scores
from .operator import Operation, needs_gradient
from .products import block_budget
from .quantization import QuantizedEmbeddings, quantize


def query_precision(dtype: torch.dtype) -> str:
    """The precision to quantize queries to, for documents whose values have this dtype; never affine."""
    return "fp8" if dtype == torch.float8_e4m3fn else "int8"


def maxsim_quantized_reference(
    queries: Tensor, documents: QuantizedEmbeddings, *cu_seqlens: Tensor, quantize_queries: bool = True, **options
) -> Tensor:
    """The definition: dequantizes both in float64 and scores them, as packed tokens if both `cu_seqlens` are given."""
    if quantize_queries:
        queries = quantize(queries, query_precision(documents.values.dtype)).dequantize(torch.float64)
    options |= dict(zip(("queries_cu_seqlens", "documents_cu_seqlens"), cu_seqlens, strict=False))
    return reference_scores(queries.double(), documents.dequantize(torch.float64), **options)


def scores_of_quantized(
    operation: str, tensors: Tensors, options: Options, documents: QuantizedEmbeddings, quantize_queries: bool
) -> Tensor:
    """The scores of a call; `documents` of `tensors` are the quantized values."""
    return _quantized((*tensors, documents.scales, documents.offsets, *options, quantize_queries), operation)


_N_TENSORS = len(Tensors._fields)


def _call(arguments: Sequence[Any]) -> tuple[Tensors, Options, Tensor, Tensor | None, bool]:
    scales, offsets = arguments[_N_TENSORS : _N_TENSORS + 2]
    return Tensors(*arguments[:_N_TENSORS]), Options(*arguments[_N_TENSORS + 2 : -1]), scales, offsets, arguments[-1]


def _check(arguments: tuple, operation: str) -> tuple:
    tensors, options, scales, offsets, quantize_queries = _call(arguments)
    tensors, options = checked_with_values(operation, tensors, options)
    return *tensors, scales, offsets, *options, checked_flag("quantize_queries", quantize_queries)


def checked_with_values(operation: str, tensors: Tensors, options: Options) -> tuple[Tensors, Options]:
    """`maxsim_operator.checked` for tensors whose documents are quantized values."""
    # Documents are already checked, and autocast does not apply to them.
    (queries, *_), options = checked(Tensors(tensors.queries, tensors.queries, *tensors[2:]), options)
    if needs_gradient(queries):
        raise RuntimeError(
            f"{operation} of quantized documents has no gradient: call it under torch.no_grad(), or with "
            "queries.detach()"
        )
    return tensors._replace(queries=queries), options


def candidates_in_place(
    tensors: Tensors, options: Options, documents: QuantizedEmbeddings, starts: Tensor, n_tokens: int
) -> Tensor:
    """The scores of packed candidates read in place from the rows of `documents`, at `starts`; kernels only.

    `documents` of `tensors` are the values [T, d]; boundaries are those of `varlen.maxsim_in_place`.
    """
    offsets = DocumentOffsets(starts, documents.values.stride(0), n_tokens)
    problem = problem_of_quantized(tensors, options, True, offsets)
    if problem.is_empty:
        scores = torch.zeros(problem.scores_shape, dtype=problem.scores_dtype, device=problem.device)
        return with_empty_score(scores, tensors, options.empty_score)
    inputs = kernels().for_kernels(problem, tensors)
    return kernels().quantized_forward(*inputs, documents.scales, documents.offsets, starts)


def problem_of_quantized(
    tensors: Tensors, options: Options, quantize_queries: bool, offsets: DocumentOffsets | None = None
) -> Problem:
    """The problem of a call with quantized documents."""
    problem = checked_problem(tensors, options, offsets=offsets, quantized=True)
    kind = replaced(problem.kind, "quantized", tensors.documents.dtype)
    return problem._replace(kind=replaced(kind, "quantize_queries", quantize_queries))


def _scores(arguments: tuple) -> Tensor:
    tensors, options, scales, offsets, quantize_queries = _call(arguments)
    problem = problem_of_quantized(tensors, options, quantize_queries)
    implementation = choose(options.implementation, problem.device, problem.deciding_dtype, problem.size)
    if implementation == "blocked" or problem.is_empty:
        return _scores_in_blocks(*_call(arguments))
    scores = kernels().quantized_forward(*kernels().for_kernels(problem, tensors), scales, offsets)
    if options.reduction == "mean":
        # `empty_score` is not divided by the token count.
        scores = with_empty_score(scores / active_counts(problem, tensors), tensors, options.empty_score)
    return scores


def _scores_in_blocks(
    tensors: Tensors, options: Options, scales: Tensor, offsets: Tensor | None, quantize_queries: bool
) -> Tensor:
    """Scores, dequantizing one block of documents at a time."""
    queries, values = tensors[:2]
    # Conversion to the accumulation dtype is exact, and avoids rounding documents to half precision.
    dtype = accumulation_dtype(queries.dtype)
    if quantize_queries:
        queries = quantize(queries, query_precision(values.dtype)).dequantize(dtype)

    def dequantized(block: DocumentBlock) -> Tensor:
        block_offsets = None if offsets is None else at(offsets, block.place)
        return QuantizedEmbeddings(at(values, block.place), at(scales, block.place), block_offsets).dequantize(dtype)

    tensors, options = tensors._replace(queries=queries.to(dtype)), options._replace(implementation="blocked")
    blocks = document_blocks(tensors, max(1, 4 * block_budget(values.device) // values.shape[-1]))
    return compute_by_block(tensors, options, False, blocks, dequantized)[0]


def _shapes(*arguments) -> tuple[Tensor, ...]:
    tensors, options, *_ = _call(arguments)
    check(tensors, quantized=True)
    return empty_results(tensors, options)


_quantized = Operation(
    "maxsim_quantized",
    f"{TENSORS_SCHEMA}, Tensor scales, Tensor? offsets, {OPTIONS_SCHEMA}, bool quantize_queries",
    (),
    (),
    _check,
    lambda arguments, _: (_scores(arguments),),
    lambda *_: (),
    _shapes,
)
