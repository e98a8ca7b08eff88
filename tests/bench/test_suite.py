"""The loop that checks, times and compares systems, on artificial systems."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from pylate_flash.bench import SUITES, forward, load_suite, memory, report, suite
from pylate_flash.bench.peers import Peer
from pylate_flash.bench.protocol import Rounds, Sample
from pylate_flash.bench.suite import OURS, Candidate, Observer, System, Unavailable

CPU = torch.device("cpu")
ROUNDS = Rounds(warmup=1, repetitions=2, flush_bytes=0)


def scaled(factor=1.0, label="right"):
    """Candidates whose scores are off by that factor, in the dtype that a system returns."""

    def candidates(inputs):
        scores = inputs.reference().float() * factor
        return [Candidate(label, lambda: scores)]

    return candidates


def fail(*arguments):
    raise RuntimeError("tried to allocate 80 GiB\nmore")


RIGHT = System(OURS, "ours", scaled())


def peer(candidates, **options):
    return System("peer", "Peer", candidates, **options)


@pytest.fixture
def run(tiny_suite, ceilings):
    """Run tiny rows with some systems, and return the result."""

    def call(*systems, changes=None, **options):
        result = replace(tiny_suite(*systems), **changes or {})
        return suite.run(result, CPU, torch.float32, ROUNDS, ceilings=ceilings, **options)

    return call


@pytest.fixture
def states(run):
    """The states of systems in one row."""

    def call(*systems, **options):
        (row,) = run(*systems, rows=["one"], **options)["rows"]
        return row["systems"]

    return call


class Script:
    """A stopwatch with scripted durations, looked up by the call or by its result."""

    clock, flush_bytes = "script", 0

    def __init__(self, durations):
        self.durations = durations

    def time(self, call):
        result = call()
        return Sample(self.durations[call if call in self.durations else result], 0.0)


def test_right_systems_are_timed_and_compared_row_by_row(run):
    seen, snapshots = [], []

    class Listener(Observer):
        def finished(self, row):
            seen.append(row["name"])

    def keep(result):
        snapshots.append((len(result["rows"]), result["complete"], result.get("facts")))

    facts = {"facts": lambda device, dtype: {"answer": 42}}
    result = run(RIGHT, peer(scaled(), counted=True), changes=facts, observer=Listener(), keep=keep)
    assert [row["name"] for row in result["rows"]] == seen == ["one", "several"]
    assert snapshots == [(1, False, None), (2, True, None), (2, True, {"answer": 42})]
    for row in result["rows"]:
        ours, other = row["systems"][OURS], row["systems"]["peer"]
        assert ours["status"] == other["status"] == "ok"
        assert ours["repetitions"] == 2
        assert ours["error"] < 1e-6
        assert ours["over_floor"] == pytest.approx(ours["median_ms"] / row["floor_ms"])
        assert row["best_peer"] == "peer"
        assert row["best_peer_over_ours"] == pytest.approx(other["median_ms"] / ours["median_ms"])
        assert row["multiples"] == {"peer": pytest.approx(ours["median_ms"] / other["median_ms"])}
    selected = run(RIGHT, changes=facts, rows=["one"])
    assert "facts" not in selected
    assert "multiples" not in selected["rows"][0]


def test_memory_that_is_not_measured_is_said_and_ends_nothing(run, monkeypatch):
    taken = {"one": RuntimeError("the process failed: Traceback\n  line 3\nOutOfMemoryError: 80 GiB")}

    def memory_of(suite, row, variants, *where):
        if row in taken:
            raise taken[row]
        return dict.fromkeys(variants, 7)

    monkeypatch.setattr(suite, "memory_of", memory_of)
    result = run(RIGHT, with_memory=True)
    one, several = result["rows"]
    assert one["memory_error"] == "OutOfMemoryError: 80 GiB"
    assert "memory_bytes" not in one["systems"][OURS]
    assert several["systems"][OURS]["memory_bytes"] == 7
    assert "one: memory not measured: OutOfMemoryError: 80 GiB" in report.remarks(result)


def test_a_way_that_a_fresh_process_does_not_offer_is_named():
    request = "forward", "textual", "torch", "einsum, chunks of 3", CPU, torch.float32
    with pytest.raises(ValueError, match="torch offers no 'einsum, chunks of 3' here, but 'einsum, chunks of "):
        memory.measure_here(*request)


def test_memory_is_measured_on_the_gpu_that_was_asked_for(monkeypatch):
    """It is made the current device: other packages launch there."""

    def set_device(device):
        raise AttributeError(f"{device} is current")

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    with pytest.raises(AttributeError, match="cuda:1 is current"):
        memory.measure_here("forward", "textual", "torch", "einsum", torch.device("cuda", 1), torch.float32)


@pytest.mark.parametrize("factor", [1.02, math.nan, math.inf])
def test_a_wrong_system_is_marked_and_not_timed(run, factor):
    (row,) = run(RIGHT, peer(scaled(factor)), rows=["one"])["rows"]
    state = row["systems"]["peer"]
    assert state["status"] == "wrong"
    assert "median_ms" not in state
    assert state["error"] == (pytest.approx(0.02) if math.isfinite(factor) else None)
    assert row["best_peer"] is row["best_peer_over_ours"] is None
    assert row["systems"][OURS]["status"] == "ok"


@pytest.mark.parametrize(
    ("accuracy", "expected"),
    [(None, "inaccurate"), (1e-3, "ok"), (1e-6, "inaccurate")],
    ids=["promised", "own", "less"],
)
def test_ours_past_its_promise_is_timed_and_marked_and_another_way_of_ours_too(run, accuracy, expected):
    off = scaled(1.0001)
    changes = None if accuracy is None else {"accuracy": lambda inputs, dtype: accuracy}
    systems = System(OURS, "ours", off), System(f"{OURS}_padded", "padded", off)
    (row,) = run(*systems, changes=changes, rows=["one"])["rows"]
    for system in systems:
        assert row["systems"][system.name]["status"] == expected
        assert row["systems"][system.name]["median_ms"] > 0
    assert row["best_peer"] is None, "another way of ours is no other"
    (row,) = run(RIGHT, peer(off), rows=["one"])["rows"]
    assert row["systems"]["peer"]["status"] == "ok"


def test_a_result_that_goes_wrong_while_it_is_timed_is_found(states):
    def racy(inputs):
        scores = inputs.reference()
        calls = iter(range(100))
        return [Candidate("racy", lambda: scores * (1.0 if next(calls) < 3 else 2.0))]

    state = states(System(OURS, "ours", racy))[OURS]
    assert state["status"] == "wrong"
    assert "race" in state["reason"]


def test_what_fails_is_marked_with_the_first_line_of_its_error_and_leaves_the_others(states):
    def mixed(inputs):
        return [Candidate("fails", fail), *scaled(3.0)(inputs), *scaled()(inputs)]

    later = System("later", "Later", lambda inputs: [Candidate("later", fail)])
    result = states(System("early", "Early", fail), later, peer(mixed))
    assert result["early"] == {"status": "failed", "reason": "RuntimeError: tried to allocate 80 GiB"}
    assert result["later"] == {"status": "failed", "reason": "later: RuntimeError: tried to allocate 80 GiB"}
    assert (result["peer"]["status"], result["peer"]["variant"]) == ("ok", "right")


def test_the_fastest_right_candidate_is_kept(states):
    durations = {}

    def three(inputs):
        scores = inputs.reference()
        results = [Candidate(label, lambda label=label: scores) for label in ("slow", "fast", "middling")]
        durations.update({candidate.call: seconds for candidate, seconds in zip(results, (3.0, 1.0, 2.0), strict=True)})
        return results

    results = states(peer(three), changes={"stopwatch": lambda device, flush_bytes: Script(durations)})
    assert results["peer"]["variant"] == "fast"
    assert results["peer"]["median_ms"] == 1000.0


@pytest.mark.parametrize(("quick", "calls"), [(False, 6), (True, 1)])
def test_a_quick_run_chooses_a_candidate_by_one_call_and_calls_run_without_gradients(states, quick, calls):
    counts = [0, 0]

    def candidates(inputs):
        scores = inputs.reference().float()

        def counting(index):
            assert not torch.is_grad_enabled()
            counts[index] += 1
            return scores

        return [Candidate(str(index), lambda index=index: counting(index)) for index in range(2)]

    assert states(peer(candidates), quick=quick)["peer"]["status"] == "ok"
    # Both are checked; the chosen one is timed, and checked once more.
    assert sorted(counts) == [1 + calls, 2 + calls + ROUNDS.warmup + ROUNDS.repetitions]


def test_what_is_not_there_is_absent_with_its_reason(states, monkeypatch):
    def refuse(inputs):
        raise Unavailable("needs a full moon")

    missing = Peer("no-such-distribution", "no_such_module")
    assert "not installed" in missing.unavailable(torch.device("cuda"))
    assert missing.version() is None
    systems = RIGHT, System("missing", "Missing", scaled(), peer=missing), peer(refuse)
    result = states(*systems)
    assert result["missing"] == {"status": "absent", "reason": "its kernels need a CUDA GPU"}
    assert result["peer"] == {"status": "absent", "reason": "needs a full moon"}
    assert "missing" not in states(*systems, with_peers=False)


def test_without_peers_this_package_and_torch_are_measured():
    without = {system.name for name in SUITES for system in load_suite(name).systems if system.peer is None}
    assert {name for name in without if not name.startswith(OURS)} == {"torch"}


def test_a_peer_is_measured_where_it_computes():
    anywhere, cpu_only = Peer("torch", "torch", device=None), Peer("torch", "torch", device="cpu")
    cuda = torch.device("cuda")
    assert anywhere.unavailable(cuda) is anywhere.unavailable(CPU) is cpu_only.unavailable(CPU) is None
    assert cpu_only.unavailable(cuda) == "it computes on the CPU only"


def test_a_peer_that_cannot_be_imported_is_absent(states, tmp_path, monkeypatch):
    (tmp_path / "broken_peer.py").write_text("raise OSError('no libcuda.so')")
    monkeypatch.syspath_prepend(tmp_path)
    broken = Peer("broken-peer", "broken_peer", device=None)
    result = states(RIGHT, peer(scaled(), peer=broken))
    assert result["peer"] == {"status": "absent", "reason": "cannot be imported (OSError: no libcuda.so)"}
    assert broken.version() is None


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        ("6.0", None),
        ("5.2", "version 5.2 is installed, expected 6.0 or later"),
        ("of-a-fork", "version 'of-a-fork' is installed, not a version number; expected 6.0 or later"),
        (None, "version None is installed, expected 6.0 or later"),
    ],
)
def test_a_peer_of_another_version_is_absent(states, tmp_path, monkeypatch, installed, reason):
    (tmp_path / "some_versioned_peer.py").write_text("" if installed is None else f"__version__ = {installed!r}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "some_versioned_peer", raising=False)
    versioned = Peer("some-versioned-peer", "some_versioned_peer", device=None, since="6.0")
    assert versioned.unavailable(CPU) == reason
    state = states(RIGHT, peer(scaled(), peer=versioned))["peer"]
    assert state["status"] == ("ok" if reason is None else "absent")


def test_a_result_is_read_after_the_call(states):
    def listed(inputs):
        return [Candidate("listed", inputs.reference().float().tolist, torch.tensor)]

    state = states(peer(listed))["peer"]
    assert state["status"] == "ok"
    assert state["error"] < 1e-6


def test_a_yardstick_is_the_floor_and_neither_checked_nor_compared(run):
    durations = {"ours": 6e-3, "peer": 8e-3, "slow": 4e-3, "fast": 2e-3}

    def named(name, yardstick):
        def candidates(inputs):
            return [Candidate(name, lambda: name, lambda _: None if yardstick else inputs.reference())]

        return System(OURS if name == "ours" else name, name, candidates, yardstick=yardstick)

    systems = [named("ours", False), named("peer", False), named("slow", True), named("fast", True)]
    changes = {"stopwatch": lambda device, flush_bytes: Script(durations)}
    (row,) = run(*systems, changes=changes, rows=["one"])["rows"]
    assert row["floor_ms"] == pytest.approx(2.0)
    assert row["bound"] == "fast"
    assert row["systems"][OURS]["over_floor"] == pytest.approx(3.0)
    assert row["systems"]["slow"]["over_floor"] == pytest.approx(2.0)
    assert row["systems"]["slow"]["error"] is None
    assert row["best_peer"] == "peer"


@pytest.mark.parametrize(
    ("changes", "quick", "retuned"), [({}, False, True), ({}, True, False), ({"retunes": False}, False, False)]
)
def test_peers_are_tuned_for_every_row_unless_it_is_quick_or_of_no_use(run, changes, quick, retuned):
    assert run(RIGHT, changes=changes, quick=quick, rows=["one"])["protocol"]["retuned"] == retuned


def test_only_rows_for_a_gpu_shrink_on_a_cpu(tiny_suite):
    large = forward.ROWS[4]
    assert suite.fit(tiny_suite(), large, CPU) == large.within(suite.CPU_FLOPS) != large
    assert suite.fit(tiny_suite(), large, torch.device("cuda")) == large
    assert suite.fit(replace(tiny_suite(), device="cpu"), large, CPU) == large


def test_tuning_of_a_peer_is_forgotten_and_nobody_elses(monkeypatch):
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    tuners = {}
    for name in ("some_peer", "some_peer.kernels", "some_peer_of_mine"):
        module, tuners[name] = ModuleType(name), object.__new__(autotuner)
        tuners[name].cache, tuners[name].cache_results = {"key": "choice"}, True
        module.kernel = tuners[name]
        monkeypatch.setitem(sys.modules, name, module)
    Peer("some-peer", "some_peer").forget_tuning()
    caches = {name: (tuner.cache, tuner.cache_results) for name, tuner in tuners.items()}
    assert caches == {
        "some_peer": ({}, False),
        "some_peer.kernels": ({}, False),
        "some_peer_of_mine": ({"key": "choice"}, True),
    }
