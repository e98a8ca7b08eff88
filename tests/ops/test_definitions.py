"""The definitions against loops over numbers, which share no code with the package."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pylate_flash import maxsim_pairwise
from pylate_flash.ops import (
    chamfer_reference,
    cross_entropy_reference,
    maxsim_from_hidden_reference,
    maxsim_reference,
    soft_maxsim_reference,
    xtr_scores_reference,
)
from pylate_flash.ops.chamfer import METRICS
from pylate_flash.ops.varlen import maxsim_varlen_reference
from pylate_flash.ops.xtr import NORMALIZERS
from tests.ops.cases import Case, cases
from tests.ops.test_varlen import packed

OPTIONS = {"max_examples": 30}
SMALL = {"max_batch": 3, "max_length": 6, "sizes": st.integers(1, 4)}


def dot(x: list[float], y: list[float]) -> float:
    return sum(a * b for a, b in zip(x, y, strict=True))


def unit(x: list[float]) -> list[float]:
    norm = max(math.sqrt(dot(x, x)), 1e-12)
    return [value / norm for value in x]


def score(
    query: list, document: list, query_on: list, document_on: list, *, normalize=False, reduction="sum",
    masking="exclude", empty_score=0.0, beta=None,
) -> float:  # fmt: skip
    """Score lists of embeddings, given a weight per query token and an active flag per document token."""
    if normalize:
        query, document = [unit(x) for x in query], [unit(y) for y in document]
    if not any(document_on):
        return empty_score
    total, active = 0.0, 0
    for x, weight in zip(query, query_on, strict=True):
        if weight == 0:
            continue
        active += 1
        similarities = [dot(x, y) for y, is_active in zip(document, document_on, strict=True) if is_active]
        if masking == "zero":
            similarities += [0.0] * (len(document) - len(similarities))
        best = max(similarities) if beta is None else math.log(sum(math.exp(beta * s) for s in similarities)) / beta
        total += weight * best
    return total / max(active, 1) if reduction == "mean" else total


def lists(tensor: Tensor | None, like: Tensor) -> list:
    """A tensor as lists; where a mask is None, all tokens are active."""
    return (torch.ones(like.shape[:-1]) if tensor is None else tensor).tolist()


def looped(case: Case, **options) -> list[list[float]]:
    queries, documents = case.queries.tolist(), case.documents.tolist()
    queries_on, documents_on = lists(case.queries_mask, case.queries), lists(case.documents_mask, case.documents)
    return [
        [
            score(query, document, query_on, on, **case.options, **options)
            for document, on in zip(
                *((documents, documents_on) if case.documents.dim() == 3 else (documents[i], documents_on[i])),
                strict=True,
            )
        ]
        for i, (query, query_on) in enumerate(zip(queries, queries_on, strict=True))
    ]


@settings(**OPTIONS)
@given(case=cases(dtypes=(torch.float64,), **SMALL), beta=st.sampled_from([0.3, 2.0, 30.0]))
def test_maxsim_and_soft_maxsim(case: Case, beta: float) -> None:
    result = maxsim_reference(*case.tensors, **case.keywords)
    torch.testing.assert_close(result, torch.tensor(looped(case), dtype=torch.float64))
    result = soft_maxsim_reference(*case.tensors, beta, **case.keywords)
    torch.testing.assert_close(result, torch.tensor(looped(case, beta=beta), dtype=torch.float64))


@settings(**OPTIONS)
@given(case=cases(layouts=("pairs",), dtypes=(torch.float64,), **SMALL))
def test_pairs(case: Case) -> None:
    expected = torch.tensor(looped(case), dtype=torch.float64).diagonal()
    torch.testing.assert_close(maxsim_pairwise(*case.tensors, **case.keywords), expected)


@settings(**OPTIONS)
@given(case=packed(dtypes=(torch.float64,), sizes=st.integers(1, 4)))
def test_packed(case: tuple) -> None:
    (queries, documents, queries_bounds, documents_bounds), options = case
    options = dict(options)
    candidates = options.pop("candidates_cu_seqlens")

    def split(values: Tensor, bounds: Tensor) -> list[list]:
        return [values[start:stop].tolist() for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]

    queries, documents = split(queries, queries_bounds), split(documents, documents_bounds)
    rows = [
        [score(query, document, [1] * len(query), [1] * len(document), **options) for document in documents]
        for query in queries
    ]
    if candidates is not None:
        rows = [rows[i][j] for i in range(len(rows)) for j in range(candidates[i], candidates[i + 1])]
    result = maxsim_varlen_reference(*case[0], **case[1])
    torch.testing.assert_close(result.double(), torch.tensor(rows, dtype=torch.float64))


def test_from_hidden_states() -> None:
    queries, hidden, weight = torch.randn(2, 3, 5), torch.randn(3, 4, 5), torch.randn(6, 5)
    bias, queries_bias = torch.randn(2, 6)

    def project(states: list, weight: list, bias: list) -> list:
        return [[dot(state, row) + shift for row, shift in zip(weight, bias, strict=True)] for state in states]

    expected = [
        [
            score(
                project(query, weight.tolist(), queries_bias.tolist()),
                project(document, weight.tolist(), bias.tolist()),
                [1] * 3, [1, 1, 0, 1], normalize=True,
            )
            for document in hidden.tolist()
        ]
        for query in queries.tolist()
    ]  # fmt: skip
    mask = torch.tensor([1, 1, 0, 1]).expand(3, 4)
    actual = maxsim_from_hidden_reference(
        queries, hidden, weight, bias, documents_mask=mask, queries_weight=weight, queries_bias=queries_bias
    )
    torch.testing.assert_close(actual, torch.tensor(expected))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("margin", [None, 0.3, -0.2])
@pytest.mark.parametrize("excluded", [(), ((0, 2), (1, 1), (2, 0))])
def test_cross_entropy(excluded: tuple, margin: float | None, symmetric: bool) -> None:
    """Pairs excluded from a query's denominator are so from those over queries, too; two queries share a document."""
    scores, labels, temperature = torch.randn(3, 4, dtype=torch.float64), [3, 0, 3], 0.7
    # Exactly at the limit of the first margin, which does not exclude it.
    scores[0, 1] = scores[0, 3] - 0.3
    exclude = torch.zeros(3, 4, dtype=torch.bool)
    for pair in excluded:
        exclude[pair] = True

    def counts(query: int, document: int) -> bool:
        score, label_score = scores[query, document].item(), scores[query, labels[query]].item()
        left_out = exclude[query, document].item() or (margin is not None and score > label_score - margin)
        return document == labels[query] or not left_out

    def denominator(positions: list) -> float:
        return math.log(sum(math.exp(scores[pair].item() / temperature) for pair in positions if counts(*pair)))

    expected = []
    for query, label in enumerate(labels):
        loss = denominator([(query, document) for document in range(4)])
        if symmetric:
            loss = (loss + denominator([(other, label) for other in range(3)])) / 2
        expected.append(loss - scores[query, label].item() / temperature)
    options = {"exclude": exclude, "margin": margin, "temperature": temperature, "symmetric": symmetric}
    actual = cross_entropy_reference(scores, torch.tensor(labels), **options, loss_reduction="none")
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))


