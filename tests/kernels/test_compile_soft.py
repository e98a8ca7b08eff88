"""Every kernel of soft MaxSim compiles for compute capability 8.0, 9.0, 10.0 and 12.0, as it is launched."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from pylate_flash.kernels import backward, soft
from pylate_flash.kernels.soft import documents, forward, queries
from pylate_flash.ops.problem import Options, Tensors, problem_of
from tests.kernels.recorder import check_launches

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

KERNELS = {
    forward: ("_forward",),
    documents: ("_documents",),
    queries: ("_queries",),
    backward.common: ("_finish",),
}
FORWARD, TWICE, ONCE = {"_forward"}, {"_documents", "_queries"}, {"_documents", "_finish"}


def check_kernels(
    tensors: Tensors, options: Options, backwards: dict[int, set[str]], capability: int, monkeypatch
) -> None:
    """Compile the forward, and for each budget of partial sums the kernels of the backward, which must be these."""
    for module in (forward, soft.backward):
        monkeypatch.setattr(module, "inverse_norms", lambda embeddings: torch.ones(embeddings.shape[:-1]))
        monkeypatch.setattr(module, "active_tokens", lambda mask: (mask.int(), torch.zeros(6, dtype=torch.int32)))
    problem, beta = problem_of(tensors, options), torch.ones(())
    lse, grad = torch.zeros(problem.winners_shape), torch.zeros(problem.scores_shape)
    check_launches(KERNELS, lambda: soft.soft_forward(problem, tensors, beta, True), FORWARD, capability, monkeypatch)
    for budget, names in backwards.items():
        check_launches(
            KERNELS,
            lambda b=budget: soft.soft_backward(problem, tensors, beta, grad, lse, (True, True, True), b),
            names,
            capability,
            monkeypatch,
        )


def embeddings(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.zeros(*shape, dtype=dtype) for shape in shapes]


def test_padded(capability: int, monkeypatch) -> None:
    tensors = Tensors(*embeddings(torch.bfloat16, (8, 64, 128), (3, 300, 128)))
    check_kernels(tensors, Options(), {0: TWICE, 1 << 40: ONCE}, capability, monkeypatch)


@pytest.mark.parametrize("capability", [80], indirect=True)
def test_float32(capability: int, monkeypatch) -> None:
    tensors = Tensors(*embeddings(torch.float32, (8, 64, 48), (3, 300, 48)))
    check_kernels(tensors, Options(), {0: TWICE}, capability, monkeypatch)


@pytest.mark.parametrize("capability", [90], indirect=True)
def test_masks_weights_and_long_embeddings(capability: int, monkeypatch) -> None:
    weights, mask = torch.ones(8, 64), torch.ones(3, 300, dtype=torch.bool)
    tensors = Tensors(*embeddings(torch.bfloat16, (8, 64, 320), (3, 300, 320)), weights, mask)
    options = Options(normalize=True, masking="zero")
    check_kernels(tensors, options, {0: TWICE | {"_finish"}}, capability, monkeypatch)


@pytest.mark.parametrize("capability", [90], indirect=True)
def test_packed_candidates(capability: int, monkeypatch) -> None:
    bounds = torch.tensor([0, 40, 300]), torch.tensor([0, 1, 2])
    tensors = Tensors(*embeddings(torch.float16, (2, 64, 96), (300, 96)), None, None, None, *bounds)
    check_kernels(tensors, Options(0, 260, 1, normalize=True), {1 << 40: TWICE}, capability, monkeypatch)
