"""The README's figure: time and memory compared with other scorers, from the newest committed results.

    python docs/benchmarks/make_picture.py

writes `speed-and-memory-light.png` and `-dark.png`, for GitHub's two themes. Each file also embeds its contents as text
(`read_contents`), so that a test can detect a figure older than its results.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from make_tables import HERE, RESULTS, newest
from pylate_flash.bench import load_suite, training
from pylate_flash.bench.report import duration, titles
from pylate_flash.bench.suite import OURS

# Rows that represent typical calls: (suite, row, title).
TIMES = (
    ("forward", "rerank-10k", "Score 10,000 documents for one query"),
    ("forward", "serve-32", "Score 1,024 documents for 32 queries"),
    ("training", "train-512", "Loss and gradients of 512 pairs"),
    ("training", "colpali-64", "Loss and gradients of 64 pairs, 1,024 tokens each"),
)
# Rows of the suite `training`: (row, title).
MEMORY = (
    ("train-128", "Loss and gradients of 128 pairs"),
    ("train-512", "Loss and gradients of 512 pairs"),
    ("train-1024", "Loss and gradients of 1,024 pairs"),
    ("colpali-64", "Loss and gradients of 64 pairs, 1,024 tokens each"),
)
TIMED_SYSTEMS = (OURS, "lik", "flash_maxsim", "torch")
# torch takes as many documents at a time as fit in memory, so its memory is not comparable.
MEASURED_SYSTEMS = (OURS, "lik", "lik_lowmem", "flash_maxsim")


@dataclass(frozen=True)
class Theme:
    """Colours of a figure: those of the page around it, and of the systems."""

    background: str
    text: str
    muted: str
    line: str
    systems: dict[str, str]


THEMES = {
    "light": Theme(
        background="#ffffff",
        text="#1f2328",
        muted="#59636e",
        line="#d8dee4",
        systems={
            OURS: "#d1495b",
            "lik": "#2e4057",
            "lik_lowmem": "#6d829b",
            "flash_maxsim": "#66a182",
            "torch": "#b8c0cc",
        },
    ),
    "dark": Theme(
        background="#0d1117",
        text="#f0f6fc",
        muted="#9198a1",
        line="#30363d",
        systems={
            OURS: "#ef6a7b",
            "lik": "#8fa8c8",
            "lik_lowmem": "#5b7391",
            "flash_maxsim": "#6fb594",
            "torch": "#59636e",
        },
    ),
}


def path_of(theme: str, folder: Path = HERE) -> Path:
    """Return the path of a theme's figure."""
    return folder / f"speed-and-memory-{theme}.png"


def gather(folder: Path = RESULTS) -> dict[str, Any]:
    """Return the contents of the figure, from the newest complete results of the suites `forward` and `training`.

    Returns
    -------
    dict
        "times" and "memory": groups of bars, each with its "title", "about" and "bars", which map a system's name to
        milliseconds or to bytes; "names" of the systems; the "caption".

    Raises
    ------
    ValueError
        If a suite has no complete result, a shown row is missing, or the results are of different machines.
    """
    by_suite = {}
    for suite in ("forward", "training"):
        result = newest(suite, folder)
        if result is None:
            raise ValueError(f"{folder}: has no complete result of the suite {suite!r}")
        by_suite[suite] = result
    names = titles(load_suite("training"), by_suite["training"])
    times = []
    for suite, name, title in TIMES:
        row = _row(by_suite[suite], name)
        about = f"{suite} {name}: {row['shape']} tokens"
        times.append({"title": title, "about": about, "bars": _bars(row, TIMED_SYSTEMS, "median_ms")})
    memory = []
    for name, title in MEMORY:
        batch = next(batch for batch in training.ROWS if batch.name == name)
        similarities = 2 * batch.Nq * batch.Nd * batch.Lq * batch.Ld  # in bfloat16
        about = f"{name}: all similarities at once would be {similarities / 2**20:,.0f} MiB"
        bars = _bars(_row(by_suite["training"], name), MEASURED_SYSTEMS, "memory_bytes")
        memory.append({"title": title, "about": about, "bars": bars})
    return {
        "times": times,
        "memory": memory,
        "names": {name: title for name, title in names.items() if name in (*TIMED_SYSTEMS, *MEASURED_SYSTEMS)},
        "caption": _caption(by_suite),
    }


def _row(result: dict[str, Any], name: str) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in result["rows"]}
    if name not in rows:
        raise ValueError(f"the newest result of the suite {result['suite']!r} has no row {name!r}")
    return rows[name]


def _bars(row: dict[str, Any], systems: tuple[str, ...], number: str) -> dict[str, float]:
    bars = {name: row["systems"].get(name, {}).get(number) for name in systems}
    if missing := [name for name, value in bars.items() if value is None]:
        raise ValueError(f"row {row['name']!r} has no {number} of {', '.join(missing)}")
    return bars


