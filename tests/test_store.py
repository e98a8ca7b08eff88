"""The store on disk: round trips, interrupted writes, damaged files, writers that meet."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import filelock
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pylate_flash.index import store
from pylate_flash.index.store import PackedStore
from pylate_flash.index.tables import blocks


def documents_of(lengths: list[int], size: int = 4, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, size, generator=generator) for length in lengths]


def content(path: Path) -> dict[str, torch.Tensor]:
    """Everything that a freshly opened store holds."""
    opened = PackedStore(path)
    assert opened.position == {id_: i for i, id_ in enumerate(opened.ids)}
    documents = {id_: opened.read(np.array([i])) for i, id_ in enumerate(opened.ids)}
    assert [len(document) for document in documents.values()] == opened.lengths.tolist()
    return documents


def assert_content(path: Path, ids: list[str], documents: list[torch.Tensor]) -> None:
    found = content(path)
    assert list(found) == ids
    for document, expected in zip(found.values(), documents, strict=True):
        torch.testing.assert_close(document, expected, rtol=0, atol=0)


def shards_in(path: Path) -> set[str]:
    return {file.name for file in path.glob("shard-*")}


def shards_named(path: Path) -> set[str]:
    return {entry["file"] for entry in json.loads((path / "manifest.json").read_bytes())["shards"]}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_reopened_store_holds_what_was_added(tmp_path: Path, dtype: str) -> None:
    documents = documents_of([3, 0, 5])
    PackedStore(tmp_path / "a", dtype=dtype).add(["x", "ü", "z"], documents)
    assert_content(tmp_path / "a", ["x", "ü", "z"], [document.to(store.DTYPES[dtype]) for document in documents])
    assert PackedStore(tmp_path / "a").dtype_name == dtype


def test_additions_and_removals_keep_the_order_of_insertion(tmp_path: Path) -> None:
    first, second = documents_of([2, 3, 1], seed=1), documents_of([4, 2], seed=2)
    opened = PackedStore(tmp_path)
    opened.add(["a", "b", "c"], first)
    opened.add(["d", "e"], second)
    opened.remove(np.array([1, 3]))
    opened.add(["b"], [second[0]])
    assert opened.ids == ["a", "c", "e", "b"]
    assert_content(tmp_path, ["a", "c", "e", "b"], [first[0], first[2], second[1], second[0]])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.data())
def test_read_returns_any_documents_in_any_order_across_shards(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], data: st.DataObject
) -> None:
    documents = documents_of(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "SHARD_BYTES", 5 * 4 * 4)
        opened = PackedStore(tmp_path_factory.mktemp("store"))
        opened.add([str(i) for i in range(len(lengths))], documents)
    positions = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8))
    expected = torch.cat([torch.empty(0, 4)] + [documents[i] for i in positions])
    torch.testing.assert_close(opened.read(np.array(positions, dtype=np.int64)), expected, rtol=0, atol=0)


def test_shards_are_split_at_the_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SHARD_BYTES", 10 * 4 * 4)
    documents = documents_of([6, 4, 1, 30, 2])
    PackedStore(tmp_path).add(list("abcde"), documents, batch_size=2)
    entries = json.loads((tmp_path / "manifest.json").read_bytes())["shards"]
    assert [entry["tokens"] for entry in entries] == [10, 1, 30, 2]
    assert_content(tmp_path, list("abcde"), documents)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 20), max_size=30), st.integers(1, 25))
def test_blocks_cover_everything_within_the_limit(lengths: list[int], limit: int) -> None:
    stretches = blocks(np.array(lengths, dtype=np.int64), limit)
    assert [i for start, stop in stretches for i in range(start, stop)] == list(range(len(lengths)))
    for start, stop in stretches:
        assert stop - start == 1 or sum(max(1, length) for length in lengths[start:stop]) <= limit


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
    monkeypatch.setattr(store, "SHARD_BYTES", 2 * 4 * 2)
    documents = documents_of([2, 2, 3])
    documents[2][1, 3] = value
    with pytest.raises(ValueError, match=r"document 'd' hold NaN or infinite values \(as float16\), first in token 1"):
        opened.add(["b", "c", "d"], documents)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert opened.ids == ["a"]
    opened.add(["b"], documents[:1])
    assert list(content(tmp_path)) == ["a", "b"]


def test_an_interrupt_just_after_a_write_took_effect_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = PackedStore(tmp_path)
    replace = os.replace

    def interrupted(source: Path, target: Path) -> None:
        replace(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        opened.add(["a"], documents_of([2]))
    assert_content(tmp_path, ["a"], documents_of([2]))
    with pytest.raises(RuntimeError, match="has been written to since it was opened"):
        opened.add(["b"], documents_of([1]))


def test_embedding_size_must_stay_the_same(tmp_path: Path) -> None:
    opened = PackedStore(tmp_path)
    with pytest.raises(ValueError, match="document 'b' have size 5, those of the first document 4"):
        opened.add(["a", "b"], documents_of([1]) + documents_of([1], size=5))
    opened.add(["a"], documents_of([1]))
    with pytest.raises(ValueError, match="document 'b' have size 5, those of the index in .* 4"):
        opened.add(["b"], documents_of([1], size=5))


# Run in a process of its own: for every case a child process opens the store in a folder and is killed while it writes.
KILLED_WRITER = """
import os, signal, sys
import numpy as np, torch
from pylate_flash.index import store

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def half_written(tensors, path, metadata=None):
    save_file(tensors, path, metadata=metadata)
    os.truncate(path, os.path.getsize(path) // 2)
    die()

def die_before(source, target):
    die()

def die_after(source, target):
    replace(source, target)
    die()

save_file, replace = store.save_file, os.replace
for case in sys.argv[1:]:
    operation, moment = os.path.basename(case).split("-")
    child = os.fork()
    if child == 0:
        if moment == "shard":
            store.save_file = half_written
        else:
            os.replace = {"before": die_before, "after": die_after}[moment]
        opened = store.PackedStore(case, override=operation == "override")
        if operation == "add":
            opened.add(["new"], [torch.ones(3, 4)])
        elif operation == "remove":
            opened.remove(np.array([0]))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (case, status)
"""
CASES = [f"{operation}-{moment}" for operation in ("add", "remove") for moment in ("shard", "before", "after")]
CASES += ["override-before", "override-after"]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with one store per case, holding a and b in one shard and c in another when the writer began."""
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    folder = tmp_path_factory.mktemp("killed")
    for case in CASES:
        opened = PackedStore(folder / case)
        opened.add(["a", "b"], documents_of([2, 3]))
        opened.add(["c"], documents_of([1]))
    cases = [str(folder / case) for case in CASES]
    environment = {**os.environ, "PYTHONPATH": str(Path(store.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", KILLED_WRITER, *cases], check=True, env=environment, timeout=300)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_killed_write_leaves_the_state_before_or_after_it(killed: Path, case: str) -> None:
    path = killed / case
    a, b = documents_of([2, 3])
    (c,) = documents_of([1])
    before = (["a", "b", "c"], [a, b, c])
    after = {
        "add": (["a", "b", "c", "new"], [a, b, c, torch.ones(3, 4)]),
        "remove": (["b", "c"], [b, c]),
        "override": ([], []),
    }
    operation, moment = case.split("-")
    ids, documents = after[operation] if moment == "after" else before
    assert_content(path, ids, documents)
    # The two that had nothing more to delete, or nothing yet, left no shard that the manifest does not name.
    assert (shards_in(path) == shards_named(path)) == (case in ("add-after", "override-before"))

    PackedStore(path).add(["next"], documents_of([4]))
    assert_content(path, [*ids, "next"], documents + documents_of([4]))
    assert shards_in(path) == shards_named(path)
    assert {file.name for file in path.iterdir()} <= shards_named(path) | {"manifest.json", "lock"}


# Damaged files


@pytest.fixture
def two_shards(tmp_path: Path) -> Path:
    opened = PackedStore(tmp_path)
    opened.add(["a", "b"], documents_of([2, 3]))
    opened.add(["c"], documents_of([1]))
    return tmp_path


def truncate(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-5])


def garble(shard: Path) -> None:
    shard.write_bytes(b"garbage" * 50)


def take_from_another_store(shard: Path) -> None:
    other = PackedStore(shard.parent / "other")
    other.add(["a", "b"], documents_of([2, 4]))
    shard.write_bytes(next((shard.parent / "other").glob("shard-*")).read_bytes())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "is missing"),
        (truncate, "is damaged"),
        (garble, "is damaged"),
        (take_from_another_store, "is damaged: its tokens is 6, the manifest says 5"),
    ],
)
def test_a_damaged_shard_is_one_error_that_names_it(two_shards: Path, damage, message: str) -> None:
    shard = two_shards / json.loads((two_shards / "manifest.json").read_bytes())["shards"][0]["file"]
    damage(shard)
    with pytest.raises(ValueError, match=message) as caught:
        PackedStore(two_shards)
    assert str(shard) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "has format version 99, and this pylate_flash reads up to 1: upgrade"),
        ({"format": "something else"}, "is not the manifest of a pylate_flash index"),
        ({"dtype": "int3"}, "is damaged: .*int3"),
        ({"shards": [{"file": "../secret.safetensors"}]}, "is damaged: .*bad shard name"),
        ({"shards": 3}, "is damaged"),
        ({"embedding_size": 5}, "its embedding_size is 4, the manifest says 5"),
    ],
)
def test_a_damaged_manifest_is_one_error_that_names_a_file(two_shards: Path, change: dict, message: str) -> None:
    manifest = two_shards / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_bytes()), **change}))
    with pytest.raises(ValueError, match=message) as caught:
        PackedStore(two_shards)
    assert str(two_shards) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', "\udcff"])
