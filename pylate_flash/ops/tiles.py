"""The one way through all similarities of a call in blocks of plain torch, for padded and packed tokens alike.

A block is some documents, and its parts are the query tokens, rows, that meet them: those of all queries, or of the one
that has the documents, or, where queries have few documents of their own, a batch of several queries. Documents of
several lengths are padded by their last token, which changes neither a maximum nor the lowest index that attains it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

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
    """What a call computes with. Rows are the tokens of all queries, one after the other.

    Attributes
    ----------
    queries, documents
        [rows, d], and [T, d] packed, [Nd, Ld, d] or [Nq, K, Ld, d].
    weights, mask
        [rows], bool or in the accumulation dtype, how often a row counts; of padded documents, bool. None: once, all.
    queries_scale, documents_scale
        One over the norms, or None.
    query_bounds, document_bounds, candidates
        Boundaries of queries among rows; of packed documents among tokens, or None; and of the documents of each query
        among all documents, or None where all queries meet all of them.
    query_length, columns
        Of each query, results have so many columns; in which of them each row stands, or None: row by row.
    zero_masked
        Whether the similarity of a masked token counts as 0.
    """

    queries: Tensor
    documents: Tensor
    weights: Tensor | None
    mask: Tensor | None
    queries_scale: Tensor | None
    documents_scale: Tensor | None
    query_bounds: np.ndarray
    document_bounds: np.ndarray | None
    candidates: np.ndarray | None
    query_length: int
    columns: Tensor | None
    zero_masked: bool

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
            return self.documents.shape[-2]
        return int(np.diff(self.document_bounds[start : stop + 1]).max(initial=0))

    def runs(self, start: int, stop: int, budget: int, padded: bool = True) -> Iterator[slice]:
        """Consecutive documents of at most `budget` tokens, padded to the longest of them or not; or one alone."""
        if self.document_bounds is None:
            step = max(1, budget // self.documents.shape[-2])
            yield from (slice(first, min(first + step, stop)) for first in range(start, stop, step))
        elif padded:
            yield from runs(np.diff(self.document_bounds), start, stop, budget)
        else:
            for first, last in sequence_blocks(self.document_bounds[start : stop + 1], budget):
                yield slice(start + first, start + last)

    def in_columns(self, of_rows: Tensor | None) -> Tensor | None:
        """A tensor of all rows, [groups, columns of results, ...], with zeros where there is no row."""
        if of_rows is None:
            return None
        if self.columns is not None:
            padded = of_rows.new_zeros(self.n_queries * self.query_length, *of_rows.shape[1:])
            padded[self.columns] = of_rows
            of_rows = padded
        return of_rows.unflatten(0, (1 if self.candidates is None else self.n_queries, -1))

    def of_rows(self, in_columns: Tensor) -> Tensor:
        """A tensor of all rows, from that of columns [groups, columns, ...]."""
        flat = in_columns.flatten(0, 1)
        return flat if self.columns is None else flat[self.columns]

    def of_documents(self, tensor: Tensor, documents: slice) -> Tensor:
        """What some documents have of a tensor of the layout of all, one document or token after the other."""
        if self.document_bounds is not None:
            return tensor[int(self.document_bounds[documents.start]) : int(self.document_bounds[documents.stop])]
        if self.documents.dim() == 3:
            return tensor[documents]
        count = tensor.shape[1]
        first, last = documents.start // count, (documents.stop - 1) // count
        if first == last:
            return tensor[first, documents.start - first * count : documents.stop - first * count]
        return tensor[first : last + 1].flatten(0, 1)


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
    scales: tuple[Tensor | None, ...] = (None, None)
    if problem.normalize:
        (queries, documents), scales = in_range((queries, documents))
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
    return Operands(
        queries, documents, weights, mask, scales[0], scales[1], bounds[0], bounds[1], bounds[2], length, columns,
        problem.kind.zero_masked,
    )  # fmt: skip


class Part(NamedTuple):
    """Rows [B, R, d] of a block's batches, with their weights and scales [B, R]."""

    rows: Tensor
    weights: Tensor | None
    scale: Tensor | None
    # The columns of the results, the rows of the operands if there is one batch, the queries, and of which each row is,
    # counted from the first (None: of one, or as many of each).
    columns: slice | Tensor
    of: slice
    queries: slice
    owners: Tensor | None

    def per_query(self, values: Tensor, shared: bool) -> Tensor:
        """Sums [documents, queries] of values [documents, R], or [documents, 1] of the query of each document."""
        count = self.queries.stop - self.queries.start if shared else 1
        if self.owners is None:
            return values.unflatten(1, (count, -1)).sum(dim=2)
        return values.new_zeros(len(values), count).index_add_(1, self.owners, values)


