"""What scores documents of an index: the operations of this package, or another package's scorer, to compare."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial, reduce
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

__all__ = ["EMPTY_SCORE", "Queries", "Scorer", "bounds_of_one"]

# A document without tokens has nothing that could match, so it comes after every document that has.
EMPTY_SCORE = float(np.finfo(np.float32).min)
# The names of this package's own.
OURS = "pylate_flash", "auto"
# PyLate's torch scorer builds the similarities of all token pairs; this bounds how many at a time.
_TORCH_PAIRS = 1 << 24


class Scorer(NamedTuple):
    """How rows of a layout are scored: by a scorer of `indexes.Flat`, with a projection in the type of the rows."""

    name: str
    layout: Layout
    projection: tuple[Tensor, Tensor | None] | None

    def embeddings(self, rows: Held) -> Tensor:
        """Embeddings [T, d] from rows."""
        kept = self.layout.embeddings(rows)
        if isinstance(kept, QuantizedEmbeddings):
            return kept.dequantize()
        return kept if self.projection is None else F.normalize(F.linear(kept, *self.projection), dim=-1)

    def by_kernels(self, device: torch.device) -> bool:
        """Whether kernels score there what is kept, as it is."""
        layout, plain = self.layout, self.name in OURS and self.projection is None
        # Codes are bytes of several things: they are scored as what they are decompressed to.
        dtype = layout.asked if layout.nbits else layout.dtype
        return plain and choose("auto", device, dtype, layout.size) == "triton"

    def in_place(self, device: torch.device, owned: bool) -> bool:
        """Whether kernels score documents among others where these lie; `owned`: of each query its own."""
        return self.by_kernels(device) and (not self.layout.quantized or (owned and not self._copies_codes))

    @property
    def _copies_codes(self) -> bool:
        """Whether the operation copies all codes first: rows that are no whole words."""
        return self.layout.size * self.layout.nbits % 32 > 0

    def repeats(self, tokens: int) -> bool:
        """Whether a graph may hold how kernels score one query of so many tokens.

        Codes that are copied first, or decompressed for a long query, which padding may double, take memory that it
        would keep.
        """
        layout = self.layout
        return not layout.nbits or (not self._copies_codes and 2 * tokens <= RESIDUAL_MANY_ROWS)

    def prepared(self, rows: Packed) -> Packed:
        """What it takes of rows of the store."""
        if self.name in OURS:
            return rows
        return rows._replace(values=self.embeddings(rows.values))

    def __call__(self, queries: Packed, documents: Packed, candidates: Tensor | None = None) -> Tensor:
        """Scores, as those of `maxsim_varlen`, of documents that are prepared.

        With `candidates` [Nq + 1], on the host, every query meets documents of its own.
        """
        if self.name not in OURS:
            return _host_scores(self.name, queries, documents, candidates)
        if self.layout.codec is not None:
            return _scores_of_codes(self.layout.codec, queries, documents, candidates)
        kept = self.layout.embeddings(documents.values)
        if documents.among is not None:
            most = 0 if candidates is None else int(candidates.diff().max())
            return maxsim_in_place(
                queries.values, kept, queries.cu_seqlens, documents.cu_seqlens, documents.among.starts,
                candidates, queries.longest, documents.longest, most, documents.among.tokens, EMPTY_SCORE,
            )  # fmt: skip
        if self.projection is None:
            return maxsim_varlen(
                queries.values, kept, queries.cu_seqlens, documents.cu_seqlens, candidates_cu_seqlens=candidates,
                max_query_length=queries.longest, max_document_length=documents.longest, empty_score=EMPTY_SCORE,
            )  # fmt: skip
        return maxsim_from_hidden(
            queries.values, documents.values, *self.projection, queries_cu_seqlens=queries.cu_seqlens,
            documents_cu_seqlens=documents.cu_seqlens, candidates_cu_seqlens=candidates,
            max_query_length=queries.longest, max_document_length=documents.longest, empty_score=EMPTY_SCORE,
        )  # fmt: skip

    def matched_tokens(self, queries: Packed, documents: Packed, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """What the tokens of each query have chosen in the documents candidates[i] to candidates[i + 1] (on the host).

        Of every document, which are rows of the store, and every token of its query, the first of its tokens that is
        most similar, and the similarity [Nd, longest]; what is beyond a query's end, or of a document without tokens,
        means nothing.
        """
        kept, values = self.layout.embeddings(documents.values), queries.values
        embeddings = self.embeddings(documents.values)
        if isinstance(kept, QuantizedEmbeddings):
            # As they are scored.
            values = quantize(values, query_precision(kept.values.dtype)).dequantize(values.dtype)
        counts = candidates.diff()
        if not len(embeddings) or not queries.longest:
            nothing = torch.zeros(len(documents.cu_seqlens) - 1, queries.longest)
            return nothing.long(), nothing
        options = Options(queries.longest, documents.longest, int(counts.max()))
        tensors = Tensors(values, embeddings, None, None, queries.cu_seqlens, documents.cu_seqlens, candidates)
        argmax = compute(tensors, options, True)[1]
        assert argmax is not None
        tokens = argmax.clamp_(min=0).long()
        chosen = (documents.cu_seqlens[:-1].unsqueeze(1) + tokens).clamp_(max=len(embeddings) - 1)
        owners = torch.arange(len(counts)).repeat_interleave(counts)
        asking = queries.cu_seqlens.cpu()[owners].unsqueeze(1) + torch.arange(queries.longest)
        asking = asking.clamp_(max=len(values) - 1).to(values.device, non_blocking=True)
        return tokens, torch.einsum("ntd,ntd->nt", values[asking].float(), embeddings[chosen].float())


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

    def __reduce__(self) -> tuple[Callable[..., Queries], tuple[Any, ...]]:
        # One by one, each would bring the memory of all that it is a view of. Bytes take a fifth of a tensor's time.
        values = self.packed().values.cpu().contiguous()
        return _unpickled, (values.view(torch.uint8).numpy(), self.lengths.tolist(), self.device, self.dtype)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each. Shape: [N], int64."""
        return np.array([sequence.shape[0] for sequence in self.sequences], np.int64)

    def packed(self) -> Packed:
        """All of them, on the device: a call of which something is on the host is planned anew."""
        sequences = self.sequences
        if len(sequences) == 1:
            # Of one query, the GPU waits for every step of the host.
            values = on_device(sequences[0].to(self.dtype), self.device)
            return Packed(values, bounds_of_one(len(values), values.device), len(values))
        bounds = np.concatenate([[0], self.lengths.cumsum()])
        if self.device.type == "cuda" and all(sequence.device.type == "cpu" for sequence in sequences):
            # At once into memory that a GPU copies from.
            dtype = reduce(torch.promote_types, {sequence.dtype for sequence in sequences})
            values = torch.empty(int(bounds[-1]), sequences[0].shape[1], dtype=dtype, pin_memory=True)
            torch.cat(sequences, out=values)
        else:
            values = torch.cat([sequence.to(self.device) for sequence in sequences])
        values = on_device(values, self.device).to(self.dtype)
        return Packed(values, on_device(bounds.astype(np.int32), self.device), int(self.lengths.max()))


