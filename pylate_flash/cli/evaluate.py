"""`pylate-flash evaluate`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._extras import check_installed
from ..encoding.texts import encode
from . import defaults
from .common import (
    SCORERS,
    BatchSize,
    Device,
    DocumentLength,
    QueryLength,
    Scorer,
    TrustRemoteCode,
    UserError,
    be_quiet,
    check_device,
    console,
    explained,
    loading,
    note,
    notes,
    say,
)
from .files import check_new_file, write_file
from .indexing import INDEX_ERRORS, check_new_index, check_place, holds_index
from .models import (
    check_encoding_host,
    check_model_name,
    check_scorer,
    has_random_projection,
    load_model,
    title_of,
)

if TYPE_CHECKING:
    from ..indexes import Flat
    from .models import Model


def evaluate(
    data: Annotated[
        Path,
        typer.Option(
            help='BEIR folder. corpus.jsonl: `{"_id": "d1", "title": "optional", "text": "..."}` in each line; '
            'queries.jsonl: `{"_id": "q1", "text": "..."}`; qrels/SPLIT.tsv: `q1`, `d1` and a whole number, 1 or more '
            "if relevant, between tabs."
        ),
    ],
    model: Annotated[str, typer.Option(help="ColBERT model, MultiVectorEncoder, or an encoder: a folder or a name.")],
    split: Annotated[str, typer.Option(help="Which file of qrels/.")] = defaults.SPLIT,
    scorer: Annotated[
        Scorer, typer.Option(metavar="NAME", help=f"Computes the scores: {SCORERS}. auto: as the model says.")
    ] = Scorer.auto,
    compare_torch: Annotated[
        bool,
        typer.Option(
            "--compare-torch",
            help="Search the same index with the torch scorer of the model's library too; exit 1 if unequal. Not with "
            "`--scorer torch`.",
        ),
    ] = False,
    index: Annotated[Path | None, typer.Option(help="Keep the index in this new folder, for `search`.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write metrics and timings here.")] = None,
    batch_size: BatchSize = defaults.BATCH_SIZE,
    query_length: QueryLength = None,
    document_length: DocumentLength = None,
    device: Device = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the index that is already in `--index`.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Evaluate a model's retrieval on a collection in BEIR's layout, by exact search.

    Prints nDCG@10, MAP, recall@100 and MRR@10 over the 100 best documents of each query. An encoder without a
    projection gets a random one, as in its library: train it first.
    """
    check_encoding_host("pylate-flash evaluate")
    if compare_torch and scorer is Scorer.torch:
        raise UserError("--compare-torch compares another scorer with torch; leave out --scorer torch")
    if index is not None:
        _check_index(index, overwrite)
    elif overwrite:
        raise UserError("--overwrite replaces the index in --index, which was not given")
    if json_file is not None:
        check_new_file(json_file, "--json")
    check_model_name(model)
    check_installed("ranx", "pylate-flash evaluate", "eval")
    be_quiet()
    loading(f"the model {model}")
    from .. import beir
    from ..data.agreement import compare
    from ..demo.job import METRICS, metrics_table, versions
    from ..index.catalog import ConcurrentWriteError

    if index is not None:
        check_place(index.resolve())
    with explained():
        documents, queries, qrels = beir.load_beir_folder(data, split=split)
    check_device(device)
    import torch

    # A projection that the encoder has not got is drawn at random: the same one at every call.
    torch.manual_seed(defaults.SEED)
    loaded = load_model(
        model,
        searching=index is not None,
        trust_remote_code=trust_remote_code,
        device=device,
        query_length=query_length,
        document_length=document_length,
    )
    if has_random_projection(loaded, model):
        note(
            f"Warning: {model} is an encoder without a projection. A random one was drawn, so the numbers below say "
            "nothing about a model of use; train it first with `pylate-flash train`."
        )
    chosen = None if scorer is Scorer.auto else scorer.value
    check_scorer(chosen, loaded)
    if index is not None:
        # Loading takes long enough for somebody else to have built one there.
        _check_index(index, overwrite)
    with _new_index(index, loaded, model, data) as flat, explained(kinds=(ValueError, OSError, ConcurrentWriteError)):
        started = time.perf_counter()
        texts = [queries[query_id] for query_id in qrels]
        embeddings = encode(loaded, texts, is_query=True, batch_size=batch_size, show_progress=notes.is_terminal)
        timings = {"encode_queries": time.perf_counter() - started}

        def run(name: str | None) -> beir.RetrievalEvaluation:
            return beir.evaluate_retrieval(
                loaded,
                documents,
                queries,
                qrels,
                index=flat,
                scorer=name,
                metrics=list(METRICS),
                batch_size=batch_size,
                show_progress=notes.is_terminal,
                queries_embeddings=embeddings,
            )

        result = run(chosen)
        timings |= result.timings
        theirs = run("torch") if compare_torch else None
    if theirs:
        timings["search_by_torch"] = theirs.timings["search"]
    rows = [(result.scorer, result.metrics)] + ([(f"torch of {title_of(loaded)}", theirs.metrics)] if theirs else [])
    console.print(metrics_table(rows, f"{len(documents)} documents, {len(qrels)} queries ({split})"))
    say(", ".join(f"{name.replace('_', ' ')} {value:.1f} s" for name, value in timings.items()))
    agreement = compare(theirs, result) if theirs else None
    if json_file is not None:
        record: dict[str, Any] = {
            "data": str(data),
            "split": split,
            "model": model,
            "scorer": result.scorer,
            **result.metrics,
            "timings": timings,
            "versions": versions(),
        }
        if theirs and agreement:
            record["torch"] = theirs.metrics
            record["agreement"] = {"holds": agreement.holds, "text": str(agreement)}
        write_file(json_file, json.dumps(record, indent=2) + "\n", "--json")
    if agreement:
        say(f"The two scorers {'agree' if agreement.holds else 'disagree'}: {agreement}.")
        if not agreement.holds:
            raise typer.Exit(1)


@contextmanager
def _new_index(index: Path | None, model: Model, name: str, data: Path) -> Iterator[Flat]:
    """An empty index that knows model and corpus; if the evaluation does not finish, none of its documents stay.

    Nor does the folder, if it was not there before. Otherwise it stays, with whatever else is in it, and so does an
    index that could not be emptied, or that another process has written to.
    """
    from ..indexes import Flat

    with contextlib.ExitStack() as stack:
        if index is None:
            place, is_new = Path(stack.enter_context(tempfile.TemporaryDirectory()), "index"), False
        else:
            place, is_new = index.resolve(), not os.path.lexists(index)
        with explained(kinds=INDEX_ERRORS):
            flat = Flat(
                place.parent, place.name, override=True, device=str(model.device), show_progress=notes.is_terminal
            )
        try:
            with explained(kinds=INDEX_ERRORS):
                flat.record_model(model, name)
                flat.record_corpus(data)
            yield flat
        except BaseException:
            # The index refuses both where another process has written to it, to which all is left then.
            with contextlib.suppress(*INDEX_ERRORS):
                flat.remove_documents(flat.documents_ids)
                flat.compact()
                if is_new and flat.info().generation:
                    shutil.rmtree(place)
            raise


def _check_index(path: Path, overwrite: bool) -> None:
    check_new_index(path)
    if holds_index(path) and not overwrite:
        raise UserError(f"--index: there is an index in {path} already; --overwrite replaces it")
