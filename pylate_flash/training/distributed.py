"""Documents of all ranks as candidates of this rank's queries: gathered at once, or passed around a ring.

Ranks may hold different numbers of queries, documents and tokens. The sizes are exchanged first (`exchange`), so that
every rank knows what it will receive, and tokens are sent packed.

`all_gather` copies all tokens to every rank. In `ring_cross_entropy` every rank holds its own block of documents and
the block that it scores, while the next one is in flight: memory does not depend on the number of ranks. The first pass
around the ring computes the logarithm of each softmax's denominator, block by block (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018). The second pass is the backward: the gradient of a block travels with it,
and is complete when it returns to its owner.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..ops import maxsim_varlen
from ..problem import accumulation_dtype, argmax_dtype
from .mini_batches import Packed

GATHERINGS = ("all_gather", "ring")

# Maximum size of the argmax of a chunk of queries against a block, in the backward of the ring: small compared to the
# float32 gradients of two blocks, 250 MB each for 4096 documents of 120 tokens.
_ARGMAX_BYTES = 64 << 20

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Ranks(NamedTuple):
    """Sizes on every rank; `lengths` of the documents, [ranks, largest number of documents], is on the device."""

    queries: list[int]
    documents: list[int]
    tokens: list[int]
    longest: list[int]
    lengths: Tensor

    def lengths_of(self, rank: int) -> Tensor:
        return self.lengths[rank, : self.documents[rank]]


def world_size() -> int:
    """Return the number of ranks: 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return this rank: 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gathers(loss: Any) -> bool:
    """Whether a loss also compares its queries with the documents of other ranks."""
    return getattr(loss, "gather_across_devices", False) and world_size() > 1


def gather_sizes(sizes: list[int], device: torch.device) -> list[list[int]]:
    """Gather integers from every rank, as lists [ranks, ...]. Waits for the device."""
    local = torch.tensor(sizes, device=device)
    gathered = local.new_empty(dist.get_world_size(), len(sizes))
    dist.all_gather_into_tensor(gathered, local.unsqueeze(0))
    return gathered.tolist()


def exchange(documents: Packed, n_queries: int) -> Ranks:
    """Exchange the sizes of all ranks.

    Raises
    ------
    TypeError
        On all ranks, if their embeddings differ in dtype.
    ValueError
        On all ranks, if their embeddings differ in size.
    """
    tokens, lengths, longest = documents
    size, dtype = tokens.shape[1], _DTYPES.index(tokens.dtype)
    local = [n_queries, len(lengths), len(tokens), longest, size, dtype]
    queries, counts, totals, longest_per_rank, sizes, dtypes = (
        list(column) for column in zip(*gather_sizes(local, tokens.device), strict=True)
    )
    if len(set(sizes)) > 1:
        raise ValueError(f"gather_across_devices: embeddings of {sizes} elements on the ranks; expected one size")
    if len(set(dtypes)) > 1:
        names = [_DTYPES[index] for index in dtypes]
        raise TypeError(f"gather_across_devices: embeddings of {names} on the ranks; expected one type")
    all_lengths = lengths.new_empty(len(counts), max(counts))
    dist.all_gather_into_tensor(all_lengths, _filled(lengths, max(counts)).unsqueeze(0))
    return Ranks(queries, counts, totals, longest_per_rank, all_lengths)


def all_gather(documents: Packed, ranks: Ranks) -> Packed:
    """Gather the documents of all ranks, in rank order; the gradient of each token is summed over the ranks."""
    lengths = torch.cat([ranks.lengths_of(rank) for rank in range(len(ranks.documents))])
    return Packed(_AllGather.apply(documents.tokens, ranks.tokens), lengths, max(ranks.longest))