def test_the_gradient_goes_to_the_first_of_equal_tokens_and_to_no_masked_one() -> None:
    documents = torch.ones(1, 5, 2, requires_grad=True)
    mask = torch.tensor([[0, 1, 1, 0, 1]])
    (gradient,) = torch.autograd.grad(
        maxsim_reference(torch.ones(1, 3, 2), documents, documents_mask=mask).sum(), documents
    )
    assert gradient[0, :, 0].tolist() == [0, 3, 0, 0, 0]
    values = torch.ones(4, 2, requires_grad=True)
    bounds = torch.tensor([0, 3]), torch.tensor([0, 1, 4])
    (gradient,) = torch.autograd.grad(maxsim_varlen_reference(torch.ones(3, 2), values, *bounds).sum(), values)
    assert gradient[:, 0].tolist() == [3, 3, 0, 0]


MASKS = {
    "queries_mask": torch.tensor([[1.0, 0.5, 0.0], [2.0, 1.0, 1.0]]),
    "documents_mask": torch.arange(15).view(3, 5) % 4 > 0,
}
OWN = MASKS | {"documents_mask": torch.arange(30).view(2, 3, 5) % 4 > 0}
NORMS_AND_MASKING = [{"normalize": norms, "masking": mode} for norms in (False, True) for mode in ("exclude", "zero")]
OF_ONE = {"x_mask": torch.tensor([[1, 1, 0], [1, 0, 1]])}
DIFFERENTIABLE = {
    f"{function.__name__} of {shapes[1]}, {options}": (function, shapes, options | masks)
    for function, shapes, masks, variants in (
        (maxsim_reference, ((2, 3, 4), (3, 5, 4)), MASKS, NORMS_AND_MASKING),
        (maxsim_reference, ((2, 3, 4), (2, 3, 5, 4)), OWN, NORMS_AND_MASKING),
        (soft_maxsim_reference, ((2, 3, 4), (3, 5, 4), ()), MASKS, NORMS_AND_MASKING),
        (xtr_scores_reference, ((2, 3, 4), (3, 5, 4)), MASKS, [{"k": 4, "normalizer": kind} for kind in NORMALIZERS]),
        (chamfer_reference, ((2, 3, 3), (2, 5, 3)), OF_ONE, [{"metric": kind} for kind in METRICS]),
    )
    for options in variants
}


@pytest.mark.parametrize("definition", DIFFERENTIABLE)
def test_definitions_pass_gradcheck(definition: str) -> None:
    function, shapes, options = DIFFERENTIABLE[definition]
    leaves = [torch.rand(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lambda *tensors: function(*tensors, **options), leaves)
