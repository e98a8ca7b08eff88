"""A result as a figure: each system under the machine's roofline, and the time over the floor of each row.

If a yardstick sets the floor, no roofline is drawn.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

from pylate_flash.bench.report import heading, titles
from pylate_flash.bench.suite import Suite

_MARKERS = "os^DvPX"


def save(suite: Suite, result: dict[str, Any], path: Path) -> None:
    """Write the figure; the format follows the file suffix.

    Raises
    ------
    ValueError
        If matplotlib does not know the suffix.
    """
    from matplotlib.figure import Figure

    has_roofline = not any(system.yardstick for system in suite.systems)
    figure = Figure(figsize=(13, 5.6), layout="constrained")
    *roof, distance = figure.subplots(1, 1 + has_roofline, squeeze=False)[0]
    figure.suptitle(f"{suite.title}: {heading(result)}", fontsize=9)
    # Title of each timed system -> (row index, row, state) of the rows in which it was timed.
    timed = {
        title: [(i, row, row["systems"][name]) for i, row in enumerate(result["rows"]) if _timed(row, name)]
        for name, title in titles(suite, result).items()
    }
    timed = {title: rows for title, rows in timed.items() if rows}
    for axes in roof:
        _draw_roofline(axes, result, timed)
    _draw_distance(distance, result, timed)
    if timed:
        distance.legend(fontsize=8, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _timed(row: dict[str, Any], name: str) -> bool:
    return "over_floor" in row["systems"].get(name, {})


def _draw_roofline(axes: Any, result: dict[str, Any], timed: dict[str, list[Any]]) -> None:
    """Achieved rate over arithmetic intensity, under the two ceilings."""
    flops, bandwidth = result["ceilings"]["flops_per_second"], result["ceilings"]["bytes_per_second"]
    intensities = [row["flops"] / row["bytes"] for row in result["rows"]]
    ridge = flops / bandwidth
    low, high = min(*intensities, ridge) / 2, max(*intensities, ridge) * 2
    axes.loglog([low, ridge, high], [low * bandwidth / 1e12, flops / 1e12, flops / 1e12], color="black", linewidth=1.2)
    for (title, rows), marker in zip(timed.items(), itertools.cycle(_MARKERS), strict=False):
        rates = [row["flops"] / state["median_ms"] / 1e9 for _, row, state in rows]
        axes.plot([intensities[i] for i, *_ in rows], rates, marker, label=title, zorder=3)
    # Labels go above the roof, where nothing else is drawn; rows of nearly the same intensity share one.
    tags: dict[int, tuple[float, list[str]]] = {}
    for intensity, row in zip(intensities, result["rows"], strict=True):
        tags.setdefault(round(math.log(intensity, 1.25)), (intensity, []))[1].append(row["name"])
    for intensity, names in tags.values():
        axes.annotate(
            ", ".join(names),
            (intensity, min(flops, intensity * bandwidth) / 1e12),
            (0, 14),
            textcoords="offset points",
            arrowprops={"arrowstyle": "-", "color": "grey"},
            rotation=90,
            fontsize=7,
            ha="center",
        )
    axes.set(
        xlim=(low, high),
        ylim=(axes.get_ylim()[0], 8 * axes.get_ylim()[1]),
        xlabel="arithmetic intensity, FLOP per byte",
        ylabel="achieved, TFLOP/s",
        title="Under the roofline (both ceilings measured in this run)",
    )
    axes.grid(alpha=0.25)


def _draw_distance(axes: Any, result: dict[str, Any], timed: dict[str, list[Any]]) -> None:
    """Time over floor, per row and system."""
    from matplotlib.ticker import LogLocator, NullFormatter

    height = 0.8 / max(1, len(timed))
    # Set before drawing the bars: a logarithmic axis cannot begin at 0, as they would.
    axes.set_xscale("log")
    for index, (title, rows) in enumerate(timed.items()):
        positions = [i + (index + 0.5) * height - 0.4 for i, *_ in rows]
        bars = axes.barh(positions, [state["over_floor"] for *_, state in rows], height=height, label=title)
        axes.bar_label(bars, fmt="%.2f", fontsize=6, padding=2)
    values = [1.0, *(state["over_floor"] for rows in timed.values() for *_, state in rows)]
    axes.axvline(1.0, color="black", linewidth=1.2)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(
        range(len(result["rows"])), [f"{row['name']}\n{row['shape']}" for row in result["rows"]], fontsize=7
    )
    axes.set(
        xlim=(0.8 * min(values), 1.4 * max(values)),  # room for the last label on the right
        ylim=(len(result["rows"]) - 0.5, -0.5),
        xlabel="time over floor (1 is the floor)",
        title="Distance from the floor",
    )
    axes.grid(axis="x", which="both", alpha=0.25)
