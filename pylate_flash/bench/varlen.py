"""The suite `varlen`: documents of many lengths, packed one after the other, and reranking through PyLate.

Packed, no padding is stored or read; padded to the longest, every function for batches will do. Both ways are measured,
and the floor counts the real tokens alone. The row `rerank` is the whole of `rank.rerank`, from numpy arrays in the
host's memory to sorted lists, so its time is the host's and the device's together.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from pylate_flash.bench import forward
from pylate_flash.bench.peers import FLASH_MAXSIM, LIK
from pylate_flash.bench.protocol import Work
from pylate_flash.bench.suite import OURS, Candidate, Suite, System, Unavailable


@dataclass(frozen=True)
class Ragged:
    """``Nq`` queries of ``Lq`` tokens against ``Nd`` documents of ``shortest`` to ``longest`` tokens, of size ``d``."""

    name: str
    Nq: int
    Nd: int
    Lq: int
    shortest: int
    longest: int
    d: int = 128

    @property
    def shape(self) -> str:
        """The shape, for people."""
        return f"{self.Nq} x {self.Nd}, {self.Lq} x {self.shortest}..{self.longest}"

    @property
    def documents(self) -> int:
        """How many documents there are in all."""
        return self.Nd

    def lengths(self) -> torch.Tensor:
        """Draw the lengths of all documents, uniformly and always the same."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.shortest, self.longest + 1, (self.documents,), generator=generator)

    def work(self, dtype: torch.dtype) -> Work:
        """As of `forward.Shape`, for the tokens that there are."""
        tokens = int(self.lengths().sum())
        return Work(
            flops=2.0 * self.Nq * self.Lq * tokens * self.d,
            bytes=float(dtype.itemsize * self.d * (self.Nq * self.Lq + tokens) + 4 * self.Nq * self.Nd),
        )

    def within(self, flops: float) -> Ragged:
        """The same row with fewer documents (and queries, where there are several), costing no more than ``flops``."""
        share = self._share(flops)
        if self.Nq == 1:
            return replace(self, Nd=max(1, int(self.Nd * share)))
        return replace(self, Nq=max(1, int(self.Nq * math.sqrt(share))), Nd=max(1, int(self.Nd * math.sqrt(share))))

    def _share(self, flops: float) -> float:
        """The part of the row that ``flops`` surely suffice for."""
        return min(1.0, flops / (2.0 * self.Nq * self.Nd * self.Lq * self.longest * self.d))


class Rerank(Ragged):
    """``Nq`` queries, each with ``Nd`` candidates of its own, in float32: what PyLate's models return as arrays."""

    @property
    def documents(self) -> int:
        """How many candidates there are in all."""
        return self.Nq * self.Nd

    def work(self, dtype: torch.dtype) -> Work:
        """As of `Ragged`, each document against its own query."""
        tokens = int(self.lengths().sum())
        return Work(
            flops=2.0 * self.Lq * tokens * self.d,
            bytes=float(4 * self.d * (self.Nq * self.Lq + tokens) + 4 * self.documents),
        )

    def within(self, flops: float) -> Rerank:
        """The same row with fewer queries, costing no more than ``flops``."""
        return replace(self, Nq=max(1, int(self.Nq * self._share(flops))))


ROWS = (
    Ragged("varlen-uniform", 1, 10000, 32, 64, 192),
    Ragged("varlen-ragged", 32, 4000, 32, 16, 512),
    # So many tokens that one of PyLate's padding, which it does not mask in `rerank`, is never the best.
    Rerank("rerank", 100, 100, 32, 40, 180),
)


@dataclass(frozen=True)
class Inputs:
    """A row's tensors, packed and padded.

    ``queries`` [Nq * Lq, d] and ``documents`` [tokens, d] with their boundaries (int32); ``padded``, whose documents
    are [Nd, longest, d] and 0 where ``active`` [Nd, longest] is False.
    """

    queries: torch.Tensor
    documents: torch.Tensor
    queries_cu_seqlens: torch.Tensor
    documents_cu_seqlens: torch.Tensor
    padded: forward.Inputs
    active: torch.Tensor


@dataclass(frozen=True)
class Request:
    """What `rank.rerank` is given: for each query its tokens and its documents, and ids that count them all from 0.

    Arrays in this suite; the suite `launch` has tensors.
    """

    ids: list[list[int]]
    queries: list[Any]
    documents: list[list[Any]]
    device: torch.device


