"""What is right: scores and training steps by their definitions in float64, and how far a result is from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from pylate_flash.bench.protocol import MIB

# The similarities that are held at a time.
REFERENCE_BYTES = 1024 * MIB

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
    queries: torch.Tensor,
    documents: torch.Tensor,
    queries_mask: torch.Tensor | None = None,
    documents_mask: torch.Tensor | None = None,
    *,
    score: Score = einsum_scores,
) -> torch.Tensor:
    """Return the scores [Nq, Nd] in float64, of the (already rounded) inputs.

    ``score`` computes them, of so many documents at a time as `REFERENCE_BYTES` allow.
    """
    queries = queries.detach().double()
    with torch.no_grad():
        parts = _parts(queries, documents, queries_mask, documents_mask)
        return torch.cat([score(queries, *part) for part in parts], dim=1)


def step(
    queries: torch.Tensor,
    documents: torch.Tensor,
    queries_mask: torch.Tensor | None = None,
    documents_mask: torch.Tensor | None = None,
    *,
    loss: Callable[[torch.Tensor], torch.Tensor],
    score: Score = einsum_scores,
) -> Step:
    """Return the step of a loss of these scores in float64."""
    found = scores(queries, documents, queries_mask, documents_mask, score=score)
    with torch.enable_grad():
        value = loss(found.requires_grad_())
    (weights,) = torch.autograd.grad(value, found)
    of_leaves = gradients(queries, documents, weights, queries_mask, documents_mask, score=score)
    return Step(value.detach(), found.detach(), *of_leaves)


def gradients(
    queries: torch.Tensor,
    documents: torch.Tensor,
    weights: torch.Tensor,
    queries_mask: torch.Tensor | None = None,
    documents_mask: torch.Tensor | None = None,
    *,
    score: Score = einsum_scores,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of queries and documents, in float64, of the scores' sum with these weights [Nq, Nd]."""
    queries = queries.detach().double().requires_grad_()
    of_queries, of_documents, first = torch.zeros_like(queries), [], 0
    for part, *masks in _parts(queries, documents, queries_mask, documents_mask):
        leaves = queries, part.requires_grad_()
        with torch.enable_grad():
            found = score(*leaves, *masks)
        last = first + found.shape[1]
        some_of_queries, some_of_documents = torch.autograd.grad(found, leaves, weights[:, first:last])
        of_queries += some_of_queries
        of_documents.append(some_of_documents)
        first = last
    return of_queries.detach(), torch.cat(of_documents, dim=-3)


def _parts(
    queries: torch.Tensor,
    documents: torch.Tensor,
    queries_mask: torch.Tensor | None,
    documents_mask: torch.Tensor | None,
) -> Iterator[tuple]:
    """Documents in float64, a part at a time, and if there are masks, both."""
    step = max(1, REFERENCE_BYTES // (8 * queries.shape[:2].numel() * documents.shape[-2]))
    masked = queries_mask is not None or documents_mask is not None
    for first in range(0, documents.shape[-3], step):
        part = slice(first, first + step)
        mask = None if documents_mask is None else documents_mask[..., part, :]
        yield documents.detach()[..., part, :, :].double(), *((queries_mask, mask) if masked else ())


def accuracy(dtype: torch.dtype, *, gradients: bool = False) -> float:
    """Return the relative error that pylate_flash promises: of scores, or of a step's gradients."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return 1e-3
    if not gradients:
        return 2e-6
    return 1e-5 if dtype == torch.float32 else 1e-2


def error(found: Result, expected: Result, wrong: float = math.inf) -> float:
    """Return the relative error of scores; of a step, the largest of loss, scores and gradients (Frobenius).

    A Frobenius error of at most 1e-2 implies a cosine of at least 0.9999. A loss or scores that are further off than
    ``wrong`` make the error infinite.
    """
    if isinstance(found, torch.Tensor) or isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        of_values = relative_error(found, expected)
        return of_values if of_values <= wrong else math.inf
    values = [(found.loss, expected.loss)]
    if found.scores is not None and expected.scores is not None:
        values.append((found.scores, expected.scores))
    of_values = max(relative_error(*pair) for pair in values)
    if of_values > wrong:
        return math.inf
    return max(
        of_values,
        frobenius(found.grad_queries, expected.grad_queries),
        frobenius(found.grad_documents, expected.grad_documents),
    )


def relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest relative error of an element, infinite where the output is not finite or has another size.

    Parameters
    ----------
    output
        What a system returned.
    reference
        The same in float64, finite. An element of it that is 0 counts with its absolute error.
    """
    if output.numel() != reference.numel():
        return math.inf
    if reference.numel() == 0:
        return 0.0
    difference = (output.detach().reshape(reference.shape).to(torch.float64) - reference).abs()
    error = (difference / torch.where(reference == 0, 1.0, reference.abs())).max().item()
    return error if math.isfinite(error) else math.inf


def frobenius(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error in Frobenius norm, infinite where it is not finite or the size is another."""
    if found.numel() != expected.numel():
        return math.inf
    difference = (found.reshape(expected.shape).double() - expected).norm().item()
    norm = expected.norm().item()
    value = difference / norm if norm else difference
    return value if math.isfinite(value) else math.inf
