"""What the losses are given, checked, and what they read off a `MultiVectorEncoder`."""

from __future__ import annotations

from . import _needs  # noqa: F401

# isort: split
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import sentence_transformers.multi_vector_encoder.losses as host
import torch
import torch.nn.functional as F
from sentence_transformers.base.losses.merged_forward import embed_columns_padded
from sentence_transformers.multi_vector_encoder import scoring as host_scoring
from torch import Tensor

from ...encoding.projection import BIAS, WEIGHT, dense_layers, hidden_states, normalizes
from ...training.contrast import Batch, Padded
from ...training.distributed import gathers
from ...training.options import LossOptions
from . import scoring

Columns = list[dict[str, Any]]

# How an operation reduces the best similarities of a query's tokens, by what the names of its scores begin with.
_REDUCTIONS = {"sum": "", "mean": "mean_"}
# What the losses of distillation score by, where the others compare a batch.
_OF_DISTILLATION = {
    host.MultiVectorDistillKLDivLoss: "colbert_kd_scores",
    host.MultiVectorMarginMSELoss: "colbert_scores_pairwise",
}


def reduction_of(loss: Any) -> str | None:
    """ "sum" or "mean" for MaxSim, the host's or ours; None for another `similarity_fct`, which is called.

    Each loss has one of its own: the others give scores of other shapes, which the host's code then has to refuse.
    """
    scores = next((name for kind, name in _OF_DISTILLATION.items() if isinstance(loss, kind)), "colbert_scores")
    for reduction, prefix in _REDUCTIONS.items():
        if loss.similarity_fct in [getattr(module, prefix + scores) for module in (host_scoring, scoring)]:
            return reduction
    return None


def asked_for(arguments: dict[str, Any]) -> list[str]:
    """Names of the arguments that ask for something: neither None nor False, which 0.0 is not."""
    return [name for name, value in arguments.items() if value is not None and value is not False]


def check_asked(loss: Any, asked: dict[str, Any]) -> None:
    """Raise ValueError where the scores are another function's, and more is asked of the loss than the host's has."""
    given = asked_for(asked)
    if given and reduction_of(loss) is None:
        raise ValueError(
            f"{', '.join(given)}: given together with a similarity_fct that the loss has to call; expected MaxSim, "
            "which colbert_scores and mean_colbert_scores and their like compute"
        )


def set_fusion(loss: Any, fuse_projection: Any) -> None:
    """Check and store whether a loss scores from hidden states."""
    if not isinstance(fuse_projection, bool):
        raise TypeError(f"fuse_projection: {fuse_projection!r}; expected True or False")
    check_asked(loss, {"fuse_projection": fuse_projection})
    if fuse_projection:
        dense_layers(loss.model)
    loss.fuse_projection = fuse_projection


def options_of(loss: Any) -> LossOptions | None:
    """How a loss compares what its model gives it, which is not normalised once more; None: the host's code does."""
    reduction = reduction_of(loss)
    if reduction is None:
        return None
    gathered = gathers(loss)
    # What ranks exchange are embeddings, which are smaller.
    fuse = loss.fuse_projection and not gathered
    options = LossOptions(
        normalize=fuse and normalizes(loss.model),
        reduction=reduction,
        empty_score=scoring.EMPTY_DOCUMENT_SCORE,
        fuse_projection=fuse,
    )
    if isinstance(loss, host.MultiVectorDistillKLDivLoss):
        return options._replace(temperature=loss.student_temperature, teacher_temperature=loss.teacher_temperature)
    if isinstance(loss, host.MultiVectorMarginMSELoss):
        return options
    return options._replace(
        temperature=1.0 / (loss.scale if isinstance(loss.scale, Tensor) else float(loss.scale)),
        margin=loss.margin,
        symmetric=loss.symmetric,
        gather=loss.gather if gathered else None,
    )


def columns_of(sentence_features: Iterable[dict[str, Any]], least: int) -> Columns:
    """The columns of a batch, queries first, to be changed by the model; each with its task.

    Raises
    ------
    ValueError
        If there are fewer than `least`, or they have different numbers of texts.
    """
    columns = [dict(features) for features in sentence_features]
    if len(columns) < least:
        raise ValueError(
            f"sentence_features: {len(columns)} columns; expected the queries and at least {least - 1} of documents"
        )
    for index, features in enumerate(columns):
        features.setdefault("task", "query" if index == 0 else "document")
    sizes = [size_of(features) for features in columns]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"sentence_features: columns of {sizes} texts; expected as many documents in each as there are queries"
        )
    return columns


