"""The store on disk: round trips, interrupted writes, damaged files, writers that meet."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pylate_flash.index import journal, store
from pylate_flash.index.shards import Shard
from pylate_flash.index.store import PackedStore
from pylate_flash.index.tables import blocks
from pylate_flash.index.turns import turn
from tests.stores import (
    assert_content,
    change_manifest,
    content,
    documents_of,
    shards_in,
    shards_named,
    store_of_two_shards,
)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_reopened_store_holds_what_was_added(tmp_path: Path, dtype: str) -> None:
    documents = documents_of([3, 0, 5])
    PackedStore(tmp_path / "a", dtype=dtype).add(["x", "ü", "z"], documents)
    assert_content(tmp_path / "a", ["x", "ü", "z"], [document.to(getattr(torch, dtype)) for document in documents])
    assert PackedStore(tmp_path / "a").manifest.dtype == dtype


def test_additions_and_removals_keep_the_order_of_insertion(tmp_path: Path) -> None:
    first, second = documents_of([2, 3, 1], seed=1), documents_of([4, 2], seed=2)
    opened = PackedStore(tmp_path)
    opened.add(["a", "b", "c"], first)
    opened.add(["d", "e"], second)
    opened.remove(np.array([1, 3]))
    opened.add(["b"], [second[0]])
    assert opened.ids == ["a", "c", "e", "b"]
    assert_content(tmp_path, ["a", "c", "e", "b"], [first[0], first[2], second[1], second[0]])


@settings(max_examples=50)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.data())
def test_read_returns_any_documents_in_any_order_across_shards(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], data: st.DataObject
) -> None:
    documents = documents_of(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "SHARD_BYTES", 5 * 4 * 4)
        patch.setattr(journal, "JOURNAL_BYTES", data.draw(st.sampled_from([0, 500, 1 << 20])))
        opened = PackedStore(tmp_path_factory.mktemp("store"))
        # One by one, so that some are in shards and some in the journal.
        for i, document in enumerate(documents):
            opened.add([str(i)], [document])
    positions = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8))
    expected = torch.cat([torch.empty(0, 4)] + [documents[i] for i in positions])
    torch.testing.assert_close(opened.read(np.array(positions, dtype=np.int64)), expected, rtol=0, atol=0)


def test_shards_are_split_at_the_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "JOURNAL_BYTES", 0)
    monkeypatch.setattr(store, "SHARD_BYTES", 10 * 4 * 4)
    documents = documents_of([6, 4, 1, 30, 2])
    PackedStore(tmp_path).add(list("abcde"), documents, batch_size=2)
    entries = json.loads((tmp_path / "manifest.json").read_bytes())["shards"]
    assert [entry["tokens"] for entry in entries] == [10, 1, 30, 2]
    assert_content(tmp_path, list("abcde"), documents)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 20), max_size=30), st.integers(1, 25))
def test_blocks_cover_everything_within_the_limit(lengths: list[int], limit: int) -> None:
    stretches = blocks(np.array(lengths, dtype=np.int64), limit)
    assert [i for start, stop in stretches for i in range(start, stop)] == list(range(len(lengths)))
    for start, stop in stretches:
        assert stop - start == 1 or sum(max(1, length) for length in lengths[start:stop]) <= limit


def test_small_additions_leave_few_files_and_rewrite_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents, written = documents_of([1, 2, 0, 5] * 125), []
    monkeypatch.setattr(journal, "JOURNAL_BYTES", 2000)
    monkeypatch.setattr(store, "SHARD_BYTES", 1 << 20)
    pwrite = os.pwrite

    def counted(descriptor: int, data: bytes, offset: int) -> int:
        written.append(len(data))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", counted)
    opened = PackedStore(tmp_path)
    most = 0
    for i, document in enumerate(documents):
        opened.add([str(i)], [document])
        most = max(most, len(os.listdir(tmp_path)))
    # Journal, manifest, lock, reserve, and a shard per power of two from 8 tokens, a journal's, to 1000, all.
    assert most <= 4 + 7
    # Into the journal with its heads and ids, once per power of two into a shard, and with every shard a manifest.
    manifests = opened.manifest.generation * 2500 + (64 << 10)
    assert sum(written) < 500 * (256 + 400) + 7 * 2 * opened.nbytes + manifests
    assert_content(tmp_path, [str(i) for i in range(500)], documents)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_may_be_as_large_as_their_type_but_not_infinite(tmp_path: Path, dtype: str) -> None:
    largest = torch.full((3, 4), torch.finfo(getattr(torch, dtype)).max)
    opened = PackedStore(tmp_path, dtype=dtype)
    opened.add(["a"], [largest])
    infinite = torch.zeros(3, 4)
    infinite[1, 2], infinite[2, 0] = -torch.inf, torch.inf
    with pytest.raises(ValueError, match=rf"document 'c' hold NaN or infinite values \(as {dtype}\), first in token 1"):
        opened.add(["b", "c"], [largest, infinite])
    assert_content(tmp_path, ["a"], [largest.to(getattr(torch, dtype))])


def test_an_addition_that_is_not_small_becomes_a_shard_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "ADDITION_BYTES", 5 * 4 * 4)
    documents = documents_of([5, 1, 6, 2])
    opened = PackedStore(tmp_path)
    opened.add(["a"], documents[:1])
    opened.add(["b"], documents[1:2])
    assert (len(opened.manifest.shards), opened.manifest.journal is None) == (0, False)
    opened.add(["c"], documents[2:3])
    assert (len(opened.manifest.shards), opened.manifest.journal is None) == (1, True)
    opened.add(["d"], documents[3:])
    assert (len(opened.manifest.shards), opened.manifest.journal is None) == (1, False)
    assert_content(tmp_path, list("abcd"), documents)


def test_an_addition_to_the_journal_touches_no_other_file(tmp_path: Path) -> None:
    opened = PackedStore(tmp_path)
    opened.add(["a"], documents_of([2]))
    before = {file.name: file.stat() for file in tmp_path.iterdir()}
    opened.add(["b"], documents_of([3]))
    after = {file.name: file.stat() for file in tmp_path.iterdir()}
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name].st_mtime_ns != after[name].st_mtime_ns}
    assert changed == {file.name for file in tmp_path.glob("journal-*")}


def test_compact_leaves_as_few_files_as_the_size_of_a_shard_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "JOURNAL_BYTES", 0)
    monkeypatch.setattr(store, "SHARD_BYTES", 10 * 4 * 4)
    documents = documents_of([10, 7, 3, 6, 6, 6, 0, 1])
    opened = PackedStore(tmp_path)
    for i, document in enumerate(documents):
        opened.add([str(i)], [document])
    full = [entry.file for entry in opened.manifest.shards if entry.tokens == 10]
    assert len(full) == 1
    opened.compact()
    assert [entry.tokens for entry in opened.manifest.shards] == [10, 10, 6, 6, 7]
    # What is full already is not written again.
    assert [entry.file for entry in opened.manifest.shards][:1] == full
    assert_content(tmp_path, [str(i) for i in range(8)], documents)
    before = {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*[sn]")}
    opened.compact()
    assert {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*[sn]")} == before
    opened.remove(np.arange(8))
    opened.compact()
    assert content(tmp_path) == {}
    PackedStore(tmp_path / "never written").compact()
    assert not (tmp_path / "never written").exists()


def test_small_additions_are_read_from_what_was_written(tmp_path: Path) -> None:
    """Not from the caller's memory, and also where the journal was copied, or merged away by another writer, since."""
    documents = documents_of([3, 2, 4, 1])
    kept = [document.clone() for document in documents]
    opened = PackedStore(tmp_path)
    for i, document in enumerate(documents[:3]):
        opened.add([str(i)], [document])
        document.zero_()
    (journal,) = tmp_path.glob("journal-*")
    copy = tmp_path / "copy"
    copy.write_bytes(journal.read_bytes())
    copy.replace(journal)
    opened.add(["3"], [documents[3]])
    PackedStore(tmp_path).compact()
    assert not list(tmp_path.glob("journal-*"))
    assert torch.equal(opened.read(np.arange(4)), torch.cat(kept))


