from __future__ import annotations

import pytest

from pylate_flash.demo.agreement import compare
from pylate_flash.evaluation import RetrievalEvaluation


def evaluation_of(run: dict[str, list[tuple[str, float]]], ndcg: float = 0.5) -> RetrievalEvaluation:
    lists = {query: [{"id": id_, "score": score} for id_, score in result] for query, result in run.items()}
    return RetrievalEvaluation({"ndcg@10": ndcg}, {}, lists, {}, "torch")


FIRST = {"q1": [("a", 3.0), ("b", 2.0), ("c", 1.0)], "q2": [("c", 9.0), ("a", 8.0)]}


def test_equal_evaluations_agree() -> None:
    agreement = compare(evaluation_of(FIRST), evaluation_of(FIRST))
    assert (agreement.identical, agreement.identical_up_to_ties, agreement.queries) == (2, 2, 2)
    assert agreement.holds
    assert str(agreement) == "metrics equal to 4 decimals, identical top-10 lists for 2 of 2 queries"


def test_documents_of_equal_scores_may_change_places() -> None:
    first = {"q": [("a", 3.0), ("b", 2.00001), ("c", 2.0), ("d", 1.0)]}
    second = {"q": [("a", 3.0), ("c", 2.00001), ("b", 2.0), ("d", 1.0)]}
    agreement = compare(evaluation_of(first), evaluation_of(second))
    assert (agreement.identical, agreement.identical_up_to_ties) == (0, 1)
    assert agreement.holds
    assert "(1 up to equal scores)" in str(agreement)


def test_a_tie_at_the_end_of_the_list_counts_as_one() -> None:
    first = {"q": [("a", 3.0), ("b", 2.0), ("c", 2.0)]}
    second = {"q": [("a", 3.0), ("c", 2.0), ("b", 2.0)]}
    assert compare(evaluation_of(first), evaluation_of(second), depth=2).holds


@pytest.mark.parametrize(
    "result",
    [
        [("b", 3.0), ("a", 2.0), ("c", 1.0)],  # another order, not tied
        [("a", 3.0), ("b", 2.0), ("d", 1.0)],  # another document
        [("a", 3.0), ("b", 2.0)],  # one fewer
    ],
)
def test_other_lists_disagree(result: list[tuple[str, float]]) -> None:
    agreement = compare(evaluation_of(FIRST), evaluation_of({**FIRST, "q1": result}))
    assert (agreement.identical, agreement.identical_up_to_ties) == (1, 1)
    assert not agreement.holds


def test_metrics_are_compared_to_four_decimals() -> None:
    assert compare(evaluation_of(FIRST, 0.12341), evaluation_of(FIRST, 0.12343)).holds
    assert not compare(evaluation_of(FIRST, 0.1234), evaluation_of(FIRST, 0.1236)).holds


def test_evaluations_of_other_queries_are_refused() -> None:
    with pytest.raises(ValueError, match="same queries"):
        compare(evaluation_of(FIRST), evaluation_of({"q1": FIRST["q1"]}))
