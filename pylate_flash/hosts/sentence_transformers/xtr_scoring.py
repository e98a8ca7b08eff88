"""XTR's scores with the semantics of sentence-transformers: `multi_vector_encoder.scoring.xtr`.

The differences from its own functions are those of `scoring`; in addition, ties between equally similar tokens go to
the first, where `torch.topk` takes any on a CPU.
"""

from __future__ import annotations

import numbers

import torch

from ...ops.checks import check_same
from ...ops.xtr import xtr_scores as scores_of
from .operands import as_tensor
from .scoring import (
    _EMBEDDINGS,
    EMPTY_DOCUMENT_SCORE,
    Embeddings,
    Mask,
    _check_candidates,
    _groups,
    _learns,
    _original,
    _queries,
    _warn_of_empty,
    _weights,
)

__all__ = ["xtr_kd_scores", "xtr_scores", "xtr_scores_pairwise"]


def xtr_scores(
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    queries_mask: Mask = None,
    documents_mask: Mask = None,
    top_k: int = 256,
    chunk_elements: int | None = None,
) -> torch.Tensor:
    """Score every query against every document of every group by the tokens that it retrieves from all of them.

    Parameters
    ----------
    queries_embeddings, documents_embeddings, queries_mask, documents_mask
        As in `scoring.colbert_scores`: [Nq, Lq, d], [G, N, Ld, d], [Nq, Lq] and [G, N, Ld]. The mask of one group is
        not broadcast to the others here.
    top_k
        Number of document tokens that each query token retrieves, at least 1; all, if there are fewer.
    chunk_elements
        Accepted for compatibility: similarities are not stored.

    Returns
    -------
    torch.Tensor
        [Nq, G * N], float32, differentiable; column g * N + n belongs to document n of group g.

    Raises
    ------
    TypeError, ValueError
        If shapes or types do not fit, or `top_k` is not a positive integer.

    Examples
    --------
    >>> import torch
    >>> documents = torch.tensor([[0.9, 0.8], [0.1, -0.7]]).view(2, 1, 2, 1)
    >>> xtr_scores(torch.ones(1, 1, 1), documents, top_k=2)
    tensor([[0.9000, 0.0000]])
    """
    if not isinstance(top_k, (numbers.Integral, torch.SymInt)):
        raise TypeError(f"top_k must be a positive integer, got {type(top_k).__name__}")
    if isinstance(top_k, bool) or top_k <= 0:
        raise ValueError(f"top_k must be a positive integer, got {top_k!r}")
    if _learns(queries_mask):
        return _original("xtr_scores")(
            queries_embeddings, documents_embeddings, queries_mask, documents_mask, top_k, chunk_elements
        )
    # As in the host, the mask of one group is not broadcast here.
    documents = _groups(documents_embeddings, documents_mask, one_for_all=False).flat()
    queries = _queries(queries_embeddings, queries_mask, documents.values.device)
    _warn_of_empty(documents)
    assert documents.mask is not None
    check_same(queries.values, documents.values, same_dtype=False, names=_EMBEDDINGS)
    dtype = torch.promote_types(queries.values.dtype, documents.values.dtype)
    scores = scores_of(
        queries.values.to(dtype),
        documents.values.to(dtype),
        k=top_k,
        queries_mask=_weights("queries_embeddings", queries.mask),
        documents_mask=documents.mask != 0,
        normalizer="retrieved",
        empty_score=EMPTY_DOCUMENT_SCORE,
    )
    # The host's scores are float32 for float64 embeddings too.
    return scores.float()


def xtr_kd_scores(
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    queries_mask: Mask = None,
    documents_mask: Mask = None,
    top_k: int = 256,
    chunk_elements: int | None = None,
) -> torch.Tensor:
    """Score every query against its own candidates, by the tokens that it retrieves from those of all queries.

    As `xtr_scores`, but for documents [Nq, N, Ld, d] and their mask [Nq, N, Ld], N candidates of each query; the scores
    are [Nq, N].

    Examples
    --------
    >>> import torch
    >>> documents = torch.tensor([[0.9, 0.8], [0.5, 0.7]]).view(2, 2, 1, 1)
    >>> xtr_kd_scores(torch.ones(2, 1, 1), documents, top_k=3)
    tensor([[0.9000, 0.8000],
            [0.0000, 0.7000]])
    """
    documents = as_tensor("documents_embeddings", documents_embeddings)
    scores = xtr_scores(queries_embeddings, documents, queries_mask, documents_mask, top_k, chunk_elements)
    _check_candidates(len(scores), documents)
    return scores.view(len(scores), *documents.shape[:2]).diagonal().T


def xtr_scores_pairwise(
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    queries_mask: Mask = None,
    documents_mask: Mask = None,
    top_k: int = 256,
    chunk_elements: int | None = None,
) -> torch.Tensor:
    """`xtr_kd_scores` for one candidate per query, [N, 1, Ld, d] or [N, Ld, d]: scores [N]."""
    documents = as_tensor("documents_embeddings", documents_embeddings)
    mask = None if documents_mask is None else as_tensor("documents_mask", documents_mask)
    if documents.dim() == 3:
        documents = documents.unsqueeze(1)
    if mask is not None and mask.dim() == 2:
        mask = mask.unsqueeze(1)
    return xtr_kd_scores(queries_embeddings, documents, queries_mask, mask, top_k, chunk_elements).squeeze(-1)
