"""Ids by the hundred thousand, as bytes in arrays: which of a store's documents have them, without Python objects."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .transfer import on_device

__all__ = ["IdTable", "Ids", "Texts", "encoded_id"]

# Bytes that are looked at together, for which some 40 times as many are needed, and how often keys are chosen, as long
# as two ids have the same: of 10 million, once in a thousand times.
_BYTES, _TRIES = 1 << 22, 4


def encoded_id(id_: str) -> bytes:
    """An id as it is kept: any string, also one that holds half of a surrogate pair."""
    return id_.encode("utf-8", "surrogatepass")


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "surrogatepass")


class Ids(NamedTuple):
    """Ids in UTF-8: the text of all [bytes] (uint8) and a 0, and where each begins and ends in it [N]."""

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
        begins = np.cumsum([0, *(len(ids.text) - 1 for ids in several)])
        ends = [begin + ids.ends for begin, ids in zip(begins.tolist(), several, strict=False)]
        return cls.of(b"".join(ids.content for ids in several), np.concatenate([begins[:0], *ends]))

    @property
    def content(self) -> bytes:
        """Their text alone."""
        return self.text[:-1].tobytes()

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
    """The bytes and a 0."""
    padded = np.empty(len(text) + 1, np.uint8)
    padded[:-1] = np.frombuffer(text, np.uint8)
    padded[-1] = 0
    return padded


class IdTable:
    """Which of `ids`, of those at some places, which are distinct, others are: looked up on a device.

    There it keeps the text of all, and for each where that lies, its key, in order, and its place: 28 bytes. To look up
    as many as are looked at together, the host need not wait for a GPU. Ids that are not distinct are a ValueError,
    which begins with what their index is.
    """

    def __init__(self, ids: Ids, places: np.ndarray, device: torch.device) -> None:
        self._texts = Texts.of(ids, device)
        chosen, longest = on_device(places, device), int((ids.ends - ids.begins).max(initial=0))
        for _ in range(_TRIES):
            self._weights = on_device(_weights(1 + longest), device)
            keys = torch.cat([chosen[:0], *(some.keys(self._weights) for some in self._texts.parts())])
            self._keys, order = keys[chosen].sort()
            if not (self._keys[1:] == self._keys[:-1]).any():
                break
        else:
            raise ValueError("is damaged: two of its documents have the same id")
        self._places = chosen[order].int()

    def find(self, texts: Texts) -> Tensor:
        """At which place each is, -1 if at none. Shape: [N], int32."""
        if not len(self._keys):
            return torch.full_like(texts.begins, -1, dtype=torch.int32)
        return torch.cat([self._places[:0], *map(self._find, texts.parts())])

    def _find(self, texts: Texts) -> Tensor:
        known, keys = self._texts, texts.keys(self._weights)
        rows = torch.searchsorted(self._keys, keys).clamp_(max=len(self._keys) - 1)
        places = self._places[rows]
        alike = (self._keys[rows] == keys) & (known.lengths[places] == texts.lengths)
        # Another text may have the same key.
        shifts = texts.of_bytes(known.begins[places] - texts.begins)
        others = (torch.arange(len(shifts), device=shifts.device) + shifts).clamp_(max=len(known.text) - 1)
        differing = texts.sums(texts.text != known.text.index_select(0, others))
        return places.masked_fill(~alike | (differing != 0), -1)


def _weights(count: int) -> np.ndarray:
    """Random ones, int64: nobody can choose ids that have one key."""
    return np.frombuffer(bytearray(secrets.token_bytes(8 * count)), np.int64)


class Texts(NamedTuple):
    """Ids on a device, one after the other: their text, where each begins in it, and its bytes [N]."""

    text: Tensor
    begins: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, ids: Ids, device: torch.device) -> Texts:
        """Those of ids on the host."""
        return cls(*(on_device(values, device) for values in (ids.text, ids.begins, ids.ends - ids.begins)))

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
        # The last of them ends the last id.
        ends = (text == 0).nonzero()[:, 0]
        if len(ends) != sum(map(len, lists)):
            # There are none, or some hold what is between them here.
            return cls.of(Ids.encoded(id_ for ids in lists for id_ in ids), device)
        begins = F.pad(ends[:-1] + 1, (1, 0))
        return cls(text, begins, ends - begins)

    def parts(self) -> list[Texts]:
        """Some after the others, of which none has many more bytes than are looked at together, if ids are alike."""
        count = len(self.begins)
        step = max(1, _BYTES * count // len(self.text))
        if 0 < count <= step:
            return [self]
        edges = [*self.begins[::step].tolist(), len(self.text)]
        return [
            Texts(self.text[begin:end], self.begins[i : i + step] - begin, self.lengths[i : i + step])
            for i, (begin, end) in zip(range(0, count, step), pairwise(edges), strict=True)
        ]

    def of_bytes(self, values: Tensor) -> Tensor:
        """For each byte of the text the value of its id, of these [N]; between two ids, that of the first."""
        spans = F.pad(self.begins, (0, 1), value=len(self.text)).diff()
        return values.repeat_interleave(spans, output_size=len(self.text))

    def sums(self, of_bytes: Tensor) -> Tensor:
        """What the bytes of each id sum up to. Shape: [N], int64."""
        sums = self.begins.new_zeros(len(of_bytes) + 1)
        torch.cumsum(of_bytes, 0, out=sums[1:])
        return sums[self.begins + self.lengths] - sums[self.begins]

    def keys(self, weights: Tensor) -> Tensor:
        """A number for each, by the weight of its length and then of each byte, the last one for those behind too.

        Two that are no longer have the same once in 2**56 times. Shape: [N], int64.
        """
        places = torch.arange(1, len(self.text) + 1, device=weights.device) - self.of_bytes(self.begins)
        products = weights.index_select(0, places.clamp_(max=len(weights) - 1)) * self.text
        return self.sums(products) + weights[0] * self.lengths
