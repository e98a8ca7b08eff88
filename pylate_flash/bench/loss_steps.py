"""The systems of the suite `losses`: what each offers for a step from embeddings to a loss and their gradients.

Another package's loss gets embeddings that are normalised, and does nothing but score them, compare and differentiate:
the part that is this package's one operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pylate_flash.bench import steps, training, varlen
from pylate_flash.bench.peers import FLASH_MAXSIM, LIK
from pylate_flash.bench.suite import Candidate, Unavailable
from pylate_flash.bench.training import TEMPERATURE, Inputs, Step

if TYPE_CHECKING:
    from pylate_flash.bench.losses import Sample

# Operations of a row from which on a call takes a tenth of a second and more: 4096 queries and as many documents.
LONG = 1e13
# Queries that the loop scores at a time: with a batch of 16384, their winners take 1 GiB.
LOOP_QUERIES = 1024
# Queries that other packages score at a time: their defaults, and what suits large batches.
CHUNKS = (32, 128, 1024)
# What rounds similarities, or gradients on the way, to half differs by so much: other tokens win.
ROUNDED = 0.3


@dataclass(frozen=True)
class Given(Inputs):
    """Embeddings that are not normalised, under autocast, and which of their tokens count: bool [Nq, Lq], [Nd, Ld]."""

    queries_mask: torch.Tensor
    documents_mask: torch.Tensor

    @property
    def autocast(self) -> torch.autocast:
        """A context for the type that the embeddings have."""
        return torch.autocast(self.queries.device.type, dtype=self.queries.dtype)


def read(found: Step | tuple[torch.Tensor, ...]) -> Sample:
    """What is checked of what a system computed: a loss and its gradients."""
    from pylate_flash.bench.losses import sample_of

    return sample_of(found if isinstance(found, Step) else Step(found[0], None, *found[1:]))


def operations(inputs: Inputs) -> float:
    """The operations of the scores."""
    queries, documents = inputs.queries, inputs.documents
    return 2.0 * queries.shape[:2].numel() * documents.numel()


def need_normalized(inputs: Inputs) -> None:
    """Raise for inputs that are not."""
    if isinstance(inputs, Given):
        raise Unavailable("the rows of a batch measure it")


def need_given(inputs: Inputs) -> Given:
    """The inputs of a loss of the package, or raise."""
    if not isinstance(inputs, Given):
        raise Unavailable("the rows of given embeddings measure it")
    varlen._need_pylate()
    return inputs


def need_less_than(inputs: Inputs, limit: float) -> None:
    """Raise for a batch that costs more operations than that."""
    if operations(inputs) > limit:
        raise Unavailable("a step takes a minute or more")


def ours(inputs: Inputs) -> list[Candidate]:
    """`maxsim_cross_entropy`, as a user calls it."""
    if not isinstance(inputs, Given):
        return [candidate._replace(read=read) for candidate in training.ours(inputs)]
    from pylate_flash import maxsim_cross_entropy

    masks: dict[str, Any] = {"queries_mask": inputs.queries_mask, "documents_mask": inputs.documents_mask}
    loss_of = steps.within(
        inputs.autocast, partial(maxsim_cross_entropy, **masks, normalize=True, temperature=TEMPERATURE)
    )
    step = partial(steps.differentiated, loss_of, inputs.queries, inputs.documents)
    return [Candidate("maxsim_cross_entropy", step, read)]


def loop(inputs: Inputs) -> list[Candidate]:
    """`maxsim_cross_entropy` of so many queries at a time, each with a backward of its own."""
    need_normalized(inputs)
    need_less_than(inputs, 100 * LONG)
    return [Candidate(f"{LOOP_QUERIES} queries at a time", partial(loop_step, inputs), read)]


def loop_step(inputs: Inputs) -> Step:
    """A step by that loop: autograd adds up the gradient of the documents, in their type."""
    from pylate_flash import maxsim_cross_entropy

    leaves = fresh_leaves(inputs)
    queries, documents = leaves
    total = torch.zeros((), device=queries.device)
    for first in range(0, len(queries), LOOP_QUERIES):
        labels = torch.arange(first, min(first + LOOP_QUERIES, len(queries)), device=queries.device)
        with torch.enable_grad():
            chunk = queries[first : first + LOOP_QUERIES]
            loss = maxsim_cross_entropy(
                chunk, documents, labels=labels, temperature=TEMPERATURE, loss_reduction="sum"
            ) / len(queries)
        loss.backward()
        total += loss.detach()
    return step_of(total, leaves)


def step_of(loss: torch.Tensor, leaves: Sequence[torch.Tensor]) -> Step:
    """A step that has left its gradients in queries and documents."""
    queries, documents = (leaf.grad for leaf in leaves)
    assert queries is not None
    assert documents is not None
    return Step(loss.detach(), None, queries, documents)


def contrastive(inputs: Inputs) -> list[Candidate]:
    """`losses.Contrastive`, whose model has the embeddings ready."""
    given = need_given(inputs)
    from pylate_flash import losses

    call = steps.Contrastive(
        given.queries, given.documents, given.queries_mask, given.documents_mask, given.queries.dtype
    )
    loss_of = call.loss(partial(losses.Contrastive, scorer="pylate_flash", temperature=TEMPERATURE))
    return [call.step("Contrastive", loss_of)._replace(read=read)]


class Picked(torch.autograd.Function):
    """The rows of a tensor at places that are all different, so that its gradient is a copy, and no sum."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Pick them."""
        ctx.save_for_backward(places)
        ctx.shape = rows.shape
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Put their gradients back."""
        (places,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_copy_(0, places, grad), None


class Encoder:
    """Stands in for a model that a cached loss calls twice: it picks the embeddings of the texts that are asked for."""

    do_query_expansion = False
    skiplist = steps.Embedded.skiplist

    def __init__(self, embeddings: dict[str, torch.Tensor]) -> None:
        self.embeddings = embeddings

    def __call__(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        (name,) = self.embeddings.keys() & features.keys()
        length = features["input_ids"].shape[1]
        return {"token_embeddings": Picked.apply(self.embeddings[name], features[name])[:, :length]}


class CachedStep:
    """A step of `losses.CachedContrastive`; gradients are left in the embeddings, and a next step drops them."""

    def __init__(self, given: Given) -> None:
        from pylate_flash import losses

        self.autocast = given.autocast
        self.leaves = fresh_leaves(given)
        encoder: Any = Encoder(dict(zip(("queries", "documents"), self.leaves, strict=True)))
        self.loss = losses.CachedContrastive(
            encoder,
            mini_batch_size=max(map(len, self.leaves)),
            temperature=TEMPERATURE,
            scorer="pylate_flash",
        )
        self.columns = [
            {
                name: torch.arange(len(mask), device=mask.device),
                "input_ids": torch.full_like(mask, 100, dtype=torch.int64),
                "attention_mask": mask.long(),
            }
            for name, mask in (("queries", given.queries_mask), ("documents", given.documents_mask))
        ]

    def __call__(self) -> Step:
        for leaf in self.leaves:
            leaf.grad = None
        with torch.enable_grad():
            with self.autocast:
                loss = self.loss([dict(column) for column in self.columns])
            loss.backward()
        return step_of(loss, self.leaves)


def cached_contrastive(inputs: Inputs) -> list[Candidate]:
    """`losses.CachedContrastive`, which encodes twice: the stand-in picks embeddings by their number."""
    return [Candidate("CachedContrastive", CachedStep(need_given(inputs)), read)]


def fresh_leaves(inputs: Inputs) -> list[torch.Tensor]:
    """Queries and documents without gradients yet."""
    return [embeddings.detach().requires_grad_() for embeddings in (inputs.queries, inputs.documents)]


def chunks_for(inputs: Inputs, limit: float) -> tuple[int, ...]:
    """The numbers of queries at a time that another package is tried with: of a long row the one that suits it."""
    need_normalized(inputs)
    need_less_than(inputs, limit)
    return CHUNKS[-1:] if operations(inputs) > LONG else CHUNKS


def pylate(inputs: Inputs) -> list[Candidate]:
    """PyLate's cached loss on given embeddings, with each of its backends that are installed."""
    varlen._need_pylate()
    device = inputs.queries.device
    peers = {"lik": LIK, "flash": FLASH_MAXSIM}
    backends = [name for name, peer in peers.items() if peer.unavailable(device) is None]
    if operations(inputs) <= LONG or not backends:
        backends.append("torch")
    candidates = []
    for backend in backends:
        for chunk in chunks_for(inputs, LONG if backend == "torch" else 100 * LONG):
            step = partial(pylate_step, inputs, backend, chunk)
            # Its gradients are those of the sum over the queries.
            candidates.append(Candidate(f"{backend}, {chunk} queries at a time", step, partial(averaged, inputs)))
    return candidates


