from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from pylate_flash.bench import forward, suite
from pylate_flash.bench.peers import Peer
from pylate_flash.bench.protocol import Rounds, Sample
from pylate_flash.bench.suite import Candidate, Observer, System, Unavailable

CPU = torch.device("cpu")
ROUNDS = Rounds(warmup=1, repetitions=2, flush_bytes=0)


def right(inputs):
    """Candidates with the right scores, in the type that a system returns."""
    scores = inputs.reference().float()
    return [Candidate("right", lambda: scores)]


def run(found, ceilings, **options):
    return suite.run(found, CPU, torch.float32, ROUNDS, ceilings=ceilings, **options)


def times(factor):
    """A system whose scores are off by that factor."""
    return System("peer", "Peer", lambda inputs: [Candidate("scaled", lambda: inputs.reference() * factor)])


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
    slightly_off = System(suite.OURS, "ours", lambda inputs: [Candidate("off", lambda: inputs.reference() * 1.0001)])
    (row,) = run(tiny_suite(slightly_off, times(1.0001)), ceilings, rows=["one"])["rows"]
    assert row["systems"][suite.OURS]["status"] == "inaccurate"
    assert row["systems"][suite.OURS]["median_ms"] > 0
    assert row["systems"]["peer"]["status"] == "ok"


def test_a_result_that_goes_wrong_while_it_is_timed_is_found(tiny_suite, ceilings):
    def racy(inputs):
        scores = inputs.reference()
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


def test_the_fastest_right_candidate_is_kept(tiny_suite, ceilings):
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

    found = replace(tiny_suite(System("peer", "Peer", three)), stopwatch=lambda device, flush_bytes: Script())
    (row,) = run(found, ceilings, rows=["one"])["rows"]
    assert row["systems"]["peer"]["variant"] == "fast"
    assert row["systems"]["peer"]["median_ms"] == 1000.0


@pytest.mark.parametrize(("quick", "calls"), [(False, 6), (True, 1)])
def test_a_quick_run_chooses_a_candidate_by_one_call(tiny_suite, ceilings, quick, calls):
    counts = [0, 0]

    def candidates(inputs):
        scores = inputs.reference().float()

        def counting(index):
            counts[index] += 1
            return scores

        return [Candidate(str(index), lambda index=index: counting(index)) for index in range(2)]

    run(tiny_suite(System("peer", "Peer", candidates)), ceilings, rows=["one"], quick=quick)
    # Both are checked; the one that is kept is timed, and checked once more.
    assert sorted(counts) == [1 + calls, 2 + calls + ROUNDS.warmup + ROUNDS.repetitions]


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


def test_what_a_machine_or_an_input_does_not_allow_is_absent_with_its_reason(tiny_suite, ceilings):
    def refuse(inputs):
        raise Unavailable("needs a full moon")

    (row,) = run(tiny_suite(System("peer", "Peer", refuse)), ceilings, rows=["one"])["rows"]
    assert row["systems"]["peer"] == {"status": "absent", "reason": "needs a full moon"}


def test_a_peer_is_measured_where_it_computes(monkeypatch):
    anywhere, cpu_only = Peer("torch", "torch", device=None), Peer("torch", "torch", device="cpu")
    cuda = torch.device("cuda")
    assert anywhere.unavailable(cuda) is anywhere.unavailable(CPU) is cpu_only.unavailable(CPU) is None
    assert cpu_only.unavailable(cuda) == "it computes on the CPU only"


def test_a_result_is_read_after_the_call(tiny_suite, ceilings):
    def listed(inputs):
        scores = inputs.reference().float()
        return [Candidate("listed", scores.tolist, torch.tensor)]

    (row,) = run(tiny_suite(System("peer", "Peer", listed)), ceilings, rows=["one"])["rows"]
    assert row["systems"]["peer"]["status"] == "ok"
    assert row["systems"]["peer"]["error"] < 1e-6


