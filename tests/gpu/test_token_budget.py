"""The token budget found by trial, in a process with little memory: the trial runs out of it, then training fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pylate_flash.hosts import HOSTS
from pylate_flash.training.token_budget import largest_token_budget
from tests.gpu.tools import allocated, memory_limit
from tests.hosts.conftest import texts, tiny_encoder_path  # noqa: F401  (fixtures)

pytestmark = pytest.mark.gpu

# Memory that the process may take beyond what it holds when the test begins.
BYTES = 512 << 20
PAIRS = 2048


@pytest.fixture
def model(colbert_path: str) -> Iterator[Any]:
    """A PyLate model, in a process with little memory."""
    from pylate_flash import models

    result = models.ColBERT(colbert_path, device="cuda", document_length=100, scorer="pylate_flash").train()
    with memory_limit(BYTES):
        yield result


def columns(model: Any, seed: int) -> list[dict[str, torch.Tensor]]:
    """Pairs of random letters, one token each; some documents have as many tokens as the model takes."""
    random = torch.Generator().manual_seed(seed)
    batch = []
    for most in (20, 120):
        lengths = torch.randint(5, most, (PAIRS,), generator=random).tolist()
        column = [" ".join(chr(97 + number % 26) for number in range(i, i + n)) for i, n in enumerate(lengths)]
        batch.append(model.tokenize(column, is_query=most == 20, pad=True))
    return batch


def train(model: Any, loss: Any, half: bool, batches: list[list[dict]]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    values = []
    for batch in batches:
        features = [{k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in column.items()} for column in batch]
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
            value = loss(features)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(value.item())
    return values


def found_budget(model: Any, loss: Any, most: int, length: int, dtype: torch.dtype | None = None) -> int:
    """Find the budget, and check that the trial leaves no memory, random state or gradients behind."""
    # Libraries keep memory from their first call on.
    assert largest_token_budget(loss, 4, dtype) == 4 * length
    before, state = allocated(), torch.cuda.get_rng_state()
    budget = largest_token_budget(loss, most, dtype)
    assert length <= budget < most * length, "memory must not suffice for the whole batch"
    assert budget % length == 0
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    return budget


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_the_budget_found_is_the_end_of_memory_and_trains(model: Any, half: bool) -> None:
    from pylate_flash import losses

    loss = losses.CachedContrastive(model, temperature=2.0)
    budget = found_budget(model, loss, PAIRS, 100, torch.bfloat16 if half else None)
    loss.mini_batch_size, loss.mini_batch_num_tokens = None, budget
    assert all(map(math.isfinite, train(model, loss, half, [columns(model, seed) for seed in range(4)])))
    # The trial did not give up early: a few times as much does not fit.
    loss.mini_batch_num_tokens = 6 * budget
    with pytest.raises(torch.OutOfMemoryError):
        train(model, loss, half, [columns(model, 0)])


def test_the_limit_of_the_process_counts(model: Any) -> None:
    """Not the memory of the GPU, a tenth of which is more than this process may have."""
    from pylate_flash import losses

    _, total = torch.cuda.mem_get_info()
    if total < 20 * BYTES:
        pytest.skip("the GPU is small")
    assert largest_token_budget(losses.CachedContrastive(model), PAIRS) >= 100


@pytest.mark.skipif(not HOSTS["sentence-transformers"].is_there(), reason="sentence-transformers 6 is not installed")
def test_the_budget_of_a_multi_vector_encoder(tiny_encoder_path: str, texts: Callable[..., list[str]]) -> None:  # noqa: F811
    from sentence_transformers import MultiVectorEncoder

    from pylate_flash.hosts.sentence_transformers import losses

    model = MultiVectorEncoder(tiny_encoder_path, device="cuda").train()
    with memory_limit(BYTES):
        loss = losses.CachedMultiVectorMultipleNegativesRankingLoss(model)
        loss.mini_batch_num_tokens = found_budget(model, loss, 8192, 64)
        batch = [
            model.preprocess(texts(seed, PAIRS, longest), task=task)
            for seed, longest, task in ((0, 9, "query"), (1, 80, "document"))
        ]
        assert all(map(math.isfinite, train(model, loss, False, [batch])))
