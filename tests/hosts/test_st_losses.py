"""The four multi-vector losses while registered: values and parameter gradients equal the host's own."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import sentence_transformers.multi_vector_encoder.losses.cached_multiple_negatives_ranking as cached_host
import torch
import torch.distributed as dist
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder import losses, scoring
from torch.nn.parallel import DistributedDataParallel

from pylate_flash import registered
from pylate_flash.hosts import sentence_transformers as ours
from pylate_flash.hosts.sentence_transformers import losses as loss_classes
from tests.ranks import run_ranks

HOST = "sentence-transformers"
WORLD = 2
Columns = list[dict[str, Any]]

IN_BATCH = "MultiVectorMultipleNegativesRankingLoss"
CACHED = f"Cached{IN_BATCH}"
# Class, its arguments, columns of documents, and columns of labels.
CASES = {
    "in-batch": (IN_BATCH, {}, 1, 0),
    "in-batch, hard negatives": (IN_BATCH, {"scale": 0.3}, 3, 0),
    "in-batch, scored in parts": (IN_BATCH, {"score_mini_batch_size": 2, "mini_batch_size": 3}, 2, 0),
    "in-batch, mean": (IN_BATCH, {"similarity_fct": scoring.mean_colbert_scores, "scale": 8.0}, 2, 0),
    "in-batch, XTR": (IN_BATCH, {"similarity_fct": scoring.XTRScores(top_k=16)}, 2, 0),
    "cached": (CACHED, {"mini_batch_size": 2}, 1, 0),
    "cached, hard negatives": (CACHED, {"mini_batch_size": 3, "scale": 0.3, "score_mini_batch_size": 4}, 3, 0),
    "cached, mean": (CACHED, {"mini_batch_size": 2, "similarity_fct": scoring.mean_colbert_scores}, 2, 0),
    "distillation": ("MultiVectorDistillKLDivLoss", {"temperature": 0.7}, 3, 3),
    "distillation, mean": ("MultiVectorDistillKLDivLoss", {"similarity_fct": scoring.mean_colbert_kd_scores}, 3, 3),
    "margins": ("MultiVectorMarginMSELoss", {}, 3, 2),
    "margins of scores": ("MultiVectorMarginMSELoss", {"mini_batch_size": 2}, 2, 2),
}


def columns(model, texts, count, n_texts=5):
    """Queries, and `count` columns of documents, each padded to its own longest."""
    return [model.preprocess(texts(10 * count + i, n_texts, 4 + 2 * i)) for i in range(count + 1)]


def value_and_gradients(loss, model, features, labels):
    model.zero_grad()
    value = loss([dict(column) for column in features], labels)
    value.backward()
    return value.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def assert_close(actual, expected):
    assert actual[0].item() == pytest.approx(expected[0].item(), rel=1e-5)
    assert (actual[1] - expected[1]).norm() <= 1e-5 * expected[1].norm()
    assert expected[1].norm() > 1e-4


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, tiny_encoder, texts):
    name, arguments, count, n_labels = CASES[case]
    loss, features = getattr(losses, name)(tiny_encoder, **arguments), columns(tiny_encoder, texts, count)
    labels = torch.randn(5, n_labels, generator=torch.Generator().manual_seed(0)) if n_labels else None
    expected = value_and_gradients(loss, tiny_encoder, features, labels)
    with registered(HOST):
        assert_close(value_and_gradients(loss, tiny_encoder, features, labels), expected)
        with torch.no_grad():
            value = loss([dict(column) for column in features], labels)
        assert value.item() == pytest.approx(expected[0].item(), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "scorer", "count"),
    [
        (IN_BATCH, "colbert_scores", 2),
        (CACHED, "colbert_scores", 2),
        ("MultiVectorDistillKLDivLoss", "colbert_kd_scores", 3),
        ("MultiVectorMarginMSELoss", "colbert_scores_pairwise", 2),
    ],
)
def test_as_similarity_fct(name, scorer, count, tiny_encoder, texts):
    """Without register()."""
    loss_class, features = getattr(losses, name), columns(tiny_encoder, texts, count)
    labels = torch.randn(5, count, generator=torch.Generator().manual_seed(0))
    mine = loss_class(tiny_encoder, similarity_fct=getattr(ours, scorer))
    assert mine.get_config_dict()["similarity_fct"].endswith(scorer)
    assert_close(
        value_and_gradients(mine, tiny_encoder, features, labels),
        value_and_gradients(loss_class(tiny_encoder), tiny_encoder, features, labels),
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_the_cached_loss_gathers_by_the_hosts_own_function(rank, monkeypatch):
    """It is looked up in the host's module at every call. A copy of all documents costs log 2."""
    generator = torch.Generator().manual_seed(0)
    embeddings = [
        [torch.randn(2, length, 8, generator=generator) for length in lengths] for lengths in ((3, 4), (6, 5), (4, 7))
    ]
    masks = [[chunk.new_ones(chunk.shape[:2], dtype=torch.bool) for chunk in column] for column in embeddings]
    monkeypatch.setattr(
        cached_host, "all_gather_padded", lambda *tensors, with_grad: [torch.cat([t, t]) for t in tensors]
    )
    monkeypatch.setattr(cached_host, "get_rank", lambda: rank)
    with registered(HOST):
        alone, gathered = (
            losses.CachedMultiVectorMultipleNegativesRankingLoss(torch.nn.Identity(), gather_across_devices=gather)
            for gather in (False, True)
        )
        value = gathered.calculate_loss(embeddings, masks)
        assert value.item() == pytest.approx(alone.calculate_loss(embeddings, masks).item() + math.log(2), rel=1e-5)


