"""Retrieval on collections in BEIR's layout, by exact search, of models of PyLate or of sentence-transformers.

    documents, queries, qrels = load_beir_folder("data/cranfield")
    result = evaluate_retrieval(model, documents, queries, qrels)
    result.metrics                 # {"ndcg@10": ..., "map": ..., "recall@100": ..., "mrr@10": ...}

Importing this module needs neither.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import reprlib
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from ._config import backend_in_force
from ._extras import check_installed
from .data.files import Corpus, read_lines, read_records
from .encoding.projection import encode_hidden_states
from .encoding.texts import encode, is_multi_vector_encoder
from .index.search import SearchResult
from .index.store import ADDITION_BYTES
from .indexes import Flat

__all__ = [
    "METRICS", "RetrievalEvaluation", "add_encoded", "evaluate_retrieval", "evaluate_run", "load_beir_folder",
    "prepare_metrics", "recall_of",
]  # fmt: skip

Qrels = Mapping[str, Mapping[str, int]]
METRICS = ("ndcg@10", "map", "recall@100", "mrr@10")
# ranx keeps relevances in 64 bits, and computes with powers and sums of them.
_INTEGER = re.compile("[+-]?[0-9]{1,9}")
_NUMBER = re.compile("[+-]?[0-9.]")
# Batches of documents between two writes to the index: texts are sorted by length within them, so few would waste
# work on padding, and many would leave the progress bar standing still.
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
        `{"id", "text"}` of every document, in the order of the file; `text` is title and text, joined by a space.
    queries
        Id and text of the queries that the split judges, in the order of its file.
    qrels
        For each of them, document ids and relevances.

    Raises
    ------
    ValueError
        If a file is missing, or a line malformed: the message names the file and the line. Among these are repeated
        ids, a judgement given twice with different relevances, and one of a query or document that does not exist.
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
    for where, query_id, document_id, relevance in _read_qrels(files[2]):
        if query_id not in texts:
            raise ValueError(f"{where}: query {query_id!r} is not in {files[1].name}")
        if document_id not in ids:
            raise ValueError(f"{where}: document {document_id!r} is not in {files[0].name}")
        if qrels.setdefault(query_id, {}).setdefault(document_id, relevance) != relevance:
            raise ValueError(
                f"{where}: document {document_id!r} has been judged {qrels[query_id][document_id]} for query "
                f"{query_id!r} before, and {relevance} here"
            )
    return documents, {query_id: texts[query_id] for query_id in qrels}, qrels


@dataclass(frozen=True)
class RetrievalEvaluation:
    """What `evaluate_retrieval` found.

    Attributes
    ----------
    metrics
        Mean of each metric over the queries.
    per_query
        For each metric, its value for every query id.
    run
        For every query id what was retrieved, `{"id", "score"}`, best first.
    timings
        Seconds of the steps that were taken: "encode_documents", "index", "encode_queries", "search",
        "prepare_metrics" (see the function) and "metrics".
    scorer
        What computed the scores.
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
    """Encode a collection, index it exactly, retrieve, and compute metrics by `ranx`.

    The metrics are those of the order that the index returns, in which equal scores are in the order of `documents`.
    A document is not skipped for having the id of the query, as some BEIR data sets ask for.

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
        None: a temporary one. A folder: a new index is built there. A `Flat`: if it is empty the documents are added
        to it, and it remembers the model; otherwise it must hold just these documents, of this model if it remembers
        one, and is searched as it is, without encoding them again. One with a projection gets hidden states.
    k
        Documents retrieved per query: metrics without a cutoff, such as "map", see no more than these.
    batch_size
        Texts encoded at a time.
    scorer
        As in `indexes.Flat`. None: the model's flag, else, for PyLate's models, what `use_scorer` or the environment
        variable `PYLATE_SCORES_BACKEND` says, else "pylate_flash".
    metrics
        Names as `ranx` knows them.
    show_progress
        Draw progress bars, and say what else takes long.
    queries_embeddings
        [L_i, d] of every query of `qrels`, in their order, where they are known: to compare scorers, say. None: they
        are encoded.

    Returns
    -------
    RetrievalEvaluation
        Metrics, their values per query, the retrieved documents, and timings.

    Raises
    ------
    ValueError
        If a metric is unknown or its cutoff exceeds `k`, there is nothing to evaluate, `qrels` name unknown queries or
        documents, `queries_embeddings` are not as many, or `index` holds other documents or another model's, or a
        folder already holds an index.
    RuntimeError
        If `ranx` cannot write what it keeps. The message says what to set.
    MissingExtraError
        If `ranx` is not installed. The message names the extra.
    """
    # Before anything is encoded.
    _check_metrics(metrics, "evaluate_retrieval", k)
    ids = [document["id"] for document in documents]
    _check_judgements(set(ids), queries, qrels)
    if queries_embeddings is not None and len(queries_embeddings) != len(qrels):
        raise ValueError(
            f"queries_embeddings: {len(queries_embeddings)}; expected those of the {len(qrels)} queries of qrels"
        )
    with contextlib.ExitStack() as stack:
        if index is None:
            index = Path(stack.enter_context(tempfile.TemporaryDirectory()), "index")
        if not isinstance(index, Flat):
            index = Flat(Path(index).parent, Path(index).name, show_progress=show_progress)
            if len(index):
                raise ValueError(
                    f"index: {index.index_path} already holds an index of {len(index)} documents: to search it as it "
                    "is pass indexes.Flat(folder, name), to build it anew indexes.Flat(folder, name, override=True)"
                )
        elif len(index) and set(index.documents_ids) != set(ids):
            raise ValueError(
                f"index: {index.index_path} holds {len(index)} documents that are not the {len(ids)} documents to "
                "evaluate on"
            )
        timings: dict[str, float] = {}
        if len(index):
            index.check_model(model)
        else:
            # What is no module has no weights to remember it by.
            if isinstance(model, torch.nn.Module):
                index.record_model(model)
            encoding = (
                functools.partial(encode, model, is_query=False)
                if index.projection is None
                else functools.partial(encode_hidden_states, model)
            )
            encoding = functools.partial(encoding, batch_size=batch_size)
            add_encoded(index, documents, encoding, batch_size, timings, show_progress)
        if queries_embeddings is None:
            with _timed(timings, "encode_queries"):
                queries_embeddings = encode(
                    model,
                    [queries[query_id] for query_id in qrels],
                    is_query=True,
                    batch_size=batch_size,
                    show_progress=show_progress,
                )
        scorer = _scorer_of(model) if scorer is None else scorer
        scorer = "pylate_flash" if scorer == "auto" else scorer
        stack.callback(setattr, index, "scorer", index.scorer)
        index.scorer = scorer
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
    """Encode documents and add them to an index in their order, some at a time, so that memory stays bounded.

    Parameters
    ----------
    index
        The index.
    documents
        `{"id", "text"}` of every document.
    encode
        What the index keeps of texts, [L_i, d] of each.
    batch_size
        Texts that it encodes at a time.
    timings
        Where the seconds that it takes are added, as "encode_documents" and "index".
    show_progress
        Draw a progress bar.
    """
    timings = {} if timings is None else timings
    step = batch_size * _BATCHES_PER_STEP
    ids: list[str] = []
    embeddings: list[Any] = []
    with tqdm(total=len(documents), desc="Encoding documents", unit="doc", disable=not show_progress) as progress:
        for start in range(0, len(documents), step):
            some = documents[start : start + step]
            with _timed(timings, "encode_documents"):
                embeddings += encode([document["text"] for document in some])
            ids += [document["id"] for document in some]
            progress.update(len(some))
            if start + step >= len(documents) or sum(array.nbytes for array in embeddings) >= ADDITION_BYTES:
                with _timed(timings, "index"):
                    index.add_documents(ids, embeddings)
                ids, embeddings = [], []