class Block:
    """Some documents, counted through all queries, with the parts that meet them; B batches of M documents each.

    `documents` tells which they are, `values` are their tokens [T, d], and `scale` [T] one over the norms, or None.
    `mask` [documents, length] tells which tokens of padded documents are active. The longest is of `length`.
    """

    def __init__(self, given: Operands, documents: slice, batches: int, parts: list[Part]) -> None:
        self.documents, self.batches, self.parts = documents, batches, parts
        self.values = given.of_documents(given.documents, documents)
        self.scale, self.mask = (
            None if tensor is None else given.of_documents(tensor, documents)
            for tensor in (given.documents_scale, given.mask)
        )
        self._lengths: np.ndarray | None = None
        if given.document_bounds is None:
            self.length = self.values.shape[1]
            self.values = self.values.flatten(0, 1)
            self.scale = None if self.scale is None else self.scale.flatten()
            self._bounds = np.arange(0, len(self.values) + 1, self.length)
            return
        bounds = given.document_bounds[documents.start : documents.stop + 1]
        self._bounds = bounds - bounds[0]
        lengths = np.diff(bounds)
        self.length = int(lengths.max())
        if lengths.min() != self.length:
            self._lengths = lengths

    @cached_property
    def padded(self) -> Tensor | None:
        """Of documents of several lengths, the token of each place [documents, length]; of others, None."""
        if self._lengths is None:
            return None
        last = np.maximum(self._bounds[1:, None] - 1, 0)
        places = np.minimum(self._bounds[:-1, None] + np.arange(self.length), last)
        return torch.from_numpy(places).to(self.values.device)

    @property
    def is_ragged(self) -> bool:
        """Whether its documents are of several lengths."""
        return self._lengths is not None

    @property
    def count(self) -> int:
        return self.documents.stop - self.documents.start

    @property
    def starts(self) -> Tensor:
        """The first token of each document [documents, 1]."""
        return torch.from_numpy(self._bounds[:-1]).to(self.values.device).unsqueeze(1)

    @cached_property
    def active(self) -> Tensor | None:
        """Which places hold an active token [documents, length], or None: all do."""
        if self._lengths is None:
            return self.mask
        return torch.from_numpy(np.arange(self.length) < self._lengths[:, None]).to(self.values.device)

    @property
    def last(self) -> Tensor | None:
        """The last token of each document [documents, 1], of those whose copies are multiplied, or None."""
        if self._lengths is None or self.batches == 1:
            return None
        return torch.from_numpy(self._lengths - 1).to(self.values.device).unsqueeze(1)

    @cached_property
    def empty(self) -> Tensor | None:
        """Which documents have no active token [documents, 1], or None: none."""
        if self._lengths is not None:
            return torch.from_numpy(self._lengths == 0).to(self.values.device).unsqueeze(1)
        return None if self.mask is None else ~self.mask.any(dim=1, keepdim=True)

    @cached_property
    def batched(self) -> tuple[Tensor, Tensor | None]:
        """Values [B, places, d] and scales [B, places] of several batches, padded."""
        values, scale = self.values, self.scale
        if self.padded is not None:
            places = self.padded.flatten()
            values, scale = values.index_select(0, places), None if scale is None else scale.index_select(0, places)
        return values.unflatten(0, (self.batches, -1)), None if scale is None else scale.view(self.batches, -1)

    def products(self, part: Part) -> Tensor:
        """Similarities [T, R] of the one batch in the accumulation dtype; the rows' norms are still to come."""
        products = inner_products(self.values, part.rows[0])
        return products if self.scale is None else products.mul_(self.scale.unsqueeze(1))

    def maxima(self, part: Part) -> Tensor:
        """The largest similarities [documents, R] of packed documents of one batch; -inf of an empty one."""
        products = self.products(part)
        owners = torch.from_numpy(np.repeat(np.arange(self.count), np.diff(self._bounds))).to(products.device)
        best = products.new_full((self.count, products.shape[1]), -torch.inf)
        return best.scatter_reduce_(0, owners.unsqueeze(1).expand_as(products), products, "amax")

    def similarities(self, part: Part) -> Tensor:
        """Similarities [documents, length, R] in the accumulation dtype; the rows' norms are still to come."""
        if self.batches == 1:
            products = self.products(part)
            if self.padded is not None:
                products = products.index_select(0, self.padded.flatten())
        else:
            values, scale = self.batched
            dtype = accumulation_dtype(values.dtype)
            products = torch.bmm(values.to(dtype), part.rows.to(dtype).transpose(1, 2))
            if scale is not None:
                products *= scale.unsqueeze(2)
        return products.view(self.count, self.length, -1)

    def per_document(self, of_rows: Tensor) -> Tensor:
        """What batches have of rows [B, R], for every document: [documents, R], or [1, R] of one batch."""
        each = self.count // self.batches
        return of_rows if self.batches == 1 or each == 1 else of_rows.repeat_interleave(each, dim=0)


