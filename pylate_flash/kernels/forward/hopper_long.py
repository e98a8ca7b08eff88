"""Embeddings too long for registers in the Hopper kernel: both operands of a product are copied block by block.

A slot holds a block of 64 elements of all query rows and of a tile of tokens, copied together. A part accumulates the
products of its rows over the blocks of a tile in registers. Tensor cores truncate what they add, so after every 1024
elements (`tables.SUMMED_EMBEDDING`), sums are added to totals with rounding: those of the first half of the columns are
in registers, too, and those of the second half, for which there are none, in shared memory.

Wide tiles matter most: L2 delivers 8 TB/s to all SMs, and 128 x 256 products of 64 elements read 48 KB; in tiles of
128 x 128, as many products read a third more. But a tile belongs to one document, and is read with all query rows,
however short the document. As a stream (`hopper_stream`), whose other warps leave no registers for products of 256
columns, only documents that fill wide tiles take longer.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from ..gluon import copy_to_shared, next_slot, wait_for_product
from ..tables import SUMMED_EMBEDDING as _SUMMED
from .hopper_barriers import (
    arrive,
    arrive_when_copied,
    await_barrier,
    load_word,
    offsets,
    rows_of_product,
    spans,
    store_word,
)
from .hopper_parts import document_at, scales_tokens, tile_positions, tokens_of, tokens_read
from .hopper_products import first_rows, product_layout
from .hopper_reductions import columns_in_two
from .hopper_walk import SPAN, await_span, ended_of, of_tile, run_start_of

SUMMED_EMBEDDING = gl.constexpr(_SUMMED)


@gluon.jit
def blocks_memory(dtype: gl.constexpr, config: gl.constexpr):
    """Allocate slots for blocks of the query rows, and if needed, memory for the second half of each part's totals."""
    ROWS: gl.constexpr = config.tile.rows
    BLOCK: gl.constexpr = config.blocks.first
    PARTS: gl.constexpr = config.tile.parts
    HALF: gl.constexpr = config.tile.columns // 2
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK], dtype)
    query_slots = gl.allocate_shared_memory(dtype, [config.tile.num_stages, ROWS, BLOCK], layout)
    totals = query_slots
    if config.size > SUMMED_EMBEDDING and config.tile.columns > 128:
        sums_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS // PARTS, HALF], gl.float32)
        totals = gl.allocate_shared_memory(gl.float32, [PARTS, ROWS // PARTS, HALF], sums_layout)
    return query_slots, totals


@gluon.jit
def _sums_of_products(
    operands, begin, end, slot, phase, config: gl.constexpr, COLUMNS: gl.constexpr, PART: gl.constexpr
):
    """Sums of products of a part's rows and tokens over at most 1024 elements, and the slot after the last one read."""
    _query_tiles, tiles, blocks, _scales, _offsets, full, empty = operands
    query_slots, _totals = blocks
    AT: gl.constexpr = offsets(config)
    ROWS: gl.constexpr = rows_of_product(config)
    products = gl.zeros([ROWS, COLUMNS], gl.float32, product_layout(config, 2, COLUMNS))
    for _ in range(begin, end, config.blocks.first):
        if config.stream:
            await_barrier(full, AT.full_slots, slot, phase)
        else:
            mbarrier.wait(full.index(slot), phase)
        # The copies are generic-proxy writes; the tensor cores read shared memory through the async proxy.
        fence_async_shared()
        rows = query_slots.index(slot).slice(PART * ROWS, ROWS)
        tile = first_rows(tiles.index(slot), COLUMNS).permute((1, 0))
        products = warpgroup_mma(rows, tile, products, is_async=True)
        products = wait_for_product(products)
        if config.stream:
            arrive(empty, AT.empty_slots, slot)
        else:
            mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, config.tile.num_stages)
    return products, slot, phase


@gluon.jit
def _halves(sums, config: gl.constexpr):
    """Split sums into the first and the second half of the columns, in the layout of a product of that width."""
    layout: gl.constexpr = product_layout(config, 2, sums.shape[1] // 2)
    first, second = columns_in_two(sums, sums.shape[0])
    first = gl.convert_layout(first, layout, assert_trivial=True)
    return first, gl.convert_layout(second, layout, assert_trivial=True)


@gluon.jit
def product_of_blocks(operands, slot, phase, config: gl.constexpr, COLUMNS: gl.constexpr, PART: gl.constexpr):
    """Similarities of a part's rows and the first COLUMNS tokens of the next tile, and the slot after it."""
    # Elements before those of the last sum, and per step. With a single step, the loop disappears, and ptxas spills.
    BEFORE: gl.constexpr = (config.size - 1) // SUMMED_EMBEDDING * SUMMED_EMBEDDING
    STEP: gl.constexpr = min(SUMMED_EMBEDDING, max(BEFORE // 2, 64))
    ROWS: gl.constexpr = rows_of_product(config)
    IN_REGISTERS: gl.constexpr = COLUMNS <= 128
    layout: gl.constexpr = product_layout(config, 2, COLUMNS)
    half: gl.constexpr = product_layout(config, 2, COLUMNS // 2)
    _, stored_totals = operands[2]
    if BEFORE > 0:
        total = gl.zeros([ROWS, COLUMNS // 2], gl.float32, half)
        if IN_REGISTERS:
            total = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        for begin in range(0, BEFORE, STEP):
            products, slot, phase = _sums_of_products(operands, begin, begin + STEP, slot, phase, config, COLUMNS, PART)
            if IN_REGISTERS:
                total += products
            else:
                first, second = _halves(products, config)
                total += first
                if begin > 0:
                    second += stored_totals.index(PART).load(half)
                stored_totals.index(PART).store(second)
    similarities, slot, phase = _sums_of_products(operands, BEFORE, config.size, slot, phase, config, COLUMNS, PART)
    if BEFORE > 0:
        if IN_REGISTERS:
            similarities += total
        else:
            first, second = _halves(similarities, config)
            joined = gl.permute(gl.join(first + total, second + stored_totals.index(PART).load(half)), (0, 2, 1))
            similarities = gl.convert_layout(gl.reshape(joined, [ROWS, COLUMNS]), layout, assert_trivial=True)
    if scales_tokens(config):
        similarities *= first_rows(operands[3].index(0), COLUMNS).load(gl.SliceLayout(0, layout))[None, :]
    return similarities, slot, phase


@gluon.jit
def product_of_stream(operands, slot, phase, config: gl.constexpr):
    """As `product_of_blocks`; also return after which eights of columns of the next tile documents end."""
    AT: gl.constexpr = offsets(config)
    similarities, slot, phase = product_of_blocks(operands, slot, phase, config, config.tile.columns, 0)
    memory = operands[-1]
    await_barrier(memory, AT.full_slots, slot, phase)
    return similarities, slot, phase, load_word(memory, AT.ends_of_slots, slot)


@gluon.jit
def _query_blocks(arguments, rows, dims, config: gl.constexpr):
    """The base address of the query rows of a program, and the offsets of the first block of each row."""
    queries, _, _, share, numbers, _ = arguments
    queries_ptr, _, _, stride_query, stride_query_token = queries
    row_block, group, _, _ = share
    n_queries, query_length, padded_query_length, _, _, _ = numbers
    first_row = row_block * config.tile.rows
    rows += first_row
    # Rows past the end repeat the last query or token; no sum includes them.
    first_query = gl.minimum(first_row // padded_query_length, n_queries - 1)
    query = gl.minimum(rows // padded_query_length, n_queries - 1)
    token = gl.minimum(rows % padded_query_length, query_length - 1)
    query_offsets = ((query - first_query) * stride_query + token * stride_query_token)[:, None] + dims[None, :]
    return queries_ptr + (group * n_queries + first_query).to(gl.int64) * stride_query, query_offsets


@gluon.jit
def copy_blocks(arguments, copy_arguments, config: gl.constexpr, SCALED: gl.constexpr):
    """Copy blocks of query rows and of the tokens of the run's documents, tile by tile, as slots become empty."""
    (
        documents_ptr, active_ptr, bounds_ptr, scale_ptr, _, cu_seqlens_ptr, offsets_ptr, tiles, query_blocks,
        scales, _, full, empty, group, first, last, n_documents, document_length, stride_group, stride_document,
        stride_token,
    ) = copy_arguments  # fmt: skip
    query_slots, _ = query_blocks
    SIZE: gl.constexpr = config.size
    BLOCK: gl.constexpr = config.blocks.first
    COLUMNS: gl.constexpr = config.tile.columns
    UNIT: gl.constexpr = 8
    # The scales of a tile are copied with its last block, which reuses the slot of an earlier one of the tile: by then,
    # those of the previous tile have been read.
    gl.static_assert(BLOCK * config.tile.num_stages < SIZE)
    positions, dims, _, _, scale_positions = tile_positions(UNIT, config)
    rows = gl.arange(0, config.tile.rows, layout=positions.type.layout)
    queries_ptr, query_offsets = _query_blocks(arguments, rows, dims, config)
    source = documents_ptr, bounds_ptr, cu_seqlens_ptr, offsets_ptr, stride_group, stride_document, stride_token
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for document in range(first, last):
        base, first_token, length = document_at(source, group, document, n_documents, document_length, config)
        for start in range(0, length, COLUMNS):
            tokens = tokens_of(active_ptr, first_token, positions, start, length, config)
            token_offsets = ((tokens - start) * stride_token)[:, None] + dims[None, :]
            tile_base = base + gl.cast(start, gl.int64) * stride_token
            read_mask = (positions < tokens_read(start, length - start, COLUMNS, config.tail, config))[:, None]
            for dim in range(0, SIZE, BLOCK):
                mbarrier.wait(empty.index(slot), phase)
                inside = (dim + dims < SIZE)[None, :]
                if SIZE % BLOCK == 0:
                    copy_to_shared(query_slots.index(slot), queries_ptr + dim + query_offsets)
                else:
                    copy_to_shared(query_slots.index(slot), queries_ptr + dim + query_offsets, mask=inside)
                if SIZE % BLOCK == 0 and config.tail == 0:
                    copy_to_shared(tiles.index(slot), tile_base + dim + token_offsets)
                elif SIZE % BLOCK == 0:
                    copy_to_shared(tiles.index(slot), tile_base + dim + token_offsets, mask=read_mask)
                else:
                    copy_to_shared(tiles.index(slot), tile_base + dim + token_offsets, mask=read_mask & inside)
                if SCALED and dim + BLOCK >= SIZE:
                    scale_tokens = tokens_of(active_ptr, first_token, scale_positions, start, length, config)
                    copy_to_shared(scales.index(0), scale_ptr + first_token + scale_tokens)
                async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
                slot, phase = next_slot(slot, phase, config.tile.num_stages)


@gluon.jit
def copy_stream_blocks(arguments, copy_arguments, span_buffers, config: gl.constexpr, SCALED: gl.constexpr):
    """As `copy_blocks`, for documents as a stream (`hopper_stream`)."""
    AT: gl.constexpr = offsets(config)
    (
        documents_ptr, _, _, scale_ptr, _, cu_seqlens_ptr, _, tiles, query_blocks, scales, _, memory, _, group,
        first, _, n_documents, document_length, _, _, stride_token,
    ) = copy_arguments  # fmt: skip
    query_slots, _ = query_blocks
    SIZE: gl.constexpr = config.size
    BLOCK: gl.constexpr = config.blocks.first
    COLUMNS: gl.constexpr = config.tile.columns
    SPANS: gl.constexpr = spans(config)
    LISTED: gl.constexpr = config.offset_unit > 0
    # As in `copy_blocks`.
    gl.static_assert(BLOCK * config.tile.num_stages < SIZE)
    positions, dims, _, _, scale_positions = tile_positions(8, config)
    rows = gl.arange(0, config.tile.rows, layout=positions.type.layout)
    queries_ptr, query_offsets = _query_blocks(arguments, rows, dims, config)
    run_start = run_start_of(cu_seqlens_ptr, group, first, n_documents, document_length, config)
    step = config.offset_unit if LISTED else stride_token
    if not LISTED:
        documents_ptr += run_start.to(gl.int64) * stride_token
    tokens, row_offsets = span_buffers
    column_rows = row_offsets if LISTED else tokens
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    span = gl.to_tensor(0)
    span_phase = gl.to_tensor(0)
    span_is_full = gl.to_tensor(True)
    while span_is_full:
        eights, span_end_bits = await_span(memory, span, span_phase, config)
        for index in range(0, gl.cdiv(8 * eights, COLUMNS)):
            tile = SPAN // COLUMNS * span + index
            token_offsets = of_tile(column_rows, tile, positions, config)[:, None] * step + dims[None, :]
            for dim in range(0, SIZE, BLOCK):
                await_barrier(memory, AT.empty_slots, slot, phase)
                store_word(memory, AT.ends_of_slots, slot, ended_of(span_end_bits, index, config))
                arrive(memory, AT.full_slots, slot)
                if SIZE % BLOCK == 0:
                    copy_to_shared(query_slots.index(slot), queries_ptr + dim + query_offsets)
                    copy_to_shared(tiles.index(slot), documents_ptr + dim + token_offsets)
                else:
                    inside = (dim + dims < SIZE)[None, :]
                    copy_to_shared(query_slots.index(slot), queries_ptr + dim + query_offsets, mask=inside)
                    copy_to_shared(tiles.index(slot), documents_ptr + dim + token_offsets, mask=inside)
                if SCALED and dim + BLOCK >= SIZE:
                    scale_tokens = of_tile(tokens, tile, scale_positions, config)
                    copy_to_shared(scales.index(0), scale_ptr + run_start + scale_tokens)
                arrive_when_copied(memory, AT.full_slots, slot)
                slot, phase = next_slot(slot, phase, config.tile.num_stages)
        arrive(memory, AT.empty_spans, span)
        span, span_phase = next_slot(span, span_phase, SPANS)
        span_is_full = eights == SPAN // 8
    await_barrier(memory, AT.empty_slots, slot, phase)
    store_word(memory, AT.ends_of_slots, slot, -1)
    arrive(memory, AT.full_slots, slot)
    arrive_when_copied(memory, AT.full_slots, slot)
