"""MaxSim in blocks of plain torch: any device, any dtype, and never the whole [Nq, Nd, Lq, Ld] tensor.

Everything here works on checked tensors in the grouped layout of `ops.maxsim`: `queries` [Nq, Lq, d], `documents`
[G, K, Ld, d] with G = 1 (all queries against the same K documents) or G = Nq (each query against its own K).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Similarities held at once. 2**20 of them (4 MiB) stay in a CPU's L2/L3 cache between the product and the max; a GPU
# needs larger products to be busy.
_BLOCK_CPU = 1 << 20
_BLOCK_OTHER = 1 << 26
# Winners whose rows are summed at once in the backward.
WINNERS_AT_ONCE = 1 << 18
# Multiplications below which a product is not worth the kernel that oneDNN compiles for each new shape (0.2 ms).
_SMALL_PRODUCT = 1 << 24


def blocked_forward(
    queries: Tensor,
    documents: Tensor,
    queries_mask: Tensor | None,
    documents_mask: Tensor | None,
    queries_scale: Tensor | None,
    documents_scale: Tensor | None,
    zero_masked: bool,
    with_winners: bool,
) -> tuple[Tensor, Tensor | None]:
    """Scores [Nq, K] in the accumulation dtype and, if asked, winners [G, K, Nq / G * Lq] (int64, -1: no gradient)."""
    groups, candidates, length, _ = documents.shape
    rows = queries.shape[0] // groups * queries.shape[1]
    dtype = accumulation_dtype(queries.dtype)
    best = torch.empty(groups, candidates, rows, dtype=dtype, device=queries.device)
    winners = torch.empty(groups, candidates, rows, dtype=torch.int64, device=queries.device) if with_winners else None
    for group, row_block, block in _blocks(groups, candidates, rows, length, queries.device):
        similarities = _similarities(queries, documents, documents_scale, group, row_block, block)
        active = None if documents_mask is None else documents_mask[group, block, :, None]
        if active is not None:
            similarities.masked_fill_(~active, 0.0 if zero_masked else -torch.inf)
        if winners is None:
            best[group, block, row_block] = similarities.amax(dim=1)
            continue
        # argmax, and not max: only argmax promises the first index on ties.
        winner = similarities.argmax(dim=1, keepdim=True)
        value = similarities.gather(1, winner)
        dropped = value == -torch.inf
        if active is not None and zero_masked:
            dropped |= ~active.expand_as(similarities).gather(1, winner)
        best[group, block, row_block] = value.squeeze(1)
        winners[group, block, row_block] = winner.masked_fill_(dropped, -1).squeeze(1)
    if documents_mask is not None and not zero_masked:
        best.masked_fill_(~documents_mask.any(dim=-1).unsqueeze(-1), 0.0)
    if queries_scale is not None:
        best *= queries_scale.reshape(groups, 1, rows)
    if queries_mask is not None:
        inactive = ~queries_mask.reshape(groups, 1, rows)
        best.masked_fill_(inactive, 0.0)
        if winners is not None:
            winners.masked_fill_(inactive, -1)
    scores = best.view(groups, candidates, -1, queries.shape[1]).sum(dim=-1)
    return scores.transpose(1, 2).reshape(queries.shape[0], candidates), winners


def blocked_backward(
    grad_scores: Tensor,
    queries: Tensor,
    documents: Tensor,
    winners: Tensor,
    queries_scale: Tensor | None,
    documents_scale: Tensor | None,
    need_queries: bool,
    need_documents: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients in the accumulation dtype of the scaled embeddings: [G, rows, d] and [G, K, Ld, d].

    Both are weighted sums of rows picked by index, which is what `embedding_bag` computes, in a fixed order and reading
    no row that did not win. For the documents, a stable sort groups each document's rows by the token that won them.
    """
    groups, candidates, length, size = documents.shape
    rows = winners.shape[-1]
    dtype = accumulation_dtype(queries.dtype)
    grad_queries = torch.zeros(groups, rows, size, dtype=dtype, device=queries.device) if need_queries else None
    grad_documents = torch.empty(documents.shape, dtype=dtype, device=queries.device) if need_documents else None
    weights = grad_scores.to(dtype).view(groups, -1, candidates).transpose(1, 2)
    weights = weights.repeat_interleave(queries.shape[1], dim=2)
    step = max(1, WINNERS_AT_ONCE // rows)
    for group in range(groups):
        group_queries = queries.reshape(groups, rows, size)[group].to(dtype)
        if queries_scale is not None:
            group_queries = group_queries * queries_scale.reshape(groups, rows, 1)[group]
        for start in range(0, candidates, step):
            block = slice(start, start + step)
            # Where no gradient flows, the winner is a token past the last.
            winner = winners[group, block]
            winner = winner.to(torch.int32).where(winner >= 0, length)
            weight = weights[group, block]
            count = winner.shape[0]
            document = torch.arange(count, device=winner.device).unsqueeze(1)
            if grad_queries is not None:
                block_documents = documents[group, block].to(dtype)
                if documents_scale is not None:
                    block_documents = block_documents * documents_scale[group, block].unsqueeze(-1)
                block_documents = F.pad(block_documents, (0, 0, 0, 1)).flatten(0, 1)
                picked = (winner + document * (length + 1)).T.contiguous()
                grad_queries[group] += F.embedding_bag(
                    picked, block_documents, mode="sum", per_sample_weights=weight.T.contiguous()
                )
            if grad_documents is not None:
                winner, order = torch.sort(winner, dim=-1, stable=True)
                tokens = torch.arange(length + 1, dtype=winner.dtype, device=winner.device).expand(count, -1)
                starts = torch.searchsorted(winner, tokens.contiguous()) + document * rows
                grad = F.embedding_bag(
                    order.flatten(),
                    group_queries,
                    offsets=starts.flatten(),
                    mode="sum",
                    per_sample_weights=weight.gather(1, order).flatten(),
                )
                grad_documents[group, block] = grad.view(count, length + 1, size)[:, :length]
    return grad_queries, grad_documents


def block_budget(device: torch.device) -> int:
    """Similarities that are held at once on `device`."""
    return _BLOCK_CPU if device.type == "cpu" else _BLOCK_OTHER


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _blocks(
    groups: int, candidates: int, rows: int, length: int, device: torch.device
) -> Iterator[tuple[int, slice, slice]]:
    """Group, rows and documents of every block: few enough similarities to stay in cache, at least one document."""
    budget = block_budget(device)
    row_step = max(1, min(rows, budget // length))
    step = max(1, budget // (row_step * length))
    for group in range(groups):
        for row in range(0, rows, row_step):
            for start in range(0, candidates, step):
                yield group, slice(row, row + row_step), slice(start, start + step)


def _similarities(
    queries: Tensor, documents: Tensor, documents_scale: Tensor | None, group: int, row_block: slice, block: slice
) -> Tensor:
    """Similarities [documents of the block, Ld, rows of the block] in the accumulation dtype, by one product."""
    groups, _, length, size = documents.shape
    block_queries = queries.reshape(groups, -1, size)[group, row_block]
    block_documents = documents[group, block].flatten(0, 1)
    similarities = inner_products(block_documents, block_queries).view(-1, length, block_queries.shape[0])
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
    dtype = accumulation_dtype(documents.dtype)
    convolves = dtype == torch.float32 and documents.device.type == "cpu" and _convolution_serves(documents.dtype)
    documents, queries = documents.to(dtype), queries.to(dtype)
    (tokens, size), rows = documents.shape, queries.shape[0]
    if not convolves or tokens * size * rows < _SMALL_PRODUCT:
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
