"""Operations against their definitions, over shapes, masks, options and values that hypothesis draws."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pylate_flash import maxsim
from pylate_flash.ops import maxsim_reference, products, xtr
from tests.ops.cases import relative_error
from tests.ops.drawn import OPERATIONS, Call


@pytest.mark.parametrize("name", OPERATIONS)
def test_scores_and_gradients_equal_the_definition(name: str) -> None:
    """Blocks hold one pair of tokens, some, or all."""

    @settings(max_examples=80)
    @given(call=OPERATIONS[name].draw(), budget=st.sampled_from([None, 150, 1]))
    def check(call: Call, budget: int | None) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if budget is not None:
                patch.setattr(products, "_BLOCK_CPU", budget)
                patch.setattr(xtr, "_BESIDE_MAXIMA", 1)
                patch.setattr(xtr, "_MAXIMA_AT_ONCE", 50)
            OPERATIONS[name].check(call)

    check()


@pytest.mark.parametrize("normalize", [False, True])
def test_same_tensor_as_queries_and_documents(normalize: bool) -> None:
    tokens = torch.randn(3, 4, 5, requires_grad=True)
    other = tokens.detach().double().requires_grad_()
    weight = torch.randn(3, 3)
    (actual,) = torch.autograd.grad((maxsim(tokens, tokens, normalize=normalize) * weight).sum(), tokens)
    (expected,) = torch.autograd.grad((maxsim_reference(other, other, normalize=normalize) * weight).sum(), other)
    assert relative_error(actual, expected) <= 1e-5


def test_memory_does_not_grow_with_the_similarity_tensor() -> None:
    """4 x 512 x 64 x 256 similarities are 128 MiB in float32; no allocation of the call may come near that."""
    queries, documents = torch.randn(4, 64, 8, requires_grad=True), torch.randn(512, 256, 8, requires_grad=True)
    with torch.profiler.profile(profile_memory=True) as profile:
        maxsim(queries, documents).sum().backward()
    assert max(event.cpu_memory_usage for event in profile.events()) < 24 << 20
