"""Every kernel of the losses compiles for compute capability 8.0, 9.0 and 10.0, with the arguments of a launch."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pylate_flash.kernels import backward, losses, tables
from pylate_flash.kernels.backward import Destination, common, compare, lists, sums, write_gradients
from pylate_flash.kernels.losses import cross_entropy, rescale
from pylate_flash.problem import Comparison, Targets
from tests.kernels.backward_cases import WAYS, dense, packed
from tests.kernels.recorder import check, check_launches

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

KERNELS = {cross_entropy: ("losses", "divergence", "columns", "gradient", "total")}
QUERIES, DOCUMENTS = 40, 3000


def check_loss(
    comparison: Comparison, targets: Targets, names: set[str], capability: int, monkeypatch, own: bool = False
) -> None:
    """Both chunks of a loss, with and without counts, and what it sums up to."""

    def run() -> None:
        with_slope = targets.temperature is not None
        found = losses.ChunkedLoss(comparison, targets, (QUERIES, DOCUMENTS, 32), own, with_slope, torch.device("cpu"))
        for first, number, counts in ((0, 32, None), (32, 8, torch.empty(8, 1))):
            scores = torch.empty(number, DOCUMENTS)
            if comparison.symmetric:
                found.meet(scores, first)
            found.compare(scores, first)
            found.gradient(scores, first, counts)
        found.sum()

    check_launches(KERNELS, run, names | {"total"}, capability, monkeypatch)


@pytest.mark.parametrize("labels", [None, torch.int64, torch.int32])
@pytest.mark.parametrize("own", [False, True])
def test_cross_entropy(own: bool, labels: torch.dtype | None, capability: int, monkeypatch) -> None:
    target = None if labels is None else torch.zeros(QUERIES, dtype=labels)
    check_loss(Comparison("cross entropy", 0.1), Targets(target), {"losses", "gradient"}, capability, monkeypatch, own)


@pytest.mark.parametrize("temperature", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exclude", [False, True])
def test_all_of_a_cross_entropy(exclude: bool, temperature: torch.dtype | None, capability: int, monkeypatch) -> None:
    targets = Targets(
        None,
        torch.zeros(QUERIES, DOCUMENTS, dtype=torch.bool) if exclude else None,
        None if temperature is None else torch.ones((), dtype=temperature),
    )
    comparison = Comparison("cross entropy", margin=1, symmetric=True, with_statistics=temperature is not None)
    check_loss(comparison, targets, {"losses", "columns", "gradient"}, capability, monkeypatch)


@pytest.mark.parametrize("temperature", [None, torch.ones(())])
@pytest.mark.parametrize("normalize_scores", [False, True])
def test_distillation(normalize_scores: bool, temperature: Tensor | None, capability: int, monkeypatch) -> None:
    targets = Targets(torch.empty(QUERIES, DOCUMENTS), None, temperature)
    comparison = Comparison("divergence", normalize_scores=normalize_scores, teacher_temperature=2)
    check_loss(comparison, targets, {"divergence", "gradient"}, capability, monkeypatch)
    if temperature is None and not normalize_scores:
        check_loss(Comparison("margin MSE"), targets, set(), capability, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(70, 9), (70, 0), (0, 9)])
def test_rescale(sizes: tuple[int, int], dtype: torch.dtype, capability: int, monkeypatch) -> None:
    tensors = [torch.empty(size, dtype=dtype) if size else None for size in sizes]
    for dtypes in ((dtype, dtype), (torch.float32, torch.float32)):
        check(losses, "_rescale", lambda to=dtypes: rescale(torch.ones(()), *tensors, to), capability, monkeypatch)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("adds", [False, True])
def test_parts_of_the_gradient_of_documents(adds: bool, way: str, capability: int, monkeypatch) -> None:
    """As chunks of queries leave them: in float32, and added to what there is."""
    monkeypatch.setattr(backward, "inverse_norms", lambda embeddings: torch.ones(embeddings.shape[:-1]))
    monkeypatch.setattr(tables, "FEW_ROWS", WAYS[way])
    names = {"_compare"} if way == "compare_winners" else {"_sort", "_scan", "_place", "_sum", "_combine"}
    kernels = {lists: ("_sort", "_scan", "_place"), sums: ("_sum", "_combine"), compare: ("_compare",)}
    for case in (
        dense((65, 32), (1, 2, 180), 128, "none", True, torch.bfloat16),
        packed((2, 1200), [3, 0, 70], 128, "none", dtype=torch.bfloat16, normalize=True),
    ):
        total = Destination(None, torch.zeros(case.tensors.documents.shape), True, adds)
        check_launches(
            kernels,
            lambda c=case, t=total: write_gradients(c.problem, c.tensors, c.grad_scores, c.winners, t),
            names,
            capability,
            monkeypatch,
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_end_of_the_gradient_of_documents(dtype: torch.dtype, capability: int, monkeypatch) -> None:
    case = replace(dense((32, 32), (1, 2, 180), 128, "none"), normalize=True)
    documents = case.tensors.documents.to(dtype)

    def run() -> None:
        total, gradient = torch.empty(documents.shape), torch.empty_like(documents)
        backward.finish_documents(case.problem, documents, torch.empty(2, 180), total, gradient)

    check(common, "_finish", run, capability, monkeypatch)
