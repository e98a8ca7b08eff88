from __future__ import annotations

import os
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from pylate_flash.bench import varlen
from pylate_flash.bench.exact import relative_error
from pylate_flash.bench.rerank import scores_by_id
from pylate_flash.bench.rows import Row
from pylate_flash.bench.suite import Unavailable
from pylate_flash.bench.varlen import Arrays
from tests.bench import stand_ins

CPU = torch.device("cpu")
ONE = Row("one", 1, 9, 4, 11, d=16, shortest=3)
SEVERAL = Row("several", 3, 70, 5, 11, d=16, shortest=3)
RERANK = Arrays("rerank", 3, 4, 5, 11, d=16, shortest=3)


def by_hand(queries, documents):
    """The definition, a pair at a time."""
    return torch.stack(
        [
            torch.stack([(query.double() @ document.double().T).amax(1).sum() for document in documents])
            for query in queries
        ]
    )


def unpacked(inputs):
    """The queries and the documents of packed inputs, one by one."""
    queries, documents, of_queries, of_documents = inputs.packed()
    return queries.split(of_queries.diff().tolist()), documents.split(of_documents.diff().tolist())


@pytest.mark.parametrize("row", [ONE, SEVERAL], ids=lambda row: row.name)
def test_inputs_are_the_same_packed_and_padded(row):
    inputs = varlen.make_inputs(row, CPU, torch.float32)
    queries, documents = unpacked(inputs)
    assert {bounds.dtype for bounds in inputs.packed()[2:]} == {torch.int32}
    whole = inputs.padded()
    assert [len(document) for document in documents] == row.lengths().tolist() == whole.lengths().tolist()
    assert torch.equal(torch.stack(queries), whole.queries)
    for document, padded, active in zip(documents, whole.documents, whole.documents_mask, strict=True):
        assert torch.equal(document, padded[active])
        assert not padded[~active].any()
    torch.testing.assert_close(inputs.documents.norm(dim=-1), torch.ones(len(inputs.documents)))


@pytest.mark.parametrize("row", [ONE, SEVERAL, RERANK], ids=lambda row: row.name)
def test_lengths_are_drawn_within_their_bounds_and_always_the_same(row):
    lengths = row.lengths()
    assert len(lengths) == row.documents
    assert row.shortest <= int(lengths.min()) < int(lengths.max()) <= row.Ld
    assert torch.equal(lengths, row.lengths())


@pytest.mark.parametrize("row", [ONE, SEVERAL], ids=lambda row: row.name)
def test_reference_is_the_definition(row):
    inputs = varlen.make_inputs(row, CPU, torch.float32)
    torch.testing.assert_close(inputs.reference(), by_hand(*unpacked(inputs)), rtol=1e-12, atol=0)


def test_a_request_is_what_a_model_returns():
    request = varlen.make_inputs(RERANK, CPU, torch.bfloat16)
    assert request.ids == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    documents = [document for candidates in request.documents for document in candidates]
    assert [len(document) for document in documents] == RERANK.lengths().tolist()
    assert all(array.dtype == np.float32 for array in [*request.queries, *documents])
    assert all(document.base is None for document in documents)
    queries = [torch.from_numpy(query) for query in request.queries]
    expected = [
        by_hand([query], [torch.from_numpy(document) for document in candidates])[0]
        for query, candidates in zip(queries, request.documents, strict=True)
    ]
    torch.testing.assert_close(request.reference(), torch.cat(expected), rtol=1e-12, atol=0)


def test_rerank_is_right_here_through_ours_and_through_pylate(monkeypatch):
    pytest.importorskip("pylate")
    monkeypatch.setenv("PYLATE_SCORES_BACKEND", "lik")
    # PyLate's padding counts there, and would win in shorter documents.
    request = varlen.make_inputs(replace(RERANK, shortest=30, Ld=40), CPU, torch.float32)
    reference = request.reference()
    for candidate in [*request.ours(), *request.torch()]:
        assert relative_error(candidate.read(candidate.call()), reference) < 1e-5
    assert os.environ["PYLATE_SCORES_BACKEND"] == "lik"
    assert request.ours_padded() == []


@pytest.mark.parametrize(("system", "backend"), [("lik", "lik"), ("flash_maxsim", "flash")])
def test_pylate_gets_the_backend_of_the_system(monkeypatch, system, backend):
    rank = pytest.importorskip("pylate.rank")
    monkeypatch.delenv("PYLATE_SCORES_BACKEND", raising=False)
    request = varlen.make_inputs(RERANK, CPU, torch.float32)
    seen = []

    def watch(*arguments, **options):
        seen.append((os.environ["PYLATE_SCORES_BACKEND"], *arguments, options))
        raise RuntimeError("no GPU here")

    monkeypatch.setattr(rank, "rerank", watch)
    (candidate,) = getattr(request, system)()
    with pytest.raises(RuntimeError, match="no GPU here"):
        candidate.call()
    assert seen == [(backend, request.ids, request.queries, request.documents, {"device": CPU})]
    assert "PYLATE_SCORES_BACKEND" not in os.environ


@pytest.mark.parametrize("system", ["ours", "lik", "flash_maxsim", "torch"])
def test_without_pylate_there_is_no_rerank(monkeypatch, system):
    monkeypatch.setitem(sys.modules, "pylate.rank", None)
    with pytest.raises(Unavailable, match="needs PyLate"):
        getattr(varlen.make_inputs(RERANK, CPU, torch.float32), system)()


@pytest.mark.parametrize(
    ("rankings", "scores"),
    [
        ([[{"id": 1, "score": 2.0}, {"id": 0, "score": 1.0}], [{"id": 2, "score": 3.0}]], [1.0, 2.0, 3.0]),
        ([[{"id": 1, "score": 1.0}, {"id": 0, "score": 2.0}], [{"id": 2, "score": 3.0}]], [np.nan, np.nan, 3.0]),
        ([[{"id": 1, "score": 2.0}], [{"id": 2, "score": 3.0}]], [np.nan, 2.0, 3.0]),
    ],
    ids=["sorted", "unsorted", "missing"],
)
def test_rankings_are_read_by_id_and_must_be_sorted_and_complete(rankings, scores):
    np.testing.assert_array_equal(scores_by_id(rankings, 3).numpy(), scores)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_packages_are_given_packed_and_padded(dtype, monkeypatch):
    stand_ins.put_in_place(monkeypatch)
    inputs = varlen.make_inputs(SEVERAL, CPU, dtype)
    packed, told = "maxsim_varlen", "maxsim_varlen, longest lengths given"
    assert [candidate.label for candidate in inputs.lik()] == [packed, told, "maxsim, padded", "maxsim_forward, padded"]
    labels = [candidate.label for candidate in inputs.flash_maxsim()]
    assert labels[0] == "flash_maxsim_packed"
    assert ("flash_maxsim_packed, from float16" in labels) == (dtype != torch.float16)
