"""Compile-time configs of the forward kernels: tiles, blocks of embeddings, flags.

They depend on the kind of a problem and on a few coarsely rounded sizes only.
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
    """A forward kernel and its specialization, passed as its only constexpr; one object per config.

    `kernel` is "single" (one short query at a time), "stacked" (the tokens of all queries as one tall matrix), "hopper"
    (the same for compute capability 9.0) or "short" (short queries and documents of few bits or tokens). It is a string
    of its fields because Triton serializes constants as JSON for its compile hooks.
    """

    kernel: str
    tile: Tile | HopperTile
    blocks: Blocks
    # Triton's num_warps, num_stages and maxnreg; the Hopper kernel adds warps and stages of its own.
    warps: tuple[int, int, int | None]
    # Embedding size.
    size: int
    packed: bool
    has_queries_mask: bool
    weighted: bool
    has_documents_mask: bool
    zero_masked: bool
    normalize: bool
    # Whether documents are 8-bit values, have offsets, and query rows have scales.
    values: bool
    affine: bool
    scale_rows: bool
    with_argmax: bool
    precision: str
    # Divisors of the strides, and the unit of the offsets of packed documents (`problem.DocumentOffsets`).
    query_unit: int
    document_unit: int
    offset_unit: int
    # How documents are assigned to programs (`forward.stacked`), and whether a document may be split into segments.
    documents: str = "run"
    in_segments: bool = False
    # Rows per partial sum.
    group: int = 1
    # Whether the kernel quantizes query rows itself: the Hopper kernel in registers, the stacked one through memory.
    quantize_rows: bool = False
    # Bits per element of residual codes; in the short kernel, 8 or 16 for other documents.
    nbits: int = 0
    # Short kernel: token stride in 4-byte words.
    row: int = 0
    # Log-sum-exp instead of the maximum.
    soft: bool = False
    # Hopper kernel: columns of a document's last product (0: a full tile), and whether its first product, of a full
    # tile, is issued before the previous document is summed.
    tail: int = 0
    starts_early: bool = False
    # Whether documents are one stream of tokens (`forward.hopper_stream`).
    stream: bool = False
    # Whether float32 elements are decomposed into pairs of float16; if TF32 products are allowed, only upper halves are
    # used.
    pairs: bool = False
    # Single kernel: its two loops are flattened; columns are tokens chosen per document; all queries share documents.
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
    **fields: Any,
) -> Config:
    """The config for problems of a kind; `fields` override the fields that have defaults."""
    warps: tuple[int, int, int | None]
    if isinstance(tile, HopperTile):
        # The default partition copies, or multiplies; eight warps decompress codes, or make pairs.
        warps = 8 if fields.get("nbits") or fields.get("pairs") else 4, 1, None
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
        **fields,
    )


def precision_of(kind: Kind) -> str:
    """Triton's input_precision; products of half-precision embeddings are exact with any.

    On Hopper, float32 takes three TF32 products, which keep 22 of 24 bits: with FFMA, the tile of `stacked` reaches
    14 TFLOP/s, and takes 3.40 ms instead of 1.01 at 32 x 1024, 32 x 180. On other GPUs they spill; there, many rows are
    decomposed into float16 (`kernels.decompose`), and few are multiplied exactly.
    """
    if kind.dtype != torch.float32:
        return "ieee"
    if kind.float32_precision == "tf32":
        return "tf32"
    return "tf32x3" if tables.architecture(kind.device)[0] == 9 else "ieee"


def planned_length(problem: Problem, least: int = 0) -> int:
    """Length of the longest document to plan for; a longer one is scored by one program.

    If the length of packed documents is bounded by their total only, planning for that bound would slow down every call
    for a rare case: the longest is assumed to have `least` tokens, or `tables.LIKELY_LENGTH` times the mean if more.
    """
    longest, n_documents = problem.document_length, problem.n_documents
    if not problem.packed or n_documents < 2 or longest < problem.n_tokens:
        return longest
    return min(longest, max(least, tables.LIKELY_LENGTH * -(-rounded_total(problem.n_tokens) // n_documents)))


@functools.lru_cache(maxsize=1024)
def padded_query_length(query_length: int, unpadded: bool) -> tuple[int, int]:
    """Rows of a stacked query, padding included, and the largest of `tables.GROUPS` that divides them.

    So every partial sum of the kernel lies within one query, and covers all of it for common lengths. There are few
    groups because each needs its own compilation. `unpadded`: a query may be summed row by row.
    """
    lengths = [-(-query_length // padding) * padding for padding in tables.PADDINGS]
    candidates = [padded for padded in lengths if padded - query_length <= tables.MOST_PADDING * padded]
    if not candidates and (unpadded or query_length == 1):
        return query_length, 1
    padded = candidates[0] if candidates else lengths[-1]
    return padded, max(group for group in tables.GROUPS if padded % group == 0)


def whole_or_split(size: int, item: int, least: int, most_bytes: int = tables.MAX_ROW_BYTES) -> Blocks:
    """Blocks for `size` elements of `item` bytes: a single one of at least `least` elements, or split."""
    padded = max(least, tables.power_of_two(size))
    split = padded * item > most_bytes
    return Blocks(tables.SPLIT_ROW_BYTES // item if split else padded, 0, split)


@functools.lru_cache(maxsize=1024)
def embedding_blocks(capability: int, size: int, item: int) -> Blocks:
    """Blocks of a tile for embeddings of `size` elements of `item` bytes."""
    blocks = whole_or_split(size, item, 16)
    if item == 2 and tables.MIN_IN_TWO <= size <= tables.MAX_IN_TWO:
        padded = tables.power_of_two(size)
        two = Blocks(padded // 2, max(16, tables.power_of_two(size - padded // 2)), False)
        if two.held < padded and (not blocks.split or _fits(tables.STACKED_IN_TWO[-1], capability, two.held * item)):
            return two
    return blocks


@functools.lru_cache(maxsize=1024)
def hopper_blocks(size: int, item: int = 2) -> Blocks:
    """Blocks of the Hopper kernel for embeddings of `size` elements of 2 bytes or 1."""
    if size > tables.HOPPER_MAX_SIZE:
        return Blocks(tables.SPLIT_ROW_BYTES // item, 0, True)
    # Its tensor cores take rows of at least 32 bytes.
    least = 32 // item
    padded = max(least, tables.power_of_two(size))
    two_blocks = Blocks(padded // 2, max(least, tables.power_of_two(size - padded // 2)), False)
    if item == 2:
        two_blocks = embedding_blocks(9, size, 2)
    pays = two_blocks.second > 0 and size >= tables.MIN_IN_TWO and two_blocks.held < padded
    return two_blocks if pays else Blocks(padded, 0, False)


@functools.lru_cache(maxsize=1024)
def pair_blocks(size: int) -> Blocks:
    """Blocks of the Hopper kernel for either half of float32 embeddings, with at least two elements per lane."""
    return Blocks(max(64, tables.power_of_two(size)), 0, False)


def fitted(tile: Tile, capability: int, row_bytes: int, split: bool) -> Tile:
    """Remove stages until the operands fit into the architecture's shared memory.

    Query rows are loaded once and tokens in stages; with split embeddings, both are loaded in stages.
    """
    budget = tables.shared_memory(capability)
    stages = tile.num_stages
    while stages > 1 and (tile.rows * (stages if split else 1) + tile.columns * stages) * row_bytes > budget:
        stages -= 1
    return tile._replace(num_stages=stages)


def _fits(tile: Tile, capability: int, row_bytes: int) -> bool:
    """Whether a tile of unsplit embeddings keeps all its stages."""
    return fitted(tile, capability, row_bytes, False) == tile


def narrowed(tile: Tile, rows: int, columns: int) -> Tile:
    """The tile with rows and columns reduced to those in use, rounded up to powers of two from 16 on."""
    rows = max(16, min(tile.rows, tables.power_of_two(rows)))
    columns = max(16, min(tile.columns, tables.power_of_two(columns)))
    return tile._replace(rows=rows, columns=columns, num_warps=min(tile.num_warps, max(1, rows // 16)))


@functools.lru_cache(maxsize=1024)
def stacked_tile(
    capability: int, size: int, item: int, rows: int, with_argmax: bool, blocks: Blocks | None = None
) -> Tile:
    """Tile for `rows` stacked query rows of `size` elements, on compute capability major `capability`.

    `blocks` of embeddings default to `embedding_blocks`.

    With 256 rows, the registers of the argmax spill: 5.78 ms, and 4.82 ms with 128, at 1024 x 1024, 32 x 180. So do two
    sums of a wide tile.
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
    # Fewer rows save no time, and each number of rows would need its own compilation.
    tile = tile._replace(rows=max(tables.MIN_STACKED_ROWS, min(tile.rows, tables.power_of_two(rows))))
    return fitted(tile, capability, row_bytes, split)


