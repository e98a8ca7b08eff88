"""`pylate-flash mine`."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .common import UserError, check_device, explained, loading, note, notes, say
from .files import check_file, check_new_file, is_standard_output, write_file
from .indexing import counted, open_corpus
from .models import check_encoding_host, check_model_name, load_model


def mine(
    data: Annotated[
        Path,
        typer.Option(
            help='JSON lines, a file or a pipe: `{"query": "...", "positive": "..."}`. A query with several positives '
            "has one line for each."
        ),
    ],
    model: Annotated[str, typer.Option(help="ColBERT model or MultiVectorEncoder: a folder or a name.")],
    output: Annotated[
        Path,
        typer.Option(
            help='New file, which `train` reads: `{"query": "...", "positive": "...", "negative_1": "...", ...}` per '
            "line."
        ),
    ],
    corpus: Annotated[
        Path | None,
        typer.Option(
            help='Texts to mine: corpus.jsonl, as in BEIR, `{"_id": "d1", "title": "optional", "text": "..."}` per '
            "line, with title and text joined by a space, or a folder as in `index`. A positive matches a document "
            "with or without its title. Default: the positives of `--data`."
        ),
    ] = None,
    num_negatives: Annotated[int, typer.Option(min=1, help="Negatives per pair.")] = 3,
    range_min: Annotated[
        int,
        typer.Option(
            min=0, help="Skip this many of the best texts that are not a positive: texts that close may be answers."
        ),
    ] = 0,
    max_score: Annotated[float | None, typer.Option(help="Maximum score of a negative.")] = None,
    absolute_margin: Annotated[
        float | None, typer.Option(help="Minimum difference between the scores of the positive and a negative.")
    ] = None,
    relative_margin: Annotated[
        float | None,
        typer.Option(help="The same, as a fraction of the positive's score: 0.05 allows at most 95 % of it."),
    ] = None,
    batch_size: options.BatchSize = options.BATCH_SIZE,
    query_length: options.QueryLength = None,
    document_length: options.DocumentLength = None,
    device: options.Device = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Find hard negatives for pairs of a query and a positive: the texts that a model wrongly scores highest.

    The search is exact: every query is scored against every text. A positive of the query is never its negative. The
    margins require a distance from the positive's score: texts that also answer the query, but are not positives in
    `--data`, score high, and training on those as negatives does harm. `--relative-margin 0.05` is a good start.

    A pair with fewer than `--num-negatives` within the bounds is left out. The file is written in one go, at the end.
    """
    check_encoding_host("pylate-flash mine")
    _check_margins(max_score, absolute_margin, relative_margin)
    check_model_name(model)
    check_file(data)
    check_new_file(output, "--output", ("--data", data), ("--corpus", corpus), overwrite=overwrite)
    loading(str(data))
    with explained():
        from ..data.training import read_training_file

        lines = read_training_file(data)
    # Stripped, like the texts of a corpus.
    queries, positives = list(lines.rows["query"]), [text.strip() for text in lines.rows["positive"]]
    texts, with_titles = (None, None) if corpus is None else _texts(corpus, set(positives))
    check_device(device)
    loading(f"the model {model}")
    loaded = load_model(
        model,
        searching=True,
        trust_remote_code=trust_remote_code,
        device=device,
        query_length=query_length,
        document_length=document_length,
    )
    from ..negatives import mine_hard_negatives

    mined = mine_hard_negatives(
        loaded,
        queries,
        positives,
        texts,
        other_forms=with_titles,
        num_negatives=num_negatives,
        range_min=range_min,
        max_score=max_score,
        absolute_margin=absolute_margin,
        relative_margin=relative_margin,
        batch_size=batch_size,
        show_progress_bar=notes.is_terminal,
    )
    pool = f"{counted(len(set(positives if texts is None else texts)), 'text')} of {corpus or data}"
    if not mined:
        raise UserError(
            f"no pair has {counted(num_negatives, 'negative')} within the bounds among the {pool}, so nothing was "
            "written; request fewer, or give a larger --corpus or a smaller margin"
        )
    unused = [*lines.rows.column_names[2:], *lines.ignored]
    if unused:
        note(f"pylate-flash: note: unused keys: {', '.join(map(repr, unused[:10]))}")
    rows = ({"query" if key == "anchor" else key: text for key, text in row.items()} for row in mined)
    write_file(output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "--output")
    # If the lines go to standard output, messages go to standard error.
    tell = note if is_standard_output(output) else say
    tell(f"{output} holds {counted(len(mined), 'line')} with {counted(num_negatives, 'negative')} each from the {pool}")
    if len(mined) < len(queries):
        tell(f"Left out: {counted(len(queries) - len(mined), 'pair')} with fewer negatives within the bounds")
    if tell is say:
        print(f"Next: pylate-flash train --data {shlex.quote(str(output))} ...")


def _check_margins(max_score: float | None, absolute_margin: float | None, relative_margin: float | None) -> None:
    for name, value in (("--max-score", max_score), ("--absolute-margin", absolute_margin)):
        if value is not None and not math.isfinite(value):
            raise UserError(f"{name} must be a finite number, got {value:g}")
    if relative_margin is not None and not 0 <= relative_margin < 1:
        raise UserError(f"--relative-margin must be at least 0 and less than 1, got {relative_margin:g}")


def _texts(path: Path, positives: set[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The non-empty texts of a corpus, and for each positive its forms with a title."""
    texts: list[str] = []
    with_titles: dict[str, list[str]] = {}
    corpus = open_corpus(path)
    with explained():
        for document in corpus:
            if document.text:
                texts.append(document.text)
            if document.body in positives:
                with_titles.setdefault(document.body, []).append(document.text)
    return texts, with_titles
