"""Exact search over a store: all documents block by block, some of them, or every query's own candidates."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ..ops import QuantizedEmbeddings
from ..problem import float32_precision
from .arguments import check_finite
from .documents import Documents, blocks, cuts, read
from .graphs import Graphs
from .layout import Layout
from .merging import joined_best, k_best, k_best_of_runs
from .ranks import Hits, Ranks
from .resident import Block, Packed, Rows
from .scorers import EMPTY_SCORE, Queries, Scorer, bounds_of_one
from .store import PackedStore
from .transfer import on_device

__all__ = ["EMPTY_SCORE", "Search", "SearchResult"]

# Scores that are computed at a time, and rows that are gathered for it.
_SCORES = 1 << 26
_GATHERED_BYTES_CUDA = 1 << 30
_GATHERED_BYTES_CPU = 8 << 20
# Queries that are scored at a time: on a CPU, of so many tokens; on a GPU, so many at most, by multiples of what fills
# tiles of the kernels; of those with subsets, so many.
_QUERY_TOKENS = 4096
_MOST_QUERIES, _ROUND = 1024, 8
# On a GPU, so many are the first ones, and the last ones have so many hits. So many times those before are packed in
# the time that these are scored in, and of so much of what is left, results are made while the rest is scored.
_FIRST, _HITS, _PACKED, _MADE = 16, 1000, 8, 0.6
# Residual codes that are decompressed for several parts, tokens at most, and for how many queries at least. In seconds
# on an H100, in one part and in several: 200 and 1000 queries of 6.4 million 0.0288 and 0.0260, 0.131 and 0.123; 1000
# of 51 million 0.806 and 0.830.
_FEW_CODES = 1 << 24
_DECOMPRESSED_FOR = 128
_QUERIES_WITH_SUBSETS = 128
# Queries that take a GPU fewer multiplications than it makes in a millisecond are scored together: a part more costs
# the host as much.
_FEW_PRODUCTS = 1 << 38


class _Hit(TypedDict):
    id: str
    score: float


class SearchResult(_Hit, total=False):
    """A document that was found: its id and its score, as PyLate's `RerankResult`.

    If they were asked for, `matches` has, for every token of the query, which of the document's tokens is most similar
    to it (the first of equal ones), and the similarity; the score is their sum. It is empty for a document without
    tokens.
    """

    matches: list[tuple[int, float]]


class Search:
    """How to search a store on a device, of whose memory rows may take as much as `indexes.Flat` says.

    With a `projection`, its weight [d, d_model] and bias [d] (or None) on the device in the type that the store keeps,
    documents are hidden states. `ranks` are processes that search together, each its share of the documents. With
    `beside`, the rows that are kept beside those of the store are scored.
    """

    def __init__(
        self,
        store: PackedStore,
        device: torch.device,
        memory: int | str,
        projection: tuple[Tensor, Tensor | None] | None,
        ranks: Ranks | None = None,
        beside: bool = False,
    ) -> None:
        self.store, self.device, self.projection, self.ranks = store, device, projection, ranks
        self.rows, self._graphs = Rows(device, memory), Graphs(device)
        self._beside = beside
        self._generation: int | None = None
        self._following = threading.Lock()
        self._documents, self._first = Documents(), 0  # of this process, and the position of the first among all

    @property
    def layout(self) -> Layout:
        """That of the rows which are scored."""
        layout = self.store.layout.beside if self._beside else self.store.layout
        assert layout is not None
        return layout

    def scorer(self, name: str) -> Scorer:
        """What scores rows of the store."""
        return Scorer(name, self.layout, self.projection)

    def found(
        self,
        queries: Queries,
        k: int,
        scorer: Scorer,
        positions: np.ndarray | None = None,
        subsets: Sequence[Sequence[str]] | None = None,
        show_progress: bool = False,
    ) -> Iterator[Hits]:
        """The `k` best for every query, of some queries after the other; equal scores in their own order.

        What is found for some queries comes to the host while the next ones are scored. They are looked for among the
        documents at some positions [N], ascending, and for each query among those of `subsets`, of which ids that are
        none of the store's are left out. A score that is NaN or infinite is a ValueError, which names the index: finite
        embeddings give none unless their products overflow.
        """
        self._follow(show_progress)
        queries = replace(queries, device=self.device)
        resident = not self.rows.streams
        if subsets is not None:
            in_place = resident and scorer.in_place(self.device, True)
            yield from self._among_candidates(queries, k, scorer, subsets, positions, show_progress, in_place)
            return
        slots = None if positions is None else self._here(positions)
        documents = self.rows.documents if slots is None else len(slots)
        if not documents:
            check_finite(queries)
            yield _nothing(len(queries))
            return
        in_place = slots is not None and resident and scorer.in_place(self.device, False)
        if slots is None:
            k = min(k, documents - len(self.rows.removed))
            repeated = resident and len(queries) == 1 and scorer.by_kernels(self.device)
            repeated = repeated and scorer.repeats(len(queries.sequences[0]))
            if repeated and (again := self._repeated(queries, k, scorer)) is not None:
                yield self._checked(queries, again, slots)
                return
        elif resident and not in_place and len(queries) == 1 and scorer.in_place(self.device, True):
            # As documents of its own, those of fewer bits are scored where they lie.
            own = [(slots, np.array([documents]))]
            yield from self._among_slots(queries, k, scorer, own, show_progress, True)
            return
        ranges, chunks = self._ranges(queries, k), []
        most = max(1, _SCORES // max(stop - start for start, stop in ranges))
        if slots is None:
            walk = self.rows.walk(most, show_progress)
        else:
            walk = self._some(slots, most, show_progress, in_place)
        best: list[tuple[Tensor, Tensor]] = []
        waiting: list[_OnHost] = []
        # The documents are walked once, whatever the number of queries: they may have to come from the disk.
        for block in walk:
            given = scorer.prepared(block.documents)
            for i, (start, stop) in enumerate(ranges):
                if not block.first:
                    # While a GPU scores those before.
                    chunks.append(queries[start:stop].packed())
                found = _best(scorer(chunks[i], given), block.removed, k)
                if not block.first:
                    best.append(found)
                else:
                    best[i] = joined_best(best[i], (found[0], found[1] + block.first), k)
                if block.first + len(block.documents.cu_seqlens) - 1 == documents:
                    waiting.append(_OnHost(best[i][0] + _poison(chunks[i].values), best[i][1]))
        for copy in waiting:
            yield self._checked(queries, copy.get(), slots)

    def _repeated(self, queries: Queries, k: int, scorer: Scorer) -> Tensor | None:
        """What is found among all documents, which stay on the device, for one query; None for the first like it."""
        query = queries.sequences[0].to(queries.dtype)
        bounds = bounds_of_one(len(query), self.device)

        def best(values: Tensor) -> Tensor:
            (block,) = self.rows.walk(self.rows.documents)
            given = scorer.prepared(block.documents)
            scores, places = _best(scorer(Packed(values, bounds, len(values)), given), block.removed, k)
            return _together(scores + _poison(values), places)

        cast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        return self._graphs((scorer, k, float32_precision(), cast), query, best, (2, 1, k))

    def results(self, found: Hits) -> list[list[SearchResult]]:
        """What was found, with ids."""
        scores, slots, counts = found
        there = np.arange(slots.shape[1]) < counts[:, None]
        names, values = self.store.ids_at(slots[there]), scores[there].tolist()
        hits: list[SearchResult] = [{"id": name, "score": value} for name, value in zip(names, values, strict=True)]
        return [hits[first:last] for first, last in pairwise([0, *counts.cumsum().tolist()])]

    def add_matches(self, results: list[list[SearchResult]], found: Hits, queries: Queries, scorer: Scorer) -> None:
        """Put into the results of what was found for these queries which tokens match."""
        queries = replace(queries, device=self.device, dtype=self.layout.asked)
        hits = [hit for own in results for hit in own]
        owners = np.repeat(np.arange(len(queries)), [len(own) for own in results])
        slots = np.concatenate([own[: len(of)] for own, of in zip(found.slots, results, strict=True)]) - self._first
        here = np.flatnonzero((slots >= 0) & (slots < self.rows.documents))
        lengths = self.rows.bounds[slots[here] + 1] - self.rows.bounds[slots[here]]
        own = iter(zip(here.tolist(), owners[here].tolist(), lengths.tolist(), strict=True))
        known: dict[int, list[tuple[int, float]]] = {}
        for block in self._owned(queries, slots[here], np.bincount(owners[here], minlength=len(queries)), False):
            tokens, similarities = (values.tolist() for values in scorer.matched_tokens(*block))
            for of_tokens, of_similarities, (hit, query, length) in zip(tokens, similarities, own, strict=False):
                size = int(queries.lengths[query]) if length else 0
                known[hit] = list(zip(of_tokens[:size], of_similarities, strict=False))
        for some in [known] if self.ranks is None else self.ranks.gather(known):
            for hit, matched in some.items():
                hits[hit]["matches"] = matched

    def _checked(
        self, queries: Queries, found: Tensor, slots: np.ndarray | None, counts: np.ndarray | None = None
    ) -> Hits:
        """What `_together` has made, if scores are finite; places are slots of this process, or among `slots`."""
        both = found.numpy()
        scores, places = both[0].view(np.float32), both[1]
        if counts is None:
            counts = np.full(*scores.shape)
        checked = Hits(scores, (places if slots is None else slots[places]) + self._first, counts)
        # A sort puts NaN first, so none that was computed is missed.
        finite = np.isfinite(scores)
        if not finite.all():
            check_finite(queries)
            self._refuse(int(checked.slots.flat[np.argmin(finite)]))
        return checked

    def _follow(self, show_progress: bool) -> None:
        """Have the rows of the store as it is now."""
        # Threads that search first load once.
        with self._following:
            if self._generation == self.store.state.generation:
                return
            documents = self.store.documents
            if self._beside:
                documents = Documents(part.beside for part in documents.parts)  # type: ignore[misc]
            if self.ranks is not None:
                first, last = self.ranks.share(documents.parts)
                self._first = sum(part.documents for part in documents.parts[:first])
                documents = Documents(documents.parts[first:last])
            self._graphs.forget()
            self.rows.follow(documents, self.layout, show_progress)
            self._documents = documents
            self._generation = self.store.state.generation

    def _here(self, slots: np.ndarray) -> np.ndarray:
        """Those of some slots, which ascend, that are of this process, counted from its first."""
        low, high = np.searchsorted(slots, (self._first, self._first + self.rows.documents))
        return slots[low:high] - self._first

    def _among_candidates(
        self,
        queries: Queries,
        k: int,
        scorer: Scorer,
        subsets: Sequence[Sequence[str]],
        positions: np.ndarray | None,
        show_progress: bool,
        in_place: bool,
    ) -> Iterator[Hits]:
        """For every query among documents of its own, of those at some positions."""
        n_documents, device = self.rows.documents, self.device
        allowed: Tensor | None = None
        if positions is not None:
            # The last one stands for ids that are none.
            allowed = torch.zeros(len(self.store.documents.lengths) + 1, dtype=torch.bool, device=device)
            allowed[on_device(positions, device)] = True
        bits = n_documents.bit_length()

        def owned() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            """Each query's, ascending."""
            for first, last in cuts(np.arange(len(queries) + 1), _QUERIES_WITH_SUBSETS):
                found, counts = self.store.find(subsets[first:last], first, device)
                slots = found - self._first
                there = (slots >= 0) & (slots < n_documents)
                if allowed is not None:
                    there &= allowed[found]
                # A GPU sorts numbers of half the bits in half the launches.
                dtype = torch.int32 if len(counts) < 1 << (31 - bits) else torch.int64
                owners = torch.arange(len(counts), dtype=dtype, device=device) << bits
                keys = owners.repeat_interleave(on_device(counts, device), output_size=len(found)) | slots
                # What is not there becomes the last one. The rest is the host's, which waits for a GPU but once.
                ordered = keys.masked_fill(~there, len(counts) << bits).sort().values.cpu().numpy()
                is_first = np.ones(len(ordered), bool)
                np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
                ordered = ordered[is_first]
                edges = np.searchsorted(ordered, np.arange(len(counts) + 1, dtype=ordered.dtype) << bits)
                yield (ordered[: edges[-1]] & ((1 << bits) - 1)).astype(np.int64), np.diff(edges)

        return self._among_slots(queries, k, scorer, owned(), show_progress, in_place)

    def again(self, queries: Queries, k: int, scorer: Scorer, found: Iterable[Hits]) -> Iterator[Hits]:
        """The `k` best, by these scores, of what was found for some of the queries after the others."""
        self._follow(False)
        queries = replace(queries, device=self.device, dtype=self.layout.asked)

        def owned() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for _, slots, counts in found:
                there = np.arange(slots.shape[1]) < counts[:, None]
                # In the order of the documents, before what only fills the places of queries with fewer.
                slots = np.sort(np.where(there, slots, np.iinfo(slots.dtype).max), axis=1)
                for first, last in cuts(np.arange(len(counts) + 1), _QUERIES_WITH_SUBSETS):
                    yield slots[first:last][there[first:last]], counts[first:last]

        return self._among_slots(queries, k, scorer, owned(), False, False)

    def _among_slots(
        self,
        queries: Queries,
        k: int,
        scorer: Scorer,
        owned: Iterable[tuple[np.ndarray, np.ndarray]],
        show_progress: bool,
        in_place: bool,
    ) -> Iterator[Hits]:
        """For every query among documents of its own: of some queries after the others, slots and how many each has."""
        waiting: list[tuple[_OnHost, np.ndarray, np.ndarray]] = []

        def next_one() -> Hits:
            copy, slots, counts = waiting.pop(0)
            return self._checked(queries, copy.get(), slots, counts)

        # While a GPU scores some, ids of the next ones are looked up, by this thread: another would wait for Python's
        # lock, and have this one wait for it.
        done = 0
        for slots, counts in owned:
            some, done = queries[done : done + len(counts)], done + len(counts)
            if not len(slots):
                while waiting:
                    yield next_one()
                check_finite(queries)
                yield _nothing(len(some))
                continue
            scored = [
                scorer(asked, scorer.prepared(given), candidates) + _poison(asked.values)
                for asked, given, candidates in self._owned(some, slots, counts, show_progress, in_place)
            ]
            scores = scored[0] if len(scored) == 1 else torch.cat(scored)
            waiting.append((_OnHost(*k_best_of_runs(scores, counts, k)), slots, np.minimum(counts, k)))
            if len(waiting) > 1:
                yield next_one()
        while waiting:
            yield next_one()

    def _owned(
        self, queries: Queries, slots: np.ndarray, counts: np.ndarray, show_progress: bool, in_place: bool = False
    ) -> Iterator[tuple[Packed, Packed, Tensor]]:
        """The documents at `slots`, of which each query owns the next of so many, a block with its owners at a time."""
        edges = np.concatenate([[0], counts.cumsum()])
        for block in self._some(slots, _SCORES, show_progress, in_place):
            last = block.first + len(block.documents.cu_seqlens) - 1
            low, high = int(np.searchsorted(edges, block.first, "right")) - 1, int(np.searchsorted(edges, last))
            # On the host, where the operation plans its launch.
            bounds = (edges[low : high + 1].clip(block.first, last) - block.first).astype(np.int32)
            yield queries[low:high].packed(), block.documents, torch.from_numpy(bounds)

    def _some(self, slots: np.ndarray, documents: int, show_progress: bool, in_place: bool) -> Iterator[Block]:
        """The documents at some slots, at most so many at a time, gathered or `in_place`."""
        if in_place and 0 < len(slots) <= documents:
            # Nothing is to be cut, for which boundaries would be needed.
            yield Block(self.rows.some(slots, int(self.rows.lengths[slots].sum()), in_place), 0, None)
            return
        nbytes = _GATHERED_BYTES_CUDA if self.device.type == "cuda" else _GATHERED_BYTES_CPU
        bounds = np.concatenate([[0], self.rows.lengths[slots].cumsum()])
        stretches = cuts(bounds, documents, None if in_place else max(1, nbytes // self.layout.nbytes))
        for start, stop in tqdm(stretches, "Searching", unit="block", disable=not show_progress or len(stretches) < 2):
            yield Block(self.rows.some(slots[start:stop], int(bounds[stop] - bounds[start]), in_place), start, None)

    def _ranges(self, queries: Queries, k: int) -> list[tuple[int, int]]:
        """From which query to which are scored together; each walks all documents.

        While a GPU scores some, the host packs those after them, and makes results of those before: so the first are
        few, and the last are fewer and fewer.
        """
        if self.device.type != "cuda":
            return blocks(queries.lengths, _QUERY_TOKENS)
        tokens, coded = int(self.rows.bounds[-1]), self.layout.nbits > 0
        products = tokens * int(queries.lengths.sum()) * self.layout.size
        if self.rows.streams or products < _FEW_PRODUCTS or (coded and tokens > _FEW_CODES):
            # What is read, or decompressed, is so for each; and what takes no time hides none of the host's.
            return cuts(np.arange(len(queries) + 1), _MOST_QUERIES)
        least = _DECOMPRESSED_FOR if coded else 0
        sizes: list[int] = []
        while left := len(queries) - sum(sizes):
            size = max(least, min(_MADE * left, _PACKED * sizes[-1]) if sizes else min(left / 4, _FIRST))
            last = left - size < least // 2 or left * k <= _HITS
            sizes.append(min(_MOST_QUERIES, left, left if last else _rounded(size)))
        return list(pairwise(np.cumsum([0, *sizes]).tolist()))

    def _refuse(self, slot: int) -> None:
        name = f"the score of document {self.store.ids_at(np.array([slot]))[0]!r:.100}"
        start, stop = self.rows.bounds[slot - self._first :][:2].tolist()
        rows = torch.empty(stop - start, self.layout.width, dtype=self.layout.dtype)
        read(self._documents.slices([(start, stop)]), rows)
        kept = self.layout.embeddings(rows)
        if torch.isfinite(kept.dequantize() if isinstance(kept, QuantizedEmbeddings) else kept).all():
            raise ValueError(
                f"{name} of the index in {self.store.path} is not finite, though its embeddings are: products of them "
                "and of the query's overflow float32, so make them smaller, as normalised ones are"
            )
        raise ValueError(
            f"the index in {self.store.path} is damaged: {name} is not finite, so its embeddings hold NaN or infinite "
            "values; verify() names the file"
        )


class _OnHost:
    """Scores and places [Nq, k] on their way to the host."""

    def __init__(self, scores: Tensor, places: Tensor) -> None:
        both = _together(scores, places)
        self._copy = both.to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if both.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(both.device))

    def get(self) -> Tensor:
        """Both, when they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy


def _together(scores: Tensor, places: Tensor) -> Tensor:
    """Scores, float32, and places in one tensor of int32, to be copied at once."""
    return torch.stack([scores.view(torch.int32), places.to(torch.int32)])


def _best(scores: Tensor, removed: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    if removed is not None:
        scores = scores.masked_fill(removed, -torch.inf)
    return k_best(scores, k)


def _poison(queries: Tensor) -> Tensor | float:
    """A 0 that is NaN where queries on a GPU are not finite, so that their scores are not: to look there is to wait."""
    return (queries * 0).sum(dtype=torch.float32) if queries.is_cuda else 0.0


def _rounded(queries: float) -> int:
    return -int(-queries // _ROUND) * _ROUND


def _nothing(queries: int) -> Hits:
    return Hits(np.zeros((queries, 0), np.float32), np.zeros((queries, 0), np.int64), np.zeros(queries, np.int64))
