"""Shared by the scripts here: metadata of a result, writing it, and the processes of torchrun."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def date() -> str:
    """The current time in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def about() -> dict[str, str]:
    """Date, GPU and torch version of this measurement."""
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"date": date(), "machine": machine, "torch": str(torch.__version__)}


def write(result: dict[str, Any], path: Path) -> None:
    """Write a result as JSON, and create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


@contextmanager
def ranks_of_torchrun(minutes: int) -> Iterator[None]:
    """The default process group of the processes that torchrun has started, with one GPU each if there are GPUs.

    A rank that waits longer than ``minutes`` for another one raises an error.
    """
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=minutes))
    try:
        yield
    finally:
        dist.destroy_process_group()


def device_of_rank() -> torch.device:
    """The device of this rank of the default group."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
