"""Call depth from a public function to the kernel launch: at most eight functions of the package.

A reader of the package needs to follow no more than these. On a CPU, which launches no kernel, the last one computes
the operation; repeated calls are replayed there as they are on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import pylate_flash
from pylate_flash import registered
from pylate_flash.hosts import HOSTS
from pylate_flash.ops import operator
from pylate_flash.ops.loss_operator import _MaxsimLoss
from pylate_flash.ops.operator import Operation

QUERIES = [torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
DOCUMENTS = [torch.randn(3 + seed, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


@pytest.fixture(autouse=True)
def repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "repeated_devices", -1)


def code_inside(function: Any) -> set[CodeType]:
    """Code objects of the `compute` closures that an operation creates for a call."""
    return {code for code in function.__code__.co_consts if isinstance(code, CodeType) and code.co_name == "compute"}


COMPUTES = code_inside(Operation.__call__) | code_inside(_MaxsimLoss.forward)
PACKAGE = str(Path(pylate_flash.__file__).parent)


def chain(call: Callable[[], object], function: Any) -> list[str]:
    """Functions of the package from this one to the first that computes an operation, for a repeated call."""
    assert COMPUTES
    for _ in range(3):
        call()
    results: list[CodeType] = []

    def watch(frame: FrameType, event: str, argument: object) -> None:
        current: FrameType | None = frame if event == "call" and frame.f_code in COMPUTES and not results else None
        while current is not None and function.__code__ not in results:
            results.append(current.f_code)
            current = current.f_back

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(before)
    assert results[-1:] == [function.__code__]
    # Python before 3.12 counts comprehensions as functions.
    names = [code.co_name for code in results[:-1] if code.co_filename.startswith(PACKAGE) and code.co_name[0] != "<"]
    return [function.__qualname__, *names[::-1]]


def test_a_contrastive_loss() -> None:
    from pylate_flash import losses
    from tests.encoders import WordVectors

    loss = losses.Contrastive(WordVectors([[1.0, 0.0], [0.0, 1.0]]))
    tokens = torch.tensor([[0, 1], [1, 1]])
    columns = [{"input_ids": tokens, "attention_mask": torch.ones_like(tokens)} for _ in range(2)]
    assert len(result := chain(lambda: loss(columns), losses.Contrastive.forward)) <= 8, result


def test_reranking() -> None:
    from pylate_flash import rank

    result = chain(lambda: rank.rerank([[1, 2, 3]] * 3, QUERIES, [DOCUMENTS] * 3), rank.rerank)
    assert len(result) <= 8, result


def test_an_index(tmp_path: Path) -> None:
    from pylate_flash import indexes

    index = indexes.Flat(tmp_path, "index", device="cpu", show_progress=False)
    index.add_documents(["a", "b", "c"], DOCUMENTS)
    assert len(result := chain(lambda: index(QUERIES, k=2), indexes.Flat.__call__)) <= 8, result


@pytest.mark.skipif(not HOSTS["sentence-transformers"].is_there(), reason="needs sentence-transformers 6")
@pytest.mark.parametrize("queries", [torch.stack(QUERIES), QUERIES], ids=["padded", "a list"])
def test_a_function_of_sentence_transformers(queries: Any) -> None:
    from sentence_transformers.util import similarity

    with registered("sentence-transformers"):
        assert len(result := chain(lambda: similarity.maxsim(queries, DOCUMENTS), similarity.maxsim)) <= 8, result
