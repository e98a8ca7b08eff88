"""Masks of any type, weights and empty documents in the forward kernels, in the interpreter."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from pylate_flash.ops import maxsim, maxsim_varlen, pack
from tests.ops.cases import Case
from tests.ops.mask_checks import (
    ALL_OPTIONS,
    check_empty_score,
    check_packed,
    check_types,
    check_weights,
    masked,
    plan_of,
)

# Kernel, partial sums per score, queries, documents.
PADDED = [
    ("single", 1, (1, 5, 8), (4, 20, 8)),
    ("single", 1, (3, 5, 300), (3, 4, 9, 300)),
    ("stacked", 1, (3, 5, 8), (4, 20, 8)),
    ("stacked", 3, (3, 44, 8), (4, 20, 8)),
    ("stacked", 5, (3, 70, 8), (3, 4, 9, 8)),
]


kernel = partial(maxsim, implementation="triton")


def case_of(name: str, sums: int, queries: tuple[int, ...], documents: tuple[int, ...], **options) -> Case:
    generator = torch.Generator().manual_seed(0)
    case = masked(*(torch.randn(shape, generator=generator) for shape in (queries, documents)), **options)
    assert plan_of(case).kernel == name
    assert plan_of(case).n_sums == sums
    return case


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
@pytest.mark.parametrize("padded", PADDED)
def test_zeros_and_ones_of_any_type_give_the_same_bits(padded: tuple, options: dict) -> None:
    types = [(torch.int64, torch.uint8), (torch.float32, torch.float64)]
    check_types(kernel, case_of(*padded, **options), types)


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
@pytest.mark.parametrize("padded", PADDED)
def test_weights(padded: tuple, options: dict) -> None:
    check_weights(kernel, case_of(*padded, **options))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("masking", ["exclude", "zero"])
@pytest.mark.parametrize("padded", PADDED)
def test_empty_score(padded: tuple, masking: str, reduction: str) -> None:
    check_empty_score(kernel, case_of(*padded, masking=masking, reduction=reduction), atol=2e-5)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("query_lengths", "candidates"), [([5], None), ([3, 0, 20], None), ([4, 4], None), ([3, 70, 1], [0, 2, 2, 5])]
)
@pytest.mark.parametrize("in_segments", [False, True])
def test_packed(in_segments: bool, query_lengths, candidates, normalize: bool, reduction: str, request) -> None:
    if in_segments:
        request.getfixturevalue("small_splits")
    generator = torch.Generator().manual_seed(0)
    queries, documents = (
        pack([torch.randn(n, 8, generator=generator) for n in sizes]) for sizes in (query_lengths, [71, 0, 30, 150, 0])
    )
    arguments = queries[0], documents[0], queries[1], documents[1]
    candidate_bounds = None if candidates is None else torch.tensor(candidates)
    options = {"candidates_cu_seqlens": candidate_bounds, "normalize": normalize, "reduction": reduction}
    function = partial(maxsim_varlen, implementation="triton")
    assert check_packed(function, arguments, options, rtol=2e-6, atol=1e-5).in_segments == in_segments
