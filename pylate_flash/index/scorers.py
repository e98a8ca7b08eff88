"""What scores documents of an index: the operations of this package, or another package's scorer, to compare."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..hosts import HOSTS, SENTENCE_TRANSFORMERS
from ..ops import QuantizedEmbeddings, maxsim_from_hidden, maxsim_varlen
from .layout import Layout

__all__ = ["EMPTY_SCORE", "Packed", "Scorer", "packed"]

# A document without tokens has nothing that could match, so it comes after every document that has.
EMPTY_SCORE = float(np.finfo(np.float32).min)
# PyLate's torch scorer builds the similarities of all token pairs; this bounds how many at a time.
_TORCH_PAIRS = 1 << 24


class Packed(NamedTuple):
    """Packed tokens [T, d], or rows of a store, their cu_seqlens [N + 1], and the length of the longest sequence.

    The boundaries of queries stay on the host.
    """

    values: Tensor
    cu_seqlens: Tensor
    longest: int


class Scorer(NamedTuple):
    """How rows of a layout are scored.

    Attributes
    ----------
    name
        As in `indexes.Flat`.
    layout
        That of the rows.
    projection
        Weight [d, d_model] and bias [d] (or None) in the type of the rows, or None.
    """

    name: str
    layout: Layout
    projection: tuple[Tensor, Tensor | None] | None

    def embeddings(self, rows: Tensor) -> Tensor:
        """Embeddings [T, d] from rows."""
        kept = self.layout.embeddings(rows)
        if isinstance(kept, QuantizedEmbeddings):
            return kept.dequantize()
        return kept if self.projection is None else F.normalize(F.linear(kept, *self.projection), dim=-1)

    def __call__(self, queries: Packed, documents: Packed, candidates: Tensor | None = None) -> Tensor:
        """Scores [Nq, Nd] of packed queries and documents; with `candidates` [Nq + 1], of each document's own query."""
        if self.name not in ("pylate_flash", "auto"):
            documents = documents._replace(values=self.embeddings(documents.values))
            return _host_scores(queries, documents, candidates, self.name)
        if self.projection is None:
            return maxsim_varlen(
                queries.values,
                self.layout.embeddings(documents.values),
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


def packed(sequences: list[Tensor], device: torch.device) -> Packed:
    """Queries [L_i, d], packed on `device`."""
    lengths = [sequence.shape[0] for sequence in sequences]
    cu_seqlens = torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))
    return Packed(torch.cat(sequences).to(device, non_blocking=True), cu_seqlens, max(lengths))


def _host_scores(queries: Packed, documents: Packed, candidates: Tensor | None, backend: str) -> Tensor:
    """As a scorer, by the scorer of this name of a host: PyLate's or, without it, sentence-transformers'."""
    if candidates is not None:
        bounds = candidates.tolist()
        owned = [
            _host_scores(
                packed([query], query.device),
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


def _split(packed: Packed) -> list[Tensor]:
    bounds = packed.cu_seqlens.tolist()
    return [packed.values[start:stop] for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]


def _sentence_transformers_scores(queries: Packed, documents: Packed) -> Tensor:
    """Scores [Nq, Nd] by the host's own `util.maxsim`, registered or not."""
    maxsim = SENTENCE_TRANSFORMERS.original("sentence_transformers.util.similarity:maxsim")
    # It rounds every similarity to the inputs' type, where the others accumulate in float32.
    queries, documents = (packed._replace(values=packed.values.float()) for packed in (queries, documents))
    scores = maxsim(_split(queries), _split(documents))
    # Where there is nothing to match it has a score of its own.
    return scores.masked_fill((documents.cu_seqlens.diff() == 0).to(scores.device), EMPTY_SCORE)


def _pylate_scores(queries: Packed, documents: Packed, backend: str) -> Tensor:
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
