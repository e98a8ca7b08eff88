"""The suite `quantized`: scores of 8-bit documents, in the rows of `forward` that are not bound by the launch.

Every system is checked against float64. Those of this package are compared with the scores of their dequantized
embeddings, which they compute; bfloat16 and the other packages, which quantize in their own ways, with the scores of
the original embeddings. Documents are quantized before the calls; queries in every call of this package, and before it
for the others, which accept quantized queries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

import pylate_flash
from pylate_flash.bench import exact, forward
from pylate_flash.bench.calls import Padded
from pylate_flash.bench.peers import FLASH_MAXSIM, LIK
from pylate_flash.bench.protocol import Rounds, Work, make_stopwatch, measure
from pylate_flash.bench.rows import Row
from pylate_flash.bench.suite import (
    FLASH_MAXSIM_SYSTEM,
    LIK_SYSTEM,
    OURS,
    Candidate,
    Suite,
    System,
    Unavailable,
    another_way,
)
from pylate_flash.ops.quantization import PRECISIONS, QuantizedEmbeddings, quantize
from pylate_flash.ops.quantized import query_precision

# Bytes of the scale of a token.
_SCALE = 4
# Query length from which late-interaction-kernels is left out.
_UNROLLED = 1024


@dataclass(frozen=True)
class Quantized(Row):
    """A shape with 8-bit documents."""

    def work(self, dtype: torch.dtype) -> Work:
        """8-bit documents read with their scales."""
        wide = super().work(dtype)
        saved = self.Nd * self.Ld * (self.d * (dtype.itemsize - 1) - _SCALE)
        return Work(flops=wide.flops, bytes=wide.bytes - saved, eight_bits=True)


ROWS = tuple(
    Quantized(row.name, row.Nq, row.Nd, row.Lq, row.Ld, row.d)
    for row in forward.ROWS
    if row.name in ("rerank-10k", "colpali", "serve-32")
)


class Reference(NamedTuple):
    """Scores [Nq, Nd] in float64: of the embeddings, and of queries and documents quantized in each precision."""

    plain: torch.Tensor
    int8: torch.Tensor
    uint8: torch.Tensor
    fp8: torch.Tensor
    # Unquantized queries, documents in int8.
    widened: torch.Tensor


class Scores(NamedTuple):
    """The scores of a system, and the name of the reference to compare them with."""

    of: str
    scores: torch.Tensor


@dataclass(frozen=True)
class Inputs(Padded):
    """Embeddings, and the quantized documents by precision."""

    quantized: dict[str, QuantizedEmbeddings] = field(default_factory=dict)

    def accuracy(self, dtype: torch.dtype) -> float:
        """The error bound of fp8 products, which tensor cores sum with few bits; other types are far closer."""
        return 2e-4


def make_inputs(row: Row, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Draw random unit vectors, and quantize the documents."""
    plain = forward.make_inputs(row, device, dtype)
    quantized = {precision: quantize(plain.documents, precision) for precision in PRECISIONS}
    return Inputs(plain.queries, plain.documents, quantized=quantized)


def reference(inputs: Inputs) -> Reference:
    """The scores in float64."""

    def scores(precision: str, quantize_queries: bool = True) -> torch.Tensor:
        queries, documents = inputs.queries, inputs.quantized[precision]
        if quantize_queries:
            queries = quantize(queries, query_precision(documents.values.dtype)).dequantize(torch.float64)
        return exact.scores(queries, documents.dequantize(torch.float64))

    plain = exact.scores(inputs.queries, inputs.documents)
    return Reference(plain, scores("int8"), scores("uint8"), scores("fp8"), scores("int8", False))


def error(result: Scores, expected: Reference) -> float:
    """The relative error of the scores against their reference."""
    return exact.relative_error(result.scores, getattr(expected, result.of))


def candidate(label: str, call: Callable[[], torch.Tensor], of: str = "plain") -> Candidate:
    """A candidate whose scores are compared with the reference ``of``."""
    return Candidate(label, call, partial(Scores, of))


