"""`maxsim` and `maxsim_pairwise` against their definition, over shapes, masks and values that hypothesis draws."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings

from pylate_flash import maxsim, maxsim_pairwise
from pylate_flash.ops import maxsim_reference
from tests.ops.cases import (
    Case,
    cases,
    check_definition,
    mistakes,
    relative_error,
    wrong,
)

OPTIONS = {"max_examples": 40}


@settings(max_examples=80)
@given(case=cases())
def test_scores_and_gradients_equal_the_definition(case: Case) -> None:
    check_definition(maxsim, maxsim_reference, case.tensors, case.keywords)


@settings(**OPTIONS)
@given(case=cases(layouts=("pairs",)))
def test_pairs_are_the_diagonal(case: Case) -> None:
    def definition(*tensors: torch.Tensor, **options) -> torch.Tensor:
        return maxsim_reference(*tensors, **options).diagonal()

    check_definition(maxsim_pairwise, definition, case.tensors, case.keywords)


def test_by_hand() -> None:
    queries = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])
    documents = torch.tensor([[[3.0, 0.0], [0.0, 1.0]], [[-1.0, 0.0], [0.0, -5.0]]])
    # Document 0: 3 + 2. Document 1: the best for token 0 is 0 (second token), for token 1 it is 0 (first token).
    assert maxsim(queries, documents).tolist() == [[5.0, 0.0]]
    mask = torch.tensor([[True, False], [True, False]])
    assert maxsim(queries, documents, documents_mask=mask).tolist() == [[3.0, -1.0]]
    assert maxsim(queries, documents, documents_mask=mask, masking="zero").tolist() == [[3.0, 0.0]]
    assert maxsim(queries, documents, queries_mask=torch.tensor([[1, 0]])).tolist() == [[3.0, 0.0]]
    assert maxsim(queries, documents, reduction="mean").tolist() == [[2.5, 0.0]]


def test_no_gradient_where_a_masked_zero_wins() -> None:
    queries = torch.ones(1, 1, 2, requires_grad=True)
    documents = torch.full((1, 2, 2), -1.0, requires_grad=True)
    mask = torch.tensor([[True, False]])
    scores = maxsim(queries, documents, documents_mask=mask, masking="zero")
    assert scores.item() == 0.0
    assert all((g == 0).all() for g in torch.autograd.grad(scores.sum(), (queries, documents)))


def test_empty_documents_and_queries() -> None:
    queries, documents = torch.randn(2, 3, 4), torch.randn(3, 5, 4)
    documents_mask = torch.ones(3, 5, dtype=torch.bool)
    documents_mask[1] = False
    queries_mask = torch.tensor([[0, 0, 0], [1, 1, 1]])
    masks = {"queries_mask": queries_mask, "documents_mask": documents_mask}
    scores = maxsim(queries, documents, **masks, reduction="mean", empty_score=-1e4)
    assert (scores[:, 1] == -1e4).all()
    assert (scores[0, [0, 2]] == 0).all()
    assert maxsim(queries, documents, **masks)[:, 1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("normalize", [False, True])
def test_same_tensor_as_queries_and_documents(normalize: bool) -> None:
    tokens = torch.randn(3, 4, 5, requires_grad=True)
    other = tokens.detach().double().requires_grad_()
    weight = torch.randn(3, 3)
    (found,) = torch.autograd.grad((maxsim(tokens, tokens, normalize=normalize) * weight).sum(), tokens)
    (expected,) = torch.autograd.grad((maxsim_reference(other, other, normalize=normalize) * weight).sum(), other)
    assert relative_error(found, expected) <= 1e-5


def test_memory_does_not_grow_with_the_similarity_tensor() -> None:
    """4 x 512 x 64 x 256 similarities are 128 MiB in float32; no allocation of the call may come near that."""
    queries, documents = torch.randn(4, 64, 8, requires_grad=True), torch.randn(512, 256, 8, requires_grad=True)
    with torch.profiler.profile(profile_memory=True) as profile:
        maxsim(queries, documents).sum().backward()
    assert max(event.cpu_memory_usage for event in profile.events()) < 24 << 20


Q, D = torch.zeros(2, 3, 4), torch.zeros(3, 5, 4)


test_bad_input_names_the_argument = mistakes(
    wrong(ValueError, "embedding size of at least 1", maxsim, Q[..., :0], D[..., :0]),
    wrong(ValueError, "one row of candidates per query", maxsim, Q, D.unsqueeze(0)),
    wrong(ValueError, "one document per query, 2, got 3", maxsim_pairwise, Q, D),
)  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU serves it")
def test_an_implementation_asked_for_by_name_is_never_replaced() -> None:
    with pytest.raises(ValueError, match=r'implementation="triton" cannot serve this input: .*CUDA'):
        maxsim(Q, D, implementation="triton")
