"""Products of the Hopper kernel, and the operands, masks, weights and scales of the query rows of a part.

A part multiplies its rows with the tokens in a slot. Sums may be over its rows, or over those of all parts.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from ..gluon import execute, next_slot, wait_for_product
from .hopper_barriers import arrive, await_barrier, has_lower, load_word, offsets, rows_of_product, warps_of_product
from .hopper_codes import scaled_rows
from .hopper_pairs import float16_pairs, scales_of_slot
from .hopper_parts import (
    query_rows,
    rounded_in_registers,
    row_sums_of,
    rows_of,
    scaled,
    scaled_affine,
    scales_tokens,
    sums_of,
)

# Hardware barriers that Triton does not use, one for each part: wait for a turn, and pass it.
AWAIT_TURN = gl.constexpr(tuple(gl.constexpr(f"bar.sync {8 + part}, 256;") for part in range(4)))
GIVE_TURN = gl.constexpr(tuple(gl.constexpr(f"bar.arrive {8 + part}, 256;") for part in range(4)))


@gluon.constexpr_function
def in_turn(config):
    """Whether parts start products in turn: where the work after a product takes as long as the product."""
    return (config.with_argmax or config.soft) and not config.blocks.split


@gluon.constexpr_function
def in_type_of_centroids(config):
    """Whether products are in the dtype of the centroids of codes, to which query rows are converted with scales."""
    return config.nbits > 0 and config.scale_rows


@gluon.constexpr_function
def product_layout(config, item, columns):
    """The layout of products with `columns` tokens, of elements of `item` bytes."""
    return gl.NVMMADistributedLayout([3, 0], [warps_of_product(config), 1], [16, columns, 32 // item])


@gluon.constexpr_function
def makes_scales(config):
    """Whether query rows get scales when they are loaded."""
    return in_type_of_centroids(config) or config.quantize_rows or config.pairs


@gluon.constexpr_function
def loads_scales(config):
    """Whether query rows have scales in memory."""
    return (config.normalize or config.values) and not (in_type_of_centroids(config) or config.quantize_rows)


@gluon.jit
def _as_operand(rows, layout: gl.constexpr):
    """Query rows as the operand of a product of another width, which has the same register layout."""
    return rows if rows.type.layout == layout else gl.convert_layout(rows, layout, assert_trivial=True)


@gluon.jit
def first_rows(tile, COLUMNS: gl.constexpr):
    return tile if tile.shape[0] == COLUMNS else tile.slice(0, COLUMNS)


@gluon.jit
def start_product(operands, slot, config: gl.constexpr, COLUMNS: gl.constexpr, PART: gl.constexpr):
    """Start the product of a part's rows with the first COLUMNS tokens of the tile in a full slot."""
    query_tiles, tiles, second_tiles, _, _, _, _ = operands
    query_tile, second_query_tile, _ = query_tiles
    ITEM: gl.constexpr = tiles.dtype.primitive_bitwidth // 8
    ROWS: gl.constexpr = query_tile.shape[0]
    mma: gl.constexpr = product_layout(config, ITEM, COLUMNS)
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 4 // ITEM)
    SUM: gl.constexpr = gl.int32 if tiles.dtype == gl.int8 else gl.float32
    if in_turn(config):
        execute(AWAIT_TURN[PART])
    tile = first_rows(tiles.index(slot), COLUMNS).permute((1, 0))
    query_tile = _as_operand(query_tile, operand)
    similarities = gl.zeros([ROWS, COLUMNS], SUM, mma)
    if config.blocks.second > 0 or has_lower(config):
        second_slot = slot + config.tile.num_stages if config.pairs else slot
        second_tile = first_rows(second_tiles.index(second_slot), COLUMNS).permute((1, 0))
        second_query_tile = _as_operand(second_query_tile, operand)
    if has_lower(config):
        # Small terms first.
        similarities = warpgroup_mma(second_query_tile, tile, similarities, use_acc=False, is_async=True)
        similarities = warpgroup_mma(query_tile, second_tile, similarities, is_async=True)
        similarities = warpgroup_mma(query_tile, tile, similarities, is_async=True)
    else:
        similarities = warpgroup_mma(query_tile, tile, similarities, use_acc=False, is_async=True)
        if config.blocks.second > 0:
            similarities = warpgroup_mma(second_query_tile, second_tile, similarities, is_async=True)
    return similarities


