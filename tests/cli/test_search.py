from __future__ import annotations

import io
import json
import os
import re
import shutil

import numpy as np
import pytest
from rich.console import Console

from pylate_flash import indexes, models
from pylate_flash.cli.common import UserError
from pylate_flash.cli.search import Hit, _read_queries, show
from pylate_flash.matches import Explanation, Token
from tests.cli.commands import assert_one_clear_sentence, invoke, succeed
from tests.stores import change_state

LONG = "a-long-name/" * 10 + "note.md"
TEXTS = {"cats": "cats and\tdogs", LONG: "planes, ships and trains", "tab\there": "bread and butter"}


@pytest.fixture(scope="module")
def index(tiny_colbert_path, tmp_path_factory):
    """An index of TEXTS, with its corpus in the same folder."""
    folder = tmp_path_factory.mktemp("searched")
    lines = (json.dumps({"_id": id_, "text": text}) + "\n" for id_, text in TEXTS.items())
    (folder / "corpus.jsonl").write_text("".join(lines))
    args = ("--data", folder / "corpus.jsonl", "--model", tiny_colbert_path, "--index", folder / "index")
    succeed("index", "build", *args, "--device", "cpu")
    return folder / "index"


@pytest.fixture
def queries(tmp_path):
    (tmp_path / "queries.jsonl").write_text(
        '{"_id": "animals", "text": "cats and dogs"}\n{"_id": "food", "text": "bread and butter"}\n'
    )
    return tmp_path / "queries.jsonl"


# Printed output


def test_a_pipe_gets_a_line_per_document_with_rank_score_id_and_text(index):
    lines = succeed("search", "planes, ships and trains", "--index", index).splitlines()
    assert len(lines) == 3
    fields = [line.split("\t") for line in lines]
    assert [rank for rank, *_ in fields] == ["1", "2", "3"]
    scores = [float(score) for _, score, *_ in fields]
    assert scores == sorted(scores, reverse=True)
    assert fields[0][2:] == [LONG, "planes, ships and trains"]
    assert {tuple(rest) for _, _, *rest in fields[1:]} == {
        ("cats", "cats and dogs"),
        (r"tab\there", "bread and butter"),
    }


def test_a_pipe_gets_no_texts_where_none_are_known(index, tmp_path):
    shutil.copytree(index, tmp_path / "elsewhere" / "index")
    change_state(tmp_path / "elsewhere" / "index", corpora=())
    lines = succeed("search", "trains", "--index", tmp_path / "elsewhere" / "index", "-k", 2).splitlines()
    assert [line.count("\t") for line in lines] == [2, 2]


def test_an_index_remembers_where_its_texts_are(tmp_path, tiny_colbert_path):
    folder = tmp_path / "here"
    (folder / "texts").mkdir(parents=True)
    (folder / "texts" / "one.txt").write_text("cats and dogs")
    (folder / "more.jsonl").write_text('{"_id": "two", "text": "planes and trains"}\n')
    args = ("--index", folder / "index", "--device", "cpu")
    printed = succeed("index", "--data", folder / "texts", "--model", tiny_colbert_path, *args)
    assert f'Next: pylate-flash search "..." --index {folder / "index"}\n' in printed
    succeed("index", "add", "--data", folder / "more.jsonl", *args)
    texts = {"one.txt\tcats and dogs", "two\tplanes and trains"}
    results = succeed("search", "cats", *args).splitlines()
    assert {line.split("\t", 2)[2] for line in results} == texts
    # Index and texts may be moved together.
    folder.rename(tmp_path / "there")
    moved_args = ("--index", tmp_path / "there" / "index", "--device", "cpu")
    assert succeed("search", "cats", *moved_args).splitlines() == results
    # Missing texts are reported, and the remaining ones shown.
    shutil.rmtree(tmp_path / "there" / "texts")
    result = invoke("search", "cats", *moved_args)
    assert result.exit_code == 0, result.output
    assert {line.split("\t", 2)[2] for line in result.stdout.splitlines()} == {"one.txt\t", "two\tplanes and trains"}
    assert f"Note: no texts are shown: there is no file {folder / 'texts'}" in result.stderr


def test_a_pipe_gets_the_beginning_of_texts_and_json_all_of_them(index, tmp_path):
    text = "word " * 100
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"_id": "cats", "text": text}) + "\n")
    arguments = ("search", "cats and dogs", "--index", index, "--data", tmp_path / "corpus.jsonl", "-k", 1)
    (line,) = succeed(*arguments).splitlines()
    assert line.split("\t")[3] == "word " * 47 + "..."
    (result,) = json.loads(succeed(*arguments, "--json"))["results"]
    assert result["text"] == text.strip()


