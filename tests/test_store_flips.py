"""Flipped bits and truncated files: search results are unchanged, or one error names the file."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pylate_flash.index import catalog, checksums, parts, store
from pylate_flash.index.layout import Layout
from pylate_flash.index.store import PackedStore
from pylate_flash.indexes import Flat
from tests.stores import EACH_DTYPE, documents_of


def filled(path: Path, dtype: str) -> Path:
    """An index of two segments and two small additions, whose last 20 documents are not flushed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "_FLUSH_SECONDS", 1000)
        index = Flat(path, "index", dtype=dtype, device="cpu", show_progress=False)
        for number, documents in enumerate((40, 20, 3, 20)):
            lengths = [(7 * i + number) % 11 + 1 for i in range(documents)]
            lengths[1] = 0 if number else 5
            nbytes = sum(lengths) * Layout(dtype, 24).all_nbytes
            patch.setattr(store, "SEGMENT_BYTES", nbytes if number < 2 else 1 << 30)
            ids = [f"doc-{number}{i:02}" for i in range(documents)]
            metadata = [{"name": id_, "place": i} for i, id_ in enumerate(ids)]
            index.add_documents(ids, documents_of(lengths, 24, number), metadata=metadata)
    assert [len(index), index.info().segments] == [83, 2]
    # As after a kill: SQLite's write-ahead log is not checkpointed yet.
    shutil.copytree(index.index_path, path / "killed")
    return path / "killed"


def answers(path: Path) -> tuple:
    """All observable state of an index: its info, search results and embeddings."""
    index = Flat(path.parent, path.name, device="cpu", show_progress=False)
    queries = documents_of([3, 5], 24, seed=99)
    ids = index.documents_ids
    result = index(queries, k=100), index(queries, k=3, subset=[ids[::7], ids[:5]])
    embeddings = torch.cat(index.get_documents_embeddings([ids])[0])
    return replace(index.info(), bytes=0), ids, result, embeddings.numpy().tobytes()


def filtered(path: Path) -> list[list[int]]:
    """Results of filters, after verifying the index."""
    store = PackedStore(path)
    store.verify()
    return [store.positions_where(f"name like '%{digit}' and place < 30").tolist() for digit in range(10)]


@pytest.mark.parametrize("closed", [False, True], ids=["killed", "closed"])
@EACH_DTYPE
def test_a_flipped_bit_or_a_cut_is_one_error_or_changes_no_answer(
    tmp_path: Path, dtype: str, closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several checksum blocks per segment, and documents that start and end within a block.
    monkeypatch.setattr(checksums, "_BLOCK_BYTES", 1000)
    original = filled(tmp_path, dtype)
    if closed:
        Flat(tmp_path, original.name, device="cpu")
    files = [file.name for file in sorted(original.iterdir()) if file.name != "reserve"]
    assert len(files) == (4 if closed else 6)
    path = tmp_path / "index"
    shutil.rmtree(path)
    shutil.copytree(original, path)
    expected, rng, errors, lost = answers(path), random.Random(dtype), 0, 0
    expected_filtered = filtered(path)
    for trial in range(120):
        shutil.rmtree(path)
        shutil.copytree(original, path)
        file = path / files[trial % len(files)]
        changed = bytearray(file.read_bytes())
        offset = rng.randrange(len(changed))
        # Small structures are at the start and the end of the file.
        offset = rng.choice([offset, offset % 700, len(changed) - 1 - offset % min(700, len(changed))]) % len(changed)
        if trial % 10 < 8:
            changed[offset] ^= 1 << rng.randrange(8)
        else:
            del changed[offset:]
        file.write_bytes(changed)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                actual = answers(path)
        except ValueError as error:
            assert str(path) in str(error), error  # noqa: PT017
            errors += 1
        except UserWarning as warning:
            # Unflushed data may be lost in a power failure, which looks the same.
            kind = {".sqlite-wal": "writes to", ".rows": "documents that were added to"}[file.suffix]
            assert re.search(f"the last .* {kind} the index are lost", str(warning))  # noqa: PT017
            assert file.suffix == ".sqlite-wal" or len(changed) < (original / file.name).stat().st_size
            with pytest.warns(UserWarning, match="are lost"):
                opened = PackedStore(path)
            with pytest.raises(ValueError, match="are lost"):
                opened.verify()
            lost += 1
        else:
            assert actual == expected, (file.name, offset)
            # Only `verify` reads all metadata.
            with contextlib.suppress(ValueError):
                assert filtered(path) == expected_filtered, (file.name, offset)
    assert errors + lost > 40
    assert lost or closed


def test_values_are_checked_once_and_where_only_a_part_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [5, 3000, 4]
    monkeypatch.setattr(checksums, "_BLOCK_BYTES", 1 << 16)
    store = PackedStore(tmp_path / "index")
    store.add(list("abc"), documents_of(lengths, 32))
    (file,) = (tmp_path / "index").glob("segment-*")
    checked: list[int] = []
    xxh3 = checksums.xxh3_64_intdigest
    monkeypatch.setattr(checksums, "xxh3_64_intdigest", lambda data: checked.append(len(data)) or xxh3(data))
    opened = PackedStore(tmp_path / "index")
    total = sum(lengths) * 128
    checked.clear()
    # "a" has 640 bytes, its checksum block 64 KiB.
    assert torch.equal(opened.read(np.array([0])), documents_of(lengths, 32)[0])
    assert checked == [1 << 16]
    for _ in range(2):
        assert torch.equal(opened.read(np.arange(3)), torch.cat(documents_of(lengths, 32)))
        assert sum(checked) == total
    # A flipped bit in "c" does not affect reads of the other documents.
    content = bytearray(file.read_bytes())
    offset = content.index(documents_of(lengths, 32)[2].numpy().tobytes())
    content[offset + 100] ^= 16
    file.write_bytes(content)
    opened = PackedStore(tmp_path / "index")
    opened.read(np.array([0]))
    for positions in ([2], [0, 1, 2]):
        with pytest.raises(ValueError, match=r"is damaged: the checksum of its bytes \d+ to \d+ differs") as caught:
            opened.read(np.array(positions))
        assert str(file) in str(caught.value)
    # A rewrite does not accept the damaged rows either.
    with pytest.raises(ValueError, match="the checksum of its bytes .* differs"):
        opened.remove(np.array([0]), erase=True)
    assert opened.ids == PackedStore(tmp_path / "index").ids == list("bc")


def test_what_is_damaged_is_not_taken_for_what_was_written_by_what_is_appended(tmp_path: Path) -> None:
    PackedStore(tmp_path).add(["a"], documents_of([5]))
    (file,) = tmp_path.glob("segment-*")
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    file.write_bytes(content)
    # The next rows share a checksum block with these.
    with pytest.raises(ValueError, match="the checksum of its bytes .* differs"):
        PackedStore(tmp_path).add(["b"], documents_of([5]))
    assert PackedStore(tmp_path).ids == ["a"]


def test_parts_of_the_first_version_of_the_format_are_one_error(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "_SUMS", b"")
        PackedStore(tmp_path).add(["a"], documents_of([5]))
    with pytest.raises(
        ValueError, match=r"catalog.sqlite is damaged: .* before version 2 of the format: rebuild the index"
    ):
        PackedStore(tmp_path)
