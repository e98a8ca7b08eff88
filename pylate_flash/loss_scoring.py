"""What the losses do with the embeddings, or the hidden states, of a batch: the loss, by one operation.

Scorers other than this package's, and a `score_metric` of the caller, leave PyLate's code as it is: `FlagScores` is the
score function that it calls.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pylate.utils import get_rank, get_world_size
from torch import Tensor

from ._switches import backend_in_force
from .gathering import all_gather, exchange, gather_sizes, ring_cross_entropy
from .loss_arguments import check_fusion
from .mini_batches import Packed, pack_padded
from .ops import maxsim_cross_entropy, maxsim_from_hidden
from .ops.problem import Options, Tensors
from .ops.soft import soft_scores_of
from .ops.varlen import with_lengths
from .projection import BIAS, WEIGHT, hidden_states, unwrapped
from .scores import ColBERTScores, colbert_kd_scores, scorer_of


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


class FlagScores:
    """The score function of a loss that was given none: it reads the flags at the time of the call.

    The queries are [Nq, Lq, d]. The documents are [Nd, N, Ld, d], one group of N per query, and give [Nq, Nd * N]; or,
    with ``own_candidates``, [Nq, K, Ld, d], and give [Nq, K].
    """

    def __init__(self, loss: Any, own_candidates: bool = False) -> None:
        self.loss = loss
        self.own_candidates = own_candidates

    def __call__(
        self,
        queries_embeddings: Tensor,
        documents_embeddings: Tensor,
        queries_mask: Tensor | None = None,
        documents_mask: Tensor | None = None,
    ) -> Tensor:
        backend, masking = self.backend(), masking_of(self.loss)
        if self.own_candidates:
            return colbert_kd_scores(
                queries_embeddings, documents_embeddings, queries_mask, documents_mask, backend, masking=masking
            )
        scores = ColBERTScores(backend, masking)
        return scores(queries_embeddings, documents_embeddings, queries_mask, documents_mask)

    def backend(self) -> str:
        """The backend of a call made now."""
        scorer = self.loss.scorer or scorer_of(self.loss.model)[0]
        # "auto" asks for nothing by name, so PYLATE_SCORES_BACKEND and use_scorer() still have their say.
        return backend_in_force(None if scorer == "auto" else scorer)


def masking_of(loss: Any) -> str:
    return loss.masking or scorer_of(loss.model)[1]


def is_scored_here(loss: Any) -> bool:
    """Whether this package computes the loss, and not PyLate's code with a score function."""
    return isinstance(loss.score_metric, FlagScores) and loss.score_metric.backend() in ("auto", "pylate_flash")


def fuses(loss: Any) -> bool:
    """Whether the loss scores from hidden states: as it was told, or else as the model says.

    What ranks exchange are projected embeddings, as hidden states are several times as large.
    """
    fuse = loss.fuse_projection
    if fuse is None:
        fuse = getattr(unwrapped(loss.model), "fuse_projection", False)
    if fuse:
        # The flags may have been set since.
        check_fusion(loss)
    return bool(fuse) and not gathers(loss)


def gathers(loss: Any) -> bool:
    return getattr(loss, "gather_across_devices", False) and get_world_size() > 1


def masks_of(loss: Any, columns: list[dict[str, Tensor]]) -> tuple[Tensor | None, list[Tensor]]:
    """Which tokens are scored: of the queries, None where all are, and of each column of documents."""
    model = unwrapped(loss.model)
    queries, *documents = columns
    scored = _scored_tokens(tuple(model.skiplist), queries["input_ids"].device)
    masks = [
        scored[features["input_ids"].clamp(max=len(scored) - 1)] & features["attention_mask"].bool()
        for features in documents
    ]
    return None if model.do_query_expansion else queries["attention_mask"].bool(), masks


@functools.lru_cache(maxsize=16)
def _scored_tokens(skiplist: tuple[int, ...], device: torch.device) -> Tensor:
    """Of each token up to the last one of the skiplist, and of all that follow together, whether it is scored.

    PyLate compares a text with one token of the skiplist after the other: a hundred launches.
    """
    scored = torch.ones(max(skiplist, default=-1) + 2, dtype=torch.bool)
    scored[list(skiplist)] = False
    return scored.to(device)


class Padded(NamedTuple):
    """Documents [N, L, d] and their mask [N, L]."""

    tokens: Tensor
    mask: Tensor


