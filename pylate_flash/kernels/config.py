"""What the kernels of the forward are specialised on: tiles, blocks of embeddings, constants.

All of it follows from the kind of a problem and a few sizes that are looked at coarsely, and is kept for each.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, NamedTuple

import torch

from . import tables
from .tables import Blocks, HopperTile, Tile
from .versions import has_gluon

if TYPE_CHECKING:
    from ..problem import Kind

_INT32_MAX = 2**31 - 1


@functools.lru_cache(maxsize=1024)
def padded_query_length(query_length: int, unpadded: bool) -> tuple[int, int]:
    """Rows that a query takes when stacked, and the largest of `tables.GROUPS` that divides them.

    Every sum that the kernel takes so lies within one query, and is all of it for the lengths in use. There are few
    groups, because each is compiled for itself. `unpadded`: a query may be summed row by row.
    """
    lengths = [-(-query_length // padding) * padding for padding in tables.PADDINGS]
    few = [padded for padded in lengths if padded - query_length <= tables.MOST_PADDING * padded]
    if not few and (unpadded or query_length == 1):
        return query_length, 1
    padded = few[0] if few else lengths[-1]
    return padded, max(group for group in tables.GROUPS if padded % group == 0)


@functools.lru_cache(maxsize=1024)
def embedding_blocks(capability: int, size: int, element_size: int) -> Blocks:
    """How tiles hold embeddings of `size` elements."""
    whole = max(16, tables.power_of_two(size))
    split = whole * element_size > tables.MAX_ROW_BYTES
    if element_size == 2 and tables.MIN_IN_TWO <= size <= tables.MAX_IN_TWO:
        blocks = Blocks(whole // 2, max(16, tables.power_of_two(size - whole // 2)), False)
        if blocks.held < whole and (
            not split or _fits(tables.STACKED_IN_TWO[-1], capability, blocks.held * element_size)
        ):
            return blocks
    return Blocks(tables.SPLIT_ROW_BYTES // element_size if split else whole, 0, split)


def stacked_tile(capability: int, size: int, element_size: int, rows: int, with_winners: bool) -> Tile:
    """Tile for `rows` stacked query rows of `size` elements, on compute capability major `capability`.

    Winners take registers, and with 256 rows those spill: 5.78 ms, and 4.82 ms with 128, at 1024 x 1024, 32 x 180. So
    do two sums of a wide tile.
    """
    blocks = embedding_blocks(capability, size, element_size)
    split, row_bytes = blocks.split, blocks.held * element_size
    tile = tables.STACKED_SPLIT if split else tables.STACKED
    if row_bytes > tables.MAX_ROW_BYTES:
        tile = next(tile for tile in tables.STACKED_IN_TWO if _fits(tile, capability, row_bytes))
    if with_winners:
        tile = tile._replace(rows=min(tile.rows, 128))
    if split and (with_winners or size > tables.SUMMED_EMBEDDING or element_size == 4):
        tile = tile._replace(columns=128, num_stages=4)
    # Fewer rows take no less time, and each number of them would be compiled for itself.
    tile = tile._replace(rows=max(tables.MIN_STACKED_ROWS, min(tile.rows, tables.power_of_two(rows))))
    return fitted(tile, capability, row_bytes, split)


@functools.lru_cache(maxsize=1024)
def hopper_blocks(size: int, element_size: int = 2) -> Blocks:
    """How the Hopper kernel holds embeddings of `size` elements, of 2 bytes or of 1."""
    # Rows of 32 bytes are the narrowest that its tensor cores take.
    least = 32 // element_size
    whole = max(least, tables.power_of_two(size))
    if element_size == 2:
        blocks = embedding_blocks(9, size, 2)
        return Blocks(whole, 0, False) if blocks.split else blocks
    blocks = Blocks(whole // 2, max(least, tables.power_of_two(size - whole // 2)), False)
    return blocks if size >= tables.MIN_IN_TWO and blocks.held < whole else Blocks(whole, 0, False)


def hopper_tile(
    capability: int, size: int, element_size: int, narrow: bool, long: bool, with_winners: bool
) -> HopperTile | None:
    """Tile of the Hopper kernel for stacked query rows of `size` elements, or None where it serves none.

    `narrow`: there are at most `tables.HOPPER_NARROW_ROWS` rows. `long`: documents are padded to at least
    `tables.HOPPER_WIDE_MIN_LENGTH`.
    """
    if capability != 9 or element_size != 2 or size > tables.HOPPER_MAX_SIZE or not has_gluon():
        return None
    if size <= 128:
        return tables.HOPPER_NARROW if narrow else tables.HOPPER_WINNERS if with_winners else tables.HOPPER
    if size <= 256:
        return tables.HOPPER_LONG_WIDE if long and not narrow and not with_winners else tables.HOPPER_LONG
    return tables.HOPPER_LONGEST


@functools.lru_cache(maxsize=1024)
def hopper_tail(tile: HopperTile, document_length: int) -> int:
    """Columns of a narrower product for the last tokens of a document (0: there is none), where that saves much.

    Longer embeddings leave less of their time to what follows a product.
    """
    left = document_length % tile.columns
    columns = document_length - left + tile.columns
    tail = next((tail for tail in tables.HOPPER_TAILS if 0 < left <= tail), 0)
    return (
        tail
        if tile in (tables.HOPPER, tables.HOPPER_NARROW) and tile.columns - tail >= tables.HOPPER_TAIL_SAVES * columns
        else 0
    )


def stride_unit(strides: tuple[int, ...]) -> int:
    """A power of two that divides all strides, which kernels take divided by it and multiply again.

    All that Triton knows of a stride is whether it is a multiple of 16 elements, and then the unit is 1. Of others,
    such as those of embeddings of 72, the product tells it how many elements it may load at a time; else that is one.
    """
    together = functools.reduce(operator.or_, strides)
    # A kernel multiplies in 32 bits what fits into them.
    return together & -together if together & 15 and max(strides) <= _INT32_MAX else 1


def divided_strides(queries: tuple[int, ...], documents: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
    """The strides of queries and of documents, divided by their units, and these units."""
    query, query_token = queries
    group, document, document_token = documents
    if not (query | query_token | group | document | document_token) & 15:
        return (query, query_token, group, document, document_token), 1, 1
    of_queries, of_documents = stride_unit(queries), stride_unit(documents)
    divided = [stride // of_queries for stride in queries] + [stride // of_documents for stride in documents]
    return tuple(divided), of_queries, of_documents


def copied_by_16_bytes(size: int, strides: tuple[int, ...], element_size: int = 2) -> bool:
    """Whether rows of `size` elements of 2 bytes or of 1 can be copied 16 bytes at a time, and Triton can tell."""
    unit = 16 // element_size
    return size % unit == 0 and (stride_unit(strides) == unit or not functools.reduce(operator.or_, strides) & 15)


def single_columns(query_length: int) -> int:
    """Columns of the tile of one query of `query_length` tokens."""
    return (
        tables.SINGLE.columns
        if query_length > tables.SINGLE.columns // 2
        else max(16, tables.power_of_two(query_length))
    )


def single_tile(capability: int, size: int, element_size: int, columns: int, packed: bool) -> Tile:
    """Tile of `columns` tokens of one query, of `size` elements, against its documents."""
    blocks = embedding_blocks(capability, size, element_size)
    split, row_bytes = blocks.split, blocks.held * element_size
    tile = tables.SINGLE_SPLIT if split else tables.SINGLE_PACKED if packed else tables.SINGLE
    if row_bytes > tables.MAX_ROW_BYTES:
        tile = tables.SINGLE_IN_TWO
    return fitted(tile._replace(columns=columns), capability, row_bytes, split)


def _fits(tile: Tile, capability: int, row_bytes: int) -> bool:
    """Whether a tile of whole embeddings keeps all its stages."""
    return fitted(tile, capability, row_bytes, False) == tile


def fitted(tile: Tile, capability: int, row_bytes: int, split: bool) -> Tile:
    """Take stages away until the operands fit into the architecture's shared memory.

    Whole query rows are loaded once, and tokens in stages; of split embeddings, both are.
    """
    budget = tables.shared_memory(capability)
    stages = tile.num_stages
    while stages > 1 and (tile.rows * (stages if split else 1) + tile.columns * stages) * row_bytes > budget:
        stages -= 1
    return tile._replace(num_stages=stages)


class Config(NamedTuple):
    """A kernel of the forward, and all that it is specialised on.

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
def single_config(
    capability: int, kind: Kind, columns: int, in_pieces: bool, query_unit: int, document_unit: int
) -> Config:
    item, packed = kind.dtype.itemsize, kind.cu_seqlens is not None
    blocks = embedding_blocks(capability, kind.size, item)
    tile = single_tile(capability, kind.size, item, columns, packed)
    constants = (
        kind.size, *blocks[:2], tile.rows, tile.columns, blocks.split, _flattened(capability, blocks), packed,
        in_pieces, kind.candidates is not None, False, False, kind.queries_mask is not None, kind.weighted,
        kind.documents_mask is not None, kind.zero_masked, kind.normalize, kind.with_winners, kind.precision,
        query_unit, document_unit, kind.offset_unit,
    )  # fmt: skip
    return Config("single", tile, blocks, constants, (tile.num_warps, tile.num_stages, None))


