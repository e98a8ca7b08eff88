"""The suite `retrieval`: searches of an exact index, from queries on the host to lists of ids and scores.

The corpora have the sizes of BEIR's, and as many passages as MS MARCO has; their embeddings are made on the device, and
the index keeps them in memory, in 8 bits where there is no room for more. Rows of a subset give every query a list of
ids, those of a filter an expression that one document in a hundred fulfils. The floor counts every embedding once, or
the products. What a store on the disk does (adding, loading, streaming) belongs to no row, and is told beneath.

Approximate indexes are shown beside it, and what share of the exact ones they find is not.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import methodcaller
from typing import Any, NamedTuple

import torch

import pylate_flash
from pylate_flash.bench import exact
from pylate_flash.bench.calls import Call, Varlen, unit_vectors
from pylate_flash.bench.peers import LIK, Peer
from pylate_flash.bench.protocol import Work
from pylate_flash.bench.rows import Row
from pylate_flash.bench.suite import (
    LIK_SYSTEM,
    OUR_SYSTEM,
    Candidate,
    Suite,
    System,
    Unavailable,
    another_way,
    release,
)

K = 100
# Ids of each query's subset; one document in so many fulfils the filter.
SUBSET, KEPT = 1000, 100
# Queries whose lists are compared with float64.
CHECKED = 2
# Documents of an approximate index that is built within a minute, and of corpora that have metadata.
MOST_BUILT, MOST_FILTERED = 60_000, 400_000
# Tokens that are made at a time, and the share of a GPU's free memory that an index may take.
BLOCK, ROOM = 1 << 20, 0.9
FAST_PLAID = Peer("fast-plaid", "fast_plaid", device=None)
# Errors of scores in fewer bits, of queries and documents, at most, relative to the largest.
ERRORS = {"int8": 0.02, "fp8": 0.05, "residual4": 0.1, "residual2": 0.3}
# Centroids of residual codes, and tokens by which their buckets are cut.
CENTROIDS, BUCKETED = 4096, 1 << 14
# Bytes of the store on the disk.
STORED_BYTES = 8 << 30


@dataclass(frozen=True)
class Search(Row):
    """``Nq`` queries of a corpus of ``Nd`` documents; ``kind``: "", "subset" or "filter"."""

    @property
    def met(self) -> float:
        """The share of its documents that a query meets, and of the embeddings that are read."""
        return {"": 1.0, "filter": 1 / KEPT}.get(self.kind, min(1.0, SUBSET / self.Nd))

    def work(self, dtype: torch.dtype) -> Work:
        """Embeddings that any query meets, read once, and the products of those that meet."""
        tokens = int(self.lengths().sum()) * self.met
        read = tokens * min(self.Nq, 1 / self.met) if self.kind == "subset" else tokens
        return Work(flops=2.0 * self.Nq * self.Lq * tokens * self.d, bytes=float(dtype.itemsize * self.d * read))


# How many documents there are, and the lengths of their texts: those of BEIR's, as long as a model takes, and passages.
CORPORA = {
    "scifact": (5_183, 64, 300),
    "fiqa": (57_638, 16, 300),
    "trec-covid": (171_332, 16, 300),
    "touche": (382_545, 16, 300),
    "quora": (522_931, 8, 32),
    "50k": (50_000, 64, 192),
    "400k": (400_000, 64, 192),
    "passages-1m": (1_000_000, 24, 112),
    "passages-2m": (2_000_000, 24, 112),
    # As many as MS MARCO has.
    "passages-8.8m": (8_800_000, 24, 112),
}
# Rows of one corpus follow one another, which is then made once.
MORE_ROWS = {"50k": ((200, ""), (200, "subset")), "400k": ((200, "subset"), (1, "filter"))}
ROWS = tuple(
    Search(f"{name}-{kind or queries}", queries, documents, 32, longest, shortest=shortest, kind=kind)
    for name, (documents, shortest, longest) in CORPORA.items()
    for queries, kind in ((1, ""), (32, ""), (1000, ""), *MORE_ROWS.get(name, ()))
)


class Rough(NamedTuple):
    """Scores of embeddings that are kept in fewer bits, and the error that they may have, of the largest."""

    scores: torch.Tensor
    within: float


class Corpus:
    """Documents of random unit vectors, the same ones for the same row on the same kind of device.

    They are made in blocks, as they may be more than the device holds, and kept in indexes in memory.
    """

    def __init__(self, row: Search, device: torch.device, dtype: torch.dtype) -> None:
        self.d, self.device, self.dtype, self.lengths = row.d, device, dtype, row.lengths()
        self.tokens = int(self.lengths.sum())
        self.ids = [f"d{i}" for i in range(len(self.lengths))]
        self._indexes: dict[str, Any] = {}

    def blocks(self) -> Iterator[torch.Tensor]:
        """The tokens [n, d] of all documents, a million at a time."""
        generator = torch.Generator(self.device).manual_seed(0)
        for start in range(0, self.tokens, BLOCK):
            yield unit_vectors(min(BLOCK, self.tokens - start), self.d, generator=generator, dtype=self.dtype)

    def index(self, dtype: str) -> Any:
        """An index that keeps them in a type; an `Unavailable` is raised if there is no room for it."""
        from pylate_flash.index.layout import Layout
        from pylate_flash.indexes import Flat

        if dtype not in self._indexes:
            layout = Layout(dtype, self.d)
            if layout.nbits:
                layout = Layout(dtype, self.d, self._codec(layout.nbits))
            if self.device.type == "cuda" and self.tokens * layout.nbytes > ROOM * torch.cuda.mem_get_info()[0]:
                raise Unavailable(f"there is no room for {self.tokens * layout.nbytes / 1e9:.0f} GB")
            index = Flat(None, dtype=dtype, device=self.device, show_progress=False)
            metadata = [{"number": i} for i in range(len(self.ids))] if len(self.ids) <= MOST_FILTERED else None

            def rows(start: int, stop: int) -> Iterator[torch.Tensor]:
                return (layout.rows(block.to(layout.given)) for block in self.blocks())

            index._store.append(self.ids, self.lengths.numpy(), layout, rows, metadata=metadata)
            self._indexes[dtype] = index
        return self._indexes[dtype]

    def _codec(self, nbits: int) -> Any:
        """What makes codes: of vectors without clusters, any centroids are as good as those of k-means."""
        from pylate_flash.index.codes import Codec

        generator = torch.Generator(self.device).manual_seed(1)
        centroids = unit_vectors(CENTROIDS, self.d, generator=generator, dtype=torch.float32)
        sample = next(self.blocks())[:BUCKETED].float()
        left = (sample - centroids[(sample @ centroids.T).argmax(dim=1)]).flatten().sort().values
        buckets = 1 << nbits
        cutoffs, weights = torch.arange(1, buckets) / buckets, (torch.arange(buckets) + 0.5) / buckets
        cut = [left[(at * (len(left) - 1)).long().to(left.device)].half() for at in (cutoffs, weights)]
        return Codec(pylate_flash.ResidualCodec(centroids.half(), *cut), self.device)

    @property
    def documents(self) -> torch.Tensor:
        """All tokens [T, d], where the index in their type has them."""
        return self.index(name_of(self.dtype))._store.documents.parts[0].memory

    @cached_property
    def fast_plaid(self) -> tuple[Any, Any]:
        """An index of fast-plaid, in 4 bits, and the folder that it lies in."""
        folder = tempfile.TemporaryDirectory()
        index = FAST_PLAID["search.FastPlaid"](folder.name, device=str(self.device))
        index.create([document.cpu().float() for document in self.documents.split(self.lengths.tolist())], nbits=4)
        return index, folder


@dataclass(frozen=True)
class Inputs(Call):
    """A row's queries [Nq, Lq, d], and the corpus that they are asked of."""

    row: Search
    queries: torch.Tensor
    corpus: Corpus

    @cached_property
    def among(self) -> torch.Tensor:
        """Which documents each query meets, in order. Shape: [Nq, n]."""
        size = len(self.corpus.ids)
        if self.row.kind == "filter":
            return torch.arange(0, size, KEPT).expand(len(self.queries), -1)
        generator = torch.Generator().manual_seed(2)
        drawn = [torch.randperm(size, generator=generator)[:SUBSET].sort().values for _ in self.queries]
        return torch.stack(drawn)

    def reference(self) -> torch.Tensor:
        """The best scores of the first queries in float64. Shape: [CHECKED, K], or less."""
        queries, corpus = self.queries[:CHECKED].double(), self.corpus
        # A document that is cut has the better part of each.
        maxima = queries.new_full((*queries.shape[:2], len(corpus.ids)), -torch.inf)
        owners = torch.arange(len(corpus.ids), device=self.device).repeat_interleave(corpus.lengths.to(self.device))
        for tokens, of in zip(corpus.blocks(), owners.split(BLOCK), strict=True):
            found, first = queries @ tokens.double().T, int(of[0])
            maxima[..., first : int(of[-1]) + 1].scatter_reduce_(2, (of - first).expand(found.shape), found, "amax")
        scores = maxima.sum(dim=1)
        best = [own[self.among[i].to(own.device)] if self.row.kind else own for i, own in enumerate(scores)]
        return torch.stack([own.topk(min(K, len(own))).values for own in best])

    def search(self, dtype: str) -> list[Candidate]:
        """A search of an index in memory that keeps embeddings in a type."""
        how: dict[str, Any] = {"k": K}
        if self.row.kind == "subset":
            how["subset"] = [[self.corpus.ids[j] for j in own] for own in self.among.tolist()]
        if self.row.kind == "filter":
            how["where"] = f"number % {KEPT} = 0"
        # As a model returns them to the host.
        queries = list(self.queries.cpu())
        read = (lambda lists: Rough(self.scores(lists), ERRORS[dtype])) if dtype in ERRORS else self.scores
        return [Candidate(f"Flat, {dtype}", partial(self.corpus.index(dtype).search, queries, **how), read)]

    def ours(self) -> list[Candidate]:
        """`indexes.Flat` in the type of the inputs or, if there is no room for that, in 8 bits."""
        try:
            return self.search(name_of(self.corpus.dtype))
        except Unavailable:
            return self.search("int8")

    @property
    def packed(self) -> Varlen:
        """All of the corpus, on the device."""
        return Varlen(self.queries, self.corpus.documents, self.corpus.lengths)

    def operation(self) -> list[Candidate]:
        """The operation and `topk` alone, with everything on the device, where equal scores come in any order."""
        if self.row.kind:
            raise Unavailable("all documents only")
        packed = self.packed
        score = partial(pylate_flash.maxsim_varlen, *packed.packed(), **packed.longest_lengths)
        call = lambda: score().topk(min(K, len(packed.lengths))).values  # noqa: E731
        return [Candidate("maxsim_varlen, topk", call, lambda scores: scores[:CHECKED].double())]

    def lik(self) -> list[Candidate]:
        """late-interaction-kernels' retrieval, of documents padded to the longest."""
        self._check_pairs(5 * 10**7)
        padded = self.packed.padded()
        documents, how = padded.documents, {"d_mask": padded.documents_mask, "normalize": False}
        search = partial(LIK["retrieve"], self.queries, documents, top_k=min(K, len(documents)), **how)
        read = lambda found: found[0][:CHECKED].double()  # noqa: E731
        ways = {chunk: partial(search, chunk=chunk) for chunk in (4096, 32768)}
        return [Candidate(f"retrieve, chunks of {chunk}", call, read) for chunk, call in ways.items()]

    def fast_plaid(self) -> list[Candidate]:
        """fast-plaid, approximate: built of 4 bits, and searched as it is by default."""
        self._check_pairs(10**7)
        if len(self.corpus.ids) > MOST_BUILT:
            raise Unavailable(f"built of at most {MOST_BUILT:,} documents")
        call = partial(self.corpus.fast_plaid[0].search, self.queries.float(), top_k=K, show_progress=False)
        return [Candidate("FastPlaid.search", call, lambda lists: [[score for _, score in own] for own in lists])]

    def _check_pairs(self, most: int) -> None:
        """Whether a package that searches all documents does so in seconds."""
        if self.row.kind or self.row.Nq * self.row.Nd > most:
            raise Unavailable(f"all documents only, and at most {most:,} pairs of query and document")

    def scores(self, lists: list[list[Any]]) -> torch.Tensor:
        """Read results: the scores of the first queries, as the reference has them."""
        scores = [[hit["score"] for hit in own] for own in lists[:CHECKED]]
        return torch.tensor(scores, dtype=torch.float64, device=self.device)


