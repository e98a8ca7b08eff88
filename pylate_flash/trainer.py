"""sentence-transformers' trainer, set up for ColBERT models.

``ColBERTTrainer`` is ``SentenceTransformerTrainer`` with PyLate's collator, a contrastive loss by default, the flag
``scorer`` as a training argument, and the three numbers that decide a contrastive run in every log entry: in-batch
negatives per query, tokens per second, and peak memory.
"""

from __future__ import annotations

from .hosts.pylate import _needs  # noqa: F401

# isort: split
import copy
import json
import logging
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pylate.losses.cached_contrastive import CachedContrastive as PyLateCachedContrastive
from pylate.losses.contrastive import Contrastive as PyLateContrastive
from pylate.losses.distillation import Distillation as PyLateDistillation
from pylate.utils import ColBERTCollator
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sampler import DefaultBatchSampler
from sentence_transformers.training_args import BatchSamplers
from torch import Tensor, nn

from ._config import check_backend, check_masking
from .hosts.pylate.loss_inputs import options_of
from .losses import CachedContrastive, Contrastive, Distillation
from .training.contrast import Stopwatch
from .training.trainer_mixin import MeasuredTrainer, Meter

__all__ = ["ColBERTTrainer", "ColBERTTrainingArguments"]

logger = logging.getLogger(__name__)

_CONTRASTIVE = (PyLateContrastive, PyLateCachedContrastive)
_PYLATE = (*_CONTRASTIVE, PyLateDistillation)
_FOLLOWING = (Contrastive, CachedContrastive, Distillation)
# The arguments that are flags of the model.
_FLAGS = ("scorer", "masking", "fuse_projection")


class _Default(str):
    """A batch sampler that nobody has named: equal to the one of its name, and told from it by its type."""


@dataclass
class ColBERTTrainingArguments(SentenceTransformerTrainingArguments):
    """sentence-transformers' training arguments, with the scorer of the run.

    Parameters
    ----------
    scorer
        ``"pylate_flash"``, ``"torch"``, ``"flash"``, ``"lik"`` or ``"auto"``: written to the flag of the model, and so
        saved with it and followed by the losses and evaluators. A plain ``pylate.models.ColBERT`` has no such flag:
        there it is given to the losses of this package, and not saved. Default: leave model and losses as they are.
    masking
        ``"exclude"`` or ``"zero"``, written to the same place.
    fuse_projection
        Whether the losses score from the encoder's hidden states, which is no help in training (see
        :class:`pylate_flash.losses.Contrastive`), written to the same place.
    batch_sampler
        Default: ``"batch_sampler"``, sentence-transformers' own, in place of which :class:`ColBERTTrainer` takes
        ``"no_duplicates"`` if every loss uses in-batch negatives, because a text that occurs twice in a batch would be
        its own negative. An ``IterableDataset`` keeps its order.

    Raises
    ------
    ValueError
        For an unknown ``scorer`` or ``masking``.
    TypeError
        If ``fuse_projection`` is neither a bool nor None.
    """

    scorer: str | None = field(
        default=None, metadata={"help": "The scorer of the run: pylate_flash, torch, flash, lik or auto."}
    )
    masking: str | None = field(default=None, metadata={"help": "How masked tokens count: exclude or zero."})
    fuse_projection: bool | None = field(default=None, metadata={"help": "Score from the encoder's hidden states."})
    batch_sampler: BatchSamplers | str | DefaultBatchSampler | Callable[..., DefaultBatchSampler] | None = field(
        default=None,  # type: ignore[assignment]
        metadata={"help": "The batch sampler. Default: no_duplicates for losses with in-batch negatives."},
    )

    def __post_init__(self) -> None:
        if self.fuse_projection is not None and not isinstance(self.fuse_projection, bool):
            raise TypeError(f"fuse_projection: {self.fuse_projection!r}; expected True, False or None")
        named = self.batch_sampler is not None and not isinstance(self.batch_sampler, _Default)
        if self.scorer is not None:
            self.scorer = check_backend(self.scorer, name="scorer")
        if self.masking is not None:
            check_masking(self.masking)
        super().__post_init__()
        if not named:
            # Other trainers know nothing of a choice that is left open: they would make batches of one line.
            self.batch_sampler = _Default(BatchSamplers.BATCH_SAMPLER.value)


