"""How chosen query tokens are scored: the tile and the grid, made from a `Problem`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .. import select
from ..soft.plan import Operands, operands_of
from ..tiles import Tile, divided_strides, fitted, power_of_two

if TYPE_CHECKING:
    from ...ops.problem import Problem

# Document tokens x chosen query tokens, of which there are as many columns as a power of two holds. Products of float32
# are computed outside tensor cores, where sums of a tile take registers; so do embeddings of more than 256 bytes.
_TILE = Tile(64, 64, 4, 3)
_TILE_WIDE = Tile(32, 32, 4, 2)


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
    tile = tile._replace(
        rows=max(16, min(tile.rows, power_of_two(problem.document_length))),
        columns=max(16, min(tile.columns, power_of_two(n_chosen))),
    )
    tile = fitted(tile, select.architecture(problem.device)[0], operands.block * item, operands.split)
    strides, *units = divided_strides(problem.query_strides, problem.document_strides)
    return Plan(tile, operands, strides, (units[0], units[1]), problem.n_queries * problem.n_documents)
