"""The calls that suites time: what users write, and what they would write with another package.

Each class holds the inputs of one call and has a method per system (see `Call`). Masks are prefixes, as for padded
texts, because flash-maxsim only accepts lengths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import pylate_flash
from pylate_flash.bench import exact
from pylate_flash.bench.exact import Result, Score, einsum_scores
from pylate_flash.bench.peers import FLASH_MAXSIM, LIK
from pylate_flash.bench.protocol import MIB
from pylate_flash.bench.suite import Candidate, Unavailable


class Call(ABC):
    """One call, with its inputs. The method of a system without such a call raises `Unavailable`."""

    # The call runs on their device unless `device` is overridden.
    queries: Any
    # Whether the call is identical every time and without gradients, so that a captured CUDA graph can replay it.
    replayable = True
    # Whether gradients are computed too.
    differentiated = False

    @property
    def device(self) -> torch.device:
        """The device of the inputs."""
        return self.queries.device

    @abstractmethod
    def reference(self) -> Any:
        """The float64 reference: scores, or a step."""

    def accuracy(self, dtype: torch.dtype) -> float:
        """The relative error that pylate_flash promises for inputs of that type."""
        return exact.accuracy(dtype)

    @abstractmethod
    def ours(self) -> list[Candidate]:
        """This package, called as users call it."""

    def lik(self) -> list[Candidate]:
        """late-interaction-kernels."""
        raise Unavailable("it has no such call")

    def flash_maxsim(self) -> list[Candidate]:
        """flash-maxsim."""
        raise Unavailable("it has no such call")

    def torch(self) -> list[Candidate]:
        """The baseline without a kernel package: an einsum, or PyLate's own call."""
        raise Unavailable("it has no such call")


def only(function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Candidate]:
    """A single candidate, labelled with the function's name."""
    return [Candidate(function.__name__, partial(function, *arguments, **options))]


