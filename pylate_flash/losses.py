"""PyLate's losses, computed by the operations of this package.

``from pylate import losses`` becomes ``from pylate_flash import losses``. Each class subclasses PyLate's, takes its
constructor arguments and returns its values. The scorer is resolved on every call, first from the loss (``scorer``,
``masking``), then from the model's flags, so a loss follows flags that change later, also when the trainer has wrapped
the model for several GPUs. If the scorer is this package, scores, loss and gradients are one operation
(`maxsim_cross_entropy`, `maxsim_kl_divergence`); with any other scorer, or a ``score_metric``, PyLate's code computes
the loss.
"""

from __future__ import annotations

from .hosts.pylate import _needs  # noqa: F401

# isort: split
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed.nn  # PyLate's gather with gradients uses it without importing it
from pylate.losses.cached_contrastive import CachedContrastive as PyLateCachedContrastive
from pylate.losses.contrastive import Contrastive as PyLateContrastive
from pylate.losses.distillation import Distillation as PyLateDistillation
from pylate.models import ColBERT
from torch import Tensor

from .hosts.pylate.loss_inputs import (
    FlagScores,
    candidate_columns,
    document_columns,
    embed,
    for_pylate,
    masks_of,
    options_of,
    set_options,
)
from .training.contrast import Padded, cross_entropy, divergence, timed
from .training.grad_cache import autocast_in_force, cached_cross_entropy
from .training.mini_batches import Limits
from .training.options import check_flags, check_sizes, check_temperature

__all__ = ["Contrastive", "CachedContrastive", "Distillation"]


class Contrastive(PyLateContrastive):
    """PyLate's contrastive loss with in-batch negatives: cross entropy of each query's positive among all documents.

    It takes PyLate's arguments in PyLate's order and returns PyLate's value and gradients (exactly under
    ``masking="zero"``, and under the default wherever no masked token would have won the max).

    Parameters
    ----------
    model
        ColBERT model, PyLate's or ours.
    score_metric
        Function of queries [Nq, Lq, d], stacked documents [Nd, N, Ld, d], ``queries_mask`` and ``documents_mask`` that
        returns [Nq, Nd * N], query-major, such as ``scores.XTRScores(k)``. Default: the MaxSim scorer selected by the
        flags.
    score_mini_batch_size
        Number of queries scored at a time when PyLate's code scores (see ``scorer``). Default: the full batch. This
        package's operation bounds its memory itself and ignores this.
    size_average
        Average over the queries of the batch; otherwise sum.
    gather_across_devices
        Use the documents of all ranks as negatives. Ranks may have different batch sizes, numbers of document columns
        and padded lengths (with a ``score_metric`` or one of PyLate's scorers, different padded lengths only). A rank's
        loss is the sum over its own queries times the number of ranks, with ``size_average`` divided by the mean number
        of queries per rank: PyLate's convention. DistributedDataParallel averages the ranks' gradients, so the result
        is the gradient of a single process with the full batch: of its sum, or of its mean times the number of ranks.
    temperature
        Divides the scores: a number above 0, or a one-element parameter, which is then learned (train it with
        :class:`~pylate_flash.trainer.ColBERTTrainer`: sentence-transformers 5.3's trainer never clears its gradient).
        1.0 suits sums over the maxima of 32 query tokens, which differ by whole units where a single cosine differs by
        hundredths (and is divided by 0.02 to 0.05); more query tokens need a higher temperature.
    scorer
        ``"pylate_flash"``, ``"torch"``, ``"flash"``, ``"lik"`` or ``"auto"``; overrides the model's flag.
    masking
        ``"exclude"`` or ``"zero"`` (PyLate's torch rule); overrides the model's flag.
    fuse_projection
        Score from the encoder's hidden states and leave the model's Dense layers to `maxsim_from_hidden`, which stores
        no projected document embeddings beyond a small scratch buffer. Value and gradients are equal up to rounding.
        This helps in reranking and search, but not in training: a step keeps the encoder's activations, and the
        projected embeddings are small next to those. Ranks that gather exchange projected embeddings and do not fuse.
        Default: the model's flag; without one, False.
    gather
        How documents are gathered, with ``gather_across_devices``: ``"all_gather"`` copies all to every rank;
        ``"ring"`` passes blocks from rank to rank and scores each while the next is in flight, in the forward and again
        in the backward. The ring's memory does not grow with the number of ranks. Results are equal up to rounding.
    smooth
        Take a smooth maximum over the document tokens, ``(1 / smooth) log sum exp(smooth * similarity)``, with
        `soft_maxsim`: the gradient reaches every token, not only the best one. A number above 0, or a one-element
        parameter, which is then learned like a ``temperature``; 10 to 100 for unit embeddings. The projection is not
        fused then, and ranks cannot gather under ``masking="zero"``. Default: the hard maximum.

    Raises
    ------
    ValueError
        For an unknown ``scorer``, ``masking`` or ``gather``, or one given together with ``score_metric``; for a
        ``temperature`` or ``smooth`` that is not finite and above 0, and a ``score_mini_batch_size`` below 1; for a
        ``smooth`` together with ``score_metric``, another scorer, ``fuse_projection`` or ``gather="ring"``. If
        ``fuse_projection`` is set and the model is not an encoder followed by linear Dense layers, or another scorer is
        requested. In the forward, on all ranks, if they gather embeddings of different sizes.
    TypeError
        If an argument has another type, and in the forward for columns that are not tokenized.

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
        gather: str = "all_gather",
        smooth: float | Tensor | None = None,
    ) -> None:
        temperature = check_temperature(temperature)
        check_sizes(score_mini_batch_size=score_mini_batch_size)
        check_flags(size_average=size_average, gather_across_devices=gather_across_devices)
        super().__init__(
            model,
            score_metric if score_metric is not None else FlagScores(self),
            score_mini_batch_size,
            size_average,
            gather_across_devices,
            temperature,
        )
        set_options(self, score_metric, scorer, masking, fuse_projection, gather=gather, smooth=smooth)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Return the loss, a scalar: float32, or float64 if the model is.

        Parameters
        ----------
        sentence_features
            Tokenized columns: the queries, their positives, then any number of columns of hard negatives, each a
            dictionary with ``input_ids`` and ``attention_mask`` [N, L]. Document columns may differ in length.
        labels
            Unused; the trainer passes it.
        """
        columns = document_columns(self, sentence_features)
        options = options_of(self)
        if options is None:
            return super().forward(for_pylate(self, columns), labels)
        batch = embed(self, columns, options)
        with timed(self, batch.queries.device):
            return cross_entropy(options, batch)


