"""Chamfer distances on a GPU: against their definition, to the last point, reproducible, and in little memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from pylate_flash import chamfer, chamfer_varlen
from pylate_flash.ops import chamfer_reference
from pylate_flash.ops.chamfer import ChamferOptions, Sets, compute_chamfer
from tests.gpu.calls import points
from tests.gpu.tools import FLOAT, HALF, equal, exact, memory_of, on_gpu, products_in, random_mask
from tests.ops.cases import relative_error
from tests.ops.chamfer_cases import (
    DTYPES,
    METRICS,
    chamfer_cases,
    check_gradients,
    check_packed,
    gradients,
)

pytestmark = pytest.mark.gpu

# Pairs, points of x and y, dimensions and dtype: direct, on tensor cores, and block by block; few and many of each.
SHAPES = [
    (16, 1000, 1500, 3, FLOAT),
    (1, 5000, 3000, 3, FLOAT),
    (3, 700, 300, 2, torch.float16),
    (2, 2049, 777, 8, FLOAT),
    (4, 300, 5000, 9, FLOAT),
    (4, 1000, 1100, 64, HALF),
    (4, 1000, 1100, 64, FLOAT),
    (2, 600, 900, 72, torch.float16),
    (2, 300, 400, 96, FLOAT),
    (2, 900, 600, 200, HALF),
    (1, 700, 800, 512, HALF),
    (1, 300, 200, 768, FLOAT),
    (300, 40, 50, 32, HALF),
    (1, 1, 1, 3, FLOAT),
]


def argmax(sets: Sets, metric: str, implementation: str) -> tuple[torch.Tensor, ...]:
    return compute_chamfer(sets, ChamferOptions(0, 0, metric, "mean", 0.0, implementation))


@settings(max_examples=40)
@given(case=chamfer_cases(dtypes=DTYPES[:3], max_length=200))
def test_packed_sets_are_masked_ones(case: tuple) -> None:
    check_packed(*on_gpu(case), "triton")


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("n", "x_length", "y_length", "size", "dtype"), SHAPES)
def test_the_same_points_win(n: int, x_length: int, y_length: int, size: int, dtype: torch.dtype, metric: str) -> None:
    """Multiples of 1/4, whose products, differences and sums are exact: ties must have the same winners."""
    x, y = (exact(n, length, size, dtype=dtype, seed=seed) for seed, length in enumerate((x_length, y_length)))
    masks = [random_mask(points.shape[:2]) for points in (x, y)]
    for sets in (Sets(x, y), Sets(x, y, *masks)):
        scores, *actual = argmax(sets, metric, "triton")
        expected, *expected_argmax = argmax(sets, metric, "blocked")
        torch.testing.assert_close(scores, expected, rtol=2e-6, atol=1e-6)
        assert equal(actual, expected_argmax)
        options = {"x_mask": sets.x_mask, "y_mask": sets.y_mask, "metric": metric}
        actual_gradients, expected_gradients = (
            gradients(chamfer, (x, y), **options, implementation=implementation)
            for implementation in ("triton", "blocked")
        )
        check_gradients(actual_gradients, expected_gradients, dtype)


def score_of_argmax(x: torch.Tensor, y: torch.Tensor, x_argmax: torch.Tensor, y_argmax: torch.Tensor, metric: str):
    """The score if these are the nearest points."""

    def one_way(points: torch.Tensor, targets: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        picked = targets.gather(1, chosen.long().unsqueeze(-1).expand(*chosen.shape, targets.shape[-1]))
        values = (points - picked).square() if metric == "sqeuclidean" else points * picked
        return values.sum(dim=2).mean(dim=1)

    return one_way(x, y, x_argmax) + one_way(y, x, y_argmax)


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize(("n", "length", "size"), [(2, 500, 3), (2, 500, 64), (16, 4096, 3), (16, 4096, 64)])
@pytest.mark.parametrize("metric", METRICS)
def test_normal_points(metric: str, n: int, length: int, size: int, dtype: torch.dtype) -> None:
    """Of points that are equally close up to the last bits, any may win: gradients are those of the winners."""
    x, y = points(length, size, dtype, n), points(length + 100, size, dtype, n, seed=1)
    actual, *chosen = argmax(Sets(x, y), metric, "triton")
    expected = chamfer(x.double(), y.double(), metric=metric)
    assert relative_error(actual, expected) <= 2e-6
    options = {"x_argmax": chosen[0], "y_argmax": chosen[1], "metric": metric}
    expected_gradients = gradients(score_of_argmax, (x.double(), y.double()), **options)
    check_gradients(gradients(chamfer, (x, y), metric=metric), expected_gradients, dtype)
    _, *exact = argmax(Sets(x.double(), y.double()), metric, "blocked")
    for pair in zip(chosen, exact, strict=True):
        assert (pair[0] == pair[1]).double().mean() >= 0.999


@pytest.mark.parametrize("size", [3, 32])
def test_near_points_far_from_the_origin(size: int) -> None:
    """Computed from norms and products, such distances and their gradients would cancel to nothing."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = 64 * torch.rand(2, 50, size, device="cuda", generator=generator) + 64
    y = x.flip(1) + 2e-3 * torch.randn(2, 50, size, device="cuda", generator=generator)
    expected = chamfer_reference(x.double(), y.double())
    assert expected.max() < 1e-3
    torch.testing.assert_close(chamfer(x, y).double(), expected, rtol=1e-6, atol=0.0)
    expected_gradients = gradients(chamfer_reference, (x.double(), y.double()))
    check_gradients(gradients(chamfer, (x, y)), expected_gradients, FLOAT)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_float32_follows_the_precision_of_products(precision: str) -> None:
    x, y = points(1000, 64, n=2), points(1200, 64, n=2, seed=1)
    with products_in(precision):
        result = chamfer(x, y)
    assert relative_error(result, chamfer(x.double(), y.double())) <= (2e-6 if precision == "highest" else 1e-3)


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize("size", [3, 20, 600])
@pytest.mark.parametrize("metric", METRICS)
def test_nan_wins_where_it_is(metric: str, size: int, dtype: torch.dtype) -> None:
    """In tiles where it is in neither the first row nor the first column; the first of several NaN wins."""
    x, y = points(350, size, dtype, 2), points(1000, size, dtype, 2, seed=1)
    y[0, 755, 1] = y[0, 900, 0] = x[1, 213] = torch.nan
    scores, *result = argmax(Sets(x, y), metric, "triton")
    assert scores.isnan().all()
    assert (result[0][0] == 755).all()
    assert (result[1][1] == 213).all()
    assert result[1][0, 755] == result[0][1, 213] == 0
    grad_x, grad_y = gradients(chamfer, (x, y), metric=metric)
    assert grad_x[0].isnan().any()
    assert grad_y[1].isnan().any()
    # Masked points are ignored.
    options = {"x_mask": ~x.isnan().any(dim=2), "y_mask": ~y.isnan().any(dim=2), "metric": metric}
    assert chamfer(x, y, **options).isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(chamfer, (x, y), **options))


