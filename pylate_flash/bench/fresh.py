"""Run a module of this package in a process of its own, for what an earlier call in this one would change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run(module: str, *arguments: str, **variables: str) -> str:
    """Run ``python -m module arguments`` and return the last word that it prints.

    Parameters
    ----------
    module
        The module's full name.
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
    finished = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, env=environment
    )
    if finished.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)} failed: {finished.stderr.strip()[-2000:]}")
    return finished.stdout.split()[-1]


def run_for_memory(module: str, request: str) -> int:
    """Run a module that prints how many bytes it took, where its allocators count what it asked for; return them.

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
    return int(run(module, request, **environment))
