"""The stacked forward on Hopper (compute capability 9.0), in Gluon: operands, copies and products placed by hand.

It computes what `stacked._stacked_kernel` computes, from the same arguments, of embeddings of 16 bits, of both operands
in int8 or fp8, of affine uint8 that the copying warps give signs, or of residual codes that they decompress
(`hopper_codes`). What plain Triton leaves unused there is the tensor cores' time: it reads both operands of every
product from shared memory, whose bandwidth a tile of 64 tokens then exhausts (4 KB per 32 cycles of a 64 x 64 x 16
product), and it takes the row maxima while the tensor cores wait. Here

- the query rows stay in registers for as long as the program runs, and only document tokens come from shared memory,
  in one block or two (as in `stacked`);
- four warps do nothing but copy tokens there, and two or four times four warps (the parts) multiply, each with its own
  rows: while some take maxima, others multiply, and while a product is under way, its part sees to the next tile;
- a row's maximum stays spread over the four lanes that share the row until the document ends, and from there to the
  sums in the layout of the products.

Measured on an H200 in bfloat16 against `_stacked_kernel` in the same run: 0.354 ms and 0.450 at 1 x 1000, 1024 x 1024
(0.340 at the rate of a large matrix product).
"""

from __future__ import annotations

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

from ...problem import Problem
from ..gluon import execute, find_document, next_slot
from ..launch import kernel, wait_for_previous_kernel
from ..plan import ForwardPlan
from ..reductions import LOG2E, larger
from ..tables import DOCUMENT_COST
from .common import ForwardTensors, numbers_of
from .hopper_codes import decode_documents, pair_table, scaled_rows
from .hopper_parts import (
    add_exponentials,
    copy_documents,
    differ,
    document_range,
    first_maximum,
    log_sums_of_lanes,
    query_rows,
    rounded_in_registers,
    row_sums_of,
    rows_of,
    scaled,
    scaled_affine,
    split_by_lane,
    sums_of,
    unscaled,
)

_DOCUMENT_COST = gl.constexpr(DOCUMENT_COST)


# Barriers of the hardware that Triton does not use, one for each part: await its turn there, and give it.
_AWAIT_TURN = gl.constexpr(tuple(gl.constexpr(f"bar.sync {8 + part}, 256;") for part in range(4)))
_GIVE_TURN = gl.constexpr(tuple(gl.constexpr(f"bar.arrive {8 + part}, 256;") for part in range(4)))


@gluon.constexpr_function
def _in_turn(config):
    """Whether parts start their products in turn: where what follows a product takes as long as it does."""
    return config.with_argmax or config.soft


@gluon.constexpr_function
def _in_type_of_centroids(config):
    """Whether products are of the type of the centroids of codes, and query rows get scales for that."""
    return config.nbits > 0 and config.scale_rows


@gluon.constexpr_function
def _copying_registers(config, bits):
    """Registers of a thread that copies, of the 280 of it and of one that multiplies.

    With 64 rows, tiles of 8 bits may be of long embeddings, of which a thread copies 16 parts. Of affine ones, it has a
    tile at a time.
    """
    of_64_rows = bits == 8 and config.tile.rows == 64 * config.tile.parts
    if config.affine:
        return 96 if of_64_rows else 80
    return 72 if of_64_rows else 56


@gluon.jit
def _lower_of(a, b):
    return gl.minimum(a, b)


@gluon.jit
def _as_operand(rows, layout: gl.constexpr):
    """Query rows as the operand of a product of another width, for which they lie as they do."""
    return rows if rows.type.layout == layout else gl.convert_layout(rows, layout, assert_trivial=True)


@gluon.jit
def _first(tile, COLUMNS: gl.constexpr):
    return tile if tile.shape[0] == COLUMNS else tile.slice(0, COLUMNS)


