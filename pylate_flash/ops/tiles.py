"""Blocked iteration over all similarities of a call in plain torch, for padded and packed tokens.

A block is a range of documents. Its parts are the query tokens (rows) scored against them: those of all queries, of
the one query that owns the documents, or, if queries have few documents of their own, a batch of several queries.
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

# The number of rows per part leaves room for at least this many document tokens.
_TOKENS = 256


class Operands(NamedTuple):
    """The operands of a call. Rows are the tokens of all queries, concatenated."""

    # [rows, d]; documents: packed [T, d], [Nd, Ld, d] or [Nq, K, Ld, d].
    queries: Tensor
    documents: Tensor
    # weights [rows], bool or in the accumulation dtype; mask of padded documents, bool. None: weight 1, all active.
    weights: Tensor | None
    mask: Tensor | None
    # Inverse norms, or None.
    queries_scale: Tensor | None
    documents_scale: Tensor | None
    # Boundaries of queries in rows; of packed documents in tokens, or None; and of each query's candidates in
    # documents, or None if all queries are scored against all documents.
    query_bounds: np.ndarray
    document_bounds: np.ndarray | None
    candidates: np.ndarray | None
    # Result columns per query, and the result column of each row, or None: the identity.
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
        """Number of documents of all queries."""
        bounds = self.document_bounds
        return self.documents.shape[:-2].numel() if bounds is None else len(bounds) - 1

    def longest(self, start: int, stop: int) -> int:
        """Length of the longest of documents `start` to `stop`, padding included."""
        if self.document_bounds is None:
            return self.documents.shape[-2] if start < stop else 0
        return int(np.diff(self.document_bounds[start : stop + 1]).max(initial=0))

    def runs(self, start: int, stop: int, budget: int, padded: bool = True) -> list[slice]:
        """Runs of consecutive documents with at most `budget` tokens, `padded` to the longest or not; at least one."""
        if self.document_bounds is None:
            step = max(1, budget // self.documents.shape[-2])
            return [slice(first, min(first + step, stop)) for first in range(start, stop, step)]
        if padded:
            spans = runs(np.diff(self.document_bounds[start : stop + 1]), budget)
        else:
            spans = sequence_blocks(self.document_bounds[start : stop + 1], budget)
        return [slice(start + first, start + last) for first, last in spans]

    def part(self, rows: slice | Tensor, shape: Sequence[int], counted: Tensor | None, *fields: Any) -> Part:
        """The part of these rows, viewed as `shape` [B, R], with weight 0 where not `counted`, and its other fields."""
        weights, scale = (
            None if values is None else values[rows].view(shape) for values in (self.weights, self.queries_scale)
        )
        if counted is not None:
            weights = counted if weights is None else weights * counted
        return Part(self.queries[rows].view(*shape, -1), weights, scale, *fields)

    def in_columns(self, values: Tensor) -> Tensor:
        """A per-row tensor as [groups, result columns, ...], with zeros where there is no row."""
        if self.columns is not None:
            padded = values.new_zeros(self.n_queries * self.query_length, *values.shape[1:])
            padded[self.columns] = values
            values = padded
        return values.unflatten(0, (1 if self.candidates is None else self.n_queries, -1))

    def tokens(self, tensor: Tensor, documents: slice) -> Tensor:
        """The entries of a tensor in the documents' layout for these documents, flattened to one per token.

        With candidates, `documents` covers full groups, or a part of one group.
        """
        if self.document_bounds is not None:
            return tensor[self.document_bounds[documents.start] : self.document_bounds[documents.stop]]
        if self.documents.dim() == 4:
            count = tensor.shape[1]
            group, first = divmod(documents.start, count)
            stop = documents.stop - group * count
            if stop > count:
                return tensor[group : group + stop // count].flatten(0, 2)
            tensor, documents = tensor[group], slice(first, stop)
        return tensor[documents].flatten(0, 1)


def operands_of(problem: Problem, tensors: Tensors) -> Operands:
    """The operands of a call with at least one token; checks its masks."""
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
        candidates = np.arange(problem.groups + 1) * problem.n_documents if problem.groups > 1 else None
        bounds = np.arange(problem.n_queries + 1) * problem.query_length, None, candidates
    length, columns = problem.query_length, None
    if len(queries) != problem.n_queries * length:
        firsts = np.arange(problem.n_queries) * length - bounds[0][:-1]
        columns = torch.from_numpy(np.repeat(firsts, np.diff(bounds[0])) + np.arange(len(queries))).to(problem.device)
    fields = *scales, *bounds, length, columns, problem.kind.zero_masked
    return Operands(queries, documents, weights, mask, *fields)


class Part(NamedTuple):
    """Rows [B, R, d] of a block's batches, with their weights and scales [B, R]."""

    rows: Tensor
    weights: Tensor | None
    scale: Tensor | None
    # The result columns, and, for a single batch, the rows of the operands.
    columns: slice | Tensor = slice(0)
    of: slice = slice(0)
    # Rows of the scores [Nq, Nd] (the only row if documents belong to one query), and the query that owns each row,
    # counted from the first (None: all queries have the same number of rows).
    queries: slice = slice(0)
    owners: Tensor | None = None

    def add(self, scores: Tensor, documents: slice, values: Tensor) -> None:
        """Sum the values [documents, R] of each query's rows into the scores [Nq, Nd], or [1, Nd]."""
        count = self.queries.stop - self.queries.start
        if self.owners is None:
            sums = values.unflatten(1, (count, -1)).sum(dim=2)
        else:
            sums = values.new_zeros(len(values), count).index_add_(1, self.owners, values)
        scores[self.queries, documents].add_(sums.T)

    def spread(self, grad_scores: Tensor, documents: slice) -> Tensor:
        """The backward of `add`: the gradient of its values, [documents, R], given that of the scores."""
        grad = grad_scores[self.queries, documents].T
        if self.owners is not None:
            return grad.index_select(1, self.owners)
        return grad.repeat_interleave(self.rows.shape[1] // grad.shape[1], dim=1)


class Block:
    """A range of documents, numbered across all queries, and the parts scored against them; B batches of M documents.

    `documents` is the range, `values` are its tokens [T, d], and `scale` [T] their inverse norms, or None. The longest
    document has `length` tokens. `mask` [documents, length] marks active tokens of padded documents (None: all).
    """

    def __init__(self, operands: Operands, documents: slice, batches: int = 1, parts: list[Part] | None = None) -> None:
        self.documents, self.batches, self.parts = documents, batches, parts or []
        self.count = documents.stop - documents.start
        self.values = operands.tokens(operands.documents, documents)
        scale, mask = operands.documents_scale, operands.mask
        self.scale = None if scale is None else operands.tokens(scale, documents)
        self.length = operands.longest(documents.start, documents.stop)
        self.mask = None if mask is None else operands.tokens(mask, documents).view(self.count, self.length)
        # The similarity of a masked token.
        self._masked = 0.0 if operands.zero_masked else -torch.inf
        # Set only if documents differ in length.
        self._bounds: np.ndarray | None = None
        if operands.document_bounds is not None and len(self.values) != self.count * self.length:
            bounds = operands.document_bounds[documents.start : documents.stop + 1]
            self._bounds = bounds - bounds[0]

    @property
    def starts(self) -> Tensor:
        """Index of the first token of each document [documents, 1]."""
        bounds = np.arange(self.count + 1) * self.length if self._bounds is None else self._bounds
        return torch.from_numpy(bounds[:-1]).to(self.values.device).unsqueeze(1)

    @cached_property
    def lengths(self) -> Tensor | None:
        """Lengths [documents, 1] if documents differ in length, else None."""
        return None if self._bounds is None else torch.from_numpy(np.diff(self._bounds)).to(self.values.device)[:, None]

    @cached_property
    def exist(self) -> Tensor | None:
        """Mask [documents, length] of tokens that exist if documents differ in length, else None."""
        return None if self.lengths is None else torch.arange(self.length, device=self.values.device) < self.lengths

    @cached_property
    def empty(self) -> Tensor | None:
        """Mask [documents, 1] of documents without an active token; None: no such document."""
        if self.lengths is not None:
            return self.lengths == 0
        return None if self.mask is None else ~self.mask.any(dim=1, keepdim=True)

    def _products(self, part: Part) -> Tensor:
        """Similarities [T, R] of a single batch in the accumulation dtype, before the rows' inverse norms."""
        products = inner_products(self.values, part.rows[0])
        return products if self.scale is None else products.mul_(self.scale.unsqueeze(1))

    def similarities(self, part: Part, active: Tensor | None) -> Tensor:
        """Similarities [documents, length, R] in the accumulation dtype, not yet scaled by the rows' inverse norms.

        Tokens that are not `active` are masked. Past the end of a document, its last token is repeated, which changes
        neither the maximum nor the lowest index that attains it.
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
        """The largest similarities [documents, R]; undefined for a document without an active token."""
        if self._bounds is None or self.batches > 1:
            return self.similarities(part, self.mask).amax(dim=1)
        products = self._products(part)
        owners = torch.from_numpy(np.repeat(np.arange(self.count), np.diff(self._bounds))).to(products.device)
        best = products.new_full((self.count, products.shape[1]), -torch.inf)
        return best.scatter_reduce_(0, owners.unsqueeze(1).expand_as(products), products, "amax")

    def argmax(self, part: Part) -> tuple[Tensor, Tensor]:
        """The maxima, and the first token that attains each; -1 where no token receives a gradient."""
        best, argmax = self.similarities(part, self.mask).max(dim=1)
        if self.lengths is not None:
            # A product may have rounded the copies of a document's last token differently.
            argmax = argmax.minimum(self.lengths - 1)
        dropped = best == -torch.inf
        if self.mask is not None and self._masked == 0.0:
            dropped |= ~self.mask.gather(1, argmax)
        return best, argmax.masked_fill_(dropped, -1)

    def per_document(self, values: Tensor) -> Tensor:
        """Expand per-batch row values [B, R] to all documents: [documents, R], or [1, R] for a single batch."""
        repeats = self.count // self.batches
        return values if self.batches == 1 or repeats == 1 else values.repeat_interleave(repeats, dim=0)


def blocks(operands: Operands, together: bool = True, padded: bool = True) -> Iterator[Block]:
    """Blocks over all documents, each with at most `block_budget` similarities, or one row and one document.

    `together`: queries with few documents of their own may share a block, which repeats a query per document.
    `padded`: whether similarities of documents of different lengths are padded to one length.
    """
    budget, bounds = block_budget(operands.device), operands.query_bounds
    if operands.candidates is None:
        query_ranges = [(0, operands.n_queries)]
    elif together:
        query_ranges = groups_at_once(operands, budget)
    else:
        query_ranges = [(query, query + 1) for query in range(operands.n_queries)]
    for first, last in query_ranges:
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
        max_rows = max([part.rows.shape[1] for part in parts])
        for run in operands.runs(start, stop, budget // max_rows, padded):
            block = Block(operands, run, 1, parts)
            if block.length:
                yield block


def _parts(operands: Operands, first: int, last: int, max_rows: int) -> list[Part]:
    """Parts of queries `first` to `last`, with at most `max_rows` rows: of several queries, or a chunk of one query."""
    bounds, parts = operands.query_bounds, []
    for start, stop in sequence_blocks(bounds[first : last + 1], max_rows):
        queries, begin, end = slice(start, stop), int(bounds[first + start]), int(bounds[first + stop])
        step = max_rows if stop - start == 1 else max(1, end - begin)
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
    """The documents of several queries in one block, with one batch per query or per document."""
    assert operands.candidates is not None
    bounds, numbers = operands.query_bounds, np.arange(queries.start, queries.stop)
    row_slice = slice(int(bounds[queries.start]), int(bounds[queries.stop]))
    rows: slice | Tensor = row_slice
    exist, shape = None, (len(numbers), operands.query_length)
    if operands.document_bounds is not None:
        counts = np.diff(operands.candidates[queries.start : queries.stop + 1])
        numbers = numbers if counts.min() == counts.max() else np.repeat(numbers, counts)
        padded, exist = padded_tokens(bounds, numbers, operands.device)
        rows, shape = padded.flatten(), (len(numbers), padded.shape[1])
    part = operands.part(rows, shape, exist, slice(0, shape[1]), row_slice, slice(0, 1))
    return Block(operands, documents, len(numbers), [part])


def groups_at_once(operands: Operands, budget: int) -> list[tuple[int, int]]:
    """Ranges of consecutive queries whose documents, padded to one length, fit `budget`; at least one query."""
    assert operands.candidates is not None
    n_queries, budget = operands.n_queries, budget // max(operands.documents.shape[-1], operands.query_length)
    if operands.document_bounds is None:
        step = max(1, budget // operands.documents.shape[1:3].numel())
        return [(first, min(first + step, n_queries)) for first in range(0, n_queries, step)]
    counts, longest = np.diff(operands.candidates), np.zeros(n_queries, dtype=np.int64)
    np.maximum.at(longest, np.repeat(np.arange(n_queries), counts), np.diff(operands.document_bounds))
    return runs(longest, budget, counts)


def padded_tokens(bounds: np.ndarray, sequences: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Token indices [N, L] of these sequences, clamped to the last token of each, and their mask (None: all exist).

    L is the length of the longest, at least 1.
    """
    starts, ends = bounds[sequences, None], bounds[sequences + 1, None]
    tokens = starts + np.arange(max(1, (ends - starts).max()))
    exist = tokens < ends
    if exist.all():
        return torch.from_numpy(tokens).to(device), None
    return torch.from_numpy(np.minimum(tokens, np.maximum(ends - 1, 0))).to(device), torch.from_numpy(exist).to(device)


def group_runs(groups: int, count: int, limit: int) -> list[slice]:
    """Ranges of at most `limit` documents, at least one, in groups of `count`: several full groups, or part of one.

    As few ranges as possible, of even size: a short last range would leave a GPU idle.
    """
    if limit >= count:
        step = _even(groups, limit // count) * count
        return [slice(first, min(first + step, groups * count)) for first in range(0, groups * count, step)]
    step = _even(count, max(1, limit))
    starts = [(group * count, first) for group in range(groups) for first in range(0, count, step)]
    return [slice(start + first, start + min(first + step, count)) for start, first in starts]


def _even(count: int, limit: int) -> int:
    """The part size that splits `count` evenly into the fewest parts of at most `limit`."""
    return -(-count // -(-count // limit))


def runs(lengths: np.ndarray, budget: int, counts: np.ndarray | None = None) -> list[tuple[int, int]]:
    """Ranges of consecutive sequences with at most `budget` tokens, padded to the longest of the range; at least one.

    With `counts`, each item is a group of that many sequences, and `lengths` holds the longest length per group.
    """
    counts = np.ones_like(lengths) if counts is None else counts
    spans, first, total, longest = [], 0, 0, 0
    for index, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        total, longest = total + count, max(longest, length)
        if index > first and total * longest > budget:
            spans.append((first, index))
            first, total, longest = index, count, length
    return [*spans, (first, len(lengths))] if len(lengths) else spans


def sequence_blocks(bounds: np.ndarray, budget: int, most: int | None = None) -> list[tuple[int, int]]:
    """Ranges of consecutive sequences whose tokens fit `budget`, `most` at a time; a longer one is a range of its own.

    At least one range, even if there are no sequences.
    """
    spans, first, count = [], 0, len(bounds) - 1
    most = count if most is None else most
    if count <= most and bounds[-1] - bounds[0] <= budget:
        return [(0, count)]
    while first < count:
        last = int(np.searchsorted(bounds, bounds[first] + max(1, budget), side="right")) - 1
        last = min(max(last, first + 1), first + most)
        spans.append((first, last))
        first = last
    return spans
