"""The losses and trainers of `pylate-flash train`, for models of PyLate and of sentence-transformers."""

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


# The kinds of losses; each library has one of each kind.
Loss = Literal["contrastive", "cached", "distillation"]
# Options that only some losses use, by library. PyLate's distillation loss normalises each query's scores itself.
USED_BY: dict[str, dict[str, tuple[Loss, ...]]] = {
    host: {"temperature": losses, "mini_batch_size": ("cached",), "mini_batch_tokens": ("cached",)}
    for host, losses in ((PYLATE, ("contrastive", "cached")), (SENTENCE_TRANSFORMERS, get_args(Loss)))
}


def make_loss(
    model: Model, loss: Loss, scorer: str, mini_batch_size: int | None, tokens: int | str | None, temperature: float
) -> Any:
    """Create the loss of a kind, from the library of the model."""
    # "auto" is resolved after the trainer has moved the model to its device.
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
    model: Model,
    rows: Dataset,
    evaluated: Dataset | None,
    loss: Any,
    scorer: str,
    progress: Any = None,
    **training_args: Any,
) -> MeasuredTrainer:
    """Create a trainer from the library of the model, which shows progress, and evaluates the loss on `evaluated`.

    `training_args` are training arguments that both libraries have; `progress` is a callback replacing the default.
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
        **training_args,
    }
    sets = [rows, evaluated]
    kind: Any
    arguments_of: Any
    if is_multi_vector_encoder(model):
        from sentence_transformers.multi_vector_encoder.training_args import MultiVectorEncoderTrainingArguments

        from ...hosts.sentence_transformers.trainer import MultiVectorEncoderTrainer

        kind, arguments_of = MultiVectorEncoderTrainer, MultiVectorEncoderTrainingArguments
        sets = [None if dataset is None else _with_columns(dataset) for dataset in sets]
        # Unlike `encode_query`, its trainer only prepends prompts that it is given.
        query, *documents = (name for name in sets[0].column_names if name != "scores")
        prompts = {query: prompt_of(model, is_query=True), **dict.fromkeys(documents, prompt_of(model, is_query=False))}
        arguments["prompts"] = {name: prompt for name, prompt in prompts.items() if prompt} or None
    else:
        from ...trainer import ColBERTTrainer, ColBERTTrainingArguments

        kind, arguments_of = ColBERTTrainer, partial(ColBERTTrainingArguments, scorer=scorer)
    args = arguments_of(**arguments)
    if args.world_size > 1 and args.device.type == "cpu":
        # torch cannot load an optimizer checkpoint to "cpu:1", accelerate's device of the second process.
        vars(args)["_setup_devices"] = torch.device("cpu")
    trainer = kind(model=model, args=args, train_dataset=sets[0], eval_dataset=sets[1], loss=loss)
    args = trainer.args
    steps = args.max_steps if args.max_steps > 0 else args.num_train_epochs * len(rows) / args.train_batch_size
    if steps < 10 and "warmup_steps" not in training_args:
        # A tenth would be rounded up to one step at a learning rate of 0, perhaps the only step.
        args.warmup_steps = 0
    # PrinterCallback prints every log entry to standard output.
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(progress or Progress())
    return trainer


def _with_columns(rows: Dataset) -> Dataset:
    """Rows in the format of sentence-transformers' losses: one column per candidate of distillation."""
    if "documents" not in rows.column_names:
        return rows
    from datasets import Dataset

    texts = zip(*rows["documents"], strict=True)
    candidates = {f"document_{number}": list(column) for number, column in enumerate(texts, start=1)}
    return Dataset.from_dict({"query": rows["query"], **candidates, "scores": rows["scores"]})
