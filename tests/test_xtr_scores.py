"""XTR scores: our values and gradients equal PyLate's, and registering routes all of PyLate's XTR scores."""

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pylate.scores
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pylate.scores import XTRKDScores, XTRScores, xtr_kd_scores, xtr_scores

from pylate_flash import losses, registered, scores
from pylate_flash.hosts import pylate as host
from pylate_flash.register import use_scorer

OPTIONS = settings(max_examples=40)


def batch(seed: int, groups: int, per_group: int, query_length: int, length: int, kind: str) -> dict[str, Any]:
    """Unit vectors, without ties between similarities except for masked tokens."""
    generator = torch.Generator().manual_seed(seed)
    queries = F.normalize(torch.randn(groups, query_length, 5, generator=generator), dim=-1)
    documents = F.normalize(torch.randn(groups, per_group, length, 5, generator=generator), dim=-1)
    if kind == "negative":
        # All similarities are negative.
        queries, documents = queries.abs(), -documents.abs()
    call = {"queries_embeddings": queries.requires_grad_(), "documents_embeddings": documents.requires_grad_()}
    if kind in ("masks", "weights"):
        lengths = torch.randint(1, length + 1, (groups, per_group, 1), generator=generator)
        call["documents_mask"] = torch.arange(length) < lengths
        query_weights = torch.rand(groups, query_length, generator=generator)
        call["queries_mask"] = query_weights if kind == "weights" else query_weights > 0.3
    return call


def check(actual: Any, expected: Any, call: dict[str, Any]) -> None:
    leaves = call["queries_embeddings"], call["documents_embeddings"]
    mine, theirs = actual(**call), expected(**call)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    weights = torch.cos(torch.arange(mine.numel())).view(mine.shape)
    gradients = [torch.autograd.grad(weighted.sum(), leaves) for weighted in (mine.mul_(weights), theirs * weights)]
    for gradient, reference in zip(*gradients, strict=True):
        assert (gradient - reference).norm() <= 1e-5 * max(1.0, reference.norm())


@OPTIONS
@given(
    st.integers(0, 2**20), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 6),
    st.sampled_from(["plain", "negative", "masks", "weights"]), st.floats(0, 1), st.booleans(),
)  # fmt: skip
def test_values_and_gradients_are_pylates(seed, groups, per_group, query_length, length, kind, part, own) -> None:
    call = batch(seed, groups, per_group, query_length, length, kind)
    # Limit k to unmasked tokens: which masked tokens torch retrieves is not deterministic.
    n_tokens = int(call["documents_mask"].sum()) if "documents_mask" in call else groups * per_group * length
    k = max(1, round(part * n_tokens))
    ours, theirs = (scores.XTRKDScores, XTRKDScores) if own else (scores.XTRScores, XTRScores)
    check(ours(k), theirs(k), call)


def test_all_tokens_and_more() -> None:
    call = batch(0, 2, 2, 3, 4, "masks")
    check(scores.XTRScores(16), XTRScores(16), call)
    with pytest.raises(RuntimeError, match="out of range"):
        XTRScores(17)(**call)
    assert torch.equal(scores.XTRScores(17)(**call), scores.XTRScores(16)(**call))


def test_k_of_numpy_and_masks_of_one_row() -> None:
    call = batch(0, 2, 2, 3, 4, "masks")
    check(scores.XTRScores(np.int64(3)), XTRScores(np.int64(3)), call)
    call["queries_mask"] = call["queries_mask"][:1]
    check(scores.XTRScores(3), XTRScores(3), call)
    for k in (True, np.True_, np.float32(3), 3.0):
        with pytest.raises(TypeError, match=f"k must be an integer, got {type(k).__name__}"):
            scores.XTRScores(k)(**call)


def test_instances_and_classes_stand_where_pylates_do() -> None:
    assert isinstance(scores.xtr_scores, XTRScores)
    assert isinstance(scores.xtr_kd_scores, XTRKDScores)
    assert scores.xtr_scores.k == scores.xtr_kd_scores.k == xtr_scores.k == xtr_kd_scores.k
    call = batch(1, 16, 2, 3, 10, "plain")
    check(scores.xtr_scores, xtr_scores, call)
    check(scores.xtr_kd_scores, xtr_kd_scores, call)
    assert set(scores.__all__) >= {name for name in pylate.scores.__all__ if name.lower().startswith("xtr")}
    failures: list[str] = []
    for example in doctest.DocTestFinder().find(scores.XTRScores, globs=vars(scores) | {"XTRScores": scores.XTRScores}):
        doctest.DocTestRunner(verbose=False).run(example, out=failures.append)
    assert not failures


