"""Soft MaxSim kernels, run by Triton's interpreter on the CPU, against the definition."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given, settings

from pylate_flash.ops import soft_maxsim, soft_maxsim_reference, soft_maxsim_varlen
from tests.ops.cases import Case, cases, relative_error
from tests.ops.test_soft import (
    BETAS,
    check_gradients,
    check_masked_gradients,
    soft_gradients,
    varlen_gradients,
    varlen_reference,
)
from tests.ops.test_varlen import packed

kernel = functools.partial(soft_maxsim, implementation="triton")
varlen_kernel = functools.partial(soft_maxsim_varlen, implementation="triton")


@settings(max_examples=12)
@given(case=cases(dtypes=(torch.float16, torch.float32), max_batch=3), beta=BETAS)
def test_scores_and_gradients(case: Case, beta: float) -> None:
    with torch.no_grad():
        scores = kernel(*case.tensors, beta, **case.keywords)
    expected = soft_maxsim_reference(*case.doubled().tensors, beta, **case.keywords)
    torch.testing.assert_close(scores.double(), expected, rtol=2e-6, atol=2e-6)
    tolerance = 1e-5 if case.queries.dtype == torch.float32 else 1e-2
    expected = soft_gradients(soft_maxsim_reference, case.doubled(), beta)
    check_gradients(soft_gradients(kernel, case, beta), expected, tolerance)


@settings(max_examples=10)
@given(case=packed(dtypes=(torch.float32,)), beta=BETAS)
def test_packed_tokens(case: tuple, beta: float) -> None:
    (queries, documents, *bounds), options = case
    scores = varlen_kernel(queries, documents, beta, *bounds, **options)
    expected = varlen_reference(queries.double(), documents.double(), beta, *bounds, **options)
    torch.testing.assert_close(scores.double(), expected, rtol=2e-6, atol=2e-6)
    actual = varlen_gradients(varlen_kernel, case, beta)
    check_gradients(actual, varlen_gradients(varlen_reference, case, beta, torch.float64), 1e-5)


@pytest.mark.parametrize(
    ("queries_shape", "documents_shape", "normalize"),
    [
        ((3, 50, 16), (2, 130, 16), False),  # several blocks of rows and of tokens, and sums of each score
        ((2, 5, 16), (18, 3, 16), False),  # programs that walk several documents, and share them
        ((1, 5, 300), (2, 3, 300), True),  # embeddings that are read block by block
        ((2, 7, 16), (2, 3, 70, 16), True),  # candidates
    ],
)
def test_tile_boundaries(queries_shape: tuple, documents_shape: tuple, normalize: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    queries, documents = (torch.randn(shape, generator=generator) for shape in (queries_shape, documents_shape))
    masks = [torch.rand(shape[:-1], generator=generator) > 0.2 for shape in (queries_shape, documents_shape)]
    case = Case(queries, documents, *masks, {"normalize": normalize, "masking": "zero"})
    beta = 5.0 if normalize else 5.0 / queries_shape[-1]
    expected = soft_maxsim_reference(*case.doubled().tensors, beta, **case.keywords)
    assert relative_error(kernel(*case.tensors, beta, **case.keywords), expected) <= 2e-6
    expected = soft_gradients(soft_maxsim_reference, case.doubled(), beta)
    check_gradients(soft_gradients(kernel, case, beta), expected, 1e-5)


def test_more_products_than_one_sum_takes() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, documents = (torch.randn(2, length, 1100, generator=generator) for length in (3, 5))
    expected = soft_maxsim_reference(queries.double(), documents.double(), 0.01)
    assert relative_error(kernel(queries, documents, 0.01), expected) <= 2e-6


def test_nan_and_infinity() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, documents = torch.rand(2, 3, 4, generator=generator) + 0.1, torch.randn(4, 40, 4, generator=generator)
    documents[0, 35, 1] = torch.nan
    documents[1, 2, 0] = torch.inf
    documents[2] = -torch.inf
    documents[3, 38, 0] = -torch.inf
    expected = soft_maxsim_reference(queries, documents, 2.0)
    actual = kernel(queries, documents.requires_grad_(), 2.0)
    torch.testing.assert_close(actual, expected, equal_nan=True)
    # Values that are not finite stay in their document.
    (gradient,) = torch.autograd.grad(actual.sum(), documents)
    assert gradient[0].isnan().all()
    assert gradient[3].isfinite().all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_padding_of_a_document_that_is_far_from_every_query() -> None:
    """A token of zeros is closer by a factor that is outside float32's range."""
    generator = torch.Generator().manual_seed(0)
    queries, documents = torch.ones(2, 3, 16), -10.0 * torch.rand(3, 21, 16, generator=generator)
    case = Case(queries, documents, None, None, {})
    beta = 5.0
    expected = soft_gradients(soft_maxsim_reference, case.doubled(), beta)
    # A probability is as inexact as its exponent, beta times a similarity, which has been rounded at least twice.
    tolerance = 4 * beta * documents.sum(dim=-1).abs().max().item() * torch.finfo(torch.float32).eps
    check_gradients(soft_gradients(kernel, case, beta), expected, tolerance)


def test_masked_tokens_may_be_anything() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, documents = torch.randn(2, 3, 4, generator=generator), torch.randn(3, 20, 4, generator=generator)
    case = Case(queries, documents, torch.rand(2, 3) > -1, torch.rand(3, 20) > -1, {"masking": "zero"})
    case.queries_mask[1, 1:], case.documents_mask[:, 3:9] = False, False
    clean = soft_gradients(kernel, case, 2.0)
    queries[1, 1:], documents[:, 3:9] = torch.nan, torch.inf
    for actual, expected in zip(soft_gradients(kernel, case, 2.0), clean, strict=True):
        assert torch.equal(actual, expected)


def test_strides_that_differ() -> None:
    """Queries and documents within wider tensors, and queries whose rows have no common stride."""
    generator = torch.Generator().manual_seed(0)
    wide, documents = torch.randn(3, 5, 22, generator=generator), torch.randn(2, 20, 28, generator=generator)[..., 8:]
    for queries in (wide[..., :20], wide.transpose(0, 1)[..., 1:21]):
        case = Case(queries, documents, None, None, {})
        expected = soft_gradients(soft_maxsim_reference, case.doubled(), 0.5)
        check_gradients(soft_gradients(kernel, case, 0.5), expected, 1e-5)
        scores = soft_maxsim_reference(queries.double(), documents.double(), 0.5)
        assert relative_error(kernel(queries, documents, 0.5), scores) <= 2e-6


def test_queries_of_one_token_may_have_any_stride_to_the_next() -> None:
    queries, documents = torch.randn(1, 5, 8).transpose(0, 1), torch.randn(3, 4, 8)
    assert queries.is_contiguous()
    assert queries.stride(0) != queries.stride(1)
    case = Case(queries, documents, None, None, {})
    check_gradients(soft_gradients(kernel, case, 0.5), soft_gradients(soft_maxsim_reference, case.doubled(), 0.5), 1e-5)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_masked_tokens_have_no_gradient_beside_what_is_not_finite(value: float, normalize: bool) -> None:
    check_masked_gradients(kernel, value, normalize)
