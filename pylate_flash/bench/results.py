"""Results as JSON: what was measured, where, with what, and when.

The layout, version 1::

    schema: 1
    suite, date (ISO 8601, UTC), complete (it has every row of the suite), quick (too few repetitions to be kept)
    machine:   device, name, compute_capability, memory_bytes, driver, cuda (None where there is no GPU)
    versions:  python, torch, triton, pylate_flash, and of the packages in `peers.PEERS` (None where absent)
    protocol:  dtype, float32_matmul_precision, clock, warmup, repetitions, flush_bytes, retuned (peers, for
               every row), reduced (batches, on a CPU)
    ceilings:  flops_per_second, bytes_per_second, l2_bytes_per_second, exponentials_per_second and
               eight_bit_flops_per_second (these three None where no row needs them)
    rows:      [name, shape, flops, bytes, floor_ms, bound (what sets the floor: compute or memory, "... and L2" where
                reads of the cache come after it, or the name of a system that is a yardstick), best_peer,
                best_peer_over_ours, multiples (our time over that of each system that is counted, in suites that have
                some),
                systems: {name: status, and what that status has}, memory_error (why no memory was measured, where it
                was asked for and failed)]
    facts:     numbers and words that belong to no row (in suites that have them)

The status of a system in a row is one of ``ok``, ``inaccurate`` (ours alone: timed, but past the accuracy it promises),
``wrong`` (its result is, so it has no time), ``failed`` (it raised) and ``absent``. ``ok`` and ``inaccurate`` come with
``variant``, ``error`` (largest relative error against float64, as the suite measures it; None for a yardstick),
``median_ms``, ``iqr_ms``, ``host_ms`` (the time until the call returned), ``repetitions``, ``over_floor``, and
``memory_bytes`` where memory was measured; the others with a ``reason``, and ``wrong`` with its ``error`` (None where
it is not finite).
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
    """Return what the machine is: the GPU, or the processor and the number of threads that torch uses."""
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
    """The version of the GPU's driver, or None where it cannot be asked."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = answer.stdout.split()
    return lines[0] if lines else None


def describe_versions() -> dict[str, str | None]:
    """Return the versions of everything that a time may depend on."""
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
    """Return a result without rows, dated now."""
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
    """Write a result, which `validate` takes; an interrupted write leaves what was there before."""
    validate(result, str(path))
    text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text)


def load(path: Path) -> dict[str, Any]:
    """Read a result; a ValueError says where the file is not JSON, or not a result of this version."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not a JSON file ({error})") from error
    validate(result, str(path))
    return dict(result)


def joined(earlier: dict[str, Any], later: dict[str, Any], rows: Sequence[str]) -> dict[str, Any]:
    """Return the later result with the rows of an earlier one that it does not have, in the order of ``rows``.

    Those are the names of all rows of the suite; others are left out. Ceilings and date are the later one's; a row
    keeps the floor of its own run. Two that were not measured alike are a ValueError (`check_alike`).
    """
    check_alike(earlier, later)
    found = {row["name"]: row for row in (*earlier["rows"], *later["rows"])}
    kept = [found[name] for name in rows if name in found]
    # Facts are measured with all rows only.
    facts = {"facts": earlier["facts"]} if "facts" in earlier else {}
    return {**facts, **later, "rows": kept, "complete": len(kept) == len(rows)}


def check_alike(earlier: dict[str, Any], later: dict[str, Any]) -> None:
    """Raise a ValueError for results of two suites, of two machines or versions, or measured in two ways."""
    for key in ("suite", "machine", "versions", "protocol"):
        if earlier[key] != later[key]:
            raise ValueError(
                f"{key}: {earlier[key]} of the rows to be added to, and {later[key]} of those measured now"
            )


def validate(result: Any, where: str) -> None:
    """Raise a ValueError naming ``where`` and what is amiss unless ``result`` has the layout above."""
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        found = result.get("schema") if isinstance(result, dict) else type(result).__name__
        raise ValueError(f"{where}: 'schema' is {found!r}, expected a benchmark result with schema {SCHEMA}")
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