class CachedContrastive(PyLateCachedContrastive):
    """PyLate's contrastive loss with cached gradients (GradCache): large batches in the memory of small ones.

    The embeddings are computed one mini-batch at a time: first without a graph, then, once the loss has computed the
    gradient of each embedding, again with a graph. The texts of a column are sorted by length, each mini-batch is
    padded to its own longest text (or a few tokens more), and tokens that are not scored (padding and skiplist tokens)
    are dropped.

    Value and gradient equal those of :class:`Contrastive` up to rounding. (PyLate's gradient is that of the sum over
    the queries even with ``size_average``: larger by the number of queries in the batch. While ``register()`` is on,
    ``pylate.losses.CachedContrastive`` keeps that. Adam is invariant to it, clipping by gradient norm is not.)

    PyLate's code computes the loss of a subclass that overrides `calculate_loss`, with the scorer of the flags.

    Under DistributedDataParallel, the ranks exchange gradients once per step, after the last mini-batch, and may have
    different numbers of mini-batches. If ranks exchange weights in every forward (FSDP, ZeRO 3), all need the same
    number: do not set ``mini_batch_num_tokens`` there, and use equal batch sizes.

    Parameters
    ----------
    model
        ColBERT model, PyLate's or ours.
    score_metric
        As in :class:`Contrastive`.
    mini_batch_size
        Maximum number of texts per forward pass of the encoder. Default: 32, as in PyLate, or with
        ``mini_batch_num_tokens`` no limit.
    score_mini_batch_size
        As in :class:`Contrastive`. Default: ``mini_batch_size``.
    size_average
        Average over the queries of the batch; otherwise sum.
    gather_across_devices
        As in :class:`Contrastive`.
    show_progress_bar
        Show a progress bar over the mini-batches.
    temperature
        As in :class:`Contrastive`.
    scorer, masking
        As in :class:`Contrastive`; they override the model's flags.
    fuse_projection
        As in :class:`Contrastive`. It costs memory: the hidden states and their gradients are stored between the two
        passes, with d_model elements per token instead of d (768 instead of 128, say).
    gather
        As in :class:`Contrastive`.
    mini_batch_num_tokens
        Maximum number of tokens per forward pass of the encoder, padding included: mini-batches of short texts hold
        more texts. A text with more tokens gets its own mini-batch. With ``mini_batch_size``, both limits apply.

    Raises
    ------
    ValueError
        As in :class:`Contrastive`, for a ``mini_batch_size`` or ``mini_batch_num_tokens`` below 1, and for
        ``mini_batch_num_tokens`` when PyLate's code scores, which keeps the padding of the batch.
    TypeError
        As in :class:`Contrastive`.
    """

    # Whether the gradient, like the value, is divided by the number of queries with `size_average`.
    _gradient_is_averaged = True

    def __init__(
        self,
        model: ColBERT,
        score_metric: Callable | None = None,
        mini_batch_size: int | None = None,
        score_mini_batch_size: int | None = None,
        size_average: bool = True,
        gather_across_devices: bool = False,
        show_progress_bar: bool = False,
        temperature: float = 1.0,
        *,
        scorer: str | None = None,
        masking: str | None = None,
        fuse_projection: bool | None = None,
        gather: str = "all_gather",
        mini_batch_num_tokens: int | None = None,
    ) -> None:
        temperature = check_temperature(temperature)
        check_sizes(mini_batch_size=mini_batch_size, score_mini_batch_size=score_mini_batch_size)
        check_flags(size_average=size_average, gather_across_devices=gather_across_devices)
        if mini_batch_size is None and mini_batch_num_tokens is None:
            mini_batch_size = 32
        super().__init__(
            model,
            score_metric if score_metric is not None else FlagScores(self),
            mini_batch_size,  # type: ignore[arg-type]
            score_mini_batch_size,
            size_average,
            gather_across_devices,
            show_progress_bar,
            temperature,
        )
        extra_options = {"gather": gather, "mini_batch_num_tokens": mini_batch_num_tokens}
        set_options(self, score_metric, scorer, masking, fuse_projection, **extra_options)
        self._autocast: dict[str, Any] = {"device_type": "cpu", "enabled": False}

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Return the loss, a scalar: float32, or float64 if the model is; columns as in :meth:`Contrastive.forward`."""
        columns = document_columns(self, sentence_features)
        options = options_of(self)
        self._autocast = autocast_in_force(columns[0]["input_ids"].device.type)
        calculate_loss = getattr(self.calculate_loss, "__func__", None)
        if options is None or calculate_loss is not PyLateCachedContrastive.calculate_loss:
            return super().forward(for_pylate(self, columns), labels)
        queries_mask, masks = masks_of(self, columns)
        if queries_mask is None:
            queries_mask = torch.ones_like(columns[0]["input_ids"], dtype=torch.bool)
        return cached_cross_entropy(
            self,
            options._replace(size_average=self.size_average and self._gradient_is_averaged),
            columns,
            [queries_mask, *masks],
            Limits(self.mini_batch_size, self.mini_batch_num_tokens),  # type: ignore[arg-type]
            autocast=self._autocast,
            divided=self.size_average and not self._gradient_is_averaged,
        )

    # Overrides of methods that PyLate's code calls when it computes the loss.

    def embed_minibatch(self, *args, **kwargs):
        """Embed a slice of a column under the autocast settings of the forward.

        The second pass runs in the backward, outside the caller's autocast: in another precision the embeddings would
        not match their cached gradients.
        """
        with torch.autocast(**self._autocast):
            return super().embed_minibatch(*args, **kwargs)

    def calculate_loss_and_cache_gradients(self, reps: list, masks: list) -> Tensor:
        """Call PyLate's method, whose gradients are those of the sum, and divide them by the batch size if averaged."""
        if not (self.size_average and self._gradient_is_averaged):
            return super().calculate_loss_and_cache_gradients(reps, masks)
        size = sum(len(embeddings) for embeddings in reps[0])
        temperature = self.temperature
        hook = None
        if isinstance(temperature, Tensor) and temperature.requires_grad:
            hook = temperature.register_hook(lambda gradient: gradient / size)
        try:
            loss = super().calculate_loss_and_cache_gradients(reps, masks)
        finally:
            if hook is not None:
                hook.remove()
        assert self.cache is not None
        self.cache = [[gradient / size for gradient in column] for column in self.cache]
        return loss


