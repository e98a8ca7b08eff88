"""The suite `retrieval`: searches of an exact index, from queries on the host to lists of ids and scores.

The corpora have the sizes of BEIR's, and as many passages as a GPU holds; their embeddings are made on the device, and
the index keeps them in memory. Rows of a subset give every query a list of ids, those of a filter an expression that
one document in a hundred fulfils. The floor counts every embedding once, or the products. What a store on the disk does
(adding, loading, streaming) belongs to no row, and is told beneath.

Approximate indexes are shown beside it, and what share of the exact ones they find is not.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple

import torch

import pylate_flash
from pylate_flash.bench import exact
from pylate_flash.bench.calls import Call, bounds_of, unit_vectors
from pylate_flash.bench.peers import LIK, Peer
from pylate_flash.bench.protocol import Rounds, Work
from pylate_flash.bench.rows import Row
from pylate_flash.bench.suite import LIK_SYSTEM, OUR_SYSTEM, Candidate, Suite, System, Unavailable, another_way

K = 100
# Ids of each query's subset; one document in so many fulfils the filter.
SUBSET, KEPT = 1000, 100
# Queries whose lists are compared with float64.
CHECKED = 2
# Documents of an approximate index that is built within a minute or two.
MOST_BUILT = 60_000
FAST_PLAID = Peer("fast-plaid", "fast_plaid", device=None)
# Errors of scores in fewer bits, of queries and documents, at most, relative to the largest.
ERRORS = {"int8": 0.02, "fp8": 0.05}
# Bytes of the store on the disk.
STORED_BYTES = 4 << 30


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
}
ROWS = (
    *(
        Search(f"{name}-{queries}", queries, documents, 32, longest, shortest=shortest)
        for name, (documents, shortest, longest) in CORPORA.items()
        for queries in (1, 32, 1000)
    ),
    Search("50k-200", 200, 50_000, 32, 192, shortest=64),
    Search("50k-subset", 200, 50_000, 32, 192, shortest=64, kind="subset"),
    Search("400k-subset", 200, 400_000, 32, 192, shortest=64, kind="subset"),
    Search("400k-filter", 1, 400_000, 32, 192, shortest=64, kind="filter"),
)


class Rough(NamedTuple):
    """Scores of embeddings that are kept in fewer bits, and the error that they may have, of the largest."""

    scores: torch.Tensor
    within: float


@dataclass(frozen=True)
class Inputs(Call):
    """A row's tensors: ``queries`` [Nq, Lq, d], and ``documents`` [tokens, d] of these ``lengths``."""

    row: Search
    queries: torch.Tensor
    documents: torch.Tensor
    lengths: torch.Tensor

    @cached_property
    def ids(self) -> list[str]:
        """The ids of all documents."""
        return [f"d{i}" for i in range(len(self.lengths))]

    @cached_property
    def among(self) -> torch.Tensor:
        """Which documents each query meets, in order. Shape: [Nq, n]."""
        size = len(self.lengths)
        if self.row.kind == "filter":
            return torch.arange(0, size, KEPT).expand(len(self.queries), -1)
        generator = torch.Generator().manual_seed(2)
        drawn = [torch.randperm(size, generator=generator)[:SUBSET].sort().values for _ in self.queries]
        return torch.stack(drawn)

    @cached_property
    def bounds(self) -> torch.Tensor:
        """Boundaries of the documents, int32, on the device."""
        return bounds_of(self.lengths).to(self.device)

    def reference(self) -> torch.Tensor:
        """The best scores of the first queries in float64. Shape: [CHECKED, K], or less."""
        best, size = [], len(self.lengths)
        owners = torch.arange(size, device=self.device).repeat_interleave(self.bounds.diff())
        for i, query in enumerate(self.queries[:CHECKED].double()):
            # A million tokens at a time; a document that is cut has the better part of each.
            maxima = query.new_full((len(query), size), -torch.inf)
            for tokens, of in zip(self.documents.split(1 << 20), owners.split(1 << 20), strict=True):
                maxima.scatter_reduce_(1, of.expand(len(query), -1), query @ tokens.double().T, "amax")
            scores = maxima.sum(dim=0)
            if self.row.kind:
                scores = scores[self.among[i].to(scores.device)]
            best.append(scores.topk(min(K, len(scores))).values)
        return torch.stack(best)

    def search(self, dtype: str | None = None) -> list[Candidate]:
        """A search of an index in memory that keeps embeddings in a type, or in that of the inputs."""
        from pylate_flash.indexes import Flat

        kept_as = dtype or str(self.documents.dtype).removeprefix("torch.")
        index = Flat(None, dtype=kept_as, device=self.device, show_progress=False)
        how: dict[str, Any] = {"k": K}
        metadata = None
        if self.row.kind == "subset":
            how["subset"] = [[self.ids[j] for j in own] for own in self.among.tolist()]
        if self.row.kind == "filter":
            how["where"], metadata = f"number % {KEPT} = 0", [{"number": i} for i in range(len(self.ids))]
        index.add_documents(self.ids, list(self.documents.split(self.lengths.tolist())), metadata=metadata)
        # As a model returns them to the host.
        queries = list(self.queries.cpu())
        read = self.scores if dtype is None else lambda lists: Rough(self.scores(lists), ERRORS[dtype])
        return [Candidate("Flat", partial(index.search, queries, **how), read)]

    # `indexes.Flat` in the type of the inputs.
    ours = search

    def operation(self) -> list[Candidate]:
        """The operation and `topk` alone, with everything on the device, where equal scores come in any order."""
        if self.row.kind:
            raise Unavailable("all documents only")
        tokens = self.queries.flatten(0, 1)
        lengths: dict[str, Any] = {"max_query_length": self.row.Lq, "max_document_length": int(self.lengths.max())}
        of_queries = torch.arange(0, len(tokens) + 1, self.row.Lq, dtype=torch.int32)
        score = partial(pylate_flash.maxsim_varlen, tokens, self.documents, of_queries, self.bounds, **lengths)
        call = lambda: score().topk(min(K, len(self.lengths))).values  # noqa: E731
        return [Candidate("maxsim_varlen, topk", call, lambda scores: scores[:CHECKED].double())]

    def lik(self) -> list[Candidate]:
        """late-interaction-kernels' retrieval, of documents padded to the longest."""
        if self.row.kind:
            raise Unavailable("all documents only")
        active = torch.arange(int(self.lengths.max())) < self.lengths.unsqueeze(1)
        padded = self.documents.new_zeros(*active.shape, self.row.d)
        mask = active.to(self.device)
        padded[mask] = self.documents
        search = partial(LIK["retrieve"], self.queries, padded, top_k=min(K, len(padded)), d_mask=mask, normalize=False)
        read = lambda found: found[0][:CHECKED].double()  # noqa: E731
        ways = {chunk: partial(search, chunk=chunk) for chunk in (4096, 32768)}
        return [Candidate(f"retrieve, chunks of {chunk}", call, read) for chunk, call in ways.items()]

    def fast_plaid(self) -> list[Candidate]:
        """fast-plaid, approximate: built of 4 bits, and searched as it is by default."""
        if self.row.kind or len(self.lengths) > MOST_BUILT:
            raise Unavailable(f"built of at most {MOST_BUILT} documents, and searched as a whole")
        folder = tempfile.TemporaryDirectory()
        index = FAST_PLAID["search.FastPlaid"](folder.name, device=str(self.documents.device))
        index.create([document.cpu().float() for document in self.documents.split(self.lengths.tolist())], nbits=4)
        queries = self.queries.float()

        def call(folder: object = folder) -> list:
            return index.search(queries, top_k=K, show_progress=False)

        return [Candidate("FastPlaid.search", call, lambda lists: [[score for _, score in own] for own in lists])]

    def scores(self, lists: list[list[Any]]) -> torch.Tensor:
        """Read results: the scores of the first queries, as the reference has them."""
        scores = [[hit["score"] for hit in own] for own in lists[:CHECKED]]
        return torch.tensor(scores, dtype=torch.float64, device=self.documents.device)


