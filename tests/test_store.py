"""The store on disk: round trips, interrupted writes, damaged files, concurrent writers."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pylate_flash.index import catalog, checksums, store
from pylate_flash.index.catalog import Catalog
from pylate_flash.index.documents import blocks
from pylate_flash.index.parts import Part
from pylate_flash.index.store import PackedStore
from tests.stores import (
    assert_content,
    content,
    documents_of,
    segments_in,
    small,
    store_of_two_segments,
    written_by_another,
)  # fmt: skip


def one_by_one(path: Path, documents: list[torch.Tensor]) -> PackedStore:
    """A store of documents with ids "0", "1", ..., each added separately."""
    opened = PackedStore(path)
    for i, document in enumerate(documents):
        opened.add([str(i)], [document])
    return opened


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_reopened_store_holds_what_was_added(tmp_path: Path, dtype: str) -> None:
    documents = documents_of([3, 0, 5])
    PackedStore(tmp_path / "a", dtype=dtype).add(["x", "ü", "z"], documents)
    assert_content(tmp_path / "a", ["x", "ü", "z"], [document.to(getattr(torch, dtype)) for document in documents])
    assert PackedStore(tmp_path / "a").state.dtype == dtype


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
@given(st.lists(st.text(max_size=9), min_size=1, max_size=8, unique=True), st.data())
def test_ids_of_any_positions(ids: list[str], data: st.DataObject) -> None:
    """Fewer positions than documents, or more."""
    opened = PackedStore(None)
    for batch in (ids[::2], ids[1::2]):
        opened.add(batch, documents_of([1] * len(batch)))
    stored = ids[::2] + ids[1::2]
    positions = data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=20))
    assert opened.ids_at(np.array(positions, dtype=np.int64)) == [stored[i] for i in positions]


@settings(max_examples=50)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.data())
def test_read_returns_any_documents_in_any_order_across_shards(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], data: st.DataObject
) -> None:
    documents = documents_of(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "SEGMENT_BYTES", 5 * 4 * 4)
        patch.setattr(store, "SMALL_PARTS", data.draw(st.sampled_from([2, 256])))
        patch.setattr(catalog, "_FLUSH_SECONDS", data.draw(st.sampled_from([0, 1000])))
        opened = one_by_one(tmp_path_factory.mktemp("store"), documents)
    positions = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8))
    expected = torch.cat([torch.empty(0, 4)] + [documents[i] for i in positions])
    torch.testing.assert_close(opened.read(np.array(positions, dtype=np.int64)), expected, rtol=0, atol=0)


def test_parts_are_split_at_the_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SEGMENT_BYTES", 10 * 4 * 4)
    documents = documents_of([6, 4, 1, 30, 2])
    PackedStore(tmp_path).add(list("abcde"), documents, batch_size=2)
    assert [part.rows for part in PackedStore(tmp_path).documents.parts] == [10, 1, 30, 2]
    assert_content(tmp_path, list("abcde"), documents)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 20), max_size=30), st.integers(1, 25))
def test_blocks_cover_everything_within_the_limit(lengths: list[int], limit: int) -> None:
    ranges = blocks(np.array(lengths, dtype=np.int64), limit)
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(len(lengths)))
    for start, stop in ranges:
        assert stop - start == 1 or sum(max(1, length) for length in lengths[start:stop]) <= limit


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


def test_small_additions_become_one_part_and_their_rows_stay_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SMALL_PARTS", 3)
    monkeypatch.setattr(checksums, "_BLOCK_BYTES", 50)
    monkeypatch.setattr(catalog, "_FLUSH_SECONDS", 0)
    documents = documents_of([5, 1, 0, 6, 2, 0, 0, 1, 1])
    opened = PackedStore(tmp_path)
    parts = [[1], [1, 1], [1, 1, 1], [4], [4, 1], [4, 1, 1], [7], [7, 1], [7, 1, 1]]
    for i, document in enumerate(documents):
        opened.add([str(i)], [document])
        assert [part.documents for part in opened.documents.parts] == parts[i]
        assert_content(tmp_path, [str(j) for j in range(i + 1)], documents[: i + 1])
    (segment,) = segments_in(tmp_path)
    assert (tmp_path / segment).read_bytes() == torch.cat(documents).numpy().tobytes()
    PackedStore(tmp_path).verify()
    # Parts with removed documents are not merged, as positions within a part must not change.
    opened.remove(np.array([8]))
    opened.add(["x"], documents[:1])
    assert [part.documents for part in opened.documents.parts] == [7, 1, 1]
    PackedStore(tmp_path).verify()


def test_an_addition_that_did_not_reach_the_disk_is_lost_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "_FLUSH_SECONDS", 1000)
    opened = PackedStore(tmp_path)
    documents = documents_of([60] * 4, 8)
    for id_, document in zip("abcd", documents, strict=True):
        opened.add([id_], [document])
    (name,) = segments_in(tmp_path)
    segment, full = tmp_path / name, (tmp_path / name).read_bytes()
    # c starts at byte 3840.
    for survivors, damaged in (("abc", full[:-1]), ("ab", full[:4096] + bytes(512) + full[4608:]), ("a", full[:1930])):
        segment.write_bytes(damaged)
        with pytest.warns(
            UserWarning, match=f"the last {4 - len(survivors)} documents .* are lost: .* a power failure"
        ):
            result = PackedStore(tmp_path)
        assert result.ids == list(survivors)
        with pytest.raises(ValueError, match="are lost"):
            result.verify()
    # Lost rows that had been flushed, and rows with other values, count as damage.
    segment.write_bytes(bytes(512) + full[512:])
    with pytest.raises(ValueError, match="the checksum of its bytes 0 to .* differs"):
        PackedStore(tmp_path).verify()
    segment.write_bytes(full[:5000] + bytes([full[5000] ^ 1]) + full[5001:])
    with pytest.raises(ValueError, match="the checksum of its bytes 0 to .* differs"):
        PackedStore(tmp_path).verify()
    # The next write accepts the loss.
    segment.write_bytes(full[:4096])
    with pytest.warns(UserWarning, match="the last 2 documents"):
        result = PackedStore(tmp_path)
    result.add(["c"], documents[3:])
    assert_content(tmp_path, ["a", "b", "c"], [*documents[:2], documents[3]])
    PackedStore(tmp_path).verify()


def test_an_addition_is_appended_to_a_segment_until_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SEGMENT_BYTES", 10 * 4 * 4)
    documents = documents_of([4, 5, 3, 9, 25, 1])
    opened = one_by_one(tmp_path, documents)
    opened.add(["x", "y", "z"], documents_of([8, 8, 4], seed=1))
    sizes = [[part.rows for part in opened.documents.parts if part.segment is segment] for segment in opened.segments]
    assert sizes == [[4, 5, 3], [9, 25], [1, 8, 8], [4]] or sizes == [[4, 5, 3], [9, 25], [1, 8, 8, 4]]
    assert_content(tmp_path, [*"012345xyz"], documents + documents_of([8, 8, 4], seed=1))


def test_compact_leaves_as_few_files_as_the_size_of_a_segment_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SEGMENT_BYTES", 10 * 4 * 4)
    documents = documents_of([10, 12, 3, 6, 6, 0, 1])
    opened = one_by_one(tmp_path, documents)
    full = [segment.path.name for segment in opened.segments]
    opened.add(["last"], documents_of([2], seed=1))
    opened.compact()
    after = [segment.path.name for segment in opened.segments]
    # Full segments are not rewritten.
    assert after[:2] == full[:2]
    assert_content(tmp_path, [*(str(i) for i in range(7)), "last"], documents + documents_of([2], seed=1))
    opened.compact()
    assert [segment.path.name for segment in opened.segments] == after
    opened.remove(np.arange(8))
    opened.compact()
    assert content(tmp_path) == {}
    assert segments_in(tmp_path) == set()
    PackedStore(tmp_path / "none").compact()
    assert not (tmp_path / "none").exists()


def test_many_removals_rewrite_a_segment(tmp_path: Path) -> None:
    documents = documents_of([1] * 12)
    opened = PackedStore(tmp_path)
    opened.add([str(i) for i in range(12)], documents)
    opened.compact()
    before = segments_in(tmp_path)
    opened.remove(np.array([3, 5, 11]))
    assert segments_in(tmp_path) == before
    survivors = [0, 1, 2, 4, 6, 7, 8, 9, 10]
    assert_content(tmp_path, [str(i) for i in survivors], [documents[i] for i in survivors])
    # After one more removal, more than a quarter of the rows is dead.
    opened.remove(np.array([0]))
    assert len(segments_in(tmp_path) - before) == len(segments_in(tmp_path)) == 1
    assert_content(tmp_path, [str(i) for i in survivors[1:]], [documents[i] for i in survivors[1:]])
    opened.add(["0"], documents[:1])
    assert opened.ids == [*"1246789", "10", "0"]
    opened.verify()


def test_files_are_no_programs(tmp_path: Path) -> None:
    PackedStore(tmp_path).add(["x"], documents_of([2]))
    assert not [path.name for path in tmp_path.iterdir() if path.stat().st_mode & 0o111]


def test_many_replacements_rewrite_a_segment(tmp_path: Path) -> None:
    documents = documents_of([1] * 12)
    opened = PackedStore(tmp_path)
    opened.add([str(i) for i in range(12)], documents)
    before = segments_in(tmp_path)
    # After five replacements, five of 16 rows are dead.
    for i in range(5):
        assert i > 3 or segments_in(tmp_path) == before
        opened.add([str(i)], [documents[i]], replace=True)
    assert len(segments_in(tmp_path) - before) == len(segments_in(tmp_path)) == 1
    order = [*range(5, 12), *range(5)]
    assert_content(tmp_path, [str(i) for i in order], [documents[i] for i in order])
    assert (tmp_path / segments_in(tmp_path).pop()).stat().st_size <= 13 * 4 * 4


def test_tokens_that_are_not_read_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = PackedStore(tmp_path)
    opened.add(["a", "b", "c"], documents_of([1000, 1, 3000], size=2000))
    assert opened.segments
    sizes, read_into = [], Part.read_into

    def counted(part: Part, out: torch.Tensor, start: int) -> None:
        sizes.append(len(out))
        read_into(part, out, start)

    monkeypatch.setattr(Part, "read_into", counted)
    opened = PackedStore(tmp_path)
    opened.read(np.array([1]))
    assert sizes == [1]


@pytest.mark.parametrize("compacted", [False, True])
def test_erased_documents_leave_the_disk(tmp_path: Path, compacted: bool) -> None:
    documents = documents_of([3, 3])
    opened = PackedStore(tmp_path)
    opened.add(["gone", "kept"], documents)
    if compacted:
        opened.compact()
    opened.remove(np.array([0]), erase=True)
    files = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert documents[0].numpy().tobytes() not in files
    assert b"gone" not in files
    assert documents[1].numpy().tobytes() in files


@pytest.mark.parametrize("how", ["erase", "erase nothing more", "compact"])
@pytest.mark.parametrize("together", [True, False])
def test_nothing_is_left_of_documents_that_were_removed_before(tmp_path: Path, how: str, together: bool) -> None:
    documents = documents_of([5, 30, 4])
    index = small(tmp_path)
    for batch in [slice(0, 3)] if together else [slice(0, 1), slice(1, 2), slice(2, 3)]:
        index.add_documents(["gone", "kept", "last"][batch], documents[batch])
    index.remove_documents(["gone"])
    if how == "compact":
        index.remove_documents(["last"]).compact()
    else:
        index.remove_documents(["last"], erase=how == "erase").remove_documents([], erase=how != "erase")
    files = b"".join(file.read_bytes() for file in (tmp_path / "index").iterdir())
    remaining = [name for name, document in zip("gkl", documents, strict=True) if document.numpy().tobytes() in files]
    assert (remaining, b"gone" in files, b"last" in files, index.documents_ids) == (["k"], False, False, ["kept"])
    assert index.info().segments == 1
    index.verify()


def test_erasing_nothing_makes_no_index(tmp_path: Path) -> None:
    small(tmp_path).remove_documents([], erase=True).remove_documents([])
    small(None).remove_documents([], erase=True)
    assert not list(tmp_path.iterdir())


def test_a_document_that_is_replaced_again_and_again_takes_no_more_room(tmp_path: Path) -> None:
    opened = PackedStore(tmp_path)
    opened.add(["kept"], documents_of([4]))
    for seed in range(20):
        opened.add(["a"], documents_of([2], seed=seed), replace=True)
    assert sum(file.stat().st_size for file in tmp_path.glob("segment-*")) <= (4 + 3 * 2) * 16
    assert_content(tmp_path, ["kept", "a"], [*documents_of([4]), *documents_of([2], seed=19)])


def test_a_store_can_be_emptied_and_filled_again(tmp_path: Path) -> None:
    opened = PackedStore(tmp_path)
    for length in (2, 3):
        opened.add(["a"], documents_of([length]))
        assert_content(tmp_path, ["a"], documents_of([length]))
        opened.remove(np.array([0]))
        assert (content(tmp_path), segments_in(tmp_path)) == ({}, set())


def test_override_empties_at_once_and_leaves_other_files(tmp_path: Path) -> None:
    PackedStore(tmp_path).add(["a"], documents_of([2]))
    (tmp_path / "notes.txt").write_text("mine")
    opened = PackedStore(tmp_path, dtype="float16", override=True)
    assert content(tmp_path) == {}
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert segments_in(tmp_path) == set()
    opened.add(["b"], documents_of([2], size=7))
    assert PackedStore(tmp_path).embedding_size == 7


def test_override_replaces_a_damaged_store(tmp_path: Path) -> None:
    PackedStore(tmp_path).add(["a"], documents_of([2]))
    (tmp_path / "catalog.sqlite").write_text("{" * 5000)
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
    opened.compact()
    before = {file.name: file.read_bytes() for file in tmp_path.glob("[!c]*")}
    # The bad document is in the last of several shards.
    monkeypatch.setattr(store, "SEGMENT_BYTES", 2 * 4 * 2)
    documents = documents_of([2, 2, 3])
    documents[2][1, 3] = value
    with pytest.raises(ValueError, match=r"document 'd' hold NaN or infinite values \(as float16\), first in token 1"):
        opened.add(["b", "c", "d"], documents)
    assert {file.name: file.read_bytes() for file in tmp_path.glob("[!c]*")} == before
    assert opened.ids == PackedStore(tmp_path).ids == ["a"]
    opened.add(["b"], documents[:1])
    assert list(content(tmp_path)) == ["a", "b"]


def test_an_interrupt_just_after_a_commit_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = PackedStore(tmp_path)
    opened.add(["a"], documents_of([2]))
    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "_note_committed", interrupt)
        with pytest.raises(KeyboardInterrupt):
            opened.add(["b"], documents_of([1]))
    assert_content(tmp_path, ["a", "b"], documents_of([2]) + documents_of([1]))
    opened.add(["c"], documents_of([3]))
    assert opened.ids == ["a", "b", "c"]
    assert_content(tmp_path, ["a", "b", "c"], documents_of([2]) + documents_of([1]) + documents_of([3]))


def interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt


def test_a_first_write_that_fails_leaves_an_empty_index(tmp_path: Path) -> None:
    opened = PackedStore(tmp_path)
    with pytest.raises(ValueError, match="document 'a' hold NaN"):
        opened.add(["a"], [torch.full((1, 4), float("nan"))])
    assert (segments_in(tmp_path), opened.ids, PackedStore(tmp_path).state.generation) == (set(), [], 0)
    opened.add(["a"], documents_of([2]))
    assert_content(tmp_path, ["a"], documents_of([2]))


# Files that no catalog names


def orphan(path: Path) -> Path:
    """A segment file that a killed writer may leave."""
    segment = path / "segment-0123456789ab.rows"
    segment.write_bytes(b"half of a segment")
    return segment


def test_what_a_killed_writer_left_goes_with_the_first_small_addition(tmp_path: Path) -> None:
    PackedStore(tmp_path).add(["a"], documents_of([2]))
    leftover = orphan(tmp_path)
    opened = PackedStore(tmp_path)
    assert leftover.exists()
    opened.add(["b"], documents_of([1]))
    assert not leftover.exists()


def test_a_compact_that_merges_nothing_deletes_what_a_killed_writer_left(tmp_path: Path) -> None:
    opened = PackedStore(tmp_path)
    opened.add(["a"], documents_of([2]))
    opened.compact()
    for ids in (["a"], []):
        leftover = orphan(tmp_path)
        generation = opened.state.generation
        opened.compact()
        assert not leftover.exists()
        assert (opened.state.generation, opened.ids) == (generation, ids)
        opened.remove(np.arange(len(opened)))


def test_embedding_size_must_stay_the_same(tmp_path: Path) -> None:
    opened = PackedStore(tmp_path)
    with pytest.raises(ValueError, match="document 'b' have size 5, expected 4 as in the first document"):
        opened.add(["a", "b"], documents_of([1]) + documents_of([1], size=5))
    opened.add(["a"], documents_of([1]))
    with pytest.raises(ValueError, match="document 'b' have size 5, expected 4 as in the index in"):
        opened.add(["b"], documents_of([1], size=5))
    # An empty index accepts any embedding size.
    opened.remove(np.array([0]))
    assert opened.embedding_size is PackedStore(tmp_path).embedding_size is None
    opened.add(["b"], documents_of([1], size=5))
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


# Concurrent writers and readers


@pytest.fixture
def two_segments(tmp_path: Path) -> Path:
    return store_of_two_segments(tmp_path)


def test_a_writer_with_an_old_picture_is_refused(tmp_path: Path) -> None:
    PackedStore(tmp_path).add(["a"], documents_of([2]))
    first, second = PackedStore(tmp_path), PackedStore(tmp_path)
    first.add(["c"], documents_of([1]))
    for write in (lambda: second.add(["b"], documents_of([3])), lambda: second.remove(np.array([0]))):
        with pytest.raises(RuntimeError, match="has been written to since it was opened"):
            write()
    assert_content(tmp_path, ["a", "c"], documents_of([2]) + documents_of([1]))


def test_a_writer_whose_index_is_gone_is_refused(tmp_path: Path) -> None:
    opened = PackedStore(tmp_path / "index")
    opened.add(["a"], documents_of([2]))
    opened._catalog.close()
    shutil.rmtree(tmp_path / "index")
    with pytest.raises(RuntimeError, match="has been written to since it was opened"):
        opened.add(["b"], documents_of([1]))
    assert PackedStore(tmp_path / "index").ids == []
    assert torch.equal(opened.read(np.array([0])), documents_of([2])[0])


def test_a_second_writer_at_the_same_time_is_refused(two_segments: Path) -> None:
    opened = PackedStore(two_segments)
    message = "another process is writing to the index"
    with written_by_another(two_segments), pytest.raises(RuntimeError, match=message):
        opened.add(["d"], documents_of([1]))
    assert list(content(two_segments)) == ["a", "b", "c"]
    opened.add(["d"], documents_of([1]))
    assert list(content(two_segments)) == ["a", "b", "c", "d"]


def test_a_reader_that_meets_a_writer_gets_a_whole_state(two_segments: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, read, calls = PackedStore(two_segments), Catalog.read, []

    def remove_meanwhile(catalog: Catalog) -> tuple:
        result = read(catalog)
        calls.append(catalog)
        if len(calls) == 1:
            writer.remove(np.array([0, 1]))
        return result

    monkeypatch.setattr(Catalog, "read", remove_meanwhile)
    assert PackedStore(two_segments).ids == ["c"]


def test_an_open_reader_outlives_a_removal(two_segments: Path) -> None:
    reader = PackedStore(two_segments)
    PackedStore(two_segments).remove(np.array([0, 1, 2]))
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
    assert {file.suffix for file in tmp_path.iterdir()} <= {".sqlite", ".sqlite-wal", ".sqlite-shm", ".rows", ""}
