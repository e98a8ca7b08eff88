from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pylate_flash.bench import forward, launch, suite, varlen
from pylate_flash.bench.protocol import Rounds, relative_error
from pylate_flash.bench.suite import Candidate

CPU = torch.device("cpu")
ROUNDS = Rounds(warmup=0, repetitions=2, flush_bytes=0)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def test_the_suite_runs_here_beside_its_floor(ceilings):
    result = suite.run(launch.suite(), CPU, torch.float32, ROUNDS, ceilings=ceilings, rows=["query", "packed"])
    assert [row["name"] for row in result["rows"]] == ["query", "packed"]
    for row in result["rows"]:
        systems = row["systems"]
        assert systems["pylate_flash"]["status"] == systems["torch"]["status"] == "ok"
        assert row["bound"] == "torch_operation"
        assert row["floor_ms"] == systems["torch_operation"]["median_ms"]
        assert systems["pylate_flash_graph"] == {"status": "absent", "reason": "a CUDA graph needs a CUDA GPU"}
        assert systems["triton_launch"]["status"] == "absent"
        assert row["best_peer"] == "torch"
    assert result["facts"] == {}


def test_both_kinds_of_inputs_go_to_their_own_functions():
    padded = launch.make_inputs(launch.ROWS[0], CPU, torch.float32)
    packed = launch.make_inputs(launch.ROWS[2], CPU, torch.float32)
    assert isinstance(padded, forward.Inputs)
    assert isinstance(packed, varlen.Inputs)
    chosen = launch.either(lambda inputs: ["padded"], lambda inputs: ["packed"])
    assert chosen(padded) == ["padded"]
    assert chosen(packed) == ["packed"]


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


def test_a_call_that_waits_is_not_captured(monkeypatch):
    monkeypatch.setattr(launch, "_waits", lambda candidate: True)
    monkeypatch.setattr(launch, "ours", lambda inputs: [Candidate("maxsim", lambda: None)])
    with pytest.raises(suite.Unavailable, match="waits for the device"):
        launch.replayed(SimpleNamespace(queries=SimpleNamespace(is_cuda=True)))


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

    monkeypatch.setattr(forward, "ours", compile_for_a_new_length)
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
    monkeypatch.setattr(launch.fresh, "run", lambda *arguments: asked.append(arguments) or "7")
    assert list(launch.compilations(torch.device("cuda", 1), torch.bfloat16).values()) == [7]
    assert asked == [("pylate_flash.bench.launch", "cuda:1", "bfloat16")]


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("row", launch.ROWS[:2], ids=lambda row: row.name)
def test_a_replayed_graph_is_right(row):
    inputs = launch.make_inputs(row, torch.device("cuda", 0), torch.bfloat16)
    with torch.no_grad():
        (candidate,) = launch.replayed(inputs)
        assert relative_error(candidate.call(), launch.reference(inputs)) < 1e-5


@needs_gpu
@pytest.mark.gpu
def test_the_empty_kernel_launches():
    inputs = launch.make_inputs(launch.ROWS[0], torch.device("cuda", 0), torch.bfloat16)
    (candidate,) = launch.empty_kernel(inputs)
    candidate.call()
    torch.cuda.synchronize()
