"""The tile and the grid of a call with residual codes, made from its `Problem`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from .. import select
from ..forms import REGISTERS, Form
from ..grids import Cuts, ForwardPlan, cuts_of, run_length
from ..tiles import Blocks, Tile, fitted, padded_query_length, power_of_two, stride_unit

if TYPE_CHECKING:
    from ...problem import Kind, Problem

# Query rows x document tokens. A tile of tokens is decompressed for each block of rows, so a block has many. With more
# tokens, a thread keeps more than the 128 registers that two programs of a processor leave it, and of few rows more
# than the 96 of five, of which some compute while others wait for centroids.
_TILE = Tile(256, 32, 8, 3)
_FEW_ROWS = Tile(64, 32, 4, 3)
# Bytes of an embedding, of the type that is multiplied, which a tile holds whole, and of a block of a longer one.
_MAX_ROW_BYTES = 256
_SPLIT_ROW_BYTES = 128
# Elements of a block at least: what four threads unpack, 8 each.
_MIN_BLOCK = 32
# Candidates that one program walks at most, and programs of a processor, by the warps of a tile.
_LONGEST_RUN = 16
_PER_PROCESSOR = {_TILE.num_warps: 2, _FEW_ROWS.num_warps: 5}
# Rows of a program of the gradient, and programs of a processor at which the documents are shared out no more.
_GRADIENT_ROWS = 32
_GRADIENT_PROGRAMS = 8
# Documents of a share at least.
_SMALLEST_SHARE = 8
_REASON = "documents are residual codes"


class GradientPlan(NamedTuple):
    """How the gradient of the queries is computed."""

    rows: int
    blocks: Blocks
    # Programs that share an embedding, and programs that share the documents.
    parts: int
    n_splits: int


def residual_plan(problem: Problem, nbits: int, own_documents: bool) -> ForwardPlan:
    """Choose the tile and the grid of the forward; `own_documents`: every query meets its candidates."""
    kind, groups, n_documents = problem.kind, problem.groups, problem.n_documents
    capability, processors = select.architecture(kind.device)
    padded, group = padded_query_length(problem.query_length, False)
    rows = problem.n_queries // groups * padded
    tile = _tile(capability, kind, min(_TILE.rows, power_of_two(rows)))
    group = min(group, tile.rows)
    row_blocks = -(-rows // tile.rows)
    cuts, per_processor = Cuts(), _PER_PROCESSOR[tile.num_warps]
    if own_documents:
        run = run_length(n_documents, row_blocks * groups, processors, per_processor, _LONGEST_RUN)
        n_runs = -(-n_documents // run)
    else:
        cuts = cuts_of(problem, row_blocks, processors, per_processor, largest=4096)
        run, n_runs = cuts.cut, cuts.number
    unit = stride_unit(problem.query_strides)
    form = _form(capability, kind, tile, group, nbits, own_documents, unit)
    strides = tuple(stride // unit for stride in problem.query_strides)
    return ForwardPlan(
        form, strides, padded, run, n_runs, n_documents, cuts, False, row_blocks, padded // group, _REASON
    )


def residual_gradient_plan(problem: Problem) -> GradientPlan:
    """Choose how the gradient of the queries is computed."""
    blocks = _blocks(problem.kind)
    parts = -(-problem.size // blocks.first)
    programs = -(-problem.rows // _GRADIENT_ROWS) * problem.groups * parts
    slots = _GRADIENT_PROGRAMS * select.architecture(problem.device)[1]
    n_splits = max(1, min(slots // programs, problem.n_documents // _SMALLEST_SHARE))
    return GradientPlan(_GRADIENT_ROWS, blocks, parts, n_splits)


def _blocks(kind: Kind) -> Blocks:
    whole = max(_MIN_BLOCK, power_of_two(kind.size))
    split = whole * kind.dtype.itemsize > _MAX_ROW_BYTES
    return Blocks(_SPLIT_ROW_BYTES // kind.dtype.itemsize if split else whole, 0, split)


@functools.cache
def _tile(capability: int, kind: Kind, rows: int) -> Tile:
    blocks = _blocks(kind)
    tile = _FEW_ROWS if rows <= _FEW_ROWS.rows or kind.dtype == torch.float32 else _TILE._replace(rows=rows)
    return fitted(tile, capability, blocks.held * kind.dtype.itemsize, blocks.split)


@functools.cache
def _form(capability: int, kind: Kind, tile: Tile, group: int, nbits: int, own_documents: bool, unit: int) -> Form:
    blocks = _blocks(kind)
    registers = None
    if capability == 9 and kind.dtype != torch.float32 and not blocks.split:
        # Left alone, ptxas takes a few registers more than leave room for so many programs. They come by eights.
        registers = REGISTERS // (_PER_PROCESSOR[tile.num_warps] * 32 * tile.num_warps) // 8 * 8
    constants = (
        kind.size, blocks.first, nbits, tile.rows, tile.columns, group, blocks.split, own_documents,
        kind.queries_mask is not None, kind.weighted, kind.with_winners, kind.precision, unit,
    )  # fmt: skip
    return Form("residual", tile, blocks, constants, (tile.num_warps, tile.num_stages, registers))
