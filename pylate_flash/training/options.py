"""The arguments of the losses: what they are asked to compute with, and the columns of a batch, checked."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._config import check_backend, check_masking
from ..encoding.projection import dense_layers, unwrapped
from ..ops.checks import check_choice, is_positive
from .distributed import GATHERINGS, world_size

# The scorers of a loss, or none, that leave it to this package.
_OURS = (None, "auto", "pylate_flash")


def check_temperature(temperature: Any, name: str = "temperature") -> None:
    """A number above 0, or a tensor of one element, as a learned temperature is."""
    if isinstance(temperature, Tensor):
        if temperature.numel() != 1:
            raise ValueError(f"{name}: a tensor of shape {tuple(temperature.shape)}; expected a number or one element")
    elif isinstance(temperature, bool) or not isinstance(temperature, numbers.Real):
        raise TypeError(f"{name}: {type(temperature).__name__}; expected a number or a tensor of one element")
    elif not is_positive(float(temperature)):
        raise ValueError(f"{name}: {temperature}; expected a finite number above 0, in float32 too")


def check_size(name: str, size: Any) -> None:
    """A number of texts or queries: an integer from 1 on."""
    if isinstance(size, bool) or not isinstance(size, numbers.Integral):
        raise TypeError(f"{name}: {type(size).__name__}; expected an integer")
    if size < 1:
        raise ValueError(f"{name}: {size}; expected at least 1")


def set_scoring(loss: Any, score_metric: Callable | None, scorer: str | None, masking: str | None) -> None:
    """Check and store what the loss was asked to score with."""
    if score_metric is not None and (scorer is not None or masking is not None):
        raise ValueError(
            f"score_metric: given together with scorer={scorer!r}, masking={masking!r}; a score_metric computes the "
            "scores itself, so pass either it or the other two"
        )
    loss.scorer = None if scorer is None else check_backend(scorer, name="scorer")
    loss.masking = None if masking is None else check_masking(masking)


def set_fusion(loss: Any, score_metric: Callable | None, fuse_projection: bool | None) -> None:
    """Store whether the projection is to be fused, checked as far as it can be before the model's flags are read."""
    if fuse_projection is not None and not isinstance(fuse_projection, bool):
        raise TypeError(f"fuse_projection: {fuse_projection!r}; expected True, False or None")
    if fuse_projection and score_metric is not None:
        raise ValueError("fuse_projection: given together with score_metric, which needs the projected embeddings")
    if fuse_projection:
        dense_layers(loss.model)
        check_fusion(loss)
    # A score_metric of the caller is called, whatever the model's flag says.
    loss.fuse_projection = False if score_metric is not None else fuse_projection


def check_fusion(loss: Any) -> None:
    """Raise ValueError if a loss of PyLate's is to be fused, and another scorer is asked for."""
    from ..scores import scorer_of

    scorer = loss.scorer or scorer_of(loss.model)[0]
    if scorer not in ("auto", "pylate_flash"):
        raise ValueError(f'fuse_projection: needs the scorer "pylate_flash" or "auto", and it is "{scorer}"')


def set_gathering(loss: Any, score_metric: Callable | None, gather: Any) -> None:
    """Check and store how documents are gathered."""
    check_choice("gather", gather, GATHERINGS)
    loss.gather = gather
    if score_metric is not None or loss.scorer not in _OURS:
        check_pylates_way(loss)


def set_smoothing(loss: Any, score_metric: Callable | None, smooth: Any) -> None:
    """Check and store how sharp the maximum is, after how documents are gathered; None: it is the maximum."""
    loss.smooth = smooth
    if smooth is None:
        return
    check_temperature(smooth, "smooth")
    if loss.fuse_projection:
        raise ValueError("smooth: given together with fuse_projection, which has no smooth maximum")
    if getattr(loss, "gather", None) == "ring":
        raise ValueError('smooth: given together with gather="ring", which has no smooth maximum')
    loss.fuse_projection = False
    if score_metric is not None or loss.scorer not in _OURS:
        check_pylates_way(loss)


