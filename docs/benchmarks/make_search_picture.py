"""The figure of the suite `retrieval`: search time against corpus size, from its newest result.

    python docs/benchmarks/make_search_picture.py

writes `search-light.png` and `search-dark.png`, which embed their contents as text, as the README's figure does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from make_picture import Theme, draw_themes, save
from make_tables import HERE, RESULTS, newest
from pylate_flash.bench import load_suite
from pylate_flash.bench.report import titles
from pylate_flash.bench.retrieval import CORPORA
from pylate_flash.bench.suite import OURS

# Numbers of queries per search, one panel each.
QUERIES = (1, 32, 1000)
SYSTEMS = (OURS, f"{OURS}_int8", "lik", "fast_plaid")


def path_of(theme: str, folder: Path = HERE) -> Path:
    """Return the path of a theme's figure."""
    return folder / f"search-{theme}.png"


def gather(folder: Path = RESULTS) -> dict[str, Any]:
    """Return the contents of the figure.

    Returns
    -------
    dict
        "panels": for each number of queries, a "title" and the "lines" of systems, [documents, tokens, milliseconds]
        per corpus in order of tokens; "names" of the systems; the "caption".

    Raises
    ------
    ValueError
        If there is no result of the suite.
    """
    result = newest("retrieval", folder)
    if result is None:
        raise ValueError(f"{folder}: has no result of the suite 'retrieval'")
    rows = {row["name"]: row for row in result["rows"]}
    panels = []
    for queries in QUERIES:
        lines: dict[str, list[list[float]]] = {}
        for name, (documents, shortest, longest) in CORPORA.items():
            for system, state in rows.get(f"{name}-{queries}", {"systems": {}})["systems"].items():
                if system in SYSTEMS and "median_ms" in state:
                    tokens = documents * (shortest + longest) / 2
                    lines.setdefault(system, []).append([documents, tokens, state["median_ms"]])
        title = f"{queries:,} quer{'y' if queries == 1 else 'ies'}"
        panels.append(
            {"title": title, "lines": {name: sorted(line, key=lambda point: point[1]) for name, line in lines.items()}}
        )
    names = titles(load_suite("retrieval"), result)
    machine, versions = result["machine"]["name"], result["versions"]
    return {
        "panels": panels,
        "names": {name: names[name] for name in SYSTEMS if any(name in panel["lines"] for panel in panels)},
        "caption": f"{machine}, torch {versions['torch']}, {result['protocol']['dtype']}, d = 128; "
        f"{result['date'][:10]}. From queries on the host to lists of ids. fast-plaid is approximate, of 4 bits.",
    }


def draw(contents: dict[str, Any], theme: Theme, path: Path) -> None:
    """Draw the panels to a PNG at ``path``, which embeds ``contents`` as text."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    colours = {
        **theme.systems,
        f"{OURS}_int8": theme.systems["lik_lowmem"],
        "fast_plaid": theme.systems["flash_maxsim"],
    }
    figure = Figure(figsize=(8.6, 3.4), dpi=150, facecolor=theme.background)
    figure.subplots_adjust(left=0.07, right=0.98, top=0.8, bottom=0.22, wspace=0.22)
    handles: dict[str, Any] = {}
    for axes, panel in zip(figure.subplots(1, len(contents["panels"]), sharex=True), contents["panels"], strict=True):
        for name, line in panel["lines"].items():
            _, tokens, times = zip(*line, strict=True)
            (handles[name],) = axes.plot(tokens, times, color=colours[name], marker="o", markersize=3, linewidth=1.5)
        axes.set(xscale="log", yscale="log", facecolor=theme.background)
        # Label ranges of less than a decade too.
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_title(panel["title"], color=theme.text, fontsize=10, loc="left")
        axes.set_xlabel("tokens of the corpus", color=theme.muted, fontsize=8)
        axes.tick_params(colors=theme.muted, labelsize=7, which="both")
        axes.grid(color=theme.line, linewidth=0.5)
        axes.spines[:].set_color(theme.line)
    figure.axes[0].set_ylabel("ms", color=theme.muted, fontsize=8)
    figure.legend(
        [handles[name] for name in contents["names"]], contents["names"].values(), loc="upper left", frameon=False,
        ncols=len(contents["names"]), fontsize=9, labelcolor=theme.text,
    )  # fmt: skip
    figure.text(0.02, 0.03, contents["caption"], color=theme.muted, fontsize=7)
    save(figure, contents, path)


if __name__ == "__main__":
    draw_themes(gather, draw, path_of)
