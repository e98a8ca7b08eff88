"""Readers of document and query files, line by line, with checks.

    corpus.jsonl         {"_id": "d1", "title": "optional", "text": "...", "metadata": {"year": 2020}} per line, as in
                         BEIR; "metadata" is optional too
    a folder             its corpus.jsonl, or else its .txt and .md files, one document each
    queries.jsonl        {"_id": "q1", "text": "..."} per line, as in BEIR
    queries.txt          one query per line
    qrels/<split>.tsv    query id, document id and relevance per line, tab-separated

Everything is UTF-8. Errors name the file and the line.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import reprlib
import shutil
import stat
import tempfile
from collections.abc import Collection, Container, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

_SUFFIXES = (".txt", ".md")
# JSON may escape an unpaired surrogate, which no file and no tokenizer accepts; Python uses one for each byte of a file
# name that is not UTF-8.
_SURROGATE = re.compile("[\ud800-\udfff]")
# ranx stores relevances in 64 bits, and computes powers and sums of them.
_INTEGER = re.compile("[+-]?[0-9]{1,9}")
_NUMBER = re.compile("[+-]?[0-9.]")


def is_utf_8(text: str) -> bool:
    """Whether UTF-8 can encode a text, which a lone surrogate prevents; tokenizers take no other texts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Text(NamedTuple):
    """A query."""

    id: str
    text: str


class Document(NamedTuple):
    """A document: its text with the title prepended, its body without title, and the metadata for search filters.

    Lists and objects in the metadata are stored as JSON text.
    """

    id: str
    text: str
    body: str
    metadata: dict[str, Any]


class Corpus:
    """The documents of a file or folder; each iteration reads them from the start, one at a time.

    Parameters
    ----------
    path
        A file in the format of BEIR's corpus.jsonl, a folder with a corpus.jsonl, or a folder of texts: every .txt and
        .md file at any depth is a document, with its relative path as id, separated by "/". Files and folders whose
        names begin with a dot are ignored. A pipe (`/dev/fd/N`) is read to its end immediately, into a temporary file.

    Raises
    ------
    ValueError
        If `path` is a folder without any of these files. While iterating: if a line is malformed, an id is empty or
        duplicated, a text is not UTF-8, or there are no documents; the message names the file and the line.
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

    def __iter__(self) -> Iterator[Document]:
        return self._read_lines() if self._files is None else self._read_files(self._files)

    def find(self, ids: Collection[str]) -> dict[str, str]:
        """Return the texts of these documents by id; unknown ids are left out.

        The corpus is read up to the last of them, with the errors of iteration.
        """
        remaining = set(ids)
        documents = iter(self)
        if self._files is not None:
            documents = self._read_files(file for file in self._files if self._id(file) in remaining)
        texts: dict[str, str] = {}
        while remaining and (document := next(documents, None)):
            if document.id in remaining:
                remaining.remove(document.id)
                texts[document.id] = document.text
        return texts

    def _read_lines(self) -> Iterator[Document]:
        opened = self.path.open("rb") if self._pipe is None else os.fdopen(os.dup(self._pipe.fileno()), "rb")
        with opened as file:
            # A file sharing its offset with an earlier reader (a copied pipe, on some systems /dev/fd/N) is at its end.
            file.seek(0)
            for id_, record in read_records(file, self.path):
                metadata = {
                    key: json.dumps(value) if isinstance(value, (list, dict)) else value
                    for key, value in (record.get("metadata") or {}).items()
                }
                text, body = f"{record.get('title') or ''} {record['text']}".strip(), record["text"].strip()
                yield Document(id_, text, body, metadata)

    def _id(self, file: Path) -> str:
        return file.relative_to(self.path).as_posix()

    def _read_files(self, files: Iterable[Path]) -> Iterator[Document]:
        for file in files:
            id_ = self._id(file)
            if _SURROGATE.search(id_):
                raise ValueError(f"{ascii(str(file))}: the name is not UTF-8 text")
            if not stat.S_ISREG(file.stat().st_mode):
                # Opening a pipe would block until it has a writer.
                raise ValueError(f"{file} is not a regular file; expected only regular files in the folder")
            text = _decoded(file.read_bytes(), file, str(file)).strip()
            yield Document(id_, text, text, {})


def read_queries(lines: Iterable[bytes], name: str | os.PathLike[str]) -> list[Text]:
    """Read queries: one per line, or one JSON object per line if the first non-blank line begins with "{".

    `lines` is, for example, a file opened in binary mode; `name` names it in messages. The id is the object's "_id" or,
    for plain text lines, the line number, from 1. A ValueError names a malformed line, a duplicate id or an empty
    query, or says that there are no queries.
    """
    numbered = iter(read_lines(lines, name))
    first = next(numbered, None)
    if first is None:
        raise ValueError(f"{name} holds no queries")
    numbered = itertools.chain([first], numbered)
    if not first[2].lstrip().startswith("{"):
        return [Text(str(number), line.strip()) for number, _, line in numbered]
    queries = []
    for where, record in _records(numbered):
        if not record["text"].strip():
            raise ValueError(f"{where}: the query is empty")
        queries.append(Text(record["_id"], record["text"]))
    return queries


def read_records(lines: Iterable[bytes], name: str | os.PathLike[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read corpus.jsonl or queries.jsonl: the id and the object of every non-blank line.

    A ValueError names a malformed line (it must hold an object, with strings for "_id", "text" and, if present and not
    null, "title", and an object for "metadata"), or an empty or duplicate id, or says that there are no records.
    """
    record = None
    for _, record in _records(read_lines(lines, name)):
        yield record["_id"], record
    if record is None:
        raise ValueError(f"{name} is empty")


