"""The documents of all ranks as candidates of this rank's queries: gathered at once, or passed round a ring.

Ranks may hold different numbers of queries, of documents and of tokens. What each holds is exchanged first
(`exchange`), so that every rank knows what it will be sent, and tokens travel packed.

`all_gather` brings all tokens to every rank. In `ring_cross_entropy` every rank holds its own block of documents and
the one that it scores, while the next one is on its way: memory does not depend on the number of ranks. The first pass
round the ring finds the logarithm of each softmax's denominator, block by block (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018). The second is the backward: the gradient of a block travels with it, and is
complete when it comes home.
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

# What the argmax of a block's similarities with some of the queries takes at most, in the backward of the ring: little
# beside the float32 gradients of two blocks, 250 MB each for 4096 documents of 120 tokens.
_ARGMAX_BYTES = 64 << 20

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Ranks(NamedTuple):
    """What every rank holds; `lengths` of the documents [ranks, documents of the rank with most] is on the device."""

    queries: list[int]
    documents: list[int]
    tokens: list[int]
    longest: list[int]
    lengths: Tensor

    def lengths_of(self, rank: int) -> Tensor:
        return self.lengths[rank, : self.documents[rank]]


def world_size() -> int:
    """The number of ranks: 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This rank: 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gathers(loss: Any) -> bool:
    """Whether a loss compares its queries with the documents of other ranks too."""
    return getattr(loss, "gather_across_devices", False) and world_size() > 1


def gather_sizes(sizes: list[int], device: torch.device) -> list[list[int]]:
    """What every rank has given, as lists [ranks, ...]. Waits for the device."""
    here = torch.tensor(sizes, device=device)
    everywhere = here.new_empty(dist.get_world_size(), len(sizes))
    dist.all_gather_into_tensor(everywhere, here.unsqueeze(0))
    return everywhere.tolist()


def exchange(documents: Packed, n_queries: int) -> Ranks:
    """Tell all ranks what this one holds.

    Raises
    ------
    TypeError
        On all ranks, if their embeddings differ in type.
    ValueError
        On all ranks, if their embeddings differ in size.
    """
    tokens, lengths, longest = documents
    size, dtype = tokens.shape[1], _DTYPES.index(tokens.dtype)
    here = [n_queries, len(lengths), len(tokens), longest, size, dtype]
    queries, counts, totals, most, sizes, dtypes = (
        list(column) for column in zip(*gather_sizes(here, tokens.device), strict=True)
    )
    if len(set(sizes)) > 1:
        raise ValueError(f"gather_across_devices: embeddings of {sizes} elements on the ranks; expected one size")
    if len(set(dtypes)) > 1:
        names = [_DTYPES[index] for index in dtypes]
        raise TypeError(f"gather_across_devices: embeddings of {names} on the ranks; expected one type")
    everywhere = lengths.new_empty(len(counts), max(counts))
    dist.all_gather_into_tensor(everywhere, _filled(lengths, max(counts)).unsqueeze(0))
    return Ranks(queries, counts, totals, most, everywhere)


def all_gather(documents: Packed, ranks: Ranks) -> Packed:
    """The documents of all ranks, in their order; the gradient of each token is the sum of all ranks'."""
    lengths = torch.cat([ranks.lengths_of(rank) for rank in range(len(ranks.documents))])
    return Packed(_AllGather.apply(documents.tokens, ranks.tokens), lengths, max(ranks.longest))


