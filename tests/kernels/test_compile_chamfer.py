"""The kernels of Chamfer distances compile for compute capability 8.0, 9.0 and 12.0, as they are launched."""

from __future__ import annotations

import os

import pytest
import torch

from pylate_flash.kernels import chamfer, rows
from pylate_flash.kernels.plan_operations import meeting_plan
from pylate_flash.ops import kernel_calls
from pylate_flash.ops.chamfer import ChamferOptions, Sets, problem_of_sets
from tests.kernels.recorder import check_launches

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

KERNELS = {rows: ("_norms",), chamfer: ("_meet", "_settle", "_gradient")}


def check_kernels(sets: Sets, squared: bool, capability: int, monkeypatch) -> None:
    """Compile the forward, and the backward but for what lists points, which is that of MaxSim."""
    monkeypatch.setattr(
        kernel_calls, "active_tokens", lambda mask: (mask.int(), torch.zeros(mask.shape[0] * 2, dtype=torch.int32))
    )
    lengths = [points.shape[-2] for points in sets[:2]]
    problem = problem_of_sets(sets, ChamferOptions(*lengths, "sqeuclidean", "mean", 0.0, "auto"))
    halves = {"_norms"} if squared and not meeting_plan(problem).direct else set()
    check_launches(
        KERNELS, lambda: kernel_calls.chamfer_nearest(problem, sets, squared), {"_meet", "_settle"} | halves,
        capability, monkeypatch,
    )  # fmt: skip
    empty = torch.zeros(0, dtype=torch.int32)
    monkeypatch.setattr(chamfer, "rows_by_token", lambda *arguments: (empty, empty))
    winners = tuple(torch.zeros(problem.n_queries, length, dtype=torch.int32) for length in lengths)
    weights = torch.zeros(problem.n_queries), torch.zeros(problem.n_queries)
    check_launches(
        KERNELS, lambda: kernel_calls.chamfer_gradients(problem, sets, winners, weights, (True, True), squared),
        {"_gradient"}, capability, monkeypatch,
    )  # fmt: skip


@pytest.mark.parametrize("capability", [80, 90], indirect=True)
@pytest.mark.parametrize(
    ("size", "dtype"), [(3, torch.float32), (64, torch.bfloat16), (64, torch.float32)], ids=lambda value: str(value)
)
def test_points_of_the_bench(size: int, dtype: torch.dtype, capability: int, monkeypatch) -> None:
    sets = Sets(torch.zeros(16, 4096, size, dtype=dtype), torch.zeros(16, 4096, size, dtype=dtype))
    check_kernels(sets, True, capability, monkeypatch)


@pytest.mark.parametrize("capability", [120], indirect=True)
def test_on_another_architecture(capability: int, monkeypatch) -> None:
    sets = Sets(torch.zeros(16, 4096, 64, dtype=torch.bfloat16), torch.zeros(16, 4096, 64, dtype=torch.bfloat16))
    check_kernels(sets, True, capability, monkeypatch)


@pytest.mark.parametrize("capability", [80], indirect=True)
@pytest.mark.parametrize(("size", "dtype"), [(200, torch.float16), (72, torch.float32)])
def test_masks_and_other_sizes(size: int, dtype: torch.dtype, capability: int, monkeypatch) -> None:
    masks = torch.ones(3, 100, dtype=torch.bool), torch.ones(3, 40, dtype=torch.bool)
    sets = Sets(torch.zeros(3, 100, size, dtype=dtype), torch.zeros(3, 40, size, dtype=dtype), *masks)
    check_kernels(sets, size == 200, capability, monkeypatch)


@pytest.mark.parametrize("capability", [90], indirect=True)
def test_packed(capability: int, monkeypatch) -> None:
    bounds = torch.tensor([0, 100, 700], dtype=torch.int32)
    points = torch.zeros(700, 512, dtype=torch.bfloat16)
    sets = Sets(points, points, None, None, bounds, bounds)
    check_kernels(sets, True, capability, monkeypatch)


def test_sets_are_shared_out_where_there_are_few(capability: int) -> None:
    """As many programs as fill the GPU, and every point of y in one share."""
    for n, length in ((1, 4096), (1, 100_000), (16, 4096), (300, 50)):
        x, y = torch.zeros(n, length, 3, device="meta"), torch.zeros(n, length + 7, 3, device="meta")
        problem = problem_of_sets(Sets(x, y), ChamferOptions(0, 0, "sqeuclidean", "mean", 0.0, "auto"))
        plan = meeting_plan(problem)
        assert (plan.n_shares - 1) * plan.share < length + 7 <= plan.n_shares * plan.share
        assert plan.share % plan.tile.columns == 0
        programs = n * plan.row_blocks * plan.n_shares
        assert programs >= 132 or plan.share == plan.tile.columns
