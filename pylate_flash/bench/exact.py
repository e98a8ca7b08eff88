"""What is right: scores and training steps by their definitions in float64, and how far a result is from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from pylate_flash.bench.protocol import FLOAT32_PRODUCTS, MIB, float32_matmul_precision

# The similarities that are held at a time.
REFERENCE_BYTES = 1024 * MIB

# Where similarities, or gradients on the way, are rounded elsewhere, other tokens win, and gradients differ by so much.
ROUNDED = 0.3

# From queries, documents and, where there are some, both masks, their scores.
Score = Callable[..., torch.Tensor]


class Step(NamedTuple):
    """What a step gives: the loss, scores [Nq, Nd] unless they stay inside the loss, and the gradients of the loss."""

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
    """The plain way: all similarities in the inputs' type, their maxima, and a float32 (or float64) sum.

    [Nq, Nd], or [Nq, K] of documents [Nq, K, Ld, d].
    """
    similarities = torch.einsum("qsd,ntd->qnst" if documents.dim() == 3 else "qsd,qntd->qnst", queries, documents)
    if documents_mask is not None:
        similarities = similarities.masked_fill_(~documents_mask.bool().unsqueeze(-2), -torch.inf)
    # `amax` is the faster one, and `max` keeps indices for its gradient in place of all similarities.
    best = similarities.max(dim=-1).values if similarities.requires_grad else similarities.amax(dim=-1)
    if queries_mask is not None:
        best = best * queries_mask.unsqueeze(1)
    return best.sum(dim=-1, dtype=torch.promote_types(best.dtype, torch.float32))


def normalized(embeddings: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Unit vectors that are rounded to a type; the rounding has no gradient."""
    unit = torch.nn.functional.normalize(embeddings, dim=-1)
    return unit + (unit.to(dtype).to(unit.dtype) - unit).detach()


def scores(
    queries: torch.Tensor, documents: torch.Tensor, *, score: Score = einsum_scores, **masks: Any
) -> torch.Tensor:
    """Return the scores [Nq, Nd] in float64, of the (already rounded) inputs.

    ``score`` computes them, of so many documents at a time as `REFERENCE_BYTES` allow. It is given the masks that there
    are, ``queries_mask`` and ``documents_mask``, by these names.
    """
    queries = queries.detach().double()
    with torch.no_grad():
        return torch.cat([score(queries, part, **some) for part, some in _parts(queries, documents, masks)], dim=1)


def step(
    queries: torch.Tensor,
    documents: torch.Tensor,
    *,
    loss: Callable[[torch.Tensor], torch.Tensor],
    score: Score = einsum_scores,
    **masks: Any,
) -> Step:
    """Return the step of a loss of these `scores` in float64."""
    found = scores(queries, documents, score=score, **masks)
    with torch.enable_grad():
        value = loss(found.requires_grad_())
    (weights,) = torch.autograd.grad(value, found)
    of_leaves = gradients(queries, documents, weights, score=score, **masks)
    return Step(value.detach(), found.detach(), *of_leaves)


def gradients(
    queries: torch.Tensor, documents: torch.Tensor, weights: torch.Tensor, *, score: Score = einsum_scores, **masks: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of queries and documents, in float64, of the sum of `scores` with these weights [Nq, Nd]."""
    queries = queries.detach().double().requires_grad_()
    of_queries, of_documents, first = torch.zeros_like(queries), [], 0
    for part, some in _parts(queries, documents, masks):
        leaves = queries, part.requires_grad_()
        with torch.enable_grad():
            found = score(*leaves, **some)
        last = first + found.shape[1]
        some_of_queries, some_of_documents = torch.autograd.grad(found, leaves, weights[:, first:last])
        of_queries += some_of_queries
        of_documents.append(some_of_documents)
        first = last
    return of_queries.detach(), torch.cat(of_documents, dim=-3)


def in_parts(
    documents: torch.Tensor, masks: Mapping[str, torch.Tensor], size: int
) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """So many documents at a time, with the masks."""
    for first in range(0, documents.shape[-3], size):
        part = slice(first, first + size)
        some = {name: mask[..., part, :] if name == "documents_mask" else mask for name, mask in masks.items()}
        yield documents[..., part, :, :], some


def _parts(
    queries: torch.Tensor, documents: torch.Tensor, masks: Mapping[str, torch.Tensor | None]
) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Documents in float64, as many at a time as the reference holds, with the masks that there are."""
    size = max(1, REFERENCE_BYTES // (8 * queries.shape[:2].numel() * documents.shape[-2]))
    given = {name: mask for name, mask in masks.items() if mask is not None}
    for part, some in in_parts(documents.detach(), given, size):
        yield part.double(), some


@contextmanager
def float32_products(of_gpus: str = "ieee", of_cpus: str = "ieee") -> Iterator[None]:
    """With products of float32 of these precisions, as torch names them; the defaults are its own."""
    before = [products.fp32_precision for products in FLOAT32_PRODUCTS]
    try:
        for products, precision in zip(FLOAT32_PRODUCTS, (of_gpus, of_cpus), strict=True):
            products.fp32_precision = precision
        yield
    finally:
        for products, precision in zip(FLOAT32_PRODUCTS, before, strict=True):
            products.fp32_precision = precision


def accuracy(dtype: torch.dtype, *, gradients: bool = False) -> float:
    """Return the relative error that pylate_flash promises: of scores, or of a step's gradients."""
    if dtype == torch.float32 and float32_matmul_precision() != "highest":
        return 1e-3
    if not gradients:
        return 2e-6
    return 1e-5 if dtype == torch.float32 else 1e-2


def error(found: Result, expected: Result, wrong: float = math.inf) -> float:
    """Return the relative error of scores; of a step, the largest of loss, scores and gradients (Frobenius).

    A Frobenius error of at most 1e-2 implies a cosine of at least 0.9999. A loss or scores that are further off than
    ``wrong`` make the error infinite.
    """
    pairs: list[tuple[Any, Any]] = [(found, expected)]
    if isinstance(expected, Step):
        pairs = list(zip(found, expected, strict=True))
    values = [pair for pair in pairs[:2] if pair[0] is not None and pair[1] is not None]
    of_values = max(relative_error(*pair) for pair in values)
    return max(of_values, *(frobenius(*pair) for pair in pairs[2:]), 0.0) if of_values <= wrong else math.inf


def relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest relative error of an element, infinite where the output is not finite or has another size.

    The reference is float64 and finite. An element of it that is 0 counts with its absolute error.
    """
    if output.numel() != reference.numel():
        return math.inf
    if reference.numel() == 0:
        return 0.0
    difference = (output.detach().reshape(reference.shape).double() - reference).abs()
    error = (difference / torch.where(reference == 0, 1.0, reference.abs())).max().item()
    return error if math.isfinite(error) else math.inf


def frobenius(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error in Frobenius norm, infinite where it is not finite or the size is another."""
    if found.numel() != expected.numel():
        return math.inf
    value = (found.reshape(expected.shape).double() - expected).norm().item() / (expected.norm().item() or 1.0)
    return value if math.isfinite(value) else math.inf
