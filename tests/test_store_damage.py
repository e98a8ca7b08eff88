"""Stores with damaged files or on failing disks: either one error that names the file, or no effect."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from pylate_flash.index.store import PackedStore
from tests.stores import (
    assert_content,
    change_state,
    content,
    documents_of,
    run_python,
    segments_in,
    store_of_two_segments,
)


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """a and b in one segment; c, d and e in another."""
    path = store_of_two_segments(tmp_path / "store")
    opened = PackedStore(path)
    opened.add(["d"], documents_of([2], seed=1))
    opened.add(["e"], documents_of([3], seed=2))
    return path


def first_segment(path: Path) -> Path:
    return PackedStore(path).segments[0].path


@contextmanager
def refused(path: Path, message: str) -> Iterator[None]:
    """Expect a single error that names this file."""
    with pytest.raises(ValueError, match=message) as caught:
        yield
    assert str(path) in str(caught.value)


def change_catalog(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path / "catalog.sqlite")) as connection:
        connection.execute(statement, values)
        connection.commit()


# Segments


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def make_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "is missing, though the catalog names it"),
        (truncate, "is damaged: it ends after 75 bytes, expected 80"),
        (make_a_pipe, "is damaged: it is not a regular file"),
    ],
)
def test_a_damaged_segment_is_one_error_that_names_it(index: Path, damage, message: str) -> None:
    segment = first_segment(index)
    damage(segment)
    with refused(segment, message):
        PackedStore(index)


def test_verify_finds_a_changed_value(index: Path) -> None:
    PackedStore(index).verify()
    segment = first_segment(index)
    original = segment.read_bytes()
    segment.write_bytes(original[:7] + bytes([original[7] ^ 1]) + original[8:])
    with refused(segment, "is damaged: the checksum of its bytes 0 to 80 differs"):
        PackedStore(index).verify()


def test_a_segment_truncated_while_it_is_open_is_an_error_that_names_it(index: Path) -> None:
    opened = PackedStore(index)
    segment = first_segment(index)
    os.truncate(segment, 50)
    with refused(segment, "is damaged: it ends after 50 bytes, expected [0-9]+"):
        opened.read(np.array([0, 1]))
    with pytest.raises(ValueError, match="is damaged: it ends after 50 bytes"):
        opened.verify()
    torch.testing.assert_close(opened.read(np.array([2])), documents_of([1])[0], rtol=0, atol=0)


# The catalog


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int3"}, "is damaged: unknown dtype 'int3'"),
        ({"documents": 7}, "is damaged: it holds 5 documents, but its state records 7"),
        ({"parts": 2}, "is damaged: it holds 4 parts, but its state records 2"),
        ({"parts_crc": 2}, "is damaged: it holds 4 parts, but its state records 4 or different ones"),
        ({"generation": 1}, "is damaged: it is of generation 1, but generation . had reached the disk"),
        ({"embedding_size": 3}, "is damaged: its part that starts at document number 3"),
        ("DELETE FROM parts WHERE number = 2", "it holds 3 parts, but its state records 4"),
        (
            "UPDATE parts SET lengths = x'0000000000000000' WHERE number = 0",
            "starts at document number 0: its CRC-32 differs",
        ),
        ("UPDATE parts SET ids = x'6164' WHERE number = 0", "starts at document number 0: its CRC-32 differs"),
        ("UPDATE parts SET segment = '../secret' WHERE number = 0", "bad segment name '../secret'"),
        ("UPDATE parts SET segment = NULL WHERE number = 3", "bad segment name None"),
        ("UPDATE parts SET crc = NULL WHERE number = 0", "it holds . parts, but its state records . or different ones"),
        ("UPDATE parts SET crc = 'x' WHERE number = 0", "it holds . parts, but its state records . or different ones"),
        ("INSERT INTO removed VALUES (0, x'00000000')", "or different ones"),
        ("INSERT INTO removed VALUES (77, x'00000000')", "or different ones"),
        ("DROP TABLE parts", "no such table: parts"),
        ("DROP TABLE state", "had reached the disk"),
    ],
    ids=str,
)
def test_a_state_or_parts_that_do_not_fit_are_one_error(index: Path, change: dict | str, message: str) -> None:
    change_state(index, **change) if isinstance(change, dict) else change_catalog(index, change)
    with refused(index / "catalog.sqlite", message):
        PackedStore(index)


CATALOG = '{"format": "pylate_flash.catalog", "version": %d, "crc32": 1}'


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("", "its state is not a valid index record"),
        ("[]", "its state is not a valid index record"),
        ("[" * 200000, "its state is not a valid index record"),
        ('{"format": "other"}', "it is not an index of pylate_flash"),
        (CATALOG % 9, "has format version 9, .* reads versions up to 2: upgr"),
        (CATALOG % 1, "the CRC-32 of its state differs"),
    ],
    ids=range(6),
)
def test_a_state_that_is_none_is_one_error(index: Path, record: str, message: str) -> None:
    change_catalog(index, "UPDATE state SET record = ?", record)
    with refused(index / "catalog.sqlite", message):
        PackedStore(index)


def test_documents_that_are_not_those_of_the_parts_are_found(index: Path) -> None:
    change_catalog(index, "UPDATE documents SET `#id` = CAST('x' AS BLOB) WHERE `#number` = 1")
    with pytest.raises(ValueError, match="its documents are not those of its parts"):
        PackedStore(index).verify()


def test_an_id_that_its_index_has_lost_is_not_added_twice(index: Path) -> None:
    path = index / "catalog.sqlite"
    content = path.read_bytes()
    with closing(sqlite3.connect(path)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE type = 'index'").fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    offset = content.index(b"b", (page - 1) * size + 200)
    path.write_bytes(content[:offset] + b"B" + content[offset + 1 :])
    with pytest.raises(ValueError, match=r"catalog\.sqlite is damaged: "):
        PackedStore(index).add(["b"], documents_of([1]))


@pytest.mark.parametrize("whole", [b"{", b"x" * 10000, b"SQLite format 3\0" + b"\0" * 5000])
def test_a_catalog_that_is_none_is_one_error(index: Path, whole: bytes) -> None:
    PackedStore(index)
    (index / "catalog.sqlite").write_bytes(whole)
    with pytest.raises(ValueError, match=r"catalog\.sqlite is damaged: "):
        PackedStore(index)
    PackedStore(index, override=True).add(["x"], documents_of([1]))
    assert list(content(index)) == ["x"]


def test_a_catalog_that_is_lost_is_an_error_that_deletes_nothing(index: Path) -> None:
    before = segments_in(index)
    for path in index.glob("catalog*"):
        path.unlink()
    with pytest.raises(ValueError, match=rf"catalog\.sqlite is missing, though {index} holds .* segment-.*override"):
        PackedStore(index)
    assert segments_in(index) == before
    PackedStore(index, override=True)
    assert segments_in(index) == set()
    PackedStore(index).add(["b"], documents_of([1]))
    assert list(content(index)) == ["b"]


def test_an_older_catalog_is_not_taken_for_the_last(index: Path) -> None:
    before = (index / "catalog.sqlite").read_bytes()
    opened = PackedStore(index)
    opened.add(["f"], documents_of([2]))
    opened.add(["g"], documents_of([2]))
    opened._catalog.close()
    for path in index.glob("catalog*"):
        path.unlink()
    (index / "catalog.sqlite").write_bytes(before)
    with pytest.raises(ValueError, match="is damaged: it is of generation 4, but generation 5 had reached the disk"):
        PackedStore(index)


def test_links_that_an_index_brings_change_nothing_outside(index: Path) -> None:
    PackedStore(index)
    for name in ("committed", "catalog.sqlite", "catalog.sqlite-wal"):
        (index / name).touch()
        victim = index.parent / f"victim of {name}"
        (index / name).rename(victim)
        (index / name).symlink_to(victim)
        original = victim.read_bytes()
        with pytest.raises((OSError, ValueError), match="symbolic link"):
            PackedStore(index).add(["f"], documents_of([1]))
        assert victim.read_bytes() == original
        (index / name).unlink()
        victim.rename(index / name)
    PackedStore(index).add(["f"], documents_of([1]))
    assert list(content(index)) == list("abcdef")


def test_dtype_must_be_known_and_agree_with_the_store(index: Path) -> None:
    with pytest.raises(ValueError, match="dtype must be one of .* got 'float8'"):
        PackedStore(index / "new", dtype="float8")
    with pytest.raises(ValueError, match="dtype is 'float16', but the index in .* stores 'float32'"):
        PackedStore(index, dtype="float16")


# Failing disks


LIMITED = """
import resource, sys, torch
from pylate_flash.index.store import PackedStore
opened = PackedStore(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
for tokens in (100_000, 400):
    try:
        opened.add(["new"], [torch.ones(tokens, 4 * 16)])
    except OSError as error:
        print(error)
"""


def test_a_file_that_may_not_grow_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    PackedStore(tmp_path / "store").add(["a"], documents_of([2], size=64))
    process = run_python(LIMITED, tmp_path / "store")
    expected = [f"[Errno 27] cannot write to the index in {tmp_path / 'store'}: File too large"] * 2
    assert process.stdout.splitlines() == expected, process.stderr
    assert_content(tmp_path / "store", ["a"], documents_of([2], size=64))


def test_what_can_be_no_folder_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for path, kind in ((tmp_path / "file", "a file"), (tmp_path / "nowhere", "a broken symbolic link")):
        for folder in (path, path / "index"):
            with pytest.raises(
                ValueError, match=f"the index cannot be in {folder}: {path} is {kind}, expected a folder"
            ):
                PackedStore(folder)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_symbolic_link_to_a_folder_is_as_good_as_the_folder(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    PackedStore(tmp_path / "link").add(["a"], documents_of([2]))
    assert_content(tmp_path / "folder", ["a"], documents_of([2]))


MANY = """
import resource, sys, torch
from pylate_flash.index import store
from pylate_flash.index.store import PackedStore
store.SEGMENT_BYTES = 16
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, min(hard, 1024)))
opened = PackedStore(sys.argv[1])
opened.add([str(i) for i in range(150)], [torch.full((1, 4), float(i)) for i in range(150)])
again = PackedStore(sys.argv[1])
again.verify()
print(len(opened.segments), len(again))
del opened, again
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    PackedStore(sys.argv[1])
except OSError as error:
    print(error)
"""


def test_more_segments_than_a_process_may_open_raise_the_limit_or_name_it(tmp_path: Path) -> None:
    process = run_python(MANY, tmp_path / "store")
    counts, error = process.stdout.splitlines()
    assert counts == "150 150", process.stderr
    assert "Too many open files: an index keeps one file open per segment; raise `ulimit -n`" in error
    assert str(tmp_path / "store") in error


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_one_error(index: Path) -> None:
    opened = PackedStore(index)
    index.chmod(0o500)
    try:
        with pytest.raises(OSError, match="cannot write to the index in .*: (Permission denied|.* readonly database)"):
            opened.compact()
    finally:
        index.chmod(0o700)
