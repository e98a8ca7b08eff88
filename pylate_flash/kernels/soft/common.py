"""What the kernels of soft MaxSim share: products of embeddings that are too long for a tile, and factors of sums."""

from __future__ import annotations

import triton
import triton.language as tl

from ..forward.common import SUMMED_EMBEDDING

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def split_products(
    left_rows, right_rows, left_exists, right_exists,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Products [LEFT, RIGHT] of embeddings that are read block by block, from where the rows begin."""
    dims = tl.arange(0, BLOCK_EMBEDDING)
    similarities = tl.zeros([LEFT, RIGHT], tl.float32)
    for sum_start in tl.static_range(0, EMBEDDING, SUMMED_EMBEDDING):
        products = tl.zeros([LEFT, RIGHT], tl.float32)
        for dim in tl.range(sum_start, min(EMBEDDING, sum_start + SUMMED_EMBEDDING), BLOCK_EMBEDDING):
            inside = dim + dims < EMBEDDING
            left = tl.load(left_rows[:, None] + (dim + dims)[None, :], mask=left_exists[:, None] & inside[None, :],
                           other=0.0)  # fmt: skip
            right = tl.load(right_rows[None, :] + (dim + dims)[:, None], mask=right_exists[None, :] & inside[:, None],
                            other=0.0)  # fmt: skip
            products = tl.dot(left, right, products, input_precision=PRECISION)
        similarities += products
    return similarities


@triton.jit
def factor(values, ROUNDED: tl.constexpr):
    """Values as they are multiplied for a gradient: float16 could not hold what a loss is scaled by."""
    return values.to(tl.bfloat16) if ROUNDED else values.to(tl.float32)
