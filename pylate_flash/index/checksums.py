"""Checksums of what is read a piece at a time: one of every MiB of a file, compared when it is first read.

XXH3 of 64 bits runs as fast as memory is read, where a CRC-32 would take longer than reading; of any damage it misses
one in 2**64. What the first version of the format wrote has a CRC-32 of every 64 KiB.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

__all__ = ["CheckedBlocks", "Sums", "block_begin", "block_of", "sums_bytes", "sums_from"]

# Smaller ones would have threads that read wait for each other between them.
_BLOCK_BYTES = 1 << 20
_CRC_BLOCK_BYTES = 64 << 10
# With which XXH3 sums begin in the catalog.
_MARK = b"XXH3-64\0"


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


def block_of(place: int, sums: np.ndarray) -> int:
    """The number of the block that holds a byte of a file, of those that checksums are of."""
    return place // _kind(sums)[0]


def block_begin(place: int, sums: np.ndarray | None = None) -> int:
    """Where the block begins that holds a byte of a file, of those that checksums are of, or that `Sums` has."""
    return place - place % (_BLOCK_BYTES if sums is None else _kind(sums)[0])


def sums_bytes(sums: np.ndarray) -> bytes:
    """As the catalog keeps checksums."""
    return sums.tobytes() if sums.itemsize == 4 else _MARK + sums.tobytes()


def sums_from(content: bytes) -> np.ndarray:
    """What `sums_bytes` was given."""
    if content.startswith(_MARK):
        return np.frombuffer(content, "<u8", offset=len(_MARK))
    return np.frombuffer(content, "<u4")


def _kind(sums: np.ndarray) -> tuple[int, Callable[[Any], int]]:
    """The bytes of a block, and what computes its checksum."""
    return (_CRC_BLOCK_BYTES, zlib.crc32) if sums.itemsize == 4 else (_BLOCK_BYTES, xxh3_64_intdigest)


class CheckedBlocks:
    """Bytes `begin` to `end` of a file: checksums of their blocks up to `end`, and which were found to be right."""

    def __init__(self, sums: np.ndarray, begin: int, end: int) -> None:
        size, self._sum = _kind(sums)
        self._sums, self._size, self._first, self._end = sums, size, begin // size, end
        self.blocks = -(-end // size) - self._first if begin < end else 0
        self._right = np.zeros(self.blocks, dtype=bool)

    def are_right(self, begin: int, end: int) -> bool:
        """Whether all blocks between two places have been found to be right."""
        return bool(self._right[begin // self._size - self._first : -(-end // self._size) - self._first].all())

    def check(self, view: memoryview, begin: int, read: Callable[[int, int], memoryview]) -> None:
        """Check the blocks that were not checked before, of which `view`, read from the place `begin`, holds a part.

        `read` gives the bytes from one place to another, for blocks that `view` holds only a part of.

        Raises
        ------
        ValueError
            If a checksum is another.
        """
        end = begin + len(view)
        low, high = begin // self._size, -(-end // self._size)
        for block in (low + np.flatnonzero(~self._right[low - self._first : high - self._first])).tolist():
            first, last = block * self._size, min((block + 1) * self._size, self._end)
            data = view[first - begin : last - begin] if begin <= first and last <= end else read(first, last)
            if self._sum(data) != self._sums[block - self._first]:
                raise ValueError(f"its bytes {first} to {last} have another checksum than when they were written")
            self._right[block - self._first] = True
