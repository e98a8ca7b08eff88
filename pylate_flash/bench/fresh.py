"""Run a program in a process of its own, for what an earlier call in this one would change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


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
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, **variables}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    command = [str(program)] if isinstance(program, Path) else ["-m", program]
    finished = subprocess.run([sys.executable, *command, *arguments], capture_output=True, text=True, env=environment)
    if finished.returncode:
        raise RuntimeError(f"{program} {' '.join(arguments)} failed: {finished.stderr.strip()[-2000:]}")
    return finished.stdout.split()[-1]


def run_for_memory(program: str | Path, request: str) -> int:
    """Run a program that prints how many bytes it took, where its allocators count what it asked for; return them.

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
    return int(run(program, request, **environment))
