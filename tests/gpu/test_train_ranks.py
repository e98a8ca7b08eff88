"""Training by two GPUs over NCCL: what a loss learns is the same on both, and a run that is stopped goes on."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from datasets import Dataset
from safetensors.torch import load_file

pytest.importorskip("pylate")

from pylate_flash import losses, models
from pylate_flash.trainer import ColBERTTrainer
from tests.cli.test_train_ranks import WORLD, by_ranks
from tests.gpu.test_cli import POSITIVES, QUERIES, pairs
from tests.test_trainer import arguments

__all__ = ["pairs"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two GPUs"),
]

STEPS, START = 20, 0.5


def work(rank: int, checkpoint: str, folder: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", HF_HUB_OFFLINE="1")
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=WORLD,
        timeout=timedelta(seconds=120), device_id=torch.device("cuda", rank),
    )  # fmt: skip
    learned = {}
    for gather in ("all_gather", "ring"):
        model = models.ColBERT(checkpoint, device=f"cuda:{rank}")
        temperature = torch.nn.Parameter(torch.tensor([START], device=f"cuda:{rank}"))
        loss = losses.Contrastive(model, temperature=temperature, gather_across_devices=True, gather=gather)
        args = arguments(
            folder / f"{gather}-{rank}", max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-2,
            bf16=True, use_cpu=False,
        )  # fmt: skip
        data = Dataset.from_dict({"query": QUERIES, "positive": POSITIVES})
        ColBERTTrainer(model=model, args=args, train_dataset=data, loss=loss).train()
        weights = [parameter.detach().flatten() for parameter in model.parameters()]
        learned[gather] = torch.cat([temperature.detach(), *weights]).cpu()
    torch.save(learned, folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


def test_a_learned_temperature_is_the_same_on_both(pylate_checkpoint: Path, tmp_path: Path) -> None:
    mp.spawn(work, args=(str(pylate_checkpoint), tmp_path), nprocs=WORLD)
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(WORLD))
    for gather, learned in first.items():
        assert torch.equal(learned, second[gather])
        assert learned.isfinite().all()
        assert abs(learned[0].item() - START) > 0.01


def test_a_run_of_two_that_is_stopped_ends_as_if_it_were_not(
    pylate_checkpoint: Path, pairs: Path, tmp_path: Path
) -> None:
    options = ["--batch-size", 2, "--epochs", 3, "--lr", 1e-3, "--loss", "contrastive", "--device", "cuda"]

    def run(name: str, *more: str, **how) -> tuple:
        command = ["train", "--data", pairs, "--model", pylate_checkpoint, "--output", tmp_path / name, *options, *more]
        return tuple(by_ranks(tmp_path, [str(argument) for argument in command], method="spawn", **how))

    codes, _, notes = run("whole")
    assert codes == (0, 0), notes
    codes, _, notes = run("out", signalled=(1,))
    assert codes == (128 + 15,) * WORLD, notes
    codes, said, notes = run("out", "--resume")
    assert codes == (0, 0), notes
    assert " steps are done" in said[0]
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(resumed[name], tensor)
