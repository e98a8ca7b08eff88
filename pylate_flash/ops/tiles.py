"""The one way through all similarities of a call in blocks of plain torch, for padded and packed tokens alike.

A block is some documents, and its parts are the query tokens, rows, that meet them: those of all queries, or of the one
that has the documents, or, where queries have few documents of their own, a batch of several queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..problem import Problem, Tensors, accumulation_dtype
from .checks import checked_mask
from .norms import in_range
from .packing import host_bounds_of
from .products import block_budget, inner_products

# So many tokens of documents at least leave rows room for them.
_TOKENS = 256


class Operands(NamedTuple):
    """What a call computes with. Rows are the tokens of all queries, one after the other."""

    # [rows, d], and [T, d] packed, [Nd, Ld, d] or [Nq, K, Ld, d].
    queries: Tensor
    documents: Tensor
    # [rows], bool or in the accumulation dtype, how often a row counts; of padded documents, bool. None: once, all.
    weights: Tensor | None
    mask: Tensor | None
    # One over the norms, or None.
    queries_scale: Tensor | None
    documents_scale: Tensor | None
    # Boundaries of queries among rows; of packed documents among tokens, or None; and of the documents of each query
    # among all documents, or None where all queries meet all of them.
    query_bounds: np.ndarray
    document_bounds: np.ndarray | None
    candidates: np.ndarray | None
    # Results have so many columns for a query; in which of them each row stands, or None: row by row.
    query_length: int
    columns: Tensor | None = None
    # Whether the similarity of a masked token counts as 0.
    zero_masked: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return accumulation_dtype(self.queries.dtype)

    @property
    def device(self) -> torch.device:
        return self.queries.device

    @property
    def n_queries(self) -> int:
        return len(self.query_bounds) - 1

    @property
    def n_documents(self) -> int:
        """Of all queries."""
        bounds = self.document_bounds
        return self.documents.shape[:-2].numel() if bounds is None else len(bounds) - 1

    def longest(self, start: int, stop: int) -> int:
        """Tokens of the longest of some documents, padding included."""
        if self.document_bounds is None:
            return self.documents.shape[-2] if start < stop else 0
        return int(np.diff(self.document_bounds[start : stop + 1]).max(initial=0))

    def runs(self, start: int, stop: int, budget: int, padded: bool = True) -> list[slice]:
        """Consecutive documents of at most `budget` tokens, padded to the longest of them or not; or one alone."""
        if self.document_bounds is None:
            step = max(1, budget // self.documents.shape[-2])
            return [slice(first, min(first + step, stop)) for first in range(start, stop, step)]
        if padded:
            found = runs(np.diff(self.document_bounds[start : stop + 1]), budget)
        else:
            found = sequence_blocks(self.document_bounds[start : stop + 1], budget)
        return [slice(start + first, start + last) for first, last in found]

    def part(self, rows: slice | Tensor, shape: Sequence[int], counted: Tensor | None, *others: Any) -> Part:
        """The part of these rows, as many as [B, R], of which those count that are `counted`, with its other fields."""
        weights, scale = (
            None if of_rows is None else of_rows[rows].view(shape) for of_rows in (self.weights, self.queries_scale)
        )
        if counted is not None:
            weights = counted if weights is None else weights * counted
        return Part(self.queries[rows].view(*shape, -1), weights, scale, *others)

    def in_columns(self, of_rows: Tensor) -> Tensor:
        """A tensor of all rows as [groups, columns of results, ...], with zeros where there is no row."""
        if self.columns is not None:
            padded = of_rows.new_zeros(self.n_queries * self.query_length, *of_rows.shape[1:])
            padded[self.columns] = of_rows
            of_rows = padded
        return of_rows.unflatten(0, (1 if self.candidates is None else self.n_queries, -1))

    def tokens(self, of_all: Tensor, documents: slice) -> Tensor:
        """What the tokens of some documents have of a tensor of the documents' layout, one after the other.

        Of candidates, these are whole groups, or some of one group.
        """
        if self.document_bounds is not None:
            return of_all[self.document_bounds[documents.start] : self.document_bounds[documents.stop]]
        if self.documents.dim() == 4:
            count = of_all.shape[1]
            group, first = divmod(documents.start, count)
            stop = documents.stop - group * count
            if stop > count:
                return of_all[group : group + stop // count].flatten(0, 2)
            of_all, documents = of_all[group], slice(first, stop)
        return of_all[documents].flatten(0, 1)


def operands_of(problem: Problem, tensors: Tensors) -> Operands:
    """The operands of a call that has tokens, after a look at its masks."""
    queries, documents = tensors[:2]
    weights = checked_mask("queries_mask", tensors.queries_mask, weights=True)
    mask = checked_mask("documents_mask", tensors.documents_mask)
    if weights is not None:
        weights = weights.flatten()
        weights = weights.to(problem.scores_dtype) if weights.is_floating_point() else weights
    if queries.dim() == 3:
        queries = queries.flatten(0, 1)
    scales: list[Tensor | None] = [None, None]
    if problem.normalize:
        (queries, documents), scales[:] = in_range((queries, documents))
    bounds: tuple[np.ndarray, np.ndarray | None, np.ndarray | None]
    if problem.packed:
        bounds = host_bounds_of(problem, tensors)
    else:
        own = np.arange(problem.groups + 1) * problem.n_documents if problem.groups > 1 else None
        bounds = np.arange(problem.n_queries + 1) * problem.query_length, None, own
    length, columns = problem.query_length, None
    if len(queries) != problem.n_queries * length:
        firsts = np.arange(problem.n_queries) * length - bounds[0][:-1]
        columns = torch.from_numpy(np.repeat(firsts, np.diff(bounds[0])) + np.arange(len(queries))).to(problem.device)
    others = *scales, *bounds, length, columns, problem.kind.zero_masked
    return Operands(queries, documents, weights, mask, *others)


class Part(NamedTuple):
    """Rows [B, R, d] of a block's batches, with their weights and scales [B, R]."""

    rows: Tensor
    weights: Tensor | None
    scale: Tensor | None
    # The columns of the results, and, of one batch, the rows of the operands.
    columns: slice | Tensor = slice(0)
    of: slice = slice(0)
    # The queries' rows of the scores [Nq, Nd], or the one row of documents that have a query of their own; and of which
    # of them each row is, counted from the first (None: as many of each).
    queries: slice = slice(0)
    owners: Tensor | None = None

    def add(self, scores: Tensor, documents: slice, values: Tensor) -> None:
        """Add what rows have of documents, [documents, R], to the scores [Nq, Nd], or [1, Nd]."""
        count = self.queries.stop - self.queries.start
        if self.owners is None:
            sums = values.unflatten(1, (count, -1)).sum(dim=2)
        else:
            sums = values.new_zeros(len(values), count).index_add_(1, self.owners, values)
        scores[self.queries, documents].add_(sums.T)

    def spread(self, grad_scores: Tensor, documents: slice) -> Tensor:
        """The gradient of what rows have of documents, [documents, R], of `add` to scores with this gradient."""
        grad = grad_scores[self.queries, documents].T
        if self.owners is not None:
            return grad.index_select(1, self.owners)
        return grad.repeat_interleave(self.rows.shape[1] // grad.shape[1], dim=1)


class Block:
    """Some documents, counted through all queries, with the parts that meet them; B batches of M documents each.

    `documents` tells which they are, `values` are their tokens [T, d], and `scale` [T] one over the norms, or None. The
    longest is of `length`. `mask` [documents, length] tells which tokens of padded documents are active (None: all).
    """

    def __init__(self, operands: Operands, documents: slice, batches: int = 1, parts: list[Part] | None = None) -> None:
        self.documents, self.batches, self.parts = documents, batches, parts or []
        self.count = documents.stop - documents.start
        self.values = operands.tokens(operands.documents, documents)
        scale, mask = operands.documents_scale, operands.mask
        self.scale = None if scale is None else operands.tokens(scale, documents)
        self.length = operands.longest(documents.start, documents.stop)
        self.mask = None if mask is None else operands.tokens(mask, documents).view(self.count, self.length)
        # The similarity of a token that is not active.
        self._masked = 0.0 if operands.zero_masked else -torch.inf
        # Of documents of several lengths.
        self._bounds: np.ndarray | None = None
        if operands.document_bounds is not None and len(self.values) != self.count * self.length:
            bounds = operands.document_bounds[documents.start : documents.stop + 1]
            self._bounds = bounds - bounds[0]

    @property
    def starts(self) -> Tensor:
        """The first token of each document [documents, 1]."""
        bounds = np.arange(self.count + 1) * self.length if self._bounds is None else self._bounds
        return torch.from_numpy(bounds[:-1]).to(self.values.device).unsqueeze(1)

    @cached_property
    def lengths(self) -> Tensor | None:
        """Of documents of several lengths, those [documents, 1], else None."""
        return None if self._bounds is None else torch.from_numpy(np.diff(self._bounds)).to(self.values.device)[:, None]

    @cached_property
    def exist(self) -> Tensor | None:
        """Which of so many tokens documents of several lengths have [documents, length], else None."""
        return None if self.lengths is None else torch.arange(self.length, device=self.values.device) < self.lengths

    @cached_property
    def empty(self) -> Tensor | None:
        """Which documents have no active token [documents, 1], or None: none."""
        if self.lengths is not None:
            return self.lengths == 0
        return None if self.mask is None else ~self.mask.any(dim=1, keepdim=True)

    def _products(self, part: Part) -> Tensor:
        """Similarities [T, R] of the one batch in the accumulation dtype; the rows' norms are still to come."""
        products = inner_products(self.values, part.rows[0])
        return products if self.scale is None else products.mul_(self.scale.unsqueeze(1))

    def similarities(self, part: Part, active: Tensor | None) -> Tensor:
        """Similarities [documents, length, R] in the accumulation dtype; the rows' norms are still to come.

        Tokens that are not `active` are masked. Past the end of a document they are those of its last token, which
        changes neither a maximum nor the lowest index that attains it.
        """
        tokens = None
        if self._bounds is not None:
            tokens = padded_tokens(self._bounds, np.arange(self.count), self.values.device)[0].flatten()
        if self.batches == 1:
            products = self._products(part)
            products = products if tokens is None else products.index_select(0, tokens)
        else:
            values, scale = self.values, self.scale
            if tokens is not None:
                values, scale = values.index_select(0, tokens), None if scale is None else scale.index_select(0, tokens)
            dtype = accumulation_dtype(values.dtype)
            products = torch.bmm(values.unflatten(0, (self.batches, -1)).to(dtype), part.rows.to(dtype).transpose(1, 2))
            if scale is not None:
                products *= scale.view(self.batches, -1, 1)
        similarities = products.view(self.count, self.length, -1)
        return similarities if active is None else similarities.masked_fill_(~active.unsqueeze(2), self._masked)

    def maxima(self, part: Part) -> Tensor:
        """The largest similarities [documents, R]; of a document without an active token, anything."""
        if self._bounds is None or self.batches > 1:
            return self.similarities(part, self.mask).amax(dim=1)
        products = self._products(part)
        owners = torch.from_numpy(np.repeat(np.arange(self.count), np.diff(self._bounds))).to(products.device)
        best = products.new_full((self.count, products.shape[1]), -torch.inf)
        return best.scatter_reduce_(0, owners.unsqueeze(1).expand_as(products), products, "amax")

    def argmax(self, part: Part) -> tuple[Tensor, Tensor]:
        """The same, and which tokens attain them, the first of equal ones; -1 where no gradient flows to one."""
        best, argmax = self.similarities(part, self.mask).max(dim=1)
        if self.lengths is not None:
            # A product may have rounded the copies of a document's last token differently.
            argmax = argmax.minimum(self.lengths - 1)
        dropped = best == -torch.inf
        if self.mask is not None and self._masked == 0.0:
            dropped |= ~self.mask.gather(1, argmax)
        return best, argmax.masked_fill_(dropped, -1)

    def per_document(self, of_rows: Tensor) -> Tensor:
        """What batches have of rows [B, R], for every document: [documents, R], or [1, R] of one batch."""
        each = self.count // self.batches
        return of_rows if self.batches == 1 or each == 1 else of_rows.repeat_interleave(each, dim=0)


def blocks(operands: Operands, together: bool = True, padded: bool = True) -> Iterator[Block]:
    """All documents, so many similarities at a time as `block_budget` tells, or those of a row with one document.

    `together`: queries with few documents of their own may go together, with copies of those that have several.
    `padded`: whether similarities of documents of several lengths are padded to one.
    """
    budget, bounds = block_budget(operands.device), operands.query_bounds
    if operands.candidates is None:
        meetings = [(0, operands.n_queries)]
    elif together:
        meetings = groups_at_once(operands, budget)
    else:
        meetings = [(query, query + 1) for query in range(operands.n_queries)]
    for first, last in meetings:
        start, stop = 0, operands.n_documents
        if operands.candidates is not None:
            start, stop = operands.candidates[[first, last]].tolist()
        longest = operands.longest(start, stop)
        if longest == 0 or bounds[first] == bounds[last]:
            continue
        if operands.candidates is not None and last - first > 1:
            yield _of_groups(operands, slice(first, last), slice(start, stop))
            continue
        parts = _parts(operands, first, last, max(1, budget // max(_TOKENS, longest)))
        most = max([part.rows.shape[1] for part in parts])
        for run in operands.runs(start, stop, budget // most, padded):
            block = Block(operands, run, 1, parts)
            if block.length:
                yield block


def _parts(operands: Operands, first: int, last: int, most: int) -> list[Part]:
    """The rows of some queries: those of as many queries as have `most`, or so many of one."""
    bounds, parts = operands.query_bounds, []
    for start, stop in sequence_blocks(bounds[first : last + 1], most):
        queries, begin, end = slice(start, stop), int(bounds[first + start]), int(bounds[first + stop])
        step = most if stop - start == 1 else max(1, end - begin)
        for row in range(begin, end, step):
            rows = slice(row, min(row + step, end))
            columns: slice | Tensor = rows
            owners = None
            if operands.candidates is not None:
                columns = slice(rows.start - begin, rows.stop - begin)
            elif operands.columns is not None:
                columns = operands.columns[rows]
                owners = columns // operands.query_length - start
            parts.append(operands.part(rows, (1, rows.stop - row), None, columns, rows, queries, owners))
    return parts


def _of_groups(operands: Operands, queries: slice, documents: slice) -> Block:
    """The documents of several queries in one block, of as many batches as there are queries, or documents."""
    assert operands.candidates is not None
    bounds, numbers = operands.query_bounds, np.arange(queries.start, queries.stop)
    of = slice(int(bounds[queries.start]), int(bounds[queries.stop]))
    rows: slice | Tensor = of
    exist, shape = None, (len(numbers), operands.query_length)
    if operands.document_bounds is not None:
        counts = np.diff(operands.candidates[queries.start : queries.stop + 1])
        numbers = numbers if counts.min() == counts.max() else np.repeat(numbers, counts)
        padded, exist = padded_tokens(bounds, numbers, operands.device)
        rows, shape = padded.flatten(), (len(numbers), padded.shape[1])
    part = operands.part(rows, shape, exist, slice(0, shape[1]), of, slice(0, 1))
    return Block(operands, documents, len(numbers), [part])


def groups_at_once(operands: Operands, budget: int) -> list[tuple[int, int]]:
    """Consecutive queries that fit into `budget` with their documents, all padded to one length; or one query alone."""
    assert operands.candidates is not None
    n_queries, budget = operands.n_queries, budget // max(operands.documents.shape[-1], operands.query_length)
    if operands.document_bounds is None:
        step = max(1, budget // operands.documents.shape[1:3].numel())
        return [(first, min(first + step, n_queries)) for first in range(0, n_queries, step)]
    counts, longest = np.diff(operands.candidates), np.zeros(n_queries, dtype=np.int64)
    np.maximum.at(longest, np.repeat(np.arange(n_queries), counts), np.diff(operands.document_bounds))
    return runs(longest, budget, counts)


def padded_tokens(bounds: np.ndarray, sequences: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The tokens [N, L] of these sequences, past the end of one its last, and which there are, or None: all.

    L is the length of the longest, or 1.
    """
    starts, ends = bounds[sequences, None], bounds[sequences + 1, None]
    tokens = starts + np.arange(max(1, (ends - starts).max()))
    exist = tokens < ends
    if exist.all():
        return torch.from_numpy(tokens).to(device), None
    return torch.from_numpy(np.minimum(tokens, np.maximum(ends - 1, 0))).to(device), torch.from_numpy(exist).to(device)


def group_runs(groups: int, count: int, most: int) -> list[slice]:
    """Consecutive documents of groups of `count`, at most `most`: all of several groups, or some of one; or one alone.

    As few as that takes, but of one size: a short last one would leave a GPU idle.
    """
    if most >= count:
        step = _even(groups, most // count) * count
        return [slice(first, min(first + step, groups * count)) for first in range(0, groups * count, step)]
    step = _even(count, max(1, most))
    starts = [(group * count, first) for group in range(groups) for first in range(0, count, step)]
    return [slice(start + first, start + min(first + step, count)) for start, first in starts]


def _even(count: int, most: int) -> int:
    """The size of as few equal parts of `count` as there are with at most `most` in each."""
    return -(-count // -(-count // most))


def runs(lengths: np.ndarray, budget: int, counts: np.ndarray | None = None) -> list[tuple[int, int]]:
    """Consecutive sequences of at most `budget` tokens, padded to the longest of them; or one alone.

    With `counts`, they are groups of so many sequences, of which `lengths` are those of the longest.
    """
    counts = np.ones_like(lengths) if counts is None else counts
    found, first, total, longest = [], 0, 0, 0
    for index, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        total, longest = total + count, max(longest, length)
        if index > first and total * longest > budget:
            found.append((first, index))
            first, total, longest = index, count, length
    return [*found, (first, len(lengths))] if len(lengths) else found


def sequence_blocks(bounds: np.ndarray, budget: int) -> list[tuple[int, int]]:
    """Consecutive sequences whose tokens fit into `budget` together; a longer sequence stands alone."""
    found, first = [], 0
    if bounds[-1] - bounds[0] <= budget:
        return [(0, len(bounds) - 1)]
    while first < len(bounds) - 1:
        last = int(np.searchsorted(bounds, bounds[first] + max(1, budget), side="right")) - 1
        last = max(last, first + 1)
        found.append((first, last))
        first = last
    return found
