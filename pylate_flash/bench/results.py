"""Results as JSON: what was measured, where, with which versions, and when.

The layout, version 1::

    schema: 1
    suite, date (ISO 8601, UTC), complete (it has every row of the suite), quick (too few repetitions for a record)
    machine:   device, name, compute_capability, memory_bytes, driver, cuda (None where there is no GPU)
    versions:  python, torch, triton, pylate_flash, and of the packages in `peers.PEERS` (None where absent)
    protocol:  dtype, float32_matmul_precision, clock, warmup, repetitions, flush_bytes, retuned (peers, for
               every row), reduced (batches, on a CPU)
    ceilings:  flops_per_second, bytes_per_second, l2_bytes_per_second, exponentials_per_second and
               eight_bit_flops_per_second (these three None where no row needs them)
    rows:      [name, shape, flops, bytes, floor_ms, bound (what sets the floor: compute or memory, "... and L2" if
                L2 reads are added, or the name of a yardstick system), best_peer, best_peer_over_ours, multiples
                (our time over that of each counted system, in suites that have some),
                systems: {name: status, and the keys of that status}, memory_error (why the requested memory
                measurement failed)]
    facts:     numbers and strings that belong to no row (in suites that have them)

The status of a system in a row is one of ``ok``, ``inaccurate`` (ours only: timed, but less accurate than promised),
``wrong`` (result is wrong, so it has no time), ``failed`` (it raised) and ``absent``. ``ok`` and ``inaccurate`` have
``variant``, ``error`` (largest relative error against float64, as the suite measures it; None for a yardstick),
``median_ms``, ``iqr_ms``, ``host_ms`` (the time until the call returned), ``repetitions``, ``over_floor``, and
``memory_bytes`` if memory was measured; the others have a ``reason``, and ``wrong`` also its ``error`` (None if it is
not finite).
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import pylate_flash
from pylate_flash.bench.peers import PEERS, Peer
from pylate_flash.bench.protocol import Ceilings, CpuStopwatch, Rounds, float32_matmul_precision
from pylate_flash.data.files import replace_file

SCHEMA = 1

_KEYS = ("suite", "date", "complete", "quick", "machine", "versions", "protocol", "ceilings", "rows")
_ROW_KEYS = ("name", "shape", "floor_ms", "bound", "systems", "best_peer", "best_peer_over_ours")
_TIMED = ("variant", "error", "median_ms", "iqr_ms", "host_ms", "over_floor")
_STATUS_KEYS = {
    **{"ok": _TIMED, "inaccurate": _TIMED},
    **{"wrong": ("reason", "error"), "failed": ("reason",), "absent": ("reason",)},
}


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Describe the machine: the GPU, or the processor and the number of threads that torch uses."""
    if device.type != "cuda":
        name = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
        unknown = dict.fromkeys(("compute_capability", "memory_bytes", "driver", "cuda"))
        return {"device": device.type, "name": name, **unknown}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": device.type,
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "driver": _driver(),
        "cuda": torch.version.cuda,
    }


def _driver() -> str | None:
    """The version of the GPU's driver, or None if nvidia-smi fails."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = answer.stdout.split()
    return lines[0] if lines else None


def describe_versions() -> dict[str, str | None]:
    """Return the versions of everything that timings may depend on."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": Peer("triton", "triton").version(),
        "pylate_flash": pylate_flash.__version__,
        **{peer.distribution: peer.version() for peer in PEERS},
    }


