"""MaxSim in blocks of plain torch: any device, dtype and layout, without materializing [Nq, Nd, Lq, Ld]."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .norms import unscaled
from .products import block_budget
from .tiles import Block, Operands, Part, blocks, group_runs

# Reduces one part of a block: each row's contribution to the scores [documents, R], and what a backward needs.
Reduction = Callable[[Block, Part], tuple[Tensor, Tensor | None]]
# Argmax entries per block of the backward.
ARGMAX_AT_ONCE = 1 << 18


def blocked_forward(
    operands: Operands, reduce: Reduction, scores: Tensor, saved: Tensor | None, together: bool = True
) -> None:
    """Add the values of `reduce` to `scores`, [Nq, Nd] or one per document, and write what it saves to `saved`.

    `saved` [documents, columns] is None where no backward follows. For `together` see `blocks`.
    """
    scores = scores.view(-1, operands.n_documents)
    for block in blocks(operands, together, padded=saved is not None):
        for part in block.parts:
            values, to_save = reduce(block, part)
            if saved is not None and to_save is not None:
                saved[block.documents, part.columns] = to_save.to(saved.dtype)
            part.add(scores, block.documents, values)


def maxima(block: Block, part: Part, with_argmax: bool) -> tuple[Tensor, Tensor | None]:
    """Each row's contribution to the scores of a block's documents [documents, R] and, if requested, the argmax."""
    best, argmax = block.argmax(part) if with_argmax else (block.maxima(part), None)
    if part.scale is not None:
        best *= block.per_document(part.scale)
    masks = [] if block.empty is None else [block.empty]
    if part.weights is not None:
        weights = block.per_document(part.weights)
        if weights.is_floating_point():
            best *= weights
        masks.append(weights == 0)
    for mask in masks:
        best.masked_fill_(mask, 0.0)
        if argmax is not None:
            argmax.masked_fill_(mask, -1)
    return best, argmax


def blocked_backward(
    operands: Operands, grad_scores: Tensor, argmax: Tensor, need_queries: bool, need_documents: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of queries [rows, d] and documents, of their shapes and dtype; `argmax` is that of the forward.

    Both are weighted sums of gathered rows, which `embedding_bag` computes in a fixed order, reading only rows that
    won. For the documents, a stable sort groups each document's rows by their argmax. Besides the gradients, memory
    holds the queries and one block of documents in the accumulation dtype.
    """
    rows = operands.in_columns(operands.queries.to(operands.dtype))
    weights, scale = (
        None if tensor is None else operands.in_columns(tensor) for tensor in (operands.weights, operands.queries_scale)
    )
    columns, size = rows.shape[1:]
    grad_scores = grad_scores.to(operands.dtype).reshape(-1, operands.n_documents)
    grad_rows = grad_documents = None
    for documents, groups in _runs(operands, columns):
        block, tokens = Block(operands, documents), argmax[documents].to(torch.int32)
        if not block.length:
            continue
        group = torch.from_numpy(groups).to(operands.device)
        # Gradient of the maximum of each document and row, before the factors of the norms.
        grad_sim = grad_scores[:, documents].T.repeat_interleave(operands.query_length, dim=1)
        grad_sim = grad_sim if weights is None else grad_sim * weights[group]
        if need_queries:
            grad = _of_rows(block, tokens, grad_sim, groups).view(-1, columns, size)
            if grad_rows is None and len(grad) == len(rows):
                grad_rows = grad
            else:
                grad_rows = torch.zeros_like(rows) if grad_rows is None else grad_rows
                grad_rows[groups[0] : groups[-1] + 1] += grad
        if need_documents:
            grad_sim = grad_sim if scale is None else grad_sim * scale[group]
            first = group.unsqueeze(1) * columns
            grad = sums_by_argmax(rows.flatten(0, 1), first, tokens, grad_sim, block.length, block.exist)
            grad = unscaled(grad, block.values, block.scale)
            if grad_documents is None and len(grad) == operands.documents.shape[:-1].numel():
                grad_documents = grad.view(operands.documents.shape)
                continue
            if grad_documents is None:
                grad_documents = operands.documents.new_empty(operands.documents.shape)
            operands.tokens(grad_documents, documents).copy_(grad)
    if grad_rows is not None:
        grad_rows = grad_rows.flatten(0, 1) if operands.columns is None else grad_rows.flatten(0, 1)[operands.columns]
        grad_rows = unscaled(grad_rows, operands.queries, operands.queries_scale)
    return grad_rows, grad_documents


