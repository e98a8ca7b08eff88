"""sentence-transformers' trainer, set up for ColBERT models.

``ColBERTTrainer`` is ``SentenceTransformerTrainer`` with PyLate's collator, a contrastive loss by default, the flag
``scorer`` as a training argument, and the three numbers that matter most in a contrastive run in every log entry:
in-batch negatives per query, tokens per second, and peak memory.
"""

from __future__ import annotations

from .hosts.pylate import _needs  # noqa: F401

# isort: split
import copy
import itertools
import json
import logging
import numbers
import warnings
from collections.abc import Callable, Mapping
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
# Training arguments that are also flags of the model.
_FLAGS = ("scorer", "masking", "fuse_projection")
# The arguments that a batch may come from.
_DATASETS = "train_dataset or eval_dataset"


class _Default(str):
    """A batch sampler not set by the user: equal to the sampler's name as a string, but distinguishable by type."""


@dataclass
class ColBERTTrainingArguments(SentenceTransformerTrainingArguments):
    """sentence-transformers' training arguments, plus the scorer of the run.

    Parameters
    ----------
    scorer
        ``"pylate_flash"``, ``"torch"``, ``"flash"``, ``"lik"`` or ``"auto"``: written to the model's flag, hence saved
        with the model and followed by the losses and evaluators. A plain ``pylate.models.ColBERT`` has no such flag:
        then it is set on the losses of this package, and not saved. Default: leave model and losses unchanged.
    masking
        ``"exclude"`` or ``"zero"``, stored likewise.
    fuse_projection
        Whether the losses score from the encoder's hidden states, which does not help in training (see
        :class:`pylate_flash.losses.Contrastive`), stored likewise.
    batch_sampler
        Default: ``"batch_sampler"``, as in sentence-transformers, which :class:`ColBERTTrainer` replaces by
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
        is_set = self.batch_sampler is not None and not isinstance(self.batch_sampler, _Default)
        if self.scorer is not None:
            self.scorer = check_backend(self.scorer, name="scorer")
        if self.masking is not None:
            check_masking(self.masking)
        super().__post_init__()
        if not is_set:
            # Other trainers do not handle None: they would make batches of one row.
            self.batch_sampler = _Default(BatchSamplers.BATCH_SAMPLER.value)


class _Meter(Meter):
    """Meter that also measures the time of this package's losses."""

    def reset(self) -> None:
        super().reset()
        self.stopwatch = Stopwatch()


class _Collator(ColBERTCollator):
    """PyLate's collator, with checks that texts and scores are such, and as many in all lists of a batch."""

    def __call__(self, features: list[dict]) -> dict[str, Tensor]:
        """Collate rows into a batch."""
        label_name = next((label for label in self.valid_label_columns if label in features[0]), None)
        label = None if label_name is None else features[0][label_name]
        for name, value in features[0].items():
            lengths = {len(row[name]) if isinstance(row[name], list) else None for row in features}
            if len(lengths) > 1:
                listed = " and ".join(map(str, sorted(lengths, key=lambda length: length or 0)))
                raise ValueError(
                    f"{_DATASETS}: the lists in the column {name!r} have {listed} elements; expected the same "
                    "number in every row of a batch"
                )
            if lengths == {0}:
                raise ValueError(f"{_DATASETS}: empty lists in the column {name!r}; expected at least one element")
            # PyLate's collator skips the columns of ids.
            if name != "dataset_name" and "_id" not in name:
                self._check(name, [row[name] for row in features], name == label_name)
            if isinstance(value, list) and isinstance(label, list) and len(label) != len(value):
                raise ValueError(
                    f"{_DATASETS}: {len(value)} elements in the column {name!r} and {len(label)} scores; expected "
                    "one score per element"
                )
        return super().__call__(features)

    @staticmethod
    def _check(name: str, values: list[Any], are_scores: bool) -> None:
        """Raise TypeError if a text or a score of a column is missing, or is the other of the two."""
        wrong = type(None), str if are_scores else numbers.Number
        for value in itertools.chain.from_iterable(v if isinstance(v, list) else [v] for v in values):
            if isinstance(value, wrong):
                expected = "scores, as numbers" if are_scores else "texts"
                raise TypeError(f"{_DATASETS}: {value!r:.100} in the column {name!r}; expected {expected}")


