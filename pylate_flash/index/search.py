"""Exact search over a store: all documents block by block, or every query's own candidates."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from ..hosts import HOSTS, SENTENCE_TRANSFORMERS
from ..ops import QuantizedEmbeddings, maxsim_from_hidden, maxsim_varlen
from .store import PackedStore
from .tables import blocks

__all__ = ["EMPTY_SCORE", "Search", "SearchResult", "free_memory"]

# A document without tokens has nothing that could match, so it comes after every document that has.
EMPTY_SCORE = float(np.finfo(np.float32).min)
# Embeddings scored at a time: enough to amortise a call; on a CPU, few enough that its caches still hold what was read.
_BLOCK_BYTES_CPU = 8 << 20
_BLOCK_BYTES_CUDA = 512 << 20
_QUERY_TOKENS = 4096
# PyLate's torch scorer builds the similarities of all token pairs; this bounds how many at a time.
_TORCH_PAIRS = 1 << 24


class SearchResult(TypedDict):
    """A document that was found: its id and its score, as PyLate's `RerankResult`."""

    id: str
    score: float


class _Packed(NamedTuple):
    """Packed tokens [T, d], or rows of the store, their cu_seqlens [N + 1], and the length of the longest sequence.

    The boundaries of queries stay on the host.
    """

    values: Tensor
    cu_seqlens: Tensor
    longest: int


