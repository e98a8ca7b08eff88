"""A result as a picture: each system under the machine's roofline, and each row's distance from its floor.

Where a yardstick sets the floor, there is no roofline to draw.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pylate_flash.bench.report import heading, titles
from pylate_flash.bench.suite import OURS, Suite

_COLOURS = ("#d1495b", "#2e4057", "#66a182", "#8d96a3", "#edae49", "#7b5ea7", "#00798c")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def save(suite: Suite, result: dict[str, Any], path: Path) -> None:
    """Write the picture; the format follows the file's ending.

    Raises
    ------
    ValueError
        If matplotlib does not know the ending.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    has_roofline = not any(system.yardstick for system in suite.systems)
    figure = Figure(figsize=(13, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    *roof, distance = figure.subplots(1, 1 + has_roofline, squeeze=False)[0]
    figure.suptitle(f"{suite.title}: {heading(result)}", fontsize=9)
    for axes in roof:
        _draw_roofline(axes, suite, result)
    _draw_distance(distance, suite, result)
    if not has_roofline:
        distance.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _timed(row: dict[str, Any], name: str) -> bool:
    return "over_floor" in row["systems"].get(name, {})


def _draw_roofline(axes: Any, suite: Suite, result: dict[str, Any]) -> None:
    """Achieved rate over arithmetic intensity, on the two ceilings."""
    flops, bandwidth = result["ceilings"]["flops_per_second"], result["ceilings"]["bytes_per_second"]
    intensities = [row["flops"] / row["bytes"] for row in result["rows"]]
    ridge = flops / bandwidth
    low, high = min(intensities + [ridge]) / 2, max(intensities + [ridge]) * 2
    axes.plot([low, ridge, high], [low * bandwidth / 1e12, flops / 1e12, flops / 1e12], color="black", linewidth=1.2)
    for index, (name, title) in enumerate(titles(suite, result).items()):
        timed = [
            (intensity, row["flops"] / row["systems"][name]["median_ms"] / 1e9)
            for intensity, row in zip(intensities, result["rows"], strict=True)
            if _timed(row, name)
        ]
        if timed:
            axes.scatter(
                *zip(*timed, strict=True),
                label=title,
                color=_COLOURS[index % len(_COLOURS)],
                marker=_MARKERS[index % len(_MARKERS)],
                s=42 if name == OURS else 26,
                zorder=4 if name == OURS else 3,
            )
    # Rows of nearly the same intensity share a name tag, above the roof, where nothing else is drawn.
    tags: list[tuple[float, list[str]]] = []
    for intensity, row in sorted(zip(intensities, result["rows"], strict=True), key=lambda pair: pair[0]):
        if tags and intensity < 1.25 * tags[-1][0]:
            tags[-1][1].append(row["name"])
        else:
            tags.append((intensity, [row["name"]]))
    for intensity, names in tags:
        top = min(flops, intensity * bandwidth) / 1e12
        axes.plot([intensity, intensity], [top, 1.15 * top], color="grey", linewidth=0.8)
        axes.annotate(
            ", ".join(names),
            (intensity, 1.2 * top),
            rotation=90,
            fontsize=7,
            ha="center",
            va="bottom",
            annotation_clip=False,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top * 8)
    axes.set_xlabel("arithmetic intensity, FLOP per byte")
    axes.set_ylabel("achieved, TFLOP/s")
    axes.set_title("Under the roofline (both ceilings measured in this run)", fontsize=10)
    axes.grid(True, which="major", alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="lower right")


def _draw_distance(axes: Any, suite: Suite, result: dict[str, Any]) -> None:
    """Time over floor, per row and system."""
    from matplotlib.ticker import LogLocator, NullFormatter

    rows = result["rows"]
    ratios = {
        name: [(position, row["systems"][name]["over_floor"]) for position, row in enumerate(rows) if _timed(row, name)]
        for name in titles(suite, result)
    }
    shown = [name for name, timed in ratios.items() if timed]
    height = 0.8 / max(1, len(shown))
    # Before the bars: a logarithmic axis does not begin at 0, where they would.
    axes.set_xscale("log")
    for index, (name, title) in enumerate(titles(suite, result).items()):
        if name in shown:
            offset = (shown.index(name) + 0.5) * height - 0.4
            bars = axes.barh(
                [position + offset for position, _ in ratios[name]],
                [ratio for _, ratio in ratios[name]],
                height=height,
                label=title,
                color=_COLOURS[index % len(_COLOURS)],
            )
            axes.bar_label(bars, fmt="%.2f", fontsize=6, padding=2)
    values = [ratio for name in shown for _, ratio in ratios[name]] or [1.0]
    axes.set_xlim(0.8 * min(1.0, *values), 1.4 * max(1.0, *values))  # to the right, room for the last number
    axes.axvline(1.0, color="black", linewidth=1.2)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(rows)), [f"{row['name']}\n{row['shape']}" for row in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("time over floor (1 is the floor)")
    axes.set_title("Distance from the floor", fontsize=10)
    axes.grid(True, which="both", axis="x", alpha=0.25)