def _flattened(capability: int, blocks: Blocks) -> bool:
    """Whether the single kernel's loops, over documents and their tokens, are one.

    Triton 3.6 does not compile them so for compute capability 10.0, where products lie in tensor memory.
    """
    return not blocks.split and capability < 10


@functools.cache
def single_runs(capability: int, kind: Kind, columns: int) -> tuple[int, int, int]:
    """Programs of the single kernel on an SM, and documents that one walks at most: in one wave, in several."""
    item = kind.dtype.itemsize
    blocks = embedding_blocks(capability, kind.size, item)
    unlike = kind.cu_seqlens is not None or kind.documents_mask is not None
    if unlike or not _flattened(capability, blocks):
        return tables.SINGLE_UNLIKE
    tile = single_tile(capability, kind.size, item, columns, False)
    rows = tile.rows * tile.num_stages
    if capability == 9 and tile.rows >= 64:
        # An operand of Hopper's products.
        rows += tile.columns
    programs = tables.shared_memory(capability) // (rows * blocks.held * item + tables.SINGLE_TAKES)
    return max(1, min(tables.SINGLE_PROGRAMS, programs)), *tables.SINGLE_LONGEST


@functools.cache
def tile_of_hopper(capability: int, kind: Kind, narrow: bool, long: bool) -> tuple[HopperTile | None, str]:
    """The Hopper kernel's tile, or None and why, where query rows are few (`narrow`) and documents `long`, or not."""
    tile = hopper_tile(capability, kind.size, kind.dtype.itemsize, narrow, long, kind.with_winners)
    if tile is not None or capability != 9:
        return tile, ""
    return None, f"; the Hopper kernel takes half precision and at most {tables.HOPPER_MAX_SIZE} dimensions"