def test_json_has_a_line_per_query_with_all_that_is_known(index, queries):
    (record,) = map(json.loads, succeed("search", "cats and dogs", "--index", index, "--json", "-k", 1).splitlines())
    (result,) = record["results"]
    assert (record["query"], result["rank"], result["id"]) == ("cats and dogs", 1, "cats")
    assert result["text"] == TEXTS["cats"]

    records = succeed("search", "--queries", queries, "--index", index, "--json", "-k", 1).splitlines()
    first, second = map(json.loads, records)
    assert (first["query_id"], first["query"], second["query_id"]) == ("animals", "cats and dogs", "food")
    assert first["results"][0]["score"] == pytest.approx(result["score"], rel=1e-5)
    assert second["results"][0]["id"] == "tab\there"


def test_a_terminal_gets_the_beginning_of_texts_and_whole_ids():
    screen = io.StringIO()
    results = [Hit(1, LONG, 12.345, "word " * 100), Hit(2, "\x1b[31mred", 1.0, None)]
    show(Console(file=screen, force_terminal=True, width=40, no_color=True), results, "two\nlines")
    lines = [line for line in screen.getvalue().replace("\x1b[0m", "").split("\n") if line.strip()]
    assert "two lines" in lines[0]
    assert LONG in lines[1]
    assert "12.35" in lines[1]
    assert all(len(line) <= 40 for line in lines[2:-1])
    assert lines[-2].rstrip().endswith("...")
    assert r"\x1b[31mred" in lines[-1]


# Several queries


def test_several_queries_find_what_each_of_them_finds(index, queries, tmp_path):
    plain = tmp_path / "queries.txt"
    plain.write_text("cats and dogs\n\nbread and butter\n")
    expected = [
        [line.split("\t")[2] for line in succeed("search", query, "--index", index).splitlines()]
        for query in ("cats and dogs", "bread and butter")
    ]
    for file, names in ((queries, ["animals", "food"]), (plain, ["1", "3"])):
        lines = succeed("search", "--queries", file, "--index", index).splitlines()
        actual = [line.split("\t") for line in lines]
        assert [fields[0] for fields in actual] == [name for name in names for _ in TEXTS]
        assert [[fields[3] for fields in actual[:3]], [fields[3] for fields in actual[3:]]] == expected


@pytest.mark.parametrize("arguments", [["-"], ["--queries", "-"]])
def test_queries_come_from_standard_input(index, arguments):
    result = invoke("search", *arguments, "--index", index, "-k", 1, input="cats and dogs\nplanes\n")
    assert result.exit_code == 0, result.output
    assert [line.split("\t")[0] for line in result.stdout.splitlines()] == ["1", "2"]


def test_more_queries_than_are_searched_together(index, queries, monkeypatch):
    arguments = ("search", "--queries", queries, "--index", index)
    expected = succeed(*arguments)
    monkeypatch.setattr("pylate_flash.cli.search._QUERIES_AT_A_TIME", 1)
    assert [line.split("\t")[3] for line in succeed(*arguments).splitlines()] == [
        line.split("\t")[3] for line in expected.splitlines()
    ]


# The model


def test_search_needs_no_model_and_says_what_it_loads(index, tiny_colbert_path):
    result = invoke("search", "trains", "--index", index)
    assert result.stderr == f"Loading the index in {index} ...\nLoading the model {tiny_colbert_path} ...\n"


def test_the_demo_needs_neither_index_nor_model(output, monkeypatch):
    flat = indexes.Flat(output, "index", device="cpu")
    flat.record_model(models.ColBERT(str(output / "model"), device="cpu"), name=output / "model")
    monkeypatch.chdir(output.parent)
    lines = succeed("search", "show a progress bar", "-k", 1).splitlines()
    best = lines[0].split("\t")
    corpus = [json.loads(line) for line in (output / "data" / "corpus.jsonl").read_text().splitlines()]
    assert " ".join(next(document["text"] for document in corpus if document["_id"] == best[2]).split()) == best[3]


def test_an_index_that_evaluate_keeps_names_its_model(beir, tmp_path, tiny_colbert_path):
    args = ("--model", tiny_colbert_path, "--device", "cpu", "--query-length", 8)
    succeed("evaluate", "--data", beir, "--index", tmp_path / "index", *args)
    assert succeed("search", "trains", "--index", tmp_path / "index")