@dataclass(frozen=True)
class Search:
    """How to search a store.

    Attributes
    ----------
    store
        The documents: embeddings, or with `projection` hidden states.
    device
        Where to score.
    scorer
        As in `indexes.Flat`.
    projection
        Weight [d, d_model] and bias [d] (or None) on `device` in the type that the store keeps, or None.
    show_progress
        Draw a progress bar over several blocks.
    """

    store: PackedStore
    device: torch.device
    scorer: str
    projection: tuple[Tensor, Tensor | None] | None
    show_progress: bool

    def embeddings(self, rows: Tensor) -> Tensor:
        """Embeddings [T, d] from rows of the store."""
        kept = self.store.layout.embeddings(rows)
        if isinstance(kept, QuantizedEmbeddings):
            return kept.dequantize()
        return kept if self.projection is None else F.normalize(F.linear(kept, *self.projection), dim=-1)

    @property
    def _limit(self) -> int:
        """Tokens of a block."""
        nbytes = _BLOCK_BYTES_CUDA if self.device.type == "cuda" else _BLOCK_BYTES_CPU
        return max(1, nbytes // self.store.token_bytes)

    def _room(self) -> Tensor | None:
        """Memory for a block, which every block is read into in turn; None where they need not be read."""
        if self.store.kept_on.type != "cpu":
            return None
        rows = min(self._limit, self.store.tokens)
        return torch.empty(rows, self.store.layout.width, dtype=self.store.layout.dtype)

    def _blocks(self, lengths: np.ndarray) -> Iterable[tuple[int, int]]:
        stretches = blocks(lengths, self._limit)
        if not self.show_progress or len(stretches) < 2:
            return stretches
        return tqdm(stretches, desc="Searching", unit="block")

    def among(self, queries: list[Tensor], positions: np.ndarray, k: int) -> list[list[SearchResult]]:
        """The `k` best for every query [L_i, d] among the documents at `positions` [N], which ascend.

        Raises
        ------
        ValueError
            If a score is NaN or infinite, which finite embeddings do not give unless their products overflow. The
            message names the index.
        """
        if not len(positions):
            return [[] for _ in queries]
        lengths = np.array([len(query) for query in queries])
        chunks = [_packed(queries[start:stop], self.device) for start, stop in blocks(lengths, _QUERY_TOKENS)]
        # Scores of each chunk's best so far, and their places in `positions`.
        best: list[tuple[Tensor, Tensor]] = []
        # The store is walked once, whatever the number of queries: it may have to come from the disk.
        room = self._room()
        for start, stop in self._blocks(self.store.lengths[positions]):
            documents = self._documents(positions[start:stop], room)
            merged = []
            for i, chunk in enumerate(chunks):
                scores = self._score(chunk, documents)
                found = torch.arange(start, stop, device=self.device).expand(len(scores), -1)
                if best:
                    scores, found = torch.cat([best[i][0], scores], dim=1), torch.cat([best[i][1], found], dim=1)
                # Columns are in the order of insertion, and only a stable sort keeps it among equals; topk does not.
                scores, order = torch.sort(scores, dim=1, descending=True, stable=True)
                merged.append((scores[:, :k].clone(), found.gather(1, order[:, :k])))
            best = merged
        # Both are exact in float64, and one copy to the host.
        each = [torch.stack([part.double() for part in chunk]).cpu().numpy() for chunk in best]
        return self._results(
            [scores for chunk in each for scores in chunk[0]],
            [positions[found.astype(np.int64)] for chunk in each for found in chunk[1]],
        )

    def among_candidates(self, queries: list[Tensor], candidates: list[np.ndarray], k: int) -> list[list[SearchResult]]:
        """The same, for every query among documents of its own."""
        counts = np.array([len(positions) for positions in candidates])
        positions = np.concatenate(candidates)
        owners = np.repeat(np.arange(len(queries)), counts)
        # A block holds whole documents and the queries that own them.
        lengths = self.store.lengths[positions]
        first = np.flatnonzero(np.diff(owners, prepend=-1))
        lengths[first] += np.array([len(queries[i]) for i in owners[first]], dtype=np.int64)
        scores = np.empty(len(positions), dtype=np.float32)
        room = self._room()
        for start, stop in self._blocks(lengths):
            low, high = owners[start], owners[stop - 1] + 1
            owned = np.bincount(owners[start:stop] - low, minlength=high - low)
            # On the host, where the op plans its launch.
            cu_seqlens = torch.from_numpy(np.concatenate([[0], np.cumsum(owned)]).astype(np.int32))
            documents = self._documents(positions[start:stop], room)
            owning = _packed(queries[low:high], self.device)
            scores[start:stop] = self._score(owning, documents, cu_seqlens).cpu().numpy()
        if not np.isfinite(scores).all():
            self._refuse(int(positions[np.argmin(np.isfinite(scores))]))
        split = np.split(scores, np.cumsum(counts)[:-1])
        orders = [np.argsort(-own, kind="stable")[:k] for own in split]
        return self._results(
            [own[order] for own, order in zip(split, orders, strict=True)],
            [found[order] for found, order in zip(candidates, orders, strict=True)],
        )

    def _results(self, scores: list[np.ndarray], positions: list[np.ndarray]) -> list[list[SearchResult]]:
        """What is found for every query, of scores and positions [k] for each."""
        flat = np.concatenate(scores)
        # A sort puts NaN first, so none that was computed is missed.
        if not np.isfinite(flat).all():
            self._refuse(int(np.concatenate(positions)[np.argmin(np.isfinite(flat))]))
        ids = iter(self.store.ids_at(np.concatenate(positions)))
        return [[SearchResult(id=next(ids), score=score) for score in own.tolist()] for own in scores]

    def _refuse(self, position: int) -> None:
        name = f"the score of document {self.store.ids_at(np.array([position]))[0]!r:.100}"
        kept = self.store.layout.embeddings(self.store.read(np.array([position]), torch.device("cpu")))
        if torch.isfinite(kept.dequantize() if isinstance(kept, QuantizedEmbeddings) else kept).all():
            raise ValueError(
                f"{name} of the index in {self.store.path} is not finite, though its embeddings are: products of them "
                "and of the query's overflow float32, so make them smaller, as normalised ones are"
            )
        raise ValueError(
            f"the index in {self.store.path} is damaged: {name} is not finite, so its embeddings hold NaN or infinite "
            "values; verify() names the file"
        )

    def _documents(self, positions: np.ndarray, room: Tensor | None) -> _Packed:
        lengths = self.store.lengths[positions]
        cu_seqlens = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        values = self.store.read(positions, self.device, room)
        return _Packed(values, cu_seqlens.to(self.device, non_blocking=True), int(lengths.max(initial=0)))

    def _score(self, queries: _Packed, documents: _Packed, candidates: Tensor | None = None) -> Tensor:
        """Scores [Nq, Nd] of packed queries and documents; with `candidates` [Nq + 1], of each document's own query."""
        if self.scorer not in ("pylate_flash", "auto"):
            documents = documents._replace(values=self.embeddings(documents.values))
            return _host_scores(queries, documents, candidates, self.scorer)
        if self.projection is None:
            return maxsim_varlen(
                queries.values,
                self.store.layout.embeddings(documents.values),
                queries.cu_seqlens,
                documents.cu_seqlens,
                candidates_cu_seqlens=candidates,
                max_query_length=queries.longest,
                max_document_length=documents.longest,
                empty_score=EMPTY_SCORE,
            )
        return maxsim_from_hidden(
            queries.values,
            documents.values,
            *self.projection,
            queries_cu_seqlens=queries.cu_seqlens,
            documents_cu_seqlens=documents.cu_seqlens,
            candidates_cu_seqlens=candidates,
            max_query_length=queries.longest,
            max_document_length=documents.longest,
            empty_score=EMPTY_SCORE,
        )


def _packed(sequences: list[Tensor], device: torch.device) -> _Packed:
    """Queries [L_i, d], packed on `device`."""
    lengths = [sequence.shape[0] for sequence in sequences]
    cu_seqlens = torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))
    return _Packed(torch.cat(sequences).to(device, non_blocking=True), cu_seqlens, max(lengths))


