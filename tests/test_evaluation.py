"""BEIR folders, retrieval metrics, and evaluators that follow the model's scorer flag."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pylate.evaluation
import pylate.models
import pytest
import torch

from pylate_flash import beir, evaluation, models, register, registered, scores, unregister
from pylate_flash.encoding.texts import encode
from pylate_flash.evaluation import evaluate_retrieval, load_beir_folder
from tests.stores import small

CORPUS = [
    {"_id": "d1", "title": "First", "text": "one"},
    {"_id": "d2", "title": "", "text": "two"},
    {"_id": "d3", "text": "three"},
    {"_id": "d4", "title": None, "text": ""},
]
QUERIES = [{"_id": "q1", "text": "a"}, {"_id": "q2", "text": "b"}, {"_id": "unjudged", "text": "c"}]
QRELS = "query-id\tcorpus-id\tscore\nq2\td1\t1\nq1\td3\t2\nq1\td2\t1\n"


def write_folder(path: Path, corpus=CORPUS, queries=QUERIES, qrels: str = QRELS) -> Path:
    (path / "qrels").mkdir(parents=True)
    for name, records in (("corpus.jsonl", corpus), ("queries.jsonl", queries)):
        (path / name).write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    (path / "qrels" / "test.tsv").write_text(qrels, encoding="utf-8")
    return path


# BEIR folders


@pytest.mark.parametrize("header", [True, False])
def test_load_beir_folder(tmp_path: Path, header: bool) -> None:
    qrels = QRELS if header else QRELS.partition("\n")[2]
    documents, queries, judgements = load_beir_folder(write_folder(tmp_path, qrels=qrels))
    assert documents == [
        {"id": "d1", "text": "First one"},
        {"id": "d2", "text": "two"},
        {"id": "d3", "text": "three"},
        {"id": "d4", "text": ""},
    ]
    assert list(queries.items()) == [("q2", "b"), ("q1", "a")]
    assert judgements == {"q2": {"d1": 1}, "q1": {"d3": 2, "d2": 1}}


def test_load_beir_folder_takes_what_editors_leave(tmp_path: Path) -> None:
    write_folder(tmp_path, qrels="q1\td1\t1\r\n\r\nq1\td1\t1\r\n")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(b"\xef\xbb\xbf" + corpus.read_bytes() + b"\n\n")
    documents, _, qrels = load_beir_folder(tmp_path)
    assert [document["id"] for document in documents] == ["d1", "d2", "d3", "d4"]
    assert qrels == {"q1": {"d1": 1}}


@pytest.mark.parametrize(
    ("file", "line", "text", "message"),
    [
        ("corpus.jsonl", 2, '{"_id": 2, "text": ""}', '"_id" must be a string, got 2'),
        ("queries.jsonl", 1, "q1", "not valid JSON"),
        ("queries.jsonl", 2, '{"_id": "q1", "text": ""}', r"""the "_id" 'q1' was given before"""),
        ("qrels/test.tsv", 2, "q1 d1 1", r"expected query id, .* tab-separated; got 1 field\(s\)"),
        ("qrels/test.tsv", 2, "q1\t0\td1\t1", r"got 4 field\(s\)"),
        ("qrels/test.tsv", 2, "q1\td1\thigh", "the relevance must be an integer, got 'high'"),
        ("qrels/test.tsv", 2, "q1\td1\t1.0", "the relevance must be an integer, got '1.0'"),
        ("qrels/test.tsv", 2, "q1\td1\t" + "1" * 23, "the relevance must be an integer of at most 9 digits, got '1"),
        ("qrels/test.tsv", 1, "q1\td1\t" + "1" * 23, "the relevance must be an integer of at most 9 digits, got '1"),
        ("qrels/test.tsv", 1, "q1\td1\t0.5", "the relevance must be an integer, got '0.5'"),
        ("qrels/test.tsv", 1, "q1\td1\t", "the relevance must be an integer, got ''"),
        ("qrels/test.tsv", 1, "query-id\tcorpus-id\t ", "the relevance must be an integer, got ' '"),
        ("qrels/test.tsv", 1, "q1\td1\thigh", "the relevance must be an integer, got 'high'"),
        ("qrels/test.tsv", 3, "q9\td1\t1", r"query 'q9' is not in queries\.jsonl"),
        ("qrels/test.tsv", 3, "q1\td9\t1", r"document 'd9' is not in corpus\.jsonl"),
        ("qrels/test.tsv", 4, "q1\td3\t1", "document 'd3' is judged 1 for query 'q1', but was judged 2 before"),
    ],
)
def test_a_malformed_line_is_one_error_with_file_and_line(
    tmp_path: Path, file: str, line: int, text: str, message: str
) -> None:
    path = write_folder(tmp_path) / file
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[line - 1] = text
    path.write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message) as caught:
        load_beir_folder(tmp_path)
    assert str(caught.value).startswith(f"{path}, line {line}: ")


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a BEIR folder .* missing corpus\.jsonl, queries\.jsonl, qrels"):
        load_beir_folder(tmp_path)
    write_folder(tmp_path)
    with pytest.raises(ValueError, match=r"split 'dev'.*missing qrels/dev\.tsv; splits found: test"):
        load_beir_folder(tmp_path, split="dev")
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n")
    with pytest.raises(ValueError, match=r"test\.tsv holds no judgements"):
        load_beir_folder(tmp_path)
    (tmp_path / "corpus.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"corpus\.jsonl is empty"):
        load_beir_folder(tmp_path)


def test_cranfield_loads(cranfield: Path) -> None:
    documents, queries, qrels = load_beir_folder(cranfield)
    assert (len(documents), len(queries), len(qrels)) == (1400, 225, 225)
    assert sum(map(len, qrels.values())) == 1612
    assert documents[0]["text"].startswith("experimental investigation of the aerodynamics of a wing in a slipstream .")


# Retrieval


class OneHot:
    """A model whose texts list the dimension of each one-hot token, so that scores are chosen by hand."""

    def __init__(self, **flags: str) -> None:
        self.encoded: list[str] = []
        for name, value in flags.items():
            setattr(self, name, value)

    def encode(self, sentences: list[str], is_query: bool, batch_size: int, show_progress_bar: bool) -> list:
        self.encoded += sentences
        return [np.eye(8, dtype=np.float32)[[int(token) for token in text.split()]] for text in sentences]


DOCUMENTS = [
    {"id": "a", "text": "0"},
    {"id": "b", "text": "0 1"},
    {"id": "c", "text": "0 1 2"},
    {"id": "d", "text": "3"},
]
# q1 ranks c (3), b (2), a (1), d (0); q2 ranks d (1), then a, b, c (0 each) in the order of insertion.
TEXTS = {"q1": "0 1 2", "q2": "3", "unjudged": "0"}
JUDGED = {"q1": {"c": 1, "a": 2}, "q2": {"b": 1}}
METRICS = {
    "q1": {
        "ndcg@10": (1 / math.log2(2) + 2 / math.log2(4)) / (2 / math.log2(2) + 1 / math.log2(3)),
        "map": (1 / 1 + 2 / 3) / 2,
        "recall@100": 1.0,
        "mrr@10": 1.0,
    },
    "q2": {"ndcg@10": 1 / math.log2(4), "map": 1 / 3, "recall@100": 1.0, "mrr@10": 1 / 3},
}


def evaluated(model: Any = None, documents: list = DOCUMENTS, queries: dict = TEXTS, qrels: dict = JUDGED, **options):
    return evaluate_retrieval(model or OneHot(), documents, queries, qrels, **options, show_progress=False)


@pytest.mark.parametrize("scorer", ["pylate_flash", "torch"])
def test_metrics_are_those_of_a_ranking_worked_out_by_hand(scorer: str) -> None:
    model = OneHot(scorer=scorer)
    with mock.patch.object(scores, "colbert_scores", wraps=scores.colbert_scores) as theirs:
        result = evaluated(model)
    assert result.scorer == scorer
    assert theirs.called == (scorer == "torch")
    ranked = {query_id: "".join(r["id"] for r in actual) for query_id, actual in result.run.items()}
    assert ranked == {"q1": "cbad", "q2": "dabc"}
    for name in ("ndcg@10", "map", "recall@100", "mrr@10"):
        expected = {query_id: METRICS[query_id][name] for query_id in JUDGED}
        assert result.per_query[name] == pytest.approx(expected)
        assert result.metrics[name] == pytest.approx(sum(expected.values()) / 2)
    assert list(result.timings) == [
        "encode_documents", "index", "encode_queries", "search", "prepare_metrics", "metrics"
    ]  # fmt: skip
    assert "0" not in model.encoded[len(DOCUMENTS) :]


@pytest.mark.parametrize("relevant", ["a", "m", "z"])
def test_equal_scores_count_in_the_order_of_insertion(relevant: str) -> None:
    ids = ["m", "a", "z", *(f"x{i}" for i in range(40))]
    documents = [{"id": id_, "text": "0"} for id_ in ids]
    result = evaluated(None, documents, {"q": "0"}, {"q": {relevant: 1}}, metrics=["mrr"])
    assert result.metrics == {"mrr": pytest.approx(1 / (1 + ids.index(relevant)))}


def test_a_query_that_finds_nothing_relevant_counts_as_zero() -> None:
    documents = [{"id": "a", "text": "0"}, {"id": "b", "text": "1"}]
    qrels = {"q1": {"b": 1}, "q2": {"b": 1}}
    result = evaluated(None, documents, {"q1": "0", "q2": "1"}, qrels, k=1, metrics=["map"])
    assert result.per_query == {"map": {"q1": 0.0, "q2": 1.0}}
    assert result.metrics == {"map": 0.5}


def test_a_filled_index_is_searched_without_encoding_again(tmp_path: Path) -> None:
    index = small(tmp_path)
    first = evaluated(index=index)
    assert len(index) == 4
    model = OneHot()
    second = evaluated(model, index=index, scorer="torch")
    assert model.encoded == ["0 1 2", "3"]
    assert (first.scorer, second.scorer, index.scorer) == ("pylate_flash", "torch", "pylate_flash")
    assert second.run == first.run
    assert second.metrics == first.metrics
    assert list(second.timings) == ["encode_queries", "search", "prepare_metrics", "metrics"]
    with pytest.raises(ValueError, match="holds 4 documents that are not the 3 documents to evaluate on"):
        evaluated(documents=DOCUMENTS[:3], index=index)


@pytest.mark.parametrize("batch_size", [0, "32"])
def test_a_wrong_batch_size_is_named_before_anything_is_encoded(batch_size: Any) -> None:
    model = OneHot()
    with pytest.raises((TypeError, ValueError), match="^batch_size must be"):
        evaluated(model, batch_size=batch_size)
    with pytest.raises((TypeError, ValueError), match="^batch_size must be"):
        beir.add_encoded(mock.Mock(), [{"id": "a", "text": "text"}], mock.Mock(side_effect=AssertionError), batch_size)
    assert model.encoded == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scorer": "fast"}, "scorer must be one of .* got 'fast'"),
        ({"k": 0, "metrics": ["map"]}, "k must be at least 1, got 0"),
        ({"k": "100"}, "k must be an integer, got str"),
        ({"documents": [*DOCUMENTS, DOCUMENTS[1]]}, "documents: 'b' is given twice"),
    ],
)
def test_a_wrong_argument_of_the_search_is_named_before_anything_is_encoded(arguments: dict, message: str) -> None:
    model = OneHot()
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        evaluated(model, **arguments)
    assert model.encoded == []


def test_queries_that_are_encoded_already_are_searched_with(tmp_path: Path) -> None:
    first = evaluated(index=tmp_path / "index")
    model = OneHot()
    embeddings = encode(model, [TEXTS[query_id] for query_id in JUDGED], is_query=True)
    model.encoded.clear()
    index = small(tmp_path)
    second = evaluated(model, index=index, queries_embeddings=embeddings)
    assert model.encoded == []
    assert (second.run, second.metrics) == (first.run, first.metrics)
    with pytest.raises(ValueError, match="queries_embeddings: 1; expected 2, one per query of qrels"):
        evaluated(model, index=index, queries_embeddings=embeddings[:1])


def test_metrics_are_compiled_once_for_ids_of_any_length(capsys: pytest.CaptureFixture[str]) -> None:
    event = pytest.importorskip("numba.core.event")
    beir.prepare_metrics.cache_clear()
    beir.prepare_metrics(show_progress=True)
    beir.prepare_metrics(show_progress=True)
    assert capsys.readouterr().err == "Loading the metrics of ranx, which compiles them once ...\n"
    long, longer = "d" * 37, "e" * 41
    with event.install_recorder("numba:compile") as recorder:
        run = {"q1": [{"id": longer, "score": 2.0}, {"id": long, "score": 1.0}], "query 2": []}
        means, per_query = beir.evaluate_run(run, {"q1": {long: 1}, "query 2": {longer: 3}}, beir.METRICS)
    assert recorder.buffer == []
    assert per_query["mrr@10"] == {"q1": 0.5, "query 2": 0.0}
    assert means["map"] == 0.25


@pytest.mark.parametrize(
    ("run", "qrels", "metrics", "message"),
    [
        # Counting the only relevant document twice would give a recall of 2.
        ({"q": ["d", "e", "d"]}, {"q": {"d": 1}}, ["recall@10"], "run: query 'q' has document 'd' more than once"),
        ({"p": ["d"]}, {"q": {"d": 1}}, ["map"], "run has no list for query 'q' of qrels"),
        ({"q": ["d"]}, {}, ["map"], "qrels must hold at least one query"),
        ({"q": ["d"]}, {"q": {"d": 1}}, "map", "metrics must be a list of at least one name, got 'map'"),
        ({"q": ["d"]}, {"q": {"d": 1}}, [], "metrics must be a list of at least one name"),
        ({"q": ["d"]}, {"q": {"d": 1}}, [1], r"metrics must be a list of at least one name, got \[1\]"),
        ({"q": ["d"]}, {"q": {"d": "1"}}, ["map"], r"qrels\['q'\]\['d'\] must be a finite number, got '1'"),
        ({"q": ["d"]}, {"q": {"d": 1}}, ["accuracy"], "'accuracy' is not a metric of ranx"),
    ],
)
def test_a_run_that_cannot_be_evaluated_is_an_error(run, qrels, metrics, message: str) -> None:
    results = {query_id: [{"id": id_, "score": 1.0} for id_ in ids] for query_id, ids in run.items()}
    with pytest.raises(ValueError, match=message):
        evaluation.evaluate_run(results, qrels, metrics)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"documents": None}, 'documents must be a list of dictionaries with "id" and "text", got NoneType'),
        ({"documents": [{"_id": "a", "text": ""}]}, r'documents\[0\] must be .* strings for "id" and "text", got {'),
        ({"documents": [{"id": "a"}]}, r'documents\[0\] must be .* strings for "id" and "text", got {'),
        ({"documents": [{"id": "a", "text": None}]}, r'documents\[0\] must be .* strings for "id" and "text", got {'),
        ({"queries": ["q1"]}, "queries must be a dictionary of texts by id, got list"),
        ({"queries": {"q1": None, "q2": ""}}, r"queries\['q1'\] must be a string, got None"),
        ({"qrels": ["q1"]}, "qrels must be a dictionary of judgements by query id, got list"),
        ({"qrels": {"q1": ["a"]}}, r"qrels\['q1'\] must be a dictionary of relevances by document id, got \['a'\]"),
        ({"index": 1}, "index must be a Flat, a folder or None, got int"),
        ({"queries_embeddings": [1, 2]}, r"queries_embeddings\[0\] must be an array or tensor of numbers, got int"),
    ],
)
def test_arguments_of_another_form_are_named_before_anything_is_encoded(arguments: dict, message: str) -> None:
    model = OneHot()
    with (
        mock.patch.object(model, "encode", side_effect=AssertionError),
        pytest.raises(TypeError, match=f"^{message}"),
    ):
        evaluated(model, **arguments)


def test_results_of_another_form_are_named() -> None:
    def refused(message: str, function: Callable, *arguments: Any) -> None:
        with pytest.raises(TypeError, match=f"^{message}"):
            function(*arguments)

    hits, qrels = [{"id": 1}], {"q": {1: 1}}
    assert evaluation.evaluate_run({"q": hits}, qrels, ["map"])[0] == {"map": 1.0}
    assert evaluation.recall_of([hits], [hits], 1) == 1.0
    refused("run must be a dictionary of results by query id, got list", evaluation.evaluate_run, [hits], qrels)
    refused(
        r"run\['q'\] must be a list of dictionaries with \"id\", got dict",
        evaluation.evaluate_run, {"q": {"a": 0.5}}, qrels,
    )  # fmt: skip
    refused(r"results\[0\]\[0\] must be a dictionary with \"id\", got {", evaluation.recall_of, [[{}]], [hits], 1)
    refused("exact must be a list of results of each query, got NoneType", evaluation.recall_of, [hits], None, 1)
    refused(
        r"documents\[0\] must be a dictionary with strings .*, got 1",
        beir.add_encoded, mock.Mock(), [1], mock.Mock(side_effect=AssertionError),
    )  # fmt: skip


def test_recall_is_of_a_whole_number_of_documents() -> None:
    exact = [[{"id": "d", "score": 1.0}]]
    with pytest.raises(ValueError, match=r"k must be an integer of at least 1 and at most 1, .* got 1\.0"):
        evaluation.recall_of(exact, exact, k=1.0)


@pytest.mark.parametrize(
    "error", ["RuntimeError('cannot cache function: no locator available')", "PermissionError(13, 'no', '/home/.ir')"]
)
def test_where_ranx_can_keep_nothing_the_error_says_what_to_set(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a user without a home directory and with read-only packages; raised by Numba and by ir_datasets."""
    (tmp_path / "ranx.py").write_text(f"raise {error}\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "ranx"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    message = r"evaluate_run needs ranx, which cannot write .*: set NUMBA_CACHE_DIR and IR_DATASETS_HOME .*(cach|/home)"
    with pytest.raises(RuntimeError, match=message):
        evaluation.evaluate_run({"q": []}, {"q": {"d": 1}})


def test_an_index_folder_is_built_once_and_never_overwritten(tmp_path: Path) -> None:
    evaluated(index=tmp_path / "index")
    assert small(tmp_path).documents_ids == ["a", "b", "c", "d"]
    with pytest.raises(ValueError, match="already holds an index of 4 documents"):
        evaluated(index=tmp_path / "index")


def test_an_index_remembers_the_model_and_another_one_is_refused(tiny_colbert_path: str, tmp_path: Path) -> None:
    model = models.ColBERT(tiny_colbert_path, device="cpu")
    index = small(tmp_path)
    evaluated(model, index=index)
    index = small(tmp_path)
    assert index.model is not None
    evaluated(model, index=index)
    next(model.parameters()).data.view(-1)[:1].add_(1e-3)
    with pytest.raises(ValueError, match="was built with the model .* differs in weights"):
        evaluated(model, index=index)


def test_documents_are_indexed_in_steps_of_bounded_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(beir, "ADDITION_BYTES", 100)
    monkeypatch.setattr(beir, "_BATCHES_PER_STEP", 1)
    index = small(tmp_path)
    with mock.patch.object(index, "add_documents", wraps=index.add_documents) as add:
        evaluated(index=index, batch_size=1)
    # 32 bytes per token: 1 + 2 tokens are below 100 bytes, 1 + 2 + 3 are not.
    assert [call.args[0] for call in add.call_args_list] == [["a", "b", "c"], ["d"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metrics": ["recall@100"], "k": 10}, "'recall@100' needs 100 documents per query, but k is 10"),
        ({"metrics": ["accuracy"]}, "'accuracy' is not a metric of ranx"),
        ({"metrics": ["ndcg@ten"]}, "'ndcg@ten' is not a metric of ranx"),
        ({"metrics": ["ndcg@"]}, "'ndcg@' is not a metric of ranx"),
        ({"metrics": ["ndcg@-1"]}, "'ndcg@-1' is not a metric of ranx: its cutoff is below 0"),
        ({"metrics": ["rbp"]}, "'rbp' is not a metric of ranx: RBP requires persistence value"),
        ({"metrics": ["map-lx"]}, "'map-lx' is not a metric of ranx"),
        ({"metrics": iter(["map"])}, "metrics must be a list of at least one name, got <list_iterator"),
        ({"metrics": "ndcg"}, "metrics must be a list of at least one name, got 'ndcg'"),
        ({"qrels": {}}, "nothing to evaluate: 4 documents, 0 judged queries"),
        ({"documents": []}, "nothing to evaluate: 0 documents, 2 judged queries"),
        ({"qrels": {"q9": {"a": 1}}}, "query 'q9' is not in queries"),
        ({"qrels": {"q1": {"z": 1}}}, "document 'z' of query 'q1' is not in documents"),
        ({"qrels": {"q1": {"a": "1"}}}, r"qrels\['q1'\]\['a'\] must be a finite number, got '1'"),
        ({"qrels": {"q1": {"a": float("nan")}}}, r"qrels\['q1'\]\['a'\] must be a finite number, got nan"),
        ({"qrels": {"q1": {"a": -(10**400)}}}, r"qrels\['q1'\]\['a'\] must be a finite number, got -1000"),
        ({"scorer": "fast"}, "scorer must be one of .* got 'fast'"),
    ],
)
def test_refused_evaluations(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluated(**arguments)


def test_a_real_model_gives_the_same_metrics_by_both_scorers(tiny_colbert_path: str, tmp_path: Path) -> None:
    words = ["wing", "lift", "drag", "flow", "heat", "shock", "layer", "plate", "body", "speed"]
    documents = [{"id": f"d{i}", "text": " ".join(words[i % 10 :: 1 + i % 4])} for i in range(30)]
    queries = {f"q{i}": f"{words[i]} {words[i - 3]}" for i in range(6)}
    qrels = {f"q{i}": {f"d{i}": 1, f"d{i + 10}": 2} for i in range(6)}
    model = models.ColBERT(tiny_colbert_path, device="cpu")
    index = small(tmp_path)
    arguments = model, documents, queries, qrels
    results = [evaluated(*arguments, index=index, scorer=scorer, k=100) for scorer in ("torch", "pylate_flash")]
    rounded = [{name: round(value, 4) for name, value in result.metrics.items()} for result in results]
    assert rounded[0] == rounded[1]
    # An index with a projection stores hidden states, and returns the same results.
    index = small(tmp_path / "states", projection=model)
    results.append(evaluated(*arguments, index=index, k=100))
    assert results[2].metrics == pytest.approx(results[0].metrics, abs=1e-4)
    for query_id in queries:
        theirs, ours, from_states = (result.run[query_id] for result in results)
        np.testing.assert_allclose([r["score"] for r in theirs], [r["score"] for r in ours], rtol=1e-5)
        np.testing.assert_allclose([r["score"] for r in theirs], [r["score"] for r in from_states], rtol=1e-5)


# Evaluators


@pytest.fixture(scope="module")
def model(tiny_colbert_path: str) -> models.ColBERT:
    return models.ColBERT(tiny_colbert_path, device="cpu")


def triplet_evaluator(module):
    return module.ColBERTTripletEvaluator(["wing"], ["a wing"], ["a cow"], write_csv=False)


def distillation_evaluator(module):
    return module.ColBERTDistillationEvaluator(["wing"], [["a wing", "a cow"]], [[0.9, 0.1]], write_csv=False)


def retrieval_evaluator(module):
    return module.PyLateInformationRetrievalEvaluator(
        {"q": "wing"}, {"a": "a wing", "b": "a cow"}, {"q": {"a"}}, write_csv=False
    )


def nano_evaluator(module):
    rows = {
        "corpus": [{"_id": "a", "text": "a wing"}, {"_id": "b", "text": "a cow"}],
        "queries": [{"_id": "q", "text": "wing"}],
        "qrels": [{"query-id": "q", "corpus-id": "a"}],
    }
    with mock.patch("datasets.load_dataset", lambda path, name, split: rows[name]):
        return module.NanoBEIREvaluator(dataset_names=["scifact"], write_csv=False)


EVALUATORS = [triplet_evaluator, distillation_evaluator, retrieval_evaluator, nano_evaluator]


class Spy:
    """Counts the calls of this package's ops and of PyLate's own scoring functions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ours = self.theirs = 0
        for name in ("maxsim", "maxsim_pairwise", "maxsim_ragged_pairwise"):
            monkeypatch.setattr(scores, name, self.counting("ours", getattr(scores, name)))
        original = scores.original
        monkeypatch.setattr(scores, "original", lambda name: self.counting("theirs", original(name)))

    def counting(self, whose: str, function):
        def call(*args, **kwargs):
            setattr(self, whose, getattr(self, whose) + 1)
            return function(*args, **kwargs)

        return call


@pytest.mark.parametrize("make", EVALUATORS)
def test_evaluators_follow_the_flag_of_each_model(make, model: models.ColBERT, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator, result = make(evaluation), {}
    spy = Spy(monkeypatch)
    # One evaluator sees one flag after the other: state cached for the first must not affect the second.
    for flag in ("torch", "pylate_flash", "torch"):
        monkeypatch.setitem(model._model_config, "scorer", flag)
        spy.ours = spy.theirs = 0
        result[flag] = evaluator(model)
        assert (spy.ours > 0, spy.theirs > 0) == (flag == "pylate_flash", flag == "torch")
    assert result["torch"] == pytest.approx(result["pylate_flash"], abs=1e-5)


@pytest.mark.parametrize("make", EVALUATORS)
def test_evaluators_score_a_plain_pylate_model_by_this_package(
    make, tiny_colbert_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = pylate.models.ColBERT(tiny_colbert_path, device="cpu")
    expected = make(pylate.evaluation)(plain)
    spy = Spy(monkeypatch)
    assert make(evaluation)(plain) == pytest.approx(expected, abs=1e-5)
    assert spy.ours > 0
    assert spy.theirs == 0


@pytest.mark.parametrize("make", EVALUATORS)
def test_registered_evaluators_do_not_call_themselves(make, model: models.ColBERT) -> None:
    expected = make(evaluation)(model)
    with registered():
        evaluator = make(pylate.evaluation)
        assert type(evaluator).__module__ == "pylate_flash.evaluation"
        assert evaluator(model) == pytest.approx(expected)
    register()
    try:
        assert make(evaluation)(model) == pytest.approx(expected)
    finally:
        unregister()


def test_given_score_functions_are_kept(model: models.ColBERT) -> None:
    calls = []

    def reverse(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        calls.append(queries.shape)
        return -model.similarity(queries, documents)

    evaluator = evaluation.PyLateInformationRetrievalEvaluator(
        {"q": "wing"},
        {"a": "a wing", "b": "a cow"},
        {"q": {"a"}},
        score_functions={"reverse": reverse},
        write_csv=False,
    )
    assert all(name.startswith("reverse_") for name in evaluator(model) | evaluator(model))
    assert len(calls) == 2


def test_the_names_of_pylate_s_module_are_here() -> None:
    for name in pylate.evaluation.__all__:
        assert hasattr(evaluation, name), name