def test_a_document_without_tokens(tiny_encoder, texts):
    """All of its tokens are masked: it scores -1e9, as a negative and as the positive."""
    loss = losses.CachedMultiVectorMultipleNegativesRankingLoss(tiny_encoder, mini_batch_size=2)
    for position in (0, 1):
        embeddings = [
            [torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()] for seed in range(3)
        ]
        masks = [[torch.ones(3, 4, dtype=torch.bool)] for _ in embeddings]
        masks[1 + position][0][1] = False
        results = []
        for _ in range(2):
            for [chunk] in embeddings:
                chunk.grad = None
            with registered(HOST) if results else torch.enable_grad():
                value = loss.calculate_loss(embeddings, masks, with_backward=True)
            results.append((value, torch.cat([chunk.grad.flatten() for [chunk] in embeddings])))
        assert_close(*results)


# Losses of this package that gather, as the host does with batches of one size.
GATHERED = {
    "in-batch": (IN_BATCH, {}),
    "in-batch, ring": (IN_BATCH, {"gather": "ring"}),
    "in-batch, mean, ring": (IN_BATCH, {"gather": "ring", "similarity_fct": scoring.mean_colbert_scores, "scale": 5.0}),
    "cached": (CACHED, {"mini_batch_size": 2}),
    "cached, ring": (CACHED, {"mini_batch_num_tokens": 20, "gather": "ring"}),
    "fused": (IN_BATCH, {"fuse_projection": True}),
    "margin": (CACHED, {"margin": 0.1}),
}
# Batches of equal and of unequal sizes; with the latter, one rank has a single query.
TEXTS = [("equal", [3, 3]), ("unequal", [5, 1])]


def batches(texts, sizes):
    """The columns of each rank: queries, positives and negatives, longer ones on the second."""
    return [[texts(10 * rank + i, size, 4 + 4 * rank + i) for i in range(3)] for rank, size in enumerate(sizes)]


def work(rank, path, folder, inputs):
    """The work of each process, which saves its results to a file for the tests."""
    torch.set_num_threads(1)
    os.environ.update(HF_HUB_OFFLINE="1")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=WORLD)
    model, results = MultiVectorEncoder(path, device="cpu"), {}
    for name, arguments in ((IN_BATCH, {}), (CACHED, {"mini_batch_size": 2})):
        loss = getattr(losses, name)(model, gather_across_devices=True, **arguments)
        batch = [model.preprocess(column) for column in inputs["equal"][rank]]
        results[name] = [value_and_gradients(loss, model, batch, None)]
        with registered(HOST):
            results[name].append(value_and_gradients(loss, model, batch, None))
    for sizes, columns in inputs.items():
        batch = [model.preprocess(column) for column in columns[rank]]
        for case, (name, arguments) in GATHERED.items():
            loss = getattr(loss_classes, name)(model, gather_across_devices=True, **arguments)
            results[case, sizes] = value_and_gradients(loss, model, batch, None)
    # BERT's pooler does not reach the loss, and DDP would wait for its gradients.
    model[0].auto_model.pooler.requires_grad_(False)
    wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    cached = loss_classes.CachedMultiVectorMultipleNegativesRankingLoss
    loss = cached(wrapped, gather_across_devices=True, mini_batch_size=2)
    results["DDP"] = value_and_gradients(loss, model, batch, None)
    loss = cached(wrapped, mini_batch_size=2, fuse_projection=True)
    results["DDP, fused"] = value_and_gradients(loss, model, batch, None)
    results["own negatives"] = value_and_gradients(cached(model, mini_batch_size=2), model, batch, None)
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tiny_encoder_path, tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("ranks")
    arguments = {name: batches(texts, sizes) for name, sizes in TEXTS}
    run_ranks(work, (tiny_encoder_path, folder, arguments), WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


def test_two_processes_with_unequal_lengths(ranks):
    values = []
    for results in ranks:
        for name in (IN_BATCH, CACHED):
            expected, actual = results[name]
            assert_close(actual, expected)
            values.append(expected[0].item())
    # Each rank has its own queries, and both losses are one.
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert values[0] != pytest.approx(values[2], rel=1e-3)


@pytest.mark.parametrize("case", ["in-batch", "in-batch, ring", "cached", "cached, ring", "fused"])
def test_gathered_by_the_classes_as_by_the_host(case, ranks):
    for results in ranks:
        assert_close(results[case, "equal"], results[IN_BATCH][0])


@pytest.mark.parametrize("sizes", [name for name, _ in TEXTS])
@pytest.mark.parametrize("case", GATHERED)
def test_the_ranks_together_are_one_large_batch(case, sizes, ranks, tiny_encoder, texts):
    """The mean of the ranks' values and gradients is that of one process with all texts."""
    name, arguments = GATHERED[case]
    merged = [sum(parts, []) for parts in zip(*batches(texts, dict(TEXTS)[sizes]), strict=True)]
    arguments = {name: value for name, value in arguments.items() if name != "gather"}
    loss = getattr(loss_classes, name)(tiny_encoder, **arguments)
    features = [tiny_encoder.preprocess(column) for column in merged]
    expected = value_and_gradients(loss, tiny_encoder, features, None)
    actual = [results[case, sizes] for results in ranks]
    value, gradients = (sum(parts) / WORLD for parts in zip(*actual, strict=True))
    assert_close((value, gradients), expected)


def test_in_distributed_data_parallel(ranks):
    """Ranks with different numbers of mini-batches exchange gradients once; the frozen pooler has none anyway."""
    for case, alone in (("DDP", ("cached", "unequal")), ("DDP, fused", "own negatives")):
        expected = sum(results[alone][1] for results in ranks) / WORLD
        for results in ranks:
            assert (results[case][1] - expected).norm() <= 1e-5 * expected.norm()
            assert results[case][0].item() == pytest.approx(results[alone][0].item(), rel=1e-5)
