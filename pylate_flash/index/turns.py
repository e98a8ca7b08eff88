"""Whose turn it is to write: one process at a time, by a lock that the system gives back when a process ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["turn"]


@contextlib.contextmanager
def turn(path: Path) -> Iterator[None]:
    """Hold the lock of the file `path`, which is created if it is not there; its content means nothing.

    Raises
    ------
    BlockingIOError
        If another process, or another thread of this one, holds it.
    OSError
        If the file cannot be opened.
    """
    import fcntl  # not on Windows, where the rest of the package can be imported all the same

    # A link, which an index from elsewhere may bring, would make a file outside its folder.
    # `flock` and not a lock of POSIX, which a process loses when it closes any descriptor of the file.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
