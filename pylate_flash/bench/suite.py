"""The definition of a suite, and the loop that runs one: check every system, time them in turn, compare.

A suite has rows (named shapes), a function that creates a row's inputs, a float64 reference, and the systems that
compute the row. A system offers one or several candidates for a row, such as the chunk sizes of a chunked loop, and
only the fastest counts, as a deployment would choose it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, NamedTuple, Protocol

import torch

from pylate_flash.bench import exact, fresh, peers, results
from pylate_flash.bench.protocol import (
    Ceilings,
    CpuStopwatch,
    Floor,
    Rounds,
    Work,
    floor_of,
    make_two_times_stopwatch,
    measure,
    measure_ceilings,
)

# The system that is compared with the others. A system whose name starts with it is another path through this package:
# it is listed in the table, but is not one of the "others".
OURS = "pylate_flash"

# The default tolerance of a system's error (`System.tolerance`).
WRONG = 1e-2

# The factor by which pylate_flash may exceed its accuracy target unreported (a maximum over a million scores).
MARGIN = 5.0

# The states in which a system does not deliver what it promises.
BROKEN = ("wrong", "inaccurate", "failed")


class Unavailable(Exception):
    """Raised by a system's ``candidates`` if it cannot be measured; the message says why."""


class Candidate(NamedTuple):
    """One way to compute a row: a label, a call without arguments, and a function that reads what the suite compares.

    Reading the result is not timed.
    """

    label: str
    call: Callable[[], Any]
    read: Callable[[Any], Any] = lambda result: result


@dataclass(frozen=True)
class System:
    """A system that is measured."""

    name: str  # the key in results: ``pylate_flash``, ``lik``, ...
    title: str  # the head of its table column
    # Maps a row's inputs to the candidates of this system. Their calls run without gradients.
    candidates: Callable[[Any], Sequence[Candidate]]
    peer: peers.Peer | None = None  # the other package that it needs, if any
    about: str = ""  # what the title stands for, if not obvious
    # It computes something else, as a bound: its result is not checked, it is not compared with pylate_flash, and the
    # fastest yardstick of a row is its floor, instead of the one from the ceilings.
    yardstick: bool = False
    counted: bool = False  # our time is also given as a multiple of its time
    # A larger error cannot be rounding: the system computes something else on these inputs, and is not timed.
    tolerance: float = WRONG


# For inputs with a method per system, as those of `calls`.
OUR_SYSTEM = System(OURS, "pylate_flash", methodcaller("ours"))
LIK_SYSTEM = System("lik", "LIK", methodcaller("lik"), peer=peers.LIK, about="late-interaction-kernels")
FLASH_MAXSIM_SYSTEM = System(
    "flash_maxsim", "FM", methodcaller("flash_maxsim"), peer=peers.FLASH_MAXSIM, about="flash-maxsim"
)
TORCH_SYSTEM = System("torch", "torch", methodcaller("torch"))


def another_way(name: str, title: str | None = None, **kwargs: Any) -> System:
    """Another path through this package: by default the inputs' method ``name``."""
    kwargs.setdefault("candidates", methodcaller(name))
    return System(f"{OURS}_{name}", title or name, **kwargs)


