"""What products of documents of few bits take: bytes of codes, queries in the order of these, a table of centroids."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...problem import Problem
from ..launch import kernel, wait_for_previous_kernel
from ..plan import ForwardPlan
from .common import ForwardTensors
from .quantized_rows import divided_rows, rounded_rows

# The largest entry of the table of a centroid of norm 1, far from the largest float16.
_LARGEST_ENTRY = tl.constexpr(64.0)
_LARGEST_VALUE = tl.constexpr(127.0)
# Centroids of a program of the table.
_CENTROIDS = 64
# Bytes of 4 bits are 0 to 127: of an index that is not its own, a permute leaves the sign of another byte, which is 0.
_LARGEST_BYTE = tl.constexpr(126)
_UNITS = tl.constexpr(32)

# Of the eight indices of 4 bits in a word, the bytes of the first four, from its lowest, and of the last four.
_FOUR_BITS = tl.constexpr("""{
.reg .b32 upper, a, b, c, d;
xor.b32 upper, $2, 0x88888888;
shr.u32 c, $2, 16;
shr.u32 d, upper, 16;
prmt.b32 a, $3, $4, $2;
prmt.b32 b, $5, $6, upper;
prmt.b32 c, $3, $4, c;
prmt.b32 d, $5, $6, d;
or.b32 $0, a, b;
or.b32 $1, c, d;
}""")
# Of the sixteen indices of 2 bits, those of even places and of odd ones of the lower half, and of the upper.
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
    """Words that a thread has of a row, or (0 bits: of 8) of half a row, and room for.

    Tensor cores take at least 32 elements of 8 bits at a time.
    """
    return max(2, triton.next_power_of_2(size // (128 // nbits if nbits else 32)))


@triton.constexpr_function
def values_size(size, nbits):
    """Elements that a query token in 8 bits takes."""
    return (128 // nbits if nbits else 32) * words_of(size, nbits)


@triton.jit
def _word(bytes_, FIRST: tl.constexpr):
    """Four bytes as a word."""
    places = tl.arange(0, bytes_.shape[0]) - FIRST
    here = (places >= 0) & (places < 4)
    return tl.sum(tl.where(here, (bytes_ & 0xFF) << 8 * tl.where(here, places, 0), 0), 0)


@triton.jit
def _bucket_bytes(weights_ptr, NBITS: tl.constexpr):
    """Bucket weights in bytes, [1 << NBITS], what 1 stands for, and the byte that stands for 0.

    Of several units, the one whose bytes are nearest to the weights.
    """
    indices = tl.arange(0, 1 << NBITS)
    weights = tl.load(weights_ptr + indices).to(tl.float32)
    lowest, highest = tl.minimum(tl.min(weights, 0), 0.0), tl.maximum(tl.max(weights, 0), 0.0)
    if NBITS == 2:
        lowest = -tl.maximum(-lowest, highest)
        highest = lowest * 0.0
    width = tl.maximum(highest - lowest, 1e-30)
    steps = (-tl.arange(0, _UNITS) + _LARGEST_BYTE).to(tl.float32)
    units = width / steps
    errors = weights[None, :] - tl.floor(weights[None, :] / units[:, None] + 0.5) * units[:, None]
    unit = width / (-tl.argmin(tl.sum(errors * errors, 1), 0) + _LARGEST_BYTE).to(tl.float32)
    # What is not a number makes every score so.
    unit += tl.sum(weights * 0.0, 0)
    zero = tl.zeros([1], tl.int32)
    if NBITS == 4:
        zero += tl.floor(0.5 - lowest / unit).to(tl.int32)
    zero = tl.max(zero, 0)
    return tl.floor(weights / unit + 0.5).to(tl.int32) + zero, unit, zero


@triton.jit
def _looked_up(indices, words):
    """Bytes of these words, for kernels that are interpreted, and know no permutes."""
    low, high = tl.where(indices & 4 != 0, words[1], words[0]), tl.where(indices & 4 != 0, words[3], words[2])
    return tl.where(indices & 8 != 0, high, low) >> 8 * (indices & 3) & 0xFF


@triton.jit
def four_bits(codes, words, PTX: tl.constexpr):
    """Words of bytes, of the first indices and of the last ones."""
    if PTX:
        first, last = tl.inline_asm_elementwise(
            _FOUR_BITS, "=&r,=&r,r,r,r,r,r", [codes, words[0], words[1], words[2], words[3]],
            dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        first, last = codes * 0, codes * 0
        for place in tl.static_range(4):
            first |= _looked_up(codes >> 4 * place & 15, words) << 8 * place
            last |= _looked_up(codes >> 16 + 4 * place & 15, words) << 8 * place
    return first, last


@triton.jit
def two_bits(codes, words, PTX: tl.constexpr):
    """Words of bytes, of even and odd indices of the lower half, and of the upper."""
    if PTX:
        a, b, c, d = tl.inline_asm_elementwise(
            _TWO_BITS, "=&r,=&r,=&r,=&r,r,r", [codes, words[0]],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        a, b, c, d = codes * 0, codes * 0, codes * 0, codes * 0
        for place in tl.static_range(4):
            a |= _looked_up(codes >> 4 * place & 3, words) << 8 * place
            b |= _looked_up(codes >> 4 * place + 2 & 3, words) << 8 * place
            c |= _looked_up(codes >> 16 + 4 * place & 3, words) << 8 * place
            d |= _looked_up(codes >> 18 + 4 * place & 3, words) << 8 * place
    return a, b, c, d


@triton.jit
def token_of_columns(COLUMNS: tl.constexpr):
    """The query token of every column: a thread's columns are tokens that lie together."""
    columns = tl.arange(0, COLUMNS)
    return columns % 8 // 2 * (COLUMNS // 4) + columns // 8 * 2 + columns % 2


