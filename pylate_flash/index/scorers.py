"""Scoring of an index's documents by this package's operations or, for comparison, another package's scorer."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..hosts import HOSTS, SENTENCE_TRANSFORMERS
from ..kernels.choice import choose
from ..kernels.tables import RESIDUAL_MANY_ROWS
from ..ops import QuantizedEmbeddings, maxsim_from_hidden, maxsim_residual, maxsim_varlen, quantize
from ..ops.compute import compute
from ..ops.quantized import query_precision
from ..ops.residual import maxsim_residual_by_bounds
from ..ops.varlen import maxsim_in_place
from ..problem import Options, Tensors
from .codes import Codec, codes_of
from .columns import Held
from .layout import Layout
from .resident import Packed
from .transfer import on_device

# The score of a document without tokens, which ranks after every document with tokens.
EMPTY_SCORE = float(np.finfo(np.float32).min)
# Names of this package's scorer.
OURS = "pylate_flash", "auto"
# Bound on the token pairs per call of PyLate's torch scorer, which materializes all their similarities.
_TORCH_PAIRS = 1 << 24


class Scorer(NamedTuple):
    """How rows of a layout are scored: by a scorer of `indexes.Flat`, with a projection in the dtype of the rows."""

    name: str
    layout: Layout
    projection: tuple[Tensor, Tensor | None] | None

    def embeddings(self, rows: Held) -> Tensor:
        """Convert rows to embeddings [T, d], dequantized or projected."""
        stored = self.layout.embeddings(rows)
        if isinstance(stored, QuantizedEmbeddings):
            return stored.dequantize()
        return stored if self.projection is None else F.normalize(F.linear(stored, *self.projection), dim=-1)

    def by_kernels(self, device: torch.device) -> bool:
        """Whether kernels on `device` score the stored rows directly."""
        layout, plain = self.layout, self.name in OURS and self.projection is None
        # The bytes of residual codes are several fields: they are scored in the dtype that they are decompressed to.
        dtype = layout.asked if layout.nbits else layout.dtype
        return plain and choose("auto", device, dtype, layout.size) == "triton"

    def in_place(self, device: torch.device, owned: bool) -> bool:
        """Whether kernels score selected documents without gathering them; `owned`: each query has its own."""
        return self.by_kernels(device) and (not self.layout.quantized or (owned and not self._copies_codes))

    @property
    def _copies_codes(self) -> bool:
        """Whether the operation copies all codes first, as their rows are not a multiple of 32 bits."""
        return self.layout.size * self.layout.nbits % 32 > 0

    def repeats(self, tokens: int) -> bool:
        """Whether scoring a query of `tokens` tokens may be captured in a CUDA graph.

        Not if codes are copied first, or decompressed for a long query, whose length padding may double: a graph would
        hold on to that memory.
        """
        layout = self.layout
        return not layout.nbits or (not self._copies_codes and 2 * tokens <= RESIDUAL_MANY_ROWS)

    def prepared(self, rows: Packed) -> Packed:
        """Convert rows of the store to the documents that `__call__` takes."""
        if self.name in OURS:
            return rows
        return rows._replace(values=self.embeddings(rows.values))

    def __call__(self, queries: Packed, documents: Packed, candidates: Tensor | None = None) -> Tensor:
        """Score documents from `prepared`; scores are shaped as those of `maxsim_varlen`.

        With `candidates` [Nq + 1], boundaries on the host, every query is scored against its own documents.
        """
        if self.name not in OURS:
            return _host_scores(self.name, queries, documents, candidates)
        if self.layout.codec is not None:
            return _scores_of_codes(self.layout.codec, queries, documents, candidates)
        stored = self.layout.embeddings(documents.values)
        if documents.among is not None:
            max_candidates = 0 if candidates is None else int(candidates.diff().max())
            return maxsim_in_place(
                queries.values, stored, queries.cu_seqlens, documents.cu_seqlens, documents.among.starts,
                candidates, queries.longest, documents.longest, max_candidates, documents.among.tokens, EMPTY_SCORE,
            )  # fmt: skip
        if self.projection is None:
            return maxsim_varlen(
                queries.values, stored, queries.cu_seqlens, documents.cu_seqlens, candidates_cu_seqlens=candidates,
                max_query_length=queries.longest, max_document_length=documents.longest, empty_score=EMPTY_SCORE,
            )  # fmt: skip
        return maxsim_from_hidden(
            queries.values, documents.values, *self.projection, queries_cu_seqlens=queries.cu_seqlens,
            documents_cu_seqlens=documents.cu_seqlens, candidates_cu_seqlens=candidates,
            max_query_length=queries.longest, max_document_length=documents.longest, empty_score=EMPTY_SCORE,
        )  # fmt: skip

    def matched_tokens(self, queries: Packed, documents: Packed, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """Match the tokens of query i to its documents candidates[i] to candidates[i + 1] (boundaries on the host).

        For every document, given as rows of the store, and every token of its query: the index of its most similar
        token (the first of equal ones), and the similarity, both [Nd, longest]. Entries beyond a query's end, or for a
        document without tokens, are undefined.
        """
        stored, values = self.layout.embeddings(documents.values), queries.values
        embeddings = self.embeddings(documents.values)
        if isinstance(stored, QuantizedEmbeddings) and self.name in OURS:
            # Round the queries as scoring does; other packages' scorers take them as they are.
            values = quantize(values, query_precision(stored.values.dtype)).dequantize(values.dtype)
        counts = candidates.diff()
        if not len(embeddings) or not queries.longest:
            placeholder = torch.zeros(len(documents.cu_seqlens) - 1, queries.longest)
            return placeholder.long(), placeholder
        options = Options(queries.longest, documents.longest, int(counts.max()))
        tensors = Tensors(values, embeddings, None, None, queries.cu_seqlens, documents.cu_seqlens, candidates)
        argmax = compute(tensors, options, True)[1]
        assert argmax is not None
        tokens = argmax.clamp_(min=0).long()
        chosen = (documents.cu_seqlens[:-1].unsqueeze(1) + tokens).clamp_(max=len(embeddings) - 1)
        owners = torch.arange(len(counts)).repeat_interleave(counts)
        query_rows = queries.cu_seqlens.cpu()[owners].unsqueeze(1) + torch.arange(queries.longest)
        query_rows = query_rows.clamp_(max=len(values) - 1).to(values.device, non_blocking=True)
        return tokens, torch.einsum("ntd,ntd->nt", values[query_rows].float(), embeddings[chosen].float())


@dataclass(frozen=True)
class Queries:
    """Queries [L_i, d] of a search, at least one, on any device, to be scored on `device` in `dtype`."""

    sequences: list[Tensor]
    device: torch.device
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, some: slice) -> Queries:
        return replace(self, sequences=self.sequences[some])

    def __reduce__(self) -> tuple[Callable[..., Queries], tuple[Any, ...]]:
        # A pickled view would bring its whole storage. Pickling bytes takes a fifth of the time of a tensor.
        values = self.packed().values.cpu().contiguous()
        content, size = values.flatten().view(torch.uint8).numpy(), values.shape[1]
        return _unpickled, (content, size, self.lengths.tolist(), self.device, self.dtype)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each query. Shape: [N], int64."""
        return np.array([sequence.shape[0] for sequence in self.sequences], np.int64)

    def packed(self) -> Packed:
        """Pack all queries on the device: a call with an operand on the host would be planned anew."""
        sequences = self.sequences
        if len(sequences) == 1:
            # Fast path: with one query, the GPU waits for every step of the host.
            values = on_device(sequences[0].to(self.dtype), self.device)
            return Packed(values, bounds_of_one(len(values), values.device), len(values))
        bounds = np.concatenate([[0], self.lengths.cumsum()])
        if len({sequence.dtype for sequence in sequences}) > 1:
            # Each by itself, as not all types have a common one.
            sequences = [sequence.to(self.dtype) for sequence in sequences]
        if self.device.type == "cuda" and all(sequence.device.type == "cpu" for sequence in sequences):
            # Concatenate directly into pinned memory.
            first = sequences[0]
            values = torch.empty(int(bounds[-1]), first.shape[1], dtype=first.dtype, pin_memory=True)
            torch.cat(sequences, out=values)
        else:
            values = torch.cat([sequence.to(self.device) for sequence in sequences])
        values = on_device(values, self.device).to(self.dtype)
        return Packed(values, on_device(bounds.astype(np.int32), self.device), int(self.lengths.max()))


