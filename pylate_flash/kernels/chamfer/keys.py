"""Maxima with their places as one integer, of which the largest is the best, and of equal ones the first.

So the order in which programs bring theirs does not matter, and the same bits win every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..xtr.keys import keys_of, similarities_of

# Less than every key: of a point that has met none.
NO_KEY = -(2**63)


@triton.jit
def keys_at(values, positions):
    """int64 keys of float32 values, NaN above all, at positions from 0 on."""
    return (keys_of(values).to(tl.int64) << 32) | (0x7FFFFFFF - positions).to(tl.int64)


@triton.jit
def value_and_position(keys):
    """What a key was made of."""
    return similarities_of((keys >> 32).to(tl.int32)), 0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32)
