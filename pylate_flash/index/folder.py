"""The folder of an index: its manifest, whose turn it is to write, and what a failed write leaves behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from .files import FULL, open_regular, write_all
from .manifest import JOURNAL_NAME, SHARD_NAME, Manifest
from .turns import turn

__all__ = ["ConcurrentWriteError", "Folder"]

_TEMPORARY = "manifest.json.tmp"
# Room for the next manifest, given back when the disk is full: to remove documents, or all, needs no more.
_RESERVE = "reserve"
_RESERVE_BYTES = 64 << 10


class ConcurrentWriteError(RuntimeError):
    """Another process is writing to an index, or has written to it since it was opened here."""


class Folder:
    """A folder as it was when its manifest was read.

    Attributes
    ----------
    path
        The folder, absolute: the process may change its own. The first write makes it.
    manifest
        Its manifest; one of an empty index if there is none.

    Raises
    ------
    ValueError
        If `path` is no folder and cannot become one.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        _check_folder(path)
        self.path = path = path.absolute()
        self.manifest = Manifest(dtype=dtype)
        self.lock = path / "lock"
        self._manifest_path = path / "manifest.json"
        self._content: bytes | None = None  # of manifest.json
        self._swept = False  # whether this object has deleted what writers left that were killed

    @property
    def exists(self) -> bool:
        """Whether there is a manifest."""
        return self._content is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the manifest and of what is held in reserve."""
        return len(self._content or b"") + self._reserved()

    def read(self) -> bytes | None:
        """The manifest's bytes as they are on the disk now, which `accept` takes; None if there is none.

        Raises
        ------
        ValueError
            If it is no regular file. The message names it.
        OSError
            If there is one that cannot be read. The message names the folder.
        """
        try:
            with open(open_regular(self._manifest_path), "rb", buffering=0) as file:
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise OSError(error.errno, f"cannot read the index in {self.path}: {error.strerror}") from error

    def parse(self, content: bytes) -> Manifest:
        """As `Manifest.parse`."""
        return Manifest.parse(content, self._manifest_path)

    def accept(self, content: bytes | None, manifest: Manifest | None = None) -> None:
        """Take `content` for what the folder holds; without a manifest, to overwrite it."""
        self._content, self.manifest = content, manifest or self.manifest

    def remains(self) -> list[str]:
        """Names of shards and journals in the folder, whether the manifest names them or not."""
        return sorted(path.name for path in self.path.iterdir() if _is_ours(path)) if self.path.is_dir() else []

    def check_no_remains(self) -> None:
        """Refuse a folder that has lost its manifest: the next write would take its shards for what nobody needs.

        Raises
        ------
        ValueError
            If there are shards or journals. The message names the manifest.
        """
        remains = self.remains()
        if remains:
            raise ValueError(
                f"{self._manifest_path} is missing, though {self.path} holds files of an index, such as {remains[0]}: "
                "bring the manifest back, or start from an empty index with override=True, which deletes them"
            )

    def new_path(self, kind: str, suffix: str = "") -> Path:
        """Where to write a file that no manifest names yet."""
        # The random part keeps the names of a file lost to a crash and of its successor apart.
        return self.path / f"{kind}-{self.manifest.generation:05d}-{secrets.token_hex(4)}{suffix}"

    @contextlib.contextmanager
    def writing(self, is_current: Callable[[], bool]) -> Iterator[None]:
        """Take the turn to write. What a failed write leaves behind is deleted.

        The first write makes the folder, and a manifest of no documents.

        Parameters
        ----------
        is_current
            Whether the files that the manifest names are as they were when it was read.

        Raises
        ------
        ConcurrentWriteError
            If another process is writing or has written since the manifest was read.
        OSError
            If a file cannot be written. The message names the folder.
        """
        before = self.manifest
        try:
            if self._content is None:
                self.path.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as stack:
                try:
                    stack.enter_context(turn(self.lock))
                except BlockingIOError:
                    raise ConcurrentWriteError(
                        f"another process is writing to the index in {self.path}: wait until it has finished"
                    ) from None
                if self.read() != self._content or not is_current():
                    raise ConcurrentWriteError(
                        f"the index in {self.path} has been written to since it was opened here (generation "
                        f"{self.manifest.generation}): open it again and repeat the change"
                    )
                first = self._content is None
                try:
                    if first:
                        # So that whoever finds shards without a manifest knows that it was lost.
                        self._replace_manifest(self.manifest)
                    if not self._swept:
                        self.delete_orphans()
                        self._swept = True
                    yield
                except BaseException:
                    self.delete_orphans()
                    if first and self.read() == self.manifest.to_bytes():
                        self._manifest_path.unlink()
                        self._content = None
                    else:
                        self._hold_reserve()
                    raise
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno in FULL and self.manifest is before:
                reason += (
                    f" ({shutil.disk_usage(self.path).free:,} bytes are free). The index is as it was: make room and "
                    "repeat it; remove_documents and override=True need none"
                )
            raise OSError(error.errno, f"cannot write to the index in {self.path}: {reason}") from error

    def commit(self, manifest: Manifest, then: Callable[[], None]) -> None:
        """Replace the manifest, and delete what it no longer names. Only here does a write take effect.

        `then` is called as soon as it has, before anything can fail.
        """
        self._replace_manifest(manifest)
        then()
        _fsync_folder(self.path)
        self.delete_orphans()
        self._hold_reserve()

    def _hold_reserve(self) -> None:
        """Take as much in reserve as there is room for."""
        if self._reserved() < _RESERVE_BYTES:
            with contextlib.suppress(OSError):
                _write_new(self.path / _RESERVE, bytes(_RESERVE_BYTES))

    def _reserved(self) -> int:
        """Bytes that are held in reserve."""
        try:
            return os.lstat(self.path / _RESERVE).st_size
        except OSError:
            return 0

    def _replace_manifest(self, manifest: Manifest) -> None:
        content = manifest.to_bytes()
        _fsync_folder(self.path)
        temporary = self.path / _TEMPORARY
        try:
            _write_new(temporary, content)
        except OSError as error:
            if error.errno not in FULL or not self._reserved():
                raise
            (self.path / _RESERVE).unlink()
            _write_new(temporary, content)
        os.replace(temporary, self._manifest_path)
        self._content, self.manifest = content, manifest

    def delete_orphans(self) -> None:
        """Delete the shards and journals that the manifest on the disk does not name, and an unfinished manifest."""
        # Not what this object believes: a write may have been interrupted just after it took effect.
        content = self.read()
        (self.path / _TEMPORARY).unlink(missing_ok=True)
        if content is None:
            return
        text = content.decode(errors="replace")
        named = {*SHARD_NAME.findall(text), *JOURNAL_NAME.findall(text)}
        for path in self.path.iterdir():
            if _is_ours(path) and path.name not in named:
                path.unlink(missing_ok=True)


def _is_ours(path: Path) -> bool:
    """Whether it has the name of a shard or a journal."""
    return bool(SHARD_NAME.fullmatch(path.name) or JOURNAL_NAME.fullmatch(path.name))


def _check_folder(path: Path) -> None:
    """Refuse a path that is no folder and cannot become one."""
    for place in (path, *path.parents):
        if os.path.lexists(place):
            if not place.is_dir():
                what = "a symbolic link to nothing" if place.is_symlink() and not place.exists() else "a file"
                raise ValueError(f"the index cannot be in {path}: {place} is {what}, expected a folder")
            return


def _write_new(path: Path, content: bytes) -> None:
    """Write a file and flush it to the disk, in place of what is there."""
    # That may be a link out of the folder, which an index from elsewhere brought.
    path.unlink(missing_ok=True)
    with path.open("xb", buffering=0) as file:
        write_all(file.fileno(), content, 0)
        os.fsync(file.fileno())


def _fsync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk, where the system can (Windows cannot open folders)."""
    if os.name == "posix":
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