@functools.cache
def hopper_tile(capability: int, size: int, item: int, narrow: bool, with_argmax: bool) -> HopperTile | None:
    """Tile of the Hopper kernel for stacked query rows of `size` elements, or None if it cannot serve them.

    `narrow`: there are at most `tables.HOPPER_NARROW_ROWS` rows.
    """
    if capability != 9 or item != 2 or size > tables.HOPPER_MAX_SIZE or not has_gluon():
        return None
    if size <= 128:
        return tables.HOPPER_NARROW if narrow else tables.HOPPER_ARGMAX if with_argmax else tables.HOPPER
    return tables.HOPPER_LONG if size <= 256 else tables.HOPPER_LONGEST


@functools.lru_cache(maxsize=1024)
def hopper_tail(tile: HopperTile, document_length: int | None) -> int:
    """Columns of a narrower product for the last tokens of a document, where that saves much time (0: none).

    Half of all packed or masked documents, whose lengths differ (None), leave no more tokens than the widest tail.
    With longer embeddings, a smaller share of the time is spent after a product.
    """
    tails = tables.HOPPER_TAILS.get(tile, ())
    if document_length is None or not tails:
        return tails[-1] if tails else 0
    remainder = document_length % tile.columns
    columns = document_length - remainder + tile.columns
    tail = next((tail for tail in tails if 0 < remainder <= tail), 0)
    return tail if tile.columns - tail >= tables.HOPPER_TAIL_SAVES * columns else 0