def _unpickled(values: np.ndarray, lengths: list[int], device: torch.device, dtype: torch.dtype) -> Queries:
    return Queries(list(torch.from_numpy(values).view(dtype).split(lengths)), device, dtype)


@lru_cache(maxsize=256)
def bounds_of_one(length: int, device: torch.device) -> Tensor:
    """The boundaries of one sequence."""
    return torch.tensor([0, length], dtype=torch.int32, device=device)


def _scores_of_codes(codec: Codec, queries: Packed, documents: Packed, candidates: Tensor | None) -> Tensor:
    """Scores by `maxsim_residual`, which takes padded queries and, of documents of their own, a list for each."""
    device, length, (*_, size) = queries.values.device, queries.longest, queries.values.shape
    among = documents.among
    codes = codes_of(documents.values, codec.on(device), documents.cu_seqlens if among is None else among.bounds)
    n_queries, mask = len(queries.cu_seqlens) - 1, None
    if len(queries.values) == n_queries * length:
        padded = queries.values.view(n_queries, length, size)
    else:
        places = torch.arange(length, device=device) + queries.cu_seqlens[:-1].unsqueeze(1)
        mask = places < queries.cu_seqlens[1:].unsqueeze(1)
        padded = queries.values[places.clamp_(max=len(queries.values) - 1)]
    if candidates is None:
        if documents.host_bounds is not None and n_queries * length >= RESIDUAL_MANY_ROWS:
            return maxsim_residual_by_bounds(padded, codes, documents.host_bounds, mask, EMPTY_SCORE)
        return maxsim_residual(padded, codes, queries_mask=mask, empty_score=EMPTY_SCORE)
    counts = candidates.diff()
    most = int(counts.max())
    # Where they are scored: of one query, there may be millions.
    starts, lengths = on_device(torch.stack([candidates[:-1], counts]), device).unsqueeze(2)
    numbers = torch.arange(most, device=device)
    own = torch.where(numbers < lengths, starts + numbers, -1)
    if among is not None:
        own = among.places[own].masked_fill_(own < 0, -1)
    scores = maxsim_residual(padded, codes, queries_mask=mask, candidates=own, empty_score=EMPTY_SCORE).flatten()
    if int(counts.min()) == most:
        return scores
    # On the host, as a mask on a GPU would wait for it.
    owned = (torch.arange(most) < counts.unsqueeze(1)).flatten().nonzero()[:, 0]
    return scores[owned.to(device, non_blocking=True)]


def _host_scores(backend: str, queries: Packed, documents: Packed, candidates: Tensor | None) -> Tensor:
    """Scores by the scorer of this name of a host: PyLate's or, without it, sentence-transformers'."""
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
