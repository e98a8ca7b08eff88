"""Operations whose calls hypothesis draws, each with its definition and tolerances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from hypothesis import strategies as st
from torch import Tensor

from pylate_flash import (
    chamfer,
    maxsim,
    maxsim_pairwise,
    maxsim_ragged,
    maxsim_residual,
    maxsim_sparse_queries,
    maxsim_varlen,
    quantize,
    soft_maxsim,
    soft_maxsim_varlen,
    unpack,
    xtr_scores,
)
from pylate_flash.ops import (
    chamfer_reference,
    maxsim_reference,
    maxsim_sparse_queries_reference,
    soft_maxsim_reference,
    xtr_scores_reference,
)
from pylate_flash.ops.quantization import PRECISIONS
from pylate_flash.ops.quantized import maxsim_quantized_reference
from pylate_flash.ops.residual import maxsim_residual_reference
from pylate_flash.ops.varlen import maxsim_varlen_reference
from tests.ops.cases import Case, cases, check_definition
from tests.ops.chamfer_cases import chamfer_cases
from tests.ops.residual_cases import residual_cases
from tests.ops.sparse_cases import sparse_cases
from tests.ops.test_soft import BETAS, varlen_reference
from tests.ops.test_varlen import packed
from tests.ops.xtr_cases import xtr_cases


@dataclass(frozen=True)
class Call:
    """Tensors that get gradients, the positional arguments after them, and options."""

    tensors: tuple[Tensor, ...]
    others: tuple
    options: dict


class Operation(NamedTuple):
    """A strategy that draws calls within limits, the function, its definition, and tolerances for any dtype."""

    draw: Callable[..., st.SearchStrategy[Call]]
    function: Callable[..., Tensor]
    definition: Callable[..., Tensor]
    atol: float = 2e-6
    least: float = 0.0
    differentiable: bool = True
    widened: bool = True

    def check(self, call: Call, there: Callable[[Any], Any] = lambda value: value, **options: str) -> None:
        """Compare a call, its tensors moved by `there`, with the definition."""
        function = partial(self.function, **options)
        check_definition(
            function, self.definition, call.tensors, call.options, *call.others,
            atol=self.atol, least=self.least, differentiable=self.differentiable, widened=self.widened, there=there,
        )  # fmt: skip


def of_cases(strategy: Callable[..., st.SearchStrategy[Case]] = cases, **fixed: Any) -> Callable:
    return lambda **limits: strategy(**fixed, **limits).map(lambda case: Call(case.tensors, (), case.keywords))


def of_packed(**limits: Any) -> st.SearchStrategy[Call]:
    return packed(**limits).map(lambda case: Call(case[0][:2], case[0][2:], case[1]))


def with_beta(draw: Callable[..., st.SearchStrategy[Call]]) -> Callable[..., st.SearchStrategy[Call]]:
    def learned(call: Call, beta: float) -> Call:
        return Call((*call.tensors, call.tensors[0].new_tensor(beta)), call.others, call.options)

    return lambda **limits: st.builds(learned, draw(**limits), BETAS)


def quantized(draw: Callable[..., st.SearchStrategy[Call]]) -> Callable[..., st.SearchStrategy[Call]]:
    def of_8_bits(call: Call, precision: str, quantize_queries: bool) -> Call:
        queries, documents = call.tensors
        options = {"quantize_queries": quantize_queries, **call.options}
        return Call((queries,), (quantize(documents, precision), *call.others), options)

    return lambda **limits: st.builds(of_8_bits, draw(**limits), st.sampled_from(list(PRECISIONS)), st.booleans())


def of_codes(**limits: Any) -> st.SearchStrategy[Call]:
    return residual_cases(**limits).map(lambda case: Call(case[:1], case[1:2], case[2]))


def diagonal(*tensors: Tensor, **options: Any) -> Tensor:
    return maxsim_reference(*tensors, **options).diagonal()


def of_lists(queries: Tensor, documents: Tensor, *bounds: Tensor, **options: Any) -> Tensor:
    """Score lists of tensors, each in its own memory."""
    packs = zip((queries, documents), bounds, strict=True)
    return maxsim_ragged(*([tokens.clone() for tokens in unpack(*pack)] for pack in packs), **options)


OPERATIONS = {
    "in-batch": Operation(of_cases(), maxsim, maxsim_reference),
    "pairs": Operation(of_cases(layouts=("pairs",)), maxsim_pairwise, diagonal),
    "packed": Operation(of_packed, maxsim_varlen, maxsim_varlen_reference),
    "ragged": Operation(of_packed, of_lists, maxsim_varlen_reference),
    "soft": Operation(with_beta(of_cases()), soft_maxsim, soft_maxsim_reference, least=1e-5),
    "packed soft": Operation(with_beta(of_packed), soft_maxsim_varlen, varlen_reference, least=1e-5),
    "sparse": Operation(of_cases(sparse_cases), maxsim_sparse_queries, maxsim_sparse_queries_reference),
    "XTR": Operation(of_cases(xtr_cases), xtr_scores, xtr_scores_reference, atol=1e-7),
    "Chamfer": Operation(
        lambda **limits: chamfer_cases(**limits).map(lambda case: Call(case[0], (), case[1])),
        chamfer, chamfer_reference, atol=1e-6,
    ),
    # Compressed documents are not widened: they are compared as they are for the dtype of the queries.
    "residual": Operation(of_codes, maxsim_residual, maxsim_residual_reference, least=1e-5, widened=False),
    "quantized": Operation(
        quantized(of_cases()), maxsim, maxsim_quantized_reference, least=1e-5, differentiable=False, widened=False
    ),
    "packed quantized": Operation(
        quantized(of_packed), maxsim_varlen, maxsim_quantized_reference, least=1e-5, differentiable=False, widened=False
    ),
}  # fmt: skip
