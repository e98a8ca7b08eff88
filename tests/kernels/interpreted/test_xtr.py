"""XTR's kernels in the interpreter: thresholds, ties and documents retrieved as a whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from pylate_flash.ops import xtr_scores
from tests.ops.cases import Case
from tests.ops.xtr_cases import check_scores_and_gradients, xtr_cases

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")


def kernel(*tensors: torch.Tensor, **options) -> torch.Tensor:
    return xtr_scores(*tensors, **options, implementation="triton")


@settings(max_examples=10, deadline=None, derandomize=True)
@given(case=xtr_cases(dtypes=(torch.float32, torch.bfloat16), max_batch=3, max_length=4))
def test_scores_and_gradients_equal_the_definition(case: Case) -> None:
    check_scores_and_gradients(kernel, case)
