"""Metadata of documents, stored as columns of the catalog's table of documents, and filters over them in SQLite.

The names of all other columns of that table begin with "#".
"""

from __future__ import annotations

import math
import re
import secrets
import sqlite3
import sys
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..data.files import is_utf_8

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
_LONGEST_PATTERN = 1000
_STEPS_BETWEEN_LOOKS = 100
# Strings, quoted names (SQLite takes three kinds of quotes), comments and parentheses; the first group is the content
# of double quotes.
_TOKENS = re.compile(
    r"""'(?:[^']|'')*'|"((?:[^"]|"")*)"|\[[^\]]*\]|`(?:[^`]|``)*`|--[^\n]*|/\*.*?(?:\*/|$)|[()]""", re.DOTALL
)
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
        entries = {
            str.__str__(key) if isinstance(key, str) else key: _checked_value(f"metadata[{i}][{key!r:.100}]", value)
            for key, value in (entry or {}).items()
        }
        checked.append(entries)
        names.update(entries)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"metadata: keys must be strings, got {name!r:.100}")
        if not name or name.startswith("#") or not name.isprintable():
            raise ValueError(f"metadata: {name!r:.100} cannot be a key: it must be printable, and not begin with '#'")
    return checked if names else None


def _checked_value(name: str, value: object) -> str | int | float | None:
    """The value as one of the types that SQLite returns, which subclasses such as `numpy.str_` are not."""
    if isinstance(value, str):
        text = str.__str__(value)
        if not is_utf_8(text):
            raise ValueError(f"{name} is {text!r:.100}, expected a string that UTF-8 can encode")
        return text
    if isinstance(value, (int, np.bool_, np.integer)):
        number = int(value)
        if not -(2**63) <= number < 2**63:
            raise ValueError(
                f"{name} is an integer of {number.bit_length()} bits and a sign, expected an integer of at most 64 bits"
            )
        return number
    if isinstance(value, (float, np.floating)):
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}, expected a finite number or None")
        return float(value)
    if value is not None:
        raise TypeError(f"{name} must be a string, a number, a truth value or None, got {type(value).__name__}")
    return None


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
    if not expression.strip():
        raise ValueError('where: the expression is empty, expected one such as "year >= 2020"')
    if not is_utf_8(expression):
        raise ValueError(f"where: {expression!r:.200} cannot be encoded in UTF-8")
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
    _check_form(expression, names)
    # A function that only the statement around the expression calls, as its name cannot be guessed.
    mark = f"mark_{secrets.token_hex(16)}"
    connection.create_function(mark, 0, lambda: -1)
    selects = marks = 0

    def allow(action: int, first: str | None, second: str | None, *rest: object) -> int:
        nonlocal selects, marks
        selects += action == sqlite3.SQLITE_SELECT
        marks += action == sqlite3.SQLITE_FUNCTION and second == mark
        allowed = (
            action == sqlite3.SQLITE_SELECT
            # SQLite passes "" for no column, as when the expression is a constant.
            or (action == sqlite3.SQLITE_READ and first == "documents" and second in ("", "#number", *names))
            or (action == sqlite3.SQLITE_FUNCTION and second in (*_FUNCTIONS, mark))
        )
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY

    end = time.monotonic() + FILTER_SECONDS
    connection.set_authorizer(allow)
    if sys.version_info >= (3, 11):
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_STRING)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, _LONGEST_PATTERN)
    connection.set_progress_handler(lambda: time.monotonic() > end, _STEPS_BETWEEN_LOOKS)
    try:
        # On a line of its own, so that a comment in it ends there. A limit of -1 is none.
        rows = connection.execute(
            f'SELECT "#number" FROM documents WHERE (\n{expression}\n) LIMIT {mark}()', parameters
        )
        numbers = np.fromiter((number for (number,) in rows), dtype=np.int64)
        # SQLite may prepare a statement twice, as for a pattern that is a parameter; a SELECT beyond its own is not
        # allowed.
        if selects != marks:
            raise ValueError(_NOTHING_ELSE)
        return numbers
    except (sqlite3.OperationalError, sqlite3.ProgrammingError, sqlite3.Warning, ValueError) as error:
        reason = str(error)
        if "interrupted" in reason:
            reason = f"it takes longer than {FILTER_SECONDS:g} s"
        elif reason.startswith('near ")"'):
            # The parenthesis after the expression, whose own ones are balanced.
            reason = "it is incomplete"
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


def _check_form(expression: str, names: list[str]) -> None:
    """Raise a ValueError unless parentheses are balanced, and names in double quotes known.

    A parenthesis too many would end the one around the expression, and SQLite takes an unknown name in double quotes
    for a string.
    """
    known, depth = {_folded(name) for name in names}, 0
    for token in _TOKENS.finditer(expression):
        name = token.group(1)
        if name is not None and _folded(name.replace('""', '"')) not in known:
            raise ValueError(f"where: no document has the key {name!r:.100}; {_known(names)}")
        depth += {"(": 1, ")": -1}.get(token.group(), 0)
        if depth < 0:
            break
    if depth:
        raise ValueError(f"where: {expression!r:.200} is not a valid filter: its parentheses are not balanced")


def _folded(name: str) -> str:
    """A name as SQLite compares it: it ignores the case of ASCII letters alone."""
    return "".join(character.lower() if character.isascii() else character for character in name)


def _known(names: list[str]) -> str:
    return f"keys are {', '.join(names)[:300]}" if names else "no document has metadata"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
