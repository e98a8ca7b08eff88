from __future__ import annotations

import pytest
import torch

from pylate_flash.bench import losses, training
from pylate_flash.bench.training import Batch

ROW = Batch("small", 40, 40, 4, 6, d=16)


@pytest.fixture
def inputs():
    return training.make_inputs(ROW, torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize("pieces", [False, True])
def test_the_sample_is_that_of_the_whole_reference(inputs, pieces, monkeypatch):
    if pieces:
        monkeypatch.setattr(training, "REFERENCE_BYTES", 1)
    whole = losses.sample_of(training.reference(inputs))
    for found, expected in zip(losses.reference(inputs), whole, strict=True):
        assert found.dtype == torch.float64
        # A logit is a float32 sum over the temperature, 0.02.
        assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert len(whole.grad_queries) == losses.SAMPLED
    assert losses.sampled(40)[[0, -1]].tolist() == [0, 39]


@pytest.mark.parametrize("system", losses.suite().systems, ids=lambda system: system.name)
def test_every_system_computes_the_step(inputs, system, monkeypatch):
    monkeypatch.setattr(losses, "LOOP_QUERIES", 16)
    expected = losses.reference(inputs)
    for candidate in system.candidates(inputs):
        found = candidate.read(candidate.call())
        assert losses.error(found, expected) <= 1e-2
        wrong = found._replace(grad_documents=found.grad_documents.roll(1, 0))
        assert losses.error(wrong, expected) > 0.1


def test_rows_are_four_times_as_large():
    assert [row.Nq for row in losses.ROWS] == [1024, 4096, 16384, 65536]
    assert all(row.Nq == row.Nd for row in losses.ROWS)
