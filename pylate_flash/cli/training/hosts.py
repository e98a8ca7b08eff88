"""The losses and the trainers of `pylate-flash train`: for PyLate's models, and for those of sentence-transformers."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from ...encoding.texts import is_multi_vector_encoder
from .. import defaults
from ..models import PYLATE, SENTENCE_TRANSFORMERS, prompt_of

if TYPE_CHECKING:
    from datasets import Dataset

    from ...data.training import TrainingData
    from ...training.trainer_mixin import MeasuredTrainer
    from ..models import Model


class Loss(str, Enum):
    """What is trained with; every library has a loss of each kind."""

    contrastive = "contrastive"
    cached = "cached"
    distillation = "distillation"


# The options that only some of the losses use, by library.
_CACHED = {"mini_batch_size": (Loss.cached,), "mini_batch_tokens": (Loss.cached,)}
USED_BY: dict[str, dict[str, tuple[Loss, ...]]] = {
    # Its distillation scales the scores of each query by themselves.
    PYLATE: {"temperature": (Loss.contrastive, Loss.cached), **_CACHED},
    SENTENCE_TRANSFORMERS: {"temperature": tuple(Loss), **_CACHED},
}


def make_loss(
    model: Model, loss: Loss, scorer: str, mini_batch_size: int | None, tokens: int | str | None, temperature: float
) -> Any:
    """The loss of a kind, of the library of a model."""
    if tokens == "auto":
        # What it is, is found when the trainer has put the model where it will be.
        tokens = 1
    if is_multi_vector_encoder(model):
        return _loss_of_sentence_transformers(model, loss, scorer, mini_batch_size, tokens, temperature)
    from ... import losses

    if loss is Loss.distillation:
        return losses.Distillation(model)
    if loss is Loss.cached:
        return losses.CachedContrastive(
            model,
            mini_batch_size=mini_batch_size,
            mini_batch_num_tokens=tokens,  # type: ignore[arg-type]
            temperature=temperature,
        )
    return losses.Contrastive(model, temperature=temperature)


def _loss_of_sentence_transformers(
    model: Any, loss: Loss, scorer: str, mini_batch_size: int | None, tokens: Any, temperature: float
) -> Any:
    if scorer == "torch":
        from sentence_transformers.multi_vector_encoder import losses
    else:
        from ...hosts.sentence_transformers import losses

    if loss is Loss.distillation:
        return losses.MultiVectorDistillKLDivLoss(model, temperature=temperature)
    if loss is Loss.cached:
        return losses.CachedMultiVectorMultipleNegativesRankingLoss(
            model,
            mini_batch_size=mini_batch_size or defaults.MINI_BATCH_SIZE,
            mini_batch_num_tokens=tokens,
            scale=1 / temperature,
        )
    return losses.MultiVectorMultipleNegativesRankingLoss(model, scale=1 / temperature)


def make_trainer(
    model: Model, lines: TrainingData, evaluated: TrainingData | None, loss: Any, scorer: str, **arguments: Any
) -> MeasuredTrainer:
    """A trainer of the library of a model, which shows its progress.

    Parameters
    ----------
    model
        The model.
    lines, evaluated
        What it trains on, and what its loss is shown of on the way.
    loss
        As `make_loss` makes it.
    scorer
        The name of what computes the scores.
    **arguments
        Training arguments that both libraries have.
    """
    from transformers.trainer_callback import PrinterCallback

    from .run import DistinctTexts, Progress

    if "scores" not in lines.rows.column_names:
        arguments["batch_sampler"] = DistinctTexts
    arguments |= {
        "warmup_steps": 0.1,
        "save_total_limit": 2,
        "use_cpu": model.device.type == "cpu",
        "logging_steps": 10,
        "logging_first_step": True,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": model.device.type == "cuda",
    }
    trainer: Any
    if is_multi_vector_encoder(model):
        trainer = _trainer_of_sentence_transformers(model, lines, evaluated, loss, arguments)
    else:
        from ...trainer import ColBERTTrainer, ColBERTTrainingArguments

        trainer = ColBERTTrainer(
            model=model,
            args=ColBERTTrainingArguments(scorer=scorer, **arguments),
            train_dataset=lines.rows,
            eval_dataset=None if evaluated is None else evaluated.rows,
            loss=loss,
        )
    args = trainer.args
    steps = args.max_steps if args.max_steps > 0 else args.num_train_epochs * len(lines.rows) / args.train_batch_size
    if steps < 10:
        # A tenth would be rounded up to a step at a learning rate of 0, the only one perhaps.
        args.warmup_steps = 0
    # It prints every log entry to standard output.
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Progress())
    return trainer


def _trainer_of_sentence_transformers(
    model: Any, lines: TrainingData, evaluated: TrainingData | None, loss: Any, arguments: dict[str, Any]
) -> MeasuredTrainer:
    from sentence_transformers.multi_vector_encoder.training_args import MultiVectorEncoderTrainingArguments

    from ...hosts.sentence_transformers.trainer import MultiVectorEncoderTrainer

    train, evaluate = _with_columns(lines), None if evaluated is None else _with_columns(evaluated)
    query, *documents = (name for name in train.column_names if name != "scores")
    # Its trainer puts no prompt before the texts but those that it is told, and `encode_query` does.
    prompts = {query: prompt_of(model, is_query=True), **dict.fromkeys(documents, prompt_of(model, is_query=False))}
    return MultiVectorEncoderTrainer(
        model=model,
        args=MultiVectorEncoderTrainingArguments(
            prompts={name: prompt for name, prompt in prompts.items() if prompt} or None,
            **arguments,
        ),
        train_dataset=train,
        eval_dataset=evaluate,
        loss=loss,
    )


def _with_columns(lines: TrainingData) -> Dataset:
    """The lines as sentence-transformers' losses take them: every candidate of distillation in a column of its own."""
    rows = lines.rows
    if "documents" not in rows.column_names:
        return rows
    from datasets import Dataset

    candidates = {
        f"document_{number}": list(texts) for number, texts in enumerate(zip(*rows["documents"], strict=True), start=1)
    }
    return Dataset.from_dict({"query": rows["query"], **candidates, "scores": rows["scores"]})
