"""Run a program in a process of its own, for what an earlier call in this one would change."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import cast


def run(program: str | Path, *arguments: str, **variables: str) -> str:
    """Run a module, or a script, with arguments and return the last word that it prints.

    Parameters
    ----------
    program
        A module's full name, or the path of a script. Both import this package as this process did.
    arguments
        What it is given.
    variables
        Environment variables to set for it.

    Raises
    ------
    RuntimeError
        If the process fails; the message ends with what it wrote.
    """
    with _started(program, arguments, variables) as process:
        return _last_word(process)


def run_in_turn(program: str | Path, requests: Sequence[str], **variables: str) -> list[str]:
    """Run a program once for each request, its argument, and return the last word that each prints.

    All start at once, as to start takes the most time. They get their turn, one after the other, when their standard
    input ends, for which a program waits once it has imported what it needs (`wait_for_turn`).

    Raises
    ------
    RuntimeError
        As `run`, for the first that fails; the others are stopped.
    """
    with ExitStack() as stack:
        processes = []
        for request in requests:
            processes.append(stack.enter_context(_started(program, [request], variables)))
            # Before it is waited for: it does nothing to those that have ended.
            stack.callback(processes[-1].kill)
        return [_last_word(process) for process in processes]


def wait_for_turn() -> None:
    """Wait, in a program that `run_in_turn` runs, until those before it have ended."""
    sys.stdin.read()


def _started(program: str | Path, arguments: Sequence[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, **variables}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    command = [str(program)] if isinstance(program, Path) else ["-m", program]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *command, *arguments], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment
    )


def _last_word(process: subprocess.Popen[str]) -> str:
    """End a process's standard input, wait for the process, and return the last word that it printed."""
    out, errors = process.communicate()
    if process.returncode:
        _, *command = cast("list[str]", process.args)
        raise RuntimeError(f"{' '.join(command)} failed: {errors.strip()[-2000:]}")
    return out.split()[-1]


def run_for_memory(program: str | Path, *requests: str) -> list[int]:
    """Run a program that prints how many bytes it took for each request (`run_in_turn`), and return these numbers.

    Its allocators count what it asked for.

    Raises
    ------
    RuntimeError
        As `run`.
    """
    environment = {
        # With a fixed threshold, glibc returns every large block to the system when it is freed.
        "MALLOC_MMAP_THRESHOLD_": "65536",
        # Else a large block may count up to 1 MiB more than was asked for, by what was allocated and freed before it.
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    return [int(word) for word in run_in_turn(program, requests, **environment)]
