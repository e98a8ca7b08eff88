"""The tile and the grid of a call with quantized documents, made from its `Problem`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from .. import select
from ..forms import REGISTERS, Form
from ..select import Cuts, ForwardPlan
from ..tiles import Blocks, Tile, divided_strides, fitted, padded_query_length, power_of_two

if TYPE_CHECKING:
    from ...ops.problem import Kind, Problem

# Query rows x document tokens. Every block of rows reads all documents out of L2, so a block has many rows. Few rows,
# as of one short query, take less of a tile, and a wider one.
_TILE = Tile(256, 64, 8, 4)
_FEW_ROWS = Tile(64, 128, 4, 4)
# Bytes of an embedding, of the type that is multiplied, which a tile holds whole, and of a block of a longer one.
_MAX_ROW_BYTES = 256
_SPLIT_ROW_BYTES = 128
# Tensor cores multiply at least so many elements of 8 bits at a time.
_MIN_BLOCK = 32
# Documents that one program walks, at most, and programs of a processor, by the shared memory that a tile takes.
_LONGEST_RUN = 16
_PER_PROCESSOR = {_TILE.num_warps: 2, _FEW_ROWS.num_warps: 3}
_REASON = "documents are quantized"


def quantized_plan(problem: Problem) -> ForwardPlan:
    """Choose the tile and the grid of the kernel of quantized documents.

    Packed documents are shared out by their tokens, whole ones; those of candidates by their number.
    """
    kind, groups, n_documents = problem.kind, problem.groups, problem.n_documents
    capability, processors = select.architecture(kind.device)
    padded, group = padded_query_length(problem.query_length, False)
    rows = problem.n_queries // groups * padded
    tile = _tile(capability, kind, min(_TILE.rows, power_of_two(rows)))
    group = min(group, tile.rows)
    row_blocks = -(-rows // tile.rows)
    cuts, per_processor = Cuts(0, 0, 0), _PER_PROCESSOR[tile.num_warps]
    if problem.packed and not problem.has_candidates:
        cuts = select.cuts_of(problem, row_blocks, processors, per_processor, largest=4096)
        run, n_runs, per_query = cuts.cut, cuts.number, n_documents
    else:
        per_query = problem.max_candidates if problem.has_candidates else n_documents
        run = select.run_length(per_query, row_blocks * groups, processors, per_processor, _LONGEST_RUN)
        n_runs = -(-per_query // run)
    query_strides = problem.query_strides
    if kind.quantize_queries:
        # They are written anew, one row after the other.
        query_strides = problem.query_length * kind.size, kind.size
    strides, *units = divided_strides(query_strides, problem.document_strides)
    return ForwardPlan(
        _form(capability, kind, tile, group, *units), strides, padded, run, n_runs, per_query, cuts, False, row_blocks,
        padded // group, _REASON,
    )  # fmt: skip


def _blocks(kind: Kind) -> Blocks:
    item = 1 if kind.quantize_queries else kind.dtype.itemsize
    whole = max(_MIN_BLOCK, power_of_two(kind.size))
    split = whole * item > _MAX_ROW_BYTES
    return Blocks(_SPLIT_ROW_BYTES // item if split else whole, 0, split)


@functools.cache
def _tile(capability: int, kind: Kind, rows: int) -> Tile:
    item, blocks = 1 if kind.quantize_queries else kind.dtype.itemsize, _blocks(kind)
    tile = _FEW_ROWS if rows <= _FEW_ROWS.rows else _TILE._replace(rows=rows)
    return fitted(tile, capability, blocks.held * item, blocks.split)


@functools.cache
def _form(capability: int, kind: Kind, tile: Tile, group: int, query_unit: int, document_unit: int) -> Form:
    blocks = _blocks(kind)
    # Two programs share a processor, so that products of one run beside the maxima of the other. That leaves a thread
    # 128 registers: a whole tile takes 120 with products of 8 bits. Left alone, ptxas takes more of others.
    registers = None
    if capability == 9 and tile.num_warps == _TILE.num_warps and not blocks.split:
        registers = REGISTERS // (2 * 32 * tile.num_warps)
    constants = (
        kind.size, blocks.first, tile.rows, tile.columns, group, blocks.split, kind.cu_seqlens is not None,
        kind.candidates is not None, kind.queries_mask is not None, kind.weighted, kind.documents_mask is not None,
        kind.zero_masked, kind.quantize_queries or kind.normalize, kind.quantized == torch.uint8, kind.precision,
        query_unit, document_unit,
    )  # fmt: skip
    return Form("quantized", tile, blocks, constants, (tile.num_warps, tile.num_stages, registers))
