"""Which values masks may hold; masked tokens do not affect scores or gradients."""

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
from tests.ops.operations import calls, value_and_gradients

QUERIES, DOCUMENTS = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
QUERIES_MASK = torch.tensor([[1, 1, 0], [1, 0, 1]])
DOCUMENTS_MASK = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 0, 0]])


def pylate_scores() -> ModuleType:
    """The functions under PyLate's names, which need PyLate."""
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
MASKED = calls(masked=True)
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


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("candidates", [False, True])
@pytest.mark.parametrize("masking", ["exclude", "zero"])
def test_masked_tokens_have_no_gradient_under_normalize(value: float, candidates: bool, masking: str) -> None:
    """Even where their norm is not a number."""
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


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", [name for name, call in MASKED.items() if any("mask" in key for key in call.options)])
def test_nothing_of_masked_tokens_reaches_a_result_or_a_gradient(name: str, value: float) -> None:
    """Except the gradient of a layer's weight, which all hidden states enter, as in torch."""
    call = MASKED[name]
    masks = {key: mask.clone() for key, mask in call.options.items() if "mask" in key}
    for key in masks.keys() & {"queries_mask", "x_mask"}:
        masks[key][0, 1] = 0
    call, spoiled = call._replace(options=call.options | masks), [tensor.clone() for tensor in call.tensors]
    masked = [(int(key in ("documents_mask", "y_mask")), mask == 0) for key, mask in masks.items()]
    for index, off in masked:
        spoiled[index][off] = value
    clean, result = [value_and_gradients(call, tensors) for tensors in (call.tensors, spoiled)]
    torch.testing.assert_close(*[results[: 3 if "hidden" in name else None] for results in (result, clean)])
    assert masked
    assert not any(result[1 + index][off].any() for index, off in masked)


@pytest.mark.parametrize("empty_score", [0.0, -1.0])
def test_a_query_that_is_not_a_number_leaves_an_empty_document_its_score(empty_score: float) -> None:
    queries, mask = QUERIES.clone(), DOCUMENTS_MASK.clone()
    queries[0, 0, 0] = torch.nan
    mask[0] = 0
    for function in (maxsim, maxsim_reference):
        scores = function(queries, DOCUMENTS, documents_mask=mask, normalize=True, empty_score=empty_score)
        assert (scores[:, 0] == empty_score).all()
        assert scores[0, 1].isnan()
