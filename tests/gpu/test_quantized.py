"""Quantized documents on a GPU, against the definition in float64 on the dequantized embeddings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pylate_flash import QuantizedEmbeddings, explain, maxsim, maxsim_varlen, pack, quantize
from pylate_flash.kernels.quantized.rows import quantized_rows
from pylate_flash.ops.quantized import maxsim_quantized_reference
from tests.gpu.embeddings import unit
from tests.gpu.test_varlen import DTYPES, OPTIONS, SIZES
from tests.ops.cases import Case, cases
from tests.ops.test_quantized import PRECISIONS
from tests.ops.test_varlen import packed

pytestmark = pytest.mark.gpu


def precisions() -> list[str]:
    # Without a GPU, these tests are skipped.
    has_fp8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    return PRECISIONS if has_fp8 else PRECISIONS[:2]


def close(found: Tensor, expected: Tensor, precision: str, quantize_queries: bool) -> None:
    """Tensor cores sum products of fp8 with about 13 bits, and those of other types exactly enough."""
    tolerance = 1e-3 if precision == "fp8" and quantize_queries else 2e-6
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.fixture(autouse=True)
def exact_products() -> None:
    assert torch.get_float32_matmul_precision() == "highest"


@settings(max_examples=60, **OPTIONS)
@given(case=cases(dtypes=DTYPES, sizes=SIZES), precision=st.sampled_from(precisions()), quantize_queries=st.booleans())
def test_scores(case: Case, precision: str, quantize_queries: bool) -> None:
    case = case.to("cuda")
    documents, options = quantize(case.documents, precision), {"quantize_queries": quantize_queries, **case.keywords}
    found = maxsim(case.queries, documents, **options, implementation="triton")
    close(found, maxsim_quantized_reference(case.queries, documents, **options), precision, quantize_queries)


@settings(max_examples=60, **OPTIONS)
@given(case=packed(dtypes=DTYPES, sizes=SIZES), precision=st.sampled_from(precisions()), quantize_queries=st.booleans())
def test_packed(case: tuple, precision: str, quantize_queries: bool) -> None:
    (queries, documents, *bounds), options = case
    queries, documents = queries.cuda(), quantize(documents.cuda(), precision)
    options["quantize_queries"] = quantize_queries
    found = maxsim_varlen(queries, documents, *bounds, **options, implementation="triton")
    expected = maxsim_quantized_reference(queries, documents, *bounds, **options)
    close(found, expected, precision, quantize_queries)


@pytest.mark.parametrize("quantize_queries", [False, True])
@pytest.mark.parametrize("precision", precisions())
@pytest.mark.parametrize(
    ("queries_shape", "documents_shape"),
    [
        ((1, 32, 128), (500, 300, 128)),
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
        found = maxsim(queries, documents, **options, implementation="triton")
        close(found, maxsim_quantized_reference(queries, documents, **options), precision, quantize_queries)
        for _ in range(20):
            assert torch.equal(maxsim(queries, documents, **options), found)


@pytest.mark.parametrize("precision", precisions())
@pytest.mark.parametrize("with_candidates", [False, True])
def test_packed_documents_of_many_lengths(precision: str, with_candidates: bool) -> None:
    lengths = [180, 0, 9000, 7, 64] * 40
    documents, bounds = pack([unit(length, 128, seed=index) for index, length in enumerate(lengths)])
    queries, query_bounds = pack([unit(length, 128, dtype=torch.bfloat16) for length in (32, 5, 0, 130)])
    options = {"candidates_cu_seqlens": torch.tensor([0, 50, 50, 60, 200])} if with_candidates else {}
    quantized = quantize(documents, precision, cu_seqlens=bounds)
    found = maxsim_varlen(queries, quantized, query_bounds, bounds, **options, empty_score=-1.0)
    call = queries, quantized, query_bounds, bounds
    close(found, maxsim_quantized_reference(*call, **options, empty_score=-1.0), precision, True)


@pytest.mark.parametrize("precision", precisions())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_queries_are_quantized_to_the_bit(dtype: torch.dtype, precision: str) -> None:
    precision = "int8" if precision == "uint8" else precision
    queries = torch.randn(30, 40, 128, device="cuda").to(dtype)
    queries *= torch.logspace(-4, 3, 40, device="cuda").unsqueeze(1).to(dtype)
    queries[0, 0], queries[1, 1, 7], queries[2, 2, 3] = 0.0, torch.nan, torch.inf
    expected = quantize(queries, precision)
    values, scales = quantized_rows(queries, queries.stride()[:2], (30, 40, 128), precision, False)
    assert torch.equal(values.view(torch.uint8), expected.values.view(torch.uint8))
    torch.testing.assert_close(scales, expected.scales, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("precision", precisions())
def test_a_graph_and_a_saved_file(precision: str, tmp_path) -> None:
    queries = unit(3, 32, 128, dtype=torch.bfloat16)
    quantize(unit(50, 180, 128, seed=1), precision).save(tmp_path / "documents.safetensors")
    documents = QuantizedEmbeddings.load(tmp_path / "documents.safetensors", "cuda")
    expected = maxsim(queries, documents)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = maxsim(queries, documents)
    found.zero_()
    graph.replay()
    assert torch.equal(found, expected)
    assert torch.equal(torch.compile(maxsim, fullgraph=True)(queries, documents), expected)
    assert "the quantized kernel" in str(explain(queries, documents))


def test_memory_is_that_of_scores_and_queries() -> None:
    queries, documents = unit(32, 32, 128, dtype=torch.bfloat16), quantize(unit(2000, 180, 128, seed=1))
    maxsim(queries, documents)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    maxsim(queries, documents)
    assert torch.cuda.max_memory_allocated() - before < 2 * 4 * 32 * 2000 + 2 * queries.nbytes
