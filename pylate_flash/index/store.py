"""The documents of an index: reading, adding, removing, merging, verifying; see the package for the files."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from . import journal as journals
from .arguments import joined
from .files import FULL
from .folder import Folder
from .journal import Journal
from .layout import DTYPES, Layout
from .manifest import Manifest
from .merging import Part, grouped
from .opening import open_folder
from .pieces import Pieces
from .shards import Shard
from .tables import Documents, blocks
from .turns import turn

__all__ = ["DTYPES", "PackedStore"]

# A removal rewrites whole shards, so they are kept well below the memory of a small machine, and large enough that a
# collection of millions of documents is a few thousand files.
SHARD_BYTES = 256 << 20
# Of shards that are rewritten, so much is in memory.
_COPIED_BYTES = 16 << 20


class PackedStore:
    """Ordered documents with their token embeddings, kept in a folder.

    Documents keep the order in which they were added, and `ids[i]`, `lengths[i]` and position `i` of :meth:`read`
    speak of the same document. Readers may be many. Writers must take turns: a second one at the same time, or one
    whose picture of the folder is out of date, gets an error and changes nothing.

    Parameters
    ----------
    path
        The folder. It is created by the first write, and is where it is now if the process changes its own.
    dtype
        "float32", "float16" or "bfloat16", or in 8 bits "int8", "uint8" or "fp8" (`ops.quantize`): how embeddings are
        kept. None: as the existing store does, or float32, which keeps float32 (and narrower) embeddings exactly.
    override
        Start from an empty store. An existing one is emptied at once; other files in the folder are left alone.

    Raises
    ------
    ValueError
        If `dtype` is none of these or differs from the existing store's, if `path` cannot be a folder, or if a
        file of the existing store is missing, damaged, or of a newer format.
    OSError
        If the folder cannot be read. The message names it.
    """

    def __init__(self, path: str | os.PathLike[str], dtype: str | None = None, override: bool = False) -> None:
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {sorted(DTYPES)}, got {dtype!r}")
        self._folder = Folder(Path(path), dtype or "float32")
        self._to_flush: tuple[Path, weakref.finalize] | None = None
        self.documents = Documents()
        self._pieces = Pieces(self.layout, [], None)
        if override:
            self._empty()
        else:
            self.documents, self._pieces = open_folder(self._folder)
            if dtype is not None and dtype != self.manifest.dtype:
                raise ValueError(
                    f"dtype={dtype!r} was asked for, but the index in {self.path} keeps {self.manifest.dtype!r}: leave "
                    "dtype out to use it as it is, or build a new index with override=True"
                )

    # Reading

    @property
    def path(self) -> Path:
        """The folder."""
        return self._folder.path

    @property
    def exists(self) -> bool:
        """Whether there is an index in the folder; the first write makes it."""
        return self._folder.exists

    @property
    def manifest(self) -> Manifest:
        """What the folder consists of."""
        return self._folder.manifest

    @property
    def layout(self) -> Layout:
        """How embeddings are kept; of size 0 as long as there are no documents."""
        return self.manifest.layout

    @property
    def embedding_size(self) -> int | None:
        """Elements of an embedding; None as long as there are no documents."""
        return self.manifest.embedding_size

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's embedding; 0 as long as there are no documents."""
        return self.layout.nbytes

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())

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

    def read(
        self, positions: np.ndarray, device: torch.device | None = None, room: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the tokens of some documents, packed.

        Parameters
        ----------
        positions
            Which documents, in the order wanted. Shape: [N], integers.
        device
            Where the result must be; None is the CPU.
        room
            Memory of the CPU, rows [*, width] of the store's layout, to read into if the result fits: new memory
            costs more than reading does.

        Returns
        -------
        torch.Tensor
            Rows [T, width] of the store's layout. It may be the store's own memory, so it must not be written to.

        Raises
        ------
        ValueError
            If a shard has been truncated, or holds other values than were written. The message names it.
        OSError
            If a shard cannot be read. The message names it.
        """
        begin = self.documents.starts[positions]
        end = begin + self.lengths[positions]
        # Neighbouring documents are neighbouring rows: read each run of them at once.
        breaks = (np.flatnonzero(begin[1:] != end[:-1]) + 1).tolist()
        runs = [
            (int(begin[first]), int(end[last - 1]))
            for first, last in pairwise([0, *breaks, len(positions)])
            if first < last
        ]
        return self._pieces.read(runs, device or torch.device("cpu"), room)

    @property
    def kept_on(self) -> torch.device:
        """Where `read` finds the embeddings: the CPU stands for the files."""
        return self._pieces.kept_on

    def bytes_to_copy(self, device: torch.device) -> int:
        """Bytes that `keep_on` would copy to `device`, beside those that are there already."""
        return self._pieces.bytes_to_copy(device)

    def keep_on(self, device: torch.device) -> None:
        """Copy all embeddings to `device`, from where :meth:`read` serves them until the next write.

        What that write leaves in place need not be copied again. With the CPU, the copies are given up.
        """
        self._pieces.keep_on(device)

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of the files that the manifest names, and of the manifest."""
        journal = 0 if self._pieces.journal is None else self._pieces.journal.nbytes
        return sum(shard.entry.bytes for shard in self._pieces.shards) + journal + self._folder.nbytes

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
        replace: bool = False,
    ) -> None:
        """Append documents, all of them or, on an error, none.

        Parameters
        ----------
        ids
            One distinct id per document; a new one, unless `replace`.
        documents
            Token embeddings, [L_i, d] of a floating dtype on any device; L_i may be 0.
        batch_size
            Documents that are converted and checked at a time.
        show_progress
            Draw a progress bar.
        replace
            Drop, in the same step, the documents that have these ids.

        Raises
        ------
        ValueError
            If an id is there already, d differs from the store's, or a value is NaN or infinite in the store's dtype.
        RuntimeError
            If another process is writing or has written since this store was opened.
        OSError
            If a file cannot be written, as on a full disk. The message names the index, which is as before.
        """
        if not documents:
            return
        keep = np.ones(len(self), dtype=bool)
        if replace:
            keep[[self.position[id_] for id_ in ids if id_ in self.position]] = False
        else:
            self.documents.check_new(ids)
        size = self.embedding_size or documents[0].shape[1]
        for i, document in enumerate(documents):
            if document.shape[1] != size:
                belongs = f"the index in {self.path}" if self.embedding_size else "the first document"
                here = f"the embeddings of document {ids[i]!r:.100} have size {document.shape[1]}"
                raise ValueError(f"{here}, those of {belongs} {size}")
        lengths = np.array([document.shape[0] for document in documents], dtype=np.int64)
        layout = Layout(self.manifest.dtype, size)
        progress: tqdm | None = None

        def converted(start: int, stop: int) -> Iterator[torch.Tensor]:
            for begin in range(start, stop, batch_size):
                end = min(begin + batch_size, stop)
                yield joined(ids[begin:end], documents[begin:end], lengths[begin:end], layout)
                if progress is not None:
                    progress.update(end - begin)

        journal = self._pieces.journal
        nbytes = int(np.maximum(lengths, 1).sum()) * layout.nbytes
        held, records = (0, 0) if journal is None else (journal.nbytes, journal.records)
        small = nbytes <= journals.ADDITION_BYTES and keep.all()
        with self._writing(), contextlib.ExitStack() as stack:
            if show_progress:
                bar = tqdm(total=len(documents), desc="Adding documents", unit="doc")
                progress = stack.enter_context(bar)
            if small and held + nbytes <= journals.JOURNAL_BYTES and records < journals.JOURNAL_RECORDS:
                values = list(converted(0, len(documents)))
                new = journal is None
                if journal is None:
                    journal = Journal.create(self._folder.new_path("journal"), layout)
                journal.append(ids, lengths, values[0] if len(values) == 1 else torch.cat(values))
                if new:
                    update = functools.partial(self.documents.extend, ids, lengths)
                    self._commit(self._pieces.shards, journal, update, embedding_size=size)
                else:
                    self._appended(ids, lengths, journal)
                return
            parts = [
                Part(ids[start:stop], lengths[start:stop], lambda start=start, stop=stop: converted(start, stop))  # type: ignore[misc]
                for start, stop in blocks(lengths, max(1, SHARD_BYTES // layout.nbytes))
            ]
            self._rewrite(keep, parts, layout)

    def remove(self, positions: np.ndarray) -> None:
        """Drop the documents at positions [N]: all of them or, on an error, none. It raises what `compact` does.

        On a full disk, where nothing can be rewritten, they are marked as removed, and a warning says so.
        """
        if not len(positions):
            return
        keep = np.ones(len(self), dtype=bool)
        keep[positions] = False
        before = self.manifest
        try:
            with self._writing():
                self._rewrite(keep, [], self.layout)
        except OSError as error:
            # It may also fail just after it took effect.
            if error.errno not in FULL or self.manifest is not before:
                raise
            self._mark(keep)
            warnings.warn(
                f"the disk of the index in {self.path} is full: its {len(positions)} removed documents are in no "
                "search any more, but on the disk until compact() finds room to write the documents beside them anew",
                stacklevel=3,
            )

    def _rewrite(self, keep: np.ndarray, new: list[Part], layout: Layout) -> None:
        """Make the documents of a mask [N], and new ones after them, the content; write what shards are not there."""
        parts, start = [], 0
        for part in self._parts():
            kept = start + np.flatnonzero(keep[start : start + len(part.ids)])
            start += len(part.ids)
            parts.append(part if len(kept) == len(part.ids) else self._some(kept))
        shards = self._merged([part for part in [*parts, *new] if len(part.ids)], layout)

        def update() -> None:
            if not keep.all():
                self.documents = self.documents.kept(keep)
            for part in new:
                self.documents.extend(part.ids, part.lengths)

        self._commit(shards, None, update, embedding_size=layout.size)

    def _mark(self, keep: np.ndarray) -> None:
        """Mark documents as removed, in the manifest, and give up the files of which a mask [N] keeps none."""
        with self._writing():
            documents, removed = self.documents.kept(keep), dict(self.manifest.removed)
            pieces, row = [], 0
            for piece, start, stop in self._places():
                if not keep[start:stop].any():
                    documents.close(row, row + piece.rows)
                    continue
                before = removed.get(piece.path.name, [])
                places = np.setdiff1d(np.arange(piece.documents), before)
                removed[piece.path.name] = sorted([*before, *places[~keep[start:stop]].tolist()])
                pieces.append(piece)
                row += piece.rows
            shards = [piece for piece in pieces if isinstance(piece, Shard)]
            journal = pieces[-1] if pieces and isinstance(pieces[-1], Journal) else None
            marks = {name: places for name, places in removed.items() if places}
            self._commit(shards, journal, lambda: setattr(self, "documents", documents), removed=marks)

    def compact(self) -> None:
        """Write the documents into as few shards as their size allows; those that are full already stay.

        Raises
        ------
        RuntimeError
            If another process is writing or has written since this store was opened.
        OSError
            If a file cannot be written, as on a full disk. The message names the index, which is as before.
        """
        if not self._folder.exists:
            return
        with self._writing():
            self._erase()
            there = {(start, stop): piece for piece, start, stop in self._places() if isinstance(piece, Shard)}
            shards = []
            for start, stop in blocks(self.lengths, max(1, SHARD_BYTES // max(1, self.token_bytes))):
                if (start, stop) in there:
                    shards.append(there[start, stop])
                else:
                    shards.append(self._save([self._some(np.arange(start, stop))], self.layout))
            if shards != self._pieces.shards or self._pieces.journal is not None:
                self._commit(shards, None)
            else:
                self._folder.delete_orphans()

    def _erase(self) -> None:
        """Write the shards anew of which documents are marked as removed.

        One after the other, and first what takes the least room, as that gives up the most for it.
        """
        marked = [some for some in self._places() if isinstance(some[0], Shard) and not self._is_whole(some[0])]
        for shard, start, stop in sorted(marked, key=lambda some: int(self.lengths[some[1] : some[2]].sum())):
            new = self._save([self._some(np.arange(start, stop))], self.layout)
            shards = [new if piece is shard else piece for piece in self._pieces.shards]
            begin = sum(piece.rows for piece in shards[: shards.index(new)])
            gone = functools.partial(self.documents.close, begin, begin + shard.rows)
            self._commit(shards, self._pieces.journal, gone)

    def note(self, **changes: Any) -> None:
        """Change what the manifest says of the model or the corpora. It raises what `compact` does."""
        with self._writing():
            self._commit(self._pieces.shards, self._pieces.journal, **changes)

    def _places(self) -> list[tuple[Shard | Journal, int, int]]:
        """Every piece, and the positions in the store of its first document and after its last."""
        found, start = [], 0
        for piece in self._pieces:
            stop = start + piece.documents - len(self.manifest.removed.get(piece.path.name, []))
            found.append((piece, start, stop))
            start = stop
        return found

    def _parts(self) -> list[Part]:
        """What the store holds; shards of which documents are marked as removed are to be written anew."""
        return [
            self._some(np.arange(start, stop), piece if isinstance(piece, Shard) and self._is_whole(piece) else None)
            for piece, start, stop in self._places()
        ]

    def _is_whole(self, piece: Shard | Journal) -> bool:
        """Whether none of its documents is marked as removed."""
        return piece.path.name not in self.manifest.removed

    def _some(self, positions: np.ndarray, shard: Shard | None = None) -> Part:
        """Some of the store's documents, as a part of what is written next; `shard` if they are all of one."""
        return Part([self.ids[i] for i in positions], self.lengths[positions], lambda: self._copied(positions), shard)

    def _copied(self, positions: np.ndarray) -> Iterator[torch.Tensor]:
        for start, stop in blocks(self.lengths[positions], max(1, _COPIED_BYTES // self.token_bytes)):
            yield self.read(positions[start:stop], torch.device("cpu"))

    def _merged(self, parts: list[Part], layout: Layout) -> list[Shard]:
        """Write parts as shards; neighbours of similar sizes become one, the others that are shards already stay."""
        limit = max(1, SHARD_BYTES // layout.nbytes)
        return [
            group[0].shard if len(group) == 1 and group[0].shard is not None else self._save(group, layout)
            for group in grouped(parts, limit)
        ]

    def _save(self, parts: list[Part], layout: Layout) -> Shard:
        """Write one shard that no manifest names yet, and open it."""
        ids = [id_ for part in parts for id_ in part.ids]
        lengths = np.concatenate([part.lengths for part in parts])
        values = (piece for part in parts for piece in part.values())
        return Shard.write(self._folder.new_path("shard", ".safetensors"), ids, lengths, values, layout)

    def _appended(self, ids: Sequence[str], lengths: np.ndarray, journal: Journal) -> None:
        """Take note of documents that have been appended to the journal, the last piece."""
        self.documents.extend(ids, lengths)
        self._pieces.appended()
        if not journal.is_flushed and (self._to_flush is None or self._to_flush[0] != journal.path):
            self._to_flush = journal.path, weakref.finalize(self, _flush, self._folder.lock, journal.path)

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        journal = self._pieces.journal
        return self._folder.writing(lambda: journal is None or journal.is_current())

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

        def take_effect() -> None:
            self._pieces = self._pieces.followed_by(self.layout, shards, journal)
            if update is not None:
                update()
            if not self.manifest.removed:
                # What was marked as removed is gone for good.
                self.documents.close(0, self.documents.rows)

        self._folder.commit(manifest, take_effect)

    def _empty(self) -> None:
        """Start anew, whatever the folder holds, even a store that cannot be read."""
        self._folder.accept(self._folder.read())
        if self._folder.exists or self._folder.remains():
            with self._writing():
                self._commit([], None)


def _flush(lock: Path, journal: Path) -> None:
    """Flush a journal, unless it is gone, or somebody is writing to it, who will."""
    with contextlib.suppress(OSError, ValueError), turn(lock):
        journals.flush(journal)