def _scorer_of(model: Any) -> str:
    """What scores a model's embeddings where nobody said."""
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
    """Every metric must be known, and `k` documents, if that many are found, be enough for it."""
    check_installed("ranx", needed_by, "eval")
    try:
        from ranx.metrics import metric_switch
    except (RuntimeError, OSError) as error:
        # Numba keeps what it compiles beside ranx or in the user's home, and ir_datasets makes a folder in the home.
        raise RuntimeError(
            f"{needed_by} needs ranx, which cannot write what it keeps: set NUMBA_CACHE_DIR and IR_DATASETS_HOME to "
            f"folders that can be written to ({error})"
        ) from error

    if isinstance(metrics, str) or not metrics:
        raise ValueError(f"metrics must be a list of at least one name, got {metrics!r}")
    for metric in metrics:
        name, at, cutoff = metric.partition("-l")[0].partition("@")
        try:
            metric_switch(name.partition(".")[0])
            # The number of rank-biased precision is its persistence, not a cutoff.
            depth = int(cutoff) if at and name != "rbp" else 0
            if depth < 0:
                raise ValueError("its cutoff is below 0")
        except ValueError as error:
            raise ValueError(f"metrics: {metric!r} is no metric of ranx: {error}") from None
        if k is not None and depth > k:
            raise ValueError(f"metrics: {metric!r} needs {cutoff} documents per query, but k is {k}")


def _check_judgements(ids: set[str], queries: Mapping[str, str], qrels: Qrels) -> None:
    if not ids or not qrels:
        raise ValueError(f"there is nothing to evaluate: {len(ids)} documents, {len(qrels)} judged queries")
    for query_id, judged in qrels.items():
        if query_id not in queries:
            raise ValueError(f"qrels: query {query_id!r} is not in queries")
        for document_id in judged:
            if document_id not in ids:
                raise ValueError(f"qrels: document {document_id!r} of query {query_id!r} is not in documents")


@functools.cache
def prepare_metrics(metrics: tuple[str, ...] = METRICS, show_progress: bool = False) -> None:
    """Let `ranx` compile metrics, half a minute of work at their very first use, or load what it has compiled.

    Parameters
    ----------
    metrics
        Names as `ranx` knows them.
    show_progress
        Say so on standard error.
    """
    if show_progress:
        print("Loading the metrics of ranx, which compiles them once ...", file=sys.stderr, flush=True)
    evaluate_run({"q": [SearchResult(id="d", score=1.0)]}, {"q": {"d": 1}}, metrics)


