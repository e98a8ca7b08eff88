"""The search for thresholds: bounds of each from maxima, and narrower ones from the counts of bins."""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import kernel, wait_for_previous_kernel
from ..reductions import LOWEST_KEY, keys_of

# Documents of which a program looks at the maxima at a time, for the largest of all.
BLOCK = 1024
# Bits of a bound after the sign: the exponent, and 12 of the mantissa. What lies between the bound and the maximum that
# the other bits would tell is collected for nothing: next to no tokens.
_BOUND_BITS = tl.constexpr(20)


@triton.jit
def _lower_bound(keys, exists, wanted):
    """A bound of the `wanted`-th largest of the keys that exist from below: its first bits, found one by one.

    The lowest integer if there are not as many.
    """
    reach = tl.sum((exists & (keys >= 0)).to(tl.int32), axis=0)
    found = tl.where(reach >= wanted, 0, -2147483648)
    for bit in tl.static_range(_BOUND_BITS):
        higher = found | (1 << (30 - bit))
        reach = tl.sum((exists & (keys >= higher)).to(tl.int32), axis=0)
        found = tl.where(reach >= wanted, higher, found)
    return found


@triton.jit
def _is_tallied(key, count, wanted, WITH_WHOLE: tl.constexpr):
    """Whether a row's tokens are to be counted by document: because it does not retrieve all of the `count` tokens that
    its threshold leaves to choose from, or may retrieve documents as a whole with a negative best.
    """
    tallied = count > wanted
    if WITH_WHOLE:
        tallied = tallied | (key <= 0)
    return tallied


