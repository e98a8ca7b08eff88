"""Run programs in fresh processes, for measurements that earlier calls in this process would affect."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any


def run(program: str | Path, *requests: Sequence[str], **variables: str) -> list[str]:
    """Run a module (by its full name) or a script once per request, and return the last word that each run prints.

    A request is a list of program arguments; ``variables`` are set in its environment. All processes start at once, as
    startup takes the most time, and do their work one after the other: each one waits after its imports, until its
    standard input is closed (`wait_for_turn`). They import the same copy of this package as this process.

    Raises
    ------
    RuntimeError
        If a process fails; the message ends with what it wrote. The others are stopped.
    """
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, **variables}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    command = [str(program)] if isinstance(program, Path) else ["-m", program]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    words = []
    with ExitStack() as stack:
        processes = []
        for request in requests:
            process = subprocess.Popen([sys.executable, *command, *request], text=True, env=environment, **pipes)
            processes.append(stack.enter_context(process))
            # Runs before the process is waited for on exit; a no-op if it has ended.
            stack.callback(process.kill)
        for process, request in zip(processes, requests, strict=True):
            out, errors = process.communicate()
            if process.returncode:
                raise RuntimeError(f"{' '.join([*command, *request])} failed: {errors.strip()[-2000:]}")
            words.append(out.split()[-1])
    return words


def wait_for_turn() -> None:
    """In a program started by `run`: wait until the earlier processes have ended."""
    sys.stdin.read()


def run_for_memory(program: str | Path, *requests: str) -> list[int]:
    """Run a program that prints the bytes it took once per request (`run`), and return these numbers.

    The environment makes its allocators count the requested bytes.
    """
    environment = {
        # With a fixed threshold, glibc returns every large block to the system when it is freed.
        "MALLOC_MMAP_THRESHOLD_": "65536",
        # Otherwise a large block may count up to 1 MiB more than requested, depending on earlier allocations and frees.
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    return [int(word) for word in run(program, *[[request] for request in requests], **environment)]
