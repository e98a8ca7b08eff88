"""`pylate-flash evaluate`."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._extras import check_installed
from ..demo.job import METRICS
from ..encoding.texts import encode
from . import options
from .against import Run, check_run_ids, check_systems, compare_systems
from .collections import Collection, load_collections
from .common import UserError, check_device, explained, loading, note, notes
from .evaluated import Evaluated, run_path, show, size_of, write
from .files import check_new_file, is_standard_output, write_file
from .indexing import INDEX_ERRORS, check_new_index, check_place, holds_index, record_corpus
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

# The placeholder for the training seed in the name of a model.
_SEED = "{seed}"


def evaluate(
    data: Annotated[
        list[str],
        typer.Option(
            help='BEIR folder; may be repeated. corpus.jsonl: `{"_id": "d1", "title": "optional", "text": "..."}` per '
            'line; queries.jsonl: `{"_id": "q1", "text": "..."}`; qrels/SPLIT.tsv: `q1`, `d1` and an integer, 1 or '
            "more if relevant, separated by tabs. Or `beir:NAME`, `nanobeir` or `nanobeir:NAME`, which are downloaded.",
            metavar="FOLDER",
        ),
    ],
    model: Annotated[str, typer.Option(help="ColBERT model, MultiVectorEncoder, or an encoder: a folder or a name.")],
    split: Annotated[str, typer.Option(help="Name of the file in qrels/.")] = "test",
    scorer: Annotated[
        options.Scorer,
        typer.Option(metavar="NAME", help=f"Computes the scores: {options.SCORERS}. auto: the model's own scorer."),
    ] = "auto",
    compare_torch: Annotated[
        bool,
        typer.Option(
            "--compare-torch",
            help="Also search the same index with the torch scorer of the model's library; exit with 1 if the results "
            "differ. Not with `--scorer torch`.",
        ),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="SYSTEMS",
            help="Compare exact search with other indexes of the same embeddings: `plaid` (PyLate's), a storage "
            "type of our index (`int8`, `residual4`, `residual4+bfloat16`, ...), or a TREC run file; separate several "
            "by commas.",
        ),
    ] = None,
    repeat: Annotated[
        str | None,
        typer.Option(
            metavar="SEEDS",
            help="Evaluate models trained with these seeds, for instance `1,2,3`: each replaces `{seed}` in `--model`. "
            "Shows means and standard deviations.",
        ),
    ] = None,
    index: Annotated[Path | None, typer.Option(help="Keep the index in this new folder, for `search`.")] = None,
    run: Annotated[
        Path | None,
        typer.Option(help="Write the results as a TREC run; for several collections or seeds, one file each."),
    ] = None,
    per_query: Annotated[Path | None, typer.Option(help="Write the metrics of every query, separated by tabs.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write metrics and timings to this file.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Plot the metrics; with `--against`, quality against time. PNG, SVG or PDF.")
    ] = None,
    batch_size: options.BatchSize = options.BATCH_SIZE,
    query_length: options.QueryLength = None,
    document_length: options.DocumentLength = None,
    device: options.Device = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the index that is already in `--index`.")
    ] = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Evaluate a model's retrieval on collections in BEIR's layout, by exact search.

    Prints nDCG@10, MAP, recall@100 and MRR@10 over the 100 best documents of each query, and the times taken. An
    encoder without a projection gets a random one, as in its library: train it first.
    """
    check_encoding_host("pylate-flash evaluate")
    if compare_torch and scorer == "torch":
        raise UserError("--compare-torch compares another scorer with torch; leave out --scorer torch")
    seeds = _seeds(repeat, model)
    if index is not None:
        if len(data) > 1 or len(seeds) > 1:
            raise UserError("--index keeps the index of one model and one --data only")
        _check_index(index, overwrite)
    elif overwrite:
        raise UserError("--overwrite replaces the index in --index, but --index is missing")
    files_of_beir = ("corpus.jsonl", "queries.jsonl", f"qrels/{split}.tsv")
    used_files = [("--data", Path(folder) / name) for folder in data for name in files_of_beir]
    used_files += [("--against", Path(name.strip())) for name in (against or "").split(",") if name.strip()]
    for option, file in (("--run", run), ("--per-query", per_query), ("--json", json_file), ("--picture", picture)):
        if file is not None:
            check_new_file(file, option, *used_files)
            used_files.append((option, file))
    names = [model if seed is None else model.replace(_SEED, str(seed)) for seed in seeds]
    for name in names:
        check_model_name(name)
    check_installed("ranx", "pylate-flash evaluate", "eval")
    if picture is not None:
        if picture.suffix.lower() not in (".png", ".svg", ".pdf"):
            raise UserError(f"--picture {picture} must end in .png, .svg or .pdf")
        check_installed("matplotlib", "--picture", "demo")
    loading(f"the model {names[0]}")
    if index is not None:
        check_place(index.resolve())
    collections = load_collections(data, split)
    if run is not None:
        check_run_ids(collections)
        _check_run_files(run, collections, seeds, used_files)
    systems = {} if against is None else check_systems(against, collections)
    check_device(device)
    evaluated: list[Evaluated] = []
    for seed, name in zip(seeds, names, strict=True):
        if evaluated:
            loading(f"the model {name}")
        loaded = _load(
            name,
            searching=index is not None,
            trust_remote_code=trust_remote_code,
            device=device,
            query_length=query_length,
            document_length=document_length,
        )
        chosen = None if scorer == "auto" else scorer
        check_scorer(chosen, loaded)
        for collection in collections:
            if index is not None:
                # Check again: another process may have built one there while the model was loading.
                _check_index(index, overwrite)
            if len(collections) > 1:
                note(f"{collection.name}: {size_of(collection)}")
            evaluated.append(
                _evaluate(collection, loaded, name, seed, index, chosen, batch_size, compare_torch, systems)
            )
    show(evaluated, split)
    write(evaluated, split, run, per_query, json_file)
    if picture is not None:
        from .pictures import draw

        write_file(picture, draw(evaluated, picture.suffix[1:]), "--picture")
    if not all(one.agreement.holds for one in evaluated if one.agreement):
        raise typer.Exit(1)


