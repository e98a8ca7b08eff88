"""Parts: documents that were added together, put end to end in the order in which they were added.

A part is a row of the catalog. It holds what is known of its documents in arrays, not in Python objects; their rows
lie in a stretch of a segment, or in memory, of an index that keeps nothing on the disk.
"""

from __future__ import annotations

import contextlib
import os
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .checksums import CheckedBlocks, Sums, block_begin, block_of
from .columns import Columns, Held, copy_rows
from .files import open_regular, read_exactly
from .ids import Ids
from .layout import Layout, is_finite

__all__ = ["COLUMNS", "SEGMENT_NAME", "Part", "Segment", "bytes_of"]

SEGMENT_NAME = "segment-*.rows"
# The columns of a part in the catalog, and the last: a CRC-32 over the others.
COLUMNS = ("number", "segment", "offset", "numbers", "lengths", "id_ends", "ids", "sums", "crc")
# Rows are read and checked so many bytes at a time, so that they are checked while a cache holds them; not
# fewer, as several threads that do so would wait for each other.
_CHECKED_AT_A_TIME = 2 << 20
_VERIFIED_AT_A_TIME = 16 << 20
_SECTOR_BYTES = 512
# With which the column of checksums begins.
_SUMS = b"XXH3-64\0"


class Segment:
    """An open file of rows, to which is only appended; closed with this object.

    It can be read as long as this object exists, also when a later write has deleted it from its folder. `tail` are the
    checksums of what was appended last, if this process did so.
    """

    def __init__(self, path: Path, written: int | None = None) -> None:
        self.path, self.tail = path, Sums()
        self._written = written if written is None else self._kept(written)
        try:
            self.descriptor = self._kept(open_regular(path))
        except FileNotFoundError:
            raise ValueError(f"{path} is missing, though the catalog names it") from None

    @property
    def nbytes(self) -> int:
        """Bytes of the file, counted or not."""
        return os.fstat(self.descriptor).st_size

    def _kept(self, descriptor: int) -> int:
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    @property
    def written(self) -> int:
        """A descriptor to write with, which stays open as well."""
        if self._written is None:
            self._written = self._kept(open_regular(self.path, os.O_RDWR))
        return self._written


