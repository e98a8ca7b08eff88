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
from ..tables import XTR_STEPS
from .scores import Retrieved, score_retrieved
from .search import begin, narrow, select_threshold
from .walk import SearchTensors, collect, count_bins, find_maxima, tally

__all__ = ["SearchTensors", "search_plan", "retrieve", "score_retrieved"]


def retrieve(problem: Problem, inputs: SearchTensors, rule: Rule) -> Retrieved:
    """What the rows of padded queries retrieve of documents [Nd, Ld, d], which all of them meet.

    All tensors lie on the device, with contiguous rows; no dimension is 0.
    """
    device, rows, n_documents = problem.device, problem.rows, problem.n_documents
    plan = search_plan(problem, rule.k)
    best = torch.empty(n_documents, rows, dtype=torch.float32, device=device)
    winners = torch.empty(n_documents, rows, dtype=problem.winners_dtype, device=device)
    # What is kept of each row from one step to the next: maxima of groups, then similarities, then counts of bins.
    scratch = torch.empty(rows, plan.scratch, dtype=torch.int32, device=device)
    find_maxima(problem, plan, inputs, best, winners, scratch)

    # Of each row: the lowest key that its threshold may have, the width of a bin as a power of two (-1: the search is
    # over), how many are retrieved from there on, and whether its tokens are to be counted by document.
    state = torch.empty(4, rows, dtype=torch.int32, device=device)
    begin(problem, plan, best, inputs.bounds, rule.k, scratch, state)
    if plan.collection.n_runs:
        counts = torch.empty(rows, plan.collection.n_runs, plan.tile.columns, dtype=torch.int32, device=device)
        collect(problem, plan, inputs, scratch, state, counts)
        select_threshold(plan, counts, rule.with_whole, scratch, state)
        del counts
    for _ in range(XTR_STEPS):
        count_bins(problem, plan, inputs, scratch, state)
        narrow(plan, rule.with_whole, scratch, state)
    del scratch
    counts = torch.empty(2, n_documents, rows, dtype=problem.winners_dtype, device=device)
    tally(problem, plan, inputs, state, counts)
    return Retrieved(best, winners, state, counts)
