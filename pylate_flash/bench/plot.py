"""A result as a picture: each system under the machine's roofline, and each row's distance from its floor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pylate_flash.bench.report import heading, titles
from pylate_flash.bench.suite import OURS, Suite

_COLOURS = ("#d1495b", "#2e4057", "#66a182", "#8d96a3", "#edae49")
_MARKERS = ("o", "s", "^", "D", "v")


def save(suite: Suite, result: dict[str, Any], path: Path) -> None:
    """Write the picture; the format follows the file's ending.

    Raises
    ------
    ValueError
        If matplotlib does not know the ending.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    roof, distance = figure.subplots(1, 2)
    figure.suptitle(f"{suite.title}: {heading(result)}", fontsize=9)
    _draw_roofline(roof, suite, result)
    _draw_distance(distance, suite, result)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


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
            if "median_ms" in row["systems"].get(name, {})
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
    rows = result["rows"]
    heads = {
        name: title
        for name, title in titles(suite, result).items()
        if any("over_floor" in row["systems"].get(name, {}) for row in rows)
    }
    height = 0.8 / max(1, len(heads))
    for index, (name, title) in enumerate(heads.items()):
        timed = [
            (position, row["systems"][name]["over_floor"])
            for position, row in enumerate(rows)
            if "over_floor" in row["systems"].get(name, {})
        ]
        if timed:
            positions, ratios = zip(*timed, strict=True)
            bars = axes.barh(
                [position - 0.4 + (index + 0.5) * height for position in positions],
                ratios,
                height=height,
                label=title,
                color=_COLOURS[index % len(_COLOURS)],
            )
            axes.bar_label(bars, fmt="%.2f", fontsize=6, padding=2)
    axes.set_xlim(right=1.25 * axes.get_xlim()[1])  # room for the last number
    axes.axvline(1.0, color="black", linewidth=1.2)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(rows)), [f"{row['name']}\n{row['shape']}" for row in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("time over floor (1 is what the machine allows)")
    axes.set_title("Distance from the floor", fontsize=10)
    axes.grid(True, which="both", axis="x", alpha=0.25)