class _AllGather(torch.autograd.Function):
    """Tokens [T, d] of every rank, one after the other."""

    @staticmethod
    def forward(ctx, tokens: Tensor, totals: list[int]) -> Tensor:
        ctx.totals = totals
        most, size = max(totals), tokens.shape[1]
        everywhere = tokens.new_empty(len(totals) * most, size)
        dist.all_gather_into_tensor(everywhere, _filled(tokens, most))
        return torch.cat([block[:total] for block, total in zip(everywhere.split(most), totals, strict=True)])

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        here = ctx.totals[dist.get_rank()]
        received = gradient.new_empty(len(ctx.totals), here, gradient.shape[1])
        dist.all_to_all_single(
            received.flatten(0, 1), gradient.contiguous(), [here] * len(ctx.totals), list(ctx.totals)
        )
        # One rounding, of a sum in one order, whatever the type.
        wide = torch.promote_types(gradient.dtype, torch.float32)
        return received.sum(dim=0, dtype=wide).to(gradient.dtype), None


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
        [Nq, Lq], or None. With it, the call waits for the device.
    documents
        This rank's.
    ranks
        What `exchange` has found.
    labels
        [Nq], int64: which of this rank's documents is the right one.
    temperature
        Divides the scores; a tensor of one element has a gradient too.
    options
        Of the scores, as `maxsim_varlen` takes them.

    Returns
    -------
    Tensor
        float32, a scalar.
    """
    longest = queries.shape[1]
    if queries_mask is None:
        lengths, tokens = torch.full((len(queries),), longest, device=queries.device), queries.flatten(0, 1)
        bounds = list(range(0, len(tokens) + 1, longest))
    else:
        lengths, tokens = queries_mask.bool().sum(dim=1), queries[queries_mask.bool()]
        bounds = F.pad(lengths.cumsum(0), (1, 0)).tolist()
    # In autocast's type from here on, on the way and in the backward, which is outside of it.
    device = tokens.device.type
    block = documents.tokens
    if torch.is_autocast_enabled(device) and tokens.dtype != torch.float64:
        tokens, block = (values.to(torch.get_autocast_dtype(device)) for values in (tokens, block))
    temperature = torch.as_tensor(temperature, dtype=None if isinstance(temperature, Tensor) else torch.float32)
    temperature = temperature.to(tokens.device)
    ring = _Ring(rank(), ranks, bounds, lengths, longest, labels, options)
    with torch.autocast(device, enabled=False):
        return _RingCrossEntropy.apply(tokens, block, temperature, ring)


class _Ring(NamedTuple):
    """The queries of this rank, packed, and how blocks of documents come by."""

    rank: int
    ranks: Ranks
    bounds: list[int]
    lengths: Tensor
    longest: int
    labels: Tensor
    options: dict[str, Any]

    def blocks(self, tokens: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The rank that owns each block, and its tokens; this rank's own is the first."""
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
        """Send to the next rank, and say where what the rank before sends will be when `wait` has waited for it."""
        incoming, size = torch.empty_like(values), len(self.ranks.tokens)
        operations = [
            dist.P2POp(dist.isend, values, (self.rank + 1) % size),
            dist.P2POp(dist.irecv, incoming, (self.rank - 1) % size),
        ]
        return incoming, dist.batch_isend_irecv(operations)

    def chunks(self, owner: int) -> Iterator[tuple[slice, slice]]:
        """Rows of queries, and of their tokens, so few that their argmax in the owner's block stays small."""
        queries = len(self.bounds) - 1
        of_one = self.longest * self.ranks.documents[owner] * argmax_dtype(self.ranks.longest[owner]).itemsize
        size = max(1, _ARGMAX_BYTES // max(1, of_one))
        for start in range(0, queries, size):
            stop = min(queries, start + size)
            yield slice(start, stop), slice(self.bounds[start], self.bounds[stop])

    def scores(self, queries: Tensor, rows: slice, block: Tensor, owner: int) -> Tensor:
        """float32 scores of some queries, whose tokens are given, and the documents of a block."""
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
    """`ring_cross_entropy` of packed tokens: both passes round the ring."""

    @staticmethod
    def forward(ctx, queries: Tensor, tokens: Tensor, temperature: Tensor, ring: _Ring) -> Tensor:
        wide = accumulation_dtype(queries.dtype)
        lse = torch.full((len(ring.labels),), -torch.inf, dtype=wide, device=queries.device)
        right = torch.zeros_like(lse)
        for owner, block in ring.blocks(tokens):
            for rows, of_tokens in ring.chunks(owner):
                logits = ring.scores(queries[of_tokens], rows, block, owner) / temperature.to(wide)
                lse[rows] = torch.logaddexp(lse[rows], logits.logsumexp(dim=1))
                if owner == ring.rank:
                    right[rows] = logits.gather(1, ring.labels[rows].unsqueeze(1)).squeeze(1)
        ctx.save_for_backward(queries, tokens, temperature, lse)
        ctx.ring = ring
        return (lse - right).sum()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        queries, tokens, temperature, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        wide = accumulation_dtype(tokens.dtype)
        of_queries = torch.zeros_like(queries, dtype=wide)
        of_temperature = torch.zeros((), dtype=wide, device=queries.device)
        # What the ranks have found of the block that is here, and what is still on its way of that.
        of_block = torch.zeros(max(ring.ranks.tokens), tokens.shape[1], dtype=wide, device=tokens.device)
        works: list[Any] = []
        for owner, block in ring.blocks(tokens):
            block = block.detach().requires_grad_()
            for rows, of_tokens in ring.chunks(owner):
                chunk = queries[of_tokens].detach().requires_grad_()
                with torch.enable_grad():
                    scores = ring.scores(chunk, rows, block, owner)
                logits = scores.detach() / temperature.to(wide)
                of_logits = (logits - lse[rows].unsqueeze(1)).exp()
                if owner == ring.rank:
                    labels = ring.labels[rows].unsqueeze(1)
                    of_logits.scatter_add_(1, labels, of_logits.new_full(labels.shape, -1.0))
                of_scores = of_logits * (gradient / temperature.to(wide))
                of_temperature -= (of_scores * logits).sum()
                found = torch.autograd.grad(scores, (chunk, block), of_scores)
                # The next chunk's argmax takes their place.
                del scores
                of_queries[of_tokens] += found[0]
                wait(works)
                of_block[: len(block)] += found[1]
                del found
            wait(works)
            of_block, works = ring.pass_on(of_block)
        wait(works)
        own = of_block[: len(tokens)].to(tokens.dtype)
        return of_queries.to(queries.dtype), own, of_temperature.reshape(temperature.shape).to(temperature.dtype), None


def wait(works: list[Any]) -> None:
    """Wait for all of it, once, and let go of what was sent."""
    for work in works:
        work.wait()
    works.clear()


def _bounds(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0), (1, 0)).int()


def _filled(values: Tensor, size: int) -> Tensor:
    """Values [n, ...] with zeros after them, [size, ...], contiguous."""
    if values.shape[0] == size:
        return values.contiguous()
    return torch.cat([values, values.new_zeros(size - values.shape[0], *values.shape[1:])])
