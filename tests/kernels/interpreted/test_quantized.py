"""Kernels for quantized documents, run by Triton's interpreter, against the definition in float64.

The interpreter truncates in casts to fp8, so queries are quantized to fp8 only where nothing is rounded.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pylate_flash import QuantizedEmbeddings, maxsim, maxsim_varlen, pack, quantize
from pylate_flash.kernels import tables
from pylate_flash.ops.quantized import maxsim_quantized_reference
from pylate_flash.ops.varlen import maxsim_in_place
from tests.kernels.interpreted.test_kernels import HALF_AND_FLOAT
from tests.ops.cases import Case, cases
from tests.ops.test_quantized import CLOSE, fp8_exact, rows_as_quantized
from tests.ops.test_varlen import packed

# Precision of documents, and whether queries have 8 bits too.
PRECISIONS = [("int8", True), ("uint8", True), ("int8", False), ("uint8", False), ("fp8", False)]


@settings(max_examples=20)
@given(case=cases(dtypes=HALF_AND_FLOAT, max_batch=3), precision=st.sampled_from(PRECISIONS))
def test_scores(case: Case, precision: tuple[str, bool]) -> None:
    documents, options = quantize(case.documents, precision[0]), {"quantize_queries": precision[1], **case.keywords}
    result = maxsim(case.queries, documents, **options, implementation="triton")
    torch.testing.assert_close(result.double(), maxsim_quantized_reference(case.queries, documents, **options), **CLOSE)


@settings(max_examples=15)
@given(case=packed(dtypes=HALF_AND_FLOAT), precision=st.sampled_from(PRECISIONS))
def test_packed(case: tuple, precision: tuple[str, bool]) -> None:
    (queries, documents, *bounds), options = case
    documents, options = quantize(documents, precision[0]), {"quantize_queries": precision[1], **options}
    actual = maxsim_varlen(queries, documents, *bounds, **options, implementation="triton")
    expected = maxsim_quantized_reference(queries, documents, *bounds, **options)
    torch.testing.assert_close(actual.double(), expected, **CLOSE)


@pytest.mark.parametrize(
    ("queries_shape", "documents_shape", "quantize_queries"),
    [
        ((9, 33, 24), (2, 150, 24), True),  # two blocks of rows, three tiles of tokens, sums of 8 rows
        ((2, 5, 300), (2, 40, 300), True),  # embeddings that are split into blocks
        ((2, 5, 1100), (2, 20, 1100), False),  # more products than one sum takes
        ((1, 3, 8), (40, 3, 8), True),  # a program that walks several documents
    ],
)
@pytest.mark.parametrize("precision", ["int8", "uint8", "fp8"])
def test_tile_boundaries(
    precision: str, queries_shape: tuple[int, ...], documents_shape: tuple[int, ...], quantize_queries: bool
) -> None:
    torch.manual_seed(0)
    queries, documents = torch.randn(queries_shape), quantize(torch.randn(documents_shape), precision)
    if precision == "fp8" and quantize_queries:
        queries = fp8_exact(queries)
    options = {
        "queries_mask": torch.rand(queries_shape[:-1]), "documents_mask": torch.rand(documents_shape[:-1]) > 0.2,
        "normalize": precision == "fp8", "masking": "zero", "quantize_queries": quantize_queries,
    }  # fmt: skip
    result = maxsim(queries, documents, **options, implementation="triton")
    torch.testing.assert_close(result.double(), maxsim_quantized_reference(queries, documents, **options), **CLOSE)


@pytest.mark.parametrize("size", [256, 384])
def test_sums_of_short_queries_at_their_largest(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 of 1.5 * 2**23 plus such a sum is exact below 2**22."""
    monkeypatch.setattr(tables, "SHORT_QUANTIZED_TOKENS", 0)
    queries, documents = torch.ones(1, 2, size), quantize(torch.full((2, 40, size), 3.0), "int8")
    scores = maxsim(queries, documents, implementation="triton")
    torch.testing.assert_close(scores, torch.full((1, 2), 6.0 * size), rtol=1e-6, atol=0)


