"""Flipped bits and cut files: a search finds what it found before, or raises one error that names the file."""

from __future__ import annotations

import os
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from pylate_flash.index import checksums, journal
from pylate_flash.index.store import DTYPES, PackedStore
from pylate_flash.indexes import Flat
from tests.stores import documents_of


def filled(path: Path, dtype: str) -> Path:
    """An index of two shards and of a journal, whose last 20 documents have not been flushed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "_FLUSH_SECONDS", 1000)
        index = Flat(path, "index", dtype=dtype, device="cpu", show_progress=False)
        for number, documents in enumerate((40, 20, 3, 20)):
            patch.setattr(journal, "JOURNAL_BYTES", 0 if number < 2 else 64 << 20)
            lengths = [(7 * i + number) % 12 for i in range(documents)]
            index.add_documents([f"doc-{number}{i:02}" for i in range(documents)], documents_of(lengths, 24, number))
    # As after a kill: no flush when the index is given up.
    assert index._store._to_flush is not None
    index._store._to_flush[1].detach()
    assert [len(index), len(index._store.manifest.shards)] == [83, 2]
    return index.index_path


def answers(path: Path) -> tuple:
    """All that an index says: of itself, of queries, and of its documents."""
    index = Flat(path.parent, path.name, device="cpu", show_progress=False)
    queries = documents_of([3, 5], 24, seed=99)
    ids = index.documents_ids
    found = index(queries, k=100), index(queries, k=3, subset=[ids[::7], ids[:5]])
    embeddings = torch.cat(index.get_documents_embeddings([ids])[0])
    return index.info(), ids, found, embeddings.numpy().tobytes()


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_flipped_bit_or_a_cut_is_one_error_or_changes_no_answer(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several blocks for each shard, and documents that begin and end in the middle of one.
    monkeypatch.setattr(checksums, "_BLOCK_BYTES", 1000)
    path = filled(tmp_path, dtype)
    expected, pick, errors, lost = answers(path), random.Random(dtype), 0, 0
    files = [file for file in sorted(path.iterdir()) if file.name not in ("lock", "reserve")]
    assert len(files) == 4
    for number in range(240):
        file = files[number % len(files)]
        whole = file.read_bytes()
        changed, place = bytearray(whole), pick.randrange(len(whole))
        # Ids, lengths and the heads lie at the ends.
        place = pick.choice([place, place % 700, len(whole) - 1 - place % 700])
        if number % 10 < 8:
            changed[place] ^= 1 << pick.randrange(8)
        else:
            del changed[place:]
        file.write_bytes(changed)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found = answers(path)
        except ValueError as error:
            assert str(path) in str(error), error  # noqa: PT017
            errors += 1
        except UserWarning as warning:
            # What was not flushed may be gone after a power failure, and not otherwise.
            assert "the last additions to the index are lost" in str(warning)  # noqa: PT017
            assert len(changed) < len(whole)
            with pytest.warns(UserWarning, match="are lost"), pytest.raises(ValueError, match="are lost"):
                PackedStore(path).verify()
            lost += 1
        else:
            assert found == expected
        file.write_bytes(whole)
    assert errors > 150
    assert lost < 20
    assert answers(path) == expected


def test_values_are_checked_once_and_where_only_a_part_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PackedStore(tmp_path)
    lengths = [5, 3000, 4]
    store.add(list("abc"), documents_of(lengths, 32))
    store.compact()
    (file,) = tmp_path.glob("shard-*")
    checked: list[int] = []
    crc32 = checksums.zlib.crc32

    def count(data: memoryview, value: int = 0) -> int:
        checked.append(len(data))
        return crc32(data, value)

    monkeypatch.setattr(checksums.zlib, "crc32", count)
    opened = PackedStore(tmp_path)
    total = sum(lengths) * 128
    checked.clear()
    # Of "a" are 640 bytes, of its block 64 KiB.
    assert torch.equal(opened.read(np.array([0])), documents_of(lengths, 32)[0])
    assert checked == [1 << 16]
    for _ in range(2):
        assert torch.equal(opened.read(np.arange(3)), torch.cat(documents_of(lengths, 32)))
        assert sum(checked) == total
    # A bit of "c" harms no search among the others.
    content = bytearray(file.read_bytes())
    at = content.index(documents_of(lengths, 32)[2].numpy().tobytes())
    content[at + 100] ^= 16
    file.write_bytes(content)
    opened = PackedStore(tmp_path)
    opened.read(np.array([0]))
    for positions in ([2], [0, 1, 2]):
        with pytest.raises(
            ValueError, match=r"is damaged: bytes \d+ to \d+ of its values have another CRC-32"
        ) as caught:
            opened.read(np.array(positions))
        assert str(file) in str(caught.value)
    # Nor does a merge take it for what was written.
    with pytest.raises(ValueError, match="another CRC-32"):
        opened.remove(np.array([0]))
    assert opened.ids == list("abc")


def test_what_an_addition_has_written_is_checked_when_it_is_read(tmp_path: Path) -> None:
    store = PackedStore(tmp_path)
    store.add(["a", "b"], documents_of([2, 3]))
    (file,) = tmp_path.glob("journal-*")
    at = file.read_bytes().index(documents_of([2, 3])[1].numpy().tobytes())
    with file.open("r+b") as opened:
        os.pwrite(opened.fileno(), b"\1", at)
    with pytest.raises(ValueError, match="is damaged: its values at byte .* are others than were written") as caught:
        store.read(np.array([1]))
    assert str(file) in str(caught.value)
