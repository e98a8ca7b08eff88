"""Operands of products with few-bit documents: codes as bytes, queries in matching order, a table of centroids."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...problem import Problem
from ..launch import kernel, wait_for_previous_kernel
from ..plan import ForwardPlan
from .common import ForwardTensors
from .quantized_rows import largest_magnitudes, multiplied, rounded_rows, scales_of

# The bits of 1.5 * 2**23 in float32.
BITS_OF_SUM = tl.constexpr(0x4B400000)
# Centroids per program of the table kernel.
_CENTROIDS = 64
# Units tried for bucket weights as bytes, from the largest weight / 126 on, and roundings tried for each unit. More
# trials reduce errors by up to a tenth, but every query waits for the program that runs them.
_LARGEST_BYTE = tl.constexpr(126)
_UNITS = tl.constexpr(32)
_ROUNDINGS = tl.constexpr(2)

# Look up the eight 4-bit indices of a word: bytes of the lowest four, then of the highest four. Both halves of the
# table are looked up; the highest bit of each index, moved to the sign bit of a byte, selects one.
_FOUR_BITS = tl.constexpr("""{
.reg .b32 n, m, s, a, b, c, d, e, f;
and.b32 n, $2, 0x77777777;
shl.b32 s, $2, 4;
shr.u32 m, n, 16;
prmt.b32 a, $3, $4, n;
prmt.b32 b, $5, $6, n;
prmt.b32 c, $3, $4, m;
prmt.b32 d, $5, $6, m;
prmt.b32 e, s, $2, 0xD9C8;
prmt.b32 f, s, $2, 0xFBEA;
lop3.b32 $0, a, b, e, 0xD8;
lop3.b32 $1, c, d, f, 0xD8;
}""")
# Look up the sixteen 2-bit indices of a word: bytes of even and of odd indices of the lower half, then of the upper.
_TWO_BITS = tl.constexpr("""{
.reg .b32 even, odd, c, d;
and.b32 even, $4, 0x77777777;
shr.u32 odd, $4, 2;
and.b32 odd, odd, 0x77777777;
shr.u32 c, even, 16;
shr.u32 d, odd, 16;
prmt.b32 $0, $5, $5, even;
prmt.b32 $1, $5, $5, odd;
prmt.b32 $2, $5, $5, c;
prmt.b32 $3, $5, $5, d;
}""")


@triton.constexpr_function
def words_of(size, nbits):
    """Words per thread of a padded row of codes, or of half a row of 8 bits, shared by four threads."""
    return values_size(size, nbits) // (128 // nbits if nbits < 8 else 32)


@triton.constexpr_function
def values_size(size, nbits):
    """Elements of a padded row: each of four threads holds at least two words, or with 8 bits two of either half."""
    return max(256 // nbits if nbits < 8 else 64, triton.next_power_of_2(size))


@triton.constexpr_function
def unit_of_table(size):
    """Factor of the table's products: those of a centroid of norm 1 are at most 64, where float16 ends at 65504."""
    return 64 / (127 * size**0.5)


@triton.jit
def _word(bytes_, FIRST: tl.constexpr):
    """Pack the four bytes from FIRST on into a word."""
    positions = tl.arange(0, bytes_.shape[0]) - FIRST
    selected = (positions >= 0) & (positions < 4)
    return tl.sum(tl.where(selected, (bytes_ & 0xFF) << 8 * tl.where(selected, positions, 0), 0), 0)


