"""What the kernels of the forward are compiled for: tiles, blocks of embeddings, flags.

All of it follows from the kind of a problem and a few sizes that are looked at coarsely.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import torch

from ..problem import Kind, Problem, rounded_total
from . import tables
from .tiles import Blocks, HopperTile, Tile
from .versions import has_gluon

INT32_MAX = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Config(str):
    """A kernel of the forward and all that it is compiled for, its only constant; one object for each.

    `kernel` is "single" (one short query at a time), "stacked" (the tokens of all queries as one tall matrix), "hopper"
    (the same for compute capability 9.0) or "short" (short queries and documents of few bits or tokens). A string of
    its fields, because Triton writes constants as JSON for those who hear of what is compiled.
    """

    kernel: str
    tile: Tile | HopperTile
    blocks: Blocks
    # Triton's num_warps, num_stages and maxnreg; the Hopper kernel has warps and stages of its own besides.
    warps: tuple[int, int, int | None]
    # Elements of an embedding.
    size: int
    packed: bool
    has_queries_mask: bool
    weighted: bool
    has_documents_mask: bool
    zero_masked: bool
    normalize: bool
    # Documents in 8 bits, with offsets; query rows with scales.
    values: bool
    affine: bool
    scale_rows: bool
    with_argmax: bool
    precision: str
    # What the strides were divided by, and what offsets of packed documents count (`problem.Places`).
    query_unit: int
    document_unit: int
    offset_unit: int
    # Which documents are a program's (`forward.stacked`), and whether one may be in segments.
    documents: str = "run"
    in_segments: bool = False
    # Rows of a sum.
    group: int = 1
    # Whether the kernel quantizes query rows itself: the Hopper kernel in registers, the stacked one by way of memory.
    quantize_rows: bool = False
    # Bits of an element of residual codes; of the short kernel, 8 or 16 of what is none.
    nbits: int = 0
    # Of the short kernel: words of 4 bytes from a token to the next.
    row: int = 0
    # The log-sum-exp in place of the maximum.
    soft: bool = False
    # Of the Hopper kernel: columns of a document's last product, 0 where it is no narrower; and whether its first one,
    # of a whole tile, is begun before the sums of the document before are taken.
    tail: int = 0
    starts_early: bool = False
    # Whether documents are one stream of tokens (`forward.hopper_stream`).
    stream: bool = False
    # Whether elements are float32, which is taken apart into pairs of float16; where products may be of TF32, the upper
    # ones are all.
    pairs: bool = False
    # Of the single kernel: its two loops are one; columns are tokens chosen for each document; all queries meet these.
    flatten: bool = False
    chosen: bool = False
    shared: bool = False

    def __new__(cls, *fields: Any, **named: Any) -> Config:
        return super().__new__(cls, f"{fields} {named}")


@functools.cache
def config_of(
    kernel: str,
    kind: Kind,
    tile: Tile | HopperTile,
    blocks: Blocks,
    units: tuple[int, int],
    registers: int | None = None,
    **special: Any,
) -> Config:
    """The config for problems of a kind; `special` are the fields that have defaults."""
    warps: tuple[int, int, int | None]
    if isinstance(tile, HopperTile):
        # The first warps of a block copy, or multiply; eight decompress codes, or make pairs.
        warps = 8 if special.get("nbits") or special.get("pairs") else 4, 1, None
    else:
        warps = tile.num_warps, tile.num_stages, registers
    return Config(
        kernel,
        tile,
        blocks,
        warps,
        kind.size,
        kind.cu_seqlens is not None,
        kind.queries_mask is not None,
        kind.weighted,
        kind.documents_mask is not None,
        kind.zero_masked,
        kind.normalize,
        kind.quantized is not None,
        kind.quantized == torch.uint8,
        kind.normalize or kind.quantize_queries,
        kind.with_argmax,
        precision_of(kind),
        *units,
        kind.offset_unit,
        **special,
    )


def precision_of(kind: Kind) -> str:
    """Triton's name for the precision of products; those of half embeddings are exact in any.

    On Hopper, of float32 three products of TF32, which leave 22 of 24 bits: by FFMA, the rows and columns of `stacked`
    reach 14 TFLOP/s, and 3.40 ms in place of 1.01 at 32 x 1024, 32 x 180. Elsewhere they spill; many rows are taken
    apart (`kernels.apart`), and few are multiplied exactly.
    """
    if kind.dtype != torch.float32:
        return "ieee"
    if kind.float32_precision == "tf32":
        return "tf32"
    return "tf32x3" if tables.architecture(kind.device)[0] == 9 else "ieee"


def planned_length(problem: Problem, least: int = 0) -> int:
    """Tokens that the longest document is planned for; one program scores a longer one.

    Where only their total bounds those of packed documents, to plan for that would cost every call what few need: the
    longest is taken to have `least` tokens, or `tables.LIKELY_LENGTH` times the mean where that is more.
    """
    longest, number = problem.document_length, problem.n_documents
    if not problem.packed or number < 2 or longest < problem.n_tokens:
        return longest
    return min(longest, max(least, tables.LIKELY_LENGTH * -(-rounded_total(problem.n_tokens) // number)))


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


def whole_or_split(size: int, item: int, least: int, most_bytes: int = tables.MAX_ROW_BYTES) -> Blocks:
    """Embeddings of `size` elements of `item` bytes in one block of at least so many elements, or split."""
    whole = max(least, tables.power_of_two(size))
    split = whole * item > most_bytes
    return Blocks(tables.SPLIT_ROW_BYTES // item if split else whole, 0, split)


@functools.lru_cache(maxsize=1024)
def embedding_blocks(capability: int, size: int, item: int) -> Blocks:
    """How tiles hold embeddings of `size` elements of `item` bytes."""
    blocks = whole_or_split(size, item, 16)
    if item == 2 and tables.MIN_IN_TWO <= size <= tables.MAX_IN_TWO:
        whole = tables.power_of_two(size)
        two = Blocks(whole // 2, max(16, tables.power_of_two(size - whole // 2)), False)
        if two.held < whole and (not blocks.split or _fits(tables.STACKED_IN_TWO[-1], capability, two.held * item)):
            return two
    return blocks


@functools.lru_cache(maxsize=1024)
def hopper_blocks(size: int, item: int = 2) -> Blocks:
    """How the Hopper kernel holds embeddings of `size` elements, of 2 bytes or of 1."""
    if size > tables.HOPPER_MAX_SIZE:
        return Blocks(tables.SPLIT_ROW_BYTES // item, 0, True)
    # Rows of 32 bytes are the narrowest that its tensor cores take.
    least = 32 // item
    whole = max(least, tables.power_of_two(size))
    two = Blocks(whole // 2, max(least, tables.power_of_two(size - whole // 2)), False)
    if item == 2:
        two = embedding_blocks(9, size, 2)
    in_two = two.second > 0 and size >= tables.MIN_IN_TWO and two.held < whole
    return two if in_two else Blocks(whole, 0, False)


@functools.lru_cache(maxsize=1024)
def pair_blocks(size: int) -> Blocks:
    """How it holds either half of embeddings in float32, of which a lane of a warp has two elements at least."""
    return Blocks(max(64, tables.power_of_two(size)), 0, False)


def fitted(tile: Tile, capability: int, row_bytes: int, split: bool) -> Tile:
    """Take stages away until the operands fit into the architecture's shared memory.

    Whole query rows are loaded once, and tokens in stages; of split embeddings, both are.
    """
    budget = tables.shared_memory(capability)
    stages = tile.num_stages
    while stages > 1 and (tile.rows * (stages if split else 1) + tile.columns * stages) * row_bytes > budget:
        stages -= 1
    return tile._replace(num_stages=stages)


def _fits(tile: Tile, capability: int, row_bytes: int) -> bool:
    """Whether a tile of whole embeddings keeps all its stages."""
    return fitted(tile, capability, row_bytes, False) == tile


def narrowed(tile: Tile, rows: int, columns: int) -> Tile:
    """The tile with no more rows and columns than there are, as powers of two from 16 on."""
    rows = max(16, min(tile.rows, tables.power_of_two(rows)))
    columns = max(16, min(tile.columns, tables.power_of_two(columns)))
    return tile._replace(rows=rows, columns=columns, num_warps=min(tile.num_warps, max(1, rows // 16)))


@functools.lru_cache(maxsize=1024)
def stacked_tile(
    capability: int, size: int, item: int, rows: int, with_argmax: bool, blocks: Blocks | None = None
) -> Tile:
    """Tile for `rows` stacked query rows of `size` elements, on compute capability major `capability`.

    `blocks`: how it holds embeddings, None for `embedding_blocks`.

    The argmax takes registers, and with 256 rows those spill: 5.78 ms, and 4.82 ms with 128, at 1024 x 1024, 32 x 180.
    So do two sums of a wide tile.
    """
    blocks = blocks or embedding_blocks(capability, size, item)
    split, row_bytes = blocks.split, blocks.held * item
    tile = tables.STACKED_SPLIT if split else tables.STACKED
    if row_bytes > tables.MAX_ROW_BYTES:
        tile = next(tile for tile in tables.STACKED_IN_TWO if _fits(tile, capability, row_bytes))
    if with_argmax:
        tile = tile._replace(rows=min(tile.rows, 128))
    if split and (with_argmax or size > tables.SUMMED_EMBEDDING or item == 4):
        tile = tile._replace(columns=128, num_stages=4)
    # Fewer rows take no less time, and each number of them would be compiled for itself.
    tile = tile._replace(rows=max(tables.MIN_STACKED_ROWS, min(tile.rows, tables.power_of_two(rows))))
    return fitted(tile, capability, row_bytes, split)


@functools.cache
def hopper_tile(capability: int, size: int, item: int, narrow: bool, with_argmax: bool) -> HopperTile | None:
    """Tile of the Hopper kernel for stacked query rows of `size` elements, or None where it serves none.

    `narrow`: there are at most `tables.HOPPER_NARROW_ROWS` rows.
    """
    if capability != 9 or item != 2 or size > tables.HOPPER_MAX_SIZE or not has_gluon():
        return None
    if size <= 128:
        return tables.HOPPER_NARROW if narrow else tables.HOPPER_ARGMAX if with_argmax else tables.HOPPER
    return tables.HOPPER_LONG if size <= 256 else tables.HOPPER_LONGEST


@functools.lru_cache(maxsize=1024)
def hopper_tail(tile: HopperTile, document_length: int | None) -> int:
    """Columns of a narrower product for the last tokens of a document (0: there is none), where that saves much.

    Of packed or masked documents, which have lengths of their own (None), half leave no more than the widest takes.
    Longer embeddings leave less of their time to what follows a product.
    """
    tails = tables.HOPPER_TAILS.get(tile, ())
    if document_length is None or not tails:
        return tails[-1] if tails else 0
    left = document_length % tile.columns
    columns = document_length - left + tile.columns
    tail = next((tail for tail in tails if 0 < left <= tail), 0)
    return tail if tile.columns - tail >= tables.HOPPER_TAIL_SAVES * columns else 0


def streamed_tile(tile: HopperTile, rows: int) -> HopperTile:
    """The tile of a stream of documents that `rows` query rows meet, of which each group of four warps multiplies 64.

    More groups hide more of what each waits for: in 16 bits 0.86 ms in place of 0.92 with two, at 32 queries and 32,000
    documents of 24 to 112 tokens on an H200. Of 8 to 20 tokens two are faster, 0.87 and 0.91 with 80,000.
    """
    if tile in (tables.HOPPER_BLOCKS, tables.HOPPER_BLOCKS_SUMMED):
        return tables.STREAM_BLOCKS_NARROW if rows <= tables.STREAM_BLOCKS_NARROW.rows else tables.STREAM_BLOCKS
    return tile._replace(parts=tile.rows // 64)


def pairs_tile(kind: Kind, rows: int) -> HopperTile:
    """The tile of a stream of documents in float32, for so many query rows.

    Those of 64 elements, or without lower halves of 128, leave registers for twice as many, but not where what divides
    documents by norms takes more.
    """
    if rows <= tables.PAIRS_NARROW.rows:
        return tables.PAIRS_NARROW
    most = 64 if precision_of(kind) == "tf32x3" else 128
    wide = kind.size <= most and rows > tables.PAIRS.rows and not kind.normalize
    return tables.PAIRS_WIDE if wide else tables.PAIRS


def quantized_hopper_tile(size: int, narrow: bool, affine: bool, length: int | None, streamed: bool) -> HopperTile:
    """Tile of the Hopper kernel for embeddings of `size` elements in 8 bits.

    Documents have `length` tokens, on average, or under masks who knows how many (None).
    """
    tile = tables.QUANTIZED_HOPPER_NARROW if narrow else tables.QUANTIZED_HOPPER
    if size > 128:
        longest = tables.QUANTIZED_HOPPER_AFFINE_LONGEST if affine else tables.QUANTIZED_HOPPER_LONGEST
        tile = tables.QUANTIZED_HOPPER_LONG if size <= 256 else longest
    if streamed:
        return tile._replace(columns=tables.STREAM_COLUMNS, num_stages=tables.QUANTIZED_HOPPER_STAGES)
    columns = next((n for most, n in tables.QUANTIZED_HOPPER_COLUMNS if length is not None and length <= most), None)
    if columns is None:
        return tile
    stages = min(tables.QUANTIZED_HOPPER_STAGES, tile.num_stages * tile.columns // columns)
    return tile._replace(columns=columns, num_stages=stages)


def single_columns(query_length: int) -> int:
    """Columns of the tile of one query of `query_length` tokens."""
    return min(tables.SINGLE.columns, max(16, tables.power_of_two(query_length)))


def single_tile(capability: int, size: int, item: int, columns: int, small: bool, normalize: bool) -> Tile:
    """Tile of `columns` tokens of one query, of `size` elements, against its documents; `small`: of fewer of theirs."""
    blocks = embedding_blocks(capability, size, item)
    split, row_bytes = blocks.split, blocks.held * item
    tile = tables.SINGLE_SPLIT if split else tables.SINGLE_PACKED if small else tables.SINGLE
    if row_bytes > tables.MAX_ROW_BYTES:
        tile = tables.SINGLE_IN_TWO_NORMS if normalize else tables.SINGLE_IN_TWO
    return fitted(tile._replace(columns=columns), capability, row_bytes, split)


@functools.cache
def single_config(
    capability: int, kind: Kind, columns: int, small: bool, in_segments: bool, units: tuple[int, int]
) -> Config:
    item = kind.dtype.itemsize
    tile = single_tile(capability, kind.size, item, columns, small, kind.normalize)
    blocks = embedding_blocks(capability, kind.size, item)
    documents = "run" if kind.candidates is None else "candidates"
    special = {"documents": documents, "in_segments": in_segments, "flatten": _flattened(capability, blocks)}
    return config_of("single", kind, tile, blocks, units, **special)


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
    tile = single_tile(capability, kind.size, item, columns, False, kind.normalize)
    rows = tile.rows * tile.num_stages
    if capability == 9 and tile.rows >= 64:
        # An operand of Hopper's products.
        rows += tile.columns
    programs = tables.shared_memory(capability) // (rows * blocks.held * item + tables.SINGLE_TAKES)
    return max(1, min(tables.SINGLE_PROGRAMS, programs)), *tables.SINGLE_LONGEST


def soft_blocks(kind: Kind) -> Blocks:
    """How the kernels of soft MaxSim and of chosen tokens hold embeddings."""
    return whole_or_split(kind.size, kind.dtype.itemsize, 16, tables.SOFT_MAX_BYTES[kind.dtype.itemsize])


def soft_tile(kind: Kind, narrow: Tile, wide: Tile) -> Tile:
    """The tile for embeddings of a kind: `wide` where one takes more than 256 bytes, or is of float32."""
    return wide if kind.dtype.itemsize == 4 or soft_blocks(kind).first > 128 else narrow


def residual_blocks(kind: Kind) -> Blocks:
    return whole_or_split(kind.size, kind.dtype.itemsize, tables.RESIDUAL_MIN_BLOCK)


def stride_unit(strides: tuple[int, ...]) -> int:
    """A power of two that divides all strides, which kernels take divided by it and multiply again.

    All that Triton knows of a stride is whether it is a multiple of 16 elements, and then the unit is 1. Of others,
    such as those of embeddings of 72, the product tells it how many elements it may load at a time; else that is one.
    """
    together = functools.reduce(operator.or_, strides)
    # A kernel multiplies in 32 bits what fits into them.
    return together & -together if together & 15 and max(strides) <= INT32_MAX else 1


def divided_strides(queries: tuple[int, ...], documents: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, int]]:
    """The strides of queries and of documents, divided by their units, and these units."""
    (query, query_token), (group, document, document_token) = queries, documents
    if not (query | query_token | group | document | document_token) & 15:
        return (query, query_token, group, document, document_token), (1, 1)
    units = stride_unit(queries), stride_unit(documents)
    return (*[s // units[0] for s in queries], *[s // units[1] for s in documents]), units


def copied_by_16_bytes(size: int, strides: tuple[int, ...], item: int = 2) -> bool:
    """Whether rows of `size` elements of `item` bytes can be copied 16 bytes at a time, and Triton can tell."""
    unit = 16 // item
    return size % unit == 0 and (stride_unit(strides) % unit == 0 or not functools.reduce(operator.or_, strides) & 15)
