"""Sizes that go together: of the tiles of a kernel, of blocks of an embedding, of what a program is given."""

from __future__ import annotations

from typing import NamedTuple


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


class Shares(NamedTuple):
    """How documents are shared out: programs of an SM, and the most that one walks: documents, work of a split.

    Where the last is 0, packed documents are not split, and runs need not fill whole waves.
    """

    per_sm: int
    longest: int
    largest: int
    # Whether a document too long for one program is scored in segments.
    in_segments: bool = False
