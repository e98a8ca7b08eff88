"""Ids by the hundred thousand, as bytes in arrays: which of a store's documents have them, without Python objects."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .transfer import on_device

__all__ = ["IdTable", "Ids", "Texts", "encoded_id"]

# Bytes of an id that are compared at a time.
_WORD = 8
# Of this process, so that nobody can choose ids that have one key.
_FACTORS = [secrets.randbits(63) | 1 for _ in range(2)]
# Marks the key of an id that is longer than a key holds: the sign.
_LONG = -(1 << 63)


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
        return cls(_padded(text), edges[:-1], edges[1:])

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


def _padded(text: bytes) -> np.ndarray:
    """The bytes and a word of zeros."""
    padded = np.zeros(len(text) + _WORD, np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    return padded


class IdTable:
    """Which of `ids`, of those at some places, which are distinct, others are: looked up on a device.

    There it keeps the key of each, in order, and its place, 12 bytes, and the text of all.
    """

    def __init__(self, ids: Ids, places: np.ndarray, device: torch.device) -> None:
        self._texts = Texts.of(ids, device)
        chosen = on_device(places, device)
        self._keys, order = self._texts.keys()[chosen].sort()
        self._places = chosen[order].int()

    def find(self, texts: Texts) -> Tensor:
        """At which place each is, -1 if at none. Shape: [N], int32."""
        keys = texts.keys()
        rows = torch.searchsorted(self._keys, keys)
        found = self._places_at(rows, keys)
        if texts.longest < _WORD:
            return found
        # A key of a long id may be that of others too, which stand next to each other.
        left = ((keys < 0) & (found >= 0)).nonzero()[:, 0]
        while len(left):
            left = left[~self._texts.equal(found[left], texts, left)]
            rows[left] += 1
            found[left] = self._places_at(rows[left], keys[left])
            left = left[found[left] >= 0]
        return found

    def _places_at(self, rows: Tensor, keys: Tensor) -> Tensor:
        """The places in some rows of the table, -1 where it has another key than these."""
        if not len(self._keys):
            return torch.full_like(rows, -1, dtype=torch.int32)
        there = rows.clamp(max=len(self._keys) - 1)
        return self._places[there].masked_fill((self._keys[there] != keys) | (there != rows), -1)


class Texts(NamedTuple):
    """Ids on a device: their text, where each begins in it, its bytes [N], and those of the longest."""

    text: Tensor
    begins: Tensor
    lengths: Tensor
    longest: int

    @classmethod
    def of(cls, ids: Ids, device: torch.device) -> Texts:
        """Those of ids on the host."""
        lengths = ids.ends - ids.begins
        text, begins, on_it = (on_device(values, device) for values in (ids.text, ids.begins, lengths))
        return cls(text, begins, on_it, int(lengths.max(initial=0)))

    @classmethod
    def of_lists(cls, lists: Sequence[Sequence[str]], device: torch.device, first: int = 0) -> Texts:
        """Those of all lists, one list after the other.

        One that is no string is a TypeError, which names the list by its number, that of the first being `first`.
        """
        try:
            # One call for a list, as a look at each of very many ids would take longer than their search.
            joined = encoded_id("\0".join(["\0".join(ids) for ids in lists if len(ids)]))
        except TypeError:
            every = ((i, j, id_) for i, ids in enumerate(lists) for j, id_ in enumerate(ids))
            i, j, id_ = next(one for one in every if not isinstance(one[2], str))
            kind = type(id_).__name__
            raise TypeError(f"subset[{first + i}][{j}] must be a string, got {id_!r:.100} of type {kind}") from None
        text = on_device(_padded(joined), device)
        zeros = (text[:-_WORD] == 0).nonzero()[:, 0]
        if len(zeros) + 1 != sum(map(len, lists)):
            # There are none, or some hold what is between them here.
            return cls.of(Ids.encoded(id_ for ids in lists for id_ in ids), device)
        begins = F.pad(zeros + 1, (1, 0))
        lengths = F.pad(zeros, (0, 1), value=len(joined)) - begins
        return cls(text, begins, lengths, int(lengths.max()))

    def words(self, begins: Tensor) -> Tensor:
        """The 8 bytes from each of these places on, as a number. Shape: [N], int64."""
        return self.text[begins.unsqueeze(1) + torch.arange(_WORD, device=begins.device)].view(torch.int64)[:, 0]

    def keys(self) -> Tensor:
        """A number for each: of equal ones the same, of others another, if they have at most 7 bytes. Shape: [N].

        Those of longer ones are negative.
        """
        masks = (1 << 8 * self.lengths.clamp(max=_WORD - 1)) - 1
        keys = self.words(self.begins) & masks | self.lengths << 56
        if self.longest >= _WORD:
            long = (self.lengths >= _WORD).nonzero()[:, 0]
            mixed = self.lengths[long]
            for left, words in self._words_of(long):
                mixed[left] = _mixed(mixed[left] ^ words)
            keys[long] = mixed | _LONG
        return keys

    def equal(self, which: Tensor, others: Texts, of_others: Tensor) -> Tensor:
        """Whether some, of at least 8 bytes, are the same as some others. Shape: [n], bool."""
        equal = self.lengths[which] == others.lengths[of_others]
        same = equal.nonzero()[:, 0]
        both = zip(self._words_of(which[same]), others._words_of(of_others[same]), strict=True)
        for (left, words), (_, words_of_others) in both:
            equal[same[left]] &= words == words_of_others
        return equal

    def _words_of(self, which: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The words of some ids of at least 8 bytes, one after the other: of which of these, and the word of each.

        The last one ends where the id does.
        """
        begins, lengths = self.begins[which], self.lengths[which]
        for start in range(0, int(lengths.max()) if len(which) else 0, _WORD):
            left = (lengths > start).nonzero()[:, 0]
            yield left, self.words(begins[left] + (lengths[left] - _WORD).clamp(max=start))


def _mixed(numbers: Tensor) -> Tensor:
    """Other numbers, of which all bits depend on all of these."""
    numbers = (numbers ^ (numbers >> 32 & 0xFFFFFFFF)) * _FACTORS[0]
    return (numbers ^ (numbers >> 29 & 0x7FFFFFFFF)) * _FACTORS[1]
