"""A run of `pylate-flash train`: batches, interruption, and progress."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import BatchSampler
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState

from ..common import note
from ..ranks import Alone
from .output import first_non_finite

if TYPE_CHECKING:
    from datasets import Dataset

    from ...index.ranks import Ranks
    from ...training.trainer_mixin import MeasuredTrainer
    from ..models import Model

# Seconds within which a repeated signal counts as the same one.
SAME_SIGNAL = 5.0


class DistinctTexts(BatchSampler):
    """Batches without duplicate texts, which would be their own negatives; every epoch covers all lines.

    The batches are those of sentence-transformers' `no_duplicates`, whose length assumes that all batches are full.
    Trainers rely on the length: if texts repeat, they would end an epoch before most lines had their turn.

    Every epoch has as many batches as the first, as trainers count epochs and resume by it. Another order may need a
    few more or fewer: the epoch then skips the last ones, of a line or two, or starts over.

    `dataset` has columns of texts; `drop_last` and `valid_label_columns` are passed to every sampler, but unused. The
    `generator` draws the order of the lines, seeded with `seed` for the first epoch.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        drop_last: bool = False,
        valid_label_columns: list[str] | None = None,
        generator: torch.Generator | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(range(len(dataset)), batch_size, drop_last)
        self.generator = torch.Generator() if generator is None else generator
        self.seed, self.epoch = seed, 0
        numbers: dict[str, int] = {}
        columns = (
            [numbers.setdefault(text, len(numbers)) for text in dataset[name][:]] for name in dataset.column_names
        )
        self._texts = list(zip(*columns, strict=True))
        self._length = len(self._batches())

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        repeated = itertools.chain.from_iterable(self._batches() for _ in itertools.count())
        return itertools.islice(repeated, len(self))

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch from now on."""
        self.epoch = epoch

    def _batches(self) -> list[list[int]]:
        """Assign every line to the first batch that has room and none of its texts."""
        self.generator.manual_seed(self.seed + self.epoch)
        batches: list[list[int]] = []
        texts_in: list[set[int]] = []
        # Index of the first batch with room, and per text that of the first one with room and without this text: if a
        # few texts repeat in all batches, a line need not scan all of them.
        first_with_room = 0
        first_without: dict[int, int] = {}

        def has_room(batch: int, *texts: int) -> bool:
            return batch == len(batches) or (
                len(batches[batch]) < self.batch_size and texts_in[batch].isdisjoint(texts)
            )

        for line in torch.randperm(len(self._texts), generator=self.generator).tolist():
            texts = self._texts[line]
            batch = max(first_with_room, *(first_without.get(text, 0) for text in texts))
            while not has_room(batch, *texts):
                batch += 1
            if batch == len(batches):
                batches.append([])
                texts_in.append(set())
            batches[batch].append(line)
            texts_in[batch].update(texts)
            while not has_room(first_with_room):
                first_with_room += 1
            for text in texts:
                first_without[text] = max(first_with_room, first_without.get(text, 0))
                while not has_room(first_without[text], text):
                    first_without[text] += 1
        return batches


class StopRequest:
    """Handle Ctrl-C and SIGTERM in its context: the first is a request to stop, the second interrupts.

    With several `ranks`, a signal to one is a request to all; another within seconds is the same signal, forwarded by
    torchrun.
    """

    def __init__(self, ranks: Ranks | Alone | None = None) -> None:
        self.signal: int | None = None  # received
        self.ranks = ranks or Alone()
        self._before: dict[int, Any] = {}
        self._came = 0.0

    def __enter__(self) -> StopRequest:
        # Only the main thread may set handlers; a signal that is ignored on purpose (nohup) stays ignored.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self.signal is not None:
            if self.ranks.size == 1 or now - self._came > SAME_SIGNAL:
                raise KeyboardInterrupt
            return
        self.signal, self._came = number, now
        if self.ranks.rank:
            return
        with contextlib.suppress(OSError):
            # `print` is not reentrant, and may be what was interrupted.
            os.write(2, b"\nStopping after this step; repeat to stop at once, without saving\n")

    def agree(self) -> None:
        """Share a request to any rank with all; every rank must call it."""
        signals = [number for number in self.ranks.gather(self.signal) if number]
        if signals:
            self.signal, self._came = signals[0], self._came or time.monotonic()


class EvaluationStopped(Exception):
    """Raised to abort an evaluation if the run is to end."""


class Guard(TrainerCallback):
    """Ends a run on request, with a checkpoint, and prevents checkpoints of a model that is not finite.

    Adds itself to the trainer. When the run is to end, a current or due evaluation is skipped.
    """

    def __init__(self, trainer: MeasuredTrainer, request: StopRequest) -> None:
        self.model, self.request = cast("Model", trainer.model), request
        # `started`: training has begun, so the checkpoint has been loaded; `saving`: a checkpoint is being written.
        self.started = self.saving = False
        self._saved_at: int | None = None
        trainer.add_callback(self)
        self._evaluate = trainer.evaluate
        trainer.evaluate = self._evaluate_until_asked  # type: ignore[method-assign]

    def _evaluate_until_asked(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        try:
            return self._evaluate(*args, **kwargs)
        except EvaluationStopped:
            return {}

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.started = True

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step >= state.max_steps:
            # The model itself is written next; log the last loss.
            control.should_save, control.should_log = False, True
        self._heed_request(state, control)

    def on_epoch_end(self, args, state, control, **kwargs) -> None:
        self._heed_request(state, control)

    def on_prediction_step(self, args, state, control, **kwargs) -> None:
        # With several ranks, the others would continue their evaluation.
        if self.request.signal is not None and self.request.ranks.size == 1:
            self._heed_request(state, control)
            raise EvaluationStopped

    def on_save(self, args, state, control, **kwargs) -> None:
        self.saving, self._saved_at = False, state.global_step

    def _heed_request(self, state: TrainerState, control: TrainerControl) -> None:
        self.request.agree()
        if self.request.signal is not None:
            control.should_training_stop = control.should_log = True
            control.should_evaluate = False
            control.should_save = self._saved_at != state.global_step < state.max_steps
        if control.should_save:
            name = first_non_finite(self.model)
            if name is not None:
                raise FloatingPointError(
                    f"after step {state.global_step} the model is not finite (first such tensor: {name}); a lower "
                    "learning rate may help"
                )
            self.saving = True


class Progress(TrainerCallback):
    """A progress bar if standard error is a terminal, and a line per log entry, on standard error."""

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", dynamic_ncols=True, disable=None)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.bar.update(state.global_step - self.bar.n if not self.bar.disable else 0)

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and "eval_loss" in logs:
            note(f"step {state.global_step} of {state.max_steps}, loss {logs['eval_loss']:.4g} on --eval-data")
        if not logs or "loss" not in logs:
            return
        parts = [f"step {state.global_step} of {state.max_steps}", f"loss {logs['loss']:.4g}"]
        parts += [f"lr {logs['learning_rate']:.3g}", f"{logs['tokens_per_second']:.0f} tokens/s"]
        parts += [f"peak {logs['peak_memory_mib']:.0f} MiB"]
        note(", ".join(parts))

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self.bar.close()


class LossBar(Progress):
    """Only the bar, with the last loss."""

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and "loss" in logs:
            self.bar.set_postfix_str(f"loss {logs['loss']:.3f}")
