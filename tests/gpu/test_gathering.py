"""Two GPUs over NCCL: gathered negatives of different lengths and batch sizes, against one GPU with the whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("pylate")

from pylate_flash import losses
from tests.encoders import WordVectors
from tests.ops.cases import relative_error
from tests.ranks import join_gpus

pytestmark = pytest.mark.gpu

WORLD, TOKENS, SIZE = 2, 300, 64
# Queries and documents of each rank, and the padded lengths of its documents.
BATCHES, LENGTHS = (24, 7), (150, 160)


def vectors() -> WordVectors:
    return WordVectors(torch.randn(TOKENS, SIZE, generator=torch.Generator().manual_seed(0)).tolist()).float().cuda()


def texts(rows: int, length: int, least: int, seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, TOKENS, (rows, length), generator=random)
    lengths = torch.randint(least, length + 1, (rows, 1), generator=random)
    return {"input_ids": ids.cuda(), "attention_mask": (torch.arange(length) < lengths).long().cuda()}


def batch(rank: int) -> list[dict[str, Tensor]]:
    queries, length = BATCHES[rank], LENGTHS[rank]
    columns = [texts(queries, length, 20, 10 * rank + column) for column in (1, 2)]
    return [texts(queries, 32, 32, 10 * rank), *columns]


def whole() -> list[dict[str, Tensor]]:
    """The columns of both ranks as one batch, padded to the longer length."""
    merged = []
    for columns in zip(*(batch(rank) for rank in range(WORLD)), strict=True):
        most = max(column["input_ids"].shape[1] for column in columns)
        merged.append(
            {
                name: torch.cat([nn.functional.pad(c[name], (0, most - c[name].shape[1])) for c in columns])
                for name in columns[0]
            }
        )
    return merged


def value_and_gradient(kind: type, model: nn.Module, columns: list, half: bool, **arguments) -> tuple[float, Tensor]:
    model.zero_grad()
    limits = {"mini_batch_num_tokens": 1000} if kind is losses.CachedContrastive else {}
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
        value = kind(model, temperature=2.0, scorer="pylate_flash", **limits, **arguments)(columns)
    value.backward()
    (gradient,) = [parameter.grad.clone() for parameter in model.parameters()]
    return value.item(), gradient


def work(rank: int, folder: Path) -> None:
    join_gpus(rank, WORLD, folder)
    results = {}
    for kind in (losses.Contrastive, losses.CachedContrastive):
        for gather in ("all_gather", "ring"):
            for half in (False, True):
                model = DistributedDataParallel(vectors(), device_ids=[rank])
                arguments = {"gather": gather, "gather_across_devices": True}
                results[kind.__name__, gather, half] = value_and_gradient(kind, model, batch(rank), half, **arguments)
    torch.save(results, folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    if torch.cuda.device_count() < WORLD:
        pytest.skip("needs two GPUs")
    folder = tmp_path_factory.mktemp("nccl")
    mp.spawn(work, args=(folder,), nprocs=WORLD)
    return [torch.load(folder / f"rank-{rank}.pt", map_location="cuda:0") for rank in range(WORLD)]


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("gather", ["all_gather", "ring"])
@pytest.mark.parametrize("name", ["Contrastive", "CachedContrastive"])
def test_two_gpus_are_one_with_the_whole_batch(ranks: list[dict], name: str, gather: str, half: bool) -> None:
    expected = value_and_gradient(getattr(losses, name), vectors(), whole(), half)
    value = sum(results[name, gather, half][0] for results in ranks) / WORLD
    assert value == pytest.approx(WORLD * expected[0], rel=1e-2 if half else 1e-5)
    for results in ranks:
        assert relative_error(results[name, gather, half][1], WORLD * expected[1]) <= (2e-2 if half else 1e-4)
