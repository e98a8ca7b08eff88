"""What the Blackwell kernel serves, and its tile and grid. It has never run, and nothing here is measured."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from .. import select
from ..forms import Form
from ..grids import ForwardPlan, tall_plan
from ..tiles import (
    Blocks,
    HopperTile,
    copied_by_16_bytes,
    power_of_two,
)

if TYPE_CHECKING:
    from ...problem import Kind, Problem


# What 16 elements of a product take from shared memory: of 128 rows and 128 columns 8 KB in 64 cycles, of 64 columns
# 6 KB in 32. Embeddings of more than 128 elements leave no room for as many columns.
_TILE = HopperTile(256, 128, 2, 4)
_LONG = HopperTile(256, 64, 2, 3)


def blackwell_plan(problem: Problem) -> ForwardPlan:
    """Choose tile and grid of the Blackwell kernel, on a device and for embeddings that it takes.

    Raises
    ------
    ValueError
        If the kernel cannot serve the problem.
    """
    kind, tile = problem.kind, tile_of(problem.size)

    def make(_: bool, *sizes: int) -> Form:
        return blackwell_form(kind, *sizes)

    # A query is always padded: a sum of single rows is no sum.
    processors, why = select.architecture(kind.device)[1], "asked for by name: it has never run"
    plan = tall_plan(problem, processors, tile, select.HOPPER_SHARES, make, why)
    reason = None
    if problem.has_candidates:
        reason = "packed queries have candidates of their own"
    elif problem.packed and problem.document_length > plan.cuts.whole:
        reason = f"a document may be longer than {plan.cuts.whole} tokens"
    elif not (problem.aligned and copied_by_16_bytes(kind.size, problem.document_strides)):
        reason = "documents cannot be copied 16 bytes at a time"
    if reason is not None:
        raise ValueError(f'implementation="blackwell" cannot serve this input: {reason}')
    return plan


def tile_of(size: int) -> HopperTile:
    """Tile for embeddings of `size` elements."""
    return _TILE if size <= 128 else _LONG


@functools.cache
def blackwell_form(kind: Kind, group: int, query_unit: int, document_unit: int) -> Form:
    tile, block = tile_of(kind.size), max(16, power_of_two(kind.size))
    constants = (
        kind.size, block, tile.columns, group, tile.num_stages, kind.cu_seqlens is not None,
        kind.queries_mask is not None, kind.weighted, kind.documents_mask is not None, kind.zero_masked,
        kind.normalize, kind.with_winners, query_unit, document_unit,
    )  # fmt: skip
    return Form("blackwell", tile, Blocks(block, 0, False), constants, (4, 1, None))
