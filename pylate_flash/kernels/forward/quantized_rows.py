"""Query rows quantized to 8 bits, and scales of quantized embeddings divided by their norms.

Quantization of a row matches `ops.quantization.quantize` bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import LARGEST_VALUES, SMALLEST_SCALE
from ..config import stride_unit
from ..launch import kernel, wait_for_previous_kernel
from ..reductions import max_along
from ..rows import inverse_norm, load_lines, of_rows, row_addresses, rows_of_block, sum_of_squares
from ..tables import power_of_two

_LARGEST_INT8 = tl.constexpr(LARGEST_VALUES["int8"])
_LARGEST_FP8 = tl.constexpr(LARGEST_VALUES["fp8"])
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
# Elements that four warps quantize at once.
_AT_ONCE = tl.constexpr(4096)
_NORM_ROWS = 64
# Added to a float32 below 2**22, this leaves the nearest integer, ties to even, in the lowest bits.
_ROUNDING = tl.constexpr(1.5 * 2**23)


@triton.jit
def largest_magnitudes(rows):
    """The largest magnitude [rows] of the elements of each row [rows, dims]."""
    return max_along(tl.abs(rows), 1)


@triton.jit
def scales_of(magnitudes, DTYPE: tl.constexpr):
    """The int8 or fp8 scales of rows with these largest magnitudes, and their inverses to multiply elements by.

    An inverse is 0 where the scale is too small, infinite or NaN.
    """
    scale = tl.div_rn(magnitudes, _LARGEST_INT8 if tl.int8 == DTYPE else _LARGEST_FP8)
    # False for NaN.
    usable = (scale >= _SMALLEST_SCALE) & (scale < float("inf"))
    return scale, tl.where(usable, tl.div_rn(1.0, tl.where(usable, scale, 1.0)), 0.0)


@triton.jit
def multiplied(rows, inverse):
    """Rows [rows, dims], float32, times `inverse` [rows]; rows with an inverse of 0 become zeros."""
    # An fma instead of a product, which compilers would fuse with a later addition and round only once.
    return tl.where((inverse > 0.0)[:, None], tl.fma(rows, inverse[:, None], 0.0), 0.0)


@triton.jit
def rounded(rows, inverse, DTYPE: tl.constexpr):
    """Round `multiplied` rows to int8 or fp8."""
    values = multiplied(rows, inverse)
    if tl.int8 == DTYPE:
        values = (values + _ROUNDING).to(tl.int32, bitcast=True)
    return values.to(DTYPE)


@triton.jit
def squares_of(values):
    """Sum of squares of each row [rows, dims]."""
    wide = values.to(tl.float32)
    return tl.sum(wide * wide, axis=1)


@triton.jit
def rounded_rows(rows, DTYPE: tl.constexpr, NORMALIZE: tl.constexpr):
    """Quantize rows [rows, dims], float32, to int8 or fp8; return values and scales [rows].

    Under NORMALIZE, the values of a row times its scale have norm 1.
    """
    scale, inverse = scales_of(largest_magnitudes(rows), DTYPE)
    values = rounded(rows, inverse, DTYPE)
    if NORMALIZE:
        scale *= inverse_norm(squares_of(values), scale)
    return values, scale


@triton.jit
def leave_values(
    tensors, first_row, layout, EMBEDDING: tl.constexpr, BLOCK_ROWS: tl.constexpr, NORMALIZE: tl.constexpr
):
    """Write BLOCK_ROWS rows in 8 bits, [Nq, Lq, EMBEDDING], and their scales, [Nq, Lq], for the same program to read.

    Programs of the same rows write the same values. Kept on the chip, the rows would take registers, or so many
    instructions, each fetched for a single use, that 1 x 10000 (32 x 300) takes 0.145 ms instead of 0.130.
    """
    queries_ptr, values_ptr, scales_ptr = tensors
    group, n_queries, query_length, padded_query_length, stride_query, stride_query_token = layout
    SIZE: tl.constexpr = triton.next_power_of_2(EMBEDDING)
    AT_ONCE: tl.constexpr = min(BLOCK_ROWS, max(1, _AT_ONCE // SIZE))
    dims = tl.arange(0, SIZE)
    for start in tl.range(0, BLOCK_ROWS, AT_ONCE):
        rows = first_row + start + tl.arange(0, AT_ONCE)
        query, token = rows // padded_query_length, rows % padded_query_length
        row_exists = (query < n_queries) & (token < query_length)
        exists = row_exists[:, None] & (dims < EMBEDDING)[None, :]
        flat_query = (group * n_queries + query).to(tl.int64)
        offset = flat_query * stride_query + token * stride_query_token
        tile = tl.load(queries_ptr + offset[:, None] + dims[None, :], mask=exists, other=0.0).to(tl.float32)
        values, scale = rounded_rows(tile, values_ptr.dtype.element_ty, NORMALIZE)
        global_row = flat_query * query_length + token
        tl.store(scales_ptr + global_row, scale, mask=row_exists)
        tl.store(values_ptr + global_row[:, None] * EMBEDDING + dims[None, :], values, mask=exists)
    tl.debug_barrier()


@kernel(follows=True, config="size block_rows normalize")
def _quantize_rows_kernel(
    queries_ptr, values_ptr, scales_ptr, n_queries, length, stride_query, stride_token, config: tl.constexpr
):
    """Quantize all rows, each in one program."""
    wait_for_previous_kernel()
    tensors, layout = (queries_ptr, values_ptr, scales_ptr), (0, n_queries, length, length, stride_query, stride_token)
    first_row = tl.program_id(0) * config.block_rows
    leave_values(tensors, first_row, layout, config.size, config.block_rows, config.normalize)


@kernel(config="size block block_rows unit")
def _divide_by_norms_kernel(
    values_ptr, scales_ptr, offsets_ptr, divided_scales_ptr, divided_offsets_ptr,
    n_rows, n_sequences, length, stride_group, stride_sequence, stride_token, config: tl.constexpr,
):  # fmt: skip
    """Divide scales and offsets [n_rows] by the norms of values * scale + offset, [groups, sequences, length, d].

    Strides are passed divided by `unit` (`config.stride_unit`).
    """
    stride_group, stride_sequence, stride_token = (
        stride_group * config.unit, stride_sequence * config.unit, stride_token * config.unit,
    )  # fmt: skip
    rows, row_exists = rows_of_block(tl.program_id(0), n_rows, config.block_rows)
    base = values_ptr + row_addresses(rows, n_sequences, length, stride_group, stride_sequence, stride_token)
    scale = tl.load(scales_ptr + rows, mask=row_exists, other=0.0)
    # The norm is taken in this unit: squares are of numbers of a few hundred, and a large scale would overflow float32.
    unit = scale
    if offsets_ptr is not None:
        offset = tl.load(offsets_ptr + rows, mask=row_exists, other=0.0)
        unit = tl.maximum(scale, tl.abs(offset))
        unit = tl.where(unit > 0, unit, 1.0)
        slope, shift = tl.div_rn(scale, unit), tl.div_rn(offset, unit)
    squares = tl.zeros([config.block_rows], tl.float32)
    for start in tl.range(0, config.size, config.block):
        values, inside = load_lines(base, row_exists, start, config)
        if offsets_ptr is not None:
            values = tl.where(inside, values * of_rows(slope) + of_rows(shift), 0.0)
        squares += sum_of_squares(values)
    inverse = inverse_norm(squares, unit)
    tl.store(divided_scales_ptr + rows, scale * inverse, mask=row_exists)
    if offsets_ptr is not None:
        tl.store(divided_offsets_ptr + rows, offset * inverse, mask=row_exists)


def quantize_rows(queries: Tensor, strides: tuple[int, ...], values: Tensor, scales: Tensor, normalize: bool) -> None:
    """Write values [Nq, Lq, d], int8 or fp8, and scales [Nq, Lq] of queries, whose `strides` are (query, token).

    With `normalize`, the scales are divided by the norms of the quantized values.
    """
    n_queries, length, size = values.shape
    rows = max(1, _AT_ONCE.value // power_of_two(size))
    grid, tensors = (-(-n_queries * length // rows), 1, 1), (queries, values, scales)
    _quantize_rows_kernel(grid, tensors, (n_queries, length), strides, (size, rows, normalize), (4, 1, None))


def divided_by_norms(
    values: Tensor, strides: tuple[int, ...], scales: Tensor, offsets: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return contiguous scales and offsets with which the dequantized embeddings have norm 1.

    `values` [.., d] have the strides (group, document, token) of `Problem`.
    """
    divided = torch.empty_like(scales)
    divided_offsets = None if offsets is None else torch.empty_like(offsets)
    _, n_sequences, length = (1, 1, *scales.shape)[-3:]
    rows, size, unit = scales.numel(), values.shape[-1], stride_unit(strides)
    _divide_by_norms_kernel(
        (-(-rows // _NORM_ROWS), 1, 1),
        (values, scales, offsets, divided, divided_offsets),
        (rows, n_sequences, length),
        tuple([stride // unit for stride in strides]),
        (size, min(128, power_of_two(size)), _NORM_ROWS, unit),
        (4, 3, None),
    )
    return divided, divided_offsets
