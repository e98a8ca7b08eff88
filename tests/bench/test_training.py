from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch

from pylate_flash.bench import exact, report, suite, training
from pylate_flash.bench.calls import chunked_scores
from pylate_flash.bench.exact import Step
from pylate_flash.bench.protocol import Ceilings, Rounds, floor_of
from pylate_flash.bench.training import Batch
from pylate_flash.ops import maxsim_reference
from tests.bench import stand_ins

CPU = torch.device("cpu")
IN_BATCH = Batch("in-batch", 6, 6, 5, 20, d=16)
CANDIDATES = Batch("candidates", 4, 3, 5, 20, own=True, d=16)
SKEWED = (
    Batch("skewed", 12, 12, 16, 40, kind="skewed"),
    Batch("skewed candidates", 8, 6, 16, 40, kind="skewed", own=True),
)
NEGATIVES = Batch("negatives", 3, 9, 5, 20, d=16)
ROWS = (IN_BATCH, CANDIDATES, NEGATIVES, *SKEWED)


def by_autograd(inputs):
    """The step by torch's autograd through the definition, in float64."""
    queries = inputs.queries.detach().double().requires_grad_()
    documents = inputs.documents.detach().double().requires_grad_()
    scores = maxsim_reference(queries, documents)
    loss = inputs.loss(scores)
    return Step(loss.detach(), scores.detach(), *torch.autograd.grad(loss, (queries, documents)))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("pieces", [False, True])
def test_reference_is_autograd_through_the_definition(row, pieces, monkeypatch):
    if pieces:
        monkeypatch.setattr(exact, "REFERENCE_BYTES", 1)
    inputs = training.make_inputs(row, CPU, torch.bfloat16)
    for found, expected in zip(inputs.reference(), by_autograd(inputs), strict=True):
        assert found.dtype == torch.float64
        assert not found.requires_grad
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_the_losses_are_cross_entropy_and_divergence_at_the_temperature():
    scores = torch.tensor([[0.02, 0.0], [0.0, 0.04]])
    inputs = training.make_inputs(replace(IN_BATCH, Nq=2, Nd=2), CPU, torch.float32)
    expected = -(torch.tensor([1.0, 0.0]).log_softmax(0)[0] + torch.tensor([0.0, 2.0]).log_softmax(0)[1]) / 2
    torch.testing.assert_close(inputs.loss(scores), expected)
    inputs = training.make_inputs(replace(CANDIDATES, Nq=2, Nd=2), CPU, torch.float32)
    teacher, student = inputs.teacher.exp(), (scores / 0.02).softmax(-1)
    torch.testing.assert_close(inputs.loss(scores), (teacher * (teacher / student).log()).sum() / 2)


@pytest.mark.parametrize("row", SKEWED, ids=lambda row: row.name)
def test_half_of_the_wins_are_on_one_token_in_twenty(row):
    inputs = training.make_inputs(row, CPU, torch.float32)
    assert inputs.hot == 2
    for embeddings in (inputs.queries, inputs.documents):
        torch.testing.assert_close(embeddings.norm(dim=-1), torch.ones(embeddings.shape[:-1]))
    equation = "qsd,qntd->qnst" if row.own else "qsd,ntd->qnst"
    argmax = torch.einsum(equation, inputs.queries, inputs.documents).argmax(-1)
    assert (argmax < inputs.hot).float().mean().item() == pytest.approx(0.5, abs=training.HOT_TOLERANCE)
    # The reference looks at it too.
    with pytest.raises(RuntimeError, match="of the wins are on the hot tokens, and not 50%"):
        replace(inputs, hot=15).reference()


def test_torch_is_the_same_in_chunks():
    for row in (IN_BATCH, CANDIDATES):
        inputs = training.make_inputs(row, CPU, torch.float32)
        whole, parts = (chunked_scores(inputs.queries, inputs.documents, chunk=chunk) for chunk in (row.Nd, 2))
        torch.testing.assert_close(whole, parts)


@pytest.mark.parametrize("part", range(4), ids=Step._fields)
@pytest.mark.parametrize("factor", [1.02, float("nan"), float("inf")])
def test_an_error_in_any_part_is_seen(part, factor):
    reference = training.make_inputs(IN_BATCH, CPU, torch.float32).reference()
    assert exact.error(reference, reference) == 0.0
    found = list(reference)
    found[part] = found[part] * factor
    assert exact.error(Step(*found), reference) == pytest.approx(0.02 if factor == 1.02 else float("inf"))


def test_a_gradient_within_the_tolerance_has_the_cosine_promised():
    """So it is not asked for: at a Frobenius error of 1e-2 it cannot be less than where the difference is across."""
    generator = torch.Generator().manual_seed(0)
    expected, other = torch.randn(2, 1000, dtype=torch.float64, generator=generator)
    across = other - expected * (other @ expected) / (expected @ expected)
    found = expected + across * (0.01 * expected.norm() / across.norm())
    assert exact.frobenius(found, expected) == pytest.approx(0.01)
    assert torch.cosine_similarity(found, expected, dim=0) > 0.9999


