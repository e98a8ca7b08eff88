"""The files and folders that commands read and write: refused before any work, and replaced whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..data.files import replace_file
from .common import UserError, explained

# What a folder may hold and still count as empty: the marks of a file system, of git and of other programs.
_NO_CONTENT = re.compile(r"\..*|lost\+found")


def check_file(path: Path) -> None:
    """There must be something to read, be it a file or a pipe such as /dev/fd/63, which can be read only once."""
    if os.path.isdir(path):
        raise UserError(f"{path} is a folder; name a file")
    if not os.path.exists(path):
        raise UserError(f"there is no file {path}")
    if not os.access(path, os.R_OK):
        raise UserError(f"{path} may not be read: permission denied")


def check_new_file(path: Path, option: str, *others: tuple[str, Path | None], overwrite: bool = True) -> None:
    """A file must be writable there, or in the place of what is there; nothing is left of the trial.

    `option` names it. The files of `others`, with their options' names, which are read or written too, are never
    replaced; anything else is if `overwrite` says so.
    """
    if os.path.isdir(path):
        raise UserError(f"{option}: {path} is a folder; name a file")
    if not os.path.isdir(path.parent):
        raise UserError(f"{option}: there is no folder {path.parent}")
    with explained(f"{option}: "):
        if not os.path.lexists(path):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            os.unlink(path)
        elif os.path.isfile(path):
            os.close(os.open(path, os.O_WRONLY))
        elif not os.path.exists(path):
            raise ValueError(f"{path} is a link to nothing")
    if is_standard_output(path) or (os.path.exists(path) and not os.path.isfile(path)):
        return
    for name, place in others:
        if place is not None and any(_is_same(path, file) for file in (place, place / "corpus.jsonl")):
            raise UserError(f"{option} {path} is the file of {name}; name another one")
    if os.path.isfile(path) and not overwrite:
        raise UserError(f"there is a file {path} already; --overwrite replaces it")


def _is_same(path: Path, other: Path) -> bool:
    """Whether two files are one, or will be when they are written."""
    if os.path.exists(path) and os.path.exists(other):
        return os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)


@contextmanager
def writable_folder(path: Path, option: str) -> Iterator[None]:
    """Make a folder and try to write into it; at the end, those that were made and stayed empty are removed."""
    missing = []
    place = path.absolute()
    while not os.path.lexists(place):
        missing.append(place)
        place = place.parent
    if not os.path.isdir(place):
        raise UserError(f"{option}: {place} is a file" + ("" if missing else "; name a folder"))
    made: list[Path] = []
    try:
        with explained(f"{option}: "):
            for folder in reversed(missing):
                folder.mkdir()
                made.append(folder)
            with tempfile.NamedTemporaryFile(dir=path, prefix=".pylate-flash-"):
                pass
        yield
    finally:
        for folder in reversed(made):
            with contextlib.suppress(OSError):
                folder.rmdir()


def other_files(folder: Path, *known: str) -> list[str]:
    """Names in a folder, if it exists, other than those given and those that any empty folder may have."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return [name for name in names if name not in known and not _NO_CONTENT.fullmatch(name)]


def write_file(path: Path, content: str | bytes, option: str) -> None:
    """Write a file so that it holds, at every moment, what it held before or all of the content."""
    with explained(f"{option}: "):
        data = content.encode() if isinstance(content, str) else content
        if is_standard_output(path):
            # Its own stream, because a second one would begin at the start of the file that it goes to.
            sys.stdout.flush()
            sys.stdout.buffer.write(data)
            return
        if os.path.exists(path) and not os.path.isfile(path):  # a pipe
            path.write_bytes(data)
            return
        replace_file(path, data)


def is_standard_output(path: Path) -> bool:
    """Whether what is written to a file comes out where results are printed."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(1))
    except (OSError, ValueError):
        return False
