"""Trainer runs that resume or end early, and unusual data."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback, TrainerState

from pylate_flash import losses, models
from pylate_flash.trainer import ColBERTTrainer
from pylate_flash.training import trainer_mixin
from tests.test_trainer import TOPICS, Make, arguments, model, pairs, tiny, trained, trainer, weights_of  # noqa: F401

# Imported fixtures are used as parameter names.
# ruff: noqa: F811


@pytest.mark.parametrize("kind", ["Contrastive", "Distillation"])
def test_resuming_in_a_later_epoch_gives_the_same_weights(
    trainer: Make, tiny_colbert_path: str, pairs: Dataset, tmp_path: Path, kind: str
) -> None:
    """An epoch has three steps; the second epoch has another order, and the dropout generator continues."""
    lists = pairs.remove_columns("positive").add_column("documents", [[topic, "else"] for topic in TOPICS])
    lists = lists.add_column("scores", [[1.0, float(i)] for i in range(len(TOPICS))])

    def run(folder: str, checkpoint: str | None = None) -> torch.Tensor:
        model = tiny(tiny_colbert_path)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.2
        steps = {"max_steps": 6, "save_strategy": "steps", "save_steps": 4, "output_dir": str(tmp_path / folder)}
        instance = trainer(getattr(losses, kind)(model), pairs if kind == "Contrastive" else lists, model, **steps)
        instance.train(resume_from_checkpoint=checkpoint)
        assert instance.state.global_step == 6
        return weights_of(model)

    uninterrupted = run("whole")
    torch.manual_seed(9)
    assert torch.equal(run("resumed", str(tmp_path / "whole" / "checkpoint-4")), uninterrupted)


def parameter(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value]))


class Gradients(TrainerCallback):
    """Record a parameter's gradient at the start of each step and before the optimizer step."""

    def __init__(self, of: nn.Parameter) -> None:
        self.of = of
        self.at_first: list[torch.Tensor | None] = []
        self.sizes: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.at_first.append(self.of.grad)

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        assert self.of.grad is not None
        self.sizes.append(self.of.grad.abs().item())


@pytest.mark.parametrize("name", ["temperature", "smooth"])
def test_a_learned_parameter_of_a_loss_begins_each_step_without_a_gradient(
    trainer: Make, model: models.ColBERT, name: str
) -> None:
    learned = parameter(3.0)
    learned.grad = torch.ones(1)
    callback, loss = Gradients(learned), losses.Contrastive(model, **{name: learned})
    steps = {"max_steps": 3, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    with pytest.warns(UserWarning, match="gradient_accumulation_steps"):
        trainer(loss, own={"callbacks": [callback]}, **steps).train()
    assert callback.at_first == [None] * 3
    assert min(callback.sizes) > 0
    assert learned.item() != 3.0


def learning(
    tiny_colbert_path: str, folder: Path, pairs: Dataset, together: bool
) -> tuple[ColBERTTrainer, list[nn.Parameter]]:
    """A trainer and its learned parameters, of one loss or of two that share a temperature."""
    model = tiny(tiny_colbert_path)
    temperature, smooth = parameter(2.0), parameter(30.0)
    loss: Any = losses.Contrastive(model, temperature=temperature, smooth=smooth)
    data: Any = pairs
    if together:
        loss = {"a": loss, "b": losses.CachedContrastive(model, temperature=temperature, mini_batch_size=2)}
        # Two separate objects: the host writes the data set's name into each.
        data = DatasetDict(a=pairs, b=pairs.select(range(len(pairs))))
    steps = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "multi_dataset_batch_sampler": "round_robin"}
    args = arguments(folder, learning_rate=0.05, **steps)
    return ColBERTTrainer(model=model, args=args, train_dataset=data, loss=loss), [temperature, smooth]