def make_inputs(row: Ragged, device: torch.device, dtype: torch.dtype) -> Inputs | Request:
    """Draw random unit vectors, the same ones for the same row on the same kind of device."""
    generator = torch.Generator(device).manual_seed(0)
    if isinstance(row, Rerank):
        dtype = torch.float32
    lengths = row.lengths()
    queries = forward.unit_vectors(row.Nq, row.Lq, row.d, generator=generator, dtype=dtype)
    documents = forward.unit_vectors(int(lengths.sum()), row.d, generator=generator, dtype=dtype)
    if isinstance(row, Rerank):
        arrays = [tokens.numpy() for tokens in documents.cpu().split(lengths.tolist())]
        return Request(
            ids=[list(range(first, first + row.Nd)) for first in range(0, row.documents, row.Nd)],
            queries=list(queries.cpu().numpy()),
            # Copies, as every document of a model's output is an array of its own.
            documents=[
                [array.copy() for array in arrays[first : first + row.Nd]] for first in range(0, row.documents, row.Nd)
            ],
            device=device,
        )
    active = (torch.arange(int(lengths.max())) < lengths.unsqueeze(1)).to(device)
    padded = torch.zeros(*active.shape, row.d, dtype=dtype, device=device)
    padded[active] = documents
    return Inputs(
        queries=queries.flatten(0, 1),
        documents=documents,
        queries_cu_seqlens=torch.arange(0, row.Nq * row.Lq + 1, row.Lq, dtype=torch.int32, device=device),
        documents_cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(device, torch.int32),
        padded=forward.Inputs(queries, padded, lengths.to(device, torch.int32)),
        active=active,
    )


def reference(inputs: Inputs | Request) -> torch.Tensor:
    """Return the scores in float64: [Nq, Nd], or of a request's documents in the order of their ids."""
    if isinstance(inputs, Inputs):
        return forward.reference(inputs.padded, inputs.active)
    scores = []
    for query, documents in zip(inputs.queries, inputs.documents, strict=True):
        similarities = query.astype(np.float64) @ np.concatenate(documents).astype(np.float64).T
        starts = np.cumsum([0] + [len(document) for document in documents[:-1]])
        scores.append(np.maximum.reduceat(similarities, starts, axis=1).sum(axis=0))
    return torch.from_numpy(np.concatenate(scores))


def ours(inputs: Inputs | Request) -> list[Candidate]:
    """The public `maxsim_varlen`, which waits for the device unless told the longest lengths, and `rank.rerank`."""
    if isinstance(inputs, Request):
        _need_pylate()
        from pylate_flash import rank

        return [_reranked("rank.rerank", inputs, partial(rank.rerank, backend="pylate_flash"))]
    from pylate_flash.ops import maxsim_varlen

    packed = partial(
        maxsim_varlen, inputs.queries, inputs.documents, inputs.queries_cu_seqlens, inputs.documents_cu_seqlens
    )
    longest = {
        "max_query_length": inputs.padded.queries.shape[1],
        "max_document_length": inputs.padded.documents.shape[1],
    }
    return [
        Candidate("maxsim_varlen, longest lengths given", partial(packed, **longest)),
        Candidate("maxsim_varlen", packed),
    ]


def ours_padded(inputs: Inputs | Request) -> list[Candidate]:
    """The public `maxsim` of the padded documents and their mask."""
    if isinstance(inputs, Request):
        return []
    from pylate_flash import maxsim

    padded, active = inputs.padded, inputs.active
    return [Candidate("maxsim", lambda: maxsim(padded.queries, padded.documents, documents_mask=active))]


def lik(inputs: Inputs | Request) -> list[Candidate]:
    """late-interaction-kernels: `maxsim_varlen`, which checks lengths given on the device, and its padded functions."""
    if isinstance(inputs, Request):
        return _through_pylate(inputs, "lik")
    from late_interaction_kernels import maxsim, maxsim_varlen
    from late_interaction_kernels.forward import maxsim_forward

    padded, active = inputs.padded, inputs.active
    packed = partial(
        maxsim_varlen, inputs.queries, inputs.documents, inputs.queries_cu_seqlens, inputs.documents_cu_seqlens
    )
    longest = {"max_seqlen_q": padded.queries.shape[1], "max_seqlen_d": padded.documents.shape[1]}
    return [
        Candidate("maxsim_varlen", packed),
        Candidate("maxsim_varlen, longest lengths given", partial(packed, **longest)),
        Candidate("maxsim, padded", lambda: maxsim(padded.queries, padded.documents, d_mask=active)),
        Candidate("maxsim_forward, padded", lambda: maxsim_forward(padded.queries, padded.documents, d_mask=active)[0]),
    ]


