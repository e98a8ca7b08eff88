"""Two processes over gloo: gathered negatives compared with PyLate's, and the trainer.

`tests/training` checks that all ranks together match one process with the whole batch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset, DatasetDict
from pylate.losses.cached_contrastive import CachedContrastive as PyLateCachedContrastive
from pylate.losses.contrastive import Contrastive as PyLateContrastive
from torch.nn.parallel import DistributedDataParallel

from pylate_flash import losses, models
from pylate_flash.trainer import ColBERTTrainer
from tests.ranks import NEGATIVES, POSITIVES, QUERIES, assert_same, join_group, run_ranks, value_and_gradient
from tests.test_trainer import arguments

WORLD = 2
CASES = {
    "Contrastive": {},
    "Contrastive in chunks": {"score_mini_batch_size": 2, "temperature": 0.1},
    "CachedContrastive": {"mini_batch_size": 2},
    "CachedContrastive, summed": {"mini_batch_size": 3, "size_average": False},
}
PYLATE = {"Contrastive": PyLateContrastive, "CachedContrastive": PyLateCachedContrastive}


def loss_class(case: str, classes: dict) -> type:
    return classes["CachedContrastive" if case.startswith("Cached") else "Contrastive"]


def load(path: str) -> models.ColBERT:
    return models.ColBERT(path, device="cpu", query_length=8, document_length=12).eval()


def batch(model: models.ColBERT, rows: slice) -> list[dict[str, torch.Tensor]]:
    return [
        model.tokenize(QUERIES[rows], is_query=True, pad=True),
        model.tokenize(POSITIVES[rows], is_query=False, pad=True),
        model.tokenize(NEGATIVES[rows], is_query=False, pad=True),
    ]


def train(model: models.ColBERT, folder: Path) -> list[dict[str, float]]:
    """Two steps of two pairs per process, with gathered negatives; returns the log history."""
    args = arguments(
        folder, logging_steps=2, per_device_train_batch_size=2, ddp_backend="gloo", dataloader_drop_last=True
    )
    data = Dataset.from_dict({"query": QUERIES[:6] * 2, "positive": POSITIVES * 2})
    loss = losses.Contrastive(model, gather_across_devices=True)
    trainer = ColBERTTrainer(model=model, args=args, train_dataset=data, loss=loss)
    trainer.train()
    assert isinstance(trainer.loss.model, DistributedDataParallel)
    return trainer.state.log_history


def learn(path: str, folder: Path, start: float, batch_size: int, together: bool) -> torch.Tensor:
    """Three steps of gradient descent; returns the temperature, then the weights.

    With `together`, one loss that gathers; otherwise one loss for each of two data sets, one with a temperature.
    """
    model = load(path)
    temperature = torch.nn.Parameter(torch.tensor([start]))
    data: Any = Dataset.from_dict({"query": QUERIES[:6] * 2, "positive": POSITIVES * 2})
    loss: Any = losses.Contrastive(model, temperature=temperature, size_average=False, gather_across_devices=together)
    if not together:
        data, loss = DatasetDict(a=data, b=data.select(range(len(data)))), {"a": loss, "b": losses.Contrastive(model)}
    sgd = {"optim": "sgd", "learning_rate": 0.01, "lr_scheduler_type": "constant", "batch_sampler": "batch_sampler"}
    args = arguments(
        folder, max_steps=3, per_device_train_batch_size=batch_size, multi_dataset_batch_sampler="round_robin", **sgd,
        ddp_backend="gloo" if dist.is_initialized() else None,
    )  # fmt: skip
    ColBERTTrainer(model=model, args=args, train_dataset=data, loss=loss).train()
    return torch.cat([temperature.detach(), *(parameter.detach().flatten() for parameter in model.parameters())])


def refusal(path: str, folder: Path, **second: Any) -> str:
    """Error message for a dictionary of losses of which the first one uses all_gather."""
    model = load(path)
    data = Dataset.from_dict({"query": QUERIES[:6], "positive": POSITIVES})
    args = arguments(folder, max_steps=1)
    loss = {"a": losses.Contrastive(model, gather_across_devices=True), "b": losses.CachedContrastive(model, **second)}
    # A loss whose data set is not trained on never makes another rank wait.
    ColBERTTrainer(model=model, args=args, train_dataset=DatasetDict(a=data), loss=loss)
    with pytest.raises(ValueError, match="loss: ") as raised:
        ColBERTTrainer(model=model, args=args, train_dataset=DatasetDict(a=data, b=data), loss=loss)
    return str(raised.value)


def work(rank: int, path: str, folder: Path) -> None:
    """Work of each process; saves its results to a file, which the tests compare."""
    # As set by torchrun: the trainer reads its rank in the group below from these.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    join_group(rank, WORLD, folder)
    model, size = load(path), len(POSITIVES) // WORLD
    inputs = batch(model, slice(rank * size, (rank + 1) * size))
    results = {}
    for case, options in CASES.items():
        for who, classes in (("ours", vars(losses)), ("pylate", PYLATE)):
            loss = loss_class(case, classes)(model, gather_across_devices=True, **options)
            value, gradient = value_and_gradient(loss, model, inputs)
            if who == "pylate" and case == "CachedContrastive":
                # PyLate's is the gradient of the sum.
                gradient /= size
            dist.all_reduce(gradient)
            results[case, who] = value, gradient / WORLD
    model.zero_grad()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True, broadcast_buffers=False)
    loss = losses.Contrastive(wrapped, gather_across_devices=True)
    results["DDP"] = value_and_gradient(loss, model, inputs)
    del loss, wrapped
    # Without gathered negatives, DDP averages the ranks' own gradients.
    _, gradient = value_and_gradient(losses.Contrastive(model), model, inputs)
    dist.all_reduce(gradient)
    results["own negatives"] = gradient / WORLD
    for unused in (False, True):
        model = load(path)
        # BERT's pooler is unused: DDP would wait for its gradient unless it finds unused parameters.
        model[0].auto_model.pooler.requires_grad_(False)
        wrapped = DistributedDataParallel(model, find_unused_parameters=unused, broadcast_buffers=False)
        for name, loss in (
            ("Contrastive", losses.Contrastive(wrapped, fuse_projection=True)),
            ("CachedContrastive", losses.CachedContrastive(wrapped, mini_batch_size=2, fuse_projection=True)),
        ):
            results["DDP, fused", name, unused] = value_and_gradient(loss, model, inputs)[1]
        del loss, wrapped
    results["logs"] = train(load(path), folder / f"run-{rank}")
    for together in (True, False):
        results["learned", together] = learn(path, folder / f"run-{rank}", 2.0 + rank, 2, together)
    results["refusals"] = [
        refusal(path, folder, **second) for second in ({}, {"gather_across_devices": True, "gather": "ring"})
    ]
    torch.save(results, folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tiny_colbert_path: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("distributed")
    run_ranks(work, (tiny_colbert_path, folder), WORLD)
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("case", CASES)
def test_every_rank_has_pylates_value_and_gradient(ranks: list[dict], case: str) -> None:
    for results in ranks:
        assert_same(results[case, "ours"], results[case, "pylate"])
    # The ranks have different queries, so no rank is compared with itself.
    assert ranks[0][case, "ours"][0] != ranks[1][case, "ours"][0]


def test_a_model_in_distributed_data_parallel(ranks: list[dict]) -> None:
    for results in ranks:
        assert_same(results["DDP"], results["Contrastive", "ours"])


@pytest.mark.parametrize("find_unused_parameters", [False, True])
@pytest.mark.parametrize("name", ["Contrastive", "CachedContrastive"])
def test_ddp_waits_for_the_projection_of_hidden_states(
    ranks: list[dict], name: str, find_unused_parameters: bool
) -> None:
    """Its gradient comes from outside the model's forward, and is averaged like any other."""
    for results in ranks:
        gradient, expected = results["DDP, fused", name, find_unused_parameters], results["own negatives"]
        assert (gradient - expected).norm() <= 1e-5 * expected.norm()


