"""What of sentence-transformers' losses is more than a call of a scoring function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops import maxsim_cross_entropy
from .. import SENTENCE_TRANSFORMERS
from . import scoring

_CACHED = "sentence_transformers.multi_vector_encoder.losses.cached_multiple_negatives_ranking"


def calculate_loss(
    self: Any, reps: list[list[Tensor]], masks_chunks: list[list[Tensor]], *, with_backward: bool = False
) -> Tensor:
    """`CachedMultiVectorMultipleNegativesRankingLoss.calculate_loss`, with all queries scored in one call.

    Its own scores `score_mini_batch_size` queries at a time, which bounds the memory of the similarities. There are
    none here, and each part would compute the gradient of all documents once more. With another `similarity_fct` than
    `colbert_scores`, the host's own method computes.

    Parameters
    ----------
    self
        The loss.
    reps
        Embeddings [B, L, d] of the mini-batches of each column, the queries first.
    masks_chunks
        Their masks [B, L].
    with_backward
        Whether to leave gradients in `reps`.

    Returns
    -------
    Tensor
        float32, a scalar; detached if the backward was done.
    """
    import sentence_transformers.multi_vector_encoder.losses.cached_multiple_negatives_ranking as host

    if self.similarity_fct not in (host.colbert_scores, scoring.colbert_scores):
        own = SENTENCE_TRANSFORMERS.original(f"{_CACHED}:CachedMultiVectorMultipleNegativesRankingLoss.calculate_loss")
        return own(self, reps, masks_chunks, with_backward=with_backward)
    (queries, queries_mask), *columns = [
        host.cat_padded_token_embeddings(*column) for column in zip(reps, masks_chunks, strict=True)
    ]
    if self.gather_across_devices:
        columns = [host.all_gather_padded(embeddings, mask, with_grad=True) for embeddings, mask in columns]
    documents, documents_mask = host.stack_padded_token_embeddings(*map(list, zip(*columns, strict=True)))
    n_queries, n_columns = queries.shape[0], len(columns)
    labels = torch.arange(n_queries, device=queries.device) * n_columns
    if self.gather_across_devices:
        labels = labels + host.get_rank() * n_queries * n_columns
    loss = maxsim_cross_entropy(
        queries,
        documents.flatten(0, 1),
        queries_mask=queries_mask,
        documents_mask=documents_mask.flatten(0, 1),
        labels=labels,
        temperature=1.0 / self.scale,
        empty_score=scoring.EMPTY_DOCUMENT_SCORE,
    )
    if with_backward:
        loss.backward()
        loss = loss.detach()
    return loss
