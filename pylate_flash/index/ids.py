"""Ids by the hundred thousand, as bytes in arrays: which of a store's documents have them, without Python objects."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .lookup import find

__all__ = ["Growing", "IdTable", "Ids", "encoded_id", "packed_ids"]

# Bytes of an id that are compared at a time, and masks of the first 0 to 8 of them.
_WORD = 8
_MASKS = np.array([(1 << 8 * length) - 1 for length in range(_WORD + 1)], np.uint64)
# Of this process, so that nobody can choose ids that meet in one place.
_FACTORS = np.array([secrets.randbits(64) | 1 for _ in range(2)], np.uint64)
# Ids that are worth a function in C, which is compiled at the first use.
_MANY = 4096
# Marks the key of an id that is longer than a key holds.
_LONG = np.uint64(1 << 63)


def encoded_id(id_: str) -> bytes:
    """An id as it is kept: any string, also one that holds half of a surrogate pair."""
    return id_.encode("utf-8", "surrogatepass")


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "surrogatepass")


class Growing:
    """A one-dimensional array with room to grow, so that n appended values cost n on average."""

    def __init__(self, dtype: type = np.int64) -> None:
        self._room: np.ndarray = np.zeros(0, dtype=dtype)
        self._size = 0

    @property
    def values(self) -> np.ndarray:
        """What has been appended, as a view that stays as it is when more follows."""
        return self._room[: self._size]

    def extend(self, values: np.ndarray) -> None:
        """Append values."""
        size = self._size + len(values)
        if size > len(self._room):
            room = np.empty(max(size, 2 * len(self._room)), dtype=self._room.dtype)
            room[: self._size] = self.values
            self._room = room
        self._room[self._size : size] = values
        self._size = size


class Ids(NamedTuple):
    """Ids in UTF-8: the text of all [bytes] (uint8) and a word more, and where each begins and ends in it [N]."""

    text: np.ndarray
    begins: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, text: bytes, ends: np.ndarray) -> Ids:
        """Ids that follow one another, of which each ends there."""
        edges = np.append(0, ends)
        return cls(np.frombuffer(text + bytes(_WORD), np.uint8), edges[:-1], edges[1:])

    @property
    def content(self) -> bytes:
        """Their text alone."""
        return self.text[:-_WORD].tobytes()

    def some(self, which: np.ndarray | slice) -> Ids:
        """Some of them."""
        return Ids(self.text, self.begins[which], self.ends[which])

    def to_list(self) -> list[str]:
        """As strings."""
        if not len(self.begins):
            return []
        lengths = self.ends - self.begins + 1
        stops = lengths.cumsum()
        text = self.text[np.arange(stops[-1]) + (self.begins - stops + lengths).repeat(lengths)]
        text[stops - 1] = 0
        ids = _decoded(text[:-1].tobytes()).split("\0")
        if len(ids) == len(stops):
            return ids
        return [_decoded(self.text[begin:end].tobytes()) for begin, end in zip(self.begins, self.ends, strict=True)]

    @property
    def words(self) -> np.ndarray:
        """The 8 bytes from every byte of the text on, as a view. Shape: [bytes + 1], uint64."""
        return np.ndarray(len(self.text) - _WORD + 1, "<u8", self.text, strides=(1,))

    def keys(self) -> np.ndarray:
        """A number for each: of equal ones the same, of others another, if they have at most 7 bytes. Shape: [N]."""
        words, lengths = self.words, self.ends - self.begins
        keys = words[self.begins] & _MASKS[np.minimum(lengths, _WORD)] | lengths.astype(np.uint64) << np.uint64(56)
        long = np.flatnonzero(lengths >= _WORD)
        if len(long):
            begins, lengths = self.begins[long], lengths[long]
            mixed = lengths.astype(np.uint64)
            for left, places in _places_of_words(lengths):
                mixed[left] = _mixed(mixed[left] ^ words[begins[left] + places])
            keys[long] = mixed | _LONG
        return keys

    def equal(self, which: np.ndarray, others: Ids, of_others: np.ndarray) -> np.ndarray:
        """Whether some, of at least 8 bytes, are the same as some others. Shape: [n], bool."""
        begins, begins_of_others = self.begins[which], others.begins[of_others]
        lengths = self.ends[which] - begins
        equal = lengths == others.ends[of_others] - begins_of_others
        lengths, words, words_of_others = np.where(equal, lengths, 0), self.words, others.words
        for left, places in _places_of_words(lengths):
            equal[left] &= words[begins[left] + places] == words_of_others[begins_of_others[left] + places]
        return equal


def _places_of_words(lengths: np.ndarray) -> Iterator[tuple[np.ndarray | slice, np.ndarray]]:
    """The words that ids of at least 8 bytes (or none) consist of: of which ids, and at which byte of each.

    The last one ends where the id does.
    """
    shortest = int(lengths.min()) if len(lengths) else 0
    for start in range(0, int(lengths.max(initial=0)), _WORD):
        left = slice(None) if start < shortest else np.flatnonzero(lengths > start)
        yield left, np.minimum(start, lengths[left] - _WORD)


def packed_ids(lists: Sequence[Sequence[str]], first: int = 0) -> tuple[Ids, np.ndarray]:
    """The ids of all lists, one list after the other, and how many each has.

    One that is no string is a TypeError, which names the list by its number, that of the first being `first`.
    """
    counts = np.array([len(ids) for ids in lists], np.int64)
    total = int(counts.sum())
    try:
        # One call for a list, as a look at each of very many ids would take longer than their search.
        text = encoded_id("\0".join(["\0".join(ids) for ids in lists if len(ids)]))
    except TypeError:
        i, j, id_ = next((i, j, x) for i, ids in enumerate(lists) for j, x in enumerate(ids) if not isinstance(x, str))
        kind = type(id_).__name__
        raise TypeError(f"subset[{first + i}][{j}] must be a string, got {id_!r:.100} of type {kind}") from None
    raw = np.frombuffer(text + bytes(_WORD), np.uint8)
    ends = np.append(np.flatnonzero(raw[:-_WORD] == 0), len(text))
    if len(ends) == total:
        begins = np.concatenate([[0], ends[:-1] + 1])
    else:
        # None, or some hold what is between them here.
        encoded = [encoded_id(id_) for ids in lists for id_ in ids]
        return Ids.of(b"".join(encoded), np.cumsum([len(id_) for id_ in encoded], dtype=np.int64)), counts
    return Ids(raw, begins, ends), counts


class IdTable:
    """A hash table (open addressing, linear probing) of distinct ids: some 30 bytes for each beside its own."""

    def __init__(self) -> None:
        self._text, self._begins, self._ends = Growing(np.uint8), Growing(), Growing()
        self._keys = Growing(np.uint64)
        self._resize(2)

    def extend(self, ids: Ids) -> None:
        """Take in more ids."""
        shift, size = len(self._text.values), len(self._keys.values)
        self._text.extend(ids.text)
        self._begins.extend(ids.begins + shift)
        self._ends.extend(ids.ends + shift)
        self._keys.extend(ids.keys())
        numbers = np.arange(size, size + len(ids.begins), dtype=np.int32)
        if 2 * (size + len(numbers)) > len(self._table):
            self._resize(4 * (size + len(numbers)))
            numbers = np.arange(size + len(numbers), dtype=np.int32)
        places = self._places(self._keys.values[numbers])
        while len(numbers):
            free = self._table[places] < 0
            # Of several for one place, the last stays there.
            self._table[places[free]] = numbers[free]
            others = self._table[places] != numbers
            numbers, places = numbers[others], (places[others] + 1) & (len(self._table) - 1)

    def find(self, ids: Ids) -> np.ndarray:
        """Which was taken in as the how manieth, -1 of none. Shape: [N], int32."""
        keys, known = ids.keys(), Ids(self._text.values, self._begins.values, self._ends.values)
        if not len(known.begins):
            return np.full(len(keys), -1, np.int32)
        places = self._places(keys)
        found = self._table[places]
        wrong = np.flatnonzero(self._differ(found, slice(None), keys, known, ids) & (found >= 0))
        while len(wrong):
            places[wrong] = (places[wrong] + 1) & (len(self._table) - 1)
            found[wrong] = self._table[places[wrong]]
            wrong = wrong[found[wrong] >= 0]
            wrong = wrong[self._differ(found[wrong], wrong, keys, known, ids)]
        return found

    def find_all(self, lists: Sequence[Sequence[str]], first: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """As `find`, of the ids of all lists, one list after the other, and how many each has: `packed_ids`."""
        counts = np.array([len(ids) for ids in lists], np.int64)
        total, found = int(counts.sum()), None
        if total >= _MANY:
            arrays = self._keys.values, self._begins.values, self._ends.values, self._text.values, _FACTORS
            addresses = [array.ctypes.data for array in arrays]
            found = find(lists, total, self._table.ctypes.data, int(self._shift), *addresses)
        if found is not None:
            return np.frombuffer(found, np.int32), counts
        ids, counts = packed_ids(lists, first)
        return self.find(ids), counts

    def _differ(
        self, found: np.ndarray, which: np.ndarray | slice, keys: np.ndarray, known: Ids, ids: Ids
    ) -> np.ndarray:
        """Whether those that were found for some ids are others."""
        own = keys[which]
        differ = self._keys.values[found] != own
        long = np.flatnonzero((own >= _LONG) & ~differ & (found >= 0))
        if len(long):
            asked = long if isinstance(which, slice) else which[long]
            differ[long] = ~known.equal(found[long], ids, asked)
        return differ

    def _resize(self, least: int) -> None:
        bits = max(2, (least - 1).bit_length())
        self._table, self._shift = np.full(1 << bits, -1, np.int32), np.uint64(64 - bits)

    def _places(self, keys: np.ndarray) -> np.ndarray:
        return (_mixed(keys) >> self._shift).astype(np.int64)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Other numbers, of which all bits depend on all of these."""
    numbers = (numbers ^ (numbers >> np.uint64(32))) * _FACTORS[0]
    return (numbers ^ (numbers >> np.uint64(29))) * _FACTORS[1]
