"""The kernel of the k best scores, run by Triton's interpreter, against a stable sort."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pylate_flash.kernels import tables
from pylate_flash.kernels.best import k_best

VALUES = torch.tensor([1.0, -1.0, 0.0, -0.0, 3e38, -3e38, 1e-45, torch.inf, -torch.inf, torch.nan])


@given(
    rows=st.integers(1, 3),
    columns=st.integers(1, 200),
    k=st.integers(1, 8),
    values=st.integers(1, len(VALUES)),
    apart=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_the_best_are_those_of_a_stable_sort(
    rows: int, columns: int, k: int, values: int, apart: int, seed: int
) -> None:
    """One block, several blocks, and several blocks whose best scores fill several blocks again."""
    chosen = torch.randint(values, (rows, columns + apart), generator=torch.Generator().manual_seed(seed))
    scores = VALUES[chosen][:, :columns]
    k = min(k, columns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "BEST_BLOCK", 16)
        patch.setattr(tables, "BEST_LEAST_BLOCK", 4)
        patch.setattr(tables, "BEST_PER_WARP", 4)
        best, result = k_best(scores, k)
    expected, order = torch.sort(scores, dim=1, descending=True, stable=True)
    torch.testing.assert_close(best, expected[:, :k], rtol=0.0, atol=0.0, equal_nan=True)
    assert torch.equal(result, order[:, :k])


def test_columns_of_any_stride_and_none_at_all() -> None:
    scores = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(k_best(scores.T, 2)[1], torch.sort(scores.T, dim=1, descending=True).indices[:, :2])
    assert [output.shape for output in k_best(scores[:0], 2)] == [(0, 2), (0, 2)]
    assert [output.shape for output in k_best(scores[:, :0], 0)] == [(7, 0), (7, 0)]
