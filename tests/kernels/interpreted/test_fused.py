"""The sum at the end of the fused projection: maxima of parts of documents, to scores."""

from __future__ import annotations

import pytest
import torch
import triton

from pylate_flash.kernels import fused

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
ROWS = 16


def maxima(similarities: torch.Tensor, bounds: list[int], columns: int) -> torch.Tensor:
    """What the kernel leaves, from similarities [T, query rows]; what it leaves alone is garbage."""
    n_parts = triton.cdiv(len(similarities), ROWS)
    best = torch.full((len(bounds) - 1 + n_parts, columns), 1e9)
    for document, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        for part in range(n_parts):
            inside = similarities[max(start, part * ROWS) : min(end, (part + 1) * ROWS)]
            if len(inside):
                best[document + part, : similarities.shape[1]] = inside.amax(dim=0)
    return best


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("query_length", [3, 20])
def test_scores_are_sums_of_the_maxima_over_parts(query_length: int, masked: bool, packed: bool) -> None:
    torch.manual_seed(0)
    n_queries, n_documents, length = 2, 9, 21
    if packed:
        lengths = torch.tensor([5, 0, 40, 16, 1, 0, 33, 16, 0])
        bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    else:
        bounds = torch.arange(n_documents + 1) * length
    similarities = torch.randn(int(bounds[-1]), n_queries * query_length)
    similarities[7, 1] = torch.nan
    queries_mask = torch.rand(n_queries, query_length) > 0.3 if masked else None
    documents_mask = None
    active = torch.ones(len(similarities), dtype=torch.bool)
    if masked and not packed:
        documents_mask = torch.rand(n_documents, length) > 0.5
        documents_mask[3] = False
        active = documents_mask.flatten()
    columns = 64
    best = maxima(similarities.masked_fill(~active.unsqueeze(1), -torch.inf), bounds.tolist(), columns)
    scores = torch.empty(n_queries, n_documents)
    fused._finish.bind(
        (triton.cdiv(n_documents, 4), n_queries, 1),
        (query_length, n_documents, 0 if packed else length, columns),
        (),
        (triton.next_power_of_2(query_length), 4, ROWS, packed, masked, documents_mask is not None),
        num_warps=1,
        num_stages=1,
    )(best, queries_mask, documents_mask, bounds if packed else None, scores)
    for document in range(n_documents):
        tokens = slice(bounds[document], bounds[document + 1])
        part = similarities[tokens][active[tokens]].unflatten(1, (n_queries, query_length))
        expected = part.amax(dim=0) if len(part) else torch.zeros(n_queries, query_length)
        if queries_mask is not None:
            expected = expected.masked_fill(~queries_mask, 0.0)
        torch.testing.assert_close(scores[:, document], expected.sum(dim=1), equal_nan=True)
