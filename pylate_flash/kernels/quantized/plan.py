"""The tile and the grid of a call with quantized documents, made from its `Problem`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from .. import select
from ..forms import REGISTERS, Form
from ..grids import ForwardPlan, Shares, tall_plan
from ..tiles import (
    HOPPER_NARROW_ROWS,
    Blocks,
    HopperTile,
    Tile,
    copied_by_16_bytes,
    fitted,
    padded_query_length,
    power_of_two,
)
from ..versions import has_gluon

if TYPE_CHECKING:
    from ...problem import Kind, Problem

# Query rows x document tokens. Every block of rows reads all documents out of L2, so a block has many rows. Few rows,
# as of one short query, take less of a tile, and a wider one.
_TILE = Tile(256, 64, 8, 4)
_FEW_ROWS = Tile(64, 128, 4, 4)
# Bytes of an embedding, of the type that is multiplied, which a tile holds whole, and of a block of a longer one.
_MAX_ROW_BYTES = 256
_SPLIT_ROW_BYTES = 128
# Tensor cores multiply at least so many elements of 8 bits at a time.
_MIN_BLOCK = 32
# Documents that one program walks, at most, or work of its cut, and programs of a processor, by the shared memory that
# a tile takes.
_LONGEST_RUN = 16
_LARGEST_CUT = 4096
_PER_PROCESSOR = {_TILE.num_warps: 2, _FEW_ROWS.num_warps: 3}
_REASON = "documents are quantized"
# The same of the Hopper kernel, which serves products of 8 bits. Of a tile of 256 x 128 at d = 128, products take the
# tensor cores 1024 cycles, and the loop has 902 instructions for a scheduler with int8 and 646 with fp8; of 256 x 64,
# 512 cycles, and 506 and 378, or in four parts 728 and 484: 0.267 and 0.263 ms at 1 x 1000, 1024 x 1024, and 0.304 and
# 0.278, or 0.340 and 0.340, where `_TILE` takes 0.451 and 0.421. Half as many rows of longer embeddings fit into
# registers, and 5 tiles of 256 elements into shared memory.
_HOPPER = HopperTile(256, 128, 2, 6)
_HOPPER_NARROW = HopperTile(128, 128, 2, 6)
_HOPPER_LONG = HopperTile(128, 128, 2, 5)
_HOPPER_MAX_SIZE = 256
# Query rows from which on it serves: a part multiplies 64. Fewer are bound by memory: 0.130 ms by `_FEW_ROWS` and 0.187
# by this one at 1 x 10000, 32 x 300.
_HOPPER_MIN_ROWS = 65
# Columns of the product of a document's last tokens, where they fit into half a tile.
_HOPPER_TAIL = 64


def quantized_plan(problem: Problem) -> ForwardPlan:
    """Choose the kernel, the tile and the grid of a call with quantized documents.

    Packed documents are shared out by their tokens, whole ones; those of candidates by their number.
    """
    hopper = _hopper_plan(problem)
    return _stacked_plan(problem, hopper) if isinstance(hopper, str) else hopper


def _hopper_plan(problem: Problem) -> ForwardPlan | str:
    """The plan of the Hopper kernel, or why it does not serve the problem."""
    kind = problem.kind
    capability, _ = select.architecture(kind.device)
    if capability != 9 or not has_gluon():
        return _REASON
    if not kind.quantize_queries or kind.quantized == torch.uint8:
        return _REASON + "; the Hopper kernel multiplies int8 or fp8 by the same"
    if kind.size > _HOPPER_MAX_SIZE:
        return _REASON + f"; the Hopper kernel takes at most {_HOPPER_MAX_SIZE} dimensions"
    if problem.has_candidates:
        return _REASON + "; packed documents are candidates"
    rows = problem.n_queries // problem.groups * padded_query_length(problem.query_length, False)[0]
    if rows < _HOPPER_MIN_ROWS:
        return _REASON + f"; fewer than {_HOPPER_MIN_ROWS} query tokens meet a document"
    if not (problem.aligned and copied_by_16_bytes(kind.size, problem.document_strides, 1)):
        return _REASON + "; documents cannot be copied 16 bytes at a time"
    tile = _HOPPER_NARROW if rows <= HOPPER_NARROW_ROWS else _HOPPER
    if kind.size > 128:
        tile = _HOPPER_LONG
    tail = _HOPPER_TAIL
    if kind.documents_mask is None and not problem.packed and not 0 < problem.document_length % tile.columns <= tail:
        tail = 0
    return select.hopper_plan(_with_values(problem), tile, tail, _REASON + ", on a Hopper GPU")


def _stacked_plan(problem: Problem, reason: str) -> ForwardPlan:
    kind = problem.kind
    capability, processors = select.architecture(kind.device)
    rows = problem.n_queries // problem.groups * padded_query_length(problem.query_length, False)[0]
    tile = _tile(capability, kind, min(_TILE.rows, power_of_two(rows)))

    def make(_: bool, *sizes: int) -> Form:
        return _form(capability, kind, tile, *sizes)

    shares = Shares(_PER_PROCESSOR[tile.num_warps], _LONGEST_RUN, _LARGEST_CUT)
    if kind.quantize_queries and not _quantizes_rows(tile, _blocks(kind)):
        problem = _with_values(problem)
    return tall_plan(problem, processors, tile, shares, make, reason)


def quantized_before(problem: Problem, plan: ForwardPlan) -> bool:
    """Whether a kernel of its own quantizes queries, before the one that scores them."""
    return problem.kind.quantize_queries and not (
        plan.kernel == "quantized" and _quantizes_rows(plan.tile, plan.form.blocks)
    )


def _quantizes_rows(tile: Tile | HopperTile, blocks: Blocks) -> bool:
    """Whether the stacked kernel quantizes query rows itself, each program those that it scores.

    That spares the host a launch, and the GPU waiting for it: one query and 100 documents (32 x 180) take 0.091 ms in
    place of 0.113, of the GPU alone 0.0089 and 0.0117. Of many rows each program has more to quantize, and there are
    more programs of the same rows: by the Hopper kernel 512 x 512 (32 x 180) would take 0.473 in place of 0.449.
    """
    return tile.rows <= _FEW_ROWS.rows and not blocks.split


def _with_values(problem: Problem) -> Problem:
    """The problem of queries that were quantized before, one row after the other."""
    return problem._replace(query_strides=(problem.query_length * problem.size, problem.size))


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
    quantizes = kind.quantize_queries and _quantizes_rows(tile, blocks)
    constants = (
        kind.size, blocks.first, tile.rows, tile.columns, group, blocks.split, kind.cu_seqlens is not None,
        kind.candidates is not None, kind.queries_mask is not None, kind.weighted, kind.documents_mask is not None,
        kind.zero_masked, quantizes, kind.normalize, kind.quantize_queries or kind.normalize,
        kind.quantized == torch.uint8, kind.precision, query_unit, document_unit,
    )  # fmt: skip
    return Form("quantized", tile, blocks, constants, (tile.num_warps, tile.num_stages, registers))
