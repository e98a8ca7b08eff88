"""A shape that was never seen costs no compilation: what is compiled for itself are a few classes of query lengths."""

from __future__ import annotations

import random

import pytest
import torch

from pylate_flash.kernels import forward
from pylate_flash.kernels.launch import Launcher


class Compiled(dict):
    """A compiled kernel, by grid."""

    def __missing__(self, grid):
        return lambda *pointers: None


class Kernel:
    """Stands for a Triton function: what it is launched as, a `Launcher` compiles."""

    def __getitem__(self, grid):
        return lambda *arguments, **options: Compiled()


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forward, "architecture", lambda device: (9, 132))
    made = {name: Launcher(Kernel()) for name in ("_stacked", "_single", "_hopper")}
    monkeypatch.setattr(forward, "_stacked", made["_stacked"])
    monkeypatch.setattr(forward, "_single", made["_single"])
    monkeypatch.setattr(forward, "_hopper", lambda: made["_hopper"])
    forward._bound_stacked.cache_clear()
    forward._bound_single.cache_clear()
    yield made
    forward._bound_stacked.cache_clear()
    forward._bound_single.cache_clear()


def score(shape: tuple[int, int, int, int]) -> None:
    n_queries, n_documents, query_length, document_length = shape
    queries = torch.empty(n_queries, query_length, 128, dtype=torch.bfloat16)
    documents = torch.empty(1, n_documents, document_length, 128, dtype=torch.bfloat16)
    forward.maxsim_forward(queries, documents, None, None, False, False, False, "ieee")


def test_fifty_random_shapes_take_few_compilations(launchers) -> None:
    drawn = random.Random(0)
    for _ in range(50):
        score((drawn.randint(1, 64), drawn.randint(1, 40), drawn.randint(1, 300), drawn.randint(1, 100)))
    counts = {name: len(launcher._compiled) for name, launcher in launchers.items()}
    # The groups of `_padded_query_length`; those with the two tiles for few rows; the three tiles for one query.
    assert counts["_hopper"] <= 6
    assert counts["_stacked"] <= 12
    assert counts["_single"] <= 3
    assert sum(counts.values()) <= 10


def test_a_new_batch_or_document_length_takes_none(launchers) -> None:
    score((16, 10, 32, 180))
    before = {name: len(launcher._compiled) for name, launcher in launchers.items()}
    for shape in ((17, 10, 32, 180), (16, 33, 32, 180), (16, 10, 32, 7), (40, 1, 31, 1000), (16, 10, 17, 180)):
        score(shape)
    assert {name: len(launcher._compiled) for name, launcher in launchers.items()} == before
