"""What is known of the documents of an index, in arrays: no Python object for each of them; and their rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from .columns import Held
from .ids import Ids, IdTable, Texts
from .parts import Part

__all__ = ["Documents", "blocks", "cuts", "read", "runs_of"]


class Documents:
    """The documents of parts put end to end. Of a document that counts as removed, the position is no other's."""

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self.parts = list(parts)
        self._tables: dict[torch.device, IdTable] = {}

    @cached_property
    def count(self) -> int:
        """How many documents do not count as removed."""
        return sum(part.documents - len(part.removed) for part in self.parts)

    @cached_property
    def bounds(self) -> np.ndarray:
        """With which row every document begins, and the last ends. Shape: [N + 1], int64."""
        return np.concatenate([np.zeros(1, np.int64), *(part.lengths for part in self.parts)]).cumsum()

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of every document. Shape: [N], int64."""
        return np.diff(self.bounds)

    @cached_property
    def numbers(self) -> np.ndarray:
        """The number of every document, ascending. Shape: [N], int64."""
        return np.concatenate([np.zeros(0, np.int64), *(part.numbers for part in self.parts)])

    @cached_property
    def removed(self) -> np.ndarray:
        """Positions, ascending, of those that count as removed. Shape: [*], int64."""
        removed = (part.removed + first for part, first in zip(self.parts, self._firsts.tolist(), strict=False))
        return np.concatenate([np.zeros(0, np.int64), *removed])

    @cached_property
    def live(self) -> np.ndarray:
        """Positions of the others."""
        return np.delete(np.arange(len(self.lengths)), self.removed)

    @cached_property
    def _firsts(self) -> np.ndarray:
        """With which position every part begins, and the last ends."""
        return np.cumsum([0, *(part.documents for part in self.parts)])

    @cached_property
    def ids(self) -> Ids:
        """The ids of all."""
        return Ids.joined([part.ids for part in self.parts])

    def find(self, lists: Sequence[Sequence[str]], first: int, device: torch.device) -> tuple[Tensor, np.ndarray]:
        """The position of the document of each id of some lists, -1 if it is not there, and how many each list has.

        They are looked up on a device, which keeps what it needs for it. It raises what `Texts.of_lists` does, and
        `IdTable`.
        """
        texts = Texts.of_lists(lists, device, first)
        if device not in self._tables:
            self._tables[device] = IdTable(self.ids, self.live, device)
        return self._tables[device].find(texts), np.array([len(ids) for ids in lists], np.int64)

    def shared_with(self, documents: Documents) -> int:
        """How many rows at the beginning are those of other documents, whatever parts they are in."""
        shared = 0
        for (*place, rows), (*other, others) in zip(self._stretches(), documents._stretches(), strict=False):
            if place != other:
                break
            shared += min(rows, others)
            if rows != others:
                break
        return shared

    def _stretches(self) -> list[tuple[object, int, int]]:
        """Where the rows lie, and how many: neighbours in a segment are one stretch."""
        found: list[tuple[object, int, int]] = []
        end = -1
        for part in self.parts:
            if part.segment is not None and found and (found[-1][0], end) == (part.segment, part.offset):
                found[-1] = *found[-1][:2], found[-1][2] + part.rows
            else:
                found.append((part.segment or id(part.memory), part.offset, part.rows))
            end = part.offset + part.nbytes
        return found

    def slices(self, runs: Iterable[tuple[int, int]]) -> Iterator[tuple[Part, int, int]]:
        """The rows of runs from start to stop: a part, from which of its rows to which."""
        edges = self.bounds[self._firsts]
        for start, stop in runs:
            index = int(np.searchsorted(edges, start, side="right")) - 1
            while start < stop:
                begin, end = edges[index : index + 2].tolist()
                last = min(stop, end)
                if start < last:
                    yield self.parts[index], start - begin, last - begin
                    start = last
                index += 1


def read(slices: Iterable[tuple[Part, int, int]], out: Held) -> None:
    """Fill `out` [T, width], on the CPU, with rows of parts, one after the other. It raises what a part does."""
    done = 0
    for part, first, last in slices:
        part.read_into(out[done : done + last - first], first)
        done += last - first


def runs_of(begins: np.ndarray, ends: np.ndarray) -> list[tuple[int, int]]:
    """Stretches of rows, with neighbours made one."""
    breaks = (np.flatnonzero(begins[1:] != ends[:-1]) + 1).tolist()
    return [(int(begins[a]), int(ends[b - 1])) for a, b in pairwise([0, *breaks, len(begins)]) if a < b]


def cuts(bounds: np.ndarray, documents: int, rows: int | None = None) -> list[tuple[int, int]]:
    """Cut documents, by their boundaries [N + 1], into stretches of at most so many documents, and so many rows.

    A longer document is a stretch of its own.
    """
    stretches, start, last = [], 0, len(bounds) - 1
    if 0 < last <= documents and (rows is None or bounds[-1] - bounds[0] <= rows):
        return [(0, last)]
    while start < last:
        stop = min(last, start + documents)
        if rows is not None:
            stop = min(stop, max(start + 1, int(np.searchsorted(bounds, bounds[start] + rows, side="right")) - 1))
        stretches.append((start, stop))
        start = stop
    return stretches


def blocks(lengths: np.ndarray, limit: int) -> list[tuple[int, int]]:
    """As `cuts`, of documents of so many tokens [N], of at most `limit` tokens.

    A document counts as one token at least, so that empty ones cannot make a stretch of unbounded length.
    """
    if int(lengths.sum()) + len(lengths) <= limit:
        return [(0, len(lengths))] if len(lengths) else []
    return cuts(np.concatenate([[0], np.maximum(lengths, 1).cumsum()]), max(1, len(lengths)), limit)
