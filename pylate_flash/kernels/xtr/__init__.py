"""What query tokens retrieve of all documents, for XTR's scores: thresholds without the similarities in memory.

`walk` computes all similarities again for every step, by the same products, so that each step sees the same bits. The
first leaves maxima. Of those, and of the maxima of groups of tokens, `search` makes bounds of every row's threshold:
where k maxima lie above a value, so do k tokens. The second step collects the similarities above the lower bound, few
more than k, and finds the k-th largest of them. Of rows for which there was no room, the next steps count the
similarities between the bounds, by bins, and narrow them down to the bin with the k-th largest, until all of that bin
is retrieved or all in it are equal. The number of steps is fixed, but a program whose rows are done ends at once. A
last step counts the tokens of each document, of rows where more tokens equal the threshold than are retrieved. `scores`
makes scores of all that.

Counts are integers, so that no order of programs changes the result.
"""

from __future__ import annotations

import torch

from ...ops.problem import Problem, Tensors
from ...ops.xtr_retrieval import Pool, Retrieval
from ..masks import active_tokens
from .plan import BIN_BITS, STEPS, plan_of
from .scores import score_retrieved
from .search import begin, narrow, select_threshold
from .walk import Inputs, collect, count_bins, find_maxima, tally

__all__ = ["plan_of", "retrieve", "score_retrieved"]


def retrieve(problem: Problem, tensors: Tensors, pool: Pool) -> Retrieval:
    """What the rows of padded queries retrieve of documents [Nd, Ld, d], which all of them meet.

    All tensors lie on the device, with contiguous rows and mask; no dimension is 0.
    """
    device, rows = problem.device, problem.rows
    plan = plan_of(problem, pool.k)
    active = bounds = None
    if tensors.documents_mask is not None:
        active, bounds = active_tokens(tensors.documents_mask)
    inputs = Inputs(tensors.queries, tensors.documents, active, bounds)
    best = torch.empty(problem.n_documents, rows, dtype=torch.float32, device=device)
    winners = torch.empty(problem.n_documents, rows, dtype=problem.winners_dtype, device=device)
    # [rows, n_groups]: the documents, or parts of them, of which those without an active token are not written.
    groups = best.T
    if plan.groups:
        groups = torch.full((rows, plan.n_groups), -torch.inf, dtype=torch.float32, device=device)
    find_maxima(problem, plan, inputs, best, winners, groups)

    wanted = pool.counts.sum().clamp(max=pool.k).to(torch.int32)
    # Of each row: the lowest key that its threshold may have, the width of a bin as a power of two (-1: the search is
    # over), how many are retrieved from there on, and whether there are more than these.
    state = torch.zeros(4, rows, dtype=torch.int32, device=device)
    begin(groups, best, wanted, state)
    del groups
    if plan.collection.n_runs:
        _, n_runs, depth = plan.collection
        columns = plan.tile.columns
        counts = torch.empty(rows, n_runs, columns, dtype=torch.int32, device=device)
        places = torch.empty(rows, n_runs, depth, columns, dtype=torch.int32, device=device)
        collect(problem, plan, inputs, state, places, counts)
        select_threshold(places, counts, state)
        del places, counts
    bins = torch.zeros(rows, 1 << BIN_BITS, dtype=torch.int32, device=device)
    for _ in range(STEPS):
        count_bins(problem, plan, inputs, state, bins)
        narrow(bins, state)
    del bins
    thresholds = torch.empty(rows, dtype=torch.float32, device=device)
    tallied = torch.empty(rows, dtype=torch.bool, device=device)
    counts = torch.empty(2, problem.n_documents, rows, dtype=problem.winners_dtype, device=device)
    tally(problem, plan, inputs, state, pool.with_whole, (thresholds, tallied, counts))
    return Retrieval(best, winners, thresholds, state[2], tallied, counts[0], counts[1])
