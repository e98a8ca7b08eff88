"""What is known of the documents of an index, in arrays that grow: no Python object for each of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from .ids import Growing, Ids, IdTable, packed_ids
from .parts import Part

__all__ = ["Documents", "blocks", "cuts"]


class Documents:
    """The documents of parts put end to end, less those that count as removed."""

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self.parts: list[Part] = []
        self.rows = 0
        self._numbers, self._lengths, self._starts = Growing(), Growing(), Growing()
        # With which slot every part begins.
        self._slots, self._firsts = Growing(), Growing()
        self._next_slot = 0
        self._by_id: IdTable | None = None
        for part in parts:
            self.append(part)

    def append(self, part: Part) -> None:
        """Take in the documents of one more part."""
        live = part.live if len(part.removed) else slice(None)
        self._firsts.extend(np.array([self._next_slot]))
        self._numbers.extend(part.numbers[live])
        self._lengths.extend(part.lengths[live])
        self._starts.extend((self.rows + part.lengths.cumsum() - part.lengths)[live])
        self._slots.extend(np.arange(self._next_slot, self._next_slot + part.documents)[live])
        self._next_slot += part.documents
        self.parts.append(part)
        self.rows += part.rows
        if self._by_id is not None:
            self._by_id.extend(part.ids.some(part.live))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def numbers(self) -> np.ndarray:
        """The number of every document, ascending. Shape: [N], int64."""
        return self._numbers.values

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every document. Shape: [N], int64."""
        return self._lengths.values

    @property
    def starts(self) -> np.ndarray:
        """The row with which every document begins, of all parts put end to end. Shape: [N], int64."""
        return self._starts.values

    @property
    def slots(self) -> np.ndarray:
        """The place of every document among all, those that count as removed among them. Shape: [N], int64."""
        return self._slots.values

    def ids_at(self, positions: np.ndarray) -> list[str]:
        """The ids of some documents, in whatever order they are asked for."""
        return self.ids_of(self.slots[positions])

    def ids_of(self, slots: np.ndarray) -> list[str]:
        """The ids of the documents at some slots, in whatever order they are asked for."""
        if len(self.parts) == 1:
            return self.parts[0].ids.some(slots).to_list()
        which = np.searchsorted(self._firsts.values, slots, side="right") - 1
        found: list[str] = []
        order = np.argsort(which, kind="stable")
        for part, some in self._by_part(which[order], slots[order]):
            found += part.ids.some(some).to_list()
        return [found[i] for i in np.argsort(order).tolist()]

    def places_of(self, positions: np.ndarray) -> list[tuple[Part, np.ndarray]]:
        """The parts that hold some documents, each with the places of these in it, ascending."""
        slots = self.slots[np.unique(positions)]
        return list(self._by_part(np.searchsorted(self._firsts.values, slots, side="right") - 1, slots))

    def _by_part(self, which: np.ndarray, slots: np.ndarray) -> Iterator[tuple[Part, np.ndarray]]:
        """The parts of these numbers, which ascend, each with the places in it of these slots."""
        edges = np.flatnonzero(np.diff(which, prepend=-1, append=-1)).tolist()
        for first, last in pairwise(edges):
            number = int(which[first])
            yield self.parts[number], slots[first:last] - self._firsts.values[number]

    def positions_of(self, ids: Sequence[str] | Ids) -> np.ndarray:
        """Where the documents of some ids are; -1 for those that are not there. Shape: [N], int64."""
        return self.table.find(ids if isinstance(ids, Ids) else packed_ids([ids])[0])

    @property
    def table(self) -> IdTable:
        """What finds ids, made when it is first asked for."""
        table = self._by_id
        if table is None:
            table = IdTable()
            for part in self.parts:
                table.extend(part.ids.some(part.live))
            # Not before, as other threads may look.
            self._by_id = table
        return table


def cuts(bounds: np.ndarray, documents: int, rows: int | None = None) -> list[tuple[int, int]]:
    """Cut documents, by their boundaries [N + 1], into stretches of at most so many documents, and so many rows.

    A longer document is a stretch of its own.
    """
    stretches, start, last = [], 0, len(bounds) - 1
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
