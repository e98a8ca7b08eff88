"""Losses with a smooth maximum, compared with torch's losses on reference scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pylate_flash import losses
from pylate_flash.ops import soft_maxsim_reference
from tests.encoders import WordVectors, tokens

LABELS = torch.tensor([[0.0, 2.0], [1.0, -1.0], [0.5, 0.0]])


@pytest.fixture
def model() -> WordVectors:
    generator = torch.Generator().manual_seed(0)
    return WordVectors(torch.randn(12, 6, generator=generator).tolist())


def columns(*rows: list[list[int]]) -> list[dict[str, Tensor]]:
    """Tokenized columns; token 11 is padding in documents."""
    first, *documents = rows
    return [tokens(*first), *(tokens(*column, masked=11) for column in documents)]


QUERIES = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
POSITIVES, NEGATIVES = [[1, 9, 11], [4, 10, 2], [8, 11, 11]], [[2, 3, 9], [7, 11, 11], [0, 1, 10]]


def by_definition(
    model: WordVectors, features: list[dict[str, Tensor]], beta: Any, per_query: bool, masking: str
) -> Tensor:
    queries, *documents = [model(column)["token_embeddings"] for column in features]
    candidates = torch.cat(documents)
    mask = torch.cat([column["attention_mask"] for column in features[1:]])
    if per_query:
        candidates, mask = candidates.unflatten(0, (len(queries), -1)), mask.unflatten(0, (len(queries), -1))
    options = {"documents_mask": mask, "normalize": True, "masking": masking}
    return soft_maxsim_reference(queries, candidates, beta, **options)


def check(model: WordVectors, loss: nn.Module, beta: Tensor, actual: Tensor, expected: Tensor) -> None:
    """Compare the value and the gradients of the model and of beta."""
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad(actual, (model.vectors, loss.smooth))
    for gradient, reference in zip(gradients, torch.autograd.grad(expected, (model.vectors, beta)), strict=True):
        torch.testing.assert_close(gradient.double(), reference.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("masking", ["exclude", "zero"])
@pytest.mark.parametrize("arguments", [{}, {"size_average": False, "temperature": 0.3}])
def test_contrastive(model: WordVectors, arguments: dict, masking: str) -> None:
    beta = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    loss = losses.Contrastive(model, **arguments, masking=masking, smooth=nn.Parameter(torch.tensor(5.0)))
    assert any(parameter is loss.smooth for parameter in loss.parameters())
    features = columns(QUERIES, POSITIVES, NEGATIVES)
    scores = by_definition(model, features, beta, False, masking) / arguments.get("temperature", 1.0)
    reduction = "mean" if arguments.get("size_average", True) else "sum"
    expected = F.cross_entropy(scores, torch.arange(3), reduction=reduction)
    check(model, loss, beta, loss(features), expected)


@pytest.mark.parametrize("arguments", [{}, {"size_average": False, "normalize_scores": False}])
def test_distillation(model: WordVectors, arguments: dict) -> None:
    beta = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    loss = losses.Distillation(model, **arguments, smooth=nn.Parameter(torch.tensor(5.0)))
    features = columns(QUERIES, POSITIVES + NEGATIVES)
    scores = by_definition(model, features, beta, True, "exclude")
    if arguments.get("normalize_scores", True):
        least, most = scores.amin(dim=1, keepdim=True), scores.amax(dim=1, keepdim=True)
        scores = (scores - least) / (most - least + 1e-8)
    divergences = F.softmax(LABELS, dim=1) * (F.log_softmax(LABELS, dim=1) - F.log_softmax(scores, dim=1))
    expected = divergences.sum() / (3 if arguments.get("size_average", True) else 1)
    check(model, loss, beta, loss(features, LABELS), expected)


@pytest.mark.parametrize("kind", [losses.Contrastive, losses.Distillation])
def test_a_sharp_maximum_is_the_maximum(model: WordVectors, kind: type) -> None:
    if kind is losses.Distillation:
        arguments = columns(QUERIES, POSITIVES + NEGATIVES), LABELS
    else:
        arguments = (columns(QUERIES, POSITIVES, NEGATIVES),)
    torch.testing.assert_close(kind(model, smooth=1e5)(*arguments), kind(model)(*arguments), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [losses.Contrastive, losses.Distillation])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"smooth": 0.0}, ValueError, "^smooth: 0.0; expected a finite number above 0"),
        ({"smooth": "5"}, TypeError, "^smooth: str; expected a number or a tensor of one element"),
        ({"smooth": torch.ones(2)}, ValueError, r"^smooth: a tensor of shape \(2,\); expected"),
        ({"smooth": 5.0, "scorer": "torch"}, ValueError, '^smooth=5.0: needs the scorer "pylate_flash" or "auto"'),
        ({"smooth": 5.0, "score_metric": max}, ValueError, '^smooth=5.0: needs the scorer "pylate_flash" or "auto"'),
    ],
)
def test_bad_arguments(model: WordVectors, kind: type, arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kind(model, **arguments)


def test_what_has_no_smooth_maximum(tiny_colbert_path: str, model: WordVectors) -> None:
    with pytest.raises(ValueError, match='^smooth: given together with gather="ring"'):
        losses.Contrastive(model, smooth=5.0, gather="ring")
    # The flag was set after construction, so the call raises.
    for kind, features in (
        (losses.Contrastive, (columns(QUERIES, POSITIVES),)),
        (losses.Distillation, (columns(QUERIES, POSITIVES + NEGATIVES), LABELS)),
    ):
        loss = kind(model, smooth=5.0)
        loss.scorer = "torch"
        with pytest.raises(ValueError, match='^smooth=5.0: needs the scorer "pylate_flash" or "auto"'):
            loss(*features)
    from pylate_flash import models

    colbert = models.ColBERT(tiny_colbert_path, device="cpu")
    with pytest.raises(ValueError, match="^smooth: given together with fuse_projection"):
        losses.Contrastive(colbert, smooth=5.0, fuse_projection=True)
