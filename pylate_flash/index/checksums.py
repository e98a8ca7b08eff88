"""Checksums of what is read a piece at a time: a CRC-32 of every 64 KiB of a file, compared when these are first read.

A CRC finds every flipped bit, and of other damage all but one in 2**32, at several GB/s: reading is hardly slower.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable

import numpy as np

__all__ = ["CheckedBlocks", "Sums", "block_begin", "block_of", "blocks_of"]

_BLOCK_BYTES = 64 << 10
# Blocks whose CRCs are joined at a time.
_JOINED = 64


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
        blocks = low + np.flatnonzero(~self._right[low - self._first : high - self._first])
        whole = blocks[(blocks * _BLOCK_BYTES >= begin) & ((blocks + 1) * _BLOCK_BYTES <= end)]
        # Many at once: between two calls, threads that read wait for each other.
        if len(whole) > 1 and whole[-1] - whole[0] == len(whole) - 1:
            some = slice(whole[0] - self._first, whole[-1] + 1 - self._first)
            data = view[whole[0] * _BLOCK_BYTES - begin : (whole[-1] + 1) * _BLOCK_BYTES - begin]
            if zlib.crc32(data) == _joined(self._sums[some], _BLOCK_BYTES):
                self._right[some] = True
                blocks = np.setdiff1d(blocks, whole, assume_unique=True)
        for block in blocks.tolist():
            first, last = block * _BLOCK_BYTES, min((block + 1) * _BLOCK_BYTES, self._end)
            data = view[first - begin : last - begin] if begin <= first and last <= end else read(first, last)
            if zlib.crc32(data) != self._sums[block - self._first]:
                raise ValueError(f"its bytes {first} to {last} have another CRC-32 than when they were written")
            self._right[block - self._first] = True


def _joined(sums: np.ndarray, nbytes: int) -> int:
    """The CRC of blocks of so many bytes, one after the other, of the CRC of each.

    That of two is the one of the first, as zeros in place of the second change it, xor that of the second. How zeros
    change it is linear in its bits.
    """
    joined = 0
    for start in range(0, len(sums), _JOINED):
        some = sums[start : start + _JOINED].astype(np.uint32)
        bits = (some[:, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
        changed = _changed_by_zeros(nbytes)
        if start:
            of_before = (np.uint32(joined) >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
            joined = int(np.bitwise_xor.reduce(of_before * changed[len(some)]))
        joined ^= int(np.bitwise_xor.reduce(bits * changed[: len(some)][::-1], axis=None))
    return joined


@functools.cache
def _changed_by_zeros(nbytes: int) -> np.ndarray:
    """What becomes of each bit of a CRC when 0, 1, ... blocks of zeros follow. Shape: [_JOINED + 1, 32], uint32."""
    changed = np.empty((_JOINED + 1, 32), np.uint32)
    changed[0] = 1 << np.arange(32, dtype=np.uint32)
    zeros = bytes(nbytes)
    changed[1] = [zlib.crc32(zeros, int(bit)) ^ zlib.crc32(zeros) for bit in changed[0]]
    for i in range(2, _JOINED + 1):
        bits = (changed[i - 1][:, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
        changed[i] = np.bitwise_xor.reduce(bits * changed[1], axis=1)
    return changed
