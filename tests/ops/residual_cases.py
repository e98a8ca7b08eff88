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
    """Documents of these lengths, of random codes."""
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
    """Queries, documents of lengths from 0, and all options: masks and weights, candidates with some missing."""
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    lengths = draw(st.lists(st.integers(0, max_length), min_size=1, max_size=6))
    size, nbits = draw(sizes), draw(st.sampled_from([2, 4]))
    documents = residual_codes(lengths, size, nbits, draw(st.sampled_from(codec_dtypes)), seed=seed)
    n_queries, query_length = draw(st.integers(1, 4)), draw(st.integers(1, max_length))
    queries = torch.nn.functional.normalize(torch.randn(n_queries, query_length, size, generator=generator), dim=-1)
    candidates = None
    if draw(st.booleans()):
        number = draw(st.integers(1, 5))
        candidates = torch.randint(-1, len(lengths), (n_queries, number), generator=generator)
        candidates = candidates.to(draw(st.sampled_from([torch.int32, torch.int64])))
    options = {
        "queries_mask": drawn_mask(draw, queries, generator, weights=True),
        "candidates": candidates,
        "reduction": draw(st.sampled_from(["sum", "mean"])),
        "empty_score": draw(st.sampled_from([0.0, -5.0])),
    }
    return queries.to(draw(st.sampled_from(dtypes))), documents, options


def residual_gradient(function, queries: Tensor, documents: ResidualCodes, options: dict) -> Tensor:
    """The gradient of the queries, as `differentiated`."""
    return differentiated(function, (queries,), options, documents)[0]


def check_8_bits(result: Tensor, queries: Tensor, documents: ResidualCodes, options: dict) -> None:
    """Scores of rounded queries and bucket weights, against the definition, by how much a similarity may be off.

    A query's elements are rounded to 1/127 of the largest. Weights are rounded so that their squared errors together
    are at most those of steps of 1/126 of the largest; what a centroid adds is off by 2**-11 of it.
    """
    rows, weights = queries.double(), documents.bucket_weights.double()
    most = weights.abs().max()
    total = rows.abs().sum(dim=-1)
    in_weights = total * most / 126 / 2 * len(weights) ** 0.5
    in_queries = rows.abs().amax(dim=-1) / 127 / 2 * documents.size * most
    centroid = rows.norm(dim=-1) * documents.centroids.double().norm(dim=-1).max()
    of_token = in_weights + in_queries + (centroid + total * most) * 2**-10
    off = (of_token * documents.scales.max()).sum(dim=-1, keepdim=True)
    if options.get("reduction") == "mean":
        off = off / queries.shape[1]
    difference = result.double() - maxsim_residual_reference(queries, documents, **options)
    assert (difference.abs() <= off).all()
    # Roundings are of either sign, so that a score is off by a few of the root of their number.
    assert difference.square().mean().sqrt() <= 6 * off.mean() / (queries.shape[1] * documents.size) ** 0.5
