"""Masks, weights and empty documents in every forward kernel, on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from pylate_flash.kernels.plan import ForwardPlan
from pylate_flash.ops import maxsim, maxsim_varlen
from tests.gpu.tools import CAPABILITY, FLOAT, HALF, equal, packed_of, unit
from tests.ops.cases import Case, gradients
from tests.ops.mask_checks import (
    ALL_OPTIONS,
    check_empty_score,
    check_packed,
    check_types,
    check_weights,
    masked,
    plan_of,
)

pytestmark = pytest.mark.gpu

# Kernel, queries, documents, dtype.
PADDED = [
    ("single", (1, 32, 128), (50, 70, 128), HALF),
    ("single", (1, 50, 512), (9, 70, 512), FLOAT),
    ("single", (6, 20, 48), (6, 5, 70, 48), HALF),
    ("stacked", (3, 32, 100), (50, 70, 100), HALF),  # no rows that can be copied 16 bytes at a time
    ("stacked", (2, 32, 130), (20, 70, 130), FLOAT),
    ("stacked", (3, 300, 66), (12, 70, 66), HALF),  # several sums of a query
    ("stacked", (3, 100, 60), (3, 5, 70, 60), HALF),
    ("hopper", (3, 32, 128), (50, 70, 128), HALF),
    ("hopper", (16, 32, 128), (50, 70, 128), HALF),
    ("hopper", (3, 300, 128), (20, 70, 128), HALF),
    ("hopper", (4, 150, 64), (4, 5, 70, 64), HALF),
    ("hopper", (16, 32, 128), (50, 70, 128), FLOAT),
    ("hopper", (3, 300, 64), (12, 70, 64), FLOAT),
    ("hopper", (16, 32, 130), (20, 70, 130), FLOAT),  # split into float16 parts before the kernel
    ("hopper", (3, 300, 66), (12, 70, 66), FLOAT),
]
# Kernel, whether documents are in segments, lengths of queries and of documents, candidates, dtype.
SHORT, LONG = [40, 0, 3, 90, 0, 17], [40, 0, 9000, 90, 0, 17, 5000]
PACKED = [
    ("single", False, [32], SHORT, None, HALF),
    ("single", False, [32, 7, 20], SHORT, [0, 2, 2, 6], HALF),
    ("single", False, [100, 7, 0], SHORT, [0, 2, 4, 6], FLOAT),
    ("hopper", False, [32, 7, 20], SHORT, None, HALF),
    ("hopper", False, [32] * 16, SHORT, None, FLOAT),
    ("hopper", False, [32] * 16, SHORT, None, HALF),
    ("hopper", False, [32, 7, 0, 300], SHORT, None, HALF),
    ("single", True, [32], LONG, None, HALF),
    ("single", True, [100, 7, 20], LONG, [0, 2, 4, 7], HALF),
    ("stacked", True, [32, 7, 20], LONG, None, HALF),
    ("stacked", True, [32] * 16, LONG, None, FLOAT),
]


kernel = partial(maxsim, implementation="triton")


def check_plan(plan: ForwardPlan, name: str, in_segments: bool = False) -> None:
    if CAPABILITY[0] == 9:
        assert plan.kernel == name
    assert plan.in_segments == in_segments


def case_of(name: str, queries: tuple[int, ...], documents: tuple[int, ...], dtype: torch.dtype, **options) -> Case:
    case = masked(unit(*queries, dtype=dtype), unit(*documents, dtype=dtype, seed=1), **options)
    check_plan(plan_of(case), name)
    return case


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
@pytest.mark.parametrize("padded", PADDED)
def test_zeros_and_ones_of_any_type_give_the_same_bits(padded: tuple, options: dict) -> None:
    types = [
        (torch.int64, torch.int64), (torch.uint8, torch.int32), (torch.float32, torch.float32),
        (torch.bfloat16, torch.float64), (torch.bool, torch.float16),
    ]  # fmt: skip
    check_types(kernel, case_of(*padded, **options), types)


def test_integers_other_than_zero_count_as_one() -> None:
    case = case_of("hopper", (3, 32, 128), (50, 70, 128), HALF)
    scaled = replace(case, queries_mask=case.queries_mask * 3, documents_mask=case.documents_mask * -7)
    assert torch.equal(kernel(*scaled.tensors, **scaled.keywords), kernel(*case.tensors, **case.keywords))
    assert equal(gradients(kernel, scaled), gradients(kernel, case))


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
@pytest.mark.parametrize("padded", PADDED)
def test_weights(padded: tuple, options: dict, weights_dtype: torch.dtype) -> None:
    check_weights(kernel, case_of(*padded, **options), weights_dtype)


@pytest.mark.parametrize("masking", ["exclude", "zero"])
@pytest.mark.parametrize(("n", "length", "size"), [(6000, 16, 64), (2000, 40, 128), (500, 180, 96)])
def test_one_query_meets_many_documents(n: int, length: int, size: int, masking: str) -> None:
    check_empty_score(kernel, case_of("hopper", (1, 32, size), (n, length, size), HALF, masking=masking))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("masking", ["exclude", "zero"])
@pytest.mark.parametrize("with_queries_mask", [False, True])
@pytest.mark.parametrize("padded", PADDED)
def test_empty_score(padded: tuple, with_queries_mask: bool, masking: str, reduction: str) -> None:
    case = case_of(*padded, masking=masking, reduction=reduction)
    check_empty_score(kernel, case if with_queries_mask else replace(case, queries_mask=None))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("name", "in_segments", "query_lengths", "lengths", "candidates", "dtype"), PACKED)
def test_packed(name, in_segments, query_lengths, lengths, candidates, dtype, normalize: bool, reduction: str) -> None:
    """Embeddings of different norms."""
    arguments = packed_of(
        [unit(n, 64, dtype=dtype, seed=i) * (0.5 + i % 3) for i, n in enumerate(query_lengths)],
        [unit(n, 64, dtype=dtype, seed=99 + i) * (0.5 + i % 4) for i, n in enumerate(lengths)],
    )
    candidate_bounds = None if candidates is None else torch.tensor(candidates)
    options = {"candidates_cu_seqlens": candidate_bounds, "normalize": normalize, "reduction": reduction}
    function = partial(maxsim_varlen, implementation="triton")
    check_plan(check_packed(function, arguments, options, rtol=4e-6, atol=4e-6), name, in_segments)
