"""Exact search over a store: over all documents, block by block, over some of them, or over candidates per query."""

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
from .scorers import Queries, Scorer, bounds_of_one
from .store import PackedStore
from .transfer import on_device

# Scores computed at a time, and bytes of rows gathered for them.
_SCORES = 1 << 26
_GATHERED_BYTES_CUDA = 1 << 30
_GATHERED_BYTES_CPU = 8 << 20
# Queries scored at a time: on a CPU, up to _QUERY_TOKENS tokens; on a GPU, up to _MOST_QUERIES, in multiples of _ROUND,
# which fill tiles of the kernels; with subsets, _QUERIES_WITH_SUBSETS.
_QUERY_TOKENS = 4096
_MOST_QUERIES, _ROUND = 1024, 8
# On a GPU: queries of the first range, and hits of the last one, at most. While a range is scored, the host packs up to
# _PACKED times as many queries; it makes results of a share _MADE of those left while the rest is scored.
_FIRST, _HITS, _PACKED, _MADE = 16, 1000, 8, 0.6
# Residual codes are decompressed once per range: queries are split only for up to _FEW_CODES tokens, in ranges of at
# least _DECOMPRESSED_FOR queries. Seconds on an H100, in one range and in several: 6.4 million tokens, 200 queries
# 0.0288 and 0.0260, 1000 queries 0.131 and 0.123; 51 million tokens, 1000 queries 0.806 and 0.830.
_FEW_CODES = 1 << 24
_DECOMPRESSED_FOR = 128
_QUERIES_WITH_SUBSETS = 128
# Queries that need fewer multiplications than a GPU does in a millisecond are scored together: another range would cost
# the host as much.
_FEW_PRODUCTS = 1 << 38


class _Hit(TypedDict):
    id: str
    score: float


class SearchResult(_Hit, total=False):
    """A document that was found: its id and its score, like PyLate's `RerankResult`.

    If requested, `matches` holds, for every token of the query, the index of the document's most similar token (the
    first of equal ones), and the similarity; the score is their sum. It is empty for a document without tokens.
    """

    matches: list[tuple[int, float]]


