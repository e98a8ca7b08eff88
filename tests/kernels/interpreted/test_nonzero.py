"""The kernel that detects rows of zeros, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from pylate_flash.kernels.rows import nonzero_rows

MINUS_ZERO, NAN = -0.0, float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "size"), [((70,), 16), ((3, 5), 130), ((2, 3, 33), 7)])
def test_rows_with_an_element_other_than_zero(shape: tuple[int, ...], size: int, dtype: torch.dtype) -> None:
    wide = torch.zeros(*shape, size + 3, dtype=dtype)
    embeddings = wide[..., :size]
    # Elements past the end of a row do not count.
    wide[..., size:] = 1
    rows = wide.view(-1, size + 3)[:, :size]
    rows[1, -1], rows[3, 0], rows[4], rows[5, size // 2] = 1e-7, NAN, MINUS_ZERO, float("-inf")
    result, nothing = nonzero_rows(embeddings)
    assert nothing is None
    assert result.dtype == torch.bool
    assert torch.equal(result, embeddings.any(dim=-1))
    assert result.flatten().nonzero().flatten().tolist() == [1, 3, 5]
    # Two batches have separate programs, whichever has more of them.
    other = torch.zeros(9, 40, size + 1, dtype=dtype)[..., :size].transpose(0, 1)
    other[7, 8, 0] = other[39, 0, -1] = 1
    for first, second in ((embeddings, other), (other, embeddings), (embeddings, embeddings)):
        first_result, second_result = nonzero_rows(first, second)
        assert torch.equal(first_result, first.any(dim=-1))
        assert torch.equal(second_result, second.any(dim=-1))