def test_another_model_is_refused(index, other_colbert_path, minilm_path):
    result = invoke("search", "x", "--index", index, "--model", other_colbert_path)
    assert_one_clear_sentence(result, index, "is a different model", "weights")
    result = invoke("search", "x", "--index", index, "--model", minilm_path)
    assert_one_clear_sentence(result, minilm_path, "without a projection")


def test_an_index_that_names_no_model_asks_for_it(tmp_path, tiny_colbert_path):
    flat = indexes.Flat(tmp_path, "index", device="cpu")
    flat.add_documents(["a"], [np.eye(2, 32, dtype="float32")])
    result = invoke("search", "x", "--index", tmp_path / "index")
    assert_one_clear_sentence(result, tmp_path / "index", "does not record which model", "--model")
    assert "\ta\n" in succeed("search", "x", "--index", tmp_path / "index", "--model", tiny_colbert_path)


def test_an_index_of_hidden_states_is_refused(tmp_path, tiny_colbert_path):
    model = models.ColBERT(tiny_colbert_path, device="cpu")
    # Its hidden states and embeddings have the same size, so only the index's record distinguishes them.
    flat = indexes.Flat(tmp_path, "index", device="cpu", projection=model)
    flat.add_documents(["a"], [np.eye(2, 32, dtype="float32")])
    flat.record_model(model, tiny_colbert_path)
    assert_one_clear_sentence(invoke("search", "x", "--index", tmp_path / "index"), "hidden states", "projection=")


def test_a_model_that_has_moved_is_named(corpus_index, tmp_path):
    (tmp_path / "model").rename(tmp_path / "moved")
    result = invoke("search", "x", "--index", corpus_index)
    assert_one_clear_sentence(result, f"no longer exists in {tmp_path / 'model'}: name the model with --model")
    succeed("search", "x", "--index", corpus_index, "--model", tmp_path / "moved")


@pytest.fixture
def corpus_index(beir, tmp_path, tiny_colbert_path):
    """An index built with a model that a test may move."""
    shutil.copytree(tiny_colbert_path, tmp_path / "model")
    succeed("index", "--data", beir, "--model", tmp_path / "model", "--index", tmp_path / "index", "--device", "cpu")
    return tmp_path / "index"


# Wrong input


