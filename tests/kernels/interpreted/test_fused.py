"""The last kernel of the fused projection reduces maxima over document parts to scores."""

from __future__ import annotations

import pytest
import torch
import triton

from pylate_flash.kernels import hidden

ROWS = 16


def maxima(similarities: torch.Tensor, bounds: list[int], columns: int) -> torch.Tensor:
    """The fused kernel's output for similarities [T, query rows]; entries that it does not write are garbage."""
    n_parts = triton.cdiv(len(similarities), ROWS)
    best = torch.full((len(bounds) - 1 + n_parts, columns), 1e9)
    for document, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        for part in range(n_parts):
            inside = similarities[max(start, part * ROWS) : min(end, (part + 1) * ROWS)]
            if len(inside):
                best[document + part, : similarities.shape[1]] = inside.amax(dim=0)
    return best


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mask", [None, torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize(("query_length", "mean", "empty_score"), [(3, False, 0.0), (20, True, -7.0)])
def test_scores_are_sums_of_the_maxima_over_parts(
    query_length: int, mean: bool, empty_score: float, mask: torch.dtype | None, packed: bool
) -> None:
    """Floating-point query masks hold weights; in a document mask, every nonzero entry is active."""
    torch.manual_seed(0)
    n_queries, n_documents, length = 2, 9, 21
    if packed:
        lengths = torch.tensor([5, 0, 40, 16, 1, 0, 33, 16, 0])
        bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    else:
        bounds = torch.arange(n_documents + 1) * length
    similarities = torch.randn(int(bounds[-1]), n_queries * query_length)
    similarities[7, 1] = torch.nan
    queries_mask = documents_mask = None
    weights, active = torch.ones(n_queries, query_length), torch.ones(len(similarities), dtype=torch.bool)
    if mask is not None:
        weights = (torch.rand(n_queries, query_length) > 0.3).float()
        if mask == torch.float32:
            weights *= torch.rand(n_queries, query_length) + 0.1
        weights[1, :3] = 0.0
        queries_mask = weights.to(mask)
        if not packed:
            documents_mask = (torch.rand(n_documents, length) > 0.5).to(mask) * (1 << 40 if mask == torch.int64 else 1)
            if mask == torch.float32:
                documents_mask *= 0.25
            documents_mask = documents_mask.to(mask)
            documents_mask[3] = 0
            active = documents_mask.flatten() != 0
    columns = 64
    best = maxima(similarities.masked_fill(~active.unsqueeze(1), -torch.inf), bounds.tolist(), columns)
    scores = torch.empty(n_queries, n_documents)
    hidden._finish_kernel(
        (triton.cdiv(n_documents, 4), n_queries, 1),
        (best, queries_mask, documents_mask, bounds if packed else None, scores),
        (query_length, n_documents, 0 if packed else length, columns, empty_score),
        (),
        (triton.next_power_of_2(query_length), 4, ROWS, mask == torch.float32, mean),
        (1, 1, None),
    )
    for document in range(n_documents):
        tokens = slice(bounds[document], bounds[document + 1])
        part = similarities[tokens][active[tokens]].unflatten(1, (n_queries, query_length))
        expected = torch.full((n_queries,), empty_score)
        if len(part):
            expected = (part.amax(dim=0) * weights).masked_fill(weights == 0, 0.0).sum(dim=1)
            if mean:
                expected = expected / (weights != 0).sum(dim=1).clamp(min=1)
        torch.testing.assert_close(scores[:, document], expected, equal_nan=True)
