"""MaxSim of chosen query tokens in blocks of plain torch: those of each document are gathered, and meet it alone."""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import Problem, Tensors
from .blocked import maxima
from .products import block_budget
from .tiles import Block, Part, operands_of


def sparse_blocked_forward(problem: Problem, tensors: Tensors, query_tokens: Tensor, winners: Tensor | None) -> Tensor:
    """Scores in the accumulation dtype; winners are written into `winners`, which holds -1. No size is 0.

    `query_tokens` [Nq, Nd or K, k] holds -1 where it chooses none.
    """
    given, length, met = operands_of(problem, tensors), problem.query_length, problem.n_documents
    scores = torch.zeros(problem.n_queries, met, dtype=given.dtype, device=given.device)
    budget = block_budget(given.device) // problem.size
    step = max(1, budget // query_tokens.shape[-1])
    own = given.candidates is not None
    for group in range(problem.n_queries if own else 1):
        for run in given.runs(group * met, (group + 1) * met, budget):
            for first in range(run.start, run.stop, step):
                documents = slice(first, min(first + step, run.stop))
                among = slice(documents.start - group * met, documents.stop - group * met)
                block = Block(given, documents, documents.stop - documents.start)
                if block.length == 0:
                    continue
                for query in [group] if own else range(problem.n_queries):
                    chosen = query_tokens[query, among].sort(dim=-1).values
                    counted = chosen >= 0
                    counted[:, 1:] &= chosen[:, 1:] != chosen[:, :-1]
                    chosen = chosen.clamp(min=0).long()
                    tokens = chosen + query * length
                    weights = counted if given.weights is None else given.weights[tokens] * counted
                    scale = None if given.queries_scale is None else given.queries_scale[tokens]
                    part = Part(given.queries[tokens], weights, scale, slice(0), slice(0), slice(0))
                    best, winner = maxima(block, part, winners is not None)
                    scores[query, among] = best.sum(dim=1)
                    if winners is not None and winner is not None:
                        # In the last place, what does not count.
                        placed = winners.new_full((len(chosen), length + 1), -1)
                        placed.scatter_(1, torch.where(counted, chosen, length), winner.to(winners.dtype))
                        first_row = 0 if own else query * length
                        winners[documents, first_row : first_row + length] = placed[:, :length]
    return scores