@functools.cache
def hopper_config(
    capability: int,
    kind: Kind,
    tile: HopperTile,
    tail: int,
    group: int,
    query_unit: int,
    document_unit: int,
    soft: bool = False,
) -> Config:
    quantized = kind.quantized is not None
    blocks = hopper_blocks(kind.size, 1 if quantized else 2)
    constants = (
        kind.size, *blocks[:2], tile.rows, tile.columns, tail, group, tile.num_stages, tile.parts,
        kind.cu_seqlens is not None, kind.queries_mask is not None, kind.weighted, kind.documents_mask is not None,
        kind.zero_masked, kind.normalize or quantized, kind.with_winners, soft, query_unit, document_unit,
        kind.offset_unit,
    )  # fmt: skip
    return Config("hopper", tile, blocks, constants, (4, 1, None))


@functools.cache
def tile_of_stacked(capability: int, kind: Kind, rows: int) -> Tile:
    return stacked_tile(capability, kind.size, kind.dtype.itemsize, rows, kind.with_winners)


@functools.cache
def stacked_config(
    kind: Kind,
    tile: Tile,
    blocks: Blocks,
    registers: int | None,
    documents: str,
    in_pieces: bool,
    group: int,
    query_unit: int,
    document_unit: int,
    nbits: int = 0,
    soft: bool = False,
) -> Config:
    """`documents`: which ones are a program's (`forward.stacked`); `nbits`: of residual codes."""
    normalize = kind.normalize and not nbits
    constants = (
        kind.size, *blocks[:2], tile.rows, tile.columns, group, blocks.split, documents, kind.cu_seqlens is not None,
        in_pieces, kind.queries_mask is not None, kind.weighted, kind.documents_mask is not None, kind.zero_masked,
        normalize, normalize or kind.quantize_queries, kind.quantize_queries and quantizes_rows(tile, blocks),
        kind.quantized is not None, kind.quantized == torch.uint8, nbits, kind.with_winners, soft, kind.precision,
        query_unit, document_unit, kind.offset_unit,
    )  # fmt: skip
    return Config("stacked", tile, blocks, constants, (tile.num_warps, tile.num_stages, registers))


