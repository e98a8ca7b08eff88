"""`pylate-flash index`: the results of every command, and its errors for wrong input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pylate_flash import indexes, models
from pylate_flash.cli import indexing
from pylate_flash.cli.index import DTYPES
from pylate_flash.index import store
from tests.cli.commands import CPU, assert_one_clear_sentence, ids_in, invoke, succeed, write_corpus, write_lines
from tests.stores import written_by_another


def files_in(folder):
    """Content of all files, except SQLite's temporary ones while an index is open."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix[:8] != ".sqlite-")
    return {str(path): path.read_bytes() for path in files}


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus.jsonl", "a", "b", "c")


@pytest.fixture
def build(corpus, tmp_path, tiny_colbert_path):
    """Function that builds an index of the corpus in the folder `index`, with further options."""

    def run(*options, data=corpus, model=tiny_colbert_path, index=tmp_path / "index"):
        return invoke("index", "--data", data, "--model", model, "--index", index, *CPU, *options)

    return run


def done(result):
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.stdout


@pytest.fixture
def index(build, tmp_path):
    """An index of the corpus."""
    done(build())
    return tmp_path / "index"


# build


def test_an_index_of_a_corpus_is_what_the_model_says_of_its_texts(build, tmp_path, tiny_colbert_path):
    assert f"{tmp_path / 'index'} holds 3 documents" in done(build())
    flat = indexes.Flat(tmp_path, "index", device="cpu")
    assert flat.documents_ids == ["a", "b", "c"]
    model = models.ColBERT(tiny_colbert_path, device="cpu")
    texts = [f"the text of {id_}" for id_ in "abc"]
    expected = model.encode(texts, is_query=False)
    for actual, reference in zip(flat.get_documents_embeddings([["a", "b", "c"]])[0], expected, strict=True):
        np.testing.assert_allclose(actual.numpy(), reference, atol=1e-6)


def test_a_folder_of_texts_is_indexed_by_path_and_searched_with_its_texts(build, tmp_path):
    (tmp_path / "notes" / "travel").mkdir(parents=True)
    (tmp_path / "notes" / "travel" / "trains.md").write_text("# Trains\n\nNight trains to the sea.\n")
    (tmp_path / "notes" / "bread.txt").write_text("Flour, water, salt.\n")
    done(build(data=tmp_path / "notes"))
    assert ids_in(tmp_path / "index") == ["bread.txt", "travel/trains.md"]
    printed = succeed("search", "trains", "--data", tmp_path / "notes", "--index", tmp_path / "index", *CPU)
    assert "\ttravel/trains.md\t# Trains Night trains to the sea.\n" in printed


def test_a_build_goes_on_with_the_documents_that_are_missing(build, index, corpus, monkeypatch):
    before = files_in(index)
    assert f"Nothing to do: {index} already holds the 3 documents of {corpus}" in done(build())
    assert files_in(index) == before

    write_corpus(corpus, "new", "a", "b", "c", "d")
    encoded = []
    encode = models.ColBERT.encode
    monkeypatch.setattr(
        models.ColBERT, "encode", lambda self, texts, **options: encoded.extend(texts) or encode(self, texts, **options)
    )
    assert f"Resuming: {index} already holds 3 of the 5 documents" in done(build())
    assert ids_in(index) == ["a", "b", "c", "new", "d"]
    # Texts of one letter come from the trial run of the model.
    assert [text for text in encoded if len(text) > 1] == ["the text of new", "the text of d"]


def test_a_build_leaves_an_index_of_other_documents_or_of_another_model(build, index, tmp_path, other_colbert_path):
    before = files_in(index)
    other = write_corpus(tmp_path / "other.jsonl", "a", "b")
    assert_one_clear_sentence(build(data=other), index, "the document 'c'", "not in", other, "--overwrite")
    assert_one_clear_sentence(build(model=other_colbert_path), index, "is a different model", "weights")
    assert_one_clear_sentence(build("--document-length", 8), index, "is a different model", "document_length")
    assert files_in(index) == before

    done(build("--overwrite", data=other, model=other_colbert_path))
    assert ids_in(index) == ["a", "b"]
    assert_one_clear_sentence(build(data=other), "is a different model")


