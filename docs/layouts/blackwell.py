"""A stacked forward for Blackwell (compute capability 10.0), in Gluon. It has been compiled, but has never run.

The package does not use it. It computes the same as `_stacked_kernel`, from the same arguments, with the structure of
the Hopper kernel (`kernels.forward.hopper`): warps that copy document tokens, and parts (warp groups) that take maxima.
The difference is the multiplication. One warp issues tcgen05 products, which read both operands from shared memory and
write to tensor memory, so the accumulators need no registers, and no part waits for the tensor cores while a buffer is
free: each of two parts has 128 query rows and two product buffers. Each thread of a part owns a row of a product, so
the maximum needs no reduction across lanes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_mma,
)

from pylate_flash.kernels.forward.common import add_sums, numbers_of
from pylate_flash.kernels.forward.hopper_parts import copy_documents, document_range
from pylate_flash.kernels.gluon import add, execute, find_document, next_slot
from pylate_flash.kernels.launch import kernel
from pylate_flash.kernels.plan import ForwardPlan, tall_plan
from pylate_flash.kernels.reductions import larger
from pylate_flash.kernels.rows import active_tokens, norms_of
from pylate_flash.kernels.tables import DOCUMENT_COST, HOPPER_SHARES, power_of_two
from pylate_flash.kernels.tiles import Blocks, HopperTile
from pylate_flash.problem import Problem, Tensors

_DOCUMENT_COST = gl.constexpr(DOCUMENT_COST)
# Rows of a part, which are the lanes of tensor memory, and columns of a product that a thread loads at a time.
_ROWS = gl.constexpr(128)
_COLUMNS = gl.constexpr(32)
_PARTS = gl.constexpr(2)
# Query rows loaded at a time.
_LOADED_ROWS = gl.constexpr(32)
# Product buffers of a part: one is reduced while the next is computed.
_BUFFERS = gl.constexpr(2)
_NO_ARGMAX = gl.constexpr(0x7FFFFFFF)
# Barriers alone do not order tensor memory accesses: fences are needed between a read and the arrive that signals it,
# and between a wait and the accesses after it.
_BEFORE_SIGNAL = gl.constexpr("tcgen05.fence::before_thread_sync;")
_AFTER_SIGNAL = gl.constexpr("tcgen05.fence::after_thread_sync;")


@gluon.jit
def _lower_of(a, b):
    return gl.minimum(a, b)


@gluon.jit
def _store_queries(
    queries_ptr, query_tiles, row_block, group, n_queries, query_length, padded_query_length, stride_query,
    stride_query_token,
    config: gl.constexpr,
):  # fmt: skip
    """Store the query rows of every part in shared memory."""
    BLOCK_EMBEDDING: gl.constexpr = config.blocks.first
    LANES: gl.constexpr = BLOCK_EMBEDDING // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    dims = gl.arange(0, BLOCK_EMBEDDING, layout=gl.SliceLayout(0, layout))
    for part in gl.static_range(_PARTS):
        # In chunks: before warp specialization, each thread has a quarter of the registers.
        for start in gl.static_range(0, _ROWS, _LOADED_ROWS):
            rows = start + gl.arange(0, _LOADED_ROWS, layout=gl.SliceLayout(1, layout))
            rows += (row_block * _PARTS + part) * _ROWS
            query, token = rows // padded_query_length, rows % padded_query_length
            mask = ((query < n_queries) & (token < query_length))[:, None] & (dims < config.size)[None, :]
            offset = (group * n_queries + query).to(gl.int64) * stride_query + token * stride_query_token
            loaded = gl.load(queries_ptr + offset[:, None] + dims[None, :], mask=mask, other=0.0)
            query_tiles.index(part).slice(start, _LOADED_ROWS).store(loaded)


@gluon.jit
def _multiply(arguments, config: gl.constexpr):
    """Multiply the rows of every part with every tile, in one warp, which waits for free buffers, not for products."""
    (
        cu_seqlens_ptr, bounds_ptr, query_tiles, tiles, products, full, empty, done, free, group, first, last,
        n_documents, document_length,
    ) = arguments  # fmt: skip
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    buffer = gl.to_tensor(0)
    free_phase = gl.to_tensor(1)
    for document in range(first, last):
        flat_document = group.to(gl.int64) * n_documents + document
        _, length = document_range(cu_seqlens_ptr, bounds_ptr, flat_document, document, document_length, config)
        for _start in range(0, length, config.tile.columns):
            mbarrier.wait(full.index(slot), phase)
            # The copies go through the generic proxy, and the tensor cores read through the async proxy.
            fence_async_shared()
            tile = tiles.index(slot).permute((1, 0))
            for part in gl.static_range(_PARTS):
                mbarrier.wait(free.index(part * _BUFFERS + buffer), free_phase)
                execute(_AFTER_SIGNAL, 1)
                product = products.index(part * _BUFFERS + buffer)
                ready = done.index(part * _BUFFERS + buffer)
                # Products complete in issue order: after the last part's, the tile is free.
                if part == _PARTS - 1:
                    tcgen05_mma(
                        query_tiles.index(part), tile, product, use_acc=False, mbarriers=[ready, empty.index(slot)]
                    )
                else:
                    tcgen05_mma(query_tiles.index(part), tile, product, use_acc=False, mbarriers=[ready])
            slot, phase = next_slot(slot, phase, config.tile.num_stages)
            buffer, free_phase = next_slot(buffer, free_phase, _BUFFERS)


@gluon.jit
def _score(arguments, config: gl.constexpr, PART: gl.constexpr):
    """Store sums (and argmax) of a part's rows for every document of the run."""
    (
        queries_mask_ptr, active_ptr, bounds_ptr, queries_scale_ptr, documents_scale_ptr, cu_seqlens_ptr, sums_ptr,
        argmax_ptr, products, done, free, row_block, group, first, last, n_queries, query_length, padded_query_length,
        n_documents, document_length, empty_score,
    ) = arguments  # fmt: skip
    BLOCK_TOKENS: gl.constexpr = config.tile.columns
    GROUP: gl.constexpr = config.group
    product_layout: gl.constexpr = gl.BlockedLayout([1, _COLUMNS], [32, 1], [4, 1], [0, 1])
    row_layout: gl.constexpr = gl.SliceLayout(1, product_layout)
    rows = (row_block * _PARTS + PART) * _ROWS + gl.arange(0, _ROWS, layout=row_layout)
    query, token = rows // padded_query_length, rows % padded_query_length
    row_exists = (query < n_queries) & (token < query_length)
    global_row = (group * n_queries + query).to(gl.int64) * query_length + token
    row_active = row_exists
    if config.has_queries_mask:
        row_weight = gl.load(queries_mask_ptr + global_row, mask=row_exists, other=0)
        row_active = row_active & (row_weight != 0)
    if config.normalize:
        row_scale = gl.load(queries_scale_ptr + global_row, mask=row_exists, other=0.0)
    columns = gl.arange(0, _COLUMNS, layout=gl.SliceLayout(0, product_layout))
    group_row = query.to(gl.int64) * query_length + token
    n_sums = n_queries * (padded_query_length // GROUP)

    buffer = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for document in range(first, last):
        flat_document = group.to(gl.int64) * n_documents + document
        first_token, length = document_range(
            cu_seqlens_ptr, bounds_ptr, flat_document, document, document_length, config
        )
        best = gl.full([_ROWS], float("-inf"), gl.float32, row_layout)
        key = gl.full([_ROWS], _NO_ARGMAX, gl.int32, row_layout)
        for start in range(0, length, BLOCK_TOKENS):
            mbarrier.wait(done.index(PART * _BUFFERS + buffer), phase)
            execute(_AFTER_SIGNAL)
            product = products.index(PART * _BUFFERS + buffer)
            for segment in gl.static_range(BLOCK_TOKENS // _COLUMNS):
                similarities = product.slice(segment * _COLUMNS, _COLUMNS).load(product_layout)
                # Past the end the last token repeats, which changes neither the maximum nor its first index.
                tokens = gl.minimum(start + segment * _COLUMNS + columns, length - 1)
                if config.normalize:
                    positions = tokens
                    if config.has_documents_mask:
                        positions = gl.load(active_ptr + first_token + tokens)
                    similarities *= gl.load(documents_scale_ptr + first_token + positions)[None, :]
                segment_best = gl.reduce(similarities, 1, larger)
                if config.with_argmax:
                    won = (similarities == segment_best[:, None]) | (similarities != similarities)
                    segment_key = gl.reduce(gl.where(won, tokens[None, :], _NO_ARGMAX), 1, _lower_of)
                    # A later token wins only if strictly better, or if it is the first NaN.
                    later = (segment_best > best) | ((segment_best != segment_best) & (best == best))
                    key = gl.where(later, segment_key, key)
                best = larger(best, segment_best)
            # Each thread arrives for itself, as it only reads its own row.
            execute(_BEFORE_SIGNAL)
            async_copy.mbarrier_arrive(free.index(PART * _BUFFERS + buffer), increment_count=False)
            buffer, phase = next_slot(buffer, phase, _BUFFERS)

        counted = row_active & (length > 0)
        if config.with_argmax:
            argmax = gl.where(counted & (key != _NO_ARGMAX) & (best != float("-inf")), key, -1)
            if config.has_documents_mask:
                chosen = gl.load(active_ptr + first_token + argmax, mask=argmax >= 0, other=0)
                argmax = gl.where(argmax >= 0, chosen, -1)
        if config.zero_masked:
            first_masked = gl.load(bounds_ptr + 2 * flat_document + 1)
            masked_exists = first_masked < document_length
            if config.with_argmax:
                earlier = (best == 0.0) & (first_masked < argmax)
                argmax = gl.where(((best < 0.0) | earlier) & masked_exists, -1, argmax)
            best = gl.where((best < 0.0) & masked_exists, 0.0, best)
        if config.with_argmax:
            argmax_offset = flat_document * n_queries * query_length + group_row
            gl.store(argmax_ptr + argmax_offset, argmax.to(argmax_ptr.dtype.element_ty), mask=row_exists)
        if config.normalize:
            best *= row_scale
        if config.weighted:
            best *= row_weight.to(gl.float32)
        best = gl.where(counted, best, 0.0)
        sums = gl.reduce(gl.reshape(best, [_ROWS // GROUP, GROUP]), 1, add)
        first_sum = (row_block * _PARTS + PART) * (_ROWS // GROUP)
        sum_row = first_sum + gl.arange(0, _ROWS // GROUP, layout=sums.type.layout)
        if config.packed or config.has_documents_mask:
            # For an empty document, one sum of a query is its score, and the others are 0.
            of_empty = gl.where(sum_row % (padded_query_length // GROUP) == 0, empty_score, 0.0)
            sums = gl.where(length > 0, sums, of_empty)
        sum_offset = (group * n_sums + sum_row).to(gl.int64) * n_documents + document
        gl.store(sums_ptr + sum_offset, sums, mask=sum_row < n_sums)


@kernel(jit=gluon.jit)
def _blackwell_kernel(
    queries_ptr, documents_ptr, queries_mask_ptr, active_ptr, bounds_ptr, queries_scale_ptr, documents_scale_ptr,
    cu_seqlens_ptr, sums_ptr, argmax_ptr,
    n_queries, query_length, padded_query_length, n_documents, document_length, n_runs, run, empty_score,
    stride_query, stride_query_token, stride_group, stride_document, stride_document_token,
    config: gl.constexpr,
):  # fmt: skip
    """As `stacked._stacked_kernel`, without document segments, and with the embedding in one block."""
    BLOCK_EMBEDDING: gl.constexpr = config.blocks.first
    BLOCK_TOKENS: gl.constexpr = config.tile.columns
    STAGES: gl.constexpr = config.tile.num_stages
    stride_query *= config.query_unit
    stride_query_token *= config.query_unit
    stride_group *= config.document_unit
    stride_document *= config.document_unit
    stride_document_token *= config.document_unit
    n_row_blocks = gl.cdiv(n_queries * padded_query_length, _PARTS * _ROWS)
    row_block = gl.program_id(0) % n_row_blocks
    run_index = (gl.program_id(0) // n_row_blocks) % n_runs
    group = gl.program_id(0) // (n_row_blocks * n_runs)
    if config.packed:
        first = find_document(cu_seqlens_ptr, n_documents, run_index.to(gl.int64) * run, _DOCUMENT_COST)
        last = find_document(cu_seqlens_ptr, n_documents, (run_index + 1).to(gl.int64) * run, _DOCUMENT_COST)
    else:
        first = run_index * run
        last = gl.minimum(first + run, n_documents)

    dtype: gl.constexpr = documents_ptr.dtype.element_ty
    query_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, BLOCK_EMBEDDING], dtype)
    token_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_TOKENS, BLOCK_EMBEDDING], dtype)
    query_tiles = gl.allocate_shared_memory(dtype, [_PARTS, _ROWS, BLOCK_EMBEDDING], query_layout)
    tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_TOKENS, BLOCK_EMBEDDING], token_layout)
    product_layout: gl.constexpr = TensorMemoryLayout([_ROWS, BLOCK_TOKENS], col_stride=1)
    products = allocate_tensor_memory(gl.float32, [_PARTS * _BUFFERS, _ROWS, BLOCK_TOKENS], product_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [_PARTS * _BUFFERS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_PARTS * _BUFFERS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # Every copying thread arrives when its copies have landed, the tensor cores when they have read a tile.
        mbarrier.init(full.index(stage), count=128)
        mbarrier.init(empty.index(stage), count=1)
    for buffer in gl.static_range(_PARTS * _BUFFERS):
        # The tensor cores arrive when a product is complete, every thread of its part when it has read it.
        mbarrier.init(done.index(buffer), count=1)
        mbarrier.init(free.index(buffer), count=128)
    _store_queries(
        queries_ptr, query_tiles, row_block, group, n_queries, query_length, padded_query_length, stride_query,
        stride_query_token, config,
    )  # fmt: skip
    fence_async_shared()

    score_args = (
        queries_mask_ptr, active_ptr, bounds_ptr, queries_scale_ptr, documents_scale_ptr, cu_seqlens_ptr, sums_ptr,
        argmax_ptr, products, done, free, row_block, group, first, last, n_queries, query_length, padded_query_length,
        n_documents, document_length, empty_score,
    )  # fmt: skip
    multiply_args = (
        cu_seqlens_ptr, bounds_ptr, query_tiles, tiles, products, full, empty, done, free, group, first, last,
        n_documents, document_length,
    )  # fmt: skip
    copy_args = (
        documents_ptr, active_ptr, bounds_ptr, None, None, cu_seqlens_ptr, None, tiles, tiles, full, full, full, empty,
        group, first, last, n_documents, document_length, stride_group, stride_document, stride_document_token,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_score, (score_args, config, gl.constexpr(0))),
            (_score, (score_args, config, gl.constexpr(1))),
            (copy_documents, (copy_args, config, gl.constexpr(False))),
            (_multiply, (multiply_args, config)),
        ],
        [4, 4, 1],
        [192, 64, 64],
    )


# Shared memory reads per 16 elements of K: for 128 rows and 128 columns 8 KB in 64 cycles, for 64 columns 6 KB in 32.
# Embeddings of more than 128 elements leave room for fewer columns, and those of more than 256 for none.
_TILE = HopperTile(256, 128, 2, 4)
_LONG = HopperTile(256, 64, 2, 3)


def blackwell_plan(problem: Problem) -> ForwardPlan:
    """Tile and grid of the kernel, for half-precision embeddings of at most 256 elements, copied 16 bytes at a time."""
    tile, block = _TILE if problem.size <= 128 else _LONG, max(16, power_of_two(problem.size))
    # A query is always padded: a sum of single rows is no sum.
    return tall_plan(problem, "blackwell", tile, Blocks(block, 0, False), HOPPER_SHARES, "it has never run")


def blackwell_forward(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor | None]:
    """As `kernels.forward.maxsim_forward`, for documents that are neither split into segments nor candidates of packed
    queries."""
    plan = blackwell_plan(problem)
    queries, documents, queries_mask, documents_mask, _, cu_seqlens, _ = tensors
    active = bounds = queries_scale = documents_scale = argmax = None
    if documents_mask is not None:
        active, bounds = active_tokens(documents_mask)
    if problem.normalize:
        queries_scale, documents_scale = norms_of(queries, documents)
    if problem.with_argmax:
        argmax = torch.empty(problem.argmax_shape, dtype=problem.argmax_dtype, device=problem.device)
    shape = problem.scores_shape if plan.n_sums == 1 else (plan.n_sums, *problem.scores_shape)
    sums = torch.empty(shape, dtype=torch.float32, device=problem.device)
    _blackwell_kernel(
        (plan.row_blocks * plan.n_runs * problem.groups, 1, 1),
        (
            queries, documents, queries_mask, active, bounds, queries_scale, documents_scale, cu_seqlens, sums, argmax,
        ),
        numbers_of(problem, plan), plan.strides, (plan.config,), plan.config.warps,
    )  # fmt: skip
    return sums if plan.n_sums == 1 else add_sums(problem, plan, sums), argmax