class Row(Protocol):
    """A named shape. A suite's own row class may have more fields."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> str: ...

    def work(self, dtype: torch.dtype) -> Work:
        """The unavoidable operations and bytes with inputs of that dtype."""

    def within(self, flops: float) -> Row:
        """The same row with fewer queries and documents, so that it takes at most ``flops`` operations."""


@dataclass(frozen=True)
class Suite:
    """A set of rows, and how to create, check and compute them."""

    name: str  # for results
    title: str  # for display
    rows: Sequence[Row]  # in the order of the table
    systems: Sequence[System]  # pylate_flash first
    make_inputs: Callable[[Any, torch.device, torch.dtype], Any]  # of a row, random, never zeros
    reference: Callable[[Any], Any] = methodcaller("reference")  # maps inputs to the float64 reference
    # The relative error that pylate_flash promises for inputs of a type.
    accuracy: Callable[[Any, torch.dtype], float] = lambda inputs, dtype: inputs.accuracy(dtype)
    # Maps what a candidate read from its result, and the reference, to the relative error (infinite if not finite).
    error: Callable[[Any, Any], float] = exact.error
    compiled: Sequence[System] = ()  # variants of ``torch.compile``, measured on request only
    unit: str = "ms"  # of the times shown, or ``us``; results keep milliseconds
    stopwatch: Callable[[torch.device, int], CpuStopwatch] = make_two_times_stopwatch  # of a device and flush_bytes
    device: str | None = None  # the only device type that it measures
    # Measurements that belong to no row, by name; taken only if all rows are measured.
    facts: Callable[[torch.device, torch.dtype], dict[str, Any]] | None = None
    # Functions that measure further rates for the floors of its rows, by field name (`protocol.Ceilings`).
    ceilings: Mapping[str, Callable[[torch.device], float | None]] = field(default_factory=dict)
    retunes: bool = True  # unless quick, peers tune for every row; not needed if only host time matters
    script: str | None = None  # its file, if it is not part of the package


class Observer:
    """Receives the progress of a run; `report.Progress` shows it. This base class ignores it."""

    def doing(self, what: str) -> None:
        """Called when a step that may take a while begins."""

    def finished(self, row: dict[str, Any]) -> None:
        """Called when a row of the result is complete."""


# On a CPU a row for a GPU would take minutes: its batch is reduced until it takes at most this many operations.
CPU_FLOPS = 5e8


def run(
    suite: Suite,
    device: torch.device,
    dtype: torch.dtype,
    rounds: Rounds,
    *,
    rows: Sequence[str] = (),
    with_peers: bool = True,
    with_compiled: bool = False,
    with_memory: bool = False,
    quick: bool = False,
    ceilings: Ceilings | None = None,
    observer: Observer | None = None,
    begin: Callable[[dict[str, Any]], None] = lambda result: None,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Measure the ceilings, unless they are given, and every row; return the result in the layout of `results`.

    A CPU gets smaller batches of the same rows (`CPU_FLOPS`), unless the suite is for CPUs. Raises a ValueError
    for an unknown row name.

    Parameters
    ----------
    rows
        Names of the rows to measure; empty means all.
    with_peers, with_compiled, with_memory
        Whether to measure the other packages, the systems under ``torch.compile``, and each system's memory beyond its
        inputs, in a fresh process (`memory`).
    quick
        Do not tune the peers for every row: a peer then reuses its choice for an earlier row with the same autotuner
        key, and a single call of each candidate of a system selects between them. The result is marked as quick.
    observer
        Receives the progress, and each row when it is done.
    begin
        Called with the result before the first row; may raise to reject a run that would be of no use.
    keep
        Called with the result after every row, incomplete until the last, so that an interrupted run keeps its rows.
    """
    chosen = choose(suite, rows)
    observer = observer or Observer()
    systems = [system for system in suite.systems if with_peers or system.peer is None]
    systems += suite.compiled if with_compiled else []
    make_current(device)
    if ceilings is None:
        observer.doing("measuring the ceilings")
        ceilings = measure_ceilings(device, dtype, others=suite.ceilings)
        release(device)
    retuned = suite.retunes and not quick
    measurement = _Measurement(
        suite, systems, device, dtype, rounds, suite.stopwatch(device, rounds.flush_bytes), ceilings, quick, observer
    )
    flags = {"retuned": retuned, "reduced": reduces(suite, device)}
    result = results.make(suite.name, device, dtype, rounds, measurement.stopwatch, ceilings, quick=quick, **flags)
    begin(result)
    for row in chosen:
        with torch.no_grad():
            measured = measurement.of_row(fit(suite, row, device))
        release(device)
        if with_memory:
            observer.doing(f"{row.name}: measuring the memory")
            timed = {name: state for name, state in measured["systems"].items() if "median_ms" in state}
            variants = {name: state["variant"] for name, state in timed.items()}
            try:
                memory = memory_of(suite.script or suite.name, row.name, variants, device, dtype)
            except RuntimeError as error:
                # A failed memory measurement must lose neither the timings nor the remaining rows.
                measured["memory_error"], memory = str(error).splitlines()[-1][:200], {}
            for name, taken in memory.items():
                timed[name]["memory_bytes"] = taken
        result["rows"].append(measured)
        result["complete"] = len(result["rows"]) == len(suite.rows)
        observer.finished(measured)
        keep(result)
    if suite.facts is not None and not rows:
        observer.doing("measuring the facts of the suite")
        result["facts"] = suite.facts(device, dtype)
        keep(result)
    return result


