"""The documents of an index: reading, adding, removing, rewriting, verifying; see the package for the file format."""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from ..ops.checks import check_choice
from .arguments import joined
from .catalog import Catalog, ConcurrentWriteError, parts_crc
from .change import Change
from .codes import Codec, trained
from .documents import Documents, blocks, cuts, read, runs_of
from .files import FULL, check_folder, hold_reserve, without_room
from .filters import Where, checked_where
from .ids import encoded_id
from .layout import DTYPES, Layout
from .parts import SEGMENT_NAME, Part, Segment
from .state import State

# Size limit of a segment, which is rewritten as a whole, and stays open as long as the index does.
SEGMENT_BYTES = 512 << 20
# Bytes added at a time in a long run of additions: enough to amortize the fixed cost of an addition.
ADDITION_BYTES = 32 << 20
# Bytes of embeddings that a CPU converts, checks and writes at a time: few enough for its caches, in memory that is
# reused. With 256 MiB at a time, it takes two to four times as long.
_CONVERTED_BYTES = 4 << 20
# An addition of at least this many bytes is flushed immediately.
_FLUSHED_BYTES = 1 << 20
# If there are more small parts than this, they are merged in the catalog.
SMALL_PARTS = 256
# Number of filters whose results are cached.
_FILTERS = 16
# A segment is rewritten when more than 1 / _DEAD of its bytes are dead.
_DEAD = 4


