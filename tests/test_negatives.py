"""Hard negatives mined with a model of the installed library, compared with a full sort of all scores."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pylate_flash.cli.models import load_model
from pylate_flash.encoding.texts import encode, is_multi_vector_encoder
from pylate_flash.negatives import _bound, mine_hard_negatives
from tests.pylate_checkpoint import WORDS


@pytest.fixture(scope="module")
def model(pylate_checkpoint: Path) -> Any:
    return load_model(str(pylate_checkpoint), device="cpu")


def texts(seed: int, count: int, longest: int = 9) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [" ".join(WORDS[int(i)] for i in torch.randint(len(WORDS), (n,), generator=generator)) for n in lengths]


def all_scores(model: Any, queries: list[str], documents: list[str]) -> dict[str, dict[str, float]]:
    """Definition of MaxSim in float64: scores of all documents, per query."""
    results = {}
    documents_embeddings = [torch.as_tensor(one).double() for one in encode(model, documents, is_query=False)]
    for query, tokens in zip(queries, encode(model, queries, is_query=True), strict=True):
        similarities = (torch.as_tensor(tokens).double() @ one.T for one in documents_embeddings)
        scores = (similarity.max(dim=1).values.sum().item() for similarity in similarities)
        results[query] = dict(zip(documents, scores, strict=True))
    return results


@pytest.mark.parametrize("own_corpus", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"range_min": 3, "num_negatives": 2},
        {"absolute_margin": 0.2},
        {"relative_margin": 0.1},
        {"max_score": 6.5, "num_negatives": 1},
    ],
)
def test_they_are_the_best_that_the_bounds_allow(
    own_corpus: bool, options: dict, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several blocks, the last one partial.
    monkeypatch.setattr("pylate_flash.negatives._QUERIES", 4)
    anchors = texts(1, 10)
    # One anchor has two positives, and neither is a negative for the other.
    anchors[4] = anchors[2]
    positives = list(dict.fromkeys(texts(2, 20, 12)))[:10]
    corpus = list(dict.fromkeys([*texts(3, 25, 12), *positives[:5]])) if own_corpus else None
    actual = mine_hard_negatives(model, anchors, positives, corpus, **options)
    count, skipped = options.get("num_negatives", 3), options.get("range_min", 0)
    scores = all_scores(model, anchors, [*positives, *(corpus or [])])
    expected = []
    for anchor, positive in zip(anchors, positives, strict=True):
        answers = {other for query, other in zip(anchors, positives, strict=True) if query == anchor}
        ranked = sorted((-scores[anchor][text], text) for text in corpus or positives if text not in answers)
        positive_score = scores[anchor][positive]
        bound = min(
            options.get("max_score", torch.inf),
            positive_score - options.get("absolute_margin", -torch.inf),
            positive_score * (1 - options["relative_margin"]) if "relative_margin" in options else torch.inf,
        )
        allowed = [(-value, text) for value, text in ranked[skipped:] if -value <= bound][:count]
        if len(allowed) == count:
            expected.append((anchor, positive, allowed))
    assert expected
    assert [(row["anchor"], row["positive"]) for row in actual] == [pair[:2] for pair in expected]
    for row, (anchor, positive, allowed) in zip(actual, expected, strict=True):
        names = [f"negative_{n}" for n in range(1, count + 1)]
        assert list(row) == ["anchor", "positive", *names]
        # Texts with equal scores may come in any order.
        values = [scores[anchor][row[name]] for name in names]
        assert values == pytest.approx([value for value, _ in allowed], abs=1e-4)
        assert positive not in [row[name] for name in names]


def test_the_mean_over_query_tokens_where_that_is_the_similarity(model: Any) -> None:
    if not is_multi_vector_encoder(model):
        pytest.skip("PyLate's models have one similarity")
    anchors, positives, corpus = texts(1, 6), texts(2, 6, 12), texts(3, 20, 12)
    sums = mine_hard_negatives(model, anchors, positives, corpus, max_score=6.4, num_negatives=1)
    model.similarity_fn_name = "meanmaxsim"
    try:
        # Every query has eight tokens.
        assert mine_hard_negatives(model, anchors, positives, corpus, max_score=0.8, num_negatives=1) == sums
    finally:
        model.similarity_fn_name = "maxsim"


def test_a_positive_with_other_whitespace_is_no_negative(model: Any) -> None:
    """In either direction."""
    for positive, in_the_corpus in (("red cats ", "red cats"), ("red cats", "\tred cats\n")):
        corpus = [in_the_corpus, "blue dogs", "a", "  blue dogs"]
        (row,) = mine_hard_negatives(model, ["red cats"], [positive], corpus, num_negatives=2)
        assert (row["anchor"], row["positive"]) == ("red cats", positive)
        assert {row["negative_1"], row["negative_2"]} == {"blue dogs", "a"}
        assert mine_hard_negatives(model, ["red cats"], [positive], corpus, num_negatives=3) == []


def test_an_anchor_with_other_whitespace_has_the_same_positives(model: Any) -> None:
    anchors, positives = ["red cats", " red cats\n", "a"], ["blue dogs", "old planes", "new bread"]
    rows = mine_hard_negatives(model, anchors, positives, num_negatives=1)
    assert [(row["anchor"], row["positive"]) for row in rows] == list(zip(anchors, positives, strict=True))
    assert [row["negative_1"] for row in rows[:2]] == ["new bread"] * 2


def test_another_form_of_a_positive_is_no_negative(model: Any) -> None:
    anchors, positives = ["red cats", "blue dogs"], ["red cats", "a"]
    corpus = ["old red cats", "red cats new", "blue dogs", "a"]
    options = {"other_forms": {" red cats": ["old red cats ", "red cats new", "elsewhere"], "nobody's": ["a"]}}
    rows = mine_hard_negatives(model, anchors, positives, corpus, num_negatives=2, **options)
    assert {rows[0]["negative_1"], rows[0]["negative_2"]} == {"blue dogs", "a"}
    # They are negatives for the other anchor, which has another positive.
    (row,) = mine_hard_negatives(model, anchors, positives, corpus, num_negatives=3, **options)
    assert row["anchor"] == "blue dogs"
    assert {row[f"negative_{n}"] for n in (1, 2, 3)} == set(corpus[:3])


def test_too_few_negatives_leave_a_pair_out(model: Any) -> None:
    pairs = ["red cats", "blue dogs"], ["a cats", "a dogs"]
    assert mine_hard_negatives(model, *pairs, num_negatives=2) == []
    assert len(mine_hard_negatives(model, *pairs, num_negatives=1)) == 2
    assert mine_hard_negatives(model, [], []) == []


def test_a_relative_margin_holds_for_a_score_below_zero() -> None:
    assert _bound(torch.tensor(-4.0), None, None, 0.25) == -5.0
    assert _bound(torch.tensor(4.0), None, None, 0.25) == 3.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positives": ["b"]}, "positives must have one text per anchor, 2, got 1"),
        ({"num_negatives": 0}, "num_negatives must be an integer of at least 1, got 0"),
        ({"range_min": -1}, "range_min must be an integer of at least 0, got -1"),
        ({"relative_margin": 1.5}, "relative_margin must be at least 0 and less than 1, got 1.5"),
        ({"relative_margin": math.nan}, "relative_margin must be None or a number other than NaN, got nan"),
        ({"absolute_margin": math.nan}, "absolute_margin must be None or a number other than NaN, got nan"),
        ({"max_score": math.nan}, "max_score must be None or a number other than NaN, got nan"),
        ({"max_score": "3"}, "max_score must be None or a number other than NaN, got '3'"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": -1}, "batch_size must be at least 1, got -1"),
    ],
)
def test_bad_arguments(options: dict, message: str) -> None:
    # Raised before anything is encoded, so no model is needed.
    with pytest.raises(ValueError, match=re.escape(message)):
        mine_hard_negatives(None, **{"anchors": ["a", "b"], "positives": ["c", "d"]} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"anchors": "ab"}, "anchors must be a list of strings, got 'ab' of type str"),
        ({"positives": "cd"}, "positives must be a list of strings, got 'cd' of type str"),
        ({"corpus": "cats"}, "corpus must be a list of strings, got 'cats' of type str"),
        ({"other_forms": {"c": "cats"}}, "other_forms['c'] must be a list of strings, got 'cats' of type str"),
        ({"other_forms": ["c"]}, "other_forms must be a mapping of texts to lists of texts, got list"),
        ({"other_forms": {1: ["c"]}}, "list(other_forms)[0] must be a string, got 1 of type int"),
        ({"anchors": ["a", 2]}, "anchors[1] must be a string, got 2 of type int"),
        ({"batch_size": 1.5}, "batch_size must be an integer, got float"),
    ],
)
def test_arguments_of_a_wrong_type(options: dict, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        mine_hard_negatives(None, **{"anchors": ["a", "b"], "positives": ["c", "d"]} | options)
