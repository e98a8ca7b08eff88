"""Results of every operation can be changed in place."""

from __future__ import annotations

import pytest
import torch

from tests.ops.operations import check_changed_in_place, operations

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("implementation", ["triton", "blocked"])
@pytest.mark.parametrize("name", operations())
def test_results_can_be_changed_in_place(name: str, implementation: str) -> None:
    queries = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)).cuda()
    check_changed_in_place(operations("cuda", implementation)[name], queries)
