from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pylate_flash.bench import calls, exact, suite
from pylate_flash.bench.protocol import Rounds, Sample
from pylate_flash.bench.suite import Candidate
from suites import launch

CPU = torch.device("cpu")
ROUNDS = Rounds(warmup=0, repetitions=2, flush_bytes=0)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def small(row):
    """The same row at a size for a test; no document is so short that PyLate's padding wins."""
    shortest = None if row.shortest is None else 30
    return replace(row, Nq=min(row.Nq, 3), Nd=min(row.Nd, 3), Lq=4, Ld=40, shortest=shortest, d=16)


@pytest.fixture
def few_in_turn(monkeypatch):
    monkeypatch.setattr(launch, "IN_TURN", 3)


by_name = {row.name: row for row in launch.ROWS}
each_row = pytest.mark.parametrize("row", launch.ROWS, ids=lambda row: row.name)


def inputs_of(row, dtype=torch.float32):
    if row.name in ("step-contrastive", "rerank"):
        pytest.importorskip("pylate")
    return launch.make_inputs(small(row), CPU, dtype)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_the_host_is_timed_over_a_batch_of_calls_and_then_waits_for_the_device(device, monkeypatch):
    events = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("wait"))
    stopwatch = launch.HostStopwatch(torch.device(device), calls=4)
    clock = iter([100.0, 100.5])
    monkeypatch.setattr(launch.time, "perf_counter", lambda: events.append("clock") or next(clock))
    assert stopwatch.time(lambda: events.append("call")) == Sample(0.125, 0.125)
    assert events == ["clock", *["call"] * 4, "clock", *(["wait"] if device != "cpu" else [])]
    assert "mean of 4" in stopwatch.clock


@pytest.mark.usefixtures("few_in_turn")
@each_row
def test_inputs_are_the_same_each_time(row):
    first, second = (inputs_of(row).reference() for _ in range(2))
    if isinstance(first, torch.Tensor):
        first, second = (first,), (second,)
    assert all(one is two is None or torch.equal(one, two) for one, two in zip(first, second, strict=True))


def test_the_rows_are_what_their_names_say():
    def masks(name):
        inputs = launch.make_inputs(small(by_name[name]), CPU, torch.bfloat16)
        return [None if mask is None else mask.dtype for mask in (inputs.queries_mask, inputs.documents_mask)]

    for name in ("maxsim-batch", "maxsim-query", "maxsim-rerank", "hidden"):
        assert masks(name) == [None, None]
    assert masks("maxsim-documents-mask") == masks("maxsim-candidates") == [None, torch.bool]
    assert masks("hidden-documents-mask") == [None, torch.bool]
    for name in ("maxsim-masks", "maxsim-pairwise", "hidden-masks", "step-cross-entropy-masks", "step-maxsim-masks"):
        assert masks(name) == [torch.bool, torch.bool]
    assert masks("maxsim-int64-masks") == [torch.int64, torch.int64]
    under_autocast = ("maxsim-autocast", "step-cross-entropy", "step-maxsim", "step-contrastive")
    for name, dtype in itertools.product(under_autocast, (torch.float32, torch.bfloat16)):
        inputs = launch.make_inputs(small(by_name[name]), CPU, dtype)
        assert inputs.cast == torch.bfloat16
        # A model's embeddings under autocast, and what `Contrastive` makes of them when it normalises.
        assert inputs.queries.dtype == (torch.bfloat16 if name == "step-contrastive" else torch.float32)
        assert inputs.queries.requires_grad == inputs.documents.requires_grad == name.startswith("step")
    for name in ("step-cross-entropy-masks", "step-maxsim-masks", "step-new-lengths"):
        inputs = launch.make_inputs(small(by_name[name]), CPU, torch.bfloat16)
        for call in inputs.calls if name == "step-new-lengths" else [inputs]:
            assert call.cast is None
            assert call.queries.dtype == torch.bfloat16
            assert call.queries.requires_grad
            assert call.documents.requires_grad
    assert by_name["maxsim-query"].shape == "1 x 100, 32 x 180"
    assert by_name["maxsim-rerank"].shape == "1 x 1000, 32 x 300"
    assert by_name["step-new-lengths"].shape == "32 x 32, 32 x 61..760, another length every time"
    assert by_name["step-maxsim"].shape == "32 x 32, 32 x 180, autocast"
    assert by_name["maxsim-candidates"].shape == "32 x 8 of its own, 32 x 180"
    assert by_name["varlen-changing"].shape == "1 x 100, 32 x 40..180, 64 in turn"
    assert by_name["hidden"].shape == "2 x 32, 32 x 180, 768 to 128"
    assert len(by_name) == len(launch.ROWS)


