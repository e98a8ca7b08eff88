"""Stores with damaged files, of older versions, on failing disks: one error that names the file, or all is well."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import pylate_flash
from pylate_flash.index import journal
from pylate_flash.index.folder import Folder
from pylate_flash.index.store import PackedStore
from tests.stores import assert_content, change_manifest, content, documents_of, shards_in, store_of_two_shards


@pytest.fixture
def two_shards(tmp_path: Path) -> Path:
    return store_of_two_shards(tmp_path / "store")


@pytest.fixture
def with_journal(two_shards: Path) -> Path:
    """d and e in a journal, beside the two shards."""
    opened = PackedStore(two_shards)
    opened.add(["d"], documents_of([2], seed=1))
    opened.add(["e"], documents_of([3], seed=2))
    return two_shards


def manifest_of(path: Path) -> dict:
    return json.loads((path / "manifest.json").read_bytes())


def journal_of(path: Path) -> Path:
    return path / manifest_of(path)["journal"]


def first_shard(path: Path) -> Path:
    return path / manifest_of(path)["shards"][0]["file"]


def rewrite_shard(path: Path, **changes: torch.Tensor) -> None:
    """Change tensors of the first shard, and make the manifest agree with the file as far as its size goes.

    As an older version would have written it, which wrote no checksums into it.
    """
    shard, manifest = first_shard(path), manifest_of(path)
    tensors = {**safetensors.torch.load(shard.read_bytes()), **changes}
    tensors.pop("checksums", None)
    safetensors.torch.save_file(tensors, shard)
    manifest["shards"][0]["bytes"] = shard.stat().st_size
    change_manifest(path, shards=manifest["shards"])


def text(value: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(value.encode()), dtype=torch.uint8)


# Shards


def truncate(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size - 5)


def garble(shard: Path) -> None:
    shard.write_bytes((b"garbage" * 50)[: shard.stat().st_size].ljust(shard.stat().st_size, b"x"))


def make_a_pipe(shard: Path) -> None:
    shard.unlink()
    os.mkfifo(shard)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "is missing, though the manifest names it"),
        (truncate, "is damaged: its size is .* bytes, the manifest says"),
        (garble, "is damaged: its header should have"),
        (make_a_pipe, "is damaged: it is no regular file"),
    ],
)
def test_a_damaged_shard_is_one_error_that_names_it(two_shards: Path, damage, message: str) -> None:
    shard = first_shard(two_shards)
    damage(shard)
    with pytest.raises(ValueError, match=message) as caught:
        PackedStore(two_shards)
    assert str(shard) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": torch.tensor([-1, 6])}, "the least length is -1"),
        ({"lengths": torch.tensor([2**62, 2**62])}, "2 lengths of 9223372036854775808 tokens in all"),
        ({"lengths": torch.tensor([2, 2**63 - 1])}, "tokens in all, and values of 5 tokens"),
        ({"lengths": torch.tensor([2.0, 3.0])}, "lengths of torch.float32|none of safetensors"),
        ({"lengths": torch.tensor([5])}, "2 ids, 1 lengths"),
        ({"values": torch.zeros(5, 5)}, "its embedding_size is 5, the manifest says 4"),
        ({"values": torch.zeros(5, 4, dtype=torch.float16)}, "its dtype is torch.float16, the manifest says"),
        ({"values": torch.zeros(5)}, r"values are of type torch.float32 and shape \[5\]"),
        ({"ids": text('["a", "a"]')}, "the document 'a' is there twice"),
        ({"ids": text('["c", "b"]')}, "the document 'c' is there twice"),
        ({"ids": text('["a", 2]')}, "its ids are not a list of strings"),
        ({"ids": text("[" * 200000)}, "its ids are not a list of strings"),
        ({"values": torch.zeros(6, 4), "lengths": torch.tensor([2, 4])}, "its tokens is 6, the manifest says 5"),
    ],
)
def test_contents_of_a_shard_that_do_not_fit_are_one_error(two_shards: Path, changes: dict, message: str) -> None:
    rewrite_shard(two_shards, **changes)
    with pytest.raises(ValueError, match=message) as caught:
        PackedStore(two_shards)
    assert str(two_shards / "shard-") in str(caught.value)


def test_verify_finds_a_changed_value_and_a_nan(two_shards: Path) -> None:
    PackedStore(two_shards).verify()
    shard = first_shard(two_shards)
    whole = shard.read_bytes()
    place = whole.index(documents_of([2, 3])[0].numpy().tobytes()) + 3
    shard.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(ValueError, match="is damaged: its sha256 is .*, the manifest says") as caught:
        PackedStore(two_shards).verify()
    assert str(shard) in str(caught.value)
    shard.write_bytes(whole)
    values = torch.zeros(5, 4)
    values[3, 1] = torch.nan
    rewrite_shard(two_shards, values=values)
    # An index of version 1, whose shards have no checksums.
    change_manifest(two_shards, shards=[{**entry, "sha256": None} for entry in manifest_of(two_shards)["shards"]])
    with pytest.raises(ValueError, match="holds NaN or infinite values, first in its token 3"):
        PackedStore(two_shards).verify()


def test_a_shard_truncated_while_it_is_open_is_an_error_that_names_it(two_shards: Path) -> None:
    opened = PackedStore(two_shards)
    shard = first_shard(two_shards)
    os.truncate(shard, 100)
    with pytest.raises(ValueError, match="is damaged: it ends after 100 bytes, .* were expected") as caught:
        opened.read(np.array([0, 1]))
    assert str(shard) in str(caught.value)
    with pytest.raises(ValueError, match="is damaged: it ends after 100 bytes"):
        opened.verify()
    torch.testing.assert_close(opened.read(np.array([2])), documents_of([1])[0], rtol=0, atol=0)


def test_shards_are_plain_safetensors(two_shards: Path) -> None:
    found = safetensors.torch.load_file(first_shard(two_shards))
    assert found["lengths"].tolist() == [2, 3]
    assert json.loads(found["ids"].numpy().tobytes()) == ["a", "b"]
    torch.testing.assert_close(found["values"], torch.cat(documents_of([2, 3])), rtol=0, atol=0)


# The journal


def test_a_damaged_journal_is_one_error_that_names_it(with_journal: Path) -> None:
    path = journal_of(with_journal)
    whole = path.read_bytes()
    assert list(content(with_journal)) == ["a", "b", "c", "d", "e"]
    # Not the last addition: that is another error, since it may not have reached the disk.
    journal.flush(path)
    whole = path.read_bytes()
    for place in (300, len(whole) - 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="is damaged at byte .*: ") as caught:
            PackedStore(with_journal)
        assert str(path) in str(caught.value)
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="it ends after .* bytes, .* were expected"):
        PackedStore(with_journal)
    path.write_bytes(whole[:200])
    with pytest.raises(ValueError, match="is damaged: it ends after 200 bytes"):
        PackedStore(with_journal)
    path.write_bytes(b"x" * len(whole))
    with pytest.raises(ValueError, match="its heads are not those of a journal"):
        PackedStore(with_journal)
    path.unlink()
    with pytest.raises(ValueError, match="is missing, though the manifest names it"):
        PackedStore(with_journal)


def test_no_changed_byte_of_a_journal_loses_anything_silently(with_journal: Path) -> None:
    path = journal_of(with_journal)
    journal.flush(path)
    whole = path.read_bytes()
    found = 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        try:
            ids = PackedStore(with_journal).ids
        except ValueError as error:
            assert str(path) in str(error)  # noqa: PT017
            found += 1
        else:
            # Of the two heads, one was enough.
            assert place < 256
            assert ids == ["a", "b", "c", "d", "e"]
    assert found == len(whole) - 256


def test_a_power_failure_takes_at_most_what_was_not_flushed_and_says_so(
    two_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_FLUSH_SECONDS", 1000)
    opened = PackedStore(two_shards)
    opened.add(["d"], documents_of([2], seed=1))
    end = journal_of(two_shards).stat().st_size
    opened.add(["e"], documents_of([3], seed=2))
    # As if the head had reached the disk, and the record had not.
    path = journal_of(two_shards)
    with path.open("r+b") as file:
        file.seek(end)
        file.write(b"\0" * (path.stat().st_size - end))
    with pytest.warns(UserWarning, match="the last additions to the index are lost"):
        found = PackedStore(two_shards)
    assert found.ids == ["a", "b", "c", "d"]
    found.add(["f"], documents_of([4], seed=3))
    expected = [*documents_of([2, 3]), *documents_of([1]), *documents_of([2], seed=1), *documents_of([4], seed=3)]
    assert_content(two_shards, ["a", "b", "c", "d", "f"], expected)


def test_a_length_that_no_power_failure_explains_is_damage(two_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_FLUSH_SECONDS", 1000)
    opened = PackedStore(two_shards)
    opened.add(["d"], documents_of([2], seed=1))
    path = journal_of(two_shards)
    end = path.stat().st_size
    opened.add(["e"], documents_of([3], seed=2))
    whole = path.read_bytes()
    head = journal._Head.read(whole[:256])[0]
    assert head.flushed == end < head.end
    for place in range(end, end + 64):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=f"is damaged at byte {end}: the length of a record") as caught:
            PackedStore(two_shards)
        assert str(path) in str(caught.value)


def test_a_run_of_additions_is_flushed_when_its_store_is_given_up(
    two_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_FLUSH_SECONDS", 1000)
    opened = PackedStore(two_shards)
    for i in range(3):
        opened.add([str(i)], documents_of([2]))
    with journal_of(two_shards).open("rb") as file:
        head = journal._Head.read(os.pread(file.fileno(), 256, 0))[0]
        assert head.flushed < head.end
        del opened
        head = journal._Head.read(os.pread(file.fileno(), 256, 0))[0]
        assert head.flushed == head.end
    # A store that was open before the flush still has its turn.
    first = PackedStore(two_shards)
    for _ in range(3):
        journal.flush(journal_of(two_shards))
    first.add(["last"], documents_of([1]))
    assert list(content(two_shards)) == ["a", "b", "c", "0", "1", "2", "last"]


# The manifest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "has format version 99, and this pylate_flash reads up to 4: upgrade"),
        ({"version": True}, "is not the manifest of a pylate_flash index: its version is True"),
        ({"format": "something else"}, "is not the manifest of a pylate_flash index"),
        ({"dtype": "int3"}, "is damaged: .*int3"),
        ({"dtype": ["float32"]}, "is damaged: unknown dtype"),
        ({"shards": [{"file": "../secret.safetensors"}]}, "is damaged: the entry .* of a shard must have the keys"),
        ({"shards": 3}, "is damaged: its shards are not a list"),
        ({"shards": [7]}, "is damaged: the entry 7 of a shard"),
        ({"embedding_size": 5}, "its embedding_size is 4, the manifest says 5"),
        ({"embedding_size": None}, "its embedding_size is None, expected an integer of at least 1"),
        ({"embedding_size": 10**30}, "its embedding_size is 10000"),
        ({"generation": "1"}, "its generation is '1'"),
        ({"generation": -1}, "its generation is -1"),
        ({"created_with": 3}, "its created_with is not an object"),
        ({"journal": "../../journal"}, "bad journal name '../../journal'"),
        ({"journal": 3}, "bad journal name 3"),
        ({"model": {"name": "x"}}, "its model must be an object with the keys"),
        ({"model": []}, "its model must be an object with the keys"),
        ({"corpora": [["x"]]}, r"its corpora are \[\['x'\]\], expected pairs of paths"),
        ({"version": 4, "removed": [3]}, r"its removed is \[3\], expected places of documents in its files"),
        ({"version": 4, "removed": {"x": [3]}}, "its removed is {'x'.* expected places of documents in its files"),
    ],
)
def test_a_damaged_manifest_is_one_error_that_names_a_file(two_shards: Path, change: dict, message: str) -> None:
    change_manifest(two_shards, **change)
    with pytest.raises(ValueError, match=message) as caught:
        PackedStore(two_shards)
    assert str(two_shards) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": "../secret.safetensors"}, "bad shard name '../secret.safetensors'"),
        ({"file": ["x"]}, "bad shard name"),
        ({"documents": 3}, "its documents is 2, the manifest says 3"),
        ({"tokens": 7}, "its tokens is 5, the manifest says 7"),
        ({"tokens": 5.0}, r"its tokens of .* is 5\.0, expected an integer"),
        ({"bytes": -4}, "its bytes of .* is -4"),
        ({"sha256": "12"}, "the sha256 of .* is '12'"),
    ],
)
def test_a_damaged_entry_of_the_manifest_is_one_error(two_shards: Path, change: dict, message: str) -> None:
    entries = manifest_of(two_shards)["shards"]
    change_manifest(two_shards, shards=[{**entries[0], **change}, entries[1]])
    with pytest.raises(ValueError, match=message) as caught:
        PackedStore(two_shards)
    assert str(two_shards) in str(caught.value)


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ([1, 0], "its removed of .* is 0, expected an integer of at least 2"),
        ([True], "its removed of .* is True"),
        ([2], "it has 2 documents, the manifest says that number 2 was removed"),
    ],
)
def test_documents_marked_as_removed_must_be_there(two_shards: Path, removed: list, message: str) -> None:
    change_manifest(two_shards, version=4, removed={first_shard(two_shards).name: [1]})
    assert list(content(two_shards)) == ["a", "c"]
    change_manifest(two_shards, removed={first_shard(two_shards).name: removed})
    with pytest.raises(ValueError, match=message):
        PackedStore(two_shards)


def test_a_shard_that_is_listed_twice_is_an_error(two_shards: Path) -> None:
    entries = manifest_of(two_shards)["shards"]
    change_manifest(two_shards, shards=[*entries, entries[0]])
    with pytest.raises(ValueError, match=r"manifest\.json is damaged: it names the shard .* twice"):
        PackedStore(two_shards)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"version": 1}', "\udcff", "[" * 200000, '{"format": ' * 100000, "9" * 5000]
)
def test_a_manifest_that_is_no_manifest(two_shards: Path, text: str) -> None:
    (two_shards / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"manifest\.json is not the manifest of a pylate_flash index"):
        PackedStore(two_shards)


@pytest.mark.parametrize("kind", ["shard", "journal"])
def test_a_manifest_that_is_lost_is_an_error_that_deletes_nothing(two_shards: Path, kind: str) -> None:
    if kind == "journal":
        two_shards = two_shards.parent / "small"
        PackedStore(two_shards).add(["a"], documents_of([2]))
    (two_shards / "manifest.json").unlink()
    before = {file.name for file in two_shards.iterdir()}
    assert any(name.startswith(kind) for name in before)
    with pytest.raises(ValueError, match=rf"manifest\.json is missing, though {two_shards} holds .* {kind}-.*override"):
        PackedStore(two_shards)
    assert {file.name for file in two_shards.iterdir()} == before
    PackedStore(two_shards, override=True)
    assert {file.name for file in two_shards.iterdir()} == {"manifest.json", "lock", "reserve"}
    PackedStore(two_shards).add(["b"], documents_of([1]))
    assert list(content(two_shards)) == ["b"]


def test_a_reader_that_meets_the_first_write_does_not_miss_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Folder.check_no_remains

    def write_meanwhile(folder: Folder) -> None:
        monkeypatch.undo()
        PackedStore(tmp_path).add(["a"], documents_of([2]))
        check(folder)

    monkeypatch.setattr(Folder, "check_no_remains", write_meanwhile)
    assert PackedStore(tmp_path).ids == ["a"]


def test_a_manifest_that_is_a_pipe_is_an_error(two_shards: Path) -> None:
    make_a_pipe(two_shards / "manifest.json")
    with pytest.raises(ValueError, match=r"manifest\.json is damaged: it is no regular file"):
        PackedStore(two_shards)


@pytest.mark.parametrize("operation", ["compact", "override"])
def test_links_that_an_index_brings_change_nothing_outside(with_journal: Path, operation: str) -> None:
    victim = with_journal.parent / "victim.txt"
    victim.write_text("mine")
    (with_journal / "manifest.json.tmp").symlink_to("../victim.txt")
    if operation == "compact":
        PackedStore(with_journal).compact()
        assert list(content(with_journal)) == list("abcde")
    else:
        PackedStore(with_journal, override=True)
    assert victim.read_text() == "mine"
    assert not (with_journal / "manifest.json").is_symlink()


def test_a_lock_that_is_a_link_makes_no_file_outside(two_shards: Path) -> None:
    (two_shards / "lock").unlink()
    (two_shards / "lock").symlink_to("../new.txt")
    with pytest.raises(OSError, match="cannot write to the index in .*: Too many levels of symbolic links"):
        PackedStore(two_shards).add(["d"], documents_of([1]))
    assert not (two_shards.parent / "new.txt").exists()


@pytest.mark.parametrize("operation", ["add", "flush"])
def test_a_journal_that_is_a_link_is_read_and_not_written_through(with_journal: Path, operation: str) -> None:
    path, victim = journal_of(with_journal), with_journal.parent / "elsewhere"
    path.rename(victim)
    path.symlink_to(victim)
    whole = victim.read_bytes()
    assert list(content(with_journal)) == list("abcde")
    opened = PackedStore(with_journal)
    write = {"add": lambda: opened.add(["f"], documents_of([1])), "flush": lambda: journal.flush(path)}[operation]
    with pytest.raises(OSError, match=f"{path.name} is a symbolic link, and is not written through"):
        write()
    assert victim.read_bytes() == whole
    # What replaces it is a file of the folder's own.
    PackedStore(with_journal).compact()
    assert list(content(with_journal)) == list("abcde")
    assert victim.read_bytes() == whole


def test_dtype_must_be_known_and_agree_with_the_store(two_shards: Path) -> None:
    with pytest.raises(ValueError, match="dtype must be one of .* got 'float8'"):
        PackedStore(two_shards / "new", dtype="float8")
    with pytest.raises(ValueError, match="dtype='float16' was asked for, but the index in .* keeps 'float32'"):
        PackedStore(two_shards, dtype="float16")


@pytest.mark.parametrize("name", ["manifest", "shard", "journal"])
def test_whatever_is_done_to_a_file_is_one_error_or_changes_no_document(with_journal: Path, name: str) -> None:
    journal.flush(journal_of(with_journal))
    path = {"manifest": with_journal / "manifest.json", "shard": first_shard(with_journal)}.get(name)
    path = path or journal_of(with_journal)
    whole, before = path.read_bytes(), content(with_journal)
    pick, errors = random.Random(0), 0
    for _ in range(200):
        changed = bytearray(whole)
        for _ in range(pick.randint(1, 3)):
            start = pick.randrange(len(changed))
            # A few bytes are changed, cut out, or put in.
            changed[start : start + pick.choice([0, 1, 1, 30])] = pick.choice(
                [b"", b"\0", b"9", b"]", pick.randbytes(3)]
            )
        path.write_bytes(changed)
        try:
            opened = PackedStore(with_journal)
            opened.verify()
        except ValueError as error:
            assert str(with_journal) in str(error)  # noqa: PT017
            errors += 1
        else:
            assert opened.ids == list(before)
            found = [opened.read(np.array([i])) for i in range(len(opened))]
            assert all(torch.equal(one, before[id_]) for one, id_ in zip(found, opened.ids, strict=True))
    assert errors > 100


# An older version


def test_an_index_of_version_1_is_read_written_and_verified(two_shards: Path) -> None:
    manifest = manifest_of(two_shards)
    entries = [{key: entry[key] for key in ("file", "documents", "tokens", "bytes")} for entry in manifest["shards"]]
    old = {key: manifest[key] for key in ("format", "generation", "dtype", "embedding_size")}
    old |= {"version": 1, "documents": 3, "created_with": {"safetensors": "0.6"}, "shards": entries}
    (two_shards / "manifest.json").write_text(json.dumps(old))
    opened = PackedStore(two_shards)
    opened.verify()
    assert [entry.sha256 for entry in opened.manifest.shards] == [None, None]
    opened.add(["d"], documents_of([2], seed=1))
    expected = [*documents_of([2, 3]), *documents_of([1]), *documents_of([2], seed=1)]
    assert_content(two_shards, ["a", "b", "c", "d"], expected)
    # What an older package reads first, and refuses.
    assert manifest_of(two_shards)["version"] == 2
    opened.compact()
    assert all(entry.sha256 for entry in PackedStore(two_shards).manifest.shards)
    old["documents"] = 4
    (two_shards / "manifest.json").write_text(json.dumps(old))
    with pytest.raises(ValueError, match="it says 4 documents, its shards 3"):
        PackedStore(two_shards)


# Disks that fail


def fail(*arguments: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace"])
@pytest.mark.parametrize("operation", ["add", "add many", "remove", "compact"])
def test_a_disk_that_is_full_is_an_error_that_names_the_index_and_changes_nothing(
    with_journal: Path, monkeypatch: pytest.MonkeyPatch, call: str, operation: str
) -> None:
    before, files = content(with_journal), {file.name for file in with_journal.iterdir()}
    opened = PackedStore(with_journal)

    def write() -> None:
        if operation == "remove":
            opened.remove(np.array([0]))
        elif operation == "compact":
            opened.compact()
        else:
            opened.add(["new"], documents_of([4]))

    if operation == "add many":
        monkeypatch.setattr(journal, "JOURNAL_BYTES", 0)
    if call == "replace" and operation == "add":
        pytest.skip("an addition to the journal replaces nothing")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="cannot write to the index in .*: No space left on device") as caught:
            write()
    assert str(with_journal) in str(caught.value)
    assert caught.value.errno == errno.ENOSPC
    assert opened.ids == list(before)
    assert {file.name for file in with_journal.iterdir()} == files
    found = content(with_journal)
    assert list(found) == list(before)
    assert all(torch.equal(found[id_], before[id_]) for id_ in before)
    PackedStore(with_journal).verify()
    write()
    assert content(with_journal).keys() == set(opened.ids) != set(before) or operation == "compact"


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
    environment = {**os.environ, "PYTHONPATH": str(Path(pylate_flash.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "store")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    # One too large for the journal, and one for it.
    assert done.stdout == f"[Errno 27] cannot write to the index in {tmp_path / 'store'}: File too large\n" * 2, (
        done.stderr
    )
    assert_content(tmp_path / "store", ["a"], documents_of([2], size=64))
    assert not shards_in(tmp_path / "store")


def test_what_can_be_no_folder_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for path, what in ((tmp_path / "file", "a file"), (tmp_path / "nowhere", "a symbolic link to nothing")):
        for place in (path, path / "index"):
            with pytest.raises(
                ValueError, match=f"the index cannot be in {place}: {path} is {what}, expected a folder"
            ):
                PackedStore(place)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_symbolic_link_to_a_folder_is_as_good_as_the_folder(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    PackedStore(tmp_path / "link").add(["a"], documents_of([2]))
    assert_content(tmp_path / "folder", ["a"], documents_of([2]))


MANY = """
import resource, sys, torch
from pylate_flash.index import journal, store
from pylate_flash.index.store import PackedStore
journal.JOURNAL_BYTES, store.SHARD_BYTES = 0, 16
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, min(hard, 1024)))
opened = PackedStore(sys.argv[1])
opened.add([str(i) for i in range(150)], [torch.full((1, 4), float(i)) for i in range(150)])
again = PackedStore(sys.argv[1])
again.verify()
print(len(opened.manifest.shards), len(again))
del opened, again
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    PackedStore(sys.argv[1])
except OSError as error:
    print(error)
"""


def test_more_shards_than_a_process_may_open_raise_the_limit_or_name_it(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(pylate_flash.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-c", MANY, str(tmp_path / "store")]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300)
    counts, error = done.stdout.splitlines()
    assert counts == "150 150", done.stderr
    assert "Too many open files: an index has one open for each of its shards; raise `ulimit -n`" in error
    assert str(tmp_path / "store") in error


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_one_error(two_shards: Path) -> None:
    opened = PackedStore(two_shards)
    two_shards.chmod(0o500)
    try:
        with pytest.raises(OSError, match="cannot write to the index in .*: Permission denied"):
            opened.compact()
    finally:
        two_shards.chmod(0o700)