def make(
    suite: str,
    device: torch.device,
    dtype: torch.dtype,
    rounds: Rounds,
    stopwatch: CpuStopwatch,
    ceilings: Ceilings,
    *,
    quick: bool,
    retuned: bool,
    reduced: bool,
) -> dict[str, Any]:
    """Return a result with the current date and no rows."""
    return {
        "schema": SCHEMA,
        "suite": suite,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "complete": False,
        "quick": quick,
        "machine": describe_machine(device),
        "versions": describe_versions(),
        "protocol": {
            "dtype": str(dtype).removeprefix("torch."),
            "float32_matmul_precision": float32_matmul_precision(),
            "clock": stopwatch.clock,
            **asdict(rounds),
            "flush_bytes": stopwatch.flush_bytes,
            "retuned": retuned,
            "reduced": reduced,
        },
        "ceilings": asdict(ceilings),
        "rows": [],
    }


def save(result: dict[str, Any], path: Path) -> None:
    """Validate a result and write it; an interrupted write leaves the previous file intact."""
    validate(result, str(path))
    text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text)


def load(path: Path) -> dict[str, Any]:
    """Read a result; raise a ValueError if the file is not JSON, or not a result of this version."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not a JSON file ({error})") from error
    validate(result, str(path))
    return dict(result)


def joined(earlier: dict[str, Any], later: dict[str, Any], rows: Sequence[str]) -> dict[str, Any]:
    """Return the later result, plus the rows that only the earlier one has, in the order of ``rows``.

    ``rows`` has the names of all rows of the suite; other rows are dropped. Ceilings and date are the later one's; each
    row keeps the floor of its own run. Raises a ValueError if they were not measured alike (`check_alike`).
    """
    check_alike(earlier, later)
    all_rows = {row["name"]: row for row in (*earlier["rows"], *later["rows"])}
    known_rows = [all_rows[name] for name in rows if name in all_rows]
    # Facts are only measured along with all rows.
    facts = {"facts": earlier["facts"]} if "facts" in earlier else {}
    return {**facts, **later, "rows": known_rows, "complete": len(known_rows) == len(rows)}


def check_alike(earlier: dict[str, Any], later: dict[str, Any]) -> None:
    """Raise a ValueError if the results differ in suite, machine, versions or protocol."""
    for key in ("suite", "machine", "versions", "protocol"):
        if earlier[key] != later[key]:
            raise ValueError(
                f"{key}: {earlier[key]} in the earlier result, {later[key]} in this run; expected the same"
            )


def validate(result: Any, where: str) -> None:
    """Raise a ValueError with ``where`` and the problem unless ``result`` has the layout above."""
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        schema = result.get("schema") if isinstance(result, dict) else type(result).__name__
        raise ValueError(f"{where}: 'schema' is {schema!r}, expected a benchmark result with schema {SCHEMA}")
    _require(result, _KEYS, where)
    if not isinstance(result["rows"], list):
        raise ValueError(f"{where}: 'rows' is of type {type(result['rows']).__name__}, expected a list")
    for index, row in enumerate(result["rows"]):
        _require(row, _ROW_KEYS, f"{where}: row {index}")
        _require(row["systems"], (), f"{where}: row {index}, systems")
        for name, state in row["systems"].items():
            place = f"{where}: row {row['name']!r}, system {name!r}"
            _require(state, ("status",), place)
            if state["status"] not in list(_STATUS_KEYS):
                raise ValueError(f"{place}: status is {state['status']!r}, expected one of {', '.join(_STATUS_KEYS)}")
            _require(state, _STATUS_KEYS[state["status"]], place)


def _require(mapping: Any, keys: tuple[str, ...], where: str) -> None:
    if not isinstance(mapping, dict):
        raise ValueError(f"{where}: is of type {type(mapping).__name__}, expected an object")
    missing = [key for key in keys if key not in mapping]
    if missing:
        raise ValueError(f"{where}: lacks {', '.join(missing)}")


def place(path: Path, result: dict[str, Any]) -> Path:
    """Return ``path`` if it ends in .json, else a file in that folder, named by suite, machine and day."""
    if path.suffix == ".json":
        return path
    machine = re.sub("[^a-z0-9]+", "-", result["machine"]["name"].lower()).strip("-")
    return path / f"{result['suite']}-{machine}-{result['date'][:10]}.json"
