"""Full disks: removals need no free space, other writes raise an error, and nothing is lost."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from pylate_flash.indexes import Flat
from tests.stores import documents_of, run_python, small

LENGTHS = [20, 0, 7, 5, 3, 6, 2]
IDS = list("abcdefg")


def filled(folder: Path) -> Flat:
    """All documents in one segment, in four additions."""
    index, documents = small(folder), documents_of(LENGTHS, 64)
    for start, stop in ((0, 3), (3, 5), (5, 6), (6, 7)):
        index.add_documents(IDS[start:stop], documents[start:stop])
    assert index.info().segments == 1
    return index


def assert_holds(index: Flat, ids: list[str]) -> None:
    """Check ids, embeddings, search results and token count, in this index and in a reopened one."""
    expected = dict(zip(IDS, documents_of(LENGTHS, 64), strict=True))
    for opened in (index, small(index.index_path.parent)):
        assert opened.documents_ids == ids
        for id_, embeddings in zip(ids, opened.get_documents_embeddings([ids])[0], strict=True):
            assert torch.equal(embeddings, expected[id_]), id_
        if ids:
            assert sorted(result["id"] for result in opened([expected["d"]], k=100)[0]) == sorted(ids)
        assert opened.info().tokens == sum(len(expected[id_]) for id_ in ids)
    assert index.verify().documents == len(ids)


class Full:
    """Simulate a disk that is full from write `step` on, while the reserve file exists if one is given."""

    def __init__(self, patch: pytest.MonkeyPatch, step: int, reserve: Path | None) -> None:
        self.calls, self.step, self.reserve = 0, step, reserve
        for name in ("pwrite", "fsync"):
            patch.setattr(os, name, self.watched(getattr(os, name), name == "pwrite"))
        disk = self

        class Connection(sqlite3.Connection):
            writes = False

            def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
                self.writes = statement == "BEGIN IMMEDIATE" or (self.writes and statement != "ROLLBACK")
                if self.writes and statement.split()[0] in ("INSERT", "UPDATE", "DELETE", "COMMIT") and disk.is_full():
                    raise sqlite3.OperationalError("database or disk is full")
                return super().execute(statement, *arguments)

        connect = sqlite3.connect
        patch.setattr(
            sqlite3, "connect", lambda *arguments, **options: connect(*arguments, factory=Connection, **options)
        )

    def is_full(self) -> bool:
        self.calls += 1
        return self.calls >= self.step and (self.reserve is None or self.reserve.exists())

    def watched(self, call: Any, writes: bool) -> Any:
        def watched(*arguments: Any) -> Any:
            if not self.is_full():
                return call(*arguments)
            if writes:
                # Half of the data still fits.
                descriptor, data, offset = arguments
                call(descriptor, data[: len(data) // 2], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return watched


@pytest.mark.parametrize("operation", ["add", "replace", "remove", "erase", "compact", "override"])
def test_wherever_the_disk_is_full_nothing_is_lost(tmp_path: Path, operation: str) -> None:
    original = filled(tmp_path / "whole").index_path
    after = {
        "add": [*IDS, "new"], "replace": list("acdefgb"), "remove": list("bdeg"),
        "erase": list("bdeg"), "override": [],
    }.get(operation, IDS)  # fmt: skip
    new = torch.ones(1, 3, 64)

    def write(folder: Path) -> None:
        index = small(folder, override=operation == "override")
        if operation == "add":
            index.add_documents(["new"], new)
        elif operation == "replace":
            index.add_documents(["b"], new, replace=True)
        elif operation in ("remove", "erase"):
            index.remove_documents(["a", "c", "f"], erase=operation == "erase")
        elif operation == "compact":
            index.compact()

    errors = done = 0
    for step in range(1, 100):
        folder = tmp_path / str(step)
        shutil.copytree(original, folder / "index")
        with pytest.MonkeyPatch.context() as patch:
            disk = Full(patch, step, None)
            try:
                write(folder)
            except OSError as error:
                assert f"cannot write to the index in {folder / 'index'}: No space left on device" in str(error)  # noqa: PT017
                errors += 1
            done = disk.calls < step
        index = small(folder)
        index.verify()
        assert index.documents_ids in ([after] if done else [IDS, after])
        if done:
            break
        if index.documents_ids == IDS:
            write(folder)
        assert small(folder).verify().documents == len(after)
    assert done
    assert errors


@pytest.mark.parametrize("operation", ["remove", "override"])
def test_documents_are_removed_with_what_is_held_in_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    index = filled(tmp_path)
    reserve = index.index_path / "reserve"
    assert reserve.stat().st_size == 256 << 10
    index._store._catalog.close()
    with monkeypatch.context() as patch:
        Full(patch, 1, reserve)
        with pytest.raises(OSError, match="The index is unchanged: free disk space"):
            index.add_documents(["new"], torch.ones(1, 3, 64))
        index._store._catalog.close()
        if operation == "remove":
            index.remove_documents(["c", "f"])
        else:
            index = small(tmp_path, override=True)
    index._store._catalog.close()
    assert_holds(index, list("abdeg") if operation == "remove" else [])
    # The reserve is restored once there is room.
    index.add_documents(["c"], documents_of(LENGTHS, 64)[2:3])
    index.compact()
    assert reserve.stat().st_size == 256 << 10


TMPFS = """
import os, subprocess, sys
import torch
from pylate_flash.index import store
from pylate_flash.indexes import Flat
folder = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", folder], check=True)
try:
    index = Flat(folder, "index", device="cpu", show_progress=False)
    index.add_documents(list("abc"), torch.ones(3, 1000, 128))
    index.add_documents(list("de"), torch.ones(2, 1000, 128))
    with open(folder + "/filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            print(error)
    ids = index.documents_ids
    del index
    index = Flat(folder, "index", device="cpu", show_progress=False)
    assert index.documents_ids == ids and len(index(torch.ones(1, 2, 128))[0]) == 5
    for change in (lambda: index.add_documents(["f"], torch.ones(1, 1000, 128)), index.compact):
        try:
            change()
            print("changed")
        except OSError as error:
            print(str(error)[:200])
        index.remove_documents([index.documents_ids[1]])
        print(index.documents_ids, Flat(folder, "index", device="cpu").verify().documents)
    print(len(Flat(folder, "index", override=True, device="cpu")), os.listdir(folder + "/index"))
finally:
    del index
    subprocess.run(["umount", folder], check=True)
"""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root mounts a disk")
def test_a_real_disk_that_is_full(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]).returncode:
        pytest.skip("nothing can be mounted here")
    # In its own mount namespace, whose mounts disappear with it in any case.
    process = run_python(TMPFS, tmp_path, before=("unshare", "-m"))
    lines = process.stdout.splitlines()
    assert len(lines) == 6, process.stdout + process.stderr
    assert "No space left on device" in lines[0]
    assert f"cannot write to the index in {tmp_path}/index: No space left" in lines[1]
    assert lines[2] == "['a', 'c', 'd', 'e'] 4"
    assert f"cannot write to the index in {tmp_path}/index: No space left" in lines[3]
    assert lines[4] == "['a', 'd', 'e'] 3"
    assert lines[5].startswith("0 [")
    assert "segment" not in lines[5]
