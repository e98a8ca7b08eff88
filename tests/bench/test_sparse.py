from __future__ import annotations

import pytest
import torch

from pylate_flash.bench import calls, exact
from pylate_flash.bench.exact import relative_error
from suites import sparse
from suites.sparse import Pruned

CPU = torch.device("cpu")
TINY = Pruned("tiny", 1, 1100, 6, 9, d=16, k=3)


@pytest.fixture
def inputs():
    return sparse.make_inputs(TINY, CPU, torch.float32)


def test_the_reference_is_of_the_chosen_tokens_and_the_same_in_parts(inputs, monkeypatch):
    expected = inputs.reference()
    # All of the query's tokens score otherwise.
    assert relative_error(expected, calls.Padded.reference(inputs)) > 0.1
    # Several documents at a time.
    monkeypatch.setattr(exact, "REFERENCE_BYTES", 7 * 8 * 6 * 25)
    assert relative_error(inputs.reference(), expected) < 1e-12


def test_positions_are_chosen_once_each(inputs):
    assert inputs.chosen.shape == (1100, 3)
    assert (inputs.chosen.diff(dim=1) > 0).all()
    assert inputs.chosen.unique().tolist() == list(range(6))
