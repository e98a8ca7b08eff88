"""sentence-transformers' scoring functions, fused, with exactly its arguments, shapes and semantics.

    from pylate_flash.hosts.sentence_transformers import colbert_scores

    loss = MultiVectorMultipleNegativesRankingLoss(model, similarity_fct=colbert_scores)

`pylate_flash.register("sentence-transformers")` replaces its own functions by these. The modules `losses` and `models`
provide its losses and its model; hard negatives are in `pylate_flash.negatives`.
"""

from __future__ import annotations

from .scoring import (
    colbert_kd_scores,
    colbert_scores,
    colbert_scores_pairwise,
    maxsim,
    maxsim_pairwise,
    mean_colbert_kd_scores,
    mean_colbert_scores,
    mean_colbert_scores_pairwise,
    mean_maxsim,
    mean_maxsim_pairwise,
)
from .xtr_scoring import xtr_kd_scores, xtr_scores, xtr_scores_pairwise

__all__ = [
    "colbert_kd_scores",
    "colbert_scores",
    "colbert_scores_pairwise",
    "maxsim",
    "maxsim_pairwise",
    "mean_colbert_kd_scores",
    "mean_colbert_scores",
    "mean_colbert_scores_pairwise",
    "mean_maxsim",
    "mean_maxsim_pairwise",
    "xtr_kd_scores",
    "xtr_scores",
    "xtr_scores_pairwise",
]