def test_all_choose_one_point() -> None:
    """Sets collapsed into a point, as those of an untrained model: one list of all points."""
    x, y = torch.zeros(2, 3000, 3, device="cuda"), points(4000, 3, n=2).abs()
    actual, expected = (
        gradients(chamfer, (points, y.to(points.dtype)), reduction="sum", implementation=implementation)
        for points, implementation in ((x, "triton"), (x.double(), "blocked"))
    )
    check_gradients(actual, (expected[0].float(), expected[1].float()), FLOAT)


def test_boundaries_on_the_host() -> None:
    (x,), (y,) = points(70, 3, n=1), points(90, 3, n=1, seed=1)
    bounds = torch.tensor([0, 10, 10, 70]), torch.tensor([0, 40, 50, 90])
    on_host = chamfer_varlen(x, y, *bounds, empty_score=-1.0)
    assert torch.equal(on_host, chamfer_varlen(x, y, *(b.cuda() for b in bounds), empty_score=-1.0))
    assert on_host[1] == -1.0


def test_memory_is_that_of_points() -> None:
    """A matrix of these distances would take 1.6 GB."""
    sets = points(20_000, 3, n=1), points(20_000, 3, n=1, seed=1)
    assert memory_of(lambda: gradients(chamfer, sets))[0] <= 16 << 20
