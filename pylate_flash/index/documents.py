"""The documents of an index, as arrays rather than one Python object each, and their rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..ops.tiles import sequence_blocks
from .columns import Held
from .ids import Ids, IdTable, Texts
from .parts import Part


class Documents:
    """The documents of parts, concatenated. Documents that are marked as removed keep their positions."""

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self.parts = list(parts)
        self._tables: dict[torch.device, IdTable] = {}

    @cached_property
    def count(self) -> int:
        """Number of live documents."""
        return sum(part.documents - len(part.removed) for part in self.parts)

    @cached_property
    def bounds(self) -> np.ndarray:
        """Row boundaries of the documents, like cu_seqlens. Shape: [N + 1], int64."""
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
        """Ascending positions of the documents that are marked as removed. Shape: [*], int64."""
        removed = (part.removed + first for part, first in zip(self.parts, self._firsts.tolist(), strict=False))
        return np.concatenate([np.zeros(0, np.int64), *removed])

    @cached_property
    def live(self) -> np.ndarray:
        """Positions of the live documents."""
        return np.delete(np.arange(len(self.lengths)), self.removed)

    @cached_property
    def _firsts(self) -> np.ndarray:
        """Boundaries of the parts, in positions."""
        return np.cumsum([0, *(part.documents for part in self.parts)])

    @cached_property
    def ids(self) -> Ids:
        """The ids of all documents."""
        return Ids.joined([part.ids for part in self.parts])

    def find(self, lists: Sequence[Sequence[str]], first: int, device: torch.device) -> tuple[Tensor, np.ndarray]:
        """Return the position of each id of all lists (-1 if it is unknown), and the number of ids of each list.

        Ids are looked up on `device`, where the table then stays. Errors are those of `Texts.of_lists` and `IdTable`.
        """
        texts = Texts.of_lists(lists, device, first)
        if device not in self._tables:
            self._tables[device] = IdTable(self.ids, self.live, device)
        return self._tables[device].find(texts), np.array([len(ids) for ids in lists], np.int64)

    def shared_with(self, documents: Documents) -> int:
        """Number of leading rows that are the same stored rows in `documents`, however split into parts."""
        shared = 0
        for (*start, rows), (*other_start, other_rows) in zip(self._stretches(), documents._stretches(), strict=False):
            if start != other_start:
                break
            shared += min(rows, other_rows)
            if rows != other_rows:
                break
        return shared

    def _stretches(self) -> list[tuple[object, int, int]]:
        """Storage, offset and number of rows of each contiguous run; parts adjacent in a segment are one run."""
        stretches: list[tuple[object, int, int]] = []
        end = -1
        for part in self.parts:
            if part.segment is not None and stretches and (stretches[-1][0], end) == (part.segment, part.offset):
                stretches[-1] = *stretches[-1][:2], stretches[-1][2] + part.rows
            else:
                stretches.append((part.segment or id(part.memory), part.offset, part.rows))
            end = part.offset + part.nbytes
        return stretches

    def slices(self, runs: Iterable[tuple[int, int]]) -> Iterator[tuple[Part, int, int]]:
        """Split runs of rows (start, stop) by part: yield the part and the start and stop of its own rows."""
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
    """Fill `out` [T, width], on the CPU, with consecutive slices of parts. Raises what `Part.read_into` raises."""
    done = 0
    for part, first, last in slices:
        part.read_into(out[done : done + last - first], first)
        done += last - first


def runs_of(begins: np.ndarray, ends: np.ndarray) -> list[tuple[int, int]]:
    """Merge adjacent ranges of rows into runs (start, stop)."""
    breaks = (np.flatnonzero(begins[1:] != ends[:-1]) + 1).tolist()
    return [(int(begins[a]), int(ends[b - 1])) for a, b in pairwise([0, *breaks, len(begins)]) if a < b]


def cuts(bounds: np.ndarray, documents: int, rows: int | None = None) -> list[tuple[int, int]]:
    """Cut documents, given by `bounds` [N + 1], into ranges of at most `documents` documents and `rows` rows.

    A longer document is a range of its own. No ranges if there are no documents.
    """
    rows = int(bounds[-1] - bounds[0]) if rows is None else rows
    return sequence_blocks(bounds, rows, documents) if len(bounds) > 1 else []


def blocks(lengths: np.ndarray, limit: int) -> list[tuple[int, int]]:
    """Like `cuts`, for documents of `lengths` [N] tokens: ranges of at most `limit` tokens.

    A document counts as at least one token, so that empty ones cannot make a range of unbounded length.
    """
    if int(lengths.sum()) + len(lengths) <= limit:
        return [(0, len(lengths))] if len(lengths) else []
    return cuts(np.concatenate([[0], np.maximum(lengths, 1).cumsum()]), max(1, len(lengths)), limit)
