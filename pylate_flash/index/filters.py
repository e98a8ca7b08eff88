"""Metadata of documents, stored as columns of the catalog's table of documents, and filters over them in SQLite.

The names of all other columns of that table begin with "#".
"""

from __future__ import annotations

import math
import re
import sqlite3
import sys
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["DOCUMENTS", "Metadata", "Where", "checked_metadata", "checked_where", "insert", "matching", "metadata_crc"]

DOCUMENTS = 'CREATE TABLE documents ("#number" INTEGER PRIMARY KEY, "#id" BLOB NOT NULL UNIQUE, "#crc" INTEGER)'
_Value = str | int | float | bool | None
Metadata = Mapping[str, _Value]
Where = str | tuple[str, Sequence[_Value] | Mapping[str, _Value]]
# SQLite allows at most 2000 columns.
_MOST_COLUMNS = 1000
_LONGEST_EXPRESSION = 10_000
# A filter may be untrusted: it is stopped after this many seconds, and may call only the functions below. SQLite checks
# the time between its steps only, and one step, such as `instr`, may take minutes for long strings.
FILTER_SECONDS = 10.0
_LONGEST_STRING = 256 << 10
_STEPS_BETWEEN_LOOKS = 1000
_NOTHING_ELSE = "it may read metadata and call plain functions, and nothing else"
_FUNCTIONS = {
    "abs", "coalesce", "date", "datetime", "glob", "ifnull", "iif", "instr", "julianday", "length", "like", "lower",
    "ltrim", "max", "min", "nullif", "round", "rtrim", "strftime", "substr", "substring", "time", "trim", "typeof",
    "unixepoch", "upper",
}  # fmt: skip


def checked_metadata(metadata: object, documents: int) -> list[dict[str, Any]] | None:
    """Check one dictionary of strings, numbers, booleans or None per document; return None if all are empty.

    Raises a TypeError for other types, and a ValueError if there are not as many as documents, or a key cannot be the
    name of a column.
    """
    if metadata is None:
        return None
    if isinstance(metadata, (str, Mapping)) or not isinstance(metadata, Sequence):
        raise TypeError(
            f"metadata must be a list of dictionaries, one for each document, got {type(metadata).__name__}"
        )
    if len(metadata) != documents:
        raise ValueError(f"metadata must have one dictionary for each document, got {len(metadata)} for {documents}")
    checked: list[dict[str, Any]] = []
    names: set[object] = set()
    for i, entry in enumerate(metadata):
        if entry is not None and not isinstance(entry, Mapping):
            raise TypeError(f"metadata[{i}] must be a dictionary, got {type(entry).__name__}")
        entries = {key: _checked_value(f"metadata[{i}][{key!r:.100}]", value) for key, value in (entry or {}).items()}
        checked.append(entries)
        names.update(entries)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"metadata: keys must be strings, got {name!r:.100}")
        if not name or name.startswith("#") or not name.isprintable():
            raise ValueError(f"metadata: {name!r:.100} cannot be a key: it must be printable, and not begin with '#'")
    return checked if names else None


def _checked_value(name: str, value: object) -> str | int | float | None:
    if isinstance(value, (bool, np.bool_)):
        return int(value)
    if isinstance(value, (np.integer, np.floating)):
        value = value.item()
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} is {value:.3g}, expected an integer of at most 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}, expected a finite number or None")
    if value is not None and not isinstance(value, (str, int, float)):
        raise TypeError(f"{name} must be a string, a number, a truth value or None, got {type(value).__name__}")
    return value


def checked_where(where: object) -> tuple[str, tuple | dict]:
    """Return the expression of a filter and its parameters, positional or named."""
    expression, parameters = where if isinstance(where, tuple) and len(where) == 2 else (where, ())
    named = isinstance(parameters, Mapping) and all(isinstance(name, str) for name in parameters)
    in_order = isinstance(parameters, Sequence) and not isinstance(parameters, str)
    if not isinstance(expression, str) or not (named or in_order):
        raise TypeError(
            'where must be an expression of SQLite such as "year >= 2020", or one with its parameters such as '
            f"('year >= ?', [2020]) or ('year >= :year', {{'year': 2020}}), got {where!r:.100}"
        )
    if len(expression) > _LONGEST_EXPRESSION:
        raise ValueError(f"where: {len(expression)} characters are too many, expected at most {_LONGEST_EXPRESSION}")
    if isinstance(parameters, Mapping):
        return expression, {k: _checked_value(f"where: parameter {k!r:.100}", value) for k, value in parameters.items()}
    return expression, tuple(_checked_value(f"where: parameter {i}", value) for i, value in enumerate(parameters))


def columns_of(connection: sqlite3.Connection) -> list[str]:
    """The metadata keys of all documents."""
    rows = connection.execute("PRAGMA table_info(documents)")
    return [name for _, name, *_ in rows if not name.startswith("#")]


