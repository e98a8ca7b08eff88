"""sentence-transformers' multi-vector losses, computed by the operations of this package.

    from pylate_flash.hosts.sentence_transformers import losses

    loss = losses.CachedMultiVectorMultipleNegativesRankingLoss(model, mini_batch_num_tokens=16384)

Each class is the host's own, with its arguments, its values and its gradients, and takes a few more. Scores, loss and
gradients are one operation (`maxsim_cross_entropy`, `maxsim_kl_divergence`, `maxsim_margin_mse`), whether the host is
registered or not. A `similarity_fct` that is not MaxSim is called by the host's code.
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
from ...training.options import LossOptions, check_sizes, check_temperature
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


class _Fusing:
    """What every loss is asked for beyond the host's arguments, checked and stored."""

    def __init__(self, model: MultiVectorEncoder, *, fuse_projection: bool = False, **arguments: Any) -> None:
        check_sizes(**{name: size for name, size in arguments.items() if name in _SIZES})
        super().__init__(model, **arguments)  # type: ignore[call-arg]
        set_fusion(self, fuse_projection)


class _Contrast(_Fusing):
    """The same of both contrastive losses, which are asked for more."""

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
        check_temperature(arguments.get("scale", 1.0), "scale")
        super().__init__(model, **arguments)
        loss: Any = self
        check_choice("gather", gather, GATHERINGS)
        if not isinstance(symmetric, bool):
            raise TypeError(f"symmetric: {symmetric!r}; expected True or False")
        if exclude is not None and not callable(exclude):
            raise TypeError(f"exclude: {type(exclude).__name__}; expected a function of the columns, or None")
        asked = {"margin": margin, "symmetric": symmetric, "exclude": exclude}
        check_asked(loss, {**asked, "gather": gather if gather != "all_gather" else None})
        beyond = asked_for(asked)
        if loss.gather_across_devices and {"symmetric", "exclude"} & set(beyond):
            raise ValueError(
                f"gather_across_devices: given together with {', '.join(beyond)}; a rank knows no queries of the "
                "others, and no texts"
            )
        if loss.gather_across_devices and gather == "ring" and margin is not None:
            raise ValueError(
                'margin: given together with gather="ring", which scores no documents twice; use "all_gather"'
            )
        loss.margin, loss.symmetric, loss.exclude, loss.gather = margin, symmetric, exclude, gather

    def get_config_dict(self) -> dict[str, Any]:
        """The arguments, for the model card: a scale that is learned as the number that it is."""
        loss: Any = self
        config = {"margin": loss.margin, "symmetric": loss.symmetric, "fuse_projection": loss.fuse_projection}
        if loss.exclude is not None:
            config["exclude"] = similarity_fct_name(loss.exclude)
        if loss.gather != "all_gather":
            config["gather"] = loss.gather
        if isinstance(loss.scale, Tensor):
            config["scale"] = loss.scale.item()
        of_host: dict[str, Any] = super().get_config_dict()  # type: ignore[misc]
        return of_host | {name: config[name] for name in asked_for(config)}


