"""The files of an index as the system has them: opened if they are regular, read and written in full."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path

__all__ = [
    "FULL", "check_folder", "fsync_folder", "hold_reserve", "open_regular", "read_exactly",
    "without_room", "write_all",
]  # fmt: skip

# What writing to a full disk raises, and writing more than a user may have there.
FULL = (errno.ENOSPC, errno.EDQUOT)
_RESERVE, _RESERVE_BYTES = "reserve", 256 << 10

# Descriptors that are left to the rest of the process, which would fail in stranger places.
_SPARE = 256


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file of the index and return its descriptor; to write to it, not through a link, which may lead out of it.

    An index has a file open for each of its segments, so the process's limit of open files is raised as they come. What
    is no regular file is a ValueError that names it: opening a pipe would wait for ever.
    """
    # Without waiting for somebody to open the other end of what may be a pipe.
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if flags & os.O_RDWR else 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(
                errno.ELOOP, f"{path.name} is a symbolic link, and is not written through", str(path)
            ) from None
        if error.errno != errno.EMFILE:
            raise
        if not _raise_limit():
            reason = f"{error.strerror}: an index has one open for each of its segments; raise `ulimit -n`"
            raise OSError(errno.EMFILE, reason, str(path)) from None
        descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is damaged: it is no regular file")
    # A new descriptor has the lowest number that is free, so it says about how many there are.
    _raise_limit(descriptor + _SPARE)
    return descriptor


def check_folder(path: Path) -> None:
    """Refuse a path that is no folder and cannot become one."""
    for place in (path, *path.parents):
        if os.path.lexists(place):
            if not place.is_dir():
                what = "a symbolic link to nothing" if place.is_symlink() and not place.exists() else "a file"
                raise ValueError(f"the index cannot be in {path}: {place} is {what}, expected a folder")
            return


def fsync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def hold_reserve(folder: Path) -> None:
    """Take as much in reserve as there is room for, for what a removal writes to the catalog when the disk is full."""
    reserve = folder / _RESERVE
    with contextlib.suppress(OSError):
        if not os.path.lexists(reserve) or os.lstat(reserve).st_size < _RESERVE_BYTES:
            reserve.unlink(missing_ok=True)
            with reserve.open("xb", buffering=0) as file:
                write_all(file.fileno(), bytes(_RESERVE_BYTES), 0)


def without_room(folder: Path, change: Callable[[], None]) -> None:
    """Make a change that takes little room, on a full disk with what is held in reserve."""
    try:
        change()
    except OSError as error:
        if error.errno not in FULL or not (folder / _RESERVE).exists():
            raise
        (folder / _RESERVE).unlink()
        change()


def read_exactly(descriptor: int, buffer: bytearray | memoryview, offset: int) -> memoryview:
    """Fill `buffer` from the place `offset` of a file, or raise a ValueError that says where the file ends."""
    view, done = memoryview(buffer), 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if not count:
            size = os.fstat(descriptor).st_size
            raise ValueError(f"it ends after {size} bytes, {offset + len(view)} were expected")
        done += count
    return view


def write_all(descriptor: int, data: memoryview | bytes, offset: int) -> None:
    """Write all of `data` at the place `offset` of a file."""
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def _raise_limit(least: float = math.inf) -> bool:
    """Let the process have twice as many files open, as far as the system allows, if it may not have `least` yet.

    Whether it may have more than before. No more than that: what waits for files with `select` takes no descriptors
    above 1023.
    """
    import resource  # not on Windows, where the rest of the package can be imported all the same

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * soft if hard == resource.RLIM_INFINITY else min(2 * soft, hard)
    if soft == resource.RLIM_INFINITY or soft >= least or wanted <= soft:
        return False
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return False
    return True
