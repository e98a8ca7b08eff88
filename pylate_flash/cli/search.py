"""`pylate-flash search`."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.markup import escape
from rich.padding import Padding

from .common import UserError, be_quiet, check_device, check_file, check_model_name, console, explained, load_model


def search(
    query: Annotated[str, typer.Argument(help="What to look for, in words.")],
    index: Annotated[Path, typer.Option(help="Folder of an index (`indexes.Flat`).")] = Path("demo-output/index"),
    model: Annotated[str, typer.Option(help="The model that the index was built with.")] = "demo-output/model",
    data: Annotated[
        Path | None,
        typer.Option(help="corpus.jsonl with the texts, or its folder. Default: looked for beside the index."),
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="How many documents.")] = 5,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... Default: a GPU if there is one.")] = None,
) -> None:
    """Search an index, by default the demo's, and print the best documents."""
    if not query.strip():
        raise UserError("the query is empty")
    if not (index / "manifest.json").is_file():
        hint = "; run `pylate-flash demo` first, or name one with --index" if index == Path("demo-output/index") else ""
        raise UserError(f"there is no index in {index}{hint}")
    check_model_name(model)
    corpus = _find_corpus(index, data)
    be_quiet()
    with explained():
        check_device(device)
    from .. import indexes, retrieve

    with explained():
        flat = indexes.Flat(index.parent, index.name, device=device, show_progress=False)
    colbert = load_model(model, device=device)
    with explained():
        embeddings = cast("list[Any]", colbert.encode([query], is_query=True))
        results = retrieve.ColBERT(index=flat).retrieve(embeddings, k=k)[0]
    found = [(str(result["id"]), result["score"]) for result in results]
    texts = _read_texts(corpus, {id_ for id_, _ in found}) if corpus else {}
    for rank, (id_, score) in enumerate(found, start=1):
        console.print(f"[bold]{rank:>2}. {escape(id_)}[/]  [dim]{score:.2f}[/]", highlight=False)
        text = " ".join(texts.get(id_, "").split())
        if text:
            console.print(
                Padding(escape(textwrap.shorten(text, 240, placeholder=" ...")), (0, 0, 0, 4)), highlight=False
            )


def _find_corpus(index: Path, data: Path | None) -> Path | None:
    """The corpus.jsonl that holds the texts of an index, if there is one."""
    if data is not None:
        path = data / "corpus.jsonl" if data.is_dir() else data
        check_file(path)
        return path
    places = (index.parent / "data" / "corpus.jsonl", index.parent / "corpus.jsonl")
    return next((place for place in places if place.is_file()), None)


def _read_texts(corpus: Path, ids: set[str]) -> dict[str, str]:
    """Texts of some documents of a corpus.jsonl."""
    texts: dict[str, str] = {}
    with corpus.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line) if line.strip() else {}
                if record.get("_id") in ids:
                    texts[record["_id"]] = f"{record.get('title') or ''} {record['text']}".strip()
            except (ValueError, AttributeError, KeyError, TypeError):
                raise UserError(
                    f'{corpus}, line {number}: expected a JSON object with strings for "_id" and "text"'
                ) from None
    return texts
