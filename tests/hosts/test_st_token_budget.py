"""The largest mini-batch of a `MultiVectorEncoder` that fits, on a model that raises when it does not."""

from __future__ import annotations

import pytest
import torch
from sentence_transformers.base.modules import Transformer

from pylate_flash.hosts.sentence_transformers import losses
from pylate_flash.training.token_budget import largest_token_budget


@pytest.fixture
def loss(tiny_encoder):
    return losses.CachedMultiVectorMultipleNegativesRankingLoss(tiny_encoder)


@pytest.mark.parametrize("length", [None, 16])
def test_full_documents_are_encoded_and_the_way_back_is_gone(length, loss, monkeypatch):
    model, shapes, forward = loss.model, [], Transformer.forward
    model[0].document_length = length
    # The number of BERT's positions, where nothing else limits the length.
    tokens = length or 64

    def limited(self, features, **kwargs):
        shapes.append(tuple(features["input_ids"].shape))
        assert kwargs.get("task", "document") == "document"
        assert features["attention_mask"].sum() == features["attention_mask"].numel() - 1
        assert features["input_ids"].unique().numel() > 10
        # As in the second and later mini-batches of a step.
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert model.training
        assert torch.is_autocast_enabled("cpu")
        if len(features["input_ids"]) > 12:
            raise torch.OutOfMemoryError
        return forward(self, features, **kwargs)

    monkeypatch.setattr(Transformer, "forward", limited)
    model.eval()
    before = torch.get_rng_state()
    assert largest_token_budget(loss, 64, torch.bfloat16) == 12 * tokens
    assert shapes == [(texts, tokens) for texts in (1, 2, 4, 8, 16, 12)]
    # The trials leave no trace.
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_texts_that_cannot_be_sorted_are_refused(loss):
    """A model that changes tokens, as pooling does, is encoded by the host's code, which counts no padding."""
    loss.model.append(torch.nn.Identity())
    with pytest.raises(ValueError, match="cannot be sorted by length"):
        largest_token_budget(loss, 8)


def test_documents_of_any_length_are_refused(loss, monkeypatch):
    monkeypatch.setattr("pylate_flash.training.token_budget.read_lengths", lambda model: (32, None))
    with pytest.raises(ValueError, match="nothing limits the length of a document"):
        largest_token_budget(loss, 8)
