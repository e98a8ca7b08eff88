"""Inputs of PyLate's losses, checked, and the options that they read from their flags and a ColBERT model.

With a scorer other than this package's, or the caller's `score_metric`, PyLate's code computes the loss; `FlagScores`
is the score function that it calls.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._config import backend_in_force, check_backend, check_masking
from ...encoding.projection import BIAS, WEIGHT, dense_layers, hidden_states, unwrapped
from ...ops.checks import check_choice
from ...scores import ColBERTScores, colbert_kd_scores, scorer_of
from ...training.contrast import Batch, Padded
from ...training.distributed import GATHERINGS, gather_sizes, gathers, world_size
from ...training.options import LossOptions, check_sizes, check_temperature

Columns = list[dict[str, Tensor]]

# The scorers with which this package computes a loss.
_OURS = ("auto", "pylate_flash")


class FlagScores:
    """The default score function of a loss: it reads the flags on every call.

    Queries [Nq, Lq, d] and documents [Nd, N, Ld, d], one group of N per query, give scores [Nq, Nd * N]; with
    ``own_candidates``, documents [Nq, K, Ld, d] give scores [Nq, K].
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
        backend, masking = self.backend(), _masking_of(self.loss)
        if self.own_candidates:
            return colbert_kd_scores(
                queries_embeddings, documents_embeddings, queries_mask, documents_mask, backend, masking=masking
            )
        scores = ColBERTScores(backend, masking)
        return scores(queries_embeddings, documents_embeddings, queries_mask, documents_mask)

    def backend(self) -> str:
        """Return the backend of a call made now."""
        scorer = _scorer_of(self.loss)
        # "auto" names no backend, so PYLATE_SCORES_BACKEND and use_scorer() still apply.
        return backend_in_force(None if scorer == "auto" else scorer)


def _scorer_of(loss: Any) -> str:
    return loss.scorer or scorer_of(loss.model)[0]


def _masking_of(loss: Any) -> str:
    return loss.masking or scorer_of(loss.model)[1]


def set_options(
    loss: Any,
    score_metric: Callable | None,
    scorer: str | None,
    masking: str | None,
    fuse_projection: bool | None,
    **extra: Any,
) -> None:
    """Check and store the options of a loss beyond PyLate's arguments, as far as they do not depend on the model.

    `extra` holds those of `gather`, `smooth` and `mini_batch_num_tokens` that the loss has, which PyLate does not.
    """
    smooth = extra.get("smooth")
    if not callable(loss.model):
        raise TypeError(f"model: {type(loss.model).__name__}; expected a ColBERT model")
    if score_metric is not None and not callable(score_metric):
        raise TypeError(f"score_metric: {type(score_metric).__name__}; expected a function of embeddings, or None")
    if score_metric is not None and (scorer is not None or masking is not None):
        raise ValueError(
            f"score_metric: given together with scorer={scorer!r}, masking={masking!r}; a score_metric computes the "
            "scores itself, so pass either it or the other two"
        )
    loss.scorer = None if scorer is None else check_backend(scorer, name="scorer")
    loss.masking = None if masking is None else check_masking(masking)
    if fuse_projection is not None and not isinstance(fuse_projection, bool):
        raise TypeError(f"fuse_projection: {fuse_projection!r}; expected True, False or None")
    if fuse_projection and score_metric is not None:
        raise ValueError("fuse_projection: given together with score_metric, which needs the projected embeddings")
    if fuse_projection:
        dense_layers(loss.model)
        _check_fusion(loss)
    check_choice("gather", extra.get("gather", "all_gather"), GATHERINGS)
    check_sizes(mini_batch_num_tokens=extra.get("mini_batch_num_tokens"))
    if smooth is not None:
        check_temperature(smooth, "smooth")
        if fuse_projection:
            raise ValueError("smooth: given together with fuse_projection, which has no smooth maximum")
        if extra.get("gather") == "ring":
            raise ValueError('smooth: given together with gather="ring", which has no smooth maximum')
    # The caller's score_metric, and the smooth maximum, take precedence over the model's flag.
    loss.fuse_projection = False if score_metric is not None or smooth is not None else fuse_projection
    for name, value in extra.items():
        setattr(loss, name, value)
    if score_metric is not None or loss.scorer not in (None, *_OURS):
        _check_pylates_way(loss)


