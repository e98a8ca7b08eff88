"""Random calls of `chamfer`, drawn by hypothesis, for every implementation's tests.

Coordinates are multiples of 1/4 of at most 1: every product, difference and sum is exact in any floating type that
accumulates in float32, so rounding never decides which point is nearest, and ties are frequent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from hypothesis import strategies as st
from torch import Tensor

from pylate_flash import chamfer, chamfer_varlen
from pylate_flash.ops import chamfer_reference
from tests.ops.cases import check_definition, differentiated, drawn_mask, gradient_tolerance, relative_error

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
METRICS = ("sqeuclidean", "inner_product")
# Sizes on both sides of the limit up to which coordinates are subtracted.
SIZES = (1, 2, 3, 8, 9, 17)


@st.composite
def chamfer_cases(
    draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES, max_batch: int = 4, max_length: int = 20
) -> tuple[tuple[Tensor, Tensor], dict]:
    """Draw both sets, masks (some without an active point) and all options."""
    n, size = draw(st.integers(1, max_batch)), draw(st.sampled_from(SIZES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from(dtypes))
    points, options = [], {}
    for name in ("x", "y"):
        length = draw(st.integers(1, max_length))
        points.append(torch.randint(-4, 5, (n, length, size), generator=generator).div(4).to(dtype))
        options[f"{name}_mask"] = drawn_mask(draw, points[-1], generator)
    options["metric"] = draw(st.sampled_from(METRICS))
    options["reduction"] = draw(st.sampled_from(["mean", "sum"]))
    options["empty_score"] = draw(st.sampled_from([0.0, -100.0]))
    return (points[0], points[1]), options


def gradients(function: Callable[..., Tensor], sets: tuple[Tensor, Tensor], **options) -> tuple[Tensor, ...]:
    return differentiated(function, sets, options)


def check_scores_and_gradients(sets: tuple[Tensor, Tensor], options: dict, implementation: str = "auto") -> None:
    check_definition(partial(chamfer, implementation=implementation), chamfer_reference, sets, options, atol=1e-6)


def check_gradients(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    for gradient, reference in zip(actual, expected, strict=True):
        assert gradient.dtype == dtype
        assert relative_error(gradient, reference) <= gradient_tolerance(dtype)


def packed_of(points: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The active points of all sets, concatenated, and the cu_seqlens of the sets."""
    on = torch.ones_like(points[..., 0], dtype=torch.bool) if mask is None else mask != 0
    return points[on], torch.nn.functional.pad(on.sum(dim=1).cumsum(0), (1, 0)).int()


def check_packed(sets: tuple[Tensor, Tensor], options: dict, implementation: str = "auto") -> None:
    """Packed sets have the scores and gradients of masked ones."""
    masks = [options[f"{name}_mask"] for name in ("x", "y")]
    packed = [packed_of(points, mask) for points, mask in zip(sets, masks, strict=True)]
    shared = {name: options[name] for name in ("metric", "reduction", "empty_score")}

    def of_packed(x: Tensor, y: Tensor, **kwargs) -> Tensor:
        lengths = {"max_x_length": sets[0].shape[1], "max_y_length": sets[1].shape[1]}
        return chamfer_varlen(x, y, packed[0][1], packed[1][1], **lengths, **kwargs, implementation=implementation)

    values = packed[0][0], packed[1][0]
    expected = chamfer(*sets, **options, implementation=implementation)
    torch.testing.assert_close(of_packed(*values, **shared), expected, rtol=1e-6, atol=1e-6)
    expected_gradients = gradients(chamfer, sets, **options, implementation=implementation)
    for actual, gradient, mask in zip(gradients(of_packed, values, **shared), expected_gradients, masks, strict=True):
        torch.testing.assert_close(actual, packed_of(gradient, mask)[0], rtol=1e-5, atol=1e-6)