@triton.jit
def _bytes(words):
    """The bytes [..., 2, 2] of words [...]."""
    even = tl.join(words.to(tl.int8), (words >> 16).to(tl.int8))
    odd = tl.join((words >> 8).to(tl.int8), (words >> 24).to(tl.int8))
    return tl.join(even, odd)


@triton.jit
def operand(words):
    """[rows, 16 * J] of the bytes of words [4, rows, J], in the order in which tensor cores take them of a thread."""
    ROWS: tl.constexpr = words.shape[1]
    J: tl.constexpr = words.shape[2]
    bytes_ = tl.permute(tl.reshape(_bytes(words), [4, ROWS, J // 2, 8]), (1, 2, 0, 3))
    return tl.reshape(bytes_, [ROWS, 16 * J])


@triton.jit
def query_values(
    query_ptr, query_length, stride_token,
    EMBEDDING: tl.constexpr,
    COLUMNS: tl.constexpr,
    NBITS: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """A query in int8 [columns, elements], an element for each that words have room for; and the columns' scales."""
    J: tl.constexpr = words_of(EMBEDDING, NBITS)
    ELEMENTS: tl.constexpr = 4 if NBITS == 0 else 32 // NBITS
    GROUPS: tl.constexpr = 8 if NBITS == 0 else 4
    HELD: tl.constexpr = EMBEDDING // (ELEMENTS * GROUPS)
    tokens = token_of_columns(COLUMNS)
    if HELD == J:
        # Of what is computed, Triton knows not that it is contiguous.
        places = tl.arange(0, EMBEDDING)
        exists = (tokens < query_length)[:, None]
    else:
        places = tl.arange(0, GROUPS * ELEMENTS * J)
        word = places // ELEMENTS % J
        exists = (tokens < query_length)[:, None] & (word < HELD)[None, :]
        places = (places // (ELEMENTS * J) * HELD + word) * ELEMENTS + places % ELEMENTS
    rows = tl.load(query_ptr + tokens[:, None] * stride_token + places[None, :], mask=exists, other=0.0)
    values, scale = rounded_rows(rows.to(tl.float32), tl.int8, NORMALIZE)
    return values, scale


@triton.jit
def operands_of(values, J: tl.constexpr):
    """The operands [16 * J, columns] of both halves of a query [columns, elements], in the order of `operand`."""
    COLUMNS: tl.constexpr = values.shape[0]
    values = tl.permute(tl.reshape(values, [COLUMNS, 2, 4, J // 2, 2, 4]), (3, 2, 4, 5, 0, 1))
    first, second = tl.split(tl.reshape(values, [16 * J, COLUMNS, 2]))
    return first, second


@triton.jit
def query_operand(values_ptr, part, COLUMNS: tl.constexpr, J: tl.constexpr):
    """[16 * J, columns] of what `_leave_query` has left: every thread loads what tensor cores take of it."""
    EIGHTS: tl.constexpr = COLUMNS // 8
    # Triton gives neighbours along the first dimension to neighbouring threads, where it takes nothing for contiguous.
    four, lanes = tl.arange(0, 4)[:, None, None], tl.arange(0, 8)[None, :, None]
    at = ((part * EIGHTS + tl.arange(0, EIGHTS)[None, None, :]) * 8 + lanes) * 4 + four
    values_ptr = values_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    words = tl.load(values_ptr + at[:, :, :, None] * J + tl.arange(0, J)[None, None, None, :])
    bytes_ = tl.reshape(_bytes(words), [4, 8, EIGHTS, J // 2, 8])
    return tl.reshape(tl.permute(bytes_, (3, 0, 4, 2, 1)), [16 * J, COLUMNS])


@triton.jit
def _leave_query(
    query_ptr, values_ptr, scales_ptr, query_length, stride_token,
    EMBEDDING: tl.constexpr,
    COLUMNS: tl.constexpr,
    NBITS: tl.constexpr,
    FACTOR: tl.constexpr,
):  # fmt: skip
    """Leave a query in int8, in the order of `query_operand`, and the scales of its columns times a factor.

    In memory the first of the elements of a byte of codes is in its highest bits, and the first byte of a word in its
    lowest; `four_bits` and `two_bits` begin at the lowest.
    """
    J: tl.constexpr = words_of(EMBEDDING, NBITS)
    ELEMENTS: tl.constexpr = 32 // NBITS
    values, scale = query_values(query_ptr, query_length, stride_token, EMBEDDING, COLUMNS, NBITS, False)
    columns, places = tl.arange(0, COLUMNS), tl.arange(0, 4 * ELEMENTS * J)
    word, element = places // ELEMENTS % J, places % ELEMENTS
    if NBITS == 4:
        part, byte = element // 4, element % 4 ^ 1
    else:
        part, byte = element // 8 * 2 + 1 - element % 2, element // 4 % 2 * 2 + 1 - element // 2 % 2
    at = (part[None, :] * COLUMNS + columns[:, None]) * 4 + (places // (ELEMENTS * J))[None, :]
    tl.store(values_ptr + at * (4 * J) + (word * 4 + byte)[None, :], values)
    tl.store(scales_ptr + columns, scale * FACTOR)


@kernel(follows=True)
def _table_kernel(
    queries_ptr, centroids_ptr, weights_ptr, table_ptr, values_ptr, scales_ptr, luts_ptr,
    n_centroids, query_length, stride_query, stride_query_token,
    NBITS: tl.constexpr,
    EMBEDDING: tl.constexpr,
    COLUMNS: tl.constexpr,
    CENTROIDS: tl.constexpr,
    QUERY_UNIT: tl.constexpr,
):  # fmt: skip
    """<centroid, v> [queries, centroids, columns], float16, scaled so that norms of 1 make at most `_LARGEST_ENTRY`.

    Less what bytes of 4 bits, which are not negative, add to <w, v>. Besides, queries in 8 bits, bucket weights in
    bytes, and what a unit of these is in the table.
    """
    wait_for_previous_kernel()
    LARGEST: tl.constexpr = _LARGEST_VALUE * EMBEDDING**0.5
    # One program of each query leaves the query, the others a block of the table.
    n_programs = tl.cdiv(n_centroids, CENTROIDS) + 1
    query = (tl.program_id(0) // n_programs).to(tl.int64)
    block = tl.program_id(0) % n_programs - 1
    queries_ptr += query * stride_query * QUERY_UNIT
    stride_query_token *= QUERY_UNIT
    bytes_, unit, zero = _bucket_bytes(weights_ptr, NBITS)
    if block < 0:
        SIZE: tl.constexpr = values_size(EMBEDDING, NBITS)
        values_ptr += query * COLUMNS * SIZE
        scales_ptr += query * COLUMNS
        _leave_query(
            queries_ptr, values_ptr, scales_ptr, query_length, stride_query_token, EMBEDDING, COLUMNS, NBITS,
            LARGEST / _LARGEST_ENTRY,
        )  # fmt: skip
        for word in tl.static_range(4):
            tl.store(luts_ptr + word, _word(bytes_, 4 * word))
        tl.store(luts_ptr + 4, (unit * (_LARGEST_ENTRY / LARGEST)).to(tl.int32, bitcast=True))
    else:
        tokens, dims = tl.arange(0, COLUMNS), tl.arange(0, triton.next_power_of_2(EMBEDDING))
        inside = dims < EMBEDDING
        at = queries_ptr + tokens[:, None] * stride_query_token + dims[None, :]
        rows = tl.load(at, mask=(tokens < query_length)[:, None] & inside[None, :], other=0.0)
        rows, _ = divided_rows(rows.to(tl.float32), _LARGEST_VALUE)
        # What bytes are more than weights, of all elements.
        more = tl.sum(tl.floor(rows + 0.5), axis=1) * zero * unit
        centroids = block * CENTROIDS + tl.arange(0, CENTROIDS)
        exists = centroids < n_centroids
        at = centroids_ptr + centroids[:, None] * EMBEDDING + dims[None, :]
        tile = tl.load(at, mask=exists[:, None] & inside[None, :], other=0.0).to(tl.float16)
        entries = (tl.dot(tile, tl.trans(rows.to(tl.float16))) - more[None, :]) * (_LARGEST_ENTRY / LARGEST)
        at = (query * n_centroids + centroids[:, None]) * COLUMNS + tokens[None, :]
        tl.store(table_ptr + at, entries.to(tl.float16), mask=exists[:, None])


def with_table(problem: Problem, plan: ForwardPlan, tensors: ForwardTensors) -> ForwardTensors:
    """With what is worked out of queries, centroids and bucket weights before any document is read."""
    assert tensors.centroids is not None
    columns, (n_centroids, size), nbits = plan.tile.columns, tensors.centroids.shape, plan.config.nbits
    n_queries, device = problem.n_queries, problem.device
    made = tensors._replace(
        table=torch.empty(n_queries, n_centroids, columns, dtype=torch.float16, device=device),
        values=torch.empty(n_queries, columns, values_size(size, nbits), dtype=torch.int8, device=device),
        queries_scale=torch.empty(n_queries, columns, dtype=torch.float32, device=device),
        luts=torch.empty(8, dtype=torch.int32, device=device),
    )
    _table_kernel(
        (n_queries * (-(-n_centroids // _CENTROIDS) + 1), 1, 1),
        (
            made.queries, made.centroids, made.bucket_weights, made.table, made.values, made.queries_scale, made.luts,
        ),
        (n_centroids, problem.query_length),
        plan.strides[:2],
        (nbits, size, columns, _CENTROIDS, plan.config.query_unit),
        (4, 1, None),
    )  # fmt: skip
    return made
