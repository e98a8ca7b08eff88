"""`evaluate` on several collections, models and indexes, with a checkpoint that both libraries load."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import sys
from pathlib import Path

import pytest
import torch

from pylate_flash.beir import evaluate_run, load_beir_folder, recall_of
from pylate_flash.cli.against import Compared, check_systems, comparison_table, read_run, run_text, show_table
from pylate_flash.cli.collections import Collection, load_collections
from pylate_flash.cli.common import UserError
from pylate_flash.cli.models import load_model
from pylate_flash.encoding.texts import encode
from pylate_flash.indexes import Flat
from tests.cli.commands import assert_one_clear_sentence, invoke, succeed
from tests.pylate_checkpoint import WORDS

pytest.importorskip("ranx")
METRICS = ("ndcg@10", "map", "recall@100", "mrr@10")


def write_collection(folder, seed):
    generator = torch.Generator().manual_seed(seed)

    def text():
        length = int(torch.randint(2, 9, (), generator=generator))
        return " ".join(WORDS[int(i)] for i in torch.randint(len(WORDS), (length,), generator=generator))

    (folder / "qrels").mkdir(parents=True)
    documents = [{"_id": f"d{i}", "text": text()} for i in range(120)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents))
    queries = [{"_id": f"q{i}", "text": text()} for i in range(12)]
    (folder / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in queries))
    judged = [f"q{i}\td{int(j)}\t1\n" for i in range(12) for j in torch.randperm(120, generator=generator)[:5]]
    (folder / "qrels" / "test.tsv").write_text("".join(judged))
    return folder


@pytest.fixture(scope="module")
def collections(tmp_path_factory):
    folder = tmp_path_factory.mktemp("collections")
    return [write_collection(folder / name, seed) for seed, name in enumerate(("first", "second", "third"))]


def evaluate(model, *arguments, data):
    sources = [part for folder in data for part in ("--data", folder)]
    return succeed("evaluate", *sources, "--model", model, "--device", "cpu", *arguments)


def test_several_collections_in_one_command(collections, pylate_checkpoint, tmp_path):
    files = {name: tmp_path / f"all{name}" for name in (".json", ".trec", ".tsv", ".png")}
    options = ("--json", files[".json"], "--run", files[".trec"], "--per-query", files[".tsv"])
    printed = evaluate(pylate_checkpoint, *options, "--picture", files[".png"], data=collections)
    result = json.loads(files[".json"].read_text())
    values = [line.split("\t") for line in files[".tsv"].read_text().splitlines()]
    assert values[0] == ["collection", "query", *METRICS]
    assert len(values) == 1 + 3 * 12
    for folder, record in zip(collections, result["collections"], strict=True):
        assert (record["data"], record["documents"], record["queries"]) == (str(folder), 120, 12)
        (row,) = (line for line in printed.splitlines() if folder.name in line)
        assert [f"{record[name]:.4f}" for name in METRICS] == re.findall(r"[01]\.[0-9]{4}", row)
        # The run file has these metrics and the per-query values of the .tsv file.
        run = read_run(tmp_path / f"all-{folder.name}.trec")
        _, _, qrels = load_beir_folder(folder)
        assert {query_id: len(hits) for query_id, hits in run.items()} == dict.fromkeys(qrels, 100)
        means, per_query = evaluate_run(run, qrels, METRICS)
        assert {name: record[name] for name in METRICS} == pytest.approx(means)
        written = {row[1]: row[2:] for row in values if row[0] == folder.name}
        assert written == {query_id: [f"{per_query[name][query_id]:.6f}" for name in METRICS] for query_id in qrels}
    for name in METRICS:
        assert result["mean"][name] == pytest.approx(statistics.mean(one[name] for one in result["collections"]))
    (row,) = (line for line in printed.splitlines() if "mean" in line)
    assert [f"{result['mean'][name]:.4f}" for name in METRICS] == re.findall(r"[01]\.[0-9]{4}", row)
    assert all(len(line) <= 80 for line in printed.splitlines())
    assert files[".png"].read_bytes().startswith(b"\x89PNG")


def test_other_indexes_against_exact_search(collections, pylate_checkpoint, tmp_path):
    systems = ["int8", "fp8", str(tmp_path / "run.trec")]
    evaluate(pylate_checkpoint, "--run", tmp_path / "run.trec", data=collections[:1])
    options = ("--against", ",".join(systems), "--json", tmp_path / "a.json", "--picture", tmp_path / "a.svg")
    printed = evaluate(pylate_checkpoint, *options, data=collections[:1])
    actual = {row["system"]: row for row in json.loads((tmp_path / "a.json").read_text())["against"]}
    assert list(actual) == ["exact", "int8", "fp8", "run.trec"]
    # Reference: the same embeddings, searched directly in the index.
    documents, queries, qrels = load_beir_folder(collections[0])
    model = load_model(str(pylate_checkpoint), device="cpu")
    embeddings = encode(model, [document["text"] for document in documents], is_query=False)
    query_embeddings = encode(model, list(queries.values()), is_query=True)

    def search(dtype):
        index = Flat(None, dtype=dtype, device="cpu", show_progress=False)
        return index.add_documents([document["id"] for document in documents], embeddings)(query_embeddings, k=100)

    exact = search("float32")
    for dtype in ("int8", "fp8"):
        hits = search(dtype)
        means, _ = evaluate_run(dict(zip(qrels, hits, strict=True)), qrels)
        assert actual[dtype]["metrics"] == pytest.approx(means)
        expected = {f"exact@{depth}": recall_of(hits, exact, depth) for depth in (10, 100)}
        assert actual[dtype]["recall"] == pytest.approx(expected)
        # A row of 8 elements: a 16-byte header, and values padded to a multiple of 16 bytes.
        assert actual[dtype]["bytes_a_token"] == 16 + 16
    assert actual["exact"]["recall"] == actual["run.trec"]["recall"] == {"exact@10": 1, "exact@100": 1}
    assert actual["run.trec"]["metrics"] == pytest.approx(actual["exact"]["metrics"])
    assert actual["run.trec"]["build_seconds"] is None
    assert all(actual[name]["milliseconds_a_query"] > 0 for name in ("exact", "int8", "fp8"))
    picture = (tmp_path / "a.svg").read_text()
    assert picture.count("bytes per token, ") == 3
    for name, row in actual.items():
        (line,) = (line for line in printed.splitlines() if line.split()[:1] == [name])
        numbers = [row["metrics"]["ndcg@10"], row["metrics"]["recall@100"], *row["recall"].values()]
        assert line.split()[1:5] == [f"{number:.4f}" for number in numbers]
    assert all(len(line) <= 80 for line in printed.splitlines() if "metrics 0" not in line)


def test_a_narrow_terminal_cuts_no_number_and_no_name(capsys, monkeypatch):
    row = {"metrics": {"ndcg@10": 0.1234, "recall@100": 0.5678}, "recall": {10: 0.9, 100: 0.99}}
    monkeypatch.setenv("COLUMNS", "34")
    show_table(comparison_table([Compared("residual4+bfloat16", **row, bytes_a_token=12.5)], "title"))
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert all(len(line) <= 80 for line in printed.splitlines())
    first, second = printed.splitlines()[-2:]
    assert first.split() == ["residual4+bfl", "0.1234", "0.5678", "0.9000", "0.9900", "12.5"]
    assert second.split() == ["oat16"]


def test_plaid_against_exact_search(collections, pylate_checkpoint, tmp_path):
    pytest.importorskip("pylate")
    options = ("--against", "plaid", "--json", tmp_path / "a.json")
    evaluate(pylate_checkpoint, *options, data=collections[:1])
    exact, plaid = json.loads((tmp_path / "a.json").read_text())["against"]
    assert (exact["system"], plaid["system"]) == ("exact", "plaid")
    assert 0.3 < plaid["recall"]["exact@10"] <= 1
    assert 0 < plaid["metrics"]["ndcg@10"] <= 1
    assert plaid["build_seconds"] > 0
    assert plaid["bytes_a_token"] > 0


def test_models_of_several_seeds(collections, pylate_checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    for seed in (1, 2, 3):
        folder = shutil.copytree(pylate_checkpoint, tmp_path / f"seed-{seed}")
        weights = load_file(folder / "1_Dense" / "model.safetensors")
        generator = torch.Generator().manual_seed(seed)
        weights = {name: torch.randn(value.shape, generator=generator) for name, value in weights.items()}
        save_file(weights, folder / "1_Dense" / "model.safetensors", {"format": "pt"})
    options = ("--repeat", "1,2,3", "--json", tmp_path / "a.json")
    printed = evaluate(tmp_path / "seed-{seed}", *options, data=collections[:2])
    records = json.loads((tmp_path / "a.json").read_text())["collections"]
    runs = [("first", 1), ("second", 1), ("first", 2), ("second", 2), ("first", 3), ("second", 3)]
    assert [(Path(record["data"]).name, record["seed"]) for record in records] == runs
    assert [record["model"] for record in records[::2]] == [str(tmp_path / f"seed-{seed}") for seed in (1, 2, 3)]
    for name in ("first", "second"):
        values = [record["ndcg@10"] for record in records if Path(record["data"]).name == name]
        assert len(set(values)) == 3
        row, deviations = printed.partition(f"\n {name}")[2].splitlines()[:2]
        assert f" {statistics.mean(values):.4f}" in row
        assert "± 3 seeds" in deviations
        assert f" {statistics.stdev(values):.4f}" in deviations


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--repeat", "1,x"), "--repeat expects distinct integer seeds, separated by commas, got '1,x'"),
        (("--repeat", "1,2,01"), "got '1,2,01'"),
        (("--repeat", "1" * 5000), "--repeat expects distinct integer seeds"),
        (("--repeat", "1,2"), "must contain {seed}"),
        (("--index", "index", "--data", "second"), "--index keeps the index of one model and one --data"),
        (("--against", "int7"), "--against int7: expected plaid, a run file, or a storage type of our index"),
        (("--against", "no/run.trec"), "--against: there is no file no/run.trec"),
        (("--against", "beir"), "--against: beir is a folder; expected a file"),
        (("--run", "no/run.trec"), "--run: there is no folder no"),
        (("--picture", "a.doc"), "--picture a.doc must end in .png, .svg or .pdf"),
        (("--data", "beir/../beir"), "two collections are named 'beir'; give each one once"),
    ],
)
def test_what_cannot_be_evaluated_is_one_sentence(options, part, pylate_checkpoint, beir, monkeypatch):
    monkeypatch.chdir(beir.parent)
    arguments = ("evaluate", "--data", "beir", "--model", pylate_checkpoint, "--device", "cpu")
    assert_one_clear_sentence(invoke(*arguments, *options), part)


def test_residual_codes_that_cannot_be_trained_are_refused_before_any_work(pylate_checkpoint, beir, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastkmeans", None)
    monkeypatch.setattr("pylate_flash.cli.evaluate.load_model", None)
    result = invoke("evaluate", "--data", beir, "--model", pylate_checkpoint, "--against", "int8,residual2")
    assert_one_clear_sentence(result, "--against residual2 needs fastkmeans", "pylate-flash[residual]")


def test_a_run_is_of_one_collection_and_of_its_queries(tmp_path):
    (tmp_path / "run.trec").write_text("q1 Q0 d1 1 2.5 name\n")
    matching, other = (Collection("name", "data", [], {}, {query_id: {"d1": 1}}) for query_id in ("q1", "q2"))
    assert check_systems(str(tmp_path / "run.trec"), [matching])
    with pytest.raises(UserError, match="is a run of one collection, but --data names 2"):
        check_systems(str(tmp_path / "run.trec"), [matching, other])
    with pytest.raises(UserError, match=r"run\.trec has no results for any query of name"):
        check_systems(str(tmp_path / "run.trec"), [other])


def test_what_is_written_replaces_neither_what_is_read_nor_each_other(beir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.trec").write_text("q1 Q0 d1 1 2.5 name\n")
    Path("link.json").symlink_to(beir / "corpus.jsonl")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for options, message in (
        (("--json", "beir/corpus.jsonl"), "--json beir/corpus.jsonl is the file of --data"),
        (("--json", "link.json"), "--json link.json is the file of --data"),
        (("--run", "beir/qrels/test.tsv"), "--run beir/qrels/test.tsv is the file of --data"),
        (("--against", "int8,run.trec", "--run", "run.trec"), "--run run.trec is the file of --against"),
        (("--run", "new", "--json", "beir/../new"), "--json beir/../new is the file of --run"),
    ):
        assert_one_clear_sentence(invoke("evaluate", "--data", "beir", "--model", "m", *options), message)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--run", "all.trec"), "--run: all-second.trec is a folder; expected a file"),
        (("--run", "r.trec", "--json", "r-first.trec"), "--run r-first.trec is the file of --json"),
        (("--run", "pipe"), "--run writes one file per collection and seed, so it must be a file name, got pipe"),
    ],
)
def test_the_run_of_every_collection_is_checked_before_any_work(
    options, message, collections, pylate_checkpoint, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pylate_flash.cli.evaluate.load_model", None)
    Path("all-second.trec").mkdir()
    os.mkfifo("pipe")
    sources = ("--data", collections[0], "--data", collections[1])
    result = invoke("evaluate", *sources, "--model", pylate_checkpoint, *options)
    assert_one_clear_sentence(result, message)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all-second.trec", "pipe"]


def test_the_run_of_a_seed_does_not_replace_what_is_compared(collections, pylate_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pylate_flash.cli.evaluate.load_model", None)
    for seed in (1, 2):
        Path(f"seed-{seed}").symlink_to(pylate_checkpoint)
    Path("r-first-2.trec").write_text("q1 Q0 d1 1 2.5 name\n")
    options = ("--repeat", "1,2", "--against", "int8, r-first-2.trec", "--run", "r.trec")
    result = invoke("evaluate", "--data", collections[0], "--model", "seed-{seed}", *options)
    assert_one_clear_sentence(result, "--run r-first-2.trec is the file of --against; choose another one")


def test_a_run_cannot_hold_ids_with_blanks(beir, pylate_checkpoint, tmp_path):
    with (beir / "corpus.jsonl").open("a") as lines:
        lines.write('{"_id": "a name", "text": "cats"}\n')
    result = invoke("evaluate", "--data", beir, "--model", pylate_checkpoint, "--run", tmp_path / "run.trec")
    assert_one_clear_sentence(
        result, "--run: the id 'a name' of beir contains whitespace, which a TREC run cannot hold"
    )


def test_runs_are_read_by_score_and_written_as_they_are_read(tmp_path):
    path = tmp_path / "run.trec"
    path.write_text("q1 Q0 d1 2 1.5 x\nq1\tQ0\td2\t1\t2.5\tx\n\nq2 Q0 d1 1 -1e3 x\n")
    run = read_run(path)
    assert run == {"q1": [{"id": "d2", "score": 2.5}, {"id": "d1", "score": 1.5}], "q2": [{"id": "d1", "score": -1e3}]}
    path.write_text(run_text(run))
    assert read_run(path) == run
    for line in ("q1 Q0 d1 1", "q1 Q0 d1 1 high x", "q1 Q0 d1 1 nan x", "q1 Q0 d 1 1 2.5 x"):
        path.write_text(f"q1 Q0 d2 1 2.5 x\n{line}\n")
        with pytest.raises(ValueError, match=r"run\.trec, line 2: expected query id, Q0, document id, rank, score"):
            read_run(path)
    path.write_text("q1 Q0 d2 1 2.5 x\nq2 Q0 d2 1 2.5 x\nq1 Q0 d2 2 1.5 x\n")
    with pytest.raises(ValueError, match=r"run\.trec, line 3: query 'q1' has document 'd2' more than once"):
        read_run(path)


def test_recall_of():
    def lists(*names):
        return [[{"id": id_, "score": -float(rank)} for rank, id_ in enumerate(one)] for one in names]

    exact = lists("abcd", "efgh")
    assert recall_of(exact, exact, 4) == 1
    # Neither the order within the top k nor anything after it counts.
    assert recall_of(lists("badc", "fehg"), exact, 2) == 1
    assert recall_of(lists("axbc", "xyef"), exact, 2) == 0.25
    assert recall_of(lists("", "e"), exact, 4) == 0.125
    for result, k, message in (
        (exact[:1], 2, "lists of the same queries, got 1 and 2"),
        (exact, 5, "at most 4"),
        (exact, 0, "at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            recall_of(result, exact, k)


# Downloaded collections


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pylate-flash" / "beir"


def test_a_beir_collection_is_fetched_once_and_may_have_parts(cache, monkeypatch):
    util = pytest.importorskip("beir.util")
    fetched = []

    def download(url, folder):
        fetched.append(url)
        for part in ("android", "wordpress"):
            write_collection(Path(folder) / "cqadupstack" / part, 0)

    monkeypatch.setattr(util, "download_and_unzip", download)
    for _ in range(2):
        result = load_collections(["beir:cqadupstack"], "test")
        assert [collection.name for collection in result] == ["android", "wordpress"]
        assert all(len(collection.documents) == 120 for collection in result)
    assert fetched == ["https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets/cqadupstack.zip"]


def test_a_collection_that_cannot_be_fetched_is_one_sentence(cache, monkeypatch):
    util = pytest.importorskip("beir.util")

    def download(url, folder):
        Path(folder, "scifact.zip").write_bytes(b"half of it")
        write_collection(Path(folder, "scifact"), 0)
        raise error

    monkeypatch.setattr(util, "download_and_unzip", download)
    error: BaseException = OSError("no route to host")
    with pytest.raises(UserError, match="--data beir:scifact could not be downloaded: OSError: no route to host"):
        load_collections(["beir:scifact"], "test")
    error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        load_collections(["beir:scifact"], "test")
    assert list(cache.iterdir()) == [], "what a next call would take for the collection"


def test_nanobeir_is_all_of_its_collections_or_one(pylate_checkpoint, tmp_path, monkeypatch):
    import datasets

    tables = {
        "corpus": [{"_id": "d1", "text": "cats"}, {"_id": "d2", "text": ""}],
        "queries": [{"_id": "q1", "text": "dogs"}],
        "qrels": [{"query-id": "q1", "corpus-id": "d1"}],
    }
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, subset: ["NanoFEVER", "NanoSciFact"])
    monkeypatch.setattr(datasets, "load_dataset", lambda name, subset, split: tables[subset])
    result = load_collections(["nanobeir"], "test")
    assert [collection.name for collection in result] == ["NanoFEVER", "NanoSciFact"]
    evaluate(pylate_checkpoint, "--index", tmp_path / "i", data=["nanobeir:SciFact"])
    assert Flat(tmp_path, "i", device="cpu").corpora == [], "there is no file of this name"
    (one,) = load_collections(["nanobeir:SciFact"], "test")
    assert one == (
        *("NanoSciFact", "nanobeir:SciFact"),
        *([{"id": "d1", "text": "cats"}], {"q1": "dogs"}, {"q1": {"d1": 1}}),
    )

    def fail(*arguments, **options):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match="--data nanobeir:SciFact could not be downloaded: ConnectionError: offline"):
        load_collections(["nanobeir:SciFact"], "test")
