"""Which documents of a write go into which shard, so that there are few shards, and none is rewritten often."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .shards import Shard

__all__ = ["Part", "grouped"]


@dataclass(frozen=True)
class Part:
    """Documents of a write: `shard` if they are all of one that is there already.

    `values` gives their tokens, as rows, in pieces.
    """

    ids: Sequence[str]
    lengths: np.ndarray
    values: Callable[[], Iterable[torch.Tensor]]
    shard: Shard | None = None

    @property
    def tokens(self) -> int:
        """As `tables.blocks` counts them."""
        return int(np.maximum(self.lengths, 1).sum())


def grouped(parts: Sequence[Part], limit: int) -> list[list[Part]]:
    """Put neighbouring parts of similar sizes together, of at most `limit` tokens in all.

    Sizes are compared in powers of two. Those of groups that follow one another fall, unless a group of both would be
    above the limit, so the groups that are not about full are few; and a document comes into a larger group only when
    its group rises by a power of two, so it is rewritten log2(limit) times at most.
    """
    groups: list[tuple[int, list[Part]]] = []
    for part in parts:
        groups.append((part.tokens, [part]))
        while len(groups) > 1:
            (before, previous), (tokens, last) = groups[-2:]
            if before.bit_length() > tokens.bit_length() or before + tokens > limit:
                break
            groups[-2:] = [(before + tokens, previous + last)]
    return [group for _, group in groups]