def test_a_manifest_that_is_no_manifest(two_shards: Path, text: str) -> None:
    (two_shards / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"manifest\.json is not the manifest of a pylate_flash index"):
        PackedStore(two_shards)


def test_dtype_must_be_known_and_agree_with_the_store(two_shards: Path) -> None:
    with pytest.raises(ValueError, match="dtype must be one of .* got 'float8'"):
        PackedStore(two_shards / "new", dtype="float8")
    with pytest.raises(ValueError, match="dtype='float16' was asked for, but the index in .* keeps 'float32'"):
        PackedStore(two_shards, dtype="float16")


# Writers and readers that meet


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
        filelock.FileLock(two_shards / "lock"),
        pytest.raises(RuntimeError, match="another process is writing to the index"),
    ):
        opened.add(["d"], documents_of([1]))
    assert list(content(two_shards)) == ["a", "b", "c"]
    opened.add(["d"], documents_of([1]))
    assert list(content(two_shards)) == ["a", "b", "c", "d"]


def test_a_reader_that_meets_a_writer_gets_a_whole_state(two_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, open_shard, calls = PackedStore(two_shards), store._open_shard, []

    def remove_meanwhile(path: Path):
        calls.append(path)
        if len(calls) == 1:
            writer.remove(np.array([0]))
        return open_shard(path)

    monkeypatch.setattr(store, "_open_shard", remove_meanwhile)
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
