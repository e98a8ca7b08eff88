"""Queries quantized row by row, and the scales of quantized embeddings divided by their norms.

A row is quantized as `ops.quantization.quantize` does it, to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.quantization import LARGEST
from ..launch import Kernel
from ..norms import inverse_norm
from ..overlap import wait_for_previous_kernel
from ..reductions import max_along
from ..tiles import power_of_two

# Elements of a program.
_BLOCK = 4096
_NORM_ROWS = 64
# Added to a float32 below 2**22 and taken away again, this rounds to the nearest integer, ties to even.
_ROUNDING = tl.constexpr(1.5 * 2**23)


@triton.jit(do_not_specialize=["n_rows", "length"])
def _quantize_rows_kernel(
    embeddings_ptr, values_ptr, scales_ptr, n_rows, length, stride_sequence, stride_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """values[row] [n_rows, EMBEDDING] and scales[row]; under NORMALIZE, a row's values times its scale have norm 1."""
    wait_for_previous_kernel()
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_EMBEDDING)
    exists = (rows < n_rows)[:, None] & (dims < EMBEDDING)[None, :]
    base = (rows // length) * stride_sequence + (rows % length) * stride_token
    values = tl.load(embeddings_ptr + base[:, None] + dims[None, :], mask=exists, other=0.0).to(tl.float32)
    scale = tl.div_rn(max_along(tl.abs(values), 1), LARGEST)
    values = tl.div_rn(values, tl.where(scale > 0.0, scale, 1.0)[:, None])
    if INTEGER:
        values = (values + _ROUNDING) - _ROUNDING
    # What is NaN has a scale that is NaN or infinite; no integer is to be made of it.
    values = tl.where(values == values, tl.minimum(tl.maximum(values, -LARGEST), LARGEST), 0.0)
    quantized = values.to(values_ptr.dtype.element_ty)
    if NORMALIZE:
        rounded = quantized.to(tl.float32) * scale[:, None]
        scale *= inverse_norm(tl.sum(rounded * rounded, axis=1))
    tl.store(scales_ptr + rows, scale, mask=rows < n_rows)
    tl.store(values_ptr + rows[:, None] * EMBEDDING + dims[None, :], quantized, mask=exists)


@triton.jit(do_not_specialize=["n_rows", "n_sequences", "length"])
def _divide_by_norms_kernel(
    values_ptr, scales_ptr, offsets_ptr, divided_scales_ptr, divided_offsets_ptr,
    n_rows, n_sequences, length, stride_group, stride_sequence, stride_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    AFFINE: tl.constexpr,
):  # fmt: skip
    """Scales and offsets [n_rows] divided by the norms of values * scale + offset, [groups, sequences, length, d]."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_exists = rows < n_rows
    sequence = rows // length
    base = (
        values_ptr
        + (sequence // n_sequences) * stride_group
        + (sequence % n_sequences) * stride_sequence
        + (rows % length) * stride_token
    )
    scale = tl.load(scales_ptr + rows, mask=row_exists, other=0.0)
    if AFFINE:
        offset = tl.load(offsets_ptr + rows, mask=row_exists, other=0.0)
    squares = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in tl.range(0, EMBEDDING, BLOCK_EMBEDDING):
        dims = start + tl.arange(0, BLOCK_EMBEDDING)
        exists = row_exists[:, None] & (dims < EMBEDDING)[None, :]
        values = tl.load(base[:, None] + dims[None, :], mask=exists, other=0.0).to(tl.float32) * scale[:, None]
        if AFFINE:
            values = tl.where((dims < EMBEDDING)[None, :], values + offset[:, None], 0.0)
        squares += tl.sum(values * values, axis=1)
    inverse = inverse_norm(squares)
    tl.store(divided_scales_ptr + rows, scale * inverse, mask=row_exists)
    if AFFINE:
        tl.store(divided_offsets_ptr + rows, offset * inverse, mask=row_exists)


_quantize_rows = Kernel(_quantize_rows_kernel, follows=True)
_divide_by_norms = Kernel(_divide_by_norms_kernel)


def quantized_rows(
    queries: Tensor, strides: tuple[int, ...], shape: tuple[int, int, int], precision: str, normalize: bool
) -> tuple[Tensor, Tensor]:
    """Values [Nq, Lq, d] and scales [Nq, Lq] of the queries, which have this `shape` by the strides of both tokens.

    `precision` is "int8" or "fp8". With `normalize`, the scales are divided by the norms of what was quantized.
    """
    dtype = torch.int8 if precision == "int8" else torch.float8_e4m3fn
    values = torch.empty(shape, dtype=dtype, device=queries.device)
    scales = torch.empty(shape[:2], dtype=torch.float32, device=queries.device)
    n_queries, length, size = shape
    block = max(16, power_of_two(size))
    block_rows = max(1, _BLOCK // block)
    _quantize_rows(
        (-(-n_queries * length // block_rows), 1, 1),
        (queries, values, scales),
        (n_queries * length, length),
        tuple(strides),
        (size, block, block_rows, LARGEST[precision], precision == "int8", normalize),
        (4, 1, None),
    )
    return values, scales


def divided_by_norms(
    values: Tensor, strides: tuple[int, ...], scales: Tensor, offsets: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Contiguous scales and offsets with which the embeddings that they stand for have norm 1.

    `values` [.., d] have the strides (group, document, token) of `Problem`.
    """
    divided = torch.empty_like(scales)
    divided_offsets = None if offsets is None else torch.empty_like(offsets)
    _, n_sequences, length = (1, 1, *scales.shape)[-3:]
    rows, size = scales.numel(), values.shape[-1]
    _divide_by_norms(
        (-(-rows // _NORM_ROWS), 1, 1),
        (values, scales, offsets, divided, divided_offsets),
        (rows, n_sequences, length),
        strides,
        (size, min(128, power_of_two(size)), _NORM_ROWS, offsets is not None),
        (4, 3, None),
    )
    return divided, divided_offsets
