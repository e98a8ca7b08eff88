"""The files and folders that commands read and write: checked before any work, and replaced atomically."""

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

# Entries that an empty folder may have: hidden files, and lost+found of a file system.
_NO_CONTENT = re.compile(r"\..*|lost\+found")


def check_file(path: Path, prefix: str = "") -> None:
    """Check that there is a readable file, or a pipe such as /dev/fd/63, which can be read only once."""
    if os.path.isdir(path):
        raise UserError(f"{prefix}{path} is a folder; expected a file")
    if not os.path.exists(path):
        raise UserError(f"{prefix}there is no file {path}")
    if not os.access(path, os.R_OK):
        raise UserError(f"{prefix}{path} cannot be read: permission denied")


def check_new_file(path: Path, option: str, *others: tuple[str, Path | None], overwrite: bool = True) -> None:
    """Check that a file can be created or replaced at `path`; the check leaves nothing behind.

    `option` is its option. `others` are (option, path) of files that are read or written too, which are never replaced;
    any other file is, if `overwrite`.
    """
    if os.path.isdir(path):
        raise UserError(f"{option}: {path} is a folder; expected a file")
    if not os.path.isdir(path.parent):
        raise UserError(f"{option}: there is no folder {path.parent}")
    with explained(f"{option}: "):
        if not os.path.lexists(path):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            os.unlink(path)
        elif os.path.isfile(path):
            os.close(os.open(path, os.O_WRONLY))
        elif not os.path.exists(path):
            raise ValueError(f"{path} is a broken link")
    if is_standard_output(path) or (os.path.exists(path) and not os.path.isfile(path)):
        return
    for name, other in others:
        if other is not None and any(_is_same(path, file) for file in (other, other / "corpus.jsonl")):
            raise UserError(f"{option} {path} is the file of {name}; choose another one")
    if os.path.isfile(path) and not overwrite:
        raise UserError(f"{path} already exists; --overwrite replaces it")


def _is_same(path: Path, other: Path) -> bool:
    """Whether two paths are the same file, or will be once written."""
    if os.path.exists(path) and os.path.exists(other):
        return os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)


@contextmanager
def writable_folder(path: Path, option: str) -> Iterator[None]:
    """Create a folder and try to write into it; on exit, created folders that are still empty are removed."""
    missing = []
    ancestor = path.absolute()
    while not os.path.lexists(ancestor):
        missing.append(ancestor)
        ancestor = ancestor.parent
    if not os.path.isdir(ancestor):
        raise UserError(f"{option}: {ancestor} is a file" + ("" if missing else "; expected a folder"))
    created: list[Path] = []
    try:
        with explained(f"{option}: "):
            for folder in reversed(missing):
                folder.mkdir()
                created.append(folder)
            _check_writable(path, option)
        yield
    finally:
        for folder in reversed(created):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _check_writable(folder: Path, option: str) -> None:
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".pylate-flash-"):
            pass
    except OSError as error:
        raise UserError(f"{option}: {folder} cannot be written to: {error.strerror}") from error


def other_files(folder: Path, *known: str) -> list[str]:
    """Names in a folder, if it exists, except `known` ones and those that an empty folder may have."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return [name for name in names if name not in known and not _NO_CONTENT.fullmatch(name)]


def write_file(path: Path, content: str | bytes, option: str) -> None:
    """Write a file atomically: at every moment it holds the old content or all of the new."""
    with explained(f"{option}: "):
        data = content.encode() if isinstance(content, str) else content
        if is_standard_output(path):
            # Use its own stream: a second one would start at the beginning of a redirected file.
            sys.stdout.flush()
            sys.stdout.buffer.write(data)
            return
        if os.path.exists(path) and not os.path.isfile(path):  # a pipe
            path.write_bytes(data)
            return
        replace_file(path, data)


def is_standard_output(path: Path) -> bool:
    """Whether a path refers to standard output."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(1))
    except (OSError, ValueError):
        return False