def insert(
    connection: sqlite3.Connection, numbers: Iterable[int], ids: Iterable[bytes], metadata: list[dict] | None
) -> None:
    """Insert new documents. Raises an IntegrityError if an id already exists.

    Raises a ValueError if keys differ only by case, or there are too many.
    """
    rows = zip(numbers, ids, strict=True)
    if metadata is None:
        connection.executemany('INSERT INTO documents ("#number", "#id") VALUES (?, ?)', rows)
        return
    names = columns_of(connection)
    known = {name.lower(): name for name in names}
    for name in sorted({key for entry in metadata for key in entry}):
        if known.setdefault(name.lower(), name) != name:
            raise ValueError(
                f"metadata: {name!r:.100} and {known[name.lower()]!r:.100} are the same key: keys are case-insensitive"
            )
        if name not in names:
            names.append(name)
            if len(names) > _MOST_COLUMNS:
                raise ValueError(f"metadata: all documents together have more than {_MOST_COLUMNS} keys")
            connection.execute(f"ALTER TABLE documents ADD COLUMN {_quoted(name)}")
    columns = ", ".join(map(_quoted, ["#number", "#id", "#crc", *names]))
    placeholders = ", ".join("?" * (len(names) + 3))
    connection.executemany(
        f"INSERT INTO documents ({columns}) VALUES ({placeholders})",
        ((*row, metadata_crc(entry), *map(entry.get, names)) for row, entry in zip(rows, metadata, strict=True)),
    )


def metadata_crc(metadata: Mapping) -> int | None:
    """CRC-32 of a document's metadata; None if it has none."""
    present = {key: metadata[key] for key in sorted(metadata) if metadata[key] is not None}
    return zlib.crc32(repr(present).encode("utf-8", "surrogatepass")) if present else None


def matching(connection: sqlite3.Connection, expression: str, parameters: tuple | dict) -> np.ndarray:
    """Return the ascending numbers of the documents whose metadata satisfy an expression.

    The connection must not be used for anything else afterwards: it can only read metadata. Raises a ValueError if this
    is not an expression over metadata, or takes too long.
    """
    # Read a snapshot: if tables change meanwhile, SQLite prepares the statement again and calls the authorizer again.
    connection.execute("BEGIN")
    names = columns_of(connection)
    selects = 0

    def allow(action: int, first: str | None, second: str | None, *rest: object) -> int:
        nonlocal selects
        # Only one SELECT is allowed: the one around the expression.
        selects += action == sqlite3.SQLITE_SELECT
        allowed = (
            (action == sqlite3.SQLITE_SELECT and selects == 1)
            # SQLite passes "" for no column, as when the expression is a constant.
            or (action == sqlite3.SQLITE_READ and first == "documents" and second in ("", "#number", *names))
            or (action == sqlite3.SQLITE_FUNCTION and second in _FUNCTIONS)
        )
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY

    # SQLite takes an unknown name in double quotes for a string, so refuse it here.
    for name in re.findall(r'"((?:[^"]|"")*)"', re.sub(r"'(?:[^']|'')*'", "", expression)):
        if name.replace('""', '"').lower() not in map(str.lower, names):
            raise ValueError(f"where: no document has the key {name!r:.100}; {_known(names)}")
    end = time.monotonic() + FILTER_SECONDS
    connection.set_authorizer(allow)
    if sys.version_info >= (3, 11):
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_STRING)
    connection.set_progress_handler(lambda: time.monotonic() > end, _STEPS_BETWEEN_LOOKS)
    try:
        # On a line of its own, so that a comment in it ends there.
        rows = connection.execute(f'SELECT "#number" FROM documents WHERE (\n{expression}\n)', parameters)
        return np.fromiter((number for (number,) in rows), dtype=np.int64)
    except (sqlite3.OperationalError, sqlite3.ProgrammingError, sqlite3.Warning, ValueError) as error:
        reason = str(error)
        if "interrupted" in reason:
            reason = f"it takes longer than {FILTER_SECONDS:g} s"
        elif reason == "not authorized":
            # Which error SQLite raises for a denied action depends on its version.
            reason = _NOTHING_ELSE
        raise ValueError(f"where: {expression!r:.200} is not a valid filter: {reason}; {_known(names)}") from None
    except sqlite3.DataError:
        raise ValueError(
            f"where: {expression!r:.200} looks at a string of more than {_LONGEST_STRING} bytes; {_known(names)}"
        ) from None
    except sqlite3.DatabaseError as error:
        if "prohibited" not in str(error) and "not authorized" not in str(error):
            raise
        raise ValueError(
            f"where: {expression!r:.200} is not a valid filter: {_NOTHING_ELSE}; {_known(names)}"
        ) from None


def _known(names: list[str]) -> str:
    return f"keys are {', '.join(names)[:300]}" if names else "no document has metadata"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
