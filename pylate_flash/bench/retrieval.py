"""The suite `retrieval`: searches of an exact index, from queries on the host to lists of ids and scores.

The corpora have the sizes of BEIR's, and as many passages as MS MARCO has; their embeddings are generated on the
device, and the index keeps them in memory, in 8 bits if more does not fit. Rows "subset" pass a list of ids per
query, rows "filter" an expression that one document in a hundred matches. The floor counts one read of every embedding,
or the products. A store on disk (adding, loading, streaming) is measured outside the rows, as facts below the table.

Approximate indexes are timed beside it; their recall is not measured.
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
# Ids in each query's subset; one document in this many matches the filter.
SUBSET, KEPT = 1000, 100
# Number of queries whose results are compared with float64.
CHECKED = 2
# Most documents of an approximate index (builds within a minute), and of a corpus with metadata.
MOST_BUILT, MOST_FILTERED = 60_000, 400_000
# Tokens generated at a time, and the share of a GPU's free memory that an index may take.
BLOCK, ROOM = 1 << 20, 0.9
FAST_PLAID = Peer("fast-plaid", "fast_plaid", device=None)
# Largest errors of scores if embeddings have fewer bits, relative to the largest score.
ERRORS = {"int8": 0.02, "fp8": 0.05, "residual4": 0.1, "residual2": 0.3}
# Number of centroids of residual codes, and of tokens sampled for the bucket cutoffs.
CENTROIDS, BUCKETED = 4096, 1 << 14
# Bytes of the store on disk.
STORED_BYTES = 8 << 30


@dataclass(frozen=True)
class Search(Row):
    """``Nq`` queries of a corpus of ``Nd`` documents; ``kind``: "", "subset" or "filter"."""

    @property
    def met(self) -> float:
        """The share of the documents that a query is scored against."""
        return {"": 1.0, "filter": 1 / KEPT}.get(self.kind, min(1.0, SUBSET / self.Nd))

    def work(self, dtype: torch.dtype) -> Work:
        """One read of each embedding that any query is scored against, and the products of all scored pairs."""
        tokens = int(self.lengths().sum()) * self.met
        read = tokens * min(self.Nq, 1 / self.met) if self.kind == "subset" else tokens
        return Work(flops=2.0 * self.Nq * self.Lq * tokens * self.d, bytes=float(dtype.itemsize * self.d * read))


# Number of documents, shortest and longest length: BEIR's texts, up to a model's document length, and passages.
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
    # The size of MS MARCO.
    "passages-8.8m": (8_800_000, 24, 112),
}
# Rows of one corpus are consecutive, so that it is generated once.
MORE_ROWS = {"50k": ((200, ""), (200, "subset")), "400k": ((200, "subset"), (1, "filter"))}
ROWS = tuple(
    Search(f"{name}-{kind or queries}", queries, documents, 32, longest, shortest=shortest, kind=kind)
    for name, (documents, shortest, longest) in CORPORA.items()
    for queries, kind in ((1, ""), (32, ""), (1000, ""), *MORE_ROWS.get(name, ()))
)


class Rough(NamedTuple):
    """Scores of embeddings in fewer bits, and their error bound, relative to the largest score."""

    scores: torch.Tensor
    within: float


class Corpus:
    """Documents of random unit vectors, reproducible per row and device type.

    They are generated in blocks, as they may not fit on the device, and kept in indexes in memory.
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
        """The index of the documents in a dtype; raises `Unavailable` if it does not fit."""
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
                return (layout.rows(block.to(layout.input_dtype)) for block in self.blocks())

            index._store.append(self.ids, self.lengths.numpy(), layout, rows, metadata=metadata)
            self._indexes[dtype] = index
        return self._indexes[dtype]

    def _codec(self, nbits: int) -> Any:
        """The residual codec: for vectors without clusters, any centroids are as good as those of k-means."""
        from pylate_flash.index.codes import Codec
        from pylate_flash.ops.residual_codec import bucket_quantiles

        generator = torch.Generator(self.device).manual_seed(1)
        centroids = unit_vectors(CENTROIDS, self.d, generator=generator, dtype=torch.float32)
        sample = next(self.blocks())[:BUCKETED].float()
        cutoffs, weights = bucket_quantiles(sample - centroids[(sample @ centroids.T).argmax(dim=1)], nbits)
        return Codec(pylate_flash.ResidualCodec(centroids.half(), cutoffs.half(), weights.half()), self.device)

    @property
    def documents(self) -> torch.Tensor:
        """All tokens [T, d], in the memory of the index in their dtype."""
        return self.index(name_of(self.dtype))._store.documents.parts[0].memory

    @cached_property
    def fast_plaid(self) -> tuple[Any, Any]:
        """A fast-plaid index in 4 bits, and the temporary folder that holds it."""
        folder = tempfile.TemporaryDirectory()
        index = FAST_PLAID["search.FastPlaid"](folder.name, device=str(self.device))
        index.create([document.cpu().float() for document in self.documents.split(self.lengths.tolist())], nbits=4)
        return index, folder


