from __future__ import annotations

import math

import pytest
import torch

from pylate_flash.bench import forward, suite
from pylate_flash.bench.peers import Peer
from pylate_flash.bench.protocol import Rounds, Sample
from pylate_flash.bench.suite import Candidate, Observer, System

CPU = torch.device("cpu")
ROUNDS = Rounds(warmup=1, repetitions=2, flush_bytes=0)


def right(inputs):
    """Candidates with the right scores, in the type that a system returns."""
    scores = forward.reference(inputs).float()
    return [Candidate("right", lambda: scores)]


def run(found, ceilings, **options):
    return suite.run(found, CPU, torch.float32, ROUNDS, ceilings=ceilings, **options)


def times(factor):
    """A system whose scores are off by that factor."""
    return System("peer", "Peer", lambda inputs: [Candidate("scaled", lambda: forward.reference(inputs) * factor)])


def test_a_right_system_is_timed_and_compared(tiny_suite, ceilings):
    found = tiny_suite(System(suite.OURS, "ours", right), System("peer", "Peer", right))
    result = run(found, ceilings)
    assert [row["name"] for row in result["rows"]] == ["one", "several"]
    assert result["complete"]
    for row in result["rows"]:
        ours, peer = row["systems"][suite.OURS], row["systems"]["peer"]
        assert ours["status"] == peer["status"] == "ok"
        assert ours["repetitions"] == 2
        assert ours["error"] < 1e-6
        assert ours["over_floor"] == pytest.approx(ours["median_ms"] / row["floor_ms"])
        assert row["best_peer"] == "peer"
        assert row["best_peer_over_ours"] == pytest.approx(peer["median_ms"] / ours["median_ms"])


@pytest.mark.parametrize("factor", [1.02, math.nan, math.inf])
def test_a_wrong_system_is_marked_and_not_timed(tiny_suite, ceilings, factor):
    result = run(tiny_suite(System(suite.OURS, "ours", right), times(factor)), ceilings, rows=["one"])
    (row,) = result["rows"]
    state = row["systems"]["peer"]
    assert state["status"] == "wrong"
    assert "median_ms" not in state
    assert state["error"] == (pytest.approx(0.02) if math.isfinite(factor) else None)
    assert row["best_peer"] is None
    assert row["best_peer_over_ours"] is None
    assert row["systems"][suite.OURS]["status"] == "ok"


def test_ours_past_its_promise_is_timed_and_marked(tiny_suite, ceilings):
    slightly_off = System(
        suite.OURS, "ours", lambda inputs: [Candidate("off", lambda: forward.reference(inputs) * 1.0001)]
    )
    (row,) = run(tiny_suite(slightly_off, times(1.0001)), ceilings, rows=["one"])["rows"]
    assert row["systems"][suite.OURS]["status"] == "inaccurate"
    assert row["systems"][suite.OURS]["median_ms"] > 0
    assert row["systems"]["peer"]["status"] == "ok"


def test_a_result_that_goes_wrong_while_it_is_timed_is_found(tiny_suite, ceilings):
    def racy(inputs):
        scores = forward.reference(inputs)
        calls = iter(range(100))
        return [Candidate("racy", lambda: scores * (1.0 if next(calls) < 3 else 2.0))]

    (row,) = run(tiny_suite(System(suite.OURS, "ours", racy)), ceilings, rows=["one"])["rows"]
    assert row["systems"][suite.OURS]["status"] == "wrong"
    assert "race" in row["systems"][suite.OURS]["reason"]


def test_a_candidate_that_fails_or_is_wrong_leaves_the_others(tiny_suite, ceilings):
    def mixed(inputs):
        def fail():
            raise RuntimeError("tried to allocate 80 GiB\nmore")

        return [Candidate("fails", fail), *times(3.0).candidates(inputs), *right(inputs)]

    (row,) = run(tiny_suite(System("peer", "Peer", mixed)), ceilings, rows=["one"])["rows"]
    assert row["systems"]["peer"]["status"] == "ok"
    assert row["systems"]["peer"]["variant"] == "right"


