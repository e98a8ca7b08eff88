from __future__ import annotations

import pytest
import torch

from pylate_flash.bench import calls, exact
from pylate_flash.bench.exact import relative_error
from pylate_flash.bench.protocol import Ceilings, floor_of
from suites import sparse
from suites.sparse import ROWS, Pruned

CPU = torch.device("cpu")
TINY = Pruned("tiny", 1, 1100, 6, 9, d=16, k=3)


@pytest.fixture
def inputs():
    return sparse.make_inputs(TINY, CPU, torch.float32)


@pytest.mark.parametrize("system", sparse.suite().systems, ids=lambda system: system.name)
def test_every_system_computes_the_scores(inputs, system, monkeypatch):
    if system.peer is not None and system.peer.unavailable(CPU):
        pytest.skip("it needs a GPU")
    expected = inputs.reference()
    for candidate in system.candidates(inputs):
        assert relative_error(candidate.read(candidate.call()), expected) < 2e-6
    # All of the query's tokens score otherwise.
    assert relative_error(expected, calls.Padded.reference(inputs)) > 0.1
    # Several documents at a time.
    monkeypatch.setattr(exact, "REFERENCE_BYTES", 7 * 8 * 6 * 25)
    assert relative_error(inputs.reference(), expected) < 1e-12


def test_positions_are_chosen_once_each(inputs):
    assert inputs.chosen.shape == (1100, 3)
    assert (inputs.chosen.diff(dim=1) > 0).all()
    assert inputs.chosen.unique().tolist() == list(range(6))


def test_floors_count_what_was_chosen():
    """Of an H200: 790 TFLOP/s of bfloat16 and 4.45 TB/s."""
    ceilings = Ceilings(flops_per_second=790e12, bytes_per_second=4.45e12)
    floors = {row.name: floor_of(row.work(torch.bfloat16), ceilings) for row in ROWS}
    found = {name: floor.milliseconds for name, floor in floors.items()}
    expected = {"pruned-1k": 0.0173, "pruned-10k": 0.1727, "pruned-visual": 0.0590, "pruned-colpali": 0.0591}
    assert found == pytest.approx(expected, rel=0.02)
    assert TINY.shape == "1 x 1100, 6 x 9, d = 16, 3 chosen"
