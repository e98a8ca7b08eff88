"""sentence-transformers' two multi-vector losses of distillation: what `losses` says of all of them."""

from __future__ import annotations

from . import _needs  # noqa: F401

# isort: split
from collections.abc import Iterable
from typing import Any

import sentence_transformers.multi_vector_encoder.losses as host
from sentence_transformers.multi_vector_encoder.losses.distill_kl_div import (
    check_teacher_targets,
    stack_padded_token_embeddings,
)
from sentence_transformers.multi_vector_encoder.model import MultiVectorEncoder
from torch import Tensor

from ...training.contrast import Batch, Padded, divergence, margin_mse
from ...training.options import check_sizes
from .loss_inputs import columns_of, embed, options_of, set_fusion, size_of, teacher_margins, teacher_scores


class MultiVectorDistillKLDivLoss(host.MultiVectorDistillKLDivLoss):
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

    def __init__(self, model: MultiVectorEncoder, *, fuse_projection: bool = False, **arguments: Any) -> None:
        check_sizes(mini_batch_size=arguments.get("mini_batch_size"))
        super().__init__(model, **arguments)
        set_fusion(self, fuse_projection)

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor) -> Tensor:
        """Return the loss, a float32 scalar.

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


class MultiVectorMarginMSELoss(host.MultiVectorMarginMSELoss):
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

    def __init__(self, model: MultiVectorEncoder, *, fuse_projection: bool = False, **arguments: Any) -> None:
        check_sizes(mini_batch_size=arguments.get("mini_batch_size"))
        super().__init__(model, **arguments)
        set_fusion(self, fuse_projection)

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor) -> Tensor:
        """Return the loss, a float32 scalar.

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
