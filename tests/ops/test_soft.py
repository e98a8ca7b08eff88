"""`soft_maxsim` against its definition, over shapes, masks and values that hypothesis draws."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pylate_flash import soft_maxsim, soft_maxsim_varlen
from pylate_flash.ops import soft_maxsim_reference
from tests.ops.cases import Case, cases, relative_error
from tests.ops.test_definitions import dot, lists, unit
from tests.ops.test_varlen import packed

OPTIONS = {"max_examples": 30, "deadline": None, "derandomize": True}
BETAS = st.sampled_from([0.3, 2.0, 30.0])


def soft_gradients(function, case: Case, beta: float | Tensor) -> tuple[Tensor, ...]:
    """Gradients of beta, queries and documents under a fixed, uneven weighting of the scores."""
    beta = torch.tensor(float(beta), dtype=torch.float64, device=case.queries.device).requires_grad_()
    queries, documents = case.queries.detach().requires_grad_(), case.documents.detach().requires_grad_()
    scores = function(queries, documents, beta, **case.keywords)
    weight = torch.cos(torch.arange(scores.numel(), device=scores.device, dtype=scores.dtype)).view(scores.shape)
    return torch.autograd.grad((scores * weight).sum(), (beta, queries, documents), materialize_grads=True)


def varlen_reference(queries, documents, beta, queries_cu_seqlens, documents_cu_seqlens, **options) -> Tensor:
    """One query and one document at a time, by the definition of padded ones."""
    options = dict(options)
    candidates = options.pop("candidates_cu_seqlens")
    split_queries, split_documents = (
        values.tensor_split(bounds[1:-1].tolist())
        for values, bounds in ((queries, queries_cu_seqlens), (documents, documents_cu_seqlens))
    )
    met = [(0, len(split_documents))] * len(split_queries)
    if candidates is not None:
        met = list(zip(candidates[:-1].tolist(), candidates[1:].tolist(), strict=True))
    scores = [
        soft_maxsim_reference(query[None], document[None], beta, **options)[0, 0]
        for query, (first, last) in zip(split_queries, met, strict=True)
        for document in split_documents[first:last]
    ]
    shape = (len(split_queries), -1) if candidates is None else (-1,)
    return torch.stack(scores).view(shape)


def varlen_gradients(function, case: tuple, beta: float, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    (queries, documents, *bounds), options = case
    learned = torch.tensor(beta, dtype=torch.float64).requires_grad_()
    queries, documents = (t.detach().to(dtype or t.dtype).requires_grad_() for t in (queries, documents))
    scores = function(queries, documents, learned, *bounds, **options)
    weight = torch.cos(torch.arange(scores.numel(), dtype=scores.dtype)).view(scores.shape)
    return torch.autograd.grad((scores * weight).sum(), (learned, queries, documents), materialize_grads=True)


def check_gradients(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    """Of beta, relative to what it is a difference of: terms of the size of the scores."""
    assert abs(found[0] - expected[0]) <= tolerance * max(1.0, abs(expected[0]))
    for gradient, reference in zip(found[1:], expected[1:], strict=True):
        assert relative_error(gradient, reference) <= tolerance


@settings(**OPTIONS)
@given(case=cases(dtypes=(torch.float64,), max_batch=3, max_length=6, sizes=st.integers(1, 4)), beta=BETAS)
def test_the_definition_is_a_loop_over_numbers(case: Case, beta: float) -> None:
    def score(query: list, document: list, query_on: list, on: list) -> float:
        options = case.options
        if not any(on):
            return options["empty_score"]
        if options["normalize"]:
            query, document = [unit(x) for x in query], [unit(y) for y in document]
        total = 0.0
        for x, weight in zip(query, query_on, strict=True):
            exponents = [beta * dot(x, y) for y, there in zip(document, on, strict=True) if there]
            exponents += [0.0] * (len(document) - len(exponents)) if options["masking"] == "zero" else []
            total += weight * math.log(sum(map(math.exp, exponents))) / beta
        active = sum(weight != 0 for weight in query_on)
        return total / max(active, 1) if options["reduction"] == "mean" else total

    queries, documents = case.queries.tolist(), case.documents.tolist()
    queries_on, on = lists(case.queries_mask, case.queries), lists(case.documents_mask, case.documents)
    own = case.documents.dim() == 4
    expected = [
        [score(q, *pair) for pair in zip(documents[i] if own else documents, [w] * 99, on[i] if own else on)]  # noqa: B905
        for i, (q, w) in enumerate(zip(queries, queries_on, strict=True))
    ]
    found = soft_maxsim_reference(*case.tensors, beta, **case.keywords)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


@settings(**OPTIONS)
@given(case=cases(), beta=BETAS)
def test_scores_equal_the_definition(case: Case, beta: float) -> None:
    scores = soft_maxsim(*case.tensors, beta, **case.keywords)
    expected = soft_maxsim_reference(*case.doubled().tensors, beta, **case.keywords)
    assert scores.dtype == torch.float32
    assert scores.shape == expected.shape
    torch.testing.assert_close(scores.double(), expected, rtol=2e-6, atol=2e-6)


@settings(**OPTIONS)
@given(case=cases(dtypes=(torch.float32, torch.float64)), beta=BETAS)
def test_gradients_equal_those_of_the_definition(case: Case, beta: float) -> None:
    found = soft_gradients(soft_maxsim, case, beta)
    check_gradients(found, soft_gradients(soft_maxsim_reference, case.doubled(), beta), 1e-5)
    assert found[1].dtype == found[2].dtype == case.queries.dtype


@settings(**OPTIONS)
@given(case=packed(), beta=BETAS)
def test_packed_tokens(case: tuple, beta: float) -> None:
    (queries, documents, *bounds), options = case
    scores = soft_maxsim_varlen(queries, documents, beta, *bounds, **options)
    expected = varlen_reference(queries.double(), documents.double(), beta, *bounds, **options)
    torch.testing.assert_close(scores.double(), expected, rtol=2e-6, atol=2e-6)
    if queries.dtype == torch.float16:
        return
    found = varlen_gradients(soft_maxsim_varlen, case, beta)
    check_gradients(found, varlen_gradients(varlen_reference, case, beta, torch.float64), 1e-5)