def _check_fusion(loss: Any) -> None:
    """Raise ValueError if a loss that fuses the projection has another scorer than this package's."""
    if _scorer_of(loss) not in _OURS:
        raise ValueError(f'fuse_projection: needs the scorer "pylate_flash" or "auto", got "{_scorer_of(loss)}"')


def _check_pylates_way(loss: Any) -> None:
    """Raise ValueError if PyLate's code, which computes this loss, does not support its options."""
    unsupported = [f"gather={loss.gather!r}"] if getattr(loss, "gather", "all_gather") != "all_gather" else []
    extra = {name: getattr(loss, name, None) for name in ("smooth", "mini_batch_num_tokens")}
    unsupported += [f"{name}={value}" for name, value in extra.items() if value is not None]
    if unsupported:
        raise ValueError(
            f'{", ".join(unsupported)}: needs the scorer "pylate_flash" or "auto", but the loss has another scorer, a '
            "score_metric or a calculate_loss of its own"
        )


def options_of(loss: Any) -> LossOptions | None:
    """Resolve how a loss compares embeddings, not yet normalized, from its flags and its model's current ones.

    None: PyLate's code computes the loss, with a score function. Raises ValueError if `fuse_projection` is set and
    another scorer is requested.
    """
    fuse = loss.fuse_projection
    if fuse is None:
        fuse = getattr(unwrapped(loss.model), "fuse_projection", False)
    if fuse:
        # The flags may have changed since the constructor.
        _check_fusion(loss)
    gathered = gathers(loss)
    # Ranks exchange projected embeddings, as hidden states are several times as large.
    fuse = bool(fuse) and not gathered
    if not fuse and not (isinstance(loss.score_metric, FlagScores) and loss.score_metric.backend() in _OURS):
        return None
    # Distillation has no temperature, and its loss function says whether it averages.
    temperature = getattr(loss, "temperature", 1.0)
    size_average = loss.size_average if hasattr(loss, "size_average") else loss.loss_function.reduction == "batchmean"
    return LossOptions(
        # torch does not accept a numpy number or a fraction as an operand everywhere.
        temperature if isinstance(temperature, Tensor) else float(temperature),
        size_average,
        _masking_of(loss),
        fuse_projection=fuse,
        smooth=getattr(loss, "smooth", None),
        gather=loss.gather if gathered else None,
        times_ranks=gathered,
        normalize_scores=getattr(loss, "normalize_scores", False),
    )


def embed(loss: Any, columns: Columns, options: LossOptions) -> Batch:
    """Run the model on tokenized columns, the queries first, and collect its outputs in a batch."""
    with hidden_states(loss.model) if options.fuse_projection else nullcontext():
        # The model writes into its inputs.
        outputs = [loss.model(dict(features)) for features in columns]
    queries, *documents = [output["token_embeddings"] for output in outputs]
    queries_mask, masks = masks_of(loss, columns)
    projection = (outputs[-1][WEIGHT], outputs[-1].get(BIAS)) if options.fuse_projection else None
    return Batch(queries, queries_mask, list(map(Padded, documents, masks)), projection)


def masks_of(loss: Any, columns: Columns) -> tuple[Tensor | None, list[Tensor]]:
    """Return masks of the scored tokens: of the queries, None if all are, and of each column of documents."""
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
    """Lookup table by token id of whether a token is scored; the last entry is for all ids beyond the skiplist.

    PyLate compares a text with one token of the skiplist after another: a hundred launches.
    """
    scored = torch.ones(max(skiplist, default=-1) + 2, dtype=torch.bool)
    scored[list(skiplist)] = False
    return scored.to(device)