def test_the_trainer_counts_all_ranks(ranks: list[dict]) -> None:
    entries = [next(entry for entry in results["logs"] if "loss" in entry) for results in ranks]
    for entry in entries:
        assert entry["in_batch_negatives_per_query"] == WORLD * 2 - 1
        assert entry["tokens_per_second"] > 0
    assert entries[0]["peak_memory_mib"] == entries[1]["peak_memory_mib"] > 50


def test_a_learned_temperature_is_that_of_one_process(
    ranks: list[dict], tiny_colbert_path: str, tmp_path: Path
) -> None:
    """It starts from the first rank's value, and its gradient is averaged over ranks, as the model's is."""
    first, second = (results["learned", True] for results in ranks)
    assert torch.equal(first, second)
    expected = learn(tiny_colbert_path, tmp_path, 2.0, 2 * WORLD, together=True)
    assert abs(expected[0].item() - 2.0) > 0.001
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5)


def test_a_temperature_of_one_data_set_is_the_same_on_all_ranks(ranks: list[dict]) -> None:
    """The first rank's batches come from one data set, the second rank's from the other."""
    first, second = (results["learned", False] for results in ranks)
    assert torch.equal(first, second)
    assert first[0].item() != 2.0


def test_losses_that_would_wait_for_each_other_are_refused(ranks: list[dict]) -> None:
    for results in ranks:
        one, other = results["refusals"]
        assert "loss: gather_across_devices=True, gather='all_gather' of 'a', gather_across_devices=False of 'b'" in one
        assert "gather='ring' of 'b', on 2 ranks" in other