def test_tokens_that_are_not_read_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = PackedStore(tmp_path)
    opened.add(["a", "b", "c"], documents_of([1000, 1, 3000], size=2000))
    sizes, read_into = [], Shard.read_into

    def counted(shard: Shard, out: torch.Tensor, start: int) -> None:
        sizes.append(len(out))
        read_into(shard, out, start)

    monkeypatch.setattr(Shard, "read_into", counted)
    opened = PackedStore(tmp_path)
    opened.read(np.array([1]))
    assert sizes == [1]


def test_removed_embeddings_leave_the_disk(tmp_path: Path) -> None:
    documents = documents_of([3, 3])
    opened = PackedStore(tmp_path)
    opened.add(["gone", "kept"], documents)
    opened.remove(np.array([0]))
    files = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert documents[0].numpy().tobytes() not in files
    assert b"gone" not in files
    assert documents[1].numpy().tobytes() in files


def test_a_store_can_be_emptied_and_filled_again(tmp_path: Path) -> None:
    opened = PackedStore(tmp_path)
    opened.add(["a"], documents_of([2]))
    opened.remove(np.array([0]))
    assert content(tmp_path) == {}
    assert shards_in(tmp_path) == set()
    opened.add(["a"], documents_of([3]))
    assert_content(tmp_path, ["a"], documents_of([3]))


