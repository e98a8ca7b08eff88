"""Soft MaxSim in blocks of plain torch: any device, any dtype, and never the whole [Nq, Nd, Lq, Ld] tensor.

Every layout comes down to blocks: query rows, the tokens of one or of all queries, which meet a few documents padded to
the longest of them. Exponents of a block are beta * similarity, [documents, Ld, rows].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..problem import Problem, Tensors, accumulation_dtype
from .blocked import block_budget, inner_products, unscaled
from .blocked_varlen import padded_tokens, runs
from .compute import checked_masks
from .norms import inverse_norms
from .packing import host_bounds_of

# Query rows that a block of documents leaves room for.
_ROWS = 1024


class _Rows(NamedTuple):
    """The tokens of all queries, padded: [Nq * Lq, d] and [Nq * Lq]."""

    # Zeros where a token is masked, or none.
    values: Tensor
    # How often a token counts, 0 where it is masked, or none.
    weights: Tensor
    # One over the norms, or None.
    scale: Tensor | None
    # Of packed queries, the token of each row, and whether it has one.
    tokens: Tensor | None
    exist: Tensor | None


class _Block(NamedTuple):
    """Documents padded to the longest of them, and the rows and scores that they have."""

    # Among the documents of all groups.
    documents: slice
    # The queries that meet them.
    queries: slice
    # Packed tokens [n, L] of the documents, or None where they are padded.
    tokens: Tensor | None
    # [n, L, d], zeros where a token is masked, or none.
    values: Tensor
    # [n, L], None: all.
    active: Tensor | None
    # One over the norms [n, L], or None.
    scale: Tensor | None


def soft_blocked_forward(
    problem: Problem, tensors: Tensors, beta: Tensor, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Scores in the accumulation dtype, 0 of an empty document, and log(sum(exp(exponents))) [documents, rows].

    The latter is 0 of an empty document.
    """
    masks = checked_masks(tensors)
    rows, length = _rows(problem, tensors, masks[0]), problem.query_length
    scores = rows.weights.new_zeros(problem.scores_shape)
    of_documents = scores.view(-1, problem.all_documents)
    kept = rows.weights.new_zeros(problem.winners_shape) if with_lse else None
    for block in _blocks(problem, tensors, masks[1]):
        first, last = block.queries.start * length, block.queries.stop * length
        sums = scores.new_zeros(block.values.shape[0], last - first)
        for part in _parts(block, first, last):
            lse = _exponents(problem, rows, block, part, beta).logsumexp(dim=1)
            if block.active is not None:
                lse.masked_fill_(~block.active.any(dim=1, keepdim=True), 0.0)
            if kept is not None:
                kept[block.documents, part.start % problem.rows : (part.stop - 1) % problem.rows + 1] = lse
            of_part = (lse / beta).masked_fill_(rows.weights[part] == 0.0, 0.0) * rows.weights[part]
            sums[:, part.start - first : part.stop - first] = of_part
        queries = block.queries if problem.groups == 1 else slice(0, 1)
        of_documents[queries, block.documents] = sums.unflatten(1, (-1, length)).sum(dim=2).T
    return scores, kept


