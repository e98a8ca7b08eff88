"""Flipped bits and cut files: a search finds what it found before, or raises one error that names the file."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import warnings
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pylate_flash.index import catalog, checksums, store
from pylate_flash.index.layout import Layout
from pylate_flash.index.store import DTYPES, PackedStore
from pylate_flash.indexes import Flat
from tests.stores import documents_of


def filled(path: Path, dtype: str) -> Path:
    """An index of two segments and of two small additions, whose last 20 documents have not been flushed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "_FLUSH_SECONDS", 1000)
        index = Flat(path, "index", dtype=dtype, device="cpu", show_progress=False)
        for number, documents in enumerate((40, 20, 3, 20)):
            lengths = [(7 * i + number) % 11 + 1 for i in range(documents)]
            lengths[1] = 0 if number else 5
            patch.setattr(store, "SEGMENT_BYTES", sum(lengths) * Layout(dtype, 24).nbytes if number < 2 else 1 << 30)
            ids = [f"doc-{number}{i:02}" for i in range(documents)]
            metadata = [{"name": id_, "place": i} for i, id_ in enumerate(ids)]
            index.add_documents(ids, documents_of(lengths, 24, number), metadata=metadata)
    assert [len(index), index.info().segments] == [83, 2]
    # As after a kill: nothing has come from SQLite's log into its file yet.
    shutil.copytree(index.index_path, path / "killed")
    return path / "killed"


def answers(path: Path) -> tuple:
    """All that an index says: of itself, of queries, and of its documents."""
    index = Flat(path.parent, path.name, device="cpu", show_progress=False)
    queries = documents_of([3, 5], 24, seed=99)
    ids = index.documents_ids
    found = index(queries, k=100), index(queries, k=3, subset=[ids[::7], ids[:5]])
    embeddings = torch.cat(index.get_documents_embeddings([ids])[0])
    return replace(index.info(), bytes=0), ids, found, embeddings.numpy().tobytes()


def filtered(path: Path) -> list[list[int]]:
    """What filters find, if the index is found to be as it was written."""
    store = PackedStore(path)
    store.verify()
    return [store.positions_where(f"name like '%{digit}' and place < 30").tolist() for digit in range(10)]


@pytest.mark.parametrize("closed", [False, True], ids=["killed", "closed"])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_flipped_bit_or_a_cut_is_one_error_or_changes_no_answer(
    tmp_path: Path, dtype: str, closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several blocks for each segment, and documents that begin and end in the middle of one.
    monkeypatch.setattr(checksums, "_BLOCK_BYTES", 1000)
    whole = filled(tmp_path, dtype)
    if closed:
        Flat(tmp_path, whole.name, device="cpu")
    files = [file.name for file in sorted(whole.iterdir()) if file.name != "reserve"]
    assert len(files) == (4 if closed else 6)
    path = tmp_path / "index"
    shutil.rmtree(path)
    shutil.copytree(whole, path)
    expected, pick, errors, lost = answers(path), random.Random(dtype), 0, 0
    expected_filtered = filtered(path)
    for number in range(240):
        shutil.rmtree(path)
        shutil.copytree(whole, path)
        file = path / files[number % len(files)]
        changed = bytearray(file.read_bytes())
        place = pick.randrange(len(changed))
        # What is small lies at the ends.
        place = pick.choice([place, place % 700, len(changed) - 1 - place % min(700, len(changed))]) % len(changed)
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
            # What was not flushed may be gone after a power failure, which looks the same.
            what = {".sqlite-wal": "writes to", ".rows": "documents that were added to"}[file.suffix]
            assert re.search(f"the last .* {what} the index are lost", str(warning))  # noqa: PT017
            assert file.suffix == ".sqlite-wal" or len(changed) < (whole / file.name).stat().st_size
            with pytest.warns(UserWarning, match="are lost"):
                opened = PackedStore(path)
            with pytest.raises(ValueError, match="are lost"):
                opened.verify()
            lost += 1
        else:
            assert found == expected, (file.name, place)
            # Of metadata only `verify` looks at all.
            with contextlib.suppress(ValueError):
                assert filtered(path) == expected_filtered, (file.name, place)
    assert errors + lost > 90
    assert lost or closed


def test_values_are_checked_once_and_where_only_a_part_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PackedStore(tmp_path)
    lengths = [5, 3000, 4]
    store.add(list("abc"), documents_of(lengths, 32))
    store.compact()
    (file,) = tmp_path.glob("segment-*")
    checked: list[int] = []
    # What is computed once, by CRCs of zeros.
    checksums._changed_by_zeros(checksums._BLOCK_BYTES)
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
        with pytest.raises(ValueError, match=r"is damaged: its bytes \d+ to \d+ have another CRC-32") as caught:
            opened.read(np.array(positions))
        assert str(file) in str(caught.value)
    # Nor does what is written anew take it for what was written.
    with pytest.raises(ValueError, match="another CRC-32"):
        opened.remove(np.array([0]), erase=True)
    assert opened.ids == PackedStore(tmp_path).ids == list("bc")


@pytest.mark.parametrize("nbytes", [1, 50, 1000, 1 << 16])
def test_the_crc_of_blocks_follows_from_theirs(nbytes: int) -> None:
    content = random.Random(nbytes).randbytes(nbytes * 131)
    sums = [zlib.crc32(content[start : start + nbytes]) for start in range(0, len(content), nbytes)]
    for number in (1, 2, 63, 64, 65, 128, 131):
        assert checksums._joined(np.array(sums[:number], "<u4"), nbytes) == zlib.crc32(content[: number * nbytes])