@functools.cache
def plain_registers(kind: Kind, tile: Tile, blocks: Blocks, in_pieces: bool) -> int | None:
    """Registers of a thread, so that two programs share an SM, where ptxas takes a few more for the pieces."""
    if in_pieces and not blocks.split and not kind.normalize and kind.dtype.itemsize == 2:
        return tables.REGISTERS // (2 * 32 * tile.num_warps)
    return None


def padded_blocks(size: int, element_size: int, least: int) -> Blocks:
    """One block of at least so many elements, or an embedding that is split."""
    whole = max(least, tables.power_of_two(size))
    split = whole * element_size > tables.MAX_ROW_BYTES
    return Blocks(tables.SPLIT_ROW_BYTES // element_size if split else whole, 0, split)


def quantizes_rows(tile: Tile | HopperTile, blocks: Blocks) -> bool:
    """Whether the stacked kernel quantizes query rows itself, each program those that it scores.

    That spares the host a launch, and the GPU waiting for it: one query and 100 documents (32 x 180) take 0.091 ms in
    place of 0.113, of the GPU alone 0.0089 and 0.0117. Of many rows each program has more to quantize, and there are
    more programs of the same rows: by the Hopper kernel 512 x 512 (32 x 180) would take 0.473 in place of 0.449.
    """
    return tile.rows <= tables.QUANTIZED_FEW_ROWS.rows and not blocks.split


@functools.cache
def quantized_config(capability: int, kind: Kind, rows: int) -> tuple[Tile, Blocks, int | None]:
    """Tile, blocks and registers of the stacked kernel for quantized documents and so many query rows."""
    item = 1 if kind.quantize_queries else kind.dtype.itemsize
    blocks, few = padded_blocks(kind.size, item, tables.QUANTIZED_MIN_BLOCK), tables.QUANTIZED_FEW_ROWS
    tile = few if rows <= few.rows else tables.QUANTIZED_TILE._replace(rows=rows)
    tile = fitted(tile, capability, blocks.held * item, blocks.split)
    registers = None
    if capability == 9 and tile.num_warps == tables.QUANTIZED_TILE.num_warps and not blocks.split:
        # Two programs share an SM, so that products of one run beside the maxima of the other. That leaves a thread
        # 128 registers: a whole tile takes 120 with products of 8 bits. Left alone, ptxas takes more of others.
        registers = tables.REGISTERS // (2 * 32 * tile.num_warps)
    return tile, blocks, registers


@functools.cache
def residual_config(capability: int, kind: Kind, rows: int) -> tuple[Tile, Blocks, int | None]:
    """The same for residual codes."""
    item, few, half = kind.dtype.itemsize, tables.RESIDUAL_FEW_ROWS, kind.dtype != torch.float32
    blocks = residual_blocks(kind)
    tile = tables.RESIDUAL_TILE._replace(rows=rows) if rows > few.rows and half else few
    tile = fitted(tile, capability, blocks.held * item, blocks.split)
    registers = None
    if capability == 9 and half and not blocks.split:
        # Left alone, ptxas takes a few registers more than leave room for so many programs. They come by eights.
        programs = tables.RESIDUAL_PER_SM[tile.num_warps]
        registers = tables.REGISTERS // (programs * 32 * tile.num_warps) // 8 * 8
    return tile, blocks, registers


def residual_blocks(kind: Kind) -> Blocks:
    return padded_blocks(kind.size, kind.dtype.itemsize, tables.RESIDUAL_MIN_BLOCK)


class Parts(NamedTuple):
    """How the kernels of soft MaxSim and of chosen tokens hold embeddings: in one block, or `split`."""

    block: int
    split: bool
    # Elements of a gradient that one program sums, and programs that share an embedding.
    owned: int
    number: int


@functools.cache
def parts_of(size: int, element_size: int) -> Parts:
    whole = max(16, tables.power_of_two(size))
    if whole <= tables.SOFT_MAX_WHOLE[element_size]:
        return Parts(whole, False, whole, 1)
    owned = tables.SOFT_SPLIT_OWNED
    return Parts(tables.SPLIT_ROW_BYTES // element_size, True, owned, -(-size // owned))


def soft_tile(kind: Kind, narrow: Tile, wide: Tile) -> Tile:
    """The tile for embeddings of a kind: `wide` where one takes more than 256 bytes, or is of float32."""
    item = kind.dtype.itemsize
    return wide if item == 4 or parts_of(kind.size, item).block > 128 else narrow


def narrowed(tile: Tile, rows: int, columns: int) -> Tile:
    """The tile with no more rows and columns than there are, as powers of two from 16 on."""
    rows = max(16, min(tile.rows, tables.power_of_two(rows)))
    columns = max(16, min(tile.columns, tables.power_of_two(columns)))
    return tile._replace(rows=rows, columns=columns, num_warps=min(tile.num_warps, max(1, rows // 16)))


@functools.cache
def sparse_config(
    capability: int, kind: Kind, document_length: int, n_chosen: int, shared: bool, query_unit: int, document_unit: int
) -> Config:
    """The single kernel for so many chosen tokens of each query and document; `shared`: all queries meet these."""
    item = kind.dtype.itemsize
    parts = parts_of(kind.size, item)
    tile = soft_tile(kind, tables.SPARSE_TILE, tables.SPARSE_TILE_WIDE)
    most = min(tile.columns, tables.SPARSE_FEW_COLUMNS) if parts.split else tile.columns
    columns = max(16, min(most, tables.power_of_two(n_chosen)))
    tile = tile._replace(rows=max(16, min(tile.rows, tables.power_of_two(document_length))), columns=columns)
    if columns <= tables.SPARSE_FEW_COLUMNS:
        tile = tile._replace(num_warps=4)
    tile = fitted(tile, capability, parts.block * item, parts.split)
    constants = (
        kind.size, parts.block, 0, tile.rows, columns, parts.split, False, kind.cu_seqlens is not None, False, False,
        True, shared, kind.queries_mask is not None, kind.weighted, kind.documents_mask is not None, kind.zero_masked,
        kind.normalize, kind.with_winners, kind.precision, query_unit, document_unit, 0,
    )  # fmt: skip
    blocks = Blocks(parts.block, 0, parts.split)
    return Config("single", tile, blocks, constants, (tile.num_warps, tile.num_stages, None))