def soft_blocked_backward(
    problem: Problem, tensors: Tensors, beta: Tensor, grad_scores: Tensor, lse: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of beta, queries and documents, in their shapes and types; the probabilities are computed once."""
    need_beta, need_queries, need_documents = needs
    masks = checked_masks(tensors)
    rows, length = _rows(problem, tensors, masks[0]), problem.query_length
    of_scores = grad_scores.to(rows.values.dtype).reshape(-1, problem.all_documents)
    slope = torch.zeros((), dtype=torch.float64, device=problem.device)
    grad_rows = torch.zeros_like(rows.values) if need_queries else None
    grad_documents = None
    if need_documents:
        grad_documents = torch.zeros_like(tensors.documents, memory_format=torch.contiguous_format)
    for block in _blocks(problem, tensors, masks[1]):
        values = block.values.flatten(0, 1).to(rows.values.dtype)
        total = torch.zeros_like(values)
        for part in _parts(block, block.queries.start * length, block.queries.stop * length):
            inside = slice(part.start % problem.rows, (part.stop - 1) % problem.rows + 1)
            exponents = _exponents(problem, rows, block, part, beta)
            probabilities = exponents.sub_(lse[block.documents, inside].unsqueeze(1)).exp_()
            query = torch.arange(part.start, part.stop, device=problem.device) // length
            of_rows = of_scores[query if problem.groups == 1 else query * 0, block.documents].T * rows.weights[part]
            if block.active is not None:
                of_rows = of_rows.masked_fill(~block.active.any(dim=1, keepdim=True), 0.0)
            if need_beta:
                # The derivative of (1 / beta) log(sum(exp(beta s))) is minus the entropy over the square of beta.
                entropy = torch.special.entr(probabilities).sum(dim=1)
                slope -= (entropy * of_rows).masked_fill_(of_rows == 0.0, 0.0).sum(dtype=torch.float64)
            flows = probabilities.mul_(of_rows.unsqueeze(1))
            # What has no weight may have a probability that is no number.
            flows.masked_fill_((rows.weights[part] == 0.0), 0.0)
            if block.active is not None:
                flows.masked_fill_(~block.active.unsqueeze(2), 0.0)
            flows = flows.flatten(0, 1)
            if grad_documents is not None:
                scaled = rows.values[part]
                total += flows @ (scaled if rows.scale is None else scaled * rows.scale[part].unsqueeze(1))
            if grad_rows is not None:
                grad_rows[part] += flows.T @ (
                    values if block.scale is None else values * block.scale.flatten().unsqueeze(1)
                )
        if grad_documents is not None:
            scale = None if block.scale is None else block.scale.flatten()
            grad = unscaled(total, block.values.flatten(0, 1), scale).view(block.values.shape)
            if block.tokens is None:
                grad_documents.view(-1, *grad.shape[1:])[block.documents] = grad
            else:
                grad_documents[block.tokens[block.active]] = grad[block.active]
    return (
        (slope / beta.double().square()).to(beta.dtype) if need_beta else None,
        None if grad_rows is None else _of_queries(problem, tensors, rows, grad_rows),
        grad_documents,
    )


def _rows(problem: Problem, tensors: Tensors, mask: Tensor | None) -> _Rows:
    """All query rows, in the accumulation dtype; `mask` holds bool or weights."""
    queries, dtype = tensors.queries, accumulation_dtype(tensors.queries.dtype)
    tokens = exist = None
    if tensors.queries_cu_seqlens is not None:
        bounds = host_bounds_of(problem, tensors)[0]
        tokens, exist = padded_tokens(bounds, np.arange(problem.n_queries), problem.device, problem.query_length)
        tokens, exist = tokens.flatten(), exist.flatten()
        # There is a token, or the problem is empty.
        values, weights = queries[tokens], exist.to(dtype)
    else:
        values = queries.flatten(0, 1)
        weights = values.new_ones(len(values), dtype=dtype) if mask is None else mask.flatten().to(dtype)
    values = values.to(dtype).masked_fill(weights.unsqueeze(1) == 0.0, 0.0)
    return _Rows(values, weights, inverse_norms(values) if problem.normalize else None, tokens, exist)


def _of_queries(problem: Problem, tensors: Tensors, rows: _Rows, grad_rows: Tensor) -> Tensor:
    """The gradient of the queries, in their shape and type, from that of their rows."""
    grad = unscaled(grad_rows, rows.values, rows.scale).to(tensors.queries.dtype)
    if rows.tokens is None or rows.exist is None:
        return grad.view(tensors.queries.shape)
    found = torch.zeros_like(tensors.queries, memory_format=torch.contiguous_format)
    found[rows.tokens[rows.exist]] = grad[rows.exist]
    return found


def _blocks(problem: Problem, tensors: Tensors, mask: Tensor | None) -> Iterator[_Block]:
    """All documents with the queries that they meet, few enough at a time to leave room for rows."""
    budget = block_budget(problem.device) // max(problem.size, min(problem.rows, _ROWS))
    if problem.packed:
        _, bounds, candidates = host_bounds_of(problem, tensors)
        lengths = np.diff(bounds)
    else:
        documents = tensors.documents.flatten(0, -3)
        mask = None if mask is None else mask.reshape(documents.shape[:2])
        lengths = np.full(problem.all_documents, problem.document_length)
        candidates = np.arange(problem.groups + 1) * problem.n_documents
    if candidates is None or problem.groups == 1:
        meetings = [(slice(0, problem.n_queries), 0, problem.all_documents)]
    else:
        meetings = [(slice(i, i + 1), candidates[i], candidates[i + 1]) for i in range(problem.n_queries)]
    for queries, start, stop in meetings:
        for block in runs(lengths, int(start), int(stop), budget):
            tokens, active = None, None
            if problem.packed:
                tokens, active = padded_tokens(bounds, np.arange(block.start, block.stop), problem.device)
                values = tensors.documents[tokens]
            else:
                values, active = documents[block], None if mask is None else mask[block]
            if active is not None:
                values = values.masked_fill(~active.unsqueeze(-1), 0.0)
            scale = inverse_norms(values) if problem.normalize else None
            yield _Block(block, queries, tokens, values, active, scale)


def _parts(block: _Block, first: int, last: int) -> Iterator[slice]:
    """The rows of a block, so many at a time."""
    step = max(1, block_budget(block.values.device) // block.values.shape[:2].numel())
    for start in range(first, last, step):
        yield slice(start, min(start + step, last))


def _exponents(problem: Problem, rows: _Rows, block: _Block, part: slice, beta: Tensor) -> Tensor:
    """beta * similarity, [documents, Ld, rows], of masked tokens what `masking` says."""
    products = inner_products(block.values.flatten(0, 1), rows.values[part])
    if block.scale is not None:
        products = products * block.scale.flatten().unsqueeze(1)
    products = products * (beta if rows.scale is None else beta * rows.scale[part])
    exponents = products.view(*block.values.shape[:2], -1)
    if block.active is not None:
        exponents.masked_fill_(~block.active.unsqueeze(2), 0.0 if problem.kind.zero_masked else -torch.inf)
    return exponents
