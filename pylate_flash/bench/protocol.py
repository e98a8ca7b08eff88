"""How a call is timed, and how fast the machine could be at all.

The protocol is that of the Flash-MaxSim paper's appendix A:

- the systems of a row are timed in turn, one call each per round, within one run, so that a clock that drifts or a card
  that warms up changes all of them alike; in every round in another order, as what ran before leaves the host's caches
  full of its own code, which a system that runs the same code has for nothing;
- the L2 cache is overwritten before every timed call, so that inputs come from device memory, as they do in a service;
- a call is timed with CUDA events; the median and the interquartile range of the rounds are reported;
- a system whose calls have taken five seconds is warm, and ends once three have counted, so that the others do not wait
  for a slow one;
- allocation, casts, compilation and tuning happen before the first timed call;
- the machine's two ceilings, a large matrix product and a large copy, are measured in the same run, and each row has a
  floor: no implementation is faster than its arithmetic at the one rate, or its unavoidable traffic at the other.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

MIB = 2**20

_backends: Any = torch.backends
# Where the precision of float32 products is set, of GPUs and of CPUs.
FLOAT32_PRODUCTS = (_backends.cuda.matmul, _backends.mkldnn.matmul)


def float32_matmul_precision() -> str:
    """Return what `torch.get_float32_matmul_precision` calls the settings of float32 products that are in force.

    That one raises where they were set by their newer names.
    """
    found = [products.fp32_precision for products in FLOAT32_PRODUCTS]
    return "medium" if "bf16" in found else "high" if "tf32" in found else "highest"


@dataclass(frozen=True)
class Rounds:
    """How often a call of each system is made, and how much is written to the cache before each."""

    warmup: int = 10  # calls before the first one that counts
    repetitions: int = 50
    # Outside the timed region; 0 leaves the cache warm. A card whose L2 is larger than half has twice its L2 written.
    flush_bytes: int = 128 * MIB


QUICK = Rounds(warmup=3, repetitions=10)
# Seconds of a system's calls after which its warm-up ends, and so do its calls once so many have counted.
_LONG_SECONDS = 5.0
_FEWEST_COUNTED = 3


class Sample(NamedTuple):
    """One timed call: ``seconds`` until its result was there, ``host_seconds`` until the call returned.

    ``device_seconds``, where they were measured: what the device took once the host had launched all of it.
    """

    seconds: float
    host_seconds: float
    device_seconds: float | None = None


class CpuStopwatch:
    """Times a call with the host's performance counter, from a cold cache if bytes are to be written before it."""

    clock = "host clock"

    def __init__(self, flush_bytes: int, device: torch.device | None = None) -> None:
        self.flush_bytes = flush_bytes
        self._buffer = torch.zeros(flush_bytes // 4, dtype=torch.int32, device=device)
        self._writes = 0

    def time(self, call: Callable[[], object]) -> Sample:
        """Flush the cache, make the call, and return how long the call took."""
        if self.flush_bytes:
            self._write()
        return self._timed(call)

    def _write(self) -> None:
        self._writes += 1
        self._buffer.fill_(self._writes)

    def _timed(self, call: Callable[[], object]) -> Sample:
        started = time.perf_counter()
        result = call()
        returned = time.perf_counter()
        # Only now: the result's memory stays its own until the call is over.
        del result
        return Sample(returned - started, returned - started)


class CudaStopwatch(CpuStopwatch):
    """Times a call with CUDA events on the device's current stream.

    Every call starts from an empty queue: the host has as its only head start the time that the device takes to write
    the flush buffer. A call whose launch takes the host longer than that is therefore charged for the difference, and
    what one system leaves in the queue never hides another system's launch.
    """

    clock = "CUDA events"

    def __init__(self, device: torch.device, flush_bytes: int) -> None:
        if flush_bytes:
            flush_bytes = max(flush_bytes, 2 * getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
        super().__init__(flush_bytes, device)
        self._start = torch.cuda.Event(enable_timing=True)
        self._stop = torch.cuda.Event(enable_timing=True)

    def _timed(self, call: Callable[[], object]) -> Sample:
        self._start.record()
        started = time.perf_counter()
        result = call()
        returned = time.perf_counter()
        self._stop.record()
        self._stop.synchronize()
        del result
        return Sample(self._start.elapsed_time(self._stop) / 1e3, returned - started)


# How much longer than the host needs for a call the device is kept busy before it, and for how long at most.
_HEAD_START = 2.0
_LONGEST_HEAD_START = 0.2


class TwoTimesStopwatch(CudaStopwatch):
    """Makes every call twice: as `CudaStopwatch` does, and with the device busy until the host has launched all of it.

    The second time is the device's alone, unless the call waits for the device on the way.
    """

    clock = "CUDA events, from an empty queue and again behind a head start of the host"

    def __init__(self, device: torch.device, flush_bytes: int) -> None:
        super().__init__(device, flush_bytes or 128 * MIB)
        self._write()
        self._write_seconds = self._timed(self._write).seconds

    def time(self, call: Callable[[], object]) -> Sample:
        """Flush the cache, make the call, and once more; return both times."""
        sample = super().time(call)
        needed = min(_HEAD_START * sample.host_seconds, _LONGEST_HEAD_START)
        for _ in range(1 + math.ceil(needed / self._write_seconds)):
            self._write()
        return sample._replace(device_seconds=self._timed(call).seconds)


def make_stopwatch(device: torch.device, flush_bytes: int, on_gpu: type[CudaStopwatch] = CudaStopwatch) -> CpuStopwatch:
    """Return the stopwatch of a device."""
    return on_gpu(device, flush_bytes) if device.type == "cuda" else CpuStopwatch(flush_bytes)


# One that also tells a GPU's own time.
make_two_times_stopwatch = partial(make_stopwatch, on_gpu=TwoTimesStopwatch)


@dataclass(frozen=True)
class Timing:
    """The calls of one system, summarised, in milliseconds; ``device_ms`` is None where it was not measured."""

    median_ms: float
    iqr_ms: float
    host_ms: float
    repetitions: int
    device_ms: float | None = None

    def known(self) -> dict[str, Any]:
        """What was measured, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def summarise(samples: Sequence[Sample]) -> Timing:
    """Return the median and the interquartile range (linear interpolation) of at least one sample."""
    milliseconds = [1e3 * sample.seconds for sample in samples]
    # A single one has no quantiles, and twice the same has its own.
    several = milliseconds if len(milliseconds) > 1 else 2 * milliseconds
    lower, _, upper = statistics.quantiles(several, n=4, method="inclusive")
    on_device = [1e3 * sample.device_seconds for sample in samples if sample.device_seconds is not None]
    return Timing(
        median_ms=statistics.median(milliseconds),
        iqr_ms=upper - lower,
        host_ms=1e3 * statistics.median(sample.host_seconds for sample in samples),
        repetitions=len(samples),
        device_ms=statistics.median(on_device) if on_device else None,
    )


def measure(calls: Mapping[str, Callable[[], object]], stopwatch: CpuStopwatch, rounds: Rounds) -> dict[str, Timing]:
    """Time several systems in turn: one call of each per round, in a random order that is the same for every run.

    Their calls are ready to run: inputs on the device, kernels compiled. The rounds of the warm-up are thrown away.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    spent = dict.fromkeys(calls, 0.0)
    # A garbage collection between two launches would be charged to whichever system it interrupted.
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    order = random.Random(0)
    try:
        for index in range(rounds.warmup + rounds.repetitions):
            for name, call in order.sample(list(calls.items()), len(calls)):
                if spent[name] >= _LONG_SECONDS and len(samples[name]) >= _FEWEST_COUNTED:
                    continue
                sample = stopwatch.time(call)
                spent[name] += sample.seconds + (sample.device_seconds or 0.0)
                if index >= rounds.warmup or spent[name] >= _LONG_SECONDS:
                    samples[name].append(sample)
    finally:
        if collecting:
            gc.enable()
    return {name: summarise(taken) for name, taken in samples.items()}


@dataclass(frozen=True)
class Ceilings:
    """What the machine reached at its best in this run."""

    flops_per_second: float  # of a matrix product
    bytes_per_second: float  # of a copy, read plus written
    # Where rows need them, on a GPU: reads of its cache, exponentials, and a matrix product of 8-bit values.
    l2_bytes_per_second: float | None = None
    exponentials_per_second: float | None = None
    eight_bit_flops_per_second: float | None = None


def measure_ceilings(
    device: torch.device,
    dtype: torch.dtype,
    *,
    others: Mapping[str, Callable[[torch.device], float | None]] = MappingProxyType({}),
    matmul_size: int | None = None,
    copy_bytes: int | None = None,
) -> Ceilings:
    """Measure the rate of a large matrix product in ``dtype`` on random data, and of a large copy.

    float32 follows torch's setting of float32 products, as the systems do. ``others`` measures further rates of a GPU,
    by the names that `Ceilings` has for them. Matrices have 8192 rows and columns on a GPU, 2048 on a CPU; 4 GiB (or an
    eighth of what is free) and 512 MiB are copied, unless other sizes are given.
    """
    on_gpu = device.type == "cuda"
    matmul_size = matmul_size or (8192 if on_gpu else 2048)
    if copy_bytes is None:
        copy_bytes = min(4096 * MIB, torch.cuda.mem_get_info(device)[0] // 8) if on_gpu else 512 * MIB
    left, right = torch.randn(2, matmul_size, matmul_size, device=device).to(dtype)
    product = torch.empty_like(left)
    source = torch.randint(0, 256, (copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # Neither fits a cache, so there is nothing to flush. A CPU takes seconds for what a GPU does in one millisecond.
    timings = measure(
        {"matmul": lambda: torch.mm(left, right, out=product), "copy": lambda: target.copy_(source)},
        make_stopwatch(device, flush_bytes=0),
        Rounds(warmup=5, repetitions=20) if on_gpu else Rounds(warmup=1, repetitions=3),
    )
    return Ceilings(
        flops_per_second=2 * matmul_size**3 / (timings["matmul"].median_ms / 1e3),
        bytes_per_second=2 * copy_bytes / (timings["copy"].median_ms / 1e3),
        **{name: measure_rate(device) for name, measure_rate in others.items() if on_gpu},
    )


@dataclass(frozen=True)
class Work:
    """What a computation cannot avoid."""

    flops: float
    bytes: float  # inputs read once, the output written once
    l2_bytes: float = 0.0  # read from tensors that fit the L2 cache, again and again, once the operations are done
    exponentials: float = 0.0  # computed beside the operations or, if they follow, after them
    exponentials_follow: bool = False
    eight_bits: bool = False  # the operations are of values of 8 bits


@dataclass(frozen=True)
class Floor:
    """The shortest possible time of a piece of work, and which of the two ceilings sets it."""

    milliseconds: float
    bound: str


def floor_of(work: Work, ceilings: Ceilings) -> Floor:
    """Return the floor of a piece of work: the longer of its two times at the ceilings.

    What it reads from the L2 cache comes after that, where that cache was measured. Exponentials, where they were
    measured, are a third time, or if they follow come after that too. Products of 8 bits whose rate was not measured
    count as twice as fast as the others.
    """
    rate = ceilings.flops_per_second
    if work.eight_bits:
        rate = ceilings.eight_bit_flops_per_second or 2 * rate
    compute, memory = work.flops / rate, work.bytes / ceilings.bytes_per_second
    seconds, bound = (compute, "compute") if compute > memory else (memory, "memory")
    exponentials = work.exponentials / (ceilings.exponentials_per_second or math.inf)
    if exponentials and work.exponentials_follow:
        seconds, bound = seconds + exponentials, f"{bound} and exponentials"
    elif exponentials > seconds:
        seconds, bound = exponentials, "exponentials"
    if work.l2_bytes and ceilings.l2_bytes_per_second is not None:
        seconds, bound = seconds + work.l2_bytes / ceilings.l2_bytes_per_second, f"{bound} and L2"
    return Floor(1e3 * seconds, bound)
