"""Arguments that the losses refuse, and batches that they warn about."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from pylate_flash import losses, models
from pylate_flash.trainer import ColBERTTrainingArguments

CONTRASTIVE = [losses.Contrastive, losses.CachedContrastive]


@pytest.fixture(scope="module")
def model(tiny_colbert_path: str) -> models.ColBERT:
    return models.ColBERT(tiny_colbert_path, device="cpu", query_length=8, document_length=16)


def columns(model: models.ColBERT, queries: int, documents: int = 1) -> list[dict[str, torch.Tensor]]:
    """Tokenized queries, and columns of as many documents."""
    texts = [["one", "two", "three", "four"][:queries] for _ in range(documents)]
    tokenized = [model.tokenize(column, is_query=False, pad=True) for column in texts]
    return [model.tokenize([f"what is {i}?" for i in range(queries)], is_query=True, pad=True), *tokenized]


@pytest.mark.parametrize("kind", CONTRASTIVE)
@pytest.mark.parametrize(
    ("temperature", "error"),
    [
        (0, ValueError),
        (-0.5, ValueError),
        (1e-46, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        (torch.ones(3), ValueError),
        (True, TypeError),
        ("1", TypeError),
        (None, TypeError),
    ],
)
def test_a_temperature_is_a_finite_number_above_0(
    model: models.ColBERT, kind: type, temperature: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match="^temperature: .*expected"):
        kind(model, temperature=temperature)


@pytest.mark.parametrize("options", [{}, {"fuse_projection": True}, {"scorer": "torch"}])
@pytest.mark.parametrize("kind", CONTRASTIVE)
def test_a_temperature_can_be_learned(model: models.ColBERT, kind: type, options: dict) -> None:
    def gradient(loss: Any, temperature: torch.Tensor) -> torch.Tensor:
        loss(columns(model, 4)).backward()
        assert temperature.grad is not None
        return temperature.grad

    learned, reference = (torch.nn.Parameter(torch.tensor(2.0)) for _ in range(2))
    actual = gradient(kind(model, temperature=learned, **options), learned)
    expected = gradient(losses.Contrastive(model, scorer="torch", temperature=reference), reference)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mini_batch_size", "score_mini_batch_size", "mini_batch_num_tokens"])
@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError)])
def test_a_mini_batch_has_at_least_one_text(
    model: models.ColBERT, name: str, size: Any, error: type[Exception]
) -> None:
    kinds = CONTRASTIVE if name == "score_mini_batch_size" else [losses.CachedContrastive]
    for kind in kinds:
        with pytest.raises(error, match=f"^{name}: .*expected"):
            kind(model, **{name: size})


@pytest.mark.parametrize("kind", CONTRASTIVE)
def test_gather_is_one_of_two(model: models.ColBERT, kind: type) -> None:
    with pytest.raises(ValueError, match="gather must be one of 'all_gather', 'ring', got 'tree'"):
        kind(model, gather="tree")


@pytest.mark.parametrize(
    ("kind", "arguments", "named"),
    [
        (losses.Contrastive, {"gather": "ring"}, "gather='ring'"),
        (losses.CachedContrastive, {"gather": "ring"}, "gather='ring'"),
        (losses.CachedContrastive, {"mini_batch_num_tokens": 64}, "mini_batch_num_tokens=64"),
    ],
)
def test_what_pylates_code_cannot_do_is_refused(
    model: models.ColBERT, kind: type, arguments: dict, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the loss is constructed, as far as known by then, and when it is called."""
    message = f'^{named}: needs the scorer "pylate_flash" or "auto"'
    with pytest.raises(ValueError, match=message):
        kind(model, scorer="torch", **arguments)
    with pytest.raises(ValueError, match=message):
        kind(model, score_metric=lambda *_, **__: None, **arguments)
    loss = kind(model, **arguments)
    loss(columns(model, 2))
    monkeypatch.setenv("PYLATE_SCORES_BACKEND", "torch")
    with pytest.raises(ValueError, match=message):
        loss(columns(model, 2))


def test_the_size_of_mini_batches_is_pylates_by_default(model: models.ColBERT) -> None:
    def limits(**arguments: int) -> tuple:
        loss = losses.CachedContrastive(model, **arguments)
        return loss.mini_batch_size, loss.mini_batch_num_tokens

    assert limits() == (32, None)
    assert limits(mini_batch_num_tokens=100) == (None, 100)
    assert limits(mini_batch_num_tokens=100, mini_batch_size=3) == (3, 100)


def test_fuse_projection_is_a_bool_or_none(model: models.ColBERT) -> None:
    for kind in (*CONTRASTIVE, losses.Distillation):
        with pytest.raises(TypeError, match="fuse_projection: 'no'; expected True, False or None"):
            kind(model, fuse_projection="no")
    with pytest.raises(TypeError, match="fuse_projection: 1; expected"):
        ColBERTTrainingArguments("out", fuse_projection=1)


@pytest.mark.parametrize("kind", CONTRASTIVE)
def test_a_batch_without_negatives_is_warned_about_once(model: models.ColBERT, kind: type) -> None:
    loss = kind(model)
    with pytest.warns(UserWarning, match="one query and one document has no negatives: its loss is 0"):
        assert loss(columns(model, 1)) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loss(columns(model, 1))
        kind(model)(columns(model, 1, documents=2))
        kind(model)(columns(model, 2))
        with torch.no_grad():
            kind(model)(columns(model, 1))


def test_distillation_of_one_candidate_is_warned_about(model: models.ColBERT) -> None:
    with pytest.warns(UserWarning, match="one candidate per query has nothing to compare"):
        assert losses.Distillation(model)(columns(model, 2), torch.ones(2, 1)) == 0


def test_distillation_refuses_ragged_lists(model: models.ColBERT) -> None:
    with pytest.raises(ValueError, match="labels: list; expected the teacher's scores"):
        losses.Distillation(model)([columns(model, 2)[0], columns(model, 4)[1]], [[1.0, 2.0], [1.0]])


def test_scores_of_a_teacher_may_be_integers(model: models.ColBERT) -> None:
    batch = [columns(model, 2)[0], columns(model, 4)[1]]
    loss = losses.Distillation(model)
    scores = torch.tensor([[3, 1], [0, 2]])
    assert torch.equal(loss(batch, scores), loss(batch, scores.float()))
