"""Search by several processes: each scores its own segments, and all get the same results."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from .parts import Part

T = TypeVar("T")

# Pickled values are prefixed with their length, of _LENGTH_BYTES. Those that fit in _EAGER_BYTES, such as the hits of a
# few queries, take one collective, where torch's for objects take two: 1.2 ms instead of 0.5 for the hits of one query,
# between two processes of two cores.
_LENGTH_BYTES = 8
_EAGER_BYTES = 1 << 15


class Hits(NamedTuple):
    """Hits of some queries: scores and slots [Nq, k], best first, and the number of hits of each query [Nq]."""

    scores: np.ndarray
    slots: np.ndarray
    counts: np.ndarray


class RankError(RuntimeError):
    """Another process of a group has failed or ended."""


class Ranks:
    """The processes of a group: this one is `rank` of `size`. All of them must call each collective method."""

    def __init__(self, group: Any) -> None:
        if not isinstance(group, dist.ProcessGroup | None):
            raise TypeError(
                "group must be a process group of torch.distributed that this process belongs to, got "
                f"{type(group).__name__}"
            )
        self._group = _of_hosts(group)
        # The error of the first rank, which was raised on all ranks.
        self.heard: Exception | None = None
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def share(self, parts: Sequence[Part]) -> tuple[int, int]:
        """Return the first and the end part of this rank: adjacent segments, with about as many rows on each rank."""
        firsts, rows, total = [0], [], 0
        for _, run in groupby(parts, lambda part: part.segment or part):
            group = list(run)
            firsts.append(firsts[-1] + len(group))
            rows.append(sum(part.rows for part in group))
            total += rows[-1]
        # A segment belongs to the rank whose share contains its middle.
        middles = np.cumsum(rows) - np.array(rows) / 2
        owners = (middles * self.size // max(1, total)).astype(np.int64)
        low, high = np.searchsorted(owners, (self.rank, self.rank + 1))
        return firsts[low], firsts[high]

    def agreed(self, make: Callable[[], T]) -> T:
        """Return on all ranks what `make` returns on the first rank, or raise the error that it raises there."""
        outcome: list[Any] = [None, None]
        if not self.rank:
            try:
                outcome[0] = make()
            except Exception as error:
                outcome[1] = error
        (data,) = self._exchanged(outcome, self._from_first)
        if self.rank:
            outcome = pickle.loads(data)
        if outcome[1] is not None:
            self.heard = outcome[1]
            raise outcome[1]
        return outcome[0]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks."""
        return [pickle.loads(data) for data in self._exchanged(value, self._from_all)]

    def to_first(self, make: Callable[[], T], what: str) -> list[T]:
        """Return what `make` returns on each rank, on the first rank only; an empty list on the others.

        If one rank fails, the others raise a RankError that states `what` it could not do, and why.
        """
        try:
            result = make()
        except Exception as error:
            self.gather(f"{type(error).__name__}: {error}")
            raise
        self._check(self.gather(None), what)
        values: list[Any] = [None] * self.size if not self.rank else []
        self._do(dist.gather_object, result, values or None, dst=dist.get_global_rank(self._group, 0))
        return values

    def _check(self, reports: Sequence[Any], what: str) -> None:
        """Raise a RankError if a rank reports why it failed."""
        for rank, report in enumerate(reports):
            if isinstance(report, str):
                raise RankError(f"rank {rank} could not {what}: {report}")

    def _do(self, collective: Callable[..., object], *arguments: Any, **options: Any) -> None:
        try:
            collective(*arguments, **options, group=self._group)
        except RuntimeError as error:
            raise RankError(f"another process of the group has ended (seen by rank {self.rank}): {error}") from error

    def _exchanged(self, value: Any, move: Callable[[torch.Tensor], np.ndarray]) -> list[bytes]:
        """Exchange pickled values with the collective `move`, which takes bytes [n] and returns bytes [values, n]."""
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        own = np.frombuffer(len(data).to_bytes(_LENGTH_BYTES, "little") + data, np.uint8)
        moved = move(_piece(own, 0, _EAGER_BYTES))
        ends = moved[:, :_LENGTH_BYTES].copy().view("<i8")[:, 0] + _LENGTH_BYTES
        if (most := int(ends.max())) > _EAGER_BYTES:
            moved = np.concatenate([moved, move(_piece(own, _EAGER_BYTES, most))], axis=1)
        return [row[_LENGTH_BYTES:end].tobytes() for row, end in zip(moved, ends, strict=True)]

    def _from_first(self, piece: torch.Tensor) -> np.ndarray:
        self._do(dist.broadcast, piece, dist.get_global_rank(self._group, 0))
        return piece.unsqueeze(0).numpy()

    def _from_all(self, piece: torch.Tensor) -> np.ndarray:
        pieces = piece.new_empty(self.size, len(piece))
        self._do(dist.all_gather, list(pieces), piece)
        return pieces.numpy()

    def merged(self, hits: Iterable[Hits], n_queries: int, k: int) -> Iterator[Hits]:
        """Merge the hits of all ranks, each among its own documents; yield the best for consecutive batches of queries.

        Batches may differ between ranks. Queries that all ranks have finished are merged while the next are scored.
        If one rank fails to search, the others raise a RankError.
        """
        local, local_queries, done = iter(hits), 0, 0
        waiting: list[list[Hits]] = [[] for _ in range(self.size)]
        while done < n_queries:
            try:
                batch = next(local) if local_queries < n_queries else None
            except Exception as error:
                self.gather(f"{type(error).__name__}: {error}")
                raise
            if batch is not None:
                local_queries += len(batch.scores)
            gathered: list[Any] = self.gather(batch)
            self._check(gathered, "search the index")
            for queue, arrived in zip(waiting, gathered, strict=True):
                if arrived is not None:
                    queue.append(arrived)
            ready = min(sum(len(batch.scores) for batch in rank_hits) for rank_hits in waiting)
            if ready:
                done += ready
                queued = [_padded(rank_hits) for rank_hits in waiting]
                yield _best([Hits(*(array[:ready] for array in rank_hits)) for rank_hits in queued], k)
                waiting = [[Hits(*(array[ready:] for array in rank_hits))] for rank_hits in queued]


