"""Tile sizes by table, measured on an H200 (compute capability 9.0) in bfloat16; `select` chooses among them.

Other architectures and wider types keep the tiles and take fewer stages where shared memory is smaller.
"""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import torch

from .versions import has_gluon


class Tile(NamedTuple):
    """Rows and columns of a product, its warps, and how many loads are in flight."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


class HopperTile(NamedTuple):
    """Rows and columns of a product, the parts of four warps that share the rows, and how many loads are in flight."""

    rows: int
    columns: int
    parts: int
    num_stages: int


class FusedTile(NamedTuple):
    """Hidden states of a tile, elements of d_model in a chunk, of an embedding with padding, blocks of query rows, rows
    of a block, and stages.
    """

    rows: int
    chunk: int
    embedding: int
    blocks: int
    columns: int
    num_stages: int


# Rows whose maxima a kernel may sum. A query is padded to a multiple of the first of `_PADDINGS` that leaves few enough
# rows empty; if none does, it need not be padded: each row's maximum is stored then, and summed afterwards.
_GROUPS = (1, 8, 16, 32, 64, 128)
_PADDINGS = (16, 8)
_MOST_PADDING = 1 / 8
# Query rows x document tokens: whole embeddings, and embeddings in blocks.
_STACKED = Tile(256, 64, 8, 3)
_STACKED_SPLIT = Tile(128, 256, 8, 3)
_MIN_STACKED_ROWS = 64
# The same on Hopper, for embeddings of half-precision elements. Query rows stay in registers, where half as many fit if
# they are longer than 128 elements; then a wide tile is faster (at 1 x 128, 1024 x 1024 and d = 256, 0.123 ms against
# 0.138) unless documents are so short that it pads them more. Winners take the maxima's time twice, which four parts
# hide better than two: 1.68 ms against 1.91 at 64 x 64, 1024 x 1024; without them, it is 0.362 against 0.357 ms at
# 1 x 1000, 1024 x 1024.
_HOPPER = HopperTile(256, 64, 2, 6)
_HOPPER_WINNERS = HopperTile(256, 64, 4, 6)
_HOPPER_LONG = HopperTile(128, 64, 2, 5)
_HOPPER_LONG_WIDE = HopperTile(128, 128, 2, 3)
# 54 microseconds instead of 86 by `_STACKED_IN_TWO` at 5 x 3000, 32 x 64, d = 320, and 123 instead of 406 at 8 x 2000,
# 32 x 180, d = 384; with 128 columns, 121 of d = 320.
_HOPPER_LONGEST = HopperTile(128, 64, 2, 4)
HOPPER_WIDE_MIN_LENGTH = 512
# Columns that a document's last product may have, and the least share of all columns that it is to save. Each is
# compiled for itself: 0.166 ms instead of 0.207 at 2 x 4000, 512 x 77.
_HOPPER_TAILS = (16, 32)
_HOPPER_TAIL_SAVES = 1 / 8
# Fewer rows leave half of the tile empty, and are bound by memory. Microseconds by `_STACKED`, and by this narrow one:
#   3 x 2000, 32 x 333, d = 96: 51 and 46    2 x 4000, 32 x 180: 58 and 56    4 x 2000, 32 x 180, winners: 48 and 36.
# Tiles of longer embeddings have so many rows anyway: 74 and 59 at 2 x 2000, 32 x 180, d = 256, and 156 and 135 at
# 1 x 1000, 128 x 1024, where a wide one takes 166.
_HOPPER_NARROW = HopperTile(128, 64, 2, 6)
HOPPER_NARROW_ROWS = 128
# Elements of an embedding of which 64 query rows fit into the registers of four warps.
HOPPER_MAX_SIZE = 384
# The fused projection of hidden states: two parts of 128, a chunk of one swizzled row of shared memory, and at most so
# many query rows. With more, their products take longer than reading the states, and projecting to memory first is
# faster.
_FUSED_ROWS = 256
_FUSED_CHUNK = 64
_FUSED_MAX_COLUMNS = 64
_FUSED_MAX_BLOCKS = 2
# Shared memory for states, weight and queries; barriers and what moves between warps take the rest.
_FUSED_SHARED_MEMORY = 220 << 10
# Document tokens x query tokens; the columns are capped by the query's length.
_SINGLE = Tile(64, 64, 4, 3)
# Packed documents are often shorter than padded ones, and a program waits for each: smaller programs, of which more
# share a processor. 0.091 ms against 0.094 at 1 x 10000 documents of 64 to 192 tokens; padded ones take as long.
_SINGLE_PACKED = Tile(32, 64, 2, 3)
_SINGLE_SPLIT = Tile(64, 64, 4, 4)
# A longer embedding is split into blocks of `_SPLIT_ROW_BYTES`, one swizzled row of shared memory. At 1 x 128,
# 1024 x 1024 and d = 256, whole embeddings took 0.231 ms; d = 512 in blocks takes 0.210 ms.
_MAX_ROW_BYTES = 256
_SPLIT_ROW_BYTES = 128
# Half-precision embeddings between these sizes are held as two blocks where that leaves less padding than one: 96
# elements as 64 and 32, 320 as 256 and 64. Products of shorter ones take less time than their maxima. More than 128 are
# not split so, where one of these tiles, the first that does, fits into shared memory with all its stages.
_MIN_IN_TWO = 65
_MAX_IN_TWO = 511
_STACKED_IN_TWO = Tile(128, 64, 8, 3), Tile(64, 64, 8, 3), Tile(64, 32, 4, 3)
_SINGLE_IN_TWO = Tile(32, 64, 4, 3)
# Tensor cores truncate what they add, an error that grows with every addition: 4e-6 of a score at d = 4096. Sums of so
# many products are added up outside them, rounded.
SUMMED_EMBEDDING = 1024
# Shared memory that one program may take, in bytes, by compute capability major; 8 is what 8.6 and 8.9 have.
_SHARED_MEMORY = {8: 99 << 10, 9: 227 << 10, 10: 227 << 10}
_INT32_MAX = 2**31 - 1
# Coordinates up to which points of Chamfer distances are subtracted, or multiplied, outside tensor cores, of which a
# product has 16 at least. Three take about half as long as finding the two maxima does.
DIRECT_SIZE = 8


@functools.lru_cache(maxsize=1024)
def padded_query_length(query_length: int, unpadded: bool) -> tuple[int, int]:
    """Rows that a query takes when stacked, and the largest of `_GROUPS` that divides them.

    Every sum that the kernel takes so lies within one query, and is all of it for the lengths in use. There are few
    groups, because each is compiled for itself. `unpadded`: a query may be summed row by row.
    """
    lengths = [-(-query_length // padding) * padding for padding in _PADDINGS]
    few = [padded for padded in lengths if padded - query_length <= _MOST_PADDING * padded]
    if not few and (unpadded or query_length == 1):
        return query_length, 1
    padded = few[0] if few else lengths[-1]
    return padded, max(group for group in _GROUPS if padded % group == 0)


class Blocks(NamedTuple):
    """Elements of an embedding that a tile holds: in a block, in a second one (0: there is none), or split.

    Split, an embedding is read block by block.
    """

    first: int
    second: int
    split: bool

    @property
    def held(self) -> int:
        return self.first + self.second


@functools.lru_cache(maxsize=1024)
def embedding_blocks(capability: int, size: int, element_size: int) -> Blocks:
    """How tiles hold embeddings of `size` elements."""
    whole = max(16, power_of_two(size))
    split = whole * element_size > _MAX_ROW_BYTES
    if element_size == 2 and _MIN_IN_TWO <= size <= _MAX_IN_TWO:
        blocks = Blocks(whole // 2, max(16, power_of_two(size - whole // 2)), False)
        if blocks.held < whole and (not split or _fits(_STACKED_IN_TWO[-1], capability, blocks.held * element_size)):
            return blocks
    return Blocks(_SPLIT_ROW_BYTES // element_size if split else whole, 0, split)


def stacked_tile(capability: int, size: int, element_size: int, rows: int, with_winners: bool) -> Tile:
    """Tile for `rows` stacked query rows of `size` elements, on compute capability major `capability`.

    Winners take registers, and with 256 rows those spill: 5.78 ms, and 4.82 ms with 128, at 1024 x 1024, 32 x 180. So
    do two sums of a wide tile.
    """
    blocks = embedding_blocks(capability, size, element_size)
    split, row_bytes = blocks.split, blocks.held * element_size
    tile = _STACKED_SPLIT if split else _STACKED
    if row_bytes > _MAX_ROW_BYTES:
        tile = next(tile for tile in _STACKED_IN_TWO if _fits(tile, capability, row_bytes))
    if with_winners:
        tile = tile._replace(rows=min(tile.rows, 128))
    if split and (with_winners or size > SUMMED_EMBEDDING or element_size == 4):
        tile = tile._replace(columns=128, num_stages=4)
    # Fewer rows take no less time, and each number of them would be compiled for itself.
    tile = tile._replace(rows=max(_MIN_STACKED_ROWS, min(tile.rows, power_of_two(rows))))
    return fitted(tile, capability, row_bytes, split)


@functools.lru_cache(maxsize=1024)
def hopper_blocks(size: int, element_size: int = 2) -> Blocks:
    """How the Hopper kernel holds embeddings of `size` elements, of 2 bytes or of 1."""
    # Rows of 32 bytes are the narrowest that its tensor cores take.
    least = 32 // element_size
    whole = max(least, power_of_two(size))
    if element_size == 2:
        blocks = embedding_blocks(9, size, 2)
        return Blocks(whole, 0, False) if blocks.split else blocks
    blocks = Blocks(whole // 2, max(least, power_of_two(size - whole // 2)), False)
    return blocks if size >= _MIN_IN_TWO and blocks.held < whole else Blocks(whole, 0, False)


def hopper_tile(
    capability: int, size: int, element_size: int, narrow: bool, long: bool, with_winners: bool
) -> HopperTile | None:
    """Tile of the Hopper kernel for stacked query rows of `size` elements, or None where it serves none.

    `narrow`: there are at most `HOPPER_NARROW_ROWS` rows. `long`: documents are padded to `HOPPER_WIDE_MIN_LENGTH` or
    more.
    """
    if capability != 9 or element_size != 2 or size > HOPPER_MAX_SIZE or not has_gluon():
        return None
    if size <= 128:
        return _HOPPER_NARROW if narrow else _HOPPER_WINNERS if with_winners else _HOPPER
    if size <= 256:
        return _HOPPER_LONG_WIDE if long and not narrow and not with_winners else _HOPPER_LONG
    return _HOPPER_LONGEST


@functools.lru_cache(maxsize=1024)
def hopper_tail(tile: HopperTile, document_length: int) -> int:
    """Columns of a narrower product for the last tokens of a document (0: there is none), where that saves much.

    Longer embeddings leave less of their time to what follows a product.
    """
    left = document_length % tile.columns
    columns = document_length - left + tile.columns
    tail = next((tail for tail in _HOPPER_TAILS if 0 < left <= tail), 0)
    return tail if tile in (_HOPPER, _HOPPER_NARROW) and tile.columns - tail >= _HOPPER_TAIL_SAVES * columns else 0


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


@functools.lru_cache(maxsize=1024)
def fused_tile(capability: int, rows: int, size: int, d_model: int, element_size: int) -> FusedTile | None:
    """Tile of the kernel that projects d_model elements to `size` and scores `rows` query rows, or None."""
    blocks = -(-rows // _FUSED_MAX_COLUMNS)
    if (
        capability != 9
        or element_size != 2
        or not 0 < blocks <= _FUSED_MAX_BLOCKS
        or size > 128
        or size % 8
        or d_model % 8
        or not has_gluon()
    ):
        return None
    columns = max(16, min(_FUSED_MAX_COLUMNS, power_of_two(rows)))
    embedding = max(16, power_of_two(size))
    free = _FUSED_SHARED_MEMORY - blocks * columns * embedding * element_size
    stages = min(6, free // ((_FUSED_ROWS + embedding) * _FUSED_CHUNK * element_size))
    return FusedTile(_FUSED_ROWS, _FUSED_CHUNK, embedding, blocks, columns, stages)


def single_columns(query_length: int) -> int:
    """Columns of the tile of one query of `query_length` tokens."""
    return _SINGLE.columns if query_length > _SINGLE.columns // 2 else max(16, power_of_two(query_length))


def single_tile(capability: int, size: int, element_size: int, columns: int, packed: bool) -> Tile:
    """Tile of `columns` tokens of one query, of `size` elements, against its documents."""
    blocks = embedding_blocks(capability, size, element_size)
    split, row_bytes = blocks.split, blocks.held * element_size
    tile = _SINGLE_SPLIT if split else _SINGLE_PACKED if packed else _SINGLE
    if row_bytes > _MAX_ROW_BYTES:
        tile = _SINGLE_IN_TWO
    return fitted(tile._replace(columns=columns), capability, row_bytes, split)


def shared_memory(capability: int) -> int:
    """Bytes of a processor that one program may take; an unknown one is taken for the smallest."""
    return _SHARED_MEMORY.get(capability, _SHARED_MEMORY[8])


def _fits(tile: Tile, capability: int, row_bytes: int) -> bool:
    """Whether a tile of whole embeddings keeps all its stages."""
    return fitted(tile, capability, row_bytes, False) == tile


def fitted(tile: Tile, capability: int, row_bytes: int, split: bool) -> Tile:
    """Take stages away until the operands fit into the architecture's shared memory.

    Whole query rows are loaded once, and tokens in stages; of split embeddings, both are.
    """
    budget = shared_memory(capability)
    stages = tile.num_stages
    while stages > 1 and (tile.rows * (stages if split else 1) + tile.columns * stages) * row_bytes > budget:
        stages -= 1
    return tile._replace(num_stages=stages)


@functools.lru_cache(maxsize=1024)
def power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


@functools.cache
def architecture(device: torch.device) -> tuple[int, int]:
    """Compute capability major and number of multiprocessors of `device` (8, 1 outside CUDA, for the interpreter)."""
    if device.type != "cuda":
        return 8, 1
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.multi_processor_count


@functools.cache
def kernels_run_on(device: torch.device, dtype: torch.dtype) -> str | None:
    """None if the Triton kernels run on `device` with elements of `dtype`, else the reason why they do not."""
    try:
        from triton import knobs
    except ImportError:
        return "triton is not installed"
    if knobs.runtime.interpret:
        return None
    if device.type != "cuda":
        return f"the Triton kernels need a CUDA device, and the tensors are on {device.type}"
    if torch.version.hip is not None:
        return "the Triton kernels are written for NVIDIA GPUs, and this PyTorch is built for ROCm"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"the Triton kernels need compute capability 8.0, and {device} has {capability[0]}.{capability[1]}"
    if dtype == torch.float8_e4m3fn and capability < (8, 9):
        return f"the Triton kernels need compute capability 8.9 for fp8, and {device} has 8.{capability[1]}"
    return None