def test_search_names_what_is_missing(index, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_one_clear_sentence(
        invoke("search", "x"), "no index in index or demo-output/index", "pylate-flash demo", "--index"
    )
    assert_one_clear_sentence(invoke("search", "x", "--index", "no"), "no index in no", "pylate-flash index")
    args = ("--index", index)
    result = invoke("search", "x", *args, "--data", tmp_path)
    assert_one_clear_sentence(result, tmp_path, "neither a corpus.jsonl nor")
    assert_one_clear_sentence(invoke("search", "x", *args, "--data", tmp_path / "no"), "no file", tmp_path / "no")
    assert_one_clear_sentence(invoke("search", *args), "either QUERY or --queries")
    assert_one_clear_sentence(invoke("search", "x", "--queries", "q.txt", *args), "not both")
    assert_one_clear_sentence(invoke("search", "--queries", "q.txt", *args), "no file q.txt")


@pytest.mark.parametrize(
    ("query", "part"), [("", "empty"), (" \n", "empty"), ("caf\udce9", "UTF-8"), ("\ud800", "UTF-8")]
)
def test_a_query_that_is_no_text_is_one_sentence(index, query, part):
    assert_one_clear_sentence(invoke("search", query, "--index", index), "the query", part)


def test_arguments_are_utf_8_where_the_locale_is_ascii(index):
    """With an ASCII locale, Python decodes each non-ASCII byte to a surrogate."""
    bytes_ = "caf\udcc3\udca9"
    results = json.loads(succeed("search", bytes_, "--index", index, "--json"))
    assert results == json.loads(succeed("search", "caf\xe9", "--index", index, "--json"))
    assert results["query"] == "caf\xe9"
    result = invoke("search", "x", "--index", index, "--where", f"id = '{bytes_}' or nothing")
    assert_one_clear_sentence(result, "nothing")
    result = invoke("search", "x", "--index", index, "--model", bytes_)
    assert_one_clear_sentence(result, "--model 'caf\xe9'", "PYTHONUTF8=1")


def test_bytes_that_are_no_text_are_one_sentence(index, tmp_path):
    result = invoke("search", "-", "--index", index, input=b"good\ncaf\xe9\n")
    assert_one_clear_sentence(result, "standard input, line 2", "UTF-8")
    assert_one_clear_sentence(invoke("search", "-", "--index", index, input=""), "standard input holds no queries")


@pytest.mark.parametrize("line", [b"nonsense", b'{"_id": "x\\ud800", "text": "t"}', b'{"_id": "x", "text": "\xe9"}'])
def test_a_corpus_with_a_bad_line_is_one_sentence(index, tmp_path, line):
    (tmp_path / "corpus.jsonl").write_bytes(b'{"_id": "a", "text": "b"}\n' + line + b"\n")
    result = invoke("search", "x", "--index", index, "--data", tmp_path)
    assert_one_clear_sentence(result, "corpus.jsonl, line 2")


@pytest.mark.parametrize("content", [b"nonsense\n", b'{"_id": "x", "text": "\xe9"}\n', b"", b"PAR1\0\0"])
def test_a_corpus_that_happens_to_lie_beside_the_index_breaks_no_search(index, tmp_path, content):
    shutil.copytree(index, tmp_path / "index")
    (tmp_path / "corpus.jsonl").write_bytes(content)
    result = invoke("search", "trains", "--index", tmp_path / "index", "-k", 2)
    assert result.exit_code == 0, result.output
    assert [line.count("\t") for line in result.stdout.splitlines()] == [2, 2]
    note = result.stderr.splitlines()[-1]
    assert note.startswith(f"Note: no texts are shown: {tmp_path / 'corpus.jsonl'}")
    assert "--data" in note


def test_a_corpus_beside_the_index_that_cannot_be_opened_breaks_no_search(index, monkeypatch):
    def refuse(*arguments):
        raise PermissionError(13, "Permission denied", str(index.parent / "corpus.jsonl"))

    monkeypatch.setattr("pylate_flash.cli.indexing.Corpus", refuse)
    result = invoke("search", "trains", "--index", index, "-k", 1)
    assert result.exit_code == 0, result.output
    assert "Note: no texts are shown: " in result.stderr
    assert "Permission denied" in result.stderr


def test_a_standard_input_that_is_closed_is_one_sentence(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UserError, match="from standard input: it is closed"):
        _read_queries("-")


def test_texts_may_come_from_a_pipe(index, tmp_path):
    with open(index.parent / "corpus.jsonl") as file:
        printed = succeed("search", "cats", "--index", index, "--data", f"/dev/fd/{file.fileno()}")
    assert "\tcats\tcats and dogs\n" in printed
    read, write = os.pipe()
    os.write(write, (index.parent / "corpus.jsonl").read_bytes())
    os.close(write)
    try:
        assert succeed("search", "cats", "--index", index, "--data", f"/dev/fd/{read}") == printed
    finally:
        os.close(read)


def test_search_with_a_damaged_index_is_one_sentence(tmp_path):
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "catalog.sqlite").write_text("{" * 5000)
    assert_one_clear_sentence(invoke("search", "x", "--index", tmp_path / "index"), "catalog.sqlite")


def test_metadata_of_a_corpus_filter_a_search(tmp_path, tiny_colbert_path):
    lines = [
        {"_id": "a", "text": "cats", "metadata": {"year": 2019, "tags": ["x", "y"]}},
        {"_id": "b", "text": "dogs", "metadata": {"year": 2021, "lang": "en"}},
        {"_id": "c", "text": "planes", "metadata": None},
        {"_id": "d", "text": "trains"},
    ]
    corpus, index = tmp_path / "corpus.jsonl", tmp_path / "index"
    corpus.write_text("".join(json.dumps(line) + "\n" for line in lines))
    succeed("index", "--data", corpus, "--model", tiny_colbert_path, "--index", index, "--device", "cpu")
    lines[1]["metadata"], lines[3]["metadata"] = {"year": 1900}, {"year": 2030}
    corpus.write_text("".join(json.dumps(line) + "\n" for line in lines[1::2]))
    succeed("index", "add", "--data", corpus, "--index", index, "--device", "cpu", "--replace")

    def results(where):
        printed = succeed("search", "cats", "--where", where, "--index", index, "--json", "--device", "cpu")
        return sorted(result["id"] for result in json.loads(printed)["results"])

    assert results("year > 2000") == ["a", "d"]
    assert results("year is null") == ["c"]
    assert results("tags like '%\"y\"%'") == ["a"]
    result = invoke("search", "cats", "--where", "yeer > 2000", "--index", index, "--device", "cpu")
    assert_one_clear_sentence(result, "pylate-flash: --where: ", "no such column: yeer", "keys are", "year")
    assert "Loading the model" not in result.stderr, "a wrong filter costs the seconds that loading a model takes"


# Which tokens match


