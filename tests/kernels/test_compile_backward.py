"""Every backward and loss kernel compiles for compute capability 8.0 to 12.0, with arguments of real launches."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from triton.tools.disasm import get_sass

from pylate_flash.kernels import backward, losses, tables_backward
from pylate_flash.kernels.backward import Destination, write_gradients
from pylate_flash.problem import Comparison, Targets
from tests.kernels.backward_cases import WAYS, dense, packed, weighted
from tests.kernels.recorder import compiled

# None of these kernels has matrix products, for which 10.0 has instructions that 12.0 lacks.
pytestmark = pytest.mark.parametrize("capability", [80, 90, 120], indirect=True)
SORTED = " sort scan place sum combine"


@pytest.mark.parametrize(
    ("dtype", "size", "normalize"),
    [(torch.bfloat16, 48, False), (torch.float16, 128, True), (torch.float32, 512, False), (torch.float32, 4096, True)],
)
def test_padded(normalize: bool, size: int, dtype: torch.dtype, capability: int) -> None:
    """With 2080 query rows, lists are summed in parts; with 32 rows, documents are split among programs."""
    few, many = (
        replace(case, queries=case.queries.to(dtype), documents=case.documents.to(dtype), normalize=normalize)
        for case in (dense((1, 32), (1, 64, 8), size, "none"), dense((65, 32), (1, 2, 180), size, "none"))
    )
    for case, way, needs, names in (
        (few, "lists", (True, False), "gather finish"),
        (few, "lists", (False, True), "list sum"),
        (many, "lists", (False, True), SORTED),
        (many, "compare_argmax", (False, True), "compare"),
        (few, None, (False, True), "compare"),
        (many, None, (False, True), SORTED),
    ):
        compiled(partial(case.run, way, *needs), names + " rows" * normalize, capability)


@pytest.mark.parametrize("normalize", [False, True])
def test_weights(normalize: bool, capability: int) -> None:
    few = weighted(dense((1, 32), (1, 64, 8), 128, "none", normalize, torch.bfloat16))
    many = weighted(dense((65, 32), (1, 2, 180), 128, "none", normalize, torch.bfloat16))
    compiled(few.run, "gather finish compare" + " rows" * normalize, capability)
    compiled(many.run, "gather" + SORTED + " rows" * normalize, capability)


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (200, 300), (1024, 2047), (2048, 180)])
def test_lists_by_one_program(rows: int, length: int, capability: int) -> None:
    case = dense((1, rows), (1, 2, length), 16, "none")
    names = "list sum" if rows <= 1024 else "list sum combine"
    compiled(lambda: case.run("lists", queries=False), names, capability)
    compiled(lambda: case.run("lists"), names.replace("list", "gather"), capability)


@pytest.mark.parametrize("size", [320, 1024])
def test_sums_of_long_embeddings_wait_for_no_other_warp(size: int, capability: int) -> None:
    """Otherwise the program of every token would wait, whether any row chose the token or not."""
    case = dense((1, 200), (1, 2, 300), size, "none", dtype=torch.bfloat16)
    result = compiled(partial(case.run, "lists", queries=False), "list sum", capability)["sum"]
    assert result.metadata.num_warps == 1
    assert result.metadata.shared == 0


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("size", "loads"), [(128, 4), (192, 8), (256, 8), (384, 8), (512, 8)])
def test_all_rows_of_a_sum_are_loaded_before_one_is_added(
    size: int, loads: int, normalize: bool, capability: int
) -> None:
    """Otherwise every row would wait for memory once more: four loads of 16 bytes for each half of the embeddings.

    All of 128 elements, and on Hopper alone.
    """
    case = dense((1, 200), (1, 2, 300), size, "none", normalize, torch.bfloat16)
    names = "list sum" + " rows" * normalize
    sass = get_sass(compiled(partial(case.run, "lists", queries=False), names, capability)["sum"].asm["cubin"])
    loads_and_sums = "".join("L" if name == "LDG.E.128" else "S" for name in re.findall(r"LDG\.E\.128|FFMA", sass))
    if capability == 90 or size > 128:
        assert "L" * loads in loads_and_sums
    assert "LDL" not in sass


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("dtype", "size", "loads"),
    [(torch.bfloat16, size, 4) for size in (96, 128, 192, 256, 320, 512)]
    + [(torch.float32, 128, 8), (torch.float32, 256, 8)],
)
def test_all_rows_of_a_gather_are_loaded_before_one_is_added(
    dtype: torch.dtype, size: int, loads: int, normalize: bool, capability: int
) -> None:
    """Of the four documents in flight: as above. Norms are not loaded so far ahead for all GPUs."""
    case = dense((80, 32), (1, 128, 300), size, "none", normalize, dtype)
    names = "gather" + " rows" * normalize
    sass = get_sass(compiled(partial(case.run, documents=False), names, capability)["gather"].asm["cubin"])
    loads_and_sums = "".join("L" if name == "LDG.E.128" else "S" for name in re.findall(r"LDG\.E\.128|FFMA", sass))
    if capability == 90 or not normalize:
        assert loads_and_sums.startswith("L" * loads)
    assert "LDL" not in sass


def test_long_documents(capability: int) -> None:
    case = dense((65, 32), (1, 1, 3000), 16, "none")
    compiled(lambda: case.run("lists", queries=False), SORTED, capability)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("candidates", [None, [0, 2, 3]])
def test_packed(candidates: list[int] | None, normalize: bool, capability: int) -> None:
    case = packed((2, 1200), [3, 0, 70], 128, "none", candidates, dtype=torch.bfloat16, normalize=normalize)
    for way, names in (("lists", "gather" + SORTED), ("compare_argmax", "gather compare")):
        compiled(partial(case.run, way), names + " rows" * normalize, capability)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("adds", [False, True])
def test_parts_of_the_gradient_of_documents(adds: bool, way: str, capability: int, monkeypatch) -> None:
    """Partial gradients of query chunks: in float32, and accumulated into the destination if `adds`."""
    monkeypatch.setattr(tables_backward, "FEW_ROWS", WAYS[way])
    names = " compare" if way == "compare_argmax" else SORTED
    for case in (
        dense((65, 32), (1, 2, 180), 128, "none", True, torch.bfloat16),
        packed((2, 1200), [3, 0, 70], 128, "none", dtype=torch.bfloat16, normalize=True),
    ):
        total = Destination(None, torch.zeros(case.tensors.documents.shape), True, adds)
        write = partial(write_gradients, case.problem, case.tensors, case.grad_scores, case.argmax, total)
        compiled(write, "rows" + names, capability)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_end_of_the_gradient_of_documents(dtype: torch.dtype, capability: int) -> None:
    case = replace(dense((32, 32), (1, 2, 180), 128, "none"), normalize=True)
    documents = case.tensors.documents.to(dtype)
    arguments = documents, torch.empty(2, 180), torch.empty(documents.shape), torch.empty_like(documents)
    compiled(partial(backward.finish_documents, case.problem, *arguments), "finish", capability)


QUERIES, N = 40, 3000


def check_loss(comparison: Comparison, targets: Targets, names: str, capability: int, own: bool = False) -> None:
    """Compile both chunks of a loss, with and without counts, and its total."""

    def run() -> None:
        with_slope = targets.temperature is not None
        result = losses.ChunkedLoss(comparison, targets, (QUERIES, N, 32), own, with_slope, torch.device("cpu"))
        for first, number, counts in ((0, 32, None), (32, 8, torch.empty(8, 1))):
            scores = torch.empty(number, N)
            if comparison.symmetric:
                result.meet(scores, first)
            result.gradient(scores, first, counts)
        result.sum()

    compiled(run, names + " total", capability)


@pytest.mark.parametrize("labels", [None, torch.int64, torch.int32])
@pytest.mark.parametrize("own", [False, True])
def test_cross_entropy(own: bool, labels: torch.dtype | None, capability: int) -> None:
    targets = Targets(None if labels is None else torch.zeros(QUERIES, dtype=labels))
    check_loss(Comparison("cross entropy", 0.1), targets, "losses gradient", capability, own)


@pytest.mark.parametrize("temperature", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exclude", [None, torch.zeros(QUERIES, N, dtype=torch.bool)], ids=["", "exclude"])
def test_all_of_a_cross_entropy(exclude: Tensor | None, temperature: torch.dtype | None, capability: int) -> None:
    learned = temperature is not None
    targets = Targets(None, exclude, torch.ones((), dtype=temperature) if learned else None)
    comparison = Comparison("cross entropy", margin=1, symmetric=True, with_statistics=learned)
    check_loss(comparison, targets, "losses columns gradient", capability)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (20, 60), (2, 1000)])
def test_all_of_few_scores(shape: tuple[int, int], symmetric: bool, capability: int) -> None:
    """In one launch, with and without the gradient."""
    scores, exclude = torch.empty(shape), torch.zeros(shape, dtype=torch.bool)
    labels = torch.zeros(shape[0], dtype=torch.int64)
    for targets, with_statistics in ((Targets(None, exclude, torch.ones(())), True), (Targets(labels), False)):
        comparison = Comparison("cross entropy", symmetric=symmetric, with_statistics=with_statistics)
        result = losses.ChunkedLoss(comparison, targets, (*shape, shape[0]), False, with_statistics, scores.device)
        kernel = compiled(partial(result.gradient, scores, 0, torch.ones(shape[0], 1)), "whole", capability)["whole"]
        order = "".join(re.findall(r"\b[lsb](?=[td]\.global|ar\.sync)", kernel.asm["ptx"]))
        assert re.match("[lb]*s[sb]*bl", order), "threads must meet before they read what others have stored"
        compiled(partial(result.compare, scores, 0), "whole", capability)


@pytest.mark.parametrize("temperature", [None, torch.ones(())])
@pytest.mark.parametrize("normalize_scores", [False, True])
def test_distillation(normalize_scores: bool, temperature: Tensor | None, capability: int) -> None:
    targets = Targets(torch.empty(QUERIES, N), None, temperature)
    comparison = Comparison("divergence", normalize_scores=normalize_scores, teacher_temperature=2)
    check_loss(comparison, targets, "divergence gradient", capability)
    if temperature is None and not normalize_scores:
        check_loss(Comparison("margin MSE"), targets, "", capability)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(70, 9), (70, 0), (0, 9)])
def test_rescale(sizes: tuple[int, int], dtype: torch.dtype, capability: int) -> None:
    tensors = [torch.empty(size, dtype=dtype) if size else None for size in sizes]
    for dtypes in ((dtype, dtype), (torch.float32, torch.float32)):
        compiled(partial(losses.rescale, torch.ones(()), *tensors, dtypes), "rescale", capability)
