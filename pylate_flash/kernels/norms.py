"""Inverse Euclidean norms of token embeddings, in float32, by which normalised similarities are scaled."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launcher

# torch.nn.functional.normalize divides by no less than this.
SMALLEST_NORM = 1e-12
_SMALLEST_NORM = tl.constexpr(SMALLEST_NORM)
_BLOCK_ROWS = 64


@triton.jit
def inverse_norm(squares):
    """One over the norm, from the sum of squares."""
    return tl.div_rn(1.0, tl.maximum(tl.sqrt_rn(squares), _SMALLEST_NORM))


@triton.jit(do_not_specialize=["n_rows", "n_sequences", "length"])
def _inverse_norms_kernel(
    embeddings_ptr, scales_ptr, n_rows, n_sequences, length, stride_group, stride_sequence, stride_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """scales[row] for the tokens [groups, sequences, length] of `embeddings`, counted as rows."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    exists = rows < n_rows
    sequence = rows // length
    base = (
        embeddings_ptr
        + (sequence // n_sequences) * stride_group
        + (sequence % n_sequences) * stride_sequence
        + (rows % length) * stride_token
    )
    squares = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in tl.range(0, EMBEDDING, BLOCK_EMBEDDING):
        dims = start + tl.arange(0, BLOCK_EMBEDDING)
        mask = exists[:, None] & (dims < EMBEDDING)[None, :]
        values = tl.load(base[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        squares += tl.sum(values * values, axis=1)
    tl.store(scales_ptr + rows, inverse_norm(squares), mask=exists)


_inverse_norms = Launcher(_inverse_norms_kernel)


def inverse_norms(embeddings: Tensor) -> Tensor:
    """Inverse norms [N, L] or [G, K, L], float32, of `embeddings` [.., d] whose rows are contiguous; no size is 0."""
    grouped = embeddings if embeddings.dim() == 4 else embeddings.unsqueeze(0)
    scales = torch.empty(embeddings.shape[:-1], dtype=torch.float32, device=embeddings.device)
    size = embeddings.shape[-1]
    _inverse_norms.bind(
        (triton.cdiv(scales.numel(), _BLOCK_ROWS), 1, 1),
        (scales.numel(), grouped.shape[1], grouped.shape[2]),
        grouped.stride()[:3],
        (size, min(128, triton.next_power_of_2(size)), _BLOCK_ROWS),
        num_warps=4,
        num_stages=3,
    )(grouped, scales)
    return scales
