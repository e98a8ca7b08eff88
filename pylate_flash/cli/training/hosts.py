"""The losses and the trainers of `pylate-flash train`: for PyLate's models, and for those of sentence-transformers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from ...encoding.texts import is_multi_vector_encoder, prompt_of
from .. import options
from ..models import PYLATE, SENTENCE_TRANSFORMERS

if TYPE_CHECKING:
    from datasets import Dataset

    from ...training.trainer_mixin import MeasuredTrainer
    from ..models import Model


# What is trained with; every library has a loss of each kind.
Loss = Literal["contrastive", "cached", "distillation"]
# The options that only some of the losses use, by library. PyLate's distillation scales each query's scores by itself.
USED_BY: dict[str, dict[str, tuple[Loss, ...]]] = {
    host: {"temperature": losses, "mini_batch_size": ("cached",), "mini_batch_tokens": ("cached",)}
    for host, losses in ((PYLATE, ("contrastive", "cached")), (SENTENCE_TRANSFORMERS, get_args(Loss)))
}


def make_loss(
    model: Model, loss: Loss, scorer: str, mini_batch_size: int | None, tokens: int | str | None, temperature: float
) -> Any:
    """The loss of a kind, of the library of a model."""
    # What "auto" is, is found when the trainer has put the model where it will be.
    limits: dict[str, Any] = {"mini_batch_num_tokens": 1 if tokens == "auto" else tokens}
    kinds: dict[Loss, tuple[Any, dict[str, Any]]]
    if not is_multi_vector_encoder(model):
        from ... import losses

        divided = {"temperature": temperature}
        kinds = {
            "contrastive": (losses.Contrastive, divided),
            "cached": (losses.CachedContrastive, {"mini_batch_size": mini_batch_size, **limits, **divided}),
            "distillation": (losses.Distillation, {}),
        }
    else:
        if scorer == "torch":
            from sentence_transformers.multi_vector_encoder import losses as st
        else:
            from ...hosts.sentence_transformers import losses as st

        limits["mini_batch_size"] = mini_batch_size or options.MINI_BATCH_SIZE
        scale = {"scale": 1 / temperature}
        kinds = {
            "contrastive": (st.MultiVectorMultipleNegativesRankingLoss, scale),
            "cached": (st.CachedMultiVectorMultipleNegativesRankingLoss, {**limits, **scale}),
            "distillation": (st.MultiVectorDistillKLDivLoss, {"temperature": temperature}),
        }
    kind, arguments = kinds[loss]
    return kind(model, **arguments)


def make_trainer(
    model: Model, rows: Dataset, evaluated: Dataset | None, loss: Any, scorer: str, progress: Any = None, **given: Any
) -> MeasuredTrainer:
    """A trainer of the library of a model, which shows its progress, and with `evaluated` the loss of these rows.

    What else is `given` are training arguments that both libraries have; `progress` is a callback of its own.
    """
    import torch
    from transformers.trainer_callback import PrinterCallback

    from .run import DistinctTexts, Progress

    arguments: dict[str, Any] = {
        "warmup_steps": 0.1,
        "save_total_limit": 2,
        "use_cpu": model.device.type == "cpu",
        "logging_steps": 10,
        "logging_first_step": True,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": model.device.type == "cuda",
        **({} if "scores" in rows.column_names else {"batch_sampler": DistinctTexts}),
        **given,
    }
    sets = [rows, evaluated]
    kind: Any
    arguments_of: Any
    if is_multi_vector_encoder(model):
        from sentence_transformers.multi_vector_encoder.training_args import MultiVectorEncoderTrainingArguments

        from ...hosts.sentence_transformers.trainer import MultiVectorEncoderTrainer

        kind, arguments_of = MultiVectorEncoderTrainer, MultiVectorEncoderTrainingArguments
        sets = [None if some is None else _with_columns(some) for some in sets]
        # Its trainer puts no prompt before the texts but those that it is told, and `encode_query` does.
        query, *documents = (name for name in sets[0].column_names if name != "scores")
        prompts = {query: prompt_of(model, is_query=True), **dict.fromkeys(documents, prompt_of(model, is_query=False))}
        arguments["prompts"] = {name: prompt for name, prompt in prompts.items() if prompt} or None
    else:
        from ...trainer import ColBERTTrainer, ColBERTTrainingArguments

        kind, arguments_of = ColBERTTrainer, partial(ColBERTTrainingArguments, scorer=scorer)
    args = arguments_of(**arguments)
    if args.world_size > 1 and args.device.type == "cpu":
        # Of "cpu:1", as accelerate calls that of the second process, torch loads no optimizer of a checkpoint.
        vars(args)["_setup_devices"] = torch.device("cpu")
    trainer = kind(model=model, args=args, train_dataset=sets[0], eval_dataset=sets[1], loss=loss)
    args = trainer.args
    steps = args.max_steps if args.max_steps > 0 else args.num_train_epochs * len(rows) / args.train_batch_size
    if steps < 10 and "warmup_steps" not in given:
        # A tenth would be rounded up to a step at a learning rate of 0, the only one perhaps.
        args.warmup_steps = 0
    # It prints every log entry to standard output.
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(progress or Progress())
    return trainer


def _with_columns(rows: Dataset) -> Dataset:
    """Lines as sentence-transformers' losses take them: every candidate of distillation in a column of its own."""
    if "documents" not in rows.column_names:
        return rows
    from datasets import Dataset

    texts = zip(*rows["documents"], strict=True)
    candidates = {f"document_{number}": list(column) for number, column in enumerate(texts, start=1)}
    return Dataset.from_dict({"query": rows["query"], **candidates, "scores": rows["scores"]})
