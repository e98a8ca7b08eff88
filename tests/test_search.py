"""Index search: top-k selection, and resident or streamed rows."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pylate_flash.index import ids as ids_module
from pylate_flash.index import merging, resident, search
from pylate_flash.index.documents import Documents
from pylate_flash.index.layout import Layout
from pylate_flash.index.merging import joined_best, k_best, k_best_of_runs
from pylate_flash.index.parts import Part
from pylate_flash.index.scorers import Queries
from pylate_flash.indexes import Flat
from pylate_flash.ops.quantization import PRECISIONS, quantize
from pylate_flash.ops.quantized import query_precision
from tests.recorded import recorded
from tests.stores import blocks_of_bytes, documents_of, integers_of, small

VALUES = [0.0, -0.0, 1.0, -1.0, 2.0, 3.5, float("inf"), -float("inf"), float("nan"), -3e38]


def sorted_best(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, columns = torch.sort(scores, dim=1, descending=True, stable=True)
    return values[:, :k], columns[:, :k]


def assert_equal(result: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    torch.testing.assert_close(result[0], expected[0], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(result[1], expected[1])


@given(
    rows=st.integers(1, 3),
    columns=st.integers(1, 300),
    k=st.integers(1, 40),
    in_one_sort=st.integers(1, 64),
    values=st.integers(1, len(VALUES)),
    seed=st.integers(0, 1000),
)
def test_the_best_are_those_of_a_stable_sort(
    rows: int, columns: int, k: int, in_one_sort: int, values: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.tensor(VALUES[:values])[torch.randint(values, (rows, columns), generator=generator)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "_SORTED", in_one_sort)
        assert_equal(k_best(scores, k), sorted_best(scores, k))
        for cut in {0, columns // 3, columns - 1}:
            parts = k_best(scores[:, :cut], k), k_best(scores[:, cut:], k)
            parts[1][1].add_(cut)
            assert_equal(joined_best(*parts, k), sorted_best(scores, k))


def test_few_of_many_columns_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.randint(50, (2, 100_003), generator=torch.Generator().manual_seed(0)).float()
    expected = sorted_best(scores, 100)
    sorts = recorded(monkeypatch, torch, "sort")
    assert_equal(k_best(scores, 100), expected)
    assert max(args[0].shape[1] for args, _ in sorts) <= merging._SORTED + 100


@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), k=st.integers(1, 12))
def test_the_best_of_runs_are_those_of_each(counts: list[int], k: int) -> None:
    scores = torch.randint(3, (sum(counts),), generator=torch.Generator().manual_seed(k)).float()
    result, positions = k_best_of_runs(scores, np.array(counts), k)
    start = 0
    for i, run in enumerate(scores.split(counts)):
        expected = sorted_best(run[None], k)
        length = expected[0].shape[1]
        assert_equal((result[i : i + 1, :length], positions[i : i + 1, :length] - start), expected)
        start += len(run)


# Resident and streamed rows


def assert_alike(result: list, expected: list, error: float) -> None:
    assert [[hit["id"] for hit in hits] for hits in result] == [[hit["id"] for hit in hits] for hits in expected]
    for hits, best in zip(result, expected, strict=True):
        assert [hit["score"] for hit in hits] == pytest.approx([hit["score"] for hit in best], rel=error, abs=error)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint8", "fp8"])
def test_what_stays_on_the_device_and_what_streams_are_found_alike(tmp_path: Path, dtype: str) -> None:
    lengths = torch.randint(0, 9, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    # 8-bit rows have scales: their sums are not exact, and no two scores are equal.
    make, error = (integers_of, 0.0) if dtype in ("float32", "bfloat16") else (documents_of, 1e-5)
    queries = make([4, 1, 0, 7, 3], 24, seed=1)
    ids = [f"d{i}" for i in range(200)]
    writer = small(tmp_path, 0, dtype=dtype)
    for start in range(0, 200, 40):
        writer.add_documents(ids[start : start + 40], make(lengths[start : start + 40], 24, seed=start))
    writer.remove_documents(["d3", "d77", "d78", "d199"])
    per_query = [ids[i : 60 * i + 3 : 2] for i in range(5)]
    calls = ({}, {"subset": ids[:90]}, {"subset": per_query}, {"k": 500})
    expected = [writer(queries, **call) for call in calls]
    row = writer._store.layout.nbytes
    total = int(writer._search.rows.bounds[-1]) * row
    with blocks_of_bytes(20 * row), pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_SCORES", 200)
        patch.setattr(search, "_QUERY_TOKENS", 6)
        patch.setattr(search, "_MOST_QUERIES", 2)
        for memory in (0, 70 * row, 300 * row, total, 2 * total):
            index = small(tmp_path, memory)
            for call, lists in zip(calls, expected, strict=True):
                assert_alike(index(queries, **call), lists, error)
            rows = index._search.rows
            assert rows.streams == (memory < total)
            resident_bytes = rows._values.nbytes if rows._values is not None else 0
            assert resident_bytes + (3 * 20 * row if rows.streams and memory else 0) <= memory


def test_what_is_there_already_is_not_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, documents = [f"{i}" for i in range(60)], integers_of([5] * 60, 8)
    index, query = small(tmp_path, 1 << 20), integers_of([3], 8, seed=9)
    starts = recorded(monkeypatch, resident.Loader, "start")
    index.add_documents(ids[:40], documents[:40])
    before = index(query, k=60)
    assert index(query, k=60) == before
    index.add_documents(ids[40:], documents[40:])
    index.remove_documents(["5", "50"])
    result = index(query, k=60)
    assert [run for (_, runs, *_), _ in starts for run in runs] == [(0, 200), (200, 300)]
    assert result == small(tmp_path, 0)(query, k=60)
    # Rewritten rows are at new positions.
    index.compact()
    assert index(query, k=60) == result
    assert index(query, k=60, subset=ids[30:]) == small(tmp_path, 0)(query, k=60, subset=ids[30:])


def test_threads_that_search_first_load_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, documents, queries = [f"{i}" for i in range(50)], integers_of([4] * 50), integers_of([3, 2], seed=3)
    expected = small(tmp_path, 0).add_documents(ids, documents)(queries)
    index, loaded, start = small(tmp_path, 1 << 20), [], resident.Loader.start
    first = threading.Barrier(4)

    def slowly(self: resident.Loader, *arguments: Any) -> Any:
        loaded.append(arguments)
        time.sleep(0.05)
        return start(self, *arguments)

    def ask() -> list:
        first.wait()
        return index(queries)

    monkeypatch.setattr(resident.Loader, "start", slowly)
    with ThreadPoolExecutor(4) as threads:
        assert [future.result() for future in [threads.submit(ask) for _ in range(4)]] == [expected] * 4
    assert len(loaded) == 1


@pytest.mark.parametrize("memory", [-1, 1.5, True, "all", None])
def test_a_wrong_device_memory_is_one_error(tmp_path: Path, memory: object) -> None:
    with pytest.raises(ValueError, match=r'device_memory must be "auto" or bytes'):
        small(tmp_path, memory)  # type: ignore[arg-type]


# Which tokens match


@pytest.mark.parametrize("memory", [0, 1 << 20], ids=["streamed", "resident"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint8", "fp8"])
def test_hits_say_which_tokens_match(tmp_path: Path, dtype: str, memory: int) -> None:
    queries = documents_of([4, 1, 0, 6], 24, seed=1)
    ids = [f"d{i}" for i in range(30)]
    documents = documents_of([i % 7 for i in range(30)], 24, seed=2)
    index = small(tmp_path, memory, dtype=dtype).add_documents(ids, documents)
    stored = dict(zip(ids, index.get_documents_embeddings([ids])[0], strict=True))
    rounded = [query.to(torch.bfloat16).float() if dtype == "bfloat16" else query for query in queries]
    if dtype in PRECISIONS:
        precision = query_precision(PRECISIONS[dtype])
        rounded = [quantize(query, precision).dequantize() if len(query) else query for query in queries]
    with blocks_of_bytes(7 * index._store.layout.nbytes):
        for subset in (None, ids[3:20], [ids[:9], ids[:1], ids, []]):
            plain = index(queries, k=25, subset=subset)
            result = index.search(queries, k=25, subset=subset, matches=True)
            assert [[{name: hit[name] for name in ("id", "score")} for hit in hits] for hits in result] == plain
            for query, hits in zip(rounded, result, strict=True):
                for hit in hits:
                    document = stored[hit["id"]]
                    assert len(hit["matches"]) == (len(query) if len(document) else 0)
                    if not len(document):
                        continue
                    similarities = query @ document.T
                    for row, (token, similarity) in zip(similarities, hit["matches"], strict=True):
                        assert similarity == pytest.approx(row.max().item(), rel=1e-5, abs=1e-5)
                        assert row[token].item() == pytest.approx(similarity, rel=1e-5, abs=1e-5)
                    total = sum(similarity for _, similarity in hit["matches"])
                    assert hit["score"] == pytest.approx(total, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("scorer", ["pylate_flash", "torch"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "fp8"])
def test_the_matches_of_every_scorer_add_up_to_its_scores(dtype: str, scorer: str) -> None:
    if scorer == "torch":
        pytest.importorskip("pylate")
    generator = torch.Generator().manual_seed(0)
    documents, queries = ([torch.randn(5, 16, generator=generator) for _ in range(4)] for _ in range(2))
    index = Flat(None, dtype=dtype, scorer=scorer, device="cpu").add_documents(list("abcd"), documents)
    for hit in (hit for hits in index.search(queries, matches=True) for hit in hits):
        assert sum(similarity for _, similarity in hit["matches"]) == pytest.approx(hit["score"], rel=1e-4, abs=1e-4)


def test_of_equal_tokens_the_first_matches(tmp_path: Path) -> None:
    index = small(tmp_path, 0).add_documents(["a"], [torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])])
    ((hit,),) = index.search([torch.eye(2)], matches=True)
    assert hit == {"id": "a", "score": 2.0, "matches": [(1, 1.0), (0, 1.0)]}


def test_an_index_in_memory_is_searched_where_it_is(tmp_path: Path) -> None:
    documents, queries = integers_of([3, 0, 5, 2] * 10, seed=1), integers_of([4, 2], seed=2)
    ids = [f"{i}" for i in range(40)]
    index = Flat(None, device="cpu", show_progress=False).add_documents(ids, documents)
    expected = small(tmp_path, 0).add_documents(ids, documents)(queries, k=40)
    assert index(queries, k=40) == expected
    assert index._search.rows._values is index._store.documents.parts[0].memory
    index.remove_documents(["4", "7"]).add_documents(["4", "new"], documents[4:6])
    reference = small(tmp_path, 0).remove_documents(["4", "7"]).add_documents(["4", "new"], documents[4:6])
    assert index(queries, k=50) == reference(queries, k=50)
    assert index(queries, k=5, subset=ids[:9]) == reference(queries, k=5, subset=ids[:9])


# Lookup of ids


CPU = torch.device("cpu")
# Ids with any characters, with NUL bytes, longer than several machine words, or with an unpaired surrogate.
NAMES = st.text(st.characters(codec=None), max_size=9) | st.text("ab\0", max_size=40) | st.just("\ud800")


def weighted(patch: pytest.MonkeyPatch, zeros: int) -> None:
    """Zero the key weights for the first `zeros` calls, so that all ids get the same key."""
    weights, remaining = ids_module._weights, iter(range(zeros))
    patch.setattr(ids_module, "_weights", lambda count: weights(count) * (next(remaining, None) is None))


@given(
    names=st.lists(NAMES, unique=True, max_size=60), zeros=st.integers(0, 2), step=st.sampled_from([1, 40, 1 << 22]),
    data=st.data(),
)  # fmt: skip
def test_ids_are_found_whatever_their_keys(names: list[str], zeros: int, step: int, data: st.DataObject) -> None:
    layout = Layout("float32", 1)
    first = data.draw(st.integers(0, len(names)))

    def part(start: int, names: list[str]) -> Part:
        numbers, lengths = np.arange(start, start + len(names)), np.ones(len(names), np.int64)
        return Part.of(layout, numbers, names, lengths, sums=np.zeros(0, "<u8"), memory=torch.zeros(len(names), 1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ids_module, "_BYTES", step)
        weighted(patch, zeros)
        parts = [part(7, names[:first]), part(7 + first, names[first:])]
        for known in (names[:first], names):
            documents = Documents(part for part in parts[: 1 if known is not names else 2] if part.documents)
            requested = data.draw(st.lists(st.sampled_from([*names, "", "none", "a" * 20, "no other"]), max_size=30))
            expected = [known.index(id_) if id_ in known else -1 for id_ in requested]
            assert documents.find([requested], 0, CPU)[0].tolist() == expected
            present = np.array([position for position in expected if position >= 0], np.int64)
            assert documents.ids.some(present).to_list() == [known[position] for position in present.tolist()]
        lists = [requested[:3], [], requested[3:]]
        result, counts = documents.find(lists, 0, CPU)
        assert (result.tolist(), counts.tolist()) == (expected, [len(row) for row in lists])


@pytest.mark.parametrize("known", ["", "a", "a" * 9])
def test_another_id_with_the_key_of_one_is_none(known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weighted(monkeypatch, 1)
    requested = [known, "", "a", "b", "a" * 9, "a" * 8 + "b", "b" + "a" * 8, "a\0b"]
    table = ids_module.IdTable(ids_module.Ids.encoded([known]), np.array([0]), CPU)
    result = table.find(ids_module.Texts.of_lists([requested], CPU))
    assert result.tolist() == [0 if id_ == known else -1 for id_ in requested]


def test_two_documents_with_one_id_are_refused() -> None:
    index = small(None).add_documents(["a", "b"], [torch.eye(8), torch.eye(8)])
    part = index._store.documents.parts[0]
    part.ids = ids_module.Ids.encoded(["a", "a"])
    for call in (lambda: index([torch.eye(8)], subset=[["b"]]), lambda: index.remove_documents(["a"])):
        with pytest.raises(ValueError, match="the index in .*memory is damaged: two of its documents have the same id"):
            call()


def test_what_is_no_id_is_named() -> None:
    with pytest.raises(TypeError, match=r"subset\[8\]\[1\] must be a string, got 3 of type int"):
        Documents().find([["a"], ["b", 3]], 7, CPU)


@pytest.mark.parametrize(
    ("queries", "k", "sizes"),
    [
        (1, 100, [1]),
        (10, 100, [10]),
        (32, 100, [8, 16, 8]),
        (200, 100, [16, 112, 48, 16, 8]),
        (1000, 10, [16, 128, 520, 208, 80, 48]),
        (3000, 1, [16, 128, 1024, 1024, 808]),
        (3, 5000, [3]),
    ],
)
def test_the_first_and_the_last_queries_that_a_gpu_scores_together_are_few(
    queries: int, k: int, sizes: list[int]
) -> None:
    check_ranges(queries, k, 1 << 36, sizes)


@pytest.mark.parametrize(("queries", "tokens", "sizes"), [(32, 1 << 28, [32]), (32, 1 << 30, [8, 16, 8])])
def test_a_gpu_scores_all_queries_together_where_that_takes_no_time(
    queries: int, tokens: int, sizes: list[int]
) -> None:
    check_ranges(queries, 100, tokens, sizes)


@pytest.mark.parametrize(
    ("queries", "tokens", "sizes"),
    [(32, 1 << 24, [32]), (200, 1 << 24, [128, 72]), (1000, 1 << 24, [128, 528, 208, 136]), (1000, 1 << 25, [1000])],
)
def test_codes_are_decompressed_for_many_queries_or_for_all(
    queries: int, tokens: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_FEW_PRODUCTS", 0)
    check_ranges(queries, 100, tokens, sizes, "residual4")


def check_ranges(queries: int, k: int, tokens: int, sizes: list[int], dtype: str = "float32") -> None:
    """Check the numbers of queries ([2, 4] each) scored together, against documents of `tokens` tokens in total."""
    batch = Queries([torch.ones(2, 4)] * queries, torch.device("cuda"), torch.float32)
    rows = SimpleNamespace(streams=False, bounds=np.array([0, tokens]))
    index = SimpleNamespace(device=batch.device, rows=rows, layout=Layout(dtype, 4))
    ranges = search.Search._ranges(index, batch, k)
    assert [stop - start for start, stop in ranges] == sizes
    assert [stop for _, stop in ranges] == np.cumsum(sizes).tolist()


@pytest.mark.parametrize("other", [torch.float16, torch.float64, torch.float8_e4m3fn])
def test_queries_may_be_of_several_types(other: torch.dtype) -> None:
    index = small(None).add_documents(["a", "b"], integers_of([3, 2]))
    queries = integers_of([2, 4], seed=1)
    mixed = [queries[0], queries[1].to(other)]
    assert index(mixed) == [index([query])[0] for query in mixed]
