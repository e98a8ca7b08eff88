"""MaxSim in blocks of plain torch: any device, any dtype, any layout, and never the whole [Nq, Nd, Lq, Ld] tensor."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .norms import unscaled
from .products import block_budget
from .tiles import Block, Operands, Part, blocks

# Winners whose rows are summed at once in the backward.
WINNERS_AT_ONCE = 1 << 18


def blocked_forward(given: Operands, scores: Tensor, winners: Tensor | None) -> None:
    """Add to `scores` [Nq, Nd], or as many as documents, those of documents that are not empty.

    Left in `winners` [documents, columns], which holds -1, are the tokens that a gradient flows to.
    """
    shared = given.candidates is None
    scores = scores.view(-1, given.n_documents)
    for block in blocks(given, padded=winners is not None):
        for part in block.parts:
            best, winner = maxima(block, part, given.zero_masked, winners is not None)
            if winners is not None and winner is not None:
                winners[block.documents, part.columns] = winner.to(winners.dtype)
            scores[part.queries if shared else slice(0, 1), block.documents] += part.per_query(best, shared).T


def maxima(block: Block, part: Part, zero_masked: bool, with_winners: bool) -> tuple[Tensor, Tensor | None]:
    """What every row adds to the scores of a block's documents [documents, R], and which tokens win, if asked for."""
    winner = None
    if block.is_ragged and block.batches == 1 and not with_winners:
        best = block.maxima(part)
    else:
        similarities = block.similarities(part)
        if block.mask is not None:
            similarities.masked_fill_(~block.mask.unsqueeze(2), 0.0 if zero_masked else -torch.inf)
        if with_winners:
            # Of equal similarities, the first is the maximum.
            best, winner = similarities.max(dim=1)
            if block.last is not None:
                # A product may have rounded the copies of a document's last token differently.
                winner = winner.minimum(block.last)
            dropped = best == -torch.inf
            if block.mask is not None and zero_masked:
                dropped |= ~block.mask.gather(1, winner)
            winner.masked_fill_(dropped, -1)
        else:
            best = similarities.amax(dim=1)
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
        if winner is not None:
            winner.masked_fill_(each, -1)
    return best, winner


