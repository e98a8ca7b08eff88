"""Reranking as PyLate users call it: `rank.rerank`, from arrays or tensors to sorted lists."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import partial, partialmethod
from typing import Any

import torch

from pylate_flash.bench import exact
from pylate_flash.bench.calls import Call
from pylate_flash.bench.exact import Result
from pylate_flash.bench.rows import Row
from pylate_flash.bench.suite import Candidate, Unavailable


def need_pylate() -> None:
    """Raise `Unavailable` if PyLate cannot be imported."""
    try:
        import pylate.rank  # noqa: F401
    except ImportError as error:
        raise Unavailable(f"needs PyLate, which cannot be imported ({error})") from None


def ids_of(row: Row) -> list[list[int]]:
    """Consecutive ids from 0 for the candidates of all queries of a row."""
    return torch.arange(row.documents).view(row.Nq, row.Nd).tolist()


@dataclass(frozen=True)
class Rerank(Call):
    """Each query's tokens and documents, as arrays or tensors; other packages run as backends of PyLate's own call."""

    ids: list[list[int]]
    queries: list[Any]
    documents: list[list[Any]]
    where: torch.device

    @property
    def device(self) -> torch.device:
        return self.where

    def reference(self) -> Result:
        """The scores in the order of the ids, on the host, like `scores_by_id`."""
        scores = []
        for query, documents in zip(self.queries, self.documents, strict=True):
            tokens = torch.as_tensor(query).unsqueeze(0)
            scores += [exact.scores(tokens, torch.as_tensor(document).unsqueeze(0)) for document in documents]
        return torch.cat([score.flatten() for score in scores]).cpu()

    def candidate(self, label: str, rerank: Any) -> Candidate:
        """The candidate that times ``rerank``; its rankings are read by id."""
        call = partial(rerank, self.ids, self.queries, self.documents, device=self.where)
        return Candidate(label, call, partial(scores_by_id, documents=sum(map(len, self.ids))))

    def through_pylate(self, backend: str) -> list[Candidate]:
        """PyLate's own `rank.rerank` with one of its backends, selected by the environment variable."""
        need_pylate()
        from pylate.rank import rerank

        def with_backend(*arguments: Any, **options: Any) -> Any:
            before = os.environ.get("PYLATE_SCORES_BACKEND")
            os.environ["PYLATE_SCORES_BACKEND"] = backend
            try:
                return rerank(*arguments, **options)
            finally:
                if before is None:
                    del os.environ["PYLATE_SCORES_BACKEND"]
                else:
                    os.environ["PYLATE_SCORES_BACKEND"] = before

        return [self.candidate(f"pylate.rank.rerank, {backend}", with_backend)]

    def ours(self) -> list[Candidate]:
        need_pylate()
        from pylate_flash import rank

        return [self.candidate("rank.rerank", partial(rank.rerank, backend="pylate_flash"))]

    lik = partialmethod(through_pylate, "lik")
    flash_maxsim = partialmethod(through_pylate, "flash")
    torch = partialmethod(through_pylate, "torch")


def scores_by_id(rankings: list[list[Any]], documents: int) -> torch.Tensor:
    """Return scores in the order of the ids; NaN if a document is missing or its ranking is not sorted."""
    scores = [math.nan] * documents
    for ranking in rankings:
        in_order = all(better["score"] >= worse["score"] for better, worse in zip(ranking, ranking[1:], strict=False))
        for result in ranking:
            scores[result["id"]] = result["score"] if in_order else math.nan
    return torch.tensor(scores, dtype=torch.float64)
