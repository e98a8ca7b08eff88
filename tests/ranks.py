"""Processes of one group, as torchrun would start them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

# They are forked of a process that has imported the hosts, which takes longer than what they do.
multiprocessing.set_forkserver_preload(["pylate_flash.trainer", "pylate_flash.hosts.sentence_transformers.trainer"])


def run_ranks(work: Callable[..., None], arguments: tuple[Any, ...], world: int) -> None:
    """Run `work(rank, *arguments)` on so many ranks, each in a process of its own, until all have returned."""
    mp.start_processes(work, arguments, nprocs=world, start_method="forkserver")