@dataclass(eq=False)
class Part:
    """Documents of a part, whether they count as removed or not; a new one for every change."""

    layout: Layout
    # Of the documents, ascending, and their tokens. Shape: [N], int64.
    numbers: np.ndarray
    lengths: np.ndarray
    ids: Ids
    # Places in the part of documents that count as removed, ascending. Shape: [*], int64.
    removed: np.ndarray
    # Checksums of the blocks of the segment that hold the rows, and where these are, a multiple of their bytes from the
    # beginning.
    sums: np.ndarray
    segment: Segment | None = None
    offset: int = 0
    # The rows, if they are in no segment, on whatever device. Shape: [T, width].
    memory: Held | None = None
    # And those beside them, on the CPU.
    memory_beside: Held | None = None

    def __post_init__(self) -> None:
        self.documents, self.rows = len(self.lengths), int(self.lengths.sum())
        self.nbytes = self.rows * self.layout.all_nbytes
        self.crc = 0
        self._checked = CheckedBlocks(self.sums, self.offset, self.end)

    @property
    def end(self) -> int:
        """Where the rows end in the segment."""
        return self.offset + self.nbytes

    @property
    def beside(self) -> Part | None:
        """The same documents in the rows that are kept beside these, behind them; what was checked is of both."""
        if self.layout.beside is None:
            return None
        offset = self.offset + self.rows * self.layout.nbytes
        part = replace(self, layout=self.layout.beside, offset=offset, memory=self.memory_beside)
        part._checked = self._checked
        return part

    @classmethod
    def of(cls, layout: Layout, numbers: np.ndarray, ids: Sequence[str], lengths: np.ndarray, **place: Any) -> Part:
        """A part of which no document counts as removed; `place` is where its rows are, and their `sums`."""
        return cls(layout, numbers, lengths, Ids.encoded(ids), np.zeros(0, np.int64), **place)

    def to_row(self) -> tuple:
        """As the catalog keeps it, in the order of COLUMNS."""
        first = int(self.numbers[0])
        gaps = int(self.numbers[-1]) - first >= self.documents
        row = (
            first,
            None if self.segment is None else self.segment.path.name,
            self.offset,
            self.numbers.astype("<i8").tobytes() if gaps else None,
            self.lengths.astype("<i4").tobytes(),
            self.ids.ends.astype("<i8").tobytes(),
            self.ids.content,
            _SUMS + self.sums.tobytes(),
        )
        self.crc = _crc(row)
        return (*row, self.crc)

    @property
    def removed_bytes(self) -> bytes:
        """`removed` as the catalog keeps it."""
        return self.removed.astype("<i4").tobytes()

    @classmethod
    def from_row(cls, row: Sequence, removed: bytes, layout: Layout, segments: dict[str, Segment]) -> Part:
        """What `to_row` and `removed_bytes` gave; `segments` are by their names. A damaged one is a ValueError."""
        first, segment, offset, numbers, lengths, id_ends, ids, sums, crc = row
        try:
            if _crc(row[:-1]) != crc:
                raise ValueError("it has another CRC-32 than when it was written")
            if not sums.startswith(_SUMS):
                raise ValueError("it was written before version 2 of the format: build it anew")
            sizes = np.frombuffer(lengths, "<i4").astype(np.int64)
            part = cls(
                layout,
                np.arange(first, first + len(sizes))
                if numbers is None
                else np.frombuffer(numbers, "<i8").astype(np.int64),
                sizes,
                Ids.of(ids, np.frombuffer(id_ends, "<i8").astype(np.int64)),
                np.frombuffer(removed, "<i4").astype(np.int64),
                np.frombuffer(sums, "<u8", offset=len(_SUMS)),
                segments[segment],
                offset,
            )
            if len(part.sums) != part._checked.blocks:
                raise ValueError(f"it has {len(part.sums)} checksums for {part.nbytes} bytes")
            if offset % max(1, layout.all_nbytes):
                raise ValueError(f"its rows of {layout.all_nbytes} bytes begin at byte {offset}")
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(f"its part of the documents from number {first!r:.100} on: {error}") from None
        part.crc = crc
        return part

    def without(self, places: np.ndarray) -> Part:
        """The same part, of which the documents at some more places count as removed; they share what was checked."""
        part = replace(self, removed=np.union1d(self.removed, places).astype(np.int64))
        part._checked, part.crc = self._checked, self.crc
        return part

    def follows(self, other: Part) -> bool:
        """Whether its rows do, in the same segment, and no document of both is removed."""
        return (
            self.segment is not None
            and self.layout.beside is None
            and (self.segment, self.offset) == (other.segment, other.end)
            and not len(self.removed) + len(other.removed)
        )

    @classmethod
    def merged(cls, parts: Sequence[Part]) -> Part:
        """One part in the place of some, of which each follows the one before it. Their rows stay where they are."""
        first = parts[0]
        lengths, numbers = (np.concatenate([getattr(part, name) for part in parts]) for name in ("lengths", "numbers"))
        ids = Ids.joined([part.ids for part in parts])
        # Of a block that two share, the later one has the checksum of what both have there.
        solid = [part for part in parts if part.nbytes]
        blocks = [block_of(part.offset) for part in solid]
        sums = [part.sums[: after - block] for part, (block, after) in zip(solid, pairwise(blocks), strict=False)]
        sums += [part.sums for part in solid[-1:]]
        return cls(
            first.layout, numbers, lengths, ids, first.removed, np.concatenate([first.sums[:0], *sums]),
            first.segment, first.offset,
        )  # fmt: skip

    @property
    def live(self) -> np.ndarray:
        """Which documents do not count as removed. Shape: [N], bool."""
        mask = np.ones(self.documents, dtype=bool)
        mask[self.removed] = False
        return mask

    def read_into(self, out: Held, start: int) -> None:
        """Fill `out` [n, width] with the rows of the tokens from `start` on.

        If the segment has become too short, or has other rows than were written, which is noticed when they are first
        read, it raises a ValueError, and an OSError if the disk fails. Both name the file.
        """
        if self.memory is not None:
            copy_rows(out, self.memory[start : start + len(out)])
            return
        if isinstance(out, Columns):
            rows = torch.empty(out.shape, dtype=out.dtype)
            self.read_into(rows, start)
            out.copy_(rows)
            return
        assert self.segment is not None
        begin = self.offset + start * self.layout.nbytes
        end = begin + len(out) * self.layout.nbytes
        view, place = memoryview(b"") if begin == end else bytes_of(out), begin
        checked = self._checked.are_right(begin, end)
        with self._named():
            while place < end:
                stop = end if checked else min(end, (place // _CHECKED_AT_A_TIME + 1) * _CHECKED_AT_A_TIME)
                some = read_exactly(self.segment.descriptor, view[place - begin : stop - begin], place)
                if not checked:
                    self._checked.check(some, place, self._bytes)
                place = stop

    def check(self, view: memoryview, begin: int) -> None:
        """Check what bytes of the segment from `begin` on, which reach to the part's end at least, hold of it.

        It raises what `read_into` does.
        """
        first = max(begin, block_begin(self.offset))
        if first < self.end and self.nbytes:
            with self._named():
                self._checked.check(view[first - begin : self.end - begin], first, self._bytes)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Have errors name the segment."""
        assert self.segment is not None
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self.segment.path} is damaged: {error}") from None
        except OSError as error:
            raise OSError(error.errno, f"{self.segment.path} cannot be read: {error.strerror}") from error

    def check_size(self) -> None:
        """Refuse a segment that has been truncated. The message names it."""
        if self.segment is not None:
            size = self.segment.nbytes
            if size < self.end:
                raise ValueError(
                    f"{self.segment.path} is damaged: it ends after {size} bytes, {self.end} were expected"
                )

    def is_lost(self) -> bool:
        """Whether rows have not come to the disk, as after a power failure: they are missing, or a sector is zeros."""
        assert self.segment is not None
        begin = block_begin(self.offset)
        if self.segment.nbytes < self.end:
            return True
        content = self._bytes(begin, self.end)
        try:
            self._checked.check(content, begin, self._bytes)
            return False
        except ValueError:
            first = (self.offset - begin) // _SECTOR_BYTES * _SECTOR_BYTES
            sectors = (content[place : place + _SECTOR_BYTES] for place in range(first, len(content), _SECTOR_BYTES))
            return any(bytes(len(sector)) == sector for sector in sectors)

    def _bytes(self, begin: int, end: int) -> memoryview:
        assert self.segment is not None
        return read_exactly(self.segment.descriptor, bytearray(end - begin), begin)

    def verify(self, path: Path) -> None:
        """Read all rows anew, those of removed documents too; `path` is the catalog's.

        If they are others than were written, or one is NaN or infinite, it raises a ValueError that names the file.
        """
        self._checked = CheckedBlocks(self.sums, self.offset, self.end)
        for part in filter(None, (self, self.beside)):
            part._verify_rows(path)

    def _verify_rows(self, path: Path) -> None:
        step = max(1, _VERIFIED_AT_A_TIME // self.layout.nbytes)
        for start in range(0, self.rows, step):
            values = torch.empty(min(step, self.rows - start), self.layout.width, dtype=self.layout.dtype)
            self.read_into(values, start)
            finite = is_finite(values)
            if not finite.all():
                number = self.numbers[
                    np.searchsorted(self.lengths.cumsum(), start + int(finite.int().argmin()), "right")
                ]
                where = path if self.segment is None else self.segment.path
                raise ValueError(f"{where} holds NaN or infinite values, first in its document {number}")


def bytes_of(values: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, and of another one a copy."""
    return memoryview(values.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _crc(columns: Iterable) -> int:
    """The CRC-32 of columns of a row."""
    pieces = [column if isinstance(column, bytes) else repr(column).encode() for column in columns]
    return zlib.crc32(b"".join(pieces), zlib.crc32(repr([len(piece) for piece in pieces]).encode()))
