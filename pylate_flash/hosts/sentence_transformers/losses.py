"""sentence-transformers' multi-vector losses, computed by the operations of this package.

    from pylate_flash.hosts.sentence_transformers import losses

    loss = losses.CachedMultiVectorMultipleNegativesRankingLoss(model, mini_batch_num_tokens=16384)

Each class subclasses the host's, with its arguments, values and gradients, and takes a few more arguments. Scores, loss
and gradients are one operation (`maxsim_cross_entropy`, `maxsim_kl_divergence`, `maxsim_margin_mse`), whether the host
is registered or not. With a `similarity_fct` that is not MaxSim, the host's code computes the loss.
"""

from __future__ import annotations

from . import _needs  # noqa: F401

# isort: split
from collections.abc import Callable, Iterable
from typing import Any

import sentence_transformers.multi_vector_encoder.losses as host
import sentence_transformers.multi_vector_encoder.losses.cached_multiple_negatives_ranking as cached_host
import torch
from sentence_transformers.multi_vector_encoder.losses.distill_kl_div import (
    check_teacher_targets,
    similarity_fct_name,
    stack_padded_token_embeddings,
)
from sentence_transformers.multi_vector_encoder.model import MultiVectorEncoder
from torch import Tensor

from ...ops.checks import check_choice
from ...training.contrast import Batch, Padded, cross_entropy, divergence, joined, margin_mse
from ...training.distributed import GATHERINGS
from ...training.grad_cache import autocast_in_force, cached_cross_entropy
from ...training.mini_batches import Limits, scored_tokens
from ...training.options import LossOptions, check_flags, check_margin, check_sizes, check_temperature
from .. import SENTENCE_TRANSFORMERS
from .loss_inputs import (
    Columns,
    asked_for,
    check_asked,
    checked_exclude,
    columns_of,
    duplicates,
    embed,
    options_of,
    reduction_of,
    set_fusion,
    size_of,
    teacher_margins,
    teacher_scores,
)
from .scoring import EMPTY_DOCUMENT_SCORE

__all__ = [
    "CachedMultiVectorMultipleNegativesRankingLoss",
    "MultiVectorDistillKLDivLoss",
    "MultiVectorMarginMSELoss",
    "MultiVectorMultipleNegativesRankingLoss",
    "duplicates",
]

_CACHED = "sentence_transformers.multi_vector_encoder.losses.cached_multiple_negatives_ranking"
_SIZES = ("mini_batch_size", "mini_batch_num_tokens", "score_mini_batch_size")
_FLAGS = ("gather_across_devices", "size_average", "normalize_scores")
# Those of one side may be None.
_OVERRIDES = ("student_temperature", "teacher_temperature")
_TEMPERATURES = ("scale", "temperature", *_OVERRIDES)


class _Fusing:
    """Mixin of all losses that checks and stores the arguments beyond the host's."""

    def __init__(self, model: MultiVectorEncoder, *, fuse_projection: bool = False, **arguments: Any) -> None:
        if not callable(model):
            raise TypeError(f"model: {type(model).__name__}; expected a MultiVectorEncoder")
        scores = arguments.get("similarity_fct")
        if scores is not None and not callable(scores):
            raise TypeError(f"similarity_fct: {type(scores).__name__}; expected a function of embeddings, or None")
        check_sizes(**{name: size for name, size in arguments.items() if name in _SIZES})
        check_flags(**{name: flag for name, flag in arguments.items() if name in _FLAGS})
        for name, value in arguments.items():
            if name in _TEMPERATURES and (value is not None or name not in _OVERRIDES):
                arguments[name] = check_temperature(value, name)
        super().__init__(model, **arguments)  # type: ignore[call-arg]
        set_fusion(self, fuse_projection)


class _Contrast(_Fusing):
    """Mixin of both contrastive losses, which have more arguments."""

    def __init__(
        self,
        model: MultiVectorEncoder,
        *,
        margin: float | None = None,
        symmetric: bool = False,
        exclude: Callable[[Columns], Tensor] | None = None,
        gather: str = "all_gather",
        **arguments: Any,
    ) -> None:
        check_margin(margin)
        super().__init__(model, **arguments)
        loss: Any = self
        check_choice("gather", gather, GATHERINGS)
        check_flags(symmetric=symmetric)
        if exclude is not None and not callable(exclude):
            raise TypeError(f"exclude: {type(exclude).__name__}; expected a function of the columns, or None")
        options = {"margin": margin, "symmetric": symmetric, "exclude": exclude}
        check_asked(loss, {**options, "gather": gather if gather != "all_gather" else None})
        names = asked_for(options)
        if loss.gather_across_devices and {"symmetric", "exclude"} & set(names):
            raise ValueError(
                f"gather_across_devices: given together with {', '.join(names)}; a rank has neither the "
                "queries nor the texts of the other ranks"
            )
        if loss.gather_across_devices and gather == "ring" and margin is not None:
            raise ValueError(
                'margin: given together with gather="ring", which scores documents only once; use "all_gather"'
            )
        loss.margin, loss.symmetric, loss.exclude, loss.gather = margin, symmetric, exclude, gather

    def get_config_dict(self) -> dict[str, Any]:
        """Return the arguments for the model card, with a learned scale as its current value."""
        loss: Any = self
        config = {"margin": loss.margin, "symmetric": loss.symmetric, "fuse_projection": loss.fuse_projection}
        if loss.exclude is not None:
            config["exclude"] = similarity_fct_name(loss.exclude)
        if loss.gather != "all_gather":
            config["gather"] = loss.gather
        if isinstance(loss.scale, Tensor):
            config["scale"] = loss.scale.item()
        host_config: dict[str, Any] = super().get_config_dict()  # type: ignore[misc]
        return host_config | {name: config[name] for name in asked_for(config)}