@pytest.mark.parametrize("together", [False, True])
def test_resuming_goes_on_with_the_parameters_of_the_loss(
    tiny_colbert_path: str, pairs: Dataset, tmp_path: Path, together: bool
) -> None:
    trainer, learned = learning(tiny_colbert_path, tmp_path, pairs, together)
    trainer.train()
    checkpoints = [tmp_path / "run" / f"checkpoint-{step}" for step in (2, 4)]
    saved = load_file(checkpoints[1] / "losses.safetensors")
    prefix = "a:" if together else ""
    expected = {f"{prefix}temperature": learned[0], f"{prefix}smooth": learned[1]}
    expected |= {"b:temperature": learned[0]} if together else {}
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], value) for name, value in expected.items())
    assert min(abs(value.item() - start) for value, start in zip(learned, (2, 30), strict=True)) > 0.05

    again, resumed = learning(tiny_colbert_path, tmp_path / "again", pairs, together)
    again.train(resume_from_checkpoint=str(checkpoints[0]))
    assert all(torch.equal(*pair) for pair in zip(resumed, learned, strict=True))
    assert torch.equal(weights_of(trainer.model), weights_of(again.model))

    # Checkpoints of earlier versions have no such file.
    (checkpoints[1] / "losses.safetensors").unlink()
    again, resumed = learning(tiny_colbert_path, tmp_path / "without", pairs, together)
    again.train(resume_from_checkpoint=str(checkpoints[1]))
    assert [value.item() for value in resumed] == [2.0, 30.0]


def test_parameters_of_another_loss_are_not_read(tiny_colbert_path: str, pairs: Dataset, tmp_path: Path) -> None:
    learning(tiny_colbert_path, tmp_path, pairs, together=True)[0].train()
    checkpoint = tmp_path / "run" / "checkpoint-2"
    with pytest.raises(
        ValueError, match=r"losses.safetensors holds the parameter 'a:.* only \['smooth', 'temperature'"
    ):
        learning(tiny_colbert_path, tmp_path, pairs, together=False)[0].train(resume_from_checkpoint=str(checkpoint))


def test_no_file_for_a_loss_without_parameters(trainer: Make, tmp_path: Path) -> None:
    """A file left by an earlier run is removed."""
    checkpoint = tmp_path / "run" / "checkpoint-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "losses.safetensors").write_bytes(b"of another run")
    trainer(max_steps=1, save_strategy="steps", save_steps=1).train()
    assert (checkpoint / "trainer_state.json").exists()
    assert not (checkpoint / "losses.safetensors").exists()


def test_resuming_does_not_go_on_with_other_adapters(trainer: Make, tiny_colbert_path: str, tmp_path: Path) -> None:
    """transformers initializes adapters randomly if it does not find those of the checkpoint."""
    peft = pytest.importorskip("peft")

    def adapted() -> ColBERTTrainer:
        model = tiny(tiny_colbert_path)
        model.add_adapter(peft.LoraConfig(task_type="FEATURE_EXTRACTION", r=4, target_modules=["query", "value"]))
        return trainer(model=model, save_strategy="steps", save_steps=1)

    adapted().train()
    with pytest.raises(ValueError, match=r"the weights in .*checkpoint-1 lack encoder\.layer.*lora_.* and \d+ more"):
        adapted().train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))


class Spoiled(losses.Contrastive):
    """A contrastive loss that returns NaN for its second batch."""

    batches = 0

    def forward(self, sentence_features, labels=None):
        self.batches += 1
        return super().forward(sentence_features, labels) * (float("nan") if self.batches == 2 else 1)


