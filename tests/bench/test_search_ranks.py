"""The search of an index by several processes, over gloo, against one process."""

from __future__ import annotations

import json
import os

import pytest

import search_ranks
from tests.ranks import free_port, run_ranks


def run(rank, world, port, folder):
    """A process as torchrun would start it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    search_ranks.main(folder / "out" / "search.json", documents=30, queries=40, steps=1, folder=folder)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    run_ranks(run, (2, free_port(), folder), 2)
    assert [path.name for path in folder.iterdir()] == ["out"]
    return json.loads((folder / "out" / "search.json").read_text(encoding="utf-8"))


def test_two_ranks_have_the_lists_of_one(result):
    assert result["same"] is True
    assert result["documents"] == 30
    assert [row["ranks"] for row in result["rows"]] == [2, 1]
    for row in result["rows"]:
        assert row["searches"].keys() == {"1", "32", "40"}
        assert all(seconds > 0 for seconds in (row["first"], *row["searches"].values()))


def test_the_table_tells_what_was_found(result):
    text = search_ranks.table(result)
    assert "| ranks | first search, s | 1 queries, s | 32 queries, s | 40 queries, s |" in text
    assert "the lists are the same" in text
    assert "NOT the same" in search_ranks.table({**result, "same": False})
