"""PyLate on a GPU: the losses, the reranker, the index and the trainer through the kernels, beside PyLate's own."""

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


def loss_and_gradients(loss: Callable, model, columns: list[list[str]]) -> tuple[float, list[torch.Tensor]]:
    features = [
        {name: value.cuda() for name, value in model.tokenize(texts, is_query=index == 0, pad=True).items()}
        for index, texts in enumerate(columns)
    ]
    model.zero_grad()
    value = loss(features)
    value.backward()
    return value.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", ["Contrastive", "CachedContrastive"])
def test_losses_equal_those_of_pylate(colbert_path: str, name: str) -> None:
    columns = [QUERIES, DOCUMENTS, DOCUMENTS[::-1]]
    model = models.ColBERT(colbert_path, device="cuda", scorer="pylate_flash", masking="zero")
    found = loss_and_gradients(getattr(losses, name)(model, temperature=0.5), model, columns)
    plain = pylate_models.ColBERT(colbert_path, device="cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYLATE_SCORES_BACKEND", "torch")
        expected = loss_and_gradients(getattr(pylate_losses, name)(plain, temperature=0.5), plain, columns)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert len(found[1]) == len(expected[1])
    whole = torch.cat([gradient.flatten() for gradient in found[1]])
    theirs = torch.cat([gradient.flatten() for gradient in expected[1]])
    # The gradient of PyLate's cached loss is that of the sum.
    theirs = theirs / len(QUERIES) if name == "CachedContrastive" else theirs
    assert relative_error(whole, theirs) <= 1e-4


