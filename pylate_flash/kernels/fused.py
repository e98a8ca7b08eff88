"""Projection of hidden states on Hopper (compute capability 9.0), and, for few query rows, scores in the same kernel.

A program takes tiles of hidden states, whatever documents they belong to, projects each once, normalises and rounds the
embeddings in registers, and multiplies them there with the queries, which stay in shared memory: the second product
takes its first operand from the registers that the first one left its sum in, as in FlashAttention. What leaves the
chip is, for each document in a tile, the maxima of that tile, and `_finish_kernel` takes the maxima of a document's
tiles and sums them over the query. Every hidden state is read once. As for the weight, which every tile needs, it comes
from the L2 cache in chunks along d_model, together with the states: tiles of 256 tokens read half as many bytes of it
as of states.

Parts of a tile (128 tokens) are numbered in order, and documents too, so a document and a part that meet have a number
that no other two have: the sum of both. There the maxima are kept, without atomics or anything to clear before.

The document tokens, and not the query's, are the rows of the second product: their maximum over a document runs across
warps, which takes longer than one along a row, but there are few columns.

Measured on an H200 in bfloat16 at 768 to 128 elements, in one run each, waiting for the GPU alone: 0.146 ms against
0.176 of a linear layer and `maxsim` at 1 x 1000, 32 x 300 (0.143 of them the linear layer; 0.108 to read the states);
0.596 against 0.799 at 1 x 8000, 32 x 180; 0.192 against 0.215 with 128 query rows at 1000 x 300.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from .hopper import add, execute, find_document, larger_of, next_slot
from .launch import Launch, Launcher
from .norms import SMALLEST_NORM
from .reductions import larger
from .tiles import architecture, fused_tile

_SMALLEST_NORM = gl.constexpr(SMALLEST_NORM)
# Four warps each, written out one by one in `_fused_kernel`.
_PARTS = 2
_PARTS_AT_ONCE = tl.constexpr(4)


@gluon.jit
def _inverse_norms(embeddings):
    """One over the norm of each row, as `norms.inverse_norm`."""
    widened = embeddings.to(gl.float32)
    squares = gl.reduce(widened * widened, 1, add)
    return gl.div_rn(1.0, gl.maximum(gl.sqrt_rn(squares), _SMALLEST_NORM))


@gluon.jit
def _scaled(embeddings, scale):
    """Rows times their scale, rounded, as in `units.unit_rows`."""
    return (embeddings.to(gl.float32) * scale[:, None]).to(embeddings.dtype)


@gluon.jit
def _first_tile(program, n_tiles):
    """The tile that a program begins with; each has as many in a row."""
    return (program.to(gl.int64) * n_tiles // gl.num_programs(0)).to(gl.int32)


@gluon.jit
def _allocate(
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
        # Every copying thread says when its copies have arrived, and every part when it has read a slot.
        mbarrier.init(full.index(stage), count=128)
        mbarrier.init(empty.index(stage), count=PARTS)
    return states, weights, full, empty


@gluon.jit
def _offsets(ROWS: gl.constexpr, D_MODEL: gl.constexpr, CHUNK: gl.constexpr):
    """Offsets [ROWS, CHUNK] of elements in rows of D_MODEL, as a constant and what differs between threads.

    All threads copy some rows at a time. Where a row is a number of such times and a number among them, the compiler
    makes a thread's addresses from a few; where it is one number, it kept every offset in two registers, and spilled:
    0.600 ms in place of 0.578 at 1 x 8000, 32 x 180.
    """
    AT_ONCE: gl.constexpr = 1024 // CHUNK
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // (CHUNK // 8), CHUNK // 8], [1, 4, 1], [2, 1, 0])
    times = gl.arange(0, ROWS // AT_ONCE, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    row = gl.arange(0, AT_ONCE, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    dims = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    offsets = row.to(gl.int64)[None, :, None] * D_MODEL + dims[None, None, :]
    offsets = offsets + times.to(gl.int64)[:, None, None] * (AT_ONCE * D_MODEL)
    return gl.reshape(offsets, [ROWS, CHUNK])


@gluon.jit
def _copy(
    hidden_ptr, weight_ptr, states, weights, full, empty, first_tile, last_tile, n_tokens,
    SIZE: gl.constexpr, D_MODEL: gl.constexpr, EMBEDDING: gl.constexpr, PART_ROWS: gl.constexpr,
    PARTS: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the tiles' states and, with them, the weight, chunk by chunk, into the slots as they become empty."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (CHUNK // 8), CHUNK // 8], [4, 1], [1, 0])
    positions = gl.arange(0, PART_ROWS, layout=gl.SliceLayout(1, layout))
    outputs = gl.arange(0, EMBEDDING, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, layout))
    to_state = gl.convert_layout(_offsets(PART_ROWS, D_MODEL, CHUNK), layout, assert_trivial=True)
    to_weight = gl.convert_layout(_offsets(EMBEDDING, D_MODEL, CHUNK), layout, assert_trivial=True)
    # Of offsets in three dimensions Triton cannot tell, and it would not copy by 16 bytes.
    to_state = gl.max_contiguous(gl.multiple_of(to_state, [1, 8]), [1, 8])
    to_weight = gl.max_contiguous(gl.multiple_of(to_weight, [1, 8]), [1, 8])
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for tile in range(first_tile, last_tile):
        for start in range(0, D_MODEL, CHUNK):
            mbarrier.wait(empty.index(slot), phase)
            for part in gl.static_range(PARTS):
                first = (tile * PARTS + part) * PART_ROWS
                mask = (positions < n_tokens - first)[:, None]
                if D_MODEL % CHUNK != 0:
                    mask = mask & (start + dims < D_MODEL)[None, :]
                base = hidden_ptr + first.to(gl.int64) * D_MODEL + start
                async_copy.async_copy_global_to_shared(states.index(slot * PARTS + part), base + to_state, mask=mask)
            mask = (outputs < SIZE)[:, None]
            if D_MODEL % CHUNK != 0:
                mask = mask & (start + dims < D_MODEL)[None, :]
            async_copy.async_copy_global_to_shared(weights.index(slot), weight_ptr + start + to_weight, mask=mask)
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            slot, phase = next_slot(slot, phase, STAGES)
    # The next kernel may get ready, if it is one that waits.
    execute("griddepcontrol.launch_dependents;")


@gluon.jit
def _bias(bias_ptr, SIZE: gl.constexpr, EMBEDDING: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, EMBEDDING, 16])
    dims = gl.arange(0, EMBEDDING, layout=gl.SliceLayout(0, layout))
    return gl.load(bias_ptr + dims, mask=dims < SIZE, other=0.0).to(gl.float32)


@gluon.jit
def _project(
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
        # The copies are ordinary writes, and the tensor cores read past the path of those.
        fence_async_shared()
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
def _score(
    queries_ptr, bias_ptr, mask_ptr, cu_seqlens_ptr, best_ptr, states, weights, queries, full, empty, ready,
    first_tile, last_tile, first_document, n_rows, query_length, n_tokens, n_documents, document_length,
    stride_query, stride_query_token,
    SIZE: gl.constexpr, D_MODEL: gl.constexpr, EMBEDDING: gl.constexpr, COLUMNS: gl.constexpr, BLOCKS: gl.constexpr,
    PART_ROWS: gl.constexpr, PARTS: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, PACKED: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_MASK: gl.constexpr, ZERO_MASKED: gl.constexpr, NORMALIZE: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """Project one part of every tile, and leave the maxima of its documents: best[document + part, query row]."""
    similarity: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, similarity, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, similarity)
    by_column: gl.constexpr = gl.SliceLayout(0, similarity)
    dtype: gl.constexpr = states.dtype

    if PART == 0:
        # While the first states are on their way.
        LANES: gl.constexpr = EMBEDDING // 8
        loaded: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
        dims = gl.arange(0, EMBEDDING, layout=gl.SliceLayout(0, loaded))
        for block in gl.static_range(BLOCKS):
            query_rows = block * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, loaded))
            offset = (query_rows // query_length).to(gl.int64) * stride_query
            offset += query_rows % query_length * stride_query_token
            exists = (query_rows < n_rows)[:, None] & (dims < SIZE)[None, :]
            values = gl.load(queries_ptr + offset[:, None] + dims[None, :], mask=exists, other=0.0)
            if NORMALIZE:
                values = _scaled(values, _inverse_norms(values))
            queries.index(block).store(values)
        fence_async_shared()
        mbarrier.arrive(ready, count=1)

    columns = gl.arange(0, COLUMNS, layout=by_column)
    no_similarities = gl.zeros([PART_ROWS, COLUMNS], gl.float32, similarity)
    if HAS_BIAS:
        bias = _bias(bias_ptr, SIZE, EMBEDDING)
    document = first_document
    if PACKED:
        n_tokens = gl.minimum(n_tokens, gl.load(cu_seqlens_ptr + n_documents).to(gl.int32))
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(first_tile, last_tile):
        part = tile * PARTS + PART
        first = part * PART_ROWS
        embeddings, slot, phase = _project(
            states, weights, full, empty, slot, phase, D_MODEL, EMBEDDING, PART_ROWS, PARTS, CHUNK, STAGES, PART
        )
        if HAS_BIAS:
            embeddings += bias[None, :]
        # Rounded as by a linear layer.
        rounded = embeddings.to(dtype)
        if NORMALIZE:
            rounded = _scaled(rounded, _inverse_norms(rounded))
        rows = first + gl.arange(0, PART_ROWS, layout=by_row)
        if HAS_MASK:
            active = gl.load(mask_ptr + rows, mask=rows < n_tokens, other=0) != 0
        rounded = gl.convert_layout(rounded, operand)

        end = gl.minimum(first + PART_ROWS, n_tokens)
        if PACKED:
            while (document + 1 < n_documents) & (gl.load(cu_seqlens_ptr + document + 1).to(gl.int32) <= first):
                document += 1
        else:
            document = first // document_length
        mbarrier.wait(ready, 0)
        for block in gl.static_range(BLOCKS):
            similarities = warpgroup_mma(
                rounded, queries.index(block).permute((1, 0)), no_similarities, use_acc=False, is_async=True
            )
            similarities = warpgroup_mma_wait(0, deps=[similarities])
            if HAS_MASK:
                similarities = gl.where(active[:, None], similarities, 0.0 if ZERO_MASKED else float("-inf"))
            current = document
            start = first
            while start < end:
                stop = (current + 1) * document_length
                if PACKED:
                    stop = gl.load(cu_seqlens_ptr + current + 1).to(gl.int32)
                inside = (rows >= start) & (rows < gl.minimum(stop, end))
                best = gl.reduce(gl.where(inside[:, None], similarities, float("-inf")), 0, larger_of)
                target = best_ptr + (current + part).to(gl.int64) * (BLOCKS * COLUMNS) + block * COLUMNS
                gl.store(target + columns, best, mask=(columns >= 0) & (stop > start))
                start = gl.maximum(start, stop)
                current += 1


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
    bias_ptr, embeddings_ptr, scales_ptr, states, weights, full, empty, first_tile, last_tile, n_tokens,
    SIZE: gl.constexpr, D_MODEL: gl.constexpr, EMBEDDING: gl.constexpr, PART_ROWS: gl.constexpr, PARTS: gl.constexpr,
    CHUNK: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr, NORMALIZE: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Project one part of every tile, and write the embeddings, and one over the norms that they were divided by."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, EMBEDDING, 16])
    stored: gl.constexpr = _by_sixteen_bytes(PART_ROWS, EMBEDDING)
    dims = gl.arange(0, EMBEDDING, layout=gl.SliceLayout(0, stored))
    if HAS_BIAS:
        bias = _bias(bias_ptr, SIZE, EMBEDDING)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(first_tile, last_tile):
        embeddings, slot, phase = _project(
            states, weights, full, empty, slot, phase, D_MODEL, EMBEDDING, PART_ROWS, PARTS, CHUNK, STAGES, PART
        )
        if HAS_BIAS:
            embeddings += bias[None, :]
        rounded = embeddings.to(states.dtype)
        first = (tile * PARTS + PART) * PART_ROWS
        if NORMALIZE:
            scale = _inverse_norms(rounded)
            rounded = _scaled(rounded, scale)
            rows = first + gl.arange(0, PART_ROWS, layout=gl.SliceLayout(1, layout))
            gl.store(scales_ptr + rows, scale, mask=rows < n_tokens)
        rows = first + gl.arange(0, PART_ROWS, layout=gl.SliceLayout(1, stored))
        mask = (rows < n_tokens)[:, None] & (dims < SIZE)[None, :]
        offset = rows.to(gl.int64)[:, None] * SIZE + dims[None, :]
        gl.store(embeddings_ptr + offset, gl.convert_layout(rounded, stored), mask=mask)


@gluon.jit
def _score_part(
    arguments, SIZE: gl.constexpr, D_MODEL: gl.constexpr, EMBEDDING: gl.constexpr, COLUMNS: gl.constexpr,
    BLOCKS: gl.constexpr, PART_ROWS: gl.constexpr, PARTS: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
    PACKED: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_MASK: gl.constexpr, ZERO_MASKED: gl.constexpr,
    NORMALIZE: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    _score(
        *arguments, SIZE, D_MODEL, EMBEDDING, COLUMNS, BLOCKS, PART_ROWS, PARTS, CHUNK, STAGES, PACKED, HAS_BIAS,
        HAS_MASK, ZERO_MASKED, NORMALIZE, PART,
    )  # fmt: skip


@gluon.jit
def _store_part(
    arguments, SIZE: gl.constexpr, D_MODEL: gl.constexpr, EMBEDDING: gl.constexpr, PART_ROWS: gl.constexpr,
    PARTS: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr, NORMALIZE: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    _store(*arguments, SIZE, D_MODEL, EMBEDDING, PART_ROWS, PARTS, CHUNK, STAGES, HAS_BIAS, NORMALIZE, PART)


@gluon.jit
def _copy_part(
    arguments, SIZE: gl.constexpr, D_MODEL: gl.constexpr, EMBEDDING: gl.constexpr, PART_ROWS: gl.constexpr,
    PARTS: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    _copy(*arguments, SIZE, D_MODEL, EMBEDDING, PART_ROWS, PARTS, CHUNK, STAGES)


@gluon.jit(do_not_specialize=["n_rows", "query_length", "n_tokens", "n_documents", "document_length"])
def _fused_kernel(
    queries_ptr, hidden_ptr, weight_ptr, bias_ptr, mask_ptr, cu_seqlens_ptr, best_ptr,
    n_rows, query_length, n_tokens, n_documents, document_length,
    stride_query, stride_query_token,
    SIZE: gl.constexpr,
    D_MODEL: gl.constexpr,
    EMBEDDING: gl.constexpr,
    COLUMNS: gl.constexpr,
    BLOCKS: gl.constexpr,
    PART_ROWS: gl.constexpr,
    PARTS: gl.constexpr,
    CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
    PACKED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_MASK: gl.constexpr,
    ZERO_MASKED: gl.constexpr,
    NORMALIZE: gl.constexpr,
):  # fmt: skip
    """best [documents + parts of tiles, BLOCKS * COLUMNS], see above; columns are the query rows [Nq * Lq].

    Grid: programs, each with as many tiles in a row. hidden [n_tokens, D_MODEL] and weight [SIZE, D_MODEL] are
    contiguous.
    """
    n_tiles = gl.cdiv(n_tokens, PART_ROWS * PARTS)
    first_tile = _first_tile(gl.program_id(0), n_tiles)
    last_tile = _first_tile(gl.program_id(0) + 1, n_tiles)
    dtype: gl.constexpr = hidden_ptr.dtype.element_ty
    states, weights, full, empty = _allocate(dtype, EMBEDDING, PART_ROWS, PARTS, CHUNK, STAGES)
    queries_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, EMBEDDING], dtype)
    queries = gl.allocate_shared_memory(dtype, [BLOCKS, COLUMNS, EMBEDDING], queries_layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    first_document = first_tile * 0
    if PACKED:
        # The document that the first token of the first tile belongs to.
        token = first_tile.to(gl.int64) * (PART_ROWS * PARTS)
        first_document = find_document(cu_seqlens_ptr, n_documents, token + 1, 0) - 1

    # A tuple that has a name, like these two, turns constants into values, so constants are not among them.
    arguments = (
        queries_ptr, bias_ptr, mask_ptr, cu_seqlens_ptr, best_ptr, states, weights, queries, full, empty, ready,
        first_tile, last_tile, first_document, n_rows, query_length, n_tokens, n_documents, document_length,
        stride_query, stride_query_token,
    )  # fmt: skip
    copied = (
        hidden_ptr, weight_ptr, states, weights, full, empty, first_tile, last_tile, n_tokens,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                _score_part,
                (
                    arguments, SIZE, D_MODEL, EMBEDDING, COLUMNS, BLOCKS, PART_ROWS, PARTS, CHUNK, STAGES, PACKED,
                    HAS_BIAS, HAS_MASK, ZERO_MASKED, NORMALIZE, gl.constexpr(0),
                ),
            ),
            (
                _score_part,
                (
                    arguments, SIZE, D_MODEL, EMBEDDING, COLUMNS, BLOCKS, PART_ROWS, PARTS, CHUNK, STAGES, PACKED,
                    HAS_BIAS, HAS_MASK, ZERO_MASKED, NORMALIZE, gl.constexpr(1),
                ),
            ),
            (_copy_part, (copied, SIZE, D_MODEL, EMBEDDING, PART_ROWS, PARTS, CHUNK, STAGES)),
        ],
        [4, 4],
        [208, 96],
    )  # fmt: skip


_fused = Launcher(_fused_kernel)


@gluon.jit(do_not_specialize=["n_tokens"])
def _project_kernel(
    hidden_ptr, weight_ptr, bias_ptr, embeddings_ptr, scales_ptr,
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

    Grid and the rest as in `_fused_kernel`.
    """
    n_tiles = gl.cdiv(n_tokens, PART_ROWS * PARTS)
    first_tile = _first_tile(gl.program_id(0), n_tiles)
    last_tile = _first_tile(gl.program_id(0) + 1, n_tiles)
    dtype: gl.constexpr = hidden_ptr.dtype.element_ty
    states, weights, full, empty = _allocate(dtype, EMBEDDING, PART_ROWS, PARTS, CHUNK, STAGES)
    arguments = (
        bias_ptr, embeddings_ptr, scales_ptr, states, weights, full, empty, first_tile, last_tile, n_tokens,
    )  # fmt: skip
    copied = (
        hidden_ptr, weight_ptr, states, weights, full, empty, first_tile, last_tile, n_tokens,
    )  # fmt: skip
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
            (_copy_part, (copied, SIZE, D_MODEL, EMBEDDING, PART_ROWS, PARTS, CHUNK, STAGES)),
        ],
        [4, 4],
        [208, 96],
    )  # fmt: skip


