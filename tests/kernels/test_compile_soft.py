"""Every kernel of soft MaxSim compiles for compute capability 8.0, 9.0, 10.0 and 12.0, as it is launched."""

from __future__ import annotations

import os
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.tools.disasm import get_sass

from pylate_flash.kernels import backward, forward, soft, tables
from pylate_flash.kernels.forward import common, hopper, stacked
from pylate_flash.kernels.plan import soft_forward_plan
from pylate_flash.kernels.versions import triton_version
from pylate_flash.problem import Options, Tensors, problem_of
from tests.kernels.recorder import check_launches

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

KERNELS = {
    stacked: ("_stacked",),
    common: ("_add_sums",),
    hopper: ("_hopper",),
    soft.kernels: ("documents", "queries"),
    backward.common: ("_finish",),
}
TWICE, ONCE = {"documents", "queries"}, {"documents", "_finish"}


def check_kernels(
    tensors: Tensors, options: Options, names: set[str], backwards: dict[int, set[str]], capability: int, monkeypatch
) -> None:
    """Compile the forward, and for each budget of partial sums the kernels of the backward, which must be these."""
    for module in (forward, soft):
        monkeypatch.setattr(module, "inverse_norms", lambda embeddings: torch.ones(embeddings.shape[:-1]))
        monkeypatch.setattr(module, "active_tokens", lambda mask: (mask.int(), torch.zeros(6, dtype=torch.int32)))
    problem, beta = problem_of(tensors, options), torch.ones(())
    lse, grad = torch.zeros(problem.winners_shape), torch.zeros(problem.scores_shape)
    check_launches(KERNELS, lambda: forward.soft_forward(problem, tensors, beta, True), names, capability, monkeypatch)
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
    names = {"_hopper" if capability == 90 else "_stacked"}
    check_kernels(tensors, Options(), names, {0: TWICE, 1 << 40: ONCE}, capability, monkeypatch)


@pytest.mark.parametrize("capability", [80], indirect=True)
def test_float32(capability: int, monkeypatch) -> None:
    tensors = Tensors(*embeddings(torch.float32, (8, 64, 48), (3, 300, 48)))
    check_kernels(tensors, Options(), {"_stacked"}, {0: TWICE}, capability, monkeypatch)


@pytest.mark.parametrize("capability", [90], indirect=True)
def test_masks_weights_and_long_embeddings(capability: int, monkeypatch) -> None:
    weights, mask = torch.ones(8, 64), torch.ones(3, 300, dtype=torch.bool)
    tensors = Tensors(*embeddings(torch.bfloat16, (8, 64, 320), (3, 300, 320)), weights, mask)
    options = Options(normalize=True, masking="zero")
    check_kernels(tensors, options, {"_hopper"}, {0: TWICE | {"_finish"}}, capability, monkeypatch)


@pytest.mark.parametrize("capability", [90], indirect=True)
def test_packed_candidates(capability: int, monkeypatch) -> None:
    bounds = torch.tensor([0, 40, 300]), torch.tensor([0, 1, 2])
    tensors = Tensors(*embeddings(torch.float16, (2, 64, 96), (300, 96)), None, None, None, *bounds)
    options = Options(0, 260, 1, normalize=True)
    check_kernels(tensors, options, {"_stacked"}, {1 << 40: TWICE}, capability, monkeypatch)


def compiled_forward(tensors: Tensors, options: Options, lse: bool, monkeypatch) -> Any:
    """The Hopper kernel as this call launches it."""
    monkeypatch.setattr(forward, "inverse_norms", lambda embeddings: torch.ones(embeddings.shape[:-1]))
    monkeypatch.setattr(forward, "active_tokens", lambda mask: (mask.int(), torch.zeros(6, dtype=torch.int32)))
    monkeypatch.setattr(forward, "add_sums", lambda problem, plan, sums: sums)
    launch = partial(forward.soft_forward, problem_of(tensors, options), tensors, torch.ones(()), lse)
    return check_launches({hopper: ("_hopper",)}, launch, {"_hopper"}, 90, monkeypatch)["_hopper"]