def test_masks_are_prefixes_of_many_lengths():
    mask = calls.prefixes(50, 9, generator=torch.Generator().manual_seed(0))
    lengths = calls.lengths_of(mask)
    assert lengths.dtype == torch.int32
    assert set(lengths.tolist()) == {5, 6, 7, 8, 9}
    assert torch.equal(mask, torch.arange(9) < lengths.unsqueeze(1))


@pytest.mark.parametrize("name", ["varlen-changing", "varlen-candidates"])
def test_the_number_of_tokens_is_another_at_every_call(name):
    row = replace(small(by_name[name]), Nd=40 if name == "varlen-changing" else 20)
    inputs = launch.make_inputs(row, CPU, torch.float32)
    batches = inputs.calls
    totals = [len(batch.documents) for batch in batches]
    assert len(set(totals)) == len(totals) == inputs.n_read == 64
    assert all(int(batch.lengths.sum()) == total for batch, total in zip(batches, totals, strict=True))
    assert any(0 in batch.lengths for batch in batches) == (name == "varlen-candidates")
    assert not inputs.replayable


@pytest.mark.parametrize("name", ["maxsim-new-lengths", "step-new-lengths"])
def test_no_length_is_met_twice_in_a_run(name):
    row = replace(by_name[name], Nq=2, Nd=2, Lq=4, d=16)
    inputs = launch.make_inputs(row, CPU, torch.float32)
    lengths = [call.documents.shape[1] for call in inputs.calls]
    rounds = Rounds()
    # Those that are timed, and some that choose between ways.
    assert len(set(lengths)) == len(lengths) > launch.CALLS * (rounds.warmup + rounds.repetitions + 6)
    for call in inputs.calls:
        assert call.documents.is_contiguous()
        assert call.documents_mask is None or call.documents_mask.shape == call.documents.shape[:2]
        torch.testing.assert_close(call.documents.norm(dim=-1), torch.ones(2, call.documents.shape[1]))
    assert not inputs.replayable


def test_calls_in_turn_are_all_read_in_order():
    made = []

    def call(index):
        made.append(index)
        return torch.tensor([float(index)])

    turn = launch.Turn([partial(call, index) for index in range(3)], 2)
    turn()
    assert turn.read(turn()).flatten().tolist() == [0, 1]
    assert made == [0, 1, 0]
    turn()
    assert made[-1] == 2
    assert turn.read(torch.tensor([9.0])).flatten().tolist() == [0, 1]
    turn()
    # What is wrong in the last call is not hidden by another one.
    assert turn.read(torch.tensor([9.0])).flatten().tolist() == [9, 1]


def test_steps_in_turn_are_compared_as_one():
    steps = [exact.Step(torch.tensor(float(n)), None, torch.full((n,), 1.0), torch.full((2, n), 2.0)) for n in (1, 2)]
    losses, _, of_queries, of_documents = launch.joined(steps)
    assert losses.tolist() == [1, 2]
    assert of_queries.tolist() == [1] * 3
    assert of_documents.tolist() == [2] * 6


