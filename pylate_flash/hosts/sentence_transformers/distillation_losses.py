"""sentence-transformers' two multi-vector losses of distillation: what `losses` says of all of them."""

from __future__ import annotations

from . import _needs  # noqa: F401

# isort: split
from collections.abc import Callable, Iterable
from typing import Any

import sentence_transformers.multi_vector_encoder.losses as host
import torch.nn.functional as F
from sentence_transformers.multi_vector_encoder.losses.distill_kl_div import (
    check_teacher_targets,
    stack_padded_token_embeddings,
)
from sentence_transformers.multi_vector_encoder.model import MultiVectorEncoder
from torch import Tensor

from ...encoding.projection import normalizes
from ...ops import maxsim_kl_divergence, maxsim_margin_mse
from ...training.contrast import Contrast, Padded, scores_of_states
from . import scoring
from .loss_inputs import (
    Columns,
    check_sizes,
    columns_of,
    embed,
    embed_states,
    fuses,
    reduction_of,
    set_fusion,
    size_of,
    teacher_margins,
    teacher_scores,
)


class MultiVectorDistillKLDivLoss(host.MultiVectorDistillKLDivLoss):
    """The host's distillation: KL divergence between a teacher's scores of each query's candidates and the model's.

    Parameters
    ----------
    model, mini_batch_size, fuse_projection
        As in :class:`MultiVectorMultipleNegativesRankingLoss`.
    similarity_fct
        `colbert_kd_scores` (the default) or `mean_colbert_kd_scores`, the host's or ours. Another function is called by
        the host's code, and nothing is fused.
    temperature
        Divides the scores of the teacher and the model's. The loss is multiplied by the square of the model's.
    student_temperature, teacher_temperature
        In place of `temperature` for the model's scores, or the teacher's. None: `temperature`.

    Raises
    ------
    ValueError
        For a temperature that is not finite and above 0, as in :class:`MultiVectorMultipleNegativesRankingLoss` for the
        other arguments, and in the forward for labels that do not fit the columns, or hold NaN in the first batch.
    TypeError
        For arguments of another type.
    """

    _checked_teacher_scale: bool

    def __init__(
        self,
        model: MultiVectorEncoder,
        *,
        similarity_fct: Callable | None = None,
        temperature: float = 1.0,
        student_temperature: float | None = None,
        teacher_temperature: float | None = None,
        mini_batch_size: int | None = None,
        fuse_projection: bool = False,
    ) -> None:
        check_sizes(mini_batch_size=mini_batch_size)
        super().__init__(
            model,
            similarity_fct=similarity_fct,
            temperature=temperature,
            student_temperature=student_temperature,
            teacher_temperature=teacher_temperature,
            mini_batch_size=mini_batch_size,
        )
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
        reduction = reduction_of(self)
        if reduction is None:
            return super().forward(columns, labels)
        teacher = teacher_scores(labels, size_of(columns[0]), len(columns) - 1)
        if not self._checked_teacher_scale:
            self._checked_teacher_scale = True
            expected = (teacher / self.teacher_temperature).softmax(dim=-1)
            check_teacher_targets(expected, teacher, self.teacher_temperature, type(self).__name__)
        if fuses(self):
            scores = _candidate_scores(self, columns, reduction) / self.student_temperature
            found = self.loss_function(
                scores.log_softmax(dim=-1), (teacher / self.teacher_temperature).log_softmax(dim=-1)
            )
        else:
            found = maxsim_kl_divergence(
                teacher_scores=teacher,
                temperature=self.student_temperature,
                teacher_temperature=self.teacher_temperature,
                **_candidates(self, columns, reduction),
            )
        return found * self.student_temperature**2


class MultiVectorMarginMSELoss(host.MultiVectorMarginMSELoss):
    """The host's margin MSE: squared differences from a teacher's margins between each positive and its negatives.

    Parameters
    ----------
    model, mini_batch_size, fuse_projection
        As in :class:`MultiVectorMultipleNegativesRankingLoss`.
    similarity_fct
        `colbert_scores_pairwise` (the default) or `mean_colbert_scores_pairwise`, the host's or ours. Another function
        is called by the host's code, and nothing is fused.

    Raises
    ------
    ValueError, TypeError
        As in :class:`MultiVectorMultipleNegativesRankingLoss`; ValueError in the forward for labels that do not fit the
        columns.
    """

    def __init__(
        self,
        model: MultiVectorEncoder,
        *,
        similarity_fct: Callable | None = None,
        mini_batch_size: int | None = None,
        fuse_projection: bool = False,
    ) -> None:
        check_sizes(mini_batch_size=mini_batch_size)
        super().__init__(model, similarity_fct=similarity_fct, mini_batch_size=mini_batch_size)
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
        reduction = reduction_of(self)
        if reduction is None:
            return super().forward(columns, labels)
        teacher = teacher_margins(labels, size_of(columns[0]), len(columns) - 2)
        if fuses(self):
            errors = _candidate_scores(self, columns, reduction) - teacher
            return F.mse_loss(errors[:, :1].expand_as(errors[:, 1:]), errors[:, 1:])
        return maxsim_margin_mse(teacher_scores=teacher, **_candidates(self, columns, reduction))


def _candidates(loss: Any, columns: Columns, reduction: str) -> dict[str, Any]:
    """Each query and its candidates [N, K, L, d], as the operations of distillation take them."""
    queries, queries_mask, *documents = embed(loss, columns)
    candidates, candidates_mask = stack_padded_token_embeddings(*documents)
    return {
        "queries": queries,
        "documents": candidates,
        "queries_mask": queries_mask,
        "documents_mask": candidates_mask,
        "reduction": reduction,
        "empty_score": scoring.EMPTY_DOCUMENT_SCORE,
    }


def _candidate_scores(loss: Any, columns: Columns, reduction: str) -> Tensor:
    """Scores [N, K] from hidden states, each query with its candidates."""
    queries, queries_mask, states, masks, projection = embed_states(loss, columns)
    contrast = Contrast(normalize=normalizes(loss.model), reduction=reduction, empty_score=scoring.EMPTY_DOCUMENT_SCORE)
    candidates = Padded(*stack_padded_token_embeddings(states, masks))
    return scores_of_states(contrast, queries, queries_mask, candidates, projection)
