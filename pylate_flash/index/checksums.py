"""Checksums of what is read a piece at a time: a CRC-32 of every 64 KiB of a file, compared when these are first read.

A CRC finds every flipped bit, and of other damage all but one in 2**32, at several GB/s: reading is hardly slower.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np

__all__ = ["CheckedBlocks", "Sums", "block_begin", "block_of", "blocks_of"]

_BLOCK_BYTES = 64 << 10


class Sums:
    """The CRCs of the blocks of a file that hold bytes which come in pieces of any size.

    They begin at the byte `begin`; `before` is the CRC of what their first block holds before that.
    """

    def __init__(self, begin: int = 0, before: int = 0) -> None:
        self._whole: list[int] = []
        self._last, self._room, self._empty = before, _BLOCK_BYTES - begin % _BLOCK_BYTES, True

    def update(self, piece: memoryview) -> None:
        """Take in the next bytes."""
        while len(piece):
            some, piece = piece[: self._room], piece[self._room :]
            self._last, self._empty = zlib.crc32(some, self._last), False
            self._room -= len(some)
            if not self._room:
                self._whole.append(self._last)
                self._last, self._room = 0, _BLOCK_BYTES

    def values(self) -> np.ndarray:
        """One for each block, of the last of which there may be a part. Shape: [N], "<u4"."""
        last = [self._last] if self._room < _BLOCK_BYTES and not self._empty else []
        return np.array(self._whole + last, dtype="<u4")


def block_of(place: int) -> int:
    """The number of the block that holds a byte of a file."""
    return place // _BLOCK_BYTES


def block_begin(place: int) -> int:
    """Where the block begins that holds a byte of a file."""
    return place - place % _BLOCK_BYTES


def blocks_of(begin: int, end: int) -> int:
    """How many blocks hold the bytes from `begin` to `end`."""
    return -(-end // _BLOCK_BYTES) - begin // _BLOCK_BYTES if begin < end else 0


class CheckedBlocks:
    """Bytes `begin` to `end` of a file: the CRCs of their blocks up to `end`, and which have been found to be right."""

    def __init__(self, sums: np.ndarray, begin: int, end: int) -> None:
        self._sums, self._first, self._end = sums, begin // _BLOCK_BYTES, end
        self._right = np.zeros(len(sums), dtype=bool)

    def check(self, view: memoryview, begin: int, read: Callable[[int, int], memoryview]) -> None:
        """Check the blocks that were not checked before, of which `view`, read from the place `begin`, holds a part.

        `read` gives the bytes from one place to another, for blocks that `view` holds only a part of.

        Raises
        ------
        ValueError
            If a CRC is another.
        """
        end = begin + len(view)
        low, high = begin // _BLOCK_BYTES, -(-end // _BLOCK_BYTES)
        for block in (low + np.flatnonzero(~self._right[low - self._first : high - self._first])).tolist():
            first, last = block * _BLOCK_BYTES, min((block + 1) * _BLOCK_BYTES, self._end)
            data = view[first - begin : last - begin] if begin <= first and last <= end else read(first, last)
            if zlib.crc32(data) != self._sums[block - self._first]:
                raise ValueError(f"its bytes {first} to {last} have another CRC-32 than when they were written")
            self._right[block - self._first] = True
