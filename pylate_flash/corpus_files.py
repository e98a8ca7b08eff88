"""Files of documents and of queries, read a line at a time and checked as they are read.

    corpus.jsonl         {"_id": "d1", "title": "optional", "text": "..."} per line, as in BEIR
    a folder             its corpus.jsonl, or else its .txt and .md files, a document each
    queries.jsonl        {"_id": "q1", "text": "..."} per line, as in BEIR
    queries.txt          a query per line

Everything is UTF-8. Errors name the file and the line.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

__all__ = ["Corpus", "Text", "read_lines", "read_queries"]

_SUFFIXES = (".txt", ".md")


class Text(NamedTuple):
    """A document or a query."""

    id: str
    text: str


class Corpus:
    """The documents of a file or folder; iterating reads them from the first on, one at a time.

    Parameters
    ----------
    path
        A file in the layout of BEIR's corpus.jsonl, a folder that holds a corpus.jsonl, or a folder of texts: there,
        every .txt and .md file at any depth is a document, and its path in the folder is its id, with "/" between the
        parts. Files and folders whose names begin with a dot are left out. A pipe (`/dev/fd/N`) is read to its end at
        once, into a temporary file.

    Raises
    ------
    ValueError
        If `path` is a folder without any of these files. While iterating: if a line is malformed, an id is empty or
        given twice, a text is not UTF-8, or there are no documents; the message names the file and the line.
    OSError
        If a file is missing or cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._files: list[Path] | None = None
        self._pipe: IO[bytes] | None = None
        if self.path.is_dir():
            if (self.path / "corpus.jsonl").is_file():
                self.path = self.path / "corpus.jsonl"
            else:
                self._files = _text_files(self.path)
        elif not stat.S_ISREG(self.path.stat().st_mode):
            self._pipe = tempfile.TemporaryFile()  # noqa: SIM115 -- it lives as long as this object
            with self.path.open("rb") as pipe:
                shutil.copyfileobj(pipe, self._pipe)
            self._pipe.flush()

    def __iter__(self) -> Iterator[Text]:
        return self._texts_of_files(self._files) if self._files is not None else self._texts_of_lines()

    def find(self, ids: Collection[str]) -> dict[str, str]:
        """Return the texts of some documents, by id; those that are not here are left out.

        Parameters
        ----------
        ids
            Which documents. The corpus is read as far as the last of them.

        Raises
        ------
        ValueError, OSError
            As while iterating.
        """
        wanted = set(ids)
        texts = iter(self)
        if self._files is not None:
            texts = self._texts_of_files(file for file in self._files if self._id(file) in wanted)
        found: dict[str, str] = {}
        while wanted and (text := next(texts, None)):
            if text.id in wanted:
                wanted.remove(text.id)
                found[text.id] = text.text
        return found

    def _open(self) -> IO[bytes]:
        return self.path.open("rb") if self._pipe is None else os.fdopen(os.dup(self._pipe.fileno()), "rb")

    def _texts_of_lines(self) -> Iterator[Text]:
        seen: dict[str, int] = {}
        with self._open() as file:
            # What shares its place with an earlier reader, a copied pipe and on some systems /dev/fd/N, is at its end.
            file.seek(0)
            for number, where, record in _records(file, self.path):
                id_ = _string(record, "_id", where, required=True)
                if not id_:
                    raise ValueError(f'{where}: the "_id" is empty')
                if id_ in seen:
                    raise ValueError(f'{where}: the "_id" {id_!r} was given before, in line {seen[id_]}')
                seen[id_] = number
                title, text = _string(record, "title", where), _string(record, "text", where, required=True)
                yield Text(id_, f"{title} {text}".strip())
        if not seen:
            raise ValueError(f"{self.path} is empty")

    def _id(self, file: Path) -> str:
        return file.relative_to(self.path).as_posix()

    def _texts_of_files(self, files: Iterable[Path]) -> Iterator[Text]:
        for file in files:
            id_ = self._id(file)
            _check_encodable(id_, f"{file}: the name")
            try:
                yield Text(id_, file.read_bytes().decode("utf-8-sig").strip())
            except UnicodeDecodeError as error:
                raise ValueError(f"{file}: not UTF-8 text ({error})") from None


def read_queries(lines: Iterable[bytes], name: str | os.PathLike[str]) -> list[Text]:
    """Read queries: one per line, or one JSON object per line if the first line that is not blank begins with "{".

    Parameters
    ----------
    lines
        The lines, for example a file opened for reading bytes. Blank ones are skipped.
    name
        What the messages call the file.

    Returns
    -------
    list of Text
        The id is the object's "_id" or, where lines are the queries themselves, the number of the line, from 1.

    Raises
    ------
    ValueError
        If a line is malformed, an id is given twice, a query is empty, or there is none; the message names the line.
    """
    queries: dict[str, str] = {}
    as_json: bool | None = None
    for number, where, line in read_lines(lines, name):
        if as_json is None:
            as_json = line.startswith("{")
        if as_json:
            record = _record(line, where)
            id_, text = (_string(record, key, where, required=True) for key in ("_id", "text"))
            if id_ in queries:
                raise ValueError(f'{where}: the "_id" {id_!r} was given before')
            if not text.strip():
                raise ValueError(f"{where}: the query is empty")
        else:
            id_, text = str(number), line
        queries[id_] = text
    if not queries:
        raise ValueError(f"{name} holds no queries")
    return [Text(*item) for item in queries.items()]


def _text_files(folder: Path) -> list[Path]:
    files = []
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [
            Path(parent, name)
            for name in names
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in _SUFFIXES
        ]
    if not files:
        raise ValueError(f"{folder} holds neither a corpus.jsonl nor .txt or .md files")
    return sorted(files)


def _raise(error: OSError) -> None:
    raise error


def read_lines(lines: Iterable[bytes], name: str | os.PathLike[str]) -> Iterator[tuple[int, str, str]]:
    """Number, "file, line n" and text of every line that is not blank."""
    for number, raw in enumerate(lines, start=1):
        where = f"{name}, line {number}"
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: not UTF-8 text ({error})") from None
        if line:
            yield number, where, line


def _records(lines: Iterable[bytes], name: str | os.PathLike[str]) -> Iterator[tuple[int, str, dict[str, Any]]]:
    for number, where, line in read_lines(lines, name):
        yield number, where, _record(line, where)


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON ({error})") from None
    except RecursionError:
        raise ValueError(f"{where}: not valid JSON (nested too deeply)") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(record).__name__}")
    return record


def _string(record: dict[str, Any], key: str, where: str, required: bool = False) -> str:
    """The value of a key; what is not required may be missing or null."""
    if required and key not in record:
        raise ValueError(f'{where}: the key "{key}" is missing; found {", ".join(record) or "none"}')
    value = record.get(key)
    if value is None and not required:
        return ""
    if not isinstance(value, str):
        raise ValueError(f'{where}: "{key}" must be a string, got {type(value).__name__}')
    _check_encodable(value, f'{where}: "{key}"')
    return value


def _check_encodable(text: str, what: str) -> None:
    """JSON may write half of a surrogate pair, which is no character and cannot be written anywhere else."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} is not valid Unicode text ({error.reason}, at character {error.start})") from None
