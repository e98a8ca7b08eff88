"""MaxSim of chosen query tokens in blocks of plain torch: those of each document are gathered, and scored as pairs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..problem import Problem, Tensors, accumulation_dtype
from .blocked import Inputs, block_budget, blocked_forward
from .blocked_varlen import padded_tokens, rows_of, runs
from .compute import blocked_inputs, weighted
from .packing import host_bounds_of

# The documents of a block [documents, 1, Ld, d], their mask and their scales.
_Documents = tuple[Tensor, Tensor | None, Tensor | None]


def sparse_blocked_forward(problem: Problem, tensors: Tensors, query_tokens: Tensor, winners: Tensor | None) -> Tensor:
    """Scores in the accumulation dtype; winners are written into `winners`, which holds -1. No size is 0.

    `query_tokens` [Nq, Nd or K, k] holds -1 where it chooses none.
    """
    given = weighted(*blocked_inputs(problem, tensors))
    n_queries, length = tensors.queries.shape[:2]
    queries = given.queries.view(tensors.queries.shape)
    # Those of queries that meet packed documents are flat.
    queries_mask, queries_scale = (
        None if tensor is None else tensor.view(n_queries, length)
        for tensor in (given.queries_mask, given.queries_scale)
    )
    own = tensors.documents.dim() == 4
    bounds = host_bounds_of(problem, tensors)[1] if problem.packed else None
    scores = torch.empty(problem.scores_shape, dtype=accumulation_dtype(queries.dtype), device=problem.device)
    for block in _blocks(problem, query_tokens.shape[-1], bounds):
        documents = None
        for query in range(n_queries):
            if documents is None or own:
                documents = _documents(given, query if own else 0, block, bounds)
            chosen = query_tokens[query, block].sort(dim=-1).values
            counted = chosen >= 0
            counted[:, 1:] &= chosen[:, 1:] != chosen[:, :-1]
            chosen = chosen.clamp(min=0).long()
            pairs = Inputs(
                queries[query][chosen],
                documents[0],
                counted if queries_mask is None else counted & queries_mask[query][chosen],
                documents[1],
                None if queries_scale is None else queries_scale[query][chosen],
                documents[2],
            )
            found, chosen_winners = blocked_forward(pairs, problem.kind.zero_masked, winners is not None)
            scores[query, block] = found.squeeze(1)
            if winners is not None and chosen_winners is not None:
                # In the last place, what does not count.
                placed = winners.new_full((len(chosen), length + 1), -1)
                placed.scatter_(1, torch.where(counted, chosen, length), chosen_winners.squeeze(1).to(winners.dtype))
                group, first = (query, 0) if own else (0, query * length)
                of_group = winners.view(-1, problem.n_documents, problem.rows)[group]
                of_group[block, first : first + length] = placed[:, :length]
    return scores


def _blocks(problem: Problem, n_chosen: int, bounds: np.ndarray | None) -> list[slice]:
    """Documents that are scored at once: not too many of their tokens, or of the query's tokens gathered for them."""
    budget = block_budget(problem.device) // problem.size
    step = max(1, budget // n_chosen)
    if bounds is None:
        return [slice(start, min(start + step, problem.n_documents)) for start in range(0, problem.n_documents, step)]
    # Padded to the longest of a block.
    return [
        slice(start, min(start + step, run.stop))
        for run in runs(np.diff(bounds), 0, problem.n_documents, budget)
        for start in range(run.start, run.stop, step)
    ]


def _documents(given: Inputs, group: int, block: slice, bounds: np.ndarray | None) -> _Documents:
    """The documents of a block; packed ones, with `bounds`, are padded."""
    documents, mask, scale = given.documents, given.documents_mask, given.documents_scale
    if bounds is not None:
        tokens, exist = padded_tokens(bounds, np.arange(block.start, block.stop), documents.device)
        of_tokens = None if scale is None else scale[tokens].unsqueeze(1)
        return rows_of(documents, tokens).unsqueeze(1), exist.unsqueeze(1), of_tokens
    return (
        documents[group, block].unsqueeze(1),
        None if mask is None else mask[group, block].unsqueeze(1),
        None if scale is None else scale[group, block].unsqueeze(1),
    )
