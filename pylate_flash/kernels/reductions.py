"""Reductions of similarities: maxima that propagate NaN (Triton's drop it), sortable keys, and log-sum-exp."""

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


# The keys of -inf, and of NaN, which ranks above all.
LOWEST_KEY = tl.constexpr(-2139095041)
_HIGHEST_KEY = tl.constexpr(2147483647)


@triton.jit
def similarities_of(keys):
    """Inverse of `keys_of`."""
    return tl.where(keys < 0, keys ^ 0x7FFFFFFF, keys).to(tl.float32, bitcast=True)


@triton.jit
def keys_of(similarities):
    """int32 keys that sort like float32 similarities in `torch.topk`: -0.0 equals 0.0, NaN ranks above all."""
    bits = tl.where(similarities == 0.0, 0.0, similarities).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(similarities != similarities, _HIGHEST_KEY, keys)


# Convert between natural and base-2 logarithms.
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def relative_to(largest):
    """The shift subtracted from exponents: 0 if the largest is infinite, as the sum is infinite or 0 without it."""
    return tl.where(tl.abs(largest) == float("inf"), 0.0, largest)


@triton.jit
def add_exponentials(similarities, row_factor, largest, total):
    """Update each row's largest base-2 exponent, and the sum of exponentials relative to it, with these similarities.

    `row_factor`, from similarities to exponents, is positive: the largest similarity has the largest exponent. NaN
    reaches the sum either way.
    """
    new_largest = tl.maximum(largest, tl.max(similarities, axis=1) * row_factor)
    shift = relative_to(new_largest)
    exponentials = tl.exp2(similarities * row_factor[:, None] - shift[:, None])
    return new_largest, total * tl.exp2(largest - shift) + tl.sum(exponentials, axis=1)


@triton.jit
def log_sums(largest, total, zeros, ZEROS: tl.constexpr):
    """Natural logarithms of sums of exponentials; ZEROS: including `zeros` additional exponents of 0."""
    if ZEROS:
        new_largest = tl.where(zeros > 0.0, tl.maximum(largest, 0.0), largest)
        shift = relative_to(new_largest)
        total = total * tl.exp2(largest - shift) + tl.where(zeros > 0.0, zeros * tl.exp2(-shift), 0.0)
        largest = new_largest
    return (tl.log2(total) + relative_to(largest)) * LN2