def _host_scores(queries: _Packed, documents: _Packed, candidates: Tensor | None, backend: str) -> Tensor:
    """As `Search._score`, by the scorer of this name of a host: PyLate's or, without it, sentence-transformers'."""
    if candidates is not None:
        bounds = candidates.tolist()
        owned = [
            _host_scores(
                _packed([query], query.device),
                documents._replace(cu_seqlens=documents.cu_seqlens[start : stop + 1]),
                None,
                backend,
            )[0]
            for query, start, stop in zip(_split(queries), bounds[:-1], bounds[1:], strict=True)
        ]
        return torch.cat(owned)
    if backend == "torch" and importlib.util.find_spec("pylate") is None and HOSTS["sentence-transformers"].is_there():
        return _sentence_transformers_scores(queries, documents)
    return _pylate_scores(queries, documents, backend)


def _split(packed: _Packed) -> list[Tensor]:
    bounds = packed.cu_seqlens.tolist()
    return [packed.values[start:stop] for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]


def _sentence_transformers_scores(queries: _Packed, documents: _Packed) -> Tensor:
    """Scores [Nq, Nd] by the host's own `util.maxsim`, registered or not."""
    maxsim = SENTENCE_TRANSFORMERS.original("sentence_transformers.util.similarity:maxsim")
    # It rounds every similarity to the inputs' type, where the others accumulate in float32.
    queries, documents = (packed._replace(values=packed.values.float()) for packed in (queries, documents))
    scores = maxsim(_split(queries), _split(documents))
    # Where there is nothing to match it has a score of its own.
    return scores.masked_fill((documents.cu_seqlens.diff() == 0).to(scores.device), EMPTY_SCORE)


def _pylate_scores(queries: _Packed, documents: _Packed, backend: str) -> Tensor:
    """Scores [Nq, Nd] by PyLate's scorer.

    It takes padded tensors and counts a padded document token as a similarity of 0, so documents are stacked with
    others of their length. Padded query tokens add 0 to a sum, which is right.
    """
    # It needs PyLate, and the search does not.
    from ..scores import colbert_scores

    values, split = queries.values, _split(queries)
    padded = torch.nn.utils.rnn.pad_sequence(split, batch_first=True)
    if backend == "torch":
        # It rounds every similarity to the inputs' type, where the others accumulate in float32.
        padded = padded.float()
    query_lengths = torch.tensor([len(query) for query in split], device=values.device)
    mask = None
    if (query_lengths != padded.shape[1]).any():
        mask = torch.arange(padded.shape[1], device=values.device) < query_lengths[:, None]
    lengths = documents.cu_seqlens.diff()
    scores = values.new_full((len(split), len(lengths)), EMPTY_SCORE, dtype=torch.float32)
    for length in lengths.unique().tolist():
        if not length:
            continue
        batch = max(1, _TORCH_PAIRS // (max(1, padded.shape[0] * padded.shape[1]) * length))
        for some in torch.nonzero(lengths == length)[:, 0].split(batch):
            rows = documents.cu_seqlens[some].long()[:, None] + torch.arange(length, device=values.device)
            stacked = documents.values[rows].to(padded.dtype)
            scores[:, some] = colbert_scores(padded, stacked, queries_mask=mask, backend=backend).float()
    return scores


def free_memory(device: torch.device) -> int:
    """Bytes of a CUDA device that can be allocated, those that PyTorch has reserved and not in use among them."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