_projection = Launcher(_project_kernel)


@triton.jit(do_not_specialize=["query_length", "n_documents", "document_length", "n_columns"])
def _finish_kernel(
    best_ptr, queries_mask_ptr, documents_mask_ptr, cu_seqlens_ptr, scores_ptr,
    query_length, n_documents, document_length, n_columns,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DOCUMENTS: tl.constexpr,
    PART_ROWS: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_QUERIES_MASK: tl.constexpr,
    HAS_DOCUMENTS_MASK: tl.constexpr,
    FOLLOWS: tl.constexpr,
):  # fmt: skip
    """scores[query, document] = sum over active rows of the maximum over the parts that the document lies in.

    Grid: (blocks of documents, queries). FOLLOWS: started before what it reads was written.
    """
    if FOLLOWS:
        gdc_wait()
    query = tl.program_id(1)
    documents = tl.program_id(0) * BLOCK_DOCUMENTS + tl.arange(0, BLOCK_DOCUMENTS)
    exists = documents < n_documents
    tokens = tl.arange(0, BLOCK_ROWS)
    if PACKED:
        begin = tl.load(cu_seqlens_ptr + documents, mask=exists, other=0).to(tl.int32)
        end = tl.load(cu_seqlens_ptr + documents + 1, mask=exists, other=0).to(tl.int32)
    else:
        begin = documents * document_length
        end = tl.where(exists, begin + document_length, begin)
    counted = end > begin
    first = begin // PART_ROWS
    parts = tl.where(counted, (end - 1) // PART_ROWS + 1 - first, 0)
    best = tl.full([BLOCK_DOCUMENTS, BLOCK_ROWS], float("-inf"), tl.float32)
    in_query = tokens < query_length
    of_rows = (documents + first).to(tl.int64)[:, None] * n_columns + (query * query_length + tokens)[None, :]
    # Most documents have no more parts than are read at once.
    some = tl.arange(0, _PARTS_AT_ONCE)
    for start in tl.range(0, tl.max(parts, axis=0), _PARTS_AT_ONCE):
        part = start + some[None, :, None]
        mask = (part < parts[:, None, None]) & in_query[None, None, :]
        values = tl.load(best_ptr + of_rows[:, None, :] + part * n_columns, mask=mask, other=float("-inf"))
        best = larger(best, tl.reduce(values, 1, larger))
    if HAS_DOCUMENTS_MASK:
        active = tl.zeros([BLOCK_DOCUMENTS], tl.int32)
        for start in tl.range(0, document_length, 64):
            at = start + tl.arange(0, 64)
            of_tokens = documents.to(tl.int64)[:, None] * document_length + at[None, :]
            mask = exists[:, None] & (at < document_length)[None, :]
            found = tl.load(documents_mask_ptr + of_tokens, mask=mask, other=0).to(tl.int32)
            active = tl.maximum(active, tl.max(found, axis=1))
        counted &= active != 0
    row_active = in_query
    if HAS_QUERIES_MASK:
        row_active &= tl.load(queries_mask_ptr + query * query_length + tokens, mask=in_query, other=0) != 0
    best = tl.where(counted[:, None] & row_active[None, :], best, 0.0)
    tl.store(scores_ptr + query.to(tl.int64) * n_documents + documents, tl.sum(best, axis=1), mask=exists)


_finish = Launcher(_finish_kernel)


@functools.lru_cache(maxsize=1024)
def bound_fused(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    n_tokens: int,
    n_documents: int,
    document_length: int,
    weight_shape: torch.Size,
    cu_seqlens_dtype: torch.dtype | None,
    has_bias: bool,
    has_queries_mask: bool,
    has_documents_mask: bool,
    normalize: bool,
    zero_masked: bool,
) -> Callable[..., Tensor] | None:
    """The function that scores such tensors, or None where the kernels do not serve them.

    It takes queries [Nq, Lq, d] of contiguous rows; hidden states [n_documents, document_length, d_model], or packed
    [n_tokens, d_model], and the weight [d, d_model], contiguous from addresses of 16 bytes; the bias [d] or None; masks
    [Nq, Lq] and [n_documents, document_length], bool and contiguous, or None; and, if packed, the boundaries
    [n_documents + 1] on the device. Of those it returns scores [Nq, n_documents], float32. Documents may be empty where
    they are packed; no dimension is 0. Every type that a launch may see is among the arguments.
    """
    n_queries, query_length, size = shape
    d_model, packed = weight_shape[1], cu_seqlens_dtype is not None
    capability, processors = architecture(device)
    tile = fused_tile(capability, n_queries * query_length, size, d_model, dtype.itemsize)
    if tile is None or n_tokens >= 1 << 31:
        return None
    n_tiles = triton.cdiv(n_tokens, tile.rows)
    columns = tile.blocks * tile.columns
    project = _fused.bind(
        (min(n_tiles, processors), 1, 1),
        (n_queries * query_length, query_length, n_tokens, n_documents, document_length),
        strides[:2],
        (
            size, d_model, max(16, triton.next_power_of_2(size)), tile.columns, tile.blocks, tile.rows // _PARTS,
            _PARTS, tile.chunk, tile.num_stages, packed, has_bias, has_documents_mask,
            zero_masked and has_documents_mask, normalize,
        ),
        num_warps=4,
        num_stages=1,
    )  # fmt: skip
    block_rows = max(16, triton.next_power_of_2(query_length))
    block_documents = 8
    finish = _finish.bind(
        (triton.cdiv(n_documents, block_documents), n_queries, 1),
        (query_length, n_documents, document_length, columns),
        (),
        (block_rows, block_documents, tile.rows // _PARTS, packed, has_queries_mask, has_documents_mask, True),
        num_warps=1,
        num_stages=1,
        follows=True,
    )
    best_shape = (n_documents + n_tiles * _PARTS, columns)

    def score(
        queries: Tensor,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        queries_mask: Tensor | None,
        documents_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> Tensor:
        best = queries.new_empty(best_shape, dtype=torch.float32)
        project(queries, hidden, weight, bias, documents_mask, cu_seqlens, best)
        scores = queries.new_empty((n_queries, n_documents), dtype=torch.float32)
        finish(best, queries_mask, documents_mask, cu_seqlens, scores)
        return scores

    return score


@functools.lru_cache(maxsize=1024)
def bound_projection(
    n_tokens: int, weight_shape: torch.Size, dtype: torch.dtype, device: torch.device, has_bias: bool, normalize: bool
) -> Launch | None:
    """A launch that projects hidden states, or None where the kernel does not serve them.

    It takes hidden states [n_tokens, d_model] and weight [d, d_model], contiguous from addresses of 16 bytes, the bias
    [d] or None, and what it writes: embeddings [n_tokens, d] and, under `normalize`, one over their norms [n_tokens] in
    float32, else None.
    """
    capability, processors = architecture(device)
    size, d_model = weight_shape
    tile = fused_tile(capability, 1, size, d_model, dtype.itemsize)
    if tile is None or not 0 < n_tokens < 1 << 31:
        return None
    return _projection.bind(
        (min(triton.cdiv(n_tokens, tile.rows), processors), 1, 1),
        (n_tokens,),
        (),
        (
            size, d_model, max(16, triton.next_power_of_2(size)), tile.rows // _PARTS, _PARTS, tile.chunk,
            tile.num_stages, has_bias, normalize,
        ),
        num_warps=4,
        num_stages=1,
    )  # fmt: skip
