"""Residual codes on a GPU, against the definition in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pylate_flash import ResidualCodes, maxsim_residual, maxsim_varlen, train_residual_codec
from pylate_flash.kernels import tables
from pylate_flash.ops.residual import maxsim_residual_by_bounds, maxsim_residual_reference
from tests.gpu.tools import DTYPES, memory_of, on_gpu, unit
from tests.ops.cases import relative_error
from tests.ops.residual_cases import check_8_bits, residual_cases, residual_codes, residual_gradient

pytestmark = pytest.mark.gpu

SIZES = st.sampled_from([8, 24, 48, 64, 72, 96, 128, 136, 256, 384, 768])
CLOSE = {"rtol": 2e-6, "atol": 2e-6, "equal_nan": True}


def by_kernels(*arguments, **options) -> Tensor:
    return maxsim_residual(*arguments, **options, precision="full", implementation="triton")


def check(queries: Tensor, documents: ResidualCodes, options: dict) -> Tensor:
    result = by_kernels(queries, documents, **options)
    torch.testing.assert_close(result.double(), maxsim_residual_reference(queries, documents, **options), **CLOSE)
    return result


@settings(max_examples=80)
@given(case=residual_cases(dtypes=DTYPES, sizes=SIZES, max_length=150))
def test_scores(case: tuple) -> None:
    check(*on_gpu(case))


@settings(max_examples=60)
@given(case=residual_cases(dtypes=(torch.float32,), sizes=SIZES))
def test_gradient(case: tuple) -> None:
    queries, documents, options = on_gpu(case)
    actual = residual_gradient(by_kernels, queries, documents, options)
    expected = residual_gradient(maxsim_residual_reference, queries, documents, options)
    assert relative_error(actual, expected) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("with_candidates", [False, True])
def test_half_gradient(dtype: torch.dtype, with_candidates: bool) -> None:
    queries, documents = unit(8, 32, 128, dtype=dtype), residual_codes([180, 0, 300, 7] * 20, 128, 4).to("cuda")
    options: dict = {"queries_mask": torch.rand(8, 32, device="cuda")}
    if with_candidates:
        options["candidates"] = torch.randint(-1, 80, (8, 50), device="cuda")
    actual = residual_gradient(by_kernels, queries, documents, options).double()
    expected = residual_gradient(maxsim_residual_reference, queries, documents, options).double()
    # Of two tokens with nearly the same similarity, float32 may choose the other one.
    assert torch.nn.functional.cosine_similarity(actual.flatten(), expected.flatten(), dim=0) >= 0.9999


@pytest.mark.parametrize("nbits", [2, 4])
@pytest.mark.parametrize(
    ("shape", "n_documents", "dtype"),
    [
        ((1, 32, 128), 2000, torch.bfloat16), ((32, 32, 128), 300, torch.float16), ((1, 1024, 128), 50, torch.bfloat16),
        ((7, 77, 96), 100, torch.bfloat16), ((3, 200, 768), 30, torch.float16), ((5, 33, 64), 100, torch.float32),
    ],
)  # fmt: skip
def test_real_shapes_and_the_same_bits_again(
    shape: tuple[int, ...], n_documents: int, dtype: torch.dtype, nbits: int
) -> None:
    lengths = [(37 * index) % 301 for index in range(n_documents)]
    documents = residual_codes(lengths, shape[-1], nbits, n_centroids=1000).to("cuda")
    queries = unit(*shape, dtype=dtype)
    candidates = torch.randint(-1, n_documents, (shape[0], 70), device="cuda")
    for options in ({}, {"candidates": candidates, "reduction": "mean", "empty_score": -1.0}):
        result = check(queries, documents, options)
        gradient = residual_gradient(by_kernels, queries, documents, options)
        for _ in range(20):
            assert torch.equal(by_kernels(queries, documents, **options), result)
        assert torch.equal(residual_gradient(by_kernels, queries, documents, options), gradient)


@pytest.mark.parametrize("nbits", [2, 4])
@pytest.mark.parametrize(
    ("shape", "n_documents", "dtype"),
    [
        ((1, 32, 128), 5000, torch.bfloat16), ((3, 17, 128), 700, torch.float16), ((1, 64, 128), 700, torch.bfloat16),
        ((2, 32, 64), 900, torch.float32), ((4, 10, 192), 300, torch.bfloat16), ((1, 32, 256), 300, torch.float16),
        ((1, 32, 96), 700, torch.bfloat16), ((1, 60, 32), 700, torch.bfloat16), ((2, 32, 48), 700, torch.bfloat16),
    ],
)  # fmt: skip
def test_short_queries_in_8_bits(shape: tuple[int, ...], n_documents: int, dtype: torch.dtype, nbits: int) -> None:
    lengths = [(37 * index) % 301 for index in range(n_documents)]
    documents = residual_codes(lengths, shape[-1], nbits, n_centroids=1000).to("cuda")
    queries = unit(*shape, dtype=dtype)
    candidates = torch.randint(-1, n_documents, (shape[0], 70), device="cuda")
    mask = torch.rand(shape[:2], device="cuda")
    for options in ({}, {"queries_mask": mask}, {"candidates": candidates, "empty_score": -1.0}):
        result = maxsim_residual(queries, documents, **options)
        check_8_bits(result, queries, documents, options)
        for _ in range(20):
            assert torch.equal(maxsim_residual(queries, documents, **options), result)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = maxsim_residual(queries, documents, **options)
        again.zero_()
        graph.replay()
        assert torch.equal(again, result)


def test_nan_and_a_long_document() -> None:
    documents = residual_codes([20000, 3], 128, 4).to("cuda")
    queries = unit(2, 32, 128, dtype=torch.bfloat16)
    check(queries, documents, {})
    queries[1, 3, 5] = torch.nan
    assert by_kernels(queries, documents).isnan().tolist() == [[False, False], [True, True]]


def of_embeddings(queries: Tensor, documents: ResidualCodes, longest: int) -> Tensor:
    """Scores of the decompressed documents."""
    length = queries.shape[1]
    bounds = torch.arange(len(queries) + 1, device="cuda", dtype=torch.int32) * length
    return maxsim_varlen(
        queries.flatten(0, 1), documents.decompress(queries.dtype), bounds, documents.cu_seqlens.int(),
        max_query_length=length, max_document_length=longest,
    )  # fmt: skip


@pytest.mark.parametrize("nbits", [2, 4])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec_dtype", [torch.bfloat16, torch.float16])
def test_decompressed_where_they_are_copied(
    nbits: int, size: int, dtype: torch.dtype, codec_dtype: torch.dtype
) -> None:
    """With a few queries, scores equal those of embeddings, wherever the codes are in memory.

    They are bitwise equal if embeddings are rounded to the dtype of the queries. If they need not be, and centroids are
    float16, embeddings (twice) and scales are rounded to float16.
    """
    tails = [0, 0, 1, 31, 32, 33, 63, 64, 65, 96, 97, 127, 128, 129, 300, 0]
    eights = [0] * 70 + [8, 7, 9, 64, 63, 65, 56, 72, 128, 1, 0, 0] * 40 + [0] * 70
    empty = ([5, 0, 0] * 20 + [0, 5, 0] * 20 + [0, 0, 5] * 20) * 4
    for lengths in (tails, [0, 0, 5], eights, empty, [(37 * index) % 301 for index in range(3000)]):
        documents = residual_codes(lengths, size, nbits, codec_dtype, n_centroids=500).to("cuda")
        for n_queries, length in ((64, 32), (5, 32), (9, 31), (16, 32)):
            queries = unit(n_queries, length, size, dtype=dtype)
            expected = of_embeddings(queries, documents, 300)
            for _ in range(5):
                assert torch.equal(by_kernels(queries, documents), expected)
            actual = maxsim_residual(queries, documents)
            if codec_dtype == torch.float16:
                # A similarity is at most 1.
                exact = of_embeddings(queries.float(), documents, 300)
                torch.testing.assert_close(actual, exact, rtol=0, atol=length * 2**-10)
            else:
                assert torch.equal(actual, expected)
            for _ in range(5):
                assert torch.equal(maxsim_residual(queries, documents), actual)
    names = "residuals", "centroids", "bucket_weights"
    shifted = replace(documents, **{name: shifted_in_memory(getattr(documents, name)) for name in names})
    assert torch.equal(by_kernels(queries, shifted), expected)
    assert torch.equal(maxsim_residual(queries, shifted), actual)
    mask = torch.rand(queries.shape[:2], device="cuda")
    options = {"queries_mask": mask, "reduction": "mean", "empty_score": -1.0}
    check(queries, documents, options)
    actual = maxsim_residual(queries, documents, **options)
    exact = maxsim_residual_reference(queries.double(), documents, **options)
    torch.testing.assert_close(actual.double(), exact, rtol=0, atol=2**-8 if codec_dtype == torch.bfloat16 else 2**-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries_of_any_size_meet_float16_centroids(dtype: torch.dtype) -> None:
    """Rows of the smallest and the largest numbers, of zeros, infinities and NaN."""
    documents = residual_codes([(37 * index) % 301 for index in range(500)], 128, 4).to("cuda")
    # Tokens of norm 0, whose scales do not fit into 16 bits.
    documents.residuals[:200] = 0
    documents.bucket_weights[0] = 0
    documents.centroids[documents.codes[:200].unique()] = 0
    documents = replace(documents, scales=None)
    queries = unit(8, 32, 128, dtype=dtype)
    small, large = (2.0**-14, 2.0**14) if dtype == torch.float16 else (2.0**-110, 2.0**110)
    queries[1:3] *= torch.tensor([small, large], device="cuda", dtype=dtype)[:, None, None]
    queries[3] = 0
    queries[4, 5, 6] = torch.inf
    queries[5, 7, 8] = torch.nan
    queries[6, 9, :64], queries[6, 9, 64:] = large, small
    actual, exact = maxsim_residual(queries, documents).double(), of_embeddings(queries.double(), documents, 300)
    for own, expected in zip(actual, exact, strict=True):
        largest = expected[expected.isfinite()].abs().max() if expected.isfinite().any() else 0.0
        # Two roundings of each of 32 similarities; infinities only keep their sign.
        torch.testing.assert_close(own, expected, rtol=0, atol=32 * 2**-10 * float(largest), equal_nan=True)


def shifted_in_memory(tensor: Tensor) -> Tensor:
    """The tensor, contiguous, with one element before it."""
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


@pytest.mark.parametrize("nbits", [2, 4])
@pytest.mark.parametrize(("size", "dtype"), [(128, torch.bfloat16), (128, torch.float16), (72, torch.bfloat16)])
def test_blocks_of_documents_decompressed_to_memory(
    nbits: int, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores are bitwise equal to those of embeddings, and so are those of blocks."""
    documents = residual_codes([(37 * index) % 301 for index in range(300)], size, nbits).to("cuda")
    queries = unit(65, 32, size, dtype=dtype)
    expected = of_embeddings(queries, documents, 300)
    assert torch.equal(by_kernels(queries, documents), expected)
    monkeypatch.setattr(tables, "RESIDUAL_SCRATCH", 1 << 20)
    # Calls repeated from a recording would use the boundaries of the first call.
    for _ in range(4):
        assert torch.equal(by_kernels(queries, documents), expected)
    assert torch.equal(
        maxsim_residual_by_bounds(queries, documents, documents.cu_seqlens.cpu().numpy() + 3, None, 0.0), expected
    )


def test_memory_is_that_of_scores_and_of_a_block() -> None:
    documents, queries = residual_codes([180] * 8000, 128, 4).to("cuda"), unit(65, 32, 128, dtype=torch.bfloat16)
    assert documents.codes.numel() * 256 > tables.RESIDUAL_SCRATCH
    most = tables.RESIDUAL_SCRATCH + 3 * 4 * 65 * 8000
    assert memory_of(lambda: maxsim_residual(queries, documents))[0] < most


def test_trained_and_compressed_here() -> None:
    pytest.importorskip("fastkmeans")
    embeddings, bounds = unit(4000, 64), torch.arange(0, 4001, 100, device="cuda")
    codec = train_residual_codec(embeddings, nbits=4)
    documents = codec.compress(embeddings, bounds)
    assert documents.device.type == "cuda"
    assert (documents.decompress() * embeddings).sum(dim=1).mean() > 0.95
    check(unit(4, 32, 64, dtype=torch.bfloat16, seed=1), documents, {})
