"""The rows of a store on the device that scores them: as many as fit are resident there, the rest is streamed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from .columns import Held, taken
from .documents import Documents, cuts, runs_of
from .layout import Layout
from .loading import STAGED_BYTES, Loader, Loading
from .transfer import on_device

# Bytes of rows streamed to a device at a time; on a CPU, few enough to be scored while still in its caches.
STREAMED_BYTES_CUDA = STAGED_BYTES
STREAMED_BYTES_CPU = 8 << 20
# Blocks in flight while another one is scored.
_AHEAD = 2
# Share of the free memory that "auto" takes; the rest is left for scores and for other users of the device.
_SHARE = 0.8
# Factor by which a growing buffer is over-allocated.
_GROWTH = 1.125
# Loads of fewer bytes are too short for a progress bar.
_LONG_BYTES = 1 << 30


class Packed(NamedTuple):
    """Packed sequences on a device: `values` are embeddings [T, d] or rows of a store [T, width]."""

    values: Any
    # Boundaries [N + 1], and an upper bound of the length of the longest sequence.
    cu_seqlens: Tensor
    longest: int
    # The same boundaries on the host, up to a common offset, where they are known.
    host_bounds: np.ndarray | None = None
    # Where the sequences lie within `values`, if they are not contiguous.
    among: Among | None = None


class Among(NamedTuple):
    """A selection of documents: their indices [N], int32, the `bounds` of all documents, and their total tokens."""

    positions: Tensor
    bounds: Tensor
    tokens: int

    @property
    def starts(self) -> Tensor:
        """Index of the first row of each document [N], int64."""
        return self.bounds[self.positions].long()


class Block(NamedTuple):
    """Documents that are scored together: rows of a store, and the position of the first document."""

    documents: Packed
    first: int
    # Mask of documents that are marked as removed, or None. Shape: [N], bool, on the device.
    removed: Tensor | None


class Rows:
    """The rows of documents, including those that are marked as removed.

    The first documents are resident on the device, in one allocation, as many as fit in `memory` bytes: "auto" is most
    of a GPU's free memory, and nothing on a CPU. `removed` holds ascending positions, `bounds` [documents + 1] the row
    boundaries of the documents, `n_resident` the number of resident ones.
    """

    def __init__(self, device: torch.device, memory: int | str) -> None:
        self.device, self.memory = device, memory
        self.layout = Layout("float32", 0)
        self._documents = Documents()
        self._values: Held | None = None
        self._loaded = 0  # rows loaded into it
        self.n_resident = 0
        self._describe()

    def follow(self, documents: Documents, layout: Layout, show_progress: bool = False) -> None:
        """Switch to these documents; leading rows shared with the previous ones stay. Raises what reading raises."""
        before, self._documents = self._documents, documents
        if layout != self.layout:
            before, self.layout, self._values = Documents(), layout, None
        self._loaded = min(self._loaded, documents.shared_with(before))
        self._describe()
        self._load(show_progress)

    @property
    def streams(self) -> bool:
        """Whether some documents are not resident on the device."""
        return self.n_resident < self.documents

    def _describe(self) -> None:
        """Set boundaries and removal masks, on the host and on the device."""
        documents = self._documents
        self.bounds, self.lengths, self.removed = documents.bounds, documents.lengths, documents.removed
        self.documents, self.longest = len(self.lengths), int(self.lengths.max(initial=0))
        self._bounds = on_device(self.bounds.astype(np.int32 if self.bounds[-1] < 2**31 else np.int64), self.device)
        self._marks: Tensor | None = None
        if len(self.removed):
            self._marks = torch.zeros(self.documents, dtype=torch.bool, device=self.device)
            self._marks[on_device(self.removed, self.device)] = True

    def _load(self, show_progress: bool) -> None:
        """Load as many rows to the device as may be resident there."""
        total, row_bytes = int(self.bounds[-1]), max(1, self.layout.nbytes)
        parts = self._documents.parts
        stored, device = parts[0].memory if len(parts) == 1 else None, self.device
        if stored is not None and device.type == stored.device.type and device.index in (None, stored.device.index):
            # An in-memory index on this device: use its rows in place.
            self._values, self._loaded, self.n_resident = stored, total, self.documents
            return
        held_bytes = 0 if self._values is None else self._values.nbytes
        if isinstance(self.memory, int):
            memory = self.memory
        else:
            memory = int(_SHARE * (free_memory(self.device) + held_bytes)) if self.device.type == "cuda" else 0
        if total * row_bytes > memory:
            # Streamed blocks need memory as well.
            memory = max(0, memory - (_AHEAD + 1) * self._streamed_bytes)
        self.n_resident = int(np.searchsorted(self.bounds, min(total, memory // row_bytes), side="right")) - 1
        rows = int(self.bounds[self.n_resident])
        self._loaded = min(self._loaded, rows)
        if held_bytes > memory:
            self._values, self._loaded = None, 0
        if self._values is None or len(self._values) < rows:
            self._grow(rows, min(int(_GROWTH * rows), memory // row_bytes))
        assert self._values is not None
        if self._loaded == rows:
            return
        out = self._values[self._loaded : rows]
        # If loading fails, only what was loaded before counts.
        begin, self.n_resident = self._loaded, int(np.searchsorted(self.bounds, self._loaded, side="right")) - 1
        bar = tqdm(
            total=out.nbytes, desc="Loading", unit="B", unit_scale=True,
            disable=not show_progress or out.nbytes < _LONG_BYTES,
        )  # fmt: skip
        with bar, Loader(self._documents, self.device) as loader:
            loader.start([(begin, rows)], out, bar.update).wait()
        self._loaded, self.n_resident = rows, int(np.searchsorted(self.bounds, rows, side="right")) - 1

    def _grow(self, rows: int, roomy: int) -> None:
        """Allocate memory for `rows` rows, or for `roomy` rows when growing, as more will follow."""
        old = None if self._values is None else self._values[: self._loaded]
        self._values = None
        if old is not None and len(old):
            try:
                self._values = self._empty(roomy)
            except torch.OutOfMemoryError:
                # Old and new do not fit together: free the old rows and read them again.
                self._loaded = 0
            else:
                self._values[: len(old)].copy_(old)  # type: ignore[arg-type]
                return
        del old
        self._values = self._empty(rows)

    def _empty(self, rows: int) -> Held:
        return self.layout.empty(rows, self.device)

    @property
    def _streamed_bytes(self) -> int:
        return STREAMED_BYTES_CUDA if self.device.type == "cuda" else STREAMED_BYTES_CPU

    def walk(self, documents: int, show_progress: bool = False) -> Iterator[Block]:
        """Yield blocks of at most `documents` documents; each is valid until the next one is requested."""
        if self.n_resident:
            assert self._values is not None
            for start, stop in cuts(self.bounds[: self.n_resident + 1], documents):
                values = self._values[int(self.bounds[start]) : int(self.bounds[stop])]
                yield self._block(values, start, stop)
        if self.streams:
            rows = max(1, self._streamed_bytes // max(1, self.layout.nbytes))
            first, bounds = self.n_resident, self.bounds[self.n_resident :]
            rest = [(first + start, first + stop) for start, stop in cuts(bounds, documents, rows)]
            bar = tqdm(rest, "Searching", unit="block", disable=not show_progress or len(rest) < 2)
            yield from self._stream(rest, bar)

    def _block(self, values: Held, start: int, stop: int) -> Block:
        bounds = self._bounds[start : stop + 1]
        if self.bounds[start]:
            bounds = bounds - bounds[:1]
        marks = self._marks
        if marks is not None:
            first, last = np.searchsorted(self.removed, (start, stop))
            marks = marks[start:stop] if first < last else None
        return Block(Packed(values, bounds, self.longest, self.bounds[start : stop + 1]), start, marks)

    def _stream(self, blocks: list[tuple[int, int]], bar: Iterable[tuple[int, int]]) -> Iterator[Block]:
        """Stream blocks (start, stop) of documents that are not resident; `bar` iterates over `blocks`."""
        spans = [(int(self.bounds[start]), int(self.bounds[stop])) for start, stop in blocks]
        ahead = min(_AHEAD, len(blocks) - 1) if self.device.type == "cuda" else 0
        ring = [self._empty(max(stop - start for start, stop in spans)) for _ in range(ahead + 1)]
        loading: list[Loading] = []
        with Loader(self._documents, self.device) as loader:

            def begin(i: int) -> None:
                start, stop = spans[i]
                loading.append(loader.start([spans[i]], ring[i % len(ring)][: stop - start]))

            for i in range(ahead):
                begin(i)
            for i, (start, stop) in enumerate(bar):
                # The buffer held the last block; copies into it wait for the current stream, which may still score it.
                if i + ahead < len(blocks):
                    begin(i + ahead)
                loading[i].wait()
                yield self._block(ring[i % len(ring)][: spans[i][1] - spans[i][0]], start, stop)

    def some(self, positions: np.ndarray, rows: int, in_place: bool) -> Packed:
        """Documents at `positions` [N], with `rows` rows in total: in place, if all are resident, or gathered."""
        if not self.streams and rows:
            assert self._values is not None
            indices = on_device(positions.astype(np.int32), self.device)
            begins = self._bounds[indices]
            lengths = self._bounds[indices + 1] - begins
            cu_seqlens = F.pad(lengths.cumsum(0, dtype=self._bounds.dtype), (1, 0))
            if in_place:
                return Packed(self._values, cu_seqlens, self.longest, among=Among(indices, self._bounds, rows))
            shifts = (begins - cu_seqlens[:-1]).repeat_interleave(lengths, output_size=rows)
            return Packed(
                taken(self._values, torch.arange(rows, device=self.device) + shifts), cu_seqlens, self.longest
            )
        begins, ends = self.bounds[positions], self.bounds[positions + 1]
        out = self._empty(rows)
        with Loader(self._documents, self.device) as loader:
            loader.start(runs_of(begins, ends), out).wait()
        bounds = np.concatenate([[0], np.cumsum(ends - begins)]).astype(np.int32)
        return Packed(out, on_device(bounds, self.device), self.longest)


def free_memory(device: torch.device) -> int:
    """Bytes of a CUDA device that can be allocated, including what PyTorch has reserved but does not use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