def test_an_index_without_a_model_is_not_added_to(build, corpus, tmp_path):
    indexes.Flat(tmp_path, "index", device="cpu").add_documents(["a"], [np.eye(2, 32, dtype="float32")])
    assert_one_clear_sentence(build(), tmp_path / "index", "does not record which model", "--overwrite")
    result = invoke("index", "add", "--data", corpus, "--index", tmp_path / "index")
    assert_one_clear_sentence(result, "does not record which model", "--model")


def test_a_build_writes_on_the_way(build, tmp_path, monkeypatch):
    monkeypatch.setattr(indexing, "SECONDS_BETWEEN_WRITES", 0.0)
    monkeypatch.setattr(indexing, "SECONDS_BETWEEN_NOTES", 0.0)
    sizes = []
    add = indexes.Flat.add_documents
    monkeypatch.setattr(
        indexes.Flat,
        "add_documents",
        lambda self, ids, *rest, **options: sizes.append(len(ids)) or add(self, ids, *rest, **options),
    )
    corpus = write_corpus(tmp_path / "corpus.jsonl", *(f"d{i}" for i in range(20)))
    result = build("--batch-size", 1, data=corpus)
    assert sizes == [8, 8, 4]
    for part in ("\n8 of 20 documents, ", " documents/s, 00:00 left\n", "\nEncoded 20 documents in "):
        assert part in result.stderr


def test_ctrl_c_keeps_what_is_in_the_index_and_says_how_to_go_on(build, tmp_path, monkeypatch):
    monkeypatch.setattr(indexing, "SECONDS_BETWEEN_WRITES", 0.0)
    corpus = write_corpus(tmp_path / "corpus.jsonl", *(f"d{i}" for i in range(20)))
    encode = models.ColBERT.encode

    def interrupted(self, texts, **options):
        if "the text of d8" in texts:
            raise KeyboardInterrupt
        return encode(self, texts, **options)

    with monkeypatch.context() as patch:
        patch.setattr(models.ColBERT, "encode", interrupted)
        result = build("--batch-size", 1, data=corpus)
    assert result.exit_code == 130
    assert f"8 of 20 documents are in {tmp_path / 'index'}; the same command resumes the build\n" in result.stderr
    done(build("--batch-size", 1, data=corpus))
    assert ids_in(tmp_path / "index") == [f"d{i}" for i in range(20)]


def test_a_build_says_that_texts_are_longer_than_what_is_read_of_them(build, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "long.txt").write_text("word " * 30)
    (tmp_path / "texts" / "short.txt").write_text("word " * 29)
    result = build(data=tmp_path / "texts")
    # The 32 tokens that are read are [CLS], a marker, 29 words and [SEP].
    assert "Note: 1 of the first 2 documents are longer than 32 tokens" in result.stderr


def test_a_build_keeps_the_type_that_was_asked_for(build, tmp_path):
    done(build("--dtype", "float16"))
    assert json.loads(succeed("index", "info", "--index", tmp_path / "index", "--json"))["dtype"] == "float16"
    done(build())
    assert_one_clear_sentence(build("--dtype", "bfloat16"), "bfloat16", "float16")


def test_a_build_keeps_8_bits_that_are_searched(corpus, tmp_path, tiny_colbert_path):
    args = ("index", "--data", corpus, "--model", tiny_colbert_path, "--index", tmp_path / "i", *CPU)
    succeed(*args, "--dtype", "int8")
    assert "32 numbers each, int8" in succeed("index", "info", "--index", tmp_path / "i")
    text = json.loads(corpus.read_text().splitlines()[1])
    result = json.loads(succeed("search", text["text"], "--index", tmp_path / "i", "--json", *CPU))
    assert result["results"][0]["id"] == text["_id"]
    assert_one_clear_sentence(invoke(*args, "--dtype", "float32"), "float32", "int8")


