from __future__ import annotations

import gc
import math

import pytest
import torch

from pylate_flash.bench import exact, protocol
from pylate_flash.bench.forward import ROWS
from pylate_flash.bench.protocol import Ceilings, Rounds, Sample, Timing, Work


class Script:
    """A stopwatch that makes the calls and reports times written down beforehand."""

    clock = "script"
    flush_bytes = 0

    def __init__(self, milliseconds):
        self.milliseconds = list(milliseconds)

    def time(self, call):
        call()
        seconds = self.milliseconds.pop(0) / 1e3
        return Sample(seconds, seconds / 2)


def test_systems_take_turns_in_changing_orders():
    def orders():
        order = []
        protocol.measure(
            {name: lambda name=name: order.append(name) for name in ("ours", "peer", "torch")},
            Script([1.0] * 120),
            Rounds(warmup=10, repetitions=30),
        )
        return order

    order = orders()
    rounds = [tuple(order[index : index + 3]) for index in range(0, 120, 3)]
    assert all(sorted(names) == ["ours", "peer", "torch"] for names in rounds)
    assert len(set(rounds)) == 6, "every order comes up"
    assert order == orders()


def test_each_system_gets_its_own_times_and_the_warmup_does_not_count():
    class Clock:
        """900 ms for a call of the warm-up; after it 1, 2, 3 ms for ours, and ten times that for the peer."""

        clock = "script"
        flush_bytes = 0

        def __init__(self):
            self.calls = {"ours": 0, "peer": 0}

        def time(self, call):
            name = call()
            self.calls[name] += 1
            counted = self.calls[name] - 2
            seconds = (0.9 if counted <= 0 else counted / 1e3) * (10 if name == "peer" else 1)
            return Sample(seconds, seconds / 2)

    timings = protocol.measure({"ours": lambda: "ours", "peer": lambda: "peer"}, Clock(), Rounds(2, 3))
    assert timings["ours"] == Timing(median_ms=2.0, iqr_ms=1.0, host_ms=1.0, repetitions=3)
    assert timings["peer"] == Timing(median_ms=20.0, iqr_ms=10.0, host_ms=10.0, repetitions=3)


@pytest.mark.parametrize(
    ("milliseconds", "median", "iqr"),
    [([10, 1, 4, 2, 3], 3.0, 2.0), ([1, 2, 3, 4], 2.5, 1.5), ([7], 7.0, 0.0)],
)
def test_median_and_interquartile_range(milliseconds, median, iqr):
    timing = protocol.summarise([Sample(value / 1e3, 0.0) for value in milliseconds])
    assert timing.median_ms == pytest.approx(median)
    assert timing.iqr_ms == pytest.approx(iqr)


def test_a_call_that_raises_leaves_the_garbage_collector_on():
    def broken():
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        protocol.measure({"broken": broken}, Script([1]), Rounds(0, 1))
    assert gc.isenabled()


def test_the_cache_is_overwritten_before_every_call():
    stopwatch = protocol.make_stopwatch(torch.device("cpu"), flush_bytes=64)
    seen = []
    for _ in range(3):
        stopwatch.time(lambda: seen.append(stopwatch._buffer.tolist()))
    assert seen == [[1] * 16, [2] * 16, [3] * 16]


def test_the_host_clock_covers_the_call_and_not_the_flush(monkeypatch):
    events = []
    stopwatch = protocol.CpuStopwatch(flush_bytes=64)
    monkeypatch.setattr(stopwatch, "_buffer", type("B", (), {"fill_": lambda self, value: events.append("flush")})())
    clock = iter([100.0, 100.25])
    monkeypatch.setattr(protocol.time, "perf_counter", lambda: events.append("clock") or next(clock))
    sample = stopwatch.time(lambda: events.append("call"))
    assert events == ["flush", "clock", "call", "clock"]
    assert sample == Sample(0.25, 0.25)


def test_floor_is_the_longer_of_the_two_times():
    ceilings = Ceilings(flops_per_second=100e12, bytes_per_second=2e12)
    # 1e12 operations take 10 ms; 4e9 bytes take 2 ms.
    assert protocol.floor_of(Work(flops=1e12, bytes=4e9), ceilings) == protocol.Floor(10.0, "compute")
    # 1e10 operations take 0.1 ms.
    assert protocol.floor_of(Work(flops=1e10, bytes=4e9), ceilings) == protocol.Floor(2.0, "memory")


def test_work_counts_every_byte_once():
    row = ROWS[0]
    # 1 x 32 query rows and 1000 x 300 document rows of 128 float32, and 1000 float32 scores.
    assert row.work(torch.float32).bytes == (32 + 300_000) * 128 * 4 + 4000
    assert row.work(torch.float32).flops == 2 * 1000 * 32 * 300 * 128


def test_ceilings_count_two_operations_per_product_and_both_directions_of_a_copy(monkeypatch):
    def measured(calls, stopwatch, rounds):
        for call in calls.values():
            call()
        assert stopwatch.flush_bytes == 0
        return {"matmul": Timing(2.0, 0.0, 0.0, 3), "copy": Timing(4.0, 0.0, 0.0, 3)}

    monkeypatch.setattr(protocol, "measure", measured)
    ceilings = protocol.measure_ceilings(torch.device("cpu"), torch.float32, matmul_size=10, copy_bytes=4096)
    assert ceilings.flops_per_second == pytest.approx(2 * 10**3 / 2e-3)
    assert ceilings.bytes_per_second == pytest.approx(2 * 4096 / 4e-3)


def test_ceilings_of_this_machine_are_rates():
    ceilings = protocol.measure_ceilings(torch.device("cpu"), torch.float32, matmul_size=32, copy_bytes=4096)
    assert 0 < ceilings.flops_per_second < math.inf
    assert 0 < ceilings.bytes_per_second < math.inf


@pytest.mark.parametrize(
    ("output", "error"),
    [
        ([[2.0, -4.0]], 0.0),
        ([[2.0, -5.0]], 0.25),
        ([[1.0, -4.0]], 0.5),
        ([[2.0, math.nan]], math.inf),
        ([[2.0, -math.inf]], math.inf),
        ([[2.0, -4.0, 1.0]], math.inf),
    ],
)
def test_relative_error(output, error):
    reference = torch.tensor([[2.0, -4.0]], dtype=torch.float64)
    assert exact.relative_error(torch.tensor(output), reference) == error


def test_relative_error_of_a_zero_is_absolute_and_of_another_layout_is_none():
    reference = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    assert exact.relative_error(torch.tensor([0.125, 1.0]), reference) == 0.125
    assert exact.relative_error(torch.empty(0), torch.empty(0, 3, dtype=torch.float64)) == 0.0
