"""Runs of the trainer that resume, that end early, and on data that are not as usual."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import Dataset

from pylate_flash import losses, models
from pylate_flash.trainer import ColBERTTrainer
from tests.test_trainer import LENGTHS, TOPICS, arguments, training_logs


@pytest.fixture
def model(tiny_colbert_path: str) -> models.ColBERT:
    return models.ColBERT(tiny_colbert_path, device="cpu", **LENGTHS)


@pytest.fixture
def pairs() -> Dataset:
    return Dataset.from_dict({"query": [f"what is {topic}?" for topic in TOPICS], "positive": TOPICS})


@pytest.mark.parametrize("kind", ["Contrastive", "Distillation"])
def test_resuming_in_a_later_epoch_gives_the_same_weights(
    tiny_colbert_path: str, pairs: Dataset, tmp_path: Path, kind: str
) -> None:
    """Three steps make an epoch: the lines of the second come in their own order, and dropout goes on."""
    lists = pairs.add_column("documents", [[topic, "else"] for topic in TOPICS]).add_column(
        "scores", [[1.0, float(i)] for i in range(len(TOPICS))]
    )
    dataset = pairs if kind == "Contrastive" else lists.remove_columns("positive")

    def run(folder: str, checkpoint: str | None = None) -> torch.Tensor:
        model = models.ColBERT(tiny_colbert_path, device="cpu", **LENGTHS)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.2
        args = arguments(tmp_path, output_dir=str(tmp_path / folder), max_steps=6, save_strategy="steps", save_steps=4)
        loss = getattr(losses, kind)(model)
        trainer = ColBERTTrainer(model=model, args=args, train_dataset=dataset, loss=loss)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.state.global_step == 6
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    whole = run("whole")
    torch.manual_seed(9)
    assert torch.equal(run("resumed", str(tmp_path / "whole" / "checkpoint-4")), whole)


class Spoiled(losses.Contrastive):
    """A contrastive loss that is NaN in its second batch."""

    batches = 0

    def forward(self, sentence_features, labels=None):
        self.batches += 1
        return super().forward(sentence_features, labels) * (float("nan") if self.batches == 2 else 1)


@pytest.mark.parametrize("noticed_by", [{"logging_steps": 2}, {"save_strategy": "steps", "save_steps": 3}, {}])
def test_a_loss_that_is_not_finite_ends_the_training(
    model: models.ColBERT, pairs: Dataset, tmp_path: Path, noticed_by: dict
) -> None:
    args = arguments(tmp_path, **{"max_steps": 3, "logging_steps": 500, **noticed_by})
    trainer = ColBERTTrainer(model=model, args=args, train_dataset=pairs, loss=Spoiled(model))
    step = noticed_by.get("logging_steps", 3)
    with pytest.raises(FloatingPointError, match=f"the loss is not finite \\(step {step} or shortly before\\)"):
        trainer.train()
    assert not list((tmp_path / "run").glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("documents", "scores", "message"),
    [
        ([["a", "b", "c"], ["d"]], [[1.0, 2.0]] * 2, "lists in the column 'documents' have 1 and 3 elements"),
        ([["a", "b"]] * 2, [[1.0, 2.0], [1.0]], "lists in the column 'scores' have 1 and 2 elements"),
        ([["a", "b", "c"]] * 2, [[1.0, 2.0]] * 2, "3 elements in the column 'documents' and 2 scores"),
    ],
)
def test_ragged_candidates_are_an_error(
    model: models.ColBERT, tmp_path: Path, documents: list, scores: list, message: str
) -> None:
    lists = Dataset.from_dict({"query": ["q", "r"], "documents": documents, "scores": scores})
    trainer = ColBERTTrainer(
        model=model, args=arguments(tmp_path), train_dataset=lists, loss=losses.Distillation(model)
    )
    with pytest.raises(ValueError, match=f"train_dataset: .*{message}"):
        trainer.train()


def test_an_iterable_dataset_is_read_in_its_order(model: models.ColBERT, pairs: Dataset, tmp_path: Path) -> None:
    """With `max_steps`, and from its start again where they are more than it has."""
    trainer = ColBERTTrainer(
        model=model, args=arguments(tmp_path, max_steps=4), train_dataset=pairs.to_iterable_dataset()
    )
    first = next(iter(trainer.get_train_dataloader()))
    assert torch.equal(
        first["query_input_ids"], model.tokenize(pairs["query"][:4], is_query=True, pad=True)["input_ids"]
    )
    trainer.train()
    assert [entry["in_batch_negatives_per_query"] for entry in training_logs(trainer)] == [3] * 4
    with pytest.raises(ValueError, match="max_steps has to be specified"):
        ColBERTTrainer(
            model=model,
            args=arguments(tmp_path, max_steps=-1, num_train_epochs=1),
            train_dataset=pairs.to_iterable_dataset(),
        )