def _check_inputs(model: Any, loss: Any, **datasets: Any) -> None:
    """Raise TypeError for arguments of another kind, which sentence-transformers would trip over in its depths."""
    if model is not None and not callable(model):
        raise TypeError(f"model: {type(model).__name__}; expected a ColBERT model")
    for each in loss.values() if isinstance(loss, Mapping) else [loss]:
        if not callable(each):
            raise TypeError(f"loss: {type(each).__name__}; expected a loss, a function of the model, or a dictionary")
    for name, data in datasets.items():
        for each in data.values() if isinstance(data, Mapping) else [data]:
            if each is not None and not hasattr(each, "column_names"):
                raise TypeError(f"{name}: {type(each).__name__}; expected a Dataset of datasets, or a dictionary")


class ColBERTTrainer(MeasuredTrainer, SentenceTransformerTrainer):
    """sentence-transformers' trainer with defaults for ColBERT models.

    Columns are what PyLate's collator expects: the query first, in a column with ``query`` or ``anchor`` in its name,
    then the positive and any hard negatives; or, for :class:`~pylate_flash.losses.Distillation`, what PyLate's
    ``KDProcessing`` makes of ``query_id``, ``document_ids`` and ``scores``. Several data sets in a dictionary, with a
    loss each, work as in sentence-transformers; so does an ``IterableDataset``, with ``max_steps``.

    Each training log entry also has

    - ``in_batch_negatives_per_query``: documents a query's positive competes with, over all document columns and, for a
      loss that gathers, all ranks (the mean over the batches since the last entry; contrastive losses only),
    - ``tokens_per_second``: query and document tokens without padding, summed over the ranks, divided by the time since
      the last entry, excluding evaluation and saving,
    - ``loss_time_share``: fraction of that time spent on this package's scores, loss and their gradients, on this rank
      (for losses of this package; excludes the backward of the encoder, and that of ``fuse_projection`` and of
      ``gather="ring"`` when the embeddings are not cached),
    - ``peak_memory_mib``: peak memory allocated by torch on the GPU so far, or, without a GPU, peak resident memory of
      the process; the maximum over the ranks.

    Under ``bf16`` and ``fp16``, the losses of this package are computed in autocast, like the model.

    A non-finite loss ends the training at the next log entry or checkpoint, because every weight has become NaN by
    then, but not under ``fp16``, whose loss scaler skips such steps. A run that resumes from a checkpoint continues as
    if it had not been interrupted (bitwise on a CPU); over an ``IterableDataset``, whose length is unknown, only within
    the first pass.

    Parameters of a loss, such as a learned ``temperature``, are trained like the model's, on several GPUs too. They are
    saved with each checkpoint, in ``losses.safetensors``, and not with the model.

    Parameters
    ----------
    model
        ColBERT model, ours or PyLate's.
    args
        :class:`ColBERTTrainingArguments`, or sentence-transformers' training arguments.
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
        If ``args.scorer`` or ``args.masking`` is set and a loss would not follow it; if there are several ranks and the
        losses of a dictionary gather documents differently. During training, if lists of candidates or scores are empty
        or differ in length within a batch; when resuming, if the checkpoint lies beyond the first pass over an
        ``IterableDataset``, lacks weights of the model (as LoRA checkpoints do, which transformers 5.3 cannot load), or
        holds parameters that the losses do not have.
    TypeError
        If ``model``, ``loss`` or a data set is of another kind. During training, if a text or score is missing, or of
        another type.
    FloatingPointError
        During training, if the loss is not finite.
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
        _check_inputs(model, loss, train_dataset=train_dataset, eval_dataset=eval_dataset)
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
            # Replace sentence-transformers' collator here: with a model_init, the model does not exist any earlier.
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
            # By default one rank reads an IterableDataset for all ranks, and can send only tensors to them.
            self.accelerator.dataloader_config.dispatch_batches = False
        self.measure(_Meter())

    # Setup

    def _apply_scorer(self) -> None:
        """Write ``args.scorer``, ``args.masking`` and ``args.fuse_projection`` where the losses read them."""
        flags = {name: getattr(self.args, name, None) for name in _FLAGS}
        flags = {name: value for name, value in flags.items() if value is not None}
        if not flags:
            return
        model_has_flags = hasattr(self.model, "scorer")
        flag_losses = [loss for loss in self.losses() if isinstance(loss, _FOLLOWING)]
        for loss in self.losses():
            # A third-party loss may read the model's flags; PyLate's never do.
            if loss not in flag_losses and (not model_has_flags or isinstance(loss, _PYLATE)):
                raise ValueError(
                    f"args: {', '.join(f'{name}={value!r}' for name, value in flags.items())} has no effect on "
                    f"{type(loss).__module__}.{type(loss).__name__}, which does not read it; use a loss of "
                    "pylate_flash.losses"
                )
        for name, value in flags.items():
            if model_has_flags:
                setattr(self.model, name, value)
                continue
            for loss in flag_losses:
                if getattr(loss, name) is None:
                    setattr(loss, name, value)

    def _resolve_batch_sampler(self) -> None:
        in_batch_negatives = all(isinstance(loss, _CONTRASTIVE) for loss in self.losses())
        has_length = hasattr(self.train_dataset, "__len__")
        if isinstance(self.args.batch_sampler, _Default) and in_batch_negatives and has_length:
            # Copy: the same arguments may be used by another trainer with another loss.
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
        """Warn about a first column that PyLate's collator, which detects queries by name, encodes as documents."""
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
        """Create the model of a run and set its flags from the arguments."""
        model = super().call_model_init(trial=trial)
        if hasattr(self, "loss"):
            self.model = model
            self._apply_scorer()
        return model

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:  # type: ignore[override]
        """Load the weights, and those saved flags that neither the arguments nor the model of this run set."""
        super()._load_from_checkpoint(checkpoint_path)
        if not hasattr(self.model, "scorer"):
            return
        saved = json.loads((Path(checkpoint_path) / "config_sentence_transformers.json").read_text(encoding="utf-8"))
        for name in _FLAGS:
            ours = self.model._model_config.get(name)
            is_set = getattr(self.args, name, None) is not None or ours not in (None, "auto")
            if not is_set and saved.get(name) is not None:
                setattr(self.model, name, saved[name])

    # Training

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args, **kwargs) -> Any:
        """Compute the loss of a batch; under ``bf16`` and ``fp16``, this package's losses run in autocast too.

        accelerate ends autocast after the model's forward and converts its output to float32. Embeddings computed in
        half precision still hold half-precision values: half-precision multiplication gives the same products, faster.
        """
        loss = self.loss_of(inputs)
        autocast = isinstance(loss, _FOLLOWING) and options_of(loss) is not None
        with self.accelerator.autocast() if autocast else nullcontext():
            return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[arg-type]

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args, **kwargs) -> Tensor:
        """Run the forward and backward of a batch, and time its loss."""
        loss: Any = self.loss_of(inputs)
        # Only while training: evaluations do not count towards the measured time.
        loss.stopwatch = self._stopwatch
        try:
            return super().training_step(model, inputs, *args, **kwargs)
        finally:
            loss.stopwatch = None

    def measurements(self, tokens_here: int | Tensor) -> dict[str, float]:
        """Return the measurements since the last log entry, with the share of time of this package's losses."""
        measured = super().measurements(tokens_here)
        if any(isinstance(loss, _FOLLOWING) for loss in self.losses()):
            measured["loss_time_share"] = round(self._stopwatch.read() / self._meter.seconds, 4)
        return measured

    @property
    def _stopwatch(self) -> Stopwatch:
        assert isinstance(self._meter, _Meter)
        return self._meter.stopwatch