@pytest.mark.parametrize("noticed_by", [{"logging_steps": 2}, {"save_strategy": "steps", "save_steps": 3}, {}])
def test_a_loss_that_is_not_finite_ends_the_training(
    trainer: Make, model: models.ColBERT, tmp_path: Path, noticed_by: dict
) -> None:
    instance = trainer(Spoiled(model), **{"max_steps": 3, "logging_steps": 500, **noticed_by})
    step = noticed_by.get("logging_steps", 3)
    with pytest.raises(FloatingPointError, match=f"the loss is not finite \\(step {step} or shortly before\\)"):
        instance.train()
    assert not list((tmp_path / "run").glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("documents", "scores", "message"),
    [
        ([["a", "b", "c"], ["d"]], [[1.0, 2.0]] * 2, "lists in the column 'documents' have 1 and 3 elements"),
        ([[], []], [[1.0, 2.0]] * 2, "empty lists in the column 'documents'"),
        ([["a", "b"]] * 2, [[1.0, 2.0], [1.0]], "lists in the column 'scores' have 1 and 2 elements"),
        ([["a", "b", "c"]] * 2, [[1.0, 2.0]] * 2, "3 elements in the column 'documents' and 2 scores"),
    ],
)
def test_ragged_candidates_are_an_error(
    trainer: Make, model: models.ColBERT, documents: list, scores: list, message: str
) -> None:
    lists = Dataset.from_dict({"query": ["q", "r"], "documents": documents, "scores": scores})
    with pytest.raises(ValueError, match=f"train_dataset or eval_dataset: .*{message}"):
        trainer(losses.Distillation(model), lists).train()


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("query", ["q", None], "None in the column 'query'; expected texts"),
        ("documents", [["a", "b"], ["c", None]], "None in the column 'documents'; expected texts"),
        ("documents", [[1, 2]] * 2, "1 in the column 'documents'; expected texts"),
        ("scores", [[1.0, None]] * 2, "None in the column 'scores'; expected scores"),
        ("scores", [["1", "2"]] * 2, "'1' in the column 'scores'; expected scores"),
    ],
)
def test_missing_texts_and_scores_are_an_error(
    trainer: Make, model: models.ColBERT, column: str, values: list, message: str
) -> None:
    rows = {"query": ["q", "r"], "documents": [["a", "b"]] * 2, "scores": [[1.0, 2.0]] * 2, column: values}
    with pytest.raises(TypeError, match=f"train_dataset or eval_dataset: {message}"):
        trainer(losses.Distillation(model), Dataset.from_dict(rows)).train()


def test_an_iterable_dataset_is_read_in_its_order(trainer: Make, model: models.ColBERT, pairs: Dataset) -> None:
    """With `max_steps`, restarting at the beginning when the data set is exhausted."""
    instance = trainer(data=pairs.to_iterable_dataset(), max_steps=4)
    first = next(iter(instance.get_train_dataloader()))["query_input_ids"]
    assert torch.equal(first, model.tokenize(pairs["query"][:4], is_query=True, pad=True)["input_ids"])
    assert [entry["in_batch_negatives_per_query"] for entry in trained(instance)] == [3] * 4
    with pytest.raises(ValueError, match="max_steps has to be specified"):
        trainer(data=pairs.to_iterable_dataset(), max_steps=-1, num_train_epochs=1)


def test_passes_over_what_has_no_length_are_counted_by_transformers(pairs: Dataset) -> None:
    """Before version 5, it has set the epoch by then; the state's epoch is a fraction of `max_steps`, here 1/3."""
    epochs: list[int] = []
    for data, epoch in ((pairs, 1.4), (pairs.to_iterable_dataset(), 1 / 3)):
        loader = SimpleNamespace(dataset=data, set_epoch=epochs.append)
        trainer_mixin._Epochs().on_epoch_begin(None, TrainerState(epoch=epoch), None, train_dataloader=loader)
    assert epochs == [1]


def test_resuming_an_iterable_dataset_in_its_first_pass_only(
    trainer: Make, tiny_colbert_path: str, pairs: Dataset, tmp_path: Path
) -> None:
    """A pass has three batches, which is unknown to the trainer: in the second pass it would skip too many batches."""

    def run(folder: str, checkpoint: str | bool | None = None, **overrides: Any) -> torch.Tensor:
        model, data = tiny(tiny_colbert_path), pairs.to_iterable_dataset().shuffle(seed=1, buffer_size=12)
        instance = trainer(None, data, model, output_dir=str(tmp_path / folder), max_steps=5, **overrides)
        instance.train(resume_from_checkpoint=checkpoint)
        assert instance.state.global_step == 5
        return weights_of(model)

    uninterrupted = run("whole", save_strategy="steps", save_steps=1)
    for step in (2, 3):
        assert torch.equal(run("resumed", str(tmp_path / "whole" / f"checkpoint-{step}")), uninterrupted)
    message = r"resume_from_checkpoint: .*beyond the first pass over train_dataset, an IterableDataset \(epoch 1\.{}"
    with pytest.raises(ValueError, match=message.format("2")):
        run("resumed", str(tmp_path / "whole" / "checkpoint-4"))
    with pytest.raises(ValueError, match=message.format("4")):
        run("whole", True)
    run("resumed", str(tmp_path / "whole" / "checkpoint-4"), ignore_data_skip=True)