class MultiVectorMultipleNegativesRankingLoss(_Contrast, host.MultiVectorMultipleNegativesRankingLoss):
    """The host's contrastive loss with in-batch negatives: cross entropy of each query's positive among all documents.

    Parameters
    ----------
    model
        `MultiVectorEncoder`, the host's or ours.
    margin
        Exclude documents that score above the positive's score minus `margin` from the denominator, as
        `maxsim_cross_entropy` does. None: exclude none. Not with the ring.
    symmetric
        Average this loss and that of the opposite direction. Not with gathered documents.
    exclude
        A function of the tokenized columns that returns [Nq, Nq * columns of documents], bool: True excludes a document
        from the query's denominator; the documents of the first column come first. `duplicates` is one. Not with
        gathered documents.
    gather
        ``"all_gather"``: all documents on every rank. ``"ring"``: blocks are passed from rank to rank, each scored
        while the next is in flight, so that memory does not grow with the number of ranks.
    fuse_projection
        Score from the encoder's hidden states, and leave the model's Dense and Normalize modules to
        `maxsim_from_hidden`. Values and gradients are equal up to rounding. This does not help in training, where a
        step keeps the encoder's activations. Ranks that gather do not fuse.
    **arguments
        Those of the host's class, with its defaults. A ``scale`` is a number above 0, or a one-element parameter, which
        is then learned. The ``similarity_fct`` is `colbert_scores` (the default) or `mean_colbert_scores`, the host's
        or ours; a document without tokens scores -1e9 under both. With another function the host's code computes the
        loss: it supports none of the arguments above, and scores ``score_mini_batch_size`` queries at a time; the
        operation bounds its memory itself and ignores that. Ranks that ``gather_across_devices`` may have different
        batch sizes, numbers of columns and padded lengths. A rank's loss is the sum over its own queries divided by the
        mean number of queries per rank. With equal numbers, that is the host's loss; averaging the gradients, as
        DistributedDataParallel does, gives the gradient of a single process with the full batch.

    Raises
    ------
    ValueError
        For arguments that are out of range or incompatible, and for ``fuse_projection`` if the model is not a
        Transformer followed by linear Dense layers and at most one Normalize, besides masks. In the forward, for
        columns of different numbers of texts, and on all ranks if they gather embeddings of different sizes.
    TypeError
        For arguments of another type.

    Examples
    --------
    >>> from sentence_transformers import MultiVectorEncoder  # doctest: +SKIP
    >>> model = MultiVectorEncoder("answerdotai/ModernBERT-base")  # doctest: +SKIP
    >>> loss = MultiVectorMultipleNegativesRankingLoss(model, exclude=duplicates)  # doctest: +SKIP
    """

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """Return the loss, a scalar: float32, or float64 if the model is.

        Parameters
        ----------
        sentence_features
            Tokenized columns: the queries, their positives, then any number of columns of hard negatives. They may
            differ in length.
        labels
            Unused; the trainer passes it.
        """
        columns = columns_of(sentence_features, least=2)
        options = options_of(self)
        if options is None:
            return super().forward(columns, labels)
        excluded = checked_exclude(self.exclude, columns)
        return cross_entropy(options, embed(self, columns, options), exclude=excluded)


