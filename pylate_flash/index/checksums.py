"""Checksums of what is read a piece at a time: one of every MiB of a file, compared when it is first read.

XXH3 of 64 bits runs as fast as memory is read, where a CRC-32 would take longer than reading; of any damage it misses
one in 2**64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

__all__ = ["CheckedBlocks", "Sums", "block_begin", "block_of"]

# Smaller ones would have threads that read wait for each other between them.
_BLOCK_BYTES = 1 << 20


class Sums:
    """The checksums of the blocks of a file that hold bytes which come in pieces of any size.

    The bytes begin at `begin`, before which their first block holds `head`.
    """

    def __init__(self, begin: int = 0, head: bytes = b"") -> None:
        self.end = begin  # of the bytes
        self._whole: list[int] = []
        self._last, self._empty = xxh3_64(head), True

    def following(self) -> Sums:
        """Of bytes that follow these."""
        sums = Sums(self.end)
        sums._last = self._last.copy()
        return sums

    def update(self, piece: memoryview) -> None:
        """Take in the next bytes."""
        while len(piece):
            room = _BLOCK_BYTES - self.end % _BLOCK_BYTES
            some, piece = piece[:room], piece[room:]
            self._last.update(some)
            self.end, self._empty = self.end + len(some), False
            if len(some) == room:
                self._whole.append(self._last.intdigest())
                self._last, self._empty = xxh3_64(), True

    def values(self) -> np.ndarray:
        """One for each block, of the last of which there may be a part. Shape: [N], "<u8"."""
        return np.array(self._whole if self._empty else [*self._whole, self._last.intdigest()], dtype="<u8")


def block_of(place: int) -> int:
    """The number of the block that holds a byte of a file."""
    return place // _BLOCK_BYTES


def block_begin(place: int) -> int:
    """Where the block begins that holds a byte of a file."""
    return place - place % _BLOCK_BYTES


class CheckedBlocks:
    """Bytes `begin` to `end` of a file: checksums of their blocks up to `end`, and which were found to be right."""

    def __init__(self, sums: np.ndarray, begin: int, end: int) -> None:
        self._sums, self._size, self._first, self._end = sums, _BLOCK_BYTES, block_of(begin), end
        self.blocks = -(-end // _BLOCK_BYTES) - self._first if begin < end else 0
        self._right = np.zeros(self.blocks, dtype=bool)

    def are_right(self, begin: int, end: int) -> bool:
        """Whether all blocks between two places have been found to be right."""
        return bool(self._right[begin // self._size - self._first : -(-end // self._size) - self._first].all())

    def check(self, view: memoryview, begin: int, read: Callable[[int, int], memoryview]) -> None:
        """Check the blocks that were not checked before, of which `view`, read from the place `begin`, holds a part.

        `read` gives the bytes from one place to another, for blocks that `view` holds only a part of. Another checksum
        is a ValueError.
        """
        end = begin + len(view)
        low, high = begin // self._size, -(-end // self._size)
        for block in (low + np.flatnonzero(~self._right[low - self._first : high - self._first])).tolist():
            first, last = block * self._size, min((block + 1) * self._size, self._end)
            data = view[first - begin : last - begin] if begin <= first and last <= end else read(first, last)
            if xxh3_64_intdigest(data) != self._sums[block - self._first]:
                raise ValueError(f"its bytes {first} to {last} have another checksum than when they were written")
            self._right[block - self._first] = True