def _unpickled(content: np.ndarray, size: int, lengths: list[int], device: torch.device, dtype: torch.dtype) -> Queries:
    values = torch.from_numpy(content).view(dtype).view(sum(lengths), size)
    return Queries(list(values.split(lengths)), device, dtype)


@lru_cache(maxsize=256)
def bounds_of_one(length: int, device: torch.device) -> Tensor:
    """The cu_seqlens of one sequence."""
    return torch.tensor([0, length], dtype=torch.int32, device=device)


def _scores_of_codes(codec: Codec, queries: Packed, documents: Packed, candidates: Tensor | None) -> Tensor:
    """Score with `maxsim_residual`, which takes padded queries and padded lists of candidates."""
    device, length, (*_, size) = queries.values.device, queries.longest, queries.values.shape
    among = documents.among
    codes = codes_of(documents.values, codec.on(device), documents.cu_seqlens if among is None else among.bounds)
    n_queries, mask = len(queries.cu_seqlens) - 1, None
    if len(queries.values) == n_queries * length:
        padded = queries.values.view(n_queries, length, size)
    else:
        positions = torch.arange(length, device=device) + queries.cu_seqlens[:-1].unsqueeze(1)
        mask = positions < queries.cu_seqlens[1:].unsqueeze(1)
        padded = queries.values[positions.clamp_(max=len(queries.values) - 1)]
    if candidates is None:
        if documents.host_bounds is not None and n_queries * length >= RESIDUAL_MANY_ROWS:
            return maxsim_residual_by_bounds(padded, codes, documents.host_bounds, mask, EMPTY_SCORE)
        return maxsim_residual(padded, codes, queries_mask=mask, empty_score=EMPTY_SCORE)
    counts = candidates.diff()
    max_count = int(counts.max())
    # Build the lists on the device: even a single query may have millions of candidates.
    starts, lengths = on_device(torch.stack([candidates[:-1], counts]), device).unsqueeze(2)
    numbers = torch.arange(max_count, device=device)
    selected = torch.where(numbers < lengths, starts + numbers, -1)
    if among is not None:
        selected = among.positions[selected].masked_fill_(selected < 0, -1)
    scores = maxsim_residual(padded, codes, queries_mask=mask, candidates=selected, empty_score=EMPTY_SCORE).flatten()
    if int(counts.min()) == max_count:
        return scores
    # Compute the indices on the host: a boolean mask on a GPU would synchronize with it.
    owned = (torch.arange(max_count) < counts.unsqueeze(1)).flatten().nonzero()[:, 0]
    return scores[owned.to(device, non_blocking=True)]


