"""Run a program in a process of its own, for what an earlier call in this one would change."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any


def run(program: str | Path, *requests: Sequence[str], **variables: str) -> list[str]:
    """Run a module (by its full name) or a script once for each request, and return the last word that each prints.

    A request is a program's arguments, and ``variables`` are set in its environment. All start at once, as to start
    takes the most time. They get their turn, one after the other, when their standard input ends, for which a program
    waits once it has imported what it needs (`wait_for_turn`). It imports this package as this process did.

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
            # Before it is waited for: it does nothing to those that have ended.
            stack.callback(process.kill)
        for process, request in zip(processes, requests, strict=True):
            out, errors = process.communicate()
            if process.returncode:
                raise RuntimeError(f"{' '.join([*command, *request])} failed: {errors.strip()[-2000:]}")
            words.append(out.split()[-1])
    return words


def wait_for_turn() -> None:
    """Wait, in a program that `run` runs, until those before it have ended."""
    sys.stdin.read()


def run_for_memory(program: str | Path, *requests: str) -> list[int]:
    """Run a program that prints how many bytes it took for each request (`run`), and return these numbers.

    Its allocators count what it asked for.
    """
    environment = {
        # With a fixed threshold, glibc returns every large block to the system when it is freed.
        "MALLOC_MMAP_THRESHOLD_": "65536",
        # Else a large block may count up to 1 MiB more than was asked for, by what was allocated and freed before it.
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    return [int(word) for word in run(program, *[[request] for request in requests], **environment)]
