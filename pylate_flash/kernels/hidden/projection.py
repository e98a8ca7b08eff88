"""Projection of hidden states on Hopper (compute capability 9.0), normalised in registers, to memory."""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..launch import Kernel
from ..plan_operations import FusedPlan
from .product import PARTS, allocate, copy_part, described, inverse_norms, load_bias, project_part, scaled


@triton.constexpr_function
def _by_sixteen_bytes(ROWS: int, EMBEDDING: int) -> gl.DistributedLinearLayout:
    """The layout of a product [ROWS, EMBEDDING] after an exchange within warps: eight columns of a row per thread."""
    columns = [[0, 1 << bit] for bit in range(3, EMBEDDING.bit_length() - 1)] + [[8, 0]]
    rows = [[1 << bit, 0] for bit in range(6, ROWS.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], *columns[2:], *rows], [*columns[:2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [ROWS, EMBEDDING],
    )  # fmt: skip


@gluon.jit
def _store(
    bias_ptr, embeddings_ptr, scales_ptr, states, weights, full, empty, n_tiles, n_tokens,
    SIZE: gl.constexpr, D_MODEL: gl.constexpr, EMBEDDING: gl.constexpr, PART_ROWS: gl.constexpr, PARTS: gl.constexpr,
    CHUNK: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr, NORMALIZE: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Project one part of every tile, and write the embeddings, and one over the norms that they were divided by."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, EMBEDDING, 16])
    stored: gl.constexpr = _by_sixteen_bytes(PART_ROWS, EMBEDDING)
    dims = gl.arange(0, EMBEDDING, layout=gl.SliceLayout(0, stored))
    if HAS_BIAS:
        bias = load_bias(bias_ptr, SIZE, EMBEDDING)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        embeddings, slot, phase = project_part(
            states, weights, full, empty, slot, phase, D_MODEL, EMBEDDING, PART_ROWS, PARTS, CHUNK, STAGES, PART
        )
        if HAS_BIAS:
            embeddings += bias[None, :]
        rounded = embeddings.to(states.dtype)
        first = (tile * PARTS + PART) * PART_ROWS
        if NORMALIZE:
            scale = inverse_norms(rounded)
            rounded = scaled(rounded, scale)
            rows = first + gl.arange(0, PART_ROWS, layout=gl.SliceLayout(1, layout))
            gl.store(scales_ptr + rows, scale, mask=rows < n_tokens)
        rows = first + gl.arange(0, PART_ROWS, layout=gl.SliceLayout(1, stored))
        mask = (rows < n_tokens)[:, None] & (dims < SIZE)[None, :]
        offset = rows.to(gl.int64)[:, None] * SIZE + dims[None, :]
        gl.store(embeddings_ptr + offset, gl.convert_layout(rounded, stored), mask=mask)


@gluon.jit
def _store_part(
    arguments, SIZE: gl.constexpr, D_MODEL: gl.constexpr, EMBEDDING: gl.constexpr, PART_ROWS: gl.constexpr,
    PARTS: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr, NORMALIZE: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    _store(*arguments, SIZE, D_MODEL, EMBEDDING, PART_ROWS, PARTS, CHUNK, STAGES, HAS_BIAS, NORMALIZE, PART)


@gluon.jit(do_not_specialize=["n_tokens"])
def _project_kernel(
    hidden, weight, bias_ptr, embeddings_ptr, scales_ptr,
    n_tokens,
    SIZE: gl.constexpr,
    D_MODEL: gl.constexpr,
    EMBEDDING: gl.constexpr,
    PART_ROWS: gl.constexpr,
    PARTS: gl.constexpr,
    CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    NORMALIZE: gl.constexpr,
):  # fmt: skip
    """embeddings [n_tokens, SIZE], over their norms under NORMALIZE, and scales [n_tokens], one over these.

    Grid and the rest as in `fused._fused_kernel`.
    """
    n_tiles = gl.cdiv(n_tokens, PART_ROWS * PARTS)
    dtype: gl.constexpr = hidden.dtype
    states, weights, full, empty = allocate(dtype, EMBEDDING, PART_ROWS, PARTS, CHUNK, STAGES)
    arguments = (
        bias_ptr, embeddings_ptr, scales_ptr, states, weights, full, empty, n_tiles, n_tokens,
    )  # fmt: skip
    copied = (hidden, weight, states, weights, full, empty, n_tiles)
    gl.warp_specialize(
        [
            (
                _store_part,
                (
                    arguments, SIZE, D_MODEL, EMBEDDING, PART_ROWS, PARTS, CHUNK, STAGES, HAS_BIAS, NORMALIZE,
                    gl.constexpr(0),
                ),
            ),
            (
                _store_part,
                (
                    arguments, SIZE, D_MODEL, EMBEDDING, PART_ROWS, PARTS, CHUNK, STAGES, HAS_BIAS, NORMALIZE,
                    gl.constexpr(1),
                ),
            ),
            (copy_part, (copied, D_MODEL, PART_ROWS, PARTS, CHUNK, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


_projection = Kernel(_project_kernel)


def project(
    plan: FusedPlan, hidden: Tensor, weight: Tensor, bias: Tensor | None, embeddings: Tensor, scales: Tensor | None
) -> None:
    """Write the embeddings [n_tokens, d] of hidden states [n_tokens, d_model].

    With `scales` [n_tokens], float32, they are divided by their norms, and one over these is written there. `plan` is
    that of one query row. What is read is contiguous, and hidden states and weight begin at multiples of 16 bytes.
    """
    size, d_model = weight.shape
    tile = plan.tile
    _projection(
        (plan.programs, 1, 1),
        (hidden, weight, bias, embeddings, scales),
        (plan.n_tokens,),
        (),
        (
            size, d_model, tile.embedding, tile.rows // PARTS, PARTS, tile.chunk, tile.num_stages,
            bias is not None, scales is not None,
        ),
        (4, 1, None),
        described(plan.n_tokens, weight, tile),
    )  # fmt: skip
