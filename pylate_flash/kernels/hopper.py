"""The stacked forward on Hopper (compute capability 9.0), in Gluon: operands, copies and products placed by hand.

It computes what `kernels.forward._stacked_kernel` computes, from the same arguments. What plain Triton leaves unused
there is the tensor cores' time: it reads both operands of every product from shared memory, whose bandwidth a tile of
64 tokens then exhausts (4 KB per 32 cycles of a 64 x 64 x 16 product), and it takes the row maxima while the tensor
cores wait. Here

- the query rows stay in registers for as long as the program runs, and only document tokens come from shared memory;
- four warps do nothing but copy tokens there, and two or four times four warps (the parts) multiply, each with its own
  rows: while some take maxima, others multiply, and while a product is under way, its part sees to the next tile;
- a row's maximum stays spread over the four lanes that share the row until the document ends, and from there to the
  sums in the layout of the products.

Measured on an H200 in bfloat16 against `_stacked_kernel` in the same run: 0.354 ms and 0.450 at 1 x 1000, 1024 x 1024
(0.340 at the rate of a large matrix product).
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .cuts import DOCUMENT_COST
from .launch import Launcher

_DOCUMENT_COST = gl.constexpr(DOCUMENT_COST)


@gluon.jit
def larger_of(a, b):
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def add(a, b):
    return a + b


def _first_maxima_ptx() -> str:
    """PTX that takes what a lane has of a product of 64 columns, and finds the maximum of each of its two rows.

    A lane has columns 2 * lane and 2 * lane + 1 of every eight: of 32 registers, two are of the first row, the next two
    of the second, and so on. Of the results, the first and the third are the rows' maxima, and after each comes its
    column, for lane 0, as an integer.

    The maxima of pairs, fours and eights on the way to a maximum are kept, and from the top down, where the first
    half's is not the whole's, the column lies in the second half: four comparisons, and the selections of what to
    compare next. Maxima are compared as integers: there is but one NaN (of tensor cores and `max`), and it equals
    itself so. Written in Gluon, nothing is added under a predicate: a tile then takes 74 instructions of the ALUs in
    place of 69, and 64 x 64, 1024 x 1024 took 1.75 ms in place of 1.68.
    """
    lines = [".reg .pred p8, p4, p2, p1;", ".reg .b32 x, y, pair<8>, four<4>, eight<2>, maximum<2>, column<2>;"]
    for row in range(2):
        value = [f"${32 + 4 * (i // 2) + 2 * row + i % 2}" for i in range(16)]
        maximum, column = f"maximum{row}", f"column{row}"
        lines += [f"max.NaN.f32 pair{i}, {value[2 * i]}, {value[2 * i + 1]};" for i in range(8)]
        lines += [f"max.NaN.f32 four{i}, pair{2 * i}, pair{2 * i + 1};" for i in range(4)]
        lines += [f"max.NaN.f32 eight{i}, four{2 * i}, four{2 * i + 1};" for i in range(2)]
        lines += [
            f"max.NaN.f32 {maximum}, eight0, eight1;",
            f"setp.ne.s32 p8, eight0, {maximum};",
            "selp.b32 x, four2, four0, p8;",
            f"setp.ne.s32 p4, x, {maximum};",
            "selp.b32 x, pair4, pair0, p8;",
            "@p4 selp.b32 x, pair6, pair2, p8;",
            f"setp.ne.s32 p2, x, {maximum};",
            f"selp.b32 x, {value[8]}, {value[0]}, p8;",
            f"@p4 selp.b32 x, {value[12]}, {value[4]}, p8;",
            f"selp.b32 y, {value[10]}, {value[2]}, p8;",
            f"@p4 selp.b32 y, {value[14]}, {value[6]}, p8;",
            "selp.b32 x, y, x, p2;",
            f"setp.ne.s32 p1, x, {maximum};",
            f"selp.b32 {column}, 32, 0, p8;",
            f"@p4 add.s32 {column}, {column}, 16;",
            f"@p2 add.s32 {column}, {column}, 8;",
            f"@p1 add.s32 {column}, {column}, 1;",
        ]
    # Only now: an operand that is written may share a register with one that is read.
    lines += ["mov.b32 $0, maximum0;", "mov.b32 $1, column0;", "mov.b32 $2, maximum1;", "mov.b32 $3, column1;"]
    return "{\n" + "\n".join(lines) + "\n}"


_FIRST_MAXIMA = gl.constexpr(_first_maxima_ptx())
_FIRST_MAXIMA_OPERANDS = gl.constexpr(",".join(["=r"] * 32 + ["r"] * 32))
# Barriers of the hardware that Triton does not use, one for each part: await its turn there, and give it.
_AWAIT_TURN = gl.constexpr(tuple(gl.constexpr(f"bar.sync {8 + part}, 256;") for part in range(4)))
_GIVE_TURN = gl.constexpr(tuple(gl.constexpr(f"bar.arrive {8 + part}, 256;") for part in range(4)))


@gluon.jit
def _differ(a, b):
    """Whether maxima differ, as integers: a NaN equals itself so."""
    return a.to(gl.int32, bitcast=True) != b.to(gl.int32, bitcast=True)


@gluon.jit
def _evens(values):
    """Every other of values [R, 4, n] along the last dimension, which is within a thread."""
    return gl.split(gl.reshape(values, [values.shape[0], values.shape[1], values.shape[2] // 2, 2]))[0]


@gluon.jit
def _first_of_eight(values):
    return gl.reduce(_evens(_evens(_evens(values))), 2, add)


@gluon.jit
def _first_maximum(similarities, ROWS: gl.constexpr):
    """Maximum [ROWS, 4] of what each of four lanes has of [ROWS, 64], and its first column, less 2 * lane."""
    gl.static_assert(similarities.shape[1] == 64)
    found = gl.inline_asm_elementwise(
        _FIRST_MAXIMA, _FIRST_MAXIMA_OPERANDS, [similarities.to(gl.int32, bitcast=True)],
        dtype=gl.int32, is_pure=True, pack=32,
    )  # fmt: skip
    maxima, columns = gl.split(gl.reshape(_by_lane(found, ROWS, 64), [ROWS, 4, 8, 2]))
    return _first_of_eight(maxima).to(gl.float32, bitcast=True), _first_of_eight(columns)


@gluon.jit
def execute(INSTRUCTION: gl.constexpr, WARPS: gl.constexpr = 4):
    """Execute an instruction that is not about a tensor, in each of the WARPS warps of a part."""
    threads = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    gl.inline_asm_elementwise(
        INSTRUCTION + " mov.b32 $0, $1;", "=r,r", [threads], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _lower_of(a, b):
    return gl.minimum(a, b)


@gluon.jit
def _sums(values, ROWS: gl.constexpr, GROUP: gl.constexpr):
    """Sums of every GROUP of values [ROWS], which lie as rows of products do: a warp has 16 of every 64."""
    of_warps = gl.reduce(gl.reshape(values, [ROWS // min(GROUP, 16), min(GROUP, 16)]), 1, add)
    if GROUP > 16:
        together: gl.constexpr = gl.BlockedLayout([GROUP // 16], [32], [4], [0])
        of_warps = gl.convert_layout(of_warps, together)
        of_warps = gl.reduce(gl.reshape(of_warps, [ROWS // GROUP, GROUP // 16]), 1, add)
    return of_warps


@gluon.jit
def _by_lane(similarities, ROWS: gl.constexpr, BLOCK_TOKENS: gl.constexpr):
    """Similarities [ROWS, 4, BLOCK_TOKENS / 4]: four lanes share a row, and the last dimension is what one of them has.

    A lane has columns 2 * lane and 2 * lane + 1 of every eight.
    """
    split = gl.reshape(similarities, [ROWS, BLOCK_TOKENS // 8, 4, 2])
    return gl.reshape(gl.permute(split, (0, 2, 1, 3)), [ROWS, 4, BLOCK_TOKENS // 4])


@gluon.jit
def _document_range(
    cu_seqlens_ptr, bounds_ptr, flat_document, document, document_length,
    PACKED: gl.constexpr, HAS_DOCUMENTS_MASK: gl.constexpr,
):  # fmt: skip
    """The first of a document's tokens, counted over all documents, and how many of them take part."""
    if PACKED:
        start = gl.load(cu_seqlens_ptr + document).to(gl.int64)
        length = (gl.load(cu_seqlens_ptr + document + 1).to(gl.int64) - start).to(gl.int32)
    else:
        start = flat_document * document_length
        length = document_length
        if HAS_DOCUMENTS_MASK:
            length = gl.load(bounds_ptr + 2 * flat_document)
    return start, length


