"""Full disks: what removes documents works without room, what needs some says so, and nothing is lost."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import pylate_flash
from pylate_flash.index import journal
from pylate_flash.indexes import Flat
from tests.stores import documents_of

LENGTHS = [20, 0, 7, 5, 3, 6, 2]
IDS = list("abcdefg")


def filled(folder: Path, dtype: str = "float32") -> Flat:
    """a, b, c in a shard, d, e in another one, f and g in the journal."""
    with pytest.MonkeyPatch.context() as patch:
        index = Flat(folder, "index", dtype=dtype, device="cpu", show_progress=False)
        documents = documents_of(LENGTHS, 64)
        for start, stop in ((0, 3), (3, 5), (5, 6), (6, 7)):
            patch.setattr(journal, "JOURNAL_BYTES", 0 if start < 5 else 64 << 20)
            index.add_documents(IDS[start:stop], documents[start:stop])
    assert index.info().shards == 2
    return index


def opened(folder: Path) -> Flat:
    return Flat(folder, "index", device="cpu", show_progress=False)


def found(index: Flat) -> list[tuple[str, float]]:
    results = index([documents_of([3], 64, seed=5)[0]], k=100)[0]
    return [(result["id"], result["score"]) for result in results]


def assert_holds(index: Flat, ids: list[str], dtype: str = "float32") -> None:
    """These documents, in this order, in whatever way one looks at them."""
    for seen in (index, opened(index.index_path.parent)):
        assert seen.documents_ids == ids
        whole = dict(zip(IDS, documents_of(LENGTHS, 64), strict=True))
        kept = seen._store.layout
        for id_, embeddings in zip(ids, seen.get_documents_embeddings([ids])[0], strict=True):
            expected = kept.embeddings(kept.rows(whole[id_].to(kept.given)))
            expected = expected.dequantize() if kept.quantized else expected
            assert torch.equal(embeddings, expected.float()), id_
        if ids:
            assert sorted(id_ for id_, _ in found(seen)) == sorted(ids)
        assert seen.info().tokens == sum(len(whole[id_]) for id_ in ids)
    assert index.verify().documents == len(ids)


class Disk:
    """A disk for one folder, which takes no more than there is on it now, and `free` bytes."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.room = folder, self.used(folder)
        self._write = os.pwrite
        patch.setattr(os, "pwrite", self.pwrite)

    @staticmethod
    def used(folder: Path) -> int:
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        fits = os.fstat(descriptor).st_size + max(0, self.room - self.used(self.folder)) - offset
        if len(data) and fits <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(descriptor, data[:fits], offset)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Disk]:
    return lambda: Disk(tmp_path, monkeypatch)


MARKED = "the disk of the index in .* is full: its {} removed documents are in no search any more"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_documents_are_removed_on_a_full_disk(tmp_path: Path, dtype: str, disk: Callable[[], Disk]) -> None:
    index = filled(tmp_path, dtype)
    before = dict(found(index))
    there = disk()
    with pytest.warns(UserWarning, match=MARKED.format(2)):
        index.remove_documents(["c", "f"])
    assert_holds(index, list("abdeg"), dtype)
    assert dict(found(index)) == {id_: score for id_, score in before.items() if id_ not in "cf"}
    with pytest.warns(UserWarning, match=MARKED.format(1)):
        opened(tmp_path).remove_documents(["a"])
    index = opened(tmp_path)
    assert_holds(index, list("bdeg"), dtype)
    assert index.info().shards == 2
    # Of a file whose documents are all removed nothing stays.
    with pytest.warns(UserWarning, match=MARKED.format(2)):
        index.remove_documents(["d", "e"])
    assert index.info().shards == 1
    assert_holds(index, list("bg"), dtype)
    # An id may come back, of another document, as soon as there is room.
    with pytest.raises(
        OSError, match=r"No space left on device \(.* bytes are free\). The index is as it was: make room"
    ):
        index.add_documents(["a"], torch.zeros(1, 5000, 64))
    assert_holds(index, list("bg"), dtype)
    there.room += 10 << 20
    index.add_documents(["a"], documents_of(LENGTHS, 64)[:1])
    assert_holds(index, list("bga"), dtype)
    index.compact()
    assert index.info().shards == 1
    assert index._store.manifest.removed == {}
    assert_holds(index, list("bga"), dtype)


def test_compact_gives_up_what_was_marked_file_by_file(tmp_path: Path, disk: Callable[[], Disk]) -> None:
    index = filled(tmp_path)
    there = disk()
    with pytest.warns(UserWarning, match=MARKED.format(3)):
        index.remove_documents(["a", "c", "d"])
    with pytest.raises(OSError, match="No space left on device .* The index is as it was"):
        index.compact()
    assert_holds(index, list("befg"))
    # "b" has no tokens, so that room for a header gives up the first file, and that is more than "e" needs.
    there.room += 1500
    used = Disk.used(tmp_path)
    index.compact()
    assert Disk.used(tmp_path) < used
    assert index._store.manifest.removed == {}
    assert_holds(index, list("befg"))


