"""Whether two scorers rank alike: the comparison behind `pylate-flash demo` and `evaluate --compare-torch`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..beir import RetrievalEvaluation


@dataclass(frozen=True)
class Agreement:
    """The agreement of two evaluations of the same collection."""

    queries: int
    """Queries compared."""
    depth: int
    """Length of the lists compared."""
    identical: int
    """Queries whose lists hold the same documents in the same order."""
    identical_up_to_ties: int
    """The same, but documents whose scores differ by at most the tolerance may swap ranks."""
    metrics_equal: bool
    """Whether all metrics are equal to 4 decimals."""

    @property
    def holds(self) -> bool:
        """Whether metrics are equal and every list is identical up to ties."""
        return self.metrics_equal and self.identical_up_to_ties == self.queries

    def __str__(self) -> str:
        metrics = "metrics equal to 4 decimals" if self.metrics_equal else "metrics NOT equal to 4 decimals"
        lists = f"identical top-{self.depth} lists for {self.identical} of {self.queries} queries"
        if self.identical_up_to_ties > self.identical:
            lists += f" ({self.identical_up_to_ties} up to equal scores)"
        return f"{metrics}, {lists}"


def compare(
    first: RetrievalEvaluation, second: RetrievalEvaluation, depth: int = 10, tolerance: float = 1e-4
) -> Agreement:
    """Compare the metrics and the best documents, `depth` of each query, of two evaluations by `evaluate_retrieval`.

    Scores within the `tolerance` count as equal: a sum of some tens of cosines has a float32 rounding error of about
    1e-5, so two exact scorers may order such documents differently. Evaluations with different queries or metrics raise
    a ValueError.
    """
    if first.run.keys() != second.run.keys() or first.metrics.keys() != second.metrics.keys():
        raise ValueError("first and second must be evaluations of the same queries with the same metrics")
    identical = ties = 0
    for query_id, results in first.run.items():
        ours = [(str(result["id"]), result["score"]) for result in results]
        theirs = [(str(result["id"]), result["score"]) for result in second.run[query_id]]
        same = [id_ for id_, _ in ours[:depth]] == [id_ for id_, _ in theirs[:depth]]
        identical += same
        ties += same or (_equal(ours, theirs, depth, tolerance) and _equal(theirs, ours, depth, tolerance))
    return Agreement(
        queries=len(first.run),
        depth=depth,
        identical=identical,
        identical_up_to_ties=ties,
        metrics_equal=all(f"{first.metrics[name]:.4f}" == f"{second.metrics[name]:.4f}" for name in first.metrics),
    )


def _equal(ours: list[tuple[str, float]], theirs: list[tuple[str, float]], depth: int, tolerance: float) -> bool:
    """Whether each of our best documents has, in their list, about the score of their document at the same rank."""
    scores = dict(theirs)
    if len(ours[:depth]) != len(theirs[:depth]):
        return False
    return all(
        abs(scores.get(id_, float("inf")) - score) <= tolerance
        for (id_, _), (_, score) in zip(ours[:depth], theirs[:depth], strict=True)
    )
