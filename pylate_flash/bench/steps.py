"""The training steps that the suite `launch` times: from embeddings to the loss, and back to their gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from pylate_flash.bench import training, varlen
from pylate_flash.bench.calls import Padded, Result, Score, einsum_scores, lengths_of, within
from pylate_flash.bench.suite import Candidate


def differentiated(loss_of: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> Result:
    """The loss of leaves, and its gradients."""
    with torch.enable_grad():
        loss = loss_of(*leaves)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def cross_entropy(score: Score, labels: torch.Tensor, queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """The loss of scores in torch."""
    return F.cross_entropy(score(queries, documents), labels)


class Step(Padded):
    """A training step: `maxsim`, torch's cross entropy, and the gradients of queries and documents."""

    replayable = False
    differentiated = True

    def labels(self) -> torch.Tensor:
        """Each query's own document."""
        return torch.arange(len(self.queries), device=self.device)

    def candidate(self, label: str, score: Score) -> Candidate:
        return self.step(f"{label}, cross_entropy", partial(cross_entropy, score, self.labels()))

    def step(self, label: str, loss_of: Score) -> Candidate:
        """What is timed of a way to compute the loss."""
        return Candidate(label, partial(differentiated, within(self.context, loss_of), self.queries, self.documents))

    def reference(self) -> Result:
        score = partial(einsum_scores, **self.options)
        leaves = [embeddings.requires_grad_() for embeddings in self.as_computed()]
        return differentiated(partial(cross_entropy, score, self.labels()), *leaves)

    def accuracy(self, dtype: torch.dtype) -> float:
        return training.accuracy(self.cast or dtype)

    def flash_maxsim(self) -> list[Candidate]:
        from flash_maxsim import flash_maxsim_batched_train

        lengths = {
            name: lengths_of(mask)
            for name, mask in (("query_lengths", self.queries_mask), ("doc_lengths", self.documents_mask))
            if mask is not None
        }
        return self.in_each_type("flash_maxsim_batched_train", partial(flash_maxsim_batched_train, **lengths))


class FusedStep(Step):
    """The same step by `maxsim_cross_entropy`, scores and loss in one, which the others do not have."""

    def ours(self) -> list[Candidate]:
        from pylate_flash import maxsim_cross_entropy

        return [self.step("maxsim_cross_entropy", partial(maxsim_cross_entropy, **self.options))]


class Embedded:
    """Stands in for a ColBERT model whose embeddings are there already, in the features."""

    do_query_expansion = False
    # Tokens that the texts do not have, as many as there are marks of punctuation in ASCII.
    skiplist = list(range(32))

    def __call__(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return features


class Contrastive(Step):
    """`losses.Contrastive`, from a model's embeddings to their gradients: it normalises, masks, scores, takes the loss.

    Embeddings have the type that the model's linear layers give them under autocast.
    """

    def loss(self, make: Callable[[Any], Callable[[Any], torch.Tensor]]) -> Score:
        """The loss that ``make`` makes for a model, as a function of the embeddings."""
        loss = make(Embedded())
        masks = (self.queries_mask, self.documents_mask)
        texts = [
            {"input_ids": torch.full_like(mask, 100, dtype=torch.int64), "attention_mask": mask}
            for mask in masks
            if mask is not None
        ]
        return lambda *embeddings: loss(
            [{**text, "token_embeddings": some} for text, some in zip(texts, embeddings, strict=True)]
        )

    def reference(self) -> Result:
        # Not rounded once normalised, as no winner may change with it: one of a thousand is 4 % of the gradients.
        def loss_of(*raw: torch.Tensor) -> torch.Tensor:
            return cross_entropy(score, self.labels(), *(F.normalize(embeddings, dim=-1) for embeddings in raw))

        score = partial(einsum_scores, **self.options)
        raw = [embeddings.detach().double().requires_grad_() for embeddings in (self.queries, self.documents)]
        return differentiated(loss_of, *raw)

    def ours(self) -> list[Candidate]:
        varlen._need_pylate()
        from pylate_flash import losses

        return [self.step("Contrastive", self.loss(partial(losses.Contrastive, scorer="pylate_flash")))]

    def through_pylate(self, backend: str) -> list[Candidate]:
        """PyLate's own loss with one of its backends."""
        varlen._need_pylate()
        from pylate.losses.contrastive import Contrastive as PyLateContrastive
        from pylate.scores.colbert import ColBERTScores

        make = partial(PyLateContrastive, score_metric=partial(ColBERTScores(), backend=backend))
        return [self.step(f"pylate.losses.Contrastive, {backend}", self.loss(make))]

    def lik(self) -> list[Candidate]:
        return self.through_pylate("lik")

    def flash_maxsim(self) -> list[Candidate]:
        return self.through_pylate("flash")

    def torch(self) -> list[Candidate]:
        return self.through_pylate("torch")
