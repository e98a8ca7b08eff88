"""Embeddings decompressed on the chip: the centroid of a token plus the bucket weight of every element."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..launch import kernel, wait_for_previous_kernel
from ..tables import power_of_two

# Tokens that a program decompresses.
_TOKENS = 32
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


@kernel(follows=True)
def _decompress_kernel(
    residuals_ptr, codes_ptr, centroids_ptr, weights_ptr, scales_ptr, embeddings_ptr, n_tokens,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    NBITS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Normalised embeddings [n_tokens, EMBEDDING]."""
    wait_for_previous_kernel()
    PADDED: tl.constexpr = BLOCK_EMBEDDING > EMBEDDING
    # The last token again, rather than one that does not exist.
    tokens = tl.minimum(tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS), n_tokens - 1)
    codes, scale = tl.load(codes_ptr + tokens).to(tl.int64), tl.load(scales_ptr + tokens)
    embeddings = decompressed(
        residuals_ptr, centroids_ptr, weights_ptr, tokens, codes, scale, tokens >= 0, 0, EMBEDDING, BLOCK_EMBEDDING,
        NBITS, PADDED, DTYPE,
    )  # fmt: skip
    dims = tl.arange(0, BLOCK_EMBEDDING)
    at = embeddings_ptr + tokens[:, None].to(tl.int64) * EMBEDDING + dims[None, :]
    tl.store(at, embeddings, mask=(dims < EMBEDDING)[None, :])


def decompressed_embeddings(problem: Problem, codes: tuple[Any, ...], nbits: int) -> Tensor:
    """Normalised embeddings [T, d] in the type of the queries, of `forward.Codes`."""
    numbers, residuals, centroids, weights, _, scales, _ = codes
    n_tokens, size = len(numbers), problem.size
    embeddings = torch.empty(n_tokens, size, dtype=problem.dtype, device=problem.device)
    _decompress_kernel(
        (-(-n_tokens // _TOKENS), 1, 1),
        (residuals, numbers, centroids, weights, scales, embeddings),
        (n_tokens,),
        (),
        (size, max(32, power_of_two(size)), nbits, _TOKENS, TYPES[problem.dtype]),
        (4, 1, None),
    )
    return embeddings
