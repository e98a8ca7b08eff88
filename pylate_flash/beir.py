"""Evaluation of PyLate or sentence-transformers models by exact retrieval on collections in BEIR's layout.

    documents, queries, qrels = load_beir_folder("data/cranfield")
    result = evaluate_retrieval(model, documents, queries, qrels)
    result.metrics                 # {"ndcg@10": ..., "map": ..., "recall@100": ..., "mrr@10": ...}

Importing this module needs neither library.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from ._config import backend_in_force
from ._extras import UnwritableCacheError, check_installed
from .data.files import Corpus, read_qrels, read_records
from .encoding.projection import encode_hidden_states
from .encoding.texts import encode, is_multi_vector_encoder
from .index.arguments import check_distinct, checked_list, column_of, sequences_of
from .index.search import SearchResult
from .index.store import ADDITION_BYTES
from .indexes import Flat
from .ops.checks import check_integer

__all__ = [
    "METRICS", "RetrievalEvaluation", "add_encoded", "evaluate_retrieval", "evaluate_run", "load_beir_folder",
    "prepare_metrics", "recall_of",
]  # fmt: skip

Qrels = Mapping[str, Mapping[str, int]]
METRICS = ("ndcg@10", "map", "recall@100", "mrr@10")
# Document batches encoded per step. Texts are sorted by length within a step, so a small step wastes work on padding,
# and a large one stalls the progress bar.
_BATCHES_PER_STEP = 16


def load_beir_folder(
    path: str | os.PathLike[str], split: str = "test"
) -> tuple[list[dict[str, str]], dict[str, str], dict[str, dict[str, int]]]:
    """Load a collection in BEIR's layout from a folder.

        corpus.jsonl         {"_id": "d1", "title": "optional", "text": "..."} per line
        queries.jsonl        {"_id": "q1", "text": "..."} per line
        qrels/<split>.tsv    query id, document id and an integer relevance per line, tab-separated; a header is skipped

    Parameters
    ----------
    path
        The folder.
    split
        Which file of `qrels/`.

    Returns
    -------
    documents
        `{"id", "text"}` of every document, in file order; `text` is title and text, joined by a space.
    queries
        Id and text of the queries that the split judges, in the order of its file.
    qrels
        For each of these queries, document ids and relevances.

    Raises
    ------
    ValueError
        If a file is missing, or a line malformed: the message names the file and the line. This includes repeated ids,
        a judgement repeated with another relevance, and a judgement of a query or document that does not exist.
    """
    folder = Path(path)
    files = [folder / "corpus.jsonl", folder / "queries.jsonl", folder / "qrels" / f"{split}.tsv"]
    missing = [str(file.relative_to(folder)) for file in files if not file.is_file()]
    if missing:
        splits = ", ".join(sorted(file.stem for file in folder.glob("qrels/*.tsv"))) or "none"
        raise ValueError(
            f"{folder} is not a BEIR folder with a split {split!r}: expected corpus.jsonl, queries.jsonl and "
            f"qrels/{split}.tsv, missing {', '.join(missing)}; splits found: {splits}"
        )
    documents = [{"id": document.id, "text": document.text} for document in Corpus(files[0])]
    ids = {document["id"] for document in documents}
    with files[1].open("rb") as lines:
        texts = {query_id: record["text"] for query_id, record in read_records(lines, files[1])}
    qrels: dict[str, dict[str, int]] = {}
    for where, query_id, document_id, relevance in read_qrels(files[2], texts, ids):
        if query_id not in texts:
            raise ValueError(f"{where}: query {query_id!r} is not in {files[1].name}")
        if document_id not in ids:
            raise ValueError(f"{where}: document {document_id!r} is not in {files[0].name}")
        if qrels.setdefault(query_id, {}).setdefault(document_id, relevance) != relevance:
            raise ValueError(
                f"{where}: document {document_id!r} is judged {relevance} for query {query_id!r}, but was judged "
                f"{qrels[query_id][document_id]} before"
            )
    return documents, {query_id: texts[query_id] for query_id in qrels}, qrels


@dataclass(frozen=True)
class RetrievalEvaluation:
    """Result of `evaluate_retrieval`.

    Attributes
    ----------
    metrics
        Mean of each metric over the queries.
    per_query
        For each metric, its value for every query id.
    run
        For every query id, the retrieved documents, `{"id", "score"}`, best first.
    timings
        Seconds per step that ran: "encode_documents", "index", "encode_queries", "search", "prepare_metrics" (see the
        function) and "metrics".
    scorer
        Name of the scorer that computed the scores.
    """

    metrics: dict[str, float]
    per_query: dict[str, dict[str, float]]
    run: dict[str, list[SearchResult]]
    timings: dict[str, float]
    scorer: str


def evaluate_retrieval(
    model: Any,
    documents: Sequence[Mapping[str, str]],
    queries: Mapping[str, str],
    qrels: Qrels,
    *,
    index: Flat | str | os.PathLike[str] | None = None,
    k: int = 100,
    batch_size: int = 32,
    scorer: str | None = None,
    metrics: Sequence[str] = METRICS,
    show_progress: bool = True,
    queries_embeddings: Sequence[Any] | None = None,
) -> RetrievalEvaluation:
    """Encode a collection, index it exactly, retrieve, and compute metrics with `ranx`.

    The metrics use the order that the index returns, in which equal scores are in the order of `documents`. A document
    with the id of the query is not skipped, though some BEIR data sets require it.

    Parameters
    ----------
    model
        A ColBERT model of this package or of PyLate, or a `MultiVectorEncoder` of sentence-transformers.
    documents
        `{"id", "text"}` of every document, as from `load_beir_folder`.
    queries
        Id and text. Those without judgements are left out.
    qrels
        For every query id, document ids and relevances; 1 and above is relevant.
    index
        None: a temporary index. A folder: a new index is built there. A `Flat`: if it is empty the documents are added
        to it and the model is recorded; otherwise it must hold exactly these documents, encoded by this model if it
        records one, and is searched without encoding them again. An index with a projection stores hidden states.
    k
        Documents retrieved per query: metrics without a cutoff, such as "map", are computed from these alone.
    batch_size
        Texts encoded at a time.
    scorer
        As in `indexes.Flat`. None: the model's flag, else, for PyLate's models, that of `use_scorer` or the environment
        variable `PYLATE_SCORES_BACKEND`, else "pylate_flash".
    metrics
        Metric names of `ranx`.
    show_progress
        Draw progress bars, and print a message before other slow steps.
    queries_embeddings
        [L_i, d] of every query of `qrels`, in their order, if already computed, for example to compare scorers. None:
        they are encoded.

    Returns
    -------
    RetrievalEvaluation
        Metrics, their values per query, the retrieved documents, and timings.

    Raises
    ------
    ValueError, TypeError
        If an argument has another form, a metric or `scorer` is unknown, a cutoff exceeds `k`, there is nothing to
        evaluate, an id of `documents` repeats, `qrels` name unknown queries or documents, there are not as many
        `queries_embeddings`, `index` holds other documents or another model's, or a folder holds an index.
    RuntimeError
        If `ranx` cannot write its cache. The message says what to set.
    MissingExtraError
        If `ranx` is not installed. The message names the extra.
    """
    # Check before anything is encoded.
    check_integer("k", k, 1)
    _check_metrics(metrics, "evaluate_retrieval", k)
    check_integer("batch_size", batch_size, 1)
    ids = column_of("documents", documents, "id", "text", kind=str)
    check_distinct("documents", ids)
    _check_judgements(set(ids), queries, qrels)
    if queries_embeddings is not None:
        queries_embeddings = sequences_of("queries_embeddings", queries_embeddings)
        if (given := len(queries_embeddings)) != len(qrels):
            raise ValueError(f"queries_embeddings: {given}; expected {len(qrels)}, one per query of qrels")
    with contextlib.ExitStack() as stack:
        if index is None:
            index = Path(stack.enter_context(tempfile.TemporaryDirectory()), "index")
        if not isinstance(index, Flat):
            if not isinstance(index, str | os.PathLike):
                raise TypeError(f"index must be a Flat, a folder or None, got {type(index).__name__}")
            index = Flat(Path(index).parent, Path(index).name, show_progress=show_progress)
            if len(index):
                raise ValueError(
                    f"index: {index.index_path} already holds an index of {len(index)} documents: to search it, pass "
                    "indexes.Flat(folder, name); to rebuild it, indexes.Flat(folder, name, override=True)"
                )
        elif len(index) and set(index.documents_ids) != set(ids):
            raise ValueError(
                f"index: {index.index_path} holds {len(index)} documents that are not the {len(ids)} documents to "
                "evaluate on"
            )
        scorer = _scorer_of(model) if scorer is None else scorer
        scorer = "pylate_flash" if scorer == "auto" else scorer
        stack.callback(setattr, index, "scorer", index.scorer)
        index.scorer = scorer
        timings: dict[str, float] = {}
        if len(index):
            index.check_model(model)
        else:
            # A model is recorded by its weights, which only a module has.
            if isinstance(model, torch.nn.Module):
                index.record_model(model)
            encoding = functools.partial(encode_hidden_states, model, batch_size=batch_size)
            if index.projection is None:
                encoding = functools.partial(encode, model, is_query=False, batch_size=batch_size)
            add_encoded(index, documents, encoding, batch_size, timings, show_progress)
        if queries_embeddings is None:
            with _timed(timings, "encode_queries"):
                texts = [queries[query_id] for query_id in qrels]
                queries_embeddings = encode(
                    model, texts, is_query=True, batch_size=batch_size, show_progress=show_progress
                )
        with _timed(timings, "search"):
            retrieved = index(queries_embeddings, k=k)
    run = dict(zip(qrels, retrieved, strict=True))
    with _timed(timings, "prepare_metrics"):
        prepare_metrics(tuple(metrics), show_progress)
    with _timed(timings, "metrics"):
        means, per_query = evaluate_run(run, qrels, metrics)
    return RetrievalEvaluation(means, per_query, run, timings, scorer)


def add_encoded(
    index: Flat,
    documents: Sequence[Mapping[str, str]],
    encode: Callable[[list[str]], Sequence[Any]],
    batch_size: int = 32,
    timings: dict[str, float] | None = None,
    show_progress: bool = False,
) -> None:
    """Encode documents in chunks and add them to an index in order, so that memory stays bounded.

    Parameters
    ----------
    index
        The index.
    documents
        `{"id", "text"}` of every document.
    encode
        Function from texts to the embeddings that the index stores, [L_i, d] each.
    batch_size
        Number of texts that `encode` processes at a time; another value than an integer of at least 1 is an error.
    timings
        Dictionary to which the elapsed seconds are added, as "encode_documents" and "index".
    show_progress
        Draw a progress bar.
    """
    check_integer("batch_size", batch_size, 1)
    column_of("documents", documents, "id", "text", kind=str)
    timings = {} if timings is None else timings
    step = batch_size * _BATCHES_PER_STEP
    ids: list[str] = []
    embeddings: list[Any] = []
    with tqdm(total=len(documents), desc="Encoding documents", unit="doc", disable=not show_progress) as progress:
        for start in range(0, len(documents), step):
            chunk = documents[start : start + step]
            with _timed(timings, "encode_documents"):
                embeddings += encode([document["text"] for document in chunk])
            ids += [document["id"] for document in chunk]
            progress.update(len(chunk))
            if start + step >= len(documents) or sum(array.nbytes for array in embeddings) >= ADDITION_BYTES:
                with _timed(timings, "index"):
                    index.add_documents(ids, embeddings)
                ids, embeddings = [], []


def _scorer_of(model: Any) -> str:
    """Return the default scorer of a model's embeddings."""
    flag = getattr(model, "scorer", "auto")
    if is_multi_vector_encoder(model):
        return flag
    return backend_in_force(None if flag == "auto" else flag)


