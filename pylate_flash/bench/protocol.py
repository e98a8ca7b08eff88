"""How a call is timed, and the machine's ceilings.

The protocol is that of the Flash-MaxSim paper's appendix A:

- the systems of a row are timed in turn, one call each per round, within one run, so that clock drift or a GPU that
  warms up affects all of them alike; every round has another order, because the previous call leaves its own code in
  the host's caches, an advantage for a system that runs the same code;
- the L2 cache is overwritten before every timed call, so that inputs come from device memory, as they do in a service;
- a call is timed with CUDA events; the median and the interquartile range of the rounds are reported;
- the warm-up of a system ends once its calls have taken five seconds, and its timing once three more have counted, so
  that a slow system does not hold up the others;
- allocation, casts, compilation and tuning happen before the first timed call;
- the machine's two ceilings, a large matrix product and a large copy, are measured in the same run. They set a floor
  for each row: its arithmetic at the one rate, or its unavoidable traffic at the other, whichever is longer.
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
# The settings of the precision of float32 products, on GPUs and on CPUs.
FLOAT32_PRODUCTS = (_backends.cuda.matmul, _backends.mkldnn.matmul)


def float32_matmul_precision() -> str:
    """Return the precision of float32 products in force, by the names of `torch.get_float32_matmul_precision`.

    That function raises if the precision was set through the newer settings.
    """
    precisions = [products.fp32_precision for products in FLOAT32_PRODUCTS]
    return "medium" if "bf16" in precisions else "high" if "tf32" in precisions else "highest"


@dataclass(frozen=True)
class Rounds:
    """The number of calls of each system, and the bytes that flush the cache before each."""

    warmup: int = 10  # calls before the first one that counts
    repetitions: int = 50
    # Outside the timed region; 0 leaves the cache warm. A GPU whose L2 is larger than half gets twice its L2 written.
    flush_bytes: int = 128 * MIB


QUICK = Rounds(warmup=3, repetitions=10)
# Seconds of calls after which a system's warm-up ends, and its timing too once this many calls have counted.
_LONG_SECONDS = 5.0
_FEWEST_COUNTED = 3


class Sample(NamedTuple):
    """One timed call: ``seconds`` until its result was ready, ``host_seconds`` until the call returned.

    ``device_seconds``, if measured: the time of the device alone, after the host had launched everything.
    """

    seconds: float
    host_seconds: float
    device_seconds: float | None = None


class CpuStopwatch:
    """Times a call with the host's performance counter, with a cold cache if ``flush_bytes`` is not 0."""

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
        # Only now: the memory of the result stays allocated until the call is over.
        del result
        return Sample(returned - started, returned - started)


class CudaStopwatch(CpuStopwatch):
    """Times a call with CUDA events on the device's current stream.

    Every call starts from an empty queue: the only head start of the host is the time in which the device writes the
    flush buffer. A call that takes longer to launch is therefore charged for the difference, and work that one system
    leaves in the queue never hides another system's launch.
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


# The device is kept busy before a call for this multiple of the call's host time, up to this many seconds.
_HEAD_START = 2.0
_LONGEST_HEAD_START = 0.2


class TwoTimesStopwatch(CudaStopwatch):
    """Makes every call twice: as `CudaStopwatch` does, and with the device busy until the host has launched all of it.

    The second time is that of the device alone, unless the call synchronises with it.
    """

    clock = "CUDA events, from an empty queue and again behind a head start of the host"

    def __init__(self, device: torch.device, flush_bytes: int) -> None:
        super().__init__(device, flush_bytes or 128 * MIB)
        self._write()
        self._write_seconds = self._timed(self._write).seconds

    def time(self, call: Callable[[], object]) -> Sample:
        """Flush the cache and make the call, twice; return both times."""
        sample = super().time(call)
        needed = min(_HEAD_START * sample.host_seconds, _LONGEST_HEAD_START)
        for _ in range(1 + math.ceil(needed / self._write_seconds)):
            self._write()
        return sample._replace(device_seconds=self._timed(call).seconds)


def make_stopwatch(device: torch.device, flush_bytes: int, on_gpu: type[CudaStopwatch] = CudaStopwatch) -> CpuStopwatch:
    """Return the stopwatch of a device."""
    return on_gpu(device, flush_bytes) if device.type == "cuda" else CpuStopwatch(flush_bytes)


# Also measures the time of the GPU alone.
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
        """The fields that are not None, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def summarise(samples: Sequence[Sample]) -> Timing:
    """Return the median and the interquartile range (linear interpolation) of at least one sample."""
    milliseconds = [1e3 * sample.seconds for sample in samples]
    # Quantiles need two samples: a single one is repeated.
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

    The calls are ready to run: inputs on the device, kernels compiled. The warm-up rounds are discarded.
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
    """The best rates that the machine reached in this run."""

    flops_per_second: float  # of a matrix product
    bytes_per_second: float  # of a copy, read plus written
    # On a GPU, if rows need them: L2 reads, exponentials, and a matrix product of 8-bit values.
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

    float32 follows torch's setting of float32 products, as the systems do. ``others`` maps fields of `Ceilings` to
    functions that measure further rates of a GPU. By default matrices have 8192 rows and columns on a GPU and 2048 on a
    CPU, and the copy has 4 GiB (at most an eighth of the free memory) on a GPU and 512 MiB on a CPU.
    """
    on_gpu = device.type == "cuda"
    matmul_size = matmul_size or (8192 if on_gpu else 2048)
    if copy_bytes is None:
        copy_bytes = min(4096 * MIB, torch.cuda.mem_get_info(device)[0] // 8) if on_gpu else 512 * MIB
    left, right = torch.randn(2, matmul_size, matmul_size, device=device).to(dtype)
    product = torch.empty_like(left)
    source = torch.randint(0, 256, (copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # Neither fits a cache, so nothing is flushed. A CPU takes seconds for what a GPU does in one millisecond.
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
    """The unavoidable work of a computation."""

    flops: float
    bytes: float  # inputs read once, the output written once
    l2_bytes: float = 0.0  # read repeatedly from tensors that fit the L2 cache, once the operations are done
    exponentials: float = 0.0  # overlap with the operations or, if they follow, come after them
    exponentials_follow: bool = False
    eight_bits: bool = False  # the operations are on 8-bit values


@dataclass(frozen=True)
class Floor:
    """The shortest possible time of some work, and which ceiling sets it."""

    milliseconds: float
    bound: str


def floor_of(work: Work, ceilings: Ceilings) -> Floor:
    """Return the floor of some work: the longer of its two times at the ceilings.

    If the L2 bandwidth was measured, the time of L2 reads is added. If the rate of exponentials was measured, they are
    a third time to take the longest of, or are added if they follow. 8-bit products without a measured rate count as
    twice as fast as the others.
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
