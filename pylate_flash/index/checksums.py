"""Checksums of what is read a piece at a time: a CRC-32 of every 64 KiB, compared when these are first read.

A CRC finds every flipped bit, and of other damage all but one in 2**32, at several GB/s: reading is hardly slower. That
all of a file is as it was written, a sha256 of it says, which costs a look at all of it (`Shard.verify`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np

__all__ = ["CheckedBlocks", "Sums", "blocks_of"]

_BLOCK_BYTES = 64 << 10


class Sums:
    """The CRCs of bytes that come in pieces of any size."""

    def __init__(self) -> None:
        self._whole: list[int] = []
        self._last, self._room = 0, _BLOCK_BYTES

    def update(self, piece: memoryview) -> None:
        """Take in the next bytes."""
        while len(piece):
            some, piece = piece[: self._room], piece[self._room :]
            self._last = zlib.crc32(some, self._last)
            self._room -= len(some)
            if not self._room:
                self._whole.append(self._last)
                self._last, self._room = 0, _BLOCK_BYTES

    def values(self) -> np.ndarray:
        """One for each block, the last of which may be shorter. Shape: [blocks_of(bytes)], "<u4"."""
        last = [self._last] if self._room < _BLOCK_BYTES else []
        return np.array(self._whole + last, dtype="<u4")


def blocks_of(nbytes: int) -> int:
    """How many CRCs so many bytes have."""
    return -(-nbytes // _BLOCK_BYTES)


class CheckedBlocks:
    """`nbytes` bytes whose CRCs are known, and which of their blocks have been found to be right."""

    def __init__(self, sums: np.ndarray, nbytes: int) -> None:
        self._sums, self._nbytes = sums, nbytes
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
        low, high = begin // _BLOCK_BYTES, blocks_of(end)
        for block in (low + np.flatnonzero(~self._right[low:high])).tolist():
            first, last = block * _BLOCK_BYTES, min((block + 1) * _BLOCK_BYTES, self._nbytes)
            data = view[first - begin : last - begin] if begin <= first and last <= end else read(first, last)
            if zlib.crc32(data) != self._sums[block]:
                raise ValueError(
                    f"bytes {first} to {last} of its values have another CRC-32 than when they were written"
                )
            self._right[block] = True