class _AllGather(torch.autograd.Function):
    """Concatenates the tokens [T, d] of all ranks."""

    @staticmethod
    def forward(ctx, tokens: Tensor, totals: list[int]) -> Tensor:
        ctx.totals = totals
        max_total, size = max(totals), tokens.shape[1]
        gathered = tokens.new_empty(len(totals) * max_total, size)
        dist.all_gather_into_tensor(gathered, _filled(tokens, max_total))
        return torch.cat([block[:total] for block, total in zip(gathered.split(max_total), totals, strict=True)])

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        own_total = ctx.totals[dist.get_rank()]
        received = gradient.new_empty(len(ctx.totals), own_total, gradient.shape[1])
        dist.all_to_all_single(
            received.flatten(0, 1), gradient.contiguous(), [own_total] * len(ctx.totals), list(ctx.totals)
        )
        # Sum in a fixed order and round once, whatever the dtype.
        acc_dtype = torch.promote_types(gradient.dtype, torch.float32)
        return received.sum(dim=0, dtype=acc_dtype).to(gradient.dtype), None


def ring_cross_entropy(
    queries: Tensor,
    queries_mask: Tensor | None,
    documents: Packed,
    ranks: Ranks,
    labels: Tensor,
    temperature: float | Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Sum over this rank's queries of the cross entropy among the documents of all ranks, differentiable.

    Parameters
    ----------
    queries
        [Nq, Lq, d].
    queries_mask
        [Nq, Lq], or None. With a mask, the call waits for the device.
    documents
        The documents of this rank.
    ranks
        Result of `exchange`.
    labels
        [Nq], int64: the index of each query's positive among this rank's documents.
    temperature
        Divides the scores; a one-element tensor receives a gradient too.
    options
        Scoring options of `maxsim_varlen`.

    Returns
    -------
    Tensor
        A scalar, float32, or float64 for float64 embeddings.
    """
    longest = queries.shape[1]
    if queries_mask is None:
        lengths, tokens = torch.full((len(queries),), longest, device=queries.device), queries.flatten(0, 1)
        bounds = [longest * i for i in range(len(queries) + 1)]
    else:
        lengths, tokens = queries_mask.bool().sum(dim=1), queries[queries_mask.bool()]
        bounds = F.pad(lengths.cumsum(0), (1, 0)).tolist()
    # Cast to autocast's dtype here: it applies in transit and in the backward too, which runs outside autocast.
    device = tokens.device.type
    block = documents.tokens
    if torch.is_autocast_enabled(device) and tokens.dtype != torch.float64:
        tokens, block = (values.to(torch.get_autocast_dtype(device)) for values in (tokens, block))
    if not isinstance(temperature, Tensor):
        temperature = torch.tensor(temperature, dtype=accumulation_dtype(tokens.dtype))
    temperature = temperature.to(tokens.device)
    ring = _Ring(rank(), ranks, bounds, lengths, longest, labels, options)
    with torch.autocast(device, enabled=False):
        return _RingCrossEntropy.apply(tokens, block, temperature, ring)


class _Ring(NamedTuple):
    """The packed queries of this rank, and the passing of document blocks around the ring."""

    rank: int
    ranks: Ranks
    bounds: list[int]
    lengths: Tensor
    longest: int
    labels: Tensor
    options: dict[str, Any]

    def blocks(self, tokens: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the owner rank and the tokens of each block, starting with this rank's own."""
        totals = self.ranks.tokens
        current = _filled(tokens, max(totals))
        for step in range(len(totals)):
            owner = (self.rank - step) % len(totals)
            is_last = step == len(totals) - 1
            incoming, works = (current, []) if is_last else self.pass_on(current)
            yield owner, current[: totals[owner]]
            wait(works)
            current = incoming

    def pass_on(self, values: Tensor) -> tuple[Tensor, list[Any]]:
        """Send to the next rank; return the receive buffer for the previous rank's data, valid after `wait`."""
        incoming, size = torch.empty_like(values), len(self.ranks.tokens)
        operations = [
            dist.P2POp(dist.isend, values, (self.rank + 1) % size),
            dist.P2POp(dist.irecv, incoming, (self.rank - 1) % size),
        ]
        return incoming, dist.batch_isend_irecv(operations)

    def chunks(self, owner: int) -> Iterator[tuple[slice, slice]]:
        """Yield chunks of queries, and of their tokens, whose argmax in the owner's block stays small."""
        queries = len(self.bounds) - 1
        argmax_bytes = self.longest * self.ranks.documents[owner] * argmax_dtype(self.ranks.longest[owner]).itemsize
        size = max(1, _ARGMAX_BYTES // max(1, argmax_bytes))
        for start in range(0, queries, size):
            stop = min(queries, start + size)
            yield slice(start, stop), slice(self.bounds[start], self.bounds[stop])

    def scores(self, queries: Tensor, rows: slice, block: Tensor, owner: int) -> Tensor:
        """Score a chunk of packed queries against the documents of a block, in float32."""
        return maxsim_varlen(
            queries,
            block,
            _bounds(self.lengths[rows]),
            _bounds(self.ranks.lengths_of(owner)),
            max_query_length=self.longest,
            max_document_length=self.ranks.longest[owner],
            **self.options,
        )


class _RingCrossEntropy(torch.autograd.Function):
    """`ring_cross_entropy` of packed tokens: both passes around the ring."""

    @staticmethod
    def forward(ctx, queries: Tensor, tokens: Tensor, temperature: Tensor, ring: _Ring) -> Tensor:
        acc_dtype = accumulation_dtype(queries.dtype)
        lse = torch.full((len(ring.labels),), -torch.inf, dtype=acc_dtype, device=queries.device)
        positive_logits = torch.zeros_like(lse)
        for owner, block in ring.blocks(tokens):
            for rows, token_slice in ring.chunks(owner):
                logits = ring.scores(queries[token_slice], rows, block, owner) / temperature.to(acc_dtype)
                lse[rows] = torch.logaddexp(lse[rows], logits.logsumexp(dim=1))
                if owner == ring.rank:
                    positive_logits[rows] = logits.gather(1, ring.labels[rows].unsqueeze(1)).squeeze(1)
        ctx.save_for_backward(queries, tokens, temperature, lse)
        ctx.ring = ring
        return (lse - positive_logits).sum()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        queries, tokens, temperature, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        acc_dtype = accumulation_dtype(tokens.dtype)
        grad_queries = torch.zeros_like(queries, dtype=acc_dtype)
        grad_temp = torch.zeros((), dtype=acc_dtype, device=queries.device)
        # Gradient of the current block accumulated by the ranks so far, and the transfers of it still in flight.
        grad_block = torch.zeros(max(ring.ranks.tokens), tokens.shape[1], dtype=acc_dtype, device=tokens.device)
        works: list[Any] = []
        for owner, block in ring.blocks(tokens):
            block = block.detach().requires_grad_()
            for rows, token_slice in ring.chunks(owner):
                chunk = queries[token_slice].detach().requires_grad_()
                with torch.enable_grad():
                    scores = ring.scores(chunk, rows, block, owner)
                logits = scores.detach() / temperature.to(acc_dtype)
                grad_logits = (logits - lse[rows].unsqueeze(1)).exp()
                if owner == ring.rank:
                    labels = ring.labels[rows].unsqueeze(1)
                    grad_logits.scatter_add_(1, labels, grad_logits.new_full(labels.shape, -1.0))
                grad_scores = grad_logits * (gradient / temperature.to(acc_dtype))
                grad_temp -= (grad_scores * logits).sum()
                grads = torch.autograd.grad(scores, (chunk, block), grad_scores)
                # Free the scores: the next chunk's argmax reuses their memory.
                del scores
                grad_queries[token_slice] += grads[0]
                wait(works)
                grad_block[: len(block)] += grads[1]
                del grads
            wait(works)
            grad_block, works = ring.pass_on(grad_block)
        wait(works)
        grad_tokens = grad_block[: len(tokens)].to(tokens.dtype)
        return (
            grad_queries.to(queries.dtype),
            grad_tokens,
            grad_temp.reshape(temperature.shape).to(temperature.dtype),
            None,
        )


def wait(works: list[Any]) -> None:
    """Wait for all transfers and drop them, which releases the buffers that were sent."""
    for work in works:
        work.wait()
    works.clear()


def _bounds(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0), (1, 0)).int()


def _filled(values: Tensor, size: int) -> Tensor:
    """Pad values [n, ...] with zeros to [size, ...], contiguous."""
    if values.shape[0] == size:
        return values.contiguous()
    return torch.cat([values, values.new_zeros(size - values.shape[0], *values.shape[1:])])
