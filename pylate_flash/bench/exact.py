"""References: scores and training steps by definition in float64, and the error of a result against them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from pylate_flash.bench.protocol import FLOAT32_PRODUCTS, MIB, float32_matmul_precision

# Bytes of similarities that are held at a time.
REFERENCE_BYTES = 1024 * MIB

# Rounding similarities or intermediate gradients elsewhere changes the argmax, and gradients differ by up to this much.
ROUNDED = 0.3

# Maps queries, documents and optional masks (`queries_mask`, `documents_mask`) to scores.
Score = Callable[..., torch.Tensor]


class Step(NamedTuple):
    """The result of a step: the loss, scores [Nq, Nd] (None if the loss is fused), and the gradients of the loss."""

    loss: torch.Tensor
    scores: torch.Tensor | None
    grad_queries: torch.Tensor
    grad_documents: torch.Tensor


Result = torch.Tensor | Step


def einsum_scores(
    queries: torch.Tensor,
    documents: torch.Tensor,
    queries_mask: torch.Tensor | None = None,
    documents_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain scores: all similarities in the inputs' dtype, their maxima, and a float32 (or float64) sum.

    Shape [Nq, Nd], or [Nq, K] for documents [Nq, K, Ld, d].
    """
    similarities = torch.einsum("qsd,ntd->qnst" if documents.dim() == 3 else "qsd,qntd->qnst", queries, documents)
    if documents_mask is not None:
        similarities = similarities.masked_fill_(~documents_mask.bool().unsqueeze(-2), -torch.inf)
    # `amax` is faster; for the backward `max` saves indices instead of all similarities.
    best = similarities.max(dim=-1).values if similarities.requires_grad else similarities.amax(dim=-1)
    if queries_mask is not None:
        best = best * queries_mask.unsqueeze(1)
    return best.sum(dim=-1, dtype=torch.promote_types(best.dtype, torch.float32))