def set_token_limit(loss: Any, score_metric: Callable | None, mini_batch_num_tokens: Any) -> None:
    """Check and store how many tokens a mini-batch may have."""
    if mini_batch_num_tokens is not None:
        check_size("mini_batch_num_tokens", mini_batch_num_tokens)
    loss.mini_batch_num_tokens = mini_batch_num_tokens
    if score_metric is not None or loss.scorer not in _OURS:
        check_pylates_way(loss)


def check_pylates_way(loss: Any) -> None:
    """Raise ValueError if PyLate's code, which computes this loss, does not know what it was asked for."""
    asked = [f"gather={loss.gather!r}"] if getattr(loss, "gather", "all_gather") != "all_gather" else []
    if getattr(loss, "smooth", None) is not None:
        asked.append(f"smooth={loss.smooth}")
    if getattr(loss, "mini_batch_num_tokens", None) is not None:
        asked.append(f"mini_batch_num_tokens={loss.mini_batch_num_tokens}")
    if asked:
        raise ValueError(
            f'{", ".join(asked)}: needs the scorer "pylate_flash" or "auto", and the loss has another one or a '
            "score_metric"
        )


def document_columns(loss: Any, sentence_features: Iterable[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Check the columns of a contrastive batch, and bring its documents to one padded length, see `padded_to`."""
    query, *documents = sentence_features
    if not documents:
        raise ValueError("sentence_features: got only the queries; expected them and at least one column of documents")
    batch_sizes = [features["input_ids"].shape[0] for features in (query, *documents)]
    if len(set(batch_sizes)) > 1:
        raise ValueError(
            f"sentence_features: columns of {batch_sizes} texts; a contrastive loss expects as many documents in each "
            "column as there are queries"
        )
    others = batch_sizes[0] * len(documents) * (world_size() if loss.gather_across_devices else 1) - 1
    if others == 0:
        _warn_once(
            loss,
            "a contrastive batch of one query and one document has no negatives: its loss is 0, and nothing is learned "
            "from it; use larger batches, or hard negatives",
        )
    length = max(features["input_ids"].shape[1] for features in documents)
    return padded_to(loss, length, [query, *documents])


def padded_to(loss: Any, length: int, columns: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Columns whose documents are padded to so many tokens.

    PyLate's collator pads every document to ``document_length``, and its losses stack the columns. Columns tokenized
    one by one (``pad=False``) end where their longest text ends: they get masked padding here, which changes no score.
    """
    query, *documents = columns
    if all(features["input_ids"].shape[1] == length for features in documents):
        return columns
    # The mask is 0 there, so the token is never looked at; the padding token is what the encoder expects to see.
    padding_token = unwrapped(loss.model).tokenizer.pad_token_id
    padded = [
        {
            name: F.pad(value, (0, length - value.shape[1]), value=padding_token if name == "input_ids" else 0)
            if value.ndim == 2 and value.shape[1] == features["input_ids"].shape[1]
            else value
            for name, value in features.items()
        }
        for features in documents
    ]
    return [query, *padded]


def candidate_columns(
    loss: Any, sentence_features: Iterable[dict[str, Tensor]], labels: Any
) -> tuple[list[dict[str, Tensor]], Tensor]:
    """Check the columns of a batch for distillation, and the teacher's scores, which come back as floats."""
    columns = list(sentence_features)
    if len(columns) != 2:
        raise ValueError(
            f"sentence_features: {len(columns)} columns; distillation expects two, the queries and their candidates"
        )
    queries, documents = (features["input_ids"].shape[0] for features in columns)
    expected = (queries, documents // max(queries, 1))
    if not isinstance(labels, Tensor) or tuple(labels.shape) != expected or documents % max(queries, 1):
        got = f"shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(
            f"labels: {got}; expected the teacher's scores, one row per query and one column per candidate, "
            f"for {queries} queries and {documents} candidates"
        )
    if expected[1] == 1:
        _warn_once(
            loss,
            "distillation of one candidate per query has nothing to compare: its loss is 0, and nothing is learned "
            "from it; give each query several candidates",
        )
    return columns, labels if labels.is_floating_point() else labels.float()


def _warn_once(loss: Any, message: str) -> None:
    """Warn about a batch that teaches nothing, once for each loss; in an evaluation there is nothing to learn."""
    if torch.is_grad_enabled() and not getattr(loss, "_warned", False):
        loss._warned = True
        warnings.warn(message, stacklevel=4)