def _of_hosts(group: Any) -> Any:
    """A group of the same processes whose collectives take CPU tensors.

    What ranks exchange is on the host already. NCCL would copy it to a GPU and back, and its watchdog aborts a process
    that waits for one that has ended, where gloo raises an error.
    """
    return group if "cpu:" in dist.get_backend_config(group) else _over_gloo(group)


@cache
def _over_gloo(group: Any) -> Any:
    """A gloo group of the same processes, with the same timeout."""
    timeout = group._get_backend(torch.device("cuda")).options._timeout
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)


def _piece(data: np.ndarray, start: int, stop: int) -> torch.Tensor:
    """Bytes from `start` to `stop`, padded with zeros after the end."""
    piece, chunk = np.zeros(stop - start, np.uint8), data[start:stop]
    piece[: len(chunk)] = chunk
    return torch.from_numpy(piece)


def _padded(batches: list[Hits]) -> Hits:
    """Concatenate hits of consecutive queries, padded with hits that sort last."""
    counts = np.concatenate([batch.counts for batch in batches])
    shape = len(counts), max(batch.slots.shape[1] for batch in batches)
    scores, slots = np.full(shape, -np.inf, np.float32), np.zeros(shape, np.int64)
    first = 0
    for batch in batches:
        window = slice(first, first + len(batch.counts)), slice(batch.slots.shape[1])
        valid = np.arange(batch.slots.shape[1]) < batch.counts[:, None]
        np.copyto(scores[window], batch.scores, where=valid)
        slots[window] = batch.slots
        first += len(batch.counts)
    return Hits(scores, slots, counts)


def _best(hits: Sequence[Hits], k: int) -> Hits:
    """Merge the hits of all ranks for the same queries.

    The slots of a rank precede those of the next one, so a stable sort keeps equal scores in document order.
    """
    all_scores, all_slots, all_counts = zip(*hits, strict=True)
    scores, slots = np.concatenate(all_scores, axis=1), np.concatenate(all_slots, axis=1)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    scores, slots = (np.take_along_axis(array, order, axis=1) for array in (scores, slots))
    return Hits(scores, slots, np.minimum(np.sum(all_counts, axis=0), k))
