"""A run of `pylate-flash train`: its batches, what may interrupt it, and what it shows."""

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

# Seconds within which ranks are told of one signal twice.
SAME_SIGNAL = 5.0


class DistinctTexts(BatchSampler):
    """Batches of lines in which no text comes twice, because it would be its own negative; of all lines in every epoch.

    The batches are those of sentence-transformers' `no_duplicates`, whose length is that of batches which are all full.
    Trainers count on the length: where texts repeat, they would end an epoch before most lines had their turn.

    Every epoch has as many batches as the first, by which trainers count epochs and resume. In the order of another
    one, a few more or fewer may be needed: it ends before the last ones, of a line or two, or begins again.

    `dataset` has columns of texts; `drop_last` and `valid_label_columns` are given to every sampler, and not used. The
    `generator` draws the order of the lines, and begins the first epoch with the `seed`.
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
        again_and_again = itertools.chain.from_iterable(self._batches() for _ in itertools.count())
        return itertools.islice(again_and_again, len(self))

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch next."""
        self.epoch = epoch

    def _batches(self) -> list[list[int]]:
        """Every line once, in the first batch that has room and none of its texts."""
        self.generator.manual_seed(self.seed + self.epoch)
        batches: list[list[int]] = []
        texts_in: list[set[int]] = []
        # Batches before the first with room; and of a text, batches before the first that has room and not this text.
        # So where a few texts fill all batches, each line finds its own without looking at all of them.
        full = 0
        taken: dict[int, int] = {}

        def has_room(batch: int, *texts: int) -> bool:
            return batch == len(batches) or (
                len(batches[batch]) < self.batch_size and texts_in[batch].isdisjoint(texts)
            )

        for line in torch.randperm(len(self._texts), generator=self.generator).tolist():
            texts = self._texts[line]
            batch = max(full, *(taken.get(text, 0) for text in texts))
            while not has_room(batch, *texts):
                batch += 1
            if batch == len(batches):
                batches.append([])
                texts_in.append(set())
            batches[batch].append(line)
            texts_in[batch].update(texts)
            while not has_room(full):
                full += 1
            for text in texts:
                taken[text] = max(full, taken.get(text, 0))
                while not has_room(taken[text], text):
                    taken[text] += 1
        return batches


class StopRequest:
    """Ctrl-C and SIGTERM while this is entered: a request the first time, an interruption the second time.

    Of several `ranks`, what came to one is a request to all, and what comes within seconds of it is the same, which
    torchrun passes on.
    """

    def __init__(self, ranks: Ranks | Alone | None = None) -> None:
        self.signal: int | None = None  # that came
        self.ranks = ranks or Alone()
        self._before: dict[int, Any] = {}
        self._came = 0.0

    def __enter__(self) -> StopRequest:
        # Python lets no other thread set handlers, and a process that ignores a signal (nohup) is meant to.
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
            # Not by `print`, which may be what was interrupted.
            os.write(2, b"\nStopping after this step; once more to stop at once, without saving\n")

    def agree(self) -> None:
        """Hear of a request to any rank; all have to call it."""
        came = [number for number in self.ranks.gather(self.signal) if number]
        if came:
            self.signal, self._came = came[0], self._came or time.monotonic()


class EvaluationStopped(Exception):
    """The run is to end, and an evaluation is under way."""


class Guard(TrainerCallback):
    """Ends a run when that is asked for, with a checkpoint, and lets none be written of a model that is not finite.

    Adds itself to the trainer. An evaluation that is under way, or due, when the run is to end is left out.
    """

    def __init__(self, trainer: MeasuredTrainer, request: StopRequest) -> None:
        self.model, self.request = cast("Model", trainer.model), request
        # Once training has begun, what a run resumes from has been loaded; and whether a checkpoint is being written.
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
            # The model itself is written next, and the last loss is told.
            control.should_save, control.should_log = False, True
        self._heed_request(state, control)

    def on_epoch_end(self, args, state, control, **kwargs) -> None:
        self._heed_request(state, control)

    def on_prediction_step(self, args, state, control, **kwargs) -> None:
        # The others would go on with theirs.
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
    """A bar, where standard error is a terminal, and a line for each log entry, on standard error."""

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", dynamic_ncols=True, disable=None)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.bar.update(state.global_step - self.bar.n if not self.bar.disable else 0)

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and "eval_loss" in logs:
            note(f"step {state.global_step} of {state.max_steps}, loss {logs['eval_loss']:.4g} of --eval-data")
        if not logs or "loss" not in logs:
            return
        parts = [f"step {state.global_step} of {state.max_steps}", f"loss {logs['loss']:.4g}"]
        parts += [f"lr {logs['learning_rate']:.3g}", f"{logs['tokens_per_second']:.0f} tokens/s"]
        parts += [f"at most {logs['peak_memory_mib']:.0f} MiB"]
        note(", ".join(parts))

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self.bar.close()


class LossBar(Progress):
    """The bar alone, with the last loss."""

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and "loss" in logs:
            self.bar.set_postfix_str(f"loss {logs['loss']:.3f}")