@kernel(follows=True)
def begin_kernel(
    best_ptr, bounds_ptr, scratch_ptr, state_ptr,
    n_rows, n_groups, n_documents, n_tiles, k, stride_scratch,
    MAXIMA: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    STEPS_FOLLOW: tl.constexpr,
    BIN_BITS: tl.constexpr,
):  # fmt: skip
    """Of one row: as lowest key the k-th largest of at most MAXIMA groups, and bins up to the largest key.

    If the STEPS_FOLLOW at once, counts of bins are zeros.
    """
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    n_active = tl.zeros([BLOCK], tl.int64)
    largest = LOWEST_KEY
    for start in tl.range(0, n_documents, BLOCK):
        documents = start + tl.arange(0, BLOCK)
        exists = documents < n_documents
        best = tl.load(best_ptr + documents.to(tl.int64) * n_rows + row, mask=exists, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(keys_of(best), axis=0))
        if bounds_ptr is not None:
            n_active += tl.load(bounds_ptr + 2 * documents.to(tl.int64), mask=exists, other=0)
    wanted = k
    if bounds_ptr is not None:
        wanted = tl.minimum(k, tl.sum(n_active, axis=0)).to(tl.int32)
    slots = tl.arange(0, MAXIMA)
    exists = slots < n_groups
    of_row = scratch_ptr + row * stride_scratch
    if GROUPS > 0:
        if bounds_ptr is not None:
            # Tiles without an active token have left no maximum.
            tile = slots // GROUPS
            count = tl.load(bounds_ptr + 2 * (tile // n_tiles).to(tl.int64), mask=exists, other=0)
            exists = exists & (tile % n_tiles * BLOCK_TOKENS < count)
        maxima = tl.load(of_row + slots, mask=exists, other=0).to(tl.float32, bitcast=True)
    else:
        maxima = tl.load(best_ptr + slots.to(tl.int64) * n_rows + row, mask=exists, other=0.0)
    lowest = tl.maximum(_lower_bound(keys_of(maxima), exists, wanted), LOWEST_KEY)
    span = (tl.maximum(largest, lowest) - lowest).to(tl.uint32, bitcast=True)
    width = 0
    for bits in tl.static_range(32 - BIN_BITS):
        width += ((span >> bits) >= (1 << BIN_BITS)).to(tl.int32)
    tl.store(state_ptr + row, lowest)
    tl.store(state_ptr + n_rows + row, tl.where(wanted > 0, width, -1))
    tl.store(state_ptr + 2 * n_rows + row, wanted)
    tl.store(state_ptr + 3 * n_rows + row, 0)
    if STEPS_FOLLOW:
        # Over the maxima, which the sums above have seen.
        tl.store(of_row + tl.arange(0, 1 << BIN_BITS), tl.zeros([1 << BIN_BITS], tl.int32))


@kernel(follows=True)
def select_kernel(
    counts_ptr, scratch_ptr, state_ptr,
    n_rows, n_runs, stride_scratch,
    SLOTS: tl.constexpr,
    PACKED: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    WITH_WHOLE: tl.constexpr,
    BIN_BITS: tl.constexpr,
):  # fmt: skip
    """Of one row: its search is over, if all similarities from that of its key on have found a place, PACKED at most.

    If it goes on, counts of bins take their places, zeros.
    """
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, SLOTS)
    counts = tl.load(counts_ptr + row * n_runs * COLUMNS + slots, mask=slots < n_runs * COLUMNS, other=0)
    of_row = scratch_ptr + row * stride_scratch
    width = tl.load(state_ptr + n_rows + row)
    goes_on = width >= 0
    deepest, total = tl.max(counts, axis=0), tl.sum(counts, axis=0)
    fits = (deepest <= DEPTH) & (total <= PACKED)
    if goes_on & fits:
        # Most places are empty, and all of them would be looked at once for every bit.
        of_column = of_row + slots // COLUMNS * (DEPTH * COLUMNS) + slots % COLUMNS
        packed = of_row + n_runs * (DEPTH * COLUMNS)
        to = packed + tl.cumsum(counts, axis=0) - counts
        for depth in tl.range(0, deepest):
            there = depth < counts
            tl.store(to + depth, tl.load(of_column + depth * COLUMNS, mask=there), mask=there)
        tl.debug_barrier()
        at = tl.arange(0, PACKED)
        exists = at < total
        keys = keys_of(tl.load(packed + at, mask=exists, other=0).to(tl.float32, bitcast=True))
        lowest = tl.load(state_ptr + row)
        wanted = tl.load(state_ptr + 2 * n_rows + row)
        # Below 2**(width + BIN_BITS), which may be 2**32.
        distances = tl.where(exists, keys - lowest, 0).to(tl.uint32, bitcast=True)
        found = tl.full([], 0, tl.uint32)
        bit = tl.full([], 1 << 31, tl.uint32) >> (32 - BIN_BITS - width).to(tl.uint32)
        for _ in tl.range(0, width + BIN_BITS):
            higher = found | bit
            bit >>= 1
            reach = tl.sum((distances >= higher).to(tl.int32), axis=0)
            found = tl.where(reach >= wanted, higher, found)
        wanted -= tl.sum((distances > found).to(tl.int32), axis=0)
        equal = tl.sum((exists & (distances == found)).to(tl.int32), axis=0)
        key = lowest + found.to(tl.int32, bitcast=True)
        tl.store(state_ptr + row, key)
        tl.store(state_ptr + n_rows + row, -1)
        tl.store(state_ptr + 2 * n_rows + row, wanted)
        tl.store(state_ptr + 3 * n_rows + row, _is_tallied(key, equal, wanted, WITH_WHOLE).to(tl.int32))
    if goes_on & ~fits:
        tl.store(of_row + tl.arange(0, 1 << BIN_BITS), tl.zeros([1 << BIN_BITS], tl.int32))


@kernel(follows=True)
def narrow_kernel(
    scratch_ptr, state_ptr, n_rows, stride_scratch,
    WITH_WHOLE: tl.constexpr,
    BIN_BITS: tl.constexpr,
):  # fmt: skip
    """Of one row: its search goes on in the bin with the threshold, or is over; its counts are zeros again."""
    wait_for_previous_kernel()
    BINS: tl.constexpr = 1 << BIN_BITS
    row = tl.program_id(0).to(tl.int64)
    width = tl.load(state_ptr + n_rows + row)
    if width >= 0:
        wanted = tl.load(state_ptr + 2 * n_rows + row)
        # The highest bin first.
        places = tl.arange(0, BINS)
        at = scratch_ptr + row * stride_scratch + (BINS - 1 - places)
        counts = tl.load(at)
        tl.store(at, tl.zeros([BINS], tl.int32))
        reached = tl.cumsum(counts, axis=0)
        place = tl.sum((reached < wanted).to(tl.int32), axis=0)
        found = places == place
        count = tl.sum(tl.where(found, counts, 0), axis=0)
        wanted -= tl.sum(tl.where(found, reached - counts, 0), axis=0)
        over = (count == wanted) | (width == 0)
        lowest = tl.load(state_ptr + row) + ((BINS - 1 - place) << width)
        narrower = tl.maximum(width - BIN_BITS, 0)
        # The next bins end where this one does, and where they are more than it has keys, they begin before it.
        begin = lowest + (1 << width) - (1 << (narrower + BIN_BITS))
        tl.store(state_ptr + row, tl.where(over, lowest, begin))
        tl.store(state_ptr + n_rows + row, tl.where(over, -1, narrower))
        tl.store(state_ptr + 2 * n_rows + row, wanted)
        tallied = over & _is_tallied(lowest, count, wanted, WITH_WHOLE)
        tl.store(state_ptr + 3 * n_rows + row, tallied.to(tl.int32))