class MultiVectorMultipleNegativesRankingLoss(_Contrast, host.MultiVectorMultipleNegativesRankingLoss):
    """The host's contrastive loss with in-batch negatives: cross entropy of each query's positive among all documents.

    Parameters
    ----------
    model
        `MultiVectorEncoder`, the host's or ours.
    margin
        Leave every document out of the denominator that scores above the right one's score less `margin`, as
        `maxsim_cross_entropy` does. None: none. Not with the ring.
    symmetric
        The mean of this loss and of that of the other direction. Not with gathered documents.
    exclude
        A function of the tokenized columns that returns [Nq, Nq * columns of documents], bool: True leaves a document
        out of the query's denominator; the documents of the first column come first. `duplicates` is one. Not with
        gathered documents.
    gather
        ``"all_gather"``: all documents on every rank. ``"ring"``: passed round the ranks, each scored while the next is
        on its way, so that memory does not grow with the number of ranks.
    fuse_projection
        Score from the encoder's hidden states, and leave the model's Dense and Normalize modules to
        `maxsim_from_hidden`. Values and gradients are the same but for rounding. It is no help in training, where a
        step keeps the encoder's activations. Ranks that gather fuse nothing.
    **arguments
        Those of the host's class, with its defaults. A ``scale`` is a number above 0, or a parameter of one element,
        which is then learned. The ``similarity_fct`` is `colbert_scores` (the default) or `mean_colbert_scores`, the
        host's or ours; a document without tokens scores -1e9 under both. Another function is called by the host's code,
        which knows none of the arguments above, and scores ``score_mini_batch_size`` queries at a time; the operation
        bounds its memory itself, and takes no notice. Ranks that ``gather_across_devices`` may have different batch
        sizes, numbers of columns and padded lengths. A rank's loss is the sum over its own queries over the mean number
        of queries of a rank. With as many on each, that is the host's; and the mean over ranks that
        DistributedDataParallel takes of the gradients is that of one process with the whole batch.

    Raises
    ------
    ValueError
        For arguments out of their range or that do not go together, and if the projection is to be fused and the model
        is not a Transformer followed by linear Dense layers and at most a Normalize, beside masks. In the forward, for
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
            Not used; the trainer passes it.
        """
        columns = columns_of(sentence_features, least=2)
        options = options_of(self)
        if options is None:
            return super().forward(columns, labels)
        out = checked_exclude(self.exclude, columns)
        return cross_entropy(options, embed(self, columns, options), exclude=out)


class CachedMultiVectorMultipleNegativesRankingLoss(_Contrast, host.CachedMultiVectorMultipleNegativesRankingLoss):
    """The host's contrastive loss with cached gradients (GradCache): large batches in the memory of small ones.

    Texts of about one length are encoded together, padded to the longest of them, and only tokens that are scored are
    kept. Value and gradient are those of :class:`MultiVectorMultipleNegativesRankingLoss`, but for rounding. Under
    DistributedDataParallel, the ranks exchange gradients once per step, and may have different numbers of mini-batches.

    Texts that cannot be sorted, as images and what is flattened for flash attention, and those of a model with modules
    that make other tokens, as pooling does, go through the model by the host's code in the order of the batch, and
    `mini_batch_num_tokens` counts no padding then.

    Parameters
    ----------
    model, margin, symmetric, exclude, gather
        As in :class:`MultiVectorMultipleNegativesRankingLoss`.
    fuse_projection
        Likewise. It costs memory here: what is kept between the two passes are hidden states and their gradients, each
        d_model wide where embeddings are d wide.
    **arguments
        Those of the host's class, with its defaults, as in :class:`MultiVectorMultipleNegativesRankingLoss`. With
        ``mini_batch_num_tokens``, a forward pass of the model takes so many tokens at most, padding included, in place
        of ``mini_batch_size`` texts: short texts go together in greater numbers than long ones. A text that has more
        goes alone.

    Raises
    ------
    ValueError, TypeError
        As in :class:`MultiVectorMultipleNegativesRankingLoss`; in the forward, ValueError also if the projection is to
        be fused of texts that cannot be sorted.
    """

    def __init__(self, model: MultiVectorEncoder, **arguments: Any) -> None:
        if arguments.get("mini_batch_size", 32) is None:
            raise TypeError("mini_batch_size: NoneType; expected an integer")
        super().__init__(model, **arguments)
        # What the host's code is to leave out: it asks for the loss of embeddings only.
        self._out: Tensor | None = None

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """Return the loss, as :meth:`MultiVectorMultipleNegativesRankingLoss.forward` does, of such columns."""
        columns = columns_of(sentence_features, least=2)
        options = options_of(self)
        if options is None:
            return super().forward(columns, labels)
        out = checked_exclude(self.exclude, columns)
        kept = [mask for features in columns if (mask := scored_tokens(self.model, features)) is not None]
        if len(kept) == len(columns):
            tokens = self.mini_batch_num_tokens
            tasks = [{"task": features.pop("task")} for features in columns]
            return cached_cross_entropy(
                self,
                options,
                columns,
                kept,
                Limits(self.mini_batch_size if tokens is None else None, tokens),
                autocast=autocast_in_force(kept[0].device.type),
                exclude=out,
                arguments=tasks,
            )
        if options.fuse_projection:
            raise ValueError(
                "fuse_projection: needs padded texts, and a model whose modules leave their tokens as they are; got "
                f"columns with {[sorted(features) for features in columns]}"
            )
        self._out = out
        return super().forward(columns, labels)

    def calculate_loss(
        self, reps: list[list[Tensor]], masks_chunks: list[list[Tensor]], *, with_backward: bool = False
    ) -> Tensor:
        """The loss of the embeddings of mini-batches, which the host's code has encoded, as its method computes it."""
        options = options_of(self)
        if options is None:
            return super().calculate_loss(reps, masks_chunks, with_backward=with_backward)
        out, self._out = self._out, None
        return _loss_of_columns(options, _columns(reps, masks_chunks), None, out, with_backward)


