"""Tile sizes, chosen by table and never by autotuning at run time: the first call compiles once, no later call stalls.

The entries are keyed by what a token's row costs in shared memory: its block of the embedding, in bytes. They were
measured on an H200 (cc 9.0) in bfloat16; other architectures keep the tiles and take fewer stages where shared memory
is smaller.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Rows and columns of a product, its warps, and how many loads are in flight."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


# Query rows x document tokens, by the bytes of a token's row; for whole embeddings, and for blocks of them.
_STACKED = {256: Tile(256, 64, 8, 3), 512: Tile(128, 64, 8, 2)}
_STACKED_SPLIT = Tile(128, 128, 8, 3)
# Document tokens x query tokens; the columns are capped by the query's length.
_SINGLE = {256: Tile(64, 64, 4, 3), 512: Tile(64, 64, 4, 3)}
_SINGLE_SPLIT = Tile(64, 64, 4, 4)
# A longer embedding is split into blocks of this many bytes, one swizzled row of shared memory.
_MAX_ROW_BYTES = 512
_SPLIT_ROW_BYTES = 128
# Shared memory that one program may take, in bytes.
_SHARED_MEMORY = {8: 99 << 10, 9: 227 << 10, 10: 227 << 10}


def embedding_block(size: int, element_size: int) -> tuple[int, bool]:
    """Elements of an embedding of `size` elements that a tile holds, and whether that is only a part of them."""
    block = max(16, _power_of_two(size))
    split = block * element_size > _MAX_ROW_BYTES
    return (_SPLIT_ROW_BYTES // element_size if split else block), split


def stacked_tile(capability: int, row_bytes: int, split: bool, rows: int, with_winners: bool) -> Tile:
    """Tile for `rows` stacked query rows, on compute capability major `capability`.

    Winners take registers, and with 256 rows those spill: 5.78 ms, and 4.82 ms with 128, at 1024 x 1024, 32 x 180.
    """
    tile = _STACKED_SPLIT if split else _at_least(_STACKED, row_bytes)
    rows = min(tile.rows, _power_of_two(rows), 128 if with_winners else tile.rows)
    return _fit(tile._replace(rows=max(16, rows)), capability, row_bytes, split)


def single_tile(capability: int, row_bytes: int, split: bool, query_length: int) -> Tile:
    """Tile for one query of `query_length` tokens against its documents."""
    tile = _SINGLE_SPLIT if split else _at_least(_SINGLE, row_bytes)
    columns = min(tile.columns, _power_of_two(query_length))
    return _fit(tile._replace(columns=max(16, columns)), capability, row_bytes, split)


def _at_least(table: dict[int, Tile], row_bytes: int) -> Tile:
    return next(tile for size, tile in table.items() if row_bytes <= size)


def _fit(tile: Tile, capability: int, row_bytes: int, split: bool) -> Tile:
    """Take stages away until the operands fit into the architecture's shared memory.

    Whole query rows are loaded once, and tokens in stages; of split embeddings, both are.
    """
    budget = _SHARED_MEMORY.get(capability, _SHARED_MEMORY[8])
    stages = tile.num_stages
    while stages > 1 and (tile.rows * (stages if split else 1) + tile.columns * stages) * row_bytes > budget:
        stages -= 1
    return tile._replace(num_stages=stages)


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


@functools.cache
def architecture(device: torch.device) -> tuple[int, int]:
    """Compute capability major and number of multiprocessors of `device` (8, 1 outside CUDA, for the interpreter)."""
    if device.type != "cuda":
        return 8, 1
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.multi_processor_count
