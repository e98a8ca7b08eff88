"""The losses of a batch, for every host: what its model has made of the texts, compared by one operation."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import maxsim_cross_entropy, maxsim_from_hidden, maxsim_kl_divergence, maxsim_margin_mse
from ..ops.loss_scores import cross_entropy_reference, kl_divergence_reference, margin_mse_reference
from ..ops.maxsim_operator import with_lengths
from ..ops.soft import soft_scores_of
from ..problem import Options, Tensors
from .distributed import Ranks, all_gather, exchange, rank, ring_cross_entropy, world_size
from .mini_batches import Packed, pack_padded
from .options import LossOptions


class Padded(NamedTuple):
    """Documents [N, L, d], or of each query its candidates [Nq, K, L, d], and their mask."""

    tokens: Tensor
    mask: Tensor


class Batch(NamedTuple):
    """What a model has made of the texts of a batch: embeddings, or with `projection` hidden states.

    Attributes
    ----------
    queries, queries_mask
        [Nq, Lq, d], and [Nq, Lq], or None where all tokens are scored.
    columns
        Documents one after the other: of the first column come first. Hidden states are scored column by column, as
        together they would be copied. Packed ones have the token of zeros that ``masking="zero"`` asks for.
    projection
        The weight [d, d_model] and the bias [d], or None, that make embeddings of hidden states.
    """

    queries: Tensor
    queries_mask: Tensor | None
    columns: Sequence[Padded | Packed]
    projection: tuple[Tensor, Tensor | None] | None = None

    def together(self) -> Padded | Packed:
        """The documents of all columns; packed ones are together already."""
        return self.columns[0] if len(self.columns) == 1 else joined(self.columns)  # type: ignore[arg-type]


def joined(parts: Sequence[Padded]) -> Padded:
    """Documents [N, L, d], of any padded lengths, one after the other."""
    if len(parts) == 1:
        return parts[0]
    tokens, masks = [part.tokens for part in parts], [part.mask for part in parts]
    longest = max(mask.shape[1] for mask in masks)
    if any(mask.shape[1] < longest for mask in masks):
        tokens = [F.pad(values, (0, 0, 0, longest - values.shape[1])) for values in tokens]
        masks = [F.pad(mask, (0, longest - mask.shape[1])) for mask in masks]
    return Padded(torch.cat(tokens), torch.cat(masks))


def cross_entropy(
    options: LossOptions, batch: Batch, labels: Tensor | None = None, exclude: Tensor | None = None
) -> Tensor:
    """The contrastive loss of a batch.

    Parameters
    ----------
    options
        How queries and documents are compared. Average, or sum, over the queries; with gathered documents, the sum over
        this rank's queries, or that over the mean number of queries of a rank: DistributedDataParallel takes the mean
        of the ranks' gradients, which is then that of one process with the whole batch, of the sum over the number of
        ranks, or of the average.
    batch
        Of this rank.
    labels
        [Nq], int64: which document of this rank is the right one. None: that of query i is document i.
    exclude
        [Nq, Nd], bool: True leaves a document out of the query's denominator. Not with gathered documents.
    """
    reduction, factor = options.loss_reduction, 1.0
    if options.gather is not None:
        documents, right, ranks = _gathered(options, batch, labels)
        reduction, factor = "sum", world_size() / sum(ranks.queries) if options.size_average else 1.0
        factor = factor * world_size() if options.times_ranks else factor
        if options.gather == "ring":
            # What is packed has no masked tokens.
            scoring = {name: value for name, value in options.scoring().items() if name != "masking"}
            return factor * ring_cross_entropy(
                batch.queries, batch.queries_mask, documents, ranks, right, options.temperature, scoring
            )
        batch, labels = batch._replace(columns=[documents]), right
    comparison: dict[str, Any] = {
        "labels": labels,
        "exclude": exclude,
        "margin": options.margin,
        "symmetric": options.symmetric,
        "temperature": options.temperature,
        "loss_reduction": reduction,
    }
    if (scores := _scores(options, batch)) is not None:
        loss = cross_entropy_reference(scores, **comparison)
    else:
        loss = maxsim_cross_entropy(**_embeddings(options, batch), **comparison)
    return loss if factor == 1.0 else loss * factor


def divergence(options: LossOptions, batch: Batch, teacher_scores: Tensor) -> Tensor:
    """The loss of distillation: how far the scores of each query's candidates are from a teacher's, [Nq, K]."""
    comparison: dict[str, Any] = {
        "teacher_scores": teacher_scores,
        "temperature": options.temperature,
        "teacher_temperature": options.teacher_temperature,
        "normalize_scores": options.normalize_scores,
        "loss_reduction": options.loss_reduction,
    }
    if (scores := _scores(options, batch)) is not None:
        return kl_divergence_reference(scores, **comparison)
    return maxsim_kl_divergence(**_embeddings(options, batch), **comparison)


def margin_mse(options: LossOptions, batch: Batch, teacher_scores: Tensor) -> Tensor:
    """Squared differences from a teacher's margins between the first of each query's candidates and the others."""
    if (scores := _scores(options, batch)) is not None:
        return margin_mse_reference(scores, teacher_scores)
    return maxsim_margin_mse(**_embeddings(options, batch), teacher_scores=teacher_scores)


def _embeddings(options: LossOptions, batch: Batch) -> dict[str, Any]:
    """What an operation takes of a batch: embeddings, masks, and how they score."""
    documents = _layout("documents", batch.together())
    return {"queries": batch.queries, "queries_mask": batch.queries_mask, **documents, **options.scoring()}


def _gathered(options: LossOptions, batch: Batch, labels: Tensor | None) -> tuple[Packed, Tensor, Ranks]:
    """The documents of all ranks, or in a ring this one's, packed; the right ones among them; what every rank holds."""
    documents = batch.together()
    if isinstance(documents, Padded):
        documents = pack_padded(documents.tokens, documents.mask, options.masking == "zero")
    ranks = exchange(documents, len(batch.queries))
    if labels is None:
        labels = torch.arange(len(batch.queries), device=batch.queries.device)
    if options.gather == "all_gather":
        documents, labels = all_gather(documents, ranks), labels + sum(ranks.documents[: rank()])
    return documents, labels, ranks