def read_lines(lines: Iterable[bytes], name: str | os.PathLike[str]) -> Iterator[tuple[int, str, str]]:
    """Read UTF-8 text: for every non-blank line its number, "file, line n" for messages, and its text.

    A ValueError names a line that is not UTF-8, or says that the file is compressed.
    """
    for number, raw in enumerate(lines, start=1):
        where = f"{name}, line {number}"
        line = _decoded(raw, name, where, begins=number == 1)
        if line.strip():
            yield number, where, line.rstrip("\r\n")


def read_qrels(file: Path, queries: Container[str], ids: Container[str]) -> Iterator[tuple[str, str, str, int]]:
    """Yield the location in the file, query id, document id and relevance of every judgement."""
    first, judgements = True, 0
    with file.open("rb") as lines:
        for _, where, line in read_lines(lines, file):
            fields = line.split("\t")
            if len(fields) != 3:
                raise ValueError(
                    f"{where}: expected query id, document id and relevance, tab-separated; got {len(fields)} field(s)"
                )
            relevance = fields[2].strip()
            if _INTEGER.fullmatch(relevance):
                judgements += 1
                yield where, fields[0], fields[1], int(relevance)
            elif not (first and relevance) or _NUMBER.match(relevance) or (fields[0] in queries and fields[1] in ids):
                digits = " of at most 9 digits" if relevance.lstrip("+-").isdigit() else ""
                raise ValueError(f"{where}: the relevance must be an integer{digits}, got {reprlib.repr(fields[2])}")
            first = False
    if not judgements:
        raise ValueError(f"{file} holds no judgements")


def _decoded(raw: bytes, name: str | os.PathLike[str], where: str, begins: bool = True) -> str:
    """Decode UTF-8 bytes; strips a byte order mark if `begins`, at the start of a file."""
    try:
        return raw.decode("utf-8-sig" if begins else "utf-8")
    except UnicodeDecodeError as error:
        if begins and raw.startswith(b"\x1f\x8b"):
            raise ValueError(f"{name} is compressed by gzip, but is read as plain text: gunzip it first") from None
        raise ValueError(f"{where}: not UTF-8 text ({error})") from None


def json_object(line: str, where: str) -> dict[str, Any]:
    """Parse a line as a JSON object; raises a ValueError that begins with `where` otherwise."""
    try:
        value = json.loads(line)
    except ValueError as error:  # also raised for a number with thousands of digits
        raise ValueError(f"{where}: not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{where}: not valid JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def _records(lines: Iterable[tuple[int, str, str]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The location and the checked object of every line."""
    seen: dict[str, int] = {}
    for number, where, line in lines:
        record = json_object(line, where)
        for key in ("_id", "text"):
            if key not in record:
                raise ValueError(f'{where}: the key "{key}" is missing; found {", ".join(record) or "none"}')
        for key in ("_id", "title", "text"):
            value = record.get(key)
            if not isinstance(value, str) and not (key == "title" and value is None):
                raise ValueError(f'{where}: "{key}" must be a string, got {reprlib.repr(value)}')
            if value is not None and _SURROGATE.search(value):
                raise ValueError(f'{where}: "{key}" holds an unpaired surrogate, which is not a character')
        if not isinstance(record.get("metadata"), (dict, type(None))):
            raise ValueError(f'{where}: "metadata" must be an object, got {reprlib.repr(record["metadata"])}')
        id_ = record["_id"]
        if not id_:
            raise ValueError(f'{where}: the "_id" is empty')
        if id_ in seen:
            raise ValueError(f'{where}: the "_id" {id_!r} was given before, in line {seen[id_]}')
        seen[id_] = number
        yield where, record


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


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically: it always holds its old or its full new content; existing permissions are kept."""
    # Imported here, as it imports torch, which takes seconds.
    from ..ops.tensor_files import permissions_of

    target = path.resolve()
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:32]}-")
    try:
        with open(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        # A temporary file is readable by its owner only.
        os.chmod(temporary, permissions_of(target))
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