@pytest.mark.parametrize("expansion", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_cached_loss_equals_the_uncached(colbert_path: str, dtype: torch.dtype | None, expansion: bool) -> None:
    """Mini-batches of few tokens, packed embeddings; with and without autocast, the loss scaled for float16."""
    columns = [QUERIES, DOCUMENTS, [text * 3 for text in reversed(DOCUMENTS)]]
    model = models.ColBERT(colbert_path, device="cuda", scorer="pylate_flash").eval()
    model.do_query_expansion = expansion
    scale, found = 2.0**10 if dtype == torch.float16 else 1.0, []
    for loss in (losses.Contrastive(model), losses.CachedContrastive(model, mini_batch_num_tokens=100)):
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            value, gradients = loss_and_gradients(lambda features, loss=loss: scale * loss(features), model, columns)
        found.append((value, torch.cat([gradient.flatten() for gradient in gradients])))
    if dtype is None:
        assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
        assert relative_error(found[1][1], found[0][1]) <= 1e-4
    else:
        assert found[1][0] == pytest.approx(found[0][0], rel=2e-2, abs=2e-2 * scale)
        assert torch.cosine_similarity(found[1][1], found[0][1], dim=0) > 0.98


@pytest.mark.parametrize("name", ["Contrastive", "CachedContrastive"])
def test_losses_from_hidden_states(colbert_path: str, name: str) -> None:
    columns = [QUERIES, DOCUMENTS, DOCUMENTS[::-1]]
    model = models.ColBERT(colbert_path, device="cuda", scorer="pylate_flash").eval()
    arguments = {"mini_batch_size": 3} if name == "CachedContrastive" else {}
    values, gradients = zip(
        *(
            loss_and_gradients(
                getattr(losses, name)(model, temperature=0.5, fuse_projection=fused, **arguments), model, columns
            )
            for fused in (False, True)
        ),
        strict=True,
    )
    assert values[1] == pytest.approx(values[0], rel=1e-5)
    whole = [torch.cat([gradient.flatten() for gradient in found]) for found in gradients]
    assert relative_error(whole[1], whole[0]) <= 1e-4
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = getattr(losses, name)(model, temperature=0.5, fuse_projection=True, **arguments)
        value, halves = loss_and_gradients(loss, model, columns)
    assert value == pytest.approx(values[0], rel=2e-2, abs=2e-2)
    half = torch.cat([gradient.flatten() for gradient in halves])
    assert torch.cosine_similarity(half, whole[0], dim=0) > 0.98


def test_rerank_of_texts_from_hidden_states(colbert_path: str) -> None:
    model = models.ColBERT(colbert_path, device="cuda", scorer="pylate_flash")
    arguments = [["a", "b", "c"], ["c", "a"]], QUERIES[:2], [DOCUMENTS[:3], [DOCUMENTS[2], DOCUMENTS[0]]]
    unfused, fused = (rank.rerank(*arguments, model=model, fuse_projection=flag) for flag in (False, True))
    for expected, found in zip(unfused, fused, strict=True):
        assert [r["id"] for r in found] == [r["id"] for r in expected]
        np.testing.assert_allclose([r["score"] for r in found], [r["score"] for r in expected], rtol=1e-5)


@pytest.mark.parametrize("scratch", [64 << 20, 64 << 10])
def test_index_of_hidden_states_equals_that_of_embeddings(
    tmp_path: Path, scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pylate_flash.ops.hidden_blocks.SCRATCH_BYTES", scratch)
    random = torch.Generator().manual_seed(0)
    states = [
        torch.randn(length, 384, generator=random)
        for length in torch.randint(0, 200, (300,), generator=random).tolist()
    ]
    weight, bias = torch.randn(128, 384, generator=random) / 384**0.5, torch.randn(128, generator=random) / 4
    projected = [torch.nn.functional.normalize(torch.nn.functional.linear(s, weight, bias), dim=-1) for s in states]
    queries = torch.nn.functional.normalize(torch.randn(5, 32, 128, generator=random), dim=-1)
    ids = [str(i) for i in range(300)]
    embeddings = indexes.Flat(tmp_path, "embeddings", device="cpu").add_documents(ids, projected)
    index = indexes.Flat(tmp_path, "states", device="cuda", projection=(weight, bias)).add_documents(ids, states)
    for subset in (None, ids[20:180], [ids[:50], ids[100:], ids[::3], [], ids[7:9]]):
        for expected, found in zip(embeddings(queries, subset=subset), index(queries, subset=subset), strict=True):
            assert [r["id"] for r in found] == [r["id"] for r in expected]
            np.testing.assert_allclose([r["score"] for r in found], [r["score"] for r in expected], rtol=1e-5)
    (found,), (expected,) = (some.get_documents_embeddings([ids]) for some in (index, embeddings))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_rerank_equals_pylate() -> None:
    random = np.random.default_rng(0)

    def tokens(length: int) -> np.ndarray:
        drawn = random.standard_normal((length, 128)).astype(np.float32)
        return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)

    queries = [tokens(32) for _ in range(20)]
    # More than what is copied in one piece.
    documents = [[tokens(int(length)) for length in random.integers(40, 180, 50)] for _ in queries]
    ids = [[f"{i}-{j}" for j in range(50)] for i in range(20)]
    found = rank.rerank(ids, queries, documents, device="cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYLATE_SCORES_BACKEND", "torch")
        expected = pylate_rank.rerank(ids, queries, documents, device="cuda")
    assert [[r["id"] for r in results] for results in found] == [[r["id"] for r in results] for results in expected]
    torch.testing.assert_close(
        torch.tensor([[r["score"] for r in results] for results in found]),
        torch.tensor([[r["score"] for r in results] for results in expected]),
        rtol=1e-5, atol=1e-5,
    )  # fmt: skip


def test_index_on_the_gpu_equals_the_cpu(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    embeddings = [
        torch.nn.functional.normalize(torch.randn(length, 128, generator=random), dim=-1)
        for length in torch.randint(1, 200, (300,), generator=random).tolist()
    ]
    queries = torch.nn.functional.normalize(torch.randn(5, 32, 128, generator=random), dim=-1)
    results = {}
    for device in ("cpu", "cuda"):
        index = indexes.Flat(index_folder=str(tmp_path), index_name=device, override=True, device=device)
        index.add_documents([str(i) for i in range(300)], embeddings)
        results[device] = retrieve.ColBERT(index=index).retrieve(queries, k=10)
    for on_cpu, on_gpu in zip(results["cpu"], results["cuda"], strict=True):
        assert [r["id"] for r in on_cpu] == [r["id"] for r in on_gpu]
        np.testing.assert_allclose([r["score"] for r in on_cpu], [r["score"] for r in on_gpu], rtol=1e-5)


def test_similarity_and_backend(colbert_path: str) -> None:
    model = models.ColBERT(colbert_path, device="cuda", scorer="pylate_flash")
    queries = torch.stack(model.encode(QUERIES, is_query=True, convert_to_tensor=True))
    documents = torch.nn.utils.rnn.pad_sequence(
        model.encode(DOCUMENTS, is_query=False, convert_to_tensor=True), batch_first=True
    )
    from pylate.scores import colbert_scores

    expected = colbert_scores(queries, documents, backend="torch")
    assert model.similarity(queries, documents).is_cuda
    torch.testing.assert_close(model.similarity(queries, documents), expected, rtol=1e-5, atol=1e-5)
    with registered():
        torch.testing.assert_close(
            colbert_scores(queries, documents, backend="pylate_flash"), expected, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_training_lowers_the_loss(colbert_path: str, tmp_path: Path, precision: str) -> None:
    model = models.ColBERT(colbert_path, device="cuda", scorer="pylate_flash")
    dataset = Dataset.from_dict({"query": QUERIES * 8, "positive": DOCUMENTS * 8})
    arguments = ColBERTTrainingArguments(
        output_dir=str(tmp_path), max_steps=20, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=5,
        bf16=precision == "bf16", report_to="none", save_strategy="no",
    )  # fmt: skip
    trainer = ColBERTTrainer(
        model=model, args=arguments, train_dataset=dataset, loss=losses.Contrastive(model, temperature=0.1)
    )
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged[-1] < logged[0]
    assert all(np.isfinite(logged))
