"""Token embeddings of many documents, packed, on disk: safetensors shards, a journal, one JSON manifest. No pickle.

    folder/
      manifest.json                      what the store holds: format version, dtype, embedding size, shards, journal
      shard-00000-3f9a61c2.safetensors   values [T, d], lengths [N] (int64), ids (a JSON list in UTF-8)
      journal-00001-77d0a1be             the last small additions, see `journal.py`
      lock                               held by the process that is writing; its content means nothing

A shard is never changed once written. A write first writes new shards and flushes them to the disk, then replaces
`manifest.json` in one atomic step, and only then deletes the files that the new manifest no longer names. A small
addition is appended to the journal, which is atomic as well; what it holds comes after all shards. A process killed at
any moment therefore leaves either the state before or the state after, and at worst some files that no manifest names,
which the next write deletes. A power failure is the same, save for additions that follow one another within a fifth
of a second: the last of such a run may be lost, which the next opening says in a warning.

When the journal is full it becomes a shard, and shards of similar sizes become one, so that there are few files
whatever the sizes of the additions, and a document is written some log2(SHARD_BYTES / JOURNAL_BYTES) times in all.

A removal rewrites the shards that held the removed documents. The alternative, marking them as dead, would make
removals cheaper, but leaves what was removed on the disk and makes every search walk over it.

Tokens that no search reads take no memory, except those of the journal.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from . import journal as journals
from .journal import Journal
from .manifest import DTYPES, JOURNAL_NAME, SHARD_NAME, Manifest
from .model_record import ModelRecord
from .shards import Shard
from .tables import Documents, blocks
from .turns import turn

__all__ = ["DTYPES", "PackedStore"]

# A removal rewrites whole shards, so they are kept well below the memory of a small machine, and large enough that a
# collection of millions of documents is a few thousand files.
SHARD_BYTES = 256 << 20
# Of shards that are rewritten, so much is in memory.
_COPIED_BYTES = 16 << 20


@dataclass(frozen=True)
class _Part:
    """Documents of a write: `shard` if they are all of one that is there already."""

    ids: Sequence[str]
    lengths: np.ndarray
    values: Callable[[], Iterable[torch.Tensor]]
    shard: Shard | None = None

    @property
    def tokens(self) -> int:
        """As `blocks` counts them."""
        return int(np.maximum(self.lengths, 1).sum())


class PackedStore:
    """Ordered documents with their token embeddings, kept in a folder.

    Documents keep the order in which they were added, and `ids[i]`, `lengths[i]` and position `i` of :meth:`read`
    speak of the same document. Readers may be many. Writers must take turns: a second one at the same time, or one
    whose picture of the folder is out of date, gets an error and changes nothing.

    Parameters
    ----------
    path
        The folder. It is created by the first write.
    dtype
        "float32", "float16" or "bfloat16": how embeddings are kept. None: as the existing store does, or float32,
        which keeps float32 (and narrower) embeddings exactly as given.
    override
        Start from an empty store. An existing one is emptied at once; other files in the folder are left alone.

    Raises
    ------
    ValueError
        If `dtype` is not one of the three or differs from the existing store's, if `path` cannot be a folder, or if a
        file of the existing store is missing, damaged, or of a newer format.
    OSError
        If the folder cannot be read. The message names it.
    """

    kept_on: torch.device  # where `read` finds the embeddings

    def __init__(self, path: str | os.PathLike[str], dtype: str | None = None, override: bool = False) -> None:
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {sorted(DTYPES)}, got {dtype!r}")
        self.path = Path(path)
        _check_folder(self.path)
        self._manifest_path = self.path / "manifest.json"
        self._lock_path = self.path / "lock"
        self._content: bytes | None = None  # of manifest.json
        self._copies: dict[Shard | Journal, torch.Tensor] = {}
        self._to_flush: tuple[Path, weakref.finalize] | None = None
        self.manifest = Manifest(dtype=dtype or "float32")
        self.documents = Documents()
        self._set_pieces([], None)
        if override:
            self._empty()
        else:
            self._open()
            if dtype is not None and dtype != self.manifest.dtype:
                raise ValueError(
                    f"dtype={dtype!r} was asked for, but the index in {self.path} keeps {self.manifest.dtype!r}: leave "
                    "dtype out to use it as it is, or build a new index with override=True"
                )

    # Reading

    @property
    def dtype(self) -> torch.dtype:
        """The type in which embeddings are kept."""
        return DTYPES[self.manifest.dtype]

    @property
    def embedding_size(self) -> int | None:
        """Elements of an embedding; None as long as nothing was added."""
        return self.manifest.embedding_size

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's embedding; 0 as long as nothing was added."""
        return (self.embedding_size or 0) * self.dtype.itemsize

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.documents.cu[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of all embeddings."""
        return self.tokens * self.token_bytes

    @property
    def ids(self) -> list[str]:
        """Ids of all documents, in order. It must not be written to."""
        return self.documents.ids

    @property
    def position(self) -> dict[str, int]:
        """For every id its place in the order."""
        return self.documents.position

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every document. Shape: [N], int64."""
        return self.documents.lengths

    def __len__(self) -> int:
        return len(self.documents)

    def read(self, positions: np.ndarray, device: torch.device | None = None) -> torch.Tensor:
        """Return the tokens of some documents, packed.

        Parameters
        ----------
        positions
            Which documents, in the order wanted. Shape: [N], integers.
        device
            Where the result must be; None is the CPU.

        Returns
        -------
        torch.Tensor
            [T, embedding_size] in the store's dtype. It may be the store's own memory, so it must not be written to.

        Raises
        ------
        ValueError
            If a shard has been truncated. The message names it.
        OSError
            If a shard cannot be read. The message names it.
        """
        device = device or torch.device("cpu")
        cu = self.documents.cu
        # Neighbouring documents are neighbouring rows: read each run of consecutive positions at once.
        breaks = np.flatnonzero(np.diff(positions) != 1) + 1
        runs = [
            (int(cu[positions[first]]), int(cu[positions[last - 1] + 1]))
            for first, last in zip(np.r_[0, breaks], np.r_[breaks, len(positions)], strict=True)
            if first < last
        ]
        slices = [piece for run in runs for piece in self._slices(*run)]
        if self.kept_on.type != "cpu":
            copies = [self._copies[self._pieces[piece]][first:last] for piece, first, last in slices]
            if copies:
                return (copies[0] if len(copies) == 1 else torch.cat(copies)).to(device)
        if len(slices) == 1 and isinstance(self._pieces[slices[0][0]], Journal):
            return self._pieces[slices[0][0]].values[slices[0][1] : slices[0][2]].to(device)  # type: ignore[union-attr]
        rows = sum(last - first for _, first, last in slices)
        values = torch.empty(rows, self.embedding_size or 0, dtype=self.dtype)
        done = 0
        for piece, first, last in slices:
            self._pieces[piece].read_into(values[done : done + last - first], first)
            done += last - first
        return values.to(device)

    def bytes_to_copy(self, device: torch.device) -> int:
        """Bytes that `keep_on` would copy to `device`, beside those that are there already."""
        return sum(piece.rows for piece in self._pieces if not self._is_on(device, piece)) * self.token_bytes

    def keep_on(self, device: torch.device) -> None:
        """Copy all embeddings to `device`, from where :meth:`read` serves them until the next write.

        What that write leaves in place need not be copied again. With the CPU, the copies are given up.
        """
        if device == self.kept_on:
            return
        self.kept_on = torch.device("cpu")
        if device.type == "cpu":
            self._copies = {}
            return
        for piece in self._pieces:
            if not self._is_on(device, piece):
                values = torch.empty(piece.rows, self.embedding_size or 0, dtype=self.dtype)
                piece.read_into(values, 0)
                self._copies[piece] = values.to(device)
        self.kept_on = device

    def _is_on(self, device: torch.device, piece: Shard | Journal) -> bool:
        copy = self._copies.get(piece)
        return copy is not None and copy.device == device and len(copy) == piece.rows

    def _slices(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Rows start..stop of all pieces put end to end: which piece, from which of its rows to which."""
        found = []
        piece = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            begin = int(self._starts[piece])
            end = min(stop, begin + self._pieces[piece].rows)
            if start < end:
                found.append((piece, start - begin, end - begin))
                start = end
            piece += 1
        return found

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of the files that the manifest names, and of the manifest."""
        journal = 0 if self._journal is None else self._journal.nbytes
        return sum(shard.entry.bytes for shard in self._shards) + journal + len(self._content or b"")

    def verify(self, show_progress: bool = False) -> None:
        """Read every file, as this object has opened them; opening has checked that they fit together.

        Raises
        ------
        ValueError
            If a checksum is wrong, or a value is NaN or infinite. The message names the file.
        """
        for piece in tqdm(self._pieces, desc="Verifying", unit="file", disable=not show_progress):
            piece.verify()

    # Writing

    def add(
        self,
        ids: Sequence[str],
        documents: Sequence[torch.Tensor],
        batch_size: int = 2000,
        show_progress: bool = False,
    ) -> None:
        """Append documents, all of them or, on an error, none.

        Parameters
        ----------
        ids
            One new, distinct id per document.
        documents
            Token embeddings, [L_i, d] of a floating dtype on any device; L_i may be 0.
        batch_size
            Documents that are converted and checked at a time.
        show_progress
            Draw a progress bar.

        Raises
        ------
        ValueError
            If d differs from the store's, or a value is NaN or infinite in the store's dtype.
        RuntimeError
            If another process is writing or has written since this store was opened.
        OSError
            If a file cannot be written, as on a full disk. The message names the index, which is as before.
        """
        if not documents:
            return
        size = self.embedding_size or documents[0].shape[1]
        for i, document in enumerate(documents):
            if document.shape[1] != size:
                belongs = f"the index in {self.path}" if self.embedding_size else "the first document"
                raise ValueError(
                    f"the embeddings of document {ids[i]!r} have size {document.shape[1]}, those of {belongs} {size}"
                )
        lengths = np.array([len(document) for document in documents], dtype=np.int64)
        row = size * self.dtype.itemsize
        progress: tqdm | None = None

        def converted(start: int, stop: int) -> Iterator[torch.Tensor]:
            for begin in range(start, stop, batch_size):
                end = min(begin + batch_size, stop)
                yield self._convert(ids[begin:end], documents[begin:end], lengths[begin:end])
                if progress is not None:
                    progress.update(end - begin)

        def update() -> None:
            self.documents.extend(ids, lengths)

        journal = self._journal
        used = (0, 0) if journal is None else (journal.nbytes, journal.records)
        with self._write(), contextlib.ExitStack() as stack:
            if show_progress:
                bar = tqdm(total=len(documents), desc="Adding documents", unit="doc")
                progress = stack.enter_context(bar)
            if used[0] + int(lengths.sum()) * row <= journals.JOURNAL_BYTES and used[1] < journals.JOURNAL_RECORDS:
                values = list(converted(0, len(documents)))
                new = journal is None
                if journal is None:
                    journal = Journal.create(self._new_name("journal"), self.dtype, size)
                journal.append(ids, lengths, values[0] if len(values) == 1 else torch.cat(values))
                if new:
                    self._commit(
                        self._shards, journal, lambda: self.documents.extend(ids, lengths), embedding_size=size
                    )
                else:
                    self._appended(ids, lengths, journal)
                return
            parts = [
                _Part(ids[start:stop], lengths[start:stop], lambda start=start, stop=stop: converted(start, stop))  # type: ignore[misc]
                for start, stop in blocks(lengths, max(1, SHARD_BYTES // row))
            ]
            shards = self._merged([*self._parts(), *parts], size)
            self._commit(shards, None, update, embedding_size=size)

    def remove(self, positions: np.ndarray) -> None:
        """Drop documents, all of them or, on an error, none.

        Parameters
        ----------
        positions
            Which documents. Shape: [N], integers in [0, len(self)).

        Raises
        ------
        RuntimeError
            If another process is writing or has written since this store was opened.
        OSError
            If a file cannot be written, as on a full disk. The message names the index, which is as before.
        """
        if not len(positions):
            return
        keep = np.ones(len(self), dtype=bool)
        keep[positions] = False
        with self._write():
            parts, start = [], 0
            for part in self._parts():
                kept = start + np.flatnonzero(keep[start : start + len(part.ids)])
                start += len(part.ids)
                parts.append(part if len(kept) == len(part.ids) else self._some(kept))
            shards = self._merged([part for part in parts if len(part.ids)], self.embedding_size or 0)
            documents = Documents()
            documents.extend([self.ids[i] for i in np.flatnonzero(keep)], self.lengths[keep])
            self._commit(shards, None, lambda: setattr(self, "documents", documents))

    def compact(self) -> None:
        """Write the documents into as few shards as their size allows; those that are full already stay.

        Raises
        ------
        RuntimeError
            If another process is writing or has written since this store was opened.
        OSError
            If a file cannot be written, as on a full disk. The message names the index, which is as before.
        """
        if not self._pieces:
            return
        with self._write():
            ends = np.cumsum([shard.entry.documents for shard in self._shards])
            there = {(int(end) - shard.entry.documents, int(end)): shard for shard, end in zip(self._shards, ends)}  # noqa: B905
            shards = []
            for start, stop in blocks(self.lengths, max(1, SHARD_BYTES // self.token_bytes)):
                shard = there.get((start, stop))
                shards.append(shard or self._save([self._some(np.arange(start, stop))], self.embedding_size or 0))
            if shards != self._shards or self._journal is not None:
                self._commit(shards, None)

    def set_model(self, model: ModelRecord) -> None:
        """Remember which model made the embeddings.

        Raises
        ------
        RuntimeError
            If another process is writing or has written since this store was opened.
        OSError
            If the manifest cannot be written.
        """
        with self._write():
            self._commit(self._shards, self._journal, model=model)

    def _parts(self) -> list[_Part]:
        """What the store holds."""
        parts, start = [], 0
        for shard in self._shards:
            stop = start + shard.entry.documents
            positions = np.arange(start, stop)
            parts.append(
                _Part(
                    self.ids[start:stop],
                    self.lengths[start:stop],
                    lambda positions=positions: self._copied(positions),  # type: ignore[misc]
                    shard,
                )
            )
            start = stop
        if start < len(self):
            parts.append(self._some(np.arange(start, len(self))))
        return parts

    def _some(self, positions: np.ndarray) -> _Part:
        """Some of the store's documents, as a part of what is written next."""
        return _Part([self.ids[i] for i in positions], self.lengths[positions], lambda: self._copied(positions))

    def _copied(self, positions: np.ndarray) -> Iterator[torch.Tensor]:
        for start, stop in blocks(self.lengths[positions], max(1, _COPIED_BYTES // self.token_bytes)):
            yield self.read(positions[start:stop], torch.device("cpu"))

    def _merged(self, parts: list[_Part], size: int) -> list[Shard]:
        """Write parts as shards; neighbours of similar sizes become one, the others that are shards already stay."""
        limit = max(1, SHARD_BYTES // (size * self.dtype.itemsize))
        groups: list[tuple[int, list[_Part]]] = []
        for part in parts:
            groups.append((part.tokens, [part]))
            # Sizes in powers of two: what follows one another is in ever smaller classes, so there are few shards, and
            # a document is rewritten only when its shard rises by a class.
            while len(groups) > 1:
                (before, previous), (tokens, last) = groups[-2:]
                if before.bit_length() > tokens.bit_length() or before + tokens > limit:
                    break
                groups[-2:] = [(before + tokens, previous + last)]
        return [
            group[0].shard if len(group) == 1 and group[0].shard is not None else self._save(group, size)
            for _, group in groups
        ]

    def _save(self, parts: list[_Part], size: int) -> Shard:
        """Write one shard that no manifest names yet, and open it."""
        ids = [id_ for part in parts for id_ in part.ids]
        lengths = np.concatenate([part.lengths for part in parts])
        values = (piece for part in parts for piece in part.values())
        return Shard.write(self._new_name("shard", ".safetensors"), ids, lengths, values, self.dtype, size)

    def _new_name(self, kind: str, suffix: str = "") -> Path:
        # The random part keeps the names of a file lost to a crash and of its successor apart.
        return self.path / f"{kind}-{self.manifest.generation:05d}-{secrets.token_hex(4)}{suffix}"

    def _convert(self, ids: Sequence[str], documents: Sequence[torch.Tensor], lengths: np.ndarray) -> torch.Tensor:
        converted = [document.detach().to("cpu", self.dtype) for document in documents]
        values = converted[0] if len(converted) == 1 else torch.cat(converted)
        # The least and the greatest are NaN if one value is; this is the cheapest look at all of them.
        if values.numel() and not all(math.isfinite(value) for value in torch.stack(values.aminmax()).tolist()):
            row = int(torch.argmin(torch.isfinite(values).all(dim=1).to(torch.int8)))
            document = int(np.searchsorted(np.cumsum(lengths), row, side="right"))
            raise ValueError(
                f"the embeddings of document {ids[document]!r} hold NaN or infinite values (as {self.manifest.dtype}), "
                f"first in token {row - int(lengths[:document].sum())}"
            )
        return values

    @contextlib.contextmanager
    def _write(self) -> Iterator[None]:
        """Take the turn to write. What a failed write leaves behind is deleted."""
        try:
            if self._content is None:
                self.path.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as stack:
                try:
                    stack.enter_context(turn(self._lock_path))
                except BlockingIOError:
                    raise RuntimeError(
                        f"another process is writing to the index in {self.path}: wait until it has finished"
                    ) from None
                current = self._read_manifest() == self._content
                if not (current and (self._journal is None or self._journal.is_current())):
                    raise RuntimeError(
                        f"the index in {self.path} has been written to since it was opened here (generation "
                        f"{self.manifest.generation}): open it again and repeat the change"
                    )
                try:
                    yield
                except BaseException:
                    self._delete_orphans()
                    raise
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(error.errno, f"cannot write to the index in {self.path}: {reason}") from error

    def _appended(self, ids: Sequence[str], lengths: np.ndarray, journal: Journal) -> None:
        """Take note of documents that have been appended to the journal, the last piece."""
        self.documents.extend(ids, lengths)
        self.kept_on = torch.device("cpu")
        if not journal.is_flushed and (self._to_flush is None or self._to_flush[0] != journal.path):
            self._to_flush = journal.path, weakref.finalize(self, _flush, self._lock_path, journal.path)

    def _commit(
        self,
        shards: list[Shard],
        journal: Journal | None,
        update: Callable[[], object] | None = None,
        **changes: object,
    ) -> None:
        """Make shards and journal the content of the store. Only here, or by the journal, does a write take effect.

        `update` makes `documents` what they hold, and `changes` are those of the manifest.
        """
        manifest = self.manifest.next(
            shards=tuple(shard.entry for shard in shards),
            journal=None if journal is None else journal.path.name,
            **changes,
        )
        content = manifest.to_bytes()
        _fsync_folder(self.path)
        temporary = self.path / "manifest.json.tmp"
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._manifest_path)
        # All at once, before anything can fail: this is the content now, whatever happens to what is left to do.
        self._content, self.manifest = content, manifest
        self._set_pieces(shards, journal)
        if update is not None:
            update()
        _fsync_folder(self.path)
        self._delete_orphans()

    def _empty(self) -> None:
        """Start anew, whatever the folder holds, even a store that cannot be read."""
        self._content = self._read_manifest()
        if self._content is not None:
            with self._write():
                self._commit([], None)

    def _delete_orphans(self) -> None:
        """Delete the shards and journals that the manifest on the disk does not name."""
        # Not what this object believes: a write may have been interrupted just after it took effect.
        content = (self._read_manifest() or b"").decode(errors="replace")
        named = {*SHARD_NAME.findall(content), *JOURNAL_NAME.findall(content)}
        for path in self.path.iterdir():
            ours = SHARD_NAME.fullmatch(path.name) or JOURNAL_NAME.fullmatch(path.name)
            if path.name == "manifest.json.tmp" or (ours and path.name not in named):
                path.unlink(missing_ok=True)

    # Opening

    def _read_manifest(self) -> bytes | None:
        try:
            return self._manifest_path.read_bytes()
        except FileNotFoundError:
            return None

    def _open(self) -> None:
        """Read the manifest and open its shards."""
        while True:
            try:
                content = self._read_manifest()
            except OSError as error:
                raise OSError(error.errno, f"cannot read the index in {self.path}: {error.strerror}") from error
            if content is None:
                return
            manifest = Manifest.parse(content, self._manifest_path)
            try:
                self._open_files(manifest)
            except ValueError:
                # A writer may have replaced the manifest, and deleted shards, after it was read here.
                if self._read_manifest() != content:
                    continue
                raise
            self._content, self.manifest = content, manifest
            return

    def _open_files(self, manifest: Manifest) -> None:
        documents, shards, journal = Documents(), [], None
        found = (Shard.open(self.path / entry.file, entry, manifest) for entry in manifest.shards)
        for shard, ids, lengths in found:
            shards.append(shard)
            _extend(documents, ids, lengths, shard.path)
        if manifest.journal is not None:
            assert manifest.embedding_size is not None
            journal, ids, lengths = Journal.open(
                self.path / manifest.journal, DTYPES[manifest.dtype], manifest.embedding_size
            )
            _extend(documents, ids, lengths, journal.path)
        self.documents = documents
        self._set_pieces(shards, journal)

    def _set_pieces(self, shards: list[Shard], journal: Journal | None) -> None:
        self._shards, self._journal = shards, journal
        self._pieces: list[Shard | Journal] = [*shards, *([] if journal is None else [journal])]
        self._starts = np.cumsum([0] + [piece.rows for piece in self._pieces[:-1]])
        # Copies of shards that are still there are used again.
        self._copies = {piece: self._copies[piece] for piece in self._pieces if piece in self._copies}
        self.kept_on = torch.device("cpu")


def _flush(lock: Path, journal: Path) -> None:
    """Flush a journal, unless it is gone, or somebody is writing to it, who will."""
    with contextlib.suppress(OSError, ValueError), turn(lock):
        journals.flush(journal)


def _extend(documents: Documents, ids: list[str], lengths: np.ndarray, path: Path) -> None:
    try:
        documents.extend(ids, lengths)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _check_folder(path: Path) -> None:
    """Refuse a path that is no folder and cannot become one."""
    for place in (path, *path.parents):
        if os.path.lexists(place):
            if not place.is_dir():
                what = "a symbolic link to nothing" if place.is_symlink() and not place.exists() else "a file"
                raise ValueError(f"the index cannot be in {path}: {place} is {what}, expected a folder")
            return


def _fsync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk, where the system can (Windows cannot open folders)."""
    if os.name == "posix":
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