class MultiVectorDistillKLDivLoss(_Fusing, host.MultiVectorDistillKLDivLoss):
    """The host's distillation: KL divergence between a teacher's scores of each query's candidates and the model's.

    Parameters
    ----------
    model, fuse_projection
        As in :class:`MultiVectorMultipleNegativesRankingLoss`.
    **arguments
        Those of the host's class, with its defaults. The ``similarity_fct`` is `colbert_kd_scores` (the default) or
        `mean_colbert_kd_scores`, the host's or ours. Another function is called by the host's code, and nothing is
        fused. The loss is multiplied by the square of the model's temperature.

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
    """The host's margin MSE: squared differences from a teacher's margins between each positive and its negatives.

    Parameters
    ----------
    model, fuse_projection
        As in :class:`MultiVectorMultipleNegativesRankingLoss`.
    **arguments
        Those of the host's class, with its defaults. The ``similarity_fct`` is `colbert_scores_pairwise` (the default)
        or `mean_colbert_scores_pairwise`, the host's or ours. Another function is called by the host's code, and
        nothing is fused.

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
    """The batch whose columns are each query's candidates: [N, K, L, d]."""
    tokens, masks = ([column[index] for column in batch.columns] for index in (0, 1))
    return batch._replace(columns=[Padded(*stack_padded_token_embeddings(tokens, masks))])


def calculate_loss(
    self: Any, reps: list[list[Tensor]], masks_chunks: list[list[Tensor]], *, with_backward: bool = False
) -> Tensor:
    """The host's `CachedMultiVectorMultipleNegativesRankingLoss.calculate_loss`, with all queries scored in one call.

    Its own scores `score_mini_batch_size` queries at a time, which bounds the memory of the similarities. There are
    none here, and each part would compute the gradient of all documents once more. With a `similarity_fct` that is not
    MaxSim, the host's own method computes. Ranks gather by the host's function.

    `reps` are embeddings [B, L, d] of the mini-batches of each column, the queries first, and `masks_chunks` their
    masks [B, L]. `with_backward` leaves gradients in `reps`, and detaches the scalar that is returned.
    """
    if reduction_of(self) != "sum":
        own = SENTENCE_TRANSFORMERS.original(f"{_CACHED}:CachedMultiVectorMultipleNegativesRankingLoss.calculate_loss")
        return own(self, reps, masks_chunks, with_backward=with_backward)
    columns = _columns(reps, masks_chunks)
    right = torch.arange(len(columns[0].tokens), device=columns[0].tokens.device)
    if self.gather_across_devices:
        columns[1:] = [Padded(*cached_host.all_gather_padded(*column, with_grad=True)) for column in columns[1:]]
        right = right + cached_host.get_rank() * len(right)
    options = LossOptions(1.0 / self.scale, normalize=False, empty_score=EMPTY_DOCUMENT_SCORE)
    return _loss_of_columns(options, columns, right, None, with_backward)


def _columns(reps: list[list[Tensor]], masks_chunks: list[list[Tensor]]) -> list[Padded]:
    """The embeddings of mini-batches and their masks, column by column."""
    return [joined(list(map(Padded, *column))) for column in zip(reps, masks_chunks, strict=True)]


def _loss_of_columns(
    options: LossOptions, columns: list[Padded], right: Tensor | None, out: Tensor | None, with_backward: bool
) -> Tensor:
    """The contrastive loss of columns, queries first; detached, with gradients in them, if it is to be."""
    (queries, queries_mask), *documents = columns
    loss = cross_entropy(options, Batch(queries, queries_mask, documents), right, out)
    if with_backward:
        loss.backward()
        loss = loss.detach()
    return loss
