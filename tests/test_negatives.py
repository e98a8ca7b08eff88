"""Hard negatives of hosts.sentence_transformers, against all scores sorted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sentence_transformers import MultiVectorEncoder

from pylate_flash.hosts.sentence_transformers.negatives import mine_hard_negatives


def by_hand(
    model: MultiVectorEncoder, anchor: str, positive: str, answers: set[str], corpus: list[str]
) -> tuple[list[tuple[float, str]], float]:
    """What is no answer, best first, and the score of the positive."""
    query = model.encode_query([anchor])
    scores = model.similarity(query, model.encode_document(corpus))[0].tolist()
    [[score]] = model.similarity(query, model.encode_document([positive])).tolist()
    ranked = sorted(zip(scores, corpus, strict=True), key=lambda pair: -pair[0])
    return [pair for pair in ranked if pair[1] not in answers], score


@pytest.mark.parametrize("own_corpus", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"range_min": 3, "num_negatives": 2},
        {"absolute_margin": 0.2},
        {"relative_margin": 0.1},
        {"max_score": 4.0, "num_negatives": 1},
    ],
)
def test_they_are_the_best_that_the_bounds_allow(
    own_corpus: bool, options: dict, tiny_encoder: MultiVectorEncoder, texts: Any
) -> None:
    anchors = texts(1, 10)
    # One anchor has two answers, and neither is a negative of the other.
    anchors[4] = anchors[2]
    positives = list(dict.fromkeys(texts(2, 20, 12)))[:10]
    corpus = list(dict.fromkeys([*texts(3, 25, 12), *positives[:5]])) if own_corpus else None
    found = mine_hard_negatives(tiny_encoder, anchors, positives, corpus, **options)
    count, skipped = options.get("num_negatives", 3), options.get("range_min", 0)
    expected = []
    for anchor, positive in zip(anchors, positives, strict=True):
        answers = {other for query, other in zip(anchors, positives, strict=True) if query == anchor}
        ranked, score = by_hand(tiny_encoder, anchor, positive, answers, corpus or positives)
        bound = min(
            options.get("max_score", torch.inf),
            score - options.get("absolute_margin", -torch.inf),
            score * (1 - options["relative_margin"]) if "relative_margin" in options else torch.inf,
        )
        allowed = [(value, text) for value, text in ranked[skipped:] if value <= bound][:count]
        if len(allowed) == count:
            expected.append((anchor, positive, allowed))
    assert [(row["anchor"], row["positive"]) for row in found] == [pair[:2] for pair in expected]
    for row, (anchor, _, allowed) in zip(found, expected, strict=True):
        names = [f"negative_{n}" for n in range(1, count + 1)]
        assert list(row) == ["anchor", "positive", *names]
        negatives = [row[name] for name in names]
        scores = tiny_encoder.similarity(tiny_encoder.encode_query([anchor]), tiny_encoder.encode_document(negatives))
        assert scores[0].tolist() == pytest.approx([value for value, _ in allowed], abs=1e-4)
        assert not {row["positive"]} & set(negatives)


def test_too_few_negatives_leave_a_pair_out(tiny_encoder: MultiVectorEncoder) -> None:
    pairs = ["red cat", "blue dog"], ["a cat", "a dog"]
    assert mine_hard_negatives(tiny_encoder, *pairs, num_negatives=2) == []
    assert len(mine_hard_negatives(tiny_encoder, *pairs, num_negatives=1)) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positives": ["b"]}, "positives must have one text per anchor, 2, got 1"),
        ({"num_negatives": 0}, "num_negatives must be an integer of at least 1, got 0"),
        ({"range_min": -1}, "range_min must be an integer of at least 0, got -1"),
        ({"relative_margin": 1.5}, "relative_margin must be at least 0 and less than 1, got 1.5"),
    ],
)
def test_bad_arguments(options: dict, message: str, tiny_encoder: MultiVectorEncoder) -> None:
    with pytest.raises(ValueError, match=message):
        mine_hard_negatives(tiny_encoder, **{"anchors": ["a", "b"], "positives": ["c", "d"]} | options)
