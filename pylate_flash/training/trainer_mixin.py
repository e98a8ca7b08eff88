"""Additions to the trainers of both libraries: metrics of the run in the log, checks, and exact resuming."""

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


class Meter(TrainerCallback):
    """Counts tokens, negatives and time between two log entries; the time excludes evaluation and saving."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start counting for the next entry."""
        self.finite: Tensor | None = None
        self.tokens: int | Tensor | None = None
        self.negatives: list[int] = []
        self.seconds = 0.0
        self.since = time.perf_counter()

    def add_time(self) -> None:
        """Add the time since the last call, or since the last excluded event."""
        now = time.perf_counter()
        self.seconds += now - self.since
        self.since = now

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.reset()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.add_time()

    def _leave_out(self, args, state, control, **kwargs) -> None:
        self.since = time.perf_counter()

    # The trainer logs, evaluates and saves after the end of a step: the time since then is not training time.
    on_log = on_evaluate = on_save = _leave_out


class _Epochs(TrainerCallback):
    """Sets the sampler's epoch, also in a run that resumes in the middle of an epoch.

    The data loader that skips the batches seen before does not forward the epoch to the sampler, so the batches would
    come in the first epoch's order.
    """

    def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs) -> None:
        # Without a length, `state.epoch` does not count passes: transformers treats all of `max_steps` as one (before
        # version 5 it has already set the epoch by now).
        if hasattr(train_dataloader, "set_epoch") and hasattr(train_dataloader.dataset, "__len__"):
            train_dataloader.set_epoch(int(state.epoch or 0))


class _OwnParameters(TrainerCallback):
    """Trains the losses' own parameters, such as a learned temperature, like the model's.

    Hosts pass them to the optimizer, but clear gradients, average them over the ranks and save weights in checkpoints
    for the model only.
    """

    # File name inside a checkpoint folder.
    FILE = "losses.safetensors"

    def __init__(self, trainer: MeasuredTrainer) -> None:
        self._trainer = trainer
        # Parameters that had a gradient: those of a guide model, which is a submodule of a loss, never have one.
        self._learned: set[nn.Parameter] = set()
        self._each: list[nn.Parameter] = []

    def _named(self) -> dict[str, nn.Parameter]:
        """Return the losses' parameters that are not the model's; in a dictionary, prefixed by the data set."""
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
        # Losses may share a parameter.
        self._each = [parameter for parameter in dict.fromkeys(self._named().values()) if parameter.requires_grad]
        if world_size() > 1:
            for parameter in self._each:
                dist.broadcast(parameter.data, 0)
        optimizer.zero_grad()

    def on_step_end(self, args, state, control, optimizer=None, **kwargs) -> None:
        optimizer.zero_grad()

    def average_gradients(self) -> None:
        """Average the gradients over the ranks, as DistributedDataParallel does for the model.

        If no rank has a gradient it stays None: the optimizer would take a step for a gradient of zeros.
        """
        if not self._each:
            return
        counts = torch.tensor([parameter.grad is not None for parameter in self._each], dtype=torch.int32)
        ranks = world_size()
        if ranks > 1:
            counts = counts.to(self._trainer.args.device)
            dist.all_reduce(counts)
        for parameter, count in zip(self._each, counts.tolist(), strict=True):
            if not count:
                continue
            self._learned.add(parameter)
            if ranks > 1:
                # Each data set may have its own loss, so this rank's batch may not have used this parameter.
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad)
                parameter.grad /= ranks

    def save(self, folder: Path) -> None:
        """Write the learned parameters, as named tensors; no file if there are none."""
        # Clone: losses may share a parameter, and safetensors rejects tensors that share memory.
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
        """Load the parameters that `save` has written; without a file, leave them unchanged.

        Raises
        ------
        ValueError
            If the losses lack a saved parameter, or have it in another shape.
        """
        file = folder / self.FILE
        if not file.is_file():
            return
        own, saved = self._named(), load_file(file)
        for name, value in saved.items():
            if name not in own or own[name].shape != value.shape:
                actual = f"one of shape {tuple(own[name].shape)}" if name in own else f"only {sorted(own)}"
                raise ValueError(
                    f"loss: {file} holds the parameter {name!r} of shape {tuple(value.shape)}, and the losses have "
                    f"{actual}; expected the losses of the run that wrote the checkpoint"
                )
        for name, value in saved.items():
            own[name].data.copy_(value)
            self._learned.add(own[name])


