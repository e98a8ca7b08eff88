"""What masks may hold, and that nothing of a masked token reaches a score or a gradient."""

from __future__ import annotations

import pytest
import torch

from pylate_flash import maxsim, maxsim_cross_entropy, maxsim_from_hidden, maxsim_pairs
from pylate_flash.ops import maxsim_reference
from pylate_flash.scores import colbert_kd_scores, colbert_scores

QUERIES, DOCUMENTS = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
QUERIES_MASK = torch.tensor([[1, 1, 0], [1, 0, 1]])
DOCUMENTS_MASK = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 0, 0]])

CALLS = {
    "maxsim": lambda queries_mask, documents_mask: maxsim(QUERIES, DOCUMENTS, queries_mask, documents_mask),
    "pairs": lambda queries_mask, documents_mask: maxsim_pairs(QUERIES, DOCUMENTS, queries_mask, documents_mask),
    "loss": lambda queries_mask, documents_mask: maxsim_cross_entropy(QUERIES, DOCUMENTS, queries_mask, documents_mask),
    "hidden": lambda queries_mask, documents_mask: maxsim_from_hidden(
        QUERIES, DOCUMENTS, torch.eye(4), None, documents_mask, queries_mask
    ),
    "PyLate's": lambda queries_mask, documents_mask: colbert_scores(QUERIES, DOCUMENTS, queries_mask, documents_mask),
    "PyLate's for distillation": lambda queries_mask, documents_mask: colbert_kd_scores(
        QUERIES, DOCUMENTS.unsqueeze(1), queries_mask, None if documents_mask is None else documents_mask.unsqueeze(1)
    ),
}


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32, torch.bfloat16])
def test_zeros_and_ones_of_any_type_are_a_mask(call, dtype: torch.dtype) -> None:
    expected = call(QUERIES_MASK.bool(), DOCUMENTS_MASK.bool())
    assert torch.equal(call(QUERIES_MASK.to(dtype), DOCUMENTS_MASK.to(dtype)), expected)


@pytest.mark.parametrize("value", [0.5, -torch.inf, torch.nan, 2.0, -1.0])
def test_weights_and_additive_masks_are_refused(call, value: float) -> None:
    for name, masks in (("queries", [QUERIES_MASK.float(), None]), ("documents", [None, DOCUMENTS_MASK.float()])):
        mask = next(mask for mask in masks if mask is not None).clone()
        mask[1, 0] = value
        with pytest.raises(
            ValueError, match=rf"{name}_mask must hold only 0 \(masked\) and 1 \(active\), got {value:g}"
        ):
            call(*(mask if given is not None else None for given in masks))


def test_an_additive_mask_is_refused_though_it_holds_a_zero() -> None:
    additive = torch.zeros(2, 5).masked_fill(DOCUMENTS_MASK == 0, -torch.inf)
    with pytest.raises(ValueError, match="documents_mask must hold only 0 .* got -inf: .* not added to similarities"):
        maxsim(QUERIES, DOCUMENTS, None, additive)


def test_a_mask_of_integers_is_refused_by_its_value() -> None:
    with pytest.raises(ValueError, match=r"queries_mask must hold only 0 .* got 3"):
        maxsim(QUERIES, DOCUMENTS, QUERIES_MASK * 3)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("candidates", [False, True])
@pytest.mark.parametrize("masking", ["exclude", "zero"])
def test_masked_tokens_have_no_gradient_under_normalize(value: float, candidates: bool, masking: str) -> None:
    """Whose norm is not a number either."""
    queries, documents = QUERIES.clone(), DOCUMENTS.clone()
    queries[QUERIES_MASK == 0] = value
    documents[DOCUMENTS_MASK == 0] = value
    masks = QUERIES_MASK, DOCUMENTS_MASK
    if candidates:
        documents, masks = documents.unsqueeze(1), (masks[0], masks[1].unsqueeze(1))
    results = []
    for function in (maxsim, maxsim_reference):
        leaves = queries.clone().requires_grad_(), documents.clone().requires_grad_()
        scores = function(*leaves, *masks, normalize=True, masking=masking)
        results.append((scores.detach(), *torch.autograd.grad(scores.square().sum(), leaves)))
    torch.testing.assert_close(*results)
    assert (results[0][1][QUERIES_MASK == 0] == 0).all()
    assert (results[0][2].view(2, 5, 4)[DOCUMENTS_MASK == 0] == 0).all()


def test_masked_hidden_states_have_no_gradient_under_normalize() -> None:
    hidden = DOCUMENTS.clone()
    hidden[DOCUMENTS_MASK == 0] = torch.nan
    hidden.requires_grad_()
    scores = maxsim_from_hidden(QUERIES, hidden, torch.eye(4), None, DOCUMENTS_MASK)
    (gradient,) = torch.autograd.grad(scores.square().sum(), hidden)
    assert (gradient[DOCUMENTS_MASK == 0] == 0).all()
    assert gradient.isfinite().all()