def test_wrong_scores_are_wrong_and_wrong_gradients_have_their_own_error():
    error, expected = launch.suite().error, torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert error(torch.tensor([1.0, 2.0]), expected) == 0
    assert error(torch.tensor([1.0, 2.1]), expected) == float("inf")
    step = exact.Step(expected[0], None, expected, expected)
    assert error(step._replace(grad_queries=expected * 1.1), step) == pytest.approx(0.1)
    assert error(step._replace(loss=expected[0] * 1.1), step) == float("inf")
    assert error(step._replace(grad_documents=expected[:1]), step) == float("inf")


@pytest.mark.parametrize(("system", "backend"), [("lik", "lik"), ("flash_maxsim", "flash"), ("torch", "torch")])
def test_pylates_own_loss_gets_the_backend_of_the_system(system, backend, monkeypatch):
    colbert = pytest.importorskip("pylate.scores.colbert")
    inputs = inputs_of(by_name["step-contrastive"])
    seen = []

    def watch(self, *arguments, backend, **options):
        seen.append(backend)
        raise RuntimeError("no GPU here")

    monkeypatch.setattr(colbert.ColBERTScores, "__call__", watch)
    (candidate,) = getattr(inputs, system)()
    with pytest.raises(RuntimeError, match="no GPU here"):
        candidate.call()
    assert seen == [backend]


def test_the_suite_runs_here_beside_its_floor(ceilings):
    own = launch.suite()
    names = ["maxsim-masks", "varlen", "step-cross-entropy"]
    tiny = replace(own, rows=[small(by_name[name]) for name in names])
    result = suite.run(tiny, CPU, torch.float32, ROUNDS, ceilings=ceilings)
    assert [row["name"] for row in result["rows"]] == names
    for row in result["rows"]:
        systems = row["systems"]
        assert systems["pylate_flash"]["status"] == systems["torch"]["status"] == "ok"
        is_step = row["name"].startswith("step")
        yardsticks = ("torch_operation", "torch_gradient") if is_step else ("torch_operation",)
        assert row["bound"] in yardsticks
        assert row["floor_ms"] == min(systems[name]["median_ms"] for name in yardsticks)
        assert systems["torch_gradient"]["status"] == ("ok" if is_step else "absent")
        assert systems["pylate_flash_graph"] == {"status": "absent", "reason": "a CUDA graph needs a CUDA GPU"}
        assert systems["triton_launch"]["status"] == systems["bare_launch"]["status"] == "absent"
        assert row["multiples"]["triton_launch"] is None
        assert (row["multiples"]["torch_gradient"] is not None) == is_step
        assert row["best_peer"] == "torch"
    assert result["facts"] == {}


def test_a_call_that_waits_for_the_device_is_found_and_the_mode_restored(monkeypatch):
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def waits():
        if modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    def breaks():
        if modes[-1] == "error":
            raise RuntimeError("out of memory")

    assert not launch._waits(Candidate("free", lambda: None))
    assert launch._waits(Candidate("waits", waits))
    with pytest.raises(RuntimeError, match="out of memory"):
        launch._waits(Candidate("breaks", breaks))
    assert modes == ["default"] + ["error", "default"] * 3


def on_a_gpu(**attributes):
    return SimpleNamespace(device=torch.device("cuda", 0), ours=lambda: [Candidate("maxsim", None)], **attributes)


def test_a_call_that_waits_is_not_captured(monkeypatch):
    monkeypatch.setattr(launch, "_waits", lambda candidate: True)
    with pytest.raises(suite.Unavailable, match="waits for the device"):
        launch.replayed(on_a_gpu(replayable=True))


@pytest.mark.usefixtures("few_in_turn")
def test_only_the_same_call_without_gradients_is_captured():
    with pytest.raises(suite.Unavailable, match="the same inputs every time"):
        launch.replayed(on_a_gpu(replayable=False))
    replayable = {row.name: launch.make_inputs(small(row), CPU, torch.float32).replayable for row in launch.ROWS}
    never = {"maxsim-new-lengths", "varlen-changing", "varlen-candidates"}
    never |= {name for name in by_name if name.startswith("step")}
    assert {name for name, can in replayable.items() if not can} == never


