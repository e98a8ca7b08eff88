from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pylate_flash.bench import exact, losses, protocol, results, suite
from pylate_flash.bench.peers import SENTENCE_TRANSFORMERS
from pylate_flash.bench.protocol import Rounds
from pylate_flash.hosts import HOSTS
from pylate_flash.hosts import SENTENCE_TRANSFORMERS as ROUTES
from suites import hosts

CPU = torch.device("cpu")
ROUNDS = Rounds(warmup=0, repetitions=2, flush_bytes=0)
needs_host = pytest.mark.skipif(
    not HOSTS["sentence-transformers"].is_there(), reason="sentence-transformers 6 is not installed"
)
each_row = pytest.mark.parametrize("row", hosts.ROWS, ids=lambda row: row.name)


def small(row):
    """The same row at a size for a test, of two mini-batches where it has them."""
    size = 5 if row.Nq > 1 else 1
    shortest = None if row.shortest is None else 3
    return replace(row, Nq=size, Nd=5 if row.step else 9, Lq=4, Ld=11, shortest=shortest, d=16)


@pytest.fixture(autouse=True)
def small_mini_batches(monkeypatch):
    monkeypatch.setattr(hosts, "MINI_BATCH", 3)
    monkeypatch.setattr(hosts, "SCORED_AT_ONCE", (2, 5))
    monkeypatch.setattr(hosts, "CHUNK_ELEMENTS", (10**3, 10**8))


@needs_host
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_row
def test_every_system_is_right(row, dtype):
    inputs = hosts.make_inputs(small(row), CPU, dtype)
    reference = inputs.reference()
    tolerances = {system.name: system.tolerance for system in hosts.suite().systems}
    for system in hosts.suite().systems:
        ours = system.name.startswith(suite.OURS)
        candidates = system.candidates(inputs)
        assert len(candidates) == (2 if system.name == "sentence_transformers_best" else 1)
        for candidate in candidates:
            with torch.no_grad():
                # Twice: no gradients are left over from the call before.
                found = [candidate.read(candidate.call()) for _ in range(2)]
            for result in found:
                most = 5 * inputs.accuracy(dtype) if ours else tolerances[system.name]
                assert hosts.error(result, reference) <= most
    if row.step:
        assert exact.error(reference._replace(grad_documents=reference.grad_documents.roll(1, 0)), reference) > 0.1


@needs_host
def test_what_is_measured_of_this_package_is_what_registering_makes_of_the_host():
    from pylate_flash import registered
    from pylate_flash.hosts.routes import find

    for path in (hosts._MAXSIM, hosts._CALCULATE):
        own, routed = ROUTES.original(path), ROUTES.routed(path)
        assert own.__code__ != routed.__code__
        assert (own.__defaults__, own.__kwdefaults__) == (routed.__defaults__, routed.__kwdefaults__)
        with registered("sentence-transformers"):
            assert find(path).__code__.co_code == routed.__code__.co_code == ROUTES.routed(path).__code__.co_code
            assert find(path).__code__.co_names == routed.__code__.co_names


@needs_host
def test_a_run_on_a_cpu(ceilings):
    tiny = replace(hosts.suite(), rows=[small(row) for row in hosts.ROWS])
    result = suite.run(tiny, CPU, torch.float32, ROUNDS, ceilings=ceilings, quick=True)
    results.validate(result, "here")
    assert result["versions"]["sentence-transformers"] == SENTENCE_TRANSFORMERS.version()
    for row in result["rows"]:
        assert [state["status"] for state in row["systems"].values()] == ["ok"] * 4
        assert row["best_peer"].startswith("sentence_transformers")
        # A processor has one time only.
        assert not any("device_ms" in state for state in row["systems"].values())


@pytest.mark.parametrize(("rounds", "calls"), [(Rounds(), (2, 20)), (protocol.QUICK, (0, 4))])
@each_row
def test_a_loss_is_called_less_often(row, rounds, calls):
    found = hosts.rounds_of(row, rounds)
    assert (found.warmup, found.repetitions) == (calls if row.step else (rounds.warmup, rounds.repetitions))
    assert found.flush_bytes == rounds.flush_bytes


