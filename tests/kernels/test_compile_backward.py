"""Every kernel of the backward compiles for compute capability 8.0, 9.0, 10.0 and 12.0, as it is launched."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pylate_flash.kernels import backward, rows
from pylate_flash.kernels.backward import common, compare, gather, lists, sums
from tests.kernels.backward_cases import dense, packed, weighted
from tests.kernels.recorder import check, check_launches

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

KERNELS = {
    gather: ("_gather",),
    common: ("_finish",),
    lists: ("_list", "_sort", "_scan", "_place", "_starts"),
    sums: ("_sum", "_combine"),
    compare: ("_compare",),
}
SORTED = {"_sort", "_scan", "_place", "_sum", "_combine"}


def check_backward(run: Callable[[], object], names: set[str], capability: int, monkeypatch) -> None:
    """Compile what `run` launches, which must be the kernels of these names."""
    monkeypatch.setattr(backward, "inverse_norms", lambda embeddings: torch.ones(embeddings.shape[:-1]))
    check_launches(KERNELS, run, names, capability, monkeypatch)


@pytest.mark.parametrize(
    ("dtype", "size", "normalize"),
    [(torch.bfloat16, 48, False), (torch.float16, 128, True), (torch.float32, 512, False), (torch.float32, 4096, True)],
)
def test_padded(normalize: bool, size: int, dtype: torch.dtype, capability: int, monkeypatch) -> None:
    """Queries of 2080 rows have lists that are summed in parts; one of 32 rows shares its documents among programs."""
    few, many = (
        replace(case, queries=case.queries.to(dtype), documents=case.documents.to(dtype), normalize=normalize)
        for case in (dense((1, 32), (1, 64, 8), size, "none"), dense((65, 32), (1, 2, 180), size, "none"))
    )
    for case, way, needs, names in (
        (few, "lists", (True, False), {"_gather", "_finish"}),
        (few, "lists", (False, True), {"_list", "_sum"}),
        (many, "lists", (False, True), SORTED),
        (many, "compare_winners", (False, True), {"_compare"}),
        (few, None, (False, True), {"_compare"}),
        (many, None, (False, True), SORTED),
    ):
        check_backward(lambda c=case, w=way, n=needs: c.run(w, *n), names, capability, monkeypatch)


@pytest.mark.parametrize("normalize", [False, True])
def test_weights(normalize: bool, capability: int, monkeypatch) -> None:
    few = weighted(dense((1, 32), (1, 64, 8), 128, "none", normalize, torch.bfloat16))
    many = weighted(dense((65, 32), (1, 2, 180), 128, "none", normalize, torch.bfloat16))
    check_backward(few.run, {"_gather", "_finish", "_compare"}, capability, monkeypatch)
    check_backward(many.run, {"_gather"} | SORTED, capability, monkeypatch)


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (200, 300), (1024, 2047), (2048, 180)])
def test_lists_by_one_program(rows: int, length: int, capability: int, monkeypatch) -> None:
    case = dense((1, rows), (1, 2, length), 16, "none")
    names = {"_list", "_sum"} if rows <= 1024 else {"_list", "_sum", "_combine"}
    check_backward(lambda: case.run("lists", queries=False), names, capability, monkeypatch)


def test_long_documents(capability: int, monkeypatch) -> None:
    case = dense((65, 32), (1, 1, 3000), 16, "none")
    check_backward(lambda: case.run("lists", queries=False), SORTED | {"_starts"}, capability, monkeypatch)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("candidates", [None, [0, 2, 3]])
def test_packed(candidates: list[int] | None, normalize: bool, capability: int, monkeypatch) -> None:
    case = packed((2, 1200), [3, 0, 70], 128, "none", candidates, dtype=torch.bfloat16, normalize=normalize)
    for way, names in (("lists", {"_gather"} | SORTED), ("compare_winners", {"_gather", "_compare"})):
        check_backward(lambda w=way: case.run(w), names, capability, monkeypatch)


@pytest.mark.parametrize("size", [48, 512])
def test_norms(size: int, capability: int, monkeypatch) -> None:
    embeddings, scales = torch.empty(4, 32, size, dtype=torch.bfloat16), torch.empty(4, 32)
    check(rows, "_norms", lambda: rows.inverse_norms(embeddings), capability, monkeypatch)
    given = embeddings, embeddings, scales
    check(rows, "_normalized", lambda: rows.normalized_rows(*given), capability, monkeypatch)
    check(rows, "_through_normalized", lambda: rows.through_normalized_rows(*given), capability, monkeypatch)
