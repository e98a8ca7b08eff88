"""The stacked forward on Hopper (compute capability 9.0), in Gluon: operands, copies and products placed by hand.

It computes what `stacked._stacked_kernel` computes, from the same arguments, of embeddings of 16 bits or of both
operands in int8 or fp8. What plain Triton leaves
unused there is the tensor cores' time: it reads both operands of every product from shared memory, whose bandwidth a
tile of 64 tokens then exhausts (4 KB per 32 cycles of a 64 x 64 x 16 product), and it takes the row maxima while the
tensor cores wait. Here

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

import functools

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
from ..gluon import execute, find_document, larger_of, next_slot, wait_for_previous_kernel
from ..jit import kernel
from ..launch import Kernel
from ..plan import ForwardPlan
from ..tables import DOCUMENT_COST
from .common import numbers_of
from .copies import copy_documents, document_range
from .exponentials import LOG2E, add_exponentials, log_sums
from .maxima import differ, first_maximum, split_by_lane
from .products import query_rows, scaled, sums_of, unscaled
from .tensors import ForwardTensors

_DOCUMENT_COST = gl.constexpr(DOCUMENT_COST)


# Barriers of the hardware that Triton does not use, one for each part: await its turn there, and give it.
_AWAIT_TURN = gl.constexpr(tuple(gl.constexpr(f"bar.sync {8 + part}, 256;") for part in range(4)))
_GIVE_TURN = gl.constexpr(tuple(gl.constexpr(f"bar.arrive {8 + part}, 256;") for part in range(4)))


@gluon.constexpr_function
def _in_turn(with_winners, soft):
    """Whether parts start their products in turn: where what follows a product takes as long as it does."""
    return with_winners or soft


@gluon.jit
def _lower_of(a, b):
    return gl.minimum(a, b)


@gluon.jit
def _score(
    queries_ptr, queries_mask_ptr, active_ptr, bounds_ptr, queries_scale_ptr, cu_seqlens_ptr, sums_ptr, winners_ptr,
    beta_ptr, lse_ptr, tiles, second_tiles, scales, full, empty, row_block, group, first, last,
    n_queries, query_length, padded_query_length, n_documents, document_length, empty_score, stride_query,
    stride_query_token,
    EMBEDDING: gl.constexpr, BLOCK_EMBEDDING: gl.constexpr, SECOND: gl.constexpr, ROWS: gl.constexpr,
    PARTS: gl.constexpr, BLOCK_TOKENS: gl.constexpr, TAIL: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    PACKED: gl.constexpr, HAS_QUERIES_MASK: gl.constexpr, WEIGHTED: gl.constexpr, HAS_DOCUMENTS_MASK: gl.constexpr,
    ZERO_MASKED: gl.constexpr, NORMALIZE: gl.constexpr, WITH_WINNERS: gl.constexpr, SOFT: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """Multiply a part's ROWS query rows with every tile; leave sums (and winners, or lse) of every document of the run.

    SOFT: of smooth maxima. What is left after whole tiles then always takes a product of TAIL columns, as a token that
    is repeated would count twice.
    """
    ITEM: gl.constexpr = queries_ptr.dtype.element_ty.primitive_bitwidth // 8
    INTEGER: gl.constexpr = queries_ptr.dtype.element_ty == gl.int8
    SUM: gl.constexpr = gl.int32 if INTEGER else gl.float32
    IN_TURN: gl.constexpr = _in_turn(WITH_WINNERS, SOFT)
    # Loads of scales while a product is under way come between its instructions. Those of 8 bits are too short for it:
    # with int8 0.250 in place of 0.262 at 1 x 1000, 1024 x 1024, and 0.068 of 0.071 at 32 x 1024, 32 x 180.
    SCALES_LAST: gl.constexpr = ITEM == 1
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_TOKENS, 32 // ITEM])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 4 // ITEM)
    first_row = (row_block * PARTS + PART) * ROWS
    query_tile = query_rows(
        queries_ptr, first_row, group, n_queries, query_length, padded_query_length, stride_query, stride_query_token,
        0, BLOCK_EMBEDDING, EMBEDDING, ROWS, operand,
    )  # fmt: skip
    if SECOND > 0:
        second_query_tile = query_rows(
            queries_ptr, first_row, group, n_queries, query_length, padded_query_length, stride_query,
            stride_query_token, BLOCK_EMBEDDING, SECOND, EMBEDDING, ROWS, operand,
        )  # fmt: skip

    zeros = gl.zeros([ROWS, BLOCK_TOKENS], SUM, mma)
    by_lane: gl.constexpr = split_by_lane(zeros, ROWS, BLOCK_TOKENS).type.layout
    # What a document leaves stays where the products' rows are: four lanes, which share a row, have the same.
    by_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, by_lane))
    rows = first_row + gl.arange(0, ROWS, layout=by_row)
    query, token = rows // padded_query_length, rows % padded_query_length
    row_exists = (query < n_queries) & (token < query_length)
    global_row = (group * n_queries + query).to(gl.int64) * query_length + token
    row_active = row_exists
    if HAS_QUERIES_MASK:
        row_weight = gl.load(queries_mask_ptr + global_row, mask=row_exists, other=0)
        row_active = row_active & (row_weight != 0)
    if NORMALIZE:
        row_scale = gl.load(queries_scale_ptr + global_row, mask=row_exists, other=0.0)
    if SOFT:
        beta = gl.load(beta_ptr)
        # From similarities to exponents of 2.
        row_factor = gl.full([ROWS], LOG2E, gl.float32, by_row) * beta
        if NORMALIZE:
            row_factor *= row_scale
        row_factor = row_factor[:, None]
    group_row = query.to(gl.int64) * query_length + token
    by_sum: gl.constexpr = sums_of(gl.zeros([ROWS], gl.float32, by_row), ROWS, GROUP).type.layout
    # A 1 that the compiler does not know, see `products.scaled`.
    one = gl.minimum(n_queries, 1)
    n_sums = n_queries * (padded_query_length // GROUP)
    sum_row = first_row // GROUP + gl.arange(0, ROWS // GROUP, layout=by_sum)
    sum_exists = sum_row < n_sums
    if PACKED or HAS_DOCUMENTS_MASK:
        # One of the sums of a query is the score of an empty document; the others add nothing to it.
        of_empty = gl.where(sum_row % (padded_query_length // GROUP) == 0, empty_score, 0.0)
    sum_offset = (group * n_sums + sum_row).to(gl.int64) * n_documents

    lanes = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, by_lane)))[None, :]
    # Finding winners takes the ALUs nearly as long as the products take the tensor cores, and so do exponentials. Parts
    # that wait for their products at once leave one of the two idle. So a part and the one PARTS // 2 on multiply in
    # turn, each when the product of the other has ended: given as soon as that is under way, a turn costs 4 % where
    # documents have masks. Of four parts, another two fill what is left between the products. Maxima alone are over too
    # soon: 0.384 against 0.348; so are those of 8 bits, 0.281 against 0.263 with fp8 at 1 x 1000, 1024 x 1024.
    OTHER: gl.constexpr = (PART + PARTS // 2) % PARTS
    if IN_TURN and PART >= PARTS // 2:
        execute(_GIVE_TURN[OTHER])
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    mbarrier.wait(full.index(slot), phase)
    # The copies are ordinary writes, and the tensor cores read past the path of those.
    fence_async_shared()
    for document in range(first, last):
        flat_document = group.to(gl.int64) * n_documents + document
        first_token, length = document_range(
            cu_seqlens_ptr, bounds_ptr, flat_document, document, document_length, PACKED, HAS_DOCUMENTS_MASK
        )
        best = gl.full([ROWS, 4], float("-inf"), gl.float32, gl.SliceLayout(2, by_lane))
        if SOFT:
            total = gl.zeros([ROWS, 4], gl.float32, gl.SliceLayout(2, by_lane))
        elif WITH_WINNERS:
            key = gl.full([ROWS, 4], 0, gl.int32, gl.SliceLayout(2, by_lane))
        # What is left after whole tiles takes a product of TAIL columns if it fits into one.
        in_tiles = length
        if TAIL > 0:
            in_tiles -= gl.where(length % BLOCK_TOKENS <= TAIL, length % BLOCK_TOKENS, 0)
        for start in range(0, in_tiles, BLOCK_TOKENS):
            if IN_TURN:
                execute(_AWAIT_TURN[PART])
            similarities = warpgroup_mma(
                query_tile, tiles.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            if SECOND > 0:
                similarities = warpgroup_mma(
                    second_query_tile, second_tiles.index(slot).permute((1, 0)), similarities, is_async=True
                )
            if NORMALIZE and not SCALES_LAST:
                scale = scales.index(slot).load(gl.SliceLayout(0, mma))
            # While the product is under way, see to the next tile: of this document or another, or the one at the end.
            read = slot
            slot, phase = next_slot(slot, phase, STAGES)
            mbarrier.wait(full.index(slot), phase)
            fence_async_shared()
            similarities = warpgroup_mma_wait(0, deps=[similarities])
            if NORMALIZE and SCALES_LAST:
                scale = scales.index(read).load(gl.SliceLayout(0, mma))
            if IN_TURN:
                execute(_GIVE_TURN[OTHER])
                # Each thread for itself, which spares the part a barrier: 0.647 ms against 0.667 at 512 x 512, 32 x
                # 180. Without winners it is slower, 0.589 against 0.573.
                async_copy.mbarrier_arrive(empty.index(read), increment_count=False)
            else:
                mbarrier.arrive(empty.index(read), count=1)
            if NORMALIZE:
                similarities = scaled(similarities, scale, one)
            if SOFT:
                best, total = add_exponentials(similarities, row_factor, best, total, ROWS, BLOCK_TOKENS)
            elif WITH_WINNERS:
                tile_best, column = first_maximum(similarities, ROWS)
                tile_best = gl.convert_layout(tile_best, gl.SliceLayout(2, by_lane), assert_trivial=True)
                column = gl.convert_layout(column, gl.SliceLayout(2, by_lane), assert_trivial=True)
                larger = larger_of(best, tile_best)
                key = gl.where(differ(larger, best), start + column, key)
                best = larger
            else:
                best = larger_of(best, gl.reduce(split_by_lane(similarities, ROWS, BLOCK_TOKENS), 2, larger_of))

        if TAIL > 0:
            # Once or not at all: a loop, as a condition crashes ptxas 12.8 at 256 elements.
            for start in range(in_tiles, length, TAIL):
                tail_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 32 // ITEM])
                tail_operand: gl.constexpr = gl.DotOperandLayout(0, tail_mma, 4 // ITEM)
                tail_columns = gl.arange(0, TAIL, layout=gl.SliceLayout(0, tail_mma))
                if IN_TURN:
                    execute(_AWAIT_TURN[PART])
                similarities = warpgroup_mma(
                    gl.convert_layout(query_tile, tail_operand, assert_trivial=True),
                    tiles.index(slot).slice(0, TAIL).permute((1, 0)),
                    gl.zeros([ROWS, TAIL], SUM, tail_mma), use_acc=False, is_async=True,
                )  # fmt: skip
                if SECOND > 0:
                    similarities = warpgroup_mma(
                        gl.convert_layout(second_query_tile, tail_operand, assert_trivial=True),
                        second_tiles.index(slot).slice(0, TAIL).permute((1, 0)), similarities, is_async=True,
                    )  # fmt: skip
                if NORMALIZE and not SCALES_LAST:
                    scale = scales.index(slot).slice(0, TAIL).load(gl.SliceLayout(0, tail_mma))
                read = slot
                slot, phase = next_slot(slot, phase, STAGES)
                mbarrier.wait(full.index(slot), phase)
                fence_async_shared()
                similarities = warpgroup_mma_wait(0, deps=[similarities])
                if NORMALIZE and SCALES_LAST:
                    scale = scales.index(read).slice(0, TAIL).load(gl.SliceLayout(0, tail_mma))
                if IN_TURN:
                    execute(_GIVE_TURN[OTHER])
                    async_copy.mbarrier_arrive(empty.index(read), increment_count=False)
                else:
                    mbarrier.arrive(empty.index(read), count=1)
                if NORMALIZE:
                    similarities = scaled(similarities, scale, one)
                if SOFT:
                    similarities = gl.where((start + tail_columns < length)[None, :], similarities, float("-inf"))
                    best, total = add_exponentials(similarities, row_factor, best, total, ROWS, TAIL)
                else:
                    tail_best = gl.reduce(split_by_lane(similarities, ROWS, TAIL), 2, larger_of)
                    tail_best = gl.convert_layout(tail_best, gl.SliceLayout(2, by_lane), assert_trivial=True)
                    best = larger_of(best, tail_best)

        counted = row_active & (length > 0)
        if SOFT:
            lse = log_sums(best, total, (document_length - length).to(gl.float32), ZERO_MASKED)
            if lse_ptr is not None:
                gl.store(lse_ptr + flat_document * n_queries * query_length + group_row, lse, mask=row_exists)
            row_best = lse / beta
        else:
            row_best = gl.reduce(best, 1, larger_of)
            if INTEGER:
                row_best = unscaled(row_best)
        if WITH_WINNERS:
            # Past the end, the last token was repeated.
            key = gl.minimum(key + 2 * lanes, length - 1)
            winner = gl.reduce(gl.where(differ(best, row_best[:, None]), 0x7FFFFFFF, key), 1, _lower_of)
            winner = gl.where(counted & (row_best != float("-inf")), winner, -1)
            if HAS_DOCUMENTS_MASK:
                winner = gl.where(
                    winner >= 0, gl.load(active_ptr + first_token + winner, mask=winner >= 0, other=0), -1
                )
        if ZERO_MASKED and not SOFT:
            first_masked = gl.load(bounds_ptr + 2 * flat_document + 1)
            masked_exists = first_masked < document_length
            if WITH_WINNERS:
                earlier = (row_best == 0.0) & (first_masked < winner)
                winner = gl.where(((row_best < 0.0) | earlier) & masked_exists, -1, winner)
            row_best = gl.where((row_best < 0.0) & masked_exists, 0.0, row_best)
        if WITH_WINNERS:
            winner_offset = flat_document * n_queries * query_length + group_row
            gl.store(winners_ptr + winner_offset, winner.to(winners_ptr.dtype.element_ty), mask=row_exists)
        if NORMALIZE and not SOFT:
            row_best *= row_scale
        if WEIGHTED:
            row_best *= row_weight.to(gl.float32)
        row_best = gl.where(counted, row_best, 0.0)
        sums = sums_of(row_best, ROWS, GROUP)
        if PACKED or HAS_DOCUMENTS_MASK:
            sums = gl.where(length > 0, sums, of_empty)
        gl.store(sums_ptr + sum_offset + document, sums, mask=sum_exists)
    if IN_TURN and PART < PARTS // 2:
        # The other part gave a turn once more.
        execute(_AWAIT_TURN[PART])


@gluon.jit
def _score_part(
    arguments, EMBEDDING: gl.constexpr, BLOCK_EMBEDDING: gl.constexpr, SECOND: gl.constexpr, ROWS: gl.constexpr,
    PARTS: gl.constexpr, BLOCK_TOKENS: gl.constexpr, TAIL: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    PACKED: gl.constexpr, HAS_QUERIES_MASK: gl.constexpr, WEIGHTED: gl.constexpr, HAS_DOCUMENTS_MASK: gl.constexpr,
    ZERO_MASKED: gl.constexpr, NORMALIZE: gl.constexpr, WITH_WINNERS: gl.constexpr, SOFT: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    _score(
        *arguments, EMBEDDING, BLOCK_EMBEDDING, SECOND, ROWS, PARTS, BLOCK_TOKENS, TAIL, GROUP, STAGES, PACKED,
        HAS_QUERIES_MASK, WEIGHTED, HAS_DOCUMENTS_MASK, ZERO_MASKED, NORMALIZE, WITH_WINNERS, SOFT, PART,
    )  # fmt: skip


@gluon.jit
def _copy_part(
    arguments, EMBEDDING: gl.constexpr, BLOCK_EMBEDDING: gl.constexpr, SECOND: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr, PACKED: gl.constexpr,
    HAS_DOCUMENTS_MASK: gl.constexpr, OFFSET_UNIT: gl.constexpr, NORMALIZE: gl.constexpr,
):  # fmt: skip
    copy_documents(
        *arguments, EMBEDDING, BLOCK_EMBEDDING, SECOND, BLOCK_TOKENS, TAIL, STAGES, PACKED, HAS_DOCUMENTS_MASK,
        OFFSET_UNIT, NORMALIZE,
    )  # fmt: skip


@functools.partial(kernel, jit=gluon.jit)
def _hopper_kernel(
    queries_ptr, documents_ptr, queries_mask_ptr, active_ptr, bounds_ptr, queries_scale_ptr, documents_scale_ptr,
    cu_seqlens_ptr, offsets_ptr, sums_ptr, winners_ptr, beta_ptr, lse_ptr,
    n_queries, query_length, padded_query_length, n_documents, document_length, n_runs, run, empty_score,
    stride_query, stride_query_token, stride_group, stride_document, stride_document_token,
    EMBEDDING: gl.constexpr,
    BLOCK_EMBEDDING: gl.constexpr,
    SECOND: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr,
    TAIL: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    PACKED: gl.constexpr,
    HAS_QUERIES_MASK: gl.constexpr,
    WEIGHTED: gl.constexpr,
    HAS_DOCUMENTS_MASK: gl.constexpr,
    ZERO_MASKED: gl.constexpr,
    NORMALIZE: gl.constexpr,
    WITH_WINNERS: gl.constexpr,
    SOFT: gl.constexpr,
    QUERY_UNIT: gl.constexpr,
    DOCUMENT_UNIT: gl.constexpr,
    OFFSET_UNIT: gl.constexpr,
):  # fmt: skip
    """As `stacked._stacked_kernel`, with every document whole."""
    wait_for_previous_kernel()
    stride_query *= QUERY_UNIT
    stride_query_token *= QUERY_UNIT
    stride_group *= DOCUMENT_UNIT
    stride_document *= DOCUMENT_UNIT
    stride_document_token *= DOCUMENT_UNIT
    ROWS: gl.constexpr = BLOCK_ROWS // PARTS
    # Whole tiles are copied whole, the last ones too.
    COPIED_TAIL: gl.constexpr = TAIL if TAIL < BLOCK_TOKENS else 0
    n_row_blocks = gl.cdiv(n_queries * padded_query_length, BLOCK_ROWS)
    row_block = gl.program_id(0) % n_row_blocks
    run_index = (gl.program_id(0) // n_row_blocks) % n_runs
    group = gl.program_id(0) // (n_row_blocks * n_runs)
    if PACKED:
        first = find_document(cu_seqlens_ptr, n_documents, run_index.to(gl.int64) * run, _DOCUMENT_COST)
        last = find_document(cu_seqlens_ptr, n_documents, (run_index + 1).to(gl.int64) * run, _DOCUMENT_COST)
    else:
        first = run_index * run
        last = gl.minimum(first + run, n_documents)

    dtype: gl.constexpr = documents_ptr.dtype.element_ty
    IN_TURN: gl.constexpr = _in_turn(WITH_WINNERS, SOFT)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_TOKENS, BLOCK_EMBEDDING], dtype)
    tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_TOKENS, BLOCK_EMBEDDING], layout)
    second_tiles = tiles
    if SECOND > 0:
        second_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_TOKENS, SECOND], dtype)
        second_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_TOKENS, SECOND], second_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scales = full
    if NORMALIZE:
        by_token: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        scales = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_TOKENS], by_token)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # Every copying thread says when its copies have arrived, and every part when it has read a tile; in turn, each
        # of its threads.
        mbarrier.init(full.index(stage), count=128)
        mbarrier.init(empty.index(stage), count=PARTS * 128 if IN_TURN else PARTS)

    # Registers of a thread that copies, of the 280 of it and of one that multiplies. With 64 rows, tiles of 8 bits may
    # be of long embeddings, of which a thread copies 16 pieces.
    COPYING: gl.constexpr = 72 if dtype.primitive_bitwidth == 8 and ROWS == 64 else 56
    # The parts are written out one by one: Gluon takes no list made in a loop, and a tuple that has a name, like these
    # two, turns constants into values.
    arguments = (
        queries_ptr, queries_mask_ptr, active_ptr, bounds_ptr, queries_scale_ptr, cu_seqlens_ptr, sums_ptr,
        winners_ptr, beta_ptr, lse_ptr, tiles, second_tiles, scales, full, empty, row_block, group,
        first, last, n_queries, query_length, padded_query_length, n_documents, document_length, empty_score,
        stride_query, stride_query_token,
    )  # fmt: skip
    copied = (
        documents_ptr, active_ptr, bounds_ptr, documents_scale_ptr, cu_seqlens_ptr, offsets_ptr, tiles, second_tiles,
        scales, full, empty, group, first, last, n_documents, document_length, stride_group, stride_document,
        stride_document_token,
    )  # fmt: skip
    if PARTS == 4:
        gl.warp_specialize(
            [
                (_score_part, (
                    arguments, EMBEDDING, BLOCK_EMBEDDING, SECOND, ROWS, PARTS, BLOCK_TOKENS, TAIL, GROUP, STAGES,
                    PACKED, HAS_QUERIES_MASK, WEIGHTED, HAS_DOCUMENTS_MASK, ZERO_MASKED, NORMALIZE, WITH_WINNERS,
                    SOFT, gl.constexpr(0),
                )),
                (_score_part, (
                    arguments, EMBEDDING, BLOCK_EMBEDDING, SECOND, ROWS, PARTS, BLOCK_TOKENS, TAIL, GROUP, STAGES,
                    PACKED, HAS_QUERIES_MASK, WEIGHTED, HAS_DOCUMENTS_MASK, ZERO_MASKED, NORMALIZE, WITH_WINNERS,
                    SOFT, gl.constexpr(1),
                )),
                (_score_part, (
                    arguments, EMBEDDING, BLOCK_EMBEDDING, SECOND, ROWS, PARTS, BLOCK_TOKENS, TAIL, GROUP, STAGES,
                    PACKED, HAS_QUERIES_MASK, WEIGHTED, HAS_DOCUMENTS_MASK, ZERO_MASKED, NORMALIZE, WITH_WINNERS,
                    SOFT, gl.constexpr(2),
                )),
                (_score_part, (
                    arguments, EMBEDDING, BLOCK_EMBEDDING, SECOND, ROWS, PARTS, BLOCK_TOKENS, TAIL, GROUP, STAGES,
                    PACKED, HAS_QUERIES_MASK, WEIGHTED, HAS_DOCUMENTS_MASK, ZERO_MASKED, NORMALIZE, WITH_WINNERS,
                    SOFT, gl.constexpr(3),
                )),
                (_copy_part, (
                    copied, EMBEDDING, BLOCK_EMBEDDING, SECOND, BLOCK_TOKENS, COPIED_TAIL, STAGES, PACKED,
                    HAS_DOCUMENTS_MASK, OFFSET_UNIT, NORMALIZE,
                )),
            ],
            [4, 4, 4, 4],
            [112, 112, 112, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_score_part, (
                    arguments, EMBEDDING, BLOCK_EMBEDDING, SECOND, ROWS, PARTS, BLOCK_TOKENS, TAIL, GROUP, STAGES,
                    PACKED, HAS_QUERIES_MASK, WEIGHTED, HAS_DOCUMENTS_MASK, ZERO_MASKED, NORMALIZE, WITH_WINNERS,
                    SOFT, gl.constexpr(0),
                )),
                (_score_part, (
                    arguments, EMBEDDING, BLOCK_EMBEDDING, SECOND, ROWS, PARTS, BLOCK_TOKENS, TAIL, GROUP, STAGES,
                    PACKED, HAS_QUERIES_MASK, WEIGHTED, HAS_DOCUMENTS_MASK, ZERO_MASKED, NORMALIZE, WITH_WINNERS,
                    SOFT, gl.constexpr(1),
                )),
                (_copy_part, (
                    copied, EMBEDDING, BLOCK_EMBEDDING, SECOND, BLOCK_TOKENS, COPIED_TAIL, STAGES, PACKED,
                    HAS_DOCUMENTS_MASK, OFFSET_UNIT, NORMALIZE,
                )),
            ],
            [4, 4],
            [280 - COPYING, COPYING],
        )  # fmt: skip


_hopper = Kernel(_hopper_kernel, follows=True)


def score_hopper(problem: Problem, plan: ForwardPlan, tensors: ForwardTensors, sums: Tensor) -> None:
    """As `stacked.score_stacked`."""
    _hopper(
        (plan.row_blocks * plan.n_runs * problem.groups, 1, 1),
        (*tensors[:9], sums, tensors.winners, tensors.beta, tensors.lse),
        numbers_of(problem, plan),
        plan.strides,
        plan.config.constants,
        plan.config.warps,
    )
