"""The candidates of each system of the suite `losses`: a step from embeddings to the loss and their gradients.

The losses of other packages get normalised embeddings, and only score them, take the loss and differentiate: the part
that is a single operation in this package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

import pylate_flash
from pylate_flash.bench.exact import Step
from pylate_flash.bench.peers import FLASH_MAXSIM, LIK
from pylate_flash.bench.rerank import need_pylate
from pylate_flash.bench.steps import Contrastive, Embedded, FusedStep, features_of
from pylate_flash.bench.suite import Candidate, Unavailable

# A row with at least this many operations takes a tenth of a second or more: 4096 queries and as many documents.
LONG = 1e13
# Queries that the loop scores at a time: with a batch of 16384, their argmax takes 1 GiB.
LOOP_QUERIES = 1024
# Numbers of queries that other packages score at a time: their defaults, and one that suits large batches.
CHUNKS = (32, 128, 1024)


class LargeStep(FusedStep):
    """A contrastive step; the rows "given" have masks and unnormalised embeddings, under autocast."""

    @property
    def is_given(self) -> bool:
        """Whether the embeddings are as a model outputs them: not normalised, with masks, under autocast."""
        return self.cast is not None

    @property
    def both_masks(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The masks of queries and documents."""
        return self.queries_mask, self.documents_mask

    @property
    def operations(self) -> float:
        """The operations (FLOPs) of the scores."""
        return 2.0 * self.queries.shape[:2].numel() * self.documents.numel()

    def need(self, *, given: bool, limit: float = math.inf) -> None:
        """Raise `Unavailable` for rows of the other kind, and for a batch with more operations than the limit."""
        if given != self.is_given:
            raise Unavailable(f"measured in the rows of {'given embeddings' if given else 'a batch'} only")
        if self.operations > limit:
            raise Unavailable("a step takes a minute or more")
        if given:
            need_pylate()

    def leaves(self) -> list[torch.Tensor]:
        """Fresh leaves of queries and documents, without gradients."""
        return [embeddings.detach().requires_grad_() for embeddings in (self.queries, self.documents)]

    def ours(self, **options: Any) -> list[Candidate]:
        return super().ours(**{"normalize": True} if self.is_given else {}, **options)

    def loop(self) -> list[Candidate]:
        """`maxsim_cross_entropy` of `LOOP_QUERIES` queries at a time, with a backward per chunk."""
        self.need(given=False, limit=100 * LONG)
        return [Candidate(f"{LOOP_QUERIES} queries at a time", self.looped)]

    def looped(self) -> Step:
        """A step by that loop: autograd accumulates the gradient of the documents, in their dtype."""
        leaves = queries, documents = self.leaves()
        total = torch.zeros((), device=self.device)
        score = partial(pylate_flash.maxsim_cross_entropy, temperature=self.temperature, loss_reduction="sum")
        with torch.enable_grad():
            for chunk, labels in zip(queries.split(LOOP_QUERIES), self.labels.split(LOOP_QUERIES), strict=True):
                loss = score(chunk, documents, labels=labels) / len(queries)
                loss.backward()
                total += loss.detach()
        return step_of(total, leaves)

    def contrastive(self) -> list[Candidate]:
        """`losses.Contrastive`, with a stand-in model that returns the embeddings."""
        self.need(given=True)
        return Contrastive(self.queries, self.documents, *self.both_masks, self.cast, None, self.temperature).ours()

    def cached(self) -> list[Candidate]:
        """`losses.CachedContrastive`, which encodes twice: the stand-in selects embeddings by index."""
        self.need(given=True)
        return [Candidate("CachedContrastive", CachedStep(self))]

    def chunks(self, limit: float) -> tuple[int, ...]:
        """The chunk sizes (queries) to try with another package: for a long row only the largest."""
        self.need(given=False, limit=limit)
        return CHUNKS[-1:] if self.operations > LONG else CHUNKS

    def pylate(self) -> list[Candidate]:
        """PyLate's cached loss on given embeddings, with each of its backends that are installed."""
        need_pylate()
        peers = {"lik": LIK, "flash": FLASH_MAXSIM}
        backends = [name for name, peer in peers.items() if peer.unavailable(self.device) is None]
        if self.operations <= LONG or not backends:
            backends.append("torch")
        return [
            # Its gradients are of the sum over the queries, not of the mean.
            Candidate(f"{backend}, {chunk} queries at a time", partial(self.by_pylate, backend, chunk), averaged)
            for backend in backends
            for chunk in self.chunks(LONG if backend == "torch" else 100 * LONG)
        ]

    def by_pylate(self, backend: str, chunk: int) -> Step:
        """The step of PyLate's cached loss, between its two passes of the encoder."""
        from pylate.losses.cached_contrastive import CachedContrastive
        from pylate.scores.colbert import ColBERTScores

        model: Any = Embedded()
        model.do_query_expansion = True
        score = partial(ColBERTScores(), backend=backend)
        loss = CachedContrastive(model, score, score_mini_batch_size=chunk, temperature=self.temperature)
        return self.by_cached_loss(loss, lambda mask: mask)

    def by_cached_loss(self, loss: Any, as_masks: Callable[[torch.Tensor], Any]) -> Step:
        """A step of a host's cached loss on one mini-batch of embeddings; ``as_masks`` converts a mask for it."""
        leaves = self.leaves()
        masks = [as_masks(torch.ones(leaf.shape[:2], dtype=torch.bool, device=leaf.device)) for leaf in leaves]
        with torch.enable_grad():
            value = loss.calculate_loss([[leaf] for leaf in leaves], masks, with_backward=True)
        return step_of(value, leaves)

    def sentence_transformers(self) -> list[Candidate]:
        """The cached loss of sentence-transformers 6 on given embeddings, between its two passes of the encoder."""
        from sentence_transformers.multi_vector_encoder import losses

        make = partial(losses.CachedMultiVectorMultipleNegativesRankingLoss, torch.nn.Identity())

        def step(chunk: int) -> Step:
            loss = make(scale=1.0 / self.temperature, score_mini_batch_size=chunk)
            return self.by_cached_loss(loss, lambda mask: [mask])

        return [Candidate(f"{chunk} queries at a time", partial(step, chunk)) for chunk in self.chunks(LONG)]

    def flash_maxsim(self) -> list[Candidate]:
        """Its fused step, in the dtype of the embeddings and in float16."""
        self.need(given=False, limit=100 * LONG)
        if self.queries.shape[1] > 32:
            raise Unavailable("it takes up to 32 query tokens")
        contrastive_step = FLASH_MAXSIM["flash_maxsim_contrastive.colbert_contrastive_step"]

        def step(dtype: torch.dtype) -> Step:
            # It takes no temperature: divide the queries by it, and their gradient too.
            queries = (self.queries.detach() / self.temperature).to(dtype)
            documents = self.documents.detach().to(dtype)
            result = step_of(contrastive_step(queries, documents), [queries, documents])
            return result._replace(grad_queries=result.grad_queries / self.temperature)

        types = sorted({self.queries.dtype, torch.float16} - {torch.float32}, key=str)
        return [Candidate(str(dtype).removeprefix("torch."), partial(step, dtype)) for dtype in types]


