"""A call of every operation and loss, on any device and by any implementation, for the tests that concern all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from pylate_flash import (
    chamfer,
    chamfer_varlen,
    maxsim,
    maxsim_cross_entropy,
    maxsim_from_hidden,
    maxsim_kl_divergence,
    maxsim_margin_mse,
    maxsim_pairwise,
    maxsim_ragged,
    maxsim_ragged_pairwise,
    maxsim_residual,
    maxsim_sparse_queries,
    maxsim_varlen,
    maxsim_varlen_pairwise,
    soft_maxsim,
    soft_maxsim_varlen,
    xtr_scores,
)
from tests.ops.residual_cases import residual_codes

Operation = Callable[[Tensor], Tensor]
# Those whose arguments are tensors of fixed shapes; the others are lists, or lengths that are read.
OF_TENSORS = (
    "in-batch", "candidates", "pairs", "packed", "Chamfer", "XTR", "from hidden states", "sparse", "residual", "soft",
    "cross entropy", "divergence",
)  # fmt: skip


def operations(device: str = "cpu", implementation: str = "auto") -> dict[str, Operation]:
    """Functions of queries [2, 3, 4], float32, on that device, which all need a gradient or none."""
    generator = torch.Generator().manual_seed(0)
    documents, candidates, weight, teacher = (
        torch.randn(shape, generator=generator).to(device) for shape in ((3, 5, 4), (2, 3, 5, 4), (4, 4), (2, 3))
    )
    rows = documents.flatten(0, 1)
    bounds = torch.tensor([0, 3, 6], device=device), torch.tensor([0, 5, 10, 15], device=device)
    pairs = bounds[0], bounds[1][:3]
    owned = torch.tensor([0, 1, 3], device=device)
    longest = {"max_query_length": 3, "max_document_length": 5}
    places = torch.tensor([[0], [1], [0]], device=device)
    codes = residual_codes([5, 0, 3], 8, 4).to(device)
    by = {"implementation": implementation}
    return {
        "in-batch": lambda queries: maxsim(queries, documents, **by),
        "candidates": lambda queries: maxsim(queries, candidates, normalize=True, **by),
        "pairs": lambda queries: maxsim_pairwise(queries, documents[:2], **by),
        "packed": lambda queries: maxsim_varlen(queries.flatten(0, 1), rows, *bounds, **longest, **by),
        "packed candidates": lambda queries: maxsim_varlen(
            queries.flatten(0, 1), rows, *bounds, candidates_cu_seqlens=owned, **by
        ),
        "packed pairs": lambda queries: maxsim_varlen_pairwise(queries.flatten(0, 1), rows[:10], *pairs, **by),
        "ragged": lambda queries: maxsim_ragged([queries[0], queries[1, :2]], [rows[:3], rows[3:8]], **by),
        "ragged pairs": lambda queries: maxsim_ragged_pairwise([*queries], [rows[:3], rows[3:8]], **by),
        "Chamfer": lambda queries: chamfer(queries, documents[:2], **by),
        "packed Chamfer": lambda queries: chamfer_varlen(queries.flatten(0, 1), rows[:10], *pairs, **by),
        "XTR": lambda queries: xtr_scores(queries, documents, k=4, **by),
        "from hidden states": lambda queries: maxsim_from_hidden(queries, documents, weight, **by),
        "packed from hidden states": lambda queries: maxsim_from_hidden(
            queries, rows, weight, documents_cu_seqlens=bounds[1], candidates_cu_seqlens=owned, **by
        ),
        "sparse": lambda queries: maxsim_sparse_queries(queries, documents, places, **by),
        "packed sparse": lambda queries: maxsim_sparse_queries(
            queries, rows, places, documents_cu_seqlens=bounds[1], reduction="mean", **by
        ),
        "residual": lambda queries: maxsim_residual(pad(queries, (0, 4)), codes, **by),
        "soft": lambda queries: soft_maxsim(queries, documents, 2.0, **by),
        "soft candidates": lambda queries: soft_maxsim(queries, candidates, 2.0, **by),
        "packed soft": lambda queries: soft_maxsim_varlen(queries.flatten(0, 1), rows, 2.0, *bounds, **by),
        "cross entropy": lambda queries: maxsim_cross_entropy(queries, documents, **by),
        "cross entropies": lambda queries: maxsim_cross_entropy(queries, documents, loss_reduction="none", **by),
        "divergence": lambda queries: maxsim_kl_divergence(queries, candidates, teacher, **by),
        "margin MSE": lambda queries: maxsim_margin_mse(queries, candidates, teacher, **by),
    }


def check_changed_in_place(operation: Operation, queries: Tensor) -> None:
    """A result that is multiplied in place has the gradient of one that is multiplied out of place."""
    expected, found = (queries.clone().requires_grad_() for _ in range(2))
    (operation(expected) * 2).square().sum().backward()
    scores = operation(found)
    scores.mul_(2)
    scores.square().sum().backward()
    assert torch.equal(found.grad, expected.grad)
