"""Hidden states times the weight on Hopper (compute capability 9.0), tile by tile: what both kernels here begin with.

A program takes tiles of hidden states, whatever documents they belong to, and projects each once. Every hidden state is
read once. As for the weight, which every tile needs, it comes from the L2 cache in chunks along d_model, together with
the states: tiles of 256 tokens read half as many bytes of it as of states.

The copy engine brings states and weight, at the word of one thread, and fills with zeros what is past their ends.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..gluon import add, copy_block_to_shared, execute, larger_of, next_slot
from ..launch import Described
from ..rows import SMALLEST_NORM
from ..tables import FusedTile

_SMALLEST_NORM = gl.constexpr(SMALLEST_NORM)
# Of a tile, four warps each, written out one by one in the kernels.
PARTS = 2


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
def allocate(
    dtype: gl.constexpr, EMBEDDING: gl.constexpr, PART_ROWS: gl.constexpr, PARTS: gl.constexpr, CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Slots for chunks of a tile's states and of the weight, and the barriers that say which are full or empty."""
    states_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PART_ROWS, CHUNK], dtype)
    weights_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([EMBEDDING, CHUNK], dtype)
    states = gl.allocate_shared_memory(dtype, [STAGES * PARTS, PART_ROWS, CHUNK], states_layout)
    weights = gl.allocate_shared_memory(dtype, [STAGES, EMBEDDING, CHUNK], weights_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # A slot is full when as many bytes arrived as were said to come, and empty when every part has read it.
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=PARTS)
    return states, weights, full, empty


@gluon.jit
def _copy(
    hidden, weight, states, weights, full, empty, n_tiles,
    D_MODEL: gl.constexpr, PART_ROWS: gl.constexpr, PARTS: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the tiles' states and, with them, the weight, chunk by chunk, into the slots as they become empty.

    What is past the end of either is zero, and counts as copied.
    """
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
def project_part(
    states, weights, full, empty, slot, phase,
    D_MODEL: gl.constexpr, EMBEDDING: gl.constexpr, PART_ROWS: gl.constexpr, PARTS: gl.constexpr, CHUNK: gl.constexpr,
    STAGES: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Products of a part of the next tile with the weight, [PART_ROWS, EMBEDDING] in float32, and the slot after it."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, EMBEDDING, 16])
    products = gl.zeros([PART_ROWS, EMBEDDING], gl.float32, layout)
    # Not the same value as `slot`, or Triton would not see that the loop changes it.
    previous = gl.to_tensor(0)
    for chunk in range(0, D_MODEL, CHUNK):
        mbarrier.wait(full.index(slot), phase)
        products = warpgroup_mma(
            states.index(slot * PARTS + PART), weights.index(slot).permute((1, 0)), products,
            use_acc=chunk > 0, is_async=True,
        )  # fmt: skip
        # One product is under way while the one before it is known to be done with its slot.
        products = warpgroup_mma_wait(1, deps=[products])
        mbarrier.arrive(empty.index(previous), count=1, pred=chunk > 0)
        previous = slot
        slot, phase = next_slot(slot, phase, STAGES)
    products = warpgroup_mma_wait(0, deps=[products])
    mbarrier.arrive(empty.index(previous), count=1)
    return products, slot, phase


@gluon.jit
def copy_part(
    arguments, D_MODEL: gl.constexpr, PART_ROWS: gl.constexpr, PARTS: gl.constexpr, CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    _copy(*arguments, D_MODEL, PART_ROWS, PARTS, CHUNK, STAGES)


def described(n_tokens: int, weight: Tensor, tile: FusedTile) -> tuple[Described, Described]:
    """Hidden states and weight, as the kernels take them."""
    size, d_model = weight.shape
    states, weights = (tile.rows // PARTS, tile.chunk), (tile.embedding, tile.chunk)
    return (
        Described(n_tokens, d_model, states, _shared_layout(states, weight.dtype)),
        Described(size, d_model, weights, _shared_layout(weights, weight.dtype)),
    )


@functools.cache
def _shared_layout(block: tuple[int, int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    item = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(block), item)