def test_an_index_is_emptied_on_a_full_disk(tmp_path: Path, disk: Callable[[], Disk]) -> None:
    filled(tmp_path)
    disk()
    index = Flat(tmp_path, "index", override=True, device="cpu", show_progress=False)
    assert {file.name for file in index.index_path.iterdir()} == {"manifest.json", "lock", "reserve"}
    index.add_documents(["a"], documents_of(LENGTHS, 64)[:1])
    assert_holds(index, ["a"])


def test_what_is_written_after_documents_were_marked_is_right(tmp_path: Path, disk: Callable[[], Disk]) -> None:
    for operation in ("remove", "add much", "add little"):
        shutil.rmtree(tmp_path / "index", ignore_errors=True)
        index = filled(tmp_path)
        with pytest.MonkeyPatch.context() as patch:
            Disk(tmp_path, patch)
            with pytest.warns(UserWarning, match=MARKED.format(3)):
                index.remove_documents(["a", "d", "f"])
        if operation == "remove":
            index.remove_documents(["g"])
            assert_holds(index, list("bce"))
            assert index._store.manifest.removed == {}
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(journal, "JOURNAL_BYTES", 0 if operation == "add much" else 64 << 20)
            index.add_documents(["a"], documents_of(LENGTHS, 64)[:1])
        assert_holds(index, list("bcega"))
        assert bool(index._store.manifest.removed) == (operation == "add little")


@pytest.mark.parametrize("operation", ["add", "add much", "remove", "compact", "override"])
def test_wherever_the_disk_is_full_nothing_is_lost(tmp_path: Path, operation: str) -> None:
    whole = filled(tmp_path / "whole").index_path
    after = {"add": [*IDS, "new"], "add much": [*IDS, "new"], "remove": list("bdeg"), "override": []}.get(
        operation, IDS
    )
    new = torch.ones(1, 3, 64)
    errors = step = calls = 0

    def fail_from(name: str, patch: pytest.MonkeyPatch) -> None:
        call = getattr(os, name)

        def watched(*arguments: object) -> object:
            nonlocal calls
            calls += 1
            # Half of what is written still fits.
            if calls == step and name == "pwrite":
                descriptor, data, offset = arguments
                call(descriptor, data[: len(data) // 2], offset)
            if calls >= step:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*arguments)

        patch.setattr(os, name, watched)

    def write(folder: Path) -> None:
        index = Flat(folder, "index", override=operation == "override", device="cpu", show_progress=False)
        if operation.startswith("add"):
            index.add_documents(["new"], new)
        elif operation == "remove":
            index.remove_documents(["a", "c", "f"])
        elif operation == "compact":
            index.compact()

    for step in range(1, 40):
        folder, calls = tmp_path / str(step), 0
        shutil.copytree(whole, folder / "index")
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if operation == "add much":
                patch.setattr(journal, "JOURNAL_BYTES", 0)
            for name in ("pwrite", "fsync"):
                fail_from(name, patch)
            try:
                write(folder)
            except OSError as error:
                assert "No space left on device" in str(error)  # noqa: PT017
                errors += 1
            done = calls < step
        index = opened(folder)
        index.verify()
        if done:
            assert index.documents_ids == after
            break
        assert index.documents_ids in (IDS, after)
        if index.documents_ids == IDS:
            write(folder)
        assert opened(folder).verify().documents == len(after)
    assert done
    assert errors


TMPFS = """
import os, subprocess, sys, warnings
import numpy as np, torch
from pylate_flash.index import journal
from pylate_flash.indexes import Flat
folder = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=True)
try:
    journal.JOURNAL_BYTES = 0
    index = Flat(folder, "index", device="cpu", show_progress=False)
    index.add_documents(list("abc"), torch.ones(3, 1000, 128))
    index.add_documents(list("de"), torch.ones(2, 1000, 128))
    with open(folder + "/filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            print(error)
    for change in (lambda: index.add_documents(["f"], torch.ones(1, 1000, 128)), index.compact):
        try:
            change()
        except OSError as error:
            print(str(error)[:200])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        index.remove_documents(["b", "d"])
    print(len(caught), index.documents_ids, Flat(folder, "index", device="cpu").verify().documents)
    print(len(Flat(folder, "index", override=True, device="cpu")), os.listdir(folder + "/index"))
finally:
    del index
    subprocess.run(["umount", folder], check=True)
"""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root mounts a disk")
def test_a_real_disk_that_is_full(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]).returncode:
        pytest.skip("nothing can be mounted here")
    environment = {**os.environ, "PYTHONPATH": str(Path(pylate_flash.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    # In a name space of its own, which takes the disk with it whatever happens.
    command = ["unshare", "-m", sys.executable, "-c", TMPFS, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    full, *refused, removed, emptied = done.stdout.splitlines() or [""]
    assert "No space left on device" in full, done.stderr
    assert len(refused) == 2
    assert all(f"cannot write to the index in {tmp_path}/index: No space left" in line for line in refused)
    assert removed == "1 ['a', 'c', 'e'] 3"
    assert emptied.startswith("0 [")
    assert not {"shard", "journal"} & {name.strip("'").split("-")[0] for name in emptied[3:-1].split(", ")}
