"""`maxsim_from_hidden` through the interpreted kernels: blocks of documents, which are views of what they take."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from pylate_flash.ops import hidden as module
from pylate_flash.ops import maxsim_from_hidden, maxsim_from_hidden_reference
from tests.ops.cases import relative_error
from tests.ops.test_hidden import Problem

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")


@pytest.mark.parametrize("scratch", [module.SCRATCH_BYTES, 2048])
@pytest.mark.parametrize("layout", ["in-batch", "candidates", "packed", "packed candidates"])
def test_blocks(layout: str, scratch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCRATCH_BYTES", scratch)
    torch.manual_seed(0)
    shape = {"in-batch": (6, 10, 12), "candidates": (3, 2, 10, 12)}.get(layout, (48, 12))
    tensors = {"queries": torch.randn(3, 5, 16), "hidden": torch.randn(shape), "weight": torch.randn(16, 12)}
    tensors["bias"] = torch.randn(16) / 4
    options: dict = {"queries_mask": torch.rand(3, 5) > 0.3}
    if layout.startswith("packed"):
        options["documents_cu_seqlens"] = torch.tensor([0, 10, 13, 13, 30, 40, 48])
        if "candidates" in layout:
            options["candidates_cu_seqlens"] = torch.tensor([0, 1, 4, 6])
    else:
        options["documents_mask"] = torch.rand(shape[:-1]) > 0.3
    problem = Problem(tensors, options)
    kernel = partial(maxsim_from_hidden, implementation="triton")
    expected = problem.to(torch.float64)
    torch.testing.assert_close(
        problem(kernel).double(), expected(maxsim_from_hidden_reference).double(), rtol=1e-5, atol=1e-5
    )
    gradients = expected.gradients(maxsim_from_hidden_reference)
    for name, found in problem.gradients(kernel).items():
        assert relative_error(found, gradients[name]) <= 1e-5, name


def test_masked_query_tokens_do_not_meet_the_tokens_of_packed_documents() -> None:
    torch.manual_seed(0)
    tensors = {"queries": torch.randn(2, 5, 16), "hidden": torch.randn(20, 12), "weight": torch.randn(16, 12)}
    tensors["hidden"][3, 0] = torch.nan
    mask = torch.tensor([[True, False, True, True, False], [False] * 5])
    problem = Problem(tensors, {"queries_mask": mask, "documents_cu_seqlens": torch.tensor([0, 8, 20])})
    scores = problem(partial(maxsim_from_hidden, implementation="triton"))
    torch.testing.assert_close(scores, problem(maxsim_from_hidden_reference), equal_nan=True, rtol=1e-5, atol=1e-5)
    assert (scores[1] == 0).all()
