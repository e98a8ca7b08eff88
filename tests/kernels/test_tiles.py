"""Tiles hold embeddings with little padding, and fit into shared memory."""

from __future__ import annotations

import pytest

from pylate_flash.kernels.config import embedding_blocks, single_columns, single_tile, stacked_tile
from tests.kernels.recorder import SHARED_MEMORY

# What a tile holds of an embedding of half precision, by its size.
HELD = {
    16: (16, 0), 40: (64, 0), 64: (64, 0), 72: (64, 16), 80: (64, 16), 96: (64, 32), 104: (128, 0), 128: (128, 0),
    144: (128, 16), 192: (128, 64), 200: (64, 0), 256: (64, 0), 300: (256, 64), 320: (256, 64), 384: (256, 128),
    400: (64, 0), 512: (64, 0), 768: (64, 0),
}  # fmt: skip


@pytest.mark.parametrize("size", HELD)
def test_embeddings_are_held_with_little_padding(size: int) -> None:
    blocks = embedding_blocks(9, size, 2)
    assert blocks[:2] == HELD[size]
    assert blocks.split == (blocks.held < size)
    of_floats = embedding_blocks(9, size, 4)
    assert of_floats.second == 0
    assert of_floats.split == (size > 64)


@pytest.mark.parametrize("with_winners", [False, True])
@pytest.mark.parametrize("capability", [8, 9, 10])
@pytest.mark.parametrize("size", HELD)
def test_tiles_fit_into_shared_memory(size: int, capability: int, with_winners: bool) -> None:
    blocks = embedding_blocks(capability, size, 2)
    budget = 99 << 10 if capability == 8 else SHARED_MEMORY[10 * capability]
    for rows in (33, 64, 128, 1000):
        tile = stacked_tile(capability, size, 2, rows, with_winners)
        loaded = tile.num_stages * (tile.rows if blocks.split else 0) + (0 if blocks.split else tile.rows)
        assert 2 * blocks.held * (loaded + tile.num_stages * tile.columns) <= budget
        assert tile.num_stages >= 2
    for query_length in (1, 32, 64):
        tile = single_tile(capability, size, 2, single_columns(query_length), False)
        loaded = tile.num_stages * (tile.columns if blocks.split else 0) + (0 if blocks.split else tile.columns)
        assert 2 * blocks.held * (loaded + tile.num_stages * tile.rows) <= budget
