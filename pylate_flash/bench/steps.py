"""The training steps that suites time: from embeddings to the loss and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, partialmethod
from typing import Any

import torch
import torch.nn.functional as F

import pylate_flash
from pylate_flash.bench import exact
from pylate_flash.bench.calls import Padded, chunk_sizes, chunked_scores, lengths_of, within
from pylate_flash.bench.exact import Score, einsum_scores
from pylate_flash.bench.peers import FLASH_MAXSIM, LIK
from pylate_flash.bench.rerank import need_pylate
from pylate_flash.bench.suite import Candidate


def differentiated(loss_of: Callable[..., Any], *leaves: torch.Tensor) -> exact.Step:
    """Run ``loss_of``, which returns the loss, or the loss and the scores, and differentiate the loss."""
    with torch.enable_grad():
        output = loss_of(*leaves)
    loss, scores = output if isinstance(output, tuple) else (output, None)
    gradients = torch.autograd.grad(loss, leaves)
    return exact.Step(loss.detach(), None if scores is None else scores.detach(), *gradients)


@dataclass(frozen=True)
class Step(Padded):
    """A training step: `maxsim`, torch's loss, and the gradients of queries and documents, which require them.

    The loss is the cross entropy of every query's scores, divided by the ``temperature``, where query i's own document
    is document i; or, with a ``teacher`` [Nq, K] (log-probabilities), the KL divergence from it.
    """

    teacher: torch.Tensor | None = None
    temperature: float = 1.0

    replayable = False
    differentiated = True

    @property
    def labels(self) -> torch.Tensor:
        """The index of each query's own document."""
        return torch.arange(len(self.queries), device=self.device)

    def loss(self, scores: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """The loss of scores [Nq, Nd]."""
        if self.temperature != 1.0:
            scores = scores / self.temperature
        if self.teacher is None:
            return F.cross_entropy(scores, self.labels if labels is None else labels)
        teacher = self.teacher.to(scores.dtype)
        return F.kl_div(scores.log_softmax(dim=-1), teacher, reduction="batchmean", log_target=True)

    def candidate(self, label: str, score: Score) -> Candidate:
        labels = self.labels

        def loss_of(queries: torch.Tensor, documents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scores = score(queries, documents)
            return self.loss(scores, labels), scores

        return self.step(label, loss_of)

    def step(self, label: str, loss_of: Callable[..., Any]) -> Candidate:
        """The candidate that times the loss and its gradients."""
        return Candidate(label, partial(differentiated, within(self.context, loss_of), self.queries, self.documents))

    def reference(self) -> exact.Result:
        return exact.step(*self.as_computed(), **self.masks, loss=self.loss)

    def lik(self, *backwards: str) -> list[Candidate]:
        """`maxsim`, with each of the named backwards, or the default one."""
        score = partial(LIK["maxsim"], q_mask=self.queries_mask, d_mask=self.documents_mask)
        scorers = {f"maxsim, {backward}": partial(score, backward=backward) for backward in backwards} or {
            "maxsim": score
        }
        return [candidate for label, scorer in scorers.items() for candidate in self.in_each_type(label, scorer)]

    def flash_maxsim(self) -> list[Candidate]:
        """Passing the lengths saves a kernel that would fill them in."""
        shared = {"shared_docs": self.documents.dim() == 3, "doc_lengths": self.lengths()}
        score = partial(FLASH_MAXSIM["flash_maxsim_batched_train"], **shared)
        if self.queries_mask is not None:
            score = partial(score, query_lengths=lengths_of(self.queries_mask))
        return self.in_each_type("flash_maxsim_batched_train", score)

    def torch(self) -> list[Candidate]:
        """An einsum over as many documents at a time as fit; its autograd saves the argmax.

        Its backward was observed to hold the similarities six times.
        """
        chunk = chunk_sizes(self.queries, self.documents, held=6.0)[-1]
        return [self.candidate(f"einsum, chunks of {chunk}", partial(chunked_scores, chunk=chunk, **self.masks))]


class FusedStep(Step):
    """The same step by `maxsim_cross_entropy` or `maxsim_kl_divergence`, which fuse scores and loss."""

    def ours(self, **options: Any) -> list[Candidate]:
        operation: Callable = pylate_flash.maxsim_cross_entropy
        if self.teacher is not None:
            operation, options["teacher_scores"] = pylate_flash.maxsim_kl_divergence, self.teacher
        loss_of = partial(operation, temperature=self.temperature, **self.masks, **options)
        return [self.step(operation.__name__, loss_of)]


class Embedded:
    """Stands in for a ColBERT model: the features already contain the embeddings."""

    do_query_expansion = False
    # Tokens that do not occur in the texts, as many as ASCII has punctuation characters.
    skiplist = list(range(32))

    def __call__(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return features


def features_of(*masks: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """The features of texts with these attention masks."""
    return [{"input_ids": torch.full_like(mask, 100, dtype=torch.int64), "attention_mask": mask} for mask in masks]


def loss_of_embedded(loss: Any, masks: Sequence[torch.Tensor], *extra_args: Any) -> Callable[..., torch.Tensor]:
    """Turn a loss of an `Embedded` model into a function of the embeddings."""
    texts = features_of(*masks)
    return lambda *embeddings: loss(
        [
            {**text, "token_embeddings": token_embeddings}
            for text, token_embeddings in zip(texts, embeddings, strict=True)
        ],
        *extra_args,
    )


class Contrastive(Step):
    """`losses.Contrastive`, from a model's embeddings to their gradients: normalise, mask, score, loss.

    Embeddings have the dtype that the model's linear layers return under autocast.
    """

    def through(self, label: str, make: Callable[[Any], Any]) -> list[Candidate]:
        """The step by the loss that ``make`` creates for a model."""
        return [self.step(label, loss_of_embedded(make(Embedded()), list(self.masks.values())))]

    def reference(self) -> exact.Step:
        """Not rounded after normalisation, as that may change the argmax: one in a thousand is 4 % of the gradients."""

        def score(queries: torch.Tensor, documents: torch.Tensor, **masks: torch.Tensor) -> torch.Tensor:
            return einsum_scores(F.normalize(queries, dim=-1), F.normalize(documents, dim=-1), **masks)

        return exact.step(self.queries, self.documents, **self.masks, loss=self.loss, score=score)

    def ours(self) -> list[Candidate]:
        need_pylate()
        from pylate_flash import losses

        make = partial(losses.Contrastive, scorer="pylate_flash", temperature=self.temperature)
        return self.through("Contrastive", make)

    def through_pylate(self, backend: str) -> list[Candidate]:
        """PyLate's own loss with one of its backends."""
        need_pylate()
        from pylate.losses.contrastive import Contrastive as PyLateContrastive
        from pylate.scores.colbert import ColBERTScores

        score = partial(ColBERTScores(), backend=backend)
        make = partial(PyLateContrastive, score_metric=score, temperature=self.temperature)
        return self.through(f"pylate.losses.Contrastive, {backend}", make)

    lik = partialmethod(through_pylate, "lik")
    flash_maxsim = partialmethod(through_pylate, "flash")
    torch = partialmethod(through_pylate, "torch")