@gluon.jit
def finish_product(
    similarities, operands, slot, phase, one, config: gl.constexpr, COLUMNS: gl.constexpr, PART: gl.constexpr
):
    """Wait for the similarities that `start_product` started, and until the next slot is full.

    For a stream, also return after which eights of its columns documents end.
    """
    AT: gl.constexpr = offsets(config)
    query_tiles, tiles, _, scales, token_offsets, full, empty = operands
    _, _, row_sums = query_tiles
    ITEM: gl.constexpr = tiles.dtype.primitive_bitwidth // 8
    PARTS: gl.constexpr = config.tile.parts
    IN_TURN: gl.constexpr = in_turn(config)
    SCALED: gl.constexpr = scales_tokens(config)
    # Loads of scales while a product is in flight are interleaved with its instructions. 8-bit products are too short
    # for that: with int8 0.250 instead of 0.262 at 1 x 1000, 1024 x 1024, and 0.068 of 0.071 at 32 x 1024, 32 x 180.
    # Four warpgroups of a stream hide the latency of loads after a product: with norms 2.53 instead of 2.88 at
    # 1024 x 1024, 32 x 180. Two do not: with 256 elements 0.585 instead of 0.551 at 32 x 5000, 32 x 112.
    SCALES_LAST: gl.constexpr = ITEM == 1 or (config.stream and PARTS == 4 and not config.pairs)
    mma: gl.constexpr = product_layout(config, ITEM, COLUMNS)
    if config.pairs:
        scale = scales_of_slot(full, slot, gl.SliceLayout(0, mma), config)
    elif SCALED and not SCALES_LAST:
        scale = first_rows(scales.index(slot), COLUMNS).load(gl.SliceLayout(0, mma))
    # While the product is in flight, wait for the next tile: of this document or another, or the one past the end.
    read_slot = slot
    slot, phase = next_slot(slot, phase, config.tile.num_stages)
    if config.stream:
        await_barrier(full, AT.full_slots, slot, phase)
        end_bits = load_word(full, AT.ends_of_slots, slot)
    else:
        mbarrier.wait(full.index(slot), phase)
        end_bits = gl.to_tensor(0)
    fence_async_shared()
    similarities = wait_for_product(similarities)
    if SCALED and SCALES_LAST:
        scale = first_rows(scales.index(read_slot), COLUMNS).load(gl.SliceLayout(0, mma))
    if config.affine:
        offset = first_rows(token_offsets.index(read_slot), COLUMNS).load(gl.SliceLayout(0, mma))
    if config.stream:
        arrive(empty, AT.empty_slots, read_slot)
    elif IN_TURN:
        execute(GIVE_TURN[(PART + PARTS // 2) % PARTS])
        # Every thread arrives by itself, which saves the part a barrier: 0.647 ms against 0.667 at 512 x 512, 32 x 180.
        # Without argmax it is slower, 0.589 against 0.573.
        async_copy.mbarrier_arrive(empty.index(read_slot), increment_count=False)
    else:
        mbarrier.arrive(empty.index(read_slot), count=1)
    if config.affine:
        row_sums = gl.convert_layout(row_sums, gl.SliceLayout(1, mma), assert_trivial=True)
        similarities = scaled_affine(similarities, scale, offset, row_sums)
    elif SCALED:
        similarities = scaled(similarities, scale, one)
    return similarities, slot, phase, end_bits


@gluon.jit
def product(operands, slot, phase, one, config: gl.constexpr, COLUMNS: gl.constexpr, PART: gl.constexpr):
    similarities = start_product(operands, slot, config, COLUMNS, PART)
    return finish_product(similarities, operands, slot, phase, one, config, COLUMNS, PART)


@gluon.jit
def _to_operand(rows, layout: gl.constexpr, config: gl.constexpr):
    """Convert query rows to the operand of a product.

    A stream has all rows at once, and converts 32 elements of each at a time: shared memory is full of tiles.
    """
    ROWS: gl.constexpr = rows.shape[0]
    SIZE: gl.constexpr = rows.shape[1]
    if config.stream and SIZE > 32:
        first, second = gl.split(gl.permute(gl.reshape(rows, [ROWS, 2, SIZE // 2]), (0, 2, 1)))
        halves = gl.join(_to_operand(first, layout, config), _to_operand(second, layout, config))
        rows = gl.reshape(gl.permute(halves, (0, 2, 1)), [ROWS, SIZE])
        rows = gl.convert_layout(rows, layout, assert_trivial=True)
    else:
        rows = gl.convert_layout(rows, layout)
    return rows


@gluon.jit
def query_operands(queries, share, numbers, tiles, config: gl.constexpr, PART: gl.constexpr):
    """Load a part's query rows to registers, in one block or two, with row sums for affine documents, and scales."""
    queries_ptr, _, _, stride_query, stride_query_token = queries
    row_block, group, _, _ = share
    n_queries, query_length, padded_query_length, _, _, _ = numbers
    SECOND: gl.constexpr = config.blocks.second
    ITEM: gl.constexpr = tiles.dtype.primitive_bitwidth // 8
    mma: gl.constexpr = product_layout(config, ITEM, config.tile.columns)
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 4 // ITEM)
    first_row = row_block * config.tile.rows + PART * rows_of_product(config)
    layout = group, n_queries, query_length, padded_query_length, stride_query, stride_query_token
    query_tile = query_rows(queries_ptr, first_row, layout, 0, config.blocks.first, config)
    row_scale = gl.to_tensor(0)
    if in_type_of_centroids(config):
        query_tile, row_scale = scaled_rows(query_tile, tiles.dtype)
    elif config.quantize_rows:
        query_tile, row_scale = rounded_in_registers(query_tile, tiles.dtype, config)
    elif config.pairs:
        query_tile, second_query_tile, row_scale = float16_pairs(query_tile, has_lower(config))
    row_sums = gl.to_tensor(0)
    if config.affine:
        row_sums = row_sums_of(query_tile, gl.SliceLayout(1, mma))
    query_tile = _to_operand(query_tile, operand, config)
    if has_lower(config):
        second_query_tile = _to_operand(second_query_tile, operand, config)
    elif SECOND > 0:
        second_query_tile = query_rows(queries_ptr, first_row, layout, config.blocks.first, SECOND, config)
        if config.affine:
            row_sums += row_sums_of(second_query_tile, gl.SliceLayout(1, mma))
        second_query_tile = _to_operand(second_query_tile, operand, config)
    else:
        second_query_tile = query_tile
    return (query_tile, second_query_tile, row_sums), row_scale


@gluon.jit
def rows_from(
    queries, share, numbers, row_scale, first_row, ROWS: gl.constexpr, BY_ROW: gl.constexpr, config: gl.constexpr
):
    """For ROWS query rows: which exist, which are active, their weights, scales, and indices within a group.

    Scales made by `query_operands` are passed through.
    """
    _, queries_mask_ptr, queries_scale_ptr, _, _ = queries
    _, group, _, _ = share
    n_queries, query_length, padded_query_length, _, _, _ = numbers
    rows = rows_of(first_row, gl.arange(0, ROWS, layout=BY_ROW), ROWS, config)
    query, token = rows // padded_query_length, rows % padded_query_length
    exists = (query < n_queries) & (token < query_length)
    global_row = (group * n_queries + query).to(gl.int64) * query_length + token
    active, weight = exists, exists
    if config.has_queries_mask:
        weight = gl.load(queries_mask_ptr + global_row, mask=exists, other=0)
        active = active & (weight != 0)
    if loads_scales(config):
        row_scale = gl.load(queries_scale_ptr + global_row, mask=exists, other=0.0)
    return exists, active, weight, row_scale, query.to(gl.int64) * query_length + token


@gluon.jit
def sums_from(share, numbers, first_row, ROWS: gl.constexpr, BY_ROW: gl.constexpr, config: gl.constexpr):
    """For the sums of ROWS query rows: which exist, their output offsets, and their values for an empty document."""
    _, group, _, _ = share
    n_queries, _, padded_query_length, n_documents, _, empty_score = numbers
    GROUP: gl.constexpr = config.group
    by_sum: gl.constexpr = sums_of(gl.zeros([ROWS], gl.float32, BY_ROW), ROWS, config).type.layout
    n_sums = n_queries * (padded_query_length // GROUP)
    sum_row = first_row // GROUP + gl.arange(0, ROWS // GROUP, layout=by_sum)
    # For an empty document, one sum of a query is the empty score, and the others are 0.
    empty_sums = gl.where(sum_row % (padded_query_length // GROUP) == 0, empty_score, 0.0)
    return sum_row < n_sums, (group * n_sums + sum_row).to(gl.int64) * n_documents, empty_sums


@gluon.jit
def store_sums(row_best, rows, sums, sums_ptr, document, length, ROWS: gl.constexpr, config: gl.constexpr):
    """Weight the row maxima [ROWS] of a document of `length` tokens, and store their sums."""
    _, active, weight, _, _ = rows
    exists, offset, empty_sums = sums
    if config.weighted:
        row_best *= weight.to(gl.float32)
    row_best = gl.where(active & (length > 0), row_best, 0.0)
    group_sums = sums_of(row_best, ROWS, config)
    if config.packed or config.has_documents_mask:
        group_sums = gl.where(length > 0, group_sums, empty_sums)
    gl.store(sums_ptr + offset + document, group_sums, mask=exists)
