"""Embeddings decompressed on the chip: the centroid of a token plus the bucket weight of every element."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from ...problem import Problem
from ..launch import kernel, wait_for_previous_kernel
from ..tables import power_of_two

# Tokens that a program decompresses by bucket weights looked up in shared memory, and elements by permutes of bytes.
_TOKENS = 32
_PERMUTED_AT_ONCE = 8192
TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def bucket_indices(
    residuals_ptr, tokens, exists, dim,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    NBITS: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Bucket indices [tokens, BLOCK_EMBEDDING] from element `dim` on; 0 past the end, or where no token exists.

    Eight elements are loaded as a word, as many as of a centroid in 16 bytes, so that a thread has those of both. The
    words' dimension comes first, and they are addressed by bytes: Triton gives neighbours along the first dimension to
    neighbouring threads, a word each, where it takes nothing for contiguous.
    """
    ROW_BYTES: tl.constexpr = EMBEDDING * NBITS // 8
    WORD: tl.constexpr = tl.int32 if NBITS == 4 else tl.int16
    places = (dim // 8 + tl.arange(0, BLOCK_EMBEDDING // 8)) * NBITS
    at = residuals_ptr + places[:, None] + tokens[None, :].to(tl.int64) * ROW_BYTES
    at = at.to(tl.pointer_type(WORD), bitcast=True)
    words = tl.load(at, mask=exists[None, :] & (places < ROW_BYTES)[:, None], other=0) if PADDED else tl.load(at)
    words = tl.trans(words).to(tl.int32)
    # The first of the elements of a byte is in its highest bits, and the first byte of a word in its lowest.
    if NBITS == 4:
        words = tl.join(words, words >> 16)
    words = tl.join(words, words >> 8)
    words = tl.join(words >> 4, words)
    if NBITS == 2:
        words = tl.join(words >> 2, words)
    return tl.reshape(words & ((1 << NBITS) - 1), [tokens.shape[0], BLOCK_EMBEDDING])


@triton.jit
def decompressed(
    residuals_ptr, centroids_ptr, weights_ptr, tokens, codes, scale, exists, dim,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    NBITS: tl.constexpr,
    PADDED: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Normalised embeddings [tokens, BLOCK_EMBEDDING] from element `dim` on, in DTYPE.

    The residuals and `tokens` are those of one document or of all, `codes` are int64. Under PADDED, zeros where no
    token `exists` and past the embedding's end.
    """
    TOKENS: tl.constexpr = tokens.shape[0]
    indices = bucket_indices(residuals_ptr, tokens, exists, dim, EMBEDDING, BLOCK_EMBEDDING, NBITS, PADDED)
    # Looked up in shared memory. Loaded by their indices, weights would have other threads than centroids have.
    weights = tl.load(weights_ptr + tl.arange(0, 1 << NBITS))
    weights = tl.gather(weights, tl.reshape(indices, [TOKENS * BLOCK_EMBEDDING]), 0)
    weights = tl.reshape(weights, [TOKENS, BLOCK_EMBEDDING])
    dims = dim + tl.arange(0, BLOCK_EMBEDDING)
    at = centroids_ptr + codes[:, None] * EMBEDDING + dims[None, :]
    if PADDED:
        inside = exists[:, None] & (dims < EMBEDDING)[None, :]
        embeddings = tl.where(inside, tl.load(at, mask=inside, other=0.0) + weights, 0.0)
    else:
        embeddings = tl.load(at) + weights
    return (embeddings.to(tl.float32) * scale[:, None]).to(DTYPE)


# What eight indices stand for, as four pairs of float16: the lower bytes of weights, $5 to $8, and the upper ones, $9
# to $12, are looked up apart. Indices of 4 bits are a word; the highest bit of each chooses between halves of a table.
WEIGHTS_OF_FOUR_BITS = """
.reg .b32 n, s, n2, s2, a, b, lo, hi, lo2, hi2, w0, w1, w2, w3;
and.b32 n, $4, 0x77777777;
shr.u32 s, $4, 1;
and.b32 s, s, 0x44444444;
or.b32 s, s, 0x32103210;
shr.u32 n2, n, 16;
shr.u32 s2, s, 16;
prmt.b32 a, $5, $6, n;
prmt.b32 b, $7, $8, n;
prmt.b32 lo, a, b, s;
prmt.b32 a, $9, $10, n;
prmt.b32 b, $11, $12, n;
prmt.b32 hi, a, b, s;
prmt.b32 a, $5, $6, n2;
prmt.b32 b, $7, $8, n2;
prmt.b32 lo2, a, b, s2;
prmt.b32 a, $9, $10, n2;
prmt.b32 b, $11, $12, n2;
prmt.b32 hi2, a, b, s2;
prmt.b32 w0, lo, hi, 0x4051;
prmt.b32 w1, lo, hi, 0x6273;
prmt.b32 w2, lo2, hi2, 0x4051;
prmt.b32 w3, lo2, hi2, 0x6273;
"""
# Those of 2 bits are half a word.
WEIGHTS_OF_TWO_BITS = """
.reg .b32 n, s, a, b, lo, hi, lo2, hi2, w0, w1, w2, w3;
and.b32 n, $4, 0x3333;
shr.u32 s, $4, 2;
and.b32 s, s, 0x3333;
prmt.b32 lo, $5, $5, s;
prmt.b32 hi, $9, $9, s;
prmt.b32 lo2, $5, $5, n;
prmt.b32 hi2, $9, $9, n;
prmt.b32 a, lo, hi, 0x4051;
prmt.b32 b, lo2, hi2, 0x4051;
prmt.b32 w0, a, b, 0x5410;
prmt.b32 w1, a, b, 0x7632;
prmt.b32 a, lo, hi, 0x6273;
prmt.b32 b, lo2, hi2, 0x6273;
prmt.b32 w2, a, b, 0x5410;
prmt.b32 w3, a, b, 0x7632;
"""


def _decompression(weights: str, to: str) -> tl.constexpr:
    """With the centroid, $13 to $16, added in float16, times the scale $17 in float32, in the type of the result."""
    added = "".join(f"add.rn.f16x2 w{pair}, w{pair}, ${13 + pair};\n" for pair in range(4))
    scaled = "".join(
        f"mov.b32 {{h, g}}, w{pair};\ncvt.f32.f16 f, h;\ncvt.f32.f16 e, g;\nmul.f32 f, f, $17;\nmul.f32 e, e, $17;\n"
        f"cvt.rn.{to}x2.f32 ${pair}, e, f;\n"
        for pair in range(4)
    )
    return tl.constexpr("{\n.reg .b16 h, g;\n.reg .f32 f, e;" + weights + added + scaled + "}")


_FOUR_BITS_TO_FP16 = _decompression(WEIGHTS_OF_FOUR_BITS, "f16")
_FOUR_BITS_TO_BF16 = _decompression(WEIGHTS_OF_FOUR_BITS, "bf16")
_TWO_BITS_TO_FP16 = _decompression(WEIGHTS_OF_TWO_BITS, "f16")
_TWO_BITS_TO_BF16 = _decompression(WEIGHTS_OF_TWO_BITS, "bf16")
_OPERANDS = tl.constexpr("=&r,=&r,=&r,=&r," + "r," * 13 + "f")


@triton.jit
def _bytes_apart(weights_ptr, FIRST: tl.constexpr):
    """The lower bytes of four weights of 16 bits as a word, and the upper ones."""
    words_ptr = weights_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    a, b = tl.load(words_ptr + FIRST // 2), tl.load(words_ptr + FIRST // 2 + 1)
    lower = (a & 0xFF) | (a >> 8 & 0xFF00) | (b & 0xFF) << 16 | (b >> 16 & 0xFF) << 24
    upper = (a >> 8 & 0xFF) | (a >> 16 & 0xFF00) | (b >> 8 & 0xFF) << 16 | (b >> 24 & 0xFF) << 24
    return lower, upper


@triton.jit
def _decompressed_pairs(
    residuals_ptr, centroids_ptr, weights_ptr, tokens, codes, scale,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    NBITS: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """`decompressed` of weights and centroids in float16, as words [tokens, BLOCK_EMBEDDING / 2] of two elements."""
    TOKENS: tl.constexpr = tokens.shape[0]
    CHUNKS: tl.constexpr = BLOCK_EMBEDDING // 8
    WORD: tl.constexpr = tl.int32 if NBITS == 4 else tl.int16
    chunks, fours = tl.arange(0, CHUNKS), tl.arange(0, 4)
    inside = (chunks < EMBEDDING // 8)[None, :] & (tokens >= 0)[:, None]
    at = tokens[:, None].to(tl.int64) * (EMBEDDING // 8) + chunks[None, :]
    indices = tl.load(residuals_ptr.to(tl.pointer_type(WORD), bitcast=True) + at, mask=inside, other=0).to(tl.int32)
    at = codes[:, None, None] * (EMBEDDING // 2) + (chunks[:, None] * 4 + fours[None, :])[None, :, :]
    centroids_ptr = centroids_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    pairs = tl.reshape(tl.load(centroids_ptr + at, mask=inside[:, :, None], other=0), [TOKENS, CHUNKS, 2, 2])
    even, odd = tl.split(pairs)
    c0, c2 = tl.split(even)
    c1, c3 = tl.split(odd)
    four: tl.constexpr = _FOUR_BITS_TO_FP16 if tl.float16 == DTYPE else _FOUR_BITS_TO_BF16
    two: tl.constexpr = _TWO_BITS_TO_FP16 if tl.float16 == DTYPE else _TWO_BITS_TO_BF16
    code: tl.constexpr = four if NBITS == 4 else two
    lower0, upper0 = _bytes_apart(weights_ptr, 0)
    lower1, upper1 = lower0, upper0
    lower2, upper2 = lower0, upper0
    lower3, upper3 = lower0, upper0
    if NBITS == 4:
        lower1, upper1 = _bytes_apart(weights_ptr, 4)
        lower2, upper2 = _bytes_apart(weights_ptr, 8)
        lower3, upper3 = _bytes_apart(weights_ptr, 12)
    scale = tl.broadcast_to(scale[:, None], [TOKENS, CHUNKS])
    r0, r1, r2, r3 = tl.inline_asm_elementwise(
        code, _OPERANDS,
        [indices, lower0, lower1, lower2, lower3, upper0, upper1, upper2, upper3, c0, c1, c2, c3, scale],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), [TOKENS, 4 * CHUNKS])


@kernel(follows=True)
def _decompress_kernel(
    residuals_ptr, codes_ptr, centroids_ptr, weights_ptr, scales_ptr, embeddings_ptr, n_tokens,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    NBITS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    DTYPE: tl.constexpr,
    PERMUTED: tl.constexpr,
):  # fmt: skip
    """Normalised embeddings [n_tokens, EMBEDDING]."""
    wait_for_previous_kernel()
    PADDED: tl.constexpr = BLOCK_EMBEDDING > EMBEDDING
    # The last token again, rather than one that does not exist.
    tokens = tl.minimum(tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS), n_tokens - 1)
    codes, scale = tl.load(codes_ptr + tokens).to(tl.int64), tl.load(scales_ptr + tokens)
    row = tokens[:, None].to(tl.int64) * EMBEDDING
    if PERMUTED:
        pairs = _decompressed_pairs(
            residuals_ptr, centroids_ptr, weights_ptr, tokens, codes, scale, EMBEDDING, BLOCK_EMBEDDING, NBITS, DTYPE
        )
        embeddings_ptr = embeddings_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        dims = tl.arange(0, BLOCK_EMBEDDING // 2)
        tl.store(embeddings_ptr + row // 2 + dims[None, :], pairs, mask=(dims < EMBEDDING // 2)[None, :])
    else:
        embeddings = decompressed(
            residuals_ptr, centroids_ptr, weights_ptr, tokens, codes, scale, tokens >= 0, 0, EMBEDDING, BLOCK_EMBEDDING,
            NBITS, PADDED, DTYPE,
        )  # fmt: skip
        dims = tl.arange(0, BLOCK_EMBEDDING)
        tl.store(embeddings_ptr + row + dims[None, :], embeddings, mask=(dims < EMBEDDING)[None, :])


def decompressed_embeddings(problem: Problem, codes: tuple[Any, ...], nbits: int) -> Tensor:
    """Normalised embeddings [T, d] in the type of the queries, of `forward.Codes`."""
    numbers, residuals, centroids, weights, _, scales, _ = codes
    n_tokens, size = len(numbers), problem.size
    embeddings = torch.empty(n_tokens, size, dtype=problem.dtype, device=problem.device)
    # The interpreter knows no permutes.
    halves = centroids.dtype == torch.float16 and problem.dtype != torch.float32
    permuted = halves and not knobs.runtime.interpret
    block = max(32, power_of_two(size))
    at_once = max(1, _PERMUTED_AT_ONCE // block) if permuted else _TOKENS
    _decompress_kernel(
        (-(-n_tokens // at_once), 1, 1),
        (residuals, numbers, centroids, weights, scales, embeddings),
        (n_tokens,),
        (),
        (size, block, nbits, at_once, TYPES[problem.dtype], permuted),
        (4, 1, None),
    )
    return embeddings
