from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby

import pytest
import torch

from pylate_flash.bench import retrieval
from pylate_flash.bench.protocol import Rounds
from pylate_flash.bench.retrieval import ROWS, Rough, Search
from pylate_flash.bench.suite import OURS, Unavailable

CPU = torch.device("cpu")
TINY = (
    Search("all", 3, 40, 4, 9, d=16, shortest=2),
    Search("subset", 3, 40, 4, 9, d=16, shortest=2, kind="subset"),
    Search("filter", 1, 40, 4, 9, d=16, shortest=2, kind="filter"),
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(retrieval, "SUBSET", 7)
    monkeypatch.setattr(retrieval, "KEPT", 5)
    monkeypatch.setattr(retrieval, "K", 12)


def best_by_hand(inputs, query):
    documents = torch.cat(list(inputs.corpus.blocks())).double().split(inputs.corpus.lengths.tolist())
    scores = torch.stack([(inputs.queries[query].double() @ one.T).amax(1).sum() for one in documents])
    if inputs.row.kind:
        scores = scores[inputs.among[query]]
    return scores.sort(descending=True).values[:12]


@pytest.mark.parametrize("row", TINY, ids=lambda row: row.name)
def test_systems_find_what_the_reference_does(row):
    inputs = retrieval.make_inputs(row, CPU, torch.float32)
    expected = inputs.reference()
    torch.testing.assert_close(expected, torch.stack([best_by_hand(inputs, i) for i in range(min(2, row.Nq))]))
    systems = {system.name: system for system in retrieval.suite().systems if system.peer is None}
    fewer = {f"{OURS}_{dtype}" for dtype in ("int8", "fp8", "residual4", "residual2")}
    assert set(systems) == {OURS, *fewer, f"{OURS}_operation"}
    for name, system in systems.items():
        if row.kind and name == f"{OURS}_operation":
            continue
        for candidate in system.candidates(inputs):
            found = candidate.read(candidate.call())
            assert isinstance(found, Rough) == (name in fewer)
            assert retrieval.error(found, expected) <= 2e-6


def test_scores_that_few_bits_do_not_explain_are_wrong():
    expected = torch.tensor([[2.0, 1.0]], dtype=torch.float64)
    assert retrieval.error(Rough(expected * 1.01, 0.02), expected) == 0
    assert retrieval.error(Rough(expected * 1.03, 0.02), expected) == math.inf
    assert retrieval.error([[1.0]], expected) == 0


def test_long_rows_are_timed_less_often():
    rounds = Rounds(10, 50)
    assert retrieval.rounds_of(ROWS[0], rounds) == rounds
    assert retrieval.rounds_of(next(row for row in ROWS if row.name == "400k-1000"), rounds).repetitions == 5


def test_what_a_store_on_the_disk_does_is_told():
    found = retrieval.store_on_disk(CPU, torch.float32, nbytes=1 << 20)
    rates = {f"{name}_gb_per_s" for name in ("added", "loaded", "streamed_for_1", "streamed_for_200")}
    assert set(found) == {"stored_gb", "opened_s", *rates}
    assert all(value > 0 for value in found.values())


def test_rows_of_a_corpus_have_the_same_documents_made_once() -> None:
    first, second = (retrieval.make_inputs(replace(TINY[0], Nq=number), CPU, torch.float32) for number in (1, 3))
    assert second.corpus is first.corpus
    assert second.corpus.documents.data_ptr() == first.corpus.documents.data_ptr()
    assert retrieval.make_inputs(replace(TINY[0], Nd=9), CPU, torch.float32).corpus is not first.corpus
    names = [row.name.rpartition("-")[0] for row in ROWS]
    assert len(list(groupby(names))) == len(set(names)) == len(retrieval.CORPORA)


def test_what_does_not_fit_is_kept_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = retrieval.make_inputs(TINY[0], CPU, torch.float32)
    index = retrieval.Corpus.index

    def refuse(self: retrieval.Corpus, dtype: str) -> object:
        if dtype == "float32":
            raise Unavailable("no room")
        return index(self, dtype)

    monkeypatch.setattr(retrieval.Corpus, "index", refuse)
    (candidate,) = inputs.ours()
    assert candidate.label == "Flat, int8"
    assert retrieval.error(candidate.read(candidate.call()), inputs.reference()) == 0
