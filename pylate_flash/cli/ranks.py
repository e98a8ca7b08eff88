"""Commands started by torchrun: several processes share the work."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import typer

from .common import UserError

if TYPE_CHECKING:
    from ..index.ranks import Ranks

T = TypeVar("T")


class Alone:
    """The interface of `Ranks` for a single process."""

    rank, size = 0, 1

    def agreed(self, make: Callable[[], T]) -> T:
        return make()

    def gather(self, value: T) -> list[T]:
        return [value]

    def to_first(self, make: Callable[[], T], what: str) -> list[T]:
        return [make()]


@contextlib.contextmanager
def together() -> Iterator[Ranks | Alone]:
    """The processes that torchrun has started; each runs the body of the context.

    Only the first prints, unless another one fails.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield Alone()
        return
    import torch
    import torch.distributed as dist

    from ..index.ranks import RankError, Ranks

    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    ranks = Ranks(dist.group.WORLD)
    try:
        with contextlib.ExitStack() as silenced:
            if ranks.rank:
                for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):
                    silenced.enter_context(redirect(io.StringIO()))
            yield ranks
    except RankError as error:
        raise UserError(str(error)) from error
    except UserError as error:
        if ranks.rank and error is ranks.heard:
            # Rank 0 reports it.
            raise typer.Exit(2) from None
        raise
    finally:
        dist.destroy_process_group()


def device_of_rank(device: str | None, ranks: Ranks | Alone) -> str | None:
    """The device of a process: with several ranks on GPUs, each has its own."""
    if ranks.size == 1 or device not in (None, "cuda"):
        return device
    import torch

    return f"cuda:{int(os.environ['LOCAL_RANK'])}" if torch.cuda.is_available() else device