def step_of(loss: torch.Tensor, leaves: Sequence[torch.Tensor]) -> Step:
    """Build the step from the loss and the gradients accumulated in the leaves (queries, documents)."""
    queries, documents = (leaf.grad for leaf in leaves)
    assert queries is not None
    assert documents is not None
    return Step(loss.detach(), None, queries, documents)


def averaged(step: Step) -> Step:
    """Convert gradients of the sum over the queries to gradients of the mean."""
    queries, documents = (grad.double() / len(step.grad_queries) for grad in step[2:])
    return step._replace(grad_queries=queries, grad_documents=documents)


class Picked(torch.autograd.Function):
    """Select rows at distinct indices, so that the backward is a copy instead of an accumulation."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Select the rows."""
        ctx.save_for_backward(indices)
        ctx.shape = rows.shape
        return rows.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Copy the gradients of the selected rows back."""
        (indices,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_copy_(0, indices, grad), None


class Encoder(Embedded):
    """Stands in for a model that a cached loss calls twice: it selects the embeddings of the requested texts."""

    def __init__(self, embeddings: dict[str, torch.Tensor]) -> None:
        self.embeddings = embeddings

    def __call__(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        (name,) = self.embeddings.keys() & features.keys()
        length = features["input_ids"].shape[1]
        return {"token_embeddings": Picked.apply(self.embeddings[name], features[name])[:, :length]}


class CachedStep:
    """A step of `losses.CachedContrastive`; gradients stay in the embeddings until the next step drops them."""

    def __init__(self, inputs: LargeStep) -> None:
        from pylate_flash import losses

        self.autocast = inputs.context
        self.leaves = inputs.leaves()
        names = ("queries", "documents")
        encoder: Any = Encoder(dict(zip(names, self.leaves, strict=True)))
        self.loss = losses.CachedContrastive(
            encoder,
            mini_batch_size=max(map(len, self.leaves)),
            temperature=inputs.temperature,
            scorer="pylate_flash",
        )
        masks = [mask.long() for mask in inputs.both_masks if mask is not None]
        self.columns = [
            {name: torch.arange(len(mask), device=mask.device), **features}
            for name, mask, features in zip(names, masks, features_of(*masks), strict=True)
        ]

    def __call__(self) -> Step:
        for leaf in self.leaves:
            leaf.grad = None
        with torch.enable_grad():
            with self.autocast or nullcontext():
                loss = self.loss([dict(column) for column in self.columns])
            loss.backward()
        return step_of(loss, self.leaves)
