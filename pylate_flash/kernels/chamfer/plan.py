"""How two sets meet: every choice of a tile and a grid, made from a `Problem`.

Who serves a call, kernels or plain torch, is chosen in `kernels.select`, as of every operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .. import select
from ..grids import run_length
from ..tiles import DIRECT_SIZE, Tile, divided_strides, power_of_two

if TYPE_CHECKING:
    from ...problem import Problem

# Points of x and of y in a tile, as many as leave the two maxima of each element in registers (compute capability 8.0
# and 9.0). Where a tile is computed directly, a thread has the coordinates of its rows there too.
_DIRECT = Tile(64, 128, 4, 1)
_DIRECT_LONG = Tile(32, 128, 4, 1)
_HALF = Tile(128, 64, 4, 3)
_HALF_LONG = Tile(64, 64, 4, 2)
_FLOAT = Tile(128, 32, 4, 2)
# Elements of a point, as a power of two, up to which a tile holds it whole, by the bytes of each; of a longer one so
# many bytes at a time.
_MAX_WHOLE = {2: 256, 4: 64}
_PART_BYTES = 128
# Columns from one to the next of a group, for which a row has a maximum of its own: those of a group lie in one thread,
# and threads compare theirs only at the end.
_DIRECT_GROUPS = 32
_GROUPS = 8
# Programs that a processor has room for, and tiles that one of them walks at most.
_PER_PROCESSOR = 2
_LONGEST_SHARE = 16


class MeetingPlan(NamedTuple):
    """How the points of two sets meet."""

    tile: Tile
    # Whether a tile is computed coordinate by coordinate; else its elements of a point, and whether they are a part.
    direct: bool
    block: int
    split: bool
    groups: int
    # Triton's name for how products are computed.
    precision: str
    strides: tuple[int, ...]
    units: tuple[int, int]
    # Programs of a pair: blocks of points of x, and shares of so many points of y.
    row_blocks: int
    share: int
    n_shares: int


def meeting_plan(problem: Problem) -> MeetingPlan:
    """Choose the tile and the grid."""
    size, item = problem.size, problem.dtype.itemsize
    direct, block, split = size <= DIRECT_SIZE, max(16, power_of_two(size)), False
    if direct:
        tile = _DIRECT if size <= DIRECT_SIZE // 2 else _DIRECT_LONG
    else:
        split = block > _MAX_WHOLE[item]
        if split:
            block = _PART_BYTES // item
        tile = _FLOAT if item == 4 else _HALF if split or block <= 128 else _HALF_LONG
    row_blocks = -(-problem.query_length // tile.rows)
    programs = row_blocks * problem.n_queries
    tiles = -(-problem.document_length // tile.columns)
    share = run_length(tiles, programs, select.architecture(problem.device)[1], _PER_PROCESSOR, _LONGEST_SHARE)
    precision = problem.kind.precision
    if problem.dtype == torch.float32 and precision == "ieee":
        # Three products of tensor cores, which leave 22 of float32's 24 bits. The distances themselves are computed
        # from their points, in float32.
        precision = "tf32x3"
    strides, *units = divided_strides(problem.query_strides, problem.document_strides)
    # A set of y is a document alone in its group.
    strides = strides[:3] + strides[4:]
    return MeetingPlan(
        tile, direct, block, split, _DIRECT_GROUPS if direct else _GROUPS, precision, strides, (units[0], units[1]),
        row_blocks, share * tile.columns, -(-tiles // share),
    )  # fmt: skip
