"""Normalisation of embeddings that are short, next to nothing, or nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pylate_flash import maxsim, maxsim_from_hidden, maxsim_varlen
from pylate_flash.ops import maxsim_reference


def packed(queries: Tensor, documents: Tensor, normalize: bool) -> Tensor:
    bounds = (torch.arange(len(tensor) + 1) * tensor.shape[1] for tensor in (queries, documents))
    return maxsim_varlen(queries.flatten(0, 1), documents.flatten(0, 1), *bounds, normalize=normalize)


def from_hidden(queries: Tensor, documents: Tensor, normalize: bool) -> Tensor:
    return maxsim_from_hidden(queries, documents, torch.eye(4, dtype=queries.dtype), normalize=normalize)


@pytest.mark.parametrize("operation", [maxsim, packed, from_hidden])
@pytest.mark.parametrize("norm", [1e-4, 1e-11, 1e-13, 0.0])
def test_norms_are_at_least_1e_12(operation, norm: float) -> None:
    """Below that the division is by a constant, and its gradient that of a product."""
    torch.manual_seed(0)
    unit = torch.nn.functional.normalize(torch.randn(5, 3, 4, dtype=torch.float64), dim=-1)
    results = []
    for function in (operation, maxsim_reference):
        leaves = (unit[:2] * norm).requires_grad_(), (unit[2:] * norm).requires_grad_()
        scores = function(*leaves, normalize=True)
        results.append((scores.detach().double(), *torch.autograd.grad(scores.sum(), leaves)))
    torch.testing.assert_close(*results, rtol=1e-5, atol=0.0)