class PackedStore:
    """Ordered documents with their token embeddings, stored in a folder.

    Documents keep the order in which they were added, and `lengths[i]` and position `i` of :meth:`read` and
    :meth:`ids_at` refer to the same document. There may be many readers, each of which keeps the state that it has
    opened, and one writer at a time: a concurrent writer, or one whose state is out of date, gets an error and changes
    nothing.

    Parameters
    ----------
    path
        The folder. The first write creates it; a relative path is resolved now. None: keep everything in memory; the
        attribute `path` is then "memory".
    dtype
        One of `layout.DTYPES`: how embeddings are stored. None: as in the existing store, or float32.
    override
        Start from an empty store. An existing one is emptied at once; other files in the folder are left alone.
    device
        Where residual codes are computed, and where an in-memory store keeps its rows: embeddings there are not moved.

    Raises
    ------
    ValueError
        If `dtype` is unknown or differs from the existing store's, if `path` cannot be a folder, or if a file of the
        existing store is missing, damaged, of a newer format, or of the previous format, which
        `pylate-flash index convert` reads.
    OSError
        If the folder cannot be read. The message names it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        dtype: str | None = None,
        override: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        if dtype is not None:
            check_choice("dtype", dtype, tuple(DTYPES))
        self.in_memory, self._device = path is None, torch.device("cpu" if path is not None else device)
        self._encodes_on = torch.device(device)
        self.path = Path("memory") if path is None else Path(path).absolute()
        # Held by a thread while it changes what this object holds, or searches it.
        self.lock = threading.RLock()
        self._catalog = Catalog(self.path, dtype or "float32", self.in_memory)
        self._swept = self.in_memory  # whether this object has deleted the leftovers of killed writers
        self._lost: list[Part] = []  # parts in the catalog whose rows did not reach the disk
        self._hold(Documents(), None)
        if self.in_memory:
            return
        check_folder(self.path)
        if (self.path / "manifest.json").exists() and not self.exists:
            raise ValueError(
                f"the index in {self.path} has the old format, with a manifest.json: `pylate-flash index convert "
                f"--index {shlex.quote(str(self.path))} --to NEW` writes a converted copy and leaves it unchanged"
            )
        if override:
            self._empty()
            return
        self._open()
        if dtype is not None and dtype != self.state.dtype:
            raise ValueError(
                f"dtype is {dtype!r}, but the index in {self.path} stores {self.state.dtype!r}: omit dtype to use it "
                "as it is, or build a new index with override=True"
            )

    # Reading

    @property
    def exists(self) -> bool:
        """Whether there is an index in the folder; the first write creates it."""
        return bool(self.state.generation) if self.in_memory else self._catalog.exists

    @property
    def state(self) -> State:
        """The state of the index besides its documents."""
        return self._catalog.state

    @property
    def embedding_size(self) -> int | None:
        """Embedding size; None while there are no documents."""
        return self.state.embedding_size

    @property
    def tokens(self) -> int:
        """Number of tokens of all documents."""
        return int(self.documents.lengths[self.documents.live].sum())

    @property
    def ids(self) -> list[str]:
        """Ids of all documents, in order: a new list."""
        return self.ids_at(self.documents.live)

    def ids_at(self, positions: np.ndarray) -> list[str]:
        """Ids of the documents at some positions."""
        ids = self.documents.ids
        if len(positions) < len(ids.begins):
            return ids.some(positions).to_list()
        # Decode each id once, then index by position.
        return np.array(ids.to_list(), object)[positions].tolist()

    def positions_of(self, ids: Sequence[str]) -> np.ndarray:
        """Positions of the documents with these ids, -1 for unknown ids. Shape: [N], int32."""
        return self.find([ids], 0, torch.device("cpu"))[0].numpy()

    def find(self, lists: Sequence[Sequence[str]], first: int, device: torch.device) -> tuple[torch.Tensor, np.ndarray]:
        """`Documents.find`; a ValueError names the index."""
        try:
            return self.documents.find(lists, first, device)
        except ValueError as error:
            raise ValueError(f"the index in {self.path} {error}") from None

    def positions_where(self, where: Where) -> np.ndarray:
        """Ascending positions of the documents whose metadata satisfy an expression. Raises what `matching` raises.

        Documents that another process has removed since this object read the catalog are left out.
        """
        expression, parameters = checked_where(where)
        # Compare by repr, as 1 == 1.0 are different parameters.
        key = expression, repr(parameters)
        if key not in self._filtered:
            if len(self._filtered) >= _FILTERS:
                self._filtered.clear()
            numbers, documents = self._catalog.numbers_where(expression, parameters), self.documents
            mask = np.isin(documents.numbers[documents.live], numbers, assume_unique=True)
            self._filtered[key] = documents.live[mask]
        return self._filtered[key]

    def __len__(self) -> int:
        return self.documents.count

    def read(self, positions: np.ndarray) -> torch.Tensor:
        """Return the packed rows [T, width] of the documents at `positions` [N], in this order, on the CPU.

        Raises what `Part.read_into` raises.
        """
        begins, ends = self.documents.bounds[positions], self.documents.bounds[positions + 1]
        rows = torch.empty(int((ends - begins).sum()), self.layout.width, dtype=self.layout.dtype)
        read(self.documents.slices(runs_of(begins, ends)), rows)
        return rows

    @property
    def segments(self) -> list[Segment]:
        """The files that hold rows, in the order of the documents."""
        return list(dict.fromkeys(part.segment for part in self.documents.parts if part.segment is not None))

    @property
    def nbytes(self) -> int:
        """Bytes of the catalog and of the segments, or of the rows in memory."""
        if self.in_memory:
            return sum(part.nbytes for part in self.documents.parts)
        return self._catalog.nbytes + sum(segment.nbytes for segment in self.segments)

    def verify(self, show_progress: bool = False) -> None:
        """Read everything that this object has opened; opening has already checked its consistency.

        Raises a ValueError that names the file if a checksum is wrong, or a value is NaN or infinite.
        """
        if not self.exists:
            return
        self._catalog.check()
        if self._lost:
            raise ValueError(
                f"{self._catalog.loss_of(self._lost)}; the next change of the index continues without them"
            )
        numbers = self.documents.numbers[self.documents.live].tolist()
        if not self._catalog.holds(zip(numbers, map(encoded_id, self.ids), strict=True)):
            raise ValueError(f"{self._catalog.path} is damaged: its documents are not those of its parts")
        for part in tqdm(self.documents.parts, desc="Verifying", unit="part", disable=not show_progress):
            part.verify(self._catalog.path)

    # Writing

    def add(
        self,
        ids: Sequence[str],
        documents: Sequence[torch.Tensor],
        batch_size: int = 2000,
        show_progress: bool = False,
        replace: bool = False,
        metadata: list[dict[str, Any]] | None = None,
    ) -> None:
        """Append documents [L_i, d] with distinct ids, all of them or, on an error, none: `indexes.Flat.add_documents`.

        Ids must be new, unless `replace` drops their previous documents in the same step; metadata are as returned by
        `filters.checked_metadata`. Raises a ValueError if an id already exists, d differs from the store's, or a value
        is NaN or infinite in the store's dtype, and what `_changing` raises.
        """
        if not documents:
            return
        size = self.embedding_size or documents[0].shape[1]
        for i, document in enumerate(documents):
            if document.shape[1] != size:
                belongs = f"the index in {self.path}" if self.embedding_size else "the first document"
                here = f"the embeddings of document {ids[i]!r:.100} have size {document.shape[1]}"
                raise ValueError(f"{here}, expected {size} as in {belongs}")
        bounds = np.array([0, *accumulate(map(len, documents))])
        lengths = bounds[1:] - bounds[:-1]
        layout = self.layout if self.layout.size == size else Layout(self.state.dtype, size, self._codec)
        if layout.nbits and (self._codec is None or self._codec.size != size):
            layout = Layout(layout.kept_as, size, trained(documents, layout.nbits, self._encodes_on, show_progress))
        forms = [(layout, self._device)] + ([(layout.beside, torch.device("cpu"))] if layout.beside else [])
        bar = tqdm(None, "Adding documents", len(forms) * len(documents), unit="doc") if show_progress else None

        def converted(start: int, stop: int) -> Iterator[torch.Tensor]:
            for form, device in forms:
                unlimited = device.type == "cuda" or form.nbits
                rows = None if unlimited else max(1, _CONVERTED_BYTES // (size * form.input_dtype.itemsize))
                for first, last in cuts(bounds[start : stop + 1], batch_size, rows):
                    window = slice(start + first, start + last)
                    yield joined(ids[window], documents[window], lengths[window], form, device)
                    if bar is not None:
                        bar.update(last - first)

        with bar or contextlib.nullcontext():
            self.append(ids, lengths, layout, converted, replace, metadata)

    def train(self, documents: Sequence[torch.Tensor], show_progress: bool = False) -> None:
        """Train the codec on sample documents (`codes.trained`) and store it. Raises what `add` raises."""
        if not self.layout.nbits or len(self.documents.parts):
            why = "has documents, and so a codec" if self.layout.nbits else f"stores {self.state.dtype}"
            raise ValueError(
                f"train_codec: expected an empty index of residual codes, but the index in {self.path} {why}"
            )
        for i, document in enumerate(documents):
            if document.shape[1] != documents[0].shape[1]:
                sizes = f"has size {document.shape[1]}, expected {documents[0].shape[1]}"
                raise ValueError(f"documents_embeddings[{i}] {sizes} as documents_embeddings[0]")
        with self._changing(flush=True) as change:
            change.take_codec(trained(documents, self.layout.nbits, self._encodes_on, show_progress))

    def append(
        self,
        ids: Sequence[str],
        lengths: np.ndarray,
        layout: Layout,
        rows: Callable[[int, int], Iterator[torch.Tensor]],
        replace: bool = False,
        metadata: list[dict[str, Any]] | None = None,
    ) -> None:
        """Like `add`, for documents of `lengths` [N]; `rows(start, stop)` yields the rows of a range in pieces."""
        if not ids:
            return
        first, nbytes = self.state.next_number, int(lengths.sum()) * layout.all_nbytes
        with self._changing(
            nbytes >= _FLUSHED_BYTES, embedding_size=layout.size, next_number=first + len(ids)
        ) as change:
            if layout.codec is not None and layout.codec is not self._codec:
                change.take_codec(layout.codec)
            if replace:
                change.remove_ids(ids)
            # In memory, the rows of one addition are searched in place, so they are not split.
            pieces = [(0, len(ids))] if self.in_memory else blocks(lengths, max(1, SEGMENT_BYTES // layout.all_nbytes))
            for start, stop in pieces:
                entries = metadata and metadata[start:stop]
                change.append(layout, first + start, ids[start:stop], lengths[start:stop], rows(start, stop), entries)
        if replace:
            self._rewrite(erase=False)

    def close(self) -> None:
        """Close the catalog, for example before the folder is renamed; it reopens on demand."""
        self._catalog.close()

    def remove(self, positions: np.ndarray, erase: bool = False) -> None:
        """Drop the documents at positions [N]: all of them or, on an error, none.

        They are marked as removed. A segment of which more than a quarter is removed is rewritten if the disk has room;
        with `erase`, every segment with removed documents is rewritten, including those removed before.
        """

        def mark() -> None:
            with self._changing() as change:
                change.remove(self.documents.numbers[np.unique(positions)])

        if len(positions):
            without_room(self.path, mark)
        elif not erase or not self.exists:
            return
        self._rewrite(erase)
        if erase:
            self._tidy()

    def _by_segment(self) -> Iterator[tuple[list[Part], int, int]]:
        """Yield the parts of each segment (in memory: each part alone), its bytes in total, and its live bytes.

        Dead bytes belong to removed documents, whose part may be gone, or were left by killed writers.
        """
        groups: dict[Segment | Part, list[Part]] = {}
        for part in self.documents.parts:
            groups.setdefault(part.segment or part, []).append(part)
        for storage, parts in groups.items():
            dead = sum(int(part.lengths[part.removed].sum()) * part.layout.all_nbytes for part in parts)
            yield parts, storage.nbytes, sum(part.nbytes for part in parts) - dead

    def _rewrite(self, erase: bool) -> None:
        """Rewrite segments of which more than 1 / _DEAD is dead or, to erase, any with dead bytes."""
        for parts, total, live in list(self._by_segment()):
            # Removed documents without tokens leave no dead bytes.
            if total == live and not any(len(part.removed) for part in parts):
                continue
            if not erase and _DEAD * (total - live) <= total:
                continue
            try:
                with self._changing(flush=True) as change:
                    change.move(parts, fresh=True)
            except (OSError, ValueError, ConcurrentWriteError) as error:
                if erase:
                    raise
                # The removal is committed; a later change reclaims the space.
                if not (isinstance(error, OSError) and error.errno in FULL):
                    warnings.warn(f"documents were removed, but their space is not reclaimed: {error}", stacklevel=4)
                return

    def compact(self) -> None:
        """Rewrite the documents into as few segments as their size allows, one at a time; full segments stay."""
        if not self.exists:
            return
        groups: list[list[Part]] = [[]]
        size, dead = 0, [False]
        for parts, total, live in self._by_segment():
            if size + live > SEGMENT_BYTES:
                groups.append([])
                dead.append(False)
                size = 0
            groups[-1] += parts
            dead[-1] |= total > live or any(len(part.removed) for part in parts)
            size += live
        for parts, any_dead in zip(groups, dead, strict=True):
            if not parts or (len({part.segment or part for part in parts}) == 1 and not any_dead):
                continue
            with self._changing(flush=True) as change:
                change.move(parts, fresh=True)
        self._tidy()

    def _tidy(self) -> None:
        """Delete the leftovers of killed writers, and shrink the catalog."""
        self._swept = self.in_memory
        with self._catalog.turn():
            self._sweep()
        if not self.in_memory:
            hold_reserve(self.path)
        self._catalog.compact()

    def note(self, **changes: Any) -> None:
        """Change the recorded model or corpora."""
        with self._changing(**changes):
            pass

    @contextlib.contextmanager
    def _changing(self, flush: bool = False, **changes: Any) -> Iterator[Change]:
        """Change the index, and its state by `changes`. On an error, such as those of `turn`, nothing changes."""
        with self.lock, self._changing_alone(flush, **changes) as change:
            yield change

    @contextlib.contextmanager
    def _changing_alone(self, flush: bool, **changes: Any) -> Iterator[Change]:
        if self._generation != self.state.generation:
            # The last change was committed, but interrupted before this object was updated.
            self._open()
        documents, first, catalog = self.documents, not self._swept, self._catalog
        with catalog.turn(flush) as connection:
            self._sweep()
            before = [*documents.parts, *self._lost]
            change = Change(self.path, connection, before, SEGMENT_BYTES, catalog.written, self.in_memory)
            try:
                for part in self._lost:
                    change.remove(part.numbers[part.live])
                yield change
                if catalog.flushes:
                    # Merge only when flushing: a part lost in a power failure must not contain flushed documents.
                    change.merge(SMALL_PARTS)
                    change.flush()
            except BaseException:
                change.undo.close()
                raise
            updated = Documents(change.parts)
            known = 0 if change.dropped else len(documents.parts)
            crcs = ((part.crc, part.removed_bytes) for part in updated.parts[known:])
            catalog.state = self.state.next(
                parts=len(updated.parts),
                parts_crc=parts_crc(crcs, self.state.parts_crc if known else 0),
                documents=(self.state.documents if known else 0) + Documents(updated.parts[known:]).count,
                **changes,
            )
            catalog.written |= change.written
        change.undo.pop_all()
        self._lost = []
        self._hold(updated, change.codec or self._codec)
        if change.dropped:
            unreferenced = {part.segment for part in change.dropped} - set(self.segments)
            self._delete(segment.path for segment in unreferenced if segment is not None)
        if (change.dropped or first) and not self.in_memory:
            hold_reserve(self.path)

    def _hold(self, documents: Documents, codec: Codec | None) -> None:
        """Set the documents of the store, and the codec of their residual codes."""
        self.documents, self._codec = documents, codec
        # Layout of the stored embeddings; its size is 0 while there are no documents.
        self.layout = self.state.layout
        if codec is not None:
            self.layout = Layout(self.layout.kept_as, self.layout.size, codec)
        self._filtered: dict[tuple, np.ndarray] = {}
        self._generation = self.state.generation  # generation that this object holds

    def _sweep(self) -> None:
        """Delete, once and under the write lock, the segments of killed writers, which the catalog does not name."""
        if not self._swept:
            self._delete(set(self.path.glob(SEGMENT_NAME)) - {segment.path for segment in self.segments})
            self._swept = True

    def _delete(self, segments: Iterable[Path]) -> None:
        for path in segments:
            path.unlink(missing_ok=True)

    def _open(self) -> None:
        """Read the catalog and open the segments that it names; if there are no files, the index is empty."""
        if self.in_memory:
            raise RuntimeError("the index in memory is unusable: its last change was interrupted")
        if not self.exists:
            remains = next(self.path.glob(SEGMENT_NAME), None)
            if remains is not None:
                raise ValueError(
                    f"{self._catalog.path} is missing, though {self.path} holds files of an index, such as "
                    f"{remains.name}: restore it, or start from an empty index with override=True, which deletes them"
                )
            return
        documents, self._lost, codec = self._catalog.open(self._encodes_on)
        self._hold(documents, codec)

    def _empty(self) -> None:
        """Start from an empty index, whatever the folder holds, even a store that cannot be read."""
        dtype = self.state.dtype
        try:
            if self.exists:
                self._catalog.read()
                without_room(self.path, lambda: self._delete(self._catalog.clear(dtype)))
                hold_reserve(self.path)
                self._hold(Documents(), None)
                return
        except ValueError:
            pass
        self._catalog.delete()
        self._delete(self.path.glob(SEGMENT_NAME))
        self._catalog.state = State(dtype=dtype)
        self._hold(Documents(), None)
