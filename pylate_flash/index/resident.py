"""The rows of a store on the device that scores them: what there is room for stays there, the rest streams through."""

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

__all__ = ["Block", "Packed", "Rows", "free_memory"]

# Rows that stream through a device at a time; on a CPU, few enough that its caches still hold what was read.
STREAMED_BYTES_CUDA = STAGED_BYTES
STREAMED_BYTES_CPU = 8 << 20
# Blocks that are being read while another one is scored.
_AHEAD = 2
# Of the memory that is free, what "auto" takes; the rest is for scores, and for others.
_SHARE = 0.8
# What grows again and again has room for so much more than it needs.
_GROWTH = 1.125
# A load of fewer bytes is over before anybody looks at a bar.
_LONG_BYTES = 1 << 30


class Packed(NamedTuple):
    """Sequences on a device: `values` are embeddings [T, d] or rows of a store [T, width]."""

    values: Any
    # Their boundaries [N + 1], and tokens of the longest of them, or more.
    cu_seqlens: Tensor
    longest: int
    # The same boundaries on the host, from any number on, where it has them.
    host_bounds: np.ndarray | None = None
    # Where they are among others, if they do not follow one another.
    among: Among | None = None


class Among(NamedTuple):
    """Documents among others: which each is [N], int32, of all with these `bounds`, and how many tokens they have."""

    places: Tensor
    bounds: Tensor
    tokens: int

    @property
    def starts(self) -> Tensor:
        """With which of all values each begins [N], int64."""
        return self.bounds[self.places].long()


class Block(NamedTuple):
    """Documents that are scored together: rows of a store, `first` the place of the first among all."""

    documents: Packed
    first: int
    # Which of them count as removed, or None. Shape: [N], bool, on the device.
    removed: Tensor | None


