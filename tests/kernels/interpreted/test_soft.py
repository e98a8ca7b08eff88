"""The kernels of soft MaxSim, run by Triton's interpreter on the CPU, against the definition."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from pylate_flash.kernels.soft import plan as plans
from pylate_flash.ops import soft_maxsim, soft_maxsim_reference, soft_maxsim_varlen
from pylate_flash.ops.problem import Options, Tensors, problem_of
from tests.ops.cases import Case, cases, relative_error
from tests.ops.test_soft import (
    BETAS,
    check_gradients,
    soft_gradients,
    varlen_gradients,
    varlen_reference,
)
from tests.ops.test_varlen import packed

OPTIONS = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

kernel = functools.partial(soft_maxsim, implementation="triton")
varlen_kernel = functools.partial(soft_maxsim_varlen, implementation="triton")


@settings(max_examples=15, **OPTIONS)
@given(case=cases(dtypes=(torch.float16, torch.float32), max_batch=3), beta=BETAS)
def test_scores_and_gradients(case: Case, beta: float) -> None:
    with torch.no_grad():
        scores = kernel(*case.tensors, beta, **case.keywords)
    expected = soft_maxsim_reference(*case.doubled().tensors, beta, **case.keywords)
    torch.testing.assert_close(scores.double(), expected, rtol=2e-6, atol=2e-6)
    tolerance = 2e-5 if case.queries.dtype == torch.float32 else 1e-2
    expected = soft_gradients(soft_maxsim_reference, case.doubled(), beta)
    # The probabilities computed once for both gradients, and once for each.
    for budget in (1 << 20, 0):
        found = soft_gradients(functools.partial(kernel, max_scratch_bytes=budget), case, beta)
        check_gradients(found, expected, tolerance)


@settings(max_examples=12, **OPTIONS)
@given(case=packed(dtypes=(torch.float32,)), beta=BETAS)
def test_packed_tokens(case: tuple, beta: float) -> None:
    (queries, documents, *bounds), options = case
    scores = varlen_kernel(queries, documents, beta, *bounds, **options)
    expected = varlen_reference(queries.double(), documents.double(), beta, *bounds, **options)
    torch.testing.assert_close(scores.double(), expected, rtol=2e-6, atol=2e-6)
    found = varlen_gradients(varlen_kernel, case, beta)
    check_gradients(found, varlen_gradients(varlen_reference, case, beta, torch.float64), 2e-5)
