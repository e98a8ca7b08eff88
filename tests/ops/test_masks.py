"""What masks may hold, and that nothing of a masked token reaches a score or a gradient."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from pylate_flash import (
    maxsim,
    maxsim_cross_entropy,
    maxsim_from_hidden,
    maxsim_pairwise,
)
from pylate_flash.ops import maxsim_reference

QUERIES, DOCUMENTS = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
QUERIES_MASK = torch.tensor([[1, 1, 0], [1, 0, 1]])
DOCUMENTS_MASK = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 0, 0]])


def pylate_scores() -> ModuleType:
    """PyLate's names, which need PyLate."""
    from pylate_flash import scores

    return scores


CALLS = {
    "maxsim": lambda **masks: maxsim(QUERIES, DOCUMENTS, **masks),
    "pairs": lambda **masks: maxsim_pairwise(QUERIES, DOCUMENTS, **masks),
    "loss": lambda **masks: maxsim_cross_entropy(QUERIES, DOCUMENTS, **masks),
    "hidden": lambda **masks: maxsim_from_hidden(QUERIES, DOCUMENTS, torch.eye(4), **masks),
    "PyLate's": lambda **masks: pylate_scores().colbert_scores(QUERIES, DOCUMENTS, **masks),
    "PyLate's for distillation": lambda queries_mask=None, documents_mask=None: pylate_scores().colbert_kd_scores(
        QUERIES, DOCUMENTS.unsqueeze(1), queries_mask, None if documents_mask is None else documents_mask.unsqueeze(1)
    ),
}
MASKS = {"queries_mask": QUERIES_MASK, "documents_mask": DOCUMENTS_MASK}


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32, torch.bfloat16])
def test_zeros_and_ones_of_any_type_are_a_mask(call, dtype: torch.dtype) -> None:
    expected = call(**{name: mask.bool() for name, mask in MASKS.items()})
    assert torch.equal(call(**{name: mask.to(dtype) for name, mask in MASKS.items()}), expected)


@pytest.mark.parametrize("value", [0.5, -torch.inf, torch.nan, 2.0, -1.0])
@pytest.mark.parametrize("name", MASKS)
def test_additive_masks_are_refused_and_weights_but_those_of_queries(call, name: str, value: float) -> None:
    mask = MASKS[name].float()
    mask[1, 0] = value
    if name == "queries_mask" and value in (0.5, 2.0):
        assert not torch.equal(call(queries_mask=mask), call(queries_mask=mask.bool()))
        return
    weights = " or positive weights" if name == "queries_mask" else ""
    with pytest.raises(
        ValueError, match=rf"{name} must hold only 0 \(masked\) and 1 \(active\){weights}, got {value:g}: a mask is not"
    ):
        call(**{name: mask})


def test_infinite_weights_are_refused(call) -> None:
    with pytest.raises(ValueError, match="queries_mask must hold only 0 .* or positive weights, got inf"):
        call(queries_mask=QUERIES_MASK.float().masked_fill(QUERIES_MASK == 1, torch.inf))


def test_an_additive_mask_is_refused_though_it_holds_a_zero() -> None:
    additive = torch.zeros(2, 5).masked_fill(DOCUMENTS_MASK == 0, -torch.inf)
    with pytest.raises(ValueError, match="documents_mask must hold only 0 .* got -inf: .* not added to similarities"):
        maxsim(QUERIES, DOCUMENTS, documents_mask=additive)
    additive = torch.zeros(2, 3).masked_fill(QUERIES_MASK == 0, -torch.inf)
    with pytest.raises(ValueError, match="queries_mask must hold only 0 .* got -inf: .* not added to similarities"):
        maxsim(QUERIES, DOCUMENTS, queries_mask=additive)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_a_mask_of_integers_is_refused_by_its_value(name: str, dtype: torch.dtype) -> None:
    """Integers are no weights."""
    with pytest.raises(ValueError, match=rf"{name} must hold only 0 \(masked\) and 1 \(active\), got 3: .* floating"):
        maxsim(QUERIES, DOCUMENTS, **{name: MASKS[name].to(dtype) * 3})


def test_masks_and_weights_have_no_gradient() -> None:
    for name, mask in MASKS.items():
        with pytest.raises(ValueError, match=f"{name} must not require a gradient"):
            maxsim(QUERIES, DOCUMENTS, **{name: mask.float().requires_grad_()})