def ours(of: str, precision: str | None, inputs: Inputs, **options: Any) -> list[Candidate]:
    """The public `pylate_flash.maxsim`, as users call it, with documents in a precision, or unquantized."""
    documents = inputs.documents if precision is None else inputs.quantized[precision]
    label = ", ".join(["maxsim", *(f"{name}={value}" for name, value in options.items())])
    return [candidate(label, partial(pylate_flash.maxsim, inputs.queries, documents, **options), of)]


def lik(inputs: Inputs) -> list[Candidate]:
    """late-interaction-kernels: fp8 with a scale per token, by its own quantization."""
    if inputs.queries.shape[1] >= _UNROLLED:
        raise Unavailable("unrolls the loop over a query's tokens, and compiles twelve tiles for minutes")
    (queries, query_scales), (documents, document_scales) = map(
        LIK["fp8.quantize_fp8_per_token"], (inputs.queries, inputs.documents)
    )
    call = partial(LIK["fp8.maxsim_inference_fp8"], queries, documents, scale_Q=query_scales, scale_D=document_scales)
    return [candidate("maxsim_inference_fp8", call)]


def flash_maxsim(inputs: Inputs) -> list[Candidate]:
    """flash-maxsim, for one query: int8 by int8, and its kernels that widen int8 and affine uint8."""
    if len(inputs.queries) > 1:
        raise Unavailable("scores one query at a time")
    query, lengths = inputs.queries[0], inputs.lengths()
    documents, scales = FLASH_MAXSIM["quantize_int8_symmetric"](inputs.documents)
    affine = FLASH_MAXSIM["quantize_int8"](inputs.documents)
    quantized, query_scales = FLASH_MAXSIM["quantize_query_int8"](query)
    calls = {
        "flash_maxsim_int8x8": (query, documents, scales, quantized, query_scales, lengths),
        "flash_maxsim_int8_symmetric": (query, documents, scales, lengths),
        "flash_maxsim_int8": (query, *affine, lengths),
    }
    return [candidate(name, partial(FLASH_MAXSIM[name], *arguments)) for name, arguments in calls.items()]


def measure_eight_bits(device: torch.device, size: int = 8192) -> float | None:
    """Return the operations per second of a large fp8 matrix product, or None if torch or the GPU does not support it.

    It is torch's fastest 8-bit product: that of int8 took 1.7 times as long on an H200.
    """
    if not hasattr(functional, "scaled_mm"):
        return None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return None
    left = torch.randn(size, size, device=device).to(torch.float8_e4m3fn)
    # The right operand must be column-major.
    right = torch.randn(size, size, device=device).to(torch.float8_e4m3fn).t()
    scale, recipe = torch.ones((), device=device), functional.ScalingType.TensorWise

    def multiply() -> None:
        functional.scaled_mm(left, right, scale, recipe, scale, recipe, use_fast_accum=True)

    timings = measure({"product": multiply}, make_stopwatch(device, flush_bytes=0), Rounds(5, 20))
    return 2 * size**3 / (timings["product"].median_ms / 1e3)


def suite() -> Suite:
    """Return the suite."""
    widened = partial(ours, "widened", "int8", quantize_queries=False)
    return Suite(
        name="quantized",
        title="MaxSim of quantized documents",
        rows=ROWS,
        systems=(
            System(OURS, "int8", partial(ours, "int8", "int8"), about="pylate_flash, queries and documents in int8"),
            _of("fp8", "both in fp8 (e4m3)", partial(ours, "fp8", "fp8")),
            _of("uint8", "documents in affine uint8, queries in int8", partial(ours, "uint8", "uint8")),
            _of("widened", "documents in int8, queries as they are", widened, "int8, widened"),
            _of("plain", "nothing quantized", partial(ours, "plain", None), "not quantized"),
            replace(LIK_SYSTEM, candidates=lik, about="late-interaction-kernels, fp8"),
            replace(FLASH_MAXSIM_SYSTEM, candidates=flash_maxsim, about="flash-maxsim, int8 or uint8"),
        ),
        make_inputs=make_inputs,
        reference=reference,
        error=error,
        ceilings={"eight_bit_flops_per_second": measure_eight_bits},
    )


def _of(name: str, about: str, candidates: Callable, title: str | None = None) -> System:
    return another_way(name, title, candidates=candidates, about=f"pylate_flash, {about}")
