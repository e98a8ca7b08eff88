from __future__ import annotations

import pytest
import torch

from pylate_flash.bench import exact
from pylate_flash.bench.rows import Row
from suites import xtr

ROW = Row("small", 12, 12, 4, 9, d=16, step=True)


@pytest.fixture(autouse=True)
def few_are_retrieved(monkeypatch):
    monkeypatch.setattr(xtr, "RETRIEVED", 20)


@pytest.fixture
def inputs():
    return xtr.make_inputs(ROW, torch.device("cpu"), torch.float32)


def test_the_reference_is_the_same_in_parts(inputs, monkeypatch):
    whole = inputs.reference()
    monkeypatch.setattr(exact, "REFERENCE_BYTES", 1)
    for found, expected in zip(inputs.reference(), whole, strict=True):
        assert (found - expected).norm() <= 1e-12 * expected.norm()


def test_rows_are_those_of_the_table():
    assert {row.name: row.shape for row in xtr.ROWS}["xtr-256"] == "256 x 256, 32 x 180"
