"""The stacked forward on Hopper (compute capability 9.0), in Gluon: operands, copies and products placed by hand.

It computes the same as `stacked._stacked_kernel`, from the same arguments, for 16-bit embeddings, for int8 or fp8
operands, for affine uint8 documents that the copying warps make signed, for residual codes that they decompress
(`hopper_codes`), and for float32 that they split into float16 (`hopper_pairs`). Plain Triton leaves the tensor cores
idle: it reads both operands of every product from shared memory, whose bandwidth a tile of 64 tokens then exhausts
(4 KB per 32 cycles of a 64 x 64 x 16 product), and it reduces row maxima while the tensor cores wait. Here,

- query rows stay in registers for the lifetime of the program, and only document tokens come from shared memory, in one
  block or two (as in `stacked`);
- four warps only copy tokens to shared memory, and two or four groups of four warps (the parts) multiply, each with its
  own rows: some take maxima while others multiply, and while its product is in flight, a part waits for the next tile;
- a row's maximum stays spread over the four lanes that share the row until the document ends, and keeps the layout of
  the products up to the sums;
- documents and codes are one stream of tokens (`hopper_stream`), except where more than the maximum is needed, where
  8-bit documents are long, or where padded documents without masks fill whole tiles or meet few query rows;
- long embeddings, whose query rows do not fit into registers, are copied block by block with them (`hopper_long`).

Measured on an H200 in bfloat16 against `_stacked_kernel` in the same run: 0.354 ms and 0.450 at 1 x 1000, 1024 x 1024
(0.340 at the rate of a large matrix product).
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from ...problem import Problem
from ..gluon import execute, find_document
from ..launch import kernel, wait_for_previous_kernel
from ..plan import ForwardPlan
from ..reductions import LOG2E, larger
from ..tables import DOCUMENT_COST, STREAM_DOCUMENT_COST
from .common import ForwardTensors, numbers_of
from .hopper_barriers import address_of, converts, has_lower, stream_memory
from .hopper_codes import decode_stream, pair_table, staging_bytes
from .hopper_long import blocks_memory, copy_blocks, copy_stream_blocks, product_of_blocks
from .hopper_pairs import pair_stream
from .hopper_parts import copy_documents, document_range, scales_tokens, unscaled
from .hopper_products import (
    AWAIT_TURN,
    GIVE_TURN,
    finish_product,
    in_turn,
    in_type_of_centroids,
    makes_scales,
    product,
    product_layout,
    query_operands,
    rows_from,
    start_product,
    store_sums,
    sums_from,
)
from .hopper_reductions import add_exponentials, differ, log_sums_of_lanes, split_by_lane, with_first_maximum
from .hopper_stream import add_maxima, copy_stream, score_stream
from .hopper_walk import walk_memory, walk_stream

# Bytes of shared memory that a launch has without opting in to more.
_UNASKED = 48 << 10


@gluon.constexpr_function
def _slots(config, bits):
    """Tiles to allocate in shared memory, for elements of `bits` bits: the ring, and the staging area behind it.

    Triton opts in to more shared memory than the default only if the amount it counts needs it, and what a stream
    allocates in PTX comes on top: so tiles alone must exceed the default. (A ring of 64 elements in 8 bits is 32 KB.)
    """
    tile = config.tile.columns * config.blocks.first * bits // 8
    slots = config.tile.num_stages * (2 if has_lower(config) else 1) + -(-staging_bytes(config) // tile)
    return max(slots, _UNASKED // tile + 1) if config.stream else slots


@gluon.constexpr_function
def _copying_registers(config, bits):
    """Registers of a copying thread, out of 280 for it and a multiplying thread.

    With 64 rows, 8-bit tiles may hold long embeddings, of which a thread copies 16 pieces. It holds an affine tile at a
    time; of a block of query rows and tokens, it copies 24 pieces.
    """
    if config.blocks.split:
        return 72
    has_64_rows = bits == 8 and config.tile.rows == 64 * config.tile.parts
    if config.affine:
        return 96 if has_64_rows else 80
    return 72 if has_64_rows else 56


@gluon.constexpr_function
def _multiplying_registers(config):
    """Registers of a multiplying thread where copies are converted; converting threads have the rest.

    Multiplying threads spill with less than 160, decompressing threads with less than 64. For float32, splitting needs
    80, and multiplying 144 at most; with 256 rows of 128 elements and no lower halves, both are short of a few.
    """
    if config.tile.parts == 4:
        return 96 if has_lower(config) or config.nbits > 0 else 88
    return 144 if config.pairs else 160


@gluon.constexpr_function
def _document_cost(config):
    return STREAM_DOCUMENT_COST if config.stream else DOCUMENT_COST


@gluon.constexpr_function
def _copied_thread_by_thread(config):
    """Whether a slot is full as soon as the copies of every thread have arrived."""
    return not (converts(config) or config.affine)


@gluon.jit
def _lower_of(a, b):
    return gl.minimum(a, b)


@gluon.jit
def _score(arguments, config: gl.constexpr, PART: gl.constexpr):
    """Multiply a part's query rows with every tile; write sums (and argmax, or lse) of every document of the run.

    For smooth maxima, the tokens after the last full tile always take a product of `config.tail` columns, as a repeated
    token would count twice.
    """
    queries, documents, shared, share, numbers, results = arguments
    active_ptr, bounds_ptr, cu_seqlens_ptr = documents
    tiles, second_tiles, scales, token_offsets, full, empty = shared
    row_block, group, first, last = share
    n_queries, query_length, _, n_documents, document_length, _ = numbers
    sums_ptr, argmax_ptr, beta_ptr, lse_ptr = results
    PARTS: gl.constexpr = config.tile.parts
    ROWS: gl.constexpr = config.tile.rows // PARTS
    BLOCK_TOKENS: gl.constexpr = config.tile.columns
    TAIL: gl.constexpr = config.tail
    ITEM: gl.constexpr = tiles.dtype.primitive_bitwidth // 8
    mma: gl.constexpr = product_layout(config, ITEM, BLOCK_TOKENS)
    query_tiles, row_scale = tiles, gl.to_tensor(0)
    if not config.blocks.split:
        query_tiles, row_scale = query_operands(queries, share, numbers, tiles, config, PART)
    operands = (query_tiles, tiles, second_tiles, scales, token_offsets, full, empty)

    zeros = gl.zeros([ROWS, BLOCK_TOKENS], gl.float32, mma)
    by_lane: gl.constexpr = split_by_lane(zeros, ROWS, BLOCK_TOKENS).type.layout
    # Row results of a document keep the row layout of the products: the four lanes that share a row hold copies.
    by_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, by_lane))
    first_row = (row_block * PARTS + PART) * ROWS
    if makes_scales(config):
        row_scale = gl.convert_layout(row_scale, by_row)
    rows = rows_from(queries, share, numbers, row_scale, first_row, ROWS, by_row, config)
    row_exists, row_active, _, row_scale, group_row = rows
    if config.soft:
        beta = gl.load(beta_ptr)
        # From similarities to exponents of 2.
        row_factor = gl.full([ROWS], LOG2E, gl.float32, by_row) * beta
        if config.normalize:
            row_factor *= row_scale
        row_factor = row_factor[:, None]
    # A 1 that is unknown to the compiler, see `scaled`.
    one = gl.minimum(n_queries, 1)
    sums = sums_from(share, numbers, first_row, ROWS, by_row, config)
    lanes = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, by_lane)))[None, :]
    # The argmax takes the ALUs nearly as long as the products take the tensor cores, and so do exponentials. Parts that
    # wait for their products at once leave one of the two idle, so a part and the one PARTS // 2 after it multiply in
    # turn, each when the other's product has finished; passing the turn as soon as that is in flight costs 4 % where
    # documents have masks. Of four parts, the other two fill the gaps between products. Maxima alone are too short for
    # turns: 0.384 against 0.348; so are those of 8 bits, 0.281 against 0.263 with fp8 at 1 x 1000, 1024 x 1024.
    if in_turn(config) and PART >= PARTS // 2:
        execute(GIVE_TURN[PART - PARTS // 2])
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    if not config.blocks.split:
        mbarrier.wait(full.index(slot), phase)
        # The copies are generic-proxy writes; the tensor cores read shared memory through the async proxy.
        fence_async_shared()
    # The range of a document is loaded while the previous document is scored.
    next_document = gl.minimum(first, n_documents - 1)
    next_flat = group.to(gl.int64) * n_documents + next_document
    next_range = document_range(cu_seqlens_ptr, bounds_ptr, next_flat, next_document, document_length, config)
    if config.starts_early:
        pending = start_product(operands, slot, config, BLOCK_TOKENS, PART)
    for document in range(first, last):
        flat_document = group.to(gl.int64) * n_documents + document
        first_token, length = next_range
        next_document = gl.minimum(document + 1, n_documents - 1)
        next_flat = group.to(gl.int64) * n_documents + next_document
        next_range = document_range(cu_seqlens_ptr, bounds_ptr, next_flat, next_document, document_length, config)
        best = gl.full([ROWS, 4], float("-inf"), gl.float32, gl.SliceLayout(2, by_lane))
        if config.soft:
            total = gl.zeros([ROWS, 4], gl.float32, gl.SliceLayout(2, by_lane))
        elif config.with_argmax:
            key = gl.full([ROWS, 4], 0, gl.int32, gl.SliceLayout(2, by_lane))
        # Tokens after the last full tile take a product of TAIL columns if they fit into one.
        tiled_length = length
        if TAIL > 0:
            tiled_length -= gl.where(length % BLOCK_TOKENS <= TAIL, length % BLOCK_TOKENS, 0)
        begin = gl.to_tensor(0)
        if config.starts_early:
            similarities, slot, phase, _end_bits = finish_product(
                pending, operands, slot, phase, one, config, BLOCK_TOKENS, PART
            )
            best = gl.reduce(split_by_lane(similarities, ROWS, BLOCK_TOKENS), 2, larger)
            begin += BLOCK_TOKENS
            tiled_length = gl.maximum(tiled_length, BLOCK_TOKENS)
        for start in range(begin, tiled_length, BLOCK_TOKENS):
            if config.blocks.split:
                similarities, slot, phase = product_of_blocks(operands, slot, phase, config, BLOCK_TOKENS, PART)
            else:
                similarities, slot, phase, _end_bits = product(operands, slot, phase, one, config, BLOCK_TOKENS, PART)
            if config.soft:
                best, total = add_exponentials(similarities, row_factor, best, total, ROWS, BLOCK_TOKENS)
            elif config.with_argmax:
                best, key = with_first_maximum(similarities, start, best, key, ROWS)
            else:
                best = larger(best, gl.reduce(split_by_lane(similarities, ROWS, BLOCK_TOKENS), 2, larger))

        if TAIL > 0:
            # Runs at most once: a loop, because a condition crashes ptxas 12.8 at 256 elements.
            for start in range(tiled_length, length, TAIL):
                if config.blocks.split:
                    tail_similarities, slot, phase = product_of_blocks(operands, slot, phase, config, TAIL, PART)
                else:
                    tail_similarities, slot, phase, _end_bits = product(operands, slot, phase, one, config, TAIL, PART)
                if config.soft:
                    columns = gl.arange(0, TAIL, layout=gl.SliceLayout(0, tail_similarities.type.layout))
                    tail_similarities = gl.where((start + columns < length)[None, :], tail_similarities, float("-inf"))
                    best, total = add_exponentials(tail_similarities, row_factor, best, total, ROWS, TAIL)
                elif config.with_argmax:
                    best, key = with_first_maximum(tail_similarities, start, best, key, ROWS)
                else:
                    tail_best = gl.reduce(split_by_lane(tail_similarities, ROWS, TAIL), 2, larger)
                    tail_best = gl.convert_layout(tail_best, gl.SliceLayout(2, by_lane), assert_trivial=True)
                    best = larger(best, tail_best)

        if config.starts_early:
            pending = start_product(operands, slot, config, BLOCK_TOKENS, PART)
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
            # Columns past the end repeat the last token.
            key = gl.minimum(key + 2 * lanes, length - 1)
            argmax = gl.reduce(gl.where(differ(best, row_best[:, None]), 0x7FFFFFFF, key), 1, _lower_of)
            argmax = gl.where(counted & (row_best != float("-inf")), argmax, -1)
            if config.has_documents_mask:
                active_token = gl.load(active_ptr + first_token + argmax, mask=argmax >= 0, other=0)
                argmax = gl.where(argmax >= 0, active_token, -1)
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
        if (config.normalize or config.values or makes_scales(config)) and not config.soft:
            row_best *= row_scale
        store_sums(row_best, rows, sums, sums_ptr, document, length, ROWS, config)
    if config.starts_early:
        # The product started after the last document, of a tile to which nothing is copied.
        warpgroup_mma_wait(0, deps=[pending])
    if in_turn(config) and PART < PARTS // 2:
        # The other part has passed one more turn.
        execute(AWAIT_TURN[PART])


@gluon.jit
def _convert_stream(arguments, codec, span_buffers, config: gl.constexpr):
    if config.nbits > 0:
        decode_stream(arguments, codec, span_buffers, config)
    else:
        _codes, _centroids, ahead, tiles_address = codec
        pair_stream(arguments, tiles_address, ahead, span_buffers, config)


@kernel(follows=True, jit=gluon.jit)
def _hopper_kernel(
    queries_ptr, documents_ptr, queries_mask_ptr, active_ptr, bounds_ptr, queries_scale_ptr, documents_scale_ptr,
    cu_seqlens_ptr, offsets_ptr, sums_ptr, argmax_ptr, documents_offset_ptr, beta_ptr, lse_ptr, codes_ptr,
    centroids_ptr, weights_ptr,
    n_queries, query_length, padded_query_length, n_documents, document_length, n_runs, run, empty_score,
    stride_query, stride_query_token, stride_group, stride_document, stride_document_token,
    config: gl.constexpr,
):  # fmt: skip
    """As `stacked._stacked_kernel`, without segments."""
    BLOCK_EMBEDDING: gl.constexpr = config.blocks.first
    SECOND: gl.constexpr = config.blocks.second
    BLOCK_TOKENS: gl.constexpr = config.tile.columns
    STAGES: gl.constexpr = config.tile.num_stages
    PARTS: gl.constexpr = config.tile.parts
    SCALED: gl.constexpr = scales_tokens(config)
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
        COST: gl.constexpr = _document_cost(config)
        first = find_document(cu_seqlens_ptr, n_documents, run_index.to(gl.int64) * run, COST)
        last = find_document(cu_seqlens_ptr, n_documents, (run_index + 1).to(gl.int64) * run, COST)
    else:
        first = run_index * run
        last = gl.minimum(first + run, n_documents)

    # The operand dtype: that of centroids if query rows are converted to it, of quantized documents, or of queries.
    operand_ptr = centroids_ptr if in_type_of_centroids(config) else documents_ptr if config.values else queries_ptr
    element: gl.constexpr = gl.float16 if config.pairs else operand_ptr.dtype.element_ty
    dtype: gl.constexpr = gl.int8 if config.affine else element
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_TOKENS, BLOCK_EMBEDDING], dtype)
    SLOTS: gl.constexpr = _slots(config, dtype.primitive_bitwidth)
    tiles = gl.allocate_shared_memory(dtype, [SLOTS, BLOCK_TOKENS, BLOCK_EMBEDDING], layout)
    second_tiles = tiles
    if config.blocks.split:
        # Blocks of query rows, and sums.
        second_tiles = blocks_memory(dtype, config)
    elif SECOND > 0:
        second_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_TOKENS, SECOND], dtype)
        second_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_TOKENS, SECOND], second_layout)
    if config.stream:
        full = stream_memory(config, 128 if _copied_thread_by_thread(config) else 0)
        empty = full
        span_buffers = walk_memory(config)
    else:
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            # Full: every copying thread arrives with its copies, or one thread when all are done with a tile. Empty:
            # every part arrives when it has read a tile; where parts take turns, each of its threads does.
            mbarrier.init(full.index(stage), count=128 if _copied_thread_by_thread(config) else 1)
            mbarrier.init(empty.index(stage), count=PARTS * 128 if in_turn(config) else PARTS)
    scales = tiles
    if SCALED and not config.pairs:
        by_token: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        scales = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_TOKENS], by_token)
    token_offsets = scales
    if config.affine:
        token_offsets = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_TOKENS], by_token)

    COPYING: gl.constexpr = _copying_registers(config, dtype.primitive_bitwidth)
    # The partitions are written out one by one: Gluon takes no list built in a loop, and a tuple bound to a name, like
    # these two, turns constants into values.
    arguments = (
        (queries_ptr, queries_mask_ptr, queries_scale_ptr, stride_query, stride_query_token),
        (active_ptr, bounds_ptr, cu_seqlens_ptr),
        (tiles, second_tiles, scales, token_offsets, full, empty),
        (row_block, group, first, last),
        (n_queries, query_length, padded_query_length, n_documents, document_length, empty_score),
        (sums_ptr, argmax_ptr, beta_ptr, lse_ptr),
    )
    copy_arguments = (
        documents_ptr, active_ptr, bounds_ptr, documents_scale_ptr, documents_offset_ptr, cu_seqlens_ptr, offsets_ptr,
        tiles, second_tiles, scales, token_offsets, full, empty, group, first, last, n_documents, document_length,
        stride_group, stride_document, stride_document_token,
    )  # fmt: skip
    if config.stream:
        if converts(config):
            # For codes, the table of weights; for pairs, whether no other program reads the same tokens.
            table_or_ahead = n_row_blocks == 1
            if config.nbits > 0:
                table_or_ahead = pair_table(weights_ptr, config.nbits)
            codec = codes_ptr, centroids_ptr, table_or_ahead, address_of(tiles, full)
            gl.warp_specialize(
                [
                    (_convert_stream, (copy_arguments, codec, span_buffers, config)),
                    (score_stream, (arguments, config)),
                    (add_maxima, (arguments, config, gl.constexpr(0))),
                    (add_maxima, (arguments, config, gl.constexpr(1))),
                    (add_maxima, (arguments, config, gl.constexpr(2))),
                    (walk_stream, (arguments, offsets_ptr, stride_document_token, span_buffers, config)),
                ],
                [4 * PARTS, 1, 1, 1, 1],
                [_multiplying_registers(config), 32, 32, 32, 32],
            )
        elif config.blocks.split:
            gl.warp_specialize(
                [
                    (copy_stream_blocks, (arguments, copy_arguments, span_buffers, config, SCALED)),
                    (score_stream, (arguments, config)),
                    (add_maxima, (arguments, config, gl.constexpr(0))),
                    (add_maxima, (arguments, config, gl.constexpr(1))),
                    (walk_stream, (arguments, offsets_ptr, stride_document_token, span_buffers, config)),
                ],
                [4 * PARTS, 2, 2, 1],
                # The first partition has the remaining registers: 80, or with one group of warps 232.
                [160 if PARTS == 2 else 200, 40, 40, 40],
            )
        else:
            gl.warp_specialize(
                [
                    (copy_stream, (copy_arguments, span_buffers, config, SCALED)),
                    (score_stream, (arguments, config)),
                    (add_maxima, (arguments, config, gl.constexpr(0))),
                    (add_maxima, (arguments, config, gl.constexpr(1))),
                    (walk_stream, (arguments, offsets_ptr, stride_document_token, span_buffers, config)),
                ],
                [4 * PARTS, 2, 2, 1],
                # The first partition has the remaining registers, 64 or 40: affine tokens of 256 bytes need over 48.
                [168, 40, 40, 40] if PARTS == 2 else [96, 40, 40, 40],
            )
    elif PARTS == 4:
        gl.warp_specialize(
            [
                (_score, (arguments, config, gl.constexpr(0))),
                (_score, (arguments, config, gl.constexpr(1))),
                (_score, (arguments, config, gl.constexpr(2))),
                (_score, (arguments, config, gl.constexpr(3))),
                (copy_documents, (copy_arguments, config, SCALED)),
            ],
            [4, 4, 4, 4],
            [112, 112, 112, 40],
        )
    elif config.blocks.split:
        gl.warp_specialize(
            [
                (_score, (arguments, config, gl.constexpr(0))),
                (_score, (arguments, config, gl.constexpr(1))),
                (copy_blocks, (arguments, copy_arguments, config, SCALED)),
            ],
            [4, 4],
            # Of 504 registers, both parts get the same: with fewer, some products wait for each other.
            [(504 - COPYING) // 2, COPYING],
        )
    else:
        gl.warp_specialize(
            [
                (_score, (arguments, config, gl.constexpr(0))),
                (_score, (arguments, config, gl.constexpr(1))),
                (copy_documents, (copy_arguments, config, SCALED)),
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