def streamed_tile(tile: HopperTile, rows: int) -> HopperTile:
    """The tile of a document stream for `rows` query rows, with 64 rows per group of four warps.

    More groups hide more latency: in 16 bits 0.86 ms instead of 0.92 with two, at 32 queries and 32,000 documents of 24
    to 112 tokens on an H200. With 80,000 of 8 to 20 tokens two are faster, 0.87 and 0.91.
    """
    if tile in (tables.HOPPER_BLOCKS, tables.HOPPER_BLOCKS_SUMMED):
        return tables.STREAM_BLOCKS_NARROW if rows <= tables.STREAM_BLOCKS_NARROW.rows else tables.STREAM_BLOCKS
    return tile._replace(parts=tile.rows // 64)


def pairs_tile(kind: Kind, rows: int) -> HopperTile:
    """The tile of a stream of float32 documents for `rows` query rows.

    Embeddings of 64 elements, or of 128 without lower halves, leave registers for twice as many rows, but not if
    documents are divided by their norms.
    """
    if rows <= tables.PAIRS_NARROW.rows:
        return tables.PAIRS_NARROW
    max_size = 64 if precision_of(kind) == "tf32x3" else 128
    is_wide = kind.size <= max_size and rows > tables.PAIRS.rows and not kind.normalize
    return tables.PAIRS_WIDE if is_wide else tables.PAIRS


def quantized_hopper_tile(size: int, narrow: bool, affine: bool, length: int | None, streamed: bool) -> HopperTile:
    """Tile of the Hopper kernel for embeddings of `size` elements in 8 bits.

    Documents have `length` tokens on average, an unknown number (None) if they are masked.
    """
    tile = tables.QUANTIZED_HOPPER_NARROW if narrow else tables.QUANTIZED_HOPPER
    if size > 128:
        longest = tables.QUANTIZED_HOPPER_AFFINE_LONGEST if affine else tables.QUANTIZED_HOPPER_LONGEST
        tile = tables.QUANTIZED_HOPPER_LONG if size <= 256 else longest
    if streamed:
        return tile._replace(columns=tables.STREAM_COLUMNS, num_stages=tables.QUANTIZED_HOPPER_STAGES)
    columns = next(
        (width for max_length, width in tables.QUANTIZED_HOPPER_COLUMNS if length is not None and length <= max_length),
        None,
    )
    if columns is None:
        return tile
    stages = min(tables.QUANTIZED_HOPPER_STAGES, tile.num_stages * tile.columns // columns)
    return tile._replace(columns=columns, num_stages=stages)


def single_columns(query_length: int) -> int:
    """Columns of a single-kernel tile for a query of `query_length` tokens."""
    return min(tables.SINGLE.columns, max(16, tables.power_of_two(query_length)))


def single_tile(capability: int, size: int, item: int, columns: int, small: bool, normalize: bool) -> Tile:
    """Tile of `columns` query tokens of `size` elements against a query's documents; `small`: fewer document tokens."""
    blocks = embedding_blocks(capability, size, item)
    split, row_bytes = blocks.split, blocks.held * item
    tile = tables.SINGLE_SPLIT if split else tables.SINGLE_PACKED if small and not normalize else tables.SINGLE
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
    fields = {"documents": documents, "in_segments": in_segments, "flatten": _flattened(capability, blocks)}
    return config_of("single", kind, tile, blocks, units, **fields)


def _flattened(capability: int, blocks: Blocks) -> bool:
    """Whether the single kernel's loops over documents and their tokens are flattened into one.

    Triton 3.6 cannot flatten them for compute capability 10.0, where products lie in tensor memory.
    """
    return not blocks.split and capability < 10


@functools.cache
def single_runs(capability: int, kind: Kind, columns: int) -> tuple[int, int, int]:
    """Single kernel: programs per SM, and maximum documents that one program walks in a single wave, and in several."""
    item = kind.dtype.itemsize
    blocks = embedding_blocks(capability, kind.size, item)
    uneven = kind.cu_seqlens is not None or kind.documents_mask is not None
    if uneven or not _flattened(capability, blocks):
        return tables.SINGLE_UNLIKE
    tile = single_tile(capability, kind.size, item, columns, False, kind.normalize)
    rows = tile.rows * tile.num_stages
    if capability == 9 and tile.rows >= 64:
        # Hopper's products read query tokens from shared memory, too.
        rows += tile.columns
    programs = tables.shared_memory(capability) // (rows * blocks.held * item + tables.SINGLE_TAKES)
    return max(1, min(tables.SINGLE_PROGRAMS, programs)), *tables.SINGLE_LONGEST


def soft_blocks(kind: Kind) -> Blocks:
    """Blocks of embeddings in the kernels of soft MaxSim and of chosen tokens."""
    return whole_or_split(kind.size, kind.dtype.itemsize, 16, tables.SOFT_MAX_BYTES[kind.dtype.itemsize])


def soft_tile(kind: Kind, narrow: Tile, wide: Tile) -> Tile:
    """The tile for embeddings of a kind: `wide` if they take more than 256 bytes, or are float32."""
    return wide if kind.dtype.itemsize == 4 or soft_blocks(kind).first > 128 else narrow


def residual_blocks(kind: Kind) -> Blocks:
    return whole_or_split(kind.size, kind.dtype.itemsize, tables.RESIDUAL_MIN_BLOCK)


def stride_unit(strides: tuple[int, ...]) -> int:
    """A power of two that divides all strides; kernels take strides divided by it, and multiply them by it again.

    Triton only specializes a stride on being a multiple of 16 elements; then the unit is 1. For other strides, such as
    those of embeddings of 72, the multiplication tells Triton how many elements it may vectorize; else it loads one.
    """
    bits = functools.reduce(operator.or_, strides)
    # A kernel multiplies strides that fit into 32 bits in 32 bits.
    return bits & -bits if bits & 15 and max(strides) <= INT32_MAX else 1


def divided_strides(queries: tuple[int, ...], documents: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Query and document strides divided by their units, and the units."""
    (query, query_token), (group, document, document_token) = queries, documents
    if not (query | query_token | group | document | document_token) & 15:
        return (query, query_token, group, document, document_token), (1, 1)
    units = stride_unit(queries), stride_unit(documents)
    return (*[s // units[0] for s in queries], *[s // units[1] for s in documents]), units


def copied_by_16_bytes(size: int, strides: tuple[int, ...], item: int = 2) -> bool:
    """Whether rows of `size` elements of `item` bytes can be copied 16 bytes at a time, and Triton can prove it."""
    unit = 16 // item
    return size % unit == 0 and (stride_unit(strides) % unit == 0 or not functools.reduce(operator.or_, strides) & 15)