def normalized(embeddings: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Normalise, then round to ``dtype``; the rounding is ignored by the backward (straight-through)."""
    unit = torch.nn.functional.normalize(embeddings, dim=-1)
    return unit + (unit.to(dtype).to(unit.dtype) - unit).detach()


def scores(
    queries: torch.Tensor, documents: torch.Tensor, *, score: Score = einsum_scores, **masks: Any
) -> torch.Tensor:
    """Return the scores [Nq, Nd] of the (already rounded) inputs in float64.

    ``score`` computes them for as many documents at a time as `REFERENCE_BYTES` allows. It receives the masks that are
    not None as keyword arguments ``queries_mask`` and ``documents_mask``.
    """
    queries = queries.detach().double()
    with torch.no_grad():
        return torch.cat(
            [score(queries, part, **part_masks) for part, part_masks in _parts(queries, documents, masks)], dim=1
        )


def step(
    queries: torch.Tensor,
    documents: torch.Tensor,
    *,
    loss: Callable[[torch.Tensor], torch.Tensor],
    score: Score = einsum_scores,
    **masks: Any,
) -> Step:
    """Return the step in float64: the loss of `scores`, and its gradients."""
    step_scores = scores(queries, documents, score=score, **masks)
    with torch.enable_grad():
        value = loss(step_scores.requires_grad_())
    (weights,) = torch.autograd.grad(value, step_scores)
    grads = gradients(queries, documents, weights, score=score, **masks)
    return Step(value.detach(), step_scores.detach(), *grads)


def gradients(
    queries: torch.Tensor, documents: torch.Tensor, weights: torch.Tensor, *, score: Score = einsum_scores, **masks: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float64 gradients of queries and documents of the sum of `scores` weighted by ``weights`` [Nq, Nd]."""
    queries = queries.detach().double().requires_grad_()
    grad_queries, grad_documents, first = torch.zeros_like(queries), [], 0
    for part, part_masks in _parts(queries, documents, masks):
        leaves = queries, part.requires_grad_()
        with torch.enable_grad():
            part_scores = score(*leaves, **part_masks)
        last = first + part_scores.shape[1]
        part_grad_queries, part_grad_documents = torch.autograd.grad(part_scores, leaves, weights[:, first:last])
        grad_queries += part_grad_queries
        grad_documents.append(part_grad_documents)
        first = last
    return grad_queries.detach(), torch.cat(grad_documents, dim=-3)


def in_parts(
    documents: torch.Tensor, masks: Mapping[str, torch.Tensor], size: int
) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Yield ``size`` documents at a time, with their masks."""
    for first in range(0, documents.shape[-3], size):
        part = slice(first, first + size)
        part_masks = {name: mask[..., part, :] if name == "documents_mask" else mask for name, mask in masks.items()}
        yield documents[..., part, :, :], part_masks


def _parts(
    queries: torch.Tensor, documents: torch.Tensor, masks: Mapping[str, torch.Tensor | None]
) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Yield float64 documents, as many at a time as `REFERENCE_BYTES` allows, with the masks that are not None."""
    size = max(1, REFERENCE_BYTES // (8 * queries.shape[:2].numel() * documents.shape[-2]))
    present_masks = {name: mask for name, mask in masks.items() if mask is not None}
    for part, part_masks in in_parts(documents.detach(), present_masks, size):
        yield part.double(), part_masks


@contextmanager
def float32_products(of_gpus: str = "ieee", of_cpus: str = "ieee") -> Iterator[None]:
    """Set the precision of float32 products, by torch's names, inside the context; the defaults are torch's own."""
    before = [products.fp32_precision for products in FLOAT32_PRODUCTS]
    try:
        for products, precision in zip(FLOAT32_PRODUCTS, (of_gpus, of_cpus), strict=True):
            products.fp32_precision = precision
        yield
    finally:
        for products, precision in zip(FLOAT32_PRODUCTS, before, strict=True):
            products.fp32_precision = precision


def accuracy(dtype: torch.dtype, *, gradients: bool = False) -> float:
    """Return the relative error that pylate_flash promises, for scores or for the gradients of a step."""
    if dtype == torch.float32 and float32_matmul_precision() != "highest":
        return 1e-3
    if not gradients:
        return 2e-6
    return 1e-5 if dtype == torch.float32 else 1e-2


def error(result: Result, expected: Result, wrong: float = math.inf) -> float:
    """Return the relative error of scores; for a step, the largest of loss, scores and gradients (Frobenius).

    A Frobenius error of at most 1e-2 implies a cosine of at least 0.9999. If the loss or the scores exceed ``wrong``,
    the error is infinite.
    """
    pairs: list[tuple[Any, Any]] = [(result, expected)]
    if isinstance(expected, Step):
        pairs = list(zip(result, expected, strict=True))
    values = [pair for pair in pairs[:2] if pair[0] is not None and pair[1] is not None]
    of_values = max(relative_error(*pair) for pair in values)
    return max(of_values, *(frobenius(*pair) for pair in pairs[2:]), 0.0) if of_values <= wrong else math.inf


def relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest elementwise relative error; infinite if the output is not finite or has another size.

    The reference is float64 and finite. Where it is 0, the absolute error counts.
    """
    if output.numel() != reference.numel():
        return math.inf
    if reference.numel() == 0:
        return 0.0
    difference = (output.detach().reshape(reference.shape).double() - reference).abs()
    error = (difference / torch.where(reference == 0, 1.0, reference.abs())).max().item()
    return error if math.isfinite(error) else math.inf


def frobenius(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error in Frobenius norm; infinite if it is not finite or the sizes differ."""
    if output.numel() != expected.numel():
        return math.inf
    value = (output.reshape(expected.shape).double() - expected).norm().item() / (expected.norm().item() or 1.0)
    return value if math.isfinite(value) else math.inf