def _seeds(repeat: str | None, model: str) -> list[int | None]:
    if repeat is None:
        return [None]
    seeds = [seed.strip() for seed in repeat.split(",")]
    if not all(re.fullmatch("[0-9]{1,19}", seed) for seed in seeds) or len({*map(int, seeds)}) < len(seeds):
        raise UserError(f"--repeat expects distinct integer seeds, separated by commas, got {repeat!r:.100}")
    if _SEED not in model:
        raise UserError(f"--repeat evaluates one model per seed: --model {model} must contain {_SEED}")
    return [int(seed) for seed in seeds]


def _check_run_files(
    run: Path, collections: list[Collection], seeds: list[int | None], used_files: list[tuple[str, Path]]
) -> None:
    """Check the files of several evaluations, which are named after collections and seeds; `run` itself was checked."""
    evaluations = len(collections) * len(seeds)
    if evaluations == 1:
        return
    if is_standard_output(run) or (os.path.exists(run) and not os.path.isfile(run)):
        raise UserError(f"--run writes one file per collection and seed, so it must be a file name, got {run}")
    files = list(used_files)
    for seed in seeds:
        for collection in collections:
            path = run_path(run, collection.name, seed, evaluations)
            check_new_file(path, "--run", *files)
            files.append(("--run", path))


def _load(name: str, **kwargs: Any) -> Model:
    import torch

    # A missing projection is initialised randomly: seed it, so that it is the same in every call.
    torch.manual_seed(options.SEED)
    loaded = load_model(name, **kwargs)
    if has_random_projection(loaded, name):
        note(
            f"Warning: {name} is an encoder without a projection. It was initialised randomly, so the numbers below "
            "are meaningless; train it first with `pylate-flash train`."
        )
    return loaded


def _evaluate(
    collection: Collection,
    loaded: Model,
    name: str,
    seed: int | None,
    index: Path | None,
    scorer: str | None,
    batch_size: int,
    compare_torch: bool,
    systems: dict[str, Run | None],
) -> Evaluated:
    """Encode a collection, and search it with the scorer and everything to compare."""
    from .. import beir
    from ..demo.agreement import compare
    from ..index.catalog import ConcurrentWriteError

    with (
        _new_index(index, loaded, name, Path(collection.data)) as flat,
        explained(kinds=(ValueError, OSError, ConcurrentWriteError)),
    ):
        started = time.perf_counter()
        texts = [collection.queries[query_id] for query_id in collection.qrels]
        embeddings = encode(loaded, texts, is_query=True, batch_size=batch_size, show_progress=notes.is_terminal)
        timings = {"encode_queries": time.perf_counter() - started}

        def search(search_scorer: str | None) -> beir.RetrievalEvaluation:
            return beir.evaluate_retrieval(
                loaded,
                collection.documents,
                collection.queries,
                collection.qrels,
                index=flat,
                scorer=search_scorer,
                metrics=list(METRICS),
                batch_size=batch_size,
                show_progress=notes.is_terminal,
                queries_embeddings=embeddings,
            )

        result = search(scorer)
        output = Evaluated(collection, name, seed, result, timings | result.timings)
        if compare_torch:
            output.theirs = search("torch")
            output.timings["search_by_torch"] = output.theirs.timings["search"]
            output.agreement, output.library = compare(output.theirs, result), title_of(loaded)
        if systems:
            output.compared = compare_systems(systems, flat, collection, embeddings, result.timings["index"])
    return output


@contextmanager
def _new_index(index: Path | None, model: Model, name: str, data: Path) -> Iterator[Flat]:
    """An empty index that records model and corpus; if the evaluation fails, its documents are removed.

    So is the folder, if it is new. An existing folder stays, with anything else in it, and so does an index that could
    not be emptied, or that another process has written to.
    """
    from ..indexes import Flat

    with contextlib.ExitStack() as stack:
        if index is None:
            path, is_new = Path(stack.enter_context(tempfile.TemporaryDirectory()), "index"), False
        else:
            path, is_new = index.resolve(), not os.path.lexists(index)
        with explained(kinds=INDEX_ERRORS):
            flat = Flat(
                path.parent, path.name, override=True, device=str(model.device), show_progress=notes.is_terminal
            )
        try:
            with explained(kinds=INDEX_ERRORS):
                flat.record_model(model, name)
                record_corpus(flat, data)
            yield flat
        except BaseException:
            # Both raise if another process has written to the index, which is then left as it is.
            with contextlib.suppress(*INDEX_ERRORS):
                flat.remove_documents(flat.documents_ids)
                flat.compact()
                if is_new and flat.info().generation:
                    shutil.rmtree(path)
            raise


def _check_index(path: Path, overwrite: bool) -> None:
    check_new_index(path)
    if holds_index(path) and not overwrite:
        raise UserError(f"--index: there is already an index in {path}; --overwrite replaces it")
