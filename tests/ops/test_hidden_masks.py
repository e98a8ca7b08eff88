"""Masked tokens of `maxsim_from_hidden`, masks of any type, and weights of query tokens."""

from __future__ import annotations

import pytest
import torch

from pylate_flash import maxsim_from_hidden, pack
from pylate_flash.ops import hidden_blocks as module
from pylate_flash.ops import maxsim_from_hidden_reference
from tests.ops.cases import gradient_tolerance, relative_error
from tests.ops.test_hidden import Problem, problem


def test_nan_in_an_active_token_makes_its_scores_nan() -> None:
    queries, hidden, weight, bias = problem().tensors.values()
    hidden[1, 3, 0] = torch.nan
    mask = torch.ones(5, 7, dtype=torch.bool)
    scores = maxsim_from_hidden(queries, hidden, weight, bias, documents_mask=mask)
    assert scores[:, 1].isnan().all()
    assert scores[:, [0, 2, 3, 4]].isfinite().all()
    mask[1, 3] = False
    assert maxsim_from_hidden(queries, hidden, weight, bias, documents_mask=mask).isfinite().all()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_masked_query_tokens_do_not_meet_the_tokens_of_packed_documents(value: float, normalize: bool) -> None:
    """Not even infinite ones: a query without active tokens scores 0, and what is masked has no gradient."""
    queries, hidden, weight, bias = problem().tensors.values()
    hidden[1, 3, 0] = value
    mask = torch.tensor([[True, False, True, True], [False] * 4, [False, True, False, False]])
    packed_hidden, bounds = pack(list(hidden))
    tensors = {"queries": queries, "hidden": packed_hidden, "weight": weight, "bias": bias}
    options = {"queries_mask": mask, "documents_cu_seqlens": bounds, "normalize": normalize}
    masked = Problem(tensors, options)
    expected = masked(maxsim_from_hidden_reference)
    assert (expected[1] == 0).all()
    for reduction in ("sum", "mean"):
        options["reduction"] = reduction
        torch.testing.assert_close(
            masked(maxsim_from_hidden), masked(maxsim_from_hidden_reference), equal_nan=True, rtol=1e-5, atol=1e-5
        )
    assert (masked.gradients(maxsim_from_hidden)["queries"][~mask] == 0).all()


@pytest.mark.parametrize("scratch", [module.SCRATCH_BYTES, 300])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32, torch.bfloat16])
def test_masks_of_any_type(dtype: torch.dtype, scratch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCRATCH_BYTES", scratch)
    masks = {"queries_mask": torch.rand(3, 4) > 0.4, "documents_mask": torch.rand(5, 7) > 0.6}
    masks["documents_mask"][2] = False
    for reduction in ("sum", "mean"):
        options = {"reduction": reduction, "empty_score": -3.0}
        expected = problem(**masks, **options)
        found = problem(**{name: mask.to(dtype) for name, mask in masks.items()}, **options)
        assert torch.equal(found(maxsim_from_hidden), expected(maxsim_from_hidden))
        assert (found(maxsim_from_hidden)[:, 2] == -3.0).all()
        gradients = expected.gradients(maxsim_from_hidden)
        for name, gradient in found.gradients(maxsim_from_hidden).items():
            assert torch.equal(gradient, gradients[name])


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("scratch", [module.SCRATCH_BYTES, 300])
@pytest.mark.parametrize("layout", ["in-batch", "candidates", "packed", "packed candidates"])
def test_weights_of_query_tokens(layout: str, scratch: int, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's best similarity counts as often as its weight says, and a weight of 0 masks it."""
    monkeypatch.setattr(module, "SCRATCH_BYTES", scratch)
    queries, hidden, weight, bias = problem().to(torch.float64).tensors.values()
    hidden = hidden.repeat(2, 1, 1)[:6]
    weights = torch.rand(3, 4, dtype=torch.float64)
    weights[1, 2], weights[2] = 0.0, 0.0
    options: dict = {"reduction": reduction, "empty_score": -3.0}
    if layout == "candidates":
        hidden = hidden.unflatten(0, (3, 2))
    elif layout.startswith("packed"):
        hidden, options["documents_cu_seqlens"] = pack([document[: 2 * i] for i, document in enumerate(hidden)])
        if "candidates" in layout:
            options["candidates_cu_seqlens"] = torch.tensor([0, 2, 3, 6])
    tensors = {"queries": queries, "hidden": hidden, "weight": weight, "bias": bias}
    # Queries of one token each, which are not divided by a number of tokens.
    single = options | {"reduction": "sum", "empty_score": 0.0}
    single.pop("candidates_cu_seqlens", None)
    expected = torch.zeros(())
    for token in range(4):
        alone = Problem(tensors | {"queries": queries[:, token : token + 1]}, single)(maxsim_from_hidden_reference)
        expected = expected + weights[:, token : token + 1] * alone
    if reduction == "mean":
        expected = expected / (weights != 0).sum(dim=1, keepdim=True).clamp(min=1)
    if layout.startswith("packed"):
        expected[:, 0] = -3.0
    if "candidates_cu_seqlens" in options:
        expected = torch.cat([expected[0, :2], expected[1, 2:3], expected[2, 3:]])
    weighted = Problem(tensors, options | {"queries_mask": weights})
    torch.testing.assert_close(weighted(maxsim_from_hidden_reference), expected)
    torch.testing.assert_close(weighted(maxsim_from_hidden), expected)
    gradients = weighted.gradients(maxsim_from_hidden_reference)
    for name, gradient in weighted.gradients(maxsim_from_hidden).items():
        assert relative_error(gradient, gradients[name]) <= gradient_tolerance(gradient.dtype), name