def memory_of(
    suite: str, row: str, variants: Mapping[str, str], device: torch.device, dtype: torch.dtype
) -> dict[str, int]:
    """Return the bytes that systems take for a row beyond its inputs.

    ``suite`` is a name or a path, ``row`` a name; ``variants`` maps each system's name to the label of the candidate to
    measure.

    Raises
    ------
    RuntimeError
        If a process fails; the message ends with what it wrote.
    """
    where = str(device), str(dtype).removeprefix("torch.")
    requests = [json.dumps([suite, row, system, variant, *where]) for system, variant in variants.items()]
    return dict(zip(variants, fresh.run_for_memory("pylate_flash.bench.memory", *requests), strict=True))


def reduces(suite: Suite, device: torch.device) -> bool:
    """Return whether the rows are reduced for the device: a suite for GPUs runs on a CPU."""
    return device.type == "cpu" and suite.device != "cpu"


def fit(suite: Suite, row: Row, device: torch.device) -> Row:
    """Return the row as measured on a device."""
    return row.within(CPU_FLOPS) if reduces(suite, device) else row


def choose(suite: Suite, names: Sequence[str]) -> list[Row]:
    """Return the rows of those names (all if empty); raise a ValueError for an unknown one."""
    known = [row.name for row in suite.rows]
    for name in names:
        if name not in known:
            raise ValueError(f"rows: the suite {suite.name!r} has no {name!r}, expected some of {', '.join(known)}")
    return [row for row in suite.rows if not names or row.name in names]


@dataclass(frozen=True)
class _Measurement:
    """The settings that the rows of a run share."""

    suite: Suite
    systems: Sequence[System]
    device: torch.device
    dtype: torch.dtype
    rounds: Rounds
    stopwatch: CpuStopwatch
    ceilings: Ceilings
    quick: bool
    observer: Observer

    def of_row(self, row: Row) -> dict[str, Any]:
        """Check, time and compare all systems on a row."""
        inputs = self.suite.make_inputs(row, self.device, self.dtype)
        self.observer.doing(f"{row.name}: computing the reference")
        reference = self.suite.reference(inputs)
        states: dict[str, dict[str, Any]] = {}
        ready: dict[str, Candidate] = {}
        for system in self.systems:
            what = f"{row.name}: preparing {system.title}"
            states[system.name], candidate = self.prepare(system, inputs, reference, what)
            if candidate is not None:
                ready[system.name] = candidate

        self.observer.doing(f"{row.name}: timing")
        calls = {name: candidate.call for name, candidate in ready.items()}
        timings = measure(calls, self.stopwatch, self.rounds)
        work = row.work(self.dtype)
        yardsticks = {s.name: timings[s.name] for s in self.systems if s.yardstick and s.name in ready}
        floor = floor_of(work, self.ceilings)
        if yardsticks:
            milliseconds, fastest = min((timing.median_ms, name) for name, timing in yardsticks.items())
            floor = Floor(milliseconds, fastest)
        accuracy = self.suite.accuracy(inputs, self.dtype)
        for system in self.systems:
            if system.name in ready:
                state = self.after(system, states[system.name], ready[system.name], reference, accuracy)
                if state["status"] != "wrong":
                    timing = timings[system.name]
                    state |= {**timing.known(), "over_floor": timing.median_ms / floor.milliseconds}
                states[system.name] = state
        return {
            "name": row.name,
            "shape": row.shape,
            "flops": work.flops,
            "bytes": work.bytes,
            "floor_ms": floor.milliseconds,
            "bound": floor.bound,
            "systems": states,
            **compare(states, [system.name for system in self.systems if system.counted], yardsticks),
        }

    def prepare(
        self, system: System, inputs: Any, reference: Any, what: str
    ) -> tuple[dict[str, Any], Candidate | None]:
        """Compile, check and compare a system's candidates; return its state, and the fastest correct one, if any.

        The observer is notified of each candidate (``what``, label), as some compile for minutes.
        """
        self.observer.doing(what)
        if system.peer is not None:
            reason = system.peer.unavailable(self.device)
            if reason is not None:
                return {"status": "absent", "reason": reason}, None
            if self.device.type == "cuda" and self.suite.retunes and not self.quick:
                system.peer.forget_tuning()
        # Free cached memory, for systems that choose sizes by the free memory.
        release(self.device)
        correct: list[tuple[float, float, Candidate]] = []
        problems: list[dict[str, Any]] = []
        try:
            candidates = list(system.candidates(inputs))
        except Unavailable as why:
            return {"status": "absent", "reason": str(why)}, None
        except Exception as exception:
            return {"status": "failed", "reason": _sentence(exception)}, None
        for candidate in candidates:
            self.observer.doing(f"{what}, {candidate.label}")
            try:
                error = 0.0
                if system.yardstick:
                    candidate.call()
                else:
                    error = check(candidate, reference, self.suite.error)
                if error > system.tolerance:
                    problems.append(_wrong(f"{candidate.label}: relative error {error:.1e}", error))
                    continue
                seconds = 0.0
                if len(candidates) > 1:
                    # The first calls of a kernel are slower; one warm-up call is enough to choose between candidates.
                    # In quick mode the check was that call.
                    times = [self.stopwatch.time(candidate.call).seconds for _ in range(1 if self.quick else 6)]
                    seconds = statistics.median(times[-5:])
                correct.append((seconds, error, candidate))
            except Exception as exception:
                # Any exception of another package (out of memory, a compiler error) is that candidate's result.
                problems.append({"status": "failed", "reason": f"{candidate.label}: {_sentence(exception)}"})
                release(self.device)
        if correct:
            _, error, fastest = min(correct, key=lambda entry: entry[0])
            return {"status": "ok", "error": error}, fastest
        if problems:
            return min(problems, key=lambda problem: problem["status"] != "wrong"), None
        return {"status": "absent", "reason": "offers nothing for this shape"}, None

    def after(
        self, system: System, state: dict[str, Any], candidate: Candidate, reference: Any, accuracy: float
    ) -> dict[str, Any]:
        """The state of a system that was timed, without its times."""
        if system.yardstick:
            return {"status": "ok", "variant": candidate.label, "error": None}
        # Check again after the timing: an error that has changed since the first check is a race.
        error = max(state["error"], check(candidate, reference, self.suite.error))
        if error > system.tolerance:
            return _wrong(f"{candidate.label}: correct before the timing, wrong after it: a race", error)
        inaccurate = system.name.startswith(OURS) and error > MARGIN * accuracy
        return {"status": "inaccurate" if inaccurate else "ok", "variant": candidate.label, "error": error}


