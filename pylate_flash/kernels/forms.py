"""What the kernels of the forward are compiled for, made once for each kind of problem."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from .tiles import (
    HOPPER_MAX_SIZE,
    Blocks,
    HopperTile,
    Tile,
    embedding_blocks,
    hopper_blocks,
    hopper_tile,
    shared_memory,
    single_tile,
    stacked_tile,
)

if TYPE_CHECKING:
    from ..problem import Kind

# Registers of a processor.
REGISTERS = 1 << 16


# Programs of the single kernel for which a processor has registers, and what each takes of its shared memory besides
# operands.
_SINGLE_PROGRAMS = 7
_SINGLE_TAKES = 1536
# Documents that one of them walks, at most: where all programs run at once, and where they do not. Microseconds with 2
# and 16: 34.3 and 31.2 at 1 x 1000, 32 x 300; 186 and 185 at 1 x 10000; 200 and 210 at 1 x 16000, 32 x 512, d = 48.
_SINGLE_LONGEST = 16, 2
# Programs of a processor, and the same, where its loops are not one: documents differ in length, which short runs even
# out, or `_flattened` says so.
_SINGLE_UNLIKE = 4, 2, 2


class Form(NamedTuple):
    """A kernel of the forward, and all that it is compiled for.

    `kernel` is "single" (one short query at a time), "stacked" (the tokens of all queries as one tall matrix) or
    "hopper" (the same for compute capability 9.0).
    """

    kernel: str
    tile: Tile | HopperTile
    blocks: Blocks
    # The kernel's constants, in its order; warps, stages and registers.
    constants: tuple
    warps: tuple[int, int, int | None]


@functools.cache
def single_form(
    capability: int, kind: Kind, columns: int, in_pieces: bool, query_unit: int, document_unit: int
) -> Form:
    item, packed = kind.dtype.itemsize, kind.cu_seqlens is not None
    blocks = embedding_blocks(capability, kind.size, item)
    tile = single_tile(capability, kind.size, item, columns, packed)
    constants = (
        kind.size, *blocks[:2], tile.rows, tile.columns, blocks.split, _flattened(capability, blocks), packed,
        in_pieces, kind.candidates is not None, kind.queries_mask is not None, kind.weighted,
        kind.documents_mask is not None, kind.zero_masked, kind.normalize, kind.with_winners, kind.precision,
        query_unit, document_unit, kind.offset_unit,
    )  # fmt: skip
    return Form("single", tile, blocks, constants, (tile.num_warps, tile.num_stages, None))


def _flattened(capability: int, blocks: Blocks) -> bool:
    """Whether the single kernel's loops, over documents and their tokens, are one.

    Triton 3.6 does not compile them so for compute capability 10.0, where products lie in tensor memory.
    """
    return not blocks.split and capability < 10


@functools.cache
def single_runs(capability: int, kind: Kind, columns: int) -> tuple[int, int, int]:
    """Programs of the single kernel on a processor, and documents that one walks at most: in one wave, in several."""
    item = kind.dtype.itemsize
    blocks = embedding_blocks(capability, kind.size, item)
    unlike = kind.cu_seqlens is not None or kind.documents_mask is not None
    if unlike or not _flattened(capability, blocks):
        return _SINGLE_UNLIKE
    tile = single_tile(capability, kind.size, item, columns, False)
    rows = tile.rows * tile.num_stages
    if capability == 9 and tile.rows >= 64:
        # An operand of Hopper's products.
        rows += tile.columns
    programs = shared_memory(capability) // (rows * blocks.held * item + _SINGLE_TAKES)
    return max(1, min(_SINGLE_PROGRAMS, programs)), *_SINGLE_LONGEST


@functools.cache
def tile_of_hopper(capability: int, kind: Kind, narrow: bool, long: bool) -> tuple[HopperTile | None, str]:
    """The Hopper kernel's tile, or None and why, where query rows are few (`narrow`) and documents `long`, or not."""
    tile = hopper_tile(capability, kind.size, kind.dtype.itemsize, narrow, long, kind.with_winners)
    if tile is not None or capability != 9:
        return tile, ""
    return None, f"; the Hopper kernel takes half precision and at most {HOPPER_MAX_SIZE} dimensions"


@functools.cache
def hopper_form(
    capability: int,
    kind: Kind,
    tile: HopperTile,
    tail: int,
    group: int,
    query_unit: int,
    document_unit: int,
    soft: bool = False,
) -> Form:
    quantized = kind.quantized is not None
    blocks = hopper_blocks(kind.size, 1 if quantized else 2)
    constants = (
        kind.size, *blocks[:2], tile.rows, tile.columns, tail, group, tile.num_stages, tile.parts,
        kind.cu_seqlens is not None, kind.queries_mask is not None, kind.weighted, kind.documents_mask is not None,
        kind.zero_masked, kind.normalize or quantized, kind.with_winners, soft, query_unit, document_unit,
        kind.offset_unit,
    )  # fmt: skip
    return Form("hopper", tile, blocks, constants, (4, 1, None))


@functools.cache
def tile_of_stacked(capability: int, kind: Kind, rows: int) -> Tile:
    return stacked_tile(capability, kind.size, kind.dtype.itemsize, rows, kind.with_winners)


@functools.cache
def stacked_form(
    capability: int, kind: Kind, tile: Tile, in_pieces: bool, group: int, query_unit: int, document_unit: int
) -> Form:
    item = kind.dtype.itemsize
    blocks = embedding_blocks(capability, kind.size, item)
    registers = None
    if in_pieces and not blocks.split and not kind.normalize and item == 2:
        # Two programs share a processor. Left alone, ptxas takes a few registers more for the pieces than that leaves.
        registers = REGISTERS // (2 * 32 * tile.num_warps)
    constants = (
        kind.size, *blocks[:2], tile.rows, tile.columns, group, blocks.split, kind.cu_seqlens is not None, in_pieces,
        kind.queries_mask is not None, kind.weighted, kind.documents_mask is not None, kind.zero_masked,
        kind.normalize, kind.with_winners, kind.precision, query_unit, document_unit, kind.offset_unit,
    )  # fmt: skip
    return Form("stacked", tile, blocks, constants, (tile.num_warps, tile.num_stages, registers))
