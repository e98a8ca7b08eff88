"""What the kernels of the gradients of soft MaxSim share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def factor(values, ROUNDED: tl.constexpr):
    """Values as they are multiplied for a gradient: float16 could not hold what a loss is scaled by."""
    return values.to(tl.bfloat16) if ROUNDED else values.to(tl.float32)
