from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from pylate_flash import maxsim_cross_entropy
from pylate_flash.bench import exact, loss_steps, losses, suite
from pylate_flash.bench.protocol import Rounds
from pylate_flash.bench.rows import Row
from pylate_flash.bench.training import TEMPERATURE

CPU = torch.device("cpu")
ROW = Row("small", 40, 40, 4, 6, d=16, step=True)
GIVEN = replace(ROW, name="given", kind=losses.GIVEN)
SYSTEMS = {system.name: system for system in losses.suite().systems}
OF_GIVEN = ("pylate_flash", "pylate_flash_contrastive", "pylate_flash_cached")


@pytest.fixture
def inputs():
    return losses.make_inputs(ROW, CPU, torch.bfloat16)


@pytest.fixture
def given():
    return losses.make_inputs(GIVEN, CPU, torch.float32)


@pytest.mark.parametrize("pieces", [False, True])
def test_the_sample_is_that_of_the_whole_reference(inputs, pieces, monkeypatch):
    if pieces:
        monkeypatch.setattr(exact, "REFERENCE_BYTES", 1)
        monkeypatch.setattr(losses, "REFERENCE_QUERIES", 16)
    whole = losses.sample_of(inputs.reference())
    reference = losses.reference(inputs)
    assert reference.scores is whole.scores is None
    for found, expected in zip(reference[::2] + reference[3:], whole[::2] + whole[3:], strict=True):
        assert found.dtype == torch.float64
        # A logit is a float32 sum over the temperature, 0.02.
        assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert len(whole.grad_queries) == losses.SAMPLED
    assert losses.sampled(40)[[0, -1]].tolist() == [0, 39]


def test_given_embeddings_are_not_normalised_and_masked(given):
    assert given.queries.dtype == torch.bfloat16
    norms = given.documents.float().norm(dim=-1)
    assert norms.min() < 0.7
    assert norms.max() > 1.3
    for mask, length in ((given.queries_mask, 4), (given.documents_mask, 6)):
        lengths = mask.sum(dim=1)
        assert length // 2 <= lengths.min() < lengths.max() == length


def test_the_reference_of_given_embeddings_is_the_definition(given):
    leaves = [e.detach().double().requires_grad_() for e in (given.queries, given.documents)]
    # As the operation rounds them, without a gradient of the rounding.
    normalized = [torch.nn.functional.normalize(leaf, dim=-1) for leaf in leaves]
    rounded = [unit + (unit.to(torch.bfloat16).double() - unit).detach() for unit in normalized]
    similarities = torch.einsum("qsd,ntd->qnst", *rounded)
    best = similarities.masked_fill(~given.documents_mask[None, :, None], -torch.inf).amax(dim=-1)
    scores = (best * given.queries_mask[:, None]).sum(dim=-1)
    loss = torch.nn.functional.cross_entropy(scores / TEMPERATURE, torch.arange(40))
    gradients = torch.autograd.grad(loss, leaves)
    expected = losses.sample_of(exact.Step(loss.detach(), None, *gradients))
    assert exact.error(losses.reference(given), expected) <= 1e-4


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
@pytest.mark.parametrize("kind", ["batch", "given"])
def test_every_system_computes_the_step(system, kind, inputs, given, monkeypatch):
    monkeypatch.setattr(loss_steps, "LOOP_QUERIES", 16)
    monkeypatch.setattr(loss_steps, "CHUNKS", (16, 64))
    if system.peer is not None and system.peer.unavailable(CPU):
        pytest.skip(system.peer.unavailable(CPU))
    row = given if kind == "given" else inputs
    if (system.name in OF_GIVEN) != (kind == "given") and system.name != "pylate_flash":
        with pytest.raises(suite.Unavailable, match="measure it|needs sentence-transformers 6"):
            system.candidates(row)
        return
    try:
        candidates = system.candidates(row)
    except suite.Unavailable as why:
        pytest.skip(str(why))
    expected = losses.reference(row)
    limit = system.tolerance
    if system.name.startswith("pylate_flash"):
        limit = suite.MARGIN * losses.accuracy(row, torch.bfloat16)
        assert limit == pytest.approx(system.tolerance if kind == "given" else 1e-2)
    for candidate in candidates:
        for _ in range(2):
            found = candidate.read(candidate.call())
            assert losses.error(found, expected) <= limit
        wrong = found._replace(grad_documents=found.grad_documents.roll(1, 0))
        assert losses.error(wrong, expected) > 2 * limit


