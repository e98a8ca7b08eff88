"""The calls that the suite `launch` times: what users write, and what they would write with another package.

Each class holds the inputs of one call, and offers the ways to make it: `Call` names them. The inputs are small, so
that the time of a call is that of the host.

Masks are prefixes, as of padded texts: flash-maxsim knows lengths only.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from pylate_flash.bench import forward, training, varlen
from pylate_flash.bench.protocol import relative_error
from pylate_flash.bench.suite import WRONG, Candidate, Unavailable

Result = torch.Tensor | tuple[torch.Tensor, ...]


class Call(ABC):
    """One call, with its inputs. A system that has no such call raises `Unavailable`."""

    # Whether the call is the same every time, and without gradients: what is captured is replayed as it was.
    replayable = True
    # Whether gradients are computed too.
    differentiated = False

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the inputs are."""

    @abstractmethod
    def reference(self) -> Result:
        """The right answer in float64: scores, or a loss and its gradients."""

    def accuracy(self, dtype: torch.dtype) -> float:
        """The relative error that pylate_flash promises for inputs of that type."""
        return forward.accuracy(dtype)

    @abstractmethod
    def ours(self) -> list[Candidate]:
        """This package: the one way that a user takes."""

    def lik(self) -> list[Candidate]:
        """late-interaction-kernels."""
        raise Unavailable("it has no such call")

    def flash_maxsim(self) -> list[Candidate]:
        """flash-maxsim."""
        raise Unavailable("it has no such call")

    @abstractmethod
    def torch(self) -> list[Candidate]:
        """What a user has without a package of kernels: an einsum, or PyLate's own call."""


