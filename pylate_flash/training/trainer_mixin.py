"""What the trainers of both libraries are given: numbers of a run in its log, checks, and exact resuming."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from ..encoding.weights import no_missing_weights
from .distributed import world_size

__all__ = ["MeasuredTrainer", "Meter"]


class Meter(TrainerCallback):
    """Counts tokens, negatives and time between two log entries; evaluation and saving do not count as time."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin with the next entry."""
        self.finite: Tensor | None = None
        self.tokens: int | Tensor | None = None
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
        # Of what has no length, `state.epoch` counts no passes: transformers, which before 5 has said the pass by now,
        # takes all of `max_steps` for one.
        if hasattr(train_dataloader, "set_epoch") and hasattr(train_dataloader.dataset, "__len__"):
            train_dataloader.set_epoch(int(state.epoch or 0))


class _OwnParameters(TrainerCallback):
    """Trains the losses' own parameters, such as a learned temperature, as the model's are trained.

    Hosts hand them to the optimizer. What else they do, they do for the model alone: its gradients are cleared and
    averaged over the ranks, and its weights are in the checkpoints.
    """

    # In the folder of a checkpoint.
    FILE = "losses.safetensors"

    def __init__(self, trainer: MeasuredTrainer) -> None:
        self._trainer = trainer
        # Those that had a gradient: a guide, which is part of a loss and a model of its own, never has one.
        self._learned: set[nn.Parameter] = set()
        self._each: list[nn.Parameter] = []

    def _named(self) -> dict[str, nn.Parameter]:
        """Parameters of the losses that are not the model's; of a dictionary, after the data set's name."""
        trainer: Any = self._trainer
        models = {id(parameter) for model in (trainer.model, trainer.model_wrapped) for parameter in model.parameters()}
        losses = trainer.loss if isinstance(trainer.loss, dict) else {None: trainer.loss}
        return {
            name if dataset is None else f"{dataset}:{name}": parameter
            for dataset, loss in losses.items()
            for name, parameter in loss.named_parameters()
            if id(parameter) not in models
        }

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs) -> None:
        # Losses may share one.
        self._each = [parameter for parameter in dict.fromkeys(self._named().values()) if parameter.requires_grad]
        if world_size() > 1:
            for parameter in self._each:
                dist.broadcast(parameter.data, 0)
        optimizer.zero_grad()

    def on_step_end(self, args, state, control, optimizer=None, **kwargs) -> None:
        optimizer.zero_grad()

    def average_gradients(self) -> None:
        """Give every rank the mean of the ranks' gradients, as DistributedDataParallel does with the model's.

        Where no rank has one, there is none: the optimizer would take a step for one of zeros.
        """
        if not self._each:
            return
        there = torch.tensor([parameter.grad is not None for parameter in self._each], dtype=torch.int32)
        ranks = world_size()
        if ranks > 1:
            there = there.to(self._trainer.args.device)
            dist.all_reduce(there)
        for parameter, count in zip(self._each, there.tolist(), strict=True):
            if not count:
                continue
            self._learned.add(parameter)
            if ranks > 1:
                # Data sets have losses of their own: this rank's batch may have been of another one.
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad)
                parameter.grad /= ranks

    def save(self, folder: Path) -> None:
        """Write those that are learned, each a tensor by its name, or no file where there are none."""
        # Copies: losses may share one, and safetensors takes no two tensors that share memory.
        learned = {
            name: parameter.detach().clone().contiguous()
            for name, parameter in self._named().items()
            if parameter in self._learned
        }
        if learned:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(learned, folder / self.FILE)
        else:
            (folder / self.FILE).unlink(missing_ok=True)

    def load(self, folder: Path) -> None:
        """Read what `save` has written; without a file, leave them as they are.

        Raises
        ------
        ValueError
            If the losses have no such parameter, or one of another shape.
        """
        file = folder / self.FILE
        if not file.is_file():
            return
        own, saved = self._named(), load_file(file)
        for name, value in saved.items():
            if name not in own or own[name].shape != value.shape:
                found = f"one of shape {tuple(own[name].shape)}" if name in own else f"only {sorted(own)}"
                raise ValueError(
                    f"loss: {file} holds the parameter {name!r} of shape {tuple(value.shape)}, and the losses have "
                    f"{found}; expected the losses of the run that wrote the checkpoint"
                )
        for name, value in saved.items():
            own[name].data.copy_(value)
            self._learned.add(own[name])


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
        """Count with `meter` from now on, tell the sampler its epoch, and train the losses' own parameters.

        Raises
        ------
        ValueError
            If there are several ranks, and losses of a dictionary that do not gather documents alike.
        """
        self._check_gathering()
        self._meter = meter
        self._own = _OwnParameters(self)
        for callback in (meter, _Epochs(), self._own):
            self.add_callback(callback)

    def _check_gathering(self) -> None:
        """Ranks get batches of different data sets: one that gathers would wait for one that does not, for ever."""
        if self.args.world_size == 1 or not isinstance(self.loss, dict) or not isinstance(self.train_dataset, dict):
            return
        # Not those of other data sets, which are evaluated with, one data set after the other.
        ways = {dataset: _gathering(self.loss[dataset]) for dataset in self.train_dataset}
        if len(set(ways.values())) > 1:
            listed = ", ".join(f"{way} of {dataset!r}" for dataset, way in ways.items())
            raise ValueError(
                f"loss: {listed}, on {self.args.world_size} ranks, whose batches may be of different data sets; "
                "expected the same gather_across_devices and gather in every loss"
            )

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
        tokens = sum(_tokens(column) for column in features)
        self._meter.tokens = tokens if self._meter.tokens is None else self._meter.tokens + tokens
        loss: Any = self.loss_of(inputs)
        if isinstance(loss, self.contrastive) and "attention_mask" in features[0]:
            documents = (len(features) - 1) * features[0]["attention_mask"].shape[0]
            self._meter.negatives.append(documents * (world_size() if loss.gather_across_devices else 1) - 1)
        value = super().training_step(model, inputs, *args, **kwargs)
        if self.accelerator.sync_gradients:
            # As early as the model's are: before a gradient scaler looks for values that are not finite.
            self._own.average_gradients()
        finite = torch.isfinite(value)
        self._meter.finite = finite if self._meter.finite is None else self._meter.finite & finite
        return value

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs) -> Any:
        """Train as the host does.

        Raises
        ------
        ValueError
            If `resume_from_checkpoint` lies beyond the first pass over an `IterableDataset`, lacks weights of the
            model, or holds parameters that the losses do not have.
        """
        self._check_pass(resume_from_checkpoint)
        result = super().train(resume_from_checkpoint, *args, **kwargs)
        self._check_finite()
        return result

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        """Evaluate as the host does, and leave the training's random numbers alone: its data loader draws one."""
        with torch.random.fork_rng(devices=[]):
            return super().evaluate(*args, **kwargs)

    def _check_pass(self, checkpoint: str | bool | None) -> None:
        """What has no length counts as a pass of `max_steps`: in a later one, too many batches would be skipped."""
        if isinstance(checkpoint, bool):
            checkpoint = get_last_checkpoint(self.args.output_dir) if checkpoint else None
        if not checkpoint or hasattr(self.train_dataset, "__len__") or self.args.ignore_data_skip:
            return
        file = Path(checkpoint) / "trainer_state.json"
        epoch = json.loads(file.read_text(encoding="utf-8")).get("epoch") if file.is_file() else None
        # A first pass ends at 1 where it has exactly as many batches as the run has steps.
        if epoch is not None and epoch > 1:
            raise ValueError(
                f"resume_from_checkpoint: {checkpoint} lies beyond the first pass over train_dataset, an "
                f"{type(self.train_dataset).__name__} (epoch {epoch:.4g}), and where in a pass is not known; expected "
                "a checkpoint of the first pass, a Dataset, or ignore_data_skip=True, which begins the data anew"
            )

    def _check_finite(self) -> None:
        if self._meter.finite is None or self.args.fp16:
            return
        # On all ranks together: one that stopped alone would leave the others waiting for it.
        if not self.accelerator.gather(self._meter.finite.reshape(1)).all():
            raise FloatingPointError(
                f"the loss is not finite (step {self.state.global_step} or shortly before); a lower learning rate may "
                "help, or the scores in the data may be too large"
            )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._check_finite()
        if self.args.should_save:
            # First: a checkpoint is whole when the host has written its state, which it does last.
            self._own.save(Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}")
        super()._save_checkpoint(model, trial)

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:  # type: ignore[override]
        """Load the weights, all of them, and the losses' own parameters."""
        with no_missing_weights(f"the weights in {checkpoint_path}"):
            super()._load_from_checkpoint(checkpoint_path)
        self._own.load(Path(checkpoint_path))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with negatives, speed and memory if the entry is one of the training."""
        if "loss" in logs and self._meter.tokens is not None:
            self._check_finite()
            logs = {**logs, **self.measurements(self._meter.tokens)}
            self._meter.reset()
        super().log(logs, start_time)

    def measurements(self, tokens_here: int | Tensor) -> dict[str, float]:
        """What has been counted since the last entry of the log, with this rank's tokens."""
        meter, device = self._meter, self.args.device
        here = torch.stack([torch.as_tensor(count, device=device) for count in (tokens_here, _peak_memory(device))])
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


def _tokens(column: dict[str, Tensor]) -> int | Tensor:
    """The tokens of a column; sequences that are flattened into one have no padding, and no mask, and images no ids."""
    if "attention_mask" in column:
        return column["attention_mask"].sum()
    return column["input_ids"].numel() if "input_ids" in column else 0


def _gathering(loss: nn.Module) -> str:
    """How a loss, or one that it wraps, has the documents of other ranks."""
    for module in loss.modules():
        if getattr(module, "gather_across_devices", False):
            return f"gather_across_devices=True, gather={getattr(module, 'gather', 'all_gather')!r}"
    return "gather_across_devices=False"


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
