"""Documents as one stream of tokens, multiplied tile by tile regardless of document boundaries.

Every document starts at a multiple of 8 columns: the last token of the previous one is repeated up to there. So a tile
holds several short documents, or parts of two, and at most 7 columns of a document repeat a token. In a product, a lane
has two columns of every 8, whose maximum belongs to one document, the same for all lanes.

- One warp computes the tokens of the columns, and where documents end (`hopper_walk`).
- Four warps copy these tokens, and pass with every tile the eights (groups of 8 columns) after which documents end. For
  codes and float32, eight warps do, which decompress them (`hopper_codes`) or split them into float16 (`hopper_pairs`).
- One partition multiplies the rows of all queries with every tile. It accumulates the maxima eight by eight; where a
  document ends, it writes the four maxima of each row to shared memory and starts anew. It needs to know nothing else
  about documents. Its groups of four warps do not wait for each other (`hopper_barriers`).
- Two workers, or three for codes and float32, take turns to reduce these four, weight them and sum them over the rows
  of a query.

If multiplying warps also sum, as in `hopper`, they spend two fifths of their time at the ends of documents of 24 to 112
tokens: shuffles wait for each other, and column masks take the ALU. 32 queries and 80,000 documents then took 3.2 ms on
an H200, against 2.87 with each document by itself; with sums in other warps, 2.3; and with one multiplying partition of
four groups and one walking warp, 2.02.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..gluon import copy_to_shared, next_slot
from ..reductions import larger
from .hopper_barriers import (
    RING,
    arrive,
    await_barrier,
    execute_ptx,
    load_word,
    offsets,
    spans,
    store_word,
    summing_workers,
    warps_of_sums,
)
from .hopper_long import product_of_stream
from .hopper_parts import announce, announce_last, tile_positions, unscaled
from .hopper_products import (
    loads_scales,
    makes_scales,
    product,
    product_layout,
    query_operands,
    rows_from,
    store_sums,
    sums_from,
)
from .hopper_reductions import split_by_lane
from .hopper_walk import SPAN, await_span, ended_of, of_tile, run_start_of


@gluon.jit
def _maxima_of_eights(similarities, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Per-lane maxima [ROWS, 4, COLUMNS / 8] of every 8 columns of a row, which four lanes share."""
    lane_maxima = gl.reduce(gl.reshape(similarities, [ROWS, COLUMNS // 8, 4, 2]), 3, larger)
    return gl.permute(lane_maxima, (0, 2, 1))


@gluon.jit
def _halves(values):
    """Split values [R, 4, n] into halves of the last dimension, which is within a thread."""
    ROWS: gl.constexpr = values.shape[0]
    HALF: gl.constexpr = values.shape[2] // 2
    return gl.split(gl.permute(gl.reshape(values, [ROWS, 4, 2, HALF]), (0, 1, 3, 2)))


_LARGEST_OF_FOUR = gl.constexpr(
    "{ .reg .f32 a, b, c, d; ld.shared.v4.f32 {a, b, c, d}, [$1]; max.NaN.f32 a, a, b; max.NaN.f32 c, c, d;"
    " max.NaN.f32 $0, a, c; }"
)


@gluon.jit
def _leave(best, memory, slot, phase, config: gl.constexpr):
    """Write the maxima [ROWS, 4] of a document to the ring, once its slot is empty."""
    AT: gl.constexpr = offsets(config)
    layout: gl.constexpr = best.type.layout
    rows = gl.arange(0, config.tile.rows, layout=gl.SliceLayout(1, layout))
    lanes = gl.arange(0, 4, layout=gl.SliceLayout(0, layout))
    addresses = memory + AT.ring_of_maxima + 16 * config.tile.rows * slot + (16 * rows[:, None] + 4 * lanes[None, :])
    await_barrier(memory, AT.empty_places, slot, phase)
    execute_ptx("st.shared.f32 [$1], $2; mov.b32 $0, 0;", "=r,r,f", [addresses, best])
    arrive(memory, AT.full_places, slot)


@gluon.jit
def _with_eight(state, values, ends, memory, row_scale, config: gl.constexpr):
    """Update the maxima of the current document with an eight [R, 4, 1]; if it `ends` there, write and reset them."""
    best, slot, phase = state
    ROWS: gl.constexpr = values.shape[0]
    best = larger(best, gl.convert_layout(gl.reshape(values, [ROWS, 4]), best.type.layout, assert_trivial=True))
    if ends != 0:
        if makes_scales(config):
            best *= row_scale[:, None]
        _leave(best, memory, slot, phase, config)
        slot, phase = next_slot(slot, phase, RING)
        best = gl.full([ROWS, 4], float("-inf"), gl.float32, best.type.layout)
    return best, slot, phase


@gluon.jit
def _with_eights(state, values, end_bits, FIRST: gl.constexpr, memory, row_scale, config: gl.constexpr):
    """Update the state, of maxima and ring slot, with the eights [R, 4, n] from FIRST on."""
    if values.shape[2] > 1:
        first, second = _halves(values)
        state = _with_eights(state, first, end_bits, FIRST, memory, row_scale, config)
        state = _with_eights(state, second, end_bits, FIRST + first.shape[2], memory, row_scale, config)
    else:
        state = _with_eight(state, values, (end_bits >> FIRST) & 1, memory, row_scale, config)
    return state


_ONE = gl.constexpr("{ .reg .b32 lane; mov.u32 lane, %laneid; add.u32 lane, lane, $1; min.u32 $0, lane, 1; }")


@gluon.jit
def _one_of_thread(positive):
    """A 1 that the compiler knows neither to be 1 nor to be the same in all threads.

    Otherwise it would be in a uniform register, which a multiply-add does not take beside a constant: ptxas would move
    it to a register before each, one more instruction. (In separate partitions, as in `hopper`, it does not.)
    """
    return gl.inline_asm_elementwise(_ONE, "=r,r", [positive], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def score_stream(arguments, config: gl.constexpr):
    """Multiply the query rows with every tile; write the maxima of every document with tokens to the ring."""
    AT: gl.constexpr = offsets(config)
    queries, _, shared, share, numbers, _ = arguments
    tiles, second_tiles, scales, token_offsets, memory, _ = shared
    n_queries, _, _, _, _, _ = numbers
    ROWS: gl.constexpr = config.tile.rows
    COLUMNS: gl.constexpr = config.tile.columns
    ITEM: gl.constexpr = tiles.dtype.primitive_bitwidth // 8
    query_tiles, row_scale = tiles, gl.to_tensor(0)
    if not config.blocks.split:
        query_tiles, row_scale = query_operands(queries, share, numbers, tiles, config, 0)
    operands = (query_tiles, tiles, second_tiles, scales, token_offsets, memory, memory)
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, product_layout(config, ITEM, COLUMNS))
    by_lane: gl.constexpr = gl.SliceLayout(2, split_by_lane(zeros, ROWS, COLUMNS).type.layout)
    if makes_scales(config):
        row_scale = gl.convert_layout(row_scale, gl.SliceLayout(1, by_lane))
    one = _one_of_thread(n_queries)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    await_barrier(memory, AT.full_slots, slot, phase)
    end_bits = load_word(memory, AT.ends_of_slots, slot)
    fence_async_shared()
    state = gl.full([ROWS, 4], float("-inf"), gl.float32, by_lane), gl.to_tensor(0), gl.to_tensor(1)
    while end_bits >= 0:
        if config.blocks.split:
            similarities, slot, phase, next_end_bits = product_of_stream(operands, slot, phase, config)
        else:
            similarities, slot, phase, next_end_bits = product(operands, slot, phase, one, config, COLUMNS, 0)
        eights = _maxima_of_eights(similarities, ROWS, COLUMNS)
        state = _with_eights(state, eights, end_bits, 0, memory, row_scale, config)
        end_bits = next_end_bits


@gluon.jit
def _take(memory, slot, phase, BY_ROW: gl.constexpr, config: gl.constexpr):
    """Wait for the next document in the ring; return the maximum of each row."""
    AT: gl.constexpr = offsets(config)
    ROWS: gl.constexpr = config.tile.rows
    addresses = memory + AT.ring_of_maxima + 16 * ROWS * slot + 16 * gl.arange(0, ROWS, layout=BY_ROW)
    await_barrier(memory, AT.full_places, slot, phase)
    best = gl.inline_asm_elementwise(_LARGEST_OF_FOUR, "=f,r", [addresses], dtype=gl.float32, is_pure=False, pack=1)
    arrive(memory, AT.empty_places, slot)
    return best


@gluon.jit
def _mark(documents, group, document, n_documents, document_length, config: gl.constexpr):
    """The start of a packed document, whose length is the difference to the next mark; the length of a padded one."""
    _, bounds_ptr, cu_seqlens_ptr = documents
    mark = document_length
    if config.packed:
        mark = gl.load(cu_seqlens_ptr + gl.minimum(document, n_documents))
    elif config.has_documents_mask:
        flat_document = group.to(gl.int64) * n_documents + gl.minimum(document, n_documents - 1)
        mark = gl.load(bounds_ptr + 2 * flat_document)
    return mark


@gluon.jit
def add_maxima(arguments, config: gl.constexpr, WORKER: gl.constexpr):
    """Sum the maxima of every document, four per row, that the multiplying partition writes to the ring.

    A sum is a chain of dependent instructions, so several workers take turns, counted over documents with tokens. A
    worker that met only empty ones for long would get so far ahead that it mistook an earlier phase of a ring slot for
    its own.
    """
    queries, documents, shared, share, numbers, results = arguments
    _, bounds_ptr, _ = documents
    tiles, _, _, _, memory, _ = shared
    row_block, group, first, last = share
    _, _, _, n_documents, document_length, _ = numbers
    sums_ptr, _, _, _ = results
    ROWS: gl.constexpr = config.tile.rows
    WORKERS: gl.constexpr = summing_workers(config)
    by_row: gl.constexpr = gl.BlockedLayout([1], [32], [warps_of_sums(config)], [0])
    rows = rows_from(queries, share, numbers, gl.to_tensor(0), row_block * ROWS, ROWS, by_row, config)
    _, _, _, row_scale, _ = rows
    sums = sums_from(share, numbers, row_block * ROWS, ROWS, by_row, config)
    # The ring slot of the next document with tokens. With an odd number of slots, two workers swap slots every round.
    gl.static_assert(RING == WORKERS or (WORKERS == 2 and RING % 2 == 1))
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    mark = _mark(documents, group, first, n_documents, document_length, config)
    next_mark = _mark(documents, group, first + 1, n_documents, document_length, config)
    for document in range(first, last):
        length = mark
        if config.packed:
            length = (next_mark - mark).to(gl.int32)
        mark = next_mark
        next_mark = _mark(documents, group, document + 2, n_documents, document_length, config)
        # Empty documents are assigned by index. (A select would cost the sums a predicate, without which ptxas
        # serializes their shuffles: 1.44 ms instead of 1.29 at 32 x 120000, 8 to 32 tokens.)
        index = (document - first) % WORKERS
        turn = slot if RING == WORKERS else (slot + phase) % 2
        turn = index + gl.minimum(length, 1) * (turn - index)
        if turn == WORKER:
            row_best = gl.zeros([ROWS], gl.float32, by_row)
            if length > 0:
                row_best = _take(memory, slot, phase, by_row, config)
            if tiles.dtype == gl.int8 and not config.affine:
                row_best = unscaled(row_best)
            if config.zero_masked:
                first_masked = gl.load(bounds_ptr + 2 * (group.to(gl.int64) * n_documents + document) + 1)
                row_best = gl.where((row_best < 0.0) & (first_masked < document_length), 0.0, row_best)
            if loads_scales(config):
                row_best *= row_scale
            store_sums(row_best, rows, sums, sums_ptr, document, length, ROWS, config)
        if length > 0:
            slot, phase = next_slot(slot, phase, RING)


@gluon.jit
def copy_stream(arguments, span_buffers, config: gl.constexpr, SCALED: gl.constexpr):
    """As `hopper_parts.copy_documents`, for documents as a stream."""
    AT: gl.constexpr = offsets(config)
    (
        documents_ptr, _, _, scale_ptr, documents_offset_ptr, cu_seqlens_ptr, offsets_ptr, tiles, second_tiles, scales,
        token_offsets, memory, _, group, first, _, n_documents, document_length, _, _, stride_token,
    ) = arguments  # fmt: skip
    shared = tiles, second_tiles, scales, token_offsets, memory
    EMBEDDING: gl.constexpr = config.size
    BLOCK_EMBEDDING: gl.constexpr = config.blocks.first
    SECOND: gl.constexpr = config.blocks.second
    COLUMNS: gl.constexpr = config.tile.columns
    UNIT: gl.constexpr = 128 // documents_ptr.dtype.element_ty.primitive_bitwidth
    positions, dims, second_positions, second_dims, scale_positions = tile_positions(UNIT, config)
    if config.affine:
        documents_ptr = documents_ptr.to(gl.pointer_type(gl.int8), bitcast=True)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    in_flight = gl.to_tensor(0)
    oldest = gl.to_tensor(0)
    run_start = run_start_of(cu_seqlens_ptr, group, first, n_documents, document_length, config)
    LISTED: gl.constexpr = config.offset_unit > 0
    step = config.offset_unit if LISTED else stride_token
    if not LISTED:
        documents_ptr += run_start.to(gl.int64) * stride_token
    base = documents_ptr + dims[None, :]
    if SECOND > 0:
        second_base = documents_ptr + second_dims[None, :]
    if SCALED:
        scale_ptr += run_start
    if config.affine:
        documents_offset_ptr += run_start
    tokens, row_offsets = span_buffers
    SPANS: gl.constexpr = spans(config)
    column_rows = row_offsets if LISTED else tokens
    span = gl.to_tensor(0)
    span_phase = gl.to_tensor(0)
    span_is_full = gl.to_tensor(True)
    while span_is_full:
        eights, span_end_bits = await_span(memory, span, span_phase, config)
        for index in range(0, gl.cdiv(8 * eights, COLUMNS)):
            tile = SPAN // COLUMNS * span + index
            rows = of_tile(column_rows, tile, positions, config)
            await_barrier(memory, AT.empty_slots, slot, phase)
            store_word(memory, AT.ends_of_slots, slot, ended_of(span_end_bits, index, config))
            if not config.affine:
                arrive(memory, AT.full_slots, slot)
            pointers = base + rows[:, None] * step
            if BLOCK_EMBEDDING <= EMBEDDING:
                copy_to_shared(tiles.index(slot), pointers)
            else:
                copy_to_shared(tiles.index(slot), pointers, mask=(dims < EMBEDDING)[None, :])
            if SECOND > 0:
                rows = of_tile(column_rows, tile, second_positions, config)
                pointers = second_base + rows[:, None] * step
                copy_to_shared(second_tiles.index(slot), pointers, mask=(second_dims < EMBEDDING)[None, :])
            if SCALED:
                scale_tokens = of_tile(tokens, tile, scale_positions, config)
                copy_to_shared(scales.index(slot), scale_ptr + scale_tokens)
                if config.affine:
                    copy_to_shared(token_offsets.index(slot), documents_offset_ptr + scale_tokens)
            in_flight, oldest = announce(slot, in_flight, oldest, shared, config)
            slot, phase = next_slot(slot, phase, config.tile.num_stages)
        arrive(memory, AT.empty_spans, span)
        span, span_phase = next_slot(span, span_phase, SPANS)
        span_is_full = eights == SPAN // 8
    await_barrier(memory, AT.empty_slots, slot, phase)
    store_word(memory, AT.ends_of_slots, slot, -1)
    if not config.affine:
        arrive(memory, AT.full_slots, slot)
    announce_last(slot, in_flight, oldest, shared, config)