def _caption(by_suite: dict[str, dict[str, Any]]) -> str:
    """Where, when and how the suites were measured; raises a ValueError if machine or versions differ."""
    setups = []
    for result in by_suite.values():
        versions, protocol = result["versions"], result["protocol"]
        setups.append(
            f"{result['machine']['name']}, torch {versions['torch']}, triton {versions['triton']}, "
            f"{protocol['dtype']}, d = 128."
        )
    if len(set(setups)) > 1:
        raise ValueError(f"one picture cannot show results of two kinds: {' / '.join(setups)}")
    repetitions = sorted({result["protocol"]["repetitions"] for result in by_suite.values()})
    dates = sorted({result["date"][:10] for result in by_suite.values()})
    return (
        f"{setups[0]} Median of {' or '.join(map(str, repetitions))} calls from a cold cache, systems in turn. "
        f"{' and '.join(dates)}.\n"
        "Loss and gradients: from embeddings on, without the encoder. LIK: late-interaction-kernels, the faster of its "
        "backwards auto and unified;\n"
        "LIK lowmem: its third. FM: flash-maxsim. torch: an einsum over as many documents at a time as fit in memory; "
        "what it takes is left out."
    )


def draw(contents: dict[str, Any], theme: Theme, path: Path) -> None:
    """Draw both panels to a PNG at ``path``, which embeds ``contents`` as text."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(8.6, 6), dpi=150, facecolor=theme.background)
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.02, right=0.98, top=0.89, bottom=0.1, wspace=0.06)
    names = contents["names"]
    figure.legend(
        handles=[Patch(color=theme.systems[name], label=title) for name, title in names.items()],
        loc="upper left",
        bbox_to_anchor=(0.012, 0.995),
        ncols=len(names),
        frameon=False,
        fontsize=9,
        labelcolor=theme.text,
        handlelength=1.0,
        handleheight=1.0,
        columnspacing=1.6,
        borderaxespad=0.2,
    )
    _panel(
        left,
        "Time, as a multiple of pylate_flash's",
        contents["times"],
        theme,
        scale=lambda bars: 1 / bars[OURS],
        label=_time,
    )
    _panel(
        right,
        "Memory beyond the inputs, gradients included, MiB",
        contents["memory"],
        theme,
        scale=lambda bars: 2**-20,
        label=lambda value, ratio: f"{value / 2**20:.1f}",
    )
    figure.text(0.02, 0.083, contents["caption"], color=theme.muted, fontsize=7, va="top", linespacing=1.5)
    save(figure, contents, path)


def save(figure: Any, contents: dict[str, Any], path: Path, colours: int = 128) -> None:
    """Write a figure to a PNG with ``colours`` colours, which embeds ``contents`` as text."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    # A palette needs one byte per pixel, which makes the file a quarter as large.
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(colours)
    description = PngInfo()
    description.add_text("Description", json.dumps(contents))
    picture.save(path, optimize=True, dpi=(figure.dpi, figure.dpi), pnginfo=description)


def _time(milliseconds: float, ratio: float) -> str:
    over_ours = "" if ratio == 1 else f"  ({ratio:.2f}x)" if ratio < 10 else f"  ({ratio:.1f}x)"
    return f"{duration(milliseconds, 'ms')} ms{over_ours}"


def _panel(
    axes: Any,
    title: str,
    groups: list[dict[str, Any]],
    theme: Theme,
    scale: Callable[[dict[str, float]], float],
    label: Callable[[float, float], str],
) -> None:
    """Draw groups of horizontal bars on one linear axis, each group below its title, with values at the bar ends."""
    longest = max(value * scale(group["bars"]) for group in groups for value in group["bars"].values())
    y = 0.0
    for group in groups:
        axes.plot([0, 0], [y + 1.5, y + len(group["bars"]) + 1.5], color=theme.line, linewidth=1, zorder=0)
        axes.text(0, y, group["title"], color=theme.text, fontsize=9, fontweight="bold", va="center")
        axes.text(0, y + 0.9, group["about"], color=theme.muted, fontsize=7.5, va="center")
        y += 2
        for name, value in group["bars"].items():
            length = value * scale(group["bars"])
            axes.barh(y, length, height=0.84, color=theme.systems[name])
            axes.text(
                length + 0.012 * longest,
                y,
                label(value, value / group["bars"][OURS]),
                color=theme.text if name == OURS else theme.muted,
                fontsize=7.5,
                fontweight="bold" if name == OURS else "normal",
                va="center_baseline",
            )
            y += 1
        y += 0.5
    axes.set_ylim(y - 0.6, -0.7)
    axes.set_xlim(0, 1.34 * longest)
    axes.set_title(title, color=theme.text, fontsize=10, loc="left", pad=8)
    axes.set_facecolor(theme.background)
    axes.set_yticks([])
    axes.set_xticks([])
    axes.spines[:].set_visible(False)


def read_contents(path: Path) -> dict[str, Any]:
    """Return the contents embedded in a figure, as passed to `draw`."""
    from PIL import Image

    with Image.open(path) as picture:
        return dict(json.loads(picture.info["Description"]))


def draw_themes(
    gather: Callable[[], dict[str, Any]],
    draw: Callable[[dict[str, Any], Theme, Path], None],
    path_of: Callable[[str], Path],
) -> None:
    """Redraw a figure for both themes."""
    try:
        contents = gather()
    except ValueError as error:
        raise SystemExit(str(error)) from None
    for name, theme in THEMES.items():
        draw(contents, theme, path_of(name))
        print(f"{path_of(name)}: drawn")


if __name__ == "__main__":
    draw_themes(gather, draw, path_of)
