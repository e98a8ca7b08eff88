"""The output of `search --explain`: matching tokens by colour and weight in a terminal, one line each in a pipe."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.text import Text

from .indexing import escaped

if TYPE_CHECKING:
    from ..matches import Explanation

# Cycled over the tokens of a query; tokens that are not in the text, such as [MASK], have none.
_COLOURS = (
    *("cyan", "magenta", "green", "yellow", "blue", "red"),
    *("dark_orange", "medium_purple1", "dark_cyan", "deep_pink2", "steel_blue", "gold3"),
)
# Fractions of the greatest similarity: a token is bold from the first on, and dim below the second.
_BOLD, _DIM = 0.9, 0.6


def marked_query(query: str, explanation: Explanation) -> Text:
    """A query with each token in the colour of the document token that it matches."""
    spans = [(token.start, token.end, _colour(explanation, i)) for i, token in enumerate(explanation.query)]
    return _marked(query, spans)


def marked_document(text: str, explanation: Explanation) -> Text:
    """A document's text up to its last matched token; matched tokens have the colour of their query token."""
    marks: dict[int, tuple[bool, float, str]] = {}
    for i, (chosen, similarity) in enumerate(explanation.choices):
        style = f"{_colour(explanation, i)} {_weight(explanation, similarity)}".strip()
        # Words of the query take precedence over [MASK] and other special tokens.
        marks[chosen] = max(marks.get(chosen, (False, -1.0, "")), (explanation.query[i].in_text, similarity, style))
    tokens = explanation.document or []
    return _marked(text, [(tokens[i].start, tokens[i].end, style) for i, (_, _, style) in marks.items()], cut=True)


def strongest_tokens(explanation: Explanation) -> Columns:
    """The similarity of each query token, and its match if that is another word; greatest first."""
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
    for name, similarities in others.items():
        items.append(
            Text(f"{name}{f' x {len(similarities)}' if len(similarities) > 1 else ''} {sum(similarities):.2f}", "dim")
        )
    return Columns(items, padding=(0, 2))


def match_lines(explanation: Explanation) -> Iterator[list[str]]:
    """Yield query token, matched token and similarity for each query token, most similar first."""
    for token, chosen, similarity in explanation.strongest():
        yield [escaped(token.word), escaped(chosen.word), f"{similarity:.6f}"]


def match_records(explanation: Explanation) -> list[dict[str, Any]]:
    """The matches as JSON values, in query order, with character offsets into the texts."""
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
    greatest = max((value for _, value in explanation.choices), default=0.0)
    return "bold" if similarity >= _BOLD * greatest else "dim" if similarity < _DIM * greatest else ""


def _marked(text: str, spans: list[tuple[int, int, str]], cut: bool = False) -> Text:
    """A text on one line with styled spans; with `cut`, truncated after the last span."""
    spans = sorted((start, end, style) for start, end, style in spans if end > start)
    pieces, position = [], 0
    for start, end, style in spans:
        pieces += [(text[position:start], ""), (text[start:end], style)]
        position = end
    rest = text[position:]
    pieces.append((rest, "") if not (cut and spans and rest.strip()) else (" ...", "dim"))
    return Text.assemble(*((escaped(re.sub(r"\s+", " ", piece)), style) for piece, style in pieces if piece))