@contextlib.contextmanager
def _timed(timings: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    timings[name] = timings.get(name, 0.0) + time.perf_counter() - start


def _check_metrics(metrics: Sequence[str], needed_by: str, k: int | None = None) -> None:
    """Raise unless every metric is known and its cutoff is at most `k`, if given."""
    check_installed("ranx", needed_by, "eval")
    try:
        from ranx.meta.evaluate import extract_metric_and_params
        from ranx.metrics import metric_switch
    except (RuntimeError, OSError) as error:
        # Numba caches compiled code next to ranx or in the user's home, and ir_datasets creates a folder in the home.
        raise UnwritableCacheError(
            f"{needed_by} needs ranx, which cannot write its caches: set NUMBA_CACHE_DIR and IR_DATASETS_HOME to "
            f"writable folders ({error})"
        ) from error

    listed = isinstance(metrics, Collection) and not isinstance(metrics, str) and len(metrics) > 0
    if not listed or not all(isinstance(metric, str) for metric in metrics):
        raise ValueError(f"metrics must be a list of at least one name, got {metrics!r}")
    for metric in metrics:
        try:
            # For rank-biased precision the number is the persistence, below 1, not a cutoff.
            name, depth, _ = extract_metric_and_params(metric)
            metric_switch(name)
            if depth < 0:
                raise ValueError("its cutoff is below 0")
        except ValueError as error:
            raise ValueError(f"metrics: {metric!r} is not a metric of ranx: {error}") from None
        if k is not None and depth > k:
            raise ValueError(f"metrics: {metric!r} needs {depth} documents per query, but k is {k}")


def _check_judgements(ids: set[str], queries: Mapping[str, str], qrels: Qrels) -> None:
    _check_relevances(qrels)
    if not isinstance(queries, Mapping):
        raise TypeError(f"queries must be a dictionary of texts by id, got {type(queries).__name__}")
    if not ids or not qrels:
        raise ValueError(f"there is nothing to evaluate: {len(ids)} documents, {len(qrels)} judged queries")
    for query_id, judged in qrels.items():
        if query_id not in queries:
            raise ValueError(f"qrels: query {query_id!r} is not in queries")
        if not isinstance(queries[query_id], str):
            raise TypeError(f"queries[{query_id!r}] must be a string, got {queries[query_id]!r:.100}")
        for document_id in judged:
            if document_id not in ids:
                raise ValueError(f"qrels: document {document_id!r} of query {query_id!r} is not in documents")


def _check_relevances(qrels: Qrels) -> None:
    if not isinstance(qrels, Mapping):
        raise TypeError(f"qrels must be a dictionary of judgements by query id, got {type(qrels).__name__}")
    for query_id, judged in qrels.items():
        if not isinstance(judged, Mapping):
            raise TypeError(
                f"qrels[{query_id!r}] must be a dictionary of relevances by document id, got {judged!r:.100}"
            )
        for id_, value in judged.items():
            if not isinstance(value, Real) or not abs(value) <= sys.float_info.max:
                raise ValueError(f"qrels[{query_id!r}][{id_!r}] must be a finite number, got {value!r:.100}")


@functools.cache
def prepare_metrics(metrics: tuple[str, ...] = METRICS, show_progress: bool = False) -> None:
    """Make `ranx` compile metrics, which takes half a minute on first use, or load the compiled ones from its cache.

    Parameters
    ----------
    metrics
        Metric names of `ranx`.
    show_progress
        Print a message to standard error.
    """
    if show_progress:
        print("Loading the metrics of ranx, which compiles them once ...", file=sys.stderr, flush=True)
    evaluate_run({"q": [SearchResult(id="d", score=1.0)]}, {"q": {"d": 1}}, metrics)


def evaluate_run(
    run: Mapping[str, Sequence[SearchResult]], qrels: Qrels, metrics: Sequence[str] = METRICS
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Compute metrics of the results of any search.

    Parameters
    ----------
    run
        For every query id of `qrels`, the retrieved documents, `{"id", "score"}`, best first: only the order counts.
    qrels
        For every query id, document ids and relevances; 1 and above is relevant.
    metrics
        Metric names of `ranx`.

    Returns
    -------
    (dict, dict)
        Mean of each metric over the queries, and for each metric its value for every query id.

    Raises
    ------
    TypeError, ValueError
        If an argument has another form, a metric is unknown, `qrels` is empty, `run` lacks one of its queries, or a
        document repeats in a query.
    RuntimeError
        If `ranx` cannot write its cache. The message says what to set.
    MissingExtraError
        If `ranx` is not installed. The message names the extra.
    """
    _check_metrics(metrics, "evaluate_run")
    _check_relevances(qrels)
    if not qrels:
        raise ValueError("qrels must hold at least one query, got none")
    if not isinstance(run, Mapping):
        raise TypeError(f"run must be a dictionary of results by query id, got {type(run).__name__}")
    for query_id in qrels:
        if query_id not in run:
            raise ValueError(f"run has no list for query {query_id!r} of qrels; expected one, [] if it found none")
        ids = column_of(f"run[{query_id!r}]", run[query_id], "id")
        if len(set(ids)) < len(ids):
            repeated = next(id_ for position, id_ in enumerate(ids) if id_ in ids[:position])
            raise ValueError(f"run: query {query_id!r} has document {repeated!r} more than once")
    # Pass integer ids to ranx, which would recompile its functions for string ids of another length, and one query at a
    # time, as queries are judged on different numbers of documents.
    from ranx import evaluate as ranx_evaluate

    per_query: dict[str, dict[str, float]] = {metric: {} for metric in metrics}
    with warnings.catch_warnings():
        # Numba warns about the cast of a loop index while it compiles ranx.
        warnings.filterwarnings("ignore", message="unsafe cast from uint64 to int64")
        for query_id, judged in qrels.items():
            numbers = {document_id: number for number, document_id in enumerate(judged)}
            relevances = sorted(((numbers[id_], value) for id_, value in judged.items()), key=lambda row: -row[1])
            results = run[query_id]
            # Unjudged documents get numbers of their own.
            hits = [
                (numbers.get(result["id"], len(judged) + rank), len(results) - rank)
                for rank, result in enumerate(results)
            ]
            judgements, ranking = (np.array(rows, dtype=np.float64).reshape(1, -1, 2) for rows in (relevances, hits))
            for metric in metrics:
                per_query[metric][query_id] = float(ranx_evaluate(judgements, ranking, metric))
    return {metric: float(np.mean(list(values.values()))) for metric, values in per_query.items()}, per_query


def recall_of(results: Sequence[Sequence[SearchResult]], exact: Sequence[Sequence[SearchResult]], k: int) -> float:
    """Recall at `k` of another search with respect to exact search.

    Parameters
    ----------
    results, exact
        For every query, `{"id", "score"}` of at least `k` documents, best first; documents missing from a shorter list
        count as not found.
    k
        Number of documents per query.

    Returns
    -------
    float
        Mean over the queries: 1 if the first `k` documents of every exact list are among the first `k` found.

    Raises
    ------
    TypeError, ValueError
        If an argument has another form, the lists differ in length or are empty, or `k` is not an integer from 1 to the
        shortest exact list's length.
    """
    found, best = (
        [
            column_of(f"{name}[{i}]", hits, "id")
            for i, hits in enumerate(checked_list(name, lists, "results of each query"))
        ]
        for name, lists in (("results", results), ("exact", exact))
    )
    if len(results) != len(exact) or not exact:
        raise ValueError(f"results and exact must be lists of the same queries, got {len(results)} and {len(exact)}")
    shortest = min(map(len, exact))
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or not 1 <= k <= shortest:
        raise ValueError(
            f"k must be an integer of at least 1 and at most {shortest}, the length of a list of exact, got {k!r:.100}"
        )
    shares = [len({*ids[:k]} & {*best_ids[:k]}) / k for ids, best_ids in zip(found, best, strict=True)]
    return float(np.mean(shares))