def test_compilations_are_counted_and_the_hook_is_given_back(monkeypatch):
    runtime = pytest.importorskip("triton").knobs.runtime
    before = object()
    monkeypatch.setattr(runtime, "jit_post_compile_hook", before)
    lengths = []

    def compile_for_a_new_length(inputs):
        def call():
            if inputs.queries.shape[1] not in lengths:
                lengths.append(inputs.queries.shape[1])
                runtime.jit_post_compile_hook(key="", repr="kernel", fn=None, compile={}, is_manual_warmup=False)

        return [Candidate("maxsim", call)]

    monkeypatch.setattr(calls.Padded, "ours", compile_for_a_new_length)
    monkeypatch.setattr(launch, "SHAPES", 5)
    assert launch.count_here(CPU, torch.float32) == len(lengths) > 1
    assert runtime.jit_post_compile_hook is before


def test_the_shapes_are_many_and_always_the_same():
    shapes = launch.random_shapes()
    assert len(shapes) == launch.SHAPES >= 50
    assert shapes == launch.random_shapes()
    for field in ("Nd", "Lq", "Ld"):
        assert len({getattr(shape, field) for shape in shapes}) > 20
    assert {shape.Nq == 1 for shape in shapes} == {True, False}


def test_a_count_that_fails_is_said_and_ends_nothing(monkeypatch):
    def fail(*arguments):
        raise RuntimeError("no space left")

    monkeypatch.setattr(launch.fresh, "run", fail)
    ((name, value),) = launch.compilations(torch.device("cuda", 0), torch.bfloat16).items()
    assert "compilations" in name
    assert value == "not counted: no space left"


def test_a_count_is_that_of_a_fresh_process(monkeypatch):
    asked = []
    monkeypatch.setattr(launch.fresh, "run", lambda *arguments: asked.append(arguments) or ["7"])
    assert list(launch.compilations(torch.device("cuda", 1), torch.bfloat16).values()) == [7]
    assert asked == [(Path(launch.__file__), ["cuda:1", "bfloat16"])]


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["maxsim-batch", "maxsim-masks", "maxsim-autocast", "varlen", "hidden-masks"])
def test_a_replayed_graph_is_right(name):
    inputs = launch.make_inputs(by_name[name], torch.device("cuda", 0), torch.bfloat16)
    with torch.no_grad():
        (candidate,) = launch.replayed(inputs)
        assert launch.suite().error(candidate.call(), inputs.reference()) < 5 * inputs.accuracy(torch.bfloat16)


@needs_gpu
@pytest.mark.gpu
@each_row
def test_our_call_is_right_on_a_gpu(row):
    if row.name in ("step-contrastive", "rerank"):
        pytest.importorskip("pylate")
    inputs = launch.make_inputs(row, torch.device("cuda", 0), torch.bfloat16)
    with torch.no_grad():
        (candidate,) = inputs.ours()
        error = launch.suite().error(candidate.read(candidate.call()), inputs.reference())
        assert error < 5 * inputs.accuracy(torch.bfloat16)


def test_slow_calls_are_made_a_fifth_as_often():
    rounds = Rounds()
    assert launch.rounds_of(by_name["step-maxsim"], rounds) is rounds
    assert launch.rounds_of(by_name["rerank"], rounds) == Rounds(2, 10, rounds.flush_bytes)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("launched", [launch.empty_kernel, launch.bare_launch])
def test_the_empty_kernel_launches(launched):
    inputs = launch.make_inputs(launch.ROWS[0], torch.device("cuda", 0), torch.bfloat16)
    try:
        (candidate,) = launched(inputs)
    except suite.Unavailable as why:
        pytest.skip(str(why))
    candidate.call()
    torch.cuda.synchronize()
