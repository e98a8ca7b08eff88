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

    Each log entry of the training also has

    - `in_batch_negatives_per_query`: documents that a query's positive competes with, over all document columns and,
      for a loss that gathers, all ranks (the mean over the batches since the last entry; for the losses with in-batch
      negatives),
    - `tokens_per_second`: tokens of queries and documents that are not padding, all ranks together, by the time since
      the last entry without evaluation and saving,
    - `peak_memory_mib`: most memory that torch had allocated on the GPU so far, or, without a GPU, most resident memory
      of the process; the highest of the ranks.

    A loss that is not finite ends the training at the next log entry or checkpoint, because every weight has become NaN
    by then; under `fp16`, whose loss scaler leaves such steps out, it does not. A run that resumes from a checkpoint
    continues, on a CPU to the bit, as if it had not been interrupted; over an `IterableDataset`, whose length nobody
    knows, it can do so within the first pass only.

    Parameters of a loss, such as a learned `scale`, are trained as the model's are, on several GPUs too. They are saved
    with each checkpoint, in `losses.safetensors`, and not with the model.

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