def _scores(options: LossOptions, batch: Batch) -> Tensor | None:
    """Scores that the operation of a loss does not compute: of hidden states, or by the smooth maximum; else None."""
    if batch.projection is not None:
        weight, bias = batch.projection
        scores = [
            maxsim_from_hidden(
                batch.queries,
                weight=weight,
                bias=bias,
                queries_mask=batch.queries_mask,
                queries_weight=weight,
                queries_bias=bias,
                **options.scoring(),
                **_layout("hidden", column),
            )
            for column in batch.columns
        ]
        return scores[0] if len(scores) == 1 else torch.cat(scores, dim=1)
    return None if options.smooth is None else _soft_scores(options, batch, options.smooth)


def _soft_scores(options: LossOptions, batch: Batch, smooth: float | Tensor) -> Tensor:
    """Scores of embeddings by the smooth maximum."""
    documents, how = batch.together(), Options(**options.scoring())
    if isinstance(documents, Padded):
        tensors = Tensors(batch.queries, documents.tokens, batch.queries_mask, documents.mask)
        return soft_scores_of("soft_maxsim", tensors, smooth, how)
    if options.masking == "zero":
        raise ValueError(
            'smooth: needs masking="exclude" where ranks gather documents, as masked tokens are not gathered, and it '
            'is "zero"'
        )
    tensors = Tensors(batch.queries, documents.tokens, batch.queries_mask, None, None, documents.cu_seqlens)
    how = with_lengths(tensors, how, None, documents.longest)
    return soft_scores_of("soft_maxsim_varlen", tensors, smooth, how)


def _layout(name: str, documents: Padded | Packed) -> dict[str, Any]:
    """The arguments of an operation that tell the documents, the first of them by its name."""
    if isinstance(documents, Padded):
        return {name: documents.tokens, "documents_mask": documents.mask}
    return {
        name: documents.tokens,
        "documents_cu_seqlens": documents.cu_seqlens,
        "max_document_length": documents.longest,
    }


class Stopwatch:
    """How long the operations of a loss take on their device, which is read when all is done there."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Count what is launched in this block."""
        if device.type == "cuda":
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            yield
            events[1].record()
            self._events.append(events)
        else:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start

    def read(self) -> float:
        """Seconds since the last reading; waits for the device."""
        for start, end in self._events:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1000
        seconds, self._seconds, self._events = self._seconds, 0.0, []
        return seconds


def timed(loss: Any, device: torch.device) -> AbstractContextManager[None]:
    """Count what this block takes on the loss's stopwatch, if a trainer has given it one."""
    stopwatch = getattr(loss, "stopwatch", None)
    return nullcontext() if stopwatch is None else stopwatch.running(device)
