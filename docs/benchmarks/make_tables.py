"""The tables of `docs/benchmarks.md`, each from the newest committed result of its suite, preferably a complete one.

    python docs/benchmarks/make_tables.py

The table of the suite ``forward`` is between ``<!-- bench:forward:begin -->`` and ``<!-- bench:forward:end -->``, and
likewise for the others. ``--check`` writes nothing and exits with 1 if the page and the results differ.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from pylate_flash.bench import load_suite, report, results
from pylate_flash.bench.report import heading, titles, two_times
from pylate_flash.bench.suite import OURS, Suite

MARKER = "<!-- bench:{}:{} -->"
HERE = Path(__file__).resolve().parent
PAGE = HERE.with_suffix(".md")
RESULTS = HERE / "results"


def newest(suite: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """Return the newest result of a suite among ``folder``'s ``<suite>-*.json``, preferring complete ones, or None.

    Skips quick results and those of reduced batches on a CPU, which get no table.
    """
    candidates = [result for path in sorted(folder.glob(f"{suite}-*.json")) if _keepable(result := results.load(path))]
    return max(
        candidates, key=lambda result: (result["complete"], datetime.fromisoformat(result["date"])), default=None
    )


def _keepable(result: dict[str, Any]) -> bool:
    return not result["quick"] and not result["protocol"]["reduced"]


def suite_of(name: str) -> Suite:
    """Return the suite of that name, from the package or from the folder `suites` here."""
    path = HERE / "suites" / f"{name}.py"
    return load_suite(str(path) if path.is_file() else name)


def render(suite: Suite, result: dict[str, Any] | None) -> str:
    """Return the text between the two markers: the table, or a sentence if there is no result yet."""
    if result is None:
        name = f"docs/benchmarks/suites/{suite.name}.py" if suite.script else suite.name
        return (
            f"No measurement is committed yet. `pylate-flash bench {name} --json docs/benchmarks/results/` makes one."
        )
    heads = titles(suite, result)
    protocol = result["protocol"]
    columns, rows = report.columns(suite, result, lambda name, _, text: f"**{text}**" if name == OURS else text)
    about = "; ".join(
        f"{system.title} is {system.about}"
        for system in (*suite.systems, *suite.compiled)
        if system.name in heads and system.about
    )
    yardsticks = [system.title for system in suite.systems if system.yardstick and system.name in heads]
    floor = (
        f"the time of {' or '.join(yardsticks)}{', whichever is shorter' if len(yardsticks) > 1 else ''}"
        if yardsticks
        else "the longer of a row's operations and its bytes at the two ceilings"
        + (", and the rows gathered at that of the L2 cache" if result["ceilings"].get("l2_bytes_per_second") else "")
        + (
            ", or a row's exponentials at theirs, which a step adds"
            if result["ceilings"].get("exponentials_per_second")
            else ""
        )
    )
    repetitions = {
        state["repetitions"] for row in result["rows"] for state in row["systems"].values() if "median_ms" in state
    }
    fewest = min(repetitions, default=protocol["repetitions"])
    lines = [
        f"{suite.title}, {suite.unit}. {heading(result)}; {result['date'][:10]}. "
        f"Median of {protocol['repetitions']} calls{' from a cold cache' if protocol['flush_bytes'] else ''}"
        f"{f', of {fewest} and more in the longest rows' if fewest < protocol['repetitions'] else ''}, "
        f"systems in turn within one run; the floor is {floor}, measured in the same run."
        + (f" {about}." if about else "")
        + (f" {sentence}" if (sentence := two_times(result)) else ""),
        "",
        "| " + " | ".join(columns) + " |",
        "|---|---|" + "---:|" * (len(columns) - 2),
    ]
    lines += ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join([*lines, *_memory(result, heads), *_missing(suite, result)])


def quality(folder: Path = RESULTS) -> str:
    """Return the table of the results of `quality.py` in ``folder``: the retrieval quality with fewer bits."""
    tables: list[str] = []
    for path in sorted((folder / "quality").glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        plain = result["rows"][0]["bytes"]
        (overlap,) = (key for key in result["rows"][0] if key.startswith("overlap@"))
        tables += [
            # Without a blank line it would continue the table above.
            *([""] if tables else []),
            f"{result['collection'].capitalize()}, {result['machine']['name']}; {result['date']}.",
            "",
            f"| documents | queries | bytes | nDCG@10 | difference | best {overlap.partition('@')[2]} kept |",
            "|---|---|---:|---:|---:|---:|",
            *(
                f"| {row['documents']} | {row['queries']} | {row['bytes'] / plain:.2f} | {row['ndcg@10']:.4f} "
                f"| {row['difference']:+.4f} | {row[overlap]:.1%} |"
                for row in result["rows"]
            ),
        ]
    return "\n".join(tables)


def _missing(suite: Suite, result: dict[str, Any]) -> list[str]:
    """The line that names the rows missing from an incomplete result, or none."""
    if result["complete"]:
        return []
    measured = {row["name"] for row in result["rows"]}
    missing = [row.name for row in suite.rows if row.name not in measured]
    return ["", f"Not measured: {', '.join(missing)}."]


def _memory(result: dict[str, Any], heads: dict[str, str]) -> list[str]:
    """The lines of a second table, with the rows whose memory was measured, or none."""
    rows = [
        (
            row["name"],
            {name: state["memory_bytes"] for name, state in row["systems"].items() if "memory_bytes" in state},
        )
        for row in result["rows"]
    ]
    rows = [(row, taken) for row, taken in rows if taken]
    if not rows:
        return []
    systems = [name for name in heads if any(name in taken for _, taken in rows)]
    lines = [
        "",
        "Memory of such a call beyond its inputs, MiB, what it returns (gradients too) among it; each system in a "
        "process of its own.",
        "",
        "| " + " | ".join(["name", *(heads[name] for name in systems)]) + " |",
        "|---|" + "---:|" * len(systems),
    ]
    for row, taken in rows:
        cells = [f"{taken[name] / 2**20:.1f}" if name in taken else "-" for name in systems]
        if OURS in systems:
            ours = systems.index(OURS)
            cells[ours] = f"**{cells[ours]}**"
        lines.append("| " + " | ".join([row, *cells]) + " |")
    return lines


def table_of(suite: str, folder: Path = RESULTS) -> str:
    """Return the text between the markers of a suite, or of "quality"."""
    return quality(folder) if suite == "quality" else render(suite_of(suite), newest(suite, folder))


def suites_of(page: str, where: str) -> list[str]:
    """Return the names of the suites that have markers in a page's text.

    Raises
    ------
    ValueError
        If there is none; ``where`` names the page.
    """
    names = list(dict.fromkeys(re.findall(MARKER.format(r"(\w+)", "(?:begin|end)"), page)))
    if not names:
        raise ValueError(
            f"{where}: needs one line {MARKER.format('forward', 'begin')} and, after it, one like it to end"
        )
    return names


def insert(page: str, table: str, suite: str, where: str) -> str:
    """Return the page's text with the suite's table between its markers.

    Raises
    ------
    ValueError
        If ``page`` does not have the suite's two markers, once each and in order; ``where`` names it.
    """
    begin, end = MARKER.format(suite, "begin"), MARKER.format(suite, "end")
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"{where}: needs one line {begin} and, after it, one line {end}")
    before, rest = page.split(begin)
    after = rest.split(end)[1]
    return f"{before}{begin}\n{table}\n{end}{after}"


def command(
    page: Annotated[Path, typer.Option(help="The page.", show_default="docs/benchmarks.md")] = PAGE,
    folder: Annotated[
        Path, typer.Option(help="Where the results lie.", show_default="docs/benchmarks/results")
    ] = RESULTS,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit with 1 where they differ.")] = False,
) -> None:
    """Write the page's tables again from the newest results."""
    try:
        updated = text = page.read_text(encoding="utf-8")
        for suite in suites_of(text, str(page)):
            updated = insert(updated, table_of(suite, folder), suite, str(page))
    except (OSError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if text == updated:
        typer.echo(f"{page}: up to date")
    elif check:
        typer.echo(f"{page}: differs from the results; run `make bench-docs`", err=True)
        raise typer.Exit(1)
    else:
        page.write_text(updated, encoding="utf-8")
        typer.echo(f"{page}: tables written")


if __name__ == "__main__":
    typer.run(command)