@gluon.jit
def find_document(cu_seqlens_ptr, n_documents, position, COST: gl.constexpr):
    """The first document that begins at `position` or later, where each costs its tokens and COST more.

    `kernels.cuts.lower_bound` of one target.
    """
    probes = gl.arange(0, 256, layout=gl.BlockedLayout([2], [32], [4], [0]))
    low = gl.to_tensor(0)
    left = gl.to_tensor(n_documents)
    while left > 0:
        step = gl.cdiv(left, 256)
        entries = low + (probes + 1) * step - 1
        exists = entries < low + left
        values = gl.load(cu_seqlens_ptr + entries, mask=exists, other=0).to(gl.int64)
        below = exists & (values + entries.to(gl.int64) * COST < position)
        skipped = gl.reduce(below.to(gl.int32), 0, add) * step
        left = gl.minimum(gl.maximum(step - 1, 0), left - skipped)
        low += skipped
    return low


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _copy_documents(
    documents_ptr, active_ptr, bounds_ptr, cu_seqlens_ptr, tiles, full, empty,
    group, first, last, n_documents, document_length, stride_group, stride_document, stride_document_token,
    EMBEDDING: gl.constexpr, BLOCK_EMBEDDING: gl.constexpr, BLOCK_TOKENS: gl.constexpr, STAGES: gl.constexpr,
    PACKED: gl.constexpr, HAS_DOCUMENTS_MASK: gl.constexpr,
):  # fmt: skip
    """Copy the tokens of the run's documents, tile by tile, into the slots as they become empty."""
    LANES: gl.constexpr = BLOCK_EMBEDDING // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    positions = gl.arange(0, BLOCK_TOKENS, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, BLOCK_EMBEDDING, layout=gl.SliceLayout(0, layout))
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for document in range(first, last):
        flat_document = group.to(gl.int64) * n_documents + document
        first_token, length = _document_range(
            cu_seqlens_ptr, bounds_ptr, flat_document, document, document_length, PACKED, HAS_DOCUMENTS_MASK
        )
        if PACKED:
            base = documents_ptr + first_token * stride_document_token
        else:
            base = documents_ptr + group.to(gl.int64) * stride_group + gl.cast(document, gl.int64) * stride_document
        for start in range(0, length, BLOCK_TOKENS):
            tokens = gl.minimum(start + positions, length - 1)
            if HAS_DOCUMENTS_MASK:
                tokens = gl.load(active_ptr + first_token + tokens)
            rows = base + tokens.to(gl.int64)[:, None] * stride_document_token + dims[None, :]
            mbarrier.wait(empty.index(slot), phase)
            if BLOCK_EMBEDDING == EMBEDDING:
                async_copy.async_copy_global_to_shared(tiles.index(slot), rows)
            else:
                async_copy.async_copy_global_to_shared(tiles.index(slot), rows, mask=(dims < EMBEDDING)[None, :])
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            slot, phase = next_slot(slot, phase, STAGES)
    # The parts look ahead to one tile more.
    mbarrier.wait(empty.index(slot), phase)
    async_copy.mbarrier_arrive(full.index(slot), increment_count=False)


