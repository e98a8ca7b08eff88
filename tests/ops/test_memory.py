"""What an operation returns lies in memory of its own, and what it was given is as before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from pylate_flash import (
    ResidualCodec,
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
    pack,
    quantize,
    soft_maxsim,
    soft_maxsim_varlen,
    train_residual_codec,
    xtr_scores,
)
from tests.ops.residual_cases import residual_codes


def tensors_of(value: object) -> Iterator[Tensor]:
    """All tensors in a value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif is_dataclass(value):
        yield from tensors_of([getattr(value, field.name) for field in fields(value)])


def places(value: object) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_of(value) if tensor.numel()}


@pytest.fixture(params=[1, 8], ids=["one", "several"])
def given(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    """Draws embeddings [n, tokens, size] that need a gradient: one of all, where the shortest ways lead, or several."""
    generator = torch.Generator().manual_seed(0)
    n, tokens, size = (1, 1, 1) if request.param == 1 else (2, 3, 8)

    def draw(*more: int) -> Tensor:
        return torch.rand(n, *more, tokens, size, generator=generator).requires_grad_()

    return draw


def bounds(embeddings: Tensor) -> Tensor:
    n, tokens = embeddings.shape[:2]
    return torch.arange(0, n * tokens + 1, tokens)


def both(embeddings: Tensor) -> dict[str, Tensor]:
    ones = torch.ones(embeddings.shape[:2])
    return {"queries_mask": ones, "documents_mask": ones.clone()}


# The call of each operation, by queries, documents and candidates: the function, and what it is given.
CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Callable[..., Any], tuple, dict[str, Any]]]] = {
    "maxsim": lambda q, d, k: (maxsim, (q, d), both(q)),
    "candidates": lambda q, d, k: (maxsim, (q, k), {}),
    "quantized": lambda q, d, k: (maxsim, (q.detach(), quantize(d)), {}),
    "pairwise": lambda q, d, k: (maxsim_pairwise, (q, d), both(q)),
    "varlen": lambda q, d, k: (maxsim_varlen, (q.flatten(0, 1), d.flatten(0, 1), bounds(q), bounds(d)), {}),
    "varlen pairwise": lambda q, d, k: (
        maxsim_varlen_pairwise,
        (q.flatten(0, 1), d.flatten(0, 1), bounds(q), bounds(d)),
        {},
    ),
    "ragged": lambda q, d, k: (maxsim_ragged, (list(q), list(d)), {}),
    "ragged pairwise": lambda q, d, k: (maxsim_ragged_pairwise, (list(q), list(d)), {}),
    "ragged pairwise, no gradient": lambda q, d, k: (maxsim_ragged_pairwise, (list(q.detach()), list(d.detach())), {}),
    "soft": lambda q, d, k: (soft_maxsim, (q, d, torch.ones(())), both(q)),
    "soft varlen": lambda q, d, k: (
        soft_maxsim_varlen,
        (q.flatten(0, 1), d.flatten(0, 1), 1.0, bounds(q), bounds(d)),
        {},
    ),
    "sparse": lambda q, d, k: (maxsim_sparse_queries, (q, d, torch.zeros(len(d), 1, dtype=torch.int64)), {}),
    "xtr": lambda q, d, k: (xtr_scores, (q, d), {"k": 1}),
    "hidden": lambda q, d, k: (maxsim_from_hidden, (q, d, torch.eye(d.shape[-1], requires_grad=True)), both(q)),
    "residual": lambda q, d, k: (
        maxsim_residual,
        (torch.rand(*q.shape[:2], 8), residual_codes([1] * len(d), 8, 4)),
        {},
    ),
    "cross entropy": lambda q, d, k: (
        maxsim_cross_entropy,
        (q, d),
        {"temperature": torch.ones((), requires_grad=True), "labels": torch.zeros(len(q), dtype=torch.int64)},
    ),
    "cross entropy of each": lambda q, d, k: (
        maxsim_cross_entropy,
        (q, d),
        {"loss_reduction": "none", "with_statistics": True},
    ),
    "divergence": lambda q, d, k: (maxsim_kl_divergence, (q, k, torch.rand(k.shape[:2])), {}),
    "margin": lambda q, d, k: (maxsim_margin_mse, (q, k, torch.rand(k.shape[:2])), {}),
    "chamfer": lambda q, d, k: (chamfer, (q, d), {}),
    "chamfer varlen": lambda q, d, k: (chamfer_varlen, (q.flatten(0, 1), d.flatten(0, 1), bounds(q), bounds(d)), {}),
    "pack": lambda q, d, k: (pack, (list(q),), {}),
    "quantize": lambda q, d, k: (quantize, (d.flatten(0, 1),), {"cu_seqlens": bounds(d)}),
    "quantize to bytes": lambda q, d, k: (quantize, (d.flatten(0, 1), "uint8"), {"cu_seqlens": bounds(d)}),
    "dequantize": lambda q, d, k: (lambda documents: documents.dequantize(), (quantize(d),), {}),
    "compress": lambda q, d, k: (
        lambda *given: [getattr(codec(8).compress(*given), name) for name in ("codes", "residuals", "cu_seqlens")],
        (torch.rand(3, 8), torch.tensor([0, 1, 3])),
        {},
    ),
    "decompress": lambda q, d, k: (lambda documents: documents.decompress(), (residual_codes([1] * len(d), 8, 4),), {}),
    "train": lambda q, d, k: (train_residual_codec, (torch.rand(4, 8), 4), {"dtype": torch.float32}),
}


def codec(size: int) -> ResidualCodec:
    return ResidualCodec(torch.eye(size), torch.zeros(3), torch.zeros(4))


@pytest.mark.parametrize("operation", CALLS)
def test_nothing_is_changed_or_kept(operation: str, given: Callable[..., Tensor]) -> None:
    if operation == "train":
        pytest.importorskip("fastkmeans")
    queries, documents = given(), given()
    function, arguments, options = CALLS[operation](queries, documents, given(2))
    inputs = [*tensors_of(list(arguments)), *tensors_of(list(options.values()))]
    before = [tensor.detach().clone() for tensor in inputs]
    found = function(*arguments, **options)
    learned = [tensor for tensor in inputs if tensor.requires_grad]
    scores = [tensor for tensor in tensors_of(found) if tensor.requires_grad]
    gradients = torch.autograd.grad(scores[0].sum(), learned) if scores else ()
    assert places(found)
    assert not places([found, gradients]) & places(inputs)
    for tensor, was in zip(inputs, before, strict=True):
        assert torch.equal(tensor, was)