class CachedMultiVectorMultipleNegativesRankingLoss(_Contrast, host.CachedMultiVectorMultipleNegativesRankingLoss):
    """The host's contrastive loss with cached gradients (GradCache): large batches in the memory of small ones.

    Texts of similar length are encoded together, padded to the longest of them, and only tokens that are scored are
    kept. Value and gradient equal those of :class:`MultiVectorMultipleNegativesRankingLoss` up to rounding. Under
    DistributedDataParallel, the ranks exchange gradients once per step, and may have different numbers of mini-batches.

    Inputs that cannot be sorted (images, texts flattened for flash attention), those of a model with modules that
    change the tokens, such as pooling, and all inputs where a wrapper (`MatryoshkaLoss`) or a subclass has replaced
    `calculate_loss` are encoded by the host's code in the order of the batch; `mini_batch_num_tokens` counts no padding
    then.

    Parameters
    ----------
    model, margin, symmetric, exclude, gather
        As in :class:`MultiVectorMultipleNegativesRankingLoss`.
    fuse_projection
        Likewise. It costs memory here: the hidden states and their gradients are stored between the two passes, with
        d_model elements per token instead of d.
    **arguments
        Those of the host's class, with its defaults, as in :class:`MultiVectorMultipleNegativesRankingLoss`.
        ``mini_batch_num_tokens`` limits a forward pass of the model to this many tokens, padding included, instead of
        ``mini_batch_size`` texts: mini-batches of short texts hold more texts. A text with more tokens gets its own
        mini-batch.

    Raises
    ------
    ValueError, TypeError
        As in :class:`MultiVectorMultipleNegativesRankingLoss`; in the forward, ValueError also for ``fuse_projection``
        with texts that cannot be sorted.
    """

    def __init__(self, model: MultiVectorEncoder, **arguments: Any) -> None:
        if arguments.get("mini_batch_size", 32) is None:
            raise TypeError("mini_batch_size: NoneType; expected an integer")
        super().__init__(model, **arguments)
        # Mask of excluded documents while the host's code runs, as it passes only embeddings to `calculate_loss`.
        self._out: Tensor | None = None

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """Return the loss; arguments as in :meth:`MultiVectorMultipleNegativesRankingLoss.forward`."""
        columns = columns_of(sentence_features, least=2)
        options = options_of(self)
        if options is None:
            return super().forward(columns, labels)
        excluded = checked_exclude(self.exclude, columns)
        keep_masks = [mask for features in columns if (mask := scored_tokens(self.model, features)) is not None]
        # A wrapper, such as MatryoshkaLoss, or a subclass replaces the method that the host's code calls.
        calculate_loss = getattr(self.calculate_loss, "__func__", None)
        replaced = calculate_loss is not CachedMultiVectorMultipleNegativesRankingLoss.calculate_loss
        if len(keep_masks) == len(columns) and not replaced:
            tokens = self.mini_batch_num_tokens
            tasks = [{"task": features.pop("task")} for features in columns]
            return cached_cross_entropy(
                self,
                options,
                columns,
                keep_masks,
                Limits(self.mini_batch_size if tokens is None else None, tokens),
                autocast=autocast_in_force(keep_masks[0].device.type),
                exclude=excluded,
                arguments=tasks,
            )
        if options.fuse_projection:
            raise ValueError(
                "fuse_projection: needs padded texts, and a model whose modules leave their tokens as they are; got "
                f"columns with {[sorted(features) for features in columns]}"
                if not replaced
                else "fuse_projection: set on a loss whose calculate_loss a wrapper or a subclass has replaced, which "
                "needs embeddings"
            )
        self._out = excluded
        try:
            return super().forward(columns, labels)
        finally:
            self._out = None

    def calculate_loss(
        self, reps: list[list[Tensor]], masks_chunks: list[list[Tensor]], *, with_backward: bool = False
    ) -> Tensor:
        """Compute the loss of embeddings that the host's code has encoded in mini-batches; overrides its method."""
        options = options_of(self)
        if options is None:
            return super().calculate_loss(reps, masks_chunks, with_backward=with_backward)
        return _loss_of_columns(options, _columns(reps, masks_chunks), None, self._out, with_backward)


class MultiVectorDistillKLDivLoss(_Fusing, host.MultiVectorDistillKLDivLoss):
    """The host's distillation: KL divergence between the teacher's and the model's scores of each query's candidates.

    Parameters
    ----------
    model, fuse_projection
        As in :class:`MultiVectorMultipleNegativesRankingLoss`.
    **arguments
        Those of the host's class, with its defaults. The ``similarity_fct`` is `colbert_kd_scores` (the default) or
        `mean_colbert_kd_scores`, the host's or ours. With another function the host's code computes the loss, without
        fusion. A temperature is a number above 0, or a one-element parameter, which is then learned; with a parameter
        as the teacher's, only the scores are fused. The loss is multiplied by the square of the model's temperature.

    Raises
    ------
    ValueError
        For a temperature that is not finite and above 0, as in :class:`MultiVectorMultipleNegativesRankingLoss` for the
        other arguments, and in the forward for labels that do not fit the columns, or hold NaN in the first batch.
    TypeError
        For arguments of another type.
    """

    _checked_teacher_scale: bool

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor) -> Tensor:
        """Return the loss, a scalar: float32, or float64 if the model is.

        Parameters
        ----------
        sentence_features
            Tokenized columns: N queries, then at least two columns of their candidates.
        labels
            The teacher's scores [N, candidates].
        """
        columns = columns_of(sentence_features, least=3)
        options = options_of(self)
        if options is None:
            return super().forward(columns, labels)
        teacher = teacher_scores(labels, size_of(columns[0]), len(columns) - 1)
        if not self._checked_teacher_scale:
            self._checked_teacher_scale = True
            expected = (teacher / self.teacher_temperature).softmax(dim=-1)
            check_teacher_targets(expected, teacher, self.teacher_temperature, type(self).__name__)
        loss = divergence(options, _of_candidates(embed(self, columns, options)), teacher)
        return loss * self.student_temperature**2


