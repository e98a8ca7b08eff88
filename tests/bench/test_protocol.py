from __future__ import annotations

import gc
import math
from dataclasses import replace

import pytest
import torch

from pylate_flash.bench import exact, protocol
from pylate_flash.bench.protocol import Ceilings, Floor, Rounds, Sample, Timing, Work


@pytest.mark.parametrize("name", ["highest", "high", "medium"])
def test_the_precision_of_float32_products_has_the_name_that_torch_gives_it(name):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        assert protocol.float32_matmul_precision() == torch.get_float32_matmul_precision() == name
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("newer", "name"), [(("tf32", "ieee"), "high"), (("ieee", "bf16"), "medium"), (("ieee", "ieee"), "highest")]
)
def test_it_has_a_name_and_an_accuracy_where_it_was_set_by_a_newer_one(newer, name):
    with exact.float32_products(*newer):
        if name != "highest":
            with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
                torch.get_float32_matmul_precision()
        assert protocol.float32_matmul_precision() == name
        assert exact.accuracy(torch.float32) == (2e-6 if name == "highest" else 1e-3)
        with exact.float32_products():
            assert protocol.float32_matmul_precision() == "highest"
        assert protocol.float32_matmul_precision() == name


def test_systems_take_turns_in_changing_orders_and_the_warmup_does_not_count():
    """A warm-up call takes 9 ms, later ones 0.1, 0.2, ... 3 ms, and all of the peer ten times that."""

    class Clock:
        clock, flush_bytes = "script", 0

        def __init__(self):
            self.order = []

        def time(self, call):
            self.order.append(call())
            counted = self.order.count(self.order[-1]) - 10
            seconds = (0.009 if counted <= 0 else counted / 1e4) * (10 if self.order[-1] == "peer" else 1)
            return Sample(seconds, seconds / 2)

    calls = {name: lambda name=name: name for name in ("ours", "peer", "torch")}
    clock, again = Clock(), Clock()
    timings = protocol.measure(calls, clock, Rounds(warmup=10, repetitions=30))
    for name, factor in (("ours", 1), ("peer", 10)):
        result = timings[name]
        assert (result.median_ms, result.iqr_ms) == pytest.approx((1.55 * factor, 1.45 * factor))
        assert (result.host_ms, result.repetitions) == (pytest.approx(0.775 * factor), 30)
    rounds = [tuple(clock.order[index : index + 3]) for index in range(0, 120, 3)]
    assert all(sorted(names) == ["ours", "peer", "torch"] for names in rounds)
    assert len(set(rounds)) == 6, "every order comes up"
    protocol.measure(calls, again, Rounds(warmup=10, repetitions=30))
    assert again.order == clock.order


def test_a_slow_system_ends_its_warmup_and_makes_few_calls_that_count():
    class Clock:
        clock, flush_bytes = "script", 0

        def time(self, call):
            return call()

    called = []
    samples = {"fast": Sample(0.01, 0.01), "slow": Sample(3.0, 0.1), "slow on the device": Sample(0.1, 0.1, 9.0)}
    calls = {name: lambda name=name: called.append(name) or samples[name] for name in samples}
    timings = protocol.measure(calls, Clock(), Rounds(warmup=4, repetitions=6))
    # One call of three seconds is enough of a warm-up, and calls of nine seconds get none.
    assert [called.count(name) for name in samples] == [10, 4, 3]
    assert [timings[name].repetitions for name in samples] == [6, 3, 3]


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
        protocol.measure({"broken": broken}, protocol.CpuStopwatch(0), Rounds(0, 1))
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


class Clock:
    """Simulated events: a write of the buffer takes 1 ms of the device, a call 5 ms of the host and 2 of the device.

    The device works through its queue while the host goes on.
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
    # From an empty queue, the host is ahead by one write, and the device waits for its launch.
    assert sample.seconds == pytest.approx(6e-3)
    assert sample.host_seconds == pytest.approx(5e-3)
    assert sample.device_seconds == pytest.approx(2e-3)
    timing = protocol.summarise([sample, sample])
    assert timing.known() == pytest.approx(
        {"median_ms": 6.0, "iqr_ms": 0.0, "host_ms": 5.0, "repetitions": 2, "device_ms": 2.0}
    )


def test_floor_is_the_longer_of_the_two_times():
    ceilings = Ceilings(flops_per_second=100e12, bytes_per_second=2e12)
    # 1e12 operations take 10 ms; 4e9 bytes take 2 ms.
    assert protocol.floor_of(Work(flops=1e12, bytes=4e9), ceilings) == Floor(10.0, "compute")
    # 1e10 operations take 0.1 ms.
    assert protocol.floor_of(Work(flops=1e10, bytes=4e9), ceilings) == Floor(2.0, "memory")
    # The time of L2 reads is added, where their rate is known.
    step = Work(flops=1e12, bytes=4e9, l2_bytes=5e9)
    assert protocol.floor_of(step, ceilings) == Floor(10.0, "compute")
    assert protocol.floor_of(step, replace(ceilings, l2_bytes_per_second=5e12)) == Floor(11.0, "compute and L2")


def test_exponentials_are_a_third_time_or_follow():
    ceilings = Ceilings(flops_per_second=1e12, bytes_per_second=1e10, exponentials_per_second=1e9)
    work = Work(flops=2e9, bytes=1e7, exponentials=1e6)
    assert protocol.floor_of(work, ceilings) == Floor(2.0, "compute")
    assert protocol.floor_of(replace(work, exponentials=3e6), ceilings) == Floor(3.0, "exponentials")
    follow = replace(work, exponentials_follow=True)
    assert protocol.floor_of(follow, ceilings) == Floor(3.0, "compute and exponentials")
    assert protocol.floor_of(follow, replace(ceilings, exponentials_per_second=None)) == Floor(2.0, "compute")


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