class MeasuredTrainer(Trainer):
    """Mixin to precede a host's trainer in the bases of a class, whose constructor ends with `measure`.

    Attributes
    ----------
    contrastive
        The loss classes that score queries against the documents of the full batch.
    """

    contrastive: tuple[type[nn.Module], ...] = ()
    loss: Any

    def measure(self, meter: Meter) -> None:
        """Install `meter` and the callbacks that set the sampler's epoch and train the losses' own parameters.

        Raises
        ------
        ValueError
            If there are several ranks and the losses of a dictionary gather documents differently.
        """
        self._check_gathering()
        self._meter = meter
        self._own = _OwnParameters(self)
        for callback in (meter, _Epochs(), self._own):
            self.add_callback(callback)

    def _check_gathering(self) -> None:
        """Raise if losses gather differently: ranks get batches of different data sets, which would deadlock."""
        if self.args.world_size == 1 or not isinstance(self.loss, dict) or not isinstance(self.train_dataset, dict):
            return
        # Losses used only for evaluation do not matter: it runs one data set at a time.
        gatherings = {dataset: _gathering(self.loss[dataset]) for dataset in self.train_dataset}
        if len(set(gatherings.values())) > 1:
            listed = ", ".join(f"{gathering} of {dataset!r}" for dataset, gathering in gatherings.items())
            raise ValueError(
                f"loss: {listed}, on {self.args.world_size} ranks, whose batches may come from different data sets; "
                "expected the same gather_across_devices and gather in every loss"
            )

    def losses(self) -> list[nn.Module]:
        """Return all losses of the trainer."""
        return list(self.loss.values()) if isinstance(self.loss, dict) else [self.loss]

    def loss_of(self, inputs: dict[str, Any]) -> nn.Module:
        """Return the loss that applies to a batch."""
        return self.loss[inputs["dataset_name"]] if isinstance(self.loss, dict) else self.loss

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args, **kwargs) -> Tensor:
        """Run the forward and backward of a batch, and count its tokens and negatives."""
        features, _ = self.collect_features(inputs)  # type: ignore[attr-defined]  # as every host's trainer has it
        # On a GPU the count stays on the device until the next log entry: reading it here would sync at every step.
        tokens = sum(_tokens(column) for column in features)
        self._meter.tokens = tokens if self._meter.tokens is None else self._meter.tokens + tokens
        loss: Any = self.loss_of(inputs)
        if isinstance(loss, self.contrastive) and "attention_mask" in features[0]:
            documents = (len(features) - 1) * features[0]["attention_mask"].shape[0]
            self._meter.negatives.append(documents * (world_size() if loss.gather_across_devices else 1) - 1)
        value = super().training_step(model, inputs, *args, **kwargs)
        if self.accelerator.sync_gradients:
            # At the same point as the model's: before a gradient scaler checks for non-finite values.
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
        """Evaluate as the host does, but preserve the random state of the training: the data loader draws a number."""
        with torch.random.fork_rng(devices=[]):
            return super().evaluate(*args, **kwargs)

    def _check_pass(self, checkpoint: str | bool | None) -> None:
        """Raise beyond the first pass over data without a length, which counts as `max_steps`: too much is skipped."""
        if isinstance(checkpoint, bool):
            checkpoint = get_last_checkpoint(self.args.output_dir) if checkpoint else None
        if not checkpoint or hasattr(self.train_dataset, "__len__") or self.args.ignore_data_skip:
            return
        file = Path(checkpoint) / "trainer_state.json"
        epoch = json.loads(file.read_text(encoding="utf-8")).get("epoch") if file.is_file() else None
        # The first pass ends at exactly 1 if it has as many batches as the run has steps.
        if epoch is not None and epoch > 1:
            raise ValueError(
                f"resume_from_checkpoint: {checkpoint} lies beyond the first pass over train_dataset, an "
                f"{type(self.train_dataset).__name__} (epoch {epoch:.4g}), so its position in the data is unknown; "
                "expected a checkpoint of the first pass, a Dataset, or ignore_data_skip=True, which restarts the data"
            )

    def _check_finite(self) -> None:
        if self._meter.finite is None or self.args.fp16:
            return
        # Decide on all ranks together: if one stopped alone, the others would wait for it.
        if not self.accelerator.gather(self._meter.finite.reshape(1)).all():
            raise FloatingPointError(
                f"the loss is not finite (step {self.state.global_step} or shortly before); a lower learning rate may "
                "help, or the scores in the data may be too large"
            )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._check_finite()
        if self.args.should_save:
            # Before the host saves: a checkpoint is complete once the host has written its state, which it does last.
            self._own.save(Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}")
        super()._save_checkpoint(model, trial)

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:  # type: ignore[override]
        """Load the weights, raising if any is missing, and the losses' own parameters."""
        with no_missing_weights(f"the weights in {checkpoint_path}"):
            super()._load_from_checkpoint(checkpoint_path)
        self._own.load(Path(checkpoint_path))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, adding negatives, speed and memory to training entries."""
        if "loss" in logs and self._meter.tokens is not None:
            self._check_finite()
            logs = {**logs, **self.measurements(self._meter.tokens)}
            self._meter.reset()
        super().log(logs, start_time)

    def measurements(self, tokens_here: int | Tensor) -> dict[str, float]:
        """Return the measurements since the last log entry over all ranks, from this rank's tokens."""
        meter, device = self._meter, self.args.device
        local = torch.stack([torch.as_tensor(count, device=device) for count in (tokens_here, _peak_memory(device))])
        ranks = self.accelerator.gather(local.unsqueeze(0))
        tokens, peak = ranks[:, 0].sum().item(), ranks[:, 1].max().item()
        # Reading the tokens has synchronized the device: the time covers all work launched since the last entry.
        meter.add_time()
        measured = {
            "tokens_per_second": round(tokens / meter.seconds, 1),
            "peak_memory_mib": round(peak / 2**20, 1),
        }
        if meter.negatives:
            measured["in_batch_negatives_per_query"] = round(sum(meter.negatives) / len(meter.negatives), 2)
        return measured


def _tokens(column: dict[str, Tensor]) -> int | Tensor:
    """Count the tokens of a column; flattened sequences have neither padding nor a mask, and images have no ids."""
    if "attention_mask" in column:
        return column["attention_mask"].sum()
    return column["input_ids"].numel() if "input_ids" in column else 0


def _gathering(loss: nn.Module) -> str:
    """Describe how a loss, or a loss that it wraps, gathers the documents of other ranks."""
    for module in loss.modules():
        if getattr(module, "gather_across_devices", False):
            return f"gather_across_devices=True, gather={getattr(module, 'gather', 'all_gather')!r}"
    return "gather_across_devices=False"


def _peak_memory(device: torch.device) -> int:
    """Return the peak bytes so far: allocated by torch on a CUDA device, else resident in the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
