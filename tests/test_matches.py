"""Matching tokens as words, for a checkpoint that both libraries load, with whichever is installed."""

from __future__ import annotations

import numpy as np
import pytest

from pylate_flash.encoding.texts import encode
from pylate_flash.hosts import HOSTS
from pylate_flash.indexes import Flat
from pylate_flash.matches import Explanation, Token, explain, tokens_of

TEXTS = {
    "animals": "cats and dogs .",
    "vehicles": "old red planes and new blue trains",
    "food": "  bread and butter . and bread",
    "long": " ".join(["a new train and red cats ."] * 5),
    "nothing": "",
}
QUERIES = ["red trains", "cats and a dog"]


@pytest.fixture(scope="module")
def model(pylate_checkpoint):
    """The model: 8 tokens per query, at most 12 per document, full stops of documents skipped."""
    if HOSTS["sentence-transformers"].is_there():
        from sentence_transformers import MultiVectorEncoder

        return MultiVectorEncoder(str(pylate_checkpoint), device="cpu")
    from pylate.models import ColBERT

    return ColBERT(str(pylate_checkpoint), device="cpu")


def search(model, matches=True):
    index = Flat(None, device="cpu", show_progress=False)
    index.add_documents(list(TEXTS), encode(model, list(TEXTS.values()), is_query=False))
    return index.search(encode(model, QUERIES, is_query=True), k=len(TEXTS), matches=matches)


def test_choices_are_the_nearest_tokens_and_their_similarities_add_up_to_the_score(model):
    explained = explain(model, QUERIES, search(model), TEXTS)
    documents = dict(zip(TEXTS, encode(model, list(TEXTS.values()), is_query=False), strict=True))
    for query, result in zip(encode(model, QUERIES, is_query=True), explained, strict=True):
        assert {hit.id for hit in result} == TEXTS.keys()
        for hit in result:
            similarities = query @ documents[hit.id].T
            assert [chosen for chosen, _ in hit.choices] == similarities.argmax(1).tolist()
            assert sum(similarity for _, similarity in hit.choices) == pytest.approx(hit.score, abs=1e-5)
            strongest = hit.strongest()
            assert [match[2] for match in strongest] == sorted((s for _, s in hit.choices), reverse=True)
            assert {match[0] for match in strongest} == set(hit.query)
            assert all(match[1] in hit.document for match in strongest)


def test_tokens_are_those_that_have_embeddings_with_their_places_in_the_text(model):
    for is_query, texts in ((False, list(TEXTS.values())), (True, QUERIES)):
        result = tokens_of(model, texts, is_query=is_query)
        assert [len(tokens) for tokens in result] == [len(rows) for rows in encode(model, texts, is_query=is_query)]
        for text, tokens in zip(texts, result, strict=True):
            assert all(text[token.start : token.end] == token.word for token in tokens if token.in_text)
            assert "." not in [token.word for token in tokens]
            starts = [token.start for token in tokens if token.in_text]
            assert starts == sorted(set(starts))
    words = [token.word for token in tokens_of(model, ["red trains"], is_query=True)[0]]
    assert words == ["[CLS]", "[Q] ", "red", "trains", "[SEP]", *["[MASK]"] * 3]
    # An unknown word keeps its text and its position.
    assert tokens_of(model, ["red zebras"], is_query=False)[0][3] == Token("zebras", 4, 10)
    assert tokens_of(model, [], is_query=False) == []


def test_a_prompt_is_no_part_of_the_text(model, monkeypatch):
    marker = model.prompts.get("document", "") if HOSTS["sentence-transformers"].is_there() else ""
    monkeypatch.setattr(model, "prompts", {"document": f"{marker}old cats "})
    monkeypatch.setattr(model, "default_prompt_name", "document")
    tokens = tokens_of(model, ["cats and cats"], is_query=False)[0]
    assert [(token.word, token.start) for token in tokens if token.in_text] == [("cats", 0), ("and", 5), ("cats", 9)]
    assert {"old"} <= {token.word for token in tokens if not token.in_text}


def test_a_text_that_is_not_known_has_numbers_for_words(model):
    hits = search(model)
    (result, _) = explain(model, QUERIES, hits, {"animals": TEXTS["animals"]})
    for hit in result:
        assert (hit.document is None) == (hit.id != "animals")
        if hit.document is None:
            _, chosen, similarity = hit.strongest()[0]
            assert (chosen.word, similarity) in [(f"#{number}", value) for number, value in hit.choices]


def test_what_cannot_be_explained_is_said(model):
    hits = search(model)
    with pytest.raises(ValueError, match="results must be those of 1 queries, got those of 2"):
        explain(model, QUERIES[:1], hits, TEXTS)
    with pytest.raises(ValueError, match="results must be those of a search with matches=True, got some without"):
        explain(model, QUERIES, search(model, matches=False), TEXTS)
    with pytest.raises(ValueError, match="texts: 'long' is not the text that was encoded: it has 3 tokens"):
        explain(model, QUERIES, hits, {**TEXTS, "long": ""})
    short = [[{**hit, "matches": hit["matches"][:3]} for hit in result] for result in hits]
    with pytest.raises(ValueError, match="model: it encodes a query as 8 tokens, expected 3, one per match"):
        explain(model, QUERIES, short, TEXTS)
    with pytest.raises(TypeError, match=f"queries must be a list of texts, got the text '{QUERIES[0]}'"):
        explain(model, QUERIES[0], hits[:1], TEXTS)
    with pytest.raises(TypeError, match="texts must be a mapping of the documents' texts by id, got list"):
        explain(model, QUERIES, hits, list(TEXTS))
    with pytest.raises(TypeError, match="texts must be a list of texts, got the text 'x'"):
        tokens_of(model, "x", is_query=True)


def test_a_document_without_tokens_has_no_choices():
    empty = Explanation("d", -1.0, [Token("a", 0, 1)], [], [])
    assert empty.strongest() == []
    assert repr(empty) == "<'d', -1.00: >"
    with pytest.raises(ValueError, match="the document 'd' has no tokens, so there is nothing to draw"):
        empty.heat_map()
    assert empty._repr_png_() is None


def test_the_heat_map_shows_chosen_tokens_and_what_each_of_the_query_carries(model):
    pytest.importorskip("matplotlib")
    (result, _) = explain(model, QUERIES, search(model), TEXTS)
    hit = next(hit for hit in result if hit.id == "vehicles")
    figure = hit.heat_map()
    heat, bars = figure.axes
    columns = sorted({chosen for chosen, _ in hit.choices})
    assert [label.get_text() for label in heat.get_xticklabels()] == [hit.document[i].word for i in columns]
    assert [label.get_text() for label in heat.get_yticklabels()] == [token.word for token in hit.query]
    grid = np.asarray(heat.images[0].get_array().filled(np.nan))
    assert np.nansum(grid) == pytest.approx(hit.score, abs=1e-5)
    assert [bar.get_width() for bar in bars.patches] == [similarity for _, similarity in hit.choices]
    assert hit._repr_png_().startswith(b"\x89PNG"), "what a notebook shows"
