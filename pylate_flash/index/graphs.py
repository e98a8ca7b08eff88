"""CUDA graphs of single-query searches on a GPU: launching the kernels one by one takes longer than running them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

# Maximum number of graphs, some hundred kilobytes each, and number of eager calls before one is captured: these compile
# and record the kernels.
_MOST, _BEFORE = 64, 3


class _Graph:
    """A captured call of `best` for queries like `query`; its result on the host is int32 of this shape.

    Copies from and to the host are captured too: launching one takes longer than copying so few bytes.
    """

    def __init__(
        self, query: Tensor, best: Callable[[Tensor], Tensor], shape: Sequence[int], device: torch.device, pool: Any
    ) -> None:
        self._device, on_host = device, query.device.type == "cpu"
        self._query = torch.empty_like(query, device=None if on_host else device, pin_memory=on_host)
        self._hits = torch.empty(*shape, dtype=torch.int32, pin_memory=True)
        # Keep what `best` refers to alive as long as the graph.
        self._best, self._graph = best, torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            # Other threads may call CUDA freely during the capture.
            self._graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                self._hits.copy_(best(self._query.to(device, non_blocking=True)), non_blocking=True)
            finally:
                self._graph.capture_end()
        self._done = torch.cuda.Event()

    def __call__(self, query: Tensor) -> Tensor:
        self._query.copy_(query, non_blocking=True)
        self._graph.replay()
        self._done.record(torch.cuda.current_stream(self._device))
        self._done.synchronize()
        return self._hits.clone()


class Graphs:
    """The graphs of a device, keyed by all that determines their kernels and arguments; replayed one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.Lock()
        self._pool: Any = None
        self._known: dict[Hashable, int | _Graph] = {}

    def forget(self) -> None:
        """Release all graphs, and the tensors that they refer to."""
        with self._lock:
            self._known, self._pool = {}, None

    def __call__(
        self, key: Hashable, query: Tensor, best: Callable[[Tensor], Tensor], shape: Sequence[int]
    ) -> Tensor | None:
        """Return the result of `best` for a query [L, d], int32 of this shape on the host.

        None for the first calls with a key.
        """
        key = key, query.shape, query.dtype, query.device.type
        with self._lock:
            entry = self._known.get(key, 0)
            if isinstance(entry, _Graph):
                return entry(query)
            if entry < _BEFORE:
                if len(self._known) == _MOST:
                    self._known, self._pool = {}, None
                self._known[key] = entry + 1
                return None
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = self._known[key] = _Graph(query, best, shape, self._device, self._pool)
            return graph(query)
