"""Sizes that go together: tiles of a kernel, blocks of an embedding, and the share of work of a program."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """Rows and columns of a product, its warps, and the number of loads in flight."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


class HopperTile(NamedTuple):
    """Rows and columns of a product, the parts (four warps each) that share the rows, and loads in flight."""

    rows: int
    columns: int
    parts: int
    num_stages: int


class FusedTile(NamedTuple):
    """Hidden states of a tile, elements of d_model in a chunk, padded embedding size, blocks of query rows, rows of a
    block, and stages.
    """

    rows: int
    chunk: int
    embedding: int
    blocks: int
    columns: int
    num_stages: int


class Blocks(NamedTuple):
    """Elements of an embedding that a tile holds: in one block, in a second one (0: none), or `split`.

    A split embedding is read block by block.
    """

    first: int
    second: int
    split: bool

    @property
    def held(self) -> int:
        return self.first + self.second


class Shares(NamedTuple):
    """How documents are divided: programs per SM, and the maximum documents, or work of a split, of one program.

    If the last is 0, packed documents are not split, and runs need not fill whole waves.
    """

    per_sm: int
    longest: int
    largest: int
    # Whether a document too long for one program is scored in segments.
    in_segments: bool = False
