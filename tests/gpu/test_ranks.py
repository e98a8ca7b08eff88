"""Two GPUs over NCCL: a loss learns the same on both, stopped training resumes, and an index equals that of one GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from datasets import Dataset
from safetensors.torch import load_file

pytest.importorskip("pylate")

from pylate_flash import losses, models
from pylate_flash.indexes import Flat
from pylate_flash.trainer import ColBERTTrainer
from tests.cli.commands import ids_in, succeed, write_corpus
from tests.cli.test_index_builds import build_by_two
from tests.cli.test_train_ranks import WORLD, by_ranks
from tests.gpu.test_cli import POSITIVES, QUERIES, pairs
from tests.ranks import join_gpus
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
    join_gpus(rank, WORLD, folder)
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

    def run(name: str, *rest: str, **kwargs) -> tuple:
        command = ["train", "--data", pairs, "--model", pylate_checkpoint, "--output", tmp_path / name, *options, *rest]
        return tuple(by_ranks(tmp_path, [str(argument) for argument in command], method="spawn", **kwargs))

    codes, _, notes = run("whole")
    assert codes == (0, 0), notes
    codes, _, notes = run("out", signalled=(1,))
    assert codes == (128 + 15,) * WORLD, notes
    codes, outputs, notes = run("out", "--resume")
    assert codes == (0, 0), notes
    assert " steps done in " in outputs[0]
    expected, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert expected.keys() == resumed.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(resumed[name], tensor)


@pytest.mark.parametrize("failure", [None, "it ends", "it fails"])
def test_two_gpus_build_the_index_of_one(failure: str | None, pylate_checkpoint: Path, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", *(f"d{i}" for i in range(45)))
    build = ["index", "build", "--data", corpus, "--model", pylate_checkpoint, "--batch-size", 1, "--device", "cuda"]
    build = [*map(str, build), "--index"]
    outputs = build_by_two(tmp_path, [*build, str(tmp_path / "index")], failure, method="spawn")
    if failure is None:
        assert [code for code, *_ in outputs] == [0, 0], outputs
    else:
        # The second process has no output if it has just ended.
        first = outputs[0]
        assert first[0] == 2
        assert first[2].strip().splitlines()[-1].startswith("pylate-flash: "), first[2]
        # Added documents stay, and one process continues.
        assert 0 < len(ids_in(tmp_path / "index")) < 45
        succeed(*build, tmp_path / "index")
    succeed(*build, tmp_path / "one")
    ids = ids_in(tmp_path / "one")
    assert ids_in(tmp_path / "index") == ids == [f"d{i}" for i in range(45)]
    actual, rows = (Flat(tmp_path, name, device="cpu").get_documents_embeddings([ids])[0] for name in ("index", "one"))
    for document, expected in zip(actual, rows, strict=True):
        torch.testing.assert_close(document, expected, atol=1e-3, rtol=0)