def _runs(operands: Operands, columns: int) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield blocks of documents, whole groups or part of one, with the group of each document; for the backward."""
    max_documents = max(1, ARGMAX_AT_ONCE // max(1, columns))
    max_tokens = max(1, 4 * block_budget(operands.device) // operands.documents.shape[-1])
    count, groups = operands.n_documents, np.zeros(operands.n_documents, dtype=np.int64)
    if operands.candidates is not None:
        groups = np.repeat(np.arange(operands.n_queries), np.diff(operands.candidates))
    if operands.document_bounds is None:
        group_size = operands.documents.shape[-3]
        runs = group_runs(
            count // group_size, group_size, min(max_documents, max_tokens // operands.documents.shape[-2])
        )
    else:
        runs = [
            slice(first, min(first + max_documents, run.stop))
            for run in operands.runs(0, count, max_tokens)
            for first in range(run.start, run.stop, max_documents)
        ]
    for run in runs:
        yield run, groups[run]


def _of_rows(block: Block, argmax: Tensor, grad_sim: Tensor, groups: np.ndarray) -> Tensor:
    """Gradient of rows [groups * columns, d] from the tokens that attain their maxima."""
    summed, has_grad = _summed(argmax)
    picked = torch.where(has_grad, block.starts.to(torch.int32) + argmax, 0)
    if block.scale is not None:
        grad_sim = grad_sim * block.scale[picked]
    table = block.values.to(grad_sim.dtype)
    if summed is not has_grad:
        # Entries without a gradient gather a zero row appended to the table.
        table, picked = F.pad(table, (0, 0, 0, 1)), torch.where(has_grad, picked, len(table))
    counts, columns = np.bincount(groups - groups[0]), argmax.shape[1]
    if counts.min() == counts.max():
        picked, grad_sim, summed = (
            entries.reshape(len(counts), -1, columns).transpose(1, 2) for entries in (picked, grad_sim, summed)
        )
        return weighted_sums(table, picked, grad_sim, summed, summed.sum(dim=2))
    first = torch.from_numpy((groups - groups[0]) * columns).to(argmax.device).unsqueeze(1)
    rows, order = torch.sort((first + torch.arange(columns, device=argmax.device)).flatten(), stable=True)
    picked, grad_sim, summed = (entries.flatten()[order] for entries in (picked, grad_sim, summed))
    sizes = torch.zeros(len(counts) * columns, dtype=torch.int64, device=argmax.device)
    return weighted_sums(table, picked, grad_sim, summed, sizes.scatter_add_(0, rows, summed.long()))


def sums_by_argmax(
    rows: Tensor, first: Tensor, argmax: Tensor, weight: Tensor, length: int, present: Tensor | None = None
) -> Tensor:
    """For each document token [documents * length, d], or each `present` one, the weighted sum of the rows it wins.

    The rows of document i begin at first[i]. For each of them, argmax [documents, R] is the token that wins it, -1 for
    none, and weight [documents, R] scales it.
    """
    summed, has_grad = _summed(argmax)
    # Entries without a gradient go to the bag of one extra token.
    bags = length if summed is has_grad else length + 1
    argmax, order = torch.sort(argmax.where(has_grad, length), dim=1, stable=True)
    counts = torch.zeros(len(argmax), length + 1, dtype=order.dtype, device=order.device)
    counts.scatter_add_(1, argmax.long(), torch.ones_like(order))
    sizes = counts[:, :bags]
    if present is not None and summed is has_grad:
        sizes, present = sizes[present], None
    sums = weighted_sums(rows, order + first, weight.gather(1, order), summed.gather(1, order), sizes)
    if summed is not has_grad:
        sums = sums.view(len(argmax), bags, -1)[:, :length].flatten(0, 1)
    return sums if present is None else sums[present.flatten()]


def _summed(argmax: Tensor) -> tuple[Tensor, Tensor]:
    """Masks of the entries that are summed, and of those that a gradient flows through.

    They are the same on a CPU. On a GPU, counting entries would synchronize, so all are summed.
    """
    has_grad = argmax >= 0
    return (has_grad if argmax.device.type == "cpu" else torch.ones_like(has_grad)), has_grad


def weighted_sums(table: Tensor, index: Tensor, weight: Tensor, summed: Tensor, sizes: Tensor) -> Tensor:
    """Weighted sums [bags, d] of table rows: each bag takes the next `sizes` entries, among those that are `summed`."""
    index, weight, sizes = index.flatten(), weight.flatten().contiguous(), sizes.flatten()
    if table.device.type == "cpu" and not summed.all():
        entries = summed.flatten().nonzero().squeeze(1)
        index, weight = index.index_select(0, entries), weight.index_select(0, entries)
    return F.embedding_bag(index, table, offsets=sizes.cumsum(0) - sizes, mode="sum", per_sample_weights=weight)
