"""The suite `launch`: how the host is timed, what its rows call in turn, what is captured, and what compiles."""

from __future__ import annotations

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
by_name = {row.name: row for row in launch.ROWS}


def small(row):
    """The same row at a test size."""
    shortest = None if row.shortest is None else 30
    return replace(row, Nq=min(row.Nq, 3), Nd=min(row.Nd, 3), Lq=4, Ld=40, shortest=shortest, d=16)


def inputs_of(name, dtype=torch.float32):
    return launch.make_inputs(small(by_name[name]), CPU, dtype)


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


@pytest.mark.parametrize(
    ("name", "queries_mask", "documents_mask", "cast", "dtype"),
    [
        ("maxsim-batch", None, None, None, torch.float16),
        ("maxsim-documents-mask", None, torch.bool, None, torch.float16),
        ("maxsim-masks", torch.bool, torch.bool, None, torch.float16),
        ("maxsim-int64-masks", torch.int64, torch.int64, None, torch.float16),
        ("maxsim-candidates", None, torch.bool, None, torch.float16),
        ("maxsim-pairwise", torch.bool, torch.bool, None, torch.float16),
        ("maxsim-autocast", torch.bool, torch.bool, torch.float16, torch.float32),
        ("step-cross-entropy-masks", torch.bool, torch.bool, None, torch.float16),
        ("step-cross-entropy", torch.bool, torch.bool, torch.float16, torch.float32),
        ("step-maxsim-masks", torch.bool, torch.bool, None, torch.float16),
        # A model's embeddings under autocast, as `Contrastive` normalises them.
        ("step-contrastive", torch.bool, torch.bool, torch.float16, torch.float16),
    ],
)
def test_rows_are_what_their_names_say(name, queries_mask, documents_mask, cast, dtype):
    inputs = inputs_of(name, torch.float16)
    masks = [None if mask is None else mask.dtype for mask in (inputs.queries_mask, inputs.documents_mask)]
    assert masks == [queries_mask, documents_mask]
    assert inputs.cast == cast
    assert inputs.queries.dtype == inputs.documents.dtype == dtype
    assert inputs.queries.requires_grad == inputs.documents.requires_grad == name.startswith("step")


@pytest.mark.parametrize("name", ["varlen-changing", "varlen-candidates"])
def test_the_number_of_tokens_is_another_at_every_call(name):
    row = replace(small(by_name[name]), Nd=40 if name == "varlen-changing" else 20)
    inputs = launch.make_inputs(row, CPU, torch.float32)
    totals = [len(batch.documents) for batch in inputs.calls]
    assert len(set(totals)) == len(totals) == inputs.n_read == 64
    assert all(int(batch.lengths.sum()) == total for batch, total in zip(inputs.calls, totals, strict=True))
    assert any(0 in batch.lengths for batch in inputs.calls) == (name == "varlen-candidates")


@pytest.mark.parametrize("name", ["maxsim-new-lengths", "step-new-lengths"])
def test_no_length_is_met_twice_in_a_run(name):
    inputs = launch.make_inputs(replace(by_name[name], Nq=2, Nd=2, Lq=4, d=16), CPU, torch.float32)
    lengths = [call.documents.shape[1] for call in inputs.calls]
    rounds = Rounds()
    # The timed calls, and some that choose between candidates.
    assert len(set(lengths)) == len(lengths) > launch.CALLS * (rounds.warmup + rounds.repetitions + 6)
    for call in inputs.calls:
        assert call.documents.is_contiguous()
        assert call.documents.requires_grad == name.startswith("step")
        assert call.documents_mask is None or call.documents_mask.shape == call.documents.shape[:2]


def test_calls_in_turn_are_all_read_in_order():
    called = []

    def call(index):
        called.append(index)
        return torch.tensor([float(index)])

    turn = launch.Turn([partial(call, index) for index in range(3)], 2)
    turn()
    assert turn.read(turn()).flatten().tolist() == [0, 1]
    assert called == [0, 1, 0]
    turn()
    assert called[-1] == 2
    assert turn.read(torch.tensor([9.0])).flatten().tolist() == [0, 1]
    turn()
    # A wrong result of the last call is not hidden by another one.
    assert turn.read(torch.tensor([9.0])).flatten().tolist() == [9, 1]


def test_steps_in_turn_are_compared_as_one():
    steps = [exact.Step(torch.tensor(float(n)), None, torch.full((n,), 1.0), torch.full((2, n), 2.0)) for n in (1, 2)]
    losses, _, grad_queries, grad_documents = launch.joined(steps)
    assert losses.tolist() == [1, 2]
    assert grad_queries.tolist() == [1] * 3
    assert grad_documents.tolist() == [2] * 6