def size_of(features: dict[str, Any]) -> int:
    """How many texts a column has, or images."""
    if "cu_seq_lens_q" in features:
        # Flattened, one after the other.
        return len(features["cu_seq_lens_q"]) - 1
    tensors = {name: value for name, value in features.items() if isinstance(value, Tensor) and value.ndim > 0}
    # Pixels may be those of several images of a text.
    first = next((name for name in ("input_ids", "attention_mask") if name in tensors), next(iter(tensors)))
    return len(tensors[first])


def embed(loss: Any, columns: Columns, options: LossOptions) -> Batch:
    """What the model makes of the columns of a batch, the queries first.

    It gets a copy of each: it writes into what it is given.
    """
    query, *documents = columns
    with hidden_states(loss.model) if options.fuse_projection else nullcontext():
        output = loss.model(dict(query), task=query["task"])
        found = embed_columns_padded(
            loss.model, [dict(features) for features in documents], loss.mini_batch_size, task_default="document"
        )
    projection = (output[WEIGHT], output.get(BIAS)) if options.fuse_projection else None
    return Batch(output["token_embeddings"], output["attention_mask"].bool(), list(map(Padded, *found)), projection)


def teacher_margins(labels: Any, n_queries: int, n_negatives: int) -> Tensor:
    """A teacher's scores [N, 1 + negatives] whose margins are those of the labels, float32.

    The labels are such scores, or the margins themselves, [N, negatives], or [N] for one negative.
    """
    shape = tuple(labels.shape) if isinstance(labels, Tensor) else None
    if shape == (n_queries, n_negatives + 1):
        return labels.detach().float()
    if shape == (n_queries, n_negatives) or (shape == (n_queries,) and n_negatives == 1):
        # The teacher scores the positive 0.
        return F.pad(-labels.detach().float().view(n_queries, n_negatives), (1, 0))
    raise ValueError(
        f"labels: {type(labels).__name__ if shape is None else f'shape {shape}'}; expected the teacher's scores "
        f"{(n_queries, n_negatives + 1)}, or its margins {(n_queries, n_negatives)}, for {n_queries} queries and "
        f"{n_negatives} columns of negatives"
    )


def teacher_scores(labels: Any, n_queries: int, n_candidates: int) -> Tensor:
    """A teacher's scores [N, candidates], floating."""
    if not isinstance(labels, Tensor) or tuple(labels.shape) != (n_queries, n_candidates):
        got = f"shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(
            f"labels: {got}; expected the teacher's scores {(n_queries, n_candidates)}, one of each candidate"
        )
    labels = labels.detach()
    return labels if labels.is_floating_point() else labels.float()


def checked_exclude(exclude: Callable[[Columns], Tensor] | None, columns: Columns) -> Tensor | None:
    """What a loss leaves out of each query's denominator, [Nq, Nq * columns of documents], if anything."""
    if exclude is None:
        return None
    out = exclude(columns)
    n_queries = size_of(columns[0])
    shape = (n_queries, n_queries * (len(columns) - 1))
    if not isinstance(out, Tensor) or out.dtype != torch.bool or tuple(out.shape) != shape:
        got = f"{out.dtype} of shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(f"exclude: returned {got}; expected torch.bool of shape {shape}")
    return out


def duplicates(columns: Columns) -> Tensor:
    """Documents that are the same text as a query's right one, so that it is no negative: an `exclude` of the losses.

    Waits for the device.

    Parameters
    ----------
    columns
        Tokenized and padded, the queries first, with ``input_ids`` and ``attention_mask`` [Nq, L].

    Returns
    -------
    Tensor
        [Nq, Nq * columns of documents], bool: the documents of the first column come first.
    """
    documents = columns[1:]
    longest = max(features["input_ids"].shape[1] for features in documents)
    # Padding says -1, whatever its token is.
    ids = [features["input_ids"].masked_fill(~features["attention_mask"].bool(), -1) for features in documents]
    texts = torch.cat([F.pad(tokens, (0, longest - tokens.shape[1]), value=-1) for tokens in ids])
    group = texts.unique(dim=0, return_inverse=True)[1]
    right = group[: len(ids[0])]
    return (right.unsqueeze(1) == group).fill_diagonal_(False)
