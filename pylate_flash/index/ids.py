"""Large sets of ids as byte arrays, without Python objects, and a table that looks up their documents."""

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

# Bytes of ids that are processed at a time, which take about 40 times as much memory, and how often hash weights are
# drawn while two ids share a key: with 10 million ids, they do once in a thousand times.
_BYTES, _TRIES = 1 << 22, 4


def encoded_id(id_: str) -> bytes:
    """Encode an id for storage: any string, including one with a lone surrogate."""
    return id_.encode("utf-8", "surrogatepass")


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "surrogatepass")


class Ids(NamedTuple):
    """UTF-8 ids: their concatenated text [bytes] (uint8) with a final 0, and where each begins and ends in it [N]."""

    text: np.ndarray
    begins: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, text: bytes, ends: np.ndarray) -> Ids:
        """Ids that are adjacent in `text` and end at `ends`."""
        edges = np.concatenate([[0], ends])
        return cls(_padded(text), edges[:-1], edges[1:])

    @classmethod
    def encoded(cls, ids: Iterable[str]) -> Ids:
        """Encode strings."""
        encoded = [encoded_id(id_) for id_ in ids]
        return cls.of(b"".join(encoded), np.fromiter(accumulate(map(len, encoded)), np.int64, len(encoded)))

    @classmethod
    def joined(cls, several: Sequence[Ids]) -> Ids:
        """Concatenate ids that `of` has created."""
        if len(several) == 1:
            return several[0]
        begins = np.cumsum([0, *(len(ids.text) - 1 for ids in several)])
        ends = [begin + ids.ends for begin, ids in zip(begins.tolist(), several, strict=False)]
        return cls.of(b"".join(ids.content for ids in several), np.concatenate([begins[:0], *ends]))

    @property
    def content(self) -> bytes:
        """The text without the final 0."""
        return self.text[:-1].tobytes()

    def some(self, which: np.ndarray | slice) -> Ids:
        """A subset of the ids."""
        return Ids(self.text, self.begins[which], self.ends[which])

    def to_list(self) -> list[str]:
        """Decode to strings."""
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
    """The bytes as an array, with a final 0."""
    padded = np.empty(len(text) + 1, np.uint8)
    padded[:-1] = np.frombuffer(text, np.uint8)
    padded[-1] = 0
    return padded


class IdTable:
    """A lookup table on a device for those of `ids` that are at `positions`, which must be distinct.

    The device holds the text of all ids and, for each, where it lies, its key (sorted) and its position: 28 bytes. A
    lookup of up to `_BYTES` bytes does not synchronize with a GPU. Ids that are not distinct raise a ValueError, whose
    message continues a sentence about the index.
    """

    def __init__(self, ids: Ids, positions: np.ndarray, device: torch.device) -> None:
        self._texts = Texts.of(ids, device)
        selected, longest = on_device(positions, device), int((ids.ends - ids.begins).max(initial=0))
        for _ in range(_TRIES):
            self._weights = on_device(_weights(1 + longest), device)
            keys = torch.cat([selected[:0], *(chunk.keys(self._weights) for chunk in self._texts.parts())])
            self._keys, order = keys[selected].sort()
            if not (self._keys[1:] == self._keys[:-1]).any():
                break
        else:
            raise ValueError("is damaged: two of its documents have the same id")
        self._positions = selected[order].int()

    def find(self, texts: Texts) -> Tensor:
        """Return the position of each id, -1 if it is unknown. Shape: [N], int32."""
        if not len(self._keys):
            return torch.full_like(texts.begins, -1, dtype=torch.int32)
        return torch.cat([self._positions[:0], *map(self._find, texts.parts())])

    def _find(self, texts: Texts) -> Tensor:
        known, keys = self._texts, texts.keys(self._weights)
        rows = torch.searchsorted(self._keys, keys).clamp_(max=len(self._keys) - 1)
        positions = self._positions[rows]
        same_key = (self._keys[rows] == keys) & (known.lengths[positions] == texts.lengths)
        # Compare the bytes: another text may have the same key.
        shifts = texts.of_bytes(known.begins[positions] - texts.begins)
        known_bytes = (torch.arange(len(shifts), device=shifts.device) + shifts).clamp_(max=len(known.text) - 1)
        mismatches = texts.sums(texts.text != known.text.index_select(0, known_bytes))
        return positions.masked_fill(~same_key | (mismatches != 0), -1)


def _weights(count: int) -> np.ndarray:
    """Random int64 weights, so that nobody can choose ids with colliding keys."""
    return np.frombuffer(bytearray(secrets.token_bytes(8 * count)), np.int64)


class Texts(NamedTuple):
    """Concatenated ids on a device: their text, where each begins in it, and how many bytes it has [N]."""

    text: Tensor
    begins: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, ids: Ids, device: torch.device) -> Texts:
        """Copy ids from the host."""
        return cls(*(on_device(values, device) for values in (ids.text, ids.begins, ids.ends - ids.begins)))

    @classmethod
    def of_lists(cls, lists: Sequence[Sequence[str]], device: torch.device, first: int = 0) -> Texts:
        """Encode the ids of all lists, one list after the other.

        An id that is not a string raises a TypeError that names its list by number, counted from `first`.
        """
        try:
            # One join per list: checking each of very many ids would take longer than searching among them.
            joined = encoded_id("\0".join(["\0".join(ids) for ids in lists if len(ids)]))
        except TypeError:
            entries = ((i, j, id_) for i, ids in enumerate(lists) for j, id_ in enumerate(ids))
            i, j, id_ = next(entry for entry in entries if not isinstance(entry[2], str))
            kind = type(id_).__name__
            raise TypeError(f"subset[{first + i}][{j}] must be a string, got {id_!r:.100} of type {kind}") from None
        text = on_device(_padded(joined), device)
        # The final 0 ends the last id.
        ends = (text == 0).nonzero()[:, 0]
        if len(ends) != sum(map(len, lists)):
            # There are no ids, or some contain the separator.
            return cls.of(Ids.encoded(id_ for ids in lists for id_ in ids), device)
        begins = F.pad(ends[:-1] + 1, (1, 0))
        return cls(text, begins, ends - begins)

    def parts(self) -> list[Texts]:
        """Split into consecutive chunks of about `_BYTES` bytes at most, if ids are of similar length."""
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
        """Expand values [N], one per id, to the bytes of the text; a byte between two ids gets that of the first."""
        spans = F.pad(self.begins, (0, 1), value=len(self.text)).diff()
        return values.repeat_interleave(spans, output_size=len(self.text))

    def sums(self, values: Tensor) -> Tensor:
        """Sum values, one per byte of the text, over each id. Shape: [N], int64."""
        sums = self.begins.new_zeros(len(values) + 1)
        torch.cumsum(values, 0, out=sums[1:])
        return sums[self.begins + self.lengths] - sums[self.begins]

    def keys(self, weights: Tensor) -> Tensor:
        """A hash of each id: its length and its bytes, weighted; bytes beyond the last weight share that weight.

        Two ids that are no longer than the weights collide once in 2**56 times. Shape: [N], int64.
        """
        weight_indices = torch.arange(1, len(self.text) + 1, device=weights.device) - self.of_bytes(self.begins)
        products = weights.index_select(0, weight_indices.clamp_(max=len(weights) - 1)) * self.text
        return self.sums(products) + weights[0] * self.lengths