def test_without_the_host_the_operation_alone_is_measured(ceilings, monkeypatch):
    monkeypatch.setattr(type(SENTENCE_TRANSFORMERS), "version", lambda peer: "5.3.0")
    tiny = replace(hosts.suite(), rows=[small(hosts.ROWS[0])])
    (row,) = suite.run(tiny, CPU, torch.float32, ROUNDS, ceilings=ceilings)["rows"]
    reason = "version 5.3.0 is installed, and what is measured is there since 6.0"
    states = row["systems"]
    assert states["pylate_flash"] == {"status": "absent", "reason": f"sentence-transformers: {reason}"}
    assert states["sentence_transformers"] == {"status": "absent", "reason": reason}
    assert states["pylate_flash_operation"]["status"] == "ok"


@each_row
def test_rows_hold_what_their_names_say(row):
    inputs = hosts.make_inputs(small(row), CPU, torch.float32)
    if row.step:
        assert [len(part) for part in inputs.columns()[1]] == [3, 2]
        return
    given = inputs.arguments
    lengths = inputs.lengths()
    assert (len(set(lengths.tolist())) > 1) == (row.shortest is not None)
    if row.kind == "lists":
        assert [len(document) for document in given["b"]] == lengths.tolist()
        assert len({document.data_ptr() for document in given["b"]}) == len(given["b"])
        assert all(document.untyped_storage().nbytes() == document.nbytes for document in given["b"])
    assert ("b_mask" in given) == (row.kind == "masked")
    assert losses.SAMPLED == 16


class Clock:
    """Events and a buffer whose writes take a millisecond of the device, and calls 5 ms of the host, 2 of the device.

    The device works on what is in its queue while the host goes on.
    """

    def __init__(self):
        self.host, self.device = 0.0, 0.0

    def launch(self, seconds, host=0.0):
        self.host += host
        self.device = max(self.device, self.host) + seconds

    def event(self, **options):
        clock = self

        class Event:
            def record(self):
                self.at = max(clock.device, clock.host)
                clock.device = self.at

            def synchronize(self):
                clock.host = max(clock.host, self.at)

            def elapsed_time(self, other):
                return 1e3 * (other.at - self.at)

        return Event()


def test_the_time_of_the_device_alone_is_without_the_hosts(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: None)
    monkeypatch.setattr(protocol.torch, "zeros", lambda *size, **options: None)
    monkeypatch.setattr(protocol.CudaStopwatch, "_write", lambda stopwatch: clock.launch(1e-3))
    monkeypatch.setattr(protocol.time, "perf_counter", lambda: clock.host)
    stopwatch = protocol.make_two_times_stopwatch(torch.device("cuda", 0), 64)
    assert isinstance(stopwatch, protocol.TwoTimesStopwatch)
    sample = stopwatch.time(lambda: clock.launch(2e-3, host=5e-3))
    # From an empty queue the host has the head start of one write, and its launch is waited for.
    assert sample.seconds == pytest.approx(6e-3)
    assert sample.host_seconds == pytest.approx(5e-3)
    assert sample.device_seconds == pytest.approx(2e-3)
    timing = protocol.summarise([sample, sample])
    assert timing.known() == pytest.approx(
        {"median_ms": 6.0, "iqr_ms": 0.0, "host_ms": 5.0, "repetitions": 2, "device_ms": 2.0}
    )


def test_a_cell_of_two_times_is_explained(result):
    from make_tables import render
    from pylate_flash.bench import load_suite, report

    assert report.TWO_TIMES not in render(load_suite("forward"), result)
    result["rows"][0]["systems"]["pylate_flash"]["device_ms"] = 0.021
    table = render(load_suite("forward"), result)
    assert report.TWO_TIMES in table
    assert "**0.030 / 0.021**" in table
    # Multiples are of both times too, as far as both sides have them.
    floor, peer = result["rows"][0]["floor_ms"], result["rows"][0]["systems"]["lik"]
    assert f"| 1.67 / {0.021 / floor:.2f} | 4.00 |" in table
    peer["device_ms"] = 0.105
    assert "| 4.00 / 5.00 |" in render(load_suite("forward"), result)
    console = report.make_console()
    with console.capture() as shown:
        report.show(console, load_suite("forward"), result)
    assert "0.030 / 0.021" in shown.get()
    assert report.TWO_TIMES in " ".join(shown.get().split())