def make_inputs(row: Search, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Draw random unit vectors, the same ones for the same row on the same kind of device."""
    generator, lengths = torch.Generator(device).manual_seed(0), row.lengths()
    draw = partial(unit_vectors, generator=generator, dtype=dtype)
    queries = draw(row.Nq, row.Lq, row.d)
    documents = torch.empty(int(lengths.sum()), row.d, dtype=dtype, device=device)
    for some in documents.split(1 << 20):
        some.copy_(draw(*some.shape))
    return Inputs(row, queries, documents, lengths)


def error(found: Any, expected: torch.Tensor) -> float:
    """The relative error of the best scores, in order; none is told of an approximate index, and of fewer bits.

    These last are wrong where they are further off than their bits explain.
    """
    if isinstance(found, Rough):
        off = (found.scores - expected).abs().max() / expected.abs().max()
        return 0.0 if off <= found.within else math.inf
    return exact.relative_error(found, expected) if isinstance(found, torch.Tensor) else 0.0


def rounds_of(row: Search, rounds: Rounds) -> Rounds:
    """A fifth of the calls of what takes the longest."""
    if row.Nq * row.Nd < 10**8:
        return rounds
    return Rounds(rounds.warmup // 5, max(3, rounds.repetitions // 5), rounds.flush_bytes)


def store_on_disk(device: torch.device, dtype: torch.dtype, nbytes: int = STORED_BYTES) -> dict[str, float]:
    """GB/s of adding to a store on the disk, loading it to the device and streaming it through; seconds of opening."""
    from pylate_flash.indexes import Flat

    row = Search("stored", 1, max(2, nbytes // (128 * 128 * dtype.itemsize)), 32, 192, shortest=64)
    inputs = make_inputs(row, device, dtype)
    queries, size = list(inputs.queries.cpu()), inputs.documents.nbytes / 1e9
    with tempfile.TemporaryDirectory() as folder:
        opened = partial(Flat, folder, "index", device=device, show_progress=False)
        documents = list(inputs.documents.cpu().split(inputs.lengths.tolist()))
        index = opened(dtype=str(dtype).removeprefix("torch."))
        found = {"added_gb_per_s": size / _seconds(lambda: index.add_documents(inputs.ids, documents), device)}
        written = sum(os.path.getsize(file) for file in Path(folder).rglob("*.rows"))
        found["opened_s"] = _seconds(opened, device)
        for name, memory in (("loaded", 1 << 50), ("streamed", 0)):
            index = opened(device_memory=memory)
            first = _seconds(lambda index=index: index(queries, k=K), device)  # type: ignore[misc]
            # What is streamed is compared with its checksums the first time only.
            again = min(_seconds(lambda index=index: index(queries, k=K), device) for _ in range(3))  # type: ignore[misc]
            found[f"{name}_gb_per_s"] = written / 1e9 / (first if memory else again)
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
        rounds_of=rounds_of,
        facts=store_on_disk,
    )
