"""An index that several processes search together, over gloo, against one process."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pylate_flash.index import store
from pylate_flash.index.layout import Layout
from pylate_flash.index.parts import Part
from pylate_flash.index.ranks import Ranks
from pylate_flash.index.scorers import Queries
from tests.ranks import join_group, run_ranks
from tests.stores import integers_of, small

IDS = [f"d{i}" for i in range(60)]


def queries() -> list[torch.Tensor]:
    return integers_of([4, 1, 0, 7], seed=1)


def calls() -> list[dict]:
    own = [IDS[:30], [], ["d5", "unknown", "d59", "d5"], IDS[50:]]
    return [{}, {"k": 3}, {"k": 100}, {"subset": IDS[10:25]}, {"subset": own, "k": 4}, {"subset": own, "matches": True}]


def search(rank: int, world: int, folder: Path, name: str) -> None:
    join_group(rank, world, folder, name)
    wanted = [small(folder).search(queries(), **call) for call in calls()]
    for memory in (0, 1 << 20):
        index = small(folder, memory, group=dist.group.WORLD)
        # What the others ask for does not count.
        own = [index.search(queries() if rank == 0 else [], **(call if rank == 0 else {})) for call in calls()]
        assert own == wanted
        share = index._search.rows.documents
        assert 0 < share < len(IDS)
    # An error of the first is one of all.
    with pytest.raises(ValueError, match="k must be"):
        index.search(queries(), k=0 if rank == 0 else 5)
    assert index.search(queries()) == wanted[0]
    # So is one of another, which says who it was.
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_are_pickled_once(dtype: torch.dtype) -> None:
    """Though they are views of one tensor, which each would bring along."""
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
