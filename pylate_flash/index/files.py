"""Low-level access to the files of an index: open regular files only, read and write in full."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path

# Error numbers of writes to a full disk, and of writes beyond a user's quota.
FULL = (errno.ENOSPC, errno.EDQUOT)
_RESERVE, _RESERVE_BYTES = "reserve", 256 << 10

# Descriptors that are left to the rest of the process, whose failures would be harder to understand.
_SPARE = 256


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file of the index and return its descriptor; for writing, do not follow a link, which may lead out of it.

    An index keeps a file open for each of its segments, so the process's limit of open files is raised as needed.
    Anything but a regular file raises a ValueError that names it: opening a pipe would block forever.
    """
    # O_NONBLOCK: do not block until the other end of a pipe is opened.
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if flags & os.O_RDWR else 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise is_a_link(path) from None
        if error.errno != errno.EMFILE:
            raise
        if not _raise_limit():
            reason = f"{error.strerror}: an index keeps one file open per segment; raise `ulimit -n`"
            raise OSError(errno.EMFILE, reason, str(path)) from None
        descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is damaged: it is not a regular file")
    # A new descriptor gets the lowest free number, which so is about the number of open ones.
    _raise_limit(descriptor + _SPARE)
    return descriptor


def is_a_link(path: Path) -> OSError:
    """The error for a symbolic link, through which a write would change a file that does not belong to the index."""
    return OSError(errno.ELOOP, f"{path.name} is a symbolic link, which the index does not write through", str(path))


def check_folder(path: Path) -> None:
    """Refuse a path that is not a folder and cannot become one."""
    for ancestor in (path, *path.parents):
        if os.path.lexists(ancestor):
            if not ancestor.is_dir():
                what = "a broken symbolic link" if ancestor.is_symlink() and not ancestor.exists() else "a file"
                raise ValueError(f"the index cannot be in {path}: {ancestor} is {what}, expected a folder")
            return


def fsync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def hold_reserve(folder: Path) -> None:
    """Create the reserve file, if there is room, for what a removal writes to the catalog when the disk is full."""
    reserve = folder / _RESERVE
    with contextlib.suppress(OSError):
        if not os.path.lexists(reserve) or os.lstat(reserve).st_size < _RESERVE_BYTES:
            reserve.unlink(missing_ok=True)
            with reserve.open("xb", buffering=0) as file:
                write_all(file.fileno(), bytes(_RESERVE_BYTES), 0)


def without_room(folder: Path, change: Callable[[], None]) -> None:
    """Make a change that takes little disk space; on a full disk, free the reserve and retry."""
    try:
        change()
    except OSError as error:
        if error.errno not in FULL or not (folder / _RESERVE).exists():
            raise
        (folder / _RESERVE).unlink()
        change()


def read_exactly(descriptor: int, buffer: bytearray | memoryview, offset: int) -> memoryview:
    """Fill `buffer` from `offset` of a file, or raise a ValueError that says where the file ends."""
    view, done = memoryview(buffer), 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if not count:
            size = os.fstat(descriptor).st_size
            raise ValueError(f"it ends after {size} bytes, expected {offset + len(view)}")
        done += count
    return view


def write_all(descriptor: int, data: memoryview | bytes, offset: int) -> None:
    """Write all of `data` at `offset` of a file."""
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def _raise_limit(least: float = math.inf) -> bool:
    """Double the limit of open files, as far as the system allows, if it is below `least`; return whether it grew.

    It grows no further than that: code that waits for files with `select` takes no descriptors above 1023.
    """
    import resource  # not available on Windows, where the rest of the package can still be imported

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    doubled = 2 * soft if hard == resource.RLIM_INFINITY else min(2 * soft, hard)
    if soft == resource.RLIM_INFINITY or soft >= least or doubled <= soft:
        return False
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (doubled, hard))
    except (OSError, ValueError):
        return False
    return True


def identity_of(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file; None if it does not exist."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
