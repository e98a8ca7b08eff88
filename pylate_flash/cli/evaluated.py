"""The results of `evaluate`, as tables, files and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ..demo.job import METRICS, versions
from .against import Compared, comparison_table, plain_table, run_text, show_table
from .collections import Collection
from .common import say
from .files import write_file
from .indexing import counted

if TYPE_CHECKING:
    from ..beir import RetrievalEvaluation
    from ..demo.agreement import Agreement


@dataclass
class Evaluated:
    """The evaluation of a model (of a seed, or None) on a collection; `theirs` is by the torch scorer."""

    collection: Collection
    model: str
    seed: int | None
    result: RetrievalEvaluation
    timings: dict[str, float]
    theirs: RetrievalEvaluation | None = None
    agreement: Agreement | None = None
    library: str = ""
    compared: Sequence[Compared] = ()

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Seconds of encoding, seconds of searching, and queries per second."""
        encoding, searching = self.timings["encode_queries"] + self.timings["encode_documents"], self.timings["search"]
        return encoding, searching, len(self.collection.qrels) / searching

    def record(self, split: str) -> dict[str, Any]:
        """The result as JSON values."""
        about: dict[str, Any] = {"data": self.collection.data, "split": split, "model": self.model}
        about |= {} if self.seed is None else {"seed": self.seed}
        about |= {"documents": len(self.collection.documents), "queries": len(self.collection.qrels)}
        about |= {"scorer": self.result.scorer, **self.result.metrics, "timings": self.timings}
        if self.theirs and self.agreement:
            about["torch"] = self.theirs.metrics
            about["agreement"] = {"holds": self.agreement.holds, "text": str(self.agreement)}
        if self.compared:
            about["against"] = [row.record() for row in self.compared]
        return about


def run_path(run: Path, collection: str, seed: int | None, evaluations: int) -> Path:
    """The run file of an evaluation: `run` itself if there is only one, otherwise one named after the evaluation."""
    return run if evaluations == 1 else run.with_name(f"{run.stem}-{_label(collection, seed)}{run.suffix}")


def _label(collection: str, seed: int | None) -> str:
    return collection if seed is None else f"{collection}-{seed}"


def size_of(collection: Collection) -> str:
    """A phrase with its numbers of documents and queries."""
    judged = len(collection.qrels)
    return f"{counted(len(collection.documents), 'document')}, {judged:,} {'query' if judged == 1 else 'queries'}"


def show(evaluated: list[Evaluated], split: str) -> None:
    """Print the table of all evaluations, timings, and comparisons."""
    several = len({one.collection.name for one in evaluated}) > 1
    first = evaluated[0]
    size = f"{size_of(first.collection)} ({split})"
    # Short labels leave room for the names within 80 columns.
    labels = ["encode s", "search s", "queries/s", *(name.replace("recall", "R") for name in METRICS.values())]
    title = f"{len(evaluated)} evaluations ({split})" if several else size
    table = plain_table(labels, title)
    rows: dict[str, list[Evaluated]] = {}
    for one in evaluated:
        rows.setdefault(one.collection.name if several else one.result.scorer, []).append(one)
    for name, ones in rows.items():
        times = [f"{mean(values):.1f}" for values in zip(*(one.seconds for one in ones), strict=True)]
        _add_rows(table, [name, *times], [one.result.metrics for one in ones])
        theirs = [one.theirs.metrics for one in ones if one.theirs]
        if theirs:
            searching = mean(one.timings["search_by_torch"] for one in ones)
            rate = len(ones[0].collection.qrels) / searching
            _add_rows(table, ["torch", "", f"{searching:.1f}", f"{rate:.1f}"], theirs)
    if several:
        seeds = dict.fromkeys(one.seed for one in evaluated)
        means = [_mean([one.result.metrics for one in evaluated if one.seed == seed]) for seed in seeds]
        table.add_section()
        _add_rows(table, ["mean", "", "", ""], means)
    show_table(table)
    for one in evaluated:
        title = one.collection.name if one.seed is None else f"{one.collection.name}, seed {one.seed}"
        if one.compared:
            show_table(comparison_table(one.compared, f"{title}: compared with exact search"))
        if one.agreement:
            agree = "agree" if one.agreement.holds else "disagree"
            scorers = f"{one.result.scorer} and torch ({one.library})"
            say(f"{f'{title}: the' if several else 'The'} two scorers, {scorers}, {agree}: {one.agreement}.")
    if len(evaluated) == 1:
        say(", ".join(f"{name.replace('_', ' ')} {value:.1f} s" for name, value in first.timings.items()))


def write(
    evaluated: list[Evaluated], split: str, run: Path | None, per_query: Path | None, json_file: Path | None
) -> None:
    """Write the requested files."""
    if run is not None:
        for one in evaluated:
            path = run_path(run, one.collection.name, one.seed, len(evaluated))
            write_file(path, run_text(one.result.run), "--run")
    if per_query is not None:
        lines = ["\t".join(["collection", "query", *METRICS])]
        for one in evaluated:
            name, values = _label(one.collection.name, one.seed), one.result.per_query
            lines += [
                "\t".join([name, query_id, *(f"{values[metric][query_id]:.6f}" for metric in METRICS)])
                for query_id in one.collection.qrels
            ]
        write_file(per_query, "\n".join(lines) + "\n", "--per-query")
    if json_file is not None:
        records = [one.record(split) for one in evaluated]
        record = records[0] if len(records) == 1 else {"collections": records, "mean": _mean(records)}
        write_file(json_file, json.dumps({**record, "versions": versions()}, indent=2) + "\n", "--json")


def _mean(metrics: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {name: mean(values[name] for values in metrics) for name in METRICS}


def _add_rows(table: Table, row: list[str], metrics: Sequence[dict[str, float]]) -> None:
    """Add a row of metrics; for several seeds their means, and a row of standard deviations below."""
    columns = [[values[name] for values in metrics] for name in METRICS]
    table.add_row(*row, *(f"{mean(own):.4f}" for own in columns))
    if len(metrics) > 1:
        table.add_row(f"± {len(metrics)} seeds", "", "", "", *(f"{stdev(own):.4f}" for own in columns))
