"""The memory that one call takes beyond its inputs, measured in a fresh process.

In a shared process, memory that an earlier system cached or still holds would count. On a GPU it is the peak of
torch's allocator, which the Triton packages use too; on a CPU the peak of the resident set (Linux).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from pylate_flash.bench import fresh, load_suite
from pylate_flash.bench.suite import fit, make_current, release


def measure_here(suite: str, row: str, system: str, variant: str, device: torch.device, dtype: torch.dtype) -> int:
    """Return the bytes that a system takes for a row, measured in this process, which should be fresh."""
    make_current(device)
    loaded_suite = load_suite(suite)
    chosen_row = next(candidate for candidate in loaded_suite.rows if candidate.name == row)
    inputs = loaded_suite.make_inputs(fit(loaded_suite, chosen_row, device), device, dtype)
    chosen_system = next(
        candidate for candidate in (*loaded_suite.systems, *loaded_suite.compiled) if candidate.name == system
    )
    calls = {candidate.label: candidate.call for candidate in chosen_system.candidates(inputs)}
    if variant not in calls:
        # For example, candidates depend on the free memory, which has changed.
        raise ValueError(f"{system} offers no {variant!r} here, but {', '.join(map(repr, calls))}")
    call = calls[variant]
    with torch.no_grad():
        # The first call tunes, which allocates; release what it left in the allocator.
        call()
        release(device)
        return peak(call, device)


def peak(call: Callable[[], object], device: torch.device) -> int:
    """Return the peak bytes of a call, its result included, beyond those held before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        torch.cuda.synchronize(device)
        highest = torch.cuda.max_memory_allocated(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is resident now
        before = _resident("VmRSS")
        result = call()
        highest = _resident("VmHWM")
    del result
    return max(0, highest - before)


def _resident(field: str) -> int:
    """Read a field of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


if __name__ == "__main__":
    suite_name, row_name, system_name, label, device_name, dtype_name = json.loads(sys.argv[1])
    load_suite(suite_name)
    fresh.wait_for_turn()
    print(measure_here(suite_name, row_name, system_name, label, torch.device(device_name), getattr(torch, dtype_name)))