def _checked(sentence_features: Iterable[dict[str, Tensor]]) -> Columns:
    """Return the columns of a batch as a list; raise if there are none, or one is not tokenized or has no texts."""
    if isinstance(sentence_features, Mapping | str) or not isinstance(sentence_features, Iterable):
        raise TypeError(f"sentence_features: {type(sentence_features).__name__}; expected a list of tokenized columns")
    columns = list(sentence_features)
    if not columns:
        raise ValueError("sentence_features: no columns; expected the queries, then documents")
    for index, features in enumerate(columns):
        if not isinstance(features, Mapping):
            raise TypeError(
                f"sentence_features: column {index} is a {type(features).__name__}; expected a dictionary of tensors, "
                "such as model.tokenize returns"
            )
        for name in ("input_ids", "attention_mask"):
            if not isinstance(features.get(name), Tensor):
                raise TypeError(
                    f"sentence_features: {name} of column {index} is a {type(features.get(name)).__name__}; expected a "
                    "tensor"
                )
        shape, mask_shape = (list(features[name].shape) for name in ("input_ids", "attention_mask"))
        if shape != mask_shape or len(shape) != 2:
            raise ValueError(
                f"sentence_features: input_ids and attention_mask of column {index} have shapes {shape} and "
                f"{mask_shape}; expected [N, L], the same for both"
            )
        if len(features["input_ids"]) == 0:
            raise ValueError(f"sentence_features: column {index} has no texts; expected at least one")
    return columns


def document_columns(loss: Any, sentence_features: Iterable[dict[str, Tensor]]) -> Columns:
    """Check the columns of a contrastive batch, and pad its documents to a common length, see `_padded_to`."""
    query, *documents = _checked(sentence_features)
    if not documents:
        raise ValueError("sentence_features: got only the queries; expected them and at least one column of documents")
    batch_sizes = [features["input_ids"].shape[0] for features in (query, *documents)]
    if len(set(batch_sizes)) > 1:
        raise ValueError(
            f"sentence_features: columns of {batch_sizes} texts; a contrastive loss expects as many documents in each "
            "column as there are queries"
        )
    negatives = batch_sizes[0] * len(documents) * (world_size() if loss.gather_across_devices else 1) - 1
    if negatives == 0:
        _warn_once(
            loss,
            "a contrastive batch of one query and one document has no negatives: its loss is 0, and nothing is learned "
            "from it; use larger batches, or hard negatives",
        )
    length = max(features["input_ids"].shape[1] for features in documents)
    return _padded_to(loss, length, [query, *documents])


def for_pylate(loss: Any, columns: Columns) -> Columns:
    """Prepare the columns of a batch for PyLate's code, which supports fewer options and gathers only equal shapes.

    Raises ValueError if it does not support the options of the loss; on all ranks, if they gather and have different
    numbers of queries or of columns.
    """
    _check_pylates_way(loss)
    if not gathers(loss):
        return columns
    queries, *documents = [features["input_ids"] for features in columns]
    sizes = [len(queries), len(documents), max(ids.shape[1] for ids in documents)]
    batch_sizes, counts, lengths = (list(size) for size in zip(*gather_sizes(sizes, queries.device), strict=True))
    if len(set(batch_sizes)) > 1 or len(set(counts)) > 1:
        raise ValueError(
            f"gather_across_devices: {batch_sizes} queries and {counts} columns of documents on the ranks; with a "
            'score_metric, or a scorer other than "pylate_flash" and "auto", every rank needs the same numbers'
        )
    return _padded_to(loss, max(lengths), columns)


def _padded_to(loss: Any, length: int, columns: Columns) -> Columns:
    """Pad the documents of all columns to `length` tokens.

    PyLate's collator pads every document to ``document_length``, and its losses stack the columns. Columns tokenized
    separately (``pad=False``) are as long as their longest text: the masked padding added here changes no score.
    """
    query, *documents = columns
    if all(features["input_ids"].shape[1] == length for features in documents):
        return columns
    # The mask is 0 there, so any token would do; the padding token is what the encoder expects.
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


def candidate_columns(loss: Any, sentence_features: Iterable[dict[str, Tensor]], labels: Any) -> tuple[Columns, Tensor]:
    """Check the columns of a distillation batch and the teacher's scores; the scores are returned as floats."""
    columns = _checked(sentence_features)
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
    """Warn once per loss about a batch with no training signal; not in evaluations."""
    if torch.is_grad_enabled() and not getattr(loss, "_warned", False):
        loss._warned = True
        warnings.warn(message, stacklevel=4)
