"""What the products of Hopper's tensor cores take and leave: query rows in registers, similarities, sums of maxima.

To a sum x of int8 products the bits of 1.0 are added. Taken for a float, that is 1 + x / 2**23, or 1 + x / 2**24 where
x is negative, as floats below 1 lie twice as close. A multiply-add by a scale s that is not negative makes s x / 2**23
of it, rounded as x converted and multiplied would be. What is negative comes out half as large, which matters only
where it is the maximum, and is doubled then (`unscaled`). Of |s x| below 2**-103, bits are lost.

That takes as many instructions as a conversion does. But a conversion takes the ALU, as a maximum does, for two cycles
each, which together is all the time of a product of 128 elements. A multiply-add of integers takes another unit. (An
addition would take the ALU as well: so one multiplies by a 1 of which the compiler does not know that it is one.)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon import add

# The bits of 1.0: |x| stays below 2**23 in products of up to 512 elements.
_BITS_OF_ONE = gl.constexpr(0x3F800000)
_INTEGER_UNIT = gl.constexpr(2.0**23)


@gluon.jit
def query_rows(
    queries_ptr, first_row, group, n_queries, query_length, padded_query_length, stride_query, stride_query_token,
    FIRST: gl.constexpr, BLOCK: gl.constexpr, EMBEDDING: gl.constexpr, ROWS: gl.constexpr, operand: gl.constexpr,
):  # fmt: skip
    """The BLOCK elements from FIRST on of ROWS query rows, in registers."""
    loaded: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (BLOCK // 8), BLOCK // 8], [4, 1], [1, 0])
    rows = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, loaded))
    query, token = rows // padded_query_length, rows % padded_query_length
    dims = FIRST + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, loaded))
    exists = ((query < n_queries) & (token < query_length))[:, None] & (dims < EMBEDDING)[None, :]
    offset = (group * n_queries + query).to(gl.int64) * stride_query + token * stride_query_token
    return gl.convert_layout(gl.load(queries_ptr + offset[:, None] + dims[None, :], mask=exists, other=0.0), operand)


@gluon.jit
def scaled(sums, scale, one):
    """Sums of products [ROWS, TOKENS] times their tokens' scale; of integers, `unscaled` makes similarities of that."""
    if sums.dtype == gl.int32:
        # Multiplied, the scale becomes an operand with a minus. Subtracted from 0, it takes an instruction.
        return gl.fma((sums * one + _BITS_OF_ONE).to(gl.float32, bitcast=True), scale[None, :], (scale * -1.0)[None, :])
    return sums * scale[None, :]


@gluon.jit
def unscaled(best):
    """The maxima of similarities, of those of `scaled` integers."""
    return best * gl.where(best < 0.0, 2 * _INTEGER_UNIT, _INTEGER_UNIT)


@gluon.jit
def sums_of(values, ROWS: gl.constexpr, GROUP: gl.constexpr):
    """Sums of every GROUP of values [ROWS], which lie as rows of products do: a warp has 16 of every 64."""
    of_warps = gl.reduce(gl.reshape(values, [ROWS // min(GROUP, 16), min(GROUP, 16)]), 1, add)
    if GROUP > 16:
        together: gl.constexpr = gl.BlockedLayout([GROUP // 16], [32], [4], [0])
        of_warps = gl.convert_layout(of_warps, together)
        of_warps = gl.reduce(gl.reshape(of_warps, [ROWS // GROUP, GROUP // 16]), 1, add)
    return of_warps
