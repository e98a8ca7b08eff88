"""Decompose float32 embeddings into rows of float16, for the half-precision kernels.

An element rounded to float16 (upper half) and its remainder rounded to float16 (lower half) together keep 22 of its 24
bits. A query row becomes [lower, upper, upper], a document row [upper, lower, upper]. Their dot product, three times as
long, is the sum of the three products of halves that are not below the rounding error. The small ones come first, as
tensor cores truncate when they accumulate. Rows are first divided by powers of 2; similarities are multiplied by these,
as they are by norms.

On Hopper, `forward.hopper_pairs` decomposes tokens while it multiplies them, but computes no argmax, and takes at most
128 elements; on other GPUs, float32 would be multiplied outside tensor cores. If torch allows TF32 products of float32,
only the upper halves are used: they have its 11 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..problem import rounded_total
from .config import stride_unit
from .launch import kernel
from .reductions import max_along
from .rows import Norms, row_addresses, row_layout, rows_of_block
from .tables import power_of_two

# float32 exponents, as bits: the smallest and largest power of 2 that rows are divided by, the power of rows with an
# infinite element, infinity, and what the largest elements become (`forward.hopper_pairs`).
_SMALLEST, _LARGEST, _OF_INFINITE, _INFINITE, _UNIT = (
    tl.constexpr(exponent << 23) for exponent in (14, 253, 133, 255, 13)
)
_INVERSE = tl.constexpr(254 << 23)
_LARGEST_HALF = tl.constexpr(65504.0)
# Elements that a program decomposes.
_ELEMENTS = 4096


@triton.jit
def _decompose(
    embeddings_ptr, norms_ptr, out_ptr, scales_ptr, block, n_rows, n_sequences, length, strides,
    OF_DOCUMENTS: tl.constexpr, config: tl.constexpr,
):  # fmt: skip
    rows, exists = rows_of_block(block, n_rows, config.block_rows)
    base = embeddings_ptr + row_addresses(rows, n_sequences, length, strides[0], strides[1], strides[2])
    dims = tl.arange(0, config.block)
    in_bounds = exists[:, None] & (dims < config.size)[None, :]
    values = tl.load(base[:, None] + dims[None, :], mask=in_bounds, other=0.0)
    bits = max_along(tl.abs(values), 1).to(tl.int32, bitcast=True) & _INFINITE
    clamped = tl.minimum(tl.maximum(bits, _SMALLEST), _LARGEST)
    bits = tl.where(bits == _INFINITE, _OF_INFINITE, clamped) - _UNIT
    values *= (-bits + _INVERSE).to(tl.float32, bitcast=True)[:, None]
    out_rows = out_ptr + rows.to(tl.int64)[:, None] * (config.parts * config.padded) + dims[None, :]
    mask = exists[:, None] & (dims < config.padded)[None, :]
    if config.parts == 1:
        tl.store(out_rows, values.to(tl.float16), mask=mask)
    else:
        # Only the lower half of an infinite element is infinite: upper halves also meet lower halves, which may be 0.
        at_most = tl.minimum(values, _LARGEST_HALF, propagate_nan=tl.PropagateNan.ALL)
        upper = tl.maximum(at_most, -_LARGEST_HALF, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
        lower = (values - upper.to(tl.float32)).to(tl.float16)
        tl.store(out_rows, upper if OF_DOCUMENTS else lower, mask=mask)
        tl.store(out_rows + config.padded, lower if OF_DOCUMENTS else upper, mask=mask)
        tl.store(out_rows + 2 * config.padded, upper, mask=mask)
    scale = bits.to(tl.float32, bitcast=True)
    if norms_ptr is not None:
        scale *= tl.load(norms_ptr + rows, mask=exists, other=0.0)
    tl.store(scales_ptr + rows, scale, mask=exists)


@kernel(config="size padded parts block block_rows unit")
def _decompose_kernel(
    queries_ptr, documents_ptr, queries_norms_ptr, documents_norms_ptr, queries_out_ptr, documents_out_ptr,
    queries_scales_ptr, documents_scales_ptr, cu_seqlens_ptr,
    blocks, n_rows, n_sequences, length, document_rows, document_sequences, document_length, n_documents,
    stride_group, stride_query, stride_token, stride_document_group, stride_document, stride_document_token,
    config: tl.constexpr,
):  # fmt: skip
    """The first `blocks` programs take queries, the others documents; strides are divided by `unit`.

    For packed documents, `document_rows` is the planned total, and cu_seqlens holds the actual one.
    """
    block = tl.program_id(0)
    UNIT: tl.constexpr = config.unit
    if block < blocks:
        strides = stride_group * UNIT, stride_query * UNIT, stride_token * UNIT
        _decompose(
            queries_ptr, queries_norms_ptr, queries_out_ptr, queries_scales_ptr, block, n_rows, n_sequences, length,
            strides, False, config,
        )  # fmt: skip
    else:
        strides = stride_document_group * UNIT, stride_document * UNIT, stride_document_token * UNIT
        if cu_seqlens_ptr is not None:
            document_rows = tl.minimum(tl.load(cu_seqlens_ptr + n_documents).to(tl.int32), document_rows)
        _decompose(
            documents_ptr, documents_norms_ptr, documents_out_ptr, documents_scales_ptr, block - blocks, document_rows,
            document_sequences, document_length, strides, True, config,
        )  # fmt: skip


def decompose(
    queries: Tensor, documents: Tensor, size: int, norms: Norms | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor, Norms]:
    """Queries and documents [.., d] as float16 rows [.., size], and the factors that their similarities need.

    `size` is d rounded up to a multiple of 8, or 3 times that. Rows are contiguous, up to three dimensions come before
    d, and no size is 0. `norms` are those that embeddings are to be divided by, if any. Packed documents need
    `cu_seqlens`; outputs hold `rounded_total` of their tokens, so that a recording of one total can be replayed for
    others.
    """
    d = queries.shape[-1]
    parts = size // (-(-d // 8) * 8)
    rows, lengths, strides = row_layout(queries)
    document_rows, document_lengths, document_strides = row_layout(documents)
    shapes: list[Sequence[int]] = [queries.shape[:-1], documents.shape[:-1]]
    n_documents = 0
    if cu_seqlens is not None:
        document_rows = rounded_total(document_rows)
        document_lengths, shapes[1], n_documents = (1, document_rows), (document_rows,), len(cu_seqlens) - 1
    out = [torch.empty(*shape, size, dtype=torch.float16, device=queries.device) for shape in shapes]
    scales = [torch.empty(*shape, dtype=torch.float32, device=queries.device) for shape in shapes]
    unit, block = stride_unit((*strides, *document_strides)), max(16, power_of_two(size // parts))
    block_rows = max(1, _ELEMENTS // block)
    blocks, document_blocks = -(-rows // block_rows), -(-document_rows // block_rows)
    _decompose_kernel(
        (blocks + document_blocks, 1, 1),
        (queries, documents, *(norms or (None, None)), *out, *scales, cu_seqlens),
        (blocks, rows, *lengths, document_rows, *document_lengths, n_documents),
        tuple([stride // unit for stride in (*strides, *document_strides)]),
        (d, size // parts, parts, block, block_rows, unit),
        (4, 1, None),
    )
    return out[0], out[1], Norms(*scales)