def blocked_backward(
    given: Operands, grad_scores: Tensor, winners: Tensor, need_queries: bool, need_documents: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of queries [rows, d] and documents, in their shapes and type; `winners` are those of the forward.

    Both are weighted sums of rows picked by index, which is what `embedding_bag` computes, in a fixed order and reading
    no row that did not win. For the documents, a stable sort groups each document's rows by the token that won them.
    Beside the gradients, there is a block of documents in the accumulation dtype at any time, and the queries.
    """
    rows = given.in_columns(given.queries.to(given.dtype))
    weights, scale = given.in_columns(given.weights), given.in_columns(given.queries_scale)
    assert rows is not None
    columns, size = rows.shape[1:]
    grad_scores = grad_scores.to(given.dtype)
    grad_rows = grad_documents = None
    for run, owners in _runs(given, columns):
        block, winner = Block(given, run, 1, []), winners[run].to(torch.int32)
        mine = slice(int(owners[0]), int(owners[-1]) + 1)
        group = torch.from_numpy(owners - mine.start).to(given.device)
        # What flows between a document and a row, but for norms.
        if given.candidates is None:
            flow = grad_scores[:, run].T.repeat_interleave(given.query_length, dim=1)
        else:
            flow = grad_scores[run].unsqueeze(1).expand(-1, columns)
        of_scale, of_weights = (
            tensor if tensor is None or given.candidates is None else tensor[mine][group] for tensor in (scale, weights)
        )
        flow = flow if of_weights is None else flow * of_weights
        if need_queries:
            found = _of_rows(block, winner, flow, group, owners).view(-1, columns, size)
            if grad_rows is None and len(found) == len(rows):
                grad_rows = found
            else:
                grad_rows = torch.zeros_like(rows) if grad_rows is None else grad_rows
                grad_rows[mine] += found
        if need_documents:
            flow = flow if of_scale is None else flow * of_scale
            exist = block.active if block.is_ragged else None
            first = group.unsqueeze(1) * columns
            grad = sums_by_winner(rows[mine].flatten(0, 1), first, winner, flow, block.length, exist)
            grad = unscaled(grad, block.values, block.scale)
            if grad_documents is None:
                if grad.numel() == given.documents.numel() and grad.is_contiguous():
                    grad_documents = grad.view(given.documents.shape)
                    continue
                grad_documents = given.documents.new_empty(given.documents.shape)
            place = given.of_documents(grad_documents, run)
            place.copy_(grad.view(place.shape))
    if grad_rows is not None:
        grad_rows = unscaled(given.of_rows(grad_rows), given.queries, given.queries_scale)
    return grad_rows, grad_documents


def _runs(given: Operands, columns: int) -> Iterator[tuple[slice, np.ndarray]]:
    """Documents of the blocks of a backward, with the group of each: all of several groups, or some of one."""
    most = max(1, WINNERS_AT_ONCE // max(1, columns))
    tokens = max(1, 4 * block_budget(given.device) // given.documents.shape[-1])
    count, starts = given.n_documents, given.candidates
    groups = np.zeros(count, dtype=np.int64)
    if starts is not None:
        groups = np.repeat(np.arange(given.n_queries), np.diff(starts))
    if starts is not None and given.document_bounds is None:
        each = int(starts[1])
        step = min(most, max(1, tokens // given.longest(0, count)))
        step = step // each * each if step >= each else step
        found = [
            slice(first, min(first + step, last))
            for begin in range(0, count, max(step, each))
            for last in [min(begin + max(step, each), count)]
            for first in range(begin, last, step)
        ]
    else:
        found = [
            slice(first, min(first + most, run.stop))
            for run in given.runs(0, count, tokens)
            for first in range(run.start, run.stop, most)
        ]
    for run in found:
        yield run, groups[run]


def _of_rows(block: Block, winner: Tensor, flow: Tensor, group: Tensor, owners: np.ndarray) -> Tensor:
    """What rows [groups * columns, d] get of the tokens that won them."""
    kept, flows = _kept(winner)
    picked = torch.where(flows, block.starts.to(torch.int32) + winner, 0)
    if block.scale is not None:
        flow = flow * block.scale[picked]
    table = block.values.to(flow.dtype)
    if kept is not flows:
        # What has won nothing gets a token of zeros.
        table, picked = F.pad(table, (0, 0, 0, 1)), torch.where(flows, picked, len(table))
    counts = np.bincount(owners - owners[0])
    shape = len(counts), -1, winner.shape[1]
    entries = picked, flow, kept
    if counts.min() == counts.max():
        picked, flow, kept = (tensor.reshape(shape).transpose(1, 2) for tensor in entries)
        sizes = kept.sum(dim=2)
    else:
        columns = torch.arange(winner.shape[1], device=winner.device)
        rows, order = torch.sort((group.unsqueeze(1) * winner.shape[1] + columns).flatten(), stable=True)
        picked, flow, kept = (tensor.flatten()[order] for tensor in entries)
        sizes = torch.zeros(len(counts) * winner.shape[1], dtype=torch.int64, device=winner.device)
        sizes.scatter_add_(0, rows, kept.long())
    return weighted_sums(table, picked, flow, kept, sizes)


def sums_by_winner(
    rows: Tensor, first: Tensor, winner: Tensor, weight: Tensor, length: int, exist: Tensor | None = None
) -> Tensor:
    """What the tokens of documents [documents * length, d], or those that `exist`, get of the rows that they won.

    Of document i, the rows begin at first[i], and winner [documents, R] and weight [documents, R] tell which won them,
    -1 for none, and how much of a row it gets.
    """
    kept, flows = _kept(winner)
    # What is left out counts as one more token's.
    bags = length if kept is flows else length + 1
    winner, order = torch.sort(winner.where(flows, length), dim=1, stable=True)
    counts = torch.zeros(len(winner), length + 1, dtype=order.dtype, device=order.device)
    counts.scatter_add_(1, winner.long(), torch.ones_like(order))
    sizes = counts[:, :bags]
    if exist is not None and kept is flows:
        sizes, exist = sizes[exist], None
    sums = weighted_sums(rows, order + first, weight.gather(1, order), kept.gather(1, order), sizes)
    if kept is not flows:
        sums = sums.view(len(winner), bags, -1)[:, :length].flatten(0, 1)
    return sums if exist is None else sums[exist.flatten()]


def _kept(winner: Tensor) -> tuple[Tensor, Tensor]:
    """Which entries are summed, and which of them a gradient flows through.

    They are the same on a CPU. To know how many those are, a GPU would be waited for: there all are summed.
    """
    flows = winner >= 0
    return (flows if winner.device.type == "cpu" else torch.ones_like(flows)), flows


def weighted_sums(table: Tensor, index: Tensor, weight: Tensor, kept: Tensor, sizes: Tensor) -> Tensor:
    """Sums [bags, d] of rows of the table, `sizes` of them one after the other, of those that are kept."""
    index, weight, sizes = index.flatten(), weight.flatten().contiguous(), sizes.flatten()
    if table.device.type == "cpu" and not kept.all():
        places = kept.flatten().nonzero().squeeze(1)
        index, weight = index.index_select(0, places), weight.index_select(0, places)
    return F.embedding_bag(index, table, offsets=sizes.cumsum(0) - sizes, mode="sum", per_sample_weights=weight)
