"""Metadata of documents, columns of the catalog's table of documents, and filters over them, expressions of SQLite.

The columns of the table that are none of metadata begin with "#".
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
# SQLite has no more than 2000 columns.
_MOST_COLUMNS = 1000
_LONGEST_EXPRESSION = 10_000
# A filter may come from a stranger: it ends after so many seconds, and calls none but these. SQLite looks at the time
# between its steps, of which `instr` is one: of long strings it would take minutes.
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
    """One dictionary of strings, numbers, truth values or None for each document, checked; None if none has any.

    It raises a TypeError of others, and a ValueError if there are not as many as documents, or a key cannot be the name
    of a column.
    """
    if metadata is None:
        return None
    if isinstance(metadata, (str, Mapping)) or not isinstance(metadata, Sequence):
        raise TypeError(
            f"metadata must be a list of dictionaries, one for each document, got {type(metadata).__name__}"
        )
    if len(metadata) != documents:
        raise ValueError(f"metadata must have one dictionary for each document, got {len(metadata)} for {documents}")
    found: list[dict[str, Any]] = []
    names: set[object] = set()
    for i, own in enumerate(metadata):
        if own is not None and not isinstance(own, Mapping):
            raise TypeError(f"metadata[{i}] must be a dictionary, got {type(own).__name__}")
        kept = {key: _checked_value(f"metadata[{i}][{key!r:.100}]", value) for key, value in (own or {}).items()}
        found.append(kept)
        names.update(kept)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"metadata: the key {name!r:.100} is no string")
        if not name or name.startswith("#") or not name.isprintable():
            raise ValueError(f"metadata: {name!r:.100} cannot be a key: it must be printable, and not begin with '#'")
    return found if names else None


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
    """The expression of a filter and its parameters, in order or by their names."""
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
    """The keys that documents have."""
    rows = connection.execute("PRAGMA table_info(documents)")
    return [name for _, name, *_ in rows if not name.startswith("#")]


def insert(
    connection: sqlite3.Connection, numbers: Iterable[int], ids: Iterable[bytes], metadata: list[dict] | None
) -> None:
    """Take in new documents; an IntegrityError says that an id is there.

    A ValueError says that keys differ by nothing but the case of letters, or that there are too many.
    """
    rows = zip(numbers, ids, strict=True)
    if metadata is None:
        connection.executemany('INSERT INTO documents ("#number", "#id") VALUES (?, ?)', rows)
        return
    names = columns_of(connection)
    known = {name.lower(): name for name in names}
    for name in sorted({key for own in metadata for key in own}):
        if known.setdefault(name.lower(), name) != name:
            raise ValueError(
                f"metadata: {name!r:.100} and {known[name.lower()]!r:.100} are one key, as capital letters do not count"
            )
        if name not in names:
            names.append(name)
            if len(names) > _MOST_COLUMNS:
                raise ValueError(f"metadata: all documents together have more than {_MOST_COLUMNS} keys")
            connection.execute(f"ALTER TABLE documents ADD COLUMN {_quoted(name)}")
    columns = ", ".join(map(_quoted, ["#number", "#id", "#crc", *names]))
    holes = ", ".join("?" * (len(names) + 3))
    connection.executemany(
        f"INSERT INTO documents ({columns}) VALUES ({holes})",
        ((*row, metadata_crc(own), *map(own.get, names)) for row, own in zip(rows, metadata, strict=True)),
    )


def metadata_crc(own: Mapping) -> int | None:
    """A CRC-32 of a document's metadata; None of none."""
    there = {key: own[key] for key in sorted(own) if own[key] is not None}
    return zlib.crc32(repr(there).encode("utf-8", "surrogatepass")) if there else None


def matching(connection: sqlite3.Connection, expression: str, parameters: tuple | dict) -> np.ndarray:
    """The numbers of the documents whose metadata fulfil an expression, ascending.

    The connection is of no use for anything else afterwards: it reads metadata, and nothing else. What is no expression
    over metadata, or takes too long, is a ValueError.
    """
    # A snapshot: where tables change meanwhile, SQLite prepares a statement again, and asks again what it may.
    connection.execute("BEGIN")
    names = columns_of(connection)
    selects = 0

    def allow(action: int, first: str | None, second: str | None, *rest: object) -> int:
        nonlocal selects
        # There is one, around the expression.
        selects += action == sqlite3.SQLITE_SELECT
        allowed = (
            (action == sqlite3.SQLITE_SELECT and selects == 1)
            # No column is "" to SQLite, as where the expression is a constant.
            or (action == sqlite3.SQLITE_READ and first == "documents" and second in ("", "#number", *names))
            or (action == sqlite3.SQLITE_FUNCTION and second in _FUNCTIONS)
        )
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY

    # A name in quotes that is none is a string to SQLite.
    for name in re.findall(r'"((?:[^"]|"")*)"', re.sub(r"'(?:[^']|'')*'", "", expression)):
        if name.replace('""', '"').lower() not in map(str.lower, names):
            raise ValueError(f"where: no document has the key {name!r:.100}; {_known(names)}")
    end = time.monotonic() + FILTER_SECONDS
    connection.set_authorizer(allow)
    if sys.version_info >= (3, 11):
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_STRING)
    connection.set_progress_handler(lambda: time.monotonic() > end, _STEPS_BETWEEN_LOOKS)
    try:
        # On lines of its own, where a comment ends.
        rows = connection.execute(f'SELECT "#number" FROM documents WHERE (\n{expression}\n)', parameters)
        return np.fromiter((number for (number,) in rows), dtype=np.int64)
    except (sqlite3.OperationalError, sqlite3.ProgrammingError, sqlite3.Warning, ValueError) as error:
        reason = str(error)
        if "interrupted" in reason:
            reason = f"it takes longer than {FILTER_SECONDS:g} s"
        elif reason == "not authorized":
            # As which of its errors SQLite refuses something, hangs on its version.
            reason = _NOTHING_ELSE
        raise ValueError(f"where: {expression!r:.200} is no filter: {reason}; {_known(names)}") from None
    except sqlite3.DataError:
        raise ValueError(
            f"where: {expression!r:.200} looks at a string of more than {_LONGEST_STRING} bytes; {_known(names)}"
        ) from None
    except sqlite3.DatabaseError as error:
        if "prohibited" not in str(error) and "not authorized" not in str(error):
            raise
        raise ValueError(f"where: {expression!r:.200} is no filter: {_NOTHING_ELSE}; {_known(names)}") from None


def _known(names: list[str]) -> str:
    return f"keys are {', '.join(names)[:300]}" if names else "no document has metadata"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
