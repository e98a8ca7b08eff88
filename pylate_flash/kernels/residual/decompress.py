"""Embeddings decompressed on the chip: the centroid of a token plus the bucket weight of every element."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bucket_indices(
    residuals_ptr, tokens, exists, dim,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    NBITS: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Bucket indices [tokens, BLOCK_EMBEDDING] from element `dim` on; 0 past the end, or where no token exists.

    Eight elements are loaded together, as many as of a centroid in 16 bytes, so that a thread has those of both. Their
    groups come before the tokens, because Triton gives neighbours along the first dimension to neighbouring threads
    where none is contiguous.
    """
    TOKENS: tl.constexpr = tokens.shape[0]
    ROW_BYTES: tl.constexpr = EMBEDDING * NBITS // 8
    groups = dim // 8 + tl.arange(0, BLOCK_EMBEDDING // 8)
    places = groups[:, None] * NBITS + tl.arange(0, NBITS)[None, :]
    at = residuals_ptr + places[:, None, :] + tokens[None, :, None].to(tl.int64) * ROW_BYTES
    if PADDED:
        packed = tl.load(at, mask=exists[None, :, None] & (places < ROW_BYTES)[:, None, :], other=0)
    else:
        packed = tl.load(at)
    packed = tl.permute(packed, (1, 0, 2)).to(tl.int32)
    # The first of the elements of a byte is in its highest bits.
    indices = tl.join(packed >> 4, packed & 15)
    if NBITS == 2:
        indices = tl.join(indices >> 2, indices & 3)
    return tl.reshape(indices, [TOKENS, BLOCK_EMBEDDING])


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
