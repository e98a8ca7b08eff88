"""The figures of `evaluate`: metrics of collections, or quality of indexes against their search time."""

from __future__ import annotations

import io
from statistics import mean
from typing import Any

from ..demo.picture import INK, METRICS, plain
from .evaluated import Evaluated

_COLOURS = ("#2563eb", "#7c3aed", "#0891b2", "#f59e0b")


def draw(evaluated: list[Evaluated], form: str) -> bytes:
    """Draw the figure, and return it as the bytes of a png, svg or pdf file."""
    from matplotlib.figure import Figure

    compared = [one for one in evaluated if one.compared]
    count = len(compared) or 1
    figure = Figure(figsize=(6.4 * count if compared else 8, 4.4), layout="constrained", facecolor="white")
    panels = figure.subplots(1, count, squeeze=False)[0]
    if compared:
        for axes, one in zip(panels, compared, strict=True):
            _quality_and_time(axes, one)
    else:
        _metrics(panels[0], evaluated)
    for axes in panels:
        plain(axes, "both" if compared else "x")
    drawn = io.BytesIO()
    figure.savefig(drawn, format=form, dpi=150)
    return drawn.getvalue()


def _metrics(axes: Any, evaluated: list[Evaluated]) -> None:
    names = list(dict.fromkeys(one.collection.name for one in evaluated))[::-1]
    height = 0.8 / len(METRICS)
    for i, (metric, label) in enumerate(METRICS.items()):
        values = [
            mean(one.result.metrics[metric] for one in evaluated if one.collection.name == name) for name in names
        ]
        positions = [j + 0.4 - height * (i + 0.5) for j in range(len(names))]
        bars = axes.barh(positions, values, height * 0.9, color=_COLOURS[i], label=label)
        axes.bar_label(bars, fmt="%.3f", padding=3, fontsize=8, color=INK)
    axes.figure.set_size_inches(8, 1.4 + 0.9 * len(names))
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(0, 1.08)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(METRICS), frameon=False)


def _quality_and_time(axes: Any, one: Evaluated) -> None:
    """Draw a point per index that was searched; a run, whose time is unknown, is a horizontal line."""
    from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

    for i, row in enumerate(one.compared):
        colour = _COLOURS[i % len(_COLOURS)]
        quality, label = row.metrics["ndcg@10"], row.system
        if row.milliseconds_a_query is None or row.bytes_a_token is None:
            axes.axhline(quality, color=colour, linestyle="--", linewidth=1, label=label)
            continue
        label += f": {row.bytes_a_token:.0f} bytes per token, {row.recall[10]:.3f} of the exact top 10"
        axes.scatter(row.milliseconds_a_query, quality, s=20 + row.bytes_a_token, color=colour, alpha=0.7, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("milliseconds per query")
    axes.set_ylabel("nDCG@10")
    axes.margins(0.25, 0.35)
    axes.set_title(
        f"{one.collection.name}: {len(one.collection.documents)} documents", loc="left", color=INK, fontsize=11
    )
    legend = axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False, fontsize=8)
    for handle in legend.legend_handles:
        if hasattr(handle, "set_sizes"):
            handle.set_sizes([36])