def test_our_time_is_a_multiple_of_that_of_what_is_counted(tiny_suite, ceilings):
    peer = System("peer", "Peer", right, counted=True)
    (row,) = run(tiny_suite(System(suite.OURS, "ours", right), peer), ceilings, rows=["one"])["rows"]
    times = [row["systems"][name]["median_ms"] for name in (suite.OURS, "peer")]
    assert row["multiples"] == {"peer": pytest.approx(times[0] / times[1])}
    (row,) = run(tiny_suite(System(suite.OURS, "ours", right)), ceilings, rows=["one"])["rows"]
    assert "multiples" not in row


def test_inputs_may_have_an_accuracy_of_their_own(tiny_suite, ceilings):
    off = System(suite.OURS, "ours", lambda inputs: [Candidate("off", lambda: inputs.reference() * 1.0001)])
    for accuracy, status in ((1e-3, "ok"), (1e-6, "inaccurate")):
        found = replace(tiny_suite(off), accuracy=lambda inputs, dtype, accuracy=accuracy: accuracy)
        (row,) = run(found, ceilings, rows=["one"])["rows"]
        assert row["systems"][suite.OURS]["status"] == status


def test_a_yardstick_is_the_floor_and_neither_checked_nor_compared(tiny_suite, ceilings):
    durations = {"ours": 6e-3, "peer": 8e-3, "slow": 4e-3, "fast": 2e-3}

    class Script:
        clock, flush_bytes = "script", 0

        def time(self, call):
            return Sample(durations[call()], 0.0)

    def named(name, yardstick):
        def read(inputs):
            return None if yardstick else inputs.reference()

        return System(
            suite.OURS if name == "ours" else name,
            name,
            lambda inputs: [Candidate(name, lambda: name, lambda _: read(inputs))],
            yardstick=yardstick,
        )

    systems = [named("ours", False), named("peer", False), named("slow", True), named("fast", True)]
    found = replace(tiny_suite(*systems), stopwatch=lambda device, flush_bytes: Script())
    (row,) = run(found, ceilings, rows=["one"])["rows"]
    assert row["floor_ms"] == pytest.approx(2.0)
    assert row["bound"] == "fast"
    assert row["systems"][suite.OURS]["over_floor"] == pytest.approx(3.0)
    assert row["systems"]["slow"]["over_floor"] == pytest.approx(2.0)
    assert row["systems"]["slow"]["error"] is None
    assert row["best_peer"] == "peer"


def test_another_way_of_ours_is_no_other_and_is_held_to_the_same_accuracy(tiny_suite, ceilings):
    off = replace(times(1.0001), name=f"{suite.OURS}_padded")
    (row,) = run(tiny_suite(System(suite.OURS, "ours", right), off), ceilings, rows=["one"])["rows"]
    assert row["best_peer"] is None
    assert row["systems"][f"{suite.OURS}_padded"]["status"] == "inaccurate"


def test_facts_stand_beside_the_rows(tiny_suite, ceilings):
    found = replace(tiny_suite(System(suite.OURS, "ours", right)), facts=lambda device, dtype: {"answer": 42})
    kept = []
    result = run(found, ceilings, keep=lambda result: kept.append(result.get("facts")))
    assert result["facts"] == {"answer": 42}
    assert kept == [None, None, {"answer": 42}]
    assert "facts" not in run(found, ceilings, rows=["one"])


def test_peers_are_tuned_for_every_row_unless_it_is_quick_or_of_no_use(tiny_suite, ceilings):
    found = tiny_suite(System(suite.OURS, "ours", right))
    assert run(found, ceilings)["protocol"]["retuned"]
    assert not run(found, ceilings, quick=True)["protocol"]["retuned"]
    assert not run(replace(found, retunes=False), ceilings)["protocol"]["retuned"]


def test_only_rows_for_a_gpu_shrink_on_a_cpu(tiny_suite):
    large = forward.ROWS[4]
    assert suite.fit(tiny_suite(), large, CPU) == large.within(suite.CPU_FLOPS) != large
    assert suite.fit(tiny_suite(), large, torch.device("cuda")) == large
    assert suite.fit(replace(tiny_suite(), device="cpu"), large, CPU) == large


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
        scores = inputs.reference()

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
