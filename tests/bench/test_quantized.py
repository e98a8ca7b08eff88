from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from pylate_flash.bench import exact
from pylate_flash.bench.suite import OURS, WRONG
from suites import quantized
from suites.quantized import Quantized, measure_eight_bits

CPU = torch.device("cpu")
TINY = (Quantized("one", 1, 70, 8, 17, d=64), Quantized("several", 3, 6, 8, 19, d=64))


@pytest.mark.parametrize("row", TINY, ids=lambda row: row.name)
def test_every_system_of_ours_is_held_to_its_own_reference(row, monkeypatch):
    inputs = quantized.make_inputs(row, CPU, torch.float32)
    # Several documents at a time.
    monkeypatch.setattr(exact, "REFERENCE_BYTES", 4 * 8 * row.Ld * row.d)
    expected = quantized.reference(inputs)
    systems = [system for system in quantized.suite().systems if system.name.startswith(OURS)]
    assert len(systems) == 5
    for system in systems:
        for candidate in system.candidates(inputs):
            found = candidate.read(candidate.call())
            assert quantized.error(found, expected) < 2e-6
            others = set(expected._fields) - {found.of}
            # Quantized, the scores are others, and not by much.
            assert all(1e-5 < quantized.error(found._replace(of=other), expected) < 10 * WRONG for other in others)


@pytest.mark.skipif(not hasattr(functional, "scaled_mm"), reason="this torch has no product of fp8 matrices")
def test_the_ceiling_of_8_bits_is_a_rate():
    try:
        rate = measure_eight_bits(CPU, size=64)
    except NotImplementedError:
        pytest.skip("this torch multiplies no fp8 on a CPU")
    assert 0 < rate < math.inf