def weighed(n_documents: int, candidates: bool, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Embeddings of any norm, weights of which some are 0 and all of one query, and a mask with an empty document."""
    generator = torch.Generator().manual_seed(0)
    shape = (4, n_documents) if candidates else (n_documents,)
    queries = torch.randn(4, 6, 8, generator=generator, dtype=dtype)
    documents = torch.randn(*shape, 7, 8, generator=generator, dtype=dtype)
    weights = 3 * torch.rand(4, 6, generator=generator) * (torch.rand(4, 6, generator=generator) > 0.2)
    weights[2] = 0
    documents_mask = torch.rand(*shape, 7, generator=generator) > 0.3
    documents_mask[..., 1, :] = False
    return queries, documents, weights, documents_mask


def by_hand(queries, documents, weights, documents_mask, normalize: bool = False) -> torch.Tensor:
    """The sum over tokens, one at a time, of weight times best similarity."""
    if normalize:
        queries, documents = (tensor / tensor.norm(dim=-1, keepdim=True) for tensor in (queries, documents))
    scores = []
    for i, query in enumerate(queries):
        for tokens, active in zip(
            *(t[i] if documents.dim() == 4 else t for t in (documents, documents_mask)), strict=True
        ):
            terms = [w * (tokens[active] @ row).max() for w, row in zip(weights[i], query, strict=True) if active.any()]
            scores.append(sum(terms, start=queries.new_zeros(())))
    return torch.stack(scores).view(len(queries), -1)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("candidates", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_are_factors_of_the_best_similarities(dtype: torch.dtype, candidates: bool, normalize: bool) -> None:
    queries, documents, *masks = weighed(5, candidates, dtype)
    double = queries.double().requires_grad_(), documents.double().requires_grad_()
    expected = by_hand(*double, *masks, normalize)
    weight = torch.cos(torch.arange(expected.numel(), dtype=torch.float64)).view(expected.shape)
    of_definition = torch.autograd.grad((expected * weight).sum(), double)
    for function in (maxsim, maxsim_reference):
        leaves = queries.clone().requires_grad_(), documents.clone().requires_grad_()
        scores = function(*leaves, queries_mask=masks[0], documents_mask=masks[1], normalize=normalize)
        torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-6)
        found = torch.autograd.grad((scores * weight).sum(), leaves)
        for gradient, reference in zip(found, of_definition, strict=True):
            torch.testing.assert_close(gradient.double(), reference, rtol=1e-5, atol=1e-6)


def test_weights_of_ones_are_no_weights() -> None:
    queries, documents, weights, documents_mask = weighed(5, False, torch.float32)
    results = []
    for mask in ((weights != 0), (weights != 0).float()):
        leaves = queries.clone().requires_grad_(), documents.clone().requires_grad_()
        scores = maxsim(*leaves, queries_mask=mask, documents_mask=documents_mask, normalize=True)
        results.append((scores.detach(), *torch.autograd.grad(scores.sum(), leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("candidates", [False, True])
@pytest.mark.parametrize("masking", ["exclude", "zero"])
def test_masked_tokens_have_no_gradient_under_normalize(value: float, candidates: bool, masking: str) -> None:
    """Whose norm is not a number either."""
    queries, documents = QUERIES.clone(), DOCUMENTS.clone()
    queries[QUERIES_MASK == 0] = value
    documents[DOCUMENTS_MASK == 0] = value
    masks = dict(MASKS)
    if candidates:
        documents, masks["documents_mask"] = documents.unsqueeze(1), DOCUMENTS_MASK.unsqueeze(1)
    results = []
    for function in (maxsim, maxsim_reference):
        leaves = queries.clone().requires_grad_(), documents.clone().requires_grad_()
        scores = function(*leaves, **masks, normalize=True, masking=masking)
        results.append((scores.detach(), *torch.autograd.grad(scores.square().sum(), leaves)))
    torch.testing.assert_close(*results)
    assert (results[0][1][QUERIES_MASK == 0] == 0).all()
    assert (results[0][2].view(2, 5, 4)[DOCUMENTS_MASK == 0] == 0).all()


@pytest.mark.parametrize("empty_score", [0.0, -1.0])
def test_a_query_that_is_not_a_number_leaves_an_empty_document_its_score(empty_score: float) -> None:
    queries, mask = QUERIES.clone(), DOCUMENTS_MASK.clone()
    queries[0, 0, 0] = torch.nan
    mask[0] = 0
    for function in (maxsim, maxsim_reference):
        scores = function(queries, DOCUMENTS, documents_mask=mask, normalize=True, empty_score=empty_score)
        assert (scores[:, 0] == empty_score).all()
        assert scores[0, 1].isnan()


def test_masked_hidden_states_have_no_gradient_under_normalize() -> None:
    hidden = DOCUMENTS.clone()
    hidden[DOCUMENTS_MASK == 0] = torch.nan
    hidden.requires_grad_()
    scores = maxsim_from_hidden(QUERIES, hidden, torch.eye(4), documents_mask=DOCUMENTS_MASK)
    (gradient,) = torch.autograd.grad(scores.square().sum(), hidden)
    assert (gradient[DOCUMENTS_MASK == 0] == 0).all()
    assert gradient.isfinite().all()