def averaged(inputs: Inputs, step: Step) -> Sample:
    """What is checked of a step whose gradients are those of the sum over the queries."""
    found = read(step)
    n_queries = len(inputs.queries)
    return found._replace(
        grad_queries=found.grad_queries.double() / n_queries, grad_documents=found.grad_documents.double() / n_queries
    )


def pylate_step(inputs: Inputs, backend: str, chunk: int) -> Step:
    """What PyLate's cached loss does between its two passes of the encoder."""
    from pylate.losses.cached_contrastive import CachedContrastive
    from pylate.scores.colbert import ColBERTScores

    leaves = fresh_leaves(inputs)
    model: Any = steps.Embedded()
    model.do_query_expansion = True
    score = partial(ColBERTScores(), backend=backend)
    loss = CachedContrastive(model, score, score_mini_batch_size=chunk, temperature=TEMPERATURE)
    masks = [torch.ones(leaf.shape[:2], dtype=torch.bool, device=leaf.device) for leaf in leaves]
    with torch.enable_grad():
        value = loss.calculate_loss([[leaf] for leaf in leaves], masks, with_backward=True)
    return step_of(value, leaves)


def sentence_transformers(inputs: Inputs) -> list[Candidate]:
    """The cached loss of sentence-transformers 6 on given embeddings."""
    try:
        from sentence_transformers.multi_vector_encoder.losses import (  # noqa: F401
            CachedMultiVectorMultipleNegativesRankingLoss,
        )
    except ImportError as error:
        raise Unavailable(f"needs sentence-transformers 6, which cannot be imported ({error})") from None
    chunks = chunks_for(inputs, LONG)
    return [
        Candidate(f"{chunk} queries at a time", partial(sentence_transformers_step, inputs, chunk), read)
        for chunk in chunks
    ]


