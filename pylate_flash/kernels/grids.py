"""How documents are shared out among the programs of a forward, and the plan that says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..problem import Problem, rounded_total
from .forms import Form
from .tiles import HopperTile, Tile, divided_strides, padded_query_length

# Cuts of packed documents, see `kernels.forward.cuts`. A document costs its tokens and so many more: half a tile, as a
# document's last tile is half full on average, and as much again for what follows it.
DOCUMENT_COST = 64
# A cut has at least so much work, or finding it costs more.
_SMALLEST_CUT = 256
# A document up to so long is never cut: its pieces would take a launch to merge.
_LONGEST_WHOLE = 2048


class Cuts(NamedTuple):
    """How packed documents are cut: work per cut, tokens up to which a document stays whole, and the number of cuts."""

    cut: int = 0
    whole: int = 0
    number: int = 0


class Shares(NamedTuple):
    """How documents are shared out: programs of a processor, and the most that one walks: documents, work of a cut."""

    per_processor: int
    longest: int
    largest: int
    # Whether a document too long for one program is scored in pieces.
    in_pieces: bool = False


class ForwardPlan(NamedTuple):
    """How a problem is scored."""

    form: Form
    # Strides of queries and of documents, divided by the units that the kernel multiplies them by.
    strides: tuple[int, ...]
    # Rows that a stacked query takes.
    padded: int
    # Documents that one program walks (stacked and packed: the work of its cut), and how many programs that takes.
    run: int
    n_runs: int
    # Documents that a query meets, at most.
    per_query: int
    # How packed documents are cut, and whether one may be longer than what is scored whole.
    cuts: Cuts
    in_pieces: bool
    # Programs that share a run: blocks of query rows, or of a query's columns.
    row_blocks: int
    # Sums that the kernel leaves for each score.
    n_sums: int
    reason: str

    @property
    def kernel(self) -> str:
        return self.form.kernel

    @property
    def tile(self) -> Tile | HopperTile:
        return self.form.tile

    @property
    def block_rows(self) -> int:
        """Query rows of a block."""
        return self.tile.columns if self.kernel == "single" else self.tile.rows


def tall_plan(
    problem: Problem,
    processors: int,
    tile: Tile | HopperTile,
    shares: Shares,
    make: Callable[..., Form],
    reason: str,
    unpadded: bool = False,
) -> ForwardPlan:
    """The plan of a kernel for which the tokens of all queries are one tall matrix.

    Its form is made of: whether a document may be in pieces, the rows of a sum, and the units of strides.
    """
    padded, group = padded_query_length(problem.query_length, unpadded)
    group = min(group, tile.rows // tile.parts if isinstance(tile, HopperTile) else tile.rows)
    row_blocks = -(-(problem.n_queries // problem.groups * padded) // tile.rows)
    per_query = problem.max_candidates if problem.has_candidates else problem.n_documents
    cuts, in_pieces = Cuts(), False
    if problem.packed and not problem.has_candidates:
        cuts = cuts_of(problem, row_blocks, processors, shares.per_processor, shares.largest)
        run, n_runs = cuts.cut, cuts.number
        in_pieces = shares.in_pieces and problem.document_length > cuts.whole
    else:
        run = run_length(per_query, row_blocks * problem.groups, processors, shares.per_processor, shares.longest)
        n_runs = -(-per_query // run)
    strides, *units = divided_strides(problem.query_strides, problem.document_strides)
    return ForwardPlan(
        make(in_pieces, group, *units), strides, padded, run, n_runs, per_query, cuts, in_pieces, row_blocks,
        padded // group, reason,
    )  # fmt: skip


def run_length(documents: int, programs: int, processors: int, per_processor: int, longest: int) -> int:
    """Documents that one program walks: about `longest`, or fewer so that every processor gets work.

    `programs` programs share each run, and `per_processor` of them fit on a processor at a time. The runs are cut so
    that the programs fill whole waves: a few programs more than a wave would take as long as a second one.
    """
    slots = per_processor * processors
    waves = -(-documents * programs // (slots * longest))
    return max(1, -(-documents // max(1, slots * waves // programs)))


def cuts_of(problem: Problem, programs: int, processors: int, per_processor: int, largest: int) -> Cuts:
    """Cut packed documents so that every processor gets an equal share, in whole waves.

    `programs` programs share each cut, and `per_processor` of them fit on a processor at a time. A cut has at most
    `largest` work, or the last ones leave gaps. The total is rounded (`rounded_total`), so that what is repeated of
    one serves others.
    """
    work = rounded_total(problem.n_tokens) + problem.n_documents * DOCUMENT_COST
    slots = per_processor * processors
    waves = -(-work * programs // (slots * largest))
    cut = max(_SMALLEST_CUT, -(-work // max(1, slots * waves // programs)))
    # What takes less than half a processor's share of the time can wait for its turn, even the last.
    whole = max(_LONGEST_WHOLE, cut, work * programs // (2 * slots))
    return Cuts(cut, whole, -(-work // cut))