def evaluate_run(
    run: Mapping[str, Sequence[SearchResult]], qrels: Qrels, metrics: Sequence[str] = METRICS
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Compute metrics of what was found, by whatever.

    Parameters
    ----------
    run
        For every query id of `qrels` what was found, `{"id", "score"}`, best first: the order counts, not the scores.
    qrels
        For every query id, document ids and relevances; 1 and above is relevant.
    metrics
        Names as `ranx` knows them.

    Returns
    -------
    (dict, dict)
        Mean of each metric over the queries, and for each metric its value for every query id.

    Raises
    ------
    ValueError
        If a metric is unknown, `qrels` has no query, `run` lacks one of its queries, or a query found a document twice.
    RuntimeError
        If `ranx` cannot write what it keeps. The message says what to set.
    MissingExtraError
        If `ranx` is not installed. The message names the extra.
    """
    _check_metrics(metrics, "evaluate_run")
    if not qrels:
        raise ValueError("qrels must hold at least one query, got none")
    for query_id in qrels:
        if query_id not in run:
            raise ValueError(f"run has nothing for query {query_id!r} of qrels, where a query without documents has []")
        ids = [result["id"] for result in run[query_id]]
        if len(set(ids)) < len(ids):
            twice = next(id_ for place, id_ in enumerate(ids) if id_ in ids[:place])
            raise ValueError(f"run: query {query_id!r} has document {twice!r} more than once")
    # ranx gets numbers for ids, as it would compile its functions anew for ids of another length, and one query at a
    # time, as queries are judged on different numbers of documents.
    from ranx import evaluate as ranx_evaluate

    per_query: dict[str, dict[str, float]] = {metric: {} for metric in metrics}
    with warnings.catch_warnings():
        # Numba's warning, while it compiles ranx, about the cast of a loop index.
        warnings.filterwarnings("ignore", message="unsafe cast from uint64 to int64")
        for query_id, judged in qrels.items():
            numbers = {document_id: number for number, document_id in enumerate(judged)}
            relevances = sorted(((numbers[id_], value) for id_, value in judged.items()), key=lambda row: -row[1])
            results = run[query_id]
            # A document that was not judged has a number of its own.
            found = [
                (numbers.get(result["id"], len(judged) + rank), len(results) - rank)
                for rank, result in enumerate(results)
            ]
            judgements, ranking = (np.array(rows, dtype=np.float64).reshape(1, -1, 2) for rows in (relevances, found))
            for metric in metrics:
                per_query[metric][query_id] = float(ranx_evaluate(judgements, ranking, metric))
    return {metric: float(np.mean(list(values.values()))) for metric, values in per_query.items()}, per_query


def recall_of(found: Sequence[Sequence[SearchResult]], exact: Sequence[Sequence[SearchResult]], k: int) -> float:
    """The share of exact search's best documents that another search has found, among as many.

    Parameters
    ----------
    found, exact
        For every query, `{"id", "score"}` of the documents, best first, of at least `k` documents: fewer count as not
        found.
    k
        How many of each query.

    Returns
    -------
    float
        Mean over the queries: 1 where all of the exact lists' first `k` are among the first `k` found.

    Raises
    ------
    ValueError
        If the two are not of the same queries, there are none, or an exact list has fewer than `k` documents.
    """
    if len(found) != len(exact) or not exact:
        raise ValueError(f"found and exact must be lists of the same queries, got {len(found)} and {len(exact)}")
    if k < 1 or min(map(len, exact)) < k:
        raise ValueError(
            f"k must be at least 1 and at most {min(map(len, exact))}, the length of a list of exact, got {k}"
        )
    shares = [
        len({hit["id"] for hit in ours[:k]} & {hit["id"] for hit in best[:k]}) / k
        for ours, best in zip(found, exact, strict=True)
    ]
    return float(np.mean(shares))


def _read_qrels(file: Path) -> Iterator[tuple[str, str, str, int]]:
    """Place, query id, document id and relevance of every judgement."""
    first, judgements = True, 0
    with file.open("rb") as lines:
        for _, where, line in read_lines(lines, file):
            fields = line.split("\t")
            if len(fields) != 3:
                raise ValueError(
                    f"{where}: expected query id, document id and relevance, tab-separated; got {len(fields)} field(s)"
                )
            relevance = fields[2].strip()
            if _INTEGER.fullmatch(relevance):
                judgements += 1
                yield where, fields[0], fields[1], int(relevance)
            elif not first or _NUMBER.match(relevance):
                digits = " of at most 9 digits" if relevance.lstrip("+-").isdigit() else ""
                raise ValueError(f"{where}: the relevance must be an integer{digits}, got {reprlib.repr(fields[2])}")
            first = False
    if not judgements:
        raise ValueError(f"{file} holds no judgements")
