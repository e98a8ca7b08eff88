"""An index searched jointly by several processes over gloo, compared with one process."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from pylate_flash.index import store
from pylate_flash.index.layout import Layout
from pylate_flash.index.parts import Part
from pylate_flash.index.ranks import _EAGER_BYTES, Hits, Ranks, _padded
from pylate_flash.index.scorers import Queries
from tests.ranks import join_group, run_ranks
from tests.stores import integers_of, small

IDS = [f"d{i}" for i in range(60)]


def queries() -> list[torch.Tensor]:
    return integers_of([4, 1, 0, 7], seed=1)


def calls() -> list[dict]:
    ids = [IDS[:30], [], ["d5", "unknown", "d59", "d5"], IDS[50:]]
    return [{}, {"k": 3}, {"k": 100}, {"subset": IDS[10:25]}, {"subset": ids, "k": 4}, {"subset": ids, "matches": True}]


def search(rank: int, world: int, folder: Path, name: str) -> None:
    join_group(rank, world, folder, name)
    expected = [small(folder).search(queries(), **call) for call in calls()]
    for memory in (0, 1 << 20):
        index = small(folder, memory, group=dist.group.WORLD)
        # The arguments of the other ranks are ignored.
        actual = [index.search(queries() if rank == 0 else [], **(call if rank == 0 else {})) for call in calls()]
        assert actual == expected
        share = index._search.rows.documents
        assert 0 < share < len(IDS)
    # An error on rank 0 is raised on all ranks.
    with pytest.raises(ValueError, match="k must be"):
        index.search(queries(), k=0 if rank == 0 else 5)
    assert index.search(queries()) == expected[0]
    # So is an error on another rank, and it names that rank.
    index = small(folder, group=dist.group.WORLD)
    if rank == world - 1:
        index._search.rows.follow = lambda *_: (_ for _ in ()).throw(OSError("no such disk"))  # type: ignore[method-assign]
    message = "no such disk" if rank == world - 1 else f"rank {world - 1} could not search.*no such disk"
    with pytest.raises(OSError if rank == world - 1 else RuntimeError, match=message):
        index.search(queries())
    dist.destroy_process_group()


@pytest.fixture(params=["float32", "residual4"])
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    if request.param == "residual4":
        pytest.importorskip("fastkmeans")
    monkeypatch.setattr(store, "SEGMENT_BYTES", 30 * (8 * 4 if request.param == "float32" else 12))
    monkeypatch.setattr(store, "PENDING_BYTES", 0, raising=False)
    index = small(tmp_path, dtype=request.param)
    for start in range(0, 60, 6):
        index.add_documents(IDS[start : start + 6], integers_of([i % 8 for i in range(start, start + 6)], seed=start))
    index.remove_documents(["d3", "d40"])
    assert index.info().segments >= 4
    return tmp_path


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_have_the_lists_of_one_process(folder: Path, world: int) -> None:
    run_ranks(search, (world, folder, "rendezvous"), world)


def search_before_it_is_opened_again(rank: int, world: int, folder: Path) -> None:
    join_group(rank, world, folder)
    index = small(folder, group=dist.group.WORLD)
    dist.barrier()
    if rank == 0:
        index.compact()
    # Else documents would be missing from the results, or in them twice.
    with pytest.raises(RuntimeError, match=r"has generation \d+ in this process and \d+ in the first of its group"):
        index.search(queries())
    assert small(folder, group=dist.group.WORLD).search(queries()) == small(folder).search(queries())
    dist.destroy_process_group()


def test_a_rank_that_has_not_opened_a_changed_index_again_is_an_error(folder: Path) -> None:
    run_ranks(search_before_it_is_opened_again, (2, folder), 2)


def exchange(rank: int, world: int, folder: Path) -> None:
    join_group(rank, world, folder)
    ranks = Ranks(dist.group.WORLD)
    eager_size = _EAGER_BYTES - len(pickle.dumps(bytes(_EAGER_BYTES), pickle.HIGHEST_PROTOCOL)) + _EAGER_BYTES
    for size in (0, *range(eager_size - 20, eager_size + 3), 3 * _EAGER_BYTES):
        # One rank has a larger value than the others.
        values = [bytes([of_rank]) * (size if of_rank == size % world else 10) for of_rank in range(world)]
        assert ranks.gather(values[rank]) == values
        value = [bytes([rank]) * size]
        agreed = ranks.agreed(lambda value=value: value)  # type: ignore[misc]
        assert agreed == [bytes(size)]
        assert (agreed is value) == (rank == 0)
    dist.destroy_process_group()


def test_values_of_all_sizes_reach_all_ranks(tmp_path: Path) -> None:
    """Sizes that need one collective, two, and around the limit; rank 0 gets back its own object from `agreed`."""
    run_ranks(exchange, (3, tmp_path), 3)


def test_queries_without_tokens_reach_other_ranks() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        queries = Queries([torch.zeros(0, 8), torch.zeros(0, 8)], torch.device("cpu"), dtype)
        copy = pickle.loads(pickle.dumps(queries))
        assert [sequence.shape for sequence in copy.sequences] == [(0, 8), (0, 8)]
        assert copy.packed().values.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_are_pickled_once(dtype: torch.dtype) -> None:
    """They are views of one tensor, of which each view would pickle the full storage."""
    drawn = torch.randn(100, 4, 8)
    queries = Queries([drawn[0, :0], *drawn], torch.device("cpu"), dtype)
    pickled = pickle.dumps(queries)
    assert len(pickled) < 2 * drawn.nbytes
    sent = pickle.loads(pickled)
    assert (sent.device, sent.dtype) == (queries.device, queries.dtype)
    assert all(torch.equal(a, b.to(dtype)) for a, b in zip(sent.sequences, queries.sequences, strict=True))


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [[5], [4, 4, 4, 4], [1, 100, 1, 1, 1, 50], [0, 0], [], [3] * 20])
def test_every_segment_has_one_rank(rows: list[int], world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout("float32", 1)
    parts = [
        Part.of(layout, np.array([i]), ["a"], np.array([n]), sums=np.zeros(1, "<u4"), memory=torch.zeros(n, 1))
        for i, n in enumerate(rows)
    ]
    monkeypatch.setattr(dist, "get_world_size", lambda group: world)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo")
    shares = []
    for rank in range(world):
        monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
        shares.append(Ranks(None).share(parts))
    assert [part for first, last in shares for part in parts[first:last]] == parts
    if rows == [3] * 20:
        assert {last - first for first, last in shares} <= {20 // world, -(-20 // world)}


class Together(Ranks):
    """Simulate ranks in one process: `gather` returns the next value of each rank."""

    def __init__(self, of_ranks: list[list[Hits]]) -> None:
        self.rank, self.size = 0, len(of_ranks)
        self.others = [iter(result) for result in of_ranks[1:]]

    def gather(self, value: Any) -> list[Any]:
        return [value, *(next(result, None) for result in self.others)]


@given(st.data())
def test_what_ranks_have_found_is_merged_whatever_each_has_at_a_time(data: st.DataObject) -> None:
    """With ties, which the lower slot wins, and with fewer documents than k."""
    n_queries, k, world = (data.draw(st.integers(1, most)) for most in (7, 5, 3))
    of_ranks, expected = [], [[] for _ in range(n_queries)]
    for rank in range(world):
        counts = data.draw(st.lists(st.integers(0, k), min_size=n_queries, max_size=n_queries))
        results = []
        for query, count in enumerate(counts):
            scores = sorted(data.draw(st.lists(st.integers(-2, 2), min_size=count, max_size=count)), reverse=True)
            slots = [100 * rank + i for i in range(count)]
            expected[query] += zip(scores, slots, strict=True)
            width = data.draw(st.integers(count, k))
            rows = (np.pad(np.array([row]), ((0, 0), (0, width - count))) for row in (scores, slots))
            scores, slots = rows
            results.append(Hits(scores.astype(np.float32), slots.astype(np.int64), np.array([count])))
        edges = sorted({0, n_queries, *data.draw(st.lists(st.integers(0, n_queries), max_size=4))})
        of_ranks.append([_padded(results[start:stop]) for start, stop in pairwise(edges)])
    merged = [*Together(of_ranks).merged(of_ranks[0], n_queries, k)]
    assert sum(len(hits.scores) for hits in merged) == n_queries
    lists = [
        [*zip(scores[:count].tolist(), slots[:count].tolist(), strict=True)]
        for hits in merged
        for scores, slots, count in zip(*hits, strict=True)
    ]
    assert lists == [sorted(pairs, key=lambda hit: (-hit[0], hit[1]))[:k] for pairs in expected]
