"""The demo's figure: metrics before and after training, and the loss curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

METRICS = {"ndcg@10": "nDCG@10", "map": "MAP", "recall@100": "recall@100", "mrr@10": "MRR@10"}
QUIET, _AFTER, INK = "#b8c0cc", "#2563eb", "#1f2937"


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the metrics before and after training beside the loss curve, from the content of `results.json`.

    The suffix of the path selects the format.
    """
    # The object-oriented interface needs no display, and does not change the caller's matplotlib settings.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained", facecolor="white")
    bars, curve = figure.subplots(1, 2, width_ratios=(1.25, 1))
    for offset, moment, colour, label in (
        (-0.2, "before", QUIET, "before"),
        (0.2, "after", _AFTER, "after training"),
    ):
        heights = [results[moment]["pylate_flash"][name] for name in METRICS]
        drawn = bars.bar([i + offset for i in range(len(METRICS))], heights, 0.38, color=colour, label=label)
        bars.bar_label(drawn, fmt="%.3f", padding=3, fontsize=9, color=INK)
    bars.set_xticks(range(len(METRICS)), METRICS.values())
    bars.set(ylim=(0, 1.2), yticks=[0, 0.25, 0.5, 0.75, 1])
    bars.legend(loc="upper left", frameon=False, ncols=2)
    corpus, training = results["corpus"], results["training"]
    bars.set_title(f"Retrieval: {corpus['queries']} queries, {corpus['documents']} documents", loc="left", color=INK)

    steps, losses = zip(*training["loss"], strict=True)
    curve.plot(steps, losses, color=QUIET, linewidth=1, marker="o", markersize=3, label="logged")
    curve.plot(steps, _running_mean(losses), color=_AFTER, linewidth=2.5, label="running mean")
    curve.legend(loc="upper right", frameon=False)
    curve.set(xlabel="training step", xlim=(0, max(steps) * 1.02), ylim=(0, max(losses) * 1.15))
    of_pairs = f"{training['pairs']} pairs, batches of {training['batch_size']}"
    curve.set_title(f"Contrastive loss: {of_pairs}", loc="left", color=INK)

    for axes in (bars, curve):
        plain(axes, "y")
    figure.suptitle(f"{results['model']} as a ColBERT model on Python documentation", fontweight="bold", color=INK)
    figure.savefig(path, dpi=150)


def plain(axes: Any, grid: Literal["both", "x", "y"]) -> None:
    """Hide the top and right spines, and draw a light grid behind the plot."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(QUIET)
    axes.tick_params(which="both", colors=INK, length=0)
    axes.grid(axis=grid, color="#e5e7eb")
    axes.set_axisbelow(True)


def _running_mean(values: Sequence[float], width: int = 9) -> list[float]:
    """The centred running mean, as the loss of single batches is too noisy to show the trend."""
    windows = [values[max(0, i - width // 2) : i + width // 2 + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
