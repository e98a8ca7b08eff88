"""Process groups as torchrun would start them, and the texts they train on."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

QUERIES = ["sort a list", "open a file", "hash table", "sum of squares", "trim space", "join strings", "what is it?"]
POSITIVES = ["Sort it, in place.", "Open; then read!", "Maps keys to values.", "x*x + y*y", "Strip it...", "Join: a, b"]
NEGATIVES = ["Reverse it?", "Close.", "A heap, a tree.", "The product", "Split on a comma.", "Repeat (n)", "No"]

# Ranks are forked from a server that has imported the hosts: the imports take longer than the work itself.
multiprocessing.set_forkserver_preload(["pylate_flash.trainer", "pylate_flash.hosts.sentence_transformers.trainer"])


def run_ranks(work: Callable[..., None], arguments: tuple[Any, ...], world: int, method: str = "forkserver") -> None:
    """Run `work(rank, *arguments)` on `world` ranks, each in its own process, and wait for all of them.

    CUDA needs spawned processes, as imports may have initialized it.
    """
    mp.start_processes(work, arguments, nprocs=world, start_method=method)


def join_group(rank: int, world: int, folder: Path, name: str = "rendezvous") -> None:
    """Initialize gloo with a timeout: a rank that waits for a message that is never sent fails."""
    torch.set_num_threads(1)
    os.environ.update(HF_HUB_OFFLINE="1")
    rendezvous = f"file://{folder / name}"
    dist.init_process_group("gloo", rendezvous, timeout=timedelta(seconds=180), rank=rank, world_size=world)


def join_gpus(rank: int, world: int, folder: Path, seconds: int = 120) -> None:
    """Initialize NCCL, with one GPU per rank."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", f"file://{folder / 'rendezvous'}", timeout=timedelta(seconds=seconds), rank=rank, world_size=world,
        device_id=torch.device("cuda", rank),
    )  # fmt: skip


def free_port() -> int:
    """A free port on this machine, as a rendezvous for processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def gradient_of(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def value_and_gradient(loss: nn.Module, model: nn.Module, columns: list) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    value = loss(columns)
    value.backward()
    return value.detach(), gradient_of(model)


def mean_over_ranks(result: tuple[Tensor, ...]) -> list[Tensor]:
    """Average over ranks, as DistributedDataParallel does with gradients."""
    for tensor in result:
        dist.all_reduce(tensor)
    return [tensor / dist.get_world_size() for tensor in result]


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Compare two (value, gradient) pairs."""
    torch.testing.assert_close(actual[0].double(), expected[0].double(), rtol=tolerance, atol=1e-7)
    assert (actual[1] - expected[1]).norm() <= tolerance * expected[1].norm()
