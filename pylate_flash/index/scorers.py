"""What scores documents of an index: the operations of this package, or another package's scorer, to compare."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..hosts import HOSTS, SENTENCE_TRANSFORMERS
from ..ops import QuantizedEmbeddings, maxsim_from_hidden, maxsim_varlen
from .layout import Layout
from .resident import on_device

__all__ = ["EMPTY_SCORE", "Packed", "Queries", "Scorer"]

# A document without tokens has nothing that could match, so it comes after every document that has.
EMPTY_SCORE = float(np.finfo(np.float32).min)
# The names of this package's own.
OURS = "pylate_flash", "auto"
# PyLate's torch scorer builds the similarities of all token pairs; this bounds how many at a time.
_TORCH_PAIRS = 1 << 24


class Packed(NamedTuple):
    """Packed tokens [T, d], or rows of a store, their cu_seqlens [N + 1], and the length of the longest sequence."""

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

    def operand(self, rows: Tensor) -> Tensor | QuantizedEmbeddings:
        """What `function` takes of rows."""
        if self.name not in OURS:
            return self.embeddings(rows)
        return self.layout.embeddings(rows)

    @property
    def function(self) -> Callable[..., Tensor]:
        """What scores packed queries and documents, by the arguments and with the result of `maxsim_varlen`.

        The lengths of the longest query and document are given.
        """
        if self.name not in OURS:
            return partial(_host_scores, self.name)
        if self.projection is not None:
            return partial(_hidden_scores, self.projection)
        return partial(maxsim_varlen, empty_score=EMPTY_SCORE)


@dataclass(frozen=True)
class Queries:
    """Queries [L_i, d] of a search, at least one, wherever they are, to be scored on a device in a type."""

    sequences: list[Tensor]
    device: torch.device
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, some: slice) -> Queries:
        return replace(self, sequences=self.sequences[some])

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each. Shape: [N], int64."""
        return np.array([len(sequence) for sequence in self.sequences], np.int64)

    def packed(self) -> Packed:
        """All of them, on the device: a call of which something is on the host is planned anew."""
        sequences = self.sequences
        if len(sequences) == 1:
            # Of one query, the GPU waits for every step of the host.
            length = len(sequences[0])
            values = on_device(sequences[0].to(self.dtype), self.device)
            return Packed(values, _bounds_of_one(length, values.device), length)
        bounds = np.concatenate([[0], self.lengths.cumsum()])
        if self.device.type == "cuda" and all(sequence.device.type == "cpu" for sequence in sequences):
            # At once into memory that a GPU copies from.
            dtype = functools.reduce(torch.promote_types, {sequence.dtype for sequence in sequences})
            values = torch.empty(int(bounds[-1]), sequences[0].shape[1], dtype=dtype, pin_memory=True)
            torch.cat(sequences, out=values)
        else:
            values = torch.cat([sequence.to(self.device) for sequence in sequences])
        values = on_device(values, self.device).to(self.dtype)
        return Packed(values, on_device(bounds.astype(np.int32), self.device), int(self.lengths.max()))


@functools.lru_cache(maxsize=256)
def _bounds_of_one(length: int, device: torch.device) -> Tensor:
    return torch.tensor([0, length], dtype=torch.int32, device=device)


def _hidden_scores(
    projection: tuple[Tensor, Tensor | None],
    queries: Tensor,
    hidden: Tensor,
    queries_cu_seqlens: Tensor,
    documents_cu_seqlens: Tensor,
    **options: Any,
) -> Tensor:
    """As `maxsim_varlen`, of hidden states."""
    return maxsim_from_hidden(
        queries, hidden, *projection, queries_cu_seqlens=queries_cu_seqlens, documents_cu_seqlens=documents_cu_seqlens,
        empty_score=EMPTY_SCORE, **options,
    )  # fmt: skip


def _host_scores(
    backend: str,
    queries: Tensor,
    documents: Tensor,
    queries_cu_seqlens: Tensor,
    documents_cu_seqlens: Tensor,
    *,
    candidates_cu_seqlens: Tensor | None = None,
    max_query_length: int,
    max_document_length: int,
) -> Tensor:
    """As `maxsim_varlen`, by the scorer of this name of a host: PyLate's or, without it, sentence-transformers'."""
    asked = Packed(queries, queries_cu_seqlens, max_query_length)
    given = Packed(documents, documents_cu_seqlens, max_document_length)
    if candidates_cu_seqlens is None:
        return _scores_of_host(backend, asked, given)
    owned = [
        _scores_of_host(backend, Queries([query], query.device, query.dtype).packed(), given._replace(cu_seqlens=own))[
            0
        ]
        for query, own in zip(
            _split(asked),
            (documents_cu_seqlens[start : stop + 1] for start, stop in pairwise(candidates_cu_seqlens.tolist())),
            strict=True,
        )
    ]
    return torch.cat(owned)


def _scores_of_host(backend: str, queries: Packed, documents: Packed) -> Tensor:
    """Scores [Nq, Nd]."""
    if backend == "torch" and importlib.util.find_spec("pylate") is None and HOSTS["sentence-transformers"].is_there():
        return _sentence_transformers_scores(queries, documents)
    return _pylate_scores(queries, documents, backend)


def _split(packed: Packed) -> list[Tensor]:
    return [packed.values[start:stop] for start, stop in pairwise(packed.cu_seqlens.tolist())]


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