class _Meter(Meter):
    """Counts the time of this package's losses too."""

    def reset(self) -> None:
        super().reset()
        self.stopwatch = Stopwatch()


class _Collator(ColBERTCollator):
    """PyLate's collator, for lists of candidates that have one length."""

    def __call__(self, features: list[dict]) -> dict[str, Tensor]:
        """Collate rows into a batch."""
        label = next((features[0][label] for label in self.valid_label_columns if label in features[0]), None)
        for name, value in features[0].items():
            lengths = {len(row[name]) if isinstance(row[name], list) else None for row in features}
            if len(lengths) > 1:
                listed = " and ".join(map(str, sorted(lengths, key=lambda length: length or 0)))
                raise ValueError(
                    f"train_dataset: the lists in the column {name!r} have {listed} elements; expected as many in "
                    "every row of a batch"
                )
            if isinstance(value, list) and isinstance(label, list) and len(label) != len(value):
                raise ValueError(
                    f"train_dataset: {len(value)} elements in the column {name!r} and {len(label)} scores; expected a "
                    "score for each"
                )
        return super().__call__(features)


class ColBERTTrainer(MeasuredTrainer, SentenceTransformerTrainer):
    """sentence-transformers' trainer with the defaults of a ColBERT model.

    Columns are what PyLate's collator expects: the query first, in a column with ``query`` or ``anchor`` in its name,
    then the positive and any hard negatives; or, for :class:`~pylate_flash.losses.Distillation`, what PyLate's
    ``KDProcessing`` makes of ``query_id``, ``document_ids`` and ``scores``. Several data sets in a dictionary, with a
    loss each, work as in sentence-transformers; so does an ``IterableDataset``, with ``max_steps``.

    Each log entry of the training also has

    - ``in_batch_negatives_per_query``: documents a query's positive competes with, over all document columns and, for a
      loss that gathers, all ranks (the mean over the batches since the last entry; contrastive losses only),
    - ``tokens_per_second``: tokens of queries and documents that are not padding, all ranks together, by the time since
      the last entry without evaluation and saving,
    - ``loss_time_share``: how much of that time this package's scores, loss and their gradients took, on this rank
      (of a loss of this package; without the backward of the encoder, and without that of ``fuse_projection`` and of
      ``gather="ring"`` where the embeddings are not cached),
    - ``peak_memory_mib``: most memory that torch had allocated on the GPU so far, or, without a GPU, most resident
      memory of the process; the highest of the ranks.

    Under ``bf16`` and ``fp16``, the losses of this package are computed in autocast, as the model is.

    A loss that is not finite ends the training at the next log entry or checkpoint, because every weight has become NaN
    by then; under ``fp16``, whose loss scaler leaves such steps out, it does not. A run that resumes from a checkpoint
    continues, on a CPU to the bit, as if it had not been interrupted; over an ``IterableDataset``, whose length nobody
    knows, it can do so within the first pass only.

    Parameters of a loss, such as a learned ``temperature``, are trained as the model's are, on several GPUs too. They
    are saved with each checkpoint, in ``losses.safetensors``, and not with the model.

    Parameters
    ----------
    model
        ColBERT model, ours or PyLate's.
    args
        :class:`ColBERTTrainingArguments`, or those of sentence-transformers.
    train_dataset, eval_dataset, evaluator, tokenizer, model_init
        As in sentence-transformers.
    loss
        As in sentence-transformers; default :class:`~pylate_flash.losses.Contrastive`.
    data_collator
        Default: ``pylate.utils.ColBERTCollator`` with the model's tokenizer and the prompts of ``args``.
    **kwargs
        Any further argument of ``SentenceTransformerTrainer``.

    Raises
    ------
    ValueError
        If ``args.scorer`` or ``args.masking`` is set and a loss would not follow it; if there are several ranks, and
        losses of a dictionary that do not gather documents alike. While it trains, if lists of candidates or scores
        differ in length within a batch; when it resumes, if the checkpoint lies beyond the first pass over an
        ``IterableDataset``, lacks weights of the model (as those of LoRA adapters do, which transformers 5.3 cannot
        load), or holds parameters that the losses do not have.
    FloatingPointError
        While it trains, if the loss is not finite.
    """

    contrastive = _CONTRASTIVE

    def __init__(
        self,
        model: SentenceTransformer | None = None,
        args: SentenceTransformerTrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        loss: Any = None,
        evaluator: Any = None,
        data_collator: Callable | None = None,
        tokenizer: Any = None,
        model_init: Callable[[], SentenceTransformer] | None = None,
        **kwargs,
    ) -> None:
        args = args if args is not None else ColBERTTrainingArguments(output_dir="tmp_trainer")
        loss = loss if loss is not None else Contrastive
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            loss=loss,
            evaluator=evaluator,
            data_collator=data_collator,
            tokenizer=tokenizer,
            model_init=model_init,
            **kwargs,
        )
        if data_collator is None:
            # sentence-transformers has put its own here: with a model_init, there is no model to ask any earlier.
            collator: Any = _Collator(
                tokenize_fn=self.model.tokenize,
                router_mapping=args.router_mapping,  # type: ignore[arg-type]
                prompts=args.prompts,  # type: ignore[arg-type]
                all_special_ids=set(self.model.tokenizer.all_special_ids),
                include_prompt_lengths=self._include_prompt_length(),
            )
            self.data_collator = collator
            self._warn_about_query_column()
        self._apply_scorer()
        self._resolve_batch_sampler()
        self._warn_about_accumulation()
        if self.accelerator.dataloader_config.dispatch_batches is None:
            # By default one rank reads an IterableDataset for all, and can hand on nothing but tensors.
            self.accelerator.dataloader_config.dispatch_batches = False
        self.measure(_Meter())

    # Setting up

    def _apply_scorer(self) -> None:
        """Write ``args.scorer``, ``args.masking`` and ``args.fuse_projection`` where the losses read them."""
        flags = {name: getattr(self.args, name, None) for name in _FLAGS}
        flags = {name: value for name, value in flags.items() if value is not None}
        if not flags:
            return
        model_has_flags = hasattr(self.model, "scorer")
        following = [loss for loss in self.losses() if isinstance(loss, _FOLLOWING)]
        for loss in self.losses():
            # A loss from elsewhere may read the model's flags; PyLate's never do.
            if loss not in following and (not model_has_flags or isinstance(loss, _PYLATE)):
                raise ValueError(
                    f"args: {', '.join(f'{name}={value!r}' for name, value in flags.items())} has no effect on "
                    f"{type(loss).__module__}.{type(loss).__name__}, which does not read it; use a loss of "
                    "pylate_flash.losses"
                )
        for name, value in flags.items():
            if model_has_flags:
                setattr(self.model, name, value)
                continue
            for loss in following:
                if getattr(loss, name) is None:
                    setattr(loss, name, value)

    def _resolve_batch_sampler(self) -> None:
        in_batch_negatives = all(isinstance(loss, _CONTRASTIVE) for loss in self.losses())
        indexed = hasattr(self.train_dataset, "__len__")
        if isinstance(self.args.batch_sampler, _Default) and in_batch_negatives and indexed:
            # In a copy: the same arguments may serve another trainer, with another loss.
            self.args = copy.copy(self.args)
            self.args.batch_sampler = BatchSamplers.NO_DUPLICATES

    def _warn_about_accumulation(self) -> None:
        steps = self.args.gradient_accumulation_steps
        names = sorted({type(loss).__name__ for loss in self.losses() if isinstance(loss, _CONTRASTIVE)})
        if steps == 1 or not names:
            return
        size = self.args.per_device_train_batch_size
        message = (
            f"gradient_accumulation_steps={steps} does not give {' and '.join(names)} more in-batch negatives: each "
            f"batch of {size} is scored on its own. For more negatives in the same memory, use "
            f"losses.CachedContrastive(model, mini_batch_size={size}) with per_device_train_batch_size={size * steps} "
            "and gradient_accumulation_steps=1."
        )
        logger.warning(message)
        warnings.warn(message, stacklevel=3)

    def _warn_about_query_column(self) -> None:
        """PyLate's collator knows queries by the column's name: any other first column is encoded as documents."""
        datasets = self.train_dataset if isinstance(self.train_dataset, dict) else {"train": self.train_dataset}
        for dataset in datasets.values():
            columns = [
                name
                for name in getattr(dataset, "column_names", None) or []
                if "_id" not in name and name not in (*self.data_collator.valid_label_columns, "dataset_name")
            ]
            if columns and "query" not in columns[0] and "anchor" not in columns[0]:
                logger.warning(
                    "The first column, %r, has neither 'query' nor 'anchor' in its name: PyLate's collator encodes it "
                    "as documents. Rename it, e.g. dataset.rename_column(%r, 'query').",
                    columns[0],
                    columns[0],
                )

    def call_model_init(self, trial: Any = None) -> SentenceTransformer:
        """Make the model of a run, and give it the flags of the arguments."""
        model = super().call_model_init(trial=trial)
        if hasattr(self, "loss"):
            self.model = model
            self._apply_scorer()
        return model

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:  # type: ignore[override]
        """Load the weights, and the saved flags that neither the arguments nor the model of this run name."""
        super()._load_from_checkpoint(checkpoint_path)
        if not hasattr(self.model, "scorer"):
            return
        saved = json.loads((Path(checkpoint_path) / "config_sentence_transformers.json").read_text(encoding="utf-8"))
        for name in _FLAGS:
            named = getattr(self.args, name, None) is not None or self.model._model_config.get(name, "auto") != "auto"
            if not named and name in saved:
                setattr(self.model, name, saved[name])

    # Running

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args, **kwargs) -> Any:
        """The loss of a batch: under ``bf16`` and ``fp16``, what this package computes of it in autocast too.

        accelerate ends autocast after the model's forward, and makes its output float32. Embeddings that a layer has
        computed in half precision are such numbers still: multiplied as such, their products are the same, and faster.
        """
        loss = self.loss_of(inputs)
        autocast = isinstance(loss, _FOLLOWING) and options_of(loss) is not None
        with self.accelerator.autocast() if autocast else nullcontext():
            return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[arg-type]

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args, **kwargs) -> Tensor:
        """One forward and backward of a batch, counted."""
        loss: Any = self.loss_of(inputs)
        # Not in evaluations, which take none of the time that is measured.
        loss.stopwatch = self._stopwatch
        try:
            return super().training_step(model, inputs, *args, **kwargs)
        finally:
            loss.stopwatch = None

    def measurements(self, tokens_here: int | Tensor) -> dict[str, float]:
        """What has been counted since the last entry of the log, with the share of time of this package's losses."""
        measured = super().measurements(tokens_here)
        if any(isinstance(loss, _FOLLOWING) for loss in self.losses()):
            measured["loss_time_share"] = round(self._stopwatch.read() / self._meter.seconds, 4)
        return measured

    @property
    def _stopwatch(self) -> Stopwatch:
        assert isinstance(self._meter, _Meter)
        return self._meter.stopwatch
