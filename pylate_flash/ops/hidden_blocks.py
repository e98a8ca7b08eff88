"""Documents in blocks, which `ops.hidden` projects one after the other."""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor


class Block(NamedTuple):
    """Documents [groups, documents] of the grouped layout, or of the packed ones, and their rows among all tokens."""

    groups: slice
    documents: slice
    rows: slice


ALL = slice(None)


@functools.lru_cache(maxsize=1024)
def padded_blocks(shape: tuple[int, int, int], most: int) -> tuple[Block, ...]:
    """Blocks of at most `most` tokens, or of one document, of documents [groups, candidates, length]."""
    groups, candidates, length = shape
    step = max(1, most // length)
    group_step = max(1, step // candidates)
    # As many blocks as that takes, but of one size: a short last one would leave a GPU idle.
    step = _even(candidates, min(step, candidates))
    group_step = _even(groups, min(group_step, groups))
    blocks = []
    for group in range(0, groups, group_step):
        last = min(groups, group + group_step)
        # Several groups come whole, so that the rows of a block are adjacent.
        for start in range(0, candidates, step):
            end = min(candidates, start + step)
            rows = slice((group * candidates + start) * length, ((last - 1) * candidates + end) * length)
            blocks.append(Block(slice(group, last), slice(start, end), rows))
    return tuple(blocks)


def _even(count: int, most: int) -> int:
    """The size of as few equal parts of `count` as there are with at most `most` in each."""
    return -(-count // -(-count // most))


def packed_blocks(cu_seqlens: Tensor, most: int) -> tuple[Block, ...]:
    """The same of packed documents with `cu_seqlens` [Nd + 1]."""
    bounds = cu_seqlens.cpu().numpy()
    last = len(bounds) - 1
    blocks = []
    start = 0
    while start < last:
        # The last document that ends within the bound, or the first one.
        end = max(start + 1, int(bounds.searchsorted(int(bounds[start]) + most, side="right")) - 1)
        blocks.append(Block(ALL, slice(start, end), slice(int(bounds[start]), int(bounds[end]))))
        start = end
    return tuple(blocks)
