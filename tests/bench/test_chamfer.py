from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pylate_flash.bench import exact
from pylate_flash.bench.protocol import Ceilings, Rounds
from pylate_flash.bench.suite import run
from pylate_flash.ops import chamfer_reference
from suites import chamfer
from suites.chamfer import Sets

CPU = torch.device("cpu")
DISTANCES = Sets("distances", 3, 40, 3)
STEP = replace(DISTANCES, name="step", d=20, step=True)
CEILINGS = Ceilings(flops_per_second=1e12, bytes_per_second=1e10)


def test_the_reference_is_the_definition() -> None:
    inputs = chamfer.make_inputs(STEP, CPU, torch.bfloat16)
    leaves = [points.detach().double().requires_grad_() for points in (inputs.x, inputs.y)]
    scores = chamfer_reference(*leaves)
    found = inputs.reference()
    expected = scores.sum().detach(), scores.detach(), *torch.autograd.grad(scores.sum(), leaves)
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(replace(inputs, is_step=False).reference(), expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_system_runs_small(dtype: torch.dtype) -> None:
    """And the package does as well as it promises."""
    small = replace(chamfer.suite(), rows=(DISTANCES, STEP))
    states = [row["systems"] for row in run(small, CPU, dtype, Rounds(0, 1, 0), ceilings=CEILINGS)["rows"]]
    assert [state["pylate_flash"]["status"] for state in states] == ["ok", "ok"]
    assert [state["torch"]["status"] for state in states] == ["ok", "ok"]


def test_a_wrong_step_has_an_error() -> None:
    inputs = chamfer.make_inputs(STEP, CPU, torch.float32)
    expected = inputs.reference()
    (candidate,) = inputs.ours()
    found = candidate.call()
    assert exact.error(found, expected) <= inputs.accuracy(torch.float32)
    assert exact.error(found._replace(grad_queries=found.grad_queries.roll(1, 0)), expected) > 0.1


def test_rows_are_those_of_the_goal() -> None:
    rows = {row.name: row for row in chamfer.ROWS}
    assert rows["points-3-step"].shape == "16 pairs, 4096 x 4096, d = 3, step"
    assert rows["points-64"].work(torch.float32).flops == 2 * 16 * 4096**2 * 64
    for row in chamfer.ROWS:
        assert 1e8 < row.within(5e8).work(torch.float32).flops <= 5e8
