"""Keys of similarities: integers in the order of `torch.topk`."""

from __future__ import annotations

import triton
import triton.language as tl

# The keys of -inf, and of NaN, which comes first.
LOWEST = tl.constexpr(-2139095041)
HIGHEST = tl.constexpr(2147483647)


@triton.jit
def similarities_of(keys):
    """The similarities that have these keys."""
    return tl.where(keys < 0, keys ^ 0x7FFFFFFF, keys).to(tl.float32, bitcast=True)


@triton.jit
def keys_of(similarities):
    """int32 keys in the order of float32 similarities: equal where these are, -0.0 and 0.0 too; NaN above all."""
    bits = tl.where(similarities == 0.0, 0.0, similarities).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(similarities != similarities, HIGHEST, keys)
