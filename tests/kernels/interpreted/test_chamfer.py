"""Chamfer kernels in the interpreter: tiles, shares, masks, packed sets, ties and NaN."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from pylate_flash import chamfer
from pylate_flash.kernels import plan_operations, tables
from pylate_flash.kernels.tiles import Tile
from pylate_flash.ops.chamfer import ChamferOptions, Sets, compute_chamfer, problem_of_sets
from tests.ops.chamfer_cases import (
    METRICS,
    chamfer_cases,
    check_gradients,
    check_packed,
    check_scores_and_gradients,
    gradients,
)

TYPES = (torch.float32, torch.float16)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, so that small sets have several of them."""
    for name, columns in (("DIRECT", 64), ("DIRECT_LONG", 64), ("HALF", 32), ("HALF_LONG", 32), ("FLOAT", 32)):
        monkeypatch.setattr(tables, "CHAMFER_" + name, Tile(16, columns, 4, 1))


@settings(max_examples=6)
@given(case=chamfer_cases(dtypes=TYPES, max_batch=2, max_length=6))
def test_scores_and_gradients_equal_the_definition(case: tuple) -> None:
    check_scores_and_gradients(*case, "triton")


@settings(max_examples=2)
@given(case=chamfer_cases(dtypes=TYPES, max_batch=2, max_length=6))
def test_packed_sets_are_masked_ones(case: tuple) -> None:
    check_packed(*case, "triton")


def argmax(sets: Sets, metric: str, implementation: str) -> tuple[torch.Tensor, ...]:
    return compute_chamfer(sets, ChamferOptions(0, 0, metric, "mean", 0.0, implementation))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("size", [3, 10, 300])
def test_the_same_points_win_in_all_tiles(size: int, metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers, many of them equal; several programs share the points of y."""
    monkeypatch.setattr(tables, "architecture", lambda device: (8, 12))
    generator = torch.Generator().manual_seed(size)
    x, y = (torch.randint(-1, 2, (2, length, size), generator=generator).float() for length in (35, 150))
    x[0, 20:], y[0, 100:] = x[0, :15].clone(), y[0, :50].clone()
    mask = torch.rand(2, 150, generator=generator) > 0.3
    mask[1, :70] = False
    sets = Sets(x, y, None, mask)
    problem = problem_of_sets(sets, ChamferOptions(0, 0, metric, "mean", 0.0, "triton"))
    chosen_plan = plan_operations.meeting_plan(problem)
    assert chosen_plan.n_shares > 1
    assert chosen_plan.row_blocks == 3
    assert chosen_plan.split is (size == 300)
    scores, *actual = argmax(sets, metric, "triton")
    expected, *expected_argmax = argmax(sets, metric, "blocked")
    torch.testing.assert_close(scores, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(actual[0], expected_argmax[0])
    assert torch.equal(actual[1], expected_argmax[1])


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("size", [3, 10])
def test_nan_wins_where_it_is(size: int, metric: str) -> None:
    """In tiles where it is in neither the first row nor the first column; the first of several NaN wins."""
    x, y = torch.randn(2, 35, size), torch.randn(2, 100, size)
    y[0, 75, 1] = y[0, 90, 0] = x[1, 21] = torch.nan
    scores, *actual = argmax(Sets(x, y), metric, "triton")
    assert scores.isnan().all()
    assert (actual[0][0] == 75).all()
    assert (actual[1][1] == 21).all()
    assert actual[1][0, 75] == actual[0][1, 21] == 0
    _, *expected_argmax = argmax(Sets(x, y), metric, "blocked")
    assert all(torch.equal(*pair) for pair in zip(actual, expected_argmax, strict=True))


def test_what_is_infinitely_far_wins_nothing() -> None:
    x, y = torch.randn(1, 3, 2), torch.randn(1, 4, 2)
    y[0, 2, 0] = torch.inf
    scores, x_argmax, y_argmax = argmax(Sets(x, y), "sqeuclidean", "triton")
    assert scores.item() == torch.inf
    assert (y_argmax == -1).tolist() == [[False, False, True, False]]
    assert (x_argmax >= 0).all()


def test_a_point_that_many_chose() -> None:
    """Its list is longer than what is summed in one step."""
    x, y = torch.randn(1, 3, 12), 0.1 * torch.randn(1, 70, 12) + 1.0
    x[0, 1] = 1.0
    actual, expected = (
        gradients(chamfer, (x, y), reduction="sum", implementation=implementation)
        for implementation in ("triton", "blocked")
    )
    check_gradients(actual, expected, torch.float32)
