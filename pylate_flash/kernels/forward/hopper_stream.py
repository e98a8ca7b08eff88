"""Documents as one stream of tokens, whose tiles are multiplied whatever the boundaries of documents.

Documents follow each other at multiples of 8 columns: the last token of each is repeated up to there. A tile so holds
several short documents, or parts of two, and a document has 7 columns at most that are products of a token before. In a
product, a lane has two columns of every 8, whose maximum belongs to one document: to which, is the same for all lanes.

- One warp finds out which tokens the columns are, and where documents end (`hopper_walk`).
- Four warps copy these tokens, and say with a tile after which eights of columns documents end. Of codes and
  float32, eight warps do, which decompress these (`hopper_codes`), or take them apart (`hopper_pairs`).
- One partition multiplies the rows of all queries with every tile. It takes the maxima of 8 columns after those before,
  and where a document ends, leaves the four that it has of a row in shared memory, begins anew, and knows nothing else
  of documents. Its groups of four warps do not wait for each other (`hopper_barriers`).
- Two workers, of codes and float32 three, in turn bring the four together, weight them and sum them over the rows of a
  query.

What multiplies, if it takes sums too, as in `hopper`, spends two fifths of its time at the ends of documents of 24 to
112 tokens: shuffles wait for each other, and masks of columns take the ALU. 32 queries and 80,000 documents then took
3.2 ms on an H200, in place of 2.87 with each document by itself; with sums by other warps, 2.3; and since one partition
multiplies, in four groups, and one warp walks, 2.02.
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
    """Maxima [ROWS, 4, COLUMNS / 8] of what each of four lanes has of every 8 columns of a row."""
    of_lanes = gl.reduce(gl.reshape(similarities, [ROWS, COLUMNS // 8, 4, 2]), 3, larger)
    return gl.permute(of_lanes, (0, 2, 1))


@gluon.jit
def _halves(values):
    """The first and the second half of values [R, 4, n] along the last dimension, which is within a thread."""
    ROWS: gl.constexpr = values.shape[0]
    HALF: gl.constexpr = values.shape[2] // 2
    return gl.split(gl.permute(gl.reshape(values, [ROWS, 4, 2, HALF]), (0, 1, 3, 2)))


_LARGEST_OF_FOUR = gl.constexpr(
    "{ .reg .f32 a, b, c, d; ld.shared.v4.f32 {a, b, c, d}, [$1]; max.NaN.f32 a, a, b; max.NaN.f32 c, c, d;"
    " max.NaN.f32 $0, a, c; }"
)


@gluon.jit
def _leave(best, memory, slot, phase, config: gl.constexpr):
    """Put the maxima [ROWS, 4] of a document into the ring, when there is a place."""
    AT: gl.constexpr = offsets(config)
    layout: gl.constexpr = best.type.layout
    rows = gl.arange(0, config.tile.rows, layout=gl.SliceLayout(1, layout))
    lanes = gl.arange(0, 4, layout=gl.SliceLayout(0, layout))
    at = memory + AT.ring_of_maxima + 16 * config.tile.rows * slot + (16 * rows[:, None] + 4 * lanes[None, :])
    await_barrier(memory, AT.empty_places, slot, phase)
    execute_ptx("st.shared.f32 [$1], $2; mov.b32 $0, 0;", "=r,r,f", [at, best])
    arrive(memory, AT.full_places, slot)


@gluon.jit
def _with_eight(state, values, ends, memory, row_scale, config: gl.constexpr):
    """Maxima of the document at hand after an eight [R, 4, 1], or of the next document, if this one `ends` there."""
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
def _with_eights(state, values, ended, FIRST: gl.constexpr, memory, row_scale, config: gl.constexpr):
    """Maxima of the document at hand after eights [R, 4, n], from FIRST on, and where they go when it ends."""
    if values.shape[2] > 1:
        first, second = _halves(values)
        state = _with_eights(state, first, ended, FIRST, memory, row_scale, config)
        state = _with_eights(state, second, ended, FIRST + first.shape[2], memory, row_scale, config)
    else:
        state = _with_eight(state, values, (ended >> FIRST) & 1, memory, row_scale, config)
    return state


_ONE = gl.constexpr("{ .reg .b32 lane; mov.u32 lane, %laneid; add.u32 lane, lane, $1; min.u32 $0, lane, 1; }")


@gluon.jit
def _one_of_thread(positive):
    """A 1 of which the compiler knows neither that it is one, nor that all threads have the same.

    Of all threads, it would be in a uniform register. A multiply-add takes none beside a constant: before each, ptxas
    moves it to a register, as many instructions more. (In partitions by themselves, as in `hopper`, it does not.)
    """
    return gl.inline_asm_elementwise(_ONE, "=r,r", [positive], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def score_stream(arguments, config: gl.constexpr):
    """Multiply the query rows with every tile; leave the maxima of every document that has tokens."""
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
    ended = load_word(memory, AT.ends_of_slots, slot)
    fence_async_shared()
    state = gl.full([ROWS, 4], float("-inf"), gl.float32, by_lane), gl.to_tensor(0), gl.to_tensor(1)
    while ended >= 0:
        if config.blocks.split:
            similarities, slot, phase, next_ended = product_of_stream(operands, slot, phase, config)
        else:
            similarities, slot, phase, next_ended = product(operands, slot, phase, one, config, COLUMNS, 0)
        eights = _maxima_of_eights(similarities, ROWS, COLUMNS)
        state = _with_eights(state, eights, ended, 0, memory, row_scale, config)
        ended = next_ended


@gluon.jit
def _take(memory, slot, phase, BY_ROW: gl.constexpr, config: gl.constexpr):
    """The maximum of each row of the next document in the ring, when it is there."""
    AT: gl.constexpr = offsets(config)
    ROWS: gl.constexpr = config.tile.rows
    at = memory + AT.ring_of_maxima + 16 * ROWS * slot + 16 * gl.arange(0, ROWS, layout=BY_ROW)
    await_barrier(memory, AT.full_places, slot, phase)
    best = gl.inline_asm_elementwise(_LARGEST_OF_FOUR, "=f,r", [at], dtype=gl.float32, is_pure=False, pack=1)
    arrive(memory, AT.empty_places, slot)
    return best


@gluon.jit
def _mark(documents, group, document, n_documents, document_length, config: gl.constexpr):
    """Where a packed document begins, which with the next mark tells its length; the length of a padded one."""
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
    """Sum the maxima of every document, of which what multiplies leaves four for each row.

    A sum is a chain of instructions that wait for each other: several workers take turns, with documents that have
    tokens. A worker that met only empty ones for long would get so far ahead as to take an earlier phase of a place in
    the ring for its own.
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
    # Where the next document with tokens lies in the ring. Of an odd number of places, two workers swap every round.
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
        # An empty document goes by its number. (Selected by a condition, this costs the sums a predicate, for want of
        # which ptxas has their shuffles follow one another: 1.44 ms in place of 1.29 at 32 x 120000, 8 to 32 tokens.)
        number = (document - first) % WORKERS
        turn = slot if RING == WORKERS else (slot + phase) % 2
        turn = number + gl.minimum(length, 1) * (turn - number)
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
def copy_stream(arguments, walked, config: gl.constexpr, SCALED: gl.constexpr):
    """As `hopper_parts.copy_documents`, of documents as a stream."""
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
    under_way = gl.to_tensor(0)
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
    tokens, places = walked
    SPANS: gl.constexpr = spans(config)
    rows_of_columns = places if LISTED else tokens
    span = gl.to_tensor(0)
    span_phase = gl.to_tensor(0)
    whole = gl.to_tensor(True)
    while whole:
        eights, ended_in_span = await_span(memory, span, span_phase, config)
        for number in range(0, gl.cdiv(8 * eights, COLUMNS)):
            tile = SPAN // COLUMNS * span + number
            rows = of_tile(rows_of_columns, tile, positions, config)
            await_barrier(memory, AT.empty_slots, slot, phase)
            store_word(memory, AT.ends_of_slots, slot, ended_of(ended_in_span, number, config))
            if not config.affine:
                arrive(memory, AT.full_slots, slot)
            at = base + rows[:, None] * step
            if BLOCK_EMBEDDING <= EMBEDDING:
                copy_to_shared(tiles.index(slot), at)
            else:
                copy_to_shared(tiles.index(slot), at, mask=(dims < EMBEDDING)[None, :])
            if SECOND > 0:
                rows = of_tile(rows_of_columns, tile, second_positions, config)
                at = second_base + rows[:, None] * step
                copy_to_shared(second_tiles.index(slot), at, mask=(second_dims < EMBEDDING)[None, :])
            if SCALED:
                of_scales = of_tile(tokens, tile, scale_positions, config)
                copy_to_shared(scales.index(slot), scale_ptr + of_scales)
                if config.affine:
                    copy_to_shared(token_offsets.index(slot), documents_offset_ptr + of_scales)
            under_way, oldest = announce(slot, under_way, oldest, shared, config)
            slot, phase = next_slot(slot, phase, config.tile.num_stages)
        arrive(memory, AT.empty_spans, span)
        span, span_phase = next_slot(span, span_phase, SPANS)
        whole = eights == SPAN // 8
    await_barrier(memory, AT.empty_slots, slot, phase)
    store_word(memory, AT.ends_of_slots, slot, -1)
    if not config.affine:
        arrive(memory, AT.full_slots, slot)
    announce_last(slot, under_way, oldest, shared, config)
