"""Inputs of the losses, checked, and the options that they read from their model, a `MultiVectorEncoder`."""

from __future__ import annotations

from . import _needs  # noqa: F401

# isort: split
from collections.abc import Callable, Iterable, Mapping
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

# Reduction of an operation over the maxima of a query's tokens, to the name prefix of the matching score functions.
_REDUCTIONS = {"sum": "", "mean": "mean_"}
# Score functions of the distillation losses; the other losses score a batch with `colbert_scores`.
_OF_DISTILLATION = {
    host.MultiVectorDistillKLDivLoss: "colbert_kd_scores",
    host.MultiVectorMarginMSELoss: "colbert_scores_pairwise",
}


def reduction_of(loss: Any) -> str | None:
    """Return "sum" or "mean" for MaxSim, the host's or ours; None for another `similarity_fct`, which gets called.

    Each loss has its own MaxSim function: the others return other shapes, which the host's code then rejects.
    """
    scores = next((name for kind, name in _OF_DISTILLATION.items() if isinstance(loss, kind)), "colbert_scores")
    for reduction, prefix in _REDUCTIONS.items():
        if loss.similarity_fct in [getattr(module, prefix + scores) for module in (host_scoring, scoring)]:
            return reduction
    return None


def asked_for(arguments: dict[str, Any]) -> list[str]:
    """Return the names of the arguments that are set: neither None nor False (0.0 counts as set)."""
    return [name for name, value in arguments.items() if value is not None and value is not False]


def check_asked(loss: Any, options: dict[str, Any]) -> None:
    """Raise ValueError if options beyond the host's are set and the scores come from a custom `similarity_fct`."""
    names = asked_for(options)
    if names and reduction_of(loss) is None:
        raise ValueError(
            f"{', '.join(names)}: given together with a similarity_fct other than MaxSim; expected colbert_scores, "
            "mean_colbert_scores or one of their variants"
        )


def set_fusion(loss: Any, fuse_projection: Any) -> None:
    """Check and store the flag `fuse_projection` of a loss."""
    if not isinstance(fuse_projection, bool):
        raise TypeError(f"fuse_projection: {fuse_projection!r}; expected True or False")
    check_asked(loss, {"fuse_projection": fuse_projection})
    if fuse_projection:
        dense_layers(loss.model)
    loss.fuse_projection = fuse_projection


def options_of(loss: Any) -> LossOptions | None:
    """Resolve how a loss compares its model's outputs, without normalizing again; None: the host's code computes it."""
    reduction = reduction_of(loss)
    if reduction is None:
        return None
    gathered = gathers(loss)
    # Ranks exchange embeddings, which are smaller than hidden states.
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
    """Copy the columns of a batch, queries first, so that the model may modify them, and set the task of each.

    Raises
    ------
    TypeError
        If they are not a list of dictionaries of tensors.
    ValueError
        If there are fewer than `least`, or they have no texts or different numbers of texts.
    """
    if isinstance(sentence_features, Mapping | str) or not isinstance(sentence_features, Iterable):
        raise TypeError(f"sentence_features: {type(sentence_features).__name__}; expected a list of tokenized columns")
    columns = []
    for index, features in enumerate(sentence_features):
        values = features.values() if isinstance(features, Mapping) else []
        if not any(isinstance(value, Tensor) and value.ndim > 0 for value in values):
            raise TypeError(
                f"sentence_features: column {index} is {features!r:.100}; expected a dictionary of tensors, such as "
                "model.preprocess returns"
            )
        columns.append(dict(features))
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
    if sizes[0] == 0:
        raise ValueError("sentence_features: columns without texts; expected at least one text in each")
    return columns


def size_of(features: dict[str, Any]) -> int:
    """Return the number of texts or images of a column."""
    if "cu_seq_lens_q" in features:
        # Flattened: the texts are concatenated.
        return len(features["cu_seq_lens_q"]) - 1
    tensors = {name: value for name, value in features.items() if isinstance(value, Tensor) and value.ndim > 0}
    # Not the pixels: a text may have several images.
    first = next((name for name in ("input_ids", "attention_mask") if name in tensors), next(iter(tensors)))
    return len(tensors[first])


def embed(loss: Any, columns: Columns, options: LossOptions) -> Batch:
    """Run the model on the columns of a batch, the queries first, and collect its outputs.

    The model gets copies, as it writes into its inputs.
    """
    query, *documents = columns
    with hidden_states(loss.model) if options.fuse_projection else nullcontext():
        output = loss.model(dict(query), task=query["task"])
        padded = embed_columns_padded(
            loss.model, [dict(features) for features in documents], loss.mini_batch_size, task_default="document"
        )
    projection = (output[WEIGHT], output.get(BIAS)) if options.fuse_projection else None
    return Batch(output["token_embeddings"], output["attention_mask"].bool(), list(map(Padded, *padded)), projection)


def teacher_margins(labels: Any, n_queries: int, n_negatives: int) -> Tensor:
    """Return teacher scores [N, 1 + negatives] with the margins of the labels, float32.

    The labels are such scores, or the margins themselves, [N, negatives], or [N] for one negative.
    """
    shape = tuple(labels.shape) if isinstance(labels, Tensor) else None
    if shape == (n_queries, n_negatives + 1):
        return labels.detach().float()
    if shape == (n_queries, n_negatives) or (shape == (n_queries,) and n_negatives == 1):
        # Set the positive's score to 0.
        return F.pad(-labels.detach().float().view(n_queries, n_negatives), (1, 0))
    raise ValueError(
        f"labels: {type(labels).__name__ if shape is None else f'shape {shape}'}; expected the teacher's scores "
        f"{(n_queries, n_negatives + 1)}, or its margins {(n_queries, n_negatives)}, for {n_queries} queries and "
        f"{n_negatives} columns of negatives"
    )


def teacher_scores(labels: Any, n_queries: int, n_candidates: int) -> Tensor:
    """Check a teacher's scores [N, candidates], and return them as floats."""
    if not isinstance(labels, Tensor) or tuple(labels.shape) != (n_queries, n_candidates):
        got = f"shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"labels: {got}; expected the teacher's scores {(n_queries, n_candidates)}, one per candidate")
    labels = labels.detach()
    return labels if labels.is_floating_point() else labels.float()


def checked_exclude(exclude: Callable[[Columns], Tensor] | None, columns: Columns) -> Tensor | None:
    """Call `exclude`, if any, and check its mask [Nq, Nq * columns of documents]."""
    if exclude is None:
        return None
    mask = exclude(columns)
    n_queries = size_of(columns[0])
    shape = (n_queries, n_queries * (len(columns) - 1))
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or tuple(mask.shape) != shape:
        got = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"exclude: returned {got}; expected torch.bool of shape {shape}")
    return mask


def duplicates(columns: Columns) -> Tensor:
    """Mask the documents with the same text as a query's positive, which are no negatives: an `exclude` of the losses.

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
    ids = []
    for features in documents:
        # Padding becomes -1, whatever its token is, and comes last, on whichever side it was.
        padding = ~features["attention_mask"].bool()
        order = padding.to(torch.uint8).argsort(dim=1, stable=True)
        ids.append(features["input_ids"].masked_fill(padding, -1).gather(1, order))
    texts = torch.cat([F.pad(tokens, (0, longest - tokens.shape[1]), value=-1) for tokens in ids])
    group = texts.unique(dim=0, return_inverse=True)[1]
    positives = group[: len(ids[0])]
    return (positives.unsqueeze(1) == group).fill_diagonal_(False)
