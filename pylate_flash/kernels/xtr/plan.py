"""The tile, the grid, and the groups of tokens of a search for thresholds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from .. import select
from ..forms import REGISTERS
from ..grids import run_length
from ..tiles import Tile, embedding_blocks, power_of_two, stacked_tile

if TYPE_CHECKING:
    from ...problem import Problem

# Bins of a step, as a power of two, and the steps that narrow 32 bits down to 1 value.
BIN_BITS = 11
STEPS = 3
# Maxima that bound a threshold: the more there are for each token that is retrieved, the fewer tokens lie above the
# bound, and the fewer are counted. Documents are cut into groups of tokens where they are fewer; so many groups of a
# tile, and maxima in all, at most.
_MAXIMA_PER_TOKEN = 4
_MAX_GROUPS = 4
_MOST_MAXIMA = 4096
# Tokens above a row's bound that are collected, for each that is retrieved.
_COLLECTED_PER_TOKEN = 4
# Places of a row for the tokens above its bound, at most. A column has enough of them, but for one in a million, where
# half as many tokens again as are retrieved lie above the bound, in columns by chance.
_MOST_PLACES = 8192


class Collection(NamedTuple):
    """How the tokens above a bound are collected: runs of so many documents, and places of a run's column.

    At most so many of a row are then `packed`, a power of two. None are collected where `n_runs` is 0.
    """

    run: int
    n_runs: int
    depth: int
    packed: int

    def places(self, columns: int) -> int:
        """Places of a row, for tiles of so many columns."""
        return self.n_runs * columns * self.depth


class Plan(NamedTuple):
    """How similarities are walked through: a tile, elements of an embedding in a block, and whether it takes several.

    `groups` of each tile have a maximum of their own (0: only documents have); of all, the first `n_groups` are looked
    at.
    """

    tile: Tile
    block_embedding: int
    split: bool
    row_blocks: int
    run: int
    n_runs: int
    groups: int
    n_groups: int
    collection: Collection
    # Elements of each row's scratch memory: for the groups, for the collection, places and packed, or for the bins.
    scratch: int
    # Registers of a thread, so that two programs share a processor, where that needs no memory in their place.
    registers: int | None


def plan_of(problem: Problem, k: int) -> Plan:
    capability, processors = select.architecture(problem.device)
    item, n_documents = problem.dtype.itemsize, problem.n_documents
    tile = stacked_tile(capability, problem.size, item, problem.rows, True)
    blocks = embedding_blocks(capability, problem.size, item)
    # One block, of which a part is padding, where the forward takes two.
    block_embedding = blocks.first if blocks.split or not blocks.second else max(16, power_of_two(problem.size))
    row_blocks = -(-problem.rows // tile.rows)
    run = run_length(n_documents, row_blocks, processors, per_processor=2, longest=16)
    groups, n_groups, wanted = 0, n_documents, min(_MOST_MAXIMA, _MAXIMA_PER_TOKEN * k)
    if n_documents < wanted:
        n_tiles = n_documents * -(-problem.document_length // tile.columns)
        groups = next((few for few in (1, 2) if few * n_tiles >= wanted), _MAX_GROUPS)
        n_groups = groups * n_tiles
    n_groups = min(_MOST_MAXIMA, n_groups)
    collection = _collection(n_documents, k, tile.columns, row_blocks, processors)
    collected = collection.places(tile.columns) + collection.packed
    # In multiples of 16, as launches want it.
    scratch = -(-max(1 << BIN_BITS, n_groups if groups else 0, collected) // 16) * 16
    return Plan(
        tile, block_embedding, blocks.split, row_blocks, run, -(-n_documents // run), groups, n_groups, collection,
        scratch, None if blocks.split or item > 2 else REGISTERS // (2 * 32 * tile.num_warps),
    )  # fmt: skip


def _collection(n_documents: int, k: int, columns: int, row_blocks: int, processors: int) -> Collection:
    """Collect by as many programs as run at a time, or not at all if there are not places for half of the processors.

    A program has places of its own, so that it needs to ask no other where to put a token.
    """
    n_runs = min(n_documents, max(1, 2 * processors // row_blocks))
    packed = min(_MOST_PLACES, max(16, power_of_two(_COLLECTED_PER_TOKEN * k)))
    while n_runs > 0:
        mean = 1.5 * k / (columns * n_runs)
        found = Collection(-(-n_documents // n_runs), n_runs, math.ceil(mean + 4 * math.sqrt(mean) + 4), packed)
        if found.places(columns) <= _MOST_PLACES and 2 * row_blocks * n_runs >= processors:
            return found._replace(n_runs=-(-n_documents // found.run))
        n_runs //= 2
    return Collection(0, 0, 0, 0)
