"""The documents of an index: reading, adding, removing, rewriting, verifying; see the package for the files."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

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

__all__ = ["ADDITION_BYTES", "DTYPES", "SEGMENT_BYTES", "ConcurrentWriteError", "PackedStore"]

# A segment is rewritten as a whole, and open as long as the index is.
SEGMENT_BYTES = 512 << 20
# Of a long run of additions, so much is added at a time: enough to make the cost of one small.
ADDITION_BYTES = 32 << 20
# Embeddings that a CPU converts, checks and writes at a time: what its caches hold, in memory that is used again. With
# 256 MiB at once, it takes two to four times as long.
_CONVERTED_BYTES = 4 << 20
# An addition of so many bytes is flushed at once.
_FLUSHED_BYTES = 1 << 20
# More small additions than this are put together in the catalog.
SMALL_PARTS = 256
# Filters whose documents are kept in mind.
_FILTERS = 16
# A segment of which more than one part in so many does not count any more is rewritten.
_DEAD = 4


class PackedStore:
    """Ordered documents with their token embeddings, kept in a folder.

    Documents keep the order in which they were added, and `lengths[i]` and position `i` of :meth:`read` and
    :meth:`ids_at` speak of the same document. Readers may be many, and each keeps the state that it has opened. Writers
    must take turns: a second one at the same time, or one whose picture of the folder is out of date, gets an error and
    changes nothing.

    Parameters
    ----------
    path
        The folder. It is created by the first write, and is where it is now if the process changes its own. None: keep
        everything in memory, and `path` is the word.
    dtype
        One of `layout.DTYPES`: how embeddings are kept. None: as the existing store does, or float32.
    override
        Start from an empty store. An existing one is emptied at once; other files in the folder are left alone.
    device
        Where embeddings become codes, and a store in memory keeps its rows: those that are there go no other way.

    Raises
    ------
    ValueError
        If `dtype` is none of these or differs from the existing store's, if `path` cannot be a folder, or if a
        file of the existing store is missing, damaged, or of a newer format, or of the format before this one, which
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
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {sorted(DTYPES)}, got {dtype!r}")
        self.in_memory, self._device = path is None, torch.device("cpu" if path is not None else device)
        self._encodes_on = torch.device(device)
        self.path = Path("memory") if path is None else Path(path).absolute()
        self._catalog = Catalog(self.path, dtype or "float32", self.in_memory)
        self._swept = self.in_memory  # whether this object has deleted what writers left that were killed
        self._lost: list[Part] = []  # of the catalog, of which rows have not come to the disk
        self._hold(Documents(), None)
        if self.in_memory:
            return
        check_folder(self.path)
        if (self.path / "manifest.json").exists() and not self.exists:
            raise ValueError(
                f"the index in {self.path} has the format before this one: `pylate-flash index convert --index "
                f"{shlex.quote(str(self.path))} --to NEW` writes it anew, and leaves it as it is"
            )
        if override:
            self._empty()
            return
        self._open()
        if dtype is not None and dtype != self.state.dtype:
            raise ValueError(
                f"dtype={dtype!r} was asked for, but the index in {self.path} keeps {self.state.dtype!r}: leave "
                "dtype out to use it as it is, or build a new index with override=True"
            )

    # Reading

    @property
    def exists(self) -> bool:
        """Whether there is an index in the folder; the first write makes it."""
        return bool(self.state.generation) if self.in_memory else self._catalog.exists

    @property
    def state(self) -> State:
        """What the index is, beside its documents."""
        return self._catalog.state

    @property
    def embedding_size(self) -> int | None:
        """Elements of an embedding; None as long as there are no documents."""
        return self.state.embedding_size

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
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
        # Each is made once, and taken where it is asked for.
        return np.array(ids.to_list(), object)[positions].tolist()

    def positions_of(self, ids: Sequence[str]) -> np.ndarray:
        """Positions of the documents of some ids, -1 of those that are not there. Shape: [N], int32."""
        return self.find([ids], 0, torch.device("cpu"))[0].numpy()

    def find(self, lists: Sequence[Sequence[str]], first: int, device: torch.device) -> tuple[torch.Tensor, np.ndarray]:
        """`Documents.find`; a ValueError names the index."""
        try:
            return self.documents.find(lists, first, device)
        except ValueError as error:
            raise ValueError(f"the index in {self.path} {error}") from None

    def positions_where(self, where: Where) -> np.ndarray:
        """Positions, ascending, of the documents whose metadata fulfil an expression. It raises what `matching` does.

        Of those that another process has removed since this object read the catalog, there is none.
        """
        expression, parameters = checked_where(where)
        # 1 equals 1.0, which is another parameter.
        key = expression, repr(parameters)
        if key not in self._filtered:
            if len(self._filtered) >= _FILTERS:
                self._filtered.clear()
            numbers, documents = self._catalog.numbers_where(expression, parameters), self.documents
            here = np.isin(documents.numbers[documents.live], numbers, assume_unique=True)
            self._filtered[key] = documents.live[here]
        return self._filtered[key]

    def __len__(self) -> int:
        return self.documents.count

    def read(self, positions: np.ndarray) -> torch.Tensor:
        """Return rows [T, width] of the store's layout, on the CPU: those of some documents [N] in this order, packed.

        It raises what `Part.read_into` does.
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
        """Read everything, as this object has opened it; opening has checked that it fits together.

        If a checksum is wrong, or a value is NaN or infinite, it raises a ValueError that names the file.
        """
        if not self.exists:
            return
        self._catalog.check()
        if self._lost:
            raise ValueError(f"{self._catalog.loss_of(self._lost)}; the next change of the index takes it as it is")
        numbers = self.documents.numbers[self.documents.live].tolist()
        if not self._catalog.holds(zip(numbers, map(encoded_id, self.ids), strict=True)):
            raise ValueError(f"{self._catalog.path} is damaged: its documents are others than those of its parts")
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

        Ids are new ones, unless the documents that have them are dropped in the same step, with `replace`; metadata are
        as `filters.checked_metadata` returns them. It raises a ValueError if an id is there already, d differs from the
        store's, or a value is NaN or infinite in the store's dtype, and what `_changing` does.
        """
        if not documents:
            return
        size = self.embedding_size or documents[0].shape[1]
        for i, document in enumerate(documents):
            if document.shape[1] != size:
                belongs = f"the index in {self.path}" if self.embedding_size else "the first document"
                here = f"the embeddings of document {ids[i]!r:.100} have size {document.shape[1]}"
                raise ValueError(f"{here}, those of {belongs} {size}")
        bounds = np.array([0, *accumulate(map(len, documents))])
        lengths = bounds[1:] - bounds[:-1]
        layout = self.layout if self.layout.size == size else Layout(self.state.dtype, size, self._codec)
        if layout.nbits and (self._codec is None or self._codec.size != size):
            layout = Layout(layout.kept_as, size, trained(documents, layout.nbits, self._encodes_on, show_progress))
        forms = [(layout, self._device)] + ([(layout.beside, torch.device("cpu"))] if layout.beside else [])
        bar = tqdm(None, "Adding documents", len(forms) * len(documents), unit="doc") if show_progress else None

        def converted(start: int, stop: int) -> Iterator[torch.Tensor]:
            for form, device in forms:
                whole = device.type == "cuda" or form.nbits
                rows = None if whole else max(1, _CONVERTED_BYTES // (size * form.given.itemsize))
                for first, last in cuts(bounds[start : stop + 1], batch_size, rows):
                    some = slice(start + first, start + last)
                    yield joined(ids[some], documents[some], lengths[some], form, device)
                    if bar is not None:
                        bar.update(last - first)

        with bar or contextlib.nullcontext():
            self.append(ids, lengths, layout, converted, replace, metadata)

    def train(self, documents: Sequence[torch.Tensor], show_progress: bool = False) -> None:
        """Train the codec on documents like those to come (`codes.trained`), and keep it; it raises as `add`."""
        if not self.layout.nbits or len(self.documents.parts):
            why = "has documents, and so a codec" if self.layout.nbits else f"keeps {self.state.dtype}"
            raise ValueError(f"a codec makes residual codes, and is trained before any: the index in {self.path} {why}")
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
        """As `add`, of documents of `lengths` [N] whose rows, of some from one to another, `rows` yields in pieces."""
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
            # In memory, those of one addition are searched where they lie, and so are not cut.
            pieces = [(0, len(ids))] if self.in_memory else blocks(lengths, max(1, SEGMENT_BYTES // layout.all_nbytes))
            for start, stop in pieces:
                own = metadata and metadata[start:stop]
                change.append(layout, first + start, ids[start:stop], lengths[start:stop], rows(start, stop), own)
        if replace:
            self._rewrite(erase=False)

    def close(self) -> None:
        """Close the catalog, as before the folder is renamed; it opens again at need."""
        self._catalog.close()

    def remove(self, positions: np.ndarray, erase: bool = False) -> None:
        """Drop the documents at positions [N]: all of them or, on an error, none.

        They are marked as removed, and a segment of which more than a quarter is so is written anew, if the disk has
        room for it; with `erase`, every segment of which some is so, now or since before.
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
        """The parts of each segment, or each by itself of those in memory; the bytes there, and those that count.

        The others are of documents that are removed, of which no part may be left, or of writers that were killed.
        """
        found: dict[Segment | Part, list[Part]] = {}
        for part in self.documents.parts:
            found.setdefault(part.segment or part, []).append(part)
        for of, parts in found.items():
            dead = sum(int(part.lengths[part.removed].sum()) * part.layout.all_nbytes for part in parts)
            yield parts, of.nbytes, sum(part.nbytes for part in parts) - dead

    def _rewrite(self, erase: bool) -> None:
        """Write segments anew of which more than a byte in _DEAD does not count, or, to erase, any."""
        for parts, there, live in list(self._by_segment()):
            # Documents without tokens have no bytes.
            if there == live and not any(len(part.removed) for part in parts):
                continue
            if not erase and _DEAD * (there - live) <= there:
                continue
            try:
                with self._changing(flush=True) as change:
                    change.move(parts, fresh=True)
            except OSError as error:
                if erase or error.errno not in FULL:
                    raise

    def compact(self) -> None:
        """Write the documents into as few segments as their size allows, one after the other; full ones stay."""
        if not self.exists:
            return
        groups: list[list[Part]] = [[]]
        size, dead = 0, [False]
        for parts, there, live in self._by_segment():
            if size + live > SEGMENT_BYTES:
                groups.append([])
                dead.append(False)
                size = 0
            groups[-1] += parts
            dead[-1] |= there > live or any(len(part.removed) for part in parts)
            size += live
        for parts, any_dead in zip(groups, dead, strict=True):
            if not parts or (len({part.segment or part for part in parts}) == 1 and not any_dead):
                continue
            with self._changing(flush=True) as change:
                change.move(parts, fresh=True)
        self._tidy()

    def _tidy(self) -> None:
        """Delete what writers left that were killed, and what is free in the catalog."""
        self._swept = self.in_memory
        with self._catalog.turn():
            self._sweep()
        if not self.in_memory:
            hold_reserve(self.path)
        self._catalog.compact()

    def note(self, **changes: Any) -> None:
        """Change what the state says of the model or the corpora."""
        with self._changing(**changes):
            pass

    @contextlib.contextmanager
    def _changing(self, flush: bool = False, **changes: Any) -> Iterator[Change]:
        """Change the index; `changes` are those of the state. On an error, as of `Catalog.turn`, nothing is changed."""
        if self._generation != self.state.generation:
            # The last change took effect, and was interrupted before this object took note of it.
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
                    # Not before: of what is lost after a power failure, nothing else is part.
                    change.merge(SMALL_PARTS)
                    change.flush()
            except BaseException:
                change.undo.close()
                raise
            held = Documents(change.parts)
            known = 0 if change.dropped else len(documents.parts)
            crcs = ((part.crc, part.removed_bytes) for part in held.parts[known:])
            catalog.state = self.state.next(
                parts=len(held.parts),
                parts_crc=parts_crc(crcs, self.state.parts_crc if known else 0),
                documents=(self.state.documents if known else 0) + Documents(held.parts[known:]).count,
                **changes,
            )
            catalog.written |= change.written
        change.undo.pop_all()
        self._lost = []
        self._hold(held, change.codec or self._codec)
        if change.dropped:
            gone = {part.segment for part in change.dropped} - set(self.segments)
            self._delete(segment.path for segment in gone if segment is not None)
        if (change.dropped or first) and not self.in_memory:
            hold_reserve(self.path)

    def _hold(self, documents: Documents, codec: Codec | None) -> None:
        """Take documents for those of the store, and a codec for that of their codes."""
        self.documents, self._codec = documents, codec
        # How embeddings are kept; of size 0 as long as there are no documents.
        self.layout = self.state.layout
        if codec is not None:
            self.layout = Layout(self.layout.kept_as, self.layout.size, codec)
        self._filtered: dict[tuple, np.ndarray] = {}
        self._generation = self.state.generation  # of what is held here

    def _sweep(self) -> None:
        """Delete, once and with the turn to write, the segments that the catalog does not name: of killed writers."""
        if not self._swept:
            self._delete(set(self.path.glob(SEGMENT_NAME)) - {segment.path for segment in self.segments})
            self._swept = True

    def _delete(self, segments: Iterable[Path]) -> None:
        for path in segments:
            path.unlink(missing_ok=True)

    def _open(self) -> None:
        """Read the catalog and open the segments that it names; without either, there is an empty index."""
        if self.in_memory:
            raise RuntimeError("the index in memory is of no use any more: its last change was interrupted")
        if not self.exists:
            remains = next(self.path.glob(SEGMENT_NAME), None)
            if remains is not None:
                raise ValueError(
                    f"{self._catalog.path} is missing, though {self.path} holds files of an index, such as "
                    f"{remains.name}: bring it back, or start from an empty index with override=True, which deletes "
                    "them"
                )
            return
        documents, self._lost, codec = self._catalog.open(self._encodes_on)
        self._hold(documents, codec)

    def _empty(self) -> None:
        """Start anew, whatever the folder holds, even a store that cannot be read."""
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
