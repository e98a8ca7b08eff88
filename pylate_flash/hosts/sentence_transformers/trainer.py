"""sentence-transformers' trainer of multi-vector models, which counts, checks and resumes as PyLate's does here."""

from __future__ import annotations

from . import _needs  # noqa: F401

# isort: split
from typing import Any

import sentence_transformers.multi_vector_encoder.trainer as host
from sentence_transformers.multi_vector_encoder.losses import (
    CachedMultiVectorMultipleNegativesRankingLoss,
    MultiVectorMultipleNegativesRankingLoss,
)

from ...training.trainer_mixin import MeasuredTrainer, Meter

__all__ = ["MultiVectorEncoderTrainer"]


class MultiVectorEncoderTrainer(MeasuredTrainer, host.MultiVectorEncoderTrainer):
    """The host's trainer, with numbers of the run in its log.

    Its log has the negatives, tokens per second and peak memory that `pylate_flash.trainer.ColBERTTrainer` logs. It
    ends, resumes, and trains parameters of a loss, such as a learned `scale`, as that one does.

    Parameters
    ----------
    *args, **kwargs
        Those of `sentence_transformers.MultiVectorEncoderTrainer`. What computes the scores is up to
        `pylate_flash.register`, and to the loss.

    Raises
    ------
    ValueError
        If there are several ranks, and losses of a dictionary that do not gather documents alike. When it resumes, if
        the checkpoint lies beyond the first pass over an `IterableDataset`, lacks weights of the model, or holds
        parameters that the losses do not have.
    FloatingPointError
        While it trains, if the loss is not finite.
    """

    contrastive = (CachedMultiVectorMultipleNegativesRankingLoss, MultiVectorMultipleNegativesRankingLoss)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.measure(Meter())
