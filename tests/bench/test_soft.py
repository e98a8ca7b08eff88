from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pylate_flash.bench import exact, protocol
from pylate_flash.bench.exact import Step
from pylate_flash.bench.protocol import Ceilings, Work, floor_of
from pylate_flash.ops import soft_maxsim_reference
from suites import soft
from suites.soft import SoftBatch

CPU = torch.device("cpu")
SCORES = SoftBatch("scores", 5, 5, 4, 7, d=16)
STEP = replace(SCORES, name="step", step=True)
CEILINGS = Ceilings(flops_per_second=1e12, bytes_per_second=1e10)


@pytest.mark.parametrize("pieces", [False, True])
def test_the_reference_is_the_definition(pieces, monkeypatch):
    if pieces:
        monkeypatch.setattr(exact, "REFERENCE_BYTES", 1)
    inputs = soft.make_inputs(STEP, CPU, torch.bfloat16)
    leaves = [tensor.detach().double().requires_grad_() for tensor in (inputs.queries, inputs.documents)]
    scores = soft_maxsim_reference(*leaves, soft.BETA)
    loss = inputs.loss(scores)
    expected = Step(loss.detach(), scores.detach(), *torch.autograd.grad(loss, leaves))
    for found, wanted in zip(inputs.reference(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(replace(inputs, is_step=False).reference(), expected.scores)


def test_which_einsum_is_timed():
    """A step with scores that were summed in bfloat16 is wrong at every size in use; with float32 sums it is right."""
    long = replace(STEP, Nq=8, Nd=8, Lq=200, Ld=200, d=128)
    inputs = soft.make_inputs(long, CPU, torch.bfloat16)
    expected = inputs.reference()
    plain, widened = (exact.error(candidate.call(), expected) for candidate in inputs.torch())
    assert plain > soft.ROUNDED > widened
    assert [candidate.label for candidate in soft.make_inputs(long, CPU, torch.float32).torch()] == ["einsum"]


def test_floors():
    """Of scores the longest of three times; of a step the sum of products and exponentials."""
    ceilings = replace(CEILINGS, exponentials_per_second=1e9)
    work = Work(flops=2e9, bytes=1e7, exponentials=1e6)
    assert floor_of(work, ceilings) == protocol.Floor(2.0, "compute")
    assert floor_of(replace(work, exponentials=3e6), ceilings) == protocol.Floor(3.0, "exponentials")
    assert floor_of(replace(work, exponentials_follow=True), ceilings) == protocol.Floor(
        3.0, "compute and exponentials"
    )
    assert floor_of(work, CEILINGS) == protocol.Floor(2.0, "compute")
    row = next(row for row in soft.ROWS if row.name == "colpali-64-step")
    assert row.work(torch.bfloat16).flops == 4 * 2 * 2**32 * 128
    assert row.work(torch.bfloat16).exponentials == 2 * 2**32
