"""What runs in PyLate's scoring functions while they are routed: this package's, for those who asked for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import _config, scores
from . import original, original_xtr


def colbert_scores(
    queries_embeddings: Any, documents_embeddings: Any, queries_mask: Any, documents_mask: Any, backend: str | None
) -> Any:
    """A call of PyLate's `colbert_scores` while it is routed."""
    serve = _serving("colbert_scores")
    return serve(queries_embeddings, documents_embeddings, queries_mask, documents_mask, backend=backend)


def colbert_scores_pairwise(queries_embeddings: Any, documents_embeddings: Any, backend: str | None) -> Any:
    """A call of PyLate's `colbert_scores_pairwise` while it is routed."""
    return _serving("colbert_scores_pairwise")(queries_embeddings, documents_embeddings, backend=backend)


def colbert_kd_scores(
    queries_embeddings: Any, documents_embeddings: Any, queries_mask: Any, documents_mask: Any, backend: str | None
) -> Any:
    """A call of PyLate's `colbert_kd_scores` while it is routed."""
    serve = _serving("colbert_kd_scores")
    return serve(queries_embeddings, documents_embeddings, queries_mask, documents_mask, backend=backend)


def xtr_score(
    self: Any, queries_embeddings: Any, documents_embeddings: Any, queries_mask: Any, documents_mask: Any
) -> Any:
    """A call of PyLate's `XTRScores._score` while it is routed, by the backend in force."""
    serve = scores.score_by_xtr if _serves_this_caller() else original_xtr()
    return serve(self, queries_embeddings, documents_embeddings, queries_mask, documents_mask)


def _serving(name: str) -> Callable:
    return getattr(scores, name) if _serves_this_caller() else original(name)


def _serves_this_caller() -> bool:
    """Whether it is routed for this caller: one who did not ask gets PyLate as it is, in a use_scorer() elsewhere."""
    return _config.registered_masking is not None or _config.default.get() is not None
