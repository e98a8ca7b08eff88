"""`maxsim_sparse_queries` against its definition, over shapes, masks and choices that hypothesis draws, and by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pylate_flash import maxsim_sparse_queries, pack
from pylate_flash.ops import maxsim_sparse_queries_reference, products
from tests.ops.cases import Elements, mistakes, wrong

BOTH = pytest.mark.parametrize("function", [maxsim_sparse_queries, maxsim_sparse_queries_reference])


QUERIES = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]])
DOCUMENTS = torch.tensor([[[3.0, -1.0], [2.0, -2.0]], [[1.0, -3.0], [-1.0, 4.0]]])


@BOTH
def test_by_hand(function) -> None:
    """The best similarities are 3, -1, 2 of document 0, and 1, 4, 3 of document 1."""
    for chosen, expected in (
        ([[0, 1], [2, 0]], [[2.0, 4.0]]),
        ([[2, -1], [-1, -1]], [[2.0, 0.0]]),
        ([[1, 1], [0, 0]], [[-1.0, 1.0]]),
        ([[[2, 1, 0], [1, -1, 1]]], [[4.0, 4.0]]),
    ):
        assert function(QUERIES, DOCUMENTS, torch.tensor(chosen)).tolist() == expected
    chosen, mask = torch.tensor([[0, 2, 2], [1, 2, -1]]), torch.tensor([[True, True, False]])
    assert function(QUERIES, DOCUMENTS, chosen, reduction="mean").tolist() == [[2.5, 3.5]]
    assert function(QUERIES, DOCUMENTS, chosen, reduction="mean", queries_mask=mask).tolist() == [[3.0, 4.0]]
    weights = torch.tensor([[0.5, 2.0, 0.25]])
    assert function(QUERIES, DOCUMENTS, chosen, queries_mask=weights).tolist() == [[2.0, 8.75]]
    mask = torch.tensor([[False, True], [False, False]])
    options = {"documents_mask": mask, "empty_score": -9.0}
    assert function(QUERIES, DOCUMENTS, chosen, **options).tolist() == [[2.0, -9.0]]
    assert function(QUERIES, DOCUMENTS, chosen, reduction="mean", **options).tolist() == [[1.0, -9.0]]


@BOTH
def test_packed_documents_by_hand(function) -> None:
    """Both documents above, and an empty one between them."""
    packed = {"documents_cu_seqlens": torch.tensor([0, 2, 2, 4]), "empty_score": -9.0}
    chosen, documents = torch.tensor([[2, 0], [0, 1], [1, -1]]), DOCUMENTS.flatten(0, 1)
    assert function(QUERIES, documents, chosen, **packed).tolist() == [[5.0, -9.0, 4.0]]
    assert function(QUERIES, documents, chosen, reduction="mean", **packed).tolist() == [[2.5, -9.0, 4.0]]


def test_memory_does_not_grow_with_the_similarities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gathered and multiplied block stays within its budget."""
    largest = 0
    product = torch.bmm

    def watched(*tensors: Tensor) -> Tensor:
        nonlocal largest
        result = product(*tensors)
        largest = max(largest, result.numel(), *(tensor.numel() for tensor in tensors))
        return result

    monkeypatch.setattr(torch, "bmm", watched)
    monkeypatch.setattr(products, "_BLOCK_CPU", 4000)
    maxsim_sparse_queries(torch.randn(2, 30, 8), torch.randn(50, 40, 8), torch.randint(0, 30, (50, 10)))
    assert 0 < largest <= 8 * 4000


Q, D, ROWS, CHOSEN = torch.ones(2, 3, 4), torch.ones(3, 5, 4), torch.ones(5, 4), torch.zeros(3, 2, dtype=torch.int64)
ONE, TWO = torch.tensor([0, 5]), torch.tensor([0, 2, 5])


test_one_error_for_each_mistake = mistakes(
    wrong(ValueError, r"shape \[2, 3, k\] or \[3, k\], got \[2, 2\]", maxsim_sparse_queries, Q, D, CHOSEN[:2]),
    wrong(ValueError, r"shape \[2, 3, k\] or \[3, k\], got \[1, 3, 2\]", maxsim_sparse_queries, Q, D, CHOSEN[None]),
    wrong(ValueError, r"shape \[2, 4, k\], got \[3, 2\]", maxsim_sparse_queries, Q, torch.ones(2, 4, 5, 4), CHOSEN),
    wrong(ValueError, "from 0 to 2, or -1 for none, got 3", maxsim_sparse_queries, Q, D, CHOSEN + 3),
    wrong(ValueError, "from 0 to 2, or -1 for none, got -2", maxsim_sparse_queries, Q, D, CHOSEN - 2),
    wrong(ValueError, r"documents must have shape .* got \[5, 4\]", maxsim_sparse_queries, Q, ROWS, CHOSEN),
    wrong(ValueError, r"documents must have shape \[Td, d\]",
          maxsim_sparse_queries, Q, D, CHOSEN, documents_cu_seqlens=torch.tensor([0, 3])),
    wrong(ValueError, "documents_mask must be None where documents are packed",
          maxsim_sparse_queries, Q, ROWS, CHOSEN[:1], documents_cu_seqlens=ONE, documents_mask=torch.ones(5)),
    wrong(ValueError, r"shape \[2, 2, k\] or \[2, k\], got \[3, 2\]",
          maxsim_sparse_queries, Q, ROWS, CHOSEN, documents_cu_seqlens=TWO),
    wrong(ValueError, "documents_cu_seqlens",
          maxsim_sparse_queries, Q, ROWS, CHOSEN, documents_cu_seqlens=torch.tensor([0, 2, 6, 5])),
    wrong(ValueError, "max_document_length must be None where documents are padded",
          maxsim_sparse_queries, Q, D, CHOSEN, max_document_length=5),
)  # fmt: skip


def test_short_packed_documents_are_not_padded_to_a_long_one() -> None:
    documents, bounds = pack([torch.randn(length, 128) for length in [2000, *[1] * 200]])
    with Elements() as elements:
        maxsim_sparse_queries(
            torch.randn(1, 32, 128), documents, torch.zeros(201, 1).long(), documents_cu_seqlens=bounds
        )
    assert elements.largest <= 4 * documents.numel()