def test_override_empties_at_once_and_leaves_other_files(tmp_path: Path) -> None:
    PackedStore(tmp_path).add(["a"], documents_of([2]))
    (tmp_path / "notes.txt").write_text("mine")
    opened = PackedStore(tmp_path, dtype="float16", override=True)
    assert content(tmp_path) == {}
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert shards_in(tmp_path) == set()
    opened.add(["b"], documents_of([2], size=7))
    assert PackedStore(tmp_path).embedding_size == 7


def test_override_replaces_a_damaged_store(tmp_path: Path) -> None:
    PackedStore(tmp_path).add(["a"], documents_of([2]))
    (tmp_path / "manifest.json").write_text("{")
    PackedStore(tmp_path, override=True).add(["b"], documents_of([1]))
    assert_content(tmp_path, ["b"], documents_of([1]))


def test_opening_writes_nothing(tmp_path: Path) -> None:
    PackedStore(tmp_path / "new")
    PackedStore(tmp_path / "new", override=True)
    assert list(tmp_path.iterdir()) == []


# Failed and interrupted writes


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e6])
def test_a_refused_document_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    opened = PackedStore(tmp_path, dtype="float16")
    opened.add(["a"], documents_of([2]))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    # The bad document is in the last of several shards.
    monkeypatch.setattr(journal, "JOURNAL_BYTES", 0)
    monkeypatch.setattr(store, "SHARD_BYTES", 2 * 4 * 2)
    documents = documents_of([2, 2, 3])
    documents[2][1, 3] = value
    with pytest.raises(ValueError, match=r"document 'd' hold NaN or infinite values \(as float16\), first in token 1"):
        opened.add(["b", "c", "d"], documents)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert opened.ids == ["a"]
    opened.add(["b"], documents[:1])
    assert list(content(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize("manifest", [1, 2])
def test_an_interrupt_just_after_a_manifest_was_written_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manifest: int
) -> None:
    opened = PackedStore(tmp_path)
    replace, calls = os.replace, []

    def interrupted(source: Path, target: Path) -> None:
        replace(source, target)
        calls.append(target)
        if len(calls) == manifest:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        opened.add(["a"], documents_of([2]))
    if manifest == 1:
        # That of no documents, before the first shard.
        assert [file.name for file in tmp_path.iterdir()] == ["lock"]
        opened.add(["a"], documents_of([2]))
    else:
        with pytest.raises(RuntimeError, match="has been written to since it was opened"):
            opened.add(["b"], documents_of([1]))
    assert_content(tmp_path, ["a"], documents_of([2]))


def test_a_first_write_that_fails_leaves_no_index(tmp_path: Path) -> None:
    opened = PackedStore(tmp_path)
    with pytest.raises(ValueError, match="document 'a' hold NaN"):
        opened.add(["a"], [torch.full((1, 4), float("nan"))])
    assert [file.name for file in tmp_path.iterdir()] == ["lock"]
    assert not opened.exists
    opened.add(["a"], documents_of([2]))
    assert_content(tmp_path, ["a"], documents_of([2]))


# The first write, killed before its n-th file is flushed or put in its place.
FIRST = """
import os, signal, sys, torch
from pylate_flash.index import journal
from pylate_flash.index.store import PackedStore
left = int(sys.argv[2])
def watched(name):
    call = getattr(os, name)
    def watch(*arguments):
        global left
        left -= 1
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments)
    setattr(os, name, watch)
for name in ("fsync", "replace"):
    watched(name)
journal.JOURNAL_BYTES = 0
PackedStore(sys.argv[1]).add(["a"], [torch.ones(2, 4)])
print("finished")
"""


def test_a_first_write_that_is_killed_can_be_repeated(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(store.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    with_shards = 0
    # Before the folder, the first manifest, the folder again, the shard, and what makes it count.
    for step in (2, 3, 4, 6):
        place = tmp_path / str(step)
        arguments = [sys.executable, "-c", FIRST, str(place), str(step)]
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == -signal.SIGKILL, done.stderr
        with_shards += bool(shards_in(place))
        opened = PackedStore(place)
        assert opened.ids == []
        opened.add(["a"], documents_of([2]))
        assert_content(place, ["a"], documents_of([2]))
        assert shards_in(place) == shards_named(place)
    assert with_shards >= 2


# Files that no manifest names


def orphan(path: Path) -> Path:
    """What a writer that was killed may leave."""
    left = path / "shard-00007-0123abcd.safetensors"
    left.write_bytes(b"half of a shard")
    return left


def test_what_a_killed_writer_left_goes_with_the_first_small_addition(tmp_path: Path) -> None:
    PackedStore(tmp_path).add(["a"], documents_of([2]))
    left = orphan(tmp_path)
    opened = PackedStore(tmp_path)
    assert left.exists()
    opened.add(["b"], documents_of([1]))
    assert opened.manifest.shards == ()
    assert not left.exists()


def test_a_compact_that_merges_nothing_deletes_what_a_killed_writer_left(tmp_path: Path) -> None:
    opened = PackedStore(tmp_path)
    opened.add(["a"], documents_of([2]))
    opened.compact()
    for ids in (["a"], []):
        left = orphan(tmp_path)
        generation = opened.manifest.generation
        opened.compact()
        assert not left.exists()
        assert (opened.manifest.generation, opened.ids) == (generation, ids)
        opened.remove(np.arange(len(opened)))


def test_compacting_what_is_not_there_makes_nothing(tmp_path: Path) -> None:
    PackedStore(tmp_path / "none").compact()
    assert list(tmp_path.iterdir()) == []


def test_embedding_size_must_stay_the_same(tmp_path: Path) -> None:
    opened = PackedStore(tmp_path)
    with pytest.raises(ValueError, match="document 'b' have size 5, those of the first document 4"):
        opened.add(["a", "b"], documents_of([1]) + documents_of([1], size=5))
    opened.add(["a"], documents_of([1]))
    with pytest.raises(ValueError, match="document 'b' have size 5, those of the index in .* 4"):
        opened.add(["b"], documents_of([1], size=5))
    # Of nothing, any size is the same.
    opened.remove(np.array([0]))
    assert opened.embedding_size is PackedStore(tmp_path).embedding_size is None
    opened.add(["b"], documents_of([1], size=5))
    assert_content(tmp_path, ["b"], documents_of([1], size=5))


def test_an_index_that_an_older_version_emptied_takes_any_size(tmp_path: Path) -> None:
    opened = PackedStore(tmp_path)
    opened.add(["a"], documents_of([1]))
    opened.remove(np.array([0]))
    change_manifest(tmp_path, embedding_size=4)
    PackedStore(tmp_path).add(["b"], documents_of([1], size=5))
    assert_content(tmp_path, ["b"], documents_of([1], size=5))


def test_a_process_that_changes_its_folder_finds_its_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    opened = PackedStore("index")
    opened.add(["a"], documents_of([2]))
    monkeypatch.chdir("elsewhere")
    opened.add(["b"], documents_of([1]))
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert list(content(tmp_path / "index")) == ["a", "b"]


# Writers and readers that meet


@pytest.fixture
def two_shards(tmp_path: Path) -> Path:
    return store_of_two_shards(tmp_path)


def test_a_writer_with_an_old_picture_is_refused(tmp_path: Path) -> None:
    PackedStore(tmp_path).add(["a"], documents_of([2]))
    first, second = PackedStore(tmp_path), PackedStore(tmp_path)
    first.add(["c"], documents_of([1]))
    with pytest.raises(RuntimeError, match="has been written to since it was opened"):
        second.add(["b"], documents_of([3]))
    with pytest.raises(RuntimeError, match="has been written to since it was opened"):
        second.remove(np.array([0]))
    assert_content(tmp_path, ["a", "c"], documents_of([2]) + documents_of([1]))
    assert shards_in(tmp_path) == shards_named(tmp_path)


def test_a_second_writer_at_the_same_time_is_refused(two_shards: Path) -> None:
    opened = PackedStore(two_shards)
    with (
        turn(two_shards / "lock"),
        pytest.raises(RuntimeError, match="another process is writing to the index"),
    ):
        opened.add(["d"], documents_of([1]))
    assert list(content(two_shards)) == ["a", "b", "c"]
    opened.add(["d"], documents_of([1]))
    assert list(content(two_shards)) == ["a", "b", "c", "d"]


def test_a_reader_that_meets_a_writer_gets_a_whole_state(two_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, open_shard, calls = PackedStore(two_shards), Shard.open, []

    def remove_meanwhile(path: Path, *rest):
        calls.append(path)
        if len(calls) == 1:
            writer.remove(np.array([0]))
        return open_shard(path, *rest)

    monkeypatch.setattr(Shard, "open", remove_meanwhile)
    assert PackedStore(two_shards).ids == ["b", "c"]


def test_an_open_reader_outlives_a_removal(two_shards: Path) -> None:
    reader = PackedStore(two_shards)
    PackedStore(two_shards).remove(np.array([0, 1, 2]))
    expected = torch.cat(documents_of([2, 3]))
    torch.testing.assert_close(reader.read(np.array([0, 1])), expected, rtol=0, atol=0)


def test_nothing_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args, **kwargs):
        raise AssertionError("pickle")

    for module, name in ((torch, "load"), (torch, "save"), (pickle, "load"), (pickle, "dump"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, refuse)
    opened = PackedStore(tmp_path)
    opened.add(["a", "b"], documents_of([2, 3]))
    opened.remove(np.array([0]))
    assert list(content(tmp_path)) == ["b"]
    assert {file.suffix for file in tmp_path.iterdir()} <= {".json", ".safetensors", ""}
