"""Negatives gathered over ranks with unequal batch sizes and lengths, against one process with the whole batch.

Two and four processes over gloo, in float64. Scores are float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pylate_flash import losses, models
from pylate_flash.hosts.pylate.loss_inputs import masks_of
from pylate_flash.training import contrast, distributed
from pylate_flash.training.mini_batches import Packed
from pylate_flash.training.options import LossOptions
from tests.encoders import Watch
from tests.ranks import (
    NEGATIVES,
    POSITIVES,
    QUERIES,
    assert_same,
    gradient_of,
    join_group,
    mean_over_ranks,
    run_ranks,
    value_and_gradient,
)
from tests.recorded import recorded

# One is longer than all others.
POSITIVES = [*POSITIVES[:5], "Join: a, b, c and d, in this order, and return one string", "It"]
# The rows of the batch on each rank; one rank has a single query.
ROWS = {2: [slice(0, 6), slice(6, 7)], 4: [slice(0, 2), slice(2, 3), slice(3, 6), slice(6, 7)]}

TYPES = torch.float32, torch.bfloat16
MEAN, RING = {}, {"gather": "ring"}
CASES = {
    "Contrastive": (losses.Contrastive, MEAN),
    "Contrastive, ring": (losses.Contrastive, RING),
    "Contrastive, summed": (losses.Contrastive, {"size_average": False}),
    "Contrastive in chunks": (losses.Contrastive, {"score_mini_batch_size": 2, "temperature": 0.1}),
    "CachedContrastive, summed": (losses.CachedContrastive, {"mini_batch_size": 3, "size_average": False}),
    "Contrastive, summed, ring": (losses.Contrastive, {"size_average": False, "temperature": 0.3, **RING}),
    "CachedContrastive": (losses.CachedContrastive, {"mini_batch_size": 2}),
    "CachedContrastive, ring": (losses.CachedContrastive, {"mini_batch_num_tokens": 30, **RING}),
    "Contrastive, soft": (losses.Contrastive, {"smooth": 5.0}),
    "Contrastive, zero": (losses.Contrastive, {"masking": "zero"}),
    "CachedContrastive, zero, ring": (losses.CachedContrastive, {"masking": "zero", **RING}),
    "Contrastive, fused": (losses.Contrastive, {"fuse_projection": True}),
    "CachedContrastive, fused, ring": (losses.CachedContrastive, {"fuse_projection": True, **RING}),
}
WITHOUT_EXPANSION = ["Contrastive", "Contrastive, ring", "CachedContrastive, ring"]


def load(path: str) -> models.ColBERT:
    return models.ColBERT(path, device="cpu", query_length=8, document_length=16).eval().double()


def batch(model: models.ColBERT, rows: slice, pad: bool, columns: int = 2) -> list[dict[str, Tensor]]:
    documents = [model.tokenize(texts[rows], is_query=False, pad=pad) for texts in (POSITIVES, NEGATIVES)[:columns]]
    return [model.tokenize(QUERIES[rows], is_query=True, pad=pad), *documents]


def learned_temperature(model: models.ColBERT, columns: list, **arguments) -> tuple[Tensor, Tensor]:
    temperature = nn.Parameter(torch.tensor([0.7], dtype=torch.float64))
    value = losses.Contrastive(model, temperature=temperature, **arguments)(columns)
    # As with a loss scaler.
    (8 * value).backward()
    return value.detach(), temperature.grad / 8


def work(rank: int, path: str, folder: Path, world: int) -> None:
    join_group(rank, world, folder)
    model, rows = load(path), ROWS[world][rank]
    own = batch(model, rows, pad=False)
    results: dict = {"lengths": [features["input_ids"].shape for features in own]}
    for expansion in (True, False):
        model.do_query_expansion = expansion
        for name in CASES if expansion else WITHOUT_EXPANSION:
            kind, arguments = CASES[name]
            loss = kind(model, gather_across_devices=True, **arguments)
            columns = batch(model, rows, pad="zero" in name)
            results[name, expansion] = mean_over_ranks(value_and_gradient(loss, model, columns))
    model.do_query_expansion = True
    for gather in ("all_gather", "ring"):
        result = learned_temperature(model, own, gather_across_devices=True, gather=gather)
        results["temperature", gather] = mean_over_ranks(result)
        for name, length in (("in float64", 3), ("no query tokens", 0)):
            drawn = torch.Generator().manual_seed(rank)
            queries, values = (torch.randn(2, n, 4, generator=drawn).double() for n in (length, 5))
            chunk = contrast.Batch(queries, None, [contrast.Padded(values, torch.ones(2, 5, dtype=torch.bool))])
            options = LossOptions(temperature=0.7, gather=gather, times_ranks=True)
            results[name, gather] = mean_over_ranks((contrast.cross_entropy(options, chunk),))[0]
        # One column of documents on some ranks, two on the others.
        loss = losses.Contrastive(model, gather_across_devices=True, gather=gather)
        columns = batch(model, rows, pad=False, columns=1 + rank % 2)
        results["other columns", gather] = mean_over_ranks(value_and_gradient(loss, model, columns))
        with torch.no_grad():
            results["evaluated", gather] = mean_over_ranks((loss(own),))[0]

    # Blocks of documents, and chunks of queries.
    with pytest.MonkeyPatch.context() as patch:
        calls = recorded(patch, distributed, "maxsim_varlen")
        loss = losses.Contrastive(model, gather_across_devices=True, gather="ring")
        for name in ("ring", "ring in chunks"):
            results[name] = mean_over_ranks(value_and_gradient(loss, model, own))
            results[f"{name}, calls"] = [(len(args[2]) - 1, len(args[1])) for args, _ in calls]
            calls.clear()
            patch.setattr(distributed, "_ARGMAX_BYTES", 1)
    masks = masks_of(loss, own)[1]
    results["tokens"] = sum(mask.sum().item() for mask in masks)

    for field, tokens in (("sizes", torch.zeros(3, 4 + rank)), ("types", torch.zeros(3, 4).to(TYPES[rank % 2]))):
        try:
            distributed.exchange(Packed(tokens, torch.tensor([3]), 3), 1)
        except (TypeError, ValueError) as error:
            results["other", field] = type(error), str(error)

    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    for name, arguments in (("texts", {"mini_batch_size": 2}), ("tokens", {"mini_batch_num_tokens": 40})):
        loss = losses.CachedContrastive(wrapped, gather_across_devices=True, gather="ring", **arguments)
        with Watch(model) as watch:
            results["DDP", name] = value_and_gradient(loss, model, own)[1]
        results["DDP, passes", name] = [len(ids) for ids in watch.ids]
    del wrapped, loss

    half = load(path).float()
    for gather in ("all_gather", "ring"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = losses.Contrastive(half, gather_across_devices=True, gather=gather)
            value = loss(own)
        half.zero_grad()
        value.backward()
        results["bfloat16", gather] = mean_over_ranks((value.detach(), gradient_of(half)))

    # PyLate's gathering needs equal shapes: lengths are made equal, batch sizes cannot be.
    texts = slice(0, 2) if rank else slice(4, 6)
    columns = batch(model, texts, pad=False)
    results["lengths for PyLate"] = columns[1]["input_ids"].shape[1]
    for scorer in ("torch", "pylate_flash"):
        for kind in (losses.Contrastive, losses.CachedContrastive):
            loss = kind(model, gather_across_devices=True, scorer=scorer, masking="zero")
            features = batch(model, texts, pad=True) if scorer == "pylate_flash" else columns
            results["PyLate's scorer", kind.__name__, scorer] = value_and_gradient(loss, model, features)
    for name, arguments in (("refused", {"scorer": "torch"}), ("refused, smooth", {"smooth": 5.0, "masking": "zero"})):
        try:
            losses.Contrastive(model, gather_across_devices=True, **arguments)(own)
        except ValueError as error:
            results[name] = str(error)
    torch.save(results, folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks_of(tiny_colbert_path: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list]:
    """The results of all ranks, by world size; each world size runs once, whatever the order of the tests."""

    @functools.cache
    def result(world: int) -> list:
        folder = tmp_path_factory.mktemp("gathering")
        run_ranks(work, (tiny_colbert_path, folder, world), world)
        results = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(world)]
        for column in (1, 2):
            assert len({r["lengths"][column] for r in results}) > 1, "the ranks must differ"
        return results

    return result


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest, ranks_of: Callable[[int], list]) -> list:
    return ranks_of(request.param)


@pytest.fixture(scope="module")
def model(tiny_colbert_path: str) -> models.ColBERT:
    return load(tiny_colbert_path)


def whole(model: models.ColBERT, name: str, expansion: bool = True) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of one process with the whole batch."""
    kind, arguments = CASES[name]
    arguments = {key: value for key, value in arguments.items() if key != "gather"}
    model.do_query_expansion = expansion
    return value_and_gradient(kind(model, **arguments), model, batch(model, slice(None), pad=True))