@triton.jit
def _rounded(weights, largest, trial):
    """Round weights to bytes, with the unit and the rounding of a trial."""
    unit = largest / (-(trial // _ROUNDINGS) + _LARGEST_BYTE).to(tl.float32)
    return tl.floor(weights / unit + (trial % _ROUNDINGS).to(tl.float32) / _ROUNDINGS)


@triton.jit
def _bucket_bytes(weights_ptr, NBITS: tl.constexpr):
    """Round bucket weights to bytes; return these [1 << NBITS], their unit, and an offset in units to add to each.

    Of several units and roundings, take the bytes whose linear fit to the weights has the smallest squared error.
    """
    COUNT: tl.constexpr = 1 << NBITS
    weights = tl.load(weights_ptr + tl.arange(0, COUNT)).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(weights), 0), 1e-30)
    mean = tl.sum(weights, 0) / COUNT
    trials = tl.arange(0, _UNITS * _ROUNDINGS)
    bytes_ = _rounded(weights[None, :], largest, trials[:, None])
    deviations = bytes_ - tl.sum(bytes_, 1)[:, None] / COUNT
    slopes = tl.sum(deviations * (weights - mean)[None, :], 1) / tl.maximum(tl.sum(deviations * deviations, 1), 1e-30)
    errors = (weights - mean)[None, :] - deviations * slopes[:, None]
    best = tl.argmin(tl.sum(errors * errors, 1), 0)
    bytes_ = _rounded(weights, largest, best)
    mean_byte = tl.sum(bytes_, 0) / COUNT
    deviations = bytes_ - mean_byte
    spread = tl.sum(deviations * deviations, 0)
    # A NaN weight makes every score NaN.
    unit = tl.sum(deviations * (weights - mean), 0) / tl.maximum(spread, 1e-30) + tl.sum(weights * 0.0, 0)
    # If all weights are equal, any unit will do.
    unit = tl.where(spread > 0, unit, tl.where(mean == mean, largest, mean))
    return bytes_.to(tl.int32), unit, mean / unit - mean_byte


@triton.jit
def _looked_up(indices, words):
    """Look up bytes of these words, for interpreted kernels, which have no byte permutes."""
    low, high = tl.where(indices & 4 != 0, words[1], words[0]), tl.where(indices & 4 != 0, words[3], words[2])
    return tl.where(indices & 8 != 0, high, low) >> 8 * (indices & 3) & 0xFF


