"""Projection of hidden states on Hopper (compute capability 9.0), normalised in registers, to memory.

What `fused` begins with, too, is here: the product with the weight. A program takes tiles of hidden states, whatever
documents they belong to, and projects each once. Every hidden state is read once. As for the weight, which every tile
needs, it comes from the L2 cache in chunks along d_model, together with the states: tiles of 256 tokens read half as
many bytes of it as of states.

The copy engine brings states and weight, at the word of one thread, and fills with zeros what is past their ends.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..gluon import add, copy_block_to_shared, execute, larger_of, next_slot
from ..launch import Described, kernel
from ..plan_operations import FusedPlan
from ..rows import SMALLEST_NORM
from ..tables import FusedTile

_SMALLEST_NORM = gl.constexpr(SMALLEST_NORM)
# Of a tile, four warps each, written out one by one in the kernels.
PARTS = gl.constexpr(2)


@gluon.jit
def inverse_norms(embeddings):
    """One over the norm of each row, as `rows.inverse_norm`."""
    widened = embeddings.to(gl.float32)
    squares = gl.reduce(widened * widened, 1, add)
    norm = larger_of(gl.sqrt_rn(squares), _SMALLEST_NORM)
    return gl.div_rn(1.0, gl.where(norm < float("inf"), norm, float("nan")))


@gluon.jit
def scaled(embeddings, scale):
    """Rows times their scale, rounded, as in `normalized.normalized_rows`."""
    return (embeddings.to(gl.float32) * scale[:, None]).to(embeddings.dtype)


@gluon.jit
def allocate(hidden, weight, STAGES: gl.constexpr):
    """Slots for chunks of a tile's states and of the weight, and the barriers that say which are full or empty."""
    PART_ROWS: gl.constexpr = hidden.block_type.shape[0]
    EMBEDDING: gl.constexpr = weight.block_type.shape[0]
    CHUNK: gl.constexpr = weight.block_type.shape[1]
    states = gl.allocate_shared_memory(hidden.dtype, [STAGES * PARTS, PART_ROWS, CHUNK], hidden.layout)
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES, EMBEDDING, CHUNK], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # A slot is full when as many bytes arrived as were said to come, and empty when every part has read it.
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=PARTS)
    return states, weights, full, empty


@gluon.jit
def copy_chunks(arguments, D_MODEL: gl.constexpr):
    """Copy the tiles' states and, with them, the weight, chunk by chunk, into the slots as they become empty.

    What is past the end of either is zero, and counts as copied.
    """
    hidden, weight, states, weights, full, empty, n_tiles = arguments
    PART_ROWS: gl.constexpr = states.shape[1]
    STAGES: gl.constexpr = weights.shape[0]
    CHUNK: gl.constexpr = weights.shape[2]
    BYTES: gl.constexpr = PARTS * hidden.block_type.nbytes + weight.block_type.nbytes
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for tile in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        for start in range(0, D_MODEL, CHUNK):
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(full.index(slot), BYTES)
            for part in gl.static_range(PARTS):
                first = (tile * PARTS + part) * PART_ROWS
                copy_block_to_shared(hidden, [first, start], full.index(slot), states.index(slot * PARTS + part))
            copy_block_to_shared(weight, [0, start], full.index(slot), weights.index(slot))
            slot, phase = next_slot(slot, phase, STAGES)
    # The next kernel may get ready, if it is one that waits.
    execute("griddepcontrol.launch_dependents;", 1)


@gluon.jit
def load_bias(bias_ptr, SIZE: gl.constexpr, EMBEDDING: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, EMBEDDING, 16])
    dims = gl.arange(0, EMBEDDING, layout=gl.SliceLayout(0, layout))
    return gl.load(bias_ptr + dims, mask=dims < SIZE, other=0.0).to(gl.float32)


@gluon.jit
def project_part(states, weights, full, empty, slot, phase, D_MODEL: gl.constexpr, PART: gl.constexpr):
    """Products of a part of the next tile with the weight, [PART_ROWS, EMBEDDING] in float32, and the slot after it."""
    PART_ROWS: gl.constexpr = states.shape[1]
    STAGES: gl.constexpr = weights.shape[0]
    EMBEDDING: gl.constexpr = weights.shape[1]
    CHUNK: gl.constexpr = weights.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, EMBEDDING, 16])
    products = gl.zeros([PART_ROWS, EMBEDDING], gl.float32, layout)
    # Not the same value as `slot`, or Triton would not see that the loop changes it.
    previous = gl.to_tensor(0)
    for chunk in range(0, D_MODEL, CHUNK):
        mbarrier.wait(full.index(slot), phase)
        follows = chunk > 0
        of_states, of_weight = states.index(slot * PARTS + PART), weights.index(slot).permute((1, 0))
        products = warpgroup_mma(of_states, of_weight, products, use_acc=follows, is_async=True)
        # One product is under way while the one before it is known to be done with its slot.
        products = warpgroup_mma_wait(1, deps=[products])
        mbarrier.arrive(empty.index(previous), count=1, pred=follows)
        previous = slot
        slot, phase = next_slot(slot, phase, STAGES)
    products = warpgroup_mma_wait(0, deps=[products])
    mbarrier.arrive(empty.index(previous), count=1)
    return products, slot, phase


