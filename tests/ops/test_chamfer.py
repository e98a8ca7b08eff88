"""`chamfer` against its definition, over shapes, masks and values that hypothesis draws, and by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from pylate_flash import chamfer, chamfer_varlen, pack
from pylate_flash.ops import chamfer_reference, products
from tests.ops.cases import Elements, mistakes, relative_error, wrong
from tests.ops.chamfer_cases import METRICS, chamfer_cases, check_packed, gradients

OPTIONS = {"max_examples": 60}


@settings(**OPTIONS)
@given(case=chamfer_cases())
def test_packed_sets_are_masked_ones(case: tuple) -> None:
    check_packed(*case)


@settings(**OPTIONS)
@given(case=chamfer_cases(dtypes=(torch.float64,), max_batch=2, max_length=4))
def test_definition(case: tuple) -> None:
    """Compare with loops over numbers."""
    sets, options = case
    masks = [options[f"{name}_mask"] for name in ("x", "y")]
    masks = [
        (torch.ones(points.shape[:2]) if mask is None else mask).tolist()
        for points, mask in zip(sets, masks, strict=True)
    ]
    expected = []
    for pair in range(len(sets[0])):
        x, y = (
            [point for point, on in zip(points[pair].tolist(), mask[pair], strict=True) if on]
            for points, mask in zip(sets, masks, strict=True)
        )
        if not (x and y):
            expected.append(options["empty_score"])
            continue
        total = 0.0
        for source, target in ((x, y), (y, x)):
            if options["metric"] == "sqeuclidean":
                best = [min(sum((a - b) ** 2 for a, b in zip(p, q, strict=True)) for q in target) for p in source]
            else:
                best = [max(sum(a * b for a, b in zip(p, q, strict=True)) for q in target) for p in source]
            total += sum(best) / (len(best) if options["reduction"] == "mean" else 1)
        expected.append(total)
    torch.testing.assert_close(chamfer_reference(*sets, **options), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [3, 32])
@pytest.mark.parametrize("metric", METRICS)
def test_normal_points(metric: str, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(3, length, size, generator=generator).to(dtype) for length in (90, 120))
    actual, expected = chamfer(x, y, metric=metric), chamfer_reference(x.double(), y.double(), metric=metric)
    assert relative_error(actual, expected) <= 1e-6
    bound = 1e-2 if dtype == torch.bfloat16 else 1e-5
    expected_gradients = gradients(chamfer_reference, (x.double(), y.double()), metric=metric)
    for gradient, reference in zip(gradients(chamfer, (x, y), metric=metric), expected_gradients, strict=True):
        assert relative_error(gradient, reference) <= bound


@pytest.mark.parametrize("size", [3, 32])
def test_near_points_far_from_the_origin(size: int) -> None:
    """Computed from norms and products, such distances and their gradients would cancel."""
    torch.manual_seed(0)
    x = 64 * torch.rand(2, 50, size) + 64
    y = x.flip(1) + 2e-3 * torch.randn(2, 50, size)
    expected = chamfer_reference(x.double(), y.double())
    assert expected.max() < 1e-3
    torch.testing.assert_close(chamfer(x, y).double(), expected, rtol=1e-6, atol=0.0)
    expected_gradients = gradients(chamfer_reference, (x.double(), y.double()))
    for gradient, reference in zip(gradients(chamfer, (x, y)), expected_gradients, strict=True):
        assert relative_error(gradient, reference) <= 1e-6


@pytest.mark.parametrize("size", [2, 12])
@pytest.mark.parametrize("metric", METRICS)
def test_nan(metric: str, size: int) -> None:
    x, y = torch.randn(3, 5, size), torch.randn(3, 7, size)
    y[1, 4, 1] = torch.nan
    assert chamfer(x, y, metric=metric).isnan().tolist() == [False, True, False]
    grad_x, _ = gradients(chamfer, (x, y), metric=metric)
    assert grad_x.isnan().flatten(1).any(dim=1).tolist() == [False, True, False]
    # A masked point has no effect.
    mask = ~y.isnan().any(dim=2)
    assert chamfer(x, y, y_mask=mask, metric=metric).isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(chamfer, (x, y), y_mask=mask, metric=metric))


def test_infinity() -> None:
    x, y = torch.randn(2, 5, 3), torch.randn(2, 7, 3)
    y[1, 4, 1] = torch.inf
    assert chamfer(x, y).tolist()[1] == torch.inf
    assert chamfer(x, y)[0].isfinite()
    long = [torch.cat([points] * 4, dim=2) for points in (x, y)]
    assert chamfer(*long).isfinite().tolist() == [True, False]
    # A point that is infinitely far from all others has no nearest point, and no gradient.
    assert gradients(chamfer, (x, y))[1][1, 4].tolist() == [0.0] * 3


@pytest.mark.parametrize("shapes", [((0, 3), (0, 5)), ((2, 0), (2, 5)), ((2, 3), (2, 0)), ((2, 0), (2, 0))])
def test_without_points(shapes: tuple) -> None:
    x, y = (torch.ones(*shape, 4, requires_grad=True) for shape in shapes)
    scores = chamfer(x, y, empty_score=-5.0)
    assert scores.tolist() == [-5.0] * shapes[0][0]
    assert not any(gradient.any() for gradient in torch.autograd.grad(scores.sum(), (x, y)))


@pytest.mark.parametrize("size", [3, 12])
def test_the_distances_are_never_together(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_BLOCK_CPU", 2000)
    x, y = torch.randn(3, 200, size, requires_grad=True), torch.randn(3, 300, size, requires_grad=True)
    with Elements() as elements:
        chamfer(x, y).sum().backward()
    assert elements.largest <= max(2000, y.numel())


def test_short_packed_sets_are_not_padded_to_a_long_one() -> None:
    x, bounds = pack([torch.randn(length, 3) for length in [600, *[2] * 60]])
    x.requires_grad_()
    with Elements() as all_together:
        chamfer_varlen(x, x.detach(), bounds, bounds).sum().backward()
    with Elements() as alone:
        chamfer_varlen(x[:600], x.detach()[:600], bounds[:2], bounds[:2]).sum().backward()
    assert all_together.total <= 3 * alone.total


X, Y, POINTS, BOUNDS = torch.ones(2, 3, 4), torch.ones(2, 5, 4), torch.ones(6, 4), torch.tensor([0, 2, 6])


test_one_error_for_each_mistake = mistakes(
    wrong(ValueError, "y must have one set for each set of x, 2, got 3 sets", chamfer, X, torch.ones(3, 5, 4)),
    wrong(ValueError, "x_mask must hold only 0 .* got 0.5", chamfer, X, Y, x_mask=torch.full((2, 3), 0.5)),
    wrong(ValueError, "x_cu_seqlens must rise from 0 to the number of points of x, 6, got 0 to 2",
          chamfer_varlen, POINTS, POINTS, torch.tensor([0, 1, 2]), BOUNDS),
    wrong(ValueError, "y_cu_seqlens has a sequence of length 4, more than max_y_length = 3",
          chamfer_varlen, POINTS, POINTS, BOUNDS, BOUNDS, max_y_length=3),
    wrong(ValueError, "max_x_length must be at least 0, got -1",
          chamfer_varlen, POINTS, POINTS, BOUNDS, BOUNDS, max_x_length=-1),
)  # fmt: skip


def test_autocast() -> None:
    x, y = torch.randn(2, 30, 16, requires_grad=True), torch.randn(2, 50, 16)
    with torch.autocast("cpu", torch.bfloat16):
        products = chamfer(x, y, metric="inner_product")
        distances, mixed = chamfer(x, y), chamfer(x, y.bfloat16())
    assert torch.equal(products, chamfer(x.bfloat16(), y.bfloat16(), metric="inner_product"))
    assert torch.equal(distances, chamfer(x, y))
    assert torch.equal(mixed, chamfer(x, y.bfloat16().float()))
    for scores in (products, distances, mixed):
        assert torch.autograd.grad(scores.sum(), x)[0].dtype == torch.float32