def test_a_build_trains_its_codec_on_texts_from_the_whole_corpus(tmp_path, tiny_colbert_path, monkeypatch):
    pytest.importorskip("fastkmeans")
    monkeypatch.setattr(indexing, "_SAMPLE", 5)
    corpus = write_corpus(tmp_path / "corpus.jsonl", *(f"d{i}" for i in range(300)))
    sizes, train = [], indexes.Flat.train_codec
    watched = lambda flat, sample: (sizes.append(len(sample)), train(flat, sample))[1]  # noqa: E731
    monkeypatch.setattr(indexes.Flat, "train_codec", watched)
    args = ("index", "--data", corpus, "--model", tiny_colbert_path, "--index", tmp_path / "i", *CPU)
    succeed(*args, "--dtype", "residual4")
    # The sample size is 16 * isqrt(300) = 272, so every second text is taken.
    assert sizes == [150]
    assert "32 numbers each, residual4" in succeed("index", "info", "--index", tmp_path / "i")
    result = json.loads(succeed("search", "the text of d31", "--index", tmp_path / "i", "--json", *CPU))
    assert "d31" in [hit["id"] for hit in result["results"]]
    assert "Nothing to do" in succeed(*args)
    assert sizes == [150]
    assert_one_clear_sentence(invoke(*args, "--dtype", "residual2"), "residual2", "residual4")


def test_residual_codes_that_cannot_be_trained_leave_what_was_there(corpus, tmp_path, tiny_colbert_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastkmeans", None)
    args = ("index", "--data", corpus, "--model", tiny_colbert_path, "--index", tmp_path / "i", *CPU)
    residual = ("--dtype", "residual4", "--overwrite")
    assert_one_clear_sentence(invoke(*args, *residual), "--dtype residual4 needs fastkmeans", "pylate-flash[residual]")
    assert not (tmp_path / "i").exists()
    succeed(*args)
    assert_one_clear_sentence(invoke(*args, *residual), "--dtype residual4 needs fastkmeans")
    assert "Nothing to do" in succeed(*args)


def test_a_build_keeps_16_bits_by_which_a_search_scores_again(corpus, tmp_path, tiny_colbert_path):
    assert set(DTYPES) == set(store.DTYPES)
    build_args = ("index", "--data", corpus, "--model", tiny_colbert_path, *CPU)
    for dtype in ("int8+float16", "float16"):
        succeed(*build_args, "--index", tmp_path / dtype, "--dtype", dtype)
    described = json.loads(succeed("index", "info", "--index", tmp_path / "int8+float16", "--json"))
    assert (described["dtype"], described["scored_bytes"]) == ("int8+float16", described["tokens"] * 48)
    args = ("search", "the text of b", "-k", 2, "--json", *CPU, "--index")
    result = json.loads(succeed(*args, tmp_path / "int8+float16", "--rescore", 3))["results"]
    expected = json.loads(succeed(*args, tmp_path / "float16"))["results"]
    assert [hit["id"] for hit in result] == [hit["id"] for hit in expected]
    assert [hit["score"] for hit in result] == pytest.approx([hit["score"] for hit in expected], rel=1e-5)
    result = invoke(*args, tmp_path / "int8+float16", "--rescore", 1)
    assert_one_clear_sentence(result, "pylate-flash: --rescore must be an integer of at least k = 2")
    result = invoke(*args, tmp_path / "float16", "--rescore", 3)
    assert_one_clear_sentence(result, "pylate-flash: --rescore: ", "stores only 'float16'")


@pytest.mark.parametrize("what", ["corpus", "encoder", "model", "place", "files", "device"])
def test_what_cannot_be_built_leaves_nothing_behind(what, corpus, tmp_path, tiny_colbert_path, minilm_path):
    options = {"--data": corpus, "--model": tiny_colbert_path, "--index": tmp_path / "index", "--device": "cpu"}
    parts: list[object]
    if what == "corpus":
        with corpus.open("a") as lines:
            lines.write('{"_id": "a", "text": "again"}\n')
        parts = [f"{corpus}, line 4", "'a'", "line 1"]
    elif what == "encoder":
        options["--model"], parts = minilm_path, [minilm_path, "without a projection"]
    elif what == "model":
        options["--model"], parts = "/no/such/model", ["there is no model in '/no/such/model'"]
    elif what == "place":
        options["--index"], parts = corpus / "index", ["--index", f"{corpus} is a file"]
    elif what == "files":
        options["--index"], parts = tmp_path, [tmp_path, "holds files that are not an index"]
    else:
        options["--device"], parts = "nonsense", ["--device nonsense"]
    before = files_in(tmp_path)
    result = invoke("index", *(part for option in options.items() for part in option))
    assert_one_clear_sentence(result, *parts)
    assert files_in(tmp_path) == before
    assert not (tmp_path / "index").exists()


def write_metadata(path, **documents):
    rows = ({"_id": id_, "text": f"the text of {id_}", "metadata": keys} for id_, keys in documents.items())
    return write_lines(path, *rows)


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"Year": 2021}, "metadata: 'Year' and 'year' are the same key: keys are case-insensitive"),
        ({f"k{i}": i for i in range(1000)}, "metadata: all documents together have more than 1000 keys"),
    ],
    ids=["case", "number"],
)
@pytest.mark.parametrize("form", ["one corpus", "resumed", "add", "replace"])
def test_keys_that_no_index_holds_together_are_refused_before_any_work(
    keys, part, form, build, tmp_path, tiny_colbert_path, monkeypatch
):
    path, index = tmp_path / "keys.jsonl", tmp_path / "index"
    if form == "one corpus":
        write_metadata(path, a={"year": 2020}, z=keys)
    else:
        done(build(data=write_metadata(path, a={"year": 2020})))
        write_metadata(path, a={}, z=keys)
    monkeypatch.setattr("pylate_flash.cli.index.load_model", None)
    monkeypatch.setattr("pylate_flash.cli.index.load_model_of", None)
    if form in ("add", "replace"):
        options = ("--replace",) if form == "replace" else ()
        result = invoke("index", "add", "--data", path, "--index", index, *CPU, *options)
    else:
        result = build(data=path)
    assert_one_clear_sentence(result, f"pylate-flash: {path}: the document 'z': {part}")


