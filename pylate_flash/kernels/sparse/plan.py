"""How chosen query tokens are scored: the tile and the grid, made from a `Problem`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .. import select
from ..soft.plan import Operands, operands_of
from ..tiles import Tile, divided_strides, fitted, power_of_two

if TYPE_CHECKING:
    from ...problem import Problem

# Document tokens x chosen query tokens, of which there are as many columns as a power of two holds. A document is read
# again for the next columns, so that there are many. Products of float32 are computed outside tensor cores, where sums
# of a tile take registers; so do embeddings of more than 256 bytes.
_TILE = Tile(64, 128, 8, 3)
_TILE_WIDE = Tile(32, 32, 4, 2)
# Columns up to which four warps hold a tile's maxima, and of embeddings that are read block by block.
_FEW_COLUMNS = 64


class Plan(NamedTuple):
    """How the scores of chosen tokens are computed, one program for each pair of a query and a document."""

    tile: Tile
    operands: Operands
    # Strides divided by the units that the kernel multiplies them by.
    strides: tuple[int, ...]
    units: tuple[int, int]
    programs: int


def sparse_plan(problem: Problem, n_chosen: int) -> Plan:
    """Choose the tile and the grid where `n_chosen` tokens of a query are chosen for each document."""
    operands, item = operands_of(problem), problem.dtype.itemsize
    tile = _TILE_WIDE if item == 4 or operands.block > 128 else _TILE
    most = min(tile.columns, _FEW_COLUMNS) if operands.split else tile.columns
    tile = tile._replace(
        rows=max(16, min(tile.rows, power_of_two(problem.document_length))),
        columns=max(16, min(most, power_of_two(n_chosen))),
    )
    if tile.columns <= _FEW_COLUMNS:
        tile = tile._replace(num_warps=4)
    tile = fitted(tile, select.architecture(problem.device)[0], operands.block * item, operands.split)
    strides, *units = divided_strides(problem.query_strides, problem.document_strides)
    return Plan(tile, operands, strides, (units[0], units[1]), problem.n_queries * problem.n_documents)
