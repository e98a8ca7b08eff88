"""Parts: documents that were added together, concatenated in the order in which they were added.

A part is a row of the catalog. It describes its documents in arrays, not in Python objects; their rows lie in a
contiguous range of a segment or, if the index stores nothing on the disk, in memory.
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

SEGMENT_NAME = "segment-*.rows"
# The columns of a part in the catalog; the last is a CRC-32 over the others.
COLUMNS = ("number", "segment", "offset", "numbers", "lengths", "id_ends", "ids", "sums", "crc")
# Bytes of rows that are read and checked at a time: few enough that they are checked while in cache, and not fewer, as
# several reading threads would wait for each other.
_CHECKED_AT_A_TIME = 2 << 20
_VERIFIED_AT_A_TIME = 16 << 20
_SECTOR_BYTES = 512
# Prefix of the column of checksums.
_SUMS = b"XXH3-64\0"


class Segment:
    """An open, append-only file of rows; closed with this object.

    It can be read as long as this object exists, even after a later write has deleted it from its folder. `tail` holds
    the checksums of what was appended last, if this process appended it.
    """

    def __init__(self, path: Path, written: int | None = None) -> None:
        self.path, self.tail = path, Sums()
        self._written = written if written is None else self._owned(written)
        try:
            self.descriptor = self._owned(open_regular(path))
        except FileNotFoundError:
            raise ValueError(f"{path} is missing, though the catalog names it") from None

    @property
    def nbytes(self) -> int:
        """Bytes of the file, whether or not the catalog counts them."""
        return os.fstat(self.descriptor).st_size

    def _owned(self, descriptor: int) -> int:
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    @property
    def written(self) -> int:
        """A descriptor for writing, which stays open as well."""
        if self._written is None:
            self._written = self._owned(open_regular(self.path, os.O_RDWR))
        return self._written


@dataclass(eq=False)
class Part:
    """The documents of a part, including those that are marked as removed; every change creates a new one."""

    layout: Layout
    # Ascending numbers of the documents, and their token counts. Shape: [N], int64.
    numbers: np.ndarray
    lengths: np.ndarray
    ids: Ids
    # Ascending positions in the part of documents that are marked as removed. Shape: [*], int64.
    removed: np.ndarray
    # Checksums of the blocks of the segment that hold the rows, and the offset of the rows, a multiple of their size in
    # bytes.
    sums: np.ndarray
    segment: Segment | None = None
    offset: int = 0
    # The rows, if they are in memory instead of a segment, on any device. Shape: [T, width].
    memory: Held | None = None
    # Their 16-bit rows (`Layout.beside`), on the CPU.
    memory_beside: Held | None = None

    def __post_init__(self) -> None:
        self.documents, self.rows = len(self.lengths), int(self.lengths.sum())
        self.nbytes = self.rows * self.layout.all_nbytes
        self.crc = 0
        self._checked = CheckedBlocks(self.sums, self.offset, self.end)

    @property
    def end(self) -> int:
        """Offset in the segment at which the rows end."""
        return self.offset + self.nbytes

    @property
    def beside(self) -> Part | None:
        """The same documents as 16-bit rows, stored after these rows; both share the record of verified blocks."""
        if self.layout.beside is None:
            return None
        offset = self.offset + self.rows * self.layout.nbytes
        part = replace(self, layout=self.layout.beside, offset=offset, memory=self.memory_beside)
        part._checked = self._checked
        return part

    @classmethod
    def of(cls, layout: Layout, numbers: np.ndarray, ids: Sequence[str], lengths: np.ndarray, **location: Any) -> Part:
        """A part without removed documents; `location` holds the fields that locate its rows, and their `sums`."""
        return cls(layout, numbers, lengths, Ids.encoded(ids), np.zeros(0, np.int64), **location)

    def to_row(self) -> tuple:
        """The row of the catalog, in the order of COLUMNS."""
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
        """`removed` as stored in the catalog."""
        return self.removed.astype("<i4").tobytes()

    @classmethod
    def from_row(cls, row: Sequence, removed: bytes, layout: Layout, segments: dict[str, Segment]) -> Part:
        """Invert `to_row` and `removed_bytes`; `segments` are by name. Raises a ValueError if the row is damaged."""
        first, segment, offset, numbers, lengths, id_ends, ids, sums, crc = row
        try:
            if _crc(row[:-1]) != crc:
                raise ValueError("its CRC-32 differs from the recorded one")
            if not sums.startswith(_SUMS):
                raise ValueError("it was written before version 2 of the format: rebuild the index")
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
                raise ValueError(f"its rows begin at byte {offset}, expected a multiple of {layout.all_nbytes}")
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(f"its part that starts at document number {first!r:.100}: {error}") from None
        part.crc = crc
        return part

    def without(self, positions: np.ndarray) -> Part:
        """The same part with more documents marked as removed; both share the record of verified blocks."""
        part = replace(self, removed=np.union1d(self.removed, positions).astype(np.int64))
        part._checked, part.crc = self._checked, self.crc
        return part

    def follows(self, other: Part) -> bool:
        """Whether its rows directly follow those of `other` in a segment, and neither part has removed documents."""
        return (
            self.segment is not None
            and self.layout.beside is None
            and (self.segment, self.offset) == (other.segment, other.end)
            and not len(self.removed) + len(other.removed)
        )

    @classmethod
    def merged(cls, parts: Sequence[Part]) -> Part:
        """Merge parts of which each follows the one before it. Their rows stay where they are."""
        first = parts[0]
        lengths, numbers = (np.concatenate([getattr(part, name) for part in parts]) for name in ("lengths", "numbers"))
        ids = Ids.joined([part.ids for part in parts])
        # If two parts share a block, the later one has the checksum of the content of both.
        nonempty = [part for part in parts if part.nbytes]
        blocks = [block_of(part.offset) for part in nonempty]
        sums = [part.sums[: stop - block] for part, (block, stop) in zip(nonempty, pairwise(blocks), strict=False)]
        sums += [part.sums for part in nonempty[-1:]]
        return cls(
            first.layout, numbers, lengths, ids, first.removed, np.concatenate([first.sums[:0], *sums]),
            first.segment, first.offset,
        )  # fmt: skip

    @property
    def live(self) -> np.ndarray:
        """Mask of documents that are not removed. Shape: [N], bool."""
        mask = np.ones(self.documents, dtype=bool)
        mask[self.removed] = False
        return mask

    def read_into(self, out: Held, start: int) -> None:
        """Fill `out` [n, width] with the rows of the tokens from `start` on.

        Raises a ValueError if the segment is too short or a checksum, verified on first read, does not match, and an
        OSError if the disk fails. Both name the file.
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
        view, offset = memoryview(b"") if begin == end else bytes_of(out), begin
        checked = self._checked.are_right(begin, end)
        with self._named():
            while offset < end:
                stop = end if checked else min(end, (offset // _CHECKED_AT_A_TIME + 1) * _CHECKED_AT_A_TIME)
                chunk = read_exactly(self.segment.descriptor, view[offset - begin : stop - begin], offset)
                if not checked:
                    self._checked.check(chunk, offset, self._bytes)
                offset = stop

    def check(self, view: memoryview, begin: int) -> None:
        """Verify this part's share of `view`, bytes of the segment from `begin` on, up to the part's end at least.

        Raises what `read_into` does.
        """
        first = max(begin, block_begin(self.offset))
        if first < self.end and self.nbytes:
            with self._named():
                self._checked.check(view[first - begin : self.end - begin], first, self._bytes)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Make errors name the segment."""
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
                raise ValueError(f"{self.segment.path} is damaged: it ends after {size} bytes, expected {self.end}")

    def is_lost(self) -> bool:
        """Whether rows did not reach the disk, as after a power failure: they are missing, or a sector is all zeros."""
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
            sectors = (content[start : start + _SECTOR_BYTES] for start in range(first, len(content), _SECTOR_BYTES))
            return any(bytes(len(sector)) == sector for sector in sectors)

    def _bytes(self, begin: int, end: int) -> memoryview:
        assert self.segment is not None
        return read_exactly(self.segment.descriptor, bytearray(end - begin), begin)

    def verify(self, path: Path) -> None:
        """Read and verify all rows again, including those of removed documents; `path` is the catalog's.

        Raises a ValueError that names the file if a checksum does not match, or a row is NaN or infinite.
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
    """The bytes of a CPU tensor; without a copy if it is contiguous."""
    return memoryview(values.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _crc(columns: Iterable) -> int:
    """CRC-32 over the columns of a row."""
    pieces = [column if isinstance(column, bytes) else repr(column).encode() for column in columns]
    return zlib.crc32(b"".join(pieces), zlib.crc32(repr([len(piece) for piece in pieces]).encode()))