@triton.jit
def four_bits(codes, words, PTX: tl.constexpr):
    """Look up 4-bit indices: words of bytes of the lowest four, and of the highest four."""
    if PTX:
        first, last = tl.inline_asm_elementwise(
            _FOUR_BITS, "=&r,=&r,r,r,r,r,r", [codes, words[0], words[1], words[2], words[3]],
            dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        first, last = codes * 0, codes * 0
        for byte in tl.static_range(4):
            first |= _looked_up(codes >> 4 * byte & 15, words) << 8 * byte
            last |= _looked_up(codes >> 16 + 4 * byte & 15, words) << 8 * byte
    return first, last


@triton.jit
def two_bits(codes, words, PTX: tl.constexpr):
    """Look up 2-bit indices: words of bytes of even and odd indices of the lower half, and of the upper half."""
    if PTX:
        a, b, c, d = tl.inline_asm_elementwise(
            _TWO_BITS, "=&r,=&r,=&r,=&r,r,r", [codes, words[0]],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        a, b, c, d = codes * 0, codes * 0, codes * 0, codes * 0
        for byte in tl.static_range(4):
            a |= _looked_up(codes >> 4 * byte & 3, words) << 8 * byte
            b |= _looked_up(codes >> 4 * byte + 2 & 3, words) << 8 * byte
            c |= _looked_up(codes >> 16 + 4 * byte & 3, words) << 8 * byte
            d |= _looked_up(codes >> 18 + 4 * byte & 3, words) << 8 * byte
    return a, b, c, d


@triton.jit
def token_of_columns(COLUMNS: tl.constexpr):
    """The query token of every column; the columns of a thread are contiguous tokens."""
    columns = tl.arange(0, COLUMNS)
    return columns % 8 // 2 * (COLUMNS // 4) + columns // 8 * 2 + columns % 2


@triton.jit
def _bytes(words, DTYPE: tl.constexpr):
    """Reinterpret words [...] as bytes [..., 2, 2], int8 or fp8."""
    even = tl.join(words.to(tl.int8), (words >> 16).to(tl.int8))
    odd = tl.join((words >> 8).to(tl.int8), (words >> 24).to(tl.int8))
    return tl.join(even, odd).to(DTYPE, bitcast=True)


@triton.jit
def operand(words, DTYPE: tl.constexpr):
    """The bytes [rows, 16 * J] of words [rows, 4 * J], in the per-thread order that tensor cores take."""
    ROWS: tl.constexpr = words.shape[0]
    J: tl.constexpr = words.shape[1] // 4
    bytes_ = tl.permute(tl.reshape(_bytes(words, DTYPE), [ROWS, 4, J // 2, 8]), (0, 2, 1, 3))
    return tl.reshape(bytes_, [ROWS, 16 * J])


@triton.jit
def query_values(
    query_ptr, query_length, stride_token, COLUMNS: tl.constexpr, config: tl.constexpr, DTYPE: tl.constexpr
):
    """Load a padded query [columns, elements], in 16 bits if documents are, else quantized to 8, and column scales."""
    EMBEDDING: tl.constexpr = config.size
    NBITS: tl.constexpr = config.nbits
    tokens, dims = token_of_columns(COLUMNS), tl.arange(0, values_size(EMBEDDING, NBITS))
    exists = (tokens < query_length)[:, None]
    if dims.shape[0] > EMBEDDING:
        exists = exists & (dims < EMBEDDING)[None, :]
    rows = tl.load(query_ptr + tokens[:, None] * stride_token + dims[None, :], mask=exists, other=0.0)
    if NBITS == 16:
        values, scale = rows, tl.full([COLUMNS], 1.0, tl.float32)
    else:
        values, scale = rounded_rows(rows.to(tl.float32), DTYPE, config.normalize)
    return values, scale


@triton.jit
def operands_of(values, J: tl.constexpr):
    """Operands [16 * J, columns] of both halves of a query [columns, elements], in the element order of `operand`."""
    COLUMNS: tl.constexpr = values.shape[0]
    values = tl.permute(tl.reshape(values, [COLUMNS, 2, 4, J // 2, 2, 4]), (3, 2, 4, 5, 0, 1))
    first, second = tl.split(tl.reshape(values, [16 * J, COLUMNS, 2]))
    return first, second


@triton.jit
def query_operand(values_ptr, part, COLUMNS: tl.constexpr, J: tl.constexpr):
    """Load an operand [16 * J, columns] that `_table_kernel` wrote: each thread loads what tensor cores take of it."""
    values_ptr = values_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    offsets = (part * COLUMNS + tl.arange(0, COLUMNS)[:, None]) * (4 * J) + tl.arange(0, 4 * J)[None, :]
    words = tl.load(values_ptr + tl.max_contiguous(offsets, [1, J]))
    bytes_ = tl.reshape(_bytes(words, tl.int8), [COLUMNS, 4, J // 2, 8])
    return tl.reshape(tl.permute(bytes_, (2, 1, 3, 0)), [16 * J, COLUMNS])


@kernel(follows=True, config="nbits size columns centroids query_unit normalize")
def _table_kernel(
    queries_ptr, centroids_ptr, weights_ptr, table_ptr, values_ptr, scales_ptr, luts_ptr,
    n_centroids, query_length, stride_query, stride_query_token, config: tl.constexpr,
):  # fmt: skip
    """Write <centroid, v> [queries, centroids, columns], float16, times `unit_of_table`.

    One more program per query writes the query in int8, in the order of `query_operand`; the column scales in the unit
    of the table, and the bits at which accumulators start; and the bucket weights as bytes, followed by their unit in
    the table.

    A byte of codes holds its first element in the highest bits, and a word its first byte in the lowest bits;
    `four_bits` and `two_bits` start at the lowest bits.
    """
    wait_for_previous_kernel()
    NBITS: tl.constexpr = config.nbits
    EMBEDDING: tl.constexpr = config.size
    COLUMNS: tl.constexpr = config.columns
    n_programs = tl.cdiv(n_centroids, config.centroids) + 1
    query = (tl.program_id(0) // n_programs).to(tl.int64)
    block = tl.program_id(0) % n_programs - 1
    queries_ptr += query * stride_query * config.query_unit
    stride_query_token *= config.query_unit
    if block < 0:
        values_ptr += query * COLUMNS * values_size(EMBEDDING, NBITS)
        scales_ptr += query * COLUMNS * 2
        J: tl.constexpr = words_of(EMBEDDING, NBITS)
        ELEMENTS: tl.constexpr = 32 // NBITS
        bytes_, unit, offset = _bucket_bytes(weights_ptr, NBITS)
        for word in tl.static_range(4):
            tl.store(luts_ptr + word, _word(bytes_, 4 * word))
        tl.store(luts_ptr + 4, (unit * unit_of_table(EMBEDDING)).to(tl.int32, bitcast=True))
        values, scale = query_values(queries_ptr, query_length, stride_query_token, COLUMNS, config, tl.int8)
        columns, positions = tl.arange(0, COLUMNS), tl.arange(0, 4 * ELEMENTS * J)
        word, element = positions // ELEMENTS % J, positions % ELEMENTS
        if NBITS == 4:
            part, byte = element // 4, element % 4 ^ 1
        else:
            part, byte = element // 8 * 2 + 1 - element % 2, element // 4 % 2 * 2 + 1 - element // 2 % 2
        row_offsets = (part[None, :] * COLUMNS + columns[:, None]) * 4 + (positions // (ELEMENTS * J))[None, :]
        tl.store(values_ptr + row_offsets * (4 * J) + (word * 4 + byte)[None, :], values)
        tl.store(scales_ptr + columns, scale / unit_of_table(EMBEDDING))
        begin = tl.floor(tl.sum(values.to(tl.int32), axis=1).to(tl.float32) * offset + 0.5).to(tl.int32) + BITS_OF_SUM
        tl.store(scales_ptr + COLUMNS + columns, begin.to(tl.float32, bitcast=True))
    else:
        tokens, dims = tl.arange(0, COLUMNS), tl.arange(0, triton.next_power_of_2(EMBEDDING))
        inside = dims < EMBEDDING
        at = queries_ptr + tokens[:, None] * stride_query_token + dims[None, :]
        rows = tl.load(at, mask=(tokens < query_length)[:, None] & inside[None, :], other=0.0)
        rows = rows.to(tl.float32)
        rows = multiplied(rows, scales_of(largest_magnitudes(rows), tl.int8)[1])
        centroids = block * config.centroids + tl.arange(0, config.centroids)
        exists = centroids < n_centroids
        at = centroids_ptr + centroids[:, None] * EMBEDDING + dims[None, :]
        tile = tl.load(at, mask=exists[:, None] & inside[None, :], other=0.0).to(tl.float16)
        entries = tl.dot(tile, tl.trans(rows.to(tl.float16))) * unit_of_table(EMBEDDING)
        at = (query * n_centroids + centroids[:, None]) * COLUMNS + tokens[None, :]
        tl.store(table_ptr + at, entries.to(tl.float16), mask=exists[:, None])


def with_table(problem: Problem, plan: ForwardPlan, tensors: ForwardTensors) -> ForwardTensors:
    """Add the tensors that are computed from queries, centroids and bucket weights before any document is read."""
    assert tensors.centroids is not None
    columns, (n_centroids, size), nbits = plan.tile.columns, tensors.centroids.shape, plan.config.nbits
    n_queries, device = problem.n_queries, problem.device
    inputs = tensors._replace(
        table=torch.empty(n_queries, n_centroids, columns, dtype=torch.float16, device=device),
        values=torch.empty(n_queries, columns, values_size(size, nbits), dtype=torch.int8, device=device),
        queries_scale=torch.empty(n_queries, 2, columns, dtype=torch.float32, device=device),
        luts=torch.empty(8, dtype=torch.int32, device=device),
    )
    _table_kernel(
        (n_queries * (-(-n_centroids // _CENTROIDS) + 1), 1, 1),
        (
            inputs.queries, inputs.centroids, inputs.bucket_weights, inputs.table, inputs.values, inputs.queries_scale,
            inputs.luts,
        ),
        (n_centroids, problem.query_length),
        plan.strides[:2],
        (nbits, size, columns, _CENTROIDS, plan.config.query_unit, False),
        (4, 1, None),
    )  # fmt: skip
    return inputs