@dataclass(frozen=True)
class Inputs(Call):
    """A row's queries [Nq, Lq, d], and the corpus to search."""

    row: Search
    queries: torch.Tensor
    corpus: Corpus

    @cached_property
    def among(self) -> torch.Tensor:
        """Sorted indices of the documents each query is scored against. Shape: [Nq, n]."""
        size = len(self.corpus.ids)
        if self.row.kind == "filter":
            return torch.arange(0, size, KEPT).expand(len(self.queries), -1)
        generator = torch.Generator().manual_seed(2)
        drawn = [torch.randperm(size, generator=generator)[:SUBSET].sort().values for _ in self.queries]
        return torch.stack(drawn)

    def reference(self) -> torch.Tensor:
        """The best scores of the first queries in float64. Shape: at most [CHECKED, K]."""
        queries, corpus = self.queries[:CHECKED].double(), self.corpus
        # A document that is split between blocks takes the maximum over both.
        maxima = queries.new_full((*queries.shape[:2], len(corpus.ids)), -torch.inf)
        owners = torch.arange(len(corpus.ids), device=self.device).repeat_interleave(corpus.lengths.to(self.device))
        for tokens, document_ids in zip(corpus.blocks(), owners.split(BLOCK), strict=True):
            similarities, first = queries @ tokens.double().T, int(document_ids[0])
            maxima[..., first : int(document_ids[-1]) + 1].scatter_reduce_(
                2, (document_ids - first).expand(similarities.shape), similarities, "amax"
            )
        scores = maxima.sum(dim=1)
        best = [own[self.among[i].to(own.device)] if self.row.kind else own for i, own in enumerate(scores)]
        return torch.stack([own.topk(min(K, len(own))).values for own in best])

    def search(self, dtype: str) -> list[Candidate]:
        """A search of the in-memory index with embeddings in a dtype."""
        options: dict[str, Any] = {"k": K}
        if self.row.kind == "subset":
            options["subset"] = [[self.corpus.ids[j] for j in own] for own in self.among.tolist()]
        if self.row.kind == "filter":
            options["where"] = f"number % {KEPT} = 0"
        # On the host, as a model returns them.
        queries = list(self.queries.cpu())
        read = (lambda lists: Rough(self.scores(lists), ERRORS[dtype])) if dtype in ERRORS else self.scores
        return [Candidate(f"Flat, {dtype}", partial(self.corpus.index(dtype).search, queries, **options), read)]

    def ours(self) -> list[Candidate]:
        """`indexes.Flat` in the dtype of the inputs or, if that does not fit, in 8 bits."""
        try:
            return self.search(name_of(self.corpus.dtype))
        except Unavailable:
            return self.search("int8")

    @property
    def packed(self) -> Varlen:
        """The whole corpus, on the device."""
        return Varlen(self.queries, self.corpus.documents, self.corpus.lengths)

    def operation(self) -> list[Candidate]:
        """The operation and `topk` alone, with everything on the device; ties come in any order."""
        if self.row.kind:
            raise Unavailable("all documents only")
        packed = self.packed
        score = partial(pylate_flash.maxsim_varlen, *packed.packed(), **packed.longest_lengths)
        call = lambda: score().topk(min(K, len(packed.lengths))).values  # noqa: E731
        return [Candidate("maxsim_varlen, topk", call, lambda scores: scores[:CHECKED].double())]

    def lik(self) -> list[Candidate]:
        """late-interaction-kernels' retrieval, with documents padded to the longest."""
        self._check_pairs(5 * 10**7)
        padded = self.packed.padded()
        documents, options = padded.documents, {"d_mask": padded.documents_mask, "normalize": False}
        search = partial(LIK["retrieve"], self.queries, documents, top_k=min(K, len(documents)), **options)
        read = lambda output: output[0][:CHECKED].double()  # noqa: E731
        calls = {chunk: partial(search, chunk=chunk) for chunk in (4096, 32768)}
        return [Candidate(f"retrieve, chunks of {chunk}", call, read) for chunk, call in calls.items()]

    def fast_plaid(self) -> list[Candidate]:
        """fast-plaid, approximate: a 4-bit index, searched with its defaults."""
        self._check_pairs(10**7)
        if len(self.corpus.ids) > MOST_BUILT:
            raise Unavailable(f"built from at most {MOST_BUILT:,} documents")
        call = partial(self.corpus.fast_plaid[0].search, self.queries.float(), top_k=K, show_progress=False)
        return [Candidate("FastPlaid.search", call, lambda lists: [[score for _, score in own] for own in lists])]

    def _check_pairs(self, most: int) -> None:
        """Raise `Unavailable` unless it is a search of all documents that another package does in seconds."""
        if self.row.kind or self.row.Nq * self.row.Nd > most:
            raise Unavailable(f"all documents only, and at most {most:,} pairs of query and document")

    def scores(self, lists: list[list[Any]]) -> torch.Tensor:
        """Extract the scores of the first queries from results, in the format of the reference."""
        scores = [[hit["score"] for hit in own] for own in lists[:CHECKED]]
        return torch.tensor(scores, dtype=torch.float64, device=self.device)


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype, as indexes spell it."""
    return str(dtype).removeprefix("torch.")


# Only the corpus of the last row, as the next row may have the same.
_corpora: dict[tuple, Corpus] = {}


def make_inputs(row: Search, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Draw the queries, and the documents unless they are those of the previous row."""
    key = row.Nd, row.Ld, row.shortest, row.d, str(device), dtype
    if key not in _corpora:
        _corpora.clear()
        release(device)
        _corpora[key] = Corpus(row, device, dtype)
    generator = torch.Generator(device).manual_seed(1)
    return Inputs(row, unit_vectors(row.Nq, row.Lq, row.d, generator=generator, dtype=dtype), _corpora[key])


