"""MaxSim of chosen query tokens in blocks of plain torch: those of each document are gathered, and meet it alone."""

from __future__ import annotations

import torch
from torch import Tensor

from .blocked import maxima
from .products import block_budget
from .tiles import Block, Operands


def sparse_blocked_forward(operands: Operands, query_tokens: Tensor, scores: Tensor, argmax: Tensor | None) -> None:
    """Leave scores [Nq, Nd or K], and in `argmax`, which holds -1, the tokens that a gradient flows to.

    `query_tokens` [Nq, Nd or K, k] holds -1 where it chooses none.
    """
    (n_queries, met, k), length, own = query_tokens.shape, operands.query_length, operands.candidates is not None
    budget = block_budget(operands.device) // operands.queries.shape[-1]
    step = max(1, budget // k)
    for start in range(0, operands.n_documents, met):
        runs = [
            documents
            for first in range(start, start + met, step)
            for documents in operands.runs(first, min(first + step, start + met), budget)
            if operands.longest(documents.start, documents.stop)
        ]
        for documents in runs:
            block = Block(operands, documents, documents.stop - documents.start)
            among = slice(documents.start - start, documents.stop - start)
            for query in [start // met] if own else range(n_queries):
                chosen = query_tokens[query, among].sort(dim=-1).values
                counted = chosen >= 0
                counted[:, 1:] &= chosen[:, 1:] != chosen[:, :-1]
                chosen = chosen.clamp(min=0).long()
                rows = chosen + query * length
                best, tokens = maxima(block, operands.part(rows, rows.shape, counted), argmax is not None)
                scores[query, among] = best.sum(dim=1)
                if argmax is not None and tokens is not None:
                    # In the last column, what does not count.
                    columns = argmax.new_full((len(chosen), length + 1), -1)
                    columns.scatter_(1, torch.where(counted, chosen, length), tokens.to(argmax.dtype))
                    first_row = 0 if own else query * length
                    argmax[documents, first_row : first_row + length] = columns[:, :length]
