from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

from pylate_flash.bench import cpu, forward, suite
from pylate_flash.bench.forward import Shape
from pylate_flash.bench.peers import MAXSIM_CPU
from pylate_flash.bench.protocol import relative_error

CPU = torch.device("cpu")
ROWS = [Shape("one", 1, 5, 4, 7, d=16), Shape("several", 3, 6, 2, 9, d=16)]


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
    assert [row.shape for row in found.rows] == ["1 x 1000, 32 x 300", "1 x 1000, 32 x 180", "32 x 256, 32 x 180"]
    assert all(suite.fit(found, row, CPU) == row for row in found.rows)


def test_pylate_is_right(inputs):
    pytest.importorskip("pylate")
    (candidate,) = cpu.pylate(inputs)
    assert relative_error(candidate.call(), forward.reference(inputs)) < 1e-5


def test_maxsim_cpu_is_right_and_takes_as_many_threads_as_torch(inputs, stand_in, monkeypatch):
    (candidate,) = cpu.maxsim_cpu(inputs)
    assert relative_error(candidate.read(candidate.call()), forward.reference(inputs)) < 1e-5
    assert int(os.environ["RAYON_NUM_THREADS"]) == torch.get_num_threads()


def test_maxsim_cpu_takes_float32_only(inputs, stand_in):
    halves = forward.make_inputs(ROWS[0], CPU, torch.bfloat16)
    with pytest.raises(suite.Unavailable, match="float32 only, not torch.bfloat16"):
        cpu.maxsim_cpu(halves)


def test_maxsim_cpu_as_installed_is_right(inputs):
    pytest.importorskip("maxsim_cpu")
    (candidate,) = cpu.maxsim_cpu(inputs)
    assert relative_error(candidate.read(candidate.call()), forward.reference(inputs)) < 1e-5


def test_maxsim_cpu_is_absent_where_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "maxsim_cpu", None)
    assert "not installed" in MAXSIM_CPU.unavailable(CPU)


def test_the_matmul_has_every_similarity(inputs):
    similarities = torch.einsum("qsd,ntd->qsnt", inputs.queries, inputs.documents).flatten(0, 1).flatten(1)
    first, second = cpu.matmul(inputs)
    torch.testing.assert_close(first.call(), similarities)
    torch.testing.assert_close(second.call(), similarities.T)


def test_the_floor_is_the_matmul(ceilings):
    found = replace(cpu.suite(), rows=ROWS)
    rounds = suite.Rounds(warmup=0, repetitions=2, flush_bytes=0)
    result = suite.run(found, CPU, torch.float32, rounds, rows=["one"], with_peers=False, ceilings=ceilings)
    (row,) = result["rows"]
    assert row["bound"] == "matmul"
    assert row["floor_ms"] == row["systems"]["matmul"]["median_ms"]
    assert row["systems"]["pylate_flash"]["status"] == "ok"
    assert not result["protocol"]["reduced"]
