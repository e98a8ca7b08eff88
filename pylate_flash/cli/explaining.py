"""How `search --explain` shows which tokens match: by colour and weight in a terminal, a line for each in a pipe."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.text import Text

from .indexing import escaped

if TYPE_CHECKING:
    from ..matches import Explanation

# One for each token of a query, in turn; those that are in no text, as [MASK], have none.
_COLOURS = (
    *("cyan", "magenta", "green", "yellow", "blue", "red"),
    *("dark_orange", "medium_purple1", "dark_cyan", "deep_pink2", "steel_blue", "gold3"),
)
# Of the greatest similarity: above the first a token is bold, below the second dim.
_BOLD, _DIM = 0.9, 0.6


def marked_query(query: str, explanation: Explanation) -> Text:
    """A query, each of its tokens in the colour that marks what it has chosen."""
    spans = [(token.start, token.end, _colour(explanation, i)) for i, token in enumerate(explanation.query)]
    return _marked(query, spans)


def marked_document(text: str, explanation: Explanation) -> Text:
    """A document's text up to its last token that was chosen, in the colours of the query's tokens that chose them."""
    marks: dict[int, tuple[bool, float, str]] = {}
    for i, (chosen, similarity) in enumerate(explanation.choices):
        style = f"{_colour(explanation, i)} {_weight(explanation, similarity)}".strip()
        # A word of the query marks what it has chosen rather than [MASK] and its like.
        marks[chosen] = max(marks.get(chosen, (False, -1.0, "")), (explanation.query[i].in_text, similarity, style))
    tokens = explanation.document or []
    return _marked(text, [(tokens[i].start, tokens[i].end, style) for i, (_, _, style) in marks.items()], cut=True)


def strongest_tokens(explanation: Explanation) -> Columns:
    """What each token of the query carries, and what it has chosen where that is another word; most first."""
    items: list[Text] = []
    others: dict[str, list[float]] = {}
    colours = {id(token): _colour(explanation, i) for i, token in enumerate(explanation.query)}
    for token, chosen, similarity in explanation.strongest():
        if not token.in_text:
            others.setdefault(token.word.strip(), []).append(similarity)
            continue
        same = chosen.word.lower() == token.word.lower()
        word = escaped(token.word if same else f"{token.word} → {chosen.word.strip()}")
        style = f"{colours[id(token)]} {_weight(explanation, similarity)}"
        items.append(Text.assemble((word, style), (f" {similarity:.2f}", "dim")))
    for name, found in others.items():
        items.append(Text(f"{name}{f' x {len(found)}' if len(found) > 1 else ''} {sum(found):.2f}", "dim"))
    return Columns(items, padding=(0, 2))


def match_lines(explanation: Explanation) -> Iterator[list[str]]:
    """For every token of the query, most similar first: it, what it has chosen, and their similarity."""
    for token, chosen, similarity in explanation.strongest():
        yield [escaped(token.word), escaped(chosen.word), f"{similarity:.6f}"]


def match_records(explanation: Explanation) -> list[dict[str, Any]]:
    """The same as JSON values, in the query's order, with the places in the texts."""
    records = []
    for token, (number, similarity) in zip(explanation.query, explanation.choices, strict=False):
        record: dict[str, Any] = {"query_token": token.word, "token": number, "similarity": similarity}
        if explanation.document is not None:
            chosen = explanation.document[number]
            record["word"] = chosen.word
            if chosen.in_text:
                record["start"], record["end"] = chosen.start, chosen.end
        records.append(record)
    return records


def _colour(explanation: Explanation, token: int) -> str:
    words = [i for i, known in enumerate(explanation.query) if known.in_text]
    return _COLOURS[words.index(token) % len(_COLOURS)] if token in words else "underline dim"


def _weight(explanation: Explanation, similarity: float) -> str:
    greatest = max((found for _, found in explanation.choices), default=0.0)
    return "bold" if similarity >= _BOLD * greatest else "dim" if similarity < _DIM * greatest else ""


def _marked(text: str, spans: list[tuple[int, int, str]], cut: bool = False) -> Text:
    """A text on one line, with styles for some of its parts; cut after the last of them."""
    spans = sorted((start, end, style) for start, end, style in spans if end > start)
    pieces, place = [], 0
    for start, end, style in spans:
        pieces += [(text[place:start], ""), (text[start:end], style)]
        place = end
    rest = text[place:]
    pieces.append((rest, "") if not (cut and spans and rest.strip()) else (" ...", "dim"))
    return Text.assemble(*((escaped(re.sub(r"\s+", " ", piece)), style) for piece, style in pieces if piece))
