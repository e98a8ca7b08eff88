"""`indexes.Flat` on a GPU, resident and streamed, against the same index on the CPU."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from pylate_flash.index import merging, resident, search
from pylate_flash.indexes import Flat
from tests.test_index_exactness import Collection, assert_exact

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 7), (1, 5183), (32, 4096), (3, 100_000), (1, 1_000_000), (500, 9000)]
)
@pytest.mark.parametrize("k", [1, 10, 100, 256, 257])
def test_the_best_are_those_of_a_stable_sort(rows: int, columns: int, k: int) -> None:
    """A kernel serves small k; sorts serve large k, or many scores."""
    generator = torch.Generator("cuda").manual_seed(0)
    scores = torch.randint(-1000, 1000, (rows, columns), device="cuda", generator=generator) / 7
    scores[:, ::5], scores[:, 1::9], scores[0, 3], scores[0, 2] = -torch.inf, -0.0, torch.nan, torch.inf
    expected, order = torch.sort(scores, dim=1, descending=True, stable=True)
    best, result = merging.k_best(scores, k)
    torch.testing.assert_close(best, expected[:, :k], rtol=0.0, atol=0.0, equal_nan=True)
    assert torch.equal(result, order[:, :k])


# Resident rows on the GPU: none, some, or all that fit.
MEMORY = pytest.mark.parametrize("memory", [0, 500_000, "auto"], ids=["streamed", "partly", "resident"])


@MEMORY
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_search_equals_the_cpu(tmp_path: Path, dtype: str, memory: int | str) -> None:
    # Small integers: every type and every order of summation gives the same scores, and many are equal.
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 60, (200,), generator=generator).tolist()
    documents = [torch.randint(-1, 2, (length, 64), generator=generator).float() for length in lengths]
    queries = [torch.randint(-1, 2, (length, 64), generator=generator).float() for length in (32, 5, 17)]
    # Ids shorter and longer than the 8 bytes that are read at once.
    ids = [f"the document of number {i}" if i % 4 == 2 else f"{i}" for i in range(len(documents))]
    Flat(tmp_path, "index", dtype=dtype, device="cpu", show_progress=False).add_documents(ids[:150], documents[:150])
    with (
        mock.patch.object(resident, "STREAMED_BYTES_CUDA", 1000 * 64 * 2),
        mock.patch.object(search, "_GATHERED_BYTES_CUDA", 1000 * 64 * 2),
        mock.patch.object(search, "_SCORES", 3 * 70),
    ):
        gpu = Flat(tmp_path, "index", device="cuda", show_progress=False, device_memory=memory)
        gpu(queries)
        gpu.add_documents(ids[150:], [document.cuda() for document in documents[150:]]).remove_documents(["3", "160"])
        cpu = Flat(tmp_path, "index", device="cpu", show_progress=False)
        for subset in (None, ids[20:180], [ids[:50], [], ids[100:]]):
            for scorer in ("pylate_flash", "torch"):
                gpu.scorer = scorer
                assert gpu(queries, k=30, subset=subset) == cpu(queries, k=30, subset=subset)
        gpu.scorer = "pylate_flash"
        for subset in (None, [ids[:50], [], ids[100:]]):
            result = gpu.search(queries, k=30, subset=subset, matches=True)
            assert result == cpu.search(queries, k=30, subset=subset, matches=True)
        assert gpu._search.rows.streams == (memory != "auto")
    if memory == "auto":
        # No memory is requested for rows that are already resident.
        with mock.patch.object(resident, "free_memory", side_effect=AssertionError):
            assert gpu(queries, k=30) == cpu(queries, k=30)


@MEMORY
@pytest.mark.parametrize("dtype", ["int8", "uint8", "fp8"])
def test_a_search_of_8_bits_equals_the_cpu(tmp_path: Path, dtype: str, memory: int | str) -> None:
    if dtype == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 60, (200,), generator=generator).tolist()
    documents, queries = (
        [torch.nn.functional.normalize(torch.randn(n, 72, generator=generator), dim=1) for n in some]
        for some in (lengths, (32, 5, 17))
    )
    ids = [str(i) for i in range(200)]
    index = Flat(tmp_path, "index", dtype=dtype, device="cpu", show_progress=False)
    index.add_documents(ids[:150], documents[:150]).add_documents(ids[150:], documents[150:])
    with mock.patch.object(resident, "STREAMED_BYTES_CUDA", 1000 * 96):
        gpu = Flat(tmp_path, "index", device="cuda", show_progress=False, device_memory=memory)
        for subset in (None, ids[20:180], [ids[:50], [], ids[100:]]):
            for actual, expected in zip(gpu(queries, 200, subset), index(queries, 200, subset), strict=True):
                scores = {result["id"]: result["score"] for result in expected}
                assert {result["id"] for result in actual} == scores.keys()
                for result in actual:
                    # Sums of fp8 have about 13 bits.
                    tolerance = 1e-3 if dtype == "fp8" else 1e-5
                    assert result["score"] == pytest.approx(scores[result["id"]], rel=tolerance, abs=tolerance)
        hits, expected = gpu(queries[:1], 200, ids[20:180])[0], index(queries[:1], 200, ids[20:180])[0]
        assert {result["id"] for result in hits} == {result["id"] for result in expected}
        assert [result["score"] for result in hits] == pytest.approx(
            [result["score"] for result in expected], rel=tolerance, abs=tolerance
        )
        assert gpu._search.rows.streams == (memory != "auto")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_search_of_one_query_that_is_repeated_equals_the_cpu(tmp_path: Path, dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    documents, queries = (
        [torch.randint(-1, 2, (n, 64), generator=generator).float() for n in lengths]
        for lengths in ([30, 7, 0, 41, 12] * 40, [32, 5, 32, 5, 32, 32, 5, 5, 32, 5])
    )
    ids = [str(i) for i in range(200)]
    gpu, cpu = (Flat(None, dtype=dtype, device=device, show_progress=False) for device in ("cuda", "cpu"))
    for first, last in ((0, 150), (150, 200)):
        for index in (gpu, cpu):
            index.add_documents(ids[first:last], documents[first:last]).remove_documents([ids[first + 3]])
        for query in queries:
            for k in (10, 100):
                gpu_query = query.cuda() if k == 100 else query
                for actual, expected in zip(gpu([gpu_query], k)[0], cpu([query], k)[0], strict=True):
                    assert (
                        actual == expected if dtype != "int8" else actual["score"] == pytest.approx(expected["score"])
                    )
        assert any(callable(entry) for entry in gpu._search._graphs._known.values())
    broken = torch.full((32, 64), torch.nan)
    with pytest.raises(ValueError, match=r"queries_embeddings\[0\] holds NaN"):
        gpu([broken])


@pytest.mark.parametrize("dtype", ["residual4", "residual2"])
@pytest.mark.parametrize("size", [64, 40])
def test_a_search_of_codes_that_is_repeated_finds_the_same(dtype: str, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    documents, queries = (
        [torch.nn.functional.normalize(torch.randn(n, size, generator=generator), dim=1) for n in lengths]
        for lengths in ([30, 7, 0, 41, 12] * 40, [32, 5, 100, 300])
    )
    ids = [str(i) for i in range(200)]
    index = Flat(None, dtype=dtype, device="cuda", show_progress=False)
    for first, last in ((0, 150), (150, 200)):
        index.add_documents(ids[first:last], documents[first:last]).remove_documents([ids[first + 3]])
        for query in queries:
            for variant in (query, query.cuda()):
                results = [index([variant], 30) for _ in range(6)]
                assert all(again == results[0] for again in results)
        captured = {key[1][0] for key, entry in index._search._graphs._known.items() if callable(entry)}
        # Queries whose graph would keep copies are not captured: of codes that are not whole words, and long ones.
        assert captured == ({32, 5, 100} if size * index._search.layout.nbits % 32 == 0 else set())


@pytest.mark.parametrize("dtype", ["residual4", "residual2"])
@pytest.mark.parametrize("size", [64, 40])
def test_subsets_of_codes_score_what_they_score_among_all(tmp_path: Path, dtype: str, size: int) -> None:
    """Codes are read in place, or gathered if they are not whole words, with the rounding that few queries allow."""
    generator = torch.Generator().manual_seed(0)
    documents, queries = (
        [torch.nn.functional.normalize(torch.randn(n, size, generator=generator), dim=1) for n in lengths]
        for lengths in ([30, 7, 0, 41, 12] * 40, [32, 5, 17, 100])
    )
    ids = [str(i) for i in range(200)]
    Flat(tmp_path, "index", dtype=dtype, device="cpu", show_progress=False).add_documents(ids, documents)
    gpu = Flat(tmp_path, "index", device="cuda", show_progress=False).remove_documents(["4", "33"])
    cpu = Flat(tmp_path, "index", device="cpu", show_progress=False)
    for subset in ([ids[:50], [], ids[100:], ["9", "3", "9"]], [ids[:7]] * 4):
        for result, allowed, query in zip(gpu(queries, 200, subset), subset, queries, strict=True):
            scores = {hit["id"]: hit["score"] for hit in cpu([query], 200)[0]}
            assert {hit["id"] for hit in result} == set(allowed) & scores.keys()
            for hit in result:
                assert hit["score"] == pytest.approx(scores[hit["id"]], rel=2e-3, abs=2e-3)


@pytest.mark.parametrize("subset", [None, [["0", "1"], ["2"]]])
def test_a_query_on_the_gpu_that_is_not_finite_is_named(tmp_path: Path, subset: list | None) -> None:
    index = Flat(tmp_path, "index", device="cuda", show_progress=False)
    index.add_documents(["0", "1", "2"], [torch.eye(8)[: i + 1] for i in range(3)])
    queries = [torch.eye(8, device="cuda"), torch.eye(8, device="cuda")]
    assert len(index(queries, subset=subset)) == 2
    queries[1][3, 2] = torch.nan
    with pytest.raises(ValueError, match=r"queries_embeddings\[1\] holds NaN"):
        index(queries, subset=subset)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_all_roads_are_exact(cranfield: Path, tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pylate")
    assert_exact(Collection(cranfield), tmp_path, dtype, "cuda", monkeypatch)
