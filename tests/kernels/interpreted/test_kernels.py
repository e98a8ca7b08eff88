"""The kernels, run by Triton's interpreter on the CPU, against the definitions.

float16 and float32 only: the interpreter multiplies the raw bits of bfloat16.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from pylate_flash.ops import maxsim, maxsim_reference, maxsim_varlen
from pylate_flash.ops.varlen import maxsim_varlen_reference
from tests.ops.cases import Case, cases, gradients, relative_error
from tests.ops.test_varlen import packed

OPTIONS = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
HALF_AND_FLOAT = (torch.float16, torch.float32)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")


def kernel(*tensors: torch.Tensor, **options) -> torch.Tensor:
    return maxsim(*tensors, **options, implementation="triton")


@settings(max_examples=25, **OPTIONS)
@given(case=cases(dtypes=HALF_AND_FLOAT, max_batch=3))
def test_scores(case: Case) -> None:
    with torch.no_grad():
        scores = kernel(*case.tensors, **case.options)
    expected = maxsim_reference(*case.doubled().tensors, **case.options)
    torch.testing.assert_close(scores.double(), expected, rtol=2e-6, atol=2e-6)


@settings(max_examples=25, **OPTIONS)
@given(case=cases(dtypes=HALF_AND_FLOAT, max_batch=3))
def test_gradients(case: Case) -> None:
    tolerance = 1e-5 if case.queries.dtype == torch.float32 else 1e-2
    for gradient, reference in zip(gradients(kernel, case), gradients(maxsim_reference, case.doubled()), strict=True):
        assert gradient.dtype == case.queries.dtype
        assert relative_error(gradient, reference) <= tolerance


@pytest.mark.parametrize(
    ("queries_shape", "documents_shape"),
    [
        ((1, 70, 24), (3, 130, 24)),  # one query of several column blocks of rows, several document tiles
        ((5, 48, 16), (2, 20, 16)),  # a query length that is no power of two: sums of 16 rows
        ((2, 130, 16), (2, 3, 70, 16)),  # candidates of long queries
        ((3, 17, 300), (2, 40, 300)),  # embeddings that are split into blocks
        ((1, 17, 300), (2, 70, 300)),
        ((3, 5, 1100), (2, 20, 1100)),  # more products than one sum takes
        ((40, 3, 8), (3, 5, 8)),  # many short queries in one block of rows
        ((1, 5, 8), (40, 3, 8)),  # a program that walks several documents
    ],
)
@pytest.mark.parametrize("with_gradient", [False, True])
def test_tile_boundaries(queries_shape: tuple[int, ...], documents_shape: tuple[int, ...], with_gradient: bool) -> None:
    torch.manual_seed(0)
    queries, documents = torch.randn(queries_shape), torch.randn(documents_shape)
    case = Case(queries, documents, torch.rand(queries_shape[:-1]) > 0.2, torch.rand(documents_shape[:-1]) > 0.2, {})
    if with_gradient:
        for gradient, reference in zip(
            gradients(kernel, case), gradients(maxsim_reference, case.doubled()), strict=True
        ):
            assert relative_error(gradient, reference) <= 1e-5
    else:
        expected = maxsim_reference(*case.doubled().tensors)
        assert relative_error(kernel(*case.tensors), expected) <= 2e-6


@pytest.mark.parametrize("queries_shape", [(1, 3, 4), (4, 20, 4)])
def test_nan_infinity_and_ties(queries_shape: tuple[int, ...]) -> None:
    """One query goes through the single kernel, several through the stacked one."""
    torch.manual_seed(0)
    # Small integers: a tie is exact whatever the order in which numpy sums a product.
    queries = torch.randint(1, 9, queries_shape).float().requires_grad_()
    documents = torch.randint(-9, 9, (4, 40, 4)).float()
    documents[0, 35, 1] = torch.nan
    documents[1, 2, 0] = torch.inf
    documents[2] = documents[2, 0]
    documents.requires_grad_()
    scores = kernel(queries, documents)
    torch.testing.assert_close(scores, maxsim_reference(queries, documents), equal_nan=True)
    assert scores[:, 0].isnan().all()
    (grad_documents,) = torch.autograd.grad(scores[:, 2].sum(), documents)
    assert (grad_documents[2, 1:] == 0).all()
    assert (grad_documents[2, 0] != 0).any()
    (grad_queries,) = torch.autograd.grad(kernel(queries, documents[[0, 3]])[:, 0].sum(), queries)
    assert grad_queries[..., 1].isnan().all()
    assert grad_queries[..., 0].isfinite().all()


@settings(max_examples=25, **OPTIONS)
@given(case=packed(dtypes=HALF_AND_FLOAT))
def test_varlen(case: tuple) -> None:
    (queries, documents, *bounds), options = case
    scores = maxsim_varlen(queries, documents, *bounds, **options, implementation="triton")
    expected = maxsim_varlen_reference(queries.double(), documents.double(), *bounds, **options)
    torch.testing.assert_close(scores.double(), expected, rtol=2e-6, atol=2e-6)
