"""Norms of token embeddings, in float32: inverse ones, by which normalised similarities are scaled, and squares."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Kernel

# torch.nn.functional.normalize divides by no less than this.
SMALLEST_NORM = 1e-12
_SMALLEST_NORM = tl.constexpr(SMALLEST_NORM)
_BLOCK_ROWS = 64


@triton.jit
def inverse_norm(squares):
    """One over the norm, from the sum of squares; NaN of NaN, as in `torch.nn.functional.normalize`."""
    return tl.div_rn(1.0, tl.maximum(tl.sqrt_rn(squares), _SMALLEST_NORM, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def row_addresses(rows, n_sequences, length, stride_group, stride_sequence, stride_token):
    """Where the tokens [groups, n_sequences, length], counted as rows, begin."""
    sequence = rows // length
    return (
        (sequence // n_sequences) * stride_group
        + (sequence % n_sequences) * stride_sequence
        + (rows % length) * stride_token
    )


@triton.jit
def _squares_of(
    embeddings_ptr, rows, n_rows, n_sequences, length, stride_group, stride_sequence, stride_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Squared norms of the tokens [groups, n_sequences, length], counted as rows, float32."""
    base = embeddings_ptr + row_addresses(rows, n_sequences, length, stride_group, stride_sequence, stride_token)
    squares = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in tl.range(0, EMBEDDING, BLOCK_EMBEDDING):
        dims = start + tl.arange(0, BLOCK_EMBEDDING)
        mask = (rows < n_rows)[:, None] & (dims < EMBEDDING)[None, :]
        values = tl.load(base[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        squares += tl.sum(values * values, axis=1)
    return squares


@triton.jit(do_not_specialize=["n_rows", "n_sequences", "length"])
def _inverse_norms_kernel(
    embeddings_ptr, scales_ptr, n_rows, n_sequences, length, stride_group, stride_sequence, stride_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """scales[row] for the tokens [groups, sequences, length] of `embeddings`, counted as rows."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    squares = _squares_of(
        embeddings_ptr, rows, n_rows, n_sequences, length, stride_group, stride_sequence, stride_token, EMBEDDING,
        BLOCK_EMBEDDING, BLOCK_ROWS,
    )  # fmt: skip
    tl.store(scales_ptr + rows, inverse_norm(squares), mask=rows < n_rows)


@triton.jit(do_not_specialize=["n_rows", "n_sequences", "length"])
def _half_squares_kernel(
    embeddings_ptr, halves_ptr, n_rows, n_sequences, length, stride_group, stride_sequence, stride_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """halves[row] for the tokens [groups, sequences, length] of `embeddings`, counted as rows."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    squares = _squares_of(
        embeddings_ptr, rows, n_rows, n_sequences, length, stride_group, stride_sequence, stride_token, EMBEDDING,
        BLOCK_EMBEDDING, BLOCK_ROWS,
    )  # fmt: skip
    tl.store(halves_ptr + rows, 0.5 * squares, mask=rows < n_rows)


_inverse_norms = Kernel(_inverse_norms_kernel)
_half_squares = Kernel(_half_squares_kernel)


class Norms(NamedTuple):
    """Inverse norms of queries and of documents, as `inverse_norms` returns them."""

    queries: Tensor
    documents: Tensor


def inverse_norms(embeddings: Tensor) -> Tensor:
    """Inverse norms [T], [N, L] or [G, K, L], float32, of `embeddings` [.., d] of contiguous rows; no size is 0."""
    scales = torch.empty(embeddings.shape[:-1], dtype=torch.float32, device=embeddings.device)
    launch_rows(_inverse_norms, embeddings, scales)
    return scales


def half_squares(embeddings: Tensor) -> Tensor:
    """Half the squared norms, with the shapes of `inverse_norms`."""
    halves = torch.empty(embeddings.shape[:-1], dtype=torch.float32, device=embeddings.device)
    launch_rows(_half_squares, embeddings, halves)
    return halves


def launch_rows(kernel: Kernel, embeddings: Tensor, found: Tensor) -> None:
    """Launch a kernel that finds a number of every row of `embeddings` [.., d], up to [G, K, L, d]."""
    shape, size = found.shape, embeddings.shape[-1]
    rows = shape.numel()
    kernel(
        (-(-rows // _BLOCK_ROWS), 1, 1),
        (embeddings, found),
        (rows, *(1, *shape)[-2:]),
        (0, 0, *embeddings.stride())[-4:-1],
        (size, min(128, 1 << (size - 1).bit_length()), _BLOCK_ROWS),
        (4, 3, None),
    )
