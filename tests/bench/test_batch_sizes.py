"""The batch size experiment at a tiny size: what is packed, what is trained, and how it is evaluated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("pylate")

from sklearn.metrics import ndcg_score

import batch_sizes
import pylate_flash
from pylate_flash import demo, evaluation
from tests.tiny_demo import TINY

SETTINGS = replace(TINY, documents=20, queries=6, pairs=16)


@pytest.fixture(scope="module")
def archive(tiny_colbert_path, tmp_path_factory):
    path = tmp_path_factory.mktemp("batch-sizes") / "data.tar.gz"
    batch_sizes.pack(path, str(Path(tiny_colbert_path).parent / "bert"), SETTINGS)
    return path


def test_a_run_that_is_in_both_comparisons_is_made_once():
    result = batch_sizes.runs((2, 4, 16), steps=4, examples=16, seeds=(1, 2))
    assert len(result) == len(set(result)) == 10
    assert {(run.batch_size, run.steps) for run in result} == {(2, 4), (4, 4), (16, 4), (2, 8), (16, 1)}
    assert [run.examples for run in result] == sorted((run.examples for run in result), reverse=True)
    with pytest.raises(ValueError, match="examples: 16; expected a multiple of every batch size, 3 among them"):
        batch_sizes.runs((4, 3), 4, 16, (1,))


def test_the_experiment_is_one_of_full_batches():
    for batch_size in batch_sizes.BATCH_SIZES:
        assert batch_sizes.SETTINGS.pairs % batch_size == 0
    sizes = (batch_sizes.BATCH_SIZES, batch_sizes.STEPS, batch_sizes.EXAMPLES, batch_sizes.SEEDS)
    assert len(batch_sizes.runs(*sizes)) == 15


def test_what_is_packed_is_the_text_and_the_encoder_in_half(archive, tiny_colbert_path):
    corpus = SETTINGS.build_corpus()
    encoder = str(Path(tiny_colbert_path).parent / "bert")
    with batch_sizes.unpacked(archive) as folder:
        documents, queries, _ = evaluation.load_beir_folder(folder)
        limit = SETTINGS.document_length
        assert [entry["text"] for entry in documents] == [
            " ".join(entry.text.split()[:limit]) for entry in corpus.documents
        ]
        assert list(queries.values()) == [entry.query for entry in corpus.queries]
        packed, full = (batch_sizes.load(Path(path), SETTINGS).cpu() for path in (folder, encoder))
    texts = [entry.text for entry in corpus.train][:4]
    actual, expected = (
        torch.cat(model.encode(texts, is_query=False, convert_to_tensor=True)) for model in (packed, full)
    )
    assert actual.dtype == torch.float32
    assert 0 < (actual - expected).norm() <= 1e-2 * expected.norm()
    vectors = packed[0].auto_model.embeddings.word_embeddings.weight
    assert len(vectors.unique(dim=0)) < len(vectors) // 2, "tokens that no text has share a vector"


def test_ndcg_of_one_right_document():
    scores = torch.tensor([[3.0, 2.0, 1.0], [1.0, 1.0, 1.0], [0.0, 5.0, 4.0]])
    expected = (1.0 + 1.0 / torch.log2(torch.tensor(3.0)).item() + 0.5) / 3
    assert batch_sizes.ndcg(scores, torch.tensor([0, 1, 0])) == pytest.approx(expected)
    assert batch_sizes.ndcg(torch.arange(20.0).unsqueeze(0), torch.tensor([5])) == 0.0


def test_a_model_that_has_diverged_finds_nothing():
    assert batch_sizes.ndcg(torch.full((2, 20), torch.nan), torch.tensor([0, 5])) == 0.0


def test_what_is_evaluated_are_the_scores_of_the_test_split(archive, monkeypatch):
    inputs = []
    ndcg = batch_sizes.ndcg
    monkeypatch.setattr(batch_sizes, "ndcg", lambda *arguments: inputs.append(arguments) or ndcg(*arguments))
    with batch_sizes.unpacked(archive) as folder:
        colbert = batch_sizes.load(folder, SETTINGS)
        actual = batch_sizes.evaluate(colbert, folder)
        documents, queries, qrels = evaluation.load_beir_folder(folder)
    ((scores, right),) = inputs
    judged = torch.tensor([[qrels[query].get(document["id"], 0) for document in documents] for query in queries])
    assert judged.shape == scores.shape == (6, 20)
    assert actual == pytest.approx(ndcg_score(judged.numpy(), scores.cpu().numpy(), k=10), abs=1e-9)
    assert 0.0 < actual < 1.0
    query, document = list(queries.values())[2], documents[right[2]]["text"]
    embedded = [colbert.encode([text], is_query=text is query, convert_to_tensor=True)[0] for text in (query, document)]
    torch.testing.assert_close(scores[2, right[2]], pylate_flash.maxsim(*(e[None] for e in embedded))[0, 0])


def test_trainings_differ_in_nothing_else(archive, tmp_path, monkeypatch):
    monkeypatch.setattr(batch_sizes, "MINI_BATCH_TOKENS", 128)
    *longer, shortest = batch_sizes.runs((4, 8), steps=2, examples=16, seeds=(1,))
    output = tmp_path / "out" / "result.json"
    compared = {"steps": 2, "examples": 16}
    batch_sizes.train_all(archive, [*longer, shortest, shortest], SETTINGS, output, 1, compared)
    result = json.loads(output.read_text(encoding="utf-8"))
    trained = result["runs"]
    results = [(run["batch_size"], run["steps"], run["examples"]) for run in trained]
    assert results == [(4, 2, 8), (4, 2, 8), (4, 4, 16), (8, 2, 16)]
    assert result["planned"] == 4
    assert result["compared"] == compared
    # Initialized from the same seed, and not trained yet.
    assert len({run["ndcg@10_before"] for run in trained}) == 1
    assert trained[0]["loss"] == trained[1]["loss"]
    assert trained[0]["ndcg@10"] == trained[1]["ndcg@10"]
    for run in trained:
        steps, values = zip(*run["loss"], strict=True)
        assert steps[-1] == run["steps"]
        assert len(set(values)) == len(values), "the model must change"


def test_the_packed_settings_are_the_demos():
    full = replace(demo.FULL, pairs=batch_sizes.SETTINGS.pairs)
    assert full == batch_sizes.SETTINGS
