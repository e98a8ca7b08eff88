"""The same commands and checkpoint, in an environment with PyLate and in one with sentence-transformers 6."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from pylate_flash.cli.common import UserError
from pylate_flash.cli.models import PYLATE, SENTENCE_TRANSFORMERS, check_encoding_host, host_of, load_model
from pylate_flash.cli.training.run import DistinctTexts
from pylate_flash.encoding.texts import encode
from pylate_flash.hosts import HOSTS
from tests.cli.commands import CPU, HERE, assert_one_clear_sentence, invoke, succeed, train, trained, write_lines

TEXTS = {"d1": "cats and dogs", "d2": "planes and old trains", "d3": "bread and butter .", "d4": "red cats"}


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "beir" / "corpus.jsonl"
    path.parent.mkdir()
    return write_lines(path, *({"_id": id_, "text": text} for id_, text in TEXTS.items()))


@pytest.fixture
def checkpoint(pylate_checkpoint, tmp_path):
    """A checkpoint that a test may modify."""
    return shutil.copytree(pylate_checkpoint, tmp_path / "model")


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def scores_by_hand(model, query, **lengths):
    loaded = load_model(str(model), device="cpu", **lengths)
    (tokens,) = encode(loaded, [query], is_query=True)
    documents = encode(loaded, list(TEXTS.values()), is_query=False)
    similarities = (torch.as_tensor(tokens).double() @ torch.as_tensor(document).double().T for document in documents)
    scores = (similarity.max(dim=1).values.sum().item() for similarity in similarities)
    return sorted(zip(TEXTS, scores, strict=True), key=lambda pair: -pair[1])


def test_index_and_search_with_the_lengths_that_were_asked_for(corpus, pylate_checkpoint, tmp_path):
    lengths = {"query_length": 6, "document_length": 5}
    options = [str(part) for name, value in lengths.items() for part in (f"--{name.replace('_', '-')}", value)]
    args = ("--index", tmp_path / "index")
    result = invoke("index", "--data", corpus, "--model", pylate_checkpoint, *args, *CPU, *options)
    assert result.exit_code == 0, result.output
    # A document's tokens are [CLS], a marker, its words and [SEP].
    assert "Note: 3 of the first 4 documents are longer than 5 tokens and are truncated" in result.stderr
    (record,) = map(json.loads, succeed("search", "old cats", *args, *CPU, "--json", "-k", 3).splitlines())
    expected = scores_by_hand(pylate_checkpoint, "old cats", **lengths)[:3]
    assert [actual["id"] for actual in record["results"]] == [id_ for id_, _ in expected]
    assert [actual["score"] for actual in record["results"]] == pytest.approx(
        [score for _, score in expected], rel=1e-5
    )
    (tmp_path / "more.jsonl").write_text('{"_id": "d9", "text": "old planes"}\n')
    assert "holds 5" in succeed("index", "add", "--data", tmp_path / "more.jsonl", *args, *CPU)


def test_evaluate_agrees_with_the_librarys_own_scorer(corpus, pylate_checkpoint, tmp_path):
    pytest.importorskip("ranx")
    folder = corpus.parent
    (folder / "queries.jsonl").write_text('{"_id": "q1", "text": "old trains"}\n{"_id": "q2", "text": "butter"}\n')
    (folder / "qrels").mkdir()
    (folder / "qrels" / "test.tsv").write_text("q1\td1\t1\nq2\td3\t1\nq2\td4\t1\n")
    record = tmp_path / "metrics.json"
    printed = succeed(
        *("evaluate", "--data", folder, "--model", pylate_checkpoint, "--compare-torch", "--json", record, *CPU),
        *("--index", tmp_path / "index"),
    )
    assert f"torch ({HOSTS[HERE].about.title})" in printed
    metrics = json.loads(record.read_text())
    assert metrics["agreement"]["holds"]
    ranks = [[id_ for id_, _ in scores_by_hand(pylate_checkpoint, query)] for query in ("old trains", "butter")]
    first = min(ranks[1].index(id_) for id_ in ("d3", "d4"))
    expected = (1 / (1 + ranks[0].index("d1")) + 1 / (1 + first)) / 2
    assert metrics["mrr@10"] == pytest.approx(expected)
    assert succeed("search", "old trains", "--index", tmp_path / "index", "-k", 1).startswith("1\t")


def test_train_mine_and_train_again(pylate_checkpoint, tmp_path):
    rows = [{"query": f"{text} new", "positive": text, "url": "x"} for text in TEXTS.values()]
    pairs = write_lines(tmp_path / "pairs.jsonl", *rows)
    options = ("--max-steps", 2, "--batch-size", 2, "--lr", 1e-3)
    first, second, mined = tmp_path / "first", tmp_path / "second", tmp_path / "mined.jsonl"
    printed = trained(pairs, pylate_checkpoint, first, *options).stdout
    assert "contrastive loss, scorer pylate_flash, cpu" in printed
    assert "truncated to 8 and 12 tokens" in printed
    assert json.loads((first / "config_sentence_transformers.json").read_text())["scorer"] == "pylate_flash"
    result = invoke("mine", "--data", pairs, "--model", first, "--output", mined, "--num-negatives", 2, *CPU)
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith(f"Loading {pairs} ...\nLoading the model {first} ...\n")
    assert f"{mined} holds 4 lines with 2 negatives each from the 4 texts of {pairs}\nNext: " in result.stdout
    assert "note: unused keys: 'url'" in result.stderr
    for row, line in zip(rows, map(json.loads, mined.read_text().splitlines()), strict=True):
        assert list(line) == ["query", "positive", "negative_1", "negative_2"]
        assert (line["query"], line["positive"]) == (row["query"], row["positive"])
        assert {line["negative_1"], line["negative_2"]} <= set(TEXTS.values()) - {row["positive"]}
    printed = trained(mined, first, second, *options, "--loss", "cached").stdout
    # Every line contains three of the four texts.
    assert "2 hard negatives per query, 2 negatives including in-batch ones on average; " in printed
    assert "\n2 steps of 1 lines on average, 0.5 epochs\n" in printed


def test_mine_knows_a_positive_by_its_text_alone(pylate_checkpoint, tmp_path):
    """Despite other surrounding whitespace, and with a title in the corpus."""
    pairs, documents, out = tmp_path / "pairs.jsonl", tmp_path / "corpus.jsonl", tmp_path / "out.jsonl"
    pairs.write_text('{"query": "cats", "positive": " red cats "}\n{"query": "dogs", "positive": "blue dogs\\n"}\n')
    rows = [
        {"_id": "d1", "title": "cats", "text": "red cats"},
        {"_id": "d2", "text": "  blue dogs "},
        {"_id": "d3", "title": "blue", "text": " "},
        {"_id": "d4", "text": " "},
    ]
    write_lines(documents, *rows)
    mine = ("mine", "--data", pairs, "--model", pylate_checkpoint, *CPU, "--output", out, "--num-negatives")
    succeed(*mine, 2, "--corpus", documents)
    first, second = ("cats", "red cats"), ("dogs", "blue dogs")
    results = {(row.pop("query"), row.pop("positive")): set(row.values()) for row in map(json.loads, out.open())}
    # The first pair has no third negative: "cats red cats" is its positive.
    assert results == {first: {"blue dogs", "blue"}, second: {"cats red cats", "blue"}}
    assert_one_clear_sentence(invoke(*mine, 3, "--corpus", documents, "--overwrite"), "no pair has 3 negatives")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="it is a disk that is full")
def test_mine_says_that_the_disk_is_full(pylate_checkpoint, corpus, tmp_path):
    (tmp_path / "pairs.jsonl").write_text('{"query": "cats", "positive": "dogs"}\n')
    mine = ("mine", "--data", tmp_path / "pairs.jsonl", "--corpus", corpus, "--model", pylate_checkpoint, *CPU)
    result = invoke(*mine, "--output", "/dev/full")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == "pylate-flash: --output: No space left on device"


@pytest.mark.parametrize("loss", ["contrastive", "cached"])
def test_train_sees_all_lines_where_positives_repeat(loss, pylate_checkpoint, tmp_path, monkeypatch):
    """With the numbers of epochs and batches, and the batch size, that the output states."""
    rows = [{"query": f"cats {i}", "positive": f"dogs {i % 2}"} for i in range(12)]
    data = write_lines(tmp_path / "pairs.jsonl", *rows)
    batches: list[list[int]] = []
    iterate = DistinctTexts.__iter__

    def seen(self):
        for batch in iterate(self):
            batches.append(batch)
            yield batch

    monkeypatch.setattr(DistinctTexts, "__iter__", seen)
    result = trained(data, pylate_checkpoint, tmp_path / "out", "--loss", loss, "--batch-size", 8, "--epochs", 2)
    assert "0 hard negatives per query, 1 negatives including in-batch ones on average; " in result.stdout
    assert "\n12 steps of 2 lines on average, 2 epochs\n" in result.stdout
    assert "\nnote: some texts repeat, and lines that share a text are never in the same batch" in result.stdout
    assert "an epoch has 6 batches instead of 2\n" in result.stdout
    assert "step 10 of 12" in result.stderr
    assert [len(batch) for batch in batches] == [2] * 12
    assert all(len({rows[line]["positive"] for line in batch}) == 2 for batch in batches)
    for epoch in (batches[:6], batches[6:]):
        assert sorted(line for batch in epoch for line in batch) == list(range(12))
    assert batches[:6] != batches[6:]


def test_train_refuses_lines_that_all_share_a_text(pylate_checkpoint, tmp_path):
    data = write_lines(tmp_path / "pairs.jsonl", *({"query": f"cats {i}", "positive": "dogs"} for i in range(4)))
    result = train(data, pylate_checkpoint, tmp_path / "out")
    assert_one_clear_sentence(result, f"any two lines of {data} share a text", "no negatives to learn from")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("answers", [200, 30, 1])
def test_batches_are_those_of_the_host(answers):
    """Every epoch has as many batches as the first: extra ones are dropped, missing ones repeat from the start."""
    try:
        from sentence_transformers.base.sampler import NoDuplicatesBatchSampler
    except ImportError:
        from sentence_transformers.sampler import NoDuplicatesBatchSampler

    generator = torch.Generator().manual_seed(0)
    chosen = (torch.rand(200, generator=generator) ** 2 * answers).int().tolist()
    lines = Dataset.from_dict({"query": [f"q{i % 150}" for i in range(200)], "positive": [f"p{i}" for i in chosen]})
    ours = DistinctTexts(lines, 8, generator=torch.Generator())
    theirs = NoDuplicatesBatchSampler(lines, 8, False, generator=torch.Generator())
    lengths = set()
    for epoch in range(6):
        ours.set_epoch(epoch)
        theirs.set_epoch(epoch)
        expected = list(theirs)
        lengths.add(len(expected))
        if epoch == 0:
            assert len(ours) == len(expected)
        assert list(ours) == (expected + expected)[: len(ours)]
    # The host's number of batches varies only if some texts repeat more often than others.
    assert len(lengths) > 1 or answers == 1


@pytest.mark.parametrize("answers", [1, 3])
def test_batches_of_many_lines_that_share_a_few_texts(answers):
    """As many batches as lines of the most common text; a pass over all lines for each batch would never finish."""
    lines = Dataset.from_dict(
        {"query": [f"q{i}" for i in range(60_000)], "positive": [f"p{i % answers}" for i in range(60_000)]}
    )
    batches = list(DistinctTexts(lines, 8))
    assert len(batches) == 60_000 // answers
    assert sorted(line for batch in batches for line in batch) == list(range(60_000))
    assert all(len({line % answers for line in batch}) == len(batch) == answers for batch in batches)


def test_mine_keeps_its_hands_off_other_files(corpus, pylate_checkpoint, tmp_path, monkeypatch):
    pairs, out = tmp_path / "pairs.jsonl", tmp_path / "out.jsonl"
    pairs.write_text('{"query": "cats", "positive": "dogs"}\n')
    out.write_text("mine")
    before = {path: path.read_bytes() for path in (pairs, out, corpus)}
    mine = ("mine", "--data", pairs, "--model", pylate_checkpoint, *CPU, "--output")
    assert_one_clear_sentence(invoke(*mine, out), out, "--overwrite replaces it")
    assert_one_clear_sentence(invoke(*mine, pairs, "--overwrite"), "is the file of --data")
    for source in (corpus, corpus.parent):
        assert_one_clear_sentence(invoke(*mine, corpus, "--corpus", source, "--overwrite"), "is the file of --corpus")
    assert_one_clear_sentence(invoke(*mine, tmp_path / "no" / "out"), "--output: there is no folder", tmp_path / "no")
    assert_one_clear_sentence(invoke(*mine, tmp_path / "new", "--relative-margin", 1), "--relative-margin must be")
    assert_one_clear_sentence(invoke(*mine, tmp_path / "new", "--max-score", "nan"), "--max-score must be a finite")
    assert_one_clear_sentence(invoke(*mine, out, "--overwrite"), "no pair has 3 negatives", "nothing was written")

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pylate_flash.negatives.mine_hard_negatives", interrupted)
        assert invoke(*mine, out, "--overwrite").exit_code == 130
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["beir", "out.jsonl", "pairs.jsonl"]

    result = invoke(*mine, "/dev/stdout", "--corpus", corpus)
    assert [len(json.loads(line)) for line in result.stdout.splitlines()] == [5]
    assert "/dev/stdout holds 1 line with 3 negatives each" in result.stderr
    result = invoke(*mine, out, "--overwrite", "--corpus", corpus, "--max-score", 7.9, "--num-negatives", 4)
    assert result.exit_code == 0, result.output
    assert len(json.loads(out.read_text())) == 6
    pairs.write_text(pairs.read_text() + '{"query": "butter .", "positive": "red cats"}\n')
    result = invoke(*mine, out, "--overwrite", "--corpus", corpus, "--num-negatives", 4)
    assert "\nLeft out: 1 pair with fewer negatives within the bounds\n" in result.stdout


@pytest.mark.parametrize("config", [{"model_type": "ColBERT"}, {"model_type": "SentenceTransformer"}, {}])
def test_what_both_load_goes_to_the_one_that_is_there(config, checkpoint):
    (checkpoint / "config_sentence_transformers.json").write_text(json.dumps(config))
    assert host_of(str(checkpoint)) == HERE


def test_a_multi_vector_encoder_goes_to_sentence_transformers(checkpoint, corpus, tmp_path, monkeypatch):
    change(checkpoint / "config_sentence_transformers.json", model_type="MultiVectorEncoder")
    if HERE == SENTENCE_TRANSFORMERS:
        assert host_of(str(checkpoint)) == HERE
        return
    for command in (
        ("index", "--data", corpus, "--index", tmp_path / "index"),
        ("mine", "--data", corpus, "--output", tmp_path / "out"),
        ("train", "--data", corpus, "--output", tmp_path / "out"),
    ):
        if command[0] != "index":
            corpus.write_text('{"query": "cats", "positive": "dogs"}\n{"query": "a", "positive": "cats"}\n')
        result = invoke(*command, "--model", checkpoint)
        assert_one_clear_sentence(
            result,
            f"the model in {checkpoint} is a MultiVectorEncoder of sentence-transformers 6, which is not installed",
            'pip install "pylate-flash[sentence-transformers]", in a separate environment, as PyLate',
        )
    assert not (tmp_path / "index").exists()
    assert not (tmp_path / "out").exists()


def test_where_both_are_there_the_checkpoint_decides(checkpoint, monkeypatch):
    class There:
        def is_there(self):
            return True

        def check(self, needed_by):
            pass

    for name in (PYLATE, SENTENCE_TRANSFORMERS):
        monkeypatch.setitem(HOSTS, name, There())
    assert host_of(str(checkpoint)) == PYLATE
    change(checkpoint / "config_sentence_transformers.json", model_type="MultiVectorEncoder")
    assert host_of(str(checkpoint)) == SENTENCE_TRANSFORMERS


def test_a_module_that_only_pylate_has_names_its_extra(checkpoint, monkeypatch):
    modules = json.loads((checkpoint / "modules.json").read_text())
    modules[1]["type"] = "pylate.models.Other"
    (checkpoint / "modules.json").write_text(json.dumps(modules))
    if HERE == PYLATE:
        assert host_of(str(checkpoint)) == PYLATE
        return
    with pytest.raises(UserError, match=r"has the module pylate.models.Other, .* pip install \"pylate-flash\[pylate\]"):
        host_of(str(checkpoint))


def test_some_library_is_here():
    check_encoding_host("this test")
