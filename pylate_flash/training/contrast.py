"""The losses of a batch, for every host: one operation on the embeddings or hidden states of its texts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import maxsim, maxsim_cross_entropy, maxsim_from_hidden, maxsim_kl_divergence, maxsim_margin_mse
from ..ops.loss_scores import cross_entropy_reference, kl_divergence_reference, margin_mse_reference
from ..ops.maxsim_operator import with_lengths
from ..ops.soft import soft_scores_of
from ..problem import Options, Tensors
from .distributed import Ranks, all_gather, exchange, rank, ring_cross_entropy, world_size
from .mini_batches import Packed, pack_padded
from .options import LossOptions


class Padded(NamedTuple):
    """Documents [N, L, d], or the candidates of each query [Nq, K, L, d], and their mask."""

    tokens: Tensor
    mask: Tensor


class Batch(NamedTuple):
    """The model outputs of a batch: embeddings, or with `projection` hidden states.

    Attributes
    ----------
    queries, queries_mask
        [Nq, Lq, d], and [Nq, Lq], or None if all tokens are scored.
    columns
        The document columns, in order. Hidden states are scored column by column, as concatenating them would copy
        them. Packed ones include the token of zeros that ``masking="zero"`` requires.
    projection
        The weight [d, d_model] and the bias [d], or None, that project hidden states to embeddings.
    """

    queries: Tensor
    queries_mask: Tensor | None
    columns: Sequence[Padded | Packed]
    projection: tuple[Tensor, Tensor | None] | None = None

    def together(self) -> Padded | Packed:
        """Concatenate the documents of all columns; packed ones are a single column already."""
        return self.columns[0] if len(self.columns) == 1 else joined(self.columns)  # type: ignore[arg-type]


def joined(parts: Sequence[Padded]) -> Padded:
    """Concatenate documents [N, L, d] of any padded lengths."""
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
    """Compute the contrastive loss of a batch.

    Parameters
    ----------
    options
        How queries and documents are compared. The loss is averaged, or summed, over the queries; with gathered
        documents it is the sum over this rank's queries divided by the mean number of queries per rank, or the plain
        sum: DistributedDataParallel averages the ranks' gradients, which gives the gradient of a single process with
        the full batch, of its average, or of its sum divided by the number of ranks.
    batch
        The batch of this rank.
    labels
        [Nq], int64: the index of each query's positive among this rank's documents. None: document i for query i.
    exclude
        [Nq, Nd], bool: True excludes a document from the query's denominator. Not with gathered documents.
    """
    reduction, factor = options.loss_reduction, 1.0
    if options.gather is not None:
        documents, targets, ranks = _gathered(options, batch, labels)
        reduction, factor = "sum", world_size() / sum(ranks.queries) if options.size_average else 1.0
        factor = factor * world_size() if options.times_ranks else factor
        if options.gather == "ring":
            # Packed documents have no masked tokens.
            scoring = {name: value for name, value in options.scoring().items() if name != "masking"}
            return factor * ring_cross_entropy(
                batch.queries, batch.queries_mask, documents, ranks, targets, options.temperature, scoring
            )
        batch, labels = batch._replace(columns=[documents]), targets
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
    """Compute the distillation loss: KL divergence of the candidates' scores from the teacher's scores [Nq, K]."""
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
    """Compute the margin MSE loss: squared errors of each query's margins between its first candidate and the rest."""
    if (scores := _scores(options, batch)) is not None:
        return margin_mse_reference(scores, teacher_scores)
    return maxsim_margin_mse(**_embeddings(options, batch), teacher_scores=teacher_scores)


def _embeddings(options: LossOptions, batch: Batch) -> dict[str, Any]:
    """Build the arguments of an operation from a batch: embeddings, masks and scoring options."""
    documents = _layout("documents", batch.together())
    return {"queries": batch.queries, "queries_mask": batch.queries_mask, **documents, **options.scoring()}


def _gathered(options: LossOptions, batch: Batch, labels: Tensor | None) -> tuple[Packed, Tensor, Ranks]:
    """Return packed documents (of all ranks, or for the ring of this one), the labels into them, and the rank sizes."""
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
    """Compute the scores if the loss operation cannot, else None.

    It takes neither hidden states, nor the smooth maximum, nor a teacher's temperature that may be learned.
    """
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
    if options.smooth is not None:
        return _soft_scores(options, batch, options.smooth)
    if isinstance(options.teacher_temperature, Tensor):
        return maxsim(**_embeddings(options, batch))
    return None


def _soft_scores(options: LossOptions, batch: Batch, smooth: float | Tensor) -> Tensor:
    """Score embeddings by the smooth maximum."""
    documents, soft_options = batch.together(), Options(**options.scoring())
    if isinstance(documents, Padded):
        tensors = Tensors(batch.queries, documents.tokens, batch.queries_mask, documents.mask)
        return soft_scores_of("soft_maxsim", tensors, smooth, soft_options)
    if options.masking == "zero":
        raise ValueError(
            'smooth: needs masking="exclude" when ranks gather documents, because masked tokens are not gathered; got '
            'masking="zero"'
        )
    tensors = Tensors(batch.queries, documents.tokens, batch.queries_mask, None, None, documents.cu_seqlens)
    soft_options = with_lengths(tensors, soft_options, None, documents.longest)
    return soft_scores_of("soft_maxsim_varlen", tensors, smooth, soft_options)


def _layout(name: str, documents: Padded | Packed) -> dict[str, Any]:
    """Build the document arguments of an operation; `name` is that of the token argument."""
    if isinstance(documents, Padded):
        return {name: documents.tokens, "documents_mask": documents.mask}
    return {
        name: documents.tokens,
        "documents_cu_seqlens": documents.cu_seqlens,
        "max_document_length": documents.longest,
    }


class Stopwatch:
    """Measures the device time of the operations of a loss; CUDA events are read only in `read`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Measure the operations launched in this block."""
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
        """Return the seconds measured since the last call; waits for the device."""
        for start, end in self._events:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1000
        seconds, self._seconds, self._events = self._seconds, 0.0, []
        return seconds


def timed(loss: Any, device: torch.device) -> AbstractContextManager[None]:
    """Measure this block with the loss's stopwatch, if a trainer has set one."""
    stopwatch = getattr(loss, "stopwatch", None)
    return nullcontext() if stopwatch is None else stopwatch.running(device)