def name_of(dtype: torch.dtype) -> str:
    """As an index names a type."""
    return str(dtype).removeprefix("torch.")


# That of the last row, as the next row may have the same.
_corpora: dict[tuple, Corpus] = {}


def make_inputs(row: Search, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Draw the queries, and other documents than those of the row before if they are not the same."""
    key = row.Nd, row.Ld, row.shortest, row.d, str(device), dtype
    if key not in _corpora:
        _corpora.clear()
        release(device)
        _corpora[key] = Corpus(row, device, dtype)
    generator = torch.Generator(device).manual_seed(1)
    return Inputs(row, unit_vectors(row.Nq, row.Lq, row.d, generator=generator, dtype=dtype), _corpora[key])


def error(found: Any, expected: torch.Tensor) -> float:
    """The relative error of the best scores, in order; none is told of an approximate index, and of fewer bits.

    These last are wrong where they are further off than their bits explain.
    """
    if isinstance(found, Rough):
        off = (found.scores - expected).abs().max() / expected.abs().max()
        return 0.0 if off <= found.within else math.inf
    return exact.relative_error(found, expected) if isinstance(found, torch.Tensor) else 0.0


def store_on_disk(device: torch.device, dtype: torch.dtype, nbytes: int = STORED_BYTES) -> dict[str, float]:
    """GB/s of adding to a store on the disk, loading it to the device and streaming it through; seconds of opening.

    It stays in the page cache, and is compared with its checksums as it is loaded.
    """
    from pylate_flash.indexes import Flat

    row = Search("stored", 200, max(2, nbytes // (128 * 128 * dtype.itemsize)), 32, 192, shortest=64)
    corpus = Corpus(row, device, dtype)
    generator = torch.Generator(device).manual_seed(1)
    queries = list(unit_vectors(row.Nq, row.Lq, row.d, generator=generator, dtype=dtype).cpu())
    documents = list(torch.cat([block.cpu() for block in corpus.blocks()]).split(corpus.lengths.tolist()))
    size = corpus.tokens * dtype.itemsize * row.d / 1e9
    with tempfile.TemporaryDirectory() as folder:
        opened = partial(Flat, folder, "index", device=device, show_progress=False)
        index = opened(dtype=name_of(dtype))
        found = {"stored_gb": size}
        found["added_gb_per_s"] = size / _seconds(lambda: index.add_documents(corpus.ids, documents), device)
        found["opened_s"] = _seconds(opened, device)
        loads = [partial(opened(device_memory=1 << 50).search, queries[:1], k=K) for _ in range(2)]
        found["loaded_gb_per_s"] = size / min(_seconds(load, device) for load in loads)
        for number in (1, 200):
            stream = partial(opened(device_memory=0).search, queries[:number], k=K)
            # What is streamed is compared with its checksums the first time only.
            found[f"streamed_for_{number}_gb_per_s"] = size / min(_seconds(stream, device) for _ in range(3))
    return found


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def suite() -> Suite:
    """Return the suite."""
    return Suite(
        name="retrieval",
        title="Search of an index",
        rows=ROWS,
        systems=(
            OUR_SYSTEM,
            *(
                another_way(dtype, candidates=methodcaller("search", dtype), about=f"pylate_flash, kept as {dtype}")
                for dtype in ERRORS
            ),
            another_way("operation", about="maxsim_varlen and topk alone"),
            replace(LIK_SYSTEM, about="late-interaction-kernels, padded"),
            System(
                "fast_plaid", "fast-plaid", methodcaller("fast_plaid"), peer=FAST_PLAID, about="approximate, of 4 bits"
            ),
        ),
        make_inputs=make_inputs,
        error=error,
        facts=store_on_disk,
    )
