"""The mini-batch found by trial, in a process that may have little memory: it meets the end of it, and then trains."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("pylate")

from pylate_flash import losses, models
from pylate_flash.training.token_budget import largest_token_budget

pytestmark = pytest.mark.gpu

# What the process may have beyond what it holds when the test begins.
BYTES = 512 << 20
PAIRS = 2048


@pytest.fixture
def model(colbert_path: str) -> Iterator[models.ColBERT]:
    found = models.ColBERT(colbert_path, device="cuda", document_length=100, scorer="pylate_flash").train()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + BYTES) / total)
    try:
        yield found
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def columns(model: models.ColBERT, seed: int) -> list[dict[str, torch.Tensor]]:
    """Pairs of random letters, a token each; some documents have all the tokens that one may have."""
    random = torch.Generator().manual_seed(seed)
    texts = []
    for most in (20, 120):
        lengths = torch.randint(5, most, (PAIRS,), generator=random).tolist()
        texts.append(
            [" ".join(chr(97 + number % 26) for number in range(index, index + n)) for index, n in enumerate(lengths)]
        )
    batch = [model.tokenize(column, is_query=not index, pad=True) for index, column in enumerate(texts)]
    return [{name: value.cuda() for name, value in column.items()} for column in batch]


def train(model: models.ColBERT, loss: losses.CachedContrastive, half: bool, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    values = []
    for seed in range(steps):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
            value = loss(columns(model, seed))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(value.item())
    return values


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_the_budget_found_is_the_end_of_memory_and_trains(model: models.ColBERT, half: bool) -> None:
    loss = losses.CachedContrastive(model, temperature=2.0)
    # What libraries keep from their first call on.
    assert largest_token_budget(loss, 4, torch.bfloat16 if half else None) == 400
    before, state = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    budget = largest_token_budget(loss, PAIRS, torch.bfloat16 if half else None)
    assert 100 <= budget < PAIRS * 100, "memory must not suffice for the whole batch"
    assert budget % 100 == 0
    # As if nothing had been tried.
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    loss.mini_batch_size, loss.mini_batch_num_tokens = None, budget
    values = train(model, loss, half, steps=4)
    assert all(map(math.isfinite, values))
    # The trial did not give up early: a few times as much does not fit.
    loss.mini_batch_num_tokens = 6 * budget
    with pytest.raises(torch.OutOfMemoryError):
        train(model, loss, half, steps=1)


def test_the_limit_of_the_process_counts(model: models.ColBERT) -> None:
    """Not the memory of the GPU, of which a tenth is more than this process may have."""
    _, total = torch.cuda.mem_get_info()
    if total < 20 * BYTES:
        pytest.skip("the GPU is small")
    assert largest_token_budget(losses.CachedContrastive(model), PAIRS) >= 100
