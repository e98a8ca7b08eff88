"""PyLate's losses, scored by the scorer that the model names.

``from pylate import losses`` becomes ``from pylate_flash import losses``. Each class is PyLate's own, with its
constructor arguments and its forward: what changes is the function that turns embeddings into scores. It is looked up
at every call, first in the loss (``scorer``, ``masking``), then in the model's flags, so that a loss follows a model
whose flag is changed later, and a model that the trainer has meanwhile wrapped for several GPUs.
"""

from __future__ import annotations

from . import _needs_pylate  # noqa: F401

# isort: split
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed.nn  # PyLate's gather with gradients uses it without importing it
import torch.nn.functional as F
import tqdm
from pylate.losses.cached_contrastive import CachedContrastive as PyLateCachedContrastive
from pylate.losses.cached_contrastive import RandContext
from pylate.losses.contrastive import Contrastive as PyLateContrastive
from pylate.losses.contrastive import extract_skiplist_mask
from pylate.losses.distillation import Distillation as PyLateDistillation
from pylate.models import ColBERT
from torch import Tensor

from .loss_arguments import (
    candidate_columns,
    check_fusion,
    check_size,
    check_temperature,
    document_columns,
    set_fusion,
    set_scoring,
)
from .ops import maxsim_from_hidden
from .projection import BIAS, WEIGHT, dense_layers, fold_dense, hidden_states, unwrapped
from .scores import ColBERTScores, colbert_kd_scores, scorer_of

__all__ = ["Contrastive", "CachedContrastive", "Distillation"]


class _FlagScores:
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
        scorer, masking = scorer_of(self.loss.model)
        scorer, masking = self.loss.scorer or scorer, self.loss.masking or masking
        # "auto" asks for nothing by name, so PYLATE_SCORES_BACKEND and use_scorer() still have their say.
        backend = None if scorer == "auto" else scorer
        if self.own_candidates:
            return colbert_kd_scores(
                queries_embeddings, documents_embeddings, queries_mask, documents_mask, backend, masking=masking
            )
        scores = ColBERTScores(backend, masking)
        return scores(queries_embeddings, documents_embeddings, queries_mask, documents_mask)


def _fuses(loss: Any) -> bool:
    """Whether the loss scores from hidden states: as it was told, or else as the model says."""
    fuse = loss.fuse_projection
    if fuse is None:
        fuse = getattr(unwrapped(loss.model), "fuse_projection", False)
    if fuse:
        # The flags may have been set since.
        check_fusion(loss)
    return bool(fuse)


def _fused_scores(loss: Any, sentence_features: list[dict[str, Tensor]], own_candidates: bool = False) -> Tensor:
    """Scores of tokenized columns from hidden states, as `_scores_of_states`."""
    with hidden_states(loss.model):
        outputs = [loss.model(features) for features in sentence_features]
    states = [output["token_embeddings"] for output in outputs]
    return _scores_of_states(
        loss, sentence_features, states, outputs[-1][WEIGHT], outputs[-1].get(BIAS), own_candidates
    )


