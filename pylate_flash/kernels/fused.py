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

The copy engine brings states and weight, at the word of one thread, and fills with zeros what is past their ends.

Measured on an H200 in bfloat16 at 768 to 128 elements, in one run, waiting for the GPU alone: 0.134 ms at 1 x 1000,
32 x 300 (0.108 to read the states), and 0.559 at 1 x 8000, 32 x 180 (0.517). Where four warps copied, and each program
took a run of tiles, it was 0.140 and 0.586. A linear layer and `maxsim` take 1.3 to 1.6 times as long.
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
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper import add, execute, find_document, larger_of, next_slot
from .launch import Described, Launch, Launcher
from .norms import SMALLEST_NORM
from .overlap import wait_for_previous_kernel
from .reductions import larger
from .tiles import FusedTile, architecture, fused_tile

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
                tma.async_copy_global_to_shared(
                    hidden, [first, start], full.index(slot), states.index(slot * PARTS + part)
                )
            tma.async_copy_global_to_shared(weight, [0, start], full.index(slot), weights.index(slot))
            slot, phase = next_slot(slot, phase, STAGES)
    # The next kernel may get ready, if it is one that waits.
    execute("griddepcontrol.launch_dependents;", 1)


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
    n_tiles, n_rows, query_length, n_tokens, n_documents, document_length,
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
    if PACKED:
        n_tokens = gl.minimum(n_tokens, gl.load(cu_seqlens_ptr + n_documents).to(gl.int32))
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
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
            document = find_document(cu_seqlens_ptr, n_documents, first.to(gl.int64) + 1, 0) - 1
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
    bias_ptr, embeddings_ptr, scales_ptr, states, weights, full, empty, n_tiles, n_tokens,
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
    for tile in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
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
    arguments, D_MODEL: gl.constexpr, PART_ROWS: gl.constexpr, PARTS: gl.constexpr, CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    _copy(*arguments, D_MODEL, PART_ROWS, PARTS, CHUNK, STAGES)


@gluon.jit(do_not_specialize=["n_rows", "query_length", "n_tokens", "n_documents", "document_length"])
def _fused_kernel(
    hidden, weight, queries_ptr, bias_ptr, mask_ptr, cu_seqlens_ptr, best_ptr,
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

    Grid: n programs, which take every n-th tile, so that what all of them read at a time lies together: where each took
    a run of tiles, it was 3 % slower at 1 x 1000, 32 x 300. hidden [n_tokens, D_MODEL] and weight [SIZE, D_MODEL] are
    contiguous.
    """
    n_tiles = gl.cdiv(n_tokens, PART_ROWS * PARTS)
    dtype: gl.constexpr = hidden.dtype
    states, weights, full, empty = _allocate(dtype, EMBEDDING, PART_ROWS, PARTS, CHUNK, STAGES)
    queries_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, EMBEDDING], dtype)
    queries = gl.allocate_shared_memory(dtype, [BLOCKS, COLUMNS, EMBEDDING], queries_layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)

    # A tuple that has a name, like these two, turns constants into values, so constants are not among them.
    arguments = (
        queries_ptr, bias_ptr, mask_ptr, cu_seqlens_ptr, best_ptr, states, weights, queries, full, empty, ready,
        n_tiles, n_rows, query_length, n_tokens, n_documents, document_length, stride_query, stride_query_token,
    )  # fmt: skip
    copied = (hidden, weight, states, weights, full, empty, n_tiles)
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
            (_copy_part, (copied, D_MODEL, PART_ROWS, PARTS, CHUNK, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


_fused = Launcher(_fused_kernel)


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

    Grid and the rest as in `_fused_kernel`.
    """
    n_tiles = gl.cdiv(n_tokens, PART_ROWS * PARTS)
    dtype: gl.constexpr = hidden.dtype
    states, weights, full, empty = _allocate(dtype, EMBEDDING, PART_ROWS, PARTS, CHUNK, STAGES)
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
            (_copy_part, (copied, D_MODEL, PART_ROWS, PARTS, CHUNK, STAGES)),
        ],
        [4, 1],
        [232, 40],
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
):  # fmt: skip
    """scores[query, document] = sum over active rows of the maximum over the parts that the document lies in.

    Grid: (blocks of documents, queries).
    """
    wait_for_previous_kernel()
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


_finish = Launcher(_finish_kernel, follows=True)


def _described(n_tokens: int, weight_shape: torch.Size, dtype: torch.dtype, tile: FusedTile) -> tuple[Described, ...]:
    """Hidden states and weight, as the kernels take them."""
    size, d_model = weight_shape
    item = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[dtype]
    blocks = (tile.rows // _PARTS, tile.chunk), (tile.embedding, tile.chunk)
    return tuple(
        Described(rows, d_model, block, gl.NVMMASharedLayout.get_default_for(list(block), item))
        for rows, block in zip((n_tokens, size), blocks, strict=True)
    )


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
            size, d_model, tile.embedding, tile.columns, tile.blocks, tile.rows // _PARTS,
            _PARTS, tile.chunk, tile.num_stages, packed, has_bias, has_documents_mask,
            zero_masked and has_documents_mask, normalize,
        ),
        num_warps=4,
        num_stages=1,
        described=_described(n_tokens, weight_shape, dtype, tile),
    )  # fmt: skip
    block_rows = max(16, triton.next_power_of_2(query_length))
    block_documents = 8
    finish = _finish.bind(
        (triton.cdiv(n_documents, block_documents), n_queries, 1),
        (query_length, n_documents, document_length, columns),
        (),
        (block_rows, block_documents, tile.rows // _PARTS, packed, has_queries_mask, has_documents_mask),
        num_warps=1,
        num_stages=1,
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
        project(hidden, weight, queries, bias, documents_mask, cu_seqlens, best)
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
            size, d_model, tile.embedding, tile.rows // _PARTS, _PARTS, tile.chunk,
            tile.num_stages, has_bias, normalize,
        ),
        num_warps=4,
        num_stages=1,
        described=_described(n_tokens, weight_shape, dtype, tile),
    )  # fmt: skip
