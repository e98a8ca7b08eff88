from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby

import pytest
import torch

from pylate_flash.bench import retrieval
from pylate_flash.bench.retrieval import ROWS, Rough, Search
from pylate_flash.bench.suite import Unavailable

CPU = torch.device("cpu")
TINY = Search("all", 3, 40, 4, 9, d=16, shortest=2)


@pytest.mark.parametrize("kind", ["", "subset", "filter"])
def test_the_reference_is_the_best_scores_of_the_documents_that_are_asked(kind, monkeypatch):
    for name, value in (("SUBSET", 7), ("KEPT", 5), ("K", 12), ("BLOCK", 30)):
        monkeypatch.setattr(retrieval, name, value)
    inputs = retrieval.make_inputs(replace(TINY, kind=kind), CPU, torch.float32)
    documents = torch.cat(list(inputs.corpus.blocks())).double().split(inputs.corpus.lengths.tolist())
    for query, result, among in zip(inputs.queries.double(), inputs.reference(), inputs.among, strict=False):
        scores = torch.stack([(query @ document.T).amax(1).sum() for document in documents])
        scores = scores[among] if kind else scores
        torch.testing.assert_close(result, scores.sort(descending=True).values[:12])


def test_scores_that_few_bits_do_not_explain_are_wrong():
    expected = torch.tensor([[2.0, 1.0]], dtype=torch.float64)
    assert retrieval.error(Rough(expected * 1.01, 0.02), expected) == 0
    assert retrieval.error(Rough(expected * 1.03, 0.02), expected) == math.inf
    assert retrieval.error([[1.0]], expected) == 0


def test_what_a_store_on_the_disk_does_is_told():
    result = retrieval.store_on_disk(CPU, torch.float32, nbytes=1 << 20)
    rates = {f"{name}_gb_per_s" for name in ("added", "loaded", "streamed_for_1", "streamed_for_200")}
    assert set(result) == {"stored_gb", "opened_s", *rates}
    assert all(value > 0 for value in result.values())


def test_rows_of_a_corpus_have_the_same_documents_made_once():
    first, second = (retrieval.make_inputs(replace(TINY, Nq=number), CPU, torch.float32) for number in (1, 3))
    assert second.corpus is first.corpus
    assert second.corpus.documents.data_ptr() == first.corpus.documents.data_ptr()
    assert retrieval.make_inputs(replace(TINY, Nd=9), CPU, torch.float32).corpus is not first.corpus
    names = [row.name.rpartition("-")[0] for row in ROWS]
    assert len(list(groupby(names))) == len(set(names)) == len(retrieval.CORPORA)


def test_what_does_not_fit_is_kept_in_8_bits(monkeypatch):
    inputs = retrieval.make_inputs(TINY, CPU, torch.float32)
    index = retrieval.Corpus.index

    def refuse(self, dtype):
        if dtype == "float32":
            raise Unavailable("no room")
        return index(self, dtype)

    monkeypatch.setattr(retrieval.Corpus, "index", refuse)
    (candidate,) = inputs.ours()
    assert candidate.label == "Flat, int8"
    assert retrieval.error(candidate.read(candidate.call()), inputs.reference()) == 0
