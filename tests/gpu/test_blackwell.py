"""The Blackwell kernel against the definition in float64, on a Blackwell GPU: it has not been run yet."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blackwell import blackwell_forward
from pylate_flash.ops import maxsim_reference, pack
from pylate_flash.ops.varlen import maxsim_varlen_reference
from pylate_flash.problem import Options, Tensors, problem_of
from tests.gpu.tools import CAPABILITY, DTYPES, on_gpu, unit
from tests.ops.cases import Case, cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(CAPABILITY[0] != 10, reason="needs a GPU of compute capability 10.0")]
SIZES = st.sampled_from([8, 48, 128])


def kernel(queries, documents, queries_mask=None, documents_mask=None, **options) -> torch.Tensor:
    # Documents are copied 16 bytes at a time.
    tensors = Tensors(queries.contiguous(), documents.contiguous(), queries_mask, documents_mask)
    return blackwell_forward(problem_of(tensors, Options(**options)), tensors)[0]


@settings(max_examples=40)
@given(case=cases(dtypes=DTYPES[:2], max_batch=7, max_length=200, sizes=SIZES))
def test_scores(case: Case) -> None:
    case = on_gpu(replace(case, options=case.options | {"reduction": "sum"}))
    scores = kernel(*case.tensors, **case.keywords)
    expected = maxsim_reference(*case.doubled().tensors, **case.keywords)
    torch.testing.assert_close(scores.double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("size", [128, 256])
def test_runs_of_many_documents_bitwise(size: int) -> None:
    """Barriers and buffers wrap around many times, and the result is the same every time."""
    queries, documents = unit(40, 32, size).bfloat16(), unit(3000, 130, size).bfloat16()
    first = kernel(queries, documents)
    for start in range(0, 3000, 500):
        expected = maxsim_reference(queries.double(), documents[start : start + 500].double())
        torch.testing.assert_close(first[:, start : start + 500].double(), expected, rtol=2e-6, atol=2e-6)
    assert all(torch.equal(kernel(queries, documents), first) for _ in range(20))


def test_packed_documents() -> None:
    queries = unit(20, 32, 128).bfloat16()
    documents = [unit(1, length, 128)[0].bfloat16() for length in (1, 0, 200, 64, 128, 129, 30)]
    tokens, bounds = pack(documents)
    packed = Tensors(queries, tokens, documents_cu_seqlens=bounds)
    scores, _ = blackwell_forward(problem_of(packed, Options(max_document_length=200)), packed)
    query_bounds = torch.arange(0, 20 * 32 + 1, 32, dtype=torch.int32, device="cuda")
    expected = maxsim_varlen_reference(queries.flatten(0, 1).double(), tokens.double(), query_bounds, bounds)
    torch.testing.assert_close(scores.double(), expected, rtol=2e-6, atol=2e-6)
