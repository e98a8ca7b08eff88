"""``python -m pylate_flash.bench.readme``: the README's tables, each from the newest committed result of its suite.

That of the suite ``forward`` stands between ``<!-- bench:forward:begin -->`` and ``<!-- bench:forward:end -->``; so do
others. ``--check`` writes nothing and exits with 1 where the README and the results differ.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from pylate_flash.bench import load_suite, results
from pylate_flash.bench.report import cell, duration, heading, titles
from pylate_flash.bench.suite import OURS, Suite

MARKER = "<!-- bench:{}:{} -->"


def render(suite: Suite, result: dict[str, Any] | None) -> str:
    """Return what stands between the two markers: the table, or a sentence where there is no result yet."""
    if result is None:
        return (
            "No measurement is committed yet. "
            f"`pylate-flash bench {suite.name} --json pylate_flash/bench/results/` makes one."
        )
    heads = titles(suite, result)
    protocol = result["protocol"]
    columns = ["name", "Nq x Nd, Lq x Ld", "floor", *heads.values(), "ours / floor", "best other / ours"]
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
    )
    lines = [
        f"{suite.title}, {suite.unit}. {heading(result)}; {result['date'][:10]}. "
        f"Median of {protocol['repetitions']} calls{' from a cold cache' if protocol['flush_bytes'] else ''}, "
        f"systems in turn within one run; the floor is {floor}, measured in the same run."
        + (f" {about}." if about else ""),
        "",
        "| " + " | ".join(columns) + " |",
        "|---|---|" + "---:|" * (len(columns) - 2),
    ]
    for row in result["rows"]:
        over_floor = row["systems"].get(OURS, {}).get("over_floor")
        ratio = row["best_peer_over_ours"]
        cells = [
            row["name"],
            row["shape"],
            duration(row["floor_ms"], suite.unit),
            *(_cell(name, row["systems"].get(name), suite.unit) for name in heads),
            "-" if over_floor is None else f"{over_floor:.2f}",
            "-" if ratio is None else f"{ratio:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, *_memory(result, heads)])


def _memory(result: dict[str, Any], heads: dict[str, str]) -> list[str]:
    """The lines of a second table, of the rows whose memory was measured, or none."""
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


def _cell(name: str, state: dict[str, Any] | None, unit: str) -> str:
    if state is None:
        return "-"
    return f"**{cell(state, unit)}**" if name == OURS else cell(state, unit)


def suites_of(readme: str, where: str) -> list[str]:
    """Return the names of the suites that a README's text has markers for.

    Raises
    ------
    ValueError
        If there is none; ``where`` names the README.
    """
    found = list(dict.fromkeys(re.findall(MARKER.format(r"(\w+)", "(?:begin|end)"), readme)))
    if not found:
        raise ValueError(
            f"{where}: needs one line {MARKER.format('forward', 'begin')} and, after it, one like it to end"
        )
    return found


def insert(readme: str, table: str, suite: str, where: str) -> str:
    """Return the README's text with the suite's table between its markers.

    Raises
    ------
    ValueError
        If ``readme`` does not have the suite's two markers, once each and in order; ``where`` names it.
    """
    begin, end = MARKER.format(suite, "begin"), MARKER.format(suite, "end")
    if readme.count(begin) != 1 or readme.count(end) != 1 or readme.index(begin) > readme.index(end):
        raise ValueError(f"{where}: needs one line {begin} and, after it, one line {end}")
    before, rest = readme.split(begin)
    after = rest.split(end)[1]
    return f"{before}{begin}\n{table}\n{end}{after}"


def command(
    readme: Annotated[Path, typer.Option(help="The README.")] = Path("README.md"),
    folder: Annotated[Path, typer.Option(help="Where the results lie.")] = results.FOLDER,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit with 1 where they differ.")] = False,
) -> None:
    """Write the README's tables again from the newest results."""
    try:
        wanted = text = readme.read_text(encoding="utf-8")
        for suite in suites_of(text, str(readme)):
            wanted = insert(wanted, render(load_suite(suite), results.newest(suite, folder)), suite, str(readme))
    except (OSError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if text == wanted:
        typer.echo(f"{readme}: up to date")
    elif check:
        typer.echo(f"{readme}: differs from the results; run `python -m pylate_flash.bench.readme`", err=True)
        raise typer.Exit(1)
    else:
        readme.write_text(wanted, encoding="utf-8")
        typer.echo(f"{readme}: tables written")


if __name__ == "__main__":
    typer.run(command)
