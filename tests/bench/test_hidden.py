from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pylate_flash.ops import maxsim_from_hidden_reference
from suites import hidden
from suites.hidden import States

CPU = torch.device("cpu")
FORWARD = States("forward", 3, 5, 4, 12, d=8, d_model=24)
STEP = replace(FORWARD, name="step", Nq=4, Nd=4, step=True)
TINY = (FORWARD, STEP, replace(FORWARD, name="packed", shortest=3), replace(STEP, name="step-packed", shortest=3))


@pytest.mark.parametrize("row", TINY, ids=lambda row: row.name)
def test_reference_is_autograd_through_the_definition(row):
    """In float64, where the projection is not rounded either."""
    inputs = hidden.make_inputs(row, CPU, torch.float64)
    expected = inputs.computed(
        lambda: maxsim_from_hidden_reference(
            inputs.queries, inputs.hidden, inputs.weight, documents_cu_seqlens=inputs.cu_seqlens
        ),
    )
    found = inputs.reference()
    assert len(found) == (4 if row.step else 1)
    for ours, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("factor", [1.02, float("nan")])
def test_an_error_in_any_part_is_seen(part, factor):
    reference = hidden.make_inputs(STEP, CPU, torch.float32).reference()
    assert hidden.error(reference, reference) == 0.0
    found = list(reference)
    found[part] = found[part] * factor
    assert hidden.error(tuple(found), reference) == pytest.approx(0.02 if factor == 1.02 else float("inf"))
    assert hidden.error(reference[:1], reference) == float("inf")