def test_explained_a_pipe_gets_a_line_per_token_of_the_query_whose_similarities_add_up(index):
    printed = succeed("search", "cats on trains", "--index", index, "-k", 2, "--explain", "--device", "cpu")
    assert "\x1b" not in printed
    fields = [line.split("\t") for line in printed.splitlines()]
    for rank in ("1", "2"):
        rows = [row for row in fields if row[0] == rank]
        assert len(rows) == 16, "the tokens of a query"
        assert sum(float(row[5]) for row in rows) == pytest.approx(float(rows[0][1]), abs=1e-4)
        assert [float(row[5]) for row in rows] == sorted((float(row[5]) for row in rows), reverse=True)
        assert {"cats", "on", "trains", "[MASK]"} <= {row[3] for row in rows}
        words = TEXTS[rows[0][2].replace(r"\t", "\t")].replace(",", "").split()
        assert {row[4] for row in rows} <= {*words, "[CLS]", "[SEP]", "[D] "}


def test_explained_json_says_where_in_the_text(index, queries):
    printed = succeed("search", "--queries", queries, "--index", index, "--explain", "--json", "--device", "cpu")
    for line in printed.splitlines():
        for result in json.loads(line)["results"]:
            matches = result["matches"]
            assert sum(match["similarity"] for match in matches) == pytest.approx(result["score"], abs=1e-5)
            for match in matches:
                if "start" in match:
                    assert result["text"][match["start"] : match["end"]] == match["word"]
            assert any("start" in match for match in matches)


@pytest.mark.parametrize("width", [80, 120])
def test_explained_a_terminal_marks_chosen_tokens_by_colour_and_weight(width):
    text = "Zwei cats\n\tand dogs " + "run and " * 30
    query = [Token("[CLS]"), Token("Cats", 0, 4), Token("dog", 5, 8), Token("[MASK]"), Token("[MASK]")]
    document = [Token("[CLS]"), Token("cats", 5, 9), Token("and", 11, 14), Token("dogs", 15, 19), Token("run", 20, 23)]
    choices = [(0, 0.9), (1, 1.0), (3, 0.5), (1, 0.8), (2, 0.8)]
    explanation = Explanation("an id", 4.0, query, document, choices)
    terminal = Console(width=width, force_terminal=True, color_system="truecolor", file=io.StringIO(), _environ={})
    show(terminal, [Hit(1, "an id", 4.0, text, explanation)], "Cats dog")
    printed = terminal.file.getvalue()
    first, second = "\x1b[1;36m", "\x1b[2;35m"
    assert printed.startswith("\x1b[36mCats\x1b[0m \x1b[35mdog\x1b[0m\n"), "the query's tokens in their colours"
    assert f"Zwei {first}cats\x1b[0m \x1b[2;4mand\x1b[0m {second}dogs\x1b[0m\x1b[2m ...\x1b[0m" in printed
    plain = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", printed).splitlines()]
    assert max(map(len, plain)) <= width
    assert re.split("  +", plain[3].strip()) == ["Cats 1.00", "dog → dogs 0.50", "[CLS] 0.90", "[MASK] x 2 1.60"]


def test_explained_without_texts_tokens_have_numbers(index, tmp_path):
    shutil.copytree(index, tmp_path / "elsewhere" / "index")
    change_state(tmp_path / "elsewhere" / "index", corpora=())
    printed = succeed("search", "cats", "--index", tmp_path / "elsewhere" / "index", "-k", 1, "--explain")
    assert all(re.fullmatch("#[0-9]+", line.split("\t")[4]) for line in printed.splitlines())


def test_a_text_that_is_not_the_one_that_was_indexed_is_not_explained(index, tmp_path):
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"_id": id_, "text": ""}) + "\n" for id_ in TEXTS))
    result = invoke("search", "trains", "--index", index, "--data", tmp_path, "--explain")
    assert_one_clear_sentence(result, "--explain: texts: ", "is not the text that was encoded: it has 3 tokens")


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ("x", "line 1: \"metadata\" must be an object, got 'x'"),
        ({"#id": 3}, "the document 'a': metadata: '#id' cannot be a key"),
        ({"n": 1e400}, "the document 'a': metadata[0]['n'] is inf"),
    ],
)
def test_wrong_metadata_of_a_corpus_are_one_sentence(tmp_path, tiny_colbert_path, metadata, said):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"_id": "a", "text": "cats", "metadata": metadata}) + "\n")
    index = ("--index", tmp_path / "index", "--device", "cpu")
    assert_one_clear_sentence(invoke("index", "--data", corpus, "--model", tiny_colbert_path, *index), said)
    assert not (tmp_path / "index").exists()
