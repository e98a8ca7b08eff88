"""Sums of exponentials of the products of Hopper's tensor cores, by each thread for itself, for soft MaxSim.

A lane keeps, of each of its two rows, the largest exponent of 2 so far and the sum of exponentials relative to it. The
four lanes that share a row add up theirs when the document ends.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon import add, larger_of
from .maxima import split_by_lane

LOG2E = gl.constexpr(1.4426950408889634)
_LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _shift(largest):
    """What exponents are taken relative to: of infinite ones, the sum is infinite or 0 without a shift."""
    return gl.where(gl.abs(largest) == float("inf"), 0.0, largest)


@gluon.jit
def add_exponentials(similarities, factor, largest, total, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Largest exponents and sums [ROWS, 4] with those of the similarities [ROWS, COLUMNS], whose `factor` > 0 is here.

    A NaN is larger than all, and stays.
    """
    split = split_by_lane(similarities, ROWS, COLUMNS)
    here: gl.constexpr = gl.SliceLayout(2, split.type.layout)
    there: gl.constexpr = largest.type.layout
    factor = gl.convert_layout(factor, here, assert_trivial=True)
    largest = gl.convert_layout(largest, here, assert_trivial=True)
    total = gl.convert_layout(total, here, assert_trivial=True)
    larger = larger_of(largest, gl.reduce(split, 2, larger_of) * factor)
    shift = _shift(larger)
    exponentials = gl.exp2(split * factor[:, :, None] - shift[:, :, None])
    total = total * gl.exp2(largest - shift) + gl.reduce(exponentials, 2, add)
    return (
        gl.convert_layout(larger, there, assert_trivial=True), gl.convert_layout(total, there, assert_trivial=True)
    )  # fmt: skip


@gluon.jit
def log_sums(largest, total, zeros, ZEROS: gl.constexpr):
    """Natural logarithms [R] of sums of exponentials, of what four lanes have [R, 4], and of `zeros` exponents of 0."""
    row_largest = gl.reduce(largest, 1, larger_of)
    if ZEROS:
        row_largest = gl.where(zeros > 0.0, larger_of(row_largest, 0.0), row_largest)
    shift = _shift(row_largest)
    row_total = gl.reduce(total * gl.exp2(largest - shift[:, None]), 1, add)
    if ZEROS:
        row_total += gl.where(zeros > 0.0, zeros * gl.exp2(-shift), 0.0)
    return (gl.log2(row_total) + shift) * _LN2
