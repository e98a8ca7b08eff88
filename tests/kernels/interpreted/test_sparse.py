"""The kernel of chosen query tokens in the interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pylate_flash.ops import maxsim_sparse_queries, maxsim_sparse_queries_reference
from tests.ops.cases import Case, check_definition, gradients
from tests.ops.sparse_cases import sparse_cases


def kernel(*tensors: torch.Tensor, **options) -> torch.Tensor:
    return maxsim_sparse_queries(*tensors, **options, implementation="triton")


def check(case: Case) -> None:
    check_definition(kernel, maxsim_sparse_queries_reference, case.tensors, case.keywords)


@settings(max_examples=12)
@given(
    case=sparse_cases(
        dtypes=(torch.float32, torch.float16), max_batch=2, max_length=20, max_chosen=20, sizes=st.integers(1, 20)
    )
)
def test_scores_and_gradients_equal_the_definition(case: Case) -> None:
    check(case)


# Queries, documents, and number of chosen tokens.
SHAPES = [
    ((2, 40, 300), (2, 33, 300), 35),  # embeddings block by block; two blocks of columns, and of tokens
    ((1, 3, 16), (2, 70, 16), 70),  # more columns than a tile has, most of them repeated
]


@pytest.mark.parametrize(("queries", "documents", "n_chosen"), SHAPES)
def test_shapes(queries: tuple[int, ...], documents: tuple[int, ...], n_chosen: int) -> None:
    generator = torch.Generator().manual_seed(0)
    embeddings = [
        torch.nn.functional.normalize(torch.randn(shape, generator=generator), dim=-1) for shape in (queries, documents)
    ]
    weights = torch.rand(queries[:2], generator=generator) + 0.5
    mask = torch.rand(documents[:2], generator=generator) > 0.3
    mask[-1] = False
    chosen = torch.randint(-1, queries[1], (documents[0], n_chosen), generator=generator)
    options = {"query_tokens": chosen, "normalize": True, "masking": "zero", "empty_score": -3.0}
    check(Case(*embeddings, weights, mask, options))


def test_nan_and_infinity_are_as_in_blocks() -> None:
    """The first NaN token wins, whichever tile it is in."""
    queries, documents = torch.randn(2, 3, 4), torch.randn(3, 150, 4)
    queries[0, 1, 2] = documents[0, 140, 1] = torch.nan
    documents[1, 0, 0] = torch.inf
    case = Case(queries, documents, None, None, {"query_tokens": torch.tensor([[0, 2], [1, 2], [0, 0]])})
    expected = maxsim_sparse_queries(queries, documents, **case.keywords)
    assert expected.isnan().any()
    assert not expected.isnan().all()
    torch.testing.assert_close(kernel(queries, documents, **case.keywords), expected, equal_nan=True)
    actual, expected_gradients = gradients(kernel, case), gradients(maxsim_sparse_queries, case)
    torch.testing.assert_close(actual, expected_gradients, equal_nan=True)


def test_no_row_out_of_place_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, positions are not checked on the host: one out of range chooses no token."""
    monkeypatch.setattr("pylate_flash.ops.checks.is_readable", lambda tensor: False)
    queries, documents = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    chosen = torch.tensor([[0, 3, 1 << 40], [-(1 << 40), -2, 2]])
    expected = maxsim_sparse_queries(queries, documents, torch.tensor([[0, -1, -1], [-1, -1, 2]]))
    # One token of each remains, so the mean equals the sum.
    for reduction in ("sum", "mean"):
        torch.testing.assert_close(kernel(queries, documents, chosen, reduction=reduction), expected)