def test_wrong_scores_are_wrong_and_wrong_gradients_have_their_own_error():
    error, expected = launch.suite().error, torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert error(torch.tensor([1.0, 2.1]), expected) == float("inf")
    step = exact.Step(expected[0], None, expected, expected)
    assert error(step._replace(grad_queries=expected * 1.1), step) == pytest.approx(0.1)
    assert error(step._replace(loss=expected[0] * 1.1), step) == float("inf")
    assert error(step._replace(grad_documents=expected[:1]), step) == float("inf")


@pytest.mark.parametrize(("system", "backend"), [("lik", "lik"), ("flash_maxsim", "flash"), ("torch", "torch")])
def test_pylates_own_loss_gets_the_backend_of_the_system(system, backend, monkeypatch):
    colbert = pytest.importorskip("pylate.scores.colbert")
    seen = []

    def watch(self, *arguments, backend, **options):
        seen.append(backend)
        raise RuntimeError("no GPU here")

    monkeypatch.setattr(colbert.ColBERTScores, "__call__", watch)
    (candidate,) = getattr(inputs_of("step-contrastive"), system)()
    with pytest.raises(RuntimeError, match="no GPU here"):
        candidate.call()
    assert seen == [backend]


def test_a_call_that_waits_for_the_device_is_found_and_the_mode_restored(monkeypatch):
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def raises(message):
        if modes[-1] == "error":
            raise RuntimeError(message)

    assert not launch._waits(Candidate("free", lambda: None))
    assert launch._waits(Candidate("waits", lambda: raises("called a synchronizing CUDA operation")))
    with pytest.raises(RuntimeError, match="out of memory"):
        launch._waits(Candidate("breaks", lambda: raises("out of memory")))
    assert modes == ["default"] + ["error", "default"] * 3


def test_only_the_same_call_without_gradients_that_waits_for_nothing_is_captured(monkeypatch):
    monkeypatch.setattr(launch, "IN_TURN", 3)
    monkeypatch.setattr(launch, "_waits", lambda candidate: True)
    for replayable, reason in ((False, "the same inputs every time"), (True, "waits for the device")):
        call = SimpleNamespace(device=torch.device("cuda", 0), ours=lambda: [None], replayable=replayable)
        with pytest.raises(suite.Unavailable, match=reason):
            launch.replayed(call)
    with pytest.raises(suite.Unavailable, match="needs a CUDA GPU"):
        launch.replayed(inputs_of("maxsim-batch"))
    never = {"maxsim-new-lengths", "varlen-changing", "varlen-candidates"}
    never |= {name for name in by_name if name.startswith("step")}
    assert {name for name in by_name if not inputs_of(name).replayable} == never


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


def test_a_count_is_that_of_a_fresh_process_and_one_that_fails_is_said_and_ends_nothing(monkeypatch):
    commands = []
    monkeypatch.setattr(launch.fresh, "run", lambda *arguments: commands.append(arguments) or ["7"])
    assert list(launch.compilations(torch.device("cuda", 1), torch.bfloat16).values()) == [7]
    assert launch.compilations(CPU, torch.float32) == {}
    assert commands == [(Path(launch.__file__), ["cuda:1", "bfloat16"])]

    def fail(*arguments):
        raise RuntimeError("no space left")

    monkeypatch.setattr(launch.fresh, "run", fail)
    ((name, value),) = launch.compilations(torch.device("cuda", 0), torch.bfloat16).items()
    assert "compilations" in name
    assert value == "not counted: no space left"


needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_gpu) for name in by_name])
def test_our_call_is_right_on_a_gpu_and_a_replayed_graph_too(name):
    if name in ("step-contrastive", "rerank"):
        pytest.importorskip("pylate")
    inputs = launch.make_inputs(by_name[name], torch.device("cuda", 0), torch.bfloat16)
    with torch.no_grad():
        candidates = inputs.ours()
        if name in ("maxsim-batch", "maxsim-masks", "maxsim-autocast", "varlen", "hidden-masks"):
            candidates = [*candidates, *launch.replayed(inputs)]
        for candidate in candidates:
            error = launch.suite().error(candidate.read(candidate.call()), inputs.reference())
            assert error < 5 * inputs.accuracy(torch.bfloat16)


@pytest.mark.parametrize("launched", [pytest.param(way, marks=needs_gpu) for way in ("empty_kernel", "bare_launch")])
def test_the_empty_kernel_launches(launched):
    inputs = launch.make_inputs(launch.ROWS[0], torch.device("cuda", 0), torch.bfloat16)
    try:
        (candidate,) = getattr(launch, launched)(inputs)
    except suite.Unavailable as why:
        pytest.skip(str(why))
    candidate.call()
    torch.cuda.synchronize()
