"""What the losses of every host do with the embeddings, or hidden states, of a batch: the loss, by one operation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import maxsim_cross_entropy, maxsim_from_hidden
from ..ops.loss_scores import cross_entropy_reference
from ..ops.soft import soft_scores_of
from ..ops.varlen import with_lengths
from ..problem import Options, Tensors
from .distributed import all_gather, exchange, rank, ring_cross_entropy, world_size
from .mini_batches import Packed, pack_padded


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


class Padded(NamedTuple):
    """Documents [N, L, d] and their mask [N, L]."""

    tokens: Tensor
    mask: Tensor


class Contrast(NamedTuple):
    """How a contrastive loss compares a query's right document with the others: options of `maxsim_cross_entropy`.

    `gather` is one of `distributed.GATHERINGS` where the documents of all ranks are compared, and None where there is
    one rank, or each has its own. The ring takes neither `margin` nor `symmetric`. With `smooth` scores are of
    `soft_maxsim`, which takes neither these two nor the ring.
    """

    temperature: float | Tensor = 1.0
    masking: str = "exclude"
    normalize: bool = True
    reduction: str = "sum"
    empty_score: float = 0.0
    margin: float | None = None
    symmetric: bool = False
    gather: str | None = None
    smooth: float | Tensor | None = None


def cross_entropy(
    contrast: Contrast,
    queries: Tensor,
    queries_mask: Tensor | None,
    documents: Padded | Packed,
    labels: Tensor | None,
    size_average: bool,
    exclude: Tensor | None = None,
) -> Tensor:
    """The contrastive loss of embeddings.

    Parameters
    ----------
    contrast
        How they are compared.
    queries, queries_mask
        [Nq, Lq, d], and [Nq, Lq] or None.
    documents
        Of this rank. Packed ones have the token of zeros that ``masking="zero"`` asks for.
    labels
        [Nq], int64: which document of this rank is the right one. None: that of query i is document i.
    size_average
        Average over the queries; otherwise sum. With gathered documents, the sum over this rank's queries, or that over
        the mean number of queries of a rank: DistributedDataParallel takes the mean of the ranks' gradients, which is
        then that of one process with the whole batch, of the sum over the number of ranks, or of the average.
    exclude
        [Nq, Nd], bool: True leaves a document out of the query's denominator. Not with gathered documents.
    """
    if contrast.gather is None:
        return _cross_entropy(
            contrast, queries, queries_mask, documents, labels, "mean" if size_average else "sum", exclude
        )
    if isinstance(documents, Padded):
        documents = pack_padded(documents.tokens, documents.mask, contrast.masking == "zero")
    ranks = exchange(documents, len(queries))
    if labels is None:
        labels = torch.arange(len(queries), device=queries.device)
    if contrast.gather == "ring":
        options = {name: getattr(contrast, name) for name in ("normalize", "reduction", "empty_score")}
        total = ring_cross_entropy(queries, queries_mask, documents, ranks, labels, contrast.temperature, options)
    else:
        labels = labels + sum(ranks.documents[: rank()])
        total = _cross_entropy(contrast, queries, queries_mask, all_gather(documents, ranks), labels, "sum")
    return total * (world_size() / sum(ranks.queries)) if size_average else total


def _cross_entropy(
    contrast: Contrast,
    queries: Tensor,
    queries_mask: Tensor | None,
    documents: Padded | Packed,
    labels: Tensor | None,
    loss_reduction: str,
    exclude: Tensor | None = None,
) -> Tensor:
    if contrast.smooth is not None:
        scores = soft_scores(contrast, queries, queries_mask, documents)
        if labels is None:
            labels = torch.arange(len(scores), device=scores.device)
        return cross_entropy_of_scores(scores, labels, contrast.temperature, loss_reduction == "mean")
    options = contrast._asdict()
    del options["gather"], options["smooth"]
    return maxsim_cross_entropy(
        queries,
        queries_mask=queries_mask,
        labels=labels,
        exclude=exclude,
        loss_reduction=loss_reduction,
        **options,
        **_layout("documents", documents),
    )


def soft_scores(contrast: Contrast, queries: Tensor, queries_mask: Tensor | None, documents: Padded | Packed) -> Tensor:
    """Scores of embeddings by the smooth maximum of a loss."""
    assert contrast.smooth is not None
    options = Options(
        normalize=contrast.normalize,
        reduction=contrast.reduction,
        masking=contrast.masking,
        empty_score=contrast.empty_score,
    )
    if isinstance(documents, Padded):
        tensors = Tensors(queries, documents.tokens, queries_mask, documents.mask)
        return soft_scores_of("soft_maxsim", tensors, contrast.smooth, options)
    if contrast.masking == "zero":
        raise ValueError(
            'smooth: needs masking="exclude" where ranks gather documents, as masked tokens are not gathered, and it '
            'is "zero"'
        )
    tensors = Tensors(queries, documents.tokens, queries_mask, None, None, documents.cu_seqlens)
    options = with_lengths(tensors, options, None, documents.longest)
    return soft_scores_of("soft_maxsim_varlen", tensors, contrast.smooth, options)


def _layout(name: str, documents: Padded | Packed) -> dict[str, Any]:
    """The arguments of an operation that tell the documents, the first of them by its name."""
    if isinstance(documents, Padded):
        return {name: documents.tokens, "documents_mask": documents.mask}
    return {
        name: documents.tokens,
        "documents_cu_seqlens": documents.cu_seqlens,
        "max_document_length": documents.longest,
    }


def cross_entropy_of_scores(scores: Tensor, labels: Tensor, temperature: float | Tensor, size_average: bool) -> Tensor:
    reduction = "mean" if size_average else "sum"
    return cross_entropy_reference(scores, labels, temperature=temperature, loss_reduction=reduction)


def scores_of_states(
    contrast: Contrast,
    queries: Tensor,
    queries_mask: Tensor | None,
    documents: Padded | Packed,
    projection: tuple[Tensor, Tensor | None],
) -> Tensor:
    """Scores of hidden states, and of the projection (weight and bias) that makes embeddings of them."""
    weight, bias = projection
    return maxsim_from_hidden(
        queries,
        weight=weight,
        bias=bias,
        queries_mask=queries_mask,
        queries_weight=weight,
        queries_bias=bias,
        masking=contrast.masking,
        normalize=contrast.normalize,
        reduction=contrast.reduction,
        empty_score=contrast.empty_score,
        **_layout("hidden", documents),
    )
