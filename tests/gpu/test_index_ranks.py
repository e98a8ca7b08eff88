"""An index that two GPUs search together, each in a process of its own, over NCCL."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pylate_flash.index import store
from pylate_flash.indexes import Flat
from tests.ranks import join_gpus

WORLD, DOCUMENTS = 2, 3000
CALLS: list[dict] = [{}, {"k": 3}, {"subset": [f"d{i}" for i in range(0, DOCUMENTS, 7)]}, {"k": 4, "matches": True}]


def texts(count: int, shortest: int, longest: int, seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=random).tolist()
    return [torch.nn.functional.normalize(torch.randn(length, 64, generator=random), dim=-1) for length in lengths]


def opened(folder: Path, rank: int, **options) -> Flat:
    return Flat(folder, "index", dtype="bfloat16", device=f"cuda:{rank}", show_progress=False, **options)


def work(rank: int, folder: Path) -> None:
    join_gpus(rank, WORLD, folder, 60)
    queries = texts(20, 4, 32, 1)
    report: dict = {"wanted": [opened(folder, rank).search(queries, **call) for call in CALLS]}
    for memory in ("auto", 0):
        index = opened(folder, rank, device_memory=memory, group=dist.group.WORLD)
        report[str(memory)] = [index.search(queries, **call) for call in CALLS]
        report["documents"] = index._search.rows.documents
    dist.barrier()
    if rank == WORLD - 1:
        (folder / f"rank-{rank}.json").write_text(json.dumps(report))
        os._exit(0)
    start = time.monotonic()
    try:
        index.search(queries)
    except RuntimeError as error:
        report |= {"error": str(error), "seconds": time.monotonic() - start}
    (folder / f"rank-{rank}.json").write_text(json.dumps(report))
    # The group has lost a process, and cannot be destroyed cleanly.
    os._exit(0)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    if torch.cuda.device_count() < WORLD:
        pytest.skip("needs two GPUs")
    folder = tmp_path_factory.mktemp("index")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "SEGMENT_BYTES", 1 << 20)
        documents = texts(DOCUMENTS, 10, 40, 0)
        index = opened(folder, 0)
        for start in range(0, DOCUMENTS, 500):
            index.add_documents([f"d{i}" for i in range(start, start + 500)], documents[start : start + 500])
    index.remove_documents(["d3", "d1700"])
    mp.spawn(work, args=(folder,), nprocs=WORLD)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("memory", ["auto", "0"])
def test_two_gpus_have_the_lists_of_one(ranks: list[dict], memory: str) -> None:
    for report in ranks:
        assert report[memory] == report["wanted"]
        assert 0 < report["documents"] < DOCUMENTS


def test_a_rank_that_ends_is_an_error_of_the_others(ranks: list[dict]) -> None:
    assert ranks[0]["error"].startswith("another process of the group has ended (seen by rank 0)")
    assert ranks[0]["seconds"] < 60
