"""What query tokens retrieve of a pool of documents: found in blocks of plain torch, and what of it scores.

Rows are query tokens. A row retrieves k tokens of the pool: those with the largest similarities, of equal ones the
first. So it retrieves whatever lies above its threshold, the k-th largest similarity, and as many of those equal to it
as are left. A document's best token scores if it is retrieved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..problem import Problem, Results, Rule, Tensors
from .products import block_budget, inner_products


def chunks(problem: Problem, tensors: Tensors, to: Results, number: int) -> Iterator[tuple[Problem, Tensors, Results]]:
    """The call, `number` of its queries at a time, with where their results go."""
    if number >= problem.n_queries:
        yield problem, tensors, to
        return
    mask, length = tensors.queries_mask, problem.query_length
    for first in range(0, problem.n_queries, number):
        chunk = slice(first, min(first + number, problem.n_queries))
        yield (
            problem._replace(n_queries=chunk.stop - first),
            tensors._replace(queries=tensors.queries[chunk], queries_mask=None if mask is None else mask[chunk]),
            Results(to.scores[chunk], to.winners[:, first * length : chunk.stop * length], to.divisors[chunk]),
        )


class Pool(NamedTuple):
    """The documents that query tokens retrieve from.

    Attributes
    ----------
    rule
        How rows retrieve.
    counts
        [Nd], int64: active tokens of each document.
    complete
        [Nd], bool: whether, after all active tokens, all masked ones of the document are retrieved too.
    """

    rule: Rule
    counts: Tensor
    complete: Tensor

    @property
    def nonempty(self) -> Tensor:
        """[Nd, 1]: whether a document has an active token."""
        return (self.counts > 0).unsqueeze(1)


def pool_of(active: Tensor, rule: Rule) -> Pool:
    """The pool of documents whose tokens are `active` [Nd, Ld] or not."""
    counts = active.sum(dim=1)
    masked = active.shape[1] - counts
    # Masked tokens come after all active ones, in their order.
    complete = (masked == 0) | (masked.cumsum(0) <= rule.k - counts.sum())
    return Pool(rule, counts, complete)


class Retrieval(NamedTuple):
    """What rows retrieve.

    Attributes
    ----------
    best, winners
        [Nd, rows]: the best similarity of a row with a document, NaN if any is, and the lowest index that attains it.
        Undefined where a document has no active token.
    thresholds
        [rows]: what lies above is retrieved, and unless rows are tallied, what is equal too.
    n_equal
        [rows], int32: of rows that are tallied, how many of the tokens equal to the threshold are retrieved.
    tallied
        [rows], bool: the rows of which tokens had to be counted, because not all that equal the threshold are
        retrieved, or documents may be retrieved as a whole with a negative best. None: there is none.
    above, equal
        [Nd, rows]: of rows that are tallied, a document's tokens above the threshold, NaN among them, and equal to it.
        Undefined for others.
    """

    best: Tensor
    winners: Tensor
    thresholds: Tensor
    n_equal: Tensor
    tallied: Tensor | None = None
    above: Tensor | None = None
    equal: Tensor | None = None


def scores_in_blocks(problem: Problem, tensors: Tensors, rule: Rule, number: int, to: Results) -> None:
    """Leave the results of a call in `to`, `number` queries at a time; no size is 0.

    The mask of documents is bool, that of queries bool or weights.
    """
    mask, documents = tensors.documents_mask, tensors.documents
    active = documents.new_ones(documents.shape[:2], dtype=torch.bool) if mask is None else mask
    pool = pool_of(active, rule)
    # Under autocast the inputs have the autocast type already; the products inside must not be rounded to it.
    with torch.autocast(problem.device.type, enabled=False):
        for chunk, given, results in chunks(problem, tensors, to, number):
            _score(retrieve_in_blocks(chunk, given, pool), pool, given.queries_mask, problem.empty_score, results)


def _score(found: Retrieval, pool: Pool, mask: Tensor | None, empty_score: float, to: Results) -> None:
    """Leave the results of what rows retrieve in `to`; `mask` [Nq, Lq] of the query tokens is bool, or has weights."""
    counts, whole = scoring(found, pool)
    if pool.rule.with_whole:
        # A token that was not retrieved counts as 0, and wins over negative ones.
        counts &= ~(found.best <= 0) | whole
    if mask is not None:
        counts &= mask.flatten() != 0
    best = found.best.where(counts, 0.0)
    if mask is not None and mask.is_floating_point():
        best = best * mask.flatten()
    counted = (best > 0) if pool.rule.with_whole else counts
    sums, numbers = (
        values.unflatten(1, (len(to.scores), -1)).sum(dim=2, dtype=best.dtype) for values in (best, counted)
    )
    to.divisors.copy_(numbers.T).clamp_(min=pool.rule.least)
    to.scores.copy_(sums.T).div_(to.divisors).masked_fill_(pool.counts == 0, empty_score)
    to.winners.copy_(found.winners.where(counts, -1))


def scoring(found: Retrieval, pool: Pool) -> tuple[Tensor, Tensor]:
    """Which documents a row retrieves a token of, and which of them as a whole, [Nd, rows]; False for empty ones.

    What is retrieved as a whole is told only if the pool asks for it and the best similarity is not positive.
    """
    nan = found.best.isnan()
    retrieved = (found.best >= found.thresholds) | nan
    whole = torch.zeros_like(retrieved)
    if found.tallied is not None:
        assert found.above is not None
        assert found.equal is not None
        before = found.equal.cumsum(dim=0, dtype=torch.int32) - found.equal
        count = found.above + (found.n_equal - before).clamp(min=0).minimum(found.equal)
        # Where nothing was counted, all that reaches the threshold is retrieved.
        retrieved &= (count > 0) | ~found.tallied | nan
        if pool.rule.with_whole:
            whole = found.tallied & (count >= pool.counts.unsqueeze(1)) & pool.complete.unsqueeze(1)
    return retrieved & pool.nonempty, whole


def retrieve_in_blocks(problem: Problem, tensors: Tensors, pool: Pool) -> Retrieval:
    """What query tokens [Nq, Lq, d] retrieve of documents [Nd, Ld, d] with a bool mask or none; no size is 0.

    A block of similarities of a few rows with all documents is held at a time.
    """
    queries, documents, _, mask, *_ = tensors
    rows, pooled = queries.flatten(0, 1), documents.flatten(0, 1)
    step = max(1, block_budget(problem.device) // problem.n_tokens)
    blocks = [_block(rows[first : first + step], pooled, mask, pool) for first in range(0, len(rows), step)]
    best, winners, thresholds, n_equal, tallied = (
        torch.cat(parts, dim=-1) for parts in zip(*(block[:5] for block in blocks), strict=True)
    )
    found = Retrieval(best, winners, thresholds, n_equal)
    if all(block.above is None for block in blocks):
        return found
    above, equal = (
        torch.cat(
            [torch.zeros_like(b.winners) if part is None else part for b, part in zip(blocks, parts, strict=True)], 1
        )
        for parts in ([block.above for block in blocks], [block.equal for block in blocks])
    )
    return found._replace(tallied=tallied, above=above, equal=equal)


def _block(rows: Tensor, pooled: Tensor, mask: Tensor | None, pool: Pool) -> Retrieval:
    """What rows [R, d] retrieve of the tokens [Nd * Ld, d]; `tallied` is always there."""
    n_documents = len(pool.counts)
    similarities = inner_products(pooled, rows).T.contiguous()
    if mask is not None:
        similarities.masked_fill_(~mask.flatten(), -torch.inf)
    # -inf where masked tokens are left to be retrieved; then all active ones are.
    highest = similarities.topk(pool.rule.k, dim=1, sorted=False).values
    thresholds = highest.masked_fill_(highest.isnan(), torch.inf).amin(dim=1)
    below = similarities < thresholds.unsqueeze(1)
    tallied = len(pooled) - below.sum(dim=1, dtype=torch.int32) > pool.rule.k
    if pool.rule.with_whole:
        tallied |= thresholds <= 0
    by_document = similarities.unflatten(1, (n_documents, -1))
    best, winners = by_document.max(dim=2)
    found = Retrieval(best.T, winners.T, thresholds, torch.zeros_like(thresholds, dtype=torch.int32), tallied)
    # To know that none is tallied, a GPU would be waited for.
    if similarities.device.type == "cpu" and not tallied.any():
        return found
    equal = similarities == thresholds.unsqueeze(1)
    above = ~(below | equal)
    if mask is not None:
        equal &= mask.flatten()
    counts = (x.view(by_document.shape).sum(dim=2, dtype=torch.int32).T for x in (above, equal))
    n_equal = pool.rule.k - above.sum(dim=1, dtype=torch.int32)
    return found._replace(n_equal=n_equal, above=next(counts), equal=next(counts))
