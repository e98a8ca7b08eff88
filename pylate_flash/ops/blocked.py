"""MaxSim in blocks of plain torch: any device, any dtype, any layout, and never the whole [Nq, Nd, Lq, Ld] tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .norms import unscaled
from .products import block_budget
from .tiles import Block, Operands, Part, blocks, group_runs

# Of a part of a block: what every row adds to the scores of the documents [documents, R], and what a backward needs.
Reduction = Callable[[Block, Part], tuple[Tensor, Tensor | None]]
# Entries of an argmax whose rows are summed at once in the backward.
ARGMAX_AT_ONCE = 1 << 18


def blocked_forward(
    operands: Operands, reduce: Reduction, scores: Tensor, saved: Tensor | None, together: bool = True
) -> None:
    """Add what `reduce` finds to `scores` [Nq, Nd], or as many as documents, and leave what it saves in `saved`.

    `saved` [documents, columns] is None where no backward follows. `together` is told in `blocks`.
    """
    scores = scores.view(-1, operands.n_documents)
    for block in blocks(operands, together, padded=saved is not None):
        for part in block.parts:
            values, to_save = reduce(block, part)
            if saved is not None and to_save is not None:
                saved[block.documents, part.columns] = to_save.to(saved.dtype)
            part.add(scores, block.documents, values)


def maxima(block: Block, part: Part, with_argmax: bool) -> tuple[Tensor, Tensor | None]:
    """What every row adds to the scores of a block's documents [documents, R], and the argmax, if asked for."""
    best, argmax = block.argmax(part) if with_argmax else (block.maxima(part), None)
    if part.scale is not None:
        best *= block.per_document(part.scale)
    left_out = [] if block.empty is None else [block.empty]
    if part.weights is not None:
        weights = block.per_document(part.weights)
        if weights.is_floating_point():
            best *= weights
        left_out.append(weights == 0)
    for each in left_out:
        best.masked_fill_(each, 0.0)
        if argmax is not None:
            argmax.masked_fill_(each, -1)
    return best, argmax


