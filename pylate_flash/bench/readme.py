"""``python -m pylate_flash.bench.readme``: the README's table, from the newest committed result.

The table stands between ``<!-- bench:begin -->`` and ``<!-- bench:end -->``. ``--check`` writes nothing and exits with
1 where the README and the results differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pylate_flash.bench import load_suite, results
from pylate_flash.bench.report import cell, duration, heading, titles
from pylate_flash.bench.suite import OURS, Suite

BEGIN = "<!-- bench:begin -->"
END = "<!-- bench:end -->"


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
    return "\n".join(lines)


def _cell(name: str, state: dict[str, Any] | None, unit: str) -> str:
    if state is None:
        return "-"
    return f"**{cell(state, unit)}**" if name == OURS else cell(state, unit)


def insert(readme: str, table: str, where: str) -> str:
    """Return the README's text with the table between its markers.

    Raises
    ------
    ValueError
        If ``readme`` does not have the two markers, once each and in order; ``where`` names it.
    """
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise ValueError(f"{where}: needs one line {BEGIN} and, after it, one line {END}")
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def command(
    readme: Annotated[Path, typer.Option(help="The README.")] = Path("README.md"),
    folder: Annotated[Path, typer.Option(help="Where the results lie.")] = results.FOLDER,
    suite: Annotated[str, typer.Option(help="The suite.")] = "forward",
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit with 1 where they differ.")] = False,
) -> None:
    """Write the README's table again from the newest result."""
    try:
        found = load_suite(suite)
        text = readme.read_text(encoding="utf-8")
        wanted = insert(text, render(found, results.newest(suite, folder)), str(readme))
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
        typer.echo(f"{readme}: table written")


if __name__ == "__main__":
    typer.run(command)