@gluon.jit
def _start(operands, slot, config: gl.constexpr, COLUMNS: gl.constexpr, PART: gl.constexpr):
    """Begin the product of a part's rows with the first COLUMNS tokens of the tile in a slot, which is full."""
    query_tile, second_query_tile, _, tiles, second_tiles, _, _, _, _ = operands
    ITEM: gl.constexpr = tiles.dtype.primitive_bitwidth // 8
    ROWS: gl.constexpr = query_tile.shape[0]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32 // ITEM])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 4 // ITEM)
    SUM: gl.constexpr = gl.int32 if tiles.dtype == gl.int8 else gl.float32
    if _in_turn(config):
        execute(_AWAIT_TURN[PART])
    similarities = warpgroup_mma(
        _as_operand(query_tile, operand),
        _first(tiles.index(slot), COLUMNS).permute((1, 0)),
        gl.zeros([ROWS, COLUMNS], SUM, mma),
        use_acc=False,
        is_async=True,
    )
    if config.blocks.second > 0:
        similarities = warpgroup_mma(
            _as_operand(second_query_tile, operand),
            _first(second_tiles.index(slot), COLUMNS).permute((1, 0)),
            similarities,
            is_async=True,
        )
    return similarities


@gluon.jit
def _finish(similarities, operands, slot, phase, one, config: gl.constexpr, COLUMNS: gl.constexpr, PART: gl.constexpr):
    """Similarities that `_start` has begun, when they are there, and the next slot, full."""
    _, _, row_sums, tiles, _, scales, token_offsets, full, empty = operands
    ITEM: gl.constexpr = tiles.dtype.primitive_bitwidth // 8
    PARTS: gl.constexpr = config.tile.parts
    IN_TURN: gl.constexpr = _in_turn(config)
    SCALED: gl.constexpr = config.normalize or config.values
    # Loads of scales while a product is under way come between its instructions. Those of 8 bits are too short for it:
    # with int8 0.250 in place of 0.262 at 1 x 1000, 1024 x 1024, and 0.068 of 0.071 at 32 x 1024, 32 x 180.
    SCALES_LAST: gl.constexpr = ITEM == 1
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32 // ITEM])
    if SCALED and not SCALES_LAST:
        scale = _first(scales.index(slot), COLUMNS).load(gl.SliceLayout(0, mma))
    # While the product is under way, see to the next tile: of this document or another, or the one at the end.
    read = slot
    slot, phase = next_slot(slot, phase, config.tile.num_stages)
    mbarrier.wait(full.index(slot), phase)
    fence_async_shared()
    similarities = warpgroup_mma_wait(0, deps=[similarities])
    if SCALED and SCALES_LAST:
        scale = _first(scales.index(read), COLUMNS).load(gl.SliceLayout(0, mma))
    if config.affine:
        offset = _first(token_offsets.index(read), COLUMNS).load(gl.SliceLayout(0, mma))
    if IN_TURN:
        execute(_GIVE_TURN[(PART + PARTS // 2) % PARTS])
        # Each thread for itself, which spares the part a barrier: 0.647 ms against 0.667 at 512 x 512, 32 x 180.
        # Without argmax it is slower, 0.589 against 0.573.
        async_copy.mbarrier_arrive(empty.index(read), increment_count=False)
    else:
        mbarrier.arrive(empty.index(read), count=1)
    if config.affine:
        row_sums = gl.convert_layout(row_sums, gl.SliceLayout(1, mma), assert_trivial=True)
        similarities = scaled_affine(similarities, scale, offset, row_sums)
    elif SCALED:
        similarities = scaled(similarities, scale, one)
    return similarities, slot, phase


@gluon.jit
def _product(operands, slot, phase, one, config: gl.constexpr, COLUMNS: gl.constexpr, PART: gl.constexpr):
    similarities = _start(operands, slot, config, COLUMNS, PART)
    return _finish(similarities, operands, slot, phase, one, config, COLUMNS, PART)


@gluon.jit
def _score(arguments, config: gl.constexpr, PART: gl.constexpr):
    """Multiply a part's query rows with every tile; leave sums (and argmax, or lse) of every document of the run.

    Of smooth maxima, what is left after whole tiles always takes a product of `config.tail` columns, as a token that is
    repeated would count twice.
    """
    (
        queries_ptr, queries_mask_ptr, active_ptr, bounds_ptr, queries_scale_ptr, cu_seqlens_ptr, sums_ptr,
        argmax_ptr, beta_ptr, lse_ptr, tiles, second_tiles, scales, token_offsets, full, empty, row_block, group, first,
        last, n_queries, query_length, padded_query_length, n_documents, document_length, empty_score, stride_query,
        stride_query_token,
    ) = arguments  # fmt: skip
    BLOCK_EMBEDDING: gl.constexpr = config.blocks.first
    SECOND: gl.constexpr = config.blocks.second
    PARTS: gl.constexpr = config.tile.parts
    ROWS: gl.constexpr = config.tile.rows // PARTS
    BLOCK_TOKENS: gl.constexpr = config.tile.columns
    TAIL: gl.constexpr = config.tail
    GROUP: gl.constexpr = config.group
    SCALED: gl.constexpr = config.normalize or config.values
    ITEM: gl.constexpr = tiles.dtype.primitive_bitwidth // 8
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_TOKENS, 32 // ITEM])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 4 // ITEM)
    first_row = (row_block * PARTS + PART) * ROWS
    layout = group, n_queries, query_length, padded_query_length, stride_query, stride_query_token
    query_tile = query_rows(queries_ptr, first_row, layout, 0, BLOCK_EMBEDDING, config)
    if _in_type_of_centroids(config):
        query_tile, row_scale = scaled_rows(query_tile, tiles.dtype)
    elif config.quantize_rows:
        query_tile, row_scale = rounded_in_registers(query_tile, tiles.dtype, config.normalize)
    row_sums = gl.to_tensor(0)
    if config.affine:
        row_sums = row_sums_of(query_tile, gl.SliceLayout(1, mma))
    query_tile = gl.convert_layout(query_tile, operand)
    second_query_tile = query_tile
    if SECOND > 0:
        second_query_tile = query_rows(queries_ptr, first_row, layout, BLOCK_EMBEDDING, SECOND, config)
        if config.affine:
            row_sums += row_sums_of(second_query_tile, gl.SliceLayout(1, mma))
        second_query_tile = gl.convert_layout(second_query_tile, operand)
    operands = (query_tile, second_query_tile, row_sums, tiles, second_tiles, scales, token_offsets, full, empty)

    zeros = gl.zeros([ROWS, BLOCK_TOKENS], gl.float32, mma)
    by_lane: gl.constexpr = split_by_lane(zeros, ROWS, BLOCK_TOKENS).type.layout
    # What a document leaves stays where the products' rows are: four lanes, which share a row, have the same.
    by_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, by_lane))
    rows = rows_of(first_row, gl.arange(0, ROWS, layout=by_row), ROWS, GROUP)
    query, token = rows // padded_query_length, rows % padded_query_length
    row_exists = (query < n_queries) & (token < query_length)
    global_row = (group * n_queries + query).to(gl.int64) * query_length + token
    row_active = row_exists
    if config.has_queries_mask:
        row_weight = gl.load(queries_mask_ptr + global_row, mask=row_exists, other=0)
        row_active = row_active & (row_weight != 0)
    if _in_type_of_centroids(config) or config.quantize_rows:
        row_scale = gl.convert_layout(row_scale, by_row)
    elif SCALED:
        row_scale = gl.load(queries_scale_ptr + global_row, mask=row_exists, other=0.0)
    if config.soft:
        beta = gl.load(beta_ptr)
        # From similarities to exponents of 2.
        row_factor = gl.full([ROWS], LOG2E, gl.float32, by_row) * beta
        if SCALED:
            row_factor *= row_scale
        row_factor = row_factor[:, None]
    group_row = query.to(gl.int64) * query_length + token
    by_sum: gl.constexpr = sums_of(gl.zeros([ROWS], gl.float32, by_row), ROWS, GROUP).type.layout
    # A 1 that the compiler does not know, see `scaled`.
    one = gl.minimum(n_queries, 1)
    n_sums = n_queries * (padded_query_length // GROUP)
    sum_row = first_row // GROUP + gl.arange(0, ROWS // GROUP, layout=by_sum)
    sum_exists = sum_row < n_sums
    if config.packed or config.has_documents_mask:
        # One of the sums of a query is the score of an empty document; the others add nothing to it.
        of_empty = gl.where(sum_row % (padded_query_length // GROUP) == 0, empty_score, 0.0)
    sum_offset = (group * n_sums + sum_row).to(gl.int64) * n_documents

    lanes = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, by_lane)))[None, :]
    # Finding the argmax takes the ALUs nearly as long as the products take the tensor cores, and so do exponentials.
    # Parts that wait for their products at once leave one of the two idle. So a part and the one PARTS // 2 on multiply
    # in turn, each when the product of the other has ended: given as soon as that is under way, a turn costs 4 % where
    # documents have masks. Of four parts, another two fill what is left between the products. Maxima alone are over too
    # soon: 0.384 against 0.348; so are those of 8 bits, 0.281 against 0.263 with fp8 at 1 x 1000, 1024 x 1024.
    if _in_turn(config) and PART >= PARTS // 2:
        execute(_GIVE_TURN[PART - PARTS // 2])
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    mbarrier.wait(full.index(slot), phase)
    # The copies are ordinary writes, and the tensor cores read past the path of those.
    fence_async_shared()
    # Where a document lies is loaded while the one before is scored.
    next_one = gl.minimum(first, n_documents - 1)
    next_flat = group.to(gl.int64) * n_documents + next_one
    following = document_range(cu_seqlens_ptr, bounds_ptr, next_flat, next_one, document_length, config)
    if config.starts_early:
        under_way = _start(operands, slot, config, BLOCK_TOKENS, PART)
    for document in range(first, last):
        flat_document = group.to(gl.int64) * n_documents + document
        first_token, length = following
        next_one = gl.minimum(document + 1, n_documents - 1)
        next_flat = group.to(gl.int64) * n_documents + next_one
        following = document_range(cu_seqlens_ptr, bounds_ptr, next_flat, next_one, document_length, config)
        best = gl.full([ROWS, 4], float("-inf"), gl.float32, gl.SliceLayout(2, by_lane))
        if config.soft:
            total = gl.zeros([ROWS, 4], gl.float32, gl.SliceLayout(2, by_lane))
        elif config.with_argmax:
            key = gl.full([ROWS, 4], 0, gl.int32, gl.SliceLayout(2, by_lane))
        # What is left after whole tiles takes a product of TAIL columns if it fits into one.
        in_tiles = length
        if TAIL > 0:
            in_tiles -= gl.where(length % BLOCK_TOKENS <= TAIL, length % BLOCK_TOKENS, 0)
        begin = gl.to_tensor(0)
        if config.starts_early:
            similarities, slot, phase = _finish(under_way, operands, slot, phase, one, config, BLOCK_TOKENS, PART)
            best = gl.reduce(split_by_lane(similarities, ROWS, BLOCK_TOKENS), 2, larger)
            begin += BLOCK_TOKENS
            in_tiles = gl.maximum(in_tiles, BLOCK_TOKENS)
        for start in range(begin, in_tiles, BLOCK_TOKENS):
            similarities, slot, phase = _product(operands, slot, phase, one, config, BLOCK_TOKENS, PART)
            if config.soft:
                best, total = add_exponentials(similarities, row_factor, best, total, ROWS, BLOCK_TOKENS)
            elif config.with_argmax:
                tile_best, column = first_maximum(similarities, ROWS)
                tile_best = gl.convert_layout(tile_best, gl.SliceLayout(2, by_lane), assert_trivial=True)
                column = gl.convert_layout(column, gl.SliceLayout(2, by_lane), assert_trivial=True)
                before = best
                best = larger(best, tile_best)
                key = gl.where(differ(best, before), start + column, key)
            else:
                best = larger(best, gl.reduce(split_by_lane(similarities, ROWS, BLOCK_TOKENS), 2, larger))

        if TAIL > 0:
            # Once or not at all: a loop, as a condition crashes ptxas 12.8 at 256 elements.
            for start in range(in_tiles, length, TAIL):
                of_tail, slot, phase = _product(operands, slot, phase, one, config, TAIL, PART)
                if config.soft:
                    columns = gl.arange(0, TAIL, layout=gl.SliceLayout(0, of_tail.type.layout))
                    of_tail = gl.where((start + columns < length)[None, :], of_tail, float("-inf"))
                    best, total = add_exponentials(of_tail, row_factor, best, total, ROWS, TAIL)
                else:
                    tail_best = gl.reduce(split_by_lane(of_tail, ROWS, TAIL), 2, larger)
                    tail_best = gl.convert_layout(tail_best, gl.SliceLayout(2, by_lane), assert_trivial=True)
                    best = larger(best, tail_best)

        if config.starts_early:
            under_way = _start(operands, slot, config, BLOCK_TOKENS, PART)
        counted = row_active & (length > 0)
        if config.soft:
            lse = log_sums_of_lanes(best, total, (document_length - length).to(gl.float32), config.zero_masked)
            if lse_ptr is not None:
                gl.store(lse_ptr + flat_document * n_queries * query_length + group_row, lse, mask=row_exists)
            row_best = lse / beta
        else:
            row_best = gl.reduce(best, 1, larger)
            if tiles.dtype == gl.int8 and not config.affine:
                row_best = unscaled(row_best)
        if config.with_argmax:
            # Past the end, the last token was repeated.
            key = gl.minimum(key + 2 * lanes, length - 1)
            argmax = gl.reduce(gl.where(differ(best, row_best[:, None]), 0x7FFFFFFF, key), 1, _lower_of)
            argmax = gl.where(counted & (row_best != float("-inf")), argmax, -1)
            if config.has_documents_mask:
                chosen = gl.load(active_ptr + first_token + argmax, mask=argmax >= 0, other=0)
                argmax = gl.where(argmax >= 0, chosen, -1)
        if config.zero_masked and not config.soft:
            first_masked = gl.load(bounds_ptr + 2 * flat_document + 1)
            masked_exists = first_masked < document_length
            if config.with_argmax:
                earlier = (row_best == 0.0) & (first_masked < argmax)
                argmax = gl.where(((row_best < 0.0) | earlier) & masked_exists, -1, argmax)
            row_best = gl.where((row_best < 0.0) & masked_exists, 0.0, row_best)
        if config.with_argmax:
            argmax_offset = flat_document * n_queries * query_length + group_row
            gl.store(argmax_ptr + argmax_offset, argmax.to(argmax_ptr.dtype.element_ty), mask=row_exists)
        if (SCALED or _in_type_of_centroids(config)) and not config.soft:
            row_best *= row_scale
        if config.weighted:
            row_best *= row_weight.to(gl.float32)
        row_best = gl.where(counted, row_best, 0.0)
        sums = sums_of(row_best, ROWS, GROUP)
        if config.packed or config.has_documents_mask:
            sums = gl.where(length > 0, sums, of_empty)
        gl.store(sums_ptr + sum_offset + document, sums, mask=sum_exists)
    if config.starts_early:
        # After the last document, that of a tile of which nothing is copied.
        warpgroup_mma_wait(0, deps=[under_way])
    if _in_turn(config) and PART < PARTS // 2:
        # The other part gave a turn once more.
        execute(_AWAIT_TURN[PART])


@kernel(follows=True, jit=gluon.jit)
def _hopper_kernel(
    queries_ptr, documents_ptr, queries_mask_ptr, active_ptr, bounds_ptr, queries_scale_ptr, documents_scale_ptr,
    cu_seqlens_ptr, offsets_ptr, sums_ptr, argmax_ptr, documents_offset_ptr, beta_ptr, lse_ptr, codes_ptr,
    centroids_ptr, weights_ptr,
    n_queries, query_length, padded_query_length, n_documents, document_length, n_runs, run, empty_score,
    stride_query, stride_query_token, stride_group, stride_document, stride_document_token,
    config: gl.constexpr,
):  # fmt: skip
    """As `stacked._stacked_kernel`, with every document whole."""
    BLOCK_EMBEDDING: gl.constexpr = config.blocks.first
    SECOND: gl.constexpr = config.blocks.second
    BLOCK_TOKENS: gl.constexpr = config.tile.columns
    STAGES: gl.constexpr = config.tile.num_stages
    PARTS: gl.constexpr = config.tile.parts
    SCALED: gl.constexpr = config.normalize or config.values
    wait_for_previous_kernel()
    stride_query *= config.query_unit
    stride_query_token *= config.query_unit
    stride_group *= config.document_unit
    stride_document *= config.document_unit
    stride_document_token *= config.document_unit
    n_row_blocks = gl.cdiv(n_queries * padded_query_length, config.tile.rows)
    row_block = gl.program_id(0) % n_row_blocks
    run_index = (gl.program_id(0) // n_row_blocks) % n_runs
    group = gl.program_id(0) // (n_row_blocks * n_runs)
    if config.packed:
        first = find_document(cu_seqlens_ptr, n_documents, run_index.to(gl.int64) * run, _DOCUMENT_COST)
        last = find_document(cu_seqlens_ptr, n_documents, (run_index + 1).to(gl.int64) * run, _DOCUMENT_COST)
    else:
        first = run_index * run
        last = gl.minimum(first + run, n_documents)

    # Of quantized documents, or of what codes stand for, where query rows are brought to that.
    operand_ptr = centroids_ptr if _in_type_of_centroids(config) else documents_ptr if config.values else queries_ptr
    dtype: gl.constexpr = gl.int8 if config.affine else operand_ptr.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_TOKENS, BLOCK_EMBEDDING], dtype)
    tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_TOKENS, BLOCK_EMBEDDING], layout)
    second_tiles = tiles
    if SECOND > 0:
        second_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_TOKENS, SECOND], dtype)
        second_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_TOKENS, SECOND], second_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scales = full
    if SCALED:
        by_token: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        scales = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_TOKENS], by_token)
    token_offsets = scales
    if config.affine:
        token_offsets = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_TOKENS], by_token)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # Every copying thread says when its copies have arrived, or one of them when all are done with a tile; and
        # every part when it has read a tile; in turn, each of its threads.
        mbarrier.init(full.index(stage), count=1 if config.nbits > 0 or config.affine else 128)
        mbarrier.init(empty.index(stage), count=PARTS * 128 if _in_turn(config) else PARTS)

    COPYING: gl.constexpr = _copying_registers(config, dtype.primitive_bitwidth)
    # The parts are written out one by one: Gluon takes no list made in a loop, and a tuple that has a name, like these
    # two, turns constants into values.
    arguments = (
        queries_ptr, queries_mask_ptr, active_ptr, bounds_ptr, queries_scale_ptr, cu_seqlens_ptr, sums_ptr,
        argmax_ptr, beta_ptr, lse_ptr, tiles, second_tiles, scales, token_offsets, full, empty, row_block, group,
        first, last, n_queries, query_length, padded_query_length, n_documents, document_length, empty_score,
        stride_query, stride_query_token,
    )  # fmt: skip
    copied = (
        documents_ptr, active_ptr, bounds_ptr, documents_scale_ptr, documents_offset_ptr, cu_seqlens_ptr, offsets_ptr,
        tiles, second_tiles, scales, token_offsets, full, empty, group, first, last, n_documents, document_length,
        stride_group, stride_document, stride_document_token,
    )  # fmt: skip
    if PARTS == 4:
        gl.warp_specialize(
            [
                (_score, (arguments, config, gl.constexpr(0))),
                (_score, (arguments, config, gl.constexpr(1))),
                (_score, (arguments, config, gl.constexpr(2))),
                (_score, (arguments, config, gl.constexpr(3))),
                (copy_documents, (copied, config, SCALED)),
            ],
            [4, 4, 4, 4],
            [112, 112, 112, 40],
        )
    elif config.nbits > 0:
        coded = codes_ptr, centroids_ptr, pair_table(weights_ptr, config.nbits)
        gl.warp_specialize(
            [
                (_score, (arguments, config, gl.constexpr(0))),
                (_score, (arguments, config, gl.constexpr(1))),
                (decode_documents, (copied, coded, config, gl.constexpr(0))),
                (decode_documents, (copied, coded, config, gl.constexpr(1))),
            ],
            [4, 4, 4],
            # With 72, Triton 3.8 has a worker that rounds to bfloat16 spill one.
            [176, 80, 80],
        )
    else:
        gl.warp_specialize(
            [
                (_score, (arguments, config, gl.constexpr(0))),
                (_score, (arguments, config, gl.constexpr(1))),
                (copy_documents, (copied, config, SCALED)),
            ],
            [4, 4],
            [280 - COPYING, COPYING],
        )


def score_hopper(problem: Problem, plan: ForwardPlan, tensors: ForwardTensors, sums: Tensor) -> None:
    """As `stacked.score_stacked`."""
    _hopper_kernel(
        (plan.row_blocks * plan.n_runs * problem.groups, 1, 1),
        (
            *tensors[:9],
            sums,
            tensors.argmax,
            tensors.documents_offset,
            tensors.beta,
            tensors.lse,
            tensors.codes,
            tensors.centroids,
            tensors.bucket_weights,
        ),
        numbers_of(problem, plan),
        plan.strides,
        (plan.config,),
        plan.config.warps,
    )