def blocked_backward(
    operands: Operands, grad_scores: Tensor, argmax: Tensor, need_queries: bool, need_documents: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of queries [rows, d] and documents, in their shapes and type; `argmax` is that of the forward.

    Both are weighted sums of rows picked by index, which is what `embedding_bag` computes, in a fixed order and reading
    no row that did not win. For the documents, a stable sort groups each document's rows by their argmax. Beside the
    gradients, there is a block of documents in the accumulation dtype at any time, and the queries.
    """
    rows = operands.in_columns(operands.queries.to(operands.dtype))
    weights, scale = (
        None if of_rows is None else operands.in_columns(of_rows)
        for of_rows in (operands.weights, operands.queries_scale)
    )
    columns, size = rows.shape[1:]
    grad_scores = grad_scores.to(operands.dtype).reshape(-1, operands.n_documents)
    grad_rows = grad_documents = None
    for run, groups in _runs(operands, columns):
        block, tokens = Block(operands, run), argmax[run].to(torch.int32)
        if not block.length:
            continue
        group = torch.from_numpy(groups).to(operands.device)
        # What flows between a document and a row, but for norms.
        flow = grad_scores[:, run].T.repeat_interleave(operands.query_length, dim=1)
        flow = flow if weights is None else flow * weights[group]
        if need_queries:
            grad = _of_rows(block, tokens, flow, groups).view(-1, columns, size)
            if grad_rows is None and len(grad) == len(rows):
                grad_rows = grad
            else:
                grad_rows = torch.zeros_like(rows) if grad_rows is None else grad_rows
                grad_rows[groups[0] : groups[-1] + 1] += grad
        if need_documents:
            flow = flow if scale is None else flow * scale[group]
            first = group.unsqueeze(1) * columns
            grad = sums_by_argmax(rows.flatten(0, 1), first, tokens, flow, block.length, block.exist)
            grad = unscaled(grad, block.values, block.scale)
            if grad_documents is None and len(grad) == operands.documents.shape[:-1].numel():
                grad_documents = grad.view(operands.documents.shape)
                continue
            if grad_documents is None:
                grad_documents = operands.documents.new_empty(operands.documents.shape)
            operands.tokens(grad_documents, run).copy_(grad)
    if grad_rows is not None:
        grad_rows = grad_rows.flatten(0, 1) if operands.columns is None else grad_rows.flatten(0, 1)[operands.columns]
        grad_rows = unscaled(grad_rows, operands.queries, operands.queries_scale)
    return grad_rows, grad_documents


def _runs(operands: Operands, columns: int) -> Iterator[tuple[slice, np.ndarray]]:
    """Documents of the blocks of a backward, with the group of each: all of several groups, or some of one."""
    most = max(1, ARGMAX_AT_ONCE // max(1, columns))
    tokens = max(1, 4 * block_budget(operands.device) // operands.documents.shape[-1])
    count, groups = operands.n_documents, np.zeros(operands.n_documents, dtype=np.int64)
    if operands.candidates is not None:
        groups = np.repeat(np.arange(operands.n_queries), np.diff(operands.candidates))
    if operands.document_bounds is None:
        each = operands.documents.shape[-3]
        found = group_runs(count // each, each, min(most, tokens // operands.documents.shape[-2]))
    else:
        found = [
            slice(first, min(first + most, run.stop))
            for run in operands.runs(0, count, tokens)
            for first in range(run.start, run.stop, most)
        ]
    for run in found:
        yield run, groups[run]


def _of_rows(block: Block, argmax: Tensor, flow: Tensor, groups: np.ndarray) -> Tensor:
    """What rows [groups * columns, d] get of the tokens that attain their maxima."""
    summed, flows = _summed(argmax)
    picked = torch.where(flows, block.starts.to(torch.int32) + argmax, 0)
    if block.scale is not None:
        flow = flow * block.scale[picked]
    table = block.values.to(flow.dtype)
    if summed is not flows:
        # Where nothing flows, a token of zeros is picked.
        table, picked = F.pad(table, (0, 0, 0, 1)), torch.where(flows, picked, len(table))
    counts, columns = np.bincount(groups - groups[0]), argmax.shape[1]
    if counts.min() == counts.max():
        picked, flow, summed = (
            entries.reshape(len(counts), -1, columns).transpose(1, 2) for entries in (picked, flow, summed)
        )
        return weighted_sums(table, picked, flow, summed, summed.sum(dim=2))
    first = torch.from_numpy((groups - groups[0]) * columns).to(argmax.device).unsqueeze(1)
    rows, order = torch.sort((first + torch.arange(columns, device=argmax.device)).flatten(), stable=True)
    picked, flow, summed = (entries.flatten()[order] for entries in (picked, flow, summed))
    sizes = torch.zeros(len(counts) * columns, dtype=torch.int64, device=argmax.device)
    return weighted_sums(table, picked, flow, summed, sizes.scatter_add_(0, rows, summed.long()))


def sums_by_argmax(
    rows: Tensor, first: Tensor, argmax: Tensor, weight: Tensor, length: int, exist: Tensor | None = None
) -> Tensor:
    """What the tokens of documents [documents * length, d], or those that `exist`, get of the rows that they win.

    Of document i, the rows begin at first[i], and argmax [documents, R] and weight [documents, R] tell which token wins
    each of them, -1 for none, and how much of it that token gets.
    """
    summed, flows = _summed(argmax)
    # What is left out counts as one more token's.
    bags = length if summed is flows else length + 1
    argmax, order = torch.sort(argmax.where(flows, length), dim=1, stable=True)
    counts = torch.zeros(len(argmax), length + 1, dtype=order.dtype, device=order.device)
    counts.scatter_add_(1, argmax.long(), torch.ones_like(order))
    sizes = counts[:, :bags]
    if exist is not None and summed is flows:
        sizes, exist = sizes[exist], None
    sums = weighted_sums(rows, order + first, weight.gather(1, order), summed.gather(1, order), sizes)
    if summed is not flows:
        sums = sums.view(len(argmax), bags, -1)[:, :length].flatten(0, 1)
    return sums if exist is None else sums[exist.flatten()]


def _summed(argmax: Tensor) -> tuple[Tensor, Tensor]:
    """Which entries are summed, and which of them a gradient flows through.

    They are the same on a CPU. To know how many those are, a GPU would be waited for: there all are summed.
    """
    flows = argmax >= 0
    return (flows if argmax.device.type == "cpu" else torch.ones_like(flows)), flows


def weighted_sums(table: Tensor, index: Tensor, weight: Tensor, summed: Tensor, sizes: Tensor) -> Tensor:
    """Sums [bags, d] of rows of the table, `sizes` of them one after the other, of those that are `summed`."""
    index, weight, sizes = index.flatten(), weight.flatten().contiguous(), sizes.flatten()
    if table.device.type == "cpu" and not summed.all():
        entries = summed.flatten().nonzero().squeeze(1)
        index, weight = index.index_select(0, entries), weight.index_select(0, entries)
    return F.embedding_bag(index, table, offsets=sizes.cumsum(0) - sizes, mode="sum", per_sample_weights=weight)
