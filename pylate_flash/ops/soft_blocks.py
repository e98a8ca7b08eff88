"""Soft MaxSim in blocks of plain torch: any device, any dtype, any layout, and never the whole [Nq, Nd, Lq, Ld] tensor.

Exponents of a block are beta * similarity, [documents, Ld, rows].
"""

from __future__ import annotations

import torch
from torch import Tensor

from .norms import unscaled
from .tiles import Block, Operands, Part, blocks


def log_sums(block: Block, part: Part, beta: Tensor) -> tuple[Tensor, Tensor]:
    """What every row adds to the scores [documents, R], and log(sum(exp(exponents))), 0 of an empty document."""
    lse = _exponents(block, part, beta).logsumexp(dim=1)
    if block.empty is not None:
        lse.masked_fill_(block.empty, 0.0)
    values = lse / beta
    if part.weights is not None:
        values = values.masked_fill_(part.weights == 0, 0.0) * part.weights
    return values, lse


def soft_blocked_backward(
    operands: Operands, beta: Tensor, grad_scores: Tensor, lse: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of beta, queries [rows, d] and documents, in their shapes and types; probabilities are found once."""
    need_beta, need_queries, need_documents = needs
    grad_scores = grad_scores.to(operands.dtype).reshape(-1, operands.n_documents)
    slope = torch.zeros((), dtype=torch.float64, device=operands.device)
    grad_rows = torch.zeros_like(operands.queries, dtype=operands.dtype) if need_queries else None
    grad_documents = None
    if need_documents:
        grad_documents = torch.zeros_like(operands.documents, memory_format=torch.contiguous_format)
    for block in blocks(operands, together=False):
        values = block.values.to(operands.dtype)
        scaled = values if block.scale is None else values * block.scale.unsqueeze(1)
        active = block.exist if block.mask is None else block.mask
        if block.mask is not None:
            # They may be no numbers.
            scaled = scaled.masked_fill(~block.mask.flatten().unsqueeze(1), 0.0)
        total = torch.zeros_like(values)
        for part in block.parts:
            exponents = _exponents(block, part, beta)
            probabilities = exponents.sub_(lse[block.documents, part.columns].unsqueeze(1)).exp_()
            flow = part.spread(grad_scores, block.documents)
            flow = flow if part.weights is None else flow * part.weights
            flow = flow if block.empty is None else flow.masked_fill(block.empty, 0.0)
            if need_beta:
                # The derivative of (1 / beta) log(sum(exp(beta s))) is minus the entropy over the square of beta.
                entropy = torch.special.entr(probabilities).sum(dim=1)
                slope -= (entropy * flow).masked_fill_(flow == 0.0, 0.0).sum(dtype=torch.float64)
            flows = probabilities.mul_(flow.unsqueeze(1))
            rows = part.rows[0].to(operands.dtype)
            rows = rows if part.scale is None else rows * part.scale[0].unsqueeze(1)
            if part.weights is not None:
                inactive = part.weights[0] == 0
                flows.masked_fill_(inactive, 0.0)
                rows = rows.masked_fill(inactive.unsqueeze(1), 0.0)
            if active is not None:
                flows.masked_fill_(~active.unsqueeze(2), 0.0)
            flows = flows.flatten(0, 1) if block.exist is None else flows[block.exist]
            if grad_documents is not None:
                total += flows @ rows
            if grad_rows is not None:
                grad_rows[part.of] += flows.T @ scaled
        if grad_documents is not None:
            operands.tokens(grad_documents, block.documents).copy_(unscaled(total, values, block.scale))
    if grad_rows is not None:
        grad_rows = unscaled(grad_rows, operands.queries, operands.queries_scale)
    return (slope / beta.double().square()).to(beta.dtype) if need_beta else None, grad_rows, grad_documents


def _exponents(block: Block, part: Part, beta: Tensor) -> Tensor:
    """beta * similarity [documents, Ld, R]."""
    similarities = block.similarities(part, block.exist if block.mask is None else block.mask)
    return similarities.mul_(beta if part.scale is None else beta * part.scale)
