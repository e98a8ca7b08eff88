"""Scores of chosen query tokens on a GPU: against their definition in float64, reproducible, and in little memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pylate_flash import maxsim_sparse_queries
from pylate_flash.ops import maxsim_sparse_queries_reference
from tests.gpu.tools import FLOAT, HALF, memory_of, random_mask, unit
from tests.ops.cases import Case, check_definition

pytestmark = pytest.mark.gpu

# Queries, documents, number of chosen tokens, and dtype.
SHAPES = [
    ((1, 32, 128), (1000, 300, 128), 16, HALF),
    ((1, 1024, 128), (40, 1024, 128), 128, HALF),
    ((3, 40, 96), (30, 77, 96), 70, torch.float16),
    ((2, 300, 128), (10, 90, 128), 200, HALF),
    ((4, 50, 64), (4, 60, 33, 64), 20, HALF),
    ((2, 33, 300), (20, 50, 300), 9, FLOAT),
    ((2, 40, 768), (2, 20, 130, 768), 33, HALF),
    ((1, 1, 17), (1, 1, 17), 1, FLOAT),
]


def kernel(*tensors: torch.Tensor, **options) -> torch.Tensor:
    return maxsim_sparse_queries(*tensors, **options, implementation="triton")


def check(case: Case) -> None:
    check_definition(kernel, maxsim_sparse_queries_reference, case.tensors, case.keywords)


def drawn(queries: tuple, documents: tuple, n_chosen: int, dtype: torch.dtype, masked: bool = False) -> Case:
    embeddings = unit(*queries, dtype=dtype), unit(*documents, dtype=dtype, seed=1)
    generator = torch.Generator("cuda").manual_seed(0)
    pairs = documents[:-2] if len(documents) == 4 else (queries[0], documents[0])
    chosen = torch.randint(-1, queries[1], (*pairs, n_chosen), device="cuda", generator=generator)
    masks, options = [None, None], {"query_tokens": chosen}
    if masked:
        masks = [random_mask(e.shape[:-1], 0.8) * factor for e, factor in zip(embeddings, (0.5, True), strict=True)]
        options |= {"normalize": True, "masking": "zero", "reduction": "mean", "empty_score": -2.0}
    return Case(*embeddings, *masks, options)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("queries", "documents", "n_chosen", "dtype"), SHAPES)
def test_shapes(queries: tuple, documents: tuple, n_chosen: int, dtype: torch.dtype, masked: bool) -> None:
    check(drawn(queries, documents, n_chosen, dtype, masked))


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_packed_documents(dtype: torch.dtype) -> None:
    lengths = torch.randint(0, 200, (300,), generator=torch.Generator().manual_seed(0))
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).cuda()
    case = drawn((3, 40, 128), (300, 1, 128), 20, dtype)
    documents = unit(int(lengths.sum()), 128, dtype=dtype, seed=2)
    options = {"documents_cu_seqlens": cu_seqlens, "normalize": True, "empty_score": -5.0}
    case = replace(case, documents=documents, options=case.options | options)
    check(case)


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_nan_and_infinity_are_as_on_a_cpu(dtype: torch.dtype) -> None:
    case = drawn((3, 5, 32), (40, 30, 32), 4, dtype)
    queries, documents = case.tensors
    documents[3, 7, 1] = queries[1, 2, 3] = torch.nan
    documents[5, :, 2], documents[6] = torch.inf, -torch.inf
    chosen = case.options["query_tokens"]
    expected = maxsim_sparse_queries(queries.cpu(), documents.cpu(), chosen.cpu())
    assert not expected.isnan().all()
    assert torch.equal(expected[:, 3].isnan(), (chosen.cpu()[:, 3] >= 0).any(dim=-1))
    torch.testing.assert_close(kernel(queries, documents, chosen).cpu(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_what_is_no_position_chooses_none() -> None:
    case = drawn((2, 8, 64), (30, 40, 64), 6, HALF)
    chosen = case.options["query_tokens"]
    expected = kernel(*case.tensors, chosen)
    none = torch.tensor([-2, 8, 1 << 40, -(1 << 40)], device="cuda").repeat(2, 30, 1)
    wrong = torch.cat([none, torch.where(chosen < 0, 1 << 33, chosen)], dim=-1)
    for reduction in ("sum", "mean"):
        expected = kernel(*case.tensors, chosen, reduction=reduction)
        torch.testing.assert_close(kernel(*case.tensors, wrong, reduction=reduction), expected)
    assert torch.equal(kernel(*case.tensors, none), torch.zeros_like(expected))


def test_positions_for_all_queries_alike() -> None:
    case = drawn((2, 20, 64), (40, 50, 64), 7, HALF)
    chosen = case.options["query_tokens"][:1]
    alike = kernel(*case.tensors, chosen.expand(2, -1, -1).contiguous())
    assert torch.equal(kernel(*case.tensors, chosen[0]), alike)


def test_scores_take_no_memory_but_their_own() -> None:
    case = drawn((1, 512, 128), (500, 300, 128), 64, HALF)
    with torch.no_grad():
        assert memory_of(lambda: kernel(*case.tensors, **case.keywords))[0] <= 1 << 16
