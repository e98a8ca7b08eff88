"""`pylate-flash search`."""

from __future__ import annotations

import io
import json
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text as RichText

from ..data.files import Corpus, Text, read_queries
from ..encoding.texts import encode
from . import options
from .common import UserError, console, decoded, explained, note
from .explaining import marked_document, marked_query, match_lines, match_records, strongest_tokens
from .files import check_file
from .indexing import (
    DEFAULT_INDEX,
    check_index,
    escaped,
    holds_index,
    index_path,
    load_model_of,
    open_corpus,
    open_flat,
)
from .models import check_encoding_host

if TYPE_CHECKING:
    from ..index.search import SearchResult
    from ..indexes import Flat
    from ..matches import Explanation
    from .models import Model

_DEMO_INDEX = Path("demo-output/index")
# Queries encoded and searched together: many, as every search scans the whole index, but not so many that their
# embeddings fill the memory, or that the first results wait too long.
_QUERIES_AT_A_TIME = 1000


class Hit(NamedTuple):
    """A document retrieved for a query; `text` is None if unknown, `explanation` if not requested."""

    rank: int
    id: str
    score: float
    text: str | None
    explanation: Explanation | None = None


def search(
    query: Annotated[str | None, typer.Argument(help="The query text; `-` reads queries from standard input.")] = None,
    queries: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Several queries instead of QUERY: one per line, or as in BEIR's queries.jsonl, "
            '`{"_id": "q1", "text": "..."}`. `-` is standard input.',
        ),
    ] = None,
    index: Annotated[
        Path | None,
        typer.Option(help=f"Folder of the index. Default: {DEFAULT_INDEX}, or else {_DEMO_INDEX}.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder or name of the model that the index was built with, if the index does not record it or the "
            "model has moved."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Texts to show: the corpus.jsonl or folder that was indexed. Default: the corpora that the index "
            "records, or a corpus.jsonl beside it."
        ),
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="Number of documents per query.")] = 5,
    where: Annotated[
        str | None,
        typer.Option(
            metavar="EXPRESSION",
            help="Search only documents whose metadata satisfy an SQLite expression: `year >= 2020 and lang = 'en'`.",
        ),
    ] = None,
    rescore: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Rescore the N best documents with the 16-bit embeddings stored beside the compressed ones (`index "
            "--dtype residual4+bfloat16`).",
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Show the document token that each query token matches, and its contribution to the score.",
        ),
    ] = False,
    json_lines: Annotated[
        bool,
        typer.Option(
            "--json",
            help='Print a line of JSON per query: `{"query": "...", "results": [{"rank": 1, "id": "d1", "score": 9.5, '
            '"text": "..."}]}`.',
        ),
    ] = False,
    device: options.Device = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Search an index, and print the best documents.

    To a pipe or a file, it writes one line per document: rank, score, id and, if known, the beginning of the text,
    separated by tabs; with `--queries`, the query's `_id` or line number comes first. `--json` contains the full texts.

    With `--explain`, a terminal shows each matched token in the colour of its query token, in bold where the similarity
    is highest. To a pipe, it writes one line per query token, with the token, the matched token and their similarity
    instead of the text. The similarities add up to the score.
    """
    check_encoding_host("pylate-flash search")
    if query == "-" and queries is None:
        query, queries = None, "-"
    if (query is None) == (queries is None):
        raise UserError("give either QUERY or --queries FILE" + ("" if query is None else ", not both"))
    all_queries = [Text("", _checked(query))] if query is not None else _read_queries(str(queries))
    where = None if where is None else decoded(where, "--where")
    path = _find_index(index)
    corpora = [] if data is None else [open_corpus(data)]
    flat = open_flat(path, device)
    if where is not None or rescore is not None:
        # An empty search reports errors in them before the model is loaded, and caches the filter for the search.
        with _options_named():
            flat([], k=k, where=where, rescore=rescore)
    if data is None:
        corpora = _known_corpora(flat)
    encoder = load_model_of(flat, model, device, trust_remote_code)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Escape characters that a non-UTF-8 output cannot encode, instead of failing.
        sys.stdout.reconfigure(errors="backslashreplace")
    for start in range(0, len(all_queries), _QUERIES_AT_A_TIME):
        chunk = all_queries[start : start + _QUERIES_AT_A_TIME]
        words = [text for _, text in chunk]
        with _options_named():
            results = flat(encode(encoder, words, is_query=True), k=k, where=where, matches=explain, rescore=rescore)
        try:
            texts = _texts(corpora, {result["id"] for documents in results for result in documents})
        except UserError as error:
            if data is not None:
                raise
            _note_no_texts(error)
            corpora, texts = [], {}
        for query_text, hits in zip(chunk, _with_texts(results, texts, encoder, words, explain), strict=True):
            if json_lines:
                print(_json(query_text, hits))
            elif sys.stdout.isatty():
                show(console, hits, query_text.text if queries is not None or explain else None)
            else:
                for line in _lines(query_text, hits, with_text=bool(corpora)):
                    print(line)


@contextmanager
def _options_named() -> Iterator[None]:
    """Convert errors of a search to a `UserError`; those about an argument name the option of that name."""
    with explained():
        try:
            yield
        except ValueError as error:
            dashes = "--" if str(error).startswith(("where: ", "rescore: ", "rescore must ")) else ""
            raise ValueError(f"{dashes}{error}") from error


def show(console: Console, documents: Sequence[Hit], query: str | None = None) -> None:
    """Print documents for a terminal, below the query if given, each with the beginning of its text."""
    if query is not None:
        explanation = documents[0].explanation if documents else None
        console.print(
            RichText(_one_line(query), style="italic") if explanation is None else marked_query(query, explanation)
        )
    for document in documents:
        line = RichText.assemble(
            (f"{document.rank:>2}. {escaped(document.id)}", "bold"), "  ", (f"{document.score:.2f}", "dim")
        )
        console.print(line, soft_wrap=True)
        parts: list[RenderableType] = []
        if document.text:
            parts.append(
                RichText(_beginning(document.text))
                if document.explanation is None
                else marked_document(document.text, document.explanation)
            )
        if document.explanation is not None:
            parts.append(strongest_tokens(document.explanation))
        for part in parts:
            console.print(Padding(part, (0, 0, 0, 4)))


def _lines(query: Text, documents: Sequence[Hit], with_text: bool) -> Iterator[str]:
    for document in documents:
        fields = [str(document.rank), f"{document.score:.4f}", escaped(document.id)]
        if query.id:
            fields.insert(0, escaped(query.id))
        if document.explanation is not None:
            yield from ("\t".join([*fields, *match]) for match in match_lines(document.explanation))
            continue
        if with_text:
            fields.append(_beginning(document.text or ""))
        yield "\t".join(fields)


def _json(query: Text, documents: Sequence[Hit]) -> str:
    results = []
    for document in documents:
        results.append({"rank": document.rank, "id": document.id, "score": document.score})
        if document.text is not None:
            results[-1]["text"] = document.text
        if document.explanation is not None:
            results[-1]["matches"] = match_records(document.explanation)
    name: dict[str, Any] = {"query_id": query.id} if query.id else {}
    return json.dumps({**name, "query": query.text, "results": results})


def _beginning(text: str) -> str:
    return textwrap.shorten(_one_line(text), 240, placeholder=" ...")


def _one_line(text: str) -> str:
    return escaped(" ".join(text.split()))


def _checked(query: str) -> str:
    if not query.strip():
        raise UserError("the query is empty")
    return decoded(query, "the query")


def _read_queries(name: str) -> list[Text]:
    with explained():
        if name == "-":
            if sys.stdin is None:
                raise UserError("queries cannot be read from standard input: it is closed")
            return read_queries(sys.stdin.buffer, "standard input")
        check_file(Path(name))
        with open(name, "rb") as file:
            return read_queries(file, name)


def _find_index(index: Path | None) -> Path:
    if index is not None:
        path = index_path(index)
        check_index(path)
        return path
    for path in (DEFAULT_INDEX, _DEMO_INDEX):
        if holds_index(path):
            return path
    raise UserError(
        f"there is no index in {DEFAULT_INDEX} or {_DEMO_INDEX}; build one with `pylate-flash index` or "
        "`pylate-flash demo`, or choose one with --index"
    )


def _known_corpora(flat: Flat) -> list[Corpus]:
    """The corpora that were added to an index, latest first, or else one beside it."""
    parent = flat.index_path.parent
    paths = (
        flat.corpora[::-1]
        or [path for path in (parent / "data" / "corpus.jsonl", parent / "corpus.jsonl") if os.path.isfile(path)][:1]
    )
    corpora = []
    for path in paths:
        try:
            corpora.append(open_corpus(path))
        except UserError as error:
            _note_no_texts(error)
    return corpora


def _note_no_texts(error: UserError) -> None:
    """Note why no texts are shown: not an error, as the user did not request this file."""
    note(f"Note: no texts are shown: {error}; give the indexed corpus with --data")


def _with_texts(
    results: list[list[SearchResult]], texts: dict[str, str], model: Model, queries: list[str], explain: bool
) -> list[list[Hit]]:
    explanations: list[list[Any]] = [[None] * len(documents) for documents in results]
    if explain:
        from .. import matches

        with explained("--explain: "):
            explanations = list(matches.explain(model, queries, results, texts))
    return [
        [
            Hit(rank, result["id"], result["score"], texts.get(result["id"]), own)
            for rank, (result, own) in enumerate(zip(documents, of_query, strict=True), start=1)
        ]
        for documents, of_query in zip(results, explanations, strict=True)
    ]


def _texts(corpora: list[Corpus], ids: set[str]) -> dict[str, str]:
    """Texts of the documents with these ids; corpora are read until all are found."""
    texts: dict[str, str] = {}
    for corpus in corpora:
        with explained():
            texts |= corpus.find(ids - texts.keys())
    return texts
