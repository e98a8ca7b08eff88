"""Results of every operation by kernels, run by Triton's interpreter, can be changed in place."""

from __future__ import annotations

import pytest
import torch

from tests.ops.operations import check_changed_in_place, operations

EVERY = operations(implementation="triton")


@pytest.mark.parametrize("name", EVERY)
def test_results_can_be_changed_in_place(name: str) -> None:
    check_changed_in_place(EVERY[name], torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)))