@pytest.mark.parametrize("name", OF_GIVEN[1:])
def test_a_loss_of_given_embeddings_is_the_bare_operation(given, name, pylate):
    """So their times are of the same work."""
    (bare,), (loss,) = (SYSTEMS[name].candidates(given) for name in (OF_GIVEN[0], name))
    found, expected = (losses.sample_of(candidate.read(candidate.call())) for candidate in (loss, bare))
    assert exact.error(found, exact.Step(*(part if part is None else part.double() for part in expected))) <= 2e-3


def test_flash_maxsims_step_is_told_the_temperature(inputs, monkeypatch):
    def step(queries, documents):
        leaves = [tensor.detach().float().requires_grad_() for tensor in (queries, documents)]
        loss = maxsim_cross_entropy(*leaves)
        loss.backward()
        for tensor, leaf in zip((queries, documents), leaves, strict=True):
            tensor.grad = leaf.grad.to(tensor.dtype)
        return loss.detach()

    module = type("module", (), {"colbert_contrastive_step": staticmethod(step)})
    monkeypatch.setitem(sys.modules, "flash_maxsim", type("package", (), {}))
    monkeypatch.setitem(sys.modules, "flash_maxsim.flash_maxsim_contrastive", module)
    candidates = inputs.flash_maxsim()
    assert [candidate.label for candidate in candidates] == ["bfloat16", "float16"]
    for candidate in candidates:
        assert losses.error(candidate.read(candidate.call()), losses.reference(inputs)) <= exact.ROUNDED / 2


def test_rows_are_four_times_as_large():
    batches = [row for row in losses.ROWS if row.kind != losses.GIVEN]
    assert [row.Nq for row in batches] == [256, 1024, 4096, 16384, 65536]
    assert [row.Nq for row in losses.ROWS[5:]] == [128, 1024, 4096]
    assert all(row.Nq == row.Nd for row in losses.ROWS)
    # On a CPU a row is a smaller one of its kind.
    assert losses.ROWS[-1].within(suite.CPU_FLOPS).kind == losses.GIVEN


def test_long_rows_have_fewer_calls():
    made = {row.name: losses.rounds_of(row, Rounds()).repetitions for row in losses.ROWS}
    assert made == {
        **dict.fromkeys(("batch-256", "batch-1024", "given-128", "given-1024"), 50),
        **dict.fromkeys(("batch-4096", "given-4096"), 20),
        "batch-16384": 3,
        "batch-65536": 2,
    }
    assert losses.rounds_of(losses.ROWS[3], Rounds(warmup=0, repetitions=2)).repetitions == 2


@pytest.mark.parametrize(("row", "expected"), [(1, 3), (2, 1), (3, 1), (4, 0)], ids=lambda value: str(value))
def test_what_would_take_minutes_is_not_offered(row, expected):
    shape = losses.ROWS[row]
    queries, documents = (torch.empty(shape.Nq, length, 128, device="meta") for length in (32, 180))
    inputs = loss_steps.LargeStep(queries, documents)
    for offered in (lambda: inputs.chunks(100 * loss_steps.LONG), inputs.loop):
        if not expected:
            with pytest.raises(suite.Unavailable, match="a minute or more"):
                offered()
        else:
            assert len(offered()) in (1, expected)
    assert len(inputs.ours()) == 1


def test_the_suite_runs(ceilings, pylate):
    found = replace(losses.suite(), rows=(ROW, GIVEN))
    result = suite.run(found, CPU, torch.float32, Rounds(0, 2, 0), ceilings=ceilings)
    for row, present in zip(result["rows"], (("pylate_flash", "pylate_flash_loop"), OF_GIVEN), strict=True):
        for name in present:
            assert row["systems"][name]["status"] == "ok", row["systems"][name]
    assert result["rows"][1]["multiples"].keys() == {"pylate_flash_contrastive", "pylate_flash_cached"}
