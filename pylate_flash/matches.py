"""Why documents were found: which of a document's tokens each token of the query has chosen, in the words of the texts.

    hits = index.search(model.encode([query], is_query=True), k=5, matches=True)
    explained = explain(model, [query], hits, texts)       # texts: {"d1": "...", ...}
    explained[0][0].strongest()                            # [("path", "paths", 0.93), ...]
    explained[0][0].heat_map()                             # a figure of matplotlib

The model is one of PyLate's or of sentence-transformers'; importing this module imports neither.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ._extras import check_installed
from .encoding.texts import encoder_of, is_multi_vector_encoder, prompt_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .index.search import SearchResult

__all__ = ["Explanation", "Token", "explain", "tokens_of"]


class Token(NamedTuple):
    """A token that has an embedding, and where it stands in its text: `text[start:end]`; [CLS] and its like nowhere."""

    word: str
    start: int = 0
    end: int = 0

    @property
    def in_text(self) -> bool:
        """Whether it is a part of the text."""
        return self.end > self.start


@dataclass(frozen=True, repr=False)
class Explanation:
    """What a query's tokens have chosen in one document.

    Attributes
    ----------
    id, score
        Of the document, as found. The similarities add up to the score.
    query
        The query's tokens.
    document
        The document's tokens; None where its text is not known.
    choices
        For every token of the query, the number of the document's token that it has chosen, and their similarity.
        Of a document without tokens there are none.
    """

    id: str
    score: float
    query: list[Token]
    document: list[Token] | None
    choices: list[tuple[int, float]]

    def strongest(self) -> list[tuple[Token, Token, float]]:
        """Each token of the query, what it has chosen, and the similarity; first those that carry most of the score.

        Of a text that is not known, tokens have their numbers for words.
        """
        found = [
            (token, Token(f"#{chosen}") if self.document is None else self.document[chosen], similarity)
            for token, (chosen, similarity) in zip(self.query, self.choices, strict=False)
        ]
        return sorted(found, key=lambda match: -match[2])

    def heat_map(self) -> Figure:
        """Draw which tokens have chosen which, and how much each token of the query carries, as a figure of matplotlib.

        It shows the document's tokens that were chosen, in their order. A notebook shows an explanation so.

        Raises
        ------
        ValueError
            If the document has no tokens.
        MissingExtraError
            If matplotlib is not installed. The message names the extra.
        """
        check_installed("matplotlib", "a heat map", "demo")
        if not self.choices:
            raise ValueError(f"the document {self.id!r:.100} has no tokens, so there is nothing to draw")
        import numpy as np
        from matplotlib.figure import Figure

        columns = sorted({chosen for chosen, _ in self.choices})
        grid = np.full((len(self.choices), len(columns)), np.nan)
        for row, (chosen, similarity) in enumerate(self.choices):
            grid[row, columns.index(chosen)] = similarity
        words = [f"#{i}" if self.document is None else self.document[i].word for i in columns]
        size = (3.5 + 0.34 * len(columns), 1.6 + 0.24 * len(self.choices))
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        heat, bars = figure.subplots(1, 2, sharey=True, width_ratios=(max(2, len(columns)), 5))
        # Most similarities are near one another: the colours tell these apart.
        heat.imshow(grid, cmap="Blues", vmin=np.nanmin(grid) - 0.2, aspect="auto")
        heat.set_xticks(range(len(columns)), words, rotation=90)
        heat.set_yticks(range(len(self.choices)), [token.word for token in self.query])
        bars.barh(range(len(self.choices)), [similarity for _, similarity in self.choices], color="#2563eb")
        bars.set_xlabel("carries")
        heat.set_xticks(np.arange(-0.5, len(columns)), minor=True)
        heat.set_yticks(np.arange(-0.5, len(self.choices)), minor=True)
        heat.grid(which="minor", color="#e5e7eb", linewidth=0.5)
        for axes in (heat, bars):
            axes.spines[:].set_visible(False)
            axes.tick_params(which="both", length=0, labelsize=8)
        figure.suptitle(f"{self.id}  {self.score:.2f}", fontsize=10, fontweight="bold")
        return figure

    def __repr__(self) -> str:
        words = [
            f"{token.word} → {chosen.word} {similarity:.2f}"
            for token, chosen, similarity in self.strongest()
            if token.in_text
        ]
        return f"<{self.id!r}, {self.score:.2f}: {', '.join(words)}>"

    def _repr_png_(self) -> bytes | None:
        """What a notebook shows: the heat map."""
        if not self.choices or importlib.util.find_spec("matplotlib") is None:
            return None
        picture = io.BytesIO()
        self.heat_map().savefig(picture, format="png", dpi=100)
        return picture.getvalue()


def explain(
    model: Any, queries: Sequence[str], found: Sequence[Sequence[SearchResult]], texts: Mapping[str, str]
) -> list[list[Explanation]]:
    """Put words to the matches of a search.

    Parameters
    ----------
    model
        The one that encoded queries and documents, of PyLate or a `MultiVectorEncoder`. Its tokenizer is a fast one.
    queries
        Their texts.
    found
        What `indexes.Flat.search(..., matches=True)` returned for them.
    texts
        Texts of the documents by id, as they were encoded; those that are not there stay without words.

    Returns
    -------
    list[list[Explanation]]
        For every query and every document found.

    Raises
    ------
    ValueError
        If `found` has no matches, or not of as many queries, or a text is not the one that was encoded, as far as its
        length tells.
    """
    if len(found) != len(queries):
        raise ValueError(f"found must have results of {len(queries)} queries, got those of {len(found)}")
    ids = list(dict.fromkeys(hit["id"] for hits in found for hit in hits if hit["id"] in texts))
    documents = dict(zip(ids, tokens_of(model, [texts[id_] for id_ in ids], is_query=False), strict=True))
    explained = []
    for tokens, hits in zip(tokens_of(model, queries, is_query=True), found, strict=True):
        of_query = []
        for hit in hits:
            if "matches" not in hit:
                raise ValueError("found must be results of a search with matches=True, got some without matches")
            choices, document = list(hit["matches"]), documents.get(hit["id"])
            if choices and len(choices) != len(tokens):
                raise ValueError(f"model: it makes {len(tokens)} tokens of a query that has {len(choices)} matches")
            if document is not None and any(chosen >= len(document) for chosen, _ in choices):
                raise ValueError(
                    f"texts: {hit['id']!r:.100} is not the text that was encoded: it has {len(document)} tokens, and "
                    f"number {max(chosen for chosen, _ in choices)} of those that were encoded has been chosen"
                )
            of_query.append(Explanation(hit["id"], hit["score"], tokens, document, choices))
        explained.append(of_query)
    return explained


def tokens_of(model: Any, texts: Sequence[str], *, is_query: bool) -> list[list[Token]]:
    """The tokens of which a model makes embeddings: without those that it skips, with those that it fills up with.

    Parameters
    ----------
    model, texts, is_query
        As in `encoding.texts.encode`.

    Returns
    -------
    list[list[Token]]
        One for each row of what `encode` returns.

    Raises
    ------
    ValueError
        If the model's tokenizer cannot say where a token stands.
    """
    if not texts:
        return []
    tokenizer = model.tokenizer
    if not tokenizer.is_fast:
        raise ValueError(f"model: its {type(tokenizer).__name__} does not say where tokens stand; expected a fast one")
    # With all that the encoder was given, and the mask of what it keeps.
    found = encoder_of(model, is_query)(list(texts), output_value=None)
    if is_multi_vector_encoder(model):
        rows = [(row["input_ids"], row["attention_mask"]) for row in found]
    else:
        rows = list(zip(found["input_ids"], found["masks"], strict=True))
    prompt = prompt_of(model, is_query)
    tokens = []
    for text, (numbers, kept) in zip(texts, rows, strict=True):
        plain = tokenizer(prompt + text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ahead = list(zip(plain["input_ids"], plain["offset_mapping"], strict=True))[::-1]
        names = tokenizer.convert_ids_to_tokens(numbers.tolist())
        of_text = []
        for number, name, is_kept in zip(numbers.tolist(), names, kept.tolist(), strict=True):
            token = Token(name)
            if ahead and ahead[-1][0] == number:
                start, end = (max(0, place - len(prompt)) for place in ahead.pop()[1])
                token = Token(text[start:end] or name, start, end)
            if is_kept:
                of_text.append(token)
        tokens.append(of_text)
    return tokens
