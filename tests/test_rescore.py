"""Searches in few bits whose top candidates are rescored with 16-bit embeddings stored alongside."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from pylate_flash.index import search, store
from pylate_flash.index.ranks import Hits
from pylate_flash.indexes import Flat
from tests.ranks import join_group, run_ranks
from tests.stores import blocks_of_bytes, integers_of, small

EACH = pytest.mark.parametrize(
    "dtype", ["int8+float16", "fp8+bfloat16", *(["residual2+bfloat16"] if find_spec("fastkmeans") else [])]
)
IDS = [f"d{i}" for i in range(90)]
# Their 16-bit scores are exact in any summation order.
DOCUMENTS = integers_of([(7 * i) % 13 for i in range(90)], 32)
QUERIES = integers_of([4, 9, 9, 1], 32, seed=1)


def filled(folder: Path | None, dtype: str) -> Flat:
    index = small(folder, dtype=dtype)
    for start in range(0, 90, 30):
        batch = slice(start, start + 30)
        index.add_documents(IDS[batch], DOCUMENTS[batch], metadata=[{"place": i} for i in range(start, start + 30)])
    return index


@EACH
def test_the_best_by_few_bits_are_ordered_by_sixteen(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_QUERIES_WITH_SUBSETS", 3)
    exact = filled(None, dtype.partition("+")[2])
    memory, writer = filled(None, dtype), filled(tmp_path, dtype)
    plain = filled(None, dtype.partition("+")[0])
    # The first pass reads no extra bytes.
    assert writer._store.layout.nbytes == plain._store.layout.nbytes
    per_query = [IDS[:30], [], ["d5", "unknown", "d89", "d5"], IDS[40:]]
    calls: list[dict] = [{}, {"subset": IDS[20:70]}, {"subset": per_query}, {"where": "place % 3 = 0"}]
    for state in ("whole", "removed", "replaced", "compact", "erased"):
        for index in (exact, memory, writer):
            if state == "removed":
                index.remove_documents(IDS[3:9])
            if state == "replaced":
                index.add_documents(IDS[50:52], DOCUMENTS[5:7], replace=True, metadata=[{"place": 3}] * 2)
            if state == "compact":
                index.compact()
            if state == "erased":
                index.remove_documents(IDS[12:14], erase=True)
        with blocks_of_bytes(2000):
            for index in (memory, writer, small(tmp_path, 1 << 30)):
                for call in calls:
                    # Rescoring all documents gives the lists of a 16-bit index.
                    assert index(QUERIES, k=9, rescore=200, **call) == exact(QUERIES, k=9, **call)
                    best = index(QUERIES, k=12, **call)
                    candidates = [[hit["id"] for hit in hits] for hits in best]
                    assert index(QUERIES, k=5, rescore=12, **call) == exact(QUERIES, k=5, subset=candidates)
                result = index(QUERIES[:3], k=4, rescore=90, matches=True)
                assert result == exact(QUERIES[:3], k=4, matches=True)
        small(tmp_path).verify()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_what_fills_the_places_of_fewer_hits_is_none(dtype: type) -> None:
    """For every integer dtype: NumPy 2 casts a Python scalar to the dtype of the array it is combined with."""
    index = filled(None, "int8+float16")
    index(QUERIES[:2], k=2, rescore=2)
    rescorer, queries = index._again, index._asked(QUERIES[:3], 3, None, False, None, 3)["queries"]
    slots, counts = np.array([[7, 5, 0], [0, 0, 0], [2, 9, 4]], dtype), np.array([2, 0, 3])
    hits = Hits(np.zeros(slots.shape, np.float32), slots, counts)
    results = [
        ranking
        for rescored in rescorer.again(queries, 3, rescorer.scorer(index.scorer), [hits])
        for ranking in rescorer.results(rescored)
    ]
    subset = [["d5", "d7"], [], ["d2", "d4", "d9"]]
    assert results == filled(None, "float16")(QUERIES[:3], k=3, subset=subset)


def test_damaged_rows_of_sixteen_bits_are_an_error_where_they_are_read(tmp_path: Path) -> None:
    index = filled(tmp_path, "int8+float16")
    index.compact()
    (path,) = (tmp_path / "index").glob("segment-*")
    content = bytearray(path.read_bytes())
    assert len(content) == sum(map(len, DOCUMENTS)) * (48 + 64)
    content[-1] ^= 64
    path.write_bytes(content)
    opened = small(tmp_path)
    with pytest.raises(ValueError, match=f"{path} is damaged"):
        opened(QUERIES, k=90, rescore=90)
    with pytest.raises(ValueError, match=f"{path} is damaged"):
        small(tmp_path).verify()


def test_what_cannot_be_rescored_is_refused() -> None:
    index = filled(None, "int8+float16")
    for rescore in (3, 0, True, "all", 7.0):
        with pytest.raises(ValueError, match="rescore must be an integer of at least k = 4"):
            index(QUERIES, k=4, rescore=rescore)
    with pytest.raises(ValueError, match="rescore: the index in memory stores only 'int8'"):
        filled(None, "int8")(QUERIES, k=4, rescore=9)


def search_together(rank: int, world: int, folder: Path, name: str) -> None:
    join_group(rank, world, folder, name)
    single, joint = small(folder), small(folder, group=dist.group.WORLD)
    for call in (
        {"k": 5, "rescore": 20},
        {"k": 3, "rescore": 9, "subset": IDS[10:60]},
        {"k": 2, "rescore": 4, "matches": True},
    ):
        assert joint(QUERIES, **call) == single(QUERIES, **call)
    dist.destroy_process_group()


def test_ranks_rescore_as_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SEGMENT_BYTES", 100 * (48 + 64))
    assert filled(tmp_path, "int8+float16").info().segments > 2
    run_ranks(search_together, (2, tmp_path, "rendezvous"), 2)
