"""What is known of the documents of an index, in arrays that grow: no Python object for each of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, repeat

import numpy as np

from .parts import Part

__all__ = ["Documents", "blocks", "cuts"]


# Documents that came later are looked up one by one, if they are not many.
_LATER = 10_000


class _Growing:
    """A one-dimensional int64 array with room to grow, so that n appended values cost n on average."""

    def __init__(self) -> None:
        self._room = np.zeros(0, dtype=np.int64)
        self._size = 0

    @property
    def values(self) -> np.ndarray:
        """What has been appended, as a view that stays as it is when more follows."""
        return self._room[: self._size]

    def extend(self, values: np.ndarray) -> None:
        size = self._size + len(values)
        if size > len(self._room):
            room = np.empty(max(size, 2 * len(self._room)), dtype=np.int64)
            room[: self._size] = self.values
            self._room = room
        self._room[self._size : size] = values
        self._size = size


class Documents:
    """The documents of parts put end to end, less those that count as removed."""

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self.parts: list[Part] = []
        self.rows = 0
        self._numbers, self._lengths, self._starts = _Growing(), _Growing(), _Growing()
        # With which slot every part begins.
        self._slots, self._firsts = _Growing(), _Growing()
        self._next_slot = 0
        self._by_id: _ById | None = None
        self._later: dict[str, int] = {}  # those that came after it was made
        for part in parts:
            self.append(part)

    def append(self, part: Part) -> None:
        """Take in the documents of one more part."""
        live = part.live
        places = np.flatnonzero(live)
        self._firsts.extend(np.array([self._next_slot]))
        self._numbers.extend(part.numbers[live])
        self._lengths.extend(part.lengths[live])
        self._starts.extend((self.rows + part.lengths.cumsum() - part.lengths)[live])
        self._slots.extend(self._next_slot + places)
        self._next_slot += part.documents
        self.parts.append(part)
        self.rows += part.rows
        if self._by_id is not None:
            self._later.update(zip(part.ids_at(places), part.numbers[live].tolist(), strict=True))
            if len(self._later) > _LATER + len(self) // 4:
                self._by_id = None

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
            return self.parts[0].ids_at(slots)
        which = np.searchsorted(self._firsts.values, slots, side="right") - 1
        found: list[str] = []
        order = np.argsort(which, kind="stable")
        for part, some in self._by_part(which[order], slots[order]):
            found += part.ids_at(some)
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

    def positions_of(self, ids: Sequence[str]) -> np.ndarray:
        """Where the documents of some ids are; -1 for those that are not there. Shape: [N], int64."""
        positions = self.find(ids)
        there = np.flatnonzero(positions >= 0)
        others = [i for i, id_ in zip(there.tolist(), self.ids_at(positions[there]), strict=True) if ids[i] != id_]
        positions[others] = -1
        return positions

    def find(self, ids: Sequence[str]) -> np.ndarray:
        """As `positions_of`, in a fifth of the time: an id that is not there is found in place of another, by 64 bits.

        They are those of Python's hash, of a key of its own in every process.
        """
        if self._by_id is None:
            self._by_id, self._later = _ById(self.ids_at(np.arange(len(self))), self.numbers), {}
        wanted = self._by_id.numbers_of(ids)
        if self._later:
            wanted = np.fromiter(map(self._later.get, ids, wanted.tolist()), np.int64, len(ids))
        numbers = self.numbers
        if not len(numbers):
            return wanted
        if numbers[-1] - numbers[0] == len(numbers) - 1:
            return np.where(wanted >= numbers[0], wanted - numbers[0], -1)
        places = np.searchsorted(numbers, wanted)
        return np.where(np.take(numbers, places, mode="clip") == wanted, places, -1)


class _ById:
    """The numbers of documents by the hashes of their ids, of 64 bits: some 30 bytes for each, and no objects."""

    def __init__(self, ids: list[str], numbers: np.ndarray) -> None:
        hashes = _hashes(ids)
        order = np.argsort(hashes)
        self._hashes, self._numbers = hashes[order], numbers[order]
        bits = len(ids).bit_length() + 1
        self._shift = np.uint64(64 - bits)
        # Where the hashes begin that begin with these bits.
        heads = np.searchsorted(self._hashes >> self._shift, np.arange(1 << bits, dtype=np.uint64))
        self._heads = heads.astype(np.int32)
        # Of two ids with one hash, once in 10**5 indexes of 10**7 documents.
        same = (self._hashes[1:] == self._hashes[:-1]).any()
        self._exactly = dict(zip(ids, numbers.tolist(), strict=True)) if same else None

    def numbers_of(self, ids: Sequence[str]) -> np.ndarray:
        """The numbers of the documents of some ids, or -1. Shape: [N], int64."""
        if self._exactly is not None or not len(self._numbers):
            return np.fromiter(map((self._exactly or {}).get, ids, repeat(-1)), np.int64, len(ids))
        wanted, last = _hashes(ids), len(self._numbers) - 1
        places = np.minimum(self._heads[wanted >> self._shift], last)
        further = np.flatnonzero(self._hashes[places] < wanted)
        while len(further):
            places[further] = np.minimum(places[further] + 1, last)
            before = (self._hashes[places[further]] < wanted[further]) & (places[further] < last)
            further = further[before]
        return np.where(self._hashes[places] == wanted, self._numbers[places], -1)


def _hashes(ids: Sequence[str]) -> np.ndarray:
    return np.fromiter(map(hash, ids), np.int64, len(ids)).view(np.uint64)


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
    return cuts(np.concatenate([[0], np.maximum(lengths, 1).cumsum()]), max(1, len(lengths)), limit)
