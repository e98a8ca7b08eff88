"""The mini-batch of a `MultiVectorEncoder`, found by trial in a process that may have little memory; then it trains."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pylate_flash.hosts import HOSTS
from pylate_flash.training.token_budget import largest_token_budget
from tests.hosts.conftest import texts, tiny_encoder_path  # noqa: F401  (fixtures)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not HOSTS["sentence-transformers"].is_there(), reason="sentence-transformers 6 is not installed"
    ),
]

# What the process may have beyond what it holds when the test begins.
BYTES = 512 << 20
# Texts of a batch that is trained on, and documents that the trial may take: more than memory holds.
PAIRS, DOCUMENTS = 2048, 8192


@pytest.fixture
def model(tiny_encoder_path: str) -> Iterator[Any]:  # noqa: F811
    from sentence_transformers import MultiVectorEncoder

    found = MultiVectorEncoder(tiny_encoder_path, device="cuda").train()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + BYTES) / total)
    try:
        yield found
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def train(model: Any, loss: Any, texts: Any) -> float:  # noqa: F811
    columns = [
        model.preprocess(texts(seed, PAIRS, longest), task=task)
        for seed, longest, task in ((0, 9, "query"), (1, 80, "document"))
    ]
    columns = [{k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in column.items()} for column in columns]
    value = loss(columns)
    value.backward()
    model.zero_grad(set_to_none=True)
    return value.item()


def test_the_budget_found_is_the_end_of_memory_and_trains(model: Any, texts: Any) -> None:  # noqa: F811
    from pylate_flash.hosts.sentence_transformers import losses

    loss = losses.CachedMultiVectorMultipleNegativesRankingLoss(model)
    # What libraries keep from their first call on.
    assert largest_token_budget(loss, 4) == 4 * 64
    before, state = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    budget = largest_token_budget(loss, DOCUMENTS)
    assert 64 <= budget < DOCUMENTS * 64, "memory must not suffice for the whole batch"
    assert budget % 64 == 0
    # As if nothing had been tried.
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    loss.mini_batch_num_tokens = budget
    assert math.isfinite(train(model, loss, texts))