@pytest.mark.parametrize("precision", ["int8", "uint8", "fp8"])
@pytest.mark.parametrize(("n_queries", "size"), [(1, 128), (1, 96), (1, 48), (3, 64), (3, 160)])
def test_short_queries(precision: str, n_queries: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded documents, candidates per query, and packed documents with empty ones, by several programs."""
    monkeypatch.setattr(tables, "architecture", lambda device: (9, 1))
    monkeypatch.setattr(tables, "SHORT_PER_SM", 2)
    monkeypatch.setattr(tables, "SHORT_QUANTIZED_TOKENS", 0)
    monkeypatch.setattr(tables, "SMALLEST_SPLIT", 64)
    torch.manual_seed(0)
    queries, lengths = torch.randn(n_queries, 11, size), torch.tensor([0, 5, 40, 0, 33, 64, 1, 20, 0])
    if precision == "fp8":
        queries = fp8_exact(queries)
    options = {"normalize": True, "queries_mask": torch.rand(n_queries, 11)}
    shape = (7, 37) if n_queries == 1 else (n_queries, 4, 37)
    documents = quantize(torch.randn(*shape, size), precision)
    actual = maxsim(queries, documents, **options, implementation="triton")
    torch.testing.assert_close(actual.double(), maxsim_quantized_reference(queries, documents, **options), **CLOSE)
    if n_queries == 1:
        bounds = torch.tensor([0, *lengths.cumsum(0)])
        packed = quantize(torch.randn(int(bounds[-1]), size), precision)
        cu_seqlens = {"queries_cu_seqlens": torch.tensor([0, 11]), "documents_cu_seqlens": bounds}
        actual = maxsim_varlen(queries[0], packed, **cu_seqlens, empty_score=-3.0, implementation="triton")
        expected = maxsim_quantized_reference(queries[0], packed, *cu_seqlens.values(), empty_score=-3.0)
        torch.testing.assert_close(actual.double(), expected, **CLOSE)
        # Values interleaved with scales and offsets, as in an index.
        rows = torch.zeros(len(packed.values), 16 + size, dtype=torch.uint8)
        rows[:, 16:], numbers = packed.values.view(torch.uint8), rows[:, :8].view(torch.float32)
        numbers[:, 0], numbers[:, 1] = packed.scales, 0.0 if packed.offsets is None else packed.offsets
        interleaved = QuantizedEmbeddings(
            rows[:, 16:].view(packed.values.dtype), numbers[:, 0], None if packed.offsets is None else numbers[:, 1]
        )
        again = maxsim_varlen(queries[0], interleaved, **cu_seqlens, empty_score=-3.0, implementation="triton")
        assert torch.equal(again, actual)


@pytest.mark.parametrize("precision", ["int8", "uint8", "fp8"])
@pytest.mark.parametrize("size", [16, 40, 160])
def test_candidates_that_lie_among_others(precision: str, size: int) -> None:
    """Values and scales in separate tensors, with rows padded as in an index."""
    torch.manual_seed(0)
    queries, queries_bounds = pack([torch.randn(length, size) for length in (5, 3, 4)])
    lengths = [7, 0, 40, 12, 90]
    rows, bounds = quantize(torch.randn(sum(lengths), size), precision), pack([torch.empty(n, 1) for n in lengths])[1]
    if precision == "fp8":
        queries = fp8_exact(queries)
    values = torch.nn.functional.pad(rows.values.view(torch.uint8), (0, -size % 16)).view(rows.values.dtype)
    stored = QuantizedEmbeddings(values[:, :size], rows.scales, rows.offsets)
    chosen, candidates = [4, 0, 1, 3, 3], torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    tokens = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in chosen])
    chosen_bounds = torch.tensor([0, *torch.tensor(lengths)[chosen].cumsum(0)], dtype=torch.int32)
    actual = maxsim_in_place(
        queries, stored, queries_bounds, chosen_bounds, bounds[chosen].long(), candidates, 5, 90, 3, len(tokens), -3.0,
        "triton",
    )  # fmt: skip
    offsets = None if rows.offsets is None else rows.offsets[tokens]
    expected = maxsim_varlen(
        queries, QuantizedEmbeddings(rows.values[tokens], rows.scales[tokens], offsets), queries_bounds, chosen_bounds,
        candidates_cu_seqlens=candidates, empty_score=-3.0, implementation="triton",
    )  # fmt: skip
    assert torch.equal(actual, expected)
    assert actual[2] == -3.0
    first = maxsim_in_place(
        queries[:5], stored, queries_bounds[:2], chosen_bounds[:3], bounds[chosen[:2]].long(), candidates[:2], 5, 90, 2,
        97, -3.0, "triton",
    )  # fmt: skip
    assert torch.equal(first, actual[:2])


def test_a_token_that_is_not_a_number() -> None:
    """It spoils the scores of its document and its query, and no others; none if it is masked."""
    torch.manual_seed(0)
    queries, documents = torch.randn(3, 4, 16), torch.randn(3, 5, 16)
    queries[1, 2, 3], documents[2, 1, 0] = torch.nan, torch.inf
    quantized = quantize(documents)
    result = maxsim(queries, quantized, implementation="triton")
    assert result.isnan().tolist() == [[False, False, True], [True, True, True], [False, False, True]]
    masks = {"queries_mask": ~queries.isnan().any(dim=-1), "documents_mask": ~documents.isinf().any(dim=-1)}
    assert not maxsim(queries, quantized, **masks, implementation="triton").isnan().any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_masked_tokens_of_short_queries_may_be_anything(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "SHORT_QUANTIZED_TOKENS", 0)
    queries, mask = torch.randn(1, 3, 64), torch.tensor([[True, False, True]])
    for precision in ("int8", "uint8"):
        score = partial(maxsim, documents=quantize(torch.randn(3, 5, 64), precision), implementation="triton")
        for weights in (mask, mask * 0.5):
            expected = score(queries, queries_mask=weights)
            spoiled = queries.clone()
            spoiled[0, 1, 5] = value
            assert torch.equal(score(spoiled, queries_mask=weights), expected)
            assert score(spoiled).isnan().all()


@pytest.mark.parametrize("precision", ["int8", "uint8", "fp8"])
@pytest.mark.parametrize("scale", [2.0**84, 2.0**-44])
def test_huge_and_tiny_documents_are_normalized(precision: str, scale: float) -> None:
    """Their squared norms are outside float32's range."""
    torch.manual_seed(0)
    queries, documents = torch.randn(2, 3, 8), torch.randn(3, 5, 8)
    documents[0, 1] = 0.0
    options = {"normalize": True, "quantize_queries": precision != "fp8"}
    actual = maxsim(queries, quantize(documents * scale, precision), **options, implementation="triton")
    expected = maxsim_quantized_reference(queries, quantize(documents * scale, precision), **options)
    torch.testing.assert_close(actual.double(), expected, **CLOSE)


@pytest.mark.parametrize("normalize", [False, True])
def test_queries_are_quantized_to_the_bit(normalize: bool) -> None:
    torch.manual_seed(0)
    queries = torch.randn(9, 20) * torch.logspace(-44, 30, 9).unsqueeze(1)
    queries[2], queries[3, 7], queries[4, 3] = 0.0, torch.nan, torch.inf
    # Ties: halves, with a scale of 1.
    queries[5] = torch.tensor([127.0, *(torch.arange(19) - 9.5)])
    expected = quantize(queries).dequantize()
    if normalize:
        expected = torch.nn.functional.normalize(expected.double(), dim=-1).float()
    actual = rows_as_quantized(queries, "int8", normalize=normalize)
    torch.testing.assert_close(actual, expected, rtol=1e-6 if normalize else 0.0, atol=0.0, equal_nan=True)


def test_scales_of_documents_of_one_token_may_have_any_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "SHORT_QUANTIZED_TOKENS", 0)
    queries, documents = torch.randn(1, 3, 64), quantize(torch.randn(5, 1, 64), "int8")
    expected = maxsim(queries, documents, implementation="triton")
    scales = torch.empty(1, 5).copy_(documents.scales.T).T
    assert scales.stride() == (1, 5)
    documents = QuantizedEmbeddings(documents.values, scales, None)
    assert torch.equal(maxsim(queries, documents, implementation="triton"), expected)
