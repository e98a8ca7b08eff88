"""`catalog.sqlite`, the record of an index. A write takes effect when SQLite commits it, and only then.

    state       one row of JSON (`state.py`)
    parts       documents that were added together (`parts.py`)
    removed     positions, within their parts, of documents that are marked as removed
    codec       the codec of residual codes (`codes.py`), if the index stores them
    documents   the number and the metadata (`filters.py`) of every id that is not removed

SQLite provides write locks, atomic writes and snapshots (WAL). It does not detect all damage: a write-ahead log with a
flipped bit ends before that bit, like one that was cut by a power failure. So the file `committed` records which
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
from .files import FULL, identity_of, is_a_link, open_regular, write_all
from .filters import DOCUMENTS, columns_of, matching, metadata_crc
from .parts import COLUMNS, SEGMENT_NAME, Part, Segment
from .state import State

_NAME = "catalog.sqlite"
# Files that SQLite writes beside it.
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
# Minimum seconds between flushes, which take milliseconds each: a run of additions does not spend its time on them, and
# a single addition is on the disk when it returns.
_FLUSH_SECONDS = 0.2


_OF_OTHERS: list[sqlite3.Connection] = []


class ConcurrentWriteError(RuntimeError):
    """Another process is writing to an index, or has written to it since it was opened here."""


class Catalog:
    """The catalog of the index in a folder or, with `in_memory`, of one that stores nothing on the disk."""

    def __init__(self, folder: Path, dtype: str, in_memory: bool = False) -> None:
        self.path, self._in_memory = folder / _NAME, in_memory
        self._memory = f"file:pylate_flash-{secrets.token_hex(8)}"  # name of the shared in-memory database
        self.state = State(dtype=dtype)  # as this object read or wrote it last
        self.codec: bytes | None = None  # content of the residual codec, as it was read last
        self.lost = 0  # number of last writes that were committed but are missing, as after a power failure
        self.unflushed: int | None = None  # number of the first document that may not be on the disk
        self.written: set[Segment] = set()  # segments whose end may not be on the disk
        self._connection: sqlite3.Connection | None = None
        self._process = 0
        self._file: tuple[int, int] | None = None  # identity of the file that is written to
        self._sound = False  # whether SQLite has checked its integrity
        self._flush_due = 0.0
        self._flushed = 0, 0  # generation, and number of the next document
        # Whether this turn is flushed to the disk when it ends; its segments must then be flushed before.
        self.flushes = False

    @property
    def exists(self) -> bool:
        """Whether the file exists, even if the index is empty."""
        return os.path.lexists(self.path)

    @property
    def nbytes(self) -> int:
        """Bytes of the catalog and of its write-ahead log."""
        total = 0
        for file in self.path.parent.glob(_NAME + "*"):
            # SQLite may delete its log meanwhile.
            with contextlib.suppress(FileNotFoundError):
                total += file.stat().st_size
        return total

    # Reading

    def read(self) -> tuple[State, list[tuple[tuple, bytes]]]:
        """Read the current state and rows of parts, each with its positions that are marked as removed."""
        # Read before the snapshot is taken: another writer may commit after it.
        committed = self._read_committed()
        with self._explained(), self._reading() as connection, _transaction(connection, "DEFERRED"):
            if not _has_tables(connection):
                # The first write was killed, unless the file is damaged.
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
            crc = parts_crc((part[-1], positions) for part, positions in rows)
        except TypeError:
            # A flipped bit may have changed the type of a column.
            crc = -1
        if removed or (len(rows), crc) != (state.parts, state.parts_crc):
            raise ValueError(
                f"{self.path} is damaged: it holds {len(rows)} parts, but its state records {state.parts} or "
                "different ones"
            )
        self._compare(state, *committed)
        self.state = state
        return state, rows

    def open(self, device: torch.device) -> tuple[Documents, list[Part], Codec | None]:
        """Return the documents, the last parts whose rows did not reach the disk (with a warning), and the codec.

        The codec of residual codes is on `device`, or None. Raises a ValueError that names a file that is missing,
        damaged, or of a newer format, and an OSError that names one that cannot be opened.
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
                    raise ValueError(f"it holds {count} documents, but its state records {state.documents}")
                lost = self._lost_of(parts)
                retained = parts[: len(parts) - len(lost)]
                for part in retained:
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
            return Documents(retained), lost, codec

    def _lost_of(self, parts: list[Part]) -> list[Part]:
        begin = self.unflushed
        new = [part for part in parts if begin is not None and part.numbers[-1] >= begin]
        self.written.update(part.segment for part in new if part.segment is not None)
        first = next((part for part in new if part.is_lost()), None)
        return [] if first is None else parts[parts.index(first) :]

    def loss_of(self, lost: Sequence[Part]) -> str:
        """The message about parts whose rows did not reach the disk."""
        return (
            f"{self.path}: the last {Documents(lost).count} documents that were added to the index are lost: they had "
            "not reached the disk, as after a power failure"
        )

    def check(self) -> None:
        """Run SQLite's integrity check; raise a ValueError that names the file if it is damaged, or writes are lost."""
        self._sound = False
        with self._explained(), self._reading() as connection:
            self._check_sound(connection)
        if self.lost:
            raise ValueError(f"{self._loss()}; the next change of the index continues without them")

    def holds(self, documents: Iterable[tuple[int, bytes]]) -> bool:
        """Whether its documents have these numbers and ids, in order, and metadata match their checksums."""
        with self._explained(), self._reading() as connection:
            if not _has_tables(connection):
                return not list(documents)
            rows = connection.execute('SELECT * FROM documents ORDER BY "#number"')
            names = [name for name, *_ in rows.description[3:]]
            for row, expected in itertools.zip_longest(rows, documents):
                if row is None or row[:2] != expected or row[2] != metadata_crc(dict(zip(names, row[3:], strict=True))):
                    return False
        return True

    def metadata_keys(self) -> list[str]:
        """The metadata keys of all documents."""
        with self._explained(), self._reading() as connection:
            return columns_of(connection)

    def numbers_where(self, expression: str, parameters: tuple | dict) -> np.ndarray:
        """The numbers of the current documents whose metadata satisfy an expression: `filters.matching`."""
        with self._explained(), self._reading(fresh=True) as connection:
            if not _has_tables(connection):
                return np.zeros(0, dtype=np.int64)
            return matching(connection, expression, parameters)

    # Writing

    @contextlib.contextmanager
    def turn(self, flush: bool = False) -> Iterator[sqlite3.Connection]:
        """Take the write lock. Writes, and a new `state`, are committed at the end, or rolled back on an error.

        With `flush`, or if a flush is due, they and all earlier writes are then on the disk. Raises a
        ConcurrentWriteError if another process is writing or has written since the catalog was read, and an OSError
        that names the folder if it cannot be written.
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
                reason += ". The index is unchanged: free disk space and repeat the change"
            raise OSError(error.errno, f"cannot write to the index in {folder}: {reason}") from error
        if self.state is not before:
            self._note_committed()

    def clear(self, dtype: str) -> list[Path]:
        """Empty the catalog, set another dtype, and return the segments that it no longer names."""
        with self.turn() as connection:
            for table in ("parts", "removed", "codec"):
                connection.execute(f"DELETE FROM {table}")
            # With its columns, the metadata keys.
            connection.execute("DROP TABLE documents")
            connection.execute(DOCUMENTS)
            state = self.state
            # Another process may still hold the documents of previous numbers.
            self.state = State(dtype=dtype, generation=state.generation + 1, next_number=state.next_number)
            # List them under the write lock: later, another process may be creating one.
            return list(self.path.parent.glob(SEGMENT_NAME))

    def compact(self) -> None:
        """Shrink the file to the size of its content."""
        with self._explained():
            connection = self._prepared()
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def delete(self) -> None:
        """Delete the catalog, even a damaged one."""
        self.close()
        for path in (*self.path.parent.glob(_NAME + "*"), self.path.with_name("committed")):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Flush and close the connection; it reopens on demand. An in-memory catalog stays open."""
        if self._connection is not None and not self._in_memory:
            self._connection = None
            self._closed()

    # SQLite

    def _connect(self, mode: str, seconds: float) -> sqlite3.Connection:
        """Connect, waiting at most `seconds` for others that lock the whole file briefly, as to recover or close it."""
        database = f"{self._memory}?mode=memory&cache=shared" if self._in_memory else f"{self.path.as_uri()}?{mode}"
        return sqlite3.connect(database, uri=True, timeout=seconds, isolation_level=None, check_same_thread=False)

    @contextlib.contextmanager
    def _reading(self, fresh: bool = False) -> Iterator[sqlite3.Connection]:
        """Yield a connection to read from: the writer's or, always with `fresh`, a temporary one."""
        if self._in_memory and fresh:
            self._prepared()
            with contextlib.closing(self._connect("", 10)) as connection:
                # With a shared cache, a reader would be refused while another thread writes.
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
                # On a read-only or full disk SQLite cannot create these files; without them, there is no other writer.
                if any(os.path.exists(self.path.with_name(name)) for name in _BESIDE):
                    raise
                connection.close()
                connection = self._connect("mode=ro&immutable=1", 10)
            yield connection
        finally:
            connection.close()

    def _refuse_links(self, *names: str) -> None:
        """Refuse symbolic links: SQLite would write through them."""
        for path in map(self.path.with_name, names):
            if path.is_symlink():
                raise is_a_link(path)

    def _prepared(self) -> sqlite3.Connection:
        """Return the writing connection, which stays open."""
        if self._connection is None or self._process != os.getpid():
            if self._in_memory:
                # After a fork, the child process has its own copy of the database.
                if self._connection is None:
                    connection = self._connect("", 0)
                    self._create(connection)
                    self._connection = connection
                return self._connection
            self.close()
            self._refuse_links(_NAME, *_BESIDE)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._committed = open_regular(self.path.with_name("committed"), os.O_RDWR | os.O_CREAT)
            connection = self._connect("mode=rwc", 0.2)
            # Python would close the connection only when its garbage collector runs.
            self._closed = weakref.finalize(self, _close, connection, self._committed, self.written, os.getpid())
            try:
                # A small addition writes four pages to the log; still smaller pages would slow down opening.
                connection.execute("PRAGMA page_size = 2048")
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA wal_autocheckpoint = 8000")
                connection.execute("PRAGMA synchronous = NORMAL")
                self._create(connection)
            except BaseException:
                self._closed()
                raise
            self._connection, self._process, self.flushes = connection, os.getpid(), False
            self._file = identity_of(self.path)
        elif not self._in_memory and identity_of(self.path) != self._file:
            # What is written to a deleted file is lost.
            raise OSError(errno.ENOENT, f"{_NAME} was deleted or replaced since it was opened here", str(self.path))
        return self._connection

    def _create(self, connection: sqlite3.Connection) -> None:
        """Create the tables if they do not exist."""
        with _transaction(connection, "IMMEDIATE"):
            if not _has_tables(connection):
                for statement in _SCHEMA.split(";"):
                    connection.execute(statement)
                connection.execute("INSERT INTO state VALUES (?, 0)", (State(dtype=self.state.dtype).to_json(),))
            # Indexes created before residual codes existed lack this table.
            connection.execute(_CODEC)

    def _check_sound(self, connection: sqlite3.Connection) -> None:
        """Check the integrity once: with a damaged table index, an existing id might not be found."""
        if self._sound:
            return
        (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise ValueError(f"{self.path} is damaged: {verdict}")
        self._sound = True

    def _read_committed(self) -> tuple[int, int, int]:
        """Read the file `committed`: the last committed generation, the last flushed one, and its next number."""
        path = self.path.with_name("committed")
        try:
            with open(open_regular(path), "rb", buffering=0) as file:
                content = file.read()
        except FileNotFoundError:
            return 0, 0, 0
        slots = [content[start : start + _SLOT_BYTES] for start in (0, _SLOT_BYTES)]
        records = [
            _COMMITTED.unpack(slot[:-4]) for slot in slots if len(slot) == _SLOT_BYTES and slot == _slot(slot[:-4])
        ]
        if content and not records:
            raise ValueError(f"{path} is damaged: its CRC-32 differs from the recorded one")
        return max(records, default=(0, 0, 0))

    def _compare(self, state: State, committed: int, flushed: int, number: int) -> None:
        if state.generation < flushed:
            raise ValueError(
                f"{self.path} is damaged: it is of generation {state.generation}, but generation {flushed} had "
                "reached the disk"
            )
        self._flushed = flushed, number
        self.unflushed = number if flushed < state.generation else None
        self.lost = max(0, committed - state.generation)
        if self.lost:
            warnings.warn(self._loss(), stacklevel=2)

    def _loss(self) -> str:
        return (
            f"{self.path}: the last {self.lost} writes to the index are lost: they had not reached the disk, as after "
            "a power failure"
        )

    def _note_committed(self) -> None:
        """Record in `committed` what SQLite committed. An error here is ignored: the write has taken effect."""
        self.lost = 0
        if self._in_memory:
            return
        if self.flushes:
            self._flush_due = time.monotonic() + _FLUSH_SECONDS
            self._flushed = self.state.generation, self.state.next_number
            self.written.clear()
        content = _slot(_COMMITTED.pack(self.state.generation, *self._flushed))
        with contextlib.suppress(OSError):
            # Overwrite the older of two slots, so that one is always complete if this is interrupted.
            write_all(self._committed, content, self.state.generation % 2 * _SLOT_BYTES)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Translate SQLite's errors into those of an index."""
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
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            if isinstance(error, sqlite3.IntegrityError):
                raise
            raise ValueError(f"{self.path} is damaged: {error}") from None


def _close(connection: sqlite3.Connection, descriptor: int, written: set[Segment], process: int) -> None:
    """Close what this process has opened; a forked copy of a connection must not be closed by SQLite."""
    os.close(descriptor)
    if process == os.getpid():
        for segment in written:
            # Before SQLite flushes the catalog that names them.
            with contextlib.suppress(OSError):
                os.fsync(segment.descriptor)
        connection.close()
    else:
        _OF_OTHERS.append(connection)


def _checked_name(name: object) -> str:
    # The name is used as a path and must not lead out of the folder.
    if not isinstance(name, str) or not re.fullmatch(SEGMENT_NAME.replace("*", "[0-9a-f]{12}"), name):
        raise ValueError(f"bad segment name {name!r:.100}")
    return name


def _slot(content: bytes) -> bytes:
    """A slot of `committed`: its content and a CRC-32."""
    return content + zlib.crc32(content).to_bytes(4, "little")


def parts_crc(parts: Iterable[tuple[int, bytes]], crc: int = 0) -> int:
    """CRC-32 over the CRCs and removed positions of all parts, continued from `crc`, that of the parts before."""
    for part, removed in parts:
        crc = zlib.crc32(removed, zlib.crc32(b"%d:%d" % (part, len(removed)), crc))
    return crc


def _has_tables(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'state'").fetchone())


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection, kind: str) -> Iterator[None]:
    try:
        # Inside, as an interrupt may arrive once the transaction has begun.
        connection.execute(f"BEGIN {kind}")
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
