"""What the trainers of both libraries are given: numbers of a run in its log, checks, and exact resuming."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

__all__ = ["MeasuredTrainer", "Meter"]


class Meter(TrainerCallback):
    """Counts tokens, negatives and time between two log entries; evaluation and saving do not count as time."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin with the next entry."""
        self.finite: Tensor | None = None
        self.tokens: Tensor | None = None
        self.negatives: list[int] = []
        self.seconds = 0.0
        self.since = time.perf_counter()

    def add_time(self) -> None:
        """Count the time since the last call, or since what is left out."""
        now = time.perf_counter()
        self.seconds += now - self.since
        self.since = now

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.reset()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.add_time()

    def _leave_out(self, args, state, control, **kwargs) -> None:
        self.since = time.perf_counter()

    # The trainer logs, evaluates and saves after the end of a step: what passed since then was none of the training.
    on_log = on_evaluate = on_save = _leave_out


class _Epochs(TrainerCallback):
    """Tells the sampler its epoch, also that of a run that resumes in the middle of one.

    The data loader that skips the batches of before keeps this from it, so that they would come in the first epoch's
    order.
    """

    def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs) -> None:
        if hasattr(train_dataloader, "set_epoch"):
            train_dataloader.set_epoch(int(state.epoch or 0))


class MeasuredTrainer(Trainer):
    """Put before a host's trainer among the bases of a class, whose constructor ends with `measure`.

    Attributes
    ----------
    contrastive
        The losses whose queries meet the documents of the whole batch.
    """

    contrastive: tuple[type[nn.Module], ...] = ()
    loss: Any

    def measure(self, meter: Meter) -> None:
        """Count with `meter` from now on, and tell the sampler its epoch."""
        self._meter = meter
        self.add_callback(meter)
        self.add_callback(_Epochs())

    def losses(self) -> list[nn.Module]:
        """Every loss that is trained with."""
        return list(self.loss.values()) if isinstance(self.loss, dict) else [self.loss]

    def loss_of(self, inputs: dict[str, Any]) -> nn.Module:
        """The loss of a batch."""
        return self.loss[inputs["dataset_name"]] if isinstance(self.loss, dict) else self.loss

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args, **kwargs) -> Tensor:
        """One forward and backward of a batch, counted."""
        features, _ = self.collect_features(inputs)  # type: ignore[attr-defined]  # as every host's trainer has it
        # On a GPU this stays there until the next log entry: reading it here would wait for the device at every step.
        tokens = torch.stack([_tokens(column) for column in features]).sum()
        self._meter.tokens = tokens if self._meter.tokens is None else self._meter.tokens + tokens
        loss: Any = self.loss_of(inputs)
        if isinstance(loss, self.contrastive) and "attention_mask" in features[0]:
            documents = (len(features) - 1) * features[0]["attention_mask"].shape[0]
            self._meter.negatives.append(documents * (_world_size() if loss.gather_across_devices else 1) - 1)
        value = super().training_step(model, inputs, *args, **kwargs)
        finite = torch.isfinite(value)
        self._meter.finite = finite if self._meter.finite is None else self._meter.finite & finite
        return value

    def train(self, *args, **kwargs) -> Any:
        """Train as the host does."""
        result = super().train(*args, **kwargs)
        self._check_finite()
        return result

    def _check_finite(self) -> None:
        if self._meter.finite is None or self.args.fp16:
            return
        # On all ranks together: one that stopped alone would leave the others waiting for it.
        if not self.accelerator.gather(self._meter.finite.reshape(1)).all():
            raise FloatingPointError(
                f"the loss is not finite (step {self.state.global_step} or shortly before); a lower learning rate may "
                "help, or the scores in the data may be too large"
            )

    def _save_checkpoint(self, *args, **kwargs) -> None:
        self._check_finite()
        super()._save_checkpoint(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with negatives, speed and memory if the entry is one of the training."""
        if "loss" in logs and self._meter.tokens is not None:
            self._check_finite()
            logs = {**logs, **self.measurements(self._meter.tokens)}
            self._meter.reset()
        super().log(logs, start_time)

    def measurements(self, tokens_here: Tensor) -> dict[str, float]:
        """What has been counted since the last entry of the log, with this rank's tokens."""
        meter, device = self._meter, self.args.device
        here = torch.stack([tokens_here.to(device), torch.tensor(_peak_memory(device), device=device)])
        ranks = self.accelerator.gather(here.unsqueeze(0))
        tokens, peak = ranks[:, 0].sum().item(), ranks[:, 1].max().item()
        # Reading the tokens has waited for the device: this is the time of all that was started since the last entry.
        meter.add_time()
        measured = {
            "tokens_per_second": round(tokens / meter.seconds, 1),
            "peak_memory_mib": round(peak / 2**20, 1),
        }
        if meter.negatives:
            measured["in_batch_negatives_per_query"] = round(sum(meter.negatives) / len(meter.negatives), 2)
        return measured


def _tokens(column: dict[str, Tensor]) -> Tensor:
    """The tokens of a column; sequences that are flattened into one have no padding, and no mask."""
    mask = column.get("attention_mask")
    return torch.tensor(column["input_ids"].numel()) if mask is None else mask.sum()


def _world_size() -> int:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if distributed else 1


def _peak_memory(device: torch.device) -> int:
    """Most bytes so far: allocated by torch on a CUDA device; resident in the process for any other device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
