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

# Query rows x document tokens; few rows, as of one short query, take half of the tile's. Of documents that are widened,
# a tile has half as many tokens, or products and what is widened need more registers than two programs find room for.
_TILE = Tile(128, 128, 8, 4)
_WIDENED = Tile(128, 64, 8, 4)
_FEW_ROWS = Tile(64, 128, 4, 4)
# Bytes of an embedding, of the type that is multiplied, which a tile holds whole, and of a block of a longer one.
_MAX_ROW_BYTES = 256
_SPLIT_ROW_BYTES = 128
# Tensor cores multiply at least so many elements of 8 bits at a time.
_MIN_BLOCK = 32
# Documents that one program walks, at most, and programs of a processor.
_LONGEST_RUN = 16
_PER_PROCESSOR = 2
_REASON = "documents are quantized"


def quantized_plan(problem: Problem) -> ForwardPlan:
    """Choose the tile and the grid of the kernel of quantized documents.

    Packed documents are shared out by their tokens, whole ones; those of candidates by their number.
    """
    kind, groups, n_documents = problem.kind, problem.groups, problem.n_documents
    capability, processors = select.architecture(kind.device)
    padded, group = padded_query_length(problem.query_length, False)
    rows = problem.n_queries // groups * padded
    tile = _tile(capability, kind, rows <= _FEW_ROWS.rows)
    group = min(group, tile.rows)
    row_blocks = -(-rows // tile.rows)
    cuts = Cuts(0, 0, 0)
    if problem.packed and not problem.has_candidates:
        cuts = select.cuts_of(problem, row_blocks, processors, _PER_PROCESSOR, largest=4096)
        run, n_runs, per_query = cuts.cut, cuts.number, n_documents
    else:
        per_query = problem.max_candidates if problem.has_candidates else n_documents
        run = select.run_length(per_query, row_blocks * groups, processors, _PER_PROCESSOR, _LONGEST_RUN)
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
def _tile(capability: int, kind: Kind, few: bool) -> Tile:
    item, blocks = 1 if kind.quantize_queries else kind.dtype.itemsize, _blocks(kind)
    tile = _FEW_ROWS if few else _TILE if kind.quantize_queries else _WIDENED
    return fitted(tile, capability, blocks.held * item, blocks.split)


@functools.cache
def _form(capability: int, kind: Kind, tile: Tile, group: int, query_unit: int, document_unit: int) -> Form:
    blocks = _blocks(kind)
    # Two programs share a processor, so that products of one run beside the maxima of the other. Left alone, ptxas
    # takes 193 registers, which leaves room for one; with 128 it spills none.
    registers = (
        REGISTERS // (2 * 32 * tile.num_warps) if capability == 9 and tile == _TILE and not blocks.split else None
    )
    constants = (
        kind.size, blocks.first, tile.rows, tile.columns, group, blocks.split, kind.cu_seqlens is not None,
        kind.candidates is not None, kind.queries_mask is not None, kind.weighted, kind.documents_mask is not None,
        kind.zero_masked, kind.quantize_queries or kind.normalize, kind.quantized == torch.uint8, kind.precision,
        query_unit, document_unit,
    )  # fmt: skip
    return Form("quantized", tile, blocks, constants, (tile.num_warps, tile.num_stages, registers))