def _wrong(reason: str, error: float) -> dict[str, Any]:
    return {"status": "wrong", "reason": reason, "error": error if error < float("inf") else None}


def check(candidate: Candidate, reference: Any, error: Callable[[Any, Any], float] = exact.error) -> float:
    """Make the call once and return its relative error.

    Memory of the result's size is filled with NaN and freed before, so that elements which the call does not write do
    not pass because an earlier call wrote them there.
    """
    tensors = (reference,) if isinstance(reference, torch.Tensor) else reference
    poison = [torch.full_like(part, torch.nan, dtype=torch.float32) for part in tensors if part is not None]
    del poison
    return error(candidate.read(candidate.call()), reference)


def compare(states: dict[str, dict[str, Any]], counted: Sequence[str], yardsticks: Container[str]) -> dict[str, Any]:
    """Name the fastest of the other systems, and its time as a multiple of ours (None if either is missing).

    Also our time as a multiple of that of each ``counted`` system, if there are any.
    """
    times = {name: state["median_ms"] for name, state in states.items() if "median_ms" in state}
    ours = times.get(OURS)
    others = {name: time for name, time in times.items() if not name.startswith(OURS) and name not in yardsticks}
    best = min(others, key=lambda name: others[name], default=None)
    multiples = {name: ours / times[name] if ours and name in times else None for name in counted}
    best_of_others = {
        "best_peer": best,
        "best_peer_over_ours": others[best] / ours if best is not None and ours else None,
    }
    return best_of_others | ({"multiples": multiples} if counted else {})


def make_current(device: torch.device) -> None:
    """Make a GPU the current device: some packages launch there, whatever the device of their tensors is."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def release(device: torch.device) -> None:
    """Release cached device memory."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _sentence(exception: BaseException) -> str:
    """The type and the first line of an exception's message, for a table and a JSON file."""
    lines = str(exception).strip().splitlines()
    return f"{type(exception).__name__}: {lines[0][:200]}" if lines else type(exception).__name__
