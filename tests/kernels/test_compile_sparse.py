"""The kernel of chosen query tokens compiles for compute capability 8.0, 9.0, 10.0 and 12.0, as it is launched."""

from __future__ import annotations

import os

import pytest
import torch

from pylate_flash.kernels import forward
from pylate_flash.kernels.forward import single, sparse_forward
from pylate_flash.problem import Options, Tensors, problem_of
from tests.kernels.recorder import check

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

# Type, elements of an embedding, tokens chosen, masks and options, winners, and capability.
CASES = [
    (torch.bfloat16, 128, 16, False, False, 80),
    (torch.bfloat16, 128, 128, False, True, 90),
    (torch.float16, 96, 40, True, True, 100),
    (torch.float32, 128, 32, True, True, 90),
    (torch.bfloat16, 768, 32, True, True, 120),
]


@pytest.mark.parametrize(
    ("dtype", "size", "n_chosen", "masked", "with_winners", "capability"), CASES, indirect=["capability"]
)
def test_compiles(
    dtype: torch.dtype, size: int, n_chosen: int, masked: bool, with_winners: bool, capability: int, monkeypatch
) -> None:
    monkeypatch.setattr(forward, "inverse_norms", lambda embeddings: torch.ones(embeddings.shape[:-1]))
    monkeypatch.setattr(forward, "active_tokens", lambda mask: (mask.int(), torch.zeros(6, dtype=torch.int32)))
    queries, documents = torch.zeros(1, 64, size, dtype=dtype), torch.zeros(3, 300, size, dtype=dtype)
    weights, mask = (torch.ones(1, 64), torch.ones(3, 300, dtype=torch.bool)) if masked else (None, None)
    tensors = Tensors(queries, documents, weights, mask)
    problem = problem_of(tensors, Options(normalize=masked, masking="zero" if masked else "exclude"), with_winners)
    chosen = torch.zeros(1, 3, n_chosen, dtype=torch.int64)
    winners = torch.zeros(problem.winners_shape, dtype=problem.winners_dtype) if with_winners else None
    check(single, "_single", lambda: sparse_forward(problem, tensors, chosen, winners), capability, monkeypatch)


@pytest.mark.parametrize("capability", [80, 90], indirect=True)
def test_packed_documents(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = Tensors(
        torch.zeros(2, 64, 128, dtype=torch.bfloat16), torch.zeros(300, 128, dtype=torch.bfloat16), None, None, None,
        torch.tensor([0, 40, 300]),
    )  # fmt: skip
    problem = problem_of(tensors, Options(0, 260), False)
    chosen = torch.zeros(2, 2, 16, dtype=torch.int32)
    check(single, "_single", lambda: sparse_forward(problem, tensors, chosen, None), capability, monkeypatch)
