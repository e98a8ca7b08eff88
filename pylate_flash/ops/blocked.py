"""MaxSim in blocks of plain torch: any device, any dtype, and never the whole [Nq, Nd, Lq, Ld] tensor.

Everything here works on checked tensors in groups, as in `problem.Problem`: `queries` [Nq, Lq, d], `documents`
[G, K, Ld, d] with G = 1 (all queries against the same K documents) or G = Nq (each query against its own K).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem import accumulation_dtype
from .norms import through_norms

# Similarities held at once. 2**20 of them (4 MiB) stay in a CPU's L2/L3 cache between the product and the max; a GPU
# needs larger products to be busy.
_BLOCK_CPU = 1 << 20
_BLOCK_OTHER = 1 << 26
# Winners whose rows are summed at once in the backward.
WINNERS_AT_ONCE = 1 << 18
# Multiplications below which a product is not worth the kernel that oneDNN compiles for each new shape (0.2 ms).
_SMALL_PRODUCT = 1 << 24


class Inputs(NamedTuple):
    """What is computed with: masks are bool, and similarities are scaled by what there is of each token."""

    queries: Tensor
    documents: Tensor
    queries_mask: Tensor | None = None
    documents_mask: Tensor | None = None
    queries_scale: Tensor | None = None
    documents_scale: Tensor | None = None


def blocked_forward(inputs: Inputs, zero_masked: bool, with_winners: bool) -> tuple[Tensor, Tensor | None]:
    """Scores [Nq, K] in the accumulation dtype and, if asked, winners [G, K, Nq / G * Lq] (int64, -1: no gradient)."""
    queries, documents, queries_mask, documents_mask, queries_scale, documents_scale = inputs
    groups, candidates, length, _ = documents.shape
    rows = queries.shape[0] // groups * queries.shape[1]
    dtype = accumulation_dtype(queries.dtype)
    best = torch.empty(groups, candidates, rows, dtype=dtype, device=queries.device)
    winners = torch.empty(groups, candidates, rows, dtype=torch.int64, device=queries.device) if with_winners else None
    for block in _blocks(documents.shape, rows, queries.device):
        similarities = _similarities(queries, documents, documents_scale, *block)
        active = None if documents_mask is None else documents_mask[block[:2]]
        if active is not None:
            similarities.masked_fill_(~active.unsqueeze(-1), 0.0 if zero_masked else -torch.inf)
        if winners is None:
            best[block] = similarities.amax(dim=2)
            continue
        # Of equal similarities, the first is the maximum.
        value, winner = similarities.max(dim=2)
        dropped = value == -torch.inf
        if active is not None and zero_masked:
            dropped |= ~active.gather(2, winner)
        best[block] = value
        winners[block] = winner.masked_fill_(dropped, -1)
    if queries_scale is not None:
        best *= queries_scale.reshape(groups, 1, rows)
    if documents_mask is not None:
        best.masked_fill_(~documents_mask.any(dim=-1).unsqueeze(-1), 0.0)
    if queries_mask is not None:
        inactive = ~queries_mask.reshape(groups, 1, rows)
        best.masked_fill_(inactive, 0.0)
        if winners is not None:
            winners.masked_fill_(inactive, -1)
    sums = best.view(groups, candidates, -1, queries.shape[1]).sum(dim=-1)
    # No view of a tensor, as autograd lets nobody write into a view that its function returns.
    scores = sums.new_empty(queries.shape[0], candidates)
    scores.view(groups, -1, candidates).copy_(sums.transpose(1, 2))
    return scores, winners


def blocked_backward(
    inputs: Inputs, grad_scores: Tensor, winners: Tensor, need_queries: bool, need_documents: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of queries and documents, in their shapes and type.

    Both are weighted sums of rows picked by index, which is what `embedding_bag` computes, in a fixed order and reading
    no row that did not win. For the documents, a stable sort groups each document's rows by the token that won them.
    Beside the gradients, there is a block of documents in the accumulation dtype at any time, and the queries.
    """
    queries, documents, _, _, queries_scale, documents_scale = inputs
    groups, candidates, length, size = documents.shape
    rows = winners.shape[-1]
    dtype, device = accumulation_dtype(queries.dtype), queries.device
    grad_queries = grad_documents = None
    weights = grad_scores.to(dtype).view(groups, -1, candidates).transpose(1, 2)
    # Rows from which no gradient flows are left out. To know how many they are, a GPU would be waited for: there they
    # have chosen one more token, of zeros.
    leaves_out = device.type == "cpu"
    bags = length if leaves_out else length + 1
    step = max(1, min(WINNERS_AT_ONCE // rows, 4 * block_budget(device) // (bags * size)))
    for group, block in document_blocks(groups, candidates, step):
        winner = winners[group, block].to(torch.int32)
        shape = winner.shape[:2]
        weight = weights[group, block].unsqueeze(-1).expand(-1, -1, -1, queries.shape[1]).reshape(winner.shape)
        flows = winner >= 0 if leaves_out else torch.ones_like(winner, dtype=torch.bool)
        # What is left out counts as one more token's.
        winner = winner.where(winner >= 0, length)
        if need_queries:
            document = torch.arange(shape.numel(), dtype=torch.int32, device=device).view(*shape, 1)
            scaled = weight
            if documents_scale is not None:
                scaled = weight * F.pad(documents_scale[group, block], (0, 1)).gather(2, winner.long())
            grad = _weighted_sums(
                _table(documents, group, block, bags),
                (winner + document * bags).transpose(1, 2),
                scaled.transpose(1, 2),
                flows.transpose(1, 2),
                flows.sum(dim=1),
            ).view(-1, rows, size)
            if block.start:
                grad_queries[group] += grad  # type: ignore[index]
            else:
                grad_queries = _placed(grad_queries, grad, (group,), (groups, rows, size))
        if need_documents:
            if queries_scale is not None:
                weight = weight * queries_scale.reshape(groups, 1, rows)[group]
            winner, order = torch.sort(winner, dim=-1, stable=True)
            counts = torch.zeros(*shape, length + 1, dtype=order.dtype, device=device)
            counts.scatter_add_(2, winner.long(), torch.ones_like(order))
            grad = _weighted_sums(
                queries.reshape(groups, rows, size)[group].to(dtype).flatten(0, 1),
                order + torch.arange(shape[0], device=device).view(-1, 1, 1) * rows,
                weight.gather(2, order),
                flows.gather(2, order),
                counts[:, :, :bags],
            ).view(*shape, bags, size)[:, :, :length]
            scale = None if documents_scale is None else documents_scale[group, block]
            grad = unscaled(grad, documents[group, block], scale)
            grad_documents = _placed(grad_documents, grad, (group, block), documents.shape)
    if grad_queries is not None:
        grad_queries = unscaled(grad_queries.view(queries.shape), queries, queries_scale)
    return grad_queries, grad_documents


def _weighted_sums(table: Tensor, index: Tensor, weight: Tensor, flows: Tensor, sizes: Tensor) -> Tensor:
    """Sums [bags, d] of rows of the table, `sizes` of them one after the other, of those that `flows` leaves."""
    index, weight, sizes = index.flatten(), weight.flatten(), sizes.flatten()
    if table.device.type == "cpu" and not flows.all():
        places = flows.flatten().nonzero().squeeze(1)
        index, weight = index.index_select(0, places), weight.index_select(0, places)
    starts = sizes.cumsum(0) - sizes
    return F.embedding_bag(index, table, offsets=starts, mode="sum", per_sample_weights=weight)


def unscaled(grad: Tensor, embeddings: Tensor, scale: Tensor | None) -> Tensor:
    """`through_norms`, and 0 where there is no gradient: a token that won nothing may be NaN, and so is its norm."""
    if scale is None or (grad.device.type == "cpu" and (scale > 0).all()):
        return through_norms(grad, embeddings, scale)
    without = ~grad.any(dim=-1, keepdim=True)
    return through_norms(grad, embeddings, scale).masked_fill_(without, 0.0)


def _placed(total: Tensor | None, block: Tensor, place: tuple[slice, ...], shape: tuple[int, ...]) -> Tensor:
    """The `block` in its place of the total, which has that `shape`, and is not made where the block is all of it."""
    if total is None:
        if block.shape == shape and block.is_contiguous():
            return block
        total = block.new_empty(shape)
    total[place] = block
    return total


def _table(documents: Tensor, group: slice, block: slice, length: int) -> Tensor:
    """The tokens [.., d] of a block of documents in the accumulation dtype, with zeros up to `length`."""
    block_documents = documents[group, block]
    padding = length - documents.shape[2]
    table = F.pad(block_documents, (0, 0, 0, padding)) if padding else block_documents
    return table.to(accumulation_dtype(documents.dtype)).flatten(0, 2)


def block_budget(device: torch.device) -> int:
    """Similarities that are held at once on `device`."""
    return _BLOCK_CPU if device.type == "cpu" else _BLOCK_OTHER


def _blocks(shape: torch.Size, rows: int, device: torch.device) -> Iterator[tuple[slice, slice, slice]]:
    """Groups, documents and rows of every block: few enough similarities to stay in cache, at least one document.

    Groups go together where several fit, with their embeddings: a product of each would take less time than its call.
    """
    groups, candidates, length, size = shape
    budget = block_budget(device)
    row_step = max(1, min(rows, budget // length))
    step = budget // (length * max(rows, size))
    if groups == 1 or step < 2 * candidates:
        step = min(candidates, max(1, budget // (row_step * length)))
    for group, block in document_blocks(groups, candidates, step):
        for row in range(0, rows, row_step):
            yield group, block, slice(row, row + row_step)


def document_blocks(groups: int, candidates: int, step: int) -> Iterator[tuple[slice, slice]]:
    """Groups and documents, `step` documents at a time: of one group, or all those of several."""
    group_step, step = max(1, step // candidates), min(step, candidates)
    for group in range(0, groups, group_step):
        for start in range(0, candidates, step):
            yield slice(group, group + group_step), slice(start, start + step)


def _similarities(
    queries: Tensor, documents: Tensor, documents_scale: Tensor | None, group: slice, block: slice, row_block: slice
) -> Tensor:
    """Similarities [groups, documents, Ld, rows] of the block in the accumulation dtype, by one product."""
    groups, _, length, size = documents.shape
    block_queries = queries.reshape(groups, -1, size)[group, row_block]
    block_documents = documents[group, block].flatten(1, 2)
    if block_queries.shape[0] == 1:
        similarities = inner_products(block_documents[0], block_queries[0])
    else:
        dtype = accumulation_dtype(queries.dtype)
        similarities = torch.bmm(block_documents.to(dtype), block_queries.to(dtype).transpose(1, 2))
    similarities = similarities.view(block_queries.shape[0], -1, length, block_queries.shape[1])
    if documents_scale is not None:
        similarities *= documents_scale[group, block].unsqueeze(-1)
    return similarities


def inner_products(documents: Tensor, queries: Tensor) -> Tensor:
    """Products of all document tokens [T, d] with all query tokens [R, d], as [T, R] in the accumulation dtype.

    Half inputs are widened first, which loses nothing. torch has no half product on the CPU that returns the float32
    it accumulates; rounded to half, every similarity would be off by up to 1e-3.

    A large float32 product on an x86 CPU is computed as a convolution with a kernel of one pixel, the document tokens
    being the pixels of an image: torch gives matrix products to MKL, and convolutions to oneDNN, which takes half the
    time for as few columns as a query has tokens (AVX-512, 2 cores, d = 128: 9 against 20 ms for 300,000 x 32, and 31
    against 65 ms for 46,080 x 1024).
    """
    given, dtype = documents.dtype, accumulation_dtype(documents.dtype)
    documents, queries = documents.to(dtype), queries.to(dtype)
    (tokens, size), rows = documents.shape, queries.shape[0]
    if (
        tokens * size * rows < _SMALL_PRODUCT
        or dtype != torch.float32
        or documents.device.type != "cpu"
        or not _convolution_serves(given)
    ):
        return documents @ queries.T
    image = documents.view(1, 1, tokens, size).permute(0, 3, 1, 2)
    # The dilation of a single pixel changes nothing, except that torch then takes oneDNN with one thread as well.
    products = F.conv2d(image, queries.reshape(rows, size, 1, 1), dilation=(2, 1))
    return products.permute(0, 2, 3, 1).reshape(tokens, rows)


def _convolution_serves(dtype: torch.dtype) -> bool:
    """Whether a float32 convolution on this CPU is a fast one, and as precise as the settings of torch ask for.

    Where they allow bfloat16 in products, `torch.mm` takes it on processors with AMX, and bfloat16 inputs lose nothing
    by that. float16 inputs are kept from it, as they would.
    """
    settings: Any = torch.backends.mkldnn
    return (
        torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
        # Older versions of torch lack these.
        and hasattr(settings, "conv")
        and settings.conv.fp32_precision in ("none", "ieee")
        and (dtype == torch.float16 or settings.matmul.fp32_precision != "bf16")
    )
