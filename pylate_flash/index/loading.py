"""Reading rows from their parts into memory of the scoring device, with several threads for a GPU."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch

from .checksums import block_begin
from .columns import Held
from .documents import Documents, read
from .parts import Part

# Bytes of a pinned block, which is one copy to a GPU, and the number of blocks; bytes that a thread reads at a time.
STAGED_BYTES = 128 << 20
_STAGED = 3
_READ_BYTES = 16 << 20
_THREADS = 16


class Loader:
    """Context manager that fills memory of a device with rows of `documents`.

    For a GPU, several threads read into blocks of pinned memory, one after the other; the thread that completes a block
    launches its copy, on a side stream. Threads do little but read, as they would wait for each other on Python's GIL.
    For a CPU, rows are read synchronously.
    """

    def __init__(self, documents: Documents, device: torch.device) -> None:
        self._documents, self._device = documents, device
        self._pool: ThreadPoolExecutor | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1))
            # The first block is the one whose copy was launched first.
            self._staged = deque[_Staged]()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            # The memory must not be freed or reused before the copies into it have finished.
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def start(self, runs: Iterable[tuple[int, int]], out: Held, tell: Callable[[int], Any] | None = None) -> Loading:
        """Begin to fill `out` [T, width] with the rows of runs, after the work queued on the current stream so far.

        It blocks until pinned memory is free, and raises what reading raises. `tell` is called with the bytes read.
        """
        loading, row_bytes = Loading(), max(1, out.shape[1] * out.element_size())
        if self._pool is None or all(part.memory is not None for part in self._documents.parts):
            for slices, target in _batches(self._documents.slices(runs), out, max(1, _READ_BYTES // row_bytes)):
                read(slices, target)
                if tell is not None:
                    tell(target.nbytes)
            return loading
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        loading.ready = lambda: current.wait_stream(self._stream)
        for slices, target in _batches(self._documents.slices(runs), out, max(1, STAGED_BYTES // row_bytes)):
            staged = _Staged(out) if len(self._staged) < _STAGED else self._staged.popleft()
            self._staged.append(staged)
            loading.futures += staged.fill(self._pool, self._stream, slices, target, tell)
        return loading


class Loading:
    """A load that is in flight."""

    def __init__(self) -> None:
        self.futures: list[Future] = []
        self.ready: Callable[[], None] = lambda: None

    def wait(self) -> None:
        """Wait until all is read, and make the current stream wait for the copies. Raises what reading raised."""
        for future in self.futures:
            future.result()
        self.ready()


class _Staged:
    """A block of pinned memory for rows like those of `out`."""

    def __init__(self, out: Held) -> None:
        rows = min(len(out), max(1, STAGED_BYTES // max(1, out.shape[1] * out.element_size())))
        self._memory = torch.empty(rows, out.shape[1], dtype=out.dtype, pin_memory=True)
        self._copied = torch.cuda.Event(blocking=True)
        self._futures: list[Future] = []

    def fill(
        self,
        pool: ThreadPoolExecutor,
        stream: torch.cuda.Stream,
        slices: Sequence[tuple[Part, int, int]],
        out: Held,
        tell: Callable[[int], Any] | None,
    ) -> list[Future]:
        """Submit the reads of rows, and a copy to `out` after the last of them."""
        for future in self._futures:
            future.result()
        self._copied.synchronize()
        if len(self._memory) < len(out):
            self._memory = _Staged(out)._memory
        memory = self._memory[: len(out)]
        shares = list(_batches(slices, memory, max(1, _READ_BYTES // (memory.nbytes // len(memory)))))
        unread = iter(range(len(shares) - 1, -1, -1))

        def bring(slices: list[tuple[Part, int, int]], target: Held) -> None:
            read(slices, target)
            if tell is not None:
                tell(target.nbytes)
            if not next(unread):
                with torch.cuda.stream(stream):
                    out.copy_(memory, non_blocking=True)
                    self._copied.record()

        self._futures = [pool.submit(bring, *share) for share in shares]
        return self._futures


def _batches(
    slices: Iterable[tuple[Part, int, int]], out: Held, rows: int
) -> Iterator[tuple[list[tuple[Part, int, int]], Held]]:
    """Yield batches of slices of at most `rows` rows in total, and the rows of `out` that they fill.

    If possible, batches end at boundaries of checksum blocks, so that no block is read twice.
    """
    batch: list[tuple[Part, int, int]] = []
    begin = end = 0
    for part, first, last in slices:
        while first < last:
            stop = min(last, first + rows - (end - begin))
            if stop < last:
                boundary = block_begin(part.offset + stop * part.layout.nbytes) - part.offset
                stop = boundary // part.layout.nbytes if boundary // part.layout.nbytes > first else stop
            batch.append((part, first, stop))
            end += stop - first
            if stop < last or end - begin == rows:
                yield batch, out[begin:end]
                batch, begin = [], end
            first = stop
    if batch:
        yield batch, out[begin:end]
