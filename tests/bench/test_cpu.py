from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

from pylate_flash.bench import forward, suite, varlen
from pylate_flash.bench.exact import relative_error
from pylate_flash.bench.peers import MAXSIM_CPU
from pylate_flash.bench.rows import Row
from suites import cpu

CPU = torch.device("cpu")
ROWS = [Row("one", 1, 5, 4, 7, d=16), Row("several", 3, 6, 2, 9, d=16)]


@pytest.fixture(params=ROWS, ids=lambda row: row.name)
def inputs(request):
    return forward.make_inputs(request.param, CPU, torch.float32)


@pytest.fixture
def stand_in(monkeypatch):
    """maxsim-cpu's function, in numpy: one float32 query [Lq, d], documents [Nd, Ld, d]; scores [Nd]."""

    def maxsim_scores(query, documents):
        assert query.dtype == documents.dtype == np.float32
        assert query.ndim == 2
        return np.einsum("sd,ntd->nst", query, documents).max(-1).sum(-1)

    module = ModuleType("maxsim_cpu")
    module.maxsim_scores = maxsim_scores
    monkeypatch.setitem(sys.modules, "maxsim_cpu", module)
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    return module


def test_rows_are_measured_at_their_full_size():
    found = cpu.suite()
    shapes = ["1 x 1000, 32 x 300", "1 x 1000, 32 x 180", "32 x 256, 32 x 180", "100 x 100 of its own, 32 x 40..180"]
    shapes += ["256 x 2 of its own, 32 x 32", "64 x 4 of its own, 32 x 32"]
    assert [row.shape for row in found.rows] == shapes
    assert all(suite.fit(found, row, CPU) == row for row in found.rows)


def test_maxsim_cpu_is_right_and_takes_as_many_threads_as_torch(inputs, stand_in, monkeypatch):
    (candidate,) = cpu.maxsim_cpu(inputs)
    assert relative_error(candidate.read(candidate.call()), inputs.reference()) < 1e-5
    assert int(os.environ["RAYON_NUM_THREADS"]) == torch.get_num_threads()


def test_maxsim_cpu_takes_float32_only(inputs, stand_in):
    halves = forward.make_inputs(ROWS[0], CPU, torch.bfloat16)
    with pytest.raises(suite.Unavailable, match="float32 only, not torch.bfloat16"):
        cpu.maxsim_cpu(halves)


def test_maxsim_cpu_as_installed_is_right(inputs):
    pytest.importorskip("maxsim_cpu")
    (candidate,) = cpu.maxsim_cpu(inputs)
    assert relative_error(candidate.read(candidate.call()), inputs.reference()) < 1e-5


def test_maxsim_cpu_is_absent_where_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "maxsim_cpu", None)
    assert "not installed" in MAXSIM_CPU.unavailable(CPU)


def test_the_products_have_every_similarity(inputs, monkeypatch):
    """Each way computes them all, block after block, in whichever order of rows and columns."""
    found = []
    monkeypatch.setattr(cpu, "BLOCK", 3 * inputs.queries.shape[0] * inputs.queries.shape[1])
    monkeypatch.setattr(cpu, "_each", lambda product, blocks: found.append([product(*block) for block in blocks]))
    expected = inputs.queries.flatten(0, 1) @ inputs.documents.flatten(0, 1).T
    for candidate in cpu.products(inputs):
        candidate.call()
    queries_first, documents_first, convolution = found
    torch.testing.assert_close(torch.cat(queries_first, dim=1), expected)
    torch.testing.assert_close(torch.cat(documents_first, dim=0).T, expected)
    torch.testing.assert_close(torch.cat([part.reshape(len(expected), -1) for part in convolution], dim=1), expected)


# Documents long enough that a token of PyLate's padding, which it does not mask here, is never the best.
RERANK = varlen.Arrays("rerank", 3, 5, 8, 60, d=16, shortest=40)


def test_distillation_is_that_of_pylate():
    """The loss and both gradients, of candidates with masked tokens, whose 0 is the best of some query tokens."""
    pytest.importorskip("pylate")
    found = cpu.suite()
    step = found.make_inputs(Row("few", 8, 3, 6, 8, own=True, step=True, d=16), CPU, torch.float32)
    reference = step.reference()
    similarities = torch.einsum("qsd,qktd->qkst", step.queries, step.documents)
    assert (similarities.masked_fill(~step.documents_mask.unsqueeze(2), -torch.inf).amax(dim=-1) < 0).any()
    for system in found.systems[:2]:
        (candidate,) = system.candidates(step)
        assert found.error(candidate.read(candidate.call()), reference) < found.accuracy(step, torch.float32)
    assert cpu.maxsim_cpu(step) == cpu.products(step) == []


@pytest.mark.parametrize("row", [ROWS[0], RERANK], ids=lambda row: row.name)
def test_the_floor_is_that_of_the_products(row, ceilings, request):
    if row is RERANK:
        # What it measures is `rank.rerank`.
        request.getfixturevalue("pylate")
    found = replace(cpu.suite(), rows=[row])
    rounds = suite.Rounds(warmup=0, repetitions=2, flush_bytes=0)
    result = suite.run(found, CPU, torch.float32, rounds, with_peers=False, ceilings=ceilings)
    (measured,) = result["rows"]
    assert measured["bound"] == "products"
    assert measured["floor_ms"] == measured["systems"]["products"]["median_ms"]
    assert measured["systems"]["pylate_flash"]["status"] == "ok"
    assert not result["protocol"]["reduced"]
