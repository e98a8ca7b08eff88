"""hosts.sentence_transformers.trainer: a learned scale, on one rank and on two, and through a checkpoint."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset, DatasetDict
from safetensors.torch import load_file
from sentence_transformers import MultiVectorEncoder, MultiVectorEncoderTrainingArguments
from torch import nn

from pylate_flash.hosts.sentence_transformers import losses
from pylate_flash.hosts.sentence_transformers.trainer import MultiVectorEncoderTrainer
from tests.ranks import run_ranks

WORLD = 2


@pytest.fixture
def rows(texts):
    return {"query": texts(1, 12, 4), "positive": texts(2, 12)}


def arguments(folder, **overrides):
    defaults = {"max_steps": 3, "per_device_train_batch_size": 4, "lr_scheduler_type": "constant", "use_cpu": True}
    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    return MultiVectorEncoderTrainingArguments(output_dir=str(folder), **{**defaults, **quiet, **overrides})


def learned(path, rows, args, start, **options):
    """Train a scale from `start`, or from a checkpoint in `options`; return it, followed by the weights."""
    checkpoint = options.pop("checkpoint", None)
    model = MultiVectorEncoder(path, device="cpu")
    scale = nn.Parameter(torch.tensor([start]))
    loss = losses.MultiVectorMultipleNegativesRankingLoss(model, scale=scale, **options)
    trainer = MultiVectorEncoderTrainer(model=model, args=args, train_dataset=Dataset.from_dict(rows), loss=loss)
    trainer.train(resume_from_checkpoint=checkpoint)
    return torch.cat([scale.detach(), *(parameter.detach().flatten() for parameter in model.parameters())])


def test_resuming_goes_on_with_the_scale(tiny_encoder_path, rows, tmp_path):
    args = arguments(tmp_path, max_steps=4, learning_rate=0.01, save_strategy="steps", save_steps=2)
    uninterrupted = learned(tiny_encoder_path, rows, args, 5.0)
    assert abs(uninterrupted[0].item() - 5.0) > 0.001
    saved = load_file(tmp_path / "checkpoint-4" / "losses.safetensors")
    assert saved.keys() == {"scale"}
    assert torch.equal(saved["scale"], uninterrupted[:1])
    resumed = learned(tiny_encoder_path, rows, args, 5.0, checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(resumed, uninterrupted)


def test_columns_that_are_no_texts_are_trained_with(tiny_encoder, rows, tmp_path):
    """Images have neither ids nor a mask, and no tokens to count before the model's forward."""

    class OfImages(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, columns, labels=None):
            assert [column.keys() for column in columns] == [{"pixel_values"}] * 2
            return sum(parameter.square().mean() for parameter in self.model.parameters())

    def collate(rows):
        return {f"{column}_pixel_values": torch.ones(len(rows), 3, 4, 4) for column in ("query", "positive")}

    collate.valid_label_columns = ()
    trainer = MultiVectorEncoderTrainer(
        model=tiny_encoder,
        args=arguments(tmp_path, logging_steps=1),
        train_dataset=Dataset.from_dict(rows),
        loss=OfImages(tiny_encoder),
        data_collator=collate,
    )
    trainer.train()
    logged = [entry["tokens_per_second"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == [0.0] * 3


def work(rank, path, folder, rows):
    """The work of each process, which saves its results to a file for the tests."""
    torch.set_num_threads(1)
    # As set by torchrun: by these the trainer finds its rank in the group below.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", HF_HUB_OFFLINE="1")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=WORLD)
    args = arguments(
        folder / f"run-{rank}", per_device_train_batch_size=2, optim="sgd", learning_rate=0.1, ddp_backend="gloo"
    )
    result = learned(path, rows, args, 5.0 + rank, gather_across_devices=True)
    model, data = MultiVectorEncoder(path, device="cpu"), Dataset.from_dict(rows)
    kinds = losses.MultiVectorMultipleNegativesRankingLoss, losses.MultiVectorDistillKLDivLoss
    with pytest.raises(ValueError, match="loss: gather_across_devices=True.* of 'a'.*=False of 'b', on 2 ranks"):
        MultiVectorEncoderTrainer(
            model=model,
            args=args,
            train_dataset=DatasetDict(a=data, b=data.select(range(12))),
            loss={"a": kinds[0](model, gather_across_devices=True), "b": kinds[1](model)},
        )
    torch.save(result, folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_on_two_ranks_the_scale_is_that_of_one_process(tiny_encoder_path, rows, tmp_path):
    """It starts as the first rank's. Losses of which one would wait for the other are refused on two ranks."""
    run_ranks(work, (tiny_encoder_path, tmp_path, rows), WORLD)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD))
    assert torch.equal(first, second)
    args = arguments(tmp_path, optim="sgd", learning_rate=0.1)
    expected = learned(tiny_encoder_path, rows, args, 5.0)
    assert abs(expected[0].item() - 5.0) > 0.001
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5)