def unit_vectors(*size: int, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Draw random vectors, normalised along the last dimension, on the generator's device."""
    drawn = torch.randn(*size, device=generator.device, generator=generator)
    return F.normalize(drawn, dim=-1).to(dtype)


def prefixes(*size: int, generator: torch.Generator, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    """Draw a prefix mask: along the last dimension at least the first half is active."""
    *sequences, length = size
    device = generator.device
    lengths = torch.randint((length + 1) // 2, length + 1, sequences, generator=generator, device=device)
    return (torch.arange(length, device=device) < lengths.unsqueeze(-1)).to(dtype)


def lengths_of(mask: torch.Tensor) -> torch.Tensor:
    """The lengths of prefix masks, int32 and flattened, as flash-maxsim takes them."""
    return mask.sum(dim=-1).flatten().to(torch.int32)


def bounds_of(lengths: torch.Tensor) -> torch.Tensor:
    """cu_seqlens [N + 1] of packed sequences of these lengths, int32, on the CPU."""
    return F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def autocast_type(dtype: torch.dtype) -> torch.dtype:
    """The autocast dtype for inputs of ``dtype``: bfloat16 for float32, otherwise the same half dtype."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


def within(context: AbstractContextManager | None, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the call so that it enters the context every time; return it as is if there is none."""
    if context is None:
        return call

    def inside(*arguments: Any) -> Any:
        with context:
            return call(*arguments)

    return inside


def chunked_scores(
    queries: torch.Tensor, documents: torch.Tensor, *, chunk: int, score: Score = einsum_scores, **masks: Any
) -> torch.Tensor:
    """Plain scores, computed over ``chunk`` documents at a time."""
    if chunk >= documents.shape[-3]:
        return score(queries, documents, **masks)
    return torch.cat(
        [score(queries, part, **part_masks) for part, part_masks in exact.in_parts(documents, masks, chunk)], dim=1
    )


def chunk_sizes(queries: torch.Tensor, documents: torch.Tensor, held: float = 2.0) -> list[int]:
    """Return the four largest of 1, 4, 16, ..., Nd whose similarities fit ``held`` times in the free memory."""
    *_, Nd, Ld, _ = documents.shape
    free = torch.cuda.mem_get_info(queries.device)[0] if queries.is_cuda else 2048 * MIB
    sizes = [size for size in (1, 4, 16, 64, 256, 1024, 4096, 16384) if size < Nd] + [Nd]
    similarities = queries.shape[:2].numel() * Ld * queries.element_size()
    return [size for size in sizes if held * size * similarities <= free][-4:] or [1]


@dataclass(frozen=True)
class Padded(Call):
    """`maxsim`: every query against every document, or against its own candidates [Nq, K, Ld, d].

    ``cast``: the autocast dtype, or None without autocast. With it the embeddings are float32, as normalisation returns
    them under autocast, and every call enters the (already created) context.
    """

    queries: torch.Tensor
    documents: torch.Tensor
    queries_mask: torch.Tensor | None = None
    documents_mask: torch.Tensor | None = None
    cast: torch.dtype | None = None

    @property
    def context(self) -> AbstractContextManager | None:
        """The autocast context, or None."""
        return None if self.cast is None else torch.autocast(self.device.type, dtype=self.cast)

    @property
    def masks(self) -> dict[str, Any]:
        """The masks that are not None, by this package's argument names."""
        return named(self.queries_mask, self.documents_mask)

    def lengths(self) -> torch.Tensor:
        """The lengths of all documents, int32."""
        if self.documents_mask is not None:
            return lengths_of(self.documents_mask)
        *documents, Ld, _ = self.documents.shape
        return torch.full((torch.Size(documents).numel(),), Ld, dtype=torch.int32, device=self.device)

    def candidate(self, label: str, score: Score) -> Candidate:
        """The candidate that times ``score``."""
        return Candidate(label, within(self.context, partial(score, self.queries, self.documents)))

    def as_computed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and documents, rounded as under autocast."""
        dtype = self.cast or self.queries.dtype
        return self.queries.detach().to(dtype), self.documents.detach().to(dtype)

    def reference(self) -> Result:
        return exact.scores(*self.as_computed(), **self.masks)

    def accuracy(self, dtype: torch.dtype) -> float:
        return exact.accuracy(self.cast or dtype, gradients=self.differentiated)

    def ours(self) -> list[Candidate]:
        return [self.candidate("maxsim", partial(pylate_flash.maxsim, **self.masks))]

    def lik(self) -> list[Candidate]:
        """`maxsim`, and the inference function that it calls, which saves some host work."""
        score = partial(LIK["maxsim"], q_mask=self.queries_mask, d_mask=self.documents_mask)
        candidates = self.in_each_type("maxsim", score)
        # Only `maxsim` splits longer queries, which is faster and compiles much sooner.
        if self.is_plain and self.queries.shape[1] <= 512:
            forward = partial(LIK["forward.maxsim_forward"], self.queries, self.documents, d_mask=self.documents_mask)
            candidates.append(Candidate("maxsim_forward", lambda: forward()[0]))
        return candidates

    @property
    def is_plain(self) -> bool:
        """Whether it is all pairs, without a mask of the queries and without autocast."""
        return self.documents.dim() == 3 and self.queries_mask is None and self.cast is None

    def flash_maxsim(self) -> list[Candidate]:
        """Its function for one query or for several, its persistent kernel, and its variants for long queries.

        Passing the lengths saves a kernel that would fill them in on every call.
        """
        documents, lengths = self.documents, self.lengths()
        if not self.is_plain:
            shared = documents.dim() == 3
            batched = partial(FLASH_MAXSIM["flash_maxsim_batched"], doc_lengths=lengths, shared_docs=shared)

            def score(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
                # It does not mask query tokens, so they are zeroed here, as PyLate does.
                if self.queries_mask is not None:
                    queries = queries * self.queries_mask.unsqueeze(-1)
                return batched(queries, documents)

            return self.in_each_type("flash_maxsim_batched", score)
        several = len(self.queries) > 1
        queries = self.queries if several else self.queries[0]
        names = ["flash_maxsim_batched" if several else "flash_maxsim", "flash_maxsim_persistent"]
        calls = {name: partial(FLASH_MAXSIM[name], queries, documents, lengths) for name in names}
        if not several and self.queries.shape[1] >= 512 and documents.shape[1] >= 512:
            calls["splitk"] = partial(calls["flash_maxsim"], splitk=True)
            # Its kernel reads documents in groups of four, and out of bounds if their number is not divisible by 4.
            if len(documents) % 4 == 0:
                calls["flash_maxsim_qreuse"] = partial(FLASH_MAXSIM["flash_maxsim_qreuse"], queries, documents, lengths)
        return [Candidate(label, call) for label, call in calls.items()]

    def in_each_type(self, label: str, score: Score) -> list[Candidate]:
        """Candidates of a function that ignores autocast: with the embeddings as they are, and cast by hand."""
        candidates = [self.candidate(label, score)]
        if (dtype := self.cast) is not None:
            by_hand = f"{label}, cast by hand"
            candidates.append(self.candidate(by_hand, lambda *embeddings: score(*[e.to(dtype) for e in embeddings])))
        return candidates

    def torch(self) -> list[Candidate]:
        """An einsum over chunks of documents, one candidate per chunk size."""
        return [
            self.candidate(f"einsum, chunks of {chunk}", partial(chunked_scores, chunk=chunk, **self.masks))
            for chunk in chunk_sizes(self.queries, self.documents)
        ]


def named(queries_mask: torch.Tensor | None, documents_mask: torch.Tensor | None) -> dict[str, Any]:
    """The masks that are not None, as keyword arguments of this package's functions."""
    masks = {"queries_mask": queries_mask, "documents_mask": documents_mask}
    return {name: mask for name, mask in masks.items() if mask is not None}


# The score of an empty document.
EMPTY_SCORE = -1.0


@dataclass(frozen=True)
class Varlen(Call):
    """`maxsim_varlen`: queries [Nq, Lq, d], and packed documents [Td, d] of these ``lengths``.

    ``own``: each query has its own candidates, some of them empty, and cu_seqlens stay on the host, as in reranking.
    Otherwise they are on the device, as `pack` returns them.
    """

    queries: torch.Tensor
    documents: torch.Tensor
    lengths: torch.Tensor
    own: bool = False

    @property
    def longest(self) -> int:
        """The length of the longest document."""
        return int(self.lengths.max())

    @property
    def longest_lengths(self) -> dict[str, Any]:
        """The arguments that save `maxsim_varlen` from reading cu_seqlens."""
        return {"max_query_length": self.queries.shape[1], "max_document_length": self.longest}

    def packed(self) -> tuple[torch.Tensor, ...]:
        """Queries and documents [tokens, d], and cu_seqlens of each (int32)."""
        Nq, Lq, _ = self.queries.shape
        device = "cpu" if self.own else self.device
        bounds = [bounds_of(lengths).to(device) for lengths in (torch.full((Nq,), Lq), self.lengths)]
        return self.queries.flatten(0, 1), self.documents, *bounds

    def padded(self) -> Padded:
        """The same inputs, padded and masked."""
        mask = (torch.arange(self.longest) < self.lengths.unsqueeze(1)).to(self.device)
        documents = self.documents.new_zeros(*mask.shape, self.documents.shape[-1])
        documents[mask] = self.documents
        if self.own:
            documents, mask = (part.unflatten(0, (len(self.queries), -1)) for part in (documents, mask))
        return Padded(self.queries, documents, None, mask)

    def filled(self, score: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The scores, with `EMPTY_SCORE` for empty documents if queries have their own candidates."""
        scores = score()
        if not self.own:
            return scores
        return scores.masked_fill((self.lengths == 0).to(self.device).view(scores.shape), EMPTY_SCORE)

    def reference(self) -> Result:
        padded = self.padded()
        return self.filled(partial(exact.scores, *padded.as_computed(), **padded.masks))

    def ours(self) -> list[Candidate]:
        options: dict[str, Any] = {}
        if self.own:
            counts = len(self.lengths) // len(self.queries)
            candidates = torch.arange(0, len(self.lengths) + 1, counts, dtype=torch.int32)
            options = {"candidates_cu_seqlens": candidates, "empty_score": EMPTY_SCORE}
        return only(pylate_flash.maxsim_varlen, *self.packed(), **options)

    def lik(self) -> list[Candidate]:
        """With the maximum lengths given, which it checks on the device, and without."""
        if self.own:
            raise Unavailable("its packed call takes no candidates")
        call = partial(LIK["maxsim_varlen"], *self.packed())
        with_lengths = partial(call, max_seqlen_q=self.queries.shape[1], max_seqlen_d=self.longest)
        return [Candidate("maxsim_varlen", call), Candidate("maxsim_varlen, longest lengths given", with_lengths)]

    def flash_maxsim(self) -> list[Candidate]:
        """One query at a time."""
        if self.own:
            raise Unavailable("its packed call takes one query and no candidates")
        score_one, longest = FLASH_MAXSIM["flash_maxsim_packed"], self.longest
        *_, boundaries = self.packed()

        def score(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
            scores = [score_one(query, documents, boundaries, longest) for query in queries]
            return scores[0] if len(scores) == 1 else torch.stack(scores)

        return [Candidate("flash_maxsim_packed", partial(score, self.queries, self.documents))]

    def torch(self) -> list[Candidate]:
        candidates = self.padded().torch()
        return [Candidate(f"{label}, padded", partial(self.filled, call)) for label, call, _ in candidates]


@dataclass(frozen=True)
class FromHidden(Call):
    """`maxsim_from_hidden`: queries [Nq, Lq, d], hidden states [Nd, Ld, d_model] of documents, weight [d, d_model]."""

    queries: torch.Tensor
    hidden: torch.Tensor
    weight: torch.Tensor
    queries_mask: torch.Tensor | None = None
    documents_mask: torch.Tensor | None = None

    @property
    def masks(self) -> dict[str, Any]:
        """The masks that are not None, by this package's argument names."""
        return named(self.queries_mask, self.documents_mask)

    def reference(self) -> Result:
        """Scores of the embeddings, which are rounded before and after normalisation."""
        queries, documents = (
            exact.normalized(embeddings.double(), embeddings.dtype)
            for embeddings in (self.queries, F.linear(self.hidden, self.weight))
        )
        return exact.scores(queries, documents, **self.masks)

    def accuracy(self, dtype: torch.dtype) -> float:
        return exact.accuracy(dtype, gradients=True)

    def ours(self) -> list[Candidate]:
        return only(pylate_flash.maxsim_from_hidden, self.queries, self.hidden, self.weight, **self.masks)

    def lik(self) -> list[Candidate]:
        if self.queries_mask is not None:
            raise Unavailable("its call from hidden states takes no mask of the queries")
        score = LIK["fused_head.maxsim_from_hidden"]
        return only(score, self.queries, self.hidden, self.weight, d_mask=self.documents_mask)

    def torch(self) -> list[Candidate]:
        def score() -> torch.Tensor:
            documents = F.normalize(F.linear(self.hidden, self.weight), dim=-1)
            return einsum_scores(self.queries, documents, **self.masks)

        return [Candidate("linear, normalize, einsum", score)]
