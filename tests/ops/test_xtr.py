"""`xtr_scores` against its definition, over shapes, masks and values that hypothesis draws, and by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pylate_flash import xtr_scores
from pylate_flash.ops import products, xtr_scores_reference
from tests.ops.cases import Case, Elements, gradients, mistakes, relative_error, wrong

NORMALIZERS = ("positive", "retrieved")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_unit_vectors(normalizer: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    queries, documents = (
        F.normalize(torch.randn(*shape, 64, generator=generator), dim=-1).to(dtype) for shape in ((5, 8), (20, 30))
    )
    mask = torch.rand(20, 30, generator=generator) > 0.2
    case = Case(queries, documents, None, mask, {"k": 3, "normalizer": normalizer})
    with torch.no_grad():
        actual = xtr_scores(*case.tensors, **case.keywords)
        expected = xtr_scores_reference(*case.doubled().tensors, **case.keywords)
    assert 0.1 < (expected == 0).double().mean() < 0.9
    assert relative_error(actual, expected) <= 2e-6
    bound = 1e-2 if dtype == torch.bfloat16 else 1e-5
    for gradient, right in zip(
        gradients(xtr_scores, case), gradients(xtr_scores_reference, case.doubled()), strict=True
    ):
        assert relative_error(gradient, right) <= bound


@pytest.mark.parametrize("function", [xtr_scores, xtr_scores_reference])
def test_by_hand(function) -> None:
    queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    documents = torch.tensor([[[3.0, -1.0], [2.0, -2.0]], [[1.0, -3.0], [-1.0, 4.0]]])
    # Token 0 retrieves 3 and 2, both of document 0; token 1 retrieves 4, of document 1, and -1, of document 0.
    assert function(queries, documents, k=2, normalizer="retrieved").tolist() == [[1.0, 4.0]]
    # Normalized by positive scores, only the 3 counts for document 0: it has a 0 for token 1.
    assert function(queries, documents, k=2).tolist() == [[3.0, 4.0]]
    # Token 1 now retrieves both tokens of document 0, so there is no 0; the top 3 of token 0 leave out one token.
    assert function(queries, documents, k=3).tolist() == [[2.0, 2.5]]
    mask = torch.tensor([[True, True], [False, True]])
    # With one more, the masked token is retrieved too, and so all of document 1: -1 and 4.
    assert function(queries, documents, k=3, documents_mask=mask).tolist() == [[2.0, 4.0]]
    assert function(queries, documents, k=4, documents_mask=mask).tolist() == [[2.0, 3.0]]
    assert function(queries, documents, k=3, documents_mask=mask, normalizer="retrieved").tolist() == [[1.0, 1.5]]
    weights = torch.tensor([[0.5, 2.0]])
    assert function(queries, documents, k=2, queries_mask=weights).tolist() == [[1.5, 8.0]]
    assert function(queries, documents, k=2, queries_mask=weights, normalizer="retrieved").tolist() == [[-0.25, 8.0]]


def test_of_equal_tokens_the_first_are_retrieved() -> None:
    documents = torch.tensor([1.0, -0.0, 2.0, 0.0]).view(1, 4, 1).repeat(3, 1, 1).requires_grad_()
    scores = xtr_scores(torch.ones(1, 1, 1), documents, k=2)
    assert scores.tolist() == [[2.0, 2.0, 0.0]]
    (gradient,) = torch.autograd.grad(scores.sum(), documents)
    assert gradient.nonzero().tolist() == [[0, 2, 0], [1, 2, 0]]
    # -0.0 and 0.0 are equal: of six of them, the first three are taken, two of document 0 and one of document 1.
    scores = xtr_scores(torch.ones(1, 1, 1), documents[:, [1, 3]] - 1, k=3, normalizer="retrieved")
    assert scores.tolist() == [[-1.0, -1.0, 0.0]]


@pytest.mark.parametrize("function", [xtr_scores, xtr_scores_reference])
def test_a_document_that_is_retrieved_as_a_whole_has_a_gradient_at_0(function) -> None:
    documents = torch.zeros(1, 2, 1, dtype=torch.float64, requires_grad=True)
    scores = function(torch.ones(1, 1, 1, dtype=torch.float64), documents, k=2, normalizer="positive")
    (gradient,) = torch.autograd.grad(scores.sum(), documents)
    assert (gradient != 0).flatten().tolist() == [True, False]


def test_a_masked_token_is_not_retrieved_where_an_infinite_query_makes_it_nan() -> None:
    queries, documents = torch.tensor([[[-torch.inf]]]), torch.tensor([[[1.0], [2.0]]])
    for function in (xtr_scores, xtr_scores_reference):
        assert function(queries, documents, documents_mask=torch.tensor([[True, False]]), k=1).tolist() == [[0.0]]


def test_nan_and_infinity() -> None:
    queries, documents = torch.randn(2, 3, 4), torch.randn(3, 5, 4)
    documents[1, 4, 0] = torch.nan
    for normalizer in NORMALIZERS:
        scores = xtr_scores(queries, documents, k=2, normalizer=normalizer)
        assert scores[:, 1].isnan().all()
        assert scores[:, [0, 2]].isfinite().all()
        # A masked token has no effect.
        mask = ~documents.isnan().any(dim=-1)
        leaf = documents.clone().requires_grad_()
        scores = xtr_scores(queries, leaf, k=2, documents_mask=mask, normalizer=normalizer)
        assert scores.isfinite().all()
        assert torch.autograd.grad(scores.sum(), leaf)[0].isfinite().all()
    queries[0, 1] = torch.nan
    assert xtr_scores(queries, documents[:1]).isnan().tolist() == [[True], [False]]
    assert xtr_scores(queries, documents[:1], queries_mask=torch.tensor([[1, 0, 1]] * 2)).isfinite().all()
    lines = torch.tensor([torch.inf, 1.0, -torch.inf]).view(3, 1, 1)
    assert xtr_scores(torch.ones(1, 1, 1), lines, k=2).tolist() == [[torch.inf, 1.0, 0.0]]
    assert xtr_scores(torch.ones(1, 1, 1), lines, k=3).tolist() == [[torch.inf, 1.0, -torch.inf]]


@pytest.mark.parametrize("mask", [[True, True], [False, True]])
def test_no_gradient_flows_where_the_best_is_minus_infinity(mask: list[bool]) -> None:
    leaves = torch.tensor([[[-torch.inf, 0.0]]], requires_grad=True), torch.ones(1, 2, 2, requires_grad=True)
    scores = xtr_scores(*leaves, k=2, documents_mask=torch.tensor([mask]), normalizer="retrieved")
    assert scores.item() == -torch.inf
    assert not any(gradient.any() for gradient in torch.autograd.grad(scores, leaves))


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("shapes", [((0, 3), (2, 5)), ((2, 0), (2, 5)), ((2, 3), (0, 5)), ((2, 3), (4, 0))])
def test_without_tokens(shapes: tuple, normalizer: str) -> None:
    (n_queries, query_length), (n_documents, length) = shapes
    queries = torch.ones(n_queries, query_length, 4, requires_grad=True)
    documents = torch.ones(n_documents, length, 4, requires_grad=True)
    scores = xtr_scores(queries, documents, normalizer=normalizer, empty_score=-5.0)
    assert torch.equal(scores, torch.full((n_queries, n_documents), 0.0 if length else -5.0))
    assert not any(g.any() for g in torch.autograd.grad(scores.sum(), (queries, documents)))


def test_the_similarities_are_never_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_BLOCK_CPU", 10_000)
    queries, documents = torch.randn(10, 16, 4, requires_grad=True), torch.randn(60, 40, 4, requires_grad=True)
    with Elements() as elements:
        xtr_scores(queries, documents, k=50).sum().backward()
    # The largest tensor is [Nd, rows] or the documents.
    assert elements.largest <= 60 * 10 * 16
    assert elements.largest < queries.shape[0] * 16 * 60 * 40 / 30


Q, D = torch.ones(2, 3, 4), torch.ones(3, 5, 4)


test_one_error_for_each_mistake = mistakes(
    wrong(TypeError, "k must be an integer, got float", xtr_scores, Q, D, k=2.0),
    wrong(TypeError, "k must be an integer, got bool", xtr_scores, Q, D, k=True),
    wrong(ValueError, "k must be at least 1, got 0", xtr_scores, Q, D, k=0),
    wrong(ValueError, "queries_mask must hold only 0 .* got -1", xtr_scores, Q, D, queries_mask=-torch.ones(2, 3)),
)