def test_keys_of_an_index_that_is_overwritten_do_not_count(build, tmp_path):
    path = write_metadata(tmp_path / "keys.jsonl", a={"year": 2020})
    done(build(data=path))
    write_metadata(path, a={"Year": 2020, "month": None}, b={"Year": 2021})
    done(build("--overwrite", data=path))
    assert ids_in(tmp_path / "index") == ["a", "b"]


def test_overwrite_is_refused_in_one_sentence_while_another_process_writes(build, index):
    before = files_in(index)
    with written_by_another(index):
        result = build("--overwrite")
    assert_one_clear_sentence(result, "another process is writing to the index", index)
    assert files_in(index) == before


@pytest.mark.parametrize("options", [(), ("--overwrite",)])
def test_a_name_that_not_every_system_takes_is_refused(build, tmp_path, options):
    # The name is refused before the model is looked up.
    result = build(*options, model="no-such/name", index=tmp_path / "a:b")
    assert_one_clear_sentence(result, "--index: ", tmp_path / "a:b", "colon", "got 'a:b'")
    assert "index_name" not in result.stderr
    assert not (tmp_path / "a:b").exists()


def test_another_type_than_the_index_has_is_refused_in_words_of_the_command_line(build, index):
    before = files_in(index)
    result = build("--dtype", "int8")
    assert_one_clear_sentence(result, "--dtype int8", f"the index in {index} stores float32", "--overwrite")
    assert "override" not in result.stderr
    assert files_in(index) == before
    done(build("--dtype", "float32"))


def test_an_index_that_was_emptied_takes_a_model_of_another_size(build, tmp_path):
    old = indexes.Flat(tmp_path, "index", device="cpu").add_documents(["x"], [np.eye(2, 5, dtype="float32")])
    old.remove_documents(["x"])
    done(build())
    assert ids_in(tmp_path / "index") == ["a", "b", "c"]


def test_a_build_goes_on_after_an_interrupted_first_write(build, tmp_path):
    (tmp_path / "index").mkdir()
    for name in ("catalog.sqlite", "committed"):
        (tmp_path / "index" / name).touch()
    done(build())
    assert ids_in(tmp_path / "index") == ["a", "b", "c"]


# add, remove, compact


