"""The search for thresholds: bounds of each from maxima, and narrower ones from the counts of bins."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..launch import Kernel
from ..overlap import wait_for_previous_kernel
from ..tiles import power_of_two
from .keys import LOWEST, keys_of
from .plan import BIN_BITS, MOST_MAXIMA

# Documents of which a program looks at the maxima at a time, for the largest of all.
_BLOCK = 1024


@triton.jit
def _largest(keys, exists, wanted):
    """The `wanted`-th largest of the keys that exist, found bit by bit; the lowest integer if there are not as many."""
    reach = tl.sum((exists & (keys >= 0)).to(tl.int32), axis=0)
    found = tl.where(reach >= wanted, 0, -2147483648)
    for bit in tl.static_range(31):
        higher = found | (1 << (30 - bit))
        reach = tl.sum((exists & (keys >= higher)).to(tl.int32), axis=0)
        found = tl.where(reach >= wanted, higher, found)
    return found


@triton.jit(do_not_specialize=["n_rows", "n_groups", "n_documents", "stride_row", "stride_group"])
def _begin_kernel(
    groups_ptr, best_ptr, wanted_ptr, state_ptr,
    n_rows, n_groups, n_documents, stride_row, stride_group,
    MAXIMA: tl.constexpr,
    BLOCK: tl.constexpr,
    BIN_BITS: tl.constexpr,
):  # fmt: skip
    """Of one row: as lowest key the `wanted`-th largest of at most MAXIMA groups, and bins up to the largest key."""
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    wanted = tl.load(wanted_ptr)
    slots = tl.arange(0, MAXIMA)
    at = groups_ptr + row * stride_row + slots.to(tl.int64) * stride_group
    exists = slots < n_groups
    keys = keys_of(tl.load(at, mask=exists, other=float("-inf")))
    lowest = tl.maximum(_largest(keys, exists, wanted), LOWEST)
    largest = lowest
    for start in tl.range(0, n_documents, BLOCK):
        documents = start + tl.arange(0, BLOCK)
        of_row = best_ptr + documents.to(tl.int64) * n_rows + row
        best = tl.load(of_row, mask=documents < n_documents, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(keys_of(best), axis=0))
    span = (largest - lowest).to(tl.uint32, bitcast=True)
    width = 0
    for bits in tl.static_range(32 - BIN_BITS):
        width += ((span >> bits) >= (1 << BIN_BITS)).to(tl.int32)
    tl.store(state_ptr + row, lowest)
    tl.store(state_ptr + n_rows + row, tl.where(wanted > 0, width, -1))
    tl.store(state_ptr + 2 * n_rows + row, wanted)


@triton.jit(do_not_specialize=["n_rows", "n_runs"])
def _select_kernel(
    places_ptr, counts_ptr, state_ptr,
    n_rows, n_runs,
    PLACES: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of one row: its search is over, if all similarities from that of its key on have found a place."""
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, PLACES)
    run = places // (DEPTH * COLUMNS)
    of_column = (row * n_runs + run) * COLUMNS + places % COLUMNS
    counts = tl.load(counts_ptr + of_column, mask=run < n_runs, other=0)
    if (tl.load(state_ptr + n_rows + row) >= 0) & (tl.max(counts, axis=0) <= DEPTH):
        exists = places // COLUMNS % DEPTH < counts
        bits = tl.load(places_ptr + row * n_runs * DEPTH * COLUMNS + places, mask=exists, other=0)
        keys = keys_of(bits.to(tl.float32, bitcast=True))
        wanted = tl.load(state_ptr + 2 * n_rows + row)
        found = _largest(keys, exists, wanted)
        wanted -= tl.sum((exists & (keys > found)).to(tl.int32), axis=0)
        equal = tl.sum((exists & (keys == found)).to(tl.int32), axis=0)
        tl.store(state_ptr + row, found)
        tl.store(state_ptr + n_rows + row, -1)
        tl.store(state_ptr + 2 * n_rows + row, wanted)
        tl.store(state_ptr + 3 * n_rows + row, (equal > wanted).to(tl.int32))


@triton.jit(do_not_specialize=["n_rows"])
def _narrow_kernel(bins_ptr, state_ptr, n_rows, BINS: tl.constexpr, BIN_BITS: tl.constexpr):
    """Of one row: its search goes on in the bin with the threshold, or is over; its counts are zeros again."""
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    width = tl.load(state_ptr + n_rows + row)
    if width >= 0:
        wanted = tl.load(state_ptr + 2 * n_rows + row)
        # The highest bin first.
        places = tl.arange(0, BINS)
        at = bins_ptr + row * BINS + (BINS - 1 - places)
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
        tl.store(state_ptr + 3 * n_rows + row, (over & (count != wanted)).to(tl.int32))


_begin = Kernel(_begin_kernel, follows=True)
_select = Kernel(_select_kernel, follows=True)
_narrow = Kernel(_narrow_kernel, follows=True)


def begin(groups: Tensor, best: Tensor, wanted: Tensor, state: Tensor) -> None:
    """Begin the search of the `wanted`-th largest similarity of every row: bounds by maxima.

    Parameters
    ----------
    groups, best
        [rows, n_groups] and [Nd, rows], float32: maxima of groups of tokens, and of documents.
    wanted
        One int32.
    state
        [4, rows], int32, zeros (`kernels.xtr.retrieve`).
    """
    rows, n_groups = len(groups), min(groups.shape[1], MOST_MAXIMA)
    maxima = max(16, power_of_two(n_groups))
    _begin(
        (rows, 1, 1), (groups, best, wanted, state), (rows, n_groups, len(best), *groups.stride()), (),
        (maxima, min(_BLOCK, max(16, power_of_two(len(best)))), BIN_BITS), (4 if maxima > 512 else 1, 1, None),
    )  # fmt: skip


def select_threshold(places: Tensor, counts: Tensor, state: Tensor) -> None:
    """End the search of every row of which all similarities above its bound have found a place (`walk.collect`)."""
    rows, n_runs, depth, columns = places.shape
    padded = power_of_two(n_runs * depth * columns)
    _select(
        (rows, 1, 1), (places, counts, state), (rows, n_runs), (), (padded, depth, columns),
        (8 if padded > 4096 else 4 if padded > 512 else 1, 1, None),
    )  # fmt: skip


def narrow(bins: Tensor, state: Tensor) -> None:
    """Narrow the search of every row by its counts [rows, bins], which are zeros then."""
    _narrow((len(bins), 1, 1), (bins, state), (len(bins),), (), (1 << BIN_BITS, BIN_BITS), (2, 1, None))
