"""What PyLate's losses read off their flags and their model, and what they hand to `contrast` of it.

Scorers other than this package's, and a `score_metric` of the caller, leave PyLate's code as it is: `FlagScores` is the
score function that it calls.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .._config import backend_in_force
from ..encoding.projection import BIAS, WEIGHT, hidden_states, unwrapped
from ..scores import ColBERTScores, colbert_kd_scores, scorer_of
from .contrast import Contrast, Padded, cross_entropy, scores_of_states
from .distributed import gather_sizes, world_size
from .mini_batches import Packed
from .options import check_fusion


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
    return getattr(loss, "gather_across_devices", False) and world_size() > 1


def masks_of(loss: Any, columns: list[dict[str, Tensor]]) -> tuple[Tensor | None, list[Tensor]]:
    """Which tokens are scored: of the queries, None where all are, and of each column of documents."""
    model = unwrapped(loss.model)
    queries, *documents = columns
    scored = _scored_tokens(tuple(model.skiplist), queries["input_ids"].device)
    masks = [
        scored.take(features["input_ids"].clamp(max=len(scored) - 1)) & features["attention_mask"].bool()
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


def contrast_of(loss: Any) -> Contrast:
    """How a loss compares embeddings that are not normalised yet; a distillation has no temperature."""
    temperature = getattr(loss, "temperature", 1.0)
    return Contrast(
        # A number of numpy's, or a fraction, is no operand of torch's everywhere.
        temperature if isinstance(temperature, Tensor) else float(temperature),
        masking_of(loss),
        gather=loss.gather if gathers(loss) else None,
        smooth=getattr(loss, "smooth", None),
    )


def contrastive_loss(
    loss: Any,
    queries: Tensor,
    queries_mask: Tensor | None,
    documents: Padded | Packed,
    labels: Tensor | None,
    size_average: bool,
) -> Tensor:
    """`cross_entropy`, with gathered documents times the number of ranks, as PyLate has it."""
    value = cross_entropy(contrast_of(loss), queries, queries_mask, documents, labels, size_average)
    return value * world_size() if gathers(loss) else value


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
    # Distillation has no temperature, and none is needed for scores.
    how = Contrast(masking=masking_of(loss))
    # Column by column: together, the hidden states would be copied.
    scores = [
        scores_of_states(how, queries, queries_mask, Padded(*column), projection)
        for column in zip(documents, masks, strict=True)
    ]
    return scores[0] if len(scores) == 1 else torch.cat(scores, dim=1)


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
