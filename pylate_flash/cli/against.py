"""`evaluate --against`: compare other indexes of the same embeddings with exact search."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from .._extras import check_installed
from .collections import Collection
from .common import UserError, console, explained
from .files import check_file
from .indexing import check_codec

if TYPE_CHECKING:
    from ..index.search import SearchResult
    from ..indexes import Flat

Results = list[list["SearchResult"]]
Run = dict[str, list["SearchResult"]]
# Documents retrieved, and the depths at which lists are compared with those of exact search.
K, DEPTHS = 100, (10, 100)
# Documents rescored with 16 bits, in an index that also stores those.
RESCORED = 2 * K
PLAID = "plaid"


@dataclass(frozen=True)
class Compared:
    """A system compared: its quality, and its costs if it was built and searched here.

    `recall` maps a depth to the recall of exact search's best documents.
    """

    system: str
    metrics: dict[str, float]
    recall: dict[int, float]
    build_seconds: float | None = None
    milliseconds_a_query: float | None = None
    bytes_a_token: float | None = None

    def record(self) -> dict[str, Any]:
        """The fields as JSON values."""
        fields = asdict(self)
        return {**fields, "recall": {f"exact@{depth}": value for depth, value in self.recall.items()}}


def check_systems(against: str, collections: Sequence[Collection]) -> dict[str, Run | None]:
    """Parse and check `--against`: each name maps to its run if it is a file, or to None if it is a kind of index."""
    systems: dict[str, Run | None] = {name.strip(): None for name in against.split(",")}
    for name in systems:
        if name == PLAID:
            check_installed("pylate", "--against plaid", "pylate", title="PyLate")
        elif os.path.exists(name) or os.sep in name or "." in name:
            check_file(Path(name), "--against: ")
            if len(collections) > 1:
                raise UserError(f"--against {name} is a run of one collection, but --data names {len(collections)}")
            with explained(f"--against {name}: "):
                run = systems[name] = read_run(Path(name))
            if not run.keys() & collections[0].qrels.keys():
                raise UserError(f"--against {name} has no results for any query of {collections[0].name}")
        else:
            from ..indexes import Flat

            expected = f"{PLAID}, a run file, or a storage type of our index"
            with explained(f"--against {name or repr(name)}: expected {expected}: "):
                Flat(None, dtype=name, device="cpu")
            check_codec(name, "--against")
    return systems


def compare_systems(
    systems: Mapping[str, Run | None], exact: Flat, collection: Collection, embeddings: list[Any], build_seconds: float
) -> list[Compared]:
    """Search the exact index of a collection, built in `build_seconds`, and each system over the same embeddings.

    `embeddings` are those of the queries in its `qrels`.
    """
    from ..beir import evaluate_run, recall_of
    from ..indexes import Flat

    ids = exact.documents_ids
    (documents,) = exact.get_documents_embeddings([ids])
    best, milliseconds = _searched(exact, embeddings)
    tokens = max(1, sum(map(len, documents)))

    def compared(name: str, results: Results, *costs: float | None) -> Compared:
        metrics, _ = evaluate_run(dict(zip(collection.qrels, results, strict=True)), collection.qrels)
        recall = {depth: recall_of(results, best, min(depth, len(ids))) for depth in DEPTHS}
        return Compared(name, metrics, recall, *costs)

    rows = [compared("exact", best, build_seconds, milliseconds, exact.info().scored_bytes / tokens)]
    for name, run in systems.items():
        if run is not None:
            rows.append(compared(Path(name).name, [run.get(query_id, [])[:K] for query_id in collection.qrels]))
            continue
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            index: Any
            if name == PLAID:
                index = _plaid(folder, exact, ids, documents)
            else:
                index = Flat(folder, "index", dtype=name, device=exact.device, show_progress=False)
                index.add_documents(ids, documents)
            built = time.perf_counter() - started
            options = {"rescore": RESCORED} if "+" in name else {}
            results, milliseconds = _searched(index, embeddings, **options)
            files = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
            # Bytes read per token; rescoring reads more, but for few documents.
            size = files if name == PLAID else index.info().scored_bytes
            rows.append(compared(name, results, built, milliseconds, size / tokens))
            del index
    return rows


def _plaid(folder: str, exact: Flat, ids: list[str], documents: list[Any]) -> Any:
    from pylate import indexes

    index = indexes.PLAID(folder, "index", override=True, device=str(exact.device), show_progress=False)
    return index.add_documents(documents_ids=ids, documents_embeddings=documents)


def _searched(index: Callable[..., Any], embeddings: list[Any], **options: Any) -> tuple[Results, float]:
    """The results of an index, and milliseconds per query; a first search warms up loading and compilation."""
    index(embeddings[:1], k=K, **options)
    started = time.perf_counter()
    results = index(embeddings, k=K, **options)
    return results, 1e3 * (time.perf_counter() - started) / len(embeddings)


def plain_table(labels: Sequence[str], title: str) -> Table:
    """A table of names and numbers that fits 80 columns; long names are folded."""
    numbers = (Column(label, justify="right", no_wrap=True) for label in labels)
    box: dict[str, Any] = {"box": SIMPLE_HEAD, "show_edge": False, "padding": (0, 0, 0, 1)}
    return Table(Column(overflow="fold"), *numbers, title=title, title_justify="left", title_style="bold", **box)


def show_table(table: Table) -> None:
    """Print a table at 80 columns or more: a narrower terminal wraps lines instead of truncating numbers."""
    Console(width=max(80, console.width)).print(table)


def comparison_table(rows: Sequence[Compared], title: str) -> Table:
    """The table of quality, recall of exact search's best documents, and costs, one row per system."""
    names = ["nDCG@10", "R@100", *(f"exact@{depth}" for depth in DEPTHS), "build s", "ms/query", "B/token"]
    table = plain_table(names, title)
    for row in rows:
        quality = [f"{row.metrics[name]:.4f}" for name in ("ndcg@10", "recall@100")]
        recall = [f"{row.recall[depth]:.4f}" for depth in DEPTHS]
        costs = [row.build_seconds, row.milliseconds_a_query, row.bytes_a_token]
        known = ["" if cost is None else f"{cost:.{digits}f}" for cost, digits in zip(costs, (2, 2, 1), strict=True)]
        table.add_row(row.system, *quality, *recall, *known)
    return table


