"""Decompression of residual codes on the chip: the centroid of a token plus the bucket weight of every element."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..launch import kernel, wait_for_previous_kernel
from ..tables import power_of_two
from ..tiles import Blocks

# Tokens per program.
_TOKENS = 32
TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def decompressed(
    codec, tokens, codes, scale, exists, dim, config: tl.constexpr, PADDED: tl.constexpr, DTYPE: tl.constexpr
):
    """Decompress `blocks.first` elements from `dim` on: normalised embeddings [tokens, `blocks.first`] in DTYPE.

    The residuals of `codec` and `tokens` are those of one document or of all documents; `codes` are int64. If PADDED,
    elements are 0 where a token does not exist and past the end of the embedding.

    Eight indices are loaded as one word, as many as there are centroid elements in 16 bytes, so a thread holds both.
    The word dimension comes first, with addresses in bytes: where Triton sees no contiguity, it assigns neighbours
    along the first dimension to neighbouring threads, one word each.
    """
    residuals_ptr, centroids_ptr, weights_ptr = codec
    NBITS: tl.constexpr = config.nbits
    BLOCK: tl.constexpr = config.blocks.first
    ROW_BYTES: tl.constexpr = config.size * NBITS // 8
    WORD: tl.constexpr = tl.int32 if NBITS == 4 else tl.int16
    byte_offsets = (dim // 8 + tl.arange(0, BLOCK // 8)) * NBITS
    pointers = residuals_ptr + byte_offsets[:, None] + tokens[None, :].to(tl.int64) * ROW_BYTES
    pointers = pointers.to(tl.pointer_type(WORD), bitcast=True)
    words = (
        tl.load(pointers, mask=exists[None, :] & (byte_offsets < ROW_BYTES)[:, None], other=0)
        if PADDED
        else tl.load(pointers)
    )
    words = tl.trans(words).to(tl.int32)
    # A byte holds its first element in the highest bits; a word holds its first byte in the lowest bits.
    if NBITS == 4:
        words = tl.join(words, words >> 16)
    words = tl.join(words, words >> 8)
    words = tl.join(words >> 4, words)
    if NBITS == 2:
        words = tl.join(words >> 2, words)
    indices = words & ((1 << NBITS) - 1)
    # Gather from shared memory: weights loaded by index would not have the thread layout of the centroids.
    weights = tl.load(weights_ptr + tl.arange(0, 1 << NBITS))
    weights = tl.gather(weights, tl.reshape(indices, [tokens.shape[0] * BLOCK]), 0)
    weights = tl.reshape(weights, [tokens.shape[0], BLOCK])
    dims = dim + tl.arange(0, BLOCK)
    pointers = centroids_ptr + codes[:, None] * config.size + dims[None, :]
    if PADDED:
        inside = exists[:, None] & (dims < config.size)[None, :]
        embeddings = tl.where(inside, tl.load(pointers, mask=inside, other=0.0) + weights, 0.0)
    else:
        embeddings = tl.load(pointers) + weights
    return (embeddings.to(tl.float32) * scale[:, None]).to(DTYPE)


@kernel(follows=True, config="size blocks nbits block_tokens")
def _decompress_kernel(
    residuals_ptr, codes_ptr, centroids_ptr, weights_ptr, scales_ptr, embeddings_ptr, n_tokens, config: tl.constexpr
):
    """Write the normalised embeddings [n_tokens, size]."""
    wait_for_previous_kernel()
    # Clamp to the last token.
    tokens = tl.minimum(tl.program_id(0) * config.block_tokens + tl.arange(0, config.block_tokens), n_tokens - 1)
    codes, scale = tl.load(codes_ptr + tokens).to(tl.int64), tl.load(scales_ptr + tokens)
    codec = residuals_ptr, centroids_ptr, weights_ptr
    PADDED: tl.constexpr = config.blocks.first > config.size
    DTYPE: tl.constexpr = embeddings_ptr.dtype.element_ty
    embeddings = decompressed(codec, tokens, codes, scale, tokens >= 0, 0, config, PADDED, DTYPE)
    dims = tl.arange(0, config.blocks.first)
    pointers = embeddings_ptr + tokens[:, None].to(tl.int64) * config.size + dims[None, :]
    tl.store(pointers, embeddings, mask=(dims < config.size)[None, :])


def decompressed_embeddings(problem: Problem, codes: tuple[Any, ...], nbits: int) -> Tensor:
    """Decompress `forward.Codes` to normalised embeddings [T, d] in the dtype of the queries."""
    centroid_indices, residuals, centroids, weights, _, scales, _ = codes
    n_tokens, size = len(centroid_indices), problem.size
    embeddings = torch.empty(n_tokens, size, dtype=problem.dtype, device=problem.device)
    _decompress_kernel(
        (-(-n_tokens // _TOKENS), 1, 1),
        (residuals, centroid_indices, centroids, weights, scales, embeddings),
        (n_tokens,),
        (),
        (size, Blocks(max(32, power_of_two(size)), 0, False), nbits, _TOKENS),
        (4, 1, None),
    )
    return embeddings
