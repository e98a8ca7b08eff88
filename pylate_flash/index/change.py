"""A change of an index: rows are appended to segments and flushed, then SQLite commits what counts."""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .checksums import Sums, block_begin
from .codes import Codec
from .columns import Held, copy_rows
from .files import fsync_folder, write_all
from .filters import insert
from .ids import encoded_id
from .layout import Layout
from .parts import COLUMNS, SEGMENT_NAME, Part, Segment, bytes_of

__all__ = ["Change"]

_INSERT = f"INSERT INTO parts VALUES ({', '.join('?' for _ in COLUMNS)})"
# Of rows that are moved, so much is in memory.
_MOVED_BYTES = 16 << 20
# A part of fewer documents is small.
_SMALL = 1024


class Change:
    """What becomes of an index, while its catalog is being written: `parts` that there will be, and `dropped` ones.

    `codec` is what will make codes from now on, if that is new. `undo` takes back what was appended.
    `written` are segments to which this change or ones before appended rows that may not be on the disk yet.
    """

    def __init__(
        self,
        folder: Path,
        connection: sqlite3.Connection,
        parts: list[Part],
        segment_bytes: int,
        written: Iterable[Segment],
        in_memory: bool,
    ) -> None:
        self.parts, self.dropped, self.written = list(parts), [], set(written)  # type: ignore[var-annotated]
        self._folder, self._connection, self._segment_bytes = folder, connection, segment_bytes
        self._in_memory = in_memory
        self.codec: Codec | None = None
        self.undo = contextlib.ExitStack()
        self._open: Segment | None = None  # what is appended to
        self._made = False  # whether there is a new segment

    def append(
        self,
        layout: Layout,
        first: int,
        ids: Sequence[str],
        lengths: np.ndarray,
        rows: Iterable[torch.Tensor],
        metadata: list[dict[str, Any]] | None,
    ) -> None:
        """Write new documents to a segment."""
        numbers = np.arange(first, first + len(ids))
        part = Part.of(layout, numbers, ids, lengths, **self._write(layout, rows, int(lengths.sum())))
        try:
            insert(self._connection, numbers.tolist(), map(encoded_id, ids), metadata)
        except sqlite3.IntegrityError:
            query = 'SELECT 1 FROM documents WHERE "#id" = ? AND "#number" < ?'
            known = (id_ for id_ in ids if self._connection.execute(query, (encoded_id(id_), first)).fetchone())
            raise ValueError(
                f"documents_ids: {next(known, ids[0])!r:.100} is already in the index in {self._folder}; replace=True "
                "replaces it"
            ) from None
        self._insert(part)
        self.parts.append(part)

    def take_codec(self, codec: Codec) -> None:
        """Keep a codec in place of the one there."""
        self.codec = codec
        self._connection.execute("DELETE FROM codec")
        self._connection.execute("INSERT INTO codec VALUES (?)", (codec.content,))

    def remove_ids(self, ids: Iterable[str]) -> None:
        """Mark the documents of these ids as removed, as far as there are any."""
        query = 'SELECT "#number" FROM documents WHERE "#id" = ?'
        there = [row for id_ in ids for row in self._connection.execute(query, (encoded_id(id_),))]
        self.remove(np.sort(np.array(there, np.int64).reshape(-1)))

    def remove(self, numbers: np.ndarray) -> None:
        """Mark the documents of these numbers, which ascend, as removed; a part of which nothing is left is dropped."""
        self._connection.executemany('DELETE FROM documents WHERE "#number" = ?', ((i,) for i in numbers.tolist()))
        for at, part in reversed([*enumerate(self.parts)]):
            low, high = np.searchsorted(numbers, (part.numbers[0], part.numbers[-1] + 1))
            if low == high:
                continue
            less = part.without(np.searchsorted(part.numbers, numbers[low:high]))
            if len(less.removed) == less.documents:
                self._replace([part], [])
                continue
            row = int(part.numbers[0]), less.removed_bytes
            self._connection.execute("INSERT OR REPLACE INTO removed VALUES (?, ?)", row)
            self.parts[at] = less
            self.dropped.append(part)

    def move(self, parts: list[Part], fresh: bool = False) -> None:
        """Write the documents of neighbouring parts that are not removed to a segment, with `fresh` to a new one."""
        if fresh and not self._in_memory:
            self._open_new()
        parts = [part for part in parts if len(part.removed) < part.documents]
        if not parts:
            return
        places = [np.flatnonzero(part.live) for part in parts]
        numbers = np.concatenate([part.numbers[some] for part, some in zip(parts, places, strict=True)])
        lengths = np.concatenate([part.lengths[some] for part, some in zip(parts, places, strict=True)])
        ids = [id_ for part, some in zip(parts, places, strict=True) for id_ in part.ids.some(some).to_list()]
        all_rows = [*parts, *(beside for part in parts if (beside := part.beside))]
        live = (rows for part in all_rows for rows in _live_rows(part))
        place = self._write(parts[0].layout, live, int(lengths.sum()))
        self._replace(parts, [Part.of(parts[0].layout, numbers, ids, lengths, **place)])

    def merge(self, most: int) -> None:
        """Put one part in the place of the last ones, if more than `most` are small; rows stay where they are."""
        run: list[Part] = []
        for part in reversed(self.parts):
            if part.documents >= _SMALL or not (not run or run[-1].follows(part)):
                break
            run.append(part)
        if len(run) > most:
            self._replace(run[::-1], [Part.merged(run[::-1])])

    def flush(self) -> None:
        """Have on the disk what was appended to segments."""
        for segment in self.written:
            os.fsync(segment.descriptor)
        if self._made:
            fsync_folder(self._folder)

    def _replace(self, old: list[Part], new: list[Part]) -> None:
        """Put parts in the place of neighbouring ones."""
        at = self.parts.index(old[0])
        span = int(old[0].numbers[0]), int(old[-1].numbers[0])
        for table in ("parts", "removed"):
            self._connection.execute(f"DELETE FROM {table} WHERE number BETWEEN ? AND ?", span)
        for part in new:
            self._insert(part)
        self.parts[at : at + len(old)] = new
        self.dropped += old

    def _insert(self, part: Part) -> None:
        self._connection.execute(_INSERT, part.to_row())

    def _write(self, layout: Layout, rows: Iterable[Held], count: int) -> dict[str, Any]:
        """Append so many rows to the segment of the last part, or to a new one if it is full; where they are.

        Where there are rows beside, they come after all others.
        """
        if self._in_memory:
            pieces = (some for some in rows if len(some))
            memory = _together(layout, pieces, count)
            beside = None if layout.beside is None else _together(layout.beside, pieces, count)
            return {"memory": memory, "memory_beside": beside, "sums": Sums().values()}
        if self._open is None:
            last = next((part.segment for part in reversed(self.parts) if part.segment is not None), None)
            self._open = last or self._open_new()
            if last is not None:
                self.undo.callback(_cut, last.written, os.fstat(last.written).st_size)
        segment = self._open
        # A writer that was killed may have left half a row.
        offset = -(-os.fstat(segment.written).st_size // layout.all_nbytes) * layout.all_nbytes
        if offset >= self._segment_bytes:
            segment, offset = self._open_new(), 0
        descriptor = segment.written
        if segment.tail.end == offset:
            sums = segment.tail.following()
        else:
            begin = block_begin(offset)
            head = os.pread(descriptor, offset - begin, begin).ljust(offset - begin, b"\0")
            for part in self.parts:
                if part.segment is segment:
                    part.check(memoryview(head), begin)
            sums = Sums(offset, head)
        end = offset
        for some in rows:
            view = bytes_of(some)  # type: ignore[arg-type]  # those of the disk are as it keeps them
            if len(view):
                sums.update(view)
                write_all(descriptor, view, end)
                end += len(view)
        segment.tail = sums
        self.written.add(segment)
        return {"segment": segment, "offset": offset, "sums": sums.values()}

    def _open_new(self) -> Segment:
        path = self._folder / SEGMENT_NAME.replace("*", secrets.token_hex(6))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self.undo.callback(path.unlink, missing_ok=True)
        self._open, self._made = Segment(path, descriptor), True
        return self._open


def _together(layout: Layout, pieces: Iterator[Held], count: int) -> Held:
    """The next so many rows. A copy, as a piece may be the caller's own; there are never two of all."""
    memory, end = layout.empty(0, torch.device("cpu")), 0
    while end < count:
        some = next(pieces)
        if not end:
            memory = layout.empty(count, some.device)
        copy_rows(memory[end : end + len(some)], some)
        end += len(some)
    return memory


def _cut(descriptor: int, end: int) -> None:
    with contextlib.suppress(OSError):
        os.truncate(descriptor, end)


def _live_rows(part: Part) -> Iterator[Held]:
    """The rows of those documents of a part that do not count as removed, in pieces."""
    live, ends = part.live, part.lengths.cumsum()
    edges = np.flatnonzero(np.diff(live, prepend=False, append=False)).tolist()
    limit = max(1, _MOVED_BYTES // part.layout.nbytes)
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        begin, end = int(ends[first] - part.lengths[first]), int(ends[last - 1])
        if part.memory is not None:
            yield part.memory[begin:end]
            continue
        for start in range(begin, end, limit):
            rows = torch.empty(min(limit, end - start), part.layout.width, dtype=part.layout.dtype)
            part.read_into(rows, start)
            yield rows