class MultiVectorMarginMSELoss(_Fusing, host.MultiVectorMarginMSELoss):
    """The host's margin MSE: squared differences from the teacher's margins between each positive and its negatives.

    Parameters
    ----------
    model, fuse_projection
        As in :class:`MultiVectorMultipleNegativesRankingLoss`.
    **arguments
        Those of the host's class, with its defaults. The ``similarity_fct`` is `colbert_scores_pairwise` (the default)
        or `mean_colbert_scores_pairwise`, the host's or ours. With another function the host's code computes the loss,
        without fusion.

    Raises
    ------
    ValueError, TypeError
        As in :class:`MultiVectorMultipleNegativesRankingLoss`; ValueError in the forward for labels that do not fit the
        columns.
    """

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor) -> Tensor:
        """Return the loss, a scalar: float32, or float64 if the model is.

        Parameters
        ----------
        sentence_features
            Tokenized columns: N queries, their positives, then at least one column of negatives.
        labels
            The teacher's scores [N, 1 + negatives], or its margins [N, negatives], or [N] for one negative.
        """
        columns = columns_of(sentence_features, least=3)
        options = options_of(self)
        if options is None:
            return super().forward(columns, labels)
        teacher = teacher_margins(labels, size_of(columns[0]), len(columns) - 2)
        return margin_mse(options, _of_candidates(embed(self, columns, options)), teacher)


def _of_candidates(batch: Batch) -> Batch:
    """Stack the document columns of a batch to the candidates of each query, [N, K, L, d]."""
    tokens, masks = ([column[index] for column in batch.columns] for index in (0, 1))
    return batch._replace(columns=[Padded(*stack_padded_token_embeddings(tokens, masks))])


def calculate_loss(
    self: Any, reps: list[list[Tensor]], masks_chunks: list[list[Tensor]], *, with_backward: bool = False
) -> Tensor:
    """The host's `CachedMultiVectorMultipleNegativesRankingLoss.calculate_loss`, with all queries scored in one call.

    The host scores `score_mini_batch_size` queries at a time, which bounds the memory of the similarities. Here none
    are stored, and each chunk would compute the gradient of all documents again. With a `similarity_fct` that is not
    MaxSim, the host's own method runs. Ranks gather with the host's function.

    `reps` holds the embeddings [B, L, d] of the mini-batches of each column, the queries first, and `masks_chunks`
    their masks [B, L]. `with_backward` leaves gradients in `reps`, and detaches the returned scalar.
    """
    if reduction_of(self) != "sum":
        original = SENTENCE_TRANSFORMERS.original(
            f"{_CACHED}:CachedMultiVectorMultipleNegativesRankingLoss.calculate_loss"
        )
        return original(self, reps, masks_chunks, with_backward=with_backward)
    columns = _columns(reps, masks_chunks)
    labels = torch.arange(len(columns[0].tokens), device=columns[0].tokens.device)
    if self.gather_across_devices:
        columns[1:] = [Padded(*cached_host.all_gather_padded(*column, with_grad=True)) for column in columns[1:]]
        labels = labels + cached_host.get_rank() * len(labels)
    options = LossOptions(1.0 / self.scale, normalize=False, empty_score=EMPTY_DOCUMENT_SCORE)
    return _loss_of_columns(options, columns, labels, None, with_backward)


def _columns(reps: list[list[Tensor]], masks_chunks: list[list[Tensor]]) -> list[Padded]:
    """Concatenate the mini-batches of each column: embeddings and masks."""
    return [joined(list(map(Padded, *column))) for column in zip(reps, masks_chunks, strict=True)]


def _loss_of_columns(
    options: LossOptions, columns: list[Padded], labels: Tensor | None, excluded: Tensor | None, with_backward: bool
) -> Tensor:
    """Compute the contrastive loss of columns, queries first; with `with_backward`, run its backward and detach it."""
    (queries, queries_mask), *documents = columns
    loss = cross_entropy(options, Batch(queries, queries_mask, documents), labels, excluded)
    if with_backward:
        loss.backward()
        loss = loss.detach()
    return loss
