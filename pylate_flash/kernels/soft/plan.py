"""How soft scores and their gradients are computed: every choice of a tile and a grid, made from a `Problem`.

Who serves a call, kernels or plain torch, is chosen in `kernels.select`, as of every operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from triton import knobs

from .. import select
from ..forms import REGISTERS, Form
from ..grids import Cuts, ForwardPlan
from ..tiles import (
    HOPPER_MAX_SIZE,
    HOPPER_NARROW_ROWS,
    Blocks,
    Tile,
    copied_by_16_bytes,
    divided_strides,
    hopper_tile,
    padded_query_length,
    power_of_two,
)

if TYPE_CHECKING:
    from ...problem import Problem

# Elements of an embedding, as a power of two, up to which a tile holds it whole, by the bytes of each; a longer one is
# read in blocks of so many bytes. Exact products of float32 are computed outside tensor cores, unrolled: of longer rows
# they leave no registers.
_MAX_WHOLE = {2: 256, 4: 32}
_PART_BYTES = 128
# Elements of a gradient that a program sums, of an embedding that is read in parts.
_SPLIT_OWNED = 64
# Query rows x document tokens of the forward. Two programs find room on a processor, and the exponentials of one are
# computed beside the products of the other.
_FORWARD = Tile(128, 64, 4, 3)
_FORWARD_WIDE = Tile(64, 32, 4, 2)
# Tokens or rows whose gradient a program keeps in registers, and those that it walks at once. With two stages, a tile
# is asked for when the one before it has been multiplied, and waited for at once. Twice as many rows take what is
# walked from L2 half as often, but fewer programs hide each other's waits: gradients of documents and queries at
# 64 x 64, 1024 x 1024, take 3.62 and 3.69 ms where three programs share a processor, and of 128 rows 3.98 and 3.74
# where two do.
_GRADIENT = Tile(64, 64, 4, 3)
_GRADIENT_WIDE = Tile(64, 32, 4, 2)
_GRADIENT_PER_PROCESSOR = 3
# Query rows from which on the Hopper kernel serves: one part of it has so many. Columns of its narrowest product.
_HOPPER_MIN_ROWS = 64
_NARROWEST = 16
# Documents that one program of the forward walks at most, programs that fill a processor, and programs per processor
# at which the documents of a query's gradient are shared out no more.
_LONGEST_RUN = 16
_PER_PROCESSOR = 2
# Documents that a program of the queries' gradient walks at least.
_SMALLEST_SHARE = 8


class Operands(NamedTuple):
    """How a kernel holds embeddings: whole in one block, or `split`, read block by block."""

    block: int
    split: bool
    # Elements of a gradient that one program sums, and programs that share an embedding.
    owned: int
    parts: int


class GradientPlan(NamedTuple):
    """How the gradients of soft scores are computed.

    Where the probabilities are computed `once`, the programs that own documents leave partial sums of the gradient of
    the queries, `documents_at_once` in memory; else other programs own query rows, and `n_splits` of them share the
    documents.
    """

    once: bool
    documents: Tile
    queries: Tile
    operands: Operands
    # From one query row to the next one, and those of the documents, divided by the units.
    strides: tuple[int, ...]
    units: tuple[int, int]
    # Programs that own the tokens of a document.
    n_blocks: int
    documents_at_once: int
    n_splits: int
    # Whether probabilities are rounded to bfloat16 before they are multiplied.
    rounded: bool


def soft_forward_plan(problem: Problem) -> ForwardPlan:
    """Choose the kernel, the tile and the grid of the forward."""
    hopper = _hopper_plan(problem)
    return _plain_plan(problem, hopper) if isinstance(hopper, str) else hopper


def _hopper_plan(problem: Problem) -> ForwardPlan | str:
    """The plan of the Hopper kernel, or why it does not serve the problem."""
    kind, capability = problem.kind, select.architecture(problem.device)[0]
    rows = problem.n_queries // problem.groups * padded_query_length(problem.query_length, False)[0]
    # Exponentials take longer than winners do: they have their tiles.
    tile = hopper_tile(capability, kind.size, kind.dtype.itemsize, rows <= HOPPER_NARROW_ROWS, False, True)
    if tile is None:
        return f"the Hopper kernel needs such a GPU, half precision and at most {HOPPER_MAX_SIZE} dimensions"
    if problem.has_candidates:
        return "packed queries have candidates of their own"
    if rows < _HOPPER_MIN_ROWS:
        return f"fewer than {_HOPPER_MIN_ROWS} query tokens meet a document"
    if not (problem.aligned and copied_by_16_bytes(kind.size, problem.document_strides)):
        return "documents cannot be copied 16 bytes at a time"
    tail = tile.columns
    if kind.documents_mask is None and not problem.packed:
        # All documents leave as many tokens after whole tiles.
        left = problem.document_length % tile.columns
        tail = max(_NARROWEST, power_of_two(left)) if left else 0
    reason = f"at least {_HOPPER_MIN_ROWS} query tokens meet a document"
    return select.hopper_plan(problem, tile, tail, reason, soft=True)


def _plain_plan(problem: Problem, reason: str) -> ForwardPlan:
    kind, operands = problem.kind, operands_of(problem)
    padded, group = padded_query_length(problem.query_length, False)
    rows = problem.n_queries // problem.groups * padded
    tile = _tile(problem, _FORWARD, _FORWARD_WIDE)
    tile = _narrowed(tile, rows, problem.document_length)
    group = min(group, tile.rows)
    row_blocks = -(-rows // tile.rows)
    per_query = problem.max_candidates if problem.has_candidates else problem.n_documents
    slots = _PER_PROCESSOR * select.architecture(problem.device)[1]
    run = max(1, min(_LONGEST_RUN, per_query * row_blocks * problem.groups // slots))
    strides, *units = divided_strides(problem.query_strides, problem.document_strides)
    constants = (
        kind.size, operands.block, operands.split, tile.rows, tile.columns, group, problem.packed,
        problem.has_candidates, kind.queries_mask is not None, kind.weighted, kind.documents_mask is not None,
        kind.zero_masked, kind.normalize, kind.precision, *units,
    )  # fmt: skip
    blocks = Blocks(operands.block, 0, operands.split)
    form = Form("soft", tile, blocks, constants, (tile.num_warps, tile.num_stages, None))
    return ForwardPlan(
        form, strides, padded, run, -(-per_query // run) or 1, per_query, Cuts(), False, row_blocks,
        padded // group, reason,
    )  # fmt: skip


def soft_gradient_plan(problem: Problem, both: bool, max_scratch_bytes: int) -> GradientPlan:
    """Choose how gradients are computed; `both`: of queries and of documents."""
    processors = select.architecture(problem.device)[1]
    tile, length = _tile(problem, _GRADIENT, _GRADIENT_WIDE), problem.document_length
    queries = _narrowed(tile, problem.rows, length)
    documents = _narrowed(tile, length, problem.rows)
    n_blocks = -(-length // documents.rows)
    # Bytes of the partial sums that one document of each group leaves. Packed ones do not have as many programs each.
    leaves = n_blocks * problem.n_queries * problem.query_length * problem.size * 4
    at_once = min(problem.n_documents, max_scratch_bytes // leaves)
    fill = -(-processors // (n_blocks * problem.groups))
    once = both and not problem.packed and at_once >= min(problem.n_documents, fill)
    walked = problem.max_candidates if problem.has_candidates else problem.n_documents
    operands = operands_of(problem)
    programs = -(-problem.rows // queries.rows) * problem.groups * operands.parts
    n_splits = max(1, min(_PER_PROCESSOR * processors // programs, walked // _SMALLEST_SHARE))
    strides, *units = divided_strides(problem.query_strides, problem.document_strides)
    rounded = problem.dtype != torch.float32 and not knobs.runtime.interpret
    return GradientPlan(
        once, documents, queries, operands, strides[1:], (units[0], units[1]), n_blocks,
        at_once if once else problem.n_documents, n_splits, rounded,
    )  # fmt: skip


def gradient_warps(tile: Tile) -> tuple[int, int, int | None]:
    """Warps, stages and registers of a thread of a program that computes gradients."""
    registers = None
    if tile == _GRADIENT:
        # They are given out by 8.
        registers = REGISTERS // (_GRADIENT_PER_PROCESSOR * 32 * tile.num_warps) & -8
    return tile.num_warps, tile.num_stages, registers


def operands_of(problem: Problem) -> Operands:
    """How tiles hold the embeddings of a problem."""
    item, whole = problem.dtype.itemsize, max(16, power_of_two(problem.size))
    if whole <= _MAX_WHOLE[item]:
        return Operands(whole, False, whole, 1)
    return Operands(_PART_BYTES // item, True, _SPLIT_OWNED, -(-problem.size // _SPLIT_OWNED))


def _tile(problem: Problem, narrow: Tile, wide: Tile) -> Tile:
    """The tile for the problem's embeddings: `wide` where one takes more than 256 bytes, or is of float32."""
    return wide if problem.dtype == torch.float32 or operands_of(problem).block > 128 else narrow


def _narrowed(tile: Tile, rows: int, columns: int) -> Tile:
    """The tile with no more rows and columns than there are, as powers of two from 16 on."""
    rows, columns = (max(16, min(most, power_of_two(n))) for most, n in ((tile.rows, rows), (tile.columns, columns)))
    warps = min(tile.num_warps, max(1, rows // 16))
    return tile._replace(rows=rows, columns=columns, num_warps=warps)