def test_other_backends_are_pylates_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half embeddings show which library scores: PyLate rounds their similarities."""
    call = {name: value.detach().half() for name, value in batch(2, 3, 2, 4, 6, "plain").items()}
    existing = XTRScores(5)
    theirs, ours = existing(**call), scores.XTRScores(5)(**call)
    assert not torch.equal(theirs, ours)
    with registered("pylate"):
        for metric in (existing, XTRScores(5)):
            assert torch.equal(metric(**call), ours)
        assert torch.equal(XTRKDScores(5)(**call), scores.XTRKDScores(5)(**call))
        monkeypatch.setenv("PYLATE_SCORES_BACKEND", "torch")
        for metric in (XTRScores(5), scores.XTRScores(5, document_chunk_size=1)):
            assert torch.equal(metric(**call), theirs)
        monkeypatch.delenv("PYLATE_SCORES_BACKEND")
        with use_scorer("torch"):
            assert torch.equal(XTRScores(5)(**call), theirs)
    with use_scorer("pylate_flash"):
        assert torch.equal(XTRScores(5)(**call), ours)
    assert host.original("XTRScores._score") is XTRScores._score


def test_errors_name_the_argument() -> None:
    call = {name: value.detach() for name, value in batch(3, 2, 2, 3, 4, "masks").items()}
    with pytest.raises(ValueError, match=r"documents_embeddings must be \[G, N, Ld, d\], got shape \[2, 4, 5\]"):
        scores.XTRScores(2)(call["queries_embeddings"], call["documents_embeddings"][0])
    with pytest.raises(ValueError, match=r"documents_mask must have shape \[2, 2, 4\], got \[2, 4\]"):
        scores.XTRScores(2)(**call | {"documents_mask": call["documents_mask"][0]})
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        scores.XTRScores(0)(**call)
    queries, documents = call["queries_embeddings"], call["documents_embeddings"]
    for metric, shape in ((scores.XTRScores(2), r"\[G, N, Ld, d\]"), (scores.XTRKDScores(2), r"\[Nq, K, Ld, d\]")):
        with pytest.raises(TypeError, match=f"documents_embeddings must be .* of shape {shape}, got NoneType"):
            metric(queries, None)
        with pytest.raises(ValueError, match=r"queries_embeddings must be \[Nq, Lq, d\], .* do not stack"):
            metric([queries[0], queries[0, :1]], documents)
    with pytest.raises(ValueError, match="documents_embeddings must hold the candidates of each query, 2, got 1"):
        scores.XTRKDScores(2)(queries, documents[:1])


@pytest.mark.parametrize("name", ["Contrastive", "CachedContrastive", "Distillation"])
def test_losses_take_them(name: str, tiny_colbert_path: str) -> None:
    from pylate import losses as pylate_losses
    from pylate import models

    model = models.ColBERT(tiny_colbert_path, device="cpu").eval()
    texts = ["red", "the sky", "dogs sleep"], ["red fish", "blue sky", "big dogs"], ["no fish", "a dog", "blue cat"]
    features = [model.tokenize(column, is_query=index == 0) for index, column in enumerate(texts)]
    labels = None
    ours, theirs = scores.XTRScores(20), XTRScores(20)
    if name == "Distillation":
        documents = {key: torch.cat([features[1][key], features[2][key]]) for key in features[1]}
        documents = {key: value.view(2, 3, -1).transpose(0, 1).flatten(0, 1) for key, value in documents.items()}
        features, labels = [features[0], documents], torch.randn(3, 2)
        ours, theirs = scores.XTRKDScores(20), XTRKDScores(20)
    values = []
    for module, metric in ((losses, ours), (pylate_losses, theirs)):
        model.zero_grad()
        value = getattr(module, name)(model, metric)([dict(column) for column in features], labels)
        if name != "CachedContrastive":
            value.backward()
        gradient = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        values.append((value.detach(), torch.cat(gradient) if gradient else torch.zeros(1)))
    torch.testing.assert_close(*values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_type_is_pylates(dtype: torch.dtype) -> None:
    arguments = torch.randn(2, 3, 5).to(dtype), torch.randn(2, 1, 4, 5).to(dtype)
    assert scores.XTRScores(4)(*arguments).dtype == XTRScores(4)(*arguments).dtype == torch.float32