class Rows:
    """The rows of documents, of those that count as removed among them.

    The first ones stay on the device, in one allocation, as many as `memory` bytes hold: "auto" is most of a GPU's
    free memory, and nothing on a CPU. `removed` are places, ascending; `bounds` [documents + 1] say with which row each
    begins, and the last ends; `kept` is how many stay on the device.
    """

    def __init__(self, device: torch.device, memory: int | str) -> None:
        self.device, self.memory = device, memory
        self.layout = Layout("float32", 0)
        self._documents = Documents()
        self._values: Held | None = None
        self._loaded = 0  # rows in it
        self.kept = 0
        self._describe()

    def follow(self, documents: Documents, layout: Layout, show_progress: bool = False) -> None:
        """Hold these documents; what they share with those before stays. It raises what reading does."""
        before, self._documents = self._documents, documents
        if layout != self.layout:
            before, self.layout, self._values = Documents(), layout, None
        self._loaded = min(self._loaded, documents.shared_with(before))
        self._describe()
        self._load(show_progress)

    @property
    def streams(self) -> bool:
        """Whether some do not stay on the device."""
        return self.kept < self.documents

    def _describe(self) -> None:
        """Boundaries and marks, on the host and on the device."""
        documents = self._documents
        self.bounds, self.lengths, self.removed = documents.bounds, documents.lengths, documents.removed
        self.documents, self.longest = len(self.lengths), int(self.lengths.max(initial=0))
        self._bounds = on_device(self.bounds.astype(np.int32 if self.bounds[-1] < 2**31 else np.int64), self.device)
        self._marks: Tensor | None = None
        if len(self.removed):
            self._marks = torch.zeros(self.documents, dtype=torch.bool, device=self.device)
            self._marks[on_device(self.removed, self.device)] = True

    def _load(self, show_progress: bool) -> None:
        """Bring as many rows to the device as may stay there."""
        total, row = int(self.bounds[-1]), max(1, self.layout.nbytes)
        parts = self._documents.parts
        there, own = parts[0].memory if len(parts) == 1 else None, self.device
        if there is not None and own.type == there.device.type and own.index in (None, there.device.index):
            # Of an index that is on no disk.
            self._values, self._loaded, self.kept = there, total, self.documents
            return
        held = 0 if self._values is None else self._values.nbytes
        if isinstance(self.memory, int):
            memory = self.memory
        else:
            memory = int(_SHARE * (free_memory(self.device) + held)) if self.device.type == "cuda" else 0
        if total * row > memory:
            # What streams needs room as well.
            memory = max(0, memory - (_AHEAD + 1) * self._streamed_bytes)
        self.kept = int(np.searchsorted(self.bounds, min(total, memory // row), side="right")) - 1
        rows = int(self.bounds[self.kept])
        self._loaded = min(self._loaded, rows)
        if held > memory:
            self._values, self._loaded = None, 0
        if self._values is None or len(self._values) < rows:
            self._grow(rows, min(int(_GROWTH * rows), memory // row))
        assert self._values is not None
        if self._loaded == rows:
            return
        out = self._values[self._loaded : rows]
        # Until all of it is there, none of what is new is.
        begin, self.kept = self._loaded, int(np.searchsorted(self.bounds, self._loaded, side="right")) - 1
        bar = tqdm(
            total=out.nbytes, desc="Loading", unit="B", unit_scale=True,
            disable=not show_progress or out.nbytes < _LONG_BYTES,
        )  # fmt: skip
        with bar, Loader(self._documents, self.device) as loader:
            loader.start([(begin, rows)], out, bar.update).wait()
        self._loaded, self.kept = rows, int(np.searchsorted(self.bounds, rows, side="right")) - 1

    def _grow(self, rows: int, roomy: int) -> None:
        """Make room for so many rows; where there were some before, for more, as more will follow."""
        old = None if self._values is None else self._values[: self._loaded]
        self._values = None
        if old is not None and len(old):
            try:
                self._values = self._empty(roomy)
            except torch.OutOfMemoryError:
                # Then what is there is read again.
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
        """All documents, at most so many at a time; they are valid until the next is asked for."""
        if self.kept:
            assert self._values is not None
            for start, stop in cuts(self.bounds[: self.kept + 1], documents):
                values = self._values[int(self.bounds[start]) : int(self.bounds[stop])]
                yield self._block(values, start, stop)
        if self.streams:
            rows = max(1, self._streamed_bytes // max(1, self.layout.nbytes))
            rest = [(self.kept + a, self.kept + b) for a, b in cuts(self.bounds[self.kept :], documents, rows)]
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
        """Documents that do not stay on the device, of each block from one to another; `bar` iterates over them."""
        spans = [(int(self.bounds[start]), int(self.bounds[stop])) for start, stop in blocks]
        ahead = min(_AHEAD, len(blocks) - 1) if self.device.type == "cuda" else 0
        ring = [self._empty(max(stop - start for start, stop in spans)) for _ in range(ahead + 1)]
        loading: list[Loading] = []
        with Loader(self._documents, self.device) as loader:

            def begin(number: int) -> None:
                start, stop = spans[number]
                loading.append(loader.start([spans[number]], ring[number % len(ring)][: stop - start]))

            for number in range(ahead):
                begin(number)
            for number, (start, stop) in enumerate(bar):
                # The block that has lain there was scored before the last one, which the current stream may still do.
                if number + ahead < len(blocks):
                    begin(number + ahead)
                loading[number].wait()
                yield self._block(ring[number % len(ring)][: spans[number][1] - spans[number][0]], start, stop)

    def some(self, places: np.ndarray, rows: int, in_place: bool) -> Packed:
        """The documents at some places [N], of so many rows: `in_place`, if all stay on the device, or gathered."""
        if not self.streams and rows:
            assert self._values is not None
            chosen = on_device(places.astype(np.int32), self.device)
            begins = self._bounds[chosen]
            lengths = self._bounds[chosen + 1] - begins
            cu_seqlens = F.pad(lengths.cumsum(0, dtype=self._bounds.dtype), (1, 0))
            if in_place:
                return Packed(self._values, cu_seqlens, self.longest, among=Among(chosen, self._bounds, rows))
            shifts = (begins - cu_seqlens[:-1]).repeat_interleave(lengths, output_size=rows)
            return Packed(
                taken(self._values, torch.arange(rows, device=self.device) + shifts), cu_seqlens, self.longest
            )
        begins, ends = self.bounds[places], self.bounds[places + 1]
        out = self._empty(rows)
        with Loader(self._documents, self.device) as loader:
            loader.start(runs_of(begins, ends), out).wait()
        bounds = np.concatenate([[0], np.cumsum(ends - begins)]).astype(np.int32)
        return Packed(out, on_device(bounds, self.device), self.longest)


def free_memory(device: torch.device) -> int:
    """Bytes of a CUDA device that can be allocated, those that PyTorch has reserved and not in use among them."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