def error(result: Any, expected: torch.Tensor) -> float:
    """The relative error of the best scores, in order; 0 for an approximate index, and for scores in fewer bits.

    The latter are wrong (infinite error) if they exceed their error bound.
    """
    if isinstance(result, Rough):
        off = (result.scores - expected).abs().max() / expected.abs().max()
        return 0.0 if off <= result.within else math.inf
    return exact.relative_error(result, expected) if isinstance(result, torch.Tensor) else 0.0


def store_on_disk(device: torch.device, dtype: torch.dtype, nbytes: int = STORED_BYTES) -> dict[str, float]:
    """GB/s of adding to a store on disk, of loading it to the device and of streaming it; seconds to open it.

    It stays in the page cache, and its checksums are verified as it is loaded.
    """
    from pylate_flash.indexes import Flat

    row = Search("stored", 200, max(2, nbytes // (128 * 128 * dtype.itemsize)), 32, 192, shortest=64)
    corpus = Corpus(row, device, dtype)
    generator = torch.Generator(device).manual_seed(1)
    queries = list(unit_vectors(row.Nq, row.Lq, row.d, generator=generator, dtype=dtype).cpu())
    documents = list(torch.cat([block.cpu() for block in corpus.blocks()]).split(corpus.lengths.tolist()))
    size = corpus.tokens * dtype.itemsize * row.d / 1e9
    with tempfile.TemporaryDirectory() as folder:
        open_index = partial(Flat, folder, "index", device=device, show_progress=False)
        index = open_index(dtype=name_of(dtype))
        facts = {"stored_gb": size}
        facts["added_gb_per_s"] = size / _seconds(lambda: index.add_documents(corpus.ids, documents), device)
        facts["opened_s"] = _seconds(open_index, device)
        loads = [partial(open_index(device_memory=1 << 50).search, queries[:1], k=K) for _ in range(2)]
        facts["loaded_gb_per_s"] = size / min(_seconds(load, device) for load in loads)
        for number in (1, 200):
            stream = partial(open_index(device_memory=0).search, queries[:number], k=K)
            # Checksums are verified only the first time the data is streamed.
            facts[f"streamed_for_{number}_gb_per_s"] = size / min(_seconds(stream, device) for _ in range(3))
    return facts


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