# Runs, in TREC's format


def read_run(path: Path) -> Run:
    """Read a TREC run file: results per query, best first; a ValueError names a malformed line."""
    from ..data.files import read_lines
    from ..index.search import SearchResult

    run: dict[str, dict[str, float]] = {}
    with path.open("rb") as lines:
        for _, where, line in read_lines(lines, path):
            try:
                query_id, _, document_id, _, text, _ = line.split()
                score = float(text)
                if math.isnan(score):
                    raise ValueError
            except ValueError:
                raise ValueError(
                    f"{where}: expected query id, Q0, document id, rank, score and a name, got {line!r:.100}"
                ) from None
            scores = run.setdefault(query_id, {})
            if document_id in scores:
                raise ValueError(f"{where}: query {query_id!r} has document {document_id!r} more than once")
            scores[document_id] = score
    return {
        query_id: [
            SearchResult(id=id_, score=scores[id_]) for id_ in sorted(scores, key=scores.__getitem__, reverse=True)
        ]
        for query_id, scores in run.items()
    }


def check_run_ids(collections: Sequence[Collection]) -> None:
    """Reject ids with blanks, which separate the fields of a TREC run file."""
    for collection in collections:
        for id_ in (*collection.qrels, *(document["id"] for document in collection.documents)):
            if len(id_.split()) != 1:
                raise UserError(
                    f"--run: the id {id_!r:.100} of {collection.name} contains whitespace, which a TREC run cannot hold"
                )


def run_text(run: Mapping[str, Sequence[SearchResult]]) -> str:
    """A run as the text of a TREC run file."""
    return "".join(
        f"{query_id} Q0 {hit['id']} {rank} {hit['score']:.6f} pylate_flash\n"
        for query_id, hits in run.items()
        for rank, hit in enumerate(hits, start=1)
    )