def flash_maxsim(inputs: Inputs | Request) -> list[Candidate]:
    """flash-maxsim: `flash_maxsim_packed`, a query at a time, also from float16, which spares it a cast; and padded."""
    if isinstance(inputs, Request):
        return _through_pylate(inputs, "flash")
    import flash_maxsim as package

    padded, boundaries, longest = inputs.padded, inputs.documents_cu_seqlens, inputs.padded.documents.shape[1]

    def packed(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        scores = [package.flash_maxsim_packed(query, documents, boundaries, longest) for query in queries]
        return scores[0] if len(scores) == 1 else torch.stack(scores)

    candidates = [Candidate("flash_maxsim_packed", partial(packed, padded.queries, inputs.documents))]
    if inputs.documents.dtype != torch.float16:
        halves = padded.queries.half(), inputs.documents.half()
        candidates.append(Candidate("flash_maxsim_packed, from float16", partial(packed, *halves)))
    return candidates + [
        candidate._replace(label=f"{candidate.label}, padded") for candidate in forward.flash_maxsim(padded)
    ]


def torch_eager(inputs: Inputs | Request) -> list[Candidate]:
    """torch: a masked einsum over chunks of padded documents, the chunk size swept; PyLate's own scorer in `rerank`."""
    if isinstance(inputs, Request):
        return _through_pylate(inputs, "torch")
    return [
        Candidate(f"einsum, chunks of {chunk}, padded", partial(masked_scores, inputs, chunk))
        for chunk in forward.chunk_sizes(inputs.padded)
    ]


def masked_scores(inputs: Inputs, chunk: int) -> torch.Tensor:
    """The plain way over ``chunk`` documents at a time: similarities in the input's type, and a float32 sum."""
    scores = []
    for documents, active in zip(inputs.padded.documents.split(chunk), inputs.active.split(chunk), strict=True):
        similarities = torch.einsum("qsd,ntd->qnst", inputs.padded.queries, documents)
        similarities.masked_fill_(~active.unsqueeze(1), -torch.inf)
        scores.append(similarities.amax(dim=-1).sum(dim=-1, dtype=torch.float32))
    return torch.cat(scores, dim=1)


def _need_pylate() -> None:
    try:
        import pylate.rank  # noqa: F401
    except ImportError as error:
        raise Unavailable(f"needs PyLate, which cannot be imported ({error})") from None


def _through_pylate(request: Request, backend: str) -> list[Candidate]:
    """PyLate's own `rank.rerank` with one of its backends, which only the environment can choose there."""
    _need_pylate()
    from pylate.rank import rerank

    def with_backend(*arguments: Any, **options: Any) -> Any:
        before = os.environ.get("PYLATE_SCORES_BACKEND")
        os.environ["PYLATE_SCORES_BACKEND"] = backend
        try:
            return rerank(*arguments, **options)
        finally:
            if before is None:
                del os.environ["PYLATE_SCORES_BACKEND"]
            else:
                os.environ["PYLATE_SCORES_BACKEND"] = before

    return [_reranked(f"pylate.rank.rerank, {backend}", request, with_backend)]


def _reranked(label: str, request: Request, rerank: Any) -> Candidate:
    call = partial(rerank, request.ids, request.queries, request.documents, device=request.device)
    return Candidate(label, call, partial(scores_by_id, documents=sum(map(len, request.ids))))


def scores_by_id(rankings: list[list[Any]], documents: int) -> torch.Tensor:
    """Read rankings: the scores in the order of the ids, NaN where a document is missing or a ranking is not sorted."""
    scores = [math.nan] * documents
    for ranking in rankings:
        in_order = all(better["score"] >= worse["score"] for better, worse in zip(ranking, ranking[1:], strict=False))
        for result in ranking:
            scores[result["id"]] = result["score"] if in_order else math.nan
    return torch.tensor(scores, dtype=torch.float64)


def suite() -> Suite:
    """Return the suite."""
    return Suite(
        name="varlen",
        title="MaxSim of packed documents",
        rows=ROWS,
        systems=(
            System(OURS, "pylate_flash", ours),
            System(f"{OURS}_padded", "padded", ours_padded, about="pylate_flash with padding and a mask"),
            System("lik", "LIK", lik, peer=LIK, about="late-interaction-kernels, the faster of packed and padded"),
            System(
                "flash_maxsim", "FM", flash_maxsim, peer=FLASH_MAXSIM, about="flash-maxsim, the faster of both ways"
            ),
            System("torch", "torch", torch_eager, about="a masked einsum over chunks of documents"),
        ),
        compiled=(),
        make_inputs=make_inputs,
        reference=reference,
        accuracy=forward.accuracy,
    )