def _host_scores(backend: str, queries: Packed, documents: Packed, candidates: Tensor | None) -> Tensor:
    """Score with PyLate's scorer `backend` or, without PyLate, with that of sentence-transformers."""
    scores: Callable[[Packed, Packed], Tensor] = partial(_pylate_scores, backend=backend)
    if backend == "torch" and importlib.util.find_spec("pylate") is None and HOSTS["sentence-transformers"].is_there():
        scores = _sentence_transformers_scores
    if candidates is None:
        return scores(queries, documents)
    owned = [
        scores(
            Queries([query], query.device, query.dtype).packed(),
            documents._replace(cu_seqlens=documents.cu_seqlens[start : stop + 1]),
        )[0]
        for query, (start, stop) in zip(_split(queries), pairwise(candidates.tolist()), strict=True)
    ]
    return torch.cat(owned)


def _split(packed: Packed) -> list[Tensor]:
    return [packed.values[start:stop] for start, stop in pairwise(packed.cu_seqlens.tolist())]


def _sentence_transformers_scores(queries: Packed, documents: Packed) -> Tensor:
    """Scores [Nq, Nd] by the original `util.maxsim` of sentence-transformers, even if this package is registered."""
    maxsim = SENTENCE_TRANSFORMERS.original("sentence_transformers.util.similarity:maxsim")
    # It rounds every similarity to the inputs' dtype, where the others accumulate in float32.
    queries, documents = (packed._replace(values=packed.values.float()) for packed in (queries, documents))
    scores = maxsim(_split(queries), _split(documents))
    # It scores empty documents differently.
    return scores.masked_fill((documents.cu_seqlens.diff() == 0).to(scores.device), EMPTY_SCORE)


def _pylate_scores(queries: Packed, documents: Packed, backend: str) -> Tensor:
    """Scores [Nq, Nd] by PyLate's scorer.

    It takes padded tensors and counts a padded document token as a similarity of 0, so only documents of equal length
    are stacked. Padded query tokens add 0 to a sum, which is correct.
    """
    # Imported here, as it needs PyLate.
    from ..scores import colbert_scores

    values, split = queries.values, _split(queries)
    padded = torch.nn.utils.rnn.pad_sequence(split, batch_first=True)
    if backend == "torch":
        # It rounds every similarity to the inputs' dtype, where the others accumulate in float32.
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
        batch_size = max(1, _TORCH_PAIRS // (max(1, padded.shape[0] * padded.shape[1]) * length))
        for batch in torch.nonzero(lengths == length)[:, 0].split(batch_size):
            rows = documents.cu_seqlens[batch].long()[:, None] + torch.arange(length, device=values.device)
            stacked = documents.values[rows].to(padded.dtype)
            scores[:, batch] = colbert_scores(padded, stacked, queries_mask=mask, backend=backend).float()
    return scores
