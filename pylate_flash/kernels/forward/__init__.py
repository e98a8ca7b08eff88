"""The forward: scores of queries and documents, and the winners that a gradient needs.

None of the kernels masks the tail of a document: token positions are clamped to the last token, and a token that is
seen twice changes neither the maximum nor the lowest index that attains it. Nor does any compare masked tokens: under a
mask, they walk the list of the active ones (`kernels.rows`), so that padding and skipped tokens are never loaded.
Under masking="zero" the masked ones take part afterwards, all at once, with a 0.

Packed documents are cut by their tokens and not by their number (`cuts`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ...problem import Problem, Tensors
from ..rows import Norms, active_tokens, inverse_norms
from ..select import forward_plan
from .common import add_sums
from .cuts import merge_pieces
from .inputs import Inputs
from .single import score_single
from .stacked import score_stacked

__all__ = ["maxsim_forward"]


def maxsim_forward(
    problem: Problem, tensors: Tensors, offsets: Tensor | None = None, norms: Norms | None = None
) -> tuple[Tensor, Tensor | None]:
    """Scores, float32, of `problem.scores_shape`, and winners of `problem.winners_shape` if it has them.

    Queries are padded, or packed with one length; all tensors lie on the device, with contiguous rows, masks and
    boundaries contiguous. No dimension is 0; a document may be empty. With `offsets`, packed documents that are not
    normalised begin there (`problem.Places`). `norms` are those of queries and documents, where they are known.
    """
    plan = forward_plan(problem)
    queries, documents, queries_mask, documents_mask, _, cu_seqlens, candidates = tensors
    device, normalize, single = problem.device, problem.normalize, plan.kernel == "single"
    active = bounds = queries_scale = documents_scale = pieces = piece_winners = winners = None
    if documents_mask is not None:
        active, bounds = active_tokens(documents_mask)
    if normalize and (not single or plan.in_pieces):
        queries_scale = inverse_norms(queries) if norms is None else norms.queries
    if normalize and not single:
        # Norms of their own are read once per token; in the kernel, a token would be squared once per block of rows.
        # The programs of the single kernel, which meet every token once, take norms themselves.
        documents_scale = inverse_norms(documents) if norms is None else norms.documents
    if plan.in_pieces:
        n_pieces, rows = 2 * plan.cuts.number, plan.row_blocks * plan.block_rows
        pieces = torch.empty(n_pieces, rows, dtype=torch.float32, device=device)
        if problem.with_winners:
            piece_winners = torch.empty(n_pieces, rows, dtype=torch.int32, device=device)
    if problem.with_winners:
        winners = torch.empty(*problem.winners_shape, dtype=problem.winners_dtype, device=device)
    # The only sum of a score is the score. (Sizes one by one, as a tuple takes the host twice as long.)
    shape = problem.scores_shape if plan.n_sums == 1 else (plan.n_sums, *problem.scores_shape)
    sums = torch.empty(*shape, dtype=torch.float32, device=device)
    inputs = Inputs(
        queries, documents, queries_mask, active, bounds, queries_scale, documents_scale, cu_seqlens, offsets,
        candidates, pieces, piece_winners,
    )  # fmt: skip
    if single:
        score_single(problem, plan, inputs, sums, winners)
    elif plan.kernel == "stacked":
        score_stacked(problem, plan, inputs, sums, winners)
    else:
        _hopper()(problem, plan, inputs, sums, winners)
    scores = sums if plan.n_sums == 1 else add_sums(problem, plan, sums)
    if plan.in_pieces:
        merge_pieces(problem, plan, inputs, scores, winners)
    return scores, winners


@functools.cache
def _hopper() -> Callable[..., None]:
    """What launches the Hopper kernel, imported where it runs only: not every Triton has Gluon."""
    from .hopper import score_hopper

    return score_hopper