def blocks(given: Operands, together: bool = True, padded: bool = True) -> Iterator[Block]:
    """All documents, so many similarities at a time as `block_budget` tells, or those of a row with one document.

    `together`: queries with few documents of their own may go together, with copies of those that have several.
    `padded`: whether similarities of documents of several lengths are padded to one.
    """
    budget, bounds = block_budget(given.device), given.query_bounds
    if given.candidates is None:
        meetings = [(0, given.n_queries)]
    elif together:
        meetings = _groups_at_once(given, budget)
    else:
        meetings = [(query, query + 1) for query in range(given.n_queries)]
    for first, last in meetings:
        start, stop = (0, given.n_documents) if given.candidates is None else given.candidates[[first, last]].tolist()
        longest = given.longest(start, stop)
        if longest == 0 or start == stop or bounds[first] == bounds[last]:
            continue
        if given.candidates is not None and last - first > 1:
            yield _of_groups(given, slice(first, last), slice(start, stop))
            continue
        parts = _parts(given, first, last, max(1, budget // max(_TOKENS, longest)))
        most = max([part.rows.shape[1] for part in parts])
        for run in given.runs(start, stop, budget // most, padded):
            block = Block(given, run, 1, parts)
            if block.length:
                yield block


def _parts(given: Operands, first: int, last: int, most: int) -> list[Part]:
    """The rows of some queries: those of as many queries as have `most`, or so many of one."""
    bounds, parts = given.query_bounds, []
    for start, stop in sequence_blocks(bounds[first : last + 1], most):
        queries = slice(first + start, first + stop)
        begin, end = int(bounds[queries.start]), int(bounds[queries.stop])
        step = most if stop - start == 1 else max(1, end - begin)
        for row in range(begin, end, step):
            rows = slice(row, min(row + step, end))
            columns: slice | Tensor = rows
            owners = None
            if given.candidates is not None:
                columns = slice(rows.start - begin, rows.stop - begin)
            elif given.columns is not None:
                columns = given.columns[rows]
                owners = columns // given.query_length - queries.start
            weights, scale = (
                None if tensor is None else tensor[rows].unsqueeze(0) for tensor in (given.weights, given.queries_scale)
            )
            parts.append(Part(given.queries[rows].unsqueeze(0), weights, scale, columns, rows, queries, owners))
    return parts


def _of_groups(given: Operands, queries: slice, documents: slice) -> Block:
    """The documents of several queries in one block, of as many batches as there are queries, or documents."""
    assert given.candidates is not None
    counts = np.diff(given.candidates[queries.start : queries.stop + 1])
    lengths = np.diff(given.query_bounds[queries.start : queries.stop + 1])
    of = slice(int(given.query_bounds[queries.start]), int(given.query_bounds[queries.stop]))
    numbers = np.arange(queries.start, queries.stop)
    tokens: slice | Tensor = of
    exist, shape = None, (len(numbers), int(lengths[0]))
    if counts.min() != counts.max() or lengths.min() != lengths.max():
        numbers = numbers if counts.min() == counts.max() else np.repeat(numbers, counts)
        tokens, exist = _padded_tokens(given.query_bounds, numbers, given.device)
        tokens, shape = tokens.flatten(), (len(numbers), tokens.shape[1])
    weights, scale = (
        None if tensor is None else tensor[tokens].view(shape) for tensor in (given.weights, given.queries_scale)
    )
    if exist is not None:
        weights = exist if weights is None else weights * exist
    part = Part(given.queries[tokens].view(*shape, -1), weights, scale, slice(0, shape[1]), of, queries, None)
    return Block(given, documents, len(numbers), [part])


def _groups_at_once(given: Operands, budget: int) -> list[tuple[int, int]]:
    """Consecutive queries that fit into `budget` with their documents, all padded to one length; or one query alone."""
    assert given.candidates is not None
    counts, size, n_queries = np.diff(given.candidates), given.documents.shape[-1], given.n_queries
    if given.document_bounds is None:
        of_one = given.documents.shape[1] * given.documents.shape[2] * max(size, given.query_length)
        step = max(1, budget // max(1, of_one))
        return [(first, min(first + step, n_queries)) for first in range(0, n_queries, step)]
    longest = np.zeros(n_queries, dtype=np.int64)
    np.maximum.at(longest, np.repeat(np.arange(n_queries), counts), np.diff(given.document_bounds))
    groups, first, total, most, widest = [], 0, 0, 0, size
    for i, (count, tokens, rows) in enumerate(
        zip(counts.tolist(), longest.tolist(), np.diff(given.query_bounds).tolist(), strict=True)
    ):
        total, most, widest = total + count, max(most, tokens), max(widest, rows)
        if i > first and total * most * widest > budget:
            groups.append((first, i))
            first, total, most, widest = i, count, tokens, max(size, rows)
    return [*groups, (first, n_queries)]


def _padded_tokens(bounds: np.ndarray, sequences: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """The tokens [N, L] of these sequences, and whether each exists; L is the length of the longest, or 1."""
    starts, ends = bounds[sequences, None], bounds[sequences + 1, None]
    tokens = starts + np.arange(max(1, (ends - starts).max()))
    exist = tokens < ends
    return torch.from_numpy(np.where(exist, tokens, 0)).to(device), torch.from_numpy(exist).to(device)


def runs(lengths: np.ndarray, start: int, stop: int, budget: int) -> Iterator[slice]:
    """Consecutive documents of at most `budget` tokens, padded to the longest of them; or one alone."""
    first, longest = start, 0
    for document, length in enumerate(lengths[start:stop].tolist(), start):
        longest = max(longest, length)
        if document > first and (document + 1 - first) * longest > budget:
            yield slice(first, document)
            first, longest = document, length
    if first < stop:
        yield slice(first, stop)


def sequence_blocks(bounds: np.ndarray, budget: int) -> list[tuple[int, int]]:
    """Consecutive sequences whose tokens fit into `budget` together; a longer sequence stands alone."""
    found, first = [], 0
    while first < len(bounds) - 1:
        last = int(np.searchsorted(bounds, bounds[first] + max(1, budget), side="right")) - 1
        last = max(last, first + 1)
        found.append((first, last))
        first = last
    return found