def sentence_transformers_step(inputs: Inputs, chunk: int) -> Step:
    """What that loss does between its two passes of the encoder."""
    from sentence_transformers.multi_vector_encoder.losses import CachedMultiVectorMultipleNegativesRankingLoss

    leaves = fresh_leaves(inputs)
    loss = CachedMultiVectorMultipleNegativesRankingLoss(
        torch.nn.Identity(), scale=1.0 / TEMPERATURE, score_mini_batch_size=chunk
    )
    masks = [[torch.ones(leaf.shape[:2], dtype=torch.bool, device=leaf.device)] for leaf in leaves]
    with torch.enable_grad():
        value = loss.calculate_loss([[leaf] for leaf in leaves], masks, with_backward=True)
    return step_of(value, leaves)


def flash_maxsim(inputs: Inputs) -> list[Candidate]:
    """flash-maxsim's fused step, as the embeddings are and in float16."""
    need_normalized(inputs)
    need_less_than(inputs, 100 * LONG)
    if inputs.queries.shape[1] > 32:
        raise Unavailable("it takes up to 32 query tokens")
    from flash_maxsim.flash_maxsim_contrastive import colbert_contrastive_step  # noqa: F401

    types = {inputs.queries.dtype, torch.float16}
    return [
        Candidate(str(dtype).removeprefix("torch."), partial(flash_maxsim_step, inputs, dtype), read)
        for dtype in sorted(types, key=str)
        if dtype != torch.float32
    ]


def flash_maxsim_step(inputs: Inputs, dtype: torch.dtype) -> Step:
    """It has no temperature: the queries are divided by it, and their gradient too."""
    from flash_maxsim.flash_maxsim_contrastive import colbert_contrastive_step

    queries = (inputs.queries.detach() / TEMPERATURE).to(dtype)
    documents = inputs.documents.detach().to(dtype)
    loss = colbert_contrastive_step(queries, documents)
    found = step_of(loss, [queries, documents])
    return found._replace(grad_queries=found.grad_queries / TEMPERATURE)
