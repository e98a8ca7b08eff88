"""Ids by the hundred thousand, as bytes in arrays: which of a store's documents have them, without Python objects."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

__all__ = ["IdTable", "Ids", "encoded_id", "packed_ids"]

# Bytes of an id that are compared at a time, and masks of the first 0 to 8 of them.
_WORD = 8
_MASKS = np.array([(1 << 8 * length) - 1 for length in range(_WORD + 1)], np.uint64)
# Of this process, so that nobody can choose ids that meet in one place.
_FACTORS = np.array([secrets.randbits(64) | 1 for _ in range(2)], np.uint64)
# Marks the key of an id that is longer than a key holds.
_LONG = np.uint64(1 << 63)


def encoded_id(id_: str) -> bytes:
    """An id as it is kept: any string, also one that holds half of a surrogate pair."""
    return id_.encode("utf-8", "surrogatepass")


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "surrogatepass")


class Ids(NamedTuple):
    """Ids in UTF-8: the text of all [bytes] (uint8) and a word more, and where each begins and ends in it [N]."""

    text: np.ndarray
    begins: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, text: bytes, ends: np.ndarray) -> Ids:
        """Ids that follow one another, of which each ends there."""
        return cls._between(text, np.concatenate([[0], ends]))

    @classmethod
    def _between(cls, text: bytes, edges: np.ndarray) -> Ids:
        return cls(np.frombuffer(text + bytes(_WORD), np.uint8), edges[:-1], edges[1:])

    @classmethod
    def encoded(cls, ids: Iterable[str]) -> Ids:
        """Those of strings."""
        encoded = [encoded_id(id_) for id_ in ids]
        return cls._between(b"".join(encoded), np.array([0, *accumulate(map(len, encoded))]))

    @classmethod
    def joined(cls, several: Sequence[Ids]) -> Ids:
        """All of those that `of` has made."""
        if len(several) == 1:
            return several[0]
        begins = np.cumsum([0, *(len(ids.text) - _WORD for ids in several)])
        ends = [begin + ids.ends for begin, ids in zip(begins.tolist(), several, strict=False)]
        return cls.of(b"".join(ids.content for ids in several), np.concatenate([begins[:0], *ends]))

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
        return Ids.encoded(id_ for ids in lists for id_ in ids), counts
    return Ids(raw, begins, ends), counts


class IdTable:
    """A hash table (open addressing, linear probing) of those of `ids` at some places, distinct: some 20 bytes each."""

    def __init__(self, ids: Ids, places: np.ndarray) -> None:
        self._ids, self._keys = ids, ids.keys()
        bits = (4 * len(places) + 1).bit_length()
        self._table, self._shift = np.full(1 << bits, -1, np.int32), np.uint64(64 - bits)
        left = places.astype(np.int32)
        begins = self._begins(self._keys[left])
        while len(left):
            free = self._table[begins] < 0
            # Of several for one place, the last stays there.
            self._table[begins[free]] = left[free]
            others = self._table[begins] != left
            left, begins = left[others], self._next(begins[others])

    def find(self, ids: Ids) -> np.ndarray:
        """At which place each is, -1 if at none. Shape: [N], int32."""
        keys = ids.keys()
        begins = self._begins(keys)
        found = self._table[begins]
        if not len(self._keys):
            return found
        left = np.flatnonzero(self._differ(found, keys, ids) & (found >= 0))
        while len(left):
            begins[left] = self._next(begins[left])
            found[left] = self._table[begins[left]]
            left = left[found[left] >= 0]
            left = left[self._differ(found[left], keys[left], ids.some(left))]
        return found

    def _differ(self, found: np.ndarray, keys: np.ndarray, ids: Ids) -> np.ndarray:
        """Whether those that were found for ids with these keys are others."""
        differ = self._keys[found] != keys
        long = np.flatnonzero((keys >= _LONG) & ~differ & (found >= 0))
        differ[long] = ~self._ids.equal(found[long], ids, long)
        return differ

    def _begins(self, keys: np.ndarray) -> np.ndarray:
        return (_mixed(keys) >> self._shift).astype(np.int64)

    def _next(self, places: np.ndarray) -> np.ndarray:
        return (places + 1) & (len(self._table) - 1)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Other numbers, of which all bits depend on all of these."""
    numbers = (numbers ^ (numbers >> np.uint64(32))) * _FACTORS[0]
    return (numbers ^ (numbers >> np.uint64(29))) * _FACTORS[1]
