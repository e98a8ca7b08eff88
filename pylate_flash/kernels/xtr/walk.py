"""The kernel that walks through all similarities, and what it leaves of them: maxima, counts of bins, or of documents.

As in `forward.stacked`, the tokens of all queries are the rows of one tall matrix, a tile of which stays on the chip
while a program walks its run of documents. All modes take the same products, so that they see the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from ...problem import Problem
from ..forward.common import SUMMED_EMBEDDING, winner_of
from ..forward.cuts import NO_WINNER
from ..launch import Region, kernel
from ..plan_operations import SearchPlan
from ..reductions import keys_of, larger, max_along, similarities_of
from ..tables import XTR_BIN_BITS

# What a walk leaves, see `_walk_kernel`.
MAXIMA, COLLECT, BINS, TALLY = (tl.constexpr(mode) for mode in range(4))
_N_BINS = tl.constexpr(1 << XTR_BIN_BITS)


class SearchTensors(NamedTuple):
    """Padded queries and documents, and of masked documents the active tokens and their numbers (`kernels.rows`)."""

    queries: Tensor
    documents: Tensor
    active: Tensor | None
    bounds: Tensor | Region | None


# Stores and additions of few elements of a product, from the registers that tensor cores leave it in. Triton's own
# bring their operands into a layout that suits memory, through shared memory, which takes longer than the product where
# nearly all is masked. Its interpreter knows no PTX, and gets Triton's own.
_AT = "{ .reg .pred on; .reg .b64 at; setp.ne.s32 on, $3, 0; mad.wide.s32 at, $2, 4, $1; "
_STORE = tl.constexpr(_AT + "@on st.global.b32 [at], $4; mov.b32 $0, 0; }")
_COUNT = tl.constexpr(_AT + "@on red.global.add.s32 [at], 1; mov.b32 $0, 0; }")


@triton.jit
def scatter(pointer, offsets, values, mask, PTX: tl.constexpr):
    """Store int32 values at int32 offsets from a pointer, where the mask says so."""
    if PTX:
        operands = [pointer.to(tl.int64), offsets, mask.to(tl.int32), values]
        tl.inline_asm_elementwise(_STORE, "=r,l,r,r,r", operands, tl.int32, is_pure=False, pack=1)
    else:
        tl.store(pointer + offsets, values, mask=mask)


@triton.jit
def count(pointer, offsets, mask, PTX: tl.constexpr):
    """Add 1 to int32 counts at int32 offsets from a pointer, where the mask says so."""
    if PTX:
        operands = [pointer.to(tl.int64), offsets, mask.to(tl.int32)]
        tl.inline_asm_elementwise(_COUNT, "=r,l,r,r", operands, tl.int32, is_pure=False, pack=1)
    else:
        tl.atomic_add(pointer + offsets, 1, mask=mask, sem="relaxed")


@kernel
def _walk_kernel(
    queries_ptr, documents_ptr, active_ptr, bounds_ptr, best_ptr, winners_ptr, scratch_ptr, state_ptr, counts_ptr,
    n_rows, query_length, n_documents, document_length, n_runs, run, n_groups,
    stride_query, stride_query_token, stride_group, stride_document, stride_document_token,
    stride_scratch,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    MODE: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPTH: tl.constexpr,
    PTX: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """MAXIMA: best [Nd, rows] and winners; and in each row's scratch the bits of the maxima of GROUPS groups of each
    tile's tokens, but those of tiles without an active token, and of groups from `n_groups` on.

    COLLECT: in each row's scratch, [runs, DEPTH, BLOCK_TOKENS], the bits of similarities, from that of the row's key
    on, of every column of the tiles of a run; counts [rows, runs, BLOCK_TOKENS] how many there are, also where they are
    more. Of rows with a width from 0 on.

    BINS: adds to counts of bins in each row's scratch the similarities of each bin of 2**width keys, from the row's key
    on, of rows with a width from 0 on.

    TALLY: counts [2, Nd, rows] of tokens above the row's key, and equal to it, of tallied rows.

    Key, width, and whether a row is tallied are of its state [4, rows] (`kernels.xtr.retrieve`).

    Grid: blocks of rows x runs of documents. Programs that run together read the same documents, out of L2.
    """
    n_row_blocks = tl.cdiv(n_rows, BLOCK_ROWS)
    rows = tl.program_id(0) % n_row_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_exists = rows < n_rows
    first = tl.program_id(0) // n_row_blocks * run
    last = tl.minimum(first + run, n_documents)
    if MODE != MAXIMA:
        lowest = tl.load(state_ptr + rows, mask=row_exists, other=0)
        if MODE == TALLY:
            counted = tl.load(state_ptr + 3 * n_rows + rows, mask=row_exists, other=0) != 0
        else:
            width = tl.load(state_ptr + n_rows + rows, mask=row_exists, other=-1)
            counted = width >= 0
            width = tl.maximum(width, 0).to(tl.uint32)
        # Nothing is walked through for rows that are done.
        last = tl.where(tl.max(counted.to(tl.int32), axis=0) > 0, last, first)

    dims = tl.arange(0, BLOCK_EMBEDDING)
    query_offset = (rows // query_length).to(tl.int64) * stride_query + rows % query_length * stride_query_token
    query_rows = queries_ptr + query_offset[:, None] + dims[None, :]
    if not SPLIT:
        query_tile = tl.load(query_rows, mask=row_exists[:, None] & (dims < EMBEDDING)[None, :], other=0.0)
    slots = tl.arange(0, BLOCK_TOKENS)
    first_row = tl.program_id(0) % n_row_blocks * BLOCK_ROWS
    if MODE != TALLY:
        scratch_ptr += first_row.to(tl.int64) * stride_scratch
        row_scratch = tl.arange(0, BLOCK_ROWS) * stride_scratch
    if MODE == COLLECT:
        # All that is kept of an element is its next place, which takes it past the end of its row's when there is none.
        ROOM: tl.constexpr = DEPTH * BLOCK_TOKENS
        run_index = tl.program_id(0) // n_row_blocks
        row_begins = row_scratch + run_index * ROOM
        bound = similarities_of(lowest)
        place = row_begins[:, None] + slots[None, :]
    for index in tl.range(0, last - first, flatten=not SPLIT):
        document = first + index
        flat = document.to(tl.int64)
        base = documents_ptr + flat * stride_document
        length = document_length
        if active_ptr is not None:
            length = tl.load(bounds_ptr + 2 * flat)
        best = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        key = tl.full([BLOCK_ROWS], NO_WINNER, tl.int32)
        above = tl.zeros([BLOCK_ROWS], tl.int32)
        equal = tl.zeros([BLOCK_ROWS], tl.int32)
        columns = slots
        if MODE == COLLECT:
            # Markers begin every document, and would all seek a place in one column.
            columns = (slots + document) % BLOCK_TOKENS
        for start in tl.range(0, length, BLOCK_TOKENS):
            # The last token is seen several times: no maximum notices, and what is counted has to exist.
            tokens = tl.minimum(start + columns, length - 1)
            if active_ptr is not None:
                tokens = tl.load(active_ptr + flat * document_length + tokens)
            token_rows = base + tokens[None, :].to(tl.int64) * stride_document_token + dims[:, None]
            if SPLIT:
                similarities = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
                for sum_start in tl.static_range(0, EMBEDDING, SUMMED_EMBEDDING):
                    products = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
                    for dim in tl.range(sum_start, min(EMBEDDING, sum_start + SUMMED_EMBEDDING), BLOCK_EMBEDDING):
                        exists = dim + dims < EMBEDDING
                        part = tl.load(query_rows + dim, mask=row_exists[:, None] & exists[None, :], other=0.0)
                        tile = tl.load(token_rows + dim, mask=exists[:, None], other=0.0)
                        products = tl.dot(part, tile, products, input_precision=PRECISION)
                    similarities += products
            else:
                if BLOCK_EMBEDDING == EMBEDDING:
                    tile = tl.load(token_rows)
                else:
                    tile = tl.load(token_rows, mask=(dims < EMBEDDING)[:, None], other=0.0)
                similarities = tl.dot(query_tile, tile, input_precision=PRECISION)
            if MODE == MAXIMA:
                tile_best = max_along(similarities, 1)
                won = (similarities == tile_best[:, None]) | (similarities != similarities)
                tile_key = tl.min(tl.where(won, tokens[None, :], NO_WINNER), axis=1)
                # A later tile must be strictly better, or the first NaN.
                later = (tile_best > best) | ((tile_best != tile_best) & (best == best))
                key = tl.where(later, tile_key, key)
                best = larger(best, tile_best)
                if GROUPS > 0:
                    # Every GROUPS-th token: those lie within a thread, or close to it. What does not exist is no more
                    # than one of them.
                    found = tl.where((start + columns < length)[None, :], similarities, float("-inf"))
                    found = tl.reshape(found, [BLOCK_ROWS, BLOCK_TOKENS // GROUPS, GROUPS])
                    group = (flat * tl.cdiv(document_length, BLOCK_TOKENS) + start // BLOCK_TOKENS) * GROUPS
                    group += tl.arange(0, GROUPS)
                    to = scratch_ptr + row_scratch[:, None] + group[None, :]
                    mask = row_exists[:, None] & (group < n_groups)[None, :]
                    tl.store(to, max_along(found, 1).to(tl.int32, bitcast=True), mask=mask)
            else:
                exists = counted[:, None] & (start + columns < length)[None, :]
                if MODE == COLLECT:
                    reaches = exists & ~(similarities < bound[:, None])
                    fits = reaches & (place < (row_begins + ROOM)[:, None])
                    scatter(scratch_ptr, place, similarities.to(tl.int32, bitcast=True), fits, PTX)
                    place += tl.where(reaches, BLOCK_TOKENS, 0)
                elif MODE == BINS:
                    keys = keys_of(similarities)
                    bins = (keys - lowest[:, None]).to(tl.uint32, bitcast=True) >> width[:, None]
                    inside = exists & (keys >= lowest[:, None]) & (bins < _N_BINS)
                    count(scratch_ptr, row_scratch[:, None] + bins.to(tl.int32, bitcast=True), inside, PTX)
                else:
                    keys = keys_of(similarities)
                    above += tl.sum((exists & (keys > lowest[:, None])).to(tl.int32), axis=1)
                    equal += tl.sum((exists & (keys == lowest[:, None])).to(tl.int32), axis=1)
        to = flat * n_rows + rows
        if MODE == MAXIMA:
            tl.store(best_ptr + to, best, mask=row_exists)
            tl.store(winners_ptr + to, winner_of(key, best).to(winners_ptr.dtype.element_ty), mask=row_exists)
        if MODE == TALLY:
            dtype = counts_ptr.dtype.element_ty
            tl.store(counts_ptr + to, above.to(dtype), mask=counted)
            tl.store(counts_ptr + tl.cast(n_documents, tl.int64) * n_rows + to, equal.to(dtype), mask=counted)
    if MODE == COLLECT:
        to = (rows.to(tl.int64) * n_runs + run_index)[:, None] * BLOCK_TOKENS + slots[None, :]
        tl.store(counts_ptr + to, (place - row_begins[:, None]) // BLOCK_TOKENS, mask=row_exists[:, None])


def walk_similarities(
    problem: Problem,
    plan: SearchPlan,
    inputs: SearchTensors,
    mode: tl.constexpr,
    best: Tensor | None = None,
    winners: Tensor | None = None,
    scratch: Tensor | None = None,
    state: Tensor | None = None,
    counts: Tensor | None = None,
) -> None:
    """Walk through all similarities, and leave what `_walk_kernel` leaves in this mode."""
    tile, run, n_runs, depth = plan.tile, plan.run, plan.n_runs, 0
    if mode.value == COLLECT.value:
        run, n_runs, depth = plan.collection.run, plan.collection.n_runs, plan.collection.depth
    groups = plan.groups if mode.value == MAXIMA.value else 0
    sizes = problem.rows, problem.query_length, problem.n_documents, problem.document_length
    shape = problem.size, plan.block_embedding, tile.rows, tile.columns, plan.split
    _walk_kernel(
        (plan.row_blocks * n_runs, 1, 1),
        (*inputs, best, winners, scratch, state, counts),
        (*sizes, n_runs, run, plan.n_groups),
        (*problem.query_strides, *problem.document_strides, plan.scratch),
        (*shape, mode.value, groups, depth, not knobs.runtime.interpret, problem.kind.precision),
        (tile.num_warps, tile.num_stages, plan.registers),
    )
