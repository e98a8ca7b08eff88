"""`catalog.sqlite`: what an index consists of. A write takes effect when SQLite commits it, and only then.

    state       one row of JSON (`state.py`)
    parts       documents that were added together (`parts.py`)
    removed     places in parts of documents that count as removed
    codec       what makes residual codes (`codes.py`), of an index that keeps them
    documents   the number of every id that does not, and what metadata it has (`filters.py`)

SQLite sees to turns, atomic writes and snapshots (WAL). It does not see all damage: a write-ahead log of which a bit
has flipped ends before that bit, as one that was cut by a power failure does. So the file `committed` says which
generation was committed last, which one is known to be on the disk, and the number of the next document then.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import secrets
import sqlite3
import struct
import time
import warnings
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from .codes import Codec
from .documents import Documents
from .files import FULL, open_regular, write_all
from .filters import DOCUMENTS, matching, metadata_crc
from .parts import COLUMNS, SEGMENT_NAME, Part, Segment
from .state import State

__all__ = ["Catalog", "ConcurrentWriteError"]

_NAME = "catalog.sqlite"
# What SQLite writes beside it.
_BESIDE = (f"{_NAME}-wal", f"{_NAME}-shm", f"{_NAME}-journal")
_SCHEMA = f"""
CREATE TABLE state (record TEXT NOT NULL, generation INTEGER NOT NULL);
CREATE TABLE parts (number INTEGER PRIMARY KEY, {", ".join(COLUMNS[1:])});
CREATE TABLE removed (number INTEGER PRIMARY KEY, places BLOB NOT NULL);
{DOCUMENTS};
"""
_CODEC = "CREATE TABLE IF NOT EXISTS codec (content BLOB NOT NULL)"
_COMMITTED = struct.Struct("<QQQ")
_SLOT_BYTES = _COMMITTED.size + 4
# Flushing takes milliseconds. At most so often (in seconds) it is done, so that a run of additions does not spend its
# time on it, and a single addition is on the disk when it returns.
_FLUSH_SECONDS = 0.2


_OF_OTHERS: list[sqlite3.Connection] = []


class ConcurrentWriteError(RuntimeError):
    """Another process is writing to an index, or has written to it since it was opened here."""


class Catalog:
    """The catalog of the index in a folder, or with `in_memory` of one that keeps nothing on the disk."""

    def __init__(self, folder: Path, dtype: str, in_memory: bool = False) -> None:
        self.path, self._in_memory = folder / _NAME, in_memory
        self._memory = f"file:pylate_flash-{secrets.token_hex(8)}"  # what SQLite knows that in memory by
        self.state = State(dtype=dtype)  # as it was read or written last by this object
        self.codec: bytes | None = None  # that of the codes which it names, as it was read last
        self.lost = 0  # of the last writes, which were committed and are not there, as after a power failure
        self.unflushed: int | None = None  # number of the first document that may not be on the disk
        self.written: set[Segment] = set()  # of which the end may not be on the disk
        self._connection: sqlite3.Connection | None = None
        self._process = 0
        self._sound = False  # whether SQLite has been asked
        self._flush_due = 0.0
        self._flushed = 0, 0  # generation, and number of the next document
        # Whether what is written in this turn will be on the disk when it ends; then segments must be before.
        self.flushes = False

    @property
    def exists(self) -> bool:
        """Whether there is a file, be it one of an empty index."""
        return os.path.lexists(self.path)

    @property
    def nbytes(self) -> int:
        """Bytes of the catalog and of its write-ahead log."""
        return sum(file.stat().st_size for file in self.path.parent.glob(_NAME + "*"))

    # Reading

    def read(self) -> tuple[State, list[tuple[tuple, bytes]]]:
        """State and rows of parts, each with the places that count as removed, as they are on the disk now."""
        # Before the snapshot, which another writer may follow with a commit.
        committed = self._read_committed()
        with self._explained(), self._reading() as connection, _transaction(connection, "DEFERRED"):
            if not _has_tables(connection):
                # A first write was killed, if it is not damaged.
                self._compare(self.state, *committed)
                return self.state, []
            (record,) = connection.execute("SELECT record FROM state").fetchone() or ("",)
            try:
                state = State.parse(record)
            except ValueError as error:
                raise ValueError(f"{self.path} is damaged: {error}") from None
            parts = connection.execute("SELECT * FROM parts ORDER BY number").fetchall()
            removed = dict(connection.execute("SELECT number, places FROM removed"))
            self.codec = None
            if state.layout.nbits:
                (self.codec,) = connection.execute("SELECT content FROM codec").fetchone() or (None,)
        rows = [(part, removed.pop(part[0], b"")) for part in parts]
        try:
            crc = parts_crc((part[-1], places) for part, places in rows)
        except TypeError:
            # A flipped bit may have made a column one of another type.
            crc = -1
        if removed or (len(rows), crc) != (state.parts, state.parts_crc):
            raise ValueError(f"{self.path} is damaged: it holds {len(rows)} parts, and says {state.parts}, or others")
        self._compare(state, *committed)
        self.state = state
        return state, rows

    def open(self, device: torch.device) -> tuple[Documents, list[Part], Codec | None]:
        """The documents, and the last parts of which rows have not come to the disk, with a warning.

        And the codec that makes residual codes, on a device. It names a file that is missing, damaged, or of a newer
        format in a ValueError, and one that cannot be opened in an OSError.
        """
        folder = self.path.parent
        while True:
            state, rows = self.read()
            try:
                names = dict.fromkeys(row[1] for row, _ in rows)
                segments = {name: Segment(folder / _checked_name(name)) for name in names}
                parts = [Part.from_row(row, removed, state.layout, segments) for row, removed in rows]
                if state.layout.nbits and rows and self.codec is None:
                    raise ValueError("the codec of its residual codes is missing")
                codec = None if self.codec is None else Codec.parse(self.codec, device)
                count = Documents(parts).count
                if count != state.documents:
                    raise ValueError(f"it holds {count} documents, and says {state.documents}")
                lost = self._lost_of(parts)
                kept = parts[: len(parts) - len(lost)]
                for part in kept:
                    part.check_size()
            except (OSError, ValueError) as error:
                # A writer may have deleted segments after the catalog was read here.
                if self.read()[0].generation != state.generation:
                    continue
                if str(folder) in str(error):
                    raise
                raise ValueError(f"{self.path} is damaged: {error}") from None
            if lost:
                warnings.warn(self.loss_of(lost), stacklevel=4)
            return Documents(kept), lost, codec

    def _lost_of(self, parts: list[Part]) -> list[Part]:
        begin = self.unflushed
        new = [part for part in parts if begin is not None and part.numbers[-1] >= begin]
        self.written.update(part.segment for part in new if part.segment is not None)
        first = next((part for part in new if part.is_lost()), None)
        return [] if first is None else parts[parts.index(first) :]

    def loss_of(self, lost: Sequence[Part]) -> str:
        """What to say of parts of which rows have not come to the disk."""
        return (
            f"{self.path}: the last {Documents(lost).count} documents that were added to the index are lost, which had "
            "not reached the disk, as after a power failure"
        )

    def check(self) -> None:
        """Have SQLite read and compare all of it: if it is damaged, or writes are lost, a ValueError names it."""
        self._sound = False
        with self._explained(), self._reading() as connection:
            self._check_sound(connection)
        if self.lost:
            raise ValueError(f"{self._loss()}; the next change of the index takes it as it is")

    def holds(self, documents: Iterable[tuple[int, bytes]]) -> bool:
        """Whether number and id of its documents are these, in the order of addition, and metadata as they were."""
        with self._explained(), self._reading() as connection:
            if not _has_tables(connection):
                return not list(documents)
            there = connection.execute('SELECT * FROM documents ORDER BY "#number"')
            names = [name for name, *_ in there.description[3:]]
            for row, other in itertools.zip_longest(there, documents):
                if row is None or row[:2] != other or row[2] != metadata_crc(dict(zip(names, row[3:], strict=True))):
                    return False
        return True

    def numbers_where(self, expression: str, parameters: tuple | dict) -> np.ndarray:
        """The numbers of the documents, as they are now, whose metadata fulfil an expression: `filters.matching`."""
        with self._explained(), self._reading(fresh=True) as connection:
            if not _has_tables(connection):
                return np.zeros(0, dtype=np.int64)
            return matching(connection, expression, parameters)

    # Writing

    @contextlib.contextmanager
    def turn(self, flush: bool = False) -> Iterator[sqlite3.Connection]:
        """Take the turn to write: what is written, and a next `state`, takes effect at the end, or, on an error, not.

        It is on the disk then with `flush`, or if that is due; what was written before is as well. It raises a
        ConcurrentWriteError if another process is writing or has written since the catalog was read, and an OSError,
        which names the folder, if it cannot be written.
        """
        folder, before = self.path.parent, self.state
        try:
            with self._explained():
                connection = self._prepared()
                due = flush or time.monotonic() >= self._flush_due
                if due != self.flushes:
                    connection.execute(f"PRAGMA synchronous = {'FULL' if due else 'NORMAL'}")
                    self.flushes = due
                with _transaction(connection, "IMMEDIATE"):
                    if connection.execute("SELECT generation FROM state").fetchone() != (before.generation,):
                        raise ConcurrentWriteError(
                            f"the index in {folder} has been written to since it was opened here (generation "
                            f"{before.generation}): open it again and repeat the change"
                        )
                    self._check_sound(connection)
                    yield connection
                    if self.state is not before:
                        row = self.state.to_json(), self.state.generation
                        connection.execute("UPDATE state SET record = ?, generation = ?", row)
        except BaseException as error:
            self.state = before
            if not isinstance(error, OSError):
                raise
            reason = error.strerror or str(error)
            if error.errno in FULL:
                reason += ". The index is as it was: make room and repeat it"
            raise OSError(error.errno, f"cannot write to the index in {folder}: {reason}") from error
        if self.state is not before:
            self._note_committed()

    def clear(self, dtype: str) -> list[Path]:
        """Empty it, and have it keep another type; returns the segments that it no longer names."""
        with self.turn() as connection:
            for table in ("parts", "removed", "documents", "codec"):
                connection.execute(f"DELETE FROM {table}")
            self.state = State(dtype=dtype, generation=self.state.generation + 1)
            # Not later, when another process may be making one.
            return list(self.path.parent.glob(SEGMENT_NAME))

    def compact(self) -> None:
        """Make it as small as its content allows."""
        with self._explained():
            connection = self._prepared()
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def delete(self) -> None:
        """Delete it, damaged as it is."""
        self.close()
        for path in (*self.path.parent.glob(_NAME + "*"), self.path.with_name("committed")):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Flush it and close it; it opens again at need. One in memory stays."""
        if self._connection is not None and not self._in_memory:
            self._connection = None
            self._closed()

    # Of SQLite

    def _connect(self, mode: str, seconds: float) -> sqlite3.Connection:
        """Connect, to wait at most so long for others who have all of it for a moment, as to recover or to close it."""
        place = f"{self._memory}?mode=memory&cache=shared" if self._in_memory else f"{self.path.as_uri()}?{mode}"
        return sqlite3.connect(place, uri=True, timeout=seconds, isolation_level=None, check_same_thread=False)

    @contextlib.contextmanager
    def _reading(self, fresh: bool = False) -> Iterator[sqlite3.Connection]:
        """A connection that reads: that of the writer, or, always with `fresh`, one for this time."""
        if self._in_memory and fresh:
            self._prepared()
            with contextlib.closing(self._connect("", 10)) as connection:
                # Where a shared memory is, a reader would be refused while another thread writes.
                connection.execute("PRAGMA read_uncommitted = 1")
                yield connection
            return
        if not fresh and (self._in_memory or (self._connection is not None and self._process == os.getpid())):
            yield self._prepared()
            return
        self._refuse_links(*_BESIDE)
        connection = self._connect("mode=ro&immutable=1" if self.path.is_symlink() else "mode=rw", 10)
        try:
            try:
                _has_tables(connection)
            except sqlite3.OperationalError:
                # Where it may not be written to, or the disk is full, SQLite cannot make its files, and nobody has.
                if any(os.path.exists(self.path.with_name(name)) for name in _BESIDE):
                    raise
                connection.close()
                connection = self._connect("mode=ro&immutable=1", 10)
            yield connection
        finally:
            connection.close()

    def _refuse_links(self, *names: str) -> None:
        """SQLite would write through them, to files that an index from elsewhere has no business with."""
        for name in names:
            path = self.path.with_name(name)
            if path.is_symlink():
                raise OSError(errno.ELOOP, f"{name} is a symbolic link, and is not written through", str(path))

    def _prepared(self) -> sqlite3.Connection:
        """The connection that writes, which stays open."""
        if self._connection is None or self._process != os.getpid():
            if self._in_memory:
                # A copy of the process has its own, after a fork.
                if self._connection is None:
                    self._connection = self._connect("", 0)
                    self._create(self._connection)
                return self._connection
            self.close()
            self._refuse_links(_NAME, *_BESIDE)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._committed = open_regular(self.path.with_name("committed"), os.O_RDWR | os.O_CREAT)
            connection = self._connect("mode=rwc", 0.2)
            # Python's own end of a connection waits for its collector of cycles.
            self._closed = weakref.finalize(self, _close, connection, self._committed, self.written, os.getpid())
            try:
                # A small addition writes four pages to the log; yet smaller ones would slow opening.
                connection.execute("PRAGMA page_size = 2048")
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA wal_autocheckpoint = 8000")
                connection.execute("PRAGMA synchronous = NORMAL")
                self._create(connection)
            except BaseException:
                self._closed()
                raise
            self._connection, self._process, self.flushes = connection, os.getpid(), False
        return self._connection

    def _create(self, connection: sqlite3.Connection) -> None:
        """Make the tables, if they are not there."""
        with _transaction(connection, "IMMEDIATE"):
            if not _has_tables(connection):
                for statement in _SCHEMA.split(";"):
                    connection.execute(statement)
                connection.execute("INSERT INTO state VALUES (?, 0)", (State(dtype=self.state.dtype).to_json(),))
            # Indexes that were made before there were codes have none.
            connection.execute(_CODEC)

    def _check_sound(self, connection: sqlite3.Connection) -> None:
        """Once: an id that cannot be found may be there, where the index of a table has been damaged."""
        if self._sound:
            return
        (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise ValueError(f"{self.path} is damaged: {found}")
        self._sound = True

    def _read_committed(self) -> tuple[int, int, int]:
        """What the file `committed` says."""
        path = self.path.with_name("committed")
        try:
            with open(open_regular(path), "rb", buffering=0) as file:
                content = file.read()
        except FileNotFoundError:
            return 0, 0, 0
        slots = [content[start : start + _SLOT_BYTES] for start in (0, _SLOT_BYTES)]
        found = [
            _COMMITTED.unpack(slot[:-4]) for slot in slots if len(slot) == _SLOT_BYTES and slot == _slot(slot[:-4])
        ]
        if content and not found:
            raise ValueError(f"{path} is damaged: it has another CRC-32 than when it was written")
        return max(found, default=(0, 0, 0))

    def _compare(self, state: State, committed: int, flushed: int, number: int) -> None:
        if state.generation < flushed:
            raise ValueError(
                f"{self.path} is damaged: it is of generation {state.generation}, and {flushed} was on the disk"
            )
        self._flushed = flushed, number
        self.unflushed = number if flushed < state.generation else None
        self.lost = max(0, committed - state.generation)
        if self.lost:
            warnings.warn(self._loss(), stacklevel=2)

    def _loss(self) -> str:
        return (
            f"{self.path}: the last {self.lost} writes to the index are lost, which had not reached the disk, as after "
            "a power failure"
        )

    def _note_committed(self) -> None:
        """Say in `committed` what SQLite has committed. A failure here is none of the write, which has taken effect."""
        self.lost = 0
        if self._in_memory:
            return
        if self.flushes:
            self._flush_due = time.monotonic() + _FLUSH_SECONDS
            self._flushed = self.state.generation, self.state.next_number
            self.written.clear()
        content = _slot(_COMMITTED.pack(self.state.generation, *self._flushed))
        with contextlib.suppress(OSError):
            # In place of what was said before the last time, so that one is whole whenever this is interrupted.
            write_all(self._committed, content, self.state.generation % 2 * _SLOT_BYTES)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn SQLite's errors into those of an index."""
        folder = self.path.parent
        try:
            yield
        except sqlite3.OperationalError as error:
            message = str(error)
            if "locked" in message or "busy" in message:
                raise ConcurrentWriteError(
                    f"another process is writing to the index in {folder}: wait until it has finished"
                ) from None
            if "full" in message:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
            if "readonly" in message or "unable to open" in message or "I/O" in message:
                raise OSError(errno.EIO if "I/O" in message else errno.EACCES, message, str(self.path)) from None
            raise ValueError(f"{self.path} is damaged: {message}") from None
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.IntegrityError):
                raise
            raise ValueError(f"{self.path} is damaged: {error}") from None


