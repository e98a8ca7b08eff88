from __future__ import annotations

from dataclasses import replace

import torch

from pylate_flash.ops import chamfer_reference
from suites import chamfer

CPU = torch.device("cpu")
STEP = chamfer.Sets("step", 3, 40, 20, step=True)


def test_the_reference_is_the_definition():
    inputs = chamfer.make_inputs(STEP, CPU, torch.bfloat16)
    leaves = [points.detach().double().requires_grad_() for points in (inputs.x, inputs.y)]
    scores = chamfer_reference(*leaves)
    found = inputs.reference()
    expected = scores.sum().detach(), scores.detach(), *torch.autograd.grad(scores.sum(), leaves)
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(replace(inputs, is_step=False).reference(), expected[1])


def test_rows_are_those_of_the_goal():
    rows = {row.name: row for row in chamfer.ROWS}
    assert rows["points-3-step"].shape == "16 pairs, 4096 x 4096, d = 3, step"
    assert rows["points-64"].work(torch.float32).flops == 2 * 16 * 4096**2 * 64
    for row in chamfer.ROWS:
        assert 1e8 < row.within(5e8).work(torch.float32).flops <= 5e8
