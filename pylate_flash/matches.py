"""Explain search results: which token of a document each token of the query matches, shown in the words of the texts.

    hits = index.search(model.encode([query], is_query=True), k=5, matches=True)
    explained = explain(model, [query], hits, texts)       # texts: {"d1": "...", ...}
    explained[0][0].strongest()                            # [("path", "paths", 0.93), ...]
    explained[0][0].heat_map()                             # a matplotlib figure

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
    """A token that has an embedding, and its span in the text, `text[start:end]`; empty for [CLS] and the like."""

    word: str
    start: int = 0
    end: int = 0

    @property
    def in_text(self) -> bool:
        """Whether it is part of the text."""
        return self.end > self.start


@dataclass(frozen=True, repr=False)
class Explanation:
    """The matches of a query's tokens in one document.

    Attributes
    ----------
    id, score
        Of the document, as returned by the search. The similarities add up to the score.
    query
        The query's tokens.
    document
        The document's tokens; None if its text is not known.
    choices
        For every token of the query, the index of the document's token that it matches, and their similarity. Empty for
        a document without tokens.
    """

    id: str
    score: float
    query: list[Token]
    document: list[Token] | None
    choices: list[tuple[int, float]]

    def strongest(self) -> list[tuple[Token, Token, float]]:
        """Return each token of the query, its match, and the similarity, in descending order of similarity.

        If the document's text is not known, its tokens are shown by their indices.
        """
        matches = [
            (token, Token(f"#{chosen}") if self.document is None else self.document[chosen], similarity)
            for token, (chosen, similarity) in zip(self.query, self.choices, strict=False)
        ]
        return sorted(matches, key=lambda match: -match[2])

    def heat_map(self) -> Figure:
        """Draw the matches, and how much each token of the query contributes to the score, as a matplotlib figure.

        It shows the matched tokens of the document, in their order. Notebooks display an explanation this way.

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
        # Most similarities are close to each other: scale the colours to their range, to tell them apart.
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
        """The heat map, as notebooks display it."""
        if not self.choices or importlib.util.find_spec("matplotlib") is None:
            return None
        picture = io.BytesIO()
        self.heat_map().savefig(picture, format="png", dpi=100)
        return picture.getvalue()


def explain(
    model: Any, queries: Sequence[str], results: Sequence[Sequence[SearchResult]], texts: Mapping[str, str]
) -> list[list[Explanation]]:
    """Show the matches of a search in words.

    Parameters
    ----------
    model
        The model that encoded queries and documents, of PyLate or a `MultiVectorEncoder`. Its tokenizer must be fast.
    queries
        Their texts.
    results
        What `indexes.Flat.search(..., matches=True)` returned for them.
    texts
        Texts of the documents by id, as they were encoded; documents without a text are shown without words.

    Returns
    -------
    list[list[Explanation]]
        For every query, one explanation per document found.

    Raises
    ------
    ValueError
        If `results` has no matches, or another number of queries, or the length of a text shows that it is not the one
        that was encoded.
    TypeError
        If `queries` is a single text, or `texts` is no mapping.
    """
    _check_texts("queries", queries)
    if not isinstance(texts, Mapping):
        raise TypeError(f"texts must be a mapping of the documents' texts by id, got {type(texts).__name__}")
    if len(results) != len(queries):
        raise ValueError(f"results must be those of {len(queries)} queries, got those of {len(results)}")
    ids = list(dict.fromkeys(hit["id"] for hits in results for hit in hits if hit["id"] in texts))
    documents = dict(zip(ids, tokens_of(model, [texts[id_] for id_ in ids], is_query=False), strict=True))
    explained = []
    for tokens, hits in zip(tokens_of(model, queries, is_query=True), results, strict=True):
        of_query = []
        for hit in hits:
            if "matches" not in hit:
                raise ValueError("results must be those of a search with matches=True, got some without matches")
            choices, document = list(hit["matches"]), documents.get(hit["id"])
            if choices and len(choices) != len(tokens):
                raise ValueError(
                    f"model: it encodes a query as {len(tokens)} tokens, expected {len(choices)}, one per match"
                )
            if document is not None and any(chosen >= len(document) for chosen, _ in choices):
                raise ValueError(
                    f"texts: {hit['id']!r:.100} is not the text that was encoded: it has {len(document)} tokens, but "
                    f"a match points to token {max(chosen for chosen, _ in choices)}"
                )
            of_query.append(Explanation(hit["id"], hit["score"], tokens, document, choices))
        explained.append(of_query)
    return explained


def tokens_of(model: Any, texts: Sequence[str], *, is_query: bool) -> list[list[Token]]:
    """Return the tokens for which a model makes embeddings, including padding that it embeds, without skipped tokens.

    Parameters
    ----------
    model, texts, is_query
        As in `encoding.texts.encode`.

    Returns
    -------
    list[list[Token]]
        One token for each row that `encode` returns.

    Raises
    ------
    ValueError
        If the model's tokenizer does not return the offsets of tokens.
    TypeError
        If `texts` is a single text.
    """
    _check_texts("texts", texts)
    if not texts:
        return []
    tokenizer = model.tokenizer
    if not tokenizer.is_fast:
        raise ValueError(
            f"model: its {type(tokenizer).__name__} does not return the offsets of tokens; expected a fast one"
        )
    # `output_value=None` also returns the encoder's inputs, and the mask of the tokens that it keeps.
    encoded = encoder_of(model, is_query)(list(texts), output_value=None)
    if is_multi_vector_encoder(model):
        rows = [(row["input_ids"], row["attention_mask"]) for row in encoded]
    else:
        rows = list(zip(encoded["input_ids"], encoded["masks"], strict=True))
    prompt = prompt_of(model, is_query)
    tokens = []
    for text, (token_ids, mask) in zip(texts, rows, strict=True):
        plain = tokenizer(prompt + text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        remaining = list(zip(plain["input_ids"], plain["offset_mapping"], strict=True))[::-1]
        names = tokenizer.convert_ids_to_tokens(token_ids.tolist())
        of_text = []
        for token_id, name, is_kept in zip(token_ids.tolist(), names, mask.tolist(), strict=True):
            token = Token(name)
            if remaining and remaining[-1][0] == token_id:
                start, end = (max(0, offset - len(prompt)) for offset in remaining.pop()[1])
                token = Token(text[start:end] or name, start, end)
            if is_kept:
                of_text.append(token)
        tokens.append(of_text)
    return tokens


def _check_texts(name: str, texts: Sequence[str]) -> None:
    """Raise TypeError for a single text, whose characters would each count as one."""
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        got = f"the text {texts!r:.100}" if isinstance(texts, str) else type(texts).__name__
        raise TypeError(f"{name} must be a list of texts, got {got}")
