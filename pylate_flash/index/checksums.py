"""Checksums of files that are read in pieces: one for every MiB of a file, verified when it is first read.

64-bit XXH3 runs at memory bandwidth, where a CRC-32 would take longer than reading; it misses damage with a probability
of one in 2**64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

# With smaller blocks, reading threads would wait for each other between them.
_BLOCK_BYTES = 1 << 20


class Sums:
    """Incremental checksums of the blocks of a file, over bytes that arrive in pieces of any size.

    The bytes begin at offset `begin`; `head` is the content of their first block before it.
    """

    def __init__(self, begin: int = 0, head: bytes = b"") -> None:
        self.end = begin  # offset at which the bytes end
        self._whole: list[int] = []
        self._last, self._empty = xxh3_64(head), True

    def following(self) -> Sums:
        """Checksums for bytes that follow these."""
        sums = Sums(self.end)
        sums._last = self._last.copy()
        return sums

    def update(self, piece: memoryview) -> None:
        """Add the next bytes."""
        while len(piece):
            remaining = _BLOCK_BYTES - self.end % _BLOCK_BYTES
            chunk, piece = piece[:remaining], piece[remaining:]
            self._last.update(chunk)
            self.end, self._empty = self.end + len(chunk), False
            if len(chunk) == remaining:
                self._whole.append(self._last.intdigest())
                self._last, self._empty = xxh3_64(), True

    def values(self) -> np.ndarray:
        """One checksum per block, of which the last may be partial. Shape: [N], "<u8"."""
        return np.array(self._whole if self._empty else [*self._whole, self._last.intdigest()], dtype="<u8")


def block_of(offset: int) -> int:
    """The index of the block that holds the byte at an offset."""
    return offset // _BLOCK_BYTES


def block_begin(offset: int) -> int:
    """The start of the block that holds the byte at an offset."""
    return offset - offset % _BLOCK_BYTES


class CheckedBlocks:
    """Checksums of the blocks of bytes `begin` to `end` of a file, and which blocks have been verified."""

    def __init__(self, sums: np.ndarray, begin: int, end: int) -> None:
        self._sums, self._size, self._first, self._end = sums, _BLOCK_BYTES, block_of(begin), end
        self.blocks = -(-end // _BLOCK_BYTES) - self._first if begin < end else 0
        self._right = np.zeros(self.blocks, dtype=bool)

    def are_right(self, begin: int, end: int) -> bool:
        """Whether all blocks between two offsets have been verified."""
        return bool(self._right[begin // self._size - self._first : -(-end // self._size) - self._first].all())

    def check(self, view: memoryview, begin: int, read: Callable[[int, int], memoryview]) -> None:
        """Verify the blocks that overlap `view`, read from the offset `begin`, and were not verified before.

        `read` returns the bytes between two offsets, for blocks that `view` holds only partially. A wrong checksum
        raises a ValueError.
        """
        end = begin + len(view)
        low, high = begin // self._size, -(-end // self._size)
        for block in (low + np.flatnonzero(~self._right[low - self._first : high - self._first])).tolist():
            first, last = block * self._size, min((block + 1) * self._size, self._end)
            data = view[first - begin : last - begin] if begin <= first and last <= end else read(first, last)
            if xxh3_64_intdigest(data) != self._sums[block - self._first]:
                raise ValueError(f"the checksum of its bytes {first} to {last} differs from the recorded one")
            self._right[block - self._first] = True
