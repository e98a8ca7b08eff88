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

_INSERT = f"INSERT INTO parts VALUES ({', '.join('?' for _ in COLUMNS)})"
# Bytes of rows in memory at a time while they are moved.
_MOVED_BYTES = 16 << 20
# A part with fewer documents than this is small.
_SMALL = 1024


class Change:
    """A change in progress, under the catalog's write lock: the future `parts` of the index, and the `dropped` ones.

    `codec` is a new residual codec, or None. `undo` reverts what was appended to files.
    `written` are segments to which this change or earlier ones appended rows that may not be on the disk yet.
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
        self._open: Segment | None = None  # the segment that rows are appended to
        self._made = False  # whether a segment was created

    def append(
        self,
        layout: Layout,
        first: int,
        ids: Sequence[str],
        lengths: np.ndarray,
        rows: Iterable[torch.Tensor],
        metadata: list[dict[str, Any]] | None,
    ) -> None:
        """Append new documents to a segment."""
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
        """Store a codec in place of the current one."""
        self.codec = codec
        self._connection.execute("DELETE FROM codec")
        self._connection.execute("INSERT INTO codec VALUES (?)", (codec.content,))

    def remove_ids(self, ids: Iterable[str]) -> None:
        """Mark the documents with these ids as removed; unknown ids are ignored."""
        query = 'SELECT "#number" FROM documents WHERE "#id" = ?'
        numbers = [row for id_ in ids for row in self._connection.execute(query, (encoded_id(id_),))]
        self.remove(np.sort(np.array(numbers, np.int64).reshape(-1)))

    def remove(self, numbers: np.ndarray) -> None:
        """Mark the documents with these ascending numbers as removed; drop a part without live documents."""
        self._connection.executemany('DELETE FROM documents WHERE "#number" = ?', ((i,) for i in numbers.tolist()))
        for index, part in reversed([*enumerate(self.parts)]):
            low, high = np.searchsorted(numbers, (part.numbers[0], part.numbers[-1] + 1))
            if low == high:
                continue
            reduced = part.without(np.searchsorted(part.numbers, numbers[low:high]))
            if len(reduced.removed) == reduced.documents:
                self._replace([part], [])
                continue
            row = int(part.numbers[0]), reduced.removed_bytes
            self._connection.execute("INSERT OR REPLACE INTO removed VALUES (?, ?)", row)
            self.parts[index] = reduced
            self.dropped.append(part)

    def move(self, parts: list[Part], fresh: bool = False) -> None:
        """Rewrite the live documents of adjacent parts as one part, in a segment or, with `fresh`, in a new one."""
        if fresh and not self._in_memory:
            self._open_new()
        parts = [part for part in parts if len(part.removed) < part.documents]
        if not parts:
            return
        positions = [np.flatnonzero(part.live) for part in parts]
        numbers = np.concatenate([part.numbers[indices] for part, indices in zip(parts, positions, strict=True)])
        lengths = np.concatenate([part.lengths[indices] for part, indices in zip(parts, positions, strict=True)])
        ids = [id_ for part, indices in zip(parts, positions, strict=True) for id_ in part.ids.some(indices).to_list()]
        all_rows = [*parts, *(beside for part in parts if (beside := part.beside))]
        live = (rows for part in all_rows for rows in _live_rows(part))
        location = self._write(parts[0].layout, live, int(lengths.sum()))
        self._replace(parts, [Part.of(parts[0].layout, numbers, ids, lengths, **location)])

    def merge(self, most: int) -> None:
        """Merge the trailing small parts into one if there are more than `most`; rows stay where they are."""
        run: list[Part] = []
        for part in reversed(self.parts):
            if part.documents >= _SMALL or not (not run or run[-1].follows(part)):
                break
            run.append(part)
        if len(run) > most:
            self._replace(run[::-1], [Part.merged(run[::-1])])

    def flush(self) -> None:
        """Flush what was appended to segments to the disk."""
        for segment in self.written:
            os.fsync(segment.descriptor)
        if self._made:
            fsync_folder(self._folder)

    def _replace(self, old: list[Part], new: list[Part]) -> None:
        """Replace adjacent parts by new ones."""
        index = self.parts.index(old[0])
        span = int(old[0].numbers[0]), int(old[-1].numbers[0])
        for table in ("parts", "removed"):
            self._connection.execute(f"DELETE FROM {table} WHERE number BETWEEN ? AND ?", span)
        for part in new:
            self._insert(part)
        self.parts[index : index + len(old)] = new
        self.dropped += old

    def _insert(self, part: Part) -> None:
        self._connection.execute(_INSERT, part.to_row())

    def _write(self, layout: Layout, rows: Iterable[Held], count: int) -> dict[str, Any]:
        """Append `count` rows to the last segment, or to a new one if it is full; return their location and checksums.

        The 16-bit rows of `Layout.beside`, if any, follow all others.
        """
        if self._in_memory:
            pieces = (piece for piece in rows if len(piece))
            memory = _together(layout, pieces, count)
            beside = None if layout.beside is None else _together(layout.beside, pieces, count)
            return {"memory": memory, "memory_beside": beside, "sums": Sums().values()}
        if self._open is None:
            last = next((part.segment for part in reversed(self.parts) if part.segment is not None), None)
            self._open = last or self._open_new()
            if last is not None:
                self.undo.callback(_cut, last.written, os.fstat(last.written).st_size)
        segment = self._open
        # A killed writer may have left a partial row.
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
        for piece in rows:
            view = bytes_of(piece)  # type: ignore[arg-type]  # rows on disk are plain tensors
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
    """Copy the next `count` rows, as a piece may be the caller's memory; never hold two copies of all rows."""
    memory, end = layout.empty(0, torch.device("cpu")), 0
    while end < count:
        piece = next(pieces)
        if not end:
            memory = layout.empty(count, piece.device)
        copy_rows(memory[end : end + len(piece)], piece)
        end += len(piece)
    return memory


def _cut(descriptor: int, end: int) -> None:
    with contextlib.suppress(OSError):
        os.truncate(descriptor, end)


def _live_rows(part: Part) -> Iterator[Held]:
    """Yield the rows of a part's live documents in pieces."""
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
