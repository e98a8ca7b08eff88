"""What query tokens retrieve of all documents, for XTR's scores: thresholds without the similarities in memory.

`walk` computes all similarities again for every step, by the same products, so that each step sees the same bits. The
first leaves maxima. Of those, and of the maxima of groups of tokens, `search` makes bounds of every row's threshold:
where k maxima lie above a value, so do k tokens. The second step collects the similarities above the lower bound, few
more than k; `search` packs them and finds the k-th largest. Of rows for which there was no room, the next steps count
the similarities between the bounds, by bins, and narrow them down to the bin with the k-th largest, until all of that
bin is retrieved or all in it are equal. The number of steps is fixed, but a program whose rows are done ends at once. A
last step counts the tokens of each document, of rows where more tokens equal the threshold than are retrieved. `scores`
makes scores of all that.

Counts are integers, so that no order of programs changes the result.
"""

from __future__ import annotations

import torch

from ...problem import Problem, Rule
from ..plan_operations import search_plan
from ..tables import XTR_BIN_BITS, XTR_STEPS, power_of_two
from . import search
from .scores import Retrieved, score_retrieved
from .walk import BINS, COLLECT, MAXIMA, TALLY, SearchTensors, walk_similarities

__all__ = ["SearchTensors", "search_plan", "retrieve", "score_retrieved"]

# Elements of a thread. Counts of a few threads are added up sooner than those of many.
_PER_THREAD = 32


def _warps(elements: int) -> int:
    return max(1, min(8, elements // (32 * _PER_THREAD)))


def retrieve(problem: Problem, inputs: SearchTensors, rule: Rule) -> Retrieved:
    """What the rows of padded queries retrieve of documents [Nd, Ld, d], which all of them meet.

    All tensors lie on the device, with contiguous rows; no dimension is 0.
    """
    device, rows, n_documents, with_whole = problem.device, problem.rows, problem.n_documents, rule.with_whole
    plan = search_plan(problem, rule.k)
    collection, columns = plan.collection, plan.tile.columns
    best = torch.empty(n_documents, rows, dtype=torch.float32, device=device)
    winners = torch.empty(n_documents, rows, dtype=problem.winners_dtype, device=device)
    # What is kept of each row from one step to the next: maxima of groups, then similarities, then counts of bins.
    scratch = torch.empty(rows, plan.scratch, dtype=torch.int32, device=device)
    walk_similarities(problem, plan, inputs, MAXIMA, best, winners, scratch)

    # Of each row: the lowest key that its threshold may have, the width of a bin as a power of two (-1: the search is
    # over), how many are retrieved from there on, and whether its tokens are to be counted by document.
    state = torch.empty(4, rows, dtype=torch.int32, device=device)
    maxima, block = (max(16, power_of_two(n)) for n in (plan.n_groups, n_documents))
    search.begin_kernel(
        (rows, 1, 1),
        (best, inputs.bounds, scratch, state),
        (rows, plan.n_groups, n_documents, -(-problem.document_length // columns), rule.k),
        (plan.scratch,),
        (maxima, min(search.BLOCK, block), plan.groups, columns, collection.n_runs == 0, XTR_BIN_BITS),
        (_warps(maxima), 1, None),
    )
    if collection.n_runs:
        counts = torch.empty(rows, collection.n_runs, columns, dtype=torch.int32, device=device)
        walk_similarities(problem, plan, inputs, COLLECT, scratch=scratch, state=state, counts=counts)
        slots = power_of_two(collection.n_runs * columns)
        search.select_kernel(
            (rows, 1, 1),
            (counts, scratch, state),
            (rows, collection.n_runs),
            (plan.scratch,),
            (slots, collection.packed, collection.depth, columns, with_whole, XTR_BIN_BITS),
            (_warps(max(slots, collection.packed)), 1, None),
        )
        del counts
    for _ in range(XTR_STEPS):
        walk_similarities(problem, plan, inputs, BINS, scratch=scratch, state=state)
        constants = with_whole, XTR_BIN_BITS
        search.narrow_kernel((rows, 1, 1), (scratch, state), (rows,), (plan.scratch,), constants, (4, 1, None))
    del scratch
    counts = torch.empty(2, n_documents, rows, dtype=problem.winners_dtype, device=device)
    walk_similarities(problem, plan, inputs, TALLY, state=state, counts=counts)
    return Retrieved(best, winners, state, counts)