@pytest.mark.parametrize(
    ("name", "expansion"), [*((name, True) for name in CASES), *((name, False) for name in WITHOUT_EXPANSION)]
)
def test_the_ranks_together_are_one_process_with_the_whole_batch(
    ranks: list, model: models.ColBERT, name: str, expansion: bool
) -> None:
    value, gradient = whole(model, name, expansion)
    times = 1 if "summed" in name else len(ranks)
    for results in ranks:
        assert_same(results[name, expansion], (value * times, gradient * times))


def test_the_ring_brings_one_block_at_a_time(ranks: list, model: models.ColBERT) -> None:
    """Each block comes once in the forward and once in the backward, whatever the chunk size."""
    value, gradient = whole(model, "Contrastive")
    tokens = [results["tokens"] for results in ranks]
    for rank, results in enumerate(ranks):
        queries = ROWS[len(ranks)][rank].stop - ROWS[len(ranks)][rank].start
        order = [tokens[(rank - step) % len(ranks)] for step in range(len(ranks))]
        assert results["ring, calls"] == [(queries, size) for size in order] * 2
        assert results["ring in chunks, calls"] == [(1, size) for size in order for _ in range(queries)] * 2
        for name in ("ring", "ring in chunks"):
            assert_same(results[name], (len(ranks) * value, len(ranks) * gradient))