def _close(connection: sqlite3.Connection, descriptor: int, written: set[Segment], process: int) -> None:
    """Close what a process has opened; a copy of it in another one, by a fork, is not SQLite's to close."""
    os.close(descriptor)
    if process == os.getpid():
        for segment in written:
            # Before SQLite flushes what names them.
            with contextlib.suppress(OSError):
                os.fsync(segment.descriptor)
        connection.close()
    else:
        _OF_OTHERS.append(connection)


def _checked_name(name: object) -> str:
    # It is used as a path: nothing outside the folder may be named.
    if not isinstance(name, str) or not re.fullmatch(SEGMENT_NAME.replace("*", "[0-9a-f]{12}"), name):
        raise ValueError(f"bad name {name!r:.100} of a segment")
    return name


def _slot(content: bytes) -> bytes:
    """What `committed` says, with its CRC-32."""
    return content + zlib.crc32(content).to_bytes(4, "little")


def parts_crc(parts: Iterable[tuple[int, bytes]], crc: int = 0) -> int:
    """A CRC-32 over those of all parts, and over the places in them that count as removed; `crc` is of those before."""
    for part, removed in parts:
        crc = zlib.crc32(removed, zlib.crc32(b"%d:%d" % (part, len(removed)), crc))
    return crc


def _has_tables(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'state'").fetchone())


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection, kind: str) -> Iterator[None]:
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
