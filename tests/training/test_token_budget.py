"""The largest mini-batch that fits, on a model that raises when it does not."""

from __future__ import annotations

import pytest
import torch

from pylate_flash import losses, models
from pylate_flash.training import token_budget
from pylate_flash.training.token_budget import _largest, largest_token_budget


@pytest.fixture
def model(tiny_colbert_path: str) -> models.ColBERT:
    return models.ColBERT(tiny_colbert_path, device="cpu", document_length=16)


@pytest.mark.parametrize(
    ("fitting", "most", "expected"),
    [(0, 8, 0), (1, 8, 1), (2, 8, 2), (3, 8, 3), (5, 8, 4), (6, 8, 6), (7, 8, 6), (8, 8, 8), (100, 9, 9), (9, 1, 1)],
)
def test_doubled_until_it_does_not_fit(fitting: int, most: int, expected: int) -> None:
    tried = []
    assert _largest(lambda size: tried.append(size) or size <= fitting, most) == expected
    assert max(tried) <= most
    assert len(tried) == len(set(tried))


def test_full_documents_are_encoded_and_the_way_back_is_gone(
    model: models.ColBERT, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = losses.CachedContrastive(model)
    shapes, forward = [], type(model).forward

    def limited(self, features):
        shapes.append(tuple(features["input_ids"].shape))
        # One token is padding, so attention needs a mask.
        assert not features["attention_mask"][0, -1]
        assert features["attention_mask"].sum() == features["attention_mask"].numel() - 1
        # As in the second and later mini-batches of a step.
        assert all(parameter.grad is not None for parameter in self.parameters())
        assert self.training
        assert torch.is_autocast_enabled("cpu")
        if len(features["input_ids"]) > 12:
            raise torch.OutOfMemoryError
        output = forward(self, features)
        assert output["token_embeddings"].requires_grad
        return output

    monkeypatch.setattr(type(model), "forward", limited)
    model.eval()
    before = torch.get_rng_state()
    assert largest_token_budget(loss, 64, torch.bfloat16) == 12 * 16
    assert [rows for rows, _ in shapes] == [1, 2, 4, 8, 16, 12]
    assert {length for _, length in shapes} == {16}
    # The trials leave no trace.
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert largest_token_budget(loss, 5, torch.bfloat16) == 5 * 16


def test_not_even_one_document(model: models.ColBERT, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self, features):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(type(model), "forward", full)
    with pytest.raises(torch.OutOfMemoryError, match="not even one document of 16 tokens"):
        largest_token_budget(losses.CachedContrastive(model), 4)


def test_wrong_arguments(model: models.ColBERT) -> None:
    loss = losses.CachedContrastive(model)
    with pytest.raises(TypeError, match="documents must be an integer, got float"):
        largest_token_budget(loss, 1.5)
    with pytest.raises(ValueError, match="documents must be at least 1, got 0"):
        largest_token_budget(loss, 0)
    with pytest.raises(ValueError, match="dtype must be torch.bfloat16, torch.float16 or None, got torch.int8"):
        largest_token_budget(loss, 2, torch.int8)


def test_what_a_process_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory and what the process has reserved, up to its limit."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100)
    for limit, expected in ((1.0, 700), (0.2, 200)):
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device, limit=limit: limit)
        assert token_budget._most(gpu) == expected
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    assert token_budget._most(gpu) == 700
