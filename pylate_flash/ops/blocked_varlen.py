"""MaxSim of packed tokens in blocks of plain torch: any device, any dtype, and no padding.

Everything here works on checked tensors: packed `queries` [Tq, d] and `documents` [Td, d] with their boundaries as
arrays on the host. All queries meet all documents, or, given `candidate_bounds`, query i meets the documents
candidate_bounds[i] to candidate_bounds[i + 1]. Winners are [Nd, rows], relative to their document, -1 where no gradient
flows, with rows = Nq * max_query_length, or max_query_length for candidates: those of the document's one query.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem import accumulation_dtype
from .blocked import WINNERS_AT_ONCE, Inputs, block_budget, blocked_forward, inner_products
from .norms import through_norms

# A winner that no token has yet taken; larger than any token.
_NO_WINNER = 2**31 - 1


# Boundaries of queries, of documents, and of each query's candidates (None: all documents), on the host.
Bounds = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def blocked_varlen_forward(
    inputs: Inputs, bounds: Bounds, max_query_length: int, with_winners: bool
) -> tuple[Tensor, Tensor | None]:
    """Scores [Nq, Nd], or [Nd] with candidates, in the accumulation dtype, and, if asked, winners (int32).

    One product per block of queries and documents, then a maximum per document; of queries with few candidates, several
    go together, padded. The mask of the queries holds a bool per token, in any shape; documents have none.
    """
    queries, documents, queries_mask, _, queries_scale, documents_scale = inputs
    query_bounds, document_bounds, candidate_bounds = bounds
    device = queries.device
    dtype = accumulation_dtype(queries.dtype)
    budget = block_budget(device)
    n_queries, n_documents = len(query_bounds) - 1, len(document_bounds) - 1
    if candidate_bounds is None:
        scores = torch.zeros(n_queries, n_documents, dtype=dtype, device=device)
        # As many rows as the longest document leaves room for, as no document is cut.
        rows = budget // max(256, int(np.diff(document_bounds).max()))
        tasks = [(first, last, 0, n_documents) for first, last in sequence_blocks(query_bounds, rows)]
    else:
        scores = torch.zeros(n_documents, dtype=dtype, device=device)
        blocks = _candidate_blocks(query_bounds, document_bounds, candidate_bounds, budget, documents.shape[1])
        tasks = [(first, last, int(candidate_bounds[first]), int(candidate_bounds[last])) for first, last in blocks]
    masked = None if queries_mask is None else ~queries_mask.flatten()
    winners = None
    if with_winners:
        rows = max_query_length * (n_queries if candidate_bounds is None else 1)
        winners = torch.full((n_documents, rows), -1, dtype=torch.int32, device=device)
    for first_query, last_query, first_document, last_document in tasks:
        block = slice(query_bounds[first_query], query_bounds[last_query])
        block_queries = queries[block]
        if block_queries.shape[0] == 0 or first_document == last_document:
            continue
        if candidate_bounds is not None and last_query - first_query > 1:
            owners = np.repeat(
                np.arange(first_query, last_query), np.diff(candidate_bounds[first_query : last_query + 1])
            )
            query_tokens, active = padded_tokens(query_bounds, owners, device)
            document_tokens, exist = padded_tokens(document_bounds, np.arange(first_document, last_document), device)
            if queries_mask is not None:
                active &= queries_mask.flatten()[query_tokens]
            padded = Inputs(
                rows_of(queries, query_tokens),
                rows_of(documents, document_tokens).unsqueeze(1),
                active,
                exist.unsqueeze(1),
                None if queries_scale is None else queries_scale[query_tokens],
                None if documents_scale is None else documents_scale[document_tokens].unsqueeze(1),
            )
            found, winner = blocked_forward(padded, False, with_winners)
            scores[first_document:last_document] = found.squeeze(1)
            if winners is not None and winner is not None:
                winners[first_document:last_document, : query_tokens.shape[1]] = winner.squeeze(1)
            continue
        owners, places = _owners(query_bounds[first_query : last_query + 1])
        columns = torch.from_numpy(places + (owners + first_query) * max_query_length * (candidate_bounds is None))
        columns, owners_of_rows = columns.to(device), torch.from_numpy(owners).to(device)
        for first, last in sequence_blocks(
            document_bounds[first_document : last_document + 1], budget // block_queries.shape[0]
        ):
            first, last = first + first_document, last + first_document
            tokens = slice(document_bounds[first], document_bounds[last])
            similarities = inner_products(documents[tokens], block_queries)
            if documents_scale is not None:
                similarities *= documents_scale[tokens].unsqueeze(1)
            owners, places = _owners(document_bounds[first : last + 1])
            owner = torch.from_numpy(owners).to(device).unsqueeze(1).expand_as(similarities)
            best = torch.full((last - first, block_queries.shape[0]), -torch.inf, dtype=dtype, device=device)
            best.scatter_reduce_(0, owner, similarities, "amax")
            if winners is not None:
                won = (similarities == best.gather(0, owner)) | similarities.isnan()
                positions = torch.from_numpy(places.astype(np.int32)).to(device).unsqueeze(1)
                winner = torch.full(best.shape, _NO_WINNER, dtype=torch.int32, device=device)
                winner.scatter_reduce_(0, owner, torch.where(won, positions, _NO_WINNER), "amin")
                winner.masked_fill_(best == -torch.inf, -1)
                winners[first:last, columns] = winner if masked is None else winner.masked_fill_(masked[block], -1)
            if queries_scale is not None:
                best *= queries_scale[block]
            empty = torch.from_numpy(np.diff(document_bounds[first : last + 1]) == 0).to(device)
            best.masked_fill_(empty.unsqueeze(1), 0.0)
            if masked is not None:
                best.masked_fill_(masked[block], 0.0)
            sums = torch.zeros(last_query - first_query, last - first, dtype=dtype, device=device)
            sums.index_add_(0, owners_of_rows, best.T)
            if candidate_bounds is None:
                scores[first_query:last_query, first:last] = sums
            else:
                scores[first:last] = sums[0]
    return scores, winners


def blocked_varlen_backward(
    inputs: Inputs,
    bounds: Bounds,
    max_query_length: int,
    grad_scores: Tensor,
    winners: Tensor,
    need_queries: bool,
    need_documents: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients [Tq, d] and [Td, d], in the type of the embeddings."""
    queries, documents, _, _, queries_scale, documents_scale = inputs
    query_bounds, document_bounds, candidate_bounds = bounds
    device = queries.device
    dtype = accumulation_dtype(queries.dtype)
    n_queries = len(query_bounds) - 1
    scaled = queries.to(dtype) if queries_scale is None else queries.to(dtype) * queries_scale.unsqueeze(1)
    grad_queries = torch.zeros(queries.shape, dtype=dtype, device=device) if need_queries else None
    grad_documents = torch.empty(documents.shape, dtype=documents.dtype, device=device) if need_documents else None
    # The packed token of each place in a padded query; places past its end win nothing.
    places = query_bounds[:-1, None] + np.arange(max_query_length)
    weights = grad_scores.to(dtype)
    weights = weights.T if candidate_bounds is None else weights.unsqueeze(1)
    owners = None if candidate_bounds is None else np.repeat(np.arange(n_queries), np.diff(candidate_bounds))
    step = max(1, WINNERS_AT_ONCE // winners.shape[1])
    blocks = sequence_blocks(document_bounds, 4 * block_budget(device) // documents.shape[1])
    for first, last in ((start, min(start + step, end)) for begin, end in blocks for start in range(begin, end, step)):
        tokens = slice(document_bounds[first], document_bounds[last])
        if tokens.start == tokens.stop:
            continue
        winner, weight = winners[first:last], weights[first:last]
        won = winner >= 0
        starts = torch.from_numpy(document_bounds[first:last] - document_bounds[first]).to(device)
        token = winner + starts.unsqueeze(1)
        if owners is None:
            own = slice(0, queries.shape[0])
            row = torch.from_numpy(places.flatten()).to(device).expand_as(token)
            weight = weight.repeat_interleave(max_query_length, dim=1)
        else:
            own = slice(query_bounds[owners[first]], query_bounds[owners[last - 1] + 1])
            row = torch.from_numpy(places[owners[first:last]] - own.start).to(device)
            weight = weight.expand_as(token)
        if own.start == own.stop:
            # Their queries have no tokens.
            if grad_documents is not None:
                grad_documents[tokens] = 0.0
            continue
        if grad_documents is not None:
            grad = weighted_sums(scaled[own], row, weight, token, won, tokens.stop - tokens.start)
            scale = None if documents_scale is None else documents_scale[tokens]
            grad_documents[tokens] = through_norms(grad, documents[tokens], scale)
        if grad_queries is not None:
            block_documents = documents[tokens].to(dtype)
            if documents_scale is not None:
                block_documents = block_documents * documents_scale[tokens].unsqueeze(1)
            grad_queries[own] += weighted_sums(block_documents, token, weight, row, won, own.stop - own.start)
    return None if grad_queries is None else through_norms(grad_queries, queries, queries_scale), grad_documents


def weighted_sums(
    source: Tensor, picked: Tensor, weights: Tensor, destination: Tensor, won: Tensor, count: int
) -> Tensor:
    """[count, d]: for each destination the sum of weights * source[picked], in the order of the entries that won.

    A stable sort groups the entries by their destination; `embedding_bag` sums each group in a fixed order.
    """
    if won.device.type == "cpu":
        # What did not win is not sorted: of padded queries, that is most.
        places = won.flatten().nonzero().squeeze(1)
        picked, weights, destination = (x.flatten()[places] for x in (picked, weights, destination))
        won = torch.ones_like(destination, dtype=torch.bool)
    destination, order = torch.sort(destination.where(won, count).flatten(), stable=True)
    starts = torch.searchsorted(destination, torch.arange(count + 1, device=destination.device))
    picked = picked.where(won, 0).flatten()[order]
    # The last group, of what did not win, is dropped.
    return F.embedding_bag(
        picked, source, offsets=starts, mode="sum", per_sample_weights=weights.flatten()[order]
    )[:count]  # fmt: skip


def _candidate_blocks(
    query_bounds: np.ndarray, document_bounds: np.ndarray, candidate_bounds: np.ndarray, budget: int, size: int
) -> list[tuple[int, int]]:
    """Consecutive queries that fit into `budget` with their documents, all padded to one length; or one query alone."""
    counts = np.diff(candidate_bounds)
    longest = np.zeros(len(counts), dtype=np.int64)
    np.maximum.at(longest, np.repeat(np.arange(len(counts)), counts), np.diff(document_bounds))
    blocks, first, total, most, widest = [], 0, 0, 0, size
    for i, (count, tokens, rows) in enumerate(
        zip(counts.tolist(), longest.tolist(), np.diff(query_bounds).tolist(), strict=True)
    ):
        total, most, widest = total + count, max(most, tokens), max(widest, rows)
        if i > first and total * most * widest > budget:
            blocks.append((first, i))
            first, total, most, widest = i, count, tokens, max(size, rows)
    return [*blocks, (first, len(counts))]


def padded_tokens(
    bounds: np.ndarray, sequences: np.ndarray, device: torch.device, length: int | None = None
) -> tuple[Tensor, Tensor]:
    """The tokens [N, L] of these sequences, and whether each exists; L is `length`, or that of the longest, or 1."""
    starts, ends = bounds[sequences, None], bounds[sequences + 1, None]
    tokens = starts + np.arange(max(1, (ends - starts).max()) if length is None else length)
    exist = tokens < ends
    return torch.from_numpy(np.where(exist, tokens, 0)).to(device), torch.from_numpy(exist).to(device)


def runs(lengths: np.ndarray, start: int, stop: int, budget: int) -> Iterator[slice]:
    """Consecutive documents of at most `budget` tokens, padded to the longest of them; or one alone."""
    first, longest = start, 0
    for document in range(start, stop):
        longest = max(longest, int(lengths[document]))
        if document > first and (document + 1 - first) * longest > budget:
            yield slice(first, document)
            first, longest = document, int(lengths[document])
    if first < stop:
        yield slice(first, stop)


def rows_of(embeddings: Tensor, tokens: Tensor) -> Tensor:
    """Embeddings [N, L, d] of tokens [N, L]."""
    return embeddings.index_select(0, tokens.flatten()).view(*tokens.shape, embeddings.shape[1])


def _owners(bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For every token between the boundaries, the index of its sequence, from the first one on, and its place in it."""
    lengths = np.diff(bounds)
    owners = np.repeat(np.arange(len(lengths)), lengths)
    return owners, np.arange(len(owners)) - (bounds[:-1] - bounds[0])[owners]


def sequence_blocks(bounds: np.ndarray, budget: int) -> list[tuple[int, int]]:
    """Consecutive sequences whose tokens fit into `budget` together; a longer sequence stands alone."""
    blocks, first = [], 0
    while first < len(bounds) - 1:
        last = int(np.searchsorted(bounds, bounds[first] + max(1, budget), side="right")) - 1
        last = max(last, first + 1)
        blocks.append((first, last))
        first = last
    return blocks
