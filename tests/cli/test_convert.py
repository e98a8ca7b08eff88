"""`index convert`: indexes of earlier versions (`tests/old_indexes`) are rewritten to a new folder, not modified."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from pylate_flash.cli import old_index
from pylate_flash.index.store import PackedStore
from pylate_flash.indexes import Flat
from tests.cli.commands import assert_one_clear_sentence, invoke, succeed
from tests.stores import content, documents_of

OLD = Path(__file__).parents[1] / "old_indexes"
SHARD = "shard-00000-de8e86ea.safetensors"
# Version 1 has neither checksums nor a journal, 2 has a journal, 3 8-bit embeddings, 4 documents marked as removed.
EXPECTED = {
    1: ("float16", ["a", "b", "c\ud800"], [*documents_of([2, 0]), *documents_of([3], seed=1)]),
    2: (
        "float32",
        ["a", "b", "c", "é", "e"],
        [*documents_of([2, 3]), *documents_of([1], seed=1), *documents_of([0, 2], seed=2)],
    ),
    3: ("int8", ["a", "b", "c"], [*documents_of([2, 3], 20), *documents_of([1], 20, seed=1)]),
    4: ("bfloat16", ["a", "c", "d"], [*documents_of([2, 3, 1])[::2], *documents_of([1, 2], seed=1)[:1]]),
}


def files_of(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.fixture
def old(tmp_path, request):
    return Path(shutil.copytree(OLD / f"version{request.param}", tmp_path / "old"))


@pytest.mark.parametrize(("old", "version"), [(version, version) for version in EXPECTED], indirect=["old"])
def test_an_old_index_is_converted_row_by_row(old, version, tmp_path):
    before, new = files_of(old), tmp_path / "new"
    printed = succeed("index", "convert", "--index", old, "--to", new)
    dtype, ids, documents = EXPECTED[version]
    assert f"{new} holds the {len(ids)} documents of {old}, which is unchanged" in printed
    assert files_of(old) == before
    # The old version's rows equal those that this version writes for the same embeddings.
    reference = PackedStore(tmp_path / "again", dtype)
    reference.add(ids, documents)
    actual, expected = content(new), content(reference.path)
    assert list(actual) == ids
    for id_ in ids:
        assert torch.equal(actual[id_].view(torch.uint8), expected[id_].view(torch.uint8))
    assert PackedStore(new).state.dtype == dtype
    assert Flat(tmp_path, "new", device="cpu").verify().documents == len(ids)
    # Documents can be added to the new index.
    PackedStore(new).add(["x"], documents_of([1], documents[0].shape[1]))


@pytest.mark.parametrize("old", [4], indirect=True)
def test_the_new_folder_may_be_a_link(old, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "new").symlink_to("elsewhere")
    succeed("index", "convert", "--index", old, "--to", tmp_path / "new")
    assert list(content(tmp_path / "elsewhere")) == EXPECTED[4][1]
    assert {path.name for path in tmp_path.iterdir()} == {"old", "new", "elsewhere"}


@pytest.mark.parametrize("old", [4], indirect=True)
def test_the_new_index_holds_only_its_own_files_and_the_old_one_stays_as_it_is(old, tmp_path):
    before, unfinished = files_of(old), tmp_path / "new.unfinished"
    PackedStore(unfinished, override=True).add(["left"], documents_of([1]))
    command = ("index", "convert", "--index", old, "--to")
    (unfinished / "notes.txt").write_text("mine")
    assert_one_clear_sentence(invoke(*command, tmp_path / "new"), f"{unfinished / 'notes.txt'} is in the way")
    assert list(content(unfinished)) == ["left"]
    (unfinished / "notes.txt").unlink()
    succeed(*command, tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == {"old", "new"}
    assert list(content(tmp_path / "new")) == EXPECTED[4][1]
    (tmp_path / "again.unfinished").symlink_to("new")
    assert_one_clear_sentence(invoke(*command, tmp_path / "again"), f"{tmp_path / 'again.unfinished'} is in the way")
    (tmp_path / "link").symlink_to("old")
    for inside in (old / "new", tmp_path / "link" / "further" / "new", old):
        assert_one_clear_sentence(invoke(*command, inside), f"--to: {inside} is in the folder of the old index")
    assert files_of(old) == before


@pytest.mark.parametrize("old", [1], indirect=True)
def test_a_document_without_tokens_is_converted_though_its_neighbours_are_removed(old, tmp_path):
    record = json.loads((old / "manifest.json").read_text())
    (old / "manifest.json").write_text(json.dumps(record | {"removed": {SHARD: [0]}}))
    store = old_index.convert(old, tmp_path / "new")
    store.verify()
    assert {id_: len(rows) for id_, rows in content(store.path).items()} == {"b": 0, "c\ud800": 3}


@pytest.mark.parametrize("old", [2], indirect=True)
def test_model_and_corpora_are_remembered(old, tmp_path):
    (tmp_path / "corpus.jsonl").write_text("{}")
    store = old_index.convert(old, tmp_path / "further" / "new")
    assert store.state.model is not None
    assert (store.state.model.name, store.state.model.query_length) == ("some/model", 32)
    assert store.state.corpora == (("/nowhere/corpus.jsonl", "../../corpus.jsonl"),)


@pytest.mark.parametrize("old", [2], indirect=True)
def test_every_command_names_the_one_that_converts(old):
    conversion = f"`pylate-flash index convert --index {old} --to NEW`"
    sentence = f"the index in {old} has the old format, with a manifest.json: {conversion}"
    with pytest.raises(ValueError, match="has the old format, with a manifest.json"):
        Flat(old.parent, old.name, device="cpu")
    before = files_of(old)
    with pytest.raises(ValueError, match="has the old format, with a manifest.json"):
        Flat(old.parent, old.name, device="cpu", override=True)
    for command in (["index", "info"], ["index", "verify"], ["index", "remove", "a"], ["search", "text"]):
        assert_one_clear_sentence(invoke(*command, "--index", old), sentence)
    assert files_of(old) == before


@pytest.mark.parametrize("old", [4], indirect=True)
def test_a_flipped_bit_is_one_error_and_makes_no_index(old, tmp_path):
    new = tmp_path / "new"
    for name, original in files_of(old).items():
        for offset in range(0, len(original), 7):
            changed = bytearray(original)
            changed[offset] ^= 1 << offset % 8
            (old / name).write_bytes(changed)
            try:
                store = old_index.convert(old, new)
            except (ValueError, OSError) as error:
                assert str(old) in str(error), (name, offset, error)  # noqa: PT017
                assert not new.exists()
            else:
                # A journal has two heads, only one of which is valid, and unused bytes.
                assert name.startswith("journal")
                assert store.ids == EXPECTED[4][1]
                shutil.rmtree(new)
        (old / name).write_bytes(original)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embedding_size": ...}, "'embedding_size' is missing"),
        ({"embedding_size": "4"}, "embedding_size must be an integer of at least 1, got '4'"),
        ({"embedding_size": None}, "embedding_size must be an integer of at least 1, got None"),
        ({"dtype": ...}, "'dtype' is missing"),
        ({"dtype": "residual4"}, "dtype must be one of .* got 'residual4'"),
        ({"shards": [{"bytes": 282}]}, "'file' is missing"),
        ({"shards": [{"file": SHARD}]}, "'bytes' is missing"),
        ({"shards": [{"file": SHARD, "bytes": "282"}]}, f"the bytes of {SHARD} must be an integer, got '282'"),
        ({"removed": [1]}, r"removed must map files to lists of integers, got \[1\]"),
        ({"removed": {SHARD: [-1]}}, "removed must map files to lists of integers, got {.*-1"),
        ({"removed": {SHARD: [99]}}, f"of the 2 documents in {SHARD} it removes number 99"),
    ],
)
@pytest.mark.parametrize("old", [1], indirect=True)
def test_a_damaged_manifest_without_a_checksum_is_named(old, change, message, tmp_path):
    manifest = old / "manifest.json"
    record = json.loads(manifest.read_text()) | change
    manifest.write_text(json.dumps({name: value for name, value in record.items() if value is not ...}))
    with pytest.raises(ValueError, match=f"manifest.json is damaged.*{message}"):
        old_index.convert(old, tmp_path / "new")
    assert_one_clear_sentence(invoke("index", "convert", "--index", old, "--to", tmp_path / "new"), "manifest.json")
    assert not (tmp_path / "new").exists()


def test_what_cannot_be_converted(tmp_path):
    def refused(index, to, message):
        result = invoke("index", "convert", "--index", tmp_path / index, "--to", tmp_path / to)
        assert_one_clear_sentence(result, message)

    PackedStore(tmp_path / "index").add(["a"], documents_of([1]))
    refused("index", "new", "needs no conversion")
    refused("nothing", "new", "there is no index in")
    shutil.copytree(OLD / "version1", tmp_path / "old")
    refused("old", "index", "is not empty")
    (tmp_path / "old" / "manifest.json").write_text(json.dumps({"format": "another"}))
    refused("old", "new", "is damaged, or is not an index manifest")