def test_the_floor_is_the_forward_and_then_the_gathers():
    row = training.ROWS[4]
    assert row.name == "train-1024"
    work = row.work(torch.bfloat16)
    assert work.flops == 2 * 1024 * 1024 * 32 * 180 * 128
    assert work.l2_bytes == 2 * 1024 * 1024 * 32 * 256
    without = floor_of(work, Ceilings(790e12, 4.3e12))
    assert without.bound == "compute"
    assert without.milliseconds == pytest.approx(1.957, rel=1e-3)
    floor = floor_of(work, Ceilings(790e12, 4.3e12, 5.0e12))
    assert floor.bound == "compute and L2"
    assert floor.milliseconds == pytest.approx(1.957 + 1e3 * work.l2_bytes / 5e12, rel=1e-3)


def test_rows_are_the_shapes_of_a_training_step():
    assert [row.shape for row in training.ROWS[::2]] == [
        "128 x 128, 32 x 300",
        "512 x 512, 32 x 180",
        "1024 x 1024, 32 x 180",
        "64 x 64, 1024 x 1024",
        "128 x 128, 1024 x 1024",
        "64 x 16 of its own, 32 x 300",
        "32 x 32, 32 x 180",
    ]
    for uniform, skewed in zip(training.ROWS[:10:2], training.ROWS[1:10:2], strict=True):
        assert skewed == replace(uniform, name=f"{uniform.name}-skewed", kind="skewed")


def test_a_smaller_row_keeps_its_kind():
    smaller = training.ROWS[3].within(suite.CPU_FLOPS)
    assert smaller.Nq == smaller.Nd > 1
    assert smaller.work(torch.float32).flops <= suite.CPU_FLOPS
    smaller = training.ROWS[11].within(suite.CPU_FLOPS)
    assert (smaller.Nd, smaller.own) == (32, True)
    assert smaller.work(torch.float32).flops <= suite.CPU_FLOPS
    assert training.ROWS[9].within(1.0).Nq == 1
    negatives = {row.name: row for row in training.ROWS}["negatives-64x5"]
    assert negatives.shape == "64 x 384, 32 x 150"
    smaller = negatives.within(suite.CPU_FLOPS)
    assert smaller.Nd == 6 * smaller.Nq
    assert smaller.work(torch.float32).flops <= suite.CPU_FLOPS


def test_lik_is_tried_with_each_of_its_backwards(monkeypatch):
    stand_ins.put_in_place(monkeypatch)
    inputs = training.make_inputs(IN_BATCH, CPU, torch.float32)
    systems = {system.name: system for system in training.suite().systems}
    labels = [[way.label for way in systems[name].candidates(inputs)] for name in ("lik", "lik_lowmem")]
    assert labels == [["maxsim, auto", "maxsim, unified"], ["maxsim, lowmem"]]


def test_the_peers_as_installed_take_these_arguments():
    lik, flash_maxsim = pytest.importorskip("late_interaction_kernels"), pytest.importorskip("flash_maxsim")
    inspect.signature(lik.maxsim).bind(None, None, backward="lowmem")
    inspect.signature(flash_maxsim.flash_maxsim_batched_train).bind(None, None, shared_docs=True, doc_lengths=None)


def test_the_suite_runs_and_its_table_has_the_ratio_to_torch(ceilings, capsys):
    found = replace(training.suite(), rows=(IN_BATCH, CANDIDATES, *SKEWED))
    rounds = Rounds(warmup=0, repetitions=2, flush_bytes=0)
    result = suite.run(found, CPU, torch.float32, rounds, ceilings=ceilings)
    assert result["complete"]
    for row in result["rows"]:
        assert row["systems"]["pylate_flash"]["status"] == row["systems"]["torch"]["status"] == "ok"
        assert row["systems"]["lik"]["status"] == row["systems"]["flash_maxsim"]["status"] == "absent"
    report.show(report.make_console(), found, result)
    output = capsys.readouterr().out
    assert "torch / ours" in output
    row = result["rows"][0]
    ratio = row["systems"]["torch"]["median_ms"] / row["systems"]["pylate_flash"]["median_ms"]
    assert f"{ratio:.2f}" in output


def test_a_wrong_gradient_is_marked_and_not_timed(ceilings):
    def halved(inputs):
        (right,) = inputs.ours()
        return [right._replace(read=lambda step: step._replace(grad_documents=step.grad_documents / 2))]

    systems = (suite.System(suite.OURS, "ours", halved),)
    found = replace(training.suite(), rows=(IN_BATCH,), systems=systems)
    (row,) = suite.run(found, CPU, torch.float32, Rounds(0, 1, 0), ceilings=ceilings)["rows"]
    assert row["systems"][suite.OURS]["status"] == "wrong"
    assert row["systems"][suite.OURS]["error"] == pytest.approx(0.5, rel=1e-3)
