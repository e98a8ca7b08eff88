"""One file to which small additions are appended, so that one of them costs one write and not a new shard.

    head     which bytes of the file count: how far it goes, how far it is known to be on the disk, a sha256, a CRC
    head     the one before it
    record   length, sha256 (of the record before it and of this one), CRC; and one safetensors file, as a shard is
    ...

Length, sha256 and CRC take 64 bytes, and a record ends, after zeros that its length counts, at a multiple of 64.

An addition is first written behind the end, and then made to count by a new head in place of the older one. A process
that is killed in between leaves some bytes behind the end, which the next addition overwrites. The sha256 of the last
record covers all before it, and a journal is small, so that all of it is checked whenever it is opened.

After a power failure, what had not been flushed may be missing or zeros, sector by sector. So a record that is not
right, and neither cut nor with a sector of zeros, is damaged: a flipped bit loses no additions in silence. The 64 bytes
before a record lie in one sector, so that they are there or not.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from .files import open_named, read_exactly, write_all
from .layout import Layout
from .shards import bytes_of, check_finite, decode, encode

__all__ = ["Journal", "flush"]

_MAGIC = b"PLFLASHJ"
_HEAD = struct.Struct("<8sQQQ32s")
_HEAD_BYTES = 128
_FIRST = 2 * _HEAD_BYTES
_RECORD = struct.Struct("<Q32s")
_RECORD_BYTES = 64
_SECTOR_BYTES = 512
# A journal is in memory, and read whole when the index is opened: so much is in it at most.
JOURNAL_BYTES = 64 << 20
JOURNAL_RECORDS = 4096
# A larger addition becomes a shard at once, so that it is not written twice.
ADDITION_BYTES = 16 << 20
# Flushing takes milliseconds. At most so often (in seconds) it is done, so that a run of additions does not spend its
# time on it, and a single addition is on the disk when it returns.
_FLUSH_SECONDS = 0.2


class _Head(NamedTuple):
    """`end` bytes of the file count, `flushed` of them are on the disk, `digest` is that of the last record."""

    number: int = 1
    end: int = _FIRST
    flushed: int = _FIRST
    digest: bytes = bytes(32)

    def next(self, end: int, flushed: int, digest: bytes) -> _Head:
        return _Head(self.number + 1, end, flushed, digest)

    def to_bytes(self) -> bytes:
        packed = _HEAD.pack(_MAGIC, self.number, self.end, self.flushed, self.digest)
        return (packed + struct.pack("<I", zlib.crc32(packed))).ljust(_HEAD_BYTES, b"\0")

    def write(self, descriptor: int) -> None:
        """In place of the head before the last, so that one is whole whenever this is interrupted."""
        write_all(descriptor, self.to_bytes(), self.number % 2 * _HEAD_BYTES)

    @classmethod
    def read(cls, content: bytes) -> tuple[_Head, bool]:
        """The last head that is whole, of those with which a file begins, and whether the other one is not."""
        if len(content) < _FIRST:
            raise ValueError(f"it ends after {len(content)} bytes")
        heads = []
        for place in (0, _HEAD_BYTES):
            magic, *values = _HEAD.unpack_from(content, place)
            head = cls(*values)
            if magic == _MAGIC and head.to_bytes() == content[place : place + _HEAD_BYTES]:
                heads.append(head)
        if not heads:
            raise ValueError("its heads are not those of a journal")
        return max(heads, key=lambda head: head.number), len(heads) == 1


class _Damage(ValueError):
    """What no power failure leaves behind."""


class Journal:
    """The additions of a journal: the rows of their tokens, `values`, are in memory from the first look at them on.

    Only the process that has the turn to write may call what changes it.
    """

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path = path
        self.records = self.documents = 0
        self.rows = 0
        self._layout, self._row = layout, layout.nbytes
        self._room = torch.empty(0, layout.width, dtype=layout.dtype)
        self._room_bytes = bytes_of(self._room)
        # Values that this object has written but not read again: where they begin in the room and in the file, how many
        # bytes they are, and their CRC. A run of additions copies none of them.
        self._unread: list[tuple[int, int, int, int]] = []
        self._file: _File | None = None
        # Threads that search read them at the same time as one that adds.
        self._reading = threading.RLock()
        self._head = self._seen = _Head()
        self._heads = b""  # as they are in the file, if known
        self._flush_due = 0.0
        self._lost = 0  # bytes of additions that opening has not found

    @classmethod
    def create(cls, path: Path, layout: Layout) -> Journal:
        """Make an empty journal, which the first addition flushes to the disk."""
        journal = cls(path, layout)
        with path.open("xb", buffering=0) as file:
            journal._head._replace(number=0).write(file.fileno())
            journal._head.write(file.fileno())
        return journal

    @classmethod
    def open(cls, path: Path, layout: Layout) -> tuple[Journal, list[str], np.ndarray]:
        """Open a journal, and return it with the ids and the lengths of its documents.

        Warns if additions that had not been flushed are lost, as after a power failure.

        Raises
        ------
        ValueError
            If the file is missing or damaged. The message names it.
        """
        journal = cls(path, layout)
        ids: list[str] = []
        lengths = [np.zeros(0, dtype=np.int64)]
        descriptor = open_named(path)
        try:
            head, torn = _Head.read(os.pread(descriptor, _FIRST, 0))
            have = os.fstat(descriptor).st_size
            room = np.empty(have if torn else min(head.end, have), dtype=np.uint8)
            content = read_exactly(descriptor, room.data, 0)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error}") from None
        finally:
            os.close(descriptor)
        while journal.nbytes < head.end:
            try:
                record = journal._parse(content)
            except ValueError as error:
                if journal.nbytes < head.flushed or isinstance(error, _Damage):
                    raise ValueError(f"{path} is damaged at byte {journal.nbytes}: {error}") from None
                journal._lost = head.end - journal.nbytes
                warnings.warn(f"{journal._loss()} ({error})", stacklevel=2)
                break
            ids += record[0]
            lengths.append(record[1])
        if journal.nbytes == head.end and journal._head.digest != head.digest:
            raise ValueError(f"{path} is damaged: its head has another sha256 than its last record")
        # A writer was interrupted while it replaced a head, or that head is damaged: what is whole counts.
        while torn:
            try:
                record = journal._parse(content)
            except ValueError:
                break
            ids += record[0]
            lengths.append(record[1])
        journal._seen, journal.documents = head, len(ids)
        journal._head = _Head(head.number, journal.nbytes, min(head.flushed, journal.nbytes), journal._head.digest)
        return journal, ids, np.concatenate(lengths)

    def _parse(self, content: memoryview) -> tuple[list[str], np.ndarray]:
        """Take in the next record of a file's content, and return its ids and lengths."""
        start = self.nbytes + _RECORD_BYTES
        if start > len(content):
            raise ValueError(f"it ends after {len(content)} bytes")
        opening = bytes(content[self.nbytes : start])
        if not any(opening):
            raise ValueError("a record is missing")
        length, digest = _RECORD.unpack_from(opening)
        if opening != _opening(length, digest):
            raise _Damage("the length of a record, its sha256, or the CRC of both is another")
        if length > len(content) - start:
            raise ValueError(f"it ends after {len(content)} bytes, {start + length} were expected")
        payload = content[start : start + length]
        if _digest(self._head.digest, [payload]) != digest:
            reason = "the sha256 of a record is another"
            raise ValueError(reason) if _has_empty_sector(payload, start) else _Damage(reason)
        found = decode(lambda offset, n: bytes(payload[offset : offset + n]), length)
        if found.layout != self._layout:
            raise ValueError(f"it holds values of type {found.layout.dtype} and size {found.layout.size}")
        values = payload[found.values_offset :][: found.tokens * self._row]
        self._take(values, self._head.next(start + length, self._head.flushed, digest))
        return found.ids, found.lengths

    @property
    def nbytes(self) -> int:
        """Bytes of the file that count."""
        return self._head.end

    @property
    def values(self) -> torch.Tensor:
        """The tokens of all documents, as a view that stays as it is when more follow. Shape: [rows, width]."""
        self._read()
        return self._room[: self.rows]

    def read_into(self, out: torch.Tensor, start: int) -> None:
        """Fill `out` [n, width] with the rows of the tokens from `start` on."""
        self._read()
        out.copy_(self._room[start : start + len(out)])

    def is_current(self) -> bool:
        """Whether the file is as this object has seen it, and no other process has added to it since."""
        descriptor = open_named(self.path)
        try:
            heads = os.pread(descriptor, _FIRST, 0)
        finally:
            os.close(descriptor)
        if heads == self._heads:
            return True
        head, _ = _Head.read(heads)
        if (head.end, head.digest) != (self._seen.end, self._seen.digest):
            return False
        # It may have been flushed meanwhile, which writes a head as well; the next one must follow that.
        flushed = min(head.flushed, self._head.end)
        self._head, self._heads = self._head._replace(number=head.number, flushed=flushed), heads
        return True

    def append(self, ids: Sequence[str], lengths: np.ndarray, values: torch.Tensor) -> None:
        """Add documents; on an error, the file is as before.

        It is on the disk when this returns, except that within a fifth of a second after one such addition the next
        ones leave that to a later addition, to `flush`, or to the system.
        """
        before, start = self._head, self._head.end
        memory = bytes_of(values)
        pieces = [*encode(ids, lengths, [memory], self._layout)]
        length = sum(map(len, pieces))
        pieces.append(bytes(-length % _RECORD_BYTES))
        length += len(pieces[-1])
        digest = _digest(before.digest, pieces)
        head = before.next(start + _RECORD_BYTES + length, before.flushed, digest)
        descriptor = open_named(self.path, os.O_RDWR)
        try:
            status = os.fstat(descriptor)
            # What a process that was killed has left behind the end.
            if status.st_size > start:
                os.ftruncate(descriptor, start)
            write_all(descriptor, b"".join([_opening(length, digest), *pieces]), start)
            head.write(descriptor)
            if time.monotonic() >= self._flush_due:
                head = _flush(descriptor, head)
                self._flush_due = time.monotonic() + _FLUSH_SECONDS
            heads = os.pread(descriptor, _FIRST, 0)
        except BaseException:
            with contextlib.suppress(OSError):
                # Twice, so that no head speaks of what is not there any more. The flush may have written one.
                for number in (2, 3):
                    before._replace(number=head.number + number).write(descriptor)
                os.ftruncate(descriptor, before.end)
            os.close(descriptor)
            raise
        offset = start + _RECORD_BYTES + sum(map(len, pieces[:2]))
        with self._reading:
            self._keep(descriptor, (status.st_dev, status.st_ino))
            self._unread.append((self.rows * self._row, offset, len(memory), zlib.crc32(memory)))
            self.rows, self.records, self._head = self.rows + len(memory) // self._row, self.records + 1, head
        self.documents += len(ids)
        self._seen, self._heads, self._lost = head, heads, 0

    @property
    def is_flushed(self) -> bool:
        """Whether all of it is known to be on the disk."""
        return self._head.flushed == self._head.end

    def verify(self) -> None:
        """Check the values; what opening has not checked already.

        Raises
        ------
        ValueError
            If a value is NaN or infinite, or additions are lost. The message names the file.
        """
        if self._lost:
            raise ValueError(f"{self._loss()}; the next change of the index takes it as it is")
        check_finite(self.values, self.path)

    def _loss(self) -> str:
        return (
            f"{self.path}: the last additions to the index are lost, {self._lost} bytes that had not reached the disk, "
            "as after a power failure"
        )

    def _take(self, values: memoryview, head: _Head) -> None:
        """Take in the memory of a record's values; `head` is that of the file with it."""
        rows = self.rows + len(values) // self._row
        self._make_room(rows)
        self._room_bytes[self.rows * self._row : rows * self._row] = values
        self.rows, self.records, self._head = rows, self.records + 1, head

    def _make_room(self, rows: int) -> None:
        if rows <= len(self._room):
            return
        # Memory that is not written to is not taken, so a journal has room for all that it will hold.
        nbytes = max(rows, JOURNAL_BYTES // self._row) * self._row
        # By NumPy, which asks the system for huge pages: taking small ones takes longer than filling them.
        room = torch.from_numpy(np.empty(nbytes, dtype=np.uint8)).view(self._layout.dtype).view(-1, self._layout.width)
        room[: len(self._room)] = self._room
        self._room, self._room_bytes = room, bytes_of(room)

    def _keep(self, descriptor: int, identity: tuple[int, int]) -> None:
        """Keep the file open for `_read`: another process may merge the journal into a shard, and delete it."""
        if self._file is not None and self._file.identity == identity:
            os.close(descriptor)
            return
        self._read()
        self._file = _File(descriptor, identity)

    def _read(self) -> None:
        """Read what was only written so far."""
        with self._reading:
            if not self._unread:
                return
            assert self._file is not None
            self._make_room(self.rows)
            try:
                for place, offset, nbytes, crc in self._unread:
                    view = self._room_bytes[place : place + nbytes]
                    if zlib.crc32(read_exactly(self._file.descriptor, view, offset)) != crc:
                        raise ValueError(f"its values at byte {offset} are others than were written")
            except (OSError, ValueError) as error:
                raise ValueError(f"{self.path} is damaged: {error}") from None
            self._unread = []


class _File:
    """An open file, closed with this object; `identity` is its device and its number there."""

    def __init__(self, descriptor: int, identity: tuple[int, int]) -> None:
        self.descriptor = descriptor
        self.identity = identity
        weakref.finalize(self, os.close, descriptor)


def _digest(before: bytes, payload: Iterable[memoryview | bytes]) -> bytes:
    """The sha256 of a record, given that of the one before it."""
    sha256 = hashlib.sha256(before)
    for piece in payload:
        sha256.update(piece)
    return sha256.digest()


def _has_empty_sector(payload: memoryview, start: int) -> bool:
    """Whether a sector of a record, which begins at the byte `start` of a file, is all zeros, as one never written.

    The first one holds what stands before the record as well, and is there.
    """
    sectors = (payload[at : at + _SECTOR_BYTES] for at in range(-start % _SECTOR_BYTES, len(payload), _SECTOR_BYTES))
    return any(bytes(len(sector)) == sector for sector in sectors)


def _opening(length: int, digest: bytes) -> bytes:
    """What stands before a record."""
    packed = _RECORD.pack(length, digest)
    return (packed + struct.pack("<I", zlib.crc32(packed))).ljust(_RECORD_BYTES, b"\0")


def flush(path: Path) -> None:
    """Have all of a journal on the disk, whoever has written it."""
    descriptor = open_named(path, os.O_RDWR)
    try:
        _flush(descriptor, _Head.read(os.pread(descriptor, _FIRST, 0))[0])
    finally:
        os.close(descriptor)


def _flush(descriptor: int, head: _Head) -> _Head:
    os.fsync(descriptor)
    head = head.next(head.end, head.end, head.digest)
    head.write(descriptor)
    return head
