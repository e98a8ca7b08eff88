"""Quantized documents on a GPU, against the definition in float64 on the dequantized embeddings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pylate_flash import QuantizedEmbeddings, explain, maxsim, maxsim_varlen, pack, quantize
from pylate_flash.kernels import tables
from pylate_flash.ops.operator import repeated
from pylate_flash.ops.quantized import maxsim_quantized_reference
from tests.gpu.tools import CAPABILITY, DTYPES, PRECISIONS, SIZES, memory_of, on_gpu, unit
from tests.ops.cases import Case, cases
from tests.ops.test_quantized import rows_as_quantized
from tests.ops.test_varlen import packed

pytestmark = pytest.mark.gpu


def close(actual: Tensor, expected: Tensor, precision: str, quantize_queries: bool) -> None:
    """Compare scores: tensor cores sum products of fp8 with about 13 bits, and others accurately enough."""
    tolerance = 1e-3 if precision == "fp8" and quantize_queries else 2e-6
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@settings(max_examples=60)
@given(case=cases(dtypes=DTYPES, sizes=SIZES), precision=st.sampled_from(PRECISIONS), quantize_queries=st.booleans())
def test_scores(case: Case, precision: str, quantize_queries: bool) -> None:
    case = on_gpu(case)
    documents, options = quantize(case.documents, precision), {"quantize_queries": quantize_queries, **case.keywords}
    result = maxsim(case.queries, documents, **options, implementation="triton")
    close(result, maxsim_quantized_reference(case.queries, documents, **options), precision, quantize_queries)


@settings(max_examples=60)
@given(case=packed(dtypes=DTYPES, sizes=SIZES), precision=st.sampled_from(PRECISIONS), quantize_queries=st.booleans())
def test_packed(case: tuple, precision: str, quantize_queries: bool) -> None:
    (queries, documents, *bounds), options = case
    queries, documents = queries.cuda(), quantize(documents.cuda(), precision)
    options["quantize_queries"] = quantize_queries
    actual = maxsim_varlen(queries, documents, *bounds, **options, implementation="triton")
    expected = maxsim_quantized_reference(queries, documents, *bounds, **options)
    close(actual, expected, precision, quantize_queries)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_packed_rows_with_scales_between_them(precision: str) -> None:
    """As in an index, with documents of all lengths, some of them empty."""
    lengths = torch.tensor([(37 * index) % 301 for index in range(2000)])
    bounds = torch.tensor([0, *lengths.cumsum(0)], device="cuda")
    packed, query = quantize(unit(int(bounds[-1]), 128, seed=1), precision), unit(32, 128, dtype=torch.bfloat16)
    rows = torch.zeros(len(packed.values), 144, dtype=torch.uint8, device="cuda")
    rows[:, 16:], numbers = packed.values.view(torch.uint8), rows[:, :8].view(torch.float32)
    numbers[:, 0], offsets = packed.scales, None
    if packed.offsets is not None:
        numbers[:, 1], offsets = packed.offsets, numbers[:, 1]
    interleaved = QuantizedEmbeddings(rows[:, 16:].view(packed.values.dtype), numbers[:, 0], offsets)
    call = query, torch.tensor([0, 32], device="cuda"), bounds
    result = maxsim_varlen(call[0], packed, *call[1:], empty_score=-3.0)
    close(result, maxsim_quantized_reference(call[0], packed, *call[1:], empty_score=-3.0), precision, True)
    assert torch.equal(maxsim_varlen(call[0], interleaved, *call[1:], empty_score=-3.0), result)


@pytest.mark.parametrize("quantize_queries", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("queries_shape", "documents_shape"),
    [
        ((1, 32, 128), (700, 300, 128)),
        ((1, 50, 96), (700, 300, 96)),
        ((32, 32, 128), (200, 180, 128)),
        ((1, 1024, 128), (30, 1024, 128)),
        ((7, 77, 72), (50, 77, 72)),
        ((5, 33, 96), (5, 20, 130, 96)),
        ((3, 200, 768), (20, 180, 768)),
    ],
)
def test_real_shapes_and_the_same_bits_again(
    queries_shape: tuple[int, ...], documents_shape: tuple[int, ...], precision: str, quantize_queries: bool
) -> None:
    queries = unit(*queries_shape, dtype=torch.bfloat16)
    documents = quantize(unit(*documents_shape, seed=1), precision)
    mask = torch.rand(documents_shape[:-1], device="cuda") > 0.3
    for options in ({}, {"documents_mask": mask, "normalize": True, "masking": "zero"}):
        options = {**options, "quantize_queries": quantize_queries}
        result = maxsim(queries, documents, **options, implementation="triton")
        close(result, maxsim_quantized_reference(queries, documents, **options), precision, quantize_queries)
        for _ in range(20):
            assert torch.equal(maxsim(queries, documents, **options), result)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "shape",
    [(1, 32, 128), (1, 60, 128), (1, 7, 48), (1, 32, 96), (1, 20, 160), (1, 32, 256), (1, 64, 64), (20, 9, 112)],
)
def test_short_queries(shape: tuple[int, ...], precision: str) -> None:
    """One query and many documents, or as many candidates per query, in rows of every width."""
    queries, own = unit(*shape, dtype=torch.bfloat16), (shape[0], 350) if shape[0] > 1 else (7000,)
    documents = quantize(unit(*own, 90, shape[-1], seed=1), precision)
    served = "stacked" if precision == "fp8" and shape[1] > 32 else "short"
    long = shape[0] == 1 and (shape[1] > 32 or shape[2] > 128)
    if CAPABILITY[0] == 9 and precision != "uint8" and long:
        served = "hopper"
    assert explain(queries, documents).forward.kernel == served
    queries_mask, documents_mask = (torch.rand(s, device="cuda") for s in (shape[:2], documents.values.shape[:-1]))
    for options in (
        {},
        {"normalize": True, "queries_mask": queries_mask},
        {"documents_mask": documents_mask > 0.3, "queries_mask": queries_mask},
    ):
        result = maxsim(queries, documents, **options)
        close(result, maxsim_quantized_reference(queries, documents, **options), precision, True)
        for _ in range(20):
            assert torch.equal(maxsim(queries, documents, **options), result)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("with_candidates", [False, True])
def test_packed_documents_of_many_lengths(precision: str, with_candidates: bool) -> None:
    lengths = [180, 0, 9000, 7, 64] * 40
    documents, bounds = pack([unit(length, 128, seed=index) for index, length in enumerate(lengths)])
    queries, query_bounds = pack([unit(length, 128, dtype=torch.bfloat16) for length in (32, 5, 0, 130)])
    options = {"candidates_cu_seqlens": torch.tensor([0, 50, 50, 60, 200])} if with_candidates else {}
    quantized = quantize(documents, precision, cu_seqlens=bounds)
    result = maxsim_varlen(queries, quantized, query_bounds, bounds, **options, empty_score=-1.0)
    call = queries, quantized, query_bounds, bounds
    close(result, maxsim_quantized_reference(*call, **options, empty_score=-1.0), precision, True)


@pytest.mark.skipif(CAPABILITY[0] != 9, reason="the kernel is for compute capability 9.0")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("size", [16, 32, 48, 64, 96, 128, 256])
@pytest.mark.parametrize("n_queries", [3, 8])
def test_a_stream_of_documents(precision: str, size: int, n_queries: int) -> None:
    """Embeddings of every size, whose tiles take more or less shared memory."""
    documents, bounds = pack([unit(index % 141, size, seed=index) for index in range(600)])
    queries, query_bounds = pack(list(unit(n_queries, 32, size, dtype=torch.bfloat16)))
    call = queries, quantize(documents, precision, cu_seqlens=bounds), query_bounds, bounds
    cu_seqlens = {"queries_cu_seqlens": query_bounds, "documents_cu_seqlens": bounds}
    longest = {"max_query_length": 32, "max_document_length": 140}
    assert explain(*call[:2], **cu_seqlens, **longest).forward.config.stream
    result = maxsim_varlen(*call, **longest, implementation="triton")
    close(result, maxsim_quantized_reference(*call), precision, True)


@pytest.mark.parametrize("n_queries", [64, 1200])
@pytest.mark.parametrize("size", [48, 128, 256, 300])
@pytest.mark.parametrize("precision", [precision for precision in PRECISIONS if precision != "uint8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_queries_are_quantized_to_the_bit(dtype: torch.dtype, precision: str, size: int, n_queries: int) -> None:
    queries = torch.randn(n_queries, size, device="cuda").to(dtype)
    queries *= torch.logspace(-4, 3, n_queries, device="cuda").unsqueeze(1).to(dtype)
    queries[0], queries[1, 7], queries[2, 3] = 0.0, torch.nan, torch.inf
    result = rows_as_quantized(queries, precision)
    torch.testing.assert_close(result, quantize(queries, precision).dequantize(), rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_saved_file(precision: str, tmp_path) -> None:
    queries, documents = unit(3, 32, 128, dtype=torch.bfloat16), quantize(unit(50, 180, 128, seed=1), precision)
    documents.save(tmp_path / "documents.safetensors")
    loaded = QuantizedEmbeddings.load(tmp_path / "documents.safetensors", "cuda")
    assert torch.equal(maxsim(queries, loaded), maxsim(queries, documents))
    assert "because documents are quantized" in str(explain(queries, loaded))


def test_memory_is_that_of_scores_and_queries() -> None:
    queries, documents = unit(32, 32, 128, dtype=torch.bfloat16), quantize(unit(2000, 180, 128, seed=1))
    peak, _ = memory_of(lambda: maxsim(queries, documents))
    assert peak < 2 * 4 * 32 * 2000 + 2 * queries.nbytes


hopper_only = pytest.mark.skipif(CAPABILITY[0] != 9, reason="the kernel is for compute capability 9.0")


def by_hopper(queries: Tensor, documents: QuantizedEmbeddings, **options) -> Tensor:
    """Scores by the Hopper kernel."""
    explained = {name: value for name, value in options.items() if name not in ("empty_score", "reduction")}
    assert "on a Hopper GPU" in str(explain(queries, documents, **explained))
    return maxsim(queries, documents, **options, implementation="triton")


@hopper_only
@settings(max_examples=30)
@given(
    shape=st.tuples(st.integers(65, 400), st.just(1)) | st.tuples(st.integers(3, 20), st.just(32)),
    length=st.integers(1, 300), size=st.sampled_from([48, 96, 128, 256]), precision=st.sampled_from(PRECISIONS),
    masked=st.booleans(), weighted=st.booleans(), normalize=st.booleans(),
    masking=st.sampled_from(["exclude", "zero"]),
)  # fmt: skip
def test_hopper(
    shape: tuple[int, int], length: int, size: int, precision: str, masked: bool, weighted: bool, normalize: bool,
    masking: str,
) -> None:  # fmt: skip
    """Every option, tails of every length, parts without rows, and a document without active tokens."""
    queries, documents = unit(*shape, size, dtype=torch.bfloat16), unit(20, length, size, seed=1)
    if precision != "fp8":
        # The last queries have negative similarities only. (Sums of fp8 are so inexact that more would cancel.)
        queries -= torch.linspace(0, 0.1, len(queries), device="cuda").to(queries.dtype)[:, None, None]
        documents += 0.1
    documents, options = quantize(documents, precision), {"normalize": normalize, "masking": masking}
    if masked:
        options["documents_mask"] = torch.rand(20, length, device="cuda") > 0.5
        options["documents_mask"][7] = False
    if weighted:
        options["queries_mask"] = torch.rand(queries.shape[:2], device="cuda").round(decimals=1)
    result = by_hopper(queries, documents, **options)
    close(result, maxsim_quantized_reference(queries, documents, **options), precision, True)


@hopper_only
@pytest.mark.parametrize("length", [64, 129, 300, 1024])
@pytest.mark.parametrize("size", [32, 96, 128, 256])
def test_hopper_finds_the_maxima_of_the_plain_kernel_to_the_bit(size: int, length: int, monkeypatch) -> None:
    """The score of a query of one token is one maximum: int8 products are exact, and the rest is rounded the same.

    Longer queries are summed in another order.
    """
    queries = torch.randn(500, 1, size, device="cuda", dtype=torch.bfloat16)
    # Large and small queries, and tokens whose similarities are all negative.
    queries *= torch.logspace(-6, 6, 500, device="cuda")[:, None, None].to(queries.dtype)
    values = torch.randint(-127, 128, (30, length, size), device="cuda", dtype=torch.int8)
    queries[::3] = -queries[::3].abs()
    values[::2] = values[::2].abs()
    # The largest possible sums, of both signs.
    queries[3], queries[4], values[4, 0] = -1.0, 1.0, 127
    scales = torch.logspace(-9, 9, 30 * length, device="cuda").view(30, length)[:, torch.randperm(length)]
    scales[5, 0], scales[6, :] = torch.nan, 0.0
    documents = QuantizedEmbeddings(values, scales.contiguous())
    mask = torch.rand(30, length, device="cuda") > 0.3
    mask[5, 0] = True
    for options in ({}, {"documents_mask": mask, "masking": "zero"}, {"documents_mask": mask, "normalize": True}):
        actual = by_hopper(queries, documents, **options)
        with monkeypatch.context() as patch:
            patch.setattr(tables, "QUANTIZED_HOPPER_MIN_ROWS", 1 << 40)
            patch.setattr(tables, "QUANTIZED_HOPPER_FEW_TOKENS", 1 << 40)
            assert "on a Hopper GPU" not in str(explain(queries, documents, **options))
            expected = maxsim(queries, documents, **options, implementation="triton")
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=0.0, equal_nan=True)
        assert actual[:, 5].isnan().all()
        # Every document has a masked token, which counts as 0 then.
        assert (actual < 0.0).any() == ("masking" not in options)


@hopper_only
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "size"), [((100, 1), 128), ((100, 1), 64), ((5, 20), 256), ((17, 30), 128)])
def test_hopper_quantizes_rows_in_registers_to_the_bit(
    shape: tuple[int, int], size: int, dtype: torch.dtype, precision: str, normalize: bool, monkeypatch
) -> None:
    """As a separate launch before it does, rows with tiny, infinite and NaN elements included."""
    queries = torch.randn(*shape, size, device="cuda")
    queries *= torch.logspace(-42, 30, shape[0], device="cuda")[:, None, None]
    queries = queries.to(dtype)
    queries[0], queries[1, 0, 7], queries[2, 0, 3] = 0.0, torch.nan, torch.inf
    documents = quantize(unit(70, 150, size, seed=1), precision)
    result = by_hopper(queries, documents, normalize=normalize)
    repeated.forget()
    monkeypatch.setattr(tables, "QUANTIZED_HOPPER_OWN", 0)
    again = by_hopper(queries, documents, normalize=normalize)
    # Squares of fp8 are added up in another order; those of integers are exact.
    rounding = 1e-6 if normalize and precision == "fp8" else 0.0
    torch.testing.assert_close(result, again, rtol=rounding, atol=0.0, equal_nan=True)


@hopper_only
@pytest.mark.parametrize("longest", [9000, 190])
@pytest.mark.parametrize("precision", ["int8", "uint8", "fp8"])
def test_hopper_of_packed_documents_and_candidates(precision: str, longest: int) -> None:
    """Long documents are scored one by one, short ones as one stream."""
    lengths = [180, 0, longest, 7, 64, 65, 128, 129] * 40
    documents, bounds = pack([unit(length, 96, seed=index) for index, length in enumerate(lengths)])
    queries = unit(9, 77, 96, dtype=torch.bfloat16)
    quantized = quantize(documents, precision, cu_seqlens=bounds)
    query_bounds = torch.arange(0, 10, device="cuda") * 77
    call = queries.flatten(0, 1), quantized, query_bounds, bounds
    explained = explain(*call[:2], queries_cu_seqlens=query_bounds, documents_cu_seqlens=bounds)
    assert "on a Hopper GPU" in str(explained)
    assert explained.forward.config.stream == (longest < 200)
    result = maxsim_varlen(*call, empty_score=-1.0, implementation="triton")
    close(result, maxsim_quantized_reference(*call, empty_score=-1.0), precision, True)
    assert (result[:, 1::8] == -1.0).all()
    for _ in range(20):
        assert torch.equal(maxsim_varlen(*call, empty_score=-1.0), result)
    own = quantize(unit(9, 5, 333, 128, seed=1), precision)
    queries = unit(9, 130, 128, dtype=torch.float16)
    close(by_hopper(queries, own), maxsim_quantized_reference(queries, own), precision, True)


@hopper_only
@pytest.mark.parametrize("size", [32, 128, 192, 256])
def test_hopper_of_the_largest_sums_of_affine_tokens(size: int) -> None:
    """All values 0 or 255, of either sign, more tiles than are prefetched, and a scale that is NaN."""
    queries = torch.ones(100, 1, size, dtype=torch.bfloat16, device="cuda")
    queries[::2] = -1.0
    values = torch.randint(0, 256, (30, 2000, size), device="cuda", dtype=torch.uint8)
    values[:, ::2], values[:, 1::4], values[7, :1999] = 0, 255, 255
    scales, offsets = torch.rand(2, 30, 2000, device="cuda")
    scales[5, 1999] = torch.nan
    documents = QuantizedEmbeddings(values, scales, offsets - 0.5)
    result = by_hopper(queries, documents)
    # Relative to the largest terms that cancel.
    largest = 255 * size
    close(result / largest, maxsim_quantized_reference(queries, documents) / largest, "uint8", True)
    assert result[:, 5].isnan().all()