@gluon.jit
def _score(
    queries_ptr, queries_mask_ptr, active_ptr, bounds_ptr, queries_scale_ptr, documents_scale_ptr, cu_seqlens_ptr,
    sums_ptr, winners_ptr, tiles, full, empty, row_block, group, first, last,
    n_queries, query_length, padded_query_length, n_documents, document_length, stride_query, stride_query_token,
    EMBEDDING: gl.constexpr, BLOCK_EMBEDDING: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    PACKED: gl.constexpr, HAS_QUERIES_MASK: gl.constexpr, HAS_DOCUMENTS_MASK: gl.constexpr,
    ZERO_MASKED: gl.constexpr, NORMALIZE: gl.constexpr, WITH_WINNERS: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Multiply a part's ROWS query rows with every tile; leave sums (and winners) of every document of the run."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_TOKENS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    LANES: gl.constexpr = BLOCK_EMBEDDING // 8
    loaded: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])

    first_row = (row_block * PARTS + PART) * ROWS
    rows = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, loaded))
    query, token = rows // padded_query_length, rows % padded_query_length
    dims = gl.arange(0, BLOCK_EMBEDDING, layout=gl.SliceLayout(0, loaded))
    exists = ((query < n_queries) & (token < query_length))[:, None] & (dims < EMBEDDING)[None, :]
    offset = (group * n_queries + query).to(gl.int64) * stride_query + token * stride_query_token
    query_tile = gl.convert_layout(
        gl.load(queries_ptr + offset[:, None] + dims[None, :], mask=exists, other=0.0), operand
    )

    by_lane: gl.constexpr = _by_lane(gl.zeros([ROWS, BLOCK_TOKENS], gl.float32, mma), ROWS, BLOCK_TOKENS).type.layout
    # What a document leaves stays where the products' rows are: four lanes, which share a row, have the same.
    by_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, by_lane))
    rows = first_row + gl.arange(0, ROWS, layout=by_row)
    query, token = rows // padded_query_length, rows % padded_query_length
    row_exists = (query < n_queries) & (token < query_length)
    global_row = (group * n_queries + query).to(gl.int64) * query_length + token
    row_active = row_exists
    if HAS_QUERIES_MASK:
        row_active = row_active & (gl.load(queries_mask_ptr + global_row, mask=row_exists, other=0) != 0)
    if NORMALIZE:
        row_scale = gl.load(queries_scale_ptr + global_row, mask=row_exists, other=0.0)
    group_row = query.to(gl.int64) * query_length + token
    by_sum: gl.constexpr = _sums(gl.zeros([ROWS], gl.float32, by_row), ROWS, GROUP).type.layout
    n_sums = n_queries * (padded_query_length // GROUP)
    sum_row = first_row // GROUP + gl.arange(0, ROWS // GROUP, layout=by_sum)
    sum_exists = sum_row < n_sums
    sum_offset = (group * n_sums + sum_row).to(gl.int64) * n_documents

    lanes = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, by_lane)))[None, :]
    columns = gl.arange(0, BLOCK_TOKENS, layout=gl.SliceLayout(0, mma))
    zeros = gl.zeros([ROWS, BLOCK_TOKENS], gl.float32, mma)
    # Finding winners takes the ALUs nearly as long as the products take the tensor cores, and parts that all wait for
    # their products at once leave one of the two idle. So products are started in turn, and what follows them is out
    # of step: 1.74 ms against 1.83 at 64 x 64, 1024 x 1024. Maxima alone are over too soon for it to matter.
    if WITH_WINNERS and PART == PARTS - 1:
        execute(_GIVE_TURN[0])
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    mbarrier.wait(full.index(slot), phase)
    # The copies are ordinary writes, and the tensor cores read past the path of those.
    fence_async_shared()
    for document in range(first, last):
        flat_document = group.to(gl.int64) * n_documents + document
        first_token, length = _document_range(
            cu_seqlens_ptr, bounds_ptr, flat_document, document, document_length, PACKED, HAS_DOCUMENTS_MASK
        )
        best = gl.full([ROWS, 4], float("-inf"), gl.float32, gl.SliceLayout(2, by_lane))
        if WITH_WINNERS:
            key = gl.full([ROWS, 4], 0, gl.int32, gl.SliceLayout(2, by_lane))
        for start in range(0, length, BLOCK_TOKENS):
            if WITH_WINNERS:
                execute(_AWAIT_TURN[PART])
            similarities = warpgroup_mma(
                query_tile, tiles.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            if WITH_WINNERS:
                execute(_GIVE_TURN[(PART + 1) % PARTS])
            if NORMALIZE:
                tokens = gl.minimum(start + columns, length - 1)
                if HAS_DOCUMENTS_MASK:
                    tokens = gl.load(active_ptr + first_token + tokens)
                scale = gl.load(documents_scale_ptr + first_token + tokens)
            # While the product is under way, see to the next tile: of this document or another, or the one at the end.
            read = slot
            slot, phase = next_slot(slot, phase, STAGES)
            mbarrier.wait(full.index(slot), phase)
            fence_async_shared()
            similarities = warpgroup_mma_wait(0, deps=[similarities])
            if WITH_WINNERS:
                # Each thread for itself, which spares the part a barrier: 0.647 ms against 0.667 at 512 x 512, 32 x
                # 180. Without winners it is slower, 0.589 against 0.573.
                async_copy.mbarrier_arrive(empty.index(read), increment_count=False)
            else:
                mbarrier.arrive(empty.index(read), count=1)
            if NORMALIZE:
                similarities *= scale[None, :]
            if WITH_WINNERS:
                tile_best, column = _first_maximum(similarities, ROWS)
                tile_best = gl.convert_layout(tile_best, gl.SliceLayout(2, by_lane), assert_trivial=True)
                column = gl.convert_layout(column, gl.SliceLayout(2, by_lane), assert_trivial=True)
                larger = larger_of(best, tile_best)
                key = gl.where(_differ(larger, best), start + column, key)
                best = larger
            else:
                best = larger_of(best, gl.reduce(_by_lane(similarities, ROWS, BLOCK_TOKENS), 2, larger_of))

        counted = row_active & (length > 0)
        row_best = gl.reduce(best, 1, larger_of)
        if WITH_WINNERS:
            # Past the end, the last token was repeated.
            key = gl.minimum(key + 2 * lanes, length - 1)
            winner = gl.reduce(gl.where(_differ(best, row_best[:, None]), 0x7FFFFFFF, key), 1, _lower_of)
            winner = gl.where(counted & (row_best != float("-inf")), winner, -1)
            if HAS_DOCUMENTS_MASK:
                winner = gl.where(
                    winner >= 0, gl.load(active_ptr + first_token + winner, mask=winner >= 0, other=0), -1
                )
        if ZERO_MASKED:
            first_masked = gl.load(bounds_ptr + 2 * flat_document + 1)
            masked_exists = first_masked < document_length
            if WITH_WINNERS:
                earlier = (row_best == 0.0) & (first_masked < winner)
                winner = gl.where(((row_best < 0.0) | earlier) & masked_exists, -1, winner)
            row_best = gl.where((row_best < 0.0) & masked_exists, 0.0, row_best)
        if WITH_WINNERS:
            winner_offset = flat_document * n_queries * query_length + group_row
            gl.store(winners_ptr + winner_offset, winner.to(winners_ptr.dtype.element_ty), mask=row_exists)
        if NORMALIZE:
            row_best *= row_scale
        row_best = gl.where(counted, row_best, 0.0)
        gl.store(sums_ptr + sum_offset + document, _sums(row_best, ROWS, GROUP), mask=sum_exists)
    if WITH_WINNERS and PART == 0:
        # The last part gave a turn once more.
        execute(_AWAIT_TURN[0])


@gluon.jit
def _score_part(
    arguments, EMBEDDING: gl.constexpr, BLOCK_EMBEDDING: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    PACKED: gl.constexpr, HAS_QUERIES_MASK: gl.constexpr, HAS_DOCUMENTS_MASK: gl.constexpr,
    ZERO_MASKED: gl.constexpr, NORMALIZE: gl.constexpr, WITH_WINNERS: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    _score(
        *arguments, EMBEDDING, BLOCK_EMBEDDING, ROWS, PARTS, BLOCK_TOKENS, GROUP, STAGES, PACKED,
        HAS_QUERIES_MASK, HAS_DOCUMENTS_MASK, ZERO_MASKED, NORMALIZE, WITH_WINNERS, PART,
    )  # fmt: skip


@gluon.jit
def _copy_part(
    arguments, EMBEDDING: gl.constexpr, BLOCK_EMBEDDING: gl.constexpr, BLOCK_TOKENS: gl.constexpr,
    STAGES: gl.constexpr, PACKED: gl.constexpr, HAS_DOCUMENTS_MASK: gl.constexpr,
):  # fmt: skip
    _copy_documents(*arguments, EMBEDDING, BLOCK_EMBEDDING, BLOCK_TOKENS, STAGES, PACKED, HAS_DOCUMENTS_MASK)


@gluon.jit(
    do_not_specialize=[
        "n_queries", "query_length", "padded_query_length", "n_documents", "document_length", "n_runs", "run"
    ]
)  # fmt: skip
def _hopper_kernel(
    queries_ptr, documents_ptr, queries_mask_ptr, active_ptr, bounds_ptr, queries_scale_ptr, documents_scale_ptr,
    cu_seqlens_ptr, sums_ptr, winners_ptr,
    n_queries, query_length, padded_query_length, n_documents, document_length, n_runs, run,
    stride_query, stride_query_token, stride_group, stride_document, stride_document_token,
    EMBEDDING: gl.constexpr,
    BLOCK_EMBEDDING: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    PACKED: gl.constexpr,
    HAS_QUERIES_MASK: gl.constexpr,
    HAS_DOCUMENTS_MASK: gl.constexpr,
    ZERO_MASKED: gl.constexpr,
    NORMALIZE: gl.constexpr,
    WITH_WINNERS: gl.constexpr,
):  # fmt: skip
    """As `kernels.forward._stacked_kernel`, with every document whole."""
    ROWS: gl.constexpr = BLOCK_ROWS // PARTS
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
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_TOKENS, BLOCK_EMBEDDING], dtype)
    tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_TOKENS, BLOCK_EMBEDDING], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # Every copying thread says when its copies have arrived, and every part when it has read a tile; with winners,
        # each of its threads.
        mbarrier.init(full.index(stage), count=128)
        mbarrier.init(empty.index(stage), count=PARTS * 128 if WITH_WINNERS else PARTS)

    # The parts are written out one by one: Gluon takes no list made in a loop, and a tuple that has a name, like these
    # two, turns constants into values.
    arguments = (
        queries_ptr, queries_mask_ptr, active_ptr, bounds_ptr, queries_scale_ptr, documents_scale_ptr,
        cu_seqlens_ptr, sums_ptr, winners_ptr, tiles, full, empty, row_block, group, first, last,
        n_queries, query_length, padded_query_length, n_documents, document_length, stride_query, stride_query_token,
    )  # fmt: skip
    copied = (
        documents_ptr, active_ptr, bounds_ptr, cu_seqlens_ptr, tiles, full, empty,
        group, first, last, n_documents, document_length, stride_group, stride_document, stride_document_token,
    )  # fmt: skip
    if PARTS == 4:
        gl.warp_specialize(
            [
                (
                    _score_part,
                    (
                        arguments, EMBEDDING, BLOCK_EMBEDDING, ROWS, PARTS, BLOCK_TOKENS, GROUP, STAGES, PACKED,
                        HAS_QUERIES_MASK, HAS_DOCUMENTS_MASK, ZERO_MASKED, NORMALIZE, WITH_WINNERS, gl.constexpr(0),
                    ),
                ),
                (
                    _score_part,
                    (
                        arguments, EMBEDDING, BLOCK_EMBEDDING, ROWS, PARTS, BLOCK_TOKENS, GROUP, STAGES, PACKED,
                        HAS_QUERIES_MASK, HAS_DOCUMENTS_MASK, ZERO_MASKED, NORMALIZE, WITH_WINNERS, gl.constexpr(1),
                    ),
                ),
                (
                    _score_part,
                    (
                        arguments, EMBEDDING, BLOCK_EMBEDDING, ROWS, PARTS, BLOCK_TOKENS, GROUP, STAGES, PACKED,
                        HAS_QUERIES_MASK, HAS_DOCUMENTS_MASK, ZERO_MASKED, NORMALIZE, WITH_WINNERS, gl.constexpr(2),
                    ),
                ),
                (
                    _score_part,
                    (
                        arguments, EMBEDDING, BLOCK_EMBEDDING, ROWS, PARTS, BLOCK_TOKENS, GROUP, STAGES, PACKED,
                        HAS_QUERIES_MASK, HAS_DOCUMENTS_MASK, ZERO_MASKED, NORMALIZE, WITH_WINNERS, gl.constexpr(3),
                    ),
                ),
                (
                    _copy_part,
                    (
                        copied, EMBEDDING, BLOCK_EMBEDDING, BLOCK_TOKENS, STAGES, PACKED, HAS_DOCUMENTS_MASK,
                    ),
                ),
            ],
            [4, 4, 4, 4],
            [112, 112, 112, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _score_part,
                    (
                        arguments, EMBEDDING, BLOCK_EMBEDDING, ROWS, PARTS, BLOCK_TOKENS, GROUP, STAGES, PACKED,
                        HAS_QUERIES_MASK, HAS_DOCUMENTS_MASK, ZERO_MASKED, NORMALIZE, WITH_WINNERS, gl.constexpr(0),
                    ),
                ),
                (
                    _score_part,
                    (
                        arguments, EMBEDDING, BLOCK_EMBEDDING, ROWS, PARTS, BLOCK_TOKENS, GROUP, STAGES, PACKED,
                        HAS_QUERIES_MASK, HAS_DOCUMENTS_MASK, ZERO_MASKED, NORMALIZE, WITH_WINNERS, gl.constexpr(1),
                    ),
                ),
                (
                    _copy_part,
                    (
                        copied, EMBEDDING, BLOCK_EMBEDDING, BLOCK_TOKENS, STAGES, PACKED, HAS_DOCUMENTS_MASK,
                    ),
                ),
            ],
            [4, 4],
            [224, 56],
        )  # fmt: skip


hopper = Launcher(_hopper_kernel)
