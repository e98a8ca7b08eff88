"""Soft MaxSim in blocks of plain torch: any device, any dtype, any layout, and never the whole [Nq, Nd, Lq, Ld] tensor.

Exponents of a block are beta * similarity, [documents, Ld, rows].
"""

from __future__ import annotations

import torch
from torch import Tensor

from .norms import unscaled
from .tiles import Block, Operands, Part, blocks


def soft_blocked_forward(given: Operands, beta: Tensor, scores: Tensor, lse: Tensor | None) -> None:
    """Add to `scores` [Nq, Nd], or as many as documents, those of documents that are not empty.

    Leaves log(sum(exp(exponents))) in `lse` [documents, columns], which holds 0, as it is of an empty document.
    """
    shared, scores = given.candidates is None, scores.view(-1, given.n_documents)
    for block in blocks(given, together=False):
        for part in block.parts:
            found = _exponents(given, block, part, beta).logsumexp(dim=1)
            if block.empty is not None:
                found.masked_fill_(block.empty, 0.0)
            if lse is not None:
                lse[block.documents, part.columns] = found.to(lse.dtype)
            found = found / beta
            if part.weights is not None:
                found = found.masked_fill_(part.weights == 0, 0.0) * part.weights
            scores[part.queries if shared else slice(0, 1), block.documents] += part.per_query(found, shared).T


def soft_blocked_backward(
    given: Operands, beta: Tensor, grad_scores: Tensor, lse: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of beta, queries [rows, d] and documents, in their shapes and types; probabilities are found once."""
    need_beta, need_queries, need_documents = needs
    grad_scores = grad_scores.to(given.dtype)
    slope = torch.zeros((), dtype=torch.float64, device=given.device)
    grad_rows = torch.zeros_like(given.queries, dtype=given.dtype) if need_queries else None
    grad_documents = None
    if need_documents:
        grad_documents = torch.zeros_like(given.documents, memory_format=torch.contiguous_format)
    for block in blocks(given, together=False):
        exist = block.active if block.is_ragged else None
        values = block.values.to(given.dtype)
        scaled = values if block.scale is None else values * block.scale.unsqueeze(1)
        if block.mask is not None:
            # They may be no numbers.
            scaled = scaled.masked_fill(~block.mask.flatten().unsqueeze(1), 0.0)
        total = torch.zeros_like(values)
        for part in block.parts:
            exponents = _exponents(given, block, part, beta)
            probabilities = exponents.sub_(lse[block.documents, part.columns].unsqueeze(1)).exp_()
            of_rows = _of_rows(given, block, part, grad_scores)
            if need_beta:
                # The derivative of (1 / beta) log(sum(exp(beta s))) is minus the entropy over the square of beta.
                entropy = torch.special.entr(probabilities).sum(dim=1)
                slope -= (entropy * of_rows).masked_fill_(of_rows == 0.0, 0.0).sum(dtype=torch.float64)
            flows = probabilities.mul_(of_rows.unsqueeze(1))
            rows = part.rows[0].to(given.dtype)
            rows = rows if part.scale is None else rows * part.scale[0].unsqueeze(1)
            if part.weights is not None:
                inactive = part.weights[0] == 0
                flows.masked_fill_(inactive, 0.0)
                rows = rows.masked_fill(inactive.unsqueeze(1), 0.0)
            if block.active is not None:
                flows.masked_fill_(~block.active.unsqueeze(2), 0.0)
            flows = flows.flatten(0, 1) if exist is None else flows[exist]
            if grad_documents is not None:
                total += flows @ rows
            if grad_rows is not None:
                grad_rows[part.of] += flows.T @ scaled
        if grad_documents is not None:
            place = given.of_documents(grad_documents, block.documents)
            place.copy_(unscaled(total, values, block.scale).view(place.shape))
    if grad_rows is not None:
        grad_rows = unscaled(grad_rows, given.queries, given.queries_scale)
    return (slope / beta.double().square()).to(beta.dtype) if need_beta else None, grad_rows, grad_documents


def _of_rows(given: Operands, block: Block, part: Part, grad_scores: Tensor) -> Tensor:
    """The gradient of what each row adds to the scores of the documents [documents, R]."""
    if given.candidates is not None:
        found = grad_scores[block.documents].unsqueeze(1).expand(-1, part.rows.shape[1])
    else:
        found = grad_scores[part.queries, block.documents].T
        if part.owners is not None:
            found = found.index_select(1, part.owners)
        else:
            found = found.repeat_interleave(part.rows.shape[1] // found.shape[1], dim=1)
    if part.weights is not None:
        found = found * part.weights
    return found if block.empty is None else found.masked_fill(block.empty, 0.0)


def _exponents(given: Operands, block: Block, part: Part, beta: Tensor) -> Tensor:
    """beta * similarity [documents, Ld, R], of masked tokens what `masking` says."""
    exponents = block.similarities(part).mul_(beta if part.scale is None else beta * part.scale)
    if block.active is not None:
        exponents.masked_fill_(~block.active.unsqueeze(2), 0.0 if given.zero_masked else -torch.inf)
    return exponents