def test_add_takes_the_model_that_the_index_remembers(index, tmp_path, tiny_colbert_path):
    more = write_corpus(tmp_path / "more.jsonl", "b", "d", "e")
    result = invoke("index", "add", "--data", more, "--index", index, *CPU)
    assert "1 of the 3 documents" in result.stdout
    assert f"Added 2 documents; {index} holds 5\n" in result.stdout
    assert ids_in(index) == ["a", "b", "c", "d", "e"]
    expected = models.ColBERT(tiny_colbert_path, device="cpu").encode(["the text of e"], is_query=False)[0]
    actual = indexes.Flat(index.parent, index.name, device="cpu").get_documents_embeddings([["e"]])[0][0]
    np.testing.assert_allclose(actual.numpy(), expected, atol=1e-6)
    assert "Added 0 documents" in succeed("index", "add", "--data", more, "--index", index, *CPU)


def test_add_refuses_another_model(index, tmp_path, other_colbert_path):
    more = write_corpus(tmp_path / "more.jsonl", "d")
    before = files_in(index)
    result = invoke("index", "add", "--data", more, "--index", index, "--model", other_colbert_path, *CPU)
    assert_one_clear_sentence(result, index, "is a different model")
    assert files_in(index) == before


def test_remove_by_ids_or_by_a_file_of_ids(index, tmp_path):
    assert f"Removed 1 document; {index} holds 2\n" in succeed("index", "remove", "b", "--index", index)
    (tmp_path / "ids.txt").write_text("c\n\nc\n")
    succeed("index", "remove", "--ids", tmp_path / "ids.txt", "--index", index)
    assert ids_in(index) == ["a"]


def test_remove_takes_all_or_none(index, tmp_path):
    (tmp_path / "ids.txt").write_text("a\nno\n")
    before = files_in(index)
    args = ("--index", index)
    assert_one_clear_sentence(invoke("index", "remove", "a", "no", *args), "'no' is not in the index in", index)
    by_file = ("--ids", tmp_path / "ids.txt")
    assert_one_clear_sentence(invoke("index", "remove", *by_file, *args), f"{tmp_path / 'ids.txt'}, line 2: 'no'")
    assert_one_clear_sentence(invoke("index", "remove", "a", *by_file, *args), "either", "not both")
    assert_one_clear_sentence(invoke("index", "remove", *args), "either IDs or --ids")
    assert files_in(index) == before


@pytest.mark.parametrize("option", [(), ("--ids",)])
def test_of_a_long_id_a_message_has_the_beginning(index, tmp_path, option):
    long = "x" * 100_000
    (tmp_path / "ids.txt").write_text(long)
    result = invoke("index", "remove", *option, tmp_path / "ids.txt" if option else long, "--index", index)
    assert_one_clear_sentence(result, "'xxx", "is not in the index in", "nothing was removed")
    assert len(result.stderr.splitlines()[-1]) < 500 + len(str(tmp_path)) * 2


def test_add_replaces_documents_on_request(index, tmp_path, tiny_colbert_path):
    (tmp_path / "more.jsonl").write_text('{"_id": "b", "text": "another text"}\n{"_id": "d", "text": "a new one"}\n')
    args = ("--data", tmp_path / "more.jsonl", "--index", index, *CPU)
    assert "1 of the 2 documents" in (printed := succeed("index", "add", *args))
    assert "--replace replaces them" in printed
    assert f"Added 0 documents, replaced 2; {index} holds 4\n" in succeed("index", "add", "--replace", *args)
    assert ids_in(index) == ["a", "c", "b", "d"]
    expected = models.ColBERT(tiny_colbert_path, device="cpu").encode(["another text"], is_query=False)[0]
    actual = indexes.Flat(index.parent, index.name, device="cpu").get_documents_embeddings([["b"]])[0][0]
    np.testing.assert_allclose(actual.numpy(), expected, atol=1e-6)
    # Search shows the texts that were added last.
    assert "\tb\tanother text\n" in (results := succeed("search", "text", "--index", index, "-k", 4, *CPU))
    assert "\ta\tthe text of a\n" in results
    assert json.loads(succeed("index", "info", "--index", index, "--json"))["corpora"] == [
        str(tmp_path / "corpus.jsonl"),
        str(tmp_path / "more.jsonl"),
    ]


