"""Reductions that propagate NaN, which Triton's own maximum drops."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def larger(a, b):
    """The larger of two values, NaN if either is NaN: one `max.NaN` instruction from compute capability 8.0 on."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def max_along(values, axis: tl.constexpr):
    """Maximum along `axis`, NaN where any value is NaN."""
    return tl.reduce(values, axis, larger)