def described(n_tokens: int, weight: Tensor, tile: FusedTile) -> tuple[Described, Described]:
    """Hidden states and weight, as the kernels take them."""
    size, d_model = weight.shape
    states, weights = (tile.rows // PARTS.value, tile.chunk), (tile.embedding, tile.chunk)
    return (
        Described(n_tokens, d_model, states, _shared_layout(states, weight.dtype)),
        Described(size, d_model, weights, _shared_layout(weights, weight.dtype)),
    )


@functools.cache
def _shared_layout(block: tuple[int, int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    item = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(block), item)


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
def _store(arguments, SIZE: gl.constexpr, D_MODEL: gl.constexpr, PART: gl.constexpr):
    """Project one part of every tile, and write the embeddings, and one over the norms that they were divided by."""
    bias_ptr, embeddings_ptr, scales_ptr, states, weights, full, empty, n_tiles, n_tokens = arguments
    PART_ROWS: gl.constexpr = states.shape[1]
    EMBEDDING: gl.constexpr = weights.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, EMBEDDING, 16])
    stored: gl.constexpr = _by_sixteen_bytes(PART_ROWS, EMBEDDING)
    dims = gl.arange(0, EMBEDDING, layout=gl.SliceLayout(0, stored))
    if bias_ptr is not None:
        bias = load_bias(bias_ptr, SIZE, EMBEDDING)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        embeddings, slot, phase = project_part(states, weights, full, empty, slot, phase, D_MODEL, PART)
        if bias_ptr is not None:
            embeddings += bias[None, :]
        rounded = embeddings.to(states.dtype)
        first = (tile * PARTS + PART) * PART_ROWS
        if scales_ptr is not None:
            scale = inverse_norms(rounded)
            rounded = scaled(rounded, scale)
            rows = first + gl.arange(0, PART_ROWS, layout=gl.SliceLayout(1, layout))
            gl.store(scales_ptr + rows, scale, mask=rows < n_tokens)
        rows = first + gl.arange(0, PART_ROWS, layout=gl.SliceLayout(1, stored))
        mask = (rows < n_tokens)[:, None] & (dims < SIZE)[None, :]
        offset = rows.to(gl.int64)[:, None] * SIZE + dims[None, :]
        gl.store(embeddings_ptr + offset, gl.convert_layout(rounded, stored), mask=mask)


@kernel(jit=gluon.jit)
def _project_kernel(
    hidden_desc, weight_desc, bias_ptr, embeddings_ptr, scales_ptr, n_tokens,
    SIZE: gl.constexpr, D_MODEL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """embeddings [n_tokens, SIZE], over their norms if there are scales [n_tokens], one over these, to be written.

    Grid and the rest as in `fused._fused_kernel`.
    """
    n_tiles = gl.cdiv(n_tokens, hidden_desc.block_type.shape[0] * PARTS)
    states, weights, full, empty = allocate(hidden_desc, weight_desc, STAGES)
    arguments = bias_ptr, embeddings_ptr, scales_ptr, states, weights, full, empty, n_tiles, n_tokens
    copied = hidden_desc, weight_desc, states, weights, full, empty, n_tiles
    gl.warp_specialize(
        [
            (_store, (arguments, SIZE, D_MODEL, gl.constexpr(0))),
            (_store, (arguments, SIZE, D_MODEL, gl.constexpr(1))),
            (copy_chunks, (copied, D_MODEL)),
        ],
        [4, 1],
        [232, 40],
    )


def project(
    plan: FusedPlan, hidden: Tensor, weight: Tensor, bias: Tensor | None, embeddings: Tensor, scales: Tensor | None
) -> None:
    """Write the embeddings [n_tokens, d] of hidden states [n_tokens, d_model].

    With `scales` [n_tokens], float32, they are divided by their norms, and one over these is written there. `plan` is
    that of one query row. What is read is contiguous, and hidden states and weight begin at multiples of 16 bytes.
    """
    size, d_model = weight.shape
    _project_kernel(
        (plan.programs, 1, 1),
        (hidden, weight, bias, embeddings, scales),
        (plan.n_tokens,),
        (),
        (size, d_model, plan.tile.num_stages),
        (4, 1, None),
        described(plan.n_tokens, weight, plan.tile),
    )