def test_a_system_that_raises_is_marked_with_the_first_line_of_its_error(tiny_suite, ceilings):
    def fail(inputs):
        raise RuntimeError("tried to allocate 80 GiB\nmore")

    def fail_later(inputs):
        return [Candidate("later", lambda: fail(inputs))]

    found = tiny_suite(System("early", "Early", fail), System("later", "Later", fail_later))
    (row,) = run(found, ceilings, rows=["one"])["rows"]
    assert row["systems"]["early"] == {"status": "failed", "reason": "RuntimeError: tried to allocate 80 GiB"}
    assert row["systems"]["later"] == {"status": "failed", "reason": "later: RuntimeError: tried to allocate 80 GiB"}


def test_the_fastest_right_candidate_is_kept(tiny_suite, ceilings, monkeypatch):
    duration = {}

    class Script:
        clock, flush_bytes = "script", 0

        def time(self, call):
            call()
            return Sample(duration[call], 0.0)

    def three(inputs):
        found = [Candidate(label, right(inputs)[0].call) for label in ("slow", "fast", "middling")]
        found = [Candidate(candidate.label, lambda call=candidate.call: call()) for candidate in found]
        duration.update({candidate.call: seconds for candidate, seconds in zip(found, (3.0, 1.0, 2.0), strict=True)})
        return found

    monkeypatch.setattr(suite, "make_stopwatch", lambda device, flush_bytes: Script())
    (row,) = run(tiny_suite(System("peer", "Peer", three)), ceilings, rows=["one"])["rows"]
    assert row["systems"]["peer"]["variant"] == "fast"
    assert row["systems"]["peer"]["median_ms"] == 1000.0


def test_what_is_not_installed_is_reported_as_absent(tiny_suite, ceilings, monkeypatch):
    missing = Peer("no-such-distribution", "no_such_module")
    monkeypatch.setattr("pylate_flash.bench.suite.measure_ceilings", None)
    assert "not installed" in missing.unavailable(torch.device("cuda"))
    assert missing.version() is None
    found = tiny_suite(System(suite.OURS, "ours", right), System("missing", "Missing", right, peer=missing))
    (row,) = run(found, ceilings, rows=["one"])["rows"]
    assert row["systems"]["missing"] == {"status": "absent", "reason": "its kernels need a CUDA GPU"}
    (row,) = run(found, ceilings, rows=["one"], with_peers=False)["rows"]
    assert "missing" not in row["systems"]


def test_rows_are_kept_as_they_come(tiny_suite, ceilings):
    seen, kept = [], []

    class Listener(Observer):
        def finished(self, row):
            seen.append(row["name"])

    run(
        tiny_suite(System(suite.OURS, "ours", right)),
        ceilings,
        observer=Listener(),
        keep=lambda result: kept.append((len(result["rows"]), result["complete"])),
    )
    assert seen == ["one", "several"]
    assert kept == [(1, False), (2, True)]


def test_calls_run_without_gradients(tiny_suite, ceilings):
    modes = []

    def watch(inputs):
        scores = forward.reference(inputs)

        def call():
            modes.append(torch.is_grad_enabled())
            return scores

        return [Candidate("watch", call)]

    run(tiny_suite(System(suite.OURS, "ours", watch)), ceilings, rows=["one"])
    assert modes
    assert not any(modes)


def test_an_unknown_row_is_named_with_those_there_are(tiny_suite, ceilings):
    with pytest.raises(ValueError, match="no 'three', expected some of one, several"):
        run(tiny_suite(), ceilings, rows=["three"])


def test_tuning_of_a_peer_is_forgotten_and_nobody_elses(monkeypatch):
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    ours, theirs = object.__new__(autotuner), object.__new__(autotuner)
    for tuner in (ours, theirs):
        tuner.cache, tuner.cache_results = {"key": "choice"}, True
    modules = {"some_peer": object, "some_peer.kernels": object, "some_peer_of_mine": object}
    for name in modules:
        monkeypatch.setitem(__import__("sys").modules, name, type(torch)(name))
    __import__("sys").modules["some_peer.kernels"].kernel = theirs
    __import__("sys").modules["some_peer_of_mine"].kernel = ours
    Peer("some-peer", "some_peer").forget_tuning()
    assert theirs.cache == {}
    assert not theirs.cache_results
    assert ours.cache == {"key": "choice"}
