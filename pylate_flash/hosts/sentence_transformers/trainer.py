"""sentence-transformers' multi-vector trainer, with the metrics, checks and resuming of `pylate_flash.trainer`."""

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
    """The host's trainer, with metrics of the run in its log.

    It logs the negatives, tokens per second and peak memory that `pylate_flash.trainer.ColBERTTrainer` logs. It stops,
    resumes, and trains parameters of a loss, such as a learned `scale`, like that trainer.

    Parameters
    ----------
    *args, **kwargs
        Passed to `sentence_transformers.MultiVectorEncoderTrainer`. `pylate_flash.register` and the loss determine
        what computes the scores.

    Raises
    ------
    ValueError
        If there are several ranks and the losses of a dictionary gather documents differently. When resuming, if the
        checkpoint lies beyond the first pass over an `IterableDataset`, lacks weights of the model, or holds parameters
        that the losses do not have.
    FloatingPointError
        During training, if the loss is not finite.
    """

    contrastive = (CachedMultiVectorMultipleNegativesRankingLoss, MultiVectorMultipleNegativesRankingLoss)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.measure(Meter())
