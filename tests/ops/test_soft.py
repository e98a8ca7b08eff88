"""`soft_maxsim` against its definition, over shapes, masks and values that hypothesis draws."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from pylate_flash import soft_maxsim, soft_maxsim_varlen
from pylate_flash.ops import soft_maxsim_reference
from tests.ops.cases import Case, differentiated, mistakes, relative_error, wrong

OPTIONS = {"max_examples": 30}
BETAS = st.sampled_from([0.3, 2.0, 30.0])


def soft_gradients(function, case: Case, beta: float | Tensor) -> tuple[Tensor, ...]:
    """Gradients of beta, queries and documents, computed by `differentiated`."""
    learned = torch.tensor(float(beta), dtype=torch.float64, device=case.queries.device)
    return differentiated(lambda b, q, d, **o: function(q, d, b, **o), (learned, *case.tensors), case.keywords)


def varlen_reference(queries, documents, beta, queries_cu_seqlens, documents_cu_seqlens, **options) -> Tensor:
    options = options | {"queries_cu_seqlens": queries_cu_seqlens, "documents_cu_seqlens": documents_cu_seqlens}
    return soft_maxsim_reference(queries, documents, beta, **options)


def varlen_gradients(function, case: tuple, beta: float, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    (queries, documents, *bounds), options = case
    learned = torch.tensor(beta, dtype=torch.float64, device=queries.device)
    leaves = learned, *(t.to(dtype or t.dtype) for t in (queries, documents))
    return differentiated(lambda b, q, d, **o: function(q, d, b, *bounds, **o), leaves, options)


def check_gradients(
    actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float, beta_scale: float = 1.0
) -> None:
    """Check relative errors; that of beta's gradient, a sum of terms of both signs, is relative to >= `beta_scale`."""
    assert abs(actual[0] - expected[0]) <= tolerance * max(beta_scale, abs(expected[0]))
    for gradient, reference in zip(actual[1:], expected[1:], strict=True):
        assert relative_error(gradient, reference) <= tolerance


def test_nan_and_infinity_behave_as_in_torch() -> None:
    queries, documents = torch.rand(2, 3, 4) + 0.1, torch.randn(4, 5, 4)
    documents[0, 3, 1], documents[1, 2, 0], documents[2], documents[3, 2, 0] = math.nan, math.inf, -math.inf, -math.inf
    actual, expected = soft_maxsim(queries, documents, 2.0), soft_maxsim_reference(queries, documents, 2.0)
    torch.testing.assert_close(actual, expected, equal_nan=True)
    assert actual.isnan().any(dim=0).tolist() == [True, False, False, False]
    # Finite documents have finite gradients.
    leaf = documents.requires_grad_()
    (gradient,) = torch.autograd.grad(soft_maxsim(queries, leaf, 2.0).sum(), leaf)
    assert gradient[0].isnan().all()
    assert gradient[3].isfinite().all()


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_masked_tokens_have_no_gradient_beside_what_is_not_finite(value: float, normalize: bool) -> None:
    check_masked_gradients(soft_maxsim, value, normalize)


def check_masked_gradients(call: Callable[..., Tensor], value: float, normalize: bool, device: str = "cpu") -> None:
    """The gradients of masked tokens are 0, of a query and a document that are not finite and of all others."""
    queries, documents = torch.rand(2, 3, 4, device=device), torch.rand(2, 3, 4, device=device)
    queries[0, 0], documents[1, 0] = value, value
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]], device=device)
    leaves = queries.requires_grad_(), documents.requires_grad_()
    scores = call(*leaves, 2.0, queries_mask=mask, documents_mask=mask, normalize=normalize)
    for gradient in torch.autograd.grad(scores.sum(), leaves):
        assert gradient.isnan().any()
        assert (gradient[mask == 0] == 0).all()


def test_a_learned_beta_of_one_element_keeps_its_shape_and_type() -> None:
    queries, documents = torch.randn(2, 3, 4), torch.randn(3, 5, 4)
    for beta in (torch.tensor([2.0]), torch.tensor(2.0, dtype=torch.bfloat16)):
        beta.requires_grad_()
        scores = soft_maxsim(queries, documents, beta)
        assert torch.equal(scores, soft_maxsim(queries, documents, 2.0))
        (gradient,) = torch.autograd.grad(scores.sum(), beta)
        assert (gradient.shape, gradient.dtype) == (beta.shape, beta.dtype)


@pytest.mark.parametrize("candidates", [[0, 1, 2], [0, 2, 2]])
def test_documents_that_meet_no_query_token_get_zeros(candidates: list[int]) -> None:
    """The first query has no token; the other one has the second document, or none."""
    queries, documents = torch.randn(3, 8, requires_grad=True), torch.randn(8, 10).T.requires_grad_()
    bounds = [torch.tensor(bounds) for bounds in ([0, 0, 3], [0, 4, 10])]
    scores = soft_maxsim_varlen(queries, documents, 2.0, *bounds, candidates_cu_seqlens=torch.tensor(candidates))
    (gradient,) = torch.autograd.grad(scores.sum(), documents)
    assert gradient.is_contiguous()
    assert gradient.any(dim=1).tolist() == [False] * 4 + [candidates == [0, 1, 2]] * 6


Q, D, TOKENS, BOUNDS = torch.ones(2, 3, 4), torch.ones(3, 5, 4), torch.ones(3, 4), torch.tensor([0, 1, 3])
LEARNED = torch.nn.Parameter(torch.tensor(-2.0))

test_one_error_for_each_mistake = mistakes(
    wrong(TypeError, "beta must be a number or a floating tensor of one element, got str", soft_maxsim, Q, D, "2"),
    wrong(TypeError, "beta must be a number or a floating tensor of one element, got bool", soft_maxsim, Q, D, True),
    wrong(TypeError, "beta must be float16, .* got torch.int64", soft_maxsim, Q, D, torch.tensor(2)),
    wrong(ValueError, r"beta must be a number or a tensor of one element, got shape \[2\]",
          soft_maxsim, Q, D, torch.ones(2)),
    wrong(ValueError, "beta must be above 0 and finite, got 0", soft_maxsim, Q, D, 0.0),
    wrong(ValueError, "beta must be above 0 and finite, got inf", soft_maxsim, Q, D, math.inf),
    wrong(ValueError, "beta must be above 0 and finite, got nan", soft_maxsim, Q, D, torch.tensor(math.nan)),
    wrong(ValueError, "beta must be above 0 and finite, got -2", soft_maxsim, Q, D, LEARNED),
    wrong(ValueError, "queries_mask must hold only 0", soft_maxsim, Q, D, 2.0, queries_mask=-torch.ones(2, 3)),
    wrong(ValueError, r"queries must have shape \[Tq, d\], got \[1, 3, 4\]",
          soft_maxsim_varlen, TOKENS[None], TOKENS, 2.0, BOUNDS, BOUNDS),
    wrong(ValueError, "documents_cu_seqlens must rise from 0 to the number of tokens of documents, 3",
          soft_maxsim_varlen, TOKENS, TOKENS, 2.0, BOUNDS, BOUNDS[:2]),
    wrong(ValueError, "beta must be above 0 and finite, got -1",
          soft_maxsim_varlen, TOKENS, TOKENS, -1.0, BOUNDS, BOUNDS),
)  # fmt: skip