def einsum_scores(
    queries: torch.Tensor,
    documents: torch.Tensor,
    queries_mask: torch.Tensor | None = None,
    documents_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The plain way, and in float64 the right one: [Nq, Nd], or [Nq, K] of documents [Nq, K, Ld, d]."""
    similarities = torch.einsum("qsd,ntd->qnst" if documents.dim() == 3 else "qsd,qntd->qnst", queries, documents)
    if documents_mask is not None:
        similarities = similarities.masked_fill(~documents_mask.bool().unsqueeze(-2), -torch.inf)
    best = similarities.max(dim=-1).values
    if queries_mask is not None:
        best = best * queries_mask.unsqueeze(1)
    return best.sum(dim=-1, dtype=torch.promote_types(best.dtype, torch.float32))


def named(queries_mask: torch.Tensor | None, documents_mask: torch.Tensor | None) -> dict[str, Any]:
    """The masks that there are, as arguments of this package's functions."""
    masks = {"queries_mask": queries_mask, "documents_mask": documents_mask}
    return {name: mask for name, mask in masks.items() if mask is not None}


def prefixes(*size: int, generator: torch.Generator, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    """Draw a mask whose last dimension is active from its start on: at least half of it."""
    *sequences, length = size
    device = generator.device
    lengths = torch.randint((length + 1) // 2, length + 1, sequences, generator=generator, device=device)
    return (torch.arange(length, device=device) < lengths.unsqueeze(-1)).to(dtype)


def lengths_of(mask: torch.Tensor) -> torch.Tensor:
    """The lengths of prefixes, int32, as flash-maxsim takes them: one after the other."""
    return mask.sum(dim=-1).flatten().to(torch.int32)


def autocast_type(dtype: torch.dtype) -> torch.dtype:
    """The type under autocast where inputs would have ``dtype``: one of the half types."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


def within(context: AbstractContextManager | None, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call in a context that it enters every time, if there is one."""
    if context is None:
        return call

    def inside(*arguments: Any) -> Any:
        with context:
            return call(*arguments)

    return inside


# From queries and documents, their scores.
Score = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Padded(Call):
    """`maxsim`: every query against every document, or against candidates [Nq, K, Ld, d] of its own.

    ``cast``: the type under autocast, or None for a call without it. Under it the embeddings are float32, which is what
    a normalisation leaves there, and every call enters the (ready made) context.
    """

    queries: torch.Tensor
    documents: torch.Tensor
    queries_mask: torch.Tensor | None = None
    documents_mask: torch.Tensor | None = None
    cast: torch.dtype | None = None

    @property
    def device(self) -> torch.device:
        return self.queries.device

    @property
    def context(self) -> AbstractContextManager | None:
        """A context of autocast, if there is one."""
        return None if self.cast is None else torch.autocast(self.device.type, dtype=self.cast)

    @property
    def options(self) -> dict[str, Any]:
        """The masks that there are, as this package names them."""
        return named(self.queries_mask, self.documents_mask)

    def candidate(self, label: str, score: Score) -> Candidate:
        """What is timed of a way to score."""
        return Candidate(label, within(self.context, partial(score, self.queries, self.documents)))

    def as_computed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and documents in float64, from what autocast rounds them to."""
        dtype = self.cast or self.queries.dtype
        return self.queries.detach().to(dtype).double(), self.documents.detach().to(dtype).double()

    def reference(self) -> Result:
        return einsum_scores(*self.as_computed(), **self.options)

    def accuracy(self, dtype: torch.dtype) -> float:
        return forward.accuracy(self.cast or dtype)

    def ours(self) -> list[Candidate]:
        from pylate_flash import maxsim

        return [self.candidate("maxsim", partial(maxsim, **self.options))]

    def plain(self) -> forward.Inputs | None:
        """The inputs as the suite `forward` knows them, or None where it does not."""
        if self.documents.dim() == 4 or self.cast is not None or self.options:
            return None
        Nd, Ld, _ = self.documents.shape
        lengths = torch.full((Nd,), Ld, dtype=torch.int32, device=self.device)
        return forward.Inputs(self.queries, self.documents, lengths)

    def lik(self) -> list[Candidate]:
        if plain := self.plain():
            return forward.lik(plain)
        from late_interaction_kernels import maxsim

        return self.in_each_type("maxsim", partial(maxsim, q_mask=self.queries_mask, d_mask=self.documents_mask))

    def flash_maxsim(self) -> list[Candidate]:
        if plain := self.plain():
            return forward.flash_maxsim(plain)
        from flash_maxsim import flash_maxsim_batched

        lengths = None if self.documents_mask is None else lengths_of(self.documents_mask)
        batched = partial(flash_maxsim_batched, doc_lengths=lengths, shared_docs=self.documents.dim() == 3)

        def score(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
            # It masks no tokens of queries, which are therefore made 0, as PyLate does.
            if self.queries_mask is not None:
                queries = queries * self.queries_mask.unsqueeze(-1)
            return batched(queries, documents)

        return self.in_each_type("flash_maxsim_batched", score)

    def in_each_type(self, label: str, score: Score) -> list[Candidate]:
        """The ways to call what does not know autocast: with the embeddings as they are, and cast by hand."""
        candidates = [self.candidate(label, score)]
        if (dtype := self.cast) is not None:
            by_hand = f"{label}, cast by hand"
            candidates.append(self.candidate(by_hand, lambda *embeddings: score(*[e.to(dtype) for e in embeddings])))
        return candidates

    def torch(self) -> list[Candidate]:
        return [self.candidate("einsum", partial(einsum_scores, **self.options))]


class Pairwise(Padded):
    """`maxsim_pairwise`: queries [N, Lq, d], and their documents as candidates [N, 1, Ld, d]."""

    def scored(self, score: Callable[..., torch.Tensor], queries_mask: str, documents_mask: str) -> Callable[[], Any]:
        """A call with documents [N, Ld, d], and the masks under these names."""
        masks = {queries_mask: self.queries_mask}
        if self.documents_mask is not None:
            masks[documents_mask] = self.documents_mask.squeeze(1)
        return partial(score, self.queries, self.documents.squeeze(1), **masks)

    def ours(self) -> list[Candidate]:
        from pylate_flash import maxsim_pairwise

        return [Candidate("maxsim_pairwise", self.scored(maxsim_pairwise, "queries_mask", "documents_mask"))]

    def lik(self) -> list[Candidate]:
        from late_interaction_kernels import maxsim_pairs

        return [Candidate("maxsim_pairs", self.scored(maxsim_pairs, "q_mask", "d_mask"))]


# What an empty document scores.
EMPTY_SCORE = -1.0


@dataclass(frozen=True)
class Packed:
    """Queries of ``query_length`` tokens [Tq, d], and documents [Td, d] of these ``lengths``, one after the other."""

    queries: torch.Tensor
    documents: torch.Tensor
    query_length: int
    lengths: torch.Tensor

    def bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The boundaries of queries and of documents, int32, on the host."""
        starts = torch.arange(0, len(self.queries) + 1, self.query_length, dtype=torch.int32)
        return starts, F.pad(self.lengths.cumsum(0), (1, 0)).to(torch.int32)

    def padded(self, own: bool) -> Padded:
        """The same padded and masked; ``own``: as many documents for each query."""
        mask = (torch.arange(int(self.lengths.max())) < self.lengths.unsqueeze(1)).to(self.documents.device)
        documents = self.documents.new_zeros(*mask.shape, self.documents.shape[-1])
        documents[mask] = self.documents
        queries = self.queries.unflatten(0, (-1, self.query_length))
        if own:
            documents, mask = documents.unflatten(0, (len(queries), -1)), mask.unflatten(0, (len(queries), -1))
        return Padded(queries, documents, None, mask)


def padded_scores(inputs: Padded, queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """The scores of padded inputs by an einsum; an empty document has `EMPTY_SCORE`."""
    scores = einsum_scores(queries, documents, **inputs.options)
    if inputs.documents.dim() == 3 or inputs.documents_mask is None:
        return scores
    return scores.masked_fill(~inputs.documents_mask.any(dim=-1), EMPTY_SCORE)


@dataclass(frozen=True)
class Varlen(Call):
    """`maxsim_varlen` of packed inputs.

    ``own``: each query has candidates of its own, empty documents among them, and the boundaries stay on the host, as
    they do in reranking. Otherwise they are on the device, as `pack` makes them.
    """

    batch: Packed
    own: bool = False

    @property
    def device(self) -> torch.device:
        return self.batch.queries.device

    def bounds(self) -> list[torch.Tensor]:
        """The boundaries of queries and of documents, on the device."""
        return [boundaries.to(self.device) for boundaries in self.batch.bounds()]

    def reference(self) -> Result:
        padded = self.batch.padded(self.own)
        return padded_scores(padded, *padded.as_computed())

    def ours(self) -> list[Candidate]:
        from pylate_flash import maxsim_varlen

        batch = self.batch
        if not self.own:
            return [Candidate("maxsim_varlen", partial(maxsim_varlen, batch.queries, batch.documents, *self.bounds()))]
        counts = len(batch.lengths) // (len(batch.queries) // batch.query_length)
        candidates = torch.arange(0, len(batch.lengths) + 1, counts, dtype=torch.int32)
        packed = partial(maxsim_varlen, batch.queries, batch.documents, *batch.bounds())
        call = partial(packed, candidates_cu_seqlens=candidates, empty_score=EMPTY_SCORE)
        return [Candidate("maxsim_varlen", call)]

    def lik(self) -> list[Candidate]:
        if self.own:
            raise Unavailable("its packed call takes no candidates")
        from late_interaction_kernels import maxsim_varlen

        call = partial(maxsim_varlen, self.batch.queries, self.batch.documents, *self.bounds())
        lengths = {"max_seqlen_q": self.batch.query_length, "max_seqlen_d": int(self.batch.lengths.max())}
        return [
            Candidate("maxsim_varlen", call),
            Candidate("maxsim_varlen, longest lengths given", partial(call, **lengths)),
        ]

    def flash_maxsim(self) -> list[Candidate]:
        if self.own:
            raise Unavailable("its packed call takes one query and no candidates")
        from flash_maxsim import flash_maxsim_packed

        _, boundaries = self.bounds()
        longest = int(self.batch.lengths.max())
        call = partial(flash_maxsim_packed, self.batch.queries, self.batch.documents, boundaries, longest)
        return [Candidate("flash_maxsim_packed", call)]

    def torch(self) -> list[Candidate]:
        padded = self.batch.padded(self.own)
        return [Candidate("einsum, padded", partial(padded_scores, padded, padded.queries, padded.documents))]


class Turn:
    """Calls that are made in turn, one at a time; the results of the first few are read."""

    def __init__(self, calls: Sequence[Callable[[], Any]], read: int) -> None:
        self.calls = calls
        self.n_read = read
        self.last = -1

    def __call__(self) -> Any:
        self.last = (self.last + 1) % len(self.calls)
        return self.calls[self.last]()

    def read(self, last: Any) -> Result:
        """What the calls that are read return, joined; ``last`` is what the last call made has returned."""
        return joined([last if index == self.last else self.calls[index]() for index in range(self.n_read)])


def joined(results: Sequence[Any]) -> Result:
    """The scores of several calls, stacked; of steps the losses, and the gradients as one vector for each leaf."""
    if isinstance(results[0], torch.Tensor):
        return torch.stack(list(results))
    losses, *gradients = zip(*results, strict=True)
    return torch.stack(losses), *(torch.cat([part.flatten() for part in of_leaf]) for of_leaf in gradients)


@dataclass(frozen=True)
class InTurn(Call):
    """The same kind of call of other inputs every time; of the first ``n_read`` of them, results are compared."""

    calls: Sequence[Call]
    n_read: int

    replayable = False

    @property
    def device(self) -> torch.device:
        return self.calls[0].device

    @property
    def differentiated(self) -> bool:  # type: ignore[override]
        return self.calls[0].differentiated

    def reference(self) -> Result:
        return joined([call.reference() for call in self.calls[: self.n_read]])

    def accuracy(self, dtype: torch.dtype) -> float:
        return self.calls[0].accuracy(dtype)

    def candidates(self, system: str) -> list[Candidate]:
        """A system's candidates, each of which makes one of the calls."""
        offered = [getattr(call, system)() for call in self.calls]
        turns = [(ways[0].label, Turn([way.call for way in ways], self.n_read)) for ways in zip(*offered, strict=True)]
        return [Candidate(label, turn, turn.read) for label, turn in turns]

    def ours(self) -> list[Candidate]:
        return self.candidates("ours")

    def lik(self) -> list[Candidate]:
        return self.candidates("lik")

    def flash_maxsim(self) -> list[Candidate]:
        return self.candidates("flash_maxsim")

    def torch(self) -> list[Candidate]:
        return self.candidates("torch")


@dataclass(frozen=True)
class FromHidden(Call):
    """`maxsim_from_hidden`: queries [Nq, Lq, d], hidden states [Nd, Ld, d_model] of documents, weight [d, d_model]."""

    queries: torch.Tensor
    hidden: torch.Tensor
    weight: torch.Tensor
    queries_mask: torch.Tensor | None = None
    documents_mask: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.queries.device

    def reference(self) -> Result:
        """As in the suite `hidden`: from the embeddings, which are rounded before and after they are normalised."""
        queries, documents = (
            F.normalize(some.double(), dim=-1).to(some.dtype).double()
            for some in (self.queries, F.linear(self.hidden, self.weight))
        )
        return einsum_scores(queries, documents, self.queries_mask, self.documents_mask)

    def accuracy(self, dtype: torch.dtype) -> float:
        return training.accuracy(dtype)

    def ours(self) -> list[Candidate]:
        from pylate_flash import maxsim_from_hidden

        masks = named(self.queries_mask, self.documents_mask)
        score = partial(maxsim_from_hidden, self.queries, self.hidden, self.weight, **masks)
        return [Candidate("maxsim_from_hidden", score)]

    def lik(self) -> list[Candidate]:
        if self.queries_mask is not None:
            raise Unavailable("its call from hidden states takes no mask of the queries")
        from late_interaction_kernels.fused_head import maxsim_from_hidden

        score = partial(maxsim_from_hidden, self.queries, self.hidden, self.weight, d_mask=self.documents_mask)
        return [Candidate("maxsim_from_hidden", score)]

    def torch(self) -> list[Candidate]:
        def score() -> torch.Tensor:
            documents = F.normalize(F.linear(self.hidden, self.weight), dim=-1)
            return einsum_scores(self.queries, documents, self.queries_mask, self.documents_mask)

        return [Candidate("linear, normalize, einsum", score)]


@dataclass(frozen=True)
class Rerank(Call):
    """`rank.rerank` of tensors on the device; another package computes in PyLate's own."""

    request: varlen.Request

    @property
    def device(self) -> torch.device:
        return self.request.device

    def reference(self) -> Result:
        scores = [
            einsum_scores(query.double().unsqueeze(0), document.double().unsqueeze(0)).flatten()
            for query, documents in zip(self.request.queries, self.request.documents, strict=True)
            for document in documents
        ]
        # Rankings are read on the host.
        return torch.cat(scores).cpu()

    def ours(self) -> list[Candidate]:
        return varlen.ours(self.request)

    def lik(self) -> list[Candidate]:
        return varlen.lik(self.request)

    def flash_maxsim(self) -> list[Candidate]:
        return varlen.flash_maxsim(self.request)

    def torch(self) -> list[Candidate]:
        return varlen.torch_eager(self.request)


def error(found: Result, expected: Result) -> float:
    """Return the relative error of scores; of a step, the largest of the loss's and of the gradients' (Frobenius).

    Scores or a loss that are wrong make it infinite, as a system's tolerance is for gradients.
    """
    found, expected = (value if isinstance(value, tuple) else (value,) for value in (found, expected))
    if len(found) != len(expected):
        return math.inf
    scores = relative_error(found[0], expected[0])
    if scores > WRONG:
        return math.inf
    return max(scores, *(training.frobenius(*pair) for pair in zip(found[1:], expected[1:], strict=True)), 0.0)