class Search:
    """Search of a store on a device; `memory` is the `device_memory` of `indexes.Flat`.

    With a `projection`, a weight [d, d_model] and a bias [d] (or None) on the device in the dtype of the store,
    documents are hidden states. `ranks` are processes that search together, each over its share of the documents. With
    `beside`, the 16-bit rows stored beside those of the store are scored.
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
        self._documents, self._first = Documents(), 0  # of this rank, and the position of its first document

    @property
    def layout(self) -> Layout:
        """The layout of the rows that are scored."""
        layout = self.store.layout.beside if self._beside else self.store.layout
        assert layout is not None
        return layout

    def scorer(self, name: str) -> Scorer:
        """Return the scorer `name` for rows of the store."""
        return Scorer(name, self.layout, self.projection)

    def hits(
        self,
        queries: Queries,
        k: int,
        scorer: Scorer,
        positions: np.ndarray | None = None,
        subsets: Sequence[Sequence[str]] | None = None,
        show_progress: bool = False,
        generation: int | None = None,
    ) -> Iterator[Hits]:
        """Yield the `k` best documents of every query, in batches of queries; equal scores keep document order.

        The hits of a batch are copied to the host while the next one is scored. The search covers the documents at
        `positions` [N], ascending, and for each query those of `subsets`, whose unknown ids are ignored. A score that
        is NaN or infinite raises a ValueError that names the index: finite embeddings give none unless their products
        overflow. `generation` is that of the first rank's store: shares and slots of another one would not match.
        """
        if generation not in (None, self.store.state.generation):
            raise RuntimeError(
                f"the index in {self.store.path} has generation {self.store.state.generation} in this process and "
                f"{generation} in the first of its group: open it again in every process after one has changed it"
            )
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
            if repeated and (replayed := self._repeated(queries, k, scorer)) is not None:
                yield self._checked(queries, replayed, slots)
                return
        elif resident and not in_place and len(queries) == 1 and scorer.in_place(self.device, True):
            # Treat them as the query's own candidates: then quantized rows are scored in place, too.
            owned = [(slots, np.array([documents]))]
            yield from self._among_slots(queries, k, scorer, owned, show_progress, True)
            return
        ranges, chunks = self._ranges(queries, k), []
        max_documents = max(1, _SCORES // max(stop - start for start, stop in ranges))
        if slots is None:
            walk = self.rows.walk(max_documents, show_progress)
        else:
            walk = self._some(slots, max_documents, show_progress, in_place)
        best: list[tuple[Tensor, Tensor]] = []
        waiting: list[_OnHost] = []
        # Walk the documents once, whatever the number of queries: they may have to be read from the disk.
        for block in walk:
            prepared = scorer.prepared(block.documents)
            for i, (start, stop) in enumerate(ranges):
                if not block.first:
                    # Pack these queries while a GPU scores the ones before.
                    chunks.append(queries[start:stop].packed())
                top = _best(scorer(chunks[i], prepared), block.removed, k)
                if not block.first:
                    best.append(top)
                else:
                    best[i] = joined_best(best[i], (top[0], top[1] + block.first), k)
                if block.first + len(block.documents.cu_seqlens) - 1 == documents:
                    waiting.append(_OnHost(best[i][0] + _poison(chunks[i].values), best[i][1]))
        for copy in waiting:
            yield self._checked(queries, copy.get(), slots)

    def _repeated(self, queries: Queries, k: int, scorer: Scorer) -> Tensor | None:
        """Search all documents, all resident, for one query with a CUDA graph; None for its first calls."""
        query = queries.sequences[0].to(queries.dtype)
        bounds = bounds_of_one(len(query), self.device)

        def best(values: Tensor) -> Tensor:
            (block,) = self.rows.walk(self.rows.documents)
            prepared = scorer.prepared(block.documents)
            scores, columns = _best(scorer(Packed(values, bounds, len(values)), prepared), block.removed, k)
            return _together(scores + _poison(values), columns)

        cast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        return self._graphs((scorer, k, float32_precision(), cast), query, best, (2, 1, k))

    def results(self, batch: Hits) -> list[list[SearchResult]]:
        """Convert hits to results with ids."""
        scores, slots, counts = batch
        valid = np.arange(slots.shape[1]) < counts[:, None]
        names, values = self.store.ids_at(slots[valid]), scores[valid].tolist()
        hits: list[SearchResult] = [{"id": name, "score": value} for name, value in zip(names, values, strict=True)]
        return [hits[first:last] for first, last in pairwise([0, *counts.cumsum().tolist()])]

    def add_matches(self, results: list[list[SearchResult]], batch: Hits, queries: Queries, scorer: Scorer) -> None:
        """Add the matching tokens to the results of the hits of these queries."""
        queries = replace(queries, device=self.device, dtype=self.layout.asked)
        hits = [hit for row in results for hit in row]
        owners = np.repeat(np.arange(len(queries)), [len(row) for row in results])
        slots = np.concatenate([row[: len(top)] for row, top in zip(batch.slots, results, strict=True)]) - self._first
        local = np.flatnonzero((slots >= 0) & (slots < self.rows.documents))
        lengths = self.rows.bounds[slots[local] + 1] - self.rows.bounds[slots[local]]
        row = iter(zip(local.tolist(), owners[local].tolist(), lengths.tolist(), strict=True))
        matches: dict[int, list[tuple[int, float]]] = {}
        for block in self._owned(queries, slots[local], np.bincount(owners[local], minlength=len(queries)), False):
            tokens, similarities = (values.tolist() for values in scorer.matched_tokens(*block))
            for token_row, similarity_row, (hit, query, length) in zip(tokens, similarities, row, strict=False):
                size = int(queries.lengths[query]) if length else 0
                matches[hit] = list(zip(token_row[:size], similarity_row, strict=False))
        for rank_matches in [matches] if self.ranks is None else self.ranks.gather(matches):
            for hit, matched in rank_matches.items():
                hits[hit]["matches"] = matched

    def _checked(
        self, queries: Queries, copied: Tensor, slots: np.ndarray | None, counts: np.ndarray | None = None
    ) -> Hits:
        """Unpack the output of `_together` and check scores; indices are slots of this rank, or indices of `slots`."""
        arrays = copied.numpy()
        scores, indices = arrays[0].view(np.float32), arrays[1]
        if counts is None:
            counts = np.full(*scores.shape)
        checked = Hits(scores, (indices if slots is None else slots[indices]) + self._first, counts)
        # A sort puts NaN first, so none is missed.
        finite = np.isfinite(scores)
        if not finite.all():
            check_finite(queries)
            self._refuse(int(checked.slots.flat[np.argmin(finite)]))
        return checked

    def _follow(self, show_progress: bool) -> None:
        """Update the rows to the current state of the store."""
        # If several threads search first, load only once.
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
        """Those of ascending slots that belong to this rank, relative to its first."""
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
        """Search the subset of every query, restricted to the documents at `positions`."""
        n_documents, device = self.rows.documents, self.device
        allowed: Tensor | None = None
        if positions is not None:
            # The last entry stands for unknown ids, whose position is -1.
            allowed = torch.zeros(len(self.store.documents.lengths) + 1, dtype=torch.bool, device=device)
            allowed[on_device(positions, device)] = True
        bits = n_documents.bit_length()

        def owned() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            """Yield the ascending slots of each query's candidates, and their counts."""
            for first, last in cuts(np.arange(len(queries) + 1), _QUERIES_WITH_SUBSETS):
                lookup, counts = self.store.find(subsets[first:last], first, device)
                slots = lookup - self._first
                valid = (slots >= 0) & (slots < n_documents)
                if allowed is not None:
                    valid &= allowed[lookup]
                # A GPU sorts int32 with half the launches of int64.
                dtype = torch.int32 if len(counts) < 1 << (31 - bits) else torch.int64
                owners = torch.arange(len(counts), dtype=dtype, device=device) << bits
                keys = owners.repeat_interleave(on_device(counts, device), output_size=len(lookup)) | slots
                # Invalid candidates sort last. The host does the rest, so it synchronizes with a GPU only once.
                ordered = keys.masked_fill(~valid, len(counts) << bits).sort().values.cpu().numpy()
                is_first = np.ones(len(ordered), bool)
                np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
                ordered = ordered[is_first]
                edges = np.searchsorted(ordered, np.arange(len(counts) + 1, dtype=ordered.dtype) << bits)
                yield (ordered[: edges[-1]] & ((1 << bits) - 1)).astype(np.int64), np.diff(edges)

        return self._among_slots(queries, k, scorer, owned(), show_progress, in_place)

    def again(self, queries: Queries, k: int, scorer: Scorer, hits: Iterable[Hits]) -> Iterator[Hits]:
        """Score hits of consecutive batches of queries again with `scorer`, and yield the `k` best."""
        self._follow(False)
        queries = replace(queries, device=self.device, dtype=self.layout.asked)

        def owned() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for _, slots, counts in hits:
                valid = np.arange(slots.shape[1]) < counts[:, None]
                # In document order, with the padding of queries with fewer hits at the end.
                slots = np.sort(np.where(valid, slots, np.iinfo(slots.dtype).max), axis=1)
                for first, last in cuts(np.arange(len(counts) + 1), _QUERIES_WITH_SUBSETS):
                    yield slots[first:last][valid[first:last]], counts[first:last]

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
        """Search each query's own documents; `owned` yields slots and counts per query for consecutive batches."""
        waiting: list[tuple[_OnHost, np.ndarray, np.ndarray]] = []

        def next_one() -> Hits:
            copy, slots, counts = waiting.pop(0)
            return self._checked(queries, copy.get(), slots, counts)

        # While a GPU scores a batch, this thread looks up the ids of the next one: another thread and this one would
        # wait for each other on Python's GIL.
        done = 0
        for slots, counts in owned:
            batch, done = queries[done : done + len(counts)], done + len(counts)
            if not len(slots):
                while waiting:
                    yield next_one()
                check_finite(queries)
                yield _nothing(len(batch))
                continue
            scored = [
                scorer(packed, scorer.prepared(documents), candidates) + _poison(packed.values)
                for packed, documents, candidates in self._owned(batch, slots, counts, show_progress, in_place)
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
        """Yield blocks of the documents at `slots` with their queries; query i owns the next `counts[i]` documents."""
        edges = np.concatenate([[0], counts.cumsum()])
        for block in self._some(slots, _SCORES, show_progress, in_place):
            last = block.first + len(block.documents.cu_seqlens) - 1
            low, high = int(np.searchsorted(edges, block.first, "right")) - 1, int(np.searchsorted(edges, last))
            # Boundaries on the host, where the operation plans its launch.
            bounds = (edges[low : high + 1].clip(block.first, last) - block.first).astype(np.int32)
            yield queries[low:high].packed(), block.documents, torch.from_numpy(bounds)

    def _some(self, slots: np.ndarray, documents: int, show_progress: bool, in_place: bool) -> Iterator[Block]:
        """Yield the documents at some slots, at most `documents` at a time, gathered or `in_place`."""
        if in_place and 0 < len(slots) <= documents:
            # A single block needs no boundaries to cut at.
            yield Block(self.rows.some(slots, int(self.rows.lengths[slots].sum()), in_place), 0, None)
            return
        nbytes = _GATHERED_BYTES_CUDA if self.device.type == "cuda" else _GATHERED_BYTES_CPU
        bounds = np.concatenate([[0], self.rows.lengths[slots].cumsum()])
        stretches = cuts(bounds, documents, None if in_place else max(1, nbytes // self.layout.nbytes))
        for start, stop in tqdm(stretches, "Searching", unit="block", disable=not show_progress or len(stretches) < 2):
            yield Block(self.rows.some(slots[start:stop], int(bounds[stop] - bounds[start]), in_place), start, None)

    def _ranges(self, queries: Queries, k: int) -> list[tuple[int, int]]:
        """Ranges of queries that are scored together, each over all documents.

        While a GPU scores a range, the host packs the next one and makes results of the previous one. So the first
        range is small, and the last ones become smaller and smaller.
        """
        if self.device.type != "cuda":
            return blocks(queries.lengths, _QUERY_TOKENS)
        tokens, coded = int(self.rows.bounds[-1]), self.layout.nbits > 0
        products = tokens * int(queries.lengths.sum()) * self.layout.size
        if self.rows.streams or products < _FEW_PRODUCTS or (coded and tokens > _FEW_CODES):
            # Each range reads or decompresses all documents again; and a short kernel hides no work of the host.
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
        embeddings = self.layout.embeddings(rows)
        if torch.isfinite(embeddings.dequantize() if isinstance(embeddings, QuantizedEmbeddings) else embeddings).all():
            raise ValueError(
                f"{name} of the index in {self.store.path} is not finite, though its embeddings are: their products "
                "with the query's overflow float32, so scale them down or normalise them"
            )
        raise ValueError(
            f"the index in {self.store.path} is damaged: {name} is not finite, so its embeddings hold NaN or infinite "
            "values; verify() names the file"
        )


class _OnHost:
    """A copy of scores and indices [Nq, k] to the host, in flight."""

    def __init__(self, scores: Tensor, indices: Tensor) -> None:
        packed = _together(scores, indices)
        self._copy = packed.to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if packed.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(packed.device))

    def get(self) -> Tensor:
        """Wait for the copy and return it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy


def _together(scores: Tensor, indices: Tensor) -> Tensor:
    """Pack float32 scores and indices into one int32 tensor, for a single copy."""
    return torch.stack([scores.view(torch.int32), indices.to(torch.int32)])


def _best(scores: Tensor, removed: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    if removed is not None:
        scores = scores.masked_fill(removed, -torch.inf)
    return k_best(scores, k)


def _poison(queries: Tensor) -> Tensor | float:
    """0, or NaN if queries on a GPU are not finite, to add to scores: checking the queries there would synchronize."""
    return (queries * 0).sum(dtype=torch.float32) if queries.is_cuda else 0.0


def _rounded(queries: float) -> int:
    return -int(-queries // _ROUND) * _ROUND


def _nothing(queries: int) -> Hits:
    return Hits(np.zeros((queries, 0), np.float32), np.zeros((queries, 0), np.int64), np.zeros(queries, np.int64))