def cross_entropy(
    loss: Any,
    queries: Tensor,
    queries_mask: Tensor | None,
    documents: Padded | Packed,
    labels: Tensor,
    size_average: bool,
) -> Tensor:
    """The contrastive loss of embeddings that are not normalised yet.

    Parameters
    ----------
    loss
        Has the temperature, the masking, and how documents are gathered.
    queries, queries_mask
        [Nq, Lq, d], and [Nq, Lq] or None.
    documents
        Of this rank. Packed ones have the token of zeros that ``masking="zero"`` asks for.
    labels
        [Nq], int64: which document is the right one.
    size_average
        Average over the queries; otherwise sum. With gathered documents, the number of ranks times either: the average
        is over the queries of all ranks, and the gradients, of which DistributedDataParallel takes the mean, are those
        of one process with the whole batch, for the average as many times larger as there are ranks. With as many
        queries on each rank, these are PyLate's.
    """
    if not gathers(loss):
        return _cross_entropy(loss, queries, queries_mask, documents, labels, "mean" if size_average else "sum")
    if isinstance(documents, Padded):
        documents = pack_padded(documents.tokens, documents.mask, masking_of(loss) == "zero")
    ranks, world = exchange(documents, len(queries)), get_world_size()
    if loss.gather == "ring":
        total = ring_cross_entropy(queries, queries_mask, documents, ranks, labels, loss.temperature)
    else:
        labels = labels + sum(ranks.documents[: get_rank()])
        total = _cross_entropy(loss, queries, queries_mask, all_gather(documents, ranks), labels, "sum")
    return total * (world * world / sum(ranks.queries) if size_average else world)


def _cross_entropy(
    loss: Any,
    queries: Tensor,
    queries_mask: Tensor | None,
    documents: Padded | Packed,
    labels: Tensor,
    loss_reduction: str,
) -> Tensor:
    if getattr(loss, "smooth", None) is not None:
        scores = soft_scores(loss, queries, queries_mask, documents)
        return cross_entropy_of_scores(loss, scores, labels, loss_reduction == "mean")
    return maxsim_cross_entropy(
        queries,
        queries_mask=queries_mask,
        labels=labels,
        temperature=loss.temperature,
        loss_reduction=loss_reduction,
        normalize=True,
        masking=masking_of(loss),
        **_layout("documents", documents),
    )


def soft_scores(loss: Any, queries: Tensor, queries_mask: Tensor | None, documents: Padded | Packed) -> Tensor:
    """Scores by the smooth maximum of the loss, of embeddings that are not normalised yet."""
    masking = masking_of(loss)
    if isinstance(documents, Padded):
        tensors = Tensors(queries, documents.tokens, queries_mask, documents.mask)
        return soft_scores_of("soft_maxsim", tensors, loss.smooth, Options(normalize=True, masking=masking))
    if masking == "zero":
        raise ValueError(
            'smooth: needs masking="exclude" where ranks gather documents, as masked tokens are not gathered, and it '
            'is "zero"'
        )
    tensors = Tensors(queries, documents.tokens, queries_mask, None, None, documents.cu_seqlens)
    options = with_lengths(tensors, Options(normalize=True), None, documents.longest)
    return soft_scores_of("soft_maxsim_varlen", tensors, loss.smooth, options)


def _layout(name: str, documents: Padded | Packed) -> dict[str, Any]:
    """The arguments of an operation that tell the documents, the first of them by its name."""
    if isinstance(documents, Padded):
        return {name: documents.tokens, "documents_mask": documents.mask}
    return {
        name: documents.tokens,
        "documents_cu_seqlens": documents.cu_seqlens,
        "max_document_length": documents.longest,
    }


def cross_entropy_of_scores(loss: Any, scores: Tensor, labels: Tensor, size_average: bool) -> Tensor:
    return F.cross_entropy(scores / loss.temperature, labels, reduction="mean" if size_average else "sum")


def fused_scores(loss: Any, columns: list[dict[str, Tensor]], own_candidates: bool = False) -> Tensor:
    """Scores of tokenized columns from hidden states.

    [Nq, N * Nq], the documents of the first column first, or with `own_candidates` [Nq, K].
    """
    with hidden_states(loss.model):
        outputs = [loss.model(features) for features in columns]
    queries, *documents = [output["token_embeddings"] for output in outputs]
    queries_mask, masks = masks_of(loss, columns)
    if own_candidates:
        documents, masks = ([values[0].unflatten(0, (len(queries), -1))] for values in (documents, masks))
    projection = outputs[-1][WEIGHT], outputs[-1].get(BIAS)
    # Column by column: together, the hidden states would be copied.
    scores = [
        scores_of_states(loss, queries, queries_mask, Padded(*column), projection)
        for column in zip(documents, masks, strict=True)
    ]
    return scores[0] if len(scores) == 1 else torch.cat(scores, dim=1)


def scores_of_states(
    loss: Any,
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
        masking=masking_of(loss),
        **_layout("hidden", documents),
    )


def check_sizes_of_ranks(loss: Any, columns: list[dict[str, Tensor]]) -> int:
    """The tokens of the longest document column on all ranks, for PyLate's gathering, which needs equal shapes.

    Raises
    ------
    ValueError
        On all ranks, if they have different numbers of queries or of columns.
    """
    queries, *documents = [features["input_ids"] for features in columns]
    sizes = [len(queries), len(documents), max(ids.shape[1] for ids in documents)]
    batch_sizes, counts, lengths = (list(size) for size in zip(*gather_sizes(sizes, queries.device), strict=True))
    if len(set(batch_sizes)) > 1 or len(set(counts)) > 1:
        raise ValueError(
            f"gather_across_devices: {batch_sizes} queries and {counts} columns of documents on the ranks; with a "
            'score_metric, or another scorer than "pylate_flash" and "auto", every rank needs as many'
        )
    return max(lengths)
