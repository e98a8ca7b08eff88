"""Tokens selected by a mask, on a GPU: the right ones, without a synchronization."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("pylate")

from pylate_flash.training.mini_batches import kept_tokens, unpack_padded
from tests.gpu.tools import no_waiting, unit

pytestmark = pytest.mark.gpu


# The last case has more tokens than one block of a scan.
@pytest.mark.parametrize(("texts", "length"), [(1, 1), (5, 9), (64, 180), (3000, 180)])
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_kept_tokens_are_those_of_the_mask_in_order(texts: int, length: int, share: float) -> None:
    generator = torch.Generator("cuda").manual_seed(texts)
    mask = torch.rand(texts, length, device="cuda", generator=generator) < share
    values = unit(texts, length, 32, dtype=torch.bfloat16)
    expected, total = values[mask], int(mask.sum())
    kept_tokens(values, mask, total)
    with no_waiting():
        actual = kept_tokens(values, mask, total)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(("texts", "length"), [(5, 9), (1000, 180)])
def test_packed_tokens_are_padded_again(texts: int, length: int) -> None:
    lengths = torch.randint(1, length + 1, (texts,), device="cuda")
    mask = torch.arange(length, device="cuda") < lengths.unsqueeze(1)
    values = unit(texts, length, 16)
    packed = values[mask]
    unpack_padded(packed, lengths, length)
    with no_waiting():
        padded, result = unpack_padded(packed, lengths, length)
    assert torch.equal(result, mask)
    assert torch.equal(padded, values * mask.unsqueeze(-1))
