"""Per-thread reductions of the Hopper kernel's products.

They compute the maximum with its first column and, for soft MaxSim, sums of exponentials: for each of its two rows, a
lane keeps the largest exponent of 2 so far and the sum of exponentials relative to it. The four lanes that share a row
combine theirs when the document ends.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon import add
from ..reductions import larger, log_sums, relative_to


def _first_maxima_ptx() -> str:
    """PTX that reduces a lane's registers of a product of 64 columns to the maximum of each of its two rows.

    A lane has columns 2 * lane and 2 * lane + 1 of every eight: of 32 registers, two are of the first row, the next two
    of the second, and so on. The first and third results are the row maxima, each followed by its column, for lane 0,
    as an integer.

    The maxima of pairs, fours and eights are kept. From the top down, if the maximum of the first half differs from the
    total, the column is in the second half: four comparisons, and selections of the next operands. Maxima are compared
    as integers: there is only one NaN (of tensor cores and `max`), which as an integer equals itself. Gluon predicates
    no additions: a tile then takes 74 ALU instructions instead of 69, and 64 x 64, 1024 x 1024 took 1.75 ms instead of
    1.68.
    """
    lines = [".reg .pred p8, p4, p2, p1;", ".reg .b32 x, y, pair<8>, four<4>, eight<2>, maximum<2>, column<2>;"]
    for row in range(2):
        value = [f"${32 + 4 * (i // 2) + 2 * row + i % 2}" for i in range(16)]
        maximum, column = f"maximum{row}", f"column{row}"
        lines += [f"max.NaN.f32 pair{i}, {value[2 * i]}, {value[2 * i + 1]};" for i in range(8)]
        lines += [f"max.NaN.f32 four{i}, pair{2 * i}, pair{2 * i + 1};" for i in range(4)]
        lines += [f"max.NaN.f32 eight{i}, four{2 * i}, four{2 * i + 1};" for i in range(2)]
        lines += [
            f"max.NaN.f32 {maximum}, eight0, eight1;",
            f"setp.ne.s32 p8, eight0, {maximum};",
            "selp.b32 x, four2, four0, p8;",
            f"setp.ne.s32 p4, x, {maximum};",
            "selp.b32 x, pair4, pair0, p8;",
            "@p4 selp.b32 x, pair6, pair2, p8;",
            f"setp.ne.s32 p2, x, {maximum};",
            f"selp.b32 x, {value[8]}, {value[0]}, p8;",
            f"@p4 selp.b32 x, {value[12]}, {value[4]}, p8;",
            f"selp.b32 y, {value[10]}, {value[2]}, p8;",
            f"@p4 selp.b32 y, {value[14]}, {value[6]}, p8;",
            "selp.b32 x, y, x, p2;",
            f"setp.ne.s32 p1, x, {maximum};",
            f"selp.b32 {column}, 32, 0, p8;",
            f"@p4 add.s32 {column}, {column}, 16;",
            f"@p2 add.s32 {column}, {column}, 8;",
            f"@p1 add.s32 {column}, {column}, 1;",
        ]
    # Outputs are written last: they may share registers with inputs.
    lines += ["mov.b32 $0, maximum0;", "mov.b32 $1, column0;", "mov.b32 $2, maximum1;", "mov.b32 $3, column1;"]
    return "{\n" + "\n".join(lines) + "\n}"


_FIRST_MAXIMA = gl.constexpr(_first_maxima_ptx())
_FIRST_MAXIMA_OPERANDS = gl.constexpr(",".join(["=r"] * 32 + ["r"] * 32))


@gluon.jit
def split_by_lane(similarities, ROWS: gl.constexpr, BLOCK_TOKENS: gl.constexpr):
    """Reshape similarities to [ROWS, 4, BLOCK_TOKENS / 4]: four lanes share a row, the last dimension is within a lane.

    A lane has columns 2 * lane and 2 * lane + 1 of every eight.
    """
    split = gl.reshape(similarities, [ROWS, BLOCK_TOKENS // 8, 4, 2])
    return gl.reshape(gl.permute(split, (0, 2, 1, 3)), [ROWS, 4, BLOCK_TOKENS // 4])


@gluon.jit
def differ(a, b):
    """Whether maxima differ, compared as integers, so that NaN equals itself."""
    return a.to(gl.int32, bitcast=True) != b.to(gl.int32, bitcast=True)


@gluon.jit
def _evens(values):
    """Every second of values [R, 4, n] along the last dimension, which is within a thread."""
    return gl.split(gl.reshape(values, [values.shape[0], values.shape[1], values.shape[2] // 2, 2]))[0]


@gluon.jit
def _first_of_eight(values):
    return gl.reduce(_evens(_evens(_evens(values))), 2, add)


@gluon.jit
def columns_in_two(values, ROWS: gl.constexpr):
    """Split values [ROWS, n] into the first and the second half of the columns; a thread has part of either."""
    return gl.split(gl.permute(gl.reshape(values, [ROWS, 2, values.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def first_maximum(similarities, ROWS: gl.constexpr):
    """Per-lane maximum [ROWS, 4] of similarities [ROWS, 64] or more, and its first column, minus 2 * lane."""
    COLUMNS: gl.constexpr = similarities.shape[1]
    if COLUMNS > 64:
        first, second = columns_in_two(similarities, ROWS)
        first_best, first_column = first_maximum(first, ROWS)
        second_best, second_column = first_maximum(second, ROWS)
        best = larger(first_best, second_best)
        column = gl.where(differ(first_best, best), second_column + COLUMNS // 2, first_column)
    else:
        gl.static_assert(COLUMNS == 64)
        results = gl.inline_asm_elementwise(
            _FIRST_MAXIMA, _FIRST_MAXIMA_OPERANDS, [similarities.to(gl.int32, bitcast=True)],
            dtype=gl.int32, is_pure=True, pack=32,
        )  # fmt: skip
        maxima, columns = gl.split(gl.reshape(split_by_lane(results, ROWS, 64), [ROWS, 4, 8, 2]))
        best, column = _first_of_eight(maxima).to(gl.float32, bitcast=True), _first_of_eight(columns)
    return best, column


@gluon.jit
def with_first_maximum(similarities, start, best, key, ROWS: gl.constexpr):
    """Update the maxima [ROWS, 4] and their tokens with the similarities of a tile that begins at token `start`."""
    layout: gl.constexpr = best.type.layout
    tile_best, column = first_maximum(similarities, ROWS)
    new_best = larger(best, gl.convert_layout(tile_best, layout, assert_trivial=True))
    column = gl.convert_layout(column, layout, assert_trivial=True)
    return new_best, gl.where(differ(new_best, best), start + column, key)


@gluon.jit
def add_exponentials(similarities, factor, largest, total, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Update the largest exponents and sums [ROWS, 4] with similarities [ROWS, COLUMNS] times `factor`, which is > 0.

    NaN is larger than everything else, and propagates.
    """
    split = split_by_lane(similarities, ROWS, COLUMNS)
    split_layout: gl.constexpr = gl.SliceLayout(2, split.type.layout)
    result_layout: gl.constexpr = largest.type.layout
    factor = gl.convert_layout(factor, split_layout, assert_trivial=True)
    largest = gl.convert_layout(largest, split_layout, assert_trivial=True)
    total = gl.convert_layout(total, split_layout, assert_trivial=True)
    new_largest = larger(largest, gl.reduce(split, 2, larger) * factor)
    shift = relative_to(new_largest)
    exponentials = gl.exp2(split * factor[:, :, None] - shift[:, :, None])
    total = total * gl.exp2(largest - shift) + gl.reduce(exponentials, 2, add)
    new_largest = gl.convert_layout(new_largest, result_layout, assert_trivial=True)
    return new_largest, gl.convert_layout(total, result_layout, assert_trivial=True)


@gluon.jit
def log_sums_of_lanes(largest, total, zeros, ZEROS: gl.constexpr):
    """`log_sums` [R] of the partial sums [R, 4] of four lanes, and of `zeros` exponents of 0."""
    row_largest = gl.reduce(largest, 1, larger)
    row_total = gl.reduce(total * gl.exp2(largest - relative_to(row_largest)[:, None]), 1, add)
    return log_sums(row_largest, row_total, zeros, ZEROS)