def test_a_full_disk_is_one_sentence(index, monkeypatch):
    def full(*arguments):
        raise OSError(28, os.strerror(28))

    # Only rewrites of segments fail, not writes to the catalog.
    monkeypatch.setattr("pylate_flash.index.change.write_all", full)
    assert f"Removed 1 document; {index} holds 2\n" in succeed("index", "remove", "b", "--index", index)
    result = invoke("index", "compact", "--index", index)
    assert_one_clear_sentence(result, "No space left", "The index is unchanged: free disk space", index)
    assert ids_in(index) == ["a", "c"]


def test_compact_keeps_the_documents_in_fewer_files(index, tmp_path):
    for id_ in "de":
        succeed("index", "add", "--data", write_corpus(tmp_path / "more.jsonl", id_), "--index", index, *CPU)
    succeed("index", "compact", "--index", index)
    assert ids_in(index) == ["a", "b", "c", "d", "e"]
    assert json.loads(succeed("index", "info", "--index", index, "--json"))["files"] == 2


# info, verify


def test_info_says_what_the_index_holds(index, tiny_colbert_path):
    record = json.loads(succeed("index", "info", "--index", index, "--json"))
    flat = indexes.Flat(index.parent, index.name, device="cpu")
    tokens = sum(len(document) for document in flat.get_documents_embeddings([flat.documents_ids])[0])
    assert (record["documents"], record["tokens"], record["embedding_size"]) == (3, tokens, 32)
    size = sum(file.stat().st_size for file in [index / "catalog.sqlite", *index.glob("segment-*")])
    assert (record["dtype"], record["bytes"], record["files"]) == ("float32", size, 2)
    assert (record["model"]["name"], record["model"]["document_length"]) == (tiny_colbert_path, 32)
    table = succeed("index", "info", "--index", index)
    for part in ("documents", "3", f"{tokens:,}", "32 numbers each, float32", record["model"]["fingerprint"][:12]):
        assert part in table
    succeed("index", "remove", "a", "b", "c", "--index", index)
    assert "embeddings  float32\n" in succeed("index", "info", "--index", index)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_behind_the_output_is_one_sentence(tmp_path):
    indexes.Flat(tmp_path, "index", device="cpu").add_documents(["a"], [np.eye(2, dtype="float32")])
    arguments = [sys.executable, "-m", "pylate_flash", "index", "info", "--json", "--index", str(tmp_path / "index")]
    with open("/dev/full", "w") as full:
        process = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert process.returncode == 2
    assert process.stderr.splitlines()[1:] == ["pylate-flash: reading or writing failed: No space left on device"]


def test_what_does_not_encode_does_not_wait_for_pylate(index):
    code = (
        "import sys; from pylate_flash.cli import app; "
        "app(['index', *sys.argv[1:]], prog_name='pylate-flash', standalone_mode=False); "
        "print(sorted({'pylate', 'transformers'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(indexes.__file__).parents[1])}
    arguments = [sys.executable, "-c", code, "remove", "a", "--index", str(index)]
    process = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment)
    assert process.stdout.splitlines()[-1] == "[]"


def test_verify_finds_a_changed_byte(index):
    succeed("index", "compact", "--index", index)
    assert "3 documents" in succeed("index", "verify", "--index", index)
    segment = next(index.glob("segment-*"))
    content = bytearray(segment.read_bytes())
    content[-20] ^= 1
    segment.write_bytes(content)
    assert_one_clear_sentence(invoke("index", "verify", "--index", index), segment.name)


@pytest.mark.parametrize("command", ["add", "remove", "info", "verify", "compact"])
def test_a_missing_or_damaged_index_is_one_sentence(command, corpus, tmp_path):
    options = {"add": ["--data", corpus], "remove": ["a"]}.get(command, [])
    args = ("index", command, *options, "--index", tmp_path / "index")
    assert_one_clear_sentence(invoke(*args), f"there is no index in {tmp_path / 'index'}")
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "catalog.sqlite").write_text("[" * 200_000)
    assert_one_clear_sentence(invoke(*args), tmp_path / "index" / "catalog.sqlite")


def test_the_group_explains_itself():
    printed = succeed("index", "--help")
    for command in ("build", "add", "remove", "info", "verify", "compact"):
        assert command in printed
        assert "--index" in succeed("index", command, "--help")
    assert '"_id": "d1"' in " ".join(succeed("index", "build", "--help").replace("│", " ").split())
