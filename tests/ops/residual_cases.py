"""Random residual codes and queries, drawn by hypothesis, for every implementation's tests."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from pylate_flash import ResidualCodes
from pylate_flash.ops.residual import maxsim_residual_reference
from tests.ops.cases import differentiated, drawn_mask

SIZES = st.sampled_from([8, 16, 24, 32, 40])


def residual_codes(
    lengths: list[int], size: int, nbits: int, dtype: torch.dtype = torch.float16, n_centroids: int = 7, seed: int = 0
) -> ResidualCodes:
    """Random codes of documents of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    n_tokens = sum(lengths)
    return ResidualCodes(
        torch.randint(0, n_centroids, (n_tokens,), generator=generator, dtype=torch.int32),
        torch.randint(0, 256, (n_tokens, size * nbits // 8), generator=generator, dtype=torch.uint8),
        torch.nn.functional.normalize(torch.randn(n_centroids, size, generator=generator), dim=-1).to(dtype),
        (torch.randn(1 << nbits, generator=generator) / size**0.5).to(dtype),
        torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64 if seed % 2 else torch.int32),
    )


@st.composite
def residual_cases(
    draw: st.DrawFn,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16, torch.float64),
    codec_dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32),
    sizes: st.SearchStrategy[int] = SIZES,
    max_length: int = 40,
) -> tuple[Tensor, ResidualCodes, dict]:
    """Draw queries, documents of lengths from 0, and all options: masks, weights, candidates with some missing."""
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    lengths = draw(st.lists(st.integers(0, max_length), min_size=1, max_size=6))
    size, nbits = draw(sizes), draw(st.sampled_from([2, 4]))
    documents = residual_codes(lengths, size, nbits, draw(st.sampled_from(codec_dtypes)), seed=seed)
    n_queries, query_length = draw(st.integers(1, 4)), draw(st.integers(1, max_length))
    queries = torch.nn.functional.normalize(torch.randn(n_queries, query_length, size, generator=generator), dim=-1)
    candidates = None
    if draw(st.booleans()):
        n_candidates = draw(st.integers(1, 5))
        candidates = torch.randint(-1, len(lengths), (n_queries, n_candidates), generator=generator)
        candidates = candidates.to(draw(st.sampled_from([torch.int32, torch.int64])))
    options = {
        "queries_mask": drawn_mask(draw, queries, generator, weights=True),
        "candidates": candidates,
        "reduction": draw(st.sampled_from(["sum", "mean"])),
        "empty_score": draw(st.sampled_from([0.0, -5.0])),
    }
    return queries.to(draw(st.sampled_from(dtypes))), documents, options


def residual_gradient(function, queries: Tensor, documents: ResidualCodes, options: dict) -> Tensor:
    """The gradient of the queries, computed by `differentiated`."""
    return differentiated(function, (queries,), options, documents)[0]


def check_8_bits(result: Tensor, queries: Tensor, documents: ResidualCodes, options: dict) -> None:
    """Compare scores of rounded queries and bucket weights with the definition, up to the error of a similarity.

    A query's elements are rounded to 1/127 of the largest. Weights are rounded so that the sum of their squared errors
    is at most that of steps of 1/126 of the largest; the centroid's term is off by 2**-11 of its magnitude.
    """
    rows, weights = queries.double(), documents.bucket_weights.double()
    largest_weight = weights.abs().max()
    total = rows.abs().sum(dim=-1)
    weights_error = total * largest_weight / 126 / 2 * len(weights) ** 0.5
    queries_error = rows.abs().amax(dim=-1) / 127 / 2 * documents.size * largest_weight
    centroid = rows.norm(dim=-1) * documents.centroids.double().norm(dim=-1).max()
    token_error = weights_error + queries_error + (centroid + total * largest_weight) * 2**-10
    bound = (token_error * documents.scales.max()).sum(dim=-1, keepdim=True)
    if options.get("reduction") == "mean":
        bound = bound / queries.shape[1]
    difference = result.double() - maxsim_residual_reference(queries, documents, **options)
    assert (difference.abs() <= bound).all()
    # Rounding errors have either sign: a score is off by a few times the square root of their number.
    assert difference.square().mean().sqrt() <= 6 * bound.mean() / (queries.shape[1] * documents.size) ** 0.5
