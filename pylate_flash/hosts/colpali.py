"""colpali-engine's MaxSim, fused, and the smooth maximum of its losses.

Its batches are padded with zeros and have no masks, so a padding token competes with similarity 0, as in
colpali-engine: in a smooth maximum, each is a term of the sum. Scores are float32, or float64 for float64 embeddings;
those returned to the host have the dtype of the embeddings, as its own have.
"""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from ..ops import maxsim, soft_maxsim
from ..ops.checks import check_embeddings, check_positive, check_same
from . import COLPALI

__all__ = ["maxsim_inbatch", "maxsim_kd"]


def maxsim_inbatch(query: Tensor, doc: Tensor) -> Tensor:
    """Score every query against every document.

    Parameters
    ----------
    query
        [Nq, Lq, d], padded with zeros.
    doc
        [Nd, Ld, d], padded with zeros.

    Returns
    -------
    Tensor
        [Nq, Nd], float32 or float64, differentiable.

    Raises
    ------
    TypeError, ValueError
        As in `pylate_flash.maxsim`.

    Examples
    --------
    >>> import torch
    >>> maxsim_inbatch(torch.ones(1, 2, 3), torch.tensor([[[1.0, 1.0, 1.0]], [[-1.0, -1.0, -1.0]]]))
    tensor([[ 6., -6.]])
    """
    _check(query, doc, {3: "[Nd, Ld, d]"})
    return maxsim(query, doc)


def maxsim_kd(query: Tensor, doc: Tensor) -> Tensor:
    """Score every query against its own candidates: as `maxsim_inbatch`, but for documents [Nq, K, Ld, d], [Nq, K].

    Examples
    --------
    >>> import torch
    >>> maxsim_kd(torch.ones(1, 2, 3), torch.ones(1, 2, 1, 3))
    tensor([[6., 6.]])
    """
    _check(query, doc, {4: "[Nq, K, Ld, d]"})
    if doc.shape[0] != query.shape[0]:
        raise ValueError(f"doc must have one row of candidates per query, {query.shape[0]}, got {doc.shape[0]} rows")
    return maxsim(query, doc)


def served_maxsim_inbatch(query: Tensor, doc: Tensor) -> Tensor:
    """Serve colpali-engine's `maxsim_inbatch` while it is routed."""
    return maxsim_inbatch(query, doc).to(query.dtype) if _is_ours() else _own("maxsim_inbatch", query, doc)


def served_maxsim_kd(query: Tensor, doc: Tensor) -> Tensor:
    """Serve colpali-engine's `maxsim_kd` while it is routed."""
    return maxsim_kd(query, doc).to(query.dtype) if _is_ours() else _own("maxsim_kd", query, doc)


def served_inbatch_scores(self: Any, query_embeddings: Tensor, doc_embeddings: Tensor) -> Tensor:
    """Serve `ColbertModule._inbatch_scores`, by which the losses score a batch, while it is routed."""
    if not (self.use_smooth_max and _is_ours()):
        # The original calls `maxsim_inbatch` for the hard maximum.
        original = COLPALI.original("colpali_engine.loss.late_interaction_losses:ColbertModule._inbatch_scores")
        return original(self, query_embeddings, doc_embeddings)
    check_positive("tau", self.tau, query_embeddings)
    scores = soft_maxsim(query_embeddings, doc_embeddings, 1.0 / self.tau).to(query_embeddings.dtype)
    if not self.normalize_scores:
        return scores
    # Count the query tokens that are not padding, as the host does.
    return self._apply_normalization(scores, query_embeddings[..., 0].count_nonzero(dim=1))


def _check(query: Tensor, doc: Tensor, layouts: dict[int, str]) -> None:
    """Raise, with the names of the host's arguments, unless both are embeddings that fit together."""
    check_embeddings("query", query, {3: "[Nq, Lq, d]"})
    check_embeddings("doc", doc, layouts)
    check_same(query, doc, names=("query", "doc"))


def _is_ours() -> bool:
    """Whether `COLPALI_SCORES_BACKEND` does not select another backend; the host validates its value."""
    return os.environ.get("COLPALI_SCORES_BACKEND", "auto").lower() in ("auto", "pylate_flash")


def _own(name: str, query: Tensor, doc: Tensor) -> Tensor:
    return COLPALI.original(f"colpali_engine.utils.maxsim:{name}")(query, doc)