@pytest.mark.parametrize("capability", [90], indirect=True)
def test_hopper_takes_one_exponential_of_a_similarity_and_spills_nothing(capability: int, monkeypatch) -> None:
    tensors = Tensors(*embeddings(torch.bfloat16, (8, 64, 128), (3, 1024, 128)))
    compiled = compiled_forward(tensors, Options(), True, monkeypatch)
    products = re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, (\S)", compiled.asm["ptx"])
    assert set(products) == {"{"}, "the first operand must be a list of registers"
    sass = get_sass(compiled.asm["cubin"])
    # Those of Triton 3.9 spill what a document needs when it ends, of the kernel that finds winners too.
    assert "LDL" not in sass or triton_version() > (3, 6)
    # In each of four parts, a thread has 32 similarities of a tile, rescales two sums by it, and two of a document.
    assert sass.count("MUFU.EX2") == 4 * (32 + 2 + 2)


@pytest.mark.parametrize("capability", [90], indirect=True)
@pytest.mark.parametrize(
    ("size", "length", "masked", "tail"),
    [(128, 128, False, None), (128, 77, False, 16), (64, 90, False, 32), (96, 300, False, 64), (256, 64, True, 64)],
)
def test_hopper_multiplies_what_is_left_after_whole_tiles_by_itself(
    size: int, length: int, masked: bool, tail: int | None, capability: int, monkeypatch
) -> None:
    """A token that is repeated to fill a tile would count twice."""
    tensors = Tensors(*embeddings(torch.float16, (12, 33, size), (3, length, size)), torch.ones(12, 33))
    if masked:
        tensors = tensors._replace(documents_mask=torch.ones(3, length, dtype=torch.bool))
    ptx = compiled_forward(tensors, Options(normalize=True, masking="zero"), True, monkeypatch).asm["ptx"]
    products = size // 16 * (2 if size > 128 else 4)
    expected = {64: products}
    if tail is not None:
        expected[tail] = expected.get(tail, 0) + products
    found = [ptx.count(f"m64n{columns}k16.f32.f16.f16") for columns in (16, 32, 64)]
    assert found == [expected.get(columns, 0) for columns in (16, 32, 64)]


@pytest.mark.parametrize("capability", [90], indirect=True)
def test_hopper_packed_few_rows_without_lse(capability: int, monkeypatch) -> None:
    bounds = torch.tensor([0, 40, 40, 300])
    tensors = Tensors(*embeddings(torch.bfloat16, (2, 40, 128), (300, 128)), documents_cu_seqlens=bounds)
    compiled_forward(tensors, Options(0, 260, normalize=True, empty_score=-1.0), False, monkeypatch)


def test_what_the_hopper_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "architecture", lambda device: (9, 132))

    def plan_of(queries: tuple[int, ...], documents: tuple[int, ...], dtype: torch.dtype = torch.bfloat16):
        return soft_forward_plan(problem_of(Tensors(*embeddings(dtype, queries, documents)), Options()))

    for plan in (
        plan_of((16, 32, 128), (40, 180, 128)),
        plan_of((1, 1000, 96), (40, 180, 96), torch.float16),
        plan_of((2, 32, 40), (40, 7, 40)),
        plan_of((4, 150, 320), (4, 5, 180, 320)),
    ):
        assert plan.kernel == "hopper"
        group = plan.padded // plan.n_sums
        assert plan.config.group == group
        assert group <= plan.tile.rows // plan.tile.parts, "a sum lies within one part"
    for plan in (
        plan_of((16, 32, 128), (40, 180, 128), torch.float32),
        plan_of((1, 32, 128), (40, 180, 128)),
        plan_of((16, 32, 128), (16, 5, 180, 128)),
        plan_of((16, 32, 44), (40, 7, 44)),
        plan_of((16, 32, 512), (40, 180, 512)),
    ):
        assert plan.kernel == "stacked"
    bounds = {"documents_cu_seqlens": torch.tensor([0, 40, 300]), "candidates_cu_seqlens": torch.tensor([0, 1, 2])}
    tensors = Tensors(*embeddings(torch.float16, (2, 64, 96), (300, 96)), **bounds)
    assert soft_forward_plan(problem_of(tensors, Options(0, 260, 1))).kernel == "stacked"
    for major in (8, 10):
        monkeypatch.setattr(tables, "architecture", lambda device, major=major: (major, 132))
        assert plan_of((16, 32, 128), (40, 180, 128)).kernel == "stacked"