def _scores_of_states(
    loss: Any,
    sentence_features: list[dict[str, Tensor]],
    states: list[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    own_candidates: bool = False,
) -> Tensor:
    """Scores [Nq, Nd * N], query-major as PyLate's, or with `own_candidates` [Nq, K].

    `states` are each column's hidden states [texts, L, d_model], those of the queries first.
    """
    model = unwrapped(loss.model)
    masks = extract_skiplist_mask(sentence_features=sentence_features, skiplist=model.skiplist)
    queries, *columns = states
    # Column by column: stacked, the hidden states would be copied.
    scores = [
        maxsim_from_hidden(
            queries,
            column.unflatten(0, (len(queries), -1)) if own_candidates else column,
            weight,
            bias,
            queries_mask=None if model.do_query_expansion else masks[0],
            documents_mask=mask.unflatten(0, (len(queries), -1)) if own_candidates else mask,
            queries_weight=weight,
            queries_bias=bias,
            masking=loss.masking or scorer_of(loss.model)[1],
        )
        for column, mask in zip(columns, masks[1:], strict=True)
    ]
    return scores[0] if len(scores) == 1 else torch.stack(scores, dim=-1).flatten(1)


def _cross_entropy(loss: Any, scores: Tensor, reduction: str) -> Tensor:
    """Cross entropy of query-major scores [Nq, Nq * N]: the positive of query i is the first document of its group."""
    positives = torch.arange(len(scores), device=scores.device) * (scores.shape[1] // len(scores))
    return F.cross_entropy(scores / loss.temperature, positives, reduction=reduction)


class Contrastive(PyLateContrastive):
    """PyLate's contrastive loss with in-batch negatives: cross entropy of each query's positive among all documents.

    It takes PyLate's arguments in PyLate's order and gives PyLate's value and gradients (exactly under
    ``masking="zero"``, and under the default wherever no masked token would have won the max).

    Parameters
    ----------
    model
        ColBERT model, PyLate's or ours.
    score_metric
        Function of queries [Nq, Lq, d], stacked documents [Nd, N, Ld, d], ``queries_mask`` and ``documents_mask`` that
        returns [Nq, Nd * N], query-major. Default: the MaxSim scorer that the flags name.
    score_mini_batch_size
        Score so many queries at a time. Default: the whole batch.
    size_average
        Average over the queries of the batch; otherwise sum.
    gather_across_devices
        Take the documents of all ranks as negatives. Every rank needs the same batch size and the same padded length.
    temperature
        Divides the scores: a number above 0, or a parameter of one element, which is then learned. 1.0 suits sums of
        the maxima of 32 query tokens, which differ by whole units where a single cosine differs by hundredths (and is
        divided by 0.02 to 0.05); more query tokens want a higher one.
    scorer
        ``"pylate_flash"``, ``"torch"``, ``"flash"``, ``"lik"`` or ``"auto"``; overrides the model's flag.
    masking
        ``"exclude"`` or ``"zero"`` (PyLate's torch rule); overrides the model's flag.
    fuse_projection
        Score from the encoder's hidden states, and leave the model's Dense layers to `maxsim_from_hidden`, which stores
        no projected document embeddings beyond a small scratch. Value and gradients are the same but for rounding, and
        ``score_mini_batch_size`` has no effect. Default: as the model's flag says; without one, False.

    Raises
    ------
    ValueError
        For an unknown ``scorer`` or ``masking``, or one given together with ``score_metric``; for a ``temperature``
        that is not finite and above 0, and a ``score_mini_batch_size`` below 1. If the projection is to be fused, and
        the model is not an encoder followed by linear Dense layers, another scorer is asked for, or
        ``gather_across_devices`` is set.
    TypeError
        If ``temperature``, ``score_mini_batch_size`` or ``fuse_projection`` is of none of these types.

    Examples
    --------
    >>> from pylate_flash import losses, models  # doctest: +SKIP
    >>> model = models.ColBERT("bert-base-uncased", scorer="pylate_flash")  # doctest: +SKIP
    >>> loss = losses.Contrastive(model)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: ColBERT,
        score_metric: Callable | None = None,
        score_mini_batch_size: int | None = None,
        size_average: bool = True,
        gather_across_devices: bool = False,
        temperature: float = 1.0,
        *,
        scorer: str | None = None,
        masking: str | None = None,
        fuse_projection: bool | None = None,
    ) -> None:
        check_temperature(temperature)
        if score_mini_batch_size is not None:
            check_size("score_mini_batch_size", score_mini_batch_size)
        super().__init__(
            model,
            score_metric if score_metric is not None else _FlagScores(self),
            score_mini_batch_size,
            size_average,
            gather_across_devices,
            temperature,
        )
        set_scoring(self, score_metric, scorer, masking)
        set_fusion(self, score_metric, fuse_projection)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Return the loss, a float32 scalar.

        Parameters
        ----------
        sentence_features
            Tokenized columns: the queries, their positives, then any number of columns of hard negatives, each a
            dictionary with ``input_ids`` and ``attention_mask`` [N, L]. Document columns may differ in length.
        labels
            Not used; the trainer passes it.
        """
        columns = document_columns(self, sentence_features)
        if not _fuses(self):
            return super().forward(columns, labels)
        scores = _fused_scores(self, columns)
        return _cross_entropy(self, scores, "mean" if self.size_average else "sum")


class CachedContrastive(PyLateCachedContrastive):
    """PyLate's contrastive loss with cached gradients (GradCache): large batches in the memory of small ones.

    The embeddings are computed ``mini_batch_size`` texts at a time, first without a graph, then, after the scores have
    given each embedding its gradient, a second time with one.

    The value is that of :class:`Contrastive`. The gradient is PyLate's, which is that of the sum over the queries also
    with ``size_average``: as many times :class:`Contrastive`'s as the batch has queries. Adam does not notice, a limit
    on the gradient's norm does.

    Parameters
    ----------
    model
        ColBERT model, PyLate's or ours.
    score_metric
        As in :class:`Contrastive`.
    mini_batch_size
        Texts per forward pass of the encoder.
    score_mini_batch_size
        Score so many queries at a time. Default: ``mini_batch_size``.
    size_average
        Average over the queries of the batch; otherwise sum.
    gather_across_devices
        Take the documents of all ranks as negatives. Every rank needs the same batch size and the same padded length.
    show_progress_bar
        Show a bar over the mini-batches.
    temperature
        As in :class:`Contrastive`.
    scorer, masking
        As in :class:`Contrastive`; they override the model's flags.
    fuse_projection
        As in :class:`Contrastive`. It costs memory: what is kept between the two passes are then hidden states and
        their gradients, each d_model wide where embeddings are d wide (768 and 128, say). Under autocast they are kept
        in its type, where embeddings are kept in float32.

    Raises
    ------
    ValueError
        As in :class:`Contrastive`, and for a ``mini_batch_size`` below 1.
    TypeError
        As in :class:`Contrastive`.
    """

    def __init__(
        self,
        model: ColBERT,
        score_metric: Callable | None = None,
        mini_batch_size: int = 32,
        score_mini_batch_size: int | None = None,
        size_average: bool = True,
        gather_across_devices: bool = False,
        show_progress_bar: bool = False,
        temperature: float = 1.0,
        *,
        scorer: str | None = None,
        masking: str | None = None,
        fuse_projection: bool | None = None,
    ) -> None:
        check_temperature(temperature)
        check_size("mini_batch_size", mini_batch_size)
        if score_mini_batch_size is not None:
            check_size("score_mini_batch_size", score_mini_batch_size)
        super().__init__(
            model,
            score_metric if score_metric is not None else _FlagScores(self),
            mini_batch_size,
            score_mini_batch_size,
            size_average,
            gather_across_devices,
            show_progress_bar,
            temperature,
        )
        set_scoring(self, score_metric, scorer, masking)
        set_fusion(self, score_metric, fuse_projection)
        self._autocast: dict[str, Any] = {"device_type": "cpu", "enabled": False}

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Return the loss, a float32 scalar; columns as in :meth:`Contrastive.forward`."""
        sentence_features = document_columns(self, sentence_features)
        device = sentence_features[0]["input_ids"].device.type
        self._autocast = {
            "device_type": device,
            "dtype": torch.get_autocast_dtype(device),
            "enabled": torch.is_autocast_enabled(device),
            # It would hold weights that were cast in the first pass, and so lead no gradient to the parameters, for a
            # second one that runs in the caller's autocast too.
            "cache_enabled": False,
        }
        if not _fuses(self):
            return super().forward(sentence_features, labels)
        return self._fused(sentence_features)

    def embed_minibatch(self, *args, **kwargs):
        """Embed a slice of a column, under the autocast of the forward.

        The second pass runs during the backward, which is outside the caller's autocast: in another precision the
        embeddings would not match their cached gradients.
        """
        with torch.autocast(**self._autocast):
            return super().embed_minibatch(*args, **kwargs)

    def _fused(self, sentence_features: list[dict[str, Tensor]]) -> Tensor:
        """The loss from hidden states, whose gradients, and those of the projection, are computed here and now."""
        columns = [_Column(features, self.mini_batch_size) for features in sentence_features]
        with torch.no_grad(), hidden_states(self.model):
            states = [self._cached_states(column) for column in columns]
            projection = [tensor for tensor in fold_dense(dense_layers(self.model)) if tensor is not None]
        with_grad = torch.is_grad_enabled()
        leaves = [tensor.detach().requires_grad_(with_grad) for tensor in (*states, *projection)]
        states, (weight, *bias) = leaves[: len(columns)], leaves[len(columns) :]
        scores = _scores_of_states(self, sentence_features, states, weight, bias[0] if bias else None)
        loss = _cross_entropy(self, scores, "sum")
        value = loss.detach() / (len(scores) if self.size_average else 1)
        if with_grad:
            learns_temperature = isinstance(self.temperature, Tensor) and self.temperature.requires_grad
            gradients = list(torch.autograd.grad(loss, leaves, retain_graph=learns_temperature))
            if learns_temperature:
                # Here and now, as without fusion.
                torch.autograd.backward(loss, inputs=self.temperature)  # type: ignore[arg-type]
            value.requires_grad_().register_hook(functools.partial(self._pass_on, columns, gradients))
        return value

    def _cached_states(self, column: _Column) -> Tensor:
        """Hidden states [texts, L, d_model] of a column; keeps the random state of each mini-batch."""
        states = torch.empty(0)
        for rows, features in column.mini_batches(self.show_progress_bar):
            column.random_states.append(RandContext(*features.values()))
            with torch.autocast(**self._autocast):
                output = self.model(features)["token_embeddings"]
            if rows.start == 0:
                # What they will be cast to anyway, which would keep them twice.
                cast = self._autocast["enabled"] and output.dtype != torch.float64
                dtype = self._autocast["dtype"] if cast else output.dtype
                states = output.new_empty(column.size, *output.shape[1:], dtype=dtype)
            states[rows] = output
        return states

    def _pass_on(self, columns: list[_Column], gradients: list[Tensor], grad_loss: Tensor) -> None:
        """Encode again, with a graph, and pass the gradients of the hidden states and of the projection on into it."""
        of_states, of_projection = gradients[: len(columns)], gradients[len(columns) :]
        with torch.enable_grad(), hidden_states(self.model):
            for column, gradient in zip(columns, of_states, strict=True):
                mini_batches = column.mini_batches(self.show_progress_bar)
                for (rows, features), random_state in zip(mini_batches, column.random_states, strict=True):
                    with random_state, torch.autocast(**self._autocast):
                        output = self.model(features)
                    tensors = [output[name] for name in ("token_embeddings", WEIGHT, BIAS) if name in output]
                    reached = {
                        tensor: cached.to(tensor.dtype) * grad_loss
                        for tensor, cached in zip(tensors, (gradient[rows], *of_projection), strict=True)
                        if tensor.requires_grad
                    }
                    torch.autograd.backward(list(reached), list(reached.values()))
                    # The first mini-batch has taken the projection's. DDP waits for some of it with each of the others.
                    of_projection = [torch.zeros_like(cached) for cached in of_projection]


class _Column:
    """A tokenized column of a batch, in mini-batches, and the random state in which each was encoded first."""

    def __init__(self, features: dict[str, Tensor], mini_batch_size: int) -> None:
        self.features, self.mini_batch_size = features, mini_batch_size
        self.size = len(features["input_ids"])
        self.random_states: list[RandContext] = []

    def mini_batches(self, show_progress: bool) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """The rows of each mini-batch, and its features."""
        starts = range(0, self.size, self.mini_batch_size)
        for start in tqdm.tqdm(starts, desc="Embed mini-batches", disable=not show_progress):
            rows = slice(start, start + self.mini_batch_size)
            yield rows, {name: value[rows] for name, value in self.features.items()}


class Distillation(PyLateDistillation):
    """PyLate's distillation: KL divergence between a teacher's scores of each query's candidates and the model's.

    Parameters
    ----------
    model
        ColBERT model, PyLate's or ours.
    score_metric
        Function of queries [Nq, Lq, d], candidates [Nq, K, Ld, d], ``queries_mask`` and ``documents_mask`` that returns
        [Nq, K]. Default: the MaxSim scorer that the flags name.
    size_average
        Average over the queries of the batch; otherwise sum.
    normalize_scores
        Rescale the model's scores of each query to [0, 1] first.
    scorer, masking, fuse_projection
        As in :class:`Contrastive`; they override the model's flags.

    Raises
    ------
    ValueError
        For an unknown ``scorer`` or ``masking``, or one given together with ``score_metric``, and as in
        :class:`Contrastive` if the projection is to be fused.
    """

    def __init__(
        self,
        model: ColBERT,
        score_metric: Callable | None = None,
        size_average: bool = True,
        normalize_scores: bool = True,
        *,
        scorer: str | None = None,
        masking: str | None = None,
        fuse_projection: bool | None = None,
    ) -> None:
        super().__init__(
            model,
            score_metric if score_metric is not None else _FlagScores(self, own_candidates=True),
            size_average,
            normalize_scores,
        )
        set_scoring(self, score_metric, scorer, masking)
        set_fusion(self, score_metric, fuse_projection)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> Tensor:
        """Return the loss, a float32 scalar.

        Parameters
        ----------
        sentence_features
            Two tokenized columns: Nq queries, and their candidates one query after the other, Nq * K texts.
        labels
            The teacher's scores, [Nq, K].
        """
        sentence_features, labels = candidate_columns(self, sentence_features, labels)
        if not _fuses(self):
            return super().forward(sentence_features, labels)
        scores = _fused_scores(self, sentence_features, own_candidates=True)
        if self.normalize_scores:
            least, most = scores.min(dim=1, keepdim=True).values, scores.max(dim=1, keepdim=True).values
            scores = (scores - least) / (most - least + 1e-8)
        return self.loss_function(F.log_softmax(scores, dim=-1), F.log_softmax(labels, dim=-1))
