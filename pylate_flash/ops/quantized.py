"""MaxSim of quantized documents: what `maxsim` and `maxsim_varlen` do with `QuantizedEmbeddings`.

`maxsim_quantized_reference` is the definition: dequantize, then score. The operator `pylate_flash::maxsim_quantized`
computes the same on the 8-bit values, by a Triton kernel (`kernels.forward`); elsewhere documents are dequantized a
block at a time, and scored as any others. (torch has no public product of int8 matrices on the CPU.)

Quantized queries differ from the given ones about as much as quantized documents do from theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.plan import choose
from ..problem import Options, Problem, Tensors, accumulation_dtype, empty_results, replaced
from .by_block import DocumentBlock, at, compute_by_block, document_blocks
from .checks import check, checked_flag, checked_number, checked_problem
from .compute import active_counts, kernels, with_empty_score
from .maxsim import checked, maxsim_reference
from .operator import LIBRARY, NOT_PLAIN, needs_gradient, repeat, signature
from .products import block_budget
from .quantization import QuantizedEmbeddings, quantize
from .varlen import maxsim_varlen_reference


class Quantization(NamedTuple):
    """What belongs to the values of quantized documents, and whether queries are quantized as well."""

    scales: Tensor
    offsets: Tensor | None
    quantize_queries: bool


def query_precision(dtype: torch.dtype) -> str:
    """The precision that queries are quantized to for documents with values of this type; never an affine one."""
    return "fp8" if dtype == torch.float8_e4m3fn else "int8"


def maxsim_quantized_reference(
    queries: Tensor, documents: QuantizedEmbeddings, *cu_seqlens: Tensor, quantize_queries: bool = True, **options
) -> Tensor:
    """The definition: dequantizes both in float64, and scores them as `maxsim_reference` does.

    With `queries_cu_seqlens` and `documents_cu_seqlens`, as `maxsim_varlen_reference` does.
    """
    if quantize_queries:
        queries = quantize(queries, query_precision(documents.values.dtype)).dequantize(torch.float64)
    score = maxsim_varlen_reference if cu_seqlens else maxsim_reference
    return score(queries.double(), documents.dequantize(torch.float64), *cu_seqlens, **options)


def scores_of_quantized(
    operation: str, tensors: Tensors, options: Options, documents: QuantizedEmbeddings, quantize_queries: bool
) -> Tensor:
    """The scores of a call; `tensors` have the values of the documents in their place."""
    given, how = (*tensors, documents.scales, documents.offsets), (*options, quantize_queries)
    key = signature("maxsim_quantized", given, how)
    if key is NOT_PLAIN:
        return _maxsim_quantized(*_arguments(operation, given, how))

    def compute(given: Sequence) -> tuple[tuple[Tensor], None]:
        return (_scores(*_arguments(operation, given, how)),), None

    return repeat(key, compute, given)[0][0]


def _arguments(operation: str, given: Sequence, how: tuple) -> tuple:
    """Those of the operator, after the checks that it relies on and autocast."""
    *rows, scales, offsets = given
    *named, quantize_queries = how
    options = Options(*named)
    tensors = checked_with_values(operation, Tensors(*rows), options)
    options = options._replace(empty_score=checked_number("empty_score", options.empty_score))
    return *tensors, *options, scales, offsets, checked_flag("quantize_queries", quantize_queries)


def checked_with_values(operation: str, tensors: Tensors, options: Options) -> Tensors:
    """`maxsim.checked` for tensors with the values of quantized documents."""
    # The documents are checked already, and autocast has no say in their type.
    queries = checked(operation, Tensors(tensors.queries, tensors.queries, *tensors[2:]), options).queries
    if needs_gradient(queries):
        raise RuntimeError(
            f"{operation} of quantized documents has no gradient: call it under torch.no_grad(), or with "
            "queries.detach()"
        )
    return tensors if queries is tensors.queries else tensors._replace(queries=queries)


def problem_of_quantized(tensors: Tensors, options: Options, quantize_queries: bool) -> Problem:
    """The problem of a call whose documents are 8-bit values."""
    problem = checked_problem(tensors, options, quantized=True)
    kind = replaced(problem.kind, "quantized", tensors.documents.dtype)
    return problem._replace(kind=replaced(kind, "quantize_queries", quantize_queries))


def _compute(tensors: Tensors, options: Options, quantization: Quantization) -> Tensor:
    problem = problem_of_quantized(tensors, options, quantization.quantize_queries)
    implementation = choose(options.implementation, problem.device, problem.deciding_dtype, problem.size)
    if implementation == "blocked" or problem.is_empty:
        return _in_blocks(problem, tensors, options, quantization)
    mean = options.reduction == "mean"
    if mean:
        # The score of an empty document is not divided.
        problem = problem._replace(empty_score=0.0)
    scores = kernels().quantized_scores(problem, tensors, *quantization[:2])
    if mean:
        scores = with_empty_score(scores / active_counts(problem, tensors), tensors, options.empty_score)
    return scores


def _in_blocks(problem: Problem, tensors: Tensors, options: Options, quantization: Quantization) -> Tensor:
    """Scores of a block of dequantized documents after the other."""
    queries, values = tensors[:2]
    # Nothing is lost, and documents need not be rounded to half precision.
    dtype = accumulation_dtype(queries.dtype)
    if quantization.quantize_queries:
        queries = quantize(queries, query_precision(values.dtype)).dequantize(dtype)

    def dequantized(block: DocumentBlock) -> Tensor:
        scales, offsets = (
            None if tensor is None else at(tensor, block.place)
            for tensor in (quantization.scales, quantization.offsets)
        )
        assert scales is not None
        return QuantizedEmbeddings(at(values, block.place), scales, offsets).dequantize(dtype)

    tensors, options = tensors._replace(queries=queries.to(dtype)), options._replace(implementation="blocked")
    blocks = document_blocks(tensors, max(1, 4 * block_budget(problem.device) // problem.size))
    return compute_by_block(tensors, options, False, blocks, dequantized)[0]


LIBRARY.define(
    "maxsim_quantized(Tensor queries, Tensor documents, Tensor? queries_mask, Tensor? documents_mask, "
    "Tensor? queries_cu_seqlens, Tensor? documents_cu_seqlens, Tensor? candidates_cu_seqlens, "
    "SymInt max_query_length, SymInt max_document_length, SymInt max_candidates, bool normalize, str reduction, "
    "str masking, float empty_score, str implementation, Tensor scales, Tensor? offsets, bool quantize_queries) "
    "-> Tensor"
)
_maxsim_quantized = torch.ops.pylate_flash.maxsim_quantized.default
_N_TENSORS = len(Tensors._fields)
_N_CALL = _N_TENSORS + len(Options._fields)


def _scores(*arguments) -> Tensor:
    call, quantization = arguments[:_N_CALL], Quantization(*arguments[_N_CALL:])
    return _compute(Tensors(*call[:_N_TENSORS]), Options(*call[_N_TENSORS:]), quantization)


def _shape(*arguments) -> Tensor:
    """Uninitialised scores."""
    tensors, options = Tensors(*arguments[:_N_TENSORS]), Options(*arguments[_N_TENSORS:_N_CALL])
    check(tensors, quantized=True)
    return empty_results(tensors, options)[0]


LIBRARY.impl("maxsim_quantized", _scores, "CompositeExplicitAutograd")
torch.library.register_fake("pylate_flash::maxsim_quantized", _shape)