class RegisteredCachedContrastive(CachedContrastive):
    """Replaces ``pylate.losses.CachedContrastive`` while registered; its gradient is that of the sum, as in PyLate."""

    _gradient_is_averaged = False


class Distillation(PyLateDistillation):
    """PyLate's distillation: KL divergence between the teacher's and the model's scores of each query's candidates.

    Parameters
    ----------
    model
        ColBERT model, PyLate's or ours.
    score_metric
        Function of queries [Nq, Lq, d], candidates [Nq, K, Ld, d], ``queries_mask`` and ``documents_mask`` that returns
        [Nq, K], such as ``scores.XTRKDScores(k)``. Default: the MaxSim scorer selected by the flags.
    size_average
        Average over the queries of the batch; otherwise sum.
    normalize_scores
        Rescale the model's scores of each query to [0, 1] first.
    scorer, masking, fuse_projection, smooth
        As in :class:`Contrastive`; the first three override the model's flags.

    Raises
    ------
    ValueError
        For an unknown ``scorer`` or ``masking``, or one given together with ``score_metric``, and as in
        :class:`Contrastive` for ``fuse_projection``.
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
        smooth: float | Tensor | None = None,
    ) -> None:
        check_flags(size_average=size_average, normalize_scores=normalize_scores)
        super().__init__(
            model,
            score_metric if score_metric is not None else FlagScores(self, own_candidates=True),
            size_average,
            normalize_scores,
        )
        set_options(self, score_metric, scorer, masking, fuse_projection, smooth=smooth)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> Tensor:
        """Return the loss, a scalar: float32, or float64 if the model is.

        Parameters
        ----------
        sentence_features
            Two tokenized columns: Nq queries, and their Nq * K candidates, grouped by query.
        labels
            The teacher's scores, [Nq, K].
        """
        columns, labels = candidate_columns(self, sentence_features, labels)
        options = options_of(self)
        if options is None:
            return super().forward(for_pylate(self, columns), labels)
        batch = embed(self, columns, options)
        # Each query is scored against its own candidates only.
        documents, mask = (values.unflatten(0, labels.shape) for values in batch.columns[0][:2])
        with timed(self, batch.queries.device):
            return divergence(options, batch._replace(columns=[Padded(documents, mask)]), labels)
