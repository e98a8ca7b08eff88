"""The scores of `scoring` divided by the number of query tokens (MeanMaxSim), by sentence-transformers' names."""

from __future__ import annotations

import torch
from torch import Tensor

from .scoring import (
    Embeddings,
    Mask,
    colbert_kd_scores,
    colbert_scores,
    colbert_scores_pairwise,
    maxsim,
    maxsim_pairwise,
)

__all__ = [
    "mean_colbert_kd_scores",
    "mean_colbert_scores",
    "mean_colbert_scores_pairwise",
    "mean_maxsim",
    "mean_maxsim_pairwise",
]


def mean_maxsim(
    a: Embeddings,
    b: Embeddings,
    a_mask: Mask = None,
    b_mask: Mask = None,
    chunk_elements: int | None = None,
    length_normalize: bool = True,
    device: str | torch.device | None = None,
) -> Tensor:
    """`maxsim` that divides by the number of query tokens, unless told otherwise. Arguments and errors are its own."""
    return maxsim(a, b, a_mask, b_mask, chunk_elements, length_normalize, device)


def mean_maxsim_pairwise(
    a: Embeddings,
    b: Embeddings,
    a_mask: Mask = None,
    b_mask: Mask = None,
    chunk_elements: int | None = None,
    length_normalize: bool = True,
    device: str | torch.device | None = None,
) -> Tensor:
    """`maxsim_pairwise` that divides by the number of query tokens, unless told otherwise."""
    return maxsim_pairwise(a, b, a_mask, b_mask, chunk_elements, length_normalize, device)


def mean_colbert_scores(
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    queries_mask: Mask = None,
    documents_mask: Mask = None,
    chunk_elements: int | None = None,
    length_normalize: bool = True,
) -> Tensor:
    """`colbert_scores` that divides by the number of query tokens, unless told otherwise."""
    return colbert_scores(
        queries_embeddings, documents_embeddings, queries_mask, documents_mask, chunk_elements, length_normalize
    )


def mean_colbert_scores_pairwise(
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    queries_mask: Mask = None,
    documents_mask: Mask = None,
    chunk_elements: int | None = None,
    length_normalize: bool = True,
) -> Tensor:
    """`colbert_scores_pairwise` that divides by the number of query tokens, unless told otherwise."""
    return colbert_scores_pairwise(
        queries_embeddings, documents_embeddings, queries_mask, documents_mask, chunk_elements, length_normalize
    )


def mean_colbert_kd_scores(
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    queries_mask: Mask = None,
    documents_mask: Mask = None,
    chunk_elements: int | None = None,
    length_normalize: bool = True,
) -> Tensor:
    """`colbert_kd_scores` that divides by the number of query tokens, unless told otherwise."""
    return colbert_kd_scores(
        queries_embeddings, documents_embeddings, queries_mask, documents_mask, chunk_elements, length_normalize
    )
