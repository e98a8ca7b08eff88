"""PyLate on a GPU: losses, reranker, index and trainer with the kernels, against PyLate's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("pylate")

from datasets import Dataset
from pylate import losses as pylate_losses
from pylate import models as pylate_models
from pylate import rank as pylate_rank
from pylate import retrieve
from pylate.scores import colbert_scores
from torch import Tensor

from pylate_flash import indexes, losses, models, rank, registered
from pylate_flash.trainer import ColBERTTrainer, ColBERTTrainingArguments
from tests.ops.cases import relative_error

pytestmark = pytest.mark.gpu

QUERIES = ["how to sort a list", "open a file, please!", "what is a kernel?", "maximum of an array"]
DOCUMENTS = [
    "the list is sorted in place, by key.",
    "opening files: use a context manager",
    "a kernel runs on the gpu; many programs run at once.",
    "the maximum over an axis, or of all values",
]


COLUMNS = [QUERIES, DOCUMENTS, DOCUMENTS[::-1]]


def loss_and_gradient(loss: Callable, model, columns: list[list[str]] = COLUMNS) -> tuple[float, Tensor]:
    features = [
        {name: value.cuda() for name, value in model.tokenize(texts, is_query=index == 0, pad=True).items()}
        for index, texts in enumerate(columns)
    ]
    model.zero_grad()
    value = loss(features)
    value.backward()
    return value.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def units(lengths: list[int], seed: int = 0) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.nn.functional.normalize(torch.randn(n, 128, generator=random), dim=-1) for n in lengths]


def assert_same(actual: list, expected: list) -> None:
    """Check that every query has the same results, in the same order."""
    assert [[r["id"] for r in own] for own in actual] == [[r["id"] for r in own] for own in expected]
    for mine, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose([r["score"] for r in mine], [r["score"] for r in theirs], rtol=1e-5)


@pytest.fixture
def model(colbert_path: str) -> models.ColBERT:
    return models.ColBERT(colbert_path, device="cuda", scorer="pylate_flash").eval()


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYLATE_SCORES_BACKEND", "torch")


@pytest.mark.usefixtures("theirs")
@pytest.mark.parametrize("name", ["Contrastive", "CachedContrastive"])
def test_losses_equal_those_of_pylate(colbert_path: str, model: models.ColBERT, name: str) -> None:
    model.masking = "zero"
    result = loss_and_gradient(getattr(losses, name)(model, temperature=0.5, scorer="pylate_flash"), model)
    plain = pylate_models.ColBERT(colbert_path, device="cuda").eval()
    value, gradient = loss_and_gradient(getattr(pylate_losses, name)(plain, temperature=0.5), plain)
    # The gradient of PyLate's cached loss is that of the sum.
    gradient = gradient / len(QUERIES) if name == "CachedContrastive" else gradient
    assert result[0] == pytest.approx(value, rel=1e-5)
    assert relative_error(result[1], gradient) <= 1e-4


@pytest.mark.parametrize("expansion", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_cached_loss_equals_the_uncached(model: models.ColBERT, dtype: torch.dtype | None, expansion: bool) -> None:
    """Mini-batches of few tokens, packed embeddings; with and without autocast, the loss scaled for float16."""
    columns = [QUERIES, DOCUMENTS, [text * 3 for text in reversed(DOCUMENTS)]]
    model.do_query_expansion = expansion
    scale, result = 2.0**10 if dtype == torch.float16 else 1.0, []
    for loss in (losses.Contrastive(model), losses.CachedContrastive(model, mini_batch_num_tokens=100)):
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            result.append(loss_and_gradient(lambda features, loss=loss: scale * loss(features), model, columns))
    if dtype is None:
        assert result[1][0] == pytest.approx(result[0][0], rel=1e-5)
        assert relative_error(result[1][1], result[0][1]) <= 1e-4
    else:
        assert result[1][0] == pytest.approx(result[0][0], rel=2e-2, abs=2e-2 * scale)
        assert torch.cosine_similarity(result[1][1], result[0][1], dim=0) > 0.98


@pytest.mark.parametrize("name", ["Contrastive", "CachedContrastive"])
def test_losses_from_hidden_states(model: models.ColBERT, name: str) -> None:
    arguments = {"temperature": 0.5, **({"mini_batch_size": 3} if name == "CachedContrastive" else {})}
    unfused, fused = (getattr(losses, name)(model, fuse_projection=flag, **arguments) for flag in (False, True))
    expected, actual = loss_and_gradient(unfused, model), loss_and_gradient(fused, model)
    assert actual[0] == pytest.approx(expected[0], rel=1e-5)
    assert relative_error(actual[1], expected[1]) <= 1e-4
    with torch.autocast("cuda", dtype=torch.bfloat16):
        value, half = loss_and_gradient(fused, model)
    assert value == pytest.approx(expected[0], rel=2e-2, abs=2e-2)
    assert torch.cosine_similarity(half, expected[1], dim=0) > 0.98


def test_rerank_of_texts_from_hidden_states(model: models.ColBERT) -> None:
    arguments = [["a", "b", "c"], ["c", "a"]], QUERIES[:2], [DOCUMENTS[:3], [DOCUMENTS[2], DOCUMENTS[0]]]
    unfused, fused = (rank.rerank(*arguments, model=model, fuse_projection=flag) for flag in (False, True))
    assert_same(fused, unfused)


LENGTHS = torch.randint(0, 200, (300,), generator=torch.Generator().manual_seed(0)).tolist()
IDS = [str(i) for i in range(300)]


@pytest.mark.parametrize("scratch", [64 << 20, 64 << 10])
def test_index_of_hidden_states_equals_that_of_embeddings(
    tmp_path: Path, scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pylate_flash.ops.hidden_blocks.SCRATCH_BYTES", scratch)
    random = torch.Generator().manual_seed(0)
    states = [torch.randn(length, 384, generator=random) for length in LENGTHS]
    weight, bias = torch.randn(128, 384, generator=random) / 384**0.5, torch.randn(128, generator=random) / 4
    projected = [torch.nn.functional.normalize(torch.nn.functional.linear(s, weight, bias), dim=-1) for s in states]
    embeddings = indexes.Flat(tmp_path, "embeddings", device="cpu").add_documents(IDS, projected)
    index = indexes.Flat(tmp_path, "states", device="cuda", projection=(weight, bias)).add_documents(IDS, states)
    queries = units([32] * 5, seed=1)
    for subset in (None, IDS[20:180], [IDS[:50], IDS[100:], IDS[::3], [], IDS[7:9]]):
        assert_same(index(queries, subset=subset), embeddings(queries, subset=subset))
    (actual,), (expected,) = (some.get_documents_embeddings([IDS]) for some in (index, embeddings))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_rerank_equals_pylate(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    queries = units([32] * 20)
    # More than is copied at once.
    documents = [units(random.integers(40, 180, 50).tolist(), seed) for seed in range(20)]
    ids = [[f"{i}-{j}" for j in range(50)] for i in range(20)]
    arrays = [query.numpy() for query in queries], [[document.numpy() for document in own] for own in documents]
    result = rank.rerank(ids, *arrays, device="cuda")
    monkeypatch.setenv("PYLATE_SCORES_BACKEND", "torch")
    assert_same(result, pylate_rank.rerank(ids, *arrays, device="cuda"))


def test_index_on_the_gpu_equals_the_cpu(tmp_path: Path) -> None:
    embeddings, queries = units([max(1, length) for length in LENGTHS]), units([32] * 5, seed=1)
    results = []
    for device in ("cpu", "cuda"):
        index = indexes.Flat(index_folder=str(tmp_path), index_name=device, override=True, device=device)
        index.add_documents(IDS, embeddings)
        results.append(retrieve.ColBERT(index=index).retrieve(queries, k=10))
    assert_same(results[1], results[0])


def test_similarity_and_backend(model: models.ColBERT) -> None:
    queries, documents = (
        torch.nn.utils.rnn.pad_sequence(
            model.encode(texts, is_query=texts is QUERIES, convert_to_tensor=True), batch_first=True
        )
        for texts in (QUERIES, DOCUMENTS)
    )
    expected = colbert_scores(queries, documents, backend="torch")
    assert model.similarity(queries, documents).is_cuda
    torch.testing.assert_close(model.similarity(queries, documents), expected, rtol=1e-5, atol=1e-5)
    with registered():
        actual = colbert_scores(queries, documents, backend="pylate_flash")
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_training_lowers_the_loss(model: models.ColBERT, tmp_path: Path, precision: str) -> None:
    dataset = Dataset.from_dict({"query": QUERIES * 8, "positive": DOCUMENTS * 8})
    arguments = ColBERTTrainingArguments(
        output_dir=str(tmp_path), max_steps=20, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=5,
        bf16=precision == "bf16", report_to="none", save_strategy="no",
    )  # fmt: skip
    loss = losses.Contrastive(model, temperature=0.1)
    trainer = ColBERTTrainer(model=model, args=arguments, train_dataset=dataset, loss=loss)
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged[-1] < logged[0]
    assert all(np.isfinite(logged))
