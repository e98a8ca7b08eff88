"""The comparison of ranks with one process, over gloo: this process is the first of two."""

from __future__ import annotations

import json
import os

import pytest
import torch
import torch.multiprocessing as mp

pytest.importorskip("pylate")

import ranks
from ranks import Sizes

SIZES = Sizes(batch_size=12, query_length=4, document_length=16, shortest=4, embedding_size=16)


def run(rank, folder):
    """A process as torchrun would start it."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="localhost")
    os.environ["MASTER_PORT"] = (folder / "port").read_text()
    ranks.Sizes = lambda batch_size: SIZES
    ranks.main(folder / "out" / "ranks.json", SIZES.batch_size, steps=2)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            patch.setenv(name, "")
        patch.setattr(ranks, "Sizes", Sizes)
        other = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        (folder / "port").write_text(str(other.port))
        del other
        second = mp.get_context("spawn").Process(target=run, args=(1, folder))
        second.start()
        try:
            run(0, folder)
        finally:
            second.join(60)
            second.kill()
    assert second.exitcode == 0
    return json.loads((folder / "out" / "ranks.json").read_text(encoding="utf-8"))


def test_two_ranks_are_one_process_with_the_whole_batch(result):
    assert result["errors"].keys() == {
        f"{gather}, {name} batch" for gather in ranks.GATHERINGS for name in ("full", "last")
    }
    for results in result["errors"].values():
        assert results.keys() == {"loss", "queries", "documents"}
        assert max(results.values()) <= 1e-5


def test_each_way_is_timed_and_one_process_too(result):
    assert [(row["ranks"], row["gather"]) for row in result["rows"]] == [(1, None), (2, "all_gather"), (2, "ring")]
    assert all(row["seconds"] > 0 and row["bytes"] is None for row in result["rows"])
    assert "| 2 | ring |" in ranks.table(result)


def test_a_wrong_gradient_is_seen():
    """Of any rank: each gradient is compared with its part of the whole batch."""
    shares = [ranks.share_of(rank, 3, SIZES, torch.device("cpu")) for rank in range(2)]
    together = ranks.whole(shares)
    ranks.step(together)
    queries, documents = (leaf.grad.double() for leaf in together.leaves)
    right = [
        [queries[3 * rank : 3 * rank + 3], documents[3 * rank : 3 * rank + 3, : share.documents.shape[1]].clone()]
        for rank, share in enumerate(shares)
    ]
    assert ranks.distances(right, shares, together) == {"queries": 0.0, "documents": 0.0}
    right[1][1][-1] = 0.0
    actual = ranks.distances(right, shares, together)
    assert actual["queries"] == 0.0
    assert actual["documents"] > 0.1


def test_lengths_and_numbers_differ():
    assert ranks.counts(SIZES, 3, False) == [4, 4, 4]
    assert ranks.counts(SIZES, 3, True) == [4, 4, 1]
    lengths = [ranks.share_of(rank, 6, SIZES, torch.device("cpu")).documents.shape[1] for rank in range(2)]
    assert lengths[0] > lengths[1]
