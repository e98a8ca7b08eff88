"""Retrieval of query tokens from all documents, for XTR scores: thresholds without materialized similarities.

`walk_similarities` recomputes all similarities for every step, by the same products, so that each step sees the same
bits. The first step writes maxima. From those, and from the maxima of groups of tokens, `_begin_kernel` derives bounds
of every row's threshold: if k maxima are above a value, so are k tokens. The second step collects the similarities
above the lower bound, few more than k; `_select_kernel` packs them and finds the k-th largest. For rows that ran out of
slots, the next steps count the similarities between the bounds in bins, and narrow the bounds down to the bin with the
k-th largest, until all of that bin is retrieved or all in it are equal. The number of steps is fixed, but a program
whose rows are done ends at once. The last step counts the tokens of each document, for rows where more tokens equal the
threshold than are retrieved. `xtr_scores` computes scores from all that.

Counts are integers, so that the order of programs does not change the result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from ..problem import Problem, Rule
from .config import precision_of
from .forward.common import NO_ARGMAX, argmax_of, load_padded, split_products, with_maxima
from .launch import Region, kernel, wait_for_previous_kernel
from .plan_operations import SearchPlan, search_plan
from .reductions import LOWEST_KEY, keys_of, max_along, similarities_of
from .tables import XTR_BIN_BITS, XTR_STEPS, power_of_two
from .xtr_scores import Retrieved

# Modes of a walk, see `_walk_kernel`.
MAXIMA, COLLECT, BINS, TALLY = (tl.constexpr(mode) for mode in range(4))
_N_BINS = tl.constexpr(1 << XTR_BIN_BITS)


class SearchTensors(NamedTuple):
    """Padded queries and documents; for masked documents the active tokens and their counts (`kernels.rows`)."""

    queries: Tensor
    documents: Tensor
    active: Tensor | None
    bounds: Tensor | Region | None


# Stores and additions of few elements of a product, from the registers that tensor cores leave it in. Triton's own
# first convert their operands to a memory-friendly layout through shared memory, which takes longer than the product if
# nearly all elements are masked. The interpreter does not support PTX, and uses Triton's.
_AT = "{ .reg .pred on; .reg .b64 at; setp.ne.s32 on, $3, 0; mad.wide.s32 at, $2, 4, $1; "
_STORE = tl.constexpr(_AT + "@on st.global.b32 [at], $4; mov.b32 $0, 0; }")
_COUNT = tl.constexpr(_AT + "@on red.global.add.s32 [at], 1; mov.b32 $0, 0; }")


@triton.jit
def scatter(pointer, offsets, values, mask, PTX: tl.constexpr):
    """Store int32 values at int32 offsets from a pointer, where `mask` is set."""
    if PTX:
        operands = [pointer.to(tl.int64), offsets, mask.to(tl.int32), values]
        tl.inline_asm_elementwise(_STORE, "=r,l,r,r,r", operands, tl.int32, is_pure=False, pack=1)
    else:
        tl.store(pointer + offsets, values, mask=mask)


@triton.jit
def count(pointer, offsets, mask, PTX: tl.constexpr):
    """Add 1 to int32 counts at int32 offsets from a pointer, where `mask` is set."""
    if PTX:
        operands = [pointer.to(tl.int64), offsets, mask.to(tl.int32)]
        tl.inline_asm_elementwise(_COUNT, "=r,l,r,r", operands, tl.int32, is_pure=False, pack=1)
    else:
        tl.atomic_add(pointer + offsets, 1, mask=mask, sem="relaxed")


@kernel(config="size block block_rows block_tokens split mode groups depth ptx precision")
def _walk_kernel(
    queries_ptr, documents_ptr, active_ptr, bounds_ptr, best_ptr, argmax_ptr, scratch_ptr, state_ptr, counts_ptr,
    n_rows, query_length, n_documents, document_length, n_runs, run, n_groups,
    stride_query, stride_query_token, stride_group, stride_document, stride_document_token, stride_scratch,
    config: tl.constexpr,
):  # fmt: skip
    """MAXIMA: best [Nd, rows] and argmax; and to each row's scratch the bits of the maxima of `config.groups` groups of
    each tile's tokens, except for tiles without an active token, and for groups from `n_groups` on.

    COLLECT: to each row's scratch, [runs, depth, block_tokens], the bits of similarities that reach that of the row's
    key, of every column of the tiles of a run; to counts [rows, runs, block_tokens] their number, even if it exceeds
    the depth. Only for rows with a width >= 0.

    BINS: adds the similarities in each bin of 2**width keys, beginning at the row's key, to the bin counts in each
    row's scratch. Only for rows with a width >= 0.

    TALLY: counts [2, Nd, rows] of tokens above the row's key, and equal to it, for tallied rows.

    Key, width, and whether a row is tallied are read from its state [4, rows] (`kernels.xtr.retrieve`).

    Grid: blocks of rows x runs of documents. Programs that run together read the same documents, out of L2.
    """
    n_row_blocks = tl.cdiv(n_rows, config.block_rows)
    rows = tl.program_id(0) % n_row_blocks * config.block_rows + tl.arange(0, config.block_rows)
    row_exists = rows < n_rows
    first = tl.program_id(0) // n_row_blocks * run
    last = tl.minimum(first + run, n_documents)
    if config.mode != MAXIMA:
        lowest = tl.load(state_ptr + rows, mask=row_exists, other=0)
        if config.mode == TALLY:
            counted = tl.load(state_ptr + 3 * n_rows + rows, mask=row_exists, other=0) != 0
        else:
            width = tl.load(state_ptr + n_rows + rows, mask=row_exists, other=-1)
            counted = width >= 0
            width = tl.maximum(width, 0).to(tl.uint32)
        # Rows that are done are not walked.
        last = tl.where(tl.max(counted.to(tl.int32), axis=0) > 0, last, first)

    dims = tl.arange(0, config.block)
    query_offset = (rows // query_length).to(tl.int64) * stride_query + rows % query_length * stride_query_token
    query_rows = queries_ptr + query_offset
    if not config.split:
        in_query = row_exists[:, None] & (dims < config.size)[None, :]
        query_tile = tl.load(query_rows[:, None] + dims[None, :], mask=in_query, other=0.0)
    lanes = tl.arange(0, config.block_tokens)
    first_row = tl.program_id(0) % n_row_blocks * config.block_rows
    if config.mode != TALLY:
        scratch_ptr += first_row.to(tl.int64) * stride_scratch
        row_scratch = tl.arange(0, config.block_rows) * stride_scratch
    if config.mode == COLLECT:
        # The only state per element is its next slot, which lies past the end of its row when the column is full.
        CAPACITY: tl.constexpr = config.depth * config.block_tokens
        run_index = tl.program_id(0) // n_row_blocks
        row_starts = row_scratch + run_index * CAPACITY
        bound = similarities_of(lowest)
        next_slots = row_starts[:, None] + lanes[None, :]
    for index in tl.range(0, last - first, flatten=not config.split):
        document = first + index
        flat = document.to(tl.int64)
        base = documents_ptr + flat * stride_document
        length = document_length
        if active_ptr is not None:
            length = tl.load(bounds_ptr + 2 * flat)
        best = tl.full([config.block_rows], float("-inf"), tl.float32)
        key = tl.full([config.block_rows], NO_ARGMAX, tl.int32)
        above = tl.zeros([config.block_rows], tl.int32)
        equal = tl.zeros([config.block_rows], tl.int32)
        columns = lanes
        if config.mode == COLLECT:
            # Rotated, as markers begin every document and would all compete for one column.
            columns = (lanes + document) % config.block_tokens
        for start in tl.range(0, length, config.block_tokens):
            # The last token is repeated: maxima do not notice, and counts are masked.
            tokens = tl.minimum(start + columns, length - 1)
            if active_ptr is not None:
                tokens = tl.load(active_ptr + flat * document_length + tokens)
            token_rows = base + tokens.to(tl.int64) * stride_document_token
            if config.split:
                similarities = split_products(query_rows, token_rows, row_exists, None, config)
            else:
                inside = (dims < config.size)[:, None]
                tile = load_padded(token_rows[None, :] + dims[:, None], inside, config.block > config.size)
                similarities = tl.dot(query_tile, tile, input_precision=config.precision)
            if config.mode == MAXIMA:
                best, key = with_maxima(similarities, tokens, best, key, True)
                if config.groups > 0:
                    # A group is every `groups`-th token: those lie within a thread, or close to it. Copies of the
                    # last token are masked, so that it is in one group only.
                    group_similarities = tl.where((start + columns < length)[None, :], similarities, float("-inf"))
                    group_similarities = tl.reshape(
                        group_similarities, [config.block_rows, config.block_tokens // config.groups, config.groups]
                    )
                    group = (
                        flat * tl.cdiv(document_length, config.block_tokens) + start // config.block_tokens
                    ) * config.groups
                    group += tl.arange(0, config.groups)
                    target = scratch_ptr + row_scratch[:, None] + group[None, :]
                    mask = row_exists[:, None] & (group < n_groups)[None, :]
                    tl.store(target, max_along(group_similarities, 1).to(tl.int32, bitcast=True), mask=mask)
            else:
                exists = counted[:, None] & (start + columns < length)[None, :]
                if config.mode == COLLECT:
                    reaches = exists & ~(similarities < bound[:, None])
                    fits = reaches & (next_slots < (row_starts + CAPACITY)[:, None])
                    scatter(scratch_ptr, next_slots, similarities.to(tl.int32, bitcast=True), fits, config.ptx)
                    next_slots += tl.where(reaches, config.block_tokens, 0)
                elif config.mode == BINS:
                    keys = keys_of(similarities)
                    bins = (keys - lowest[:, None]).to(tl.uint32, bitcast=True) >> width[:, None]
                    inside = exists & (keys >= lowest[:, None]) & (bins < _N_BINS)
                    count(scratch_ptr, row_scratch[:, None] + bins.to(tl.int32, bitcast=True), inside, config.ptx)
                else:
                    keys = keys_of(similarities)
                    above += tl.sum((exists & (keys > lowest[:, None])).to(tl.int32), axis=1)
                    equal += tl.sum((exists & (keys == lowest[:, None])).to(tl.int32), axis=1)
        target = flat * n_rows + rows
        if config.mode == MAXIMA:
            tl.store(best_ptr + target, best, mask=row_exists)
            tl.store(argmax_ptr + target, argmax_of(key, best).to(argmax_ptr.dtype.element_ty), mask=row_exists)
        if config.mode == TALLY:
            dtype = counts_ptr.dtype.element_ty
            tl.store(counts_ptr + target, above.to(dtype), mask=counted)
            tl.store(counts_ptr + tl.cast(n_documents, tl.int64) * n_rows + target, equal.to(dtype), mask=counted)
    if config.mode == COLLECT:
        target = (rows.to(tl.int64) * n_runs + run_index)[:, None] * config.block_tokens + lanes[None, :]
        tl.store(
            counts_ptr + target, (next_slots - row_starts[:, None]) // config.block_tokens, mask=row_exists[:, None]
        )


def walk_similarities(
    problem: Problem,
    plan: SearchPlan,
    inputs: SearchTensors,
    mode: tl.constexpr,
    best: Tensor | None = None,
    argmax: Tensor | None = None,
    scratch: Tensor | None = None,
    state: Tensor | None = None,
    counts: Tensor | None = None,
) -> None:
    """Walk all similarities, and write what `_walk_kernel` writes in this mode."""
    tile, run, n_runs, depth = plan.tile, plan.run, plan.n_runs, 0
    if mode.value == COLLECT.value:
        run, n_runs, depth = plan.collection.run, plan.collection.n_runs, plan.collection.depth
    groups = plan.groups if mode.value == MAXIMA.value else 0
    sizes = problem.rows, problem.query_length, problem.n_documents, problem.document_length
    shape = problem.size, plan.block_embedding, tile.rows, tile.columns, plan.split
    _walk_kernel(
        (plan.row_blocks * n_runs, 1, 1),
        (*inputs, best, argmax, scratch, state, counts),
        (*sizes, n_runs, run, plan.n_groups),
        (*problem.query_strides, *problem.document_strides, plan.scratch),
        (*shape, mode.value, groups, depth, not knobs.runtime.interpret, precision_of(problem.kind)),
        (tile.num_warps, tile.num_stages, plan.registers),
    )


# Documents whose maxima a program reads at a time, to find the largest of all.
_BLOCK = 1024
# Bits of a bound after the sign: the exponent, and 12 of the mantissa. The remaining bits would exclude next to no
# tokens from the collection.
_BOUND_BITS = tl.constexpr(20)


@triton.jit
def _lower_bound(keys, exists, k):
    """A lower bound of the k-th largest of the keys that exist: its leading bits, found one by one.

    The lowest integer if there are fewer.
    """
    n_reaching = tl.sum((exists & (keys >= 0)).to(tl.int32), axis=0)
    bound = tl.where(n_reaching >= k, 0, -2147483648)
    for bit in tl.static_range(_BOUND_BITS):
        candidate = bound | (1 << (30 - bit))
        n_reaching = tl.sum((exists & (keys >= candidate)).to(tl.int32), axis=0)
        bound = tl.where(n_reaching >= k, candidate, bound)
    return bound


@triton.jit
def _is_tallied(key, count, remaining, WITH_WHOLE: tl.constexpr):
    """Whether a row's tokens must be counted by document: if it retrieves only `remaining` of the `count` tokens at its
    threshold, or may retrieve whole documents with a negative best.
    """
    tallied = count > remaining
    if WITH_WHOLE:
        tallied = tallied | (key <= 0)
    return tallied


@kernel(follows=True, config="maxima block groups block_tokens steps_follow bin_bits")
def _begin_kernel(
    best_ptr, bounds_ptr, scratch_ptr, state_ptr,
    n_rows, n_groups, n_documents, n_tiles, k,
    stride_scratch, config: tl.constexpr,
):  # fmt: skip
    """Per row: set the lowest key to about the k-th largest group maximum, and span bins from it to the largest key.

    If the bin steps follow at once (`steps_follow`), also zero the bin counts.
    """
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    n_active = tl.zeros([config.block], tl.int64)
    largest = LOWEST_KEY
    for start in tl.range(0, n_documents, config.block):
        documents = start + tl.arange(0, config.block)
        exists = documents < n_documents
        best = tl.load(best_ptr + documents.to(tl.int64) * n_rows + row, mask=exists, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(keys_of(best), axis=0))
        if bounds_ptr is not None:
            n_active += tl.load(bounds_ptr + 2 * documents.to(tl.int64), mask=exists, other=0)
    remaining = k
    if bounds_ptr is not None:
        remaining = tl.minimum(k, tl.sum(n_active, axis=0)).to(tl.int32)
    slots = tl.arange(0, config.maxima)
    exists = slots < n_groups
    row_scratch = scratch_ptr + row * stride_scratch
    if config.groups > 0:
        if bounds_ptr is not None:
            # Tiles without an active token have written no maximum.
            tile = slots // config.groups
            count = tl.load(bounds_ptr + 2 * (tile // n_tiles).to(tl.int64), mask=exists, other=0)
            exists = exists & (tile % n_tiles * config.block_tokens < count)
        maxima = tl.load(row_scratch + slots, mask=exists, other=0).to(tl.float32, bitcast=True)
    else:
        maxima = tl.load(best_ptr + slots.to(tl.int64) * n_rows + row, mask=exists, other=0.0)
    lowest = tl.maximum(_lower_bound(keys_of(maxima), exists, remaining), LOWEST_KEY)
    span = (tl.maximum(largest, lowest) - lowest).to(tl.uint32, bitcast=True)
    width = 0
    for bits in tl.static_range(32 - config.bin_bits):
        width += ((span >> bits) >= (1 << config.bin_bits)).to(tl.int32)
    tl.store(state_ptr + row, lowest)
    tl.store(state_ptr + n_rows + row, tl.where(remaining > 0, width, -1))
    tl.store(state_ptr + 2 * n_rows + row, remaining)
    tl.store(state_ptr + 3 * n_rows + row, 0)
    if config.steps_follow:
        # Overwrites the maxima, which have been read by the reductions above.
        tl.store(row_scratch + tl.arange(0, 1 << config.bin_bits), tl.zeros([1 << config.bin_bits], tl.int32))


@kernel(follows=True, config="slots packed depth columns with_whole bin_bits")
def _select_kernel(counts_ptr, scratch_ptr, state_ptr, n_rows, n_runs, stride_scratch, config: tl.constexpr):
    """Per row: end the search if all similarities from its key on were stored and number at most `packed`.

    Otherwise, zero the bin counts, which reuse the slots.
    """
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, config.slots)
    counts = tl.load(counts_ptr + row * n_runs * config.columns + slots, mask=slots < n_runs * config.columns, other=0)
    row_scratch = scratch_ptr + row * stride_scratch
    width = tl.load(state_ptr + n_rows + row)
    goes_on = width >= 0
    deepest, total = tl.max(counts, axis=0), tl.sum(counts, axis=0)
    fits = (deepest <= config.depth) & (total <= config.packed)
    if goes_on & fits:
        # Pack the slots first: most are empty, and all of them would be read for every bit.
        column_starts = row_scratch + slots // config.columns * (config.depth * config.columns) + slots % config.columns
        packed = row_scratch + n_runs * (config.depth * config.columns)
        targets = packed + tl.cumsum(counts, axis=0) - counts
        for depth in tl.range(0, deepest):
            mask = depth < counts
            tl.store(targets + depth, tl.load(column_starts + depth * config.columns, mask=mask), mask=mask)
        tl.debug_barrier()
        lanes = tl.arange(0, config.packed)
        exists = lanes < total
        keys = keys_of(tl.load(packed + lanes, mask=exists, other=0).to(tl.float32, bitcast=True))
        lowest = tl.load(state_ptr + row)
        remaining = tl.load(state_ptr + 2 * n_rows + row)
        # Below 2**(width + bin_bits), which may be 2**32.
        distances = tl.where(exists, keys - lowest, 0).to(tl.uint32, bitcast=True)
        kth_distance = tl.full([], 0, tl.uint32)
        bit = tl.full([], 1 << 31, tl.uint32) >> (32 - config.bin_bits - width).to(tl.uint32)
        for _ in tl.range(0, width + config.bin_bits):
            candidate = kth_distance | bit
            bit >>= 1
            n_reaching = tl.sum((distances >= candidate).to(tl.int32), axis=0)
            kth_distance = tl.where(n_reaching >= remaining, candidate, kth_distance)
        remaining -= tl.sum((distances > kth_distance).to(tl.int32), axis=0)
        equal = tl.sum((exists & (distances == kth_distance)).to(tl.int32), axis=0)
        key = lowest + kth_distance.to(tl.int32, bitcast=True)
        tl.store(state_ptr + row, key)
        tl.store(state_ptr + n_rows + row, -1)
        tl.store(state_ptr + 2 * n_rows + row, remaining)
        tl.store(state_ptr + 3 * n_rows + row, _is_tallied(key, equal, remaining, config.with_whole).to(tl.int32))
    if goes_on & ~fits:
        tl.store(row_scratch + tl.arange(0, 1 << config.bin_bits), tl.zeros([1 << config.bin_bits], tl.int32))


@kernel(follows=True, config="with_whole bin_bits")
def _narrow_kernel(scratch_ptr, state_ptr, n_rows, stride_scratch, config: tl.constexpr):
    """Per row: narrow the search to the bin with the threshold, or end it; zero the bin counts again."""
    wait_for_previous_kernel()
    BINS: tl.constexpr = 1 << config.bin_bits
    row = tl.program_id(0).to(tl.int64)
    width = tl.load(state_ptr + n_rows + row)
    if width >= 0:
        remaining = tl.load(state_ptr + 2 * n_rows + row)
        # Highest bin first.
        ranks = tl.arange(0, BINS)
        bins = scratch_ptr + row * stride_scratch + (BINS - 1 - ranks)
        counts = tl.load(bins)
        tl.store(bins, tl.zeros([BINS], tl.int32))
        cumulative = tl.cumsum(counts, axis=0)
        rank = tl.sum((cumulative < remaining).to(tl.int32), axis=0)
        is_threshold_bin = ranks == rank
        count = tl.sum(tl.where(is_threshold_bin, counts, 0), axis=0)
        remaining -= tl.sum(tl.where(is_threshold_bin, cumulative - counts, 0), axis=0)
        is_done = (count == remaining) | (width == 0)
        lowest = tl.load(state_ptr + row) + ((BINS - 1 - rank) << width)
        next_width = tl.maximum(width - config.bin_bits, 0)
        # The next bins end where this one does; if they are more than it has keys, they begin before it.
        begin = lowest + (1 << width) - (1 << (next_width + config.bin_bits))
        tl.store(state_ptr + row, tl.where(is_done, lowest, begin))
        tl.store(state_ptr + n_rows + row, tl.where(is_done, -1, next_width))
        tl.store(state_ptr + 2 * n_rows + row, remaining)
        tallied = is_done & _is_tallied(lowest, count, remaining, config.with_whole)
        tl.store(state_ptr + 3 * n_rows + row, tallied.to(tl.int32))


# Elements per thread. Counts of a few threads are summed faster than those of many.
_PER_THREAD = 32


def _warps(elements: int) -> int:
    return max(1, min(8, elements // (32 * _PER_THREAD)))


def retrieve(problem: Problem, inputs: SearchTensors, rule: Rule) -> Retrieved:
    """What the rows of padded queries retrieve from documents [Nd, Ld, d], which are shared by all rows.

    All tensors are on the device, with contiguous rows; no dimension is 0.
    """
    device, rows, n_documents, with_whole = problem.device, problem.rows, problem.n_documents, rule.with_whole
    plan = search_plan(problem, rule.k)
    collection, columns = plan.collection, plan.tile.columns
    best = torch.empty(n_documents, rows, dtype=torch.float32, device=device)
    argmax = torch.empty(n_documents, rows, dtype=problem.argmax_dtype, device=device)
    # Per-row scratch, reused by each step: group maxima, then collected similarities, then bin counts.
    scratch = torch.empty(rows, plan.scratch, dtype=torch.int32, device=device)
    walk_similarities(problem, plan, inputs, MAXIMA, best, argmax, scratch)

    # Per row: the lowest key that its threshold may have, the width of a bin as a power of two (-1: the search is
    # over), how many tokens are retrieved from there on, and whether its tokens are to be counted by document.
    state = torch.empty(4, rows, dtype=torch.int32, device=device)
    maxima, block = (max(16, power_of_two(n)) for n in (plan.n_groups, n_documents))
    _begin_kernel(
        (rows, 1, 1),
        (best, inputs.bounds, scratch, state),
        (rows, plan.n_groups, n_documents, -(-problem.document_length // columns), rule.k),
        (plan.scratch,),
        (maxima, min(_BLOCK, block), plan.groups, columns, collection.n_runs == 0, XTR_BIN_BITS),
        (_warps(maxima), 1, None),
    )
    if collection.n_runs:
        counts = torch.empty(rows, collection.n_runs, columns, dtype=torch.int32, device=device)
        walk_similarities(problem, plan, inputs, COLLECT, scratch=scratch, state=state, counts=counts)
        slots = power_of_two(collection.n_runs * columns)
        _select_kernel(
            (rows, 1, 1),
            (counts, scratch, state),
            (rows, collection.n_runs),
            (plan.scratch,),
            (slots, collection.packed, collection.depth, columns, with_whole, XTR_BIN_BITS),
            (_warps(max(slots, collection.packed)), 1, None),
        )
        del counts
    for _ in range(XTR_STEPS):
        walk_similarities(problem, plan, inputs, BINS, scratch=scratch, state=state)
        constants = with_whole, XTR_BIN_BITS
        _narrow_kernel((rows, 1, 1), (scratch, state), (rows,), (plan.scratch,), constants, (4, 1, None))
    del scratch
    counts = torch.empty(2, n_documents, rows, dtype=problem.argmax_dtype, device=device)
    walk_similarities(problem, plan, inputs, TALLY, state=state, counts=counts)
    return Retrieved(best, argmax, state, counts)