def test_embeddings_that_do_not_go_together_are_an_error_on_all_ranks(ranks: list) -> None:
    sizes = [4 + rank for rank in range(len(ranks))]
    types = [TYPES[rank % 2] for rank in range(len(ranks))]
    for results in ranks:
        message = f"gather_across_devices: embeddings of {sizes} elements on the ranks; expected one size"
        assert results["other", "sizes"] == (ValueError, message)
        message = f"gather_across_devices: embeddings of {types} on the ranks; expected one type"
        assert results["other", "types"] == (TypeError, message)


@pytest.mark.parametrize("gather", ["all_gather", "ring"])
def test_a_learned_temperature(ranks: list, model: models.ColBERT, gather: str) -> None:
    model.do_query_expansion = True
    expected = learned_temperature(model, batch(model, slice(None), pad=True))
    for results in ranks:
        assert_same(results["temperature", gather], tuple(len(ranks) * value for value in expected))


@pytest.mark.parametrize("name", ["in float64", "no query tokens"])
def test_the_ring_rounds_no_temperature_and_takes_queries_without_tokens(ranks: list, name: str) -> None:
    for results in ranks:
        torch.testing.assert_close(results[name, "ring"], results[name, "all_gather"], rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("gather", ["all_gather", "ring"])
def test_numbers_of_columns_may_differ(ranks: list, model: models.ColBERT, gather: str) -> None:
    """Some ranks have no negatives: every query is scored against all documents that exist."""
    world = len(ranks)
    model.do_query_expansion = True
    model.zero_grad()
    queries, positives, negatives = (
        nn.functional.normalize(model(features)["token_embeddings"], dim=-1)
        for features in batch(model, slice(None), True)
    )
    present = [i for rank, rows in enumerate(ROWS[world]) for i in range(rows.start, rows.stop) if rank % 2]
    masks = masks_of(losses.Contrastive(model), batch(model, slice(None), True))[1]
    documents, mask = torch.cat([positives, negatives[present]]), torch.cat([masks[0], masks[1][present]])
    similarities = torch.einsum("qsd,ntd->qnst", queries, documents).masked_fill(~mask[None, :, None], -torch.inf)
    value = nn.functional.cross_entropy(similarities.amax(-1).sum(-1), torch.arange(len(queries)))
    value.backward()
    for results in ranks:
        assert_same(results["other columns", gather], (world * value.detach(), world * gradient_of(model)))


@pytest.mark.parametrize("gather", ["all_gather", "ring"])
def test_without_gradients(ranks: list, model: models.ColBERT, gather: str) -> None:
    value, _ = whole(model, "Contrastive")
    for results in ranks:
        torch.testing.assert_close(
            results["evaluated", gather].double(), len(ranks) * value.double(), rtol=1e-5, atol=0
        )


@pytest.mark.parametrize("limit", ["texts", "tokens"])
def test_ranks_in_ddp_may_have_other_numbers_of_mini_batches(ranks: list, model: models.ColBERT, limit: str) -> None:
    assert len({len(results["DDP, passes", limit]) for results in ranks}) > 1
    for results in ranks:
        gradient, expected = results["DDP", limit], len(ranks) * whole(model, "Contrastive")[1]
        assert (gradient - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("gather", ["all_gather", "ring"])
def test_in_bfloat16_autocast(ranks: list, model: models.ColBERT, gather: str) -> None:
    value, gradient = whole(model, "Contrastive")
    for results in ranks:
        result = results["bfloat16", gather]
        torch.testing.assert_close(result[0].double(), len(ranks) * value.double(), rtol=0.03, atol=0.03)
        assert torch.cosine_similarity(result[1].double(), gradient, dim=0) > 0.95


@pytest.mark.parametrize("name", ["Contrastive", "CachedContrastive"])
def test_pylates_scorer_gathers_other_lengths(ranks: list, name: str) -> None:
    assert len({results["lengths for PyLate"] for results in ranks}) > 1
    for results in ranks:
        actual, expected = (results["PyLate's scorer", name, scorer] for scorer in ("torch", "pylate_flash"))
        assert_same(actual, expected)


def test_what_cannot_be_gathered_is_refused_on_all_ranks(ranks: list) -> None:
    sizes = [rows.stop - rows.start for rows in ROWS[len(ranks)]]
    for results in ranks:
        assert results["refused"].startswith(f"gather_across_devices: {sizes} queries and {[2] * len(ranks)} columns")
        assert results["refused, smooth"].startswith('smooth: needs masking="exclude"')
