"""Masks of any type, weights and empty documents in the kernels of the forward, in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pylate_flash.kernels import plan, tables
from pylate_flash.kernels.plan import forward_plan
from pylate_flash.ops import maxsim, maxsim_reference, maxsim_varlen, pack
from pylate_flash.ops.varlen import maxsim_varlen_reference
from pylate_flash.problem import Options, Problem, Tensors, problem_of
from tests.ops.cases import Case, gradients, relative_error
from tests.ops.test_varlen import gradients as varlen_gradients

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

# Kernel, sums of a score, queries, documents.
PADDED = [
    ("single", 1, (1, 5, 8), (4, 20, 8)),
    ("single", 1, (3, 5, 300), (3, 4, 9, 300)),
    ("stacked", 1, (3, 5, 8), (4, 20, 8)),
    ("stacked", 3, (3, 44, 8), (4, 20, 8)),
    ("stacked", 5, (3, 70, 8), (3, 4, 9, 8)),
]


def kernel(*tensors: torch.Tensor, **options) -> torch.Tensor:
    return maxsim(*tensors, **options, implementation="triton")


def masked(name: str, sums: int, queries: tuple[int, ...], documents: tuple[int, ...], **options) -> Case:
    """Masks with a query and documents of which no token is active."""
    generator = torch.Generator().manual_seed(0)
    embeddings = [torch.randn(shape, generator=generator) for shape in (queries, documents)]
    queries_mask, documents_mask = (torch.rand(t.shape[:-1], generator=generator) > 0.3 for t in embeddings)
    if queries[0] > 1:
        queries_mask[1] = False
    documents_mask[..., 1, :] = False
    documents_mask[..., -1, :] = False
    documents_mask[..., 0, :] = True
    case = Case(*embeddings, queries_mask, documents_mask, options)
    plan = forward_plan(problem_of(Tensors(*embeddings, queries_mask, documents_mask), Options(**options)))
    assert plan.kernel == name

    assert plan.n_sums == sums
    return case


@pytest.mark.parametrize("options", [{}, {"normalize": True, "masking": "zero", "reduction": "mean"}], ids=str)
@pytest.mark.parametrize(("name", "sums", "queries", "documents"), PADDED)
def test_zeros_and_ones_of_any_type_give_the_same_bits(name, sums, queries, documents, options: dict) -> None:
    case = masked(name, sums, queries, documents, **options)
    with torch.no_grad():
        expected = kernel(*case.tensors, **case.keywords)
    expected_gradients = gradients(kernel, case)
    for of_queries, of_documents in ((torch.int64, torch.uint8), (torch.float32, torch.float64)):
        masks = {
            "queries_mask": case.queries_mask.to(of_queries),
            "documents_mask": case.documents_mask.to(of_documents),
        }
        other = replace(case, **masks)
        with torch.no_grad():
            assert torch.equal(kernel(*other.tensors, **other.keywords), expected)
        assert all(torch.equal(a, b) for a, b in zip(gradients(kernel, other), expected_gradients, strict=True))


@pytest.mark.parametrize("options", [{}, {"normalize": True, "masking": "zero", "reduction": "mean"}], ids=str)
@pytest.mark.parametrize(("name", "sums", "queries", "documents"), PADDED)
def test_weights(name, sums, queries, documents, options: dict) -> None:
    case = masked(name, sums, queries, documents, **options)
    weights = 0.25 + 3 * torch.rand(queries[:2], generator=torch.Generator().manual_seed(1))
    case = replace(case, queries_mask=weights * case.queries_mask)
    expected = maxsim_reference(*case.doubled().tensors, **case.keywords)
    with torch.no_grad():
        assert relative_error(kernel(*case.tensors, **case.keywords), expected) <= 2e-6
    for gradient, reference in zip(gradients(kernel, case), gradients(maxsim_reference, case.doubled()), strict=True):
        assert relative_error(gradient, reference) <= 1e-5


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("masking", ["exclude", "zero"])
@pytest.mark.parametrize(("name", "sums", "queries", "documents"), PADDED)
def test_empty_score(name, sums, queries, documents, masking: str, reduction: str) -> None:
    case = masked(name, sums, queries, documents, masking=masking, reduction=reduction, empty_score=-7.5)
    with torch.no_grad():
        scores = kernel(*case.tensors, **case.keywords)
        plain = kernel(*case.tensors, **(case.keywords | {"empty_score": 0.0}))
    empty = ~case.documents_mask.any(-1).expand(scores.shape)
    assert empty.sum() == 2 * queries[0]
    assert (scores[empty] == -7.5).all()
    assert torch.equal(scores[~empty], plain[~empty])
    expected = maxsim_reference(*case.doubled().tensors, **case.keywords)
    torch.testing.assert_close(scores.double(), expected, rtol=2e-6, atol=2e-5)
    leaves = [tensor.detach().requires_grad_() for tensor in case.tensors]
    with_winners = kernel(*leaves, **case.keywords)
    # Other tiles score where something has to win, and a BLAS adds up products in an order that may depend on them.
    torch.testing.assert_close(with_winners.detach(), scores, rtol=2e-6, atol=2e-5)
    _, grad_documents = torch.autograd.grad(with_winners.sum(), leaves)
    assert not grad_documents[~case.documents_mask].any()


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("query_lengths", "candidates"), [([5], None), ([3, 0, 20], None), ([4, 4], None), ([3, 70, 1], [0, 2, 2, 5])]
)
@pytest.mark.parametrize("in_pieces", [False, True])
def test_packed(in_pieces: bool, query_lengths, candidates, normalize: bool, reduction: str, monkeypatch) -> None:
    """Empty documents and queries of unequal lengths, with gradients."""
    if in_pieces:

        def cuts(problem: Problem, *_: int, **__: int) -> plan.Cuts:
            work = problem.n_tokens + problem.n_documents * tables.DOCUMENT_COST
            return plan.Cuts(70, 70, -(-work // 70))

        monkeypatch.setattr(plan, "cuts_of", cuts)
    generator = torch.Generator().manual_seed(0)
    lengths = [71, 0, 30, 150, 0]
    queries, documents = (
        pack([torch.randn(n, 8, generator=generator) for n in sizes]) for sizes in (query_lengths, lengths)
    )
    arguments = queries[0], documents[0], queries[1], documents[1]
    owned = None if candidates is None else torch.tensor(candidates)
    options = {
        "candidates_cu_seqlens": owned, "normalize": normalize, "reduction": reduction, "empty_score": -7.5
    }  # fmt: skip
    tensors = Tensors(*arguments[:2], None, None, *arguments[2:], owned)
    assert forward_plan(problem_of(tensors, Options(max(query_lengths), 150, 3, normalize))).in_pieces == in_pieces

    def function(*tensors: torch.Tensor, **options) -> torch.Tensor:
        return maxsim_varlen(*tensors, **options, implementation="triton")

    expected = maxsim_varlen_reference(*(t.double() for t in arguments[:2]), *arguments[2:], **options)
    scores = function(*arguments, **options)
    torch.testing.assert_close(scores.double(), expected, rtol=2e-6, atol=1e-5)
    assert (scores[..., [1, 4]] == -7.5).all()
    found = varlen_gradients(function, (arguments, options))
    references = varlen_gradients(maxsim_varlen_reference, (arguments, options), torch.float64)
    for gradient, reference in zip(found, references, strict=True):
        assert relative_error(gradient, reference) <= 1e-5
