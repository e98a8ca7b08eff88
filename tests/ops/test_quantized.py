"""`quantize`, `QuantizedEmbeddings`, and the scores of quantized documents against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pylate_flash import QuantizedEmbeddings, maxsim, maxsim_pairwise, maxsim_varlen, quantize
from pylate_flash.ops import products
from pylate_flash.ops.quantization import PRECISIONS as TYPES
from pylate_flash.ops.quantized import maxsim_quantized_reference
from tests.ops.cases import mistakes, wrong

PRECISIONS = list(TYPES)
CLOSE = {"rtol": 2e-6, "atol": 2e-6, "equal_nan": True}


def fp8_exact(embeddings: Tensor) -> Tensor:
    """Embeddings that quantization to fp8 leaves unchanged: fp8 values, with a scale of 1."""
    exact = (embeddings * 100).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    exact[..., 0] = 448.0
    return exact


def rows_as_quantized(queries: Tensor, precision: str, **options) -> Tensor:
    """Rows [N, d] as the kernels quantize them, [N, d]: their scores with one-hot documents of one token."""
    elements = torch.eye(queries.shape[1], device=queries.device).unsqueeze(1).to(TYPES[precision])
    documents = QuantizedEmbeddings(elements, torch.ones(elements.shape[:2], device=queries.device))
    return maxsim(queries.unsqueeze(1), documents, implementation="triton", **options)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_quantized_to_the_nearest_value(dtype: torch.dtype, precision: str) -> None:
    torch.manual_seed(0)
    embeddings = (torch.randn(3, 7, 40) * torch.tensor([0.01, 1.0, 100.0]).view(3, 1, 1)).to(dtype)
    quantized = quantize(embeddings, precision)
    wide = embeddings.float().double()
    result, scales = quantized.dequantize(torch.float64), quantized.scales.double().unsqueeze(-1)
    if precision == "fp8":
        # Half a unit in the last of 3 bits behind the point, or of the smallest value, 2^-9.
        step = torch.maximum(wide.abs() / 16, scales * 2.0**-10)
    else:
        # The offset is subtracted before rounding, with a rounding error of its own.
        step = scales / 2 * (1 + 1e-4)
        levels = (wide.amax(-1) - wide.amin(-1)) / 255 if precision == "uint8" else wide.abs().amax(-1) / 127
        torch.testing.assert_close(scales.squeeze(-1), levels, rtol=1e-6, atol=0.0)
    assert ((result - wide).abs() <= step * (1 + 1e-6)).all()
    largest = wide.abs().amax(-1, keepdim=True)
    assert ((quantized.dequantize().double() - result).abs() <= 1e-6 * largest).all()
    assert quantized.dequantize(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("precision", PRECISIONS)
def test_tokens_of_one_value_and_of_zeros(precision: str) -> None:
    embeddings = torch.tensor([[0.0, 0.0], [0.3, 0.3], [-2.0, -2.0], [1e-45, 0.0]])
    result = quantize(embeddings, precision).dequantize()
    torch.testing.assert_close(result, embeddings, rtol=1e-6, atol=1e-44)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_token_that_is_not_a_number_is_none_as_a_whole(precision: str) -> None:
    embeddings = torch.ones(4, 3)
    embeddings[1, 2], embeddings[2, 0] = torch.nan, -torch.inf
    result = quantize(embeddings, precision).dequantize()
    assert result.isnan().tolist() == [[False] * 3, [True] * 3, [True] * 3, [False] * 3]


def test_a_block_of_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from pylate_flash.ops import quantization

    embeddings = torch.randn(5, 7, 8, generator=torch.Generator().manual_seed(0))
    expected = quantize(embeddings, "uint8")
    monkeypatch.setattr(quantization, "_TOKENS_AT_ONCE", 4)
    actual = quantize(embeddings, "uint8")
    assert torch.equal(actual.values, expected.values)
    assert torch.equal(actual.scales, expected.scales)
    assert torch.equal(actual.offsets, expected.offsets)


@pytest.mark.parametrize("shape", [(9, 20, 16), (4, 3, 20, 16)])
def test_several_blocks_of_documents(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    queries, documents = torch.randn(4, 5, 16), quantize(torch.randn(shape), "uint8")
    masks = {"queries_mask": torch.rand(4, 5), "documents_mask": torch.rand(shape[:-1]) > 0.5}
    expected = maxsim_quantized_reference(queries, documents, **masks)
    flat = quantize(torch.randn(180, 16)), torch.tensor([0, 20, 20, 60, 100, 180])
    owners = {"candidates_cu_seqlens": torch.tensor([0, 2, 2, 4, 5])}
    bounds = torch.tensor([0, 5, 10, 15, 20]), flat[1]
    for block in (1, 160, 1 << 20):
        monkeypatch.setattr(products, "_BLOCK_CPU", block)
        torch.testing.assert_close(maxsim(queries, documents, **masks).double(), expected, **CLOSE)
        for options in ({}, owners):
            packed_queries = queries.flatten(0, 1)
            actual = maxsim_varlen(packed_queries, flat[0], *bounds, **options, empty_score=-1.0)
            packed_expected = maxsim_quantized_reference(packed_queries, flat[0], *bounds, **options, empty_score=-1.0)
            torch.testing.assert_close(actual.double(), packed_expected, **CLOSE)


@pytest.mark.parametrize("shape", [(0, 5, 8), (3, 0, 8)])
def test_no_documents_and_no_tokens(shape: tuple[int, ...]) -> None:
    documents = quantize(torch.ones(shape))
    result = maxsim(torch.ones(2, 4, 8), documents, empty_score=-7.0, reduction="mean")
    assert torch.equal(result, torch.full((2, shape[0]), -7.0))
    packed_documents, bounds = quantize(torch.ones(0, 8)), torch.zeros(shape[0] + 1, dtype=torch.int32)
    result = maxsim_varlen(torch.ones(4, 8), packed_documents, torch.tensor([0, 4, 4]), bounds, empty_score=-7.0)
    assert torch.equal(result, torch.full((2, shape[0]), -7.0))


def test_queries_as_they_are_are_not_rounded() -> None:
    """Where quantizing the queries changes the score, and where not."""
    queries, documents = torch.tensor([[[1.0, 0.001]]]), quantize(torch.eye(2).view(1, 2, 2))
    assert maxsim(queries * torch.tensor([0.0, 1.0]) + 0.0, documents).item() == pytest.approx(0.001)
    second = quantize(torch.tensor([[[0.0, 1.0]]]))
    assert maxsim(queries, second).item() == 0.0
    assert maxsim(queries, second, quantize_queries=False).item() == pytest.approx(0.001)


def test_under_autocast_queries_take_its_type() -> None:
    queries, documents = torch.randn(2, 3, 8), quantize(torch.randn(2, 4, 8))
    expected = maxsim(queries.bfloat16(), documents, quantize_queries=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(maxsim(queries, documents, quantize_queries=False), expected)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_opcheck_and_compile(precision: str) -> None:
    torch.manual_seed(0)
    queries, documents = torch.randn(2, 3, 8), quantize(torch.randn(4, 5, 8), precision)
    tensors = (queries, documents.values, *[None] * 5, documents.scales, documents.offsets)
    arguments = (*tensors, 0, 0, 0, False, "mean", "exclude", 0.0, "auto", True)
    # test_schema multiplies the inputs, and torch has no product of fp8 elements.
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    tests += [] if precision == "fp8" else ["test_schema"]
    torch.library.opcheck(torch.ops.pylate_flash.maxsim_quantized.default, arguments, test_utils=tests)
    result = torch.compile(maxsim, fullgraph=True)(queries, documents, reduction="mean")
    torch.testing.assert_close(result, maxsim(queries, documents, reduction="mean"))


def test_a_gradient_is_refused() -> None:
    queries, documents = torch.randn(2, 3, 8, requires_grad=True), quantize(torch.randn(2, 4, 8, requires_grad=True))
    with pytest.raises(RuntimeError, match="maxsim of quantized documents has no gradient"):
        maxsim(queries, documents)
    with torch.no_grad():
        assert torch.equal(maxsim(queries, documents), maxsim(queries.detach(), documents))


def tensors_of(quantized: QuantizedEmbeddings) -> dict[str, Tensor | None]:
    return {name: getattr(quantized, name) for name in ("values", "scales", "offsets", "cu_seqlens")}


test_one_error_for_each_mistake = mistakes(
    wrong(ValueError, "precision must be one of 'int8', 'uint8', 'fp8'", quantize, torch.ones(2, 3), "int4"),
    wrong(ValueError, r"embeddings must have shape \[T, d\] or", quantize, torch.ones(3)),
    wrong(ValueError, "are of packed", quantize, torch.ones(1, 2, 3), cu_seqlens=torch.tensor([0, 2])),
    wrong(ValueError, "offsets must be given for values of torch.uint8, got None",
          QuantizedEmbeddings, torch.ones(2, 3, dtype=torch.uint8), torch.ones(2)),
    wrong(ValueError, "offsets must be None for values of torch.int8, got a tensor",
          QuantizedEmbeddings, torch.ones(2, 3, dtype=torch.int8), torch.ones(2), torch.ones(2)),
    wrong(ValueError, "scales must not require a gradient",
          QuantizedEmbeddings, quantize(torch.ones(2, 3)).values, torch.ones(2, requires_grad=True)),
    wrong(TypeError, "dtype must be a floating torch.dtype", quantize(torch.ones(2, 3)).dequantize, torch.int8),
    wrong(ValueError, r"documents must have shape", maxsim, torch.ones(1, 2, 3), quantize(torch.ones(2, 3))),
    wrong(ValueError, "documents must have the embedding size of queries, 3, got 4",
          maxsim, torch.ones(1, 2, 3), quantize(torch.ones(1, 2, 4))),
    wrong(TypeError, "documents must be a torch.Tensor, got QuantizedEmbeddings",
          maxsim_pairwise, torch.ones(1, 2, 3), quantize(torch.ones(1, 2, 3))),
    wrong(ValueError, "documents_cu_seqlens must rise from 0",
          maxsim_varlen, torch.ones(2, 3), quantize(torch.ones(2, 3)), torch.tensor([0, 2]), torch.tensor([0, 3])),
)  # fmt: skip
