"""A result on the terminal: progress while it is measured, then a table, then remarks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from pylate_flash.bench.suite import BROKEN, OURS, Observer, Suite

# Explains the two times of a cell.
TWO_TIMES = (
    "Two times: of the call, host included, by which systems are compared; and of the GPU alone, once the host has "
    "launched everything. Ratios are of both, in this order."
)

# The baseline without a kernel package: compared with pylate_flash even if another system is faster.
TORCH = "torch"


def make_console() -> Console:
    """Return a console that does not wrap the table if the output goes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, 240))


class Progress(Observer):
    """A progress bar over the rows; if the output is not a terminal, a line for each step and each row."""

    def __init__(self, console: Console, rows: int, unit: str) -> None:
        self.console = console
        self.unit = unit
        self.bar = Bar(
            SpinnerColumn(),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
        )
        self.task = self.bar.add_task("", total=rows)
        self.started = time.monotonic()

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def doing(self, what: str) -> None:
        """Show the current step; without a terminal also the seconds since the start of the run."""
        self.bar.update(self.task, description=escape(what))
        if not self.console.is_terminal:
            seconds = time.monotonic() - self.started
            self.console.print(f"{seconds:5.0f} s: {what}", highlight=False, markup=False)

    def finished(self, row: dict[str, Any]) -> None:
        """Count the row, and print it if there is no bar."""
        self.bar.advance(self.task)
        if not self.console.is_terminal:
            times = ", ".join(f"{name} {cell(state, self.unit)}" for name, state in row["systems"].items())
            floor = duration(row["floor_ms"], self.unit)
            text = f"{row['name']}, {self.unit}: floor {floor}, {times}"
            self.console.print(text, highlight=False, markup=False)


def duration(milliseconds: float, unit: str) -> str:
    """Format a time in ms or us, with at most three decimals, and fewer for 10 or more."""
    value = 1e3 * milliseconds if unit == "us" else milliseconds
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def cell(state: dict[str, Any], unit: str) -> str:
    """Return the text of a table cell for a system's state: its median, or else its status.

    After a slash comes the time of the device alone, if it was measured (`TWO_TIMES`).
    """
    if "median_ms" not in state:
        return "-" if state["status"] == "absent" else str(state["status"])
    alone = f" / {duration(state['device_ms'], unit)}" if "device_ms" in state else ""
    return duration(state["median_ms"], unit) + alone + (" (inaccurate)" if state["status"] == "inaccurate" else "")


def two_times(result: dict[str, Any]) -> str:
    """Return the sentence that explains cells with two times, or an empty string if a result has none."""
    states = (state for row in result["rows"] for state in row["systems"].values())
    return TWO_TIMES if any("device_ms" in state for state in states) else ""


# Ceilings that only some rows need -> their text in a heading, in 1e12 per second.
_FURTHER = {
    "l2_bytes_per_second": " (L2: {:.3g} TB/s)",
    "exponentials_per_second": ", {:.3g} T exponentials/s",
    "eight_bit_flops_per_second": ", {:.4g} TFLOP/s in 8 bits",
}


def heading(result: dict[str, Any]) -> str:
    """Return one line: machine, versions, input dtype and ceilings."""
    machine, versions, ceilings = result["machine"], result["versions"], result["ceilings"]
    about = {"compute capability": machine["compute_capability"], "driver": machine["driver"]}
    about |= {name: versions[name] for name in ("torch", "triton")}
    rates = f"{ceilings['flops_per_second'] / 1e12:.3g} TFLOP/s and {ceilings['bytes_per_second'] / 1e12:.3g} TB/s"
    further = [text.format(ceilings[name] / 1e12) for name, text in _FURTHER.items() if ceilings.get(name)]
    named = [f"{what} {value}" for what, value in about.items() if value]
    return ", ".join([machine["name"], *named, result["protocol"]["dtype"], "".join([f"ceilings {rates}", *further])])


def titles(suite: Suite, result: dict[str, Any]) -> dict[str, str]:
    """Return the column heads of the systems in a result, by name; those of other packages with their version."""
    present = {name for row in result["rows"] for name in row["systems"]}
    heads = {}
    for system in (*suite.systems, *suite.compiled):
        if system.name in present:
            version = result["versions"].get(system.peer.distribution) if system.peer else None
            heads[system.name] = f"{system.title} {version}" if version else system.title
    return heads


def columns(
    suite: Suite, result: dict[str, Any], style: Callable[[str, dict[str, Any], str], str]
) -> tuple[list[str], list[list[str]]]:
    """Return the column heads of a result's table, and the cells of its rows.

    ``style`` maps a system's name, its state and the cell's text to the text shown.
    """
    heads = titles(suite, result)
    # Systems whose time ours is given as a multiple of; not every result has some.
    counted = {name for row in result["rows"] for name in row.get("multiples", {})}
    multiples = [name for name in heads if name in counted]
    yardsticks = {system.name for system in suite.systems if system.yardstick}
    rows = []
    for row in result["rows"]:
        states = row["systems"]
        ours = states.get(OURS, {})
        # Ratios are of times that include the host's part and, after a slash, of times of the device alone.
        alone = ours.get("device_ms")
        others = [
            state["device_ms"]
            for name, state in states.items()
            if "device_ms" in state and not name.startswith(OURS) and name not in yardsticks
        ]
        cells = [row["name"], row["shape"], duration(row["floor_ms"], suite.unit)]
        cells += [
            style(name, states[name], cell(states[name], suite.unit)) if name in states else "-" for name in heads
        ]
        cells.append(_ratios(ours.get("over_floor"), alone and alone / row["floor_ms"]))
        cells += [_ratios(row.get("multiples", {}).get(name)) for name in multiples]
        cells.append(_ratios(row["best_peer_over_ours"], min(others) / alone if others and alone else None))
        rows.append(cells)
    ratios = ["ours / floor", *(f"ours / {heads[name]}" for name in multiples), "best other / ours"]
    return ["name", "Nq x Nd, Lq x Ld", "floor", *heads.values(), *ratios], rows


def _ratios(value: float | None, alone: float | None = None) -> str:
    """Format a ratio of times and, after a slash, that of the times of the device alone."""
    if value is None:
        return "-"
    return f"{value:.2f}" if alone is None else f"{value:.2f} / {alone:.2f}"


def show(console: Console, suite: Suite, result: dict[str, Any]) -> None:
    """Print a result: the table, then one line per remark."""
    protocol = result["protocol"]
    cache = f"{protocol['flush_bytes'] / 1e6:.0f} MB written before every call" if protocol["flush_bytes"] else "warm"
    console.print(f"[bold]{escape(suite.title)}[/bold], {suite.unit}: {escape(heading(result))}", highlight=False)
    console.print(
        f"Median and interquartile range of {protocol['repetitions']} calls ({protocol['clock']}), systems in turn; "
        f"cache: {cache}.",
        highlight=False,
    )
    if protocol["reduced"]:
        console.print(
            "[yellow]No GPU: these are times of a CPU, on smaller batches of the same rows, and the peers' kernels "
            "need a GPU.[/yellow]"
        )
    if sentence := two_times(result):
        console.print(sentence, highlight=False)
    heads, rows = columns(suite, result, lambda _, state, text: _styled(state, text, suite.unit))
    with_torch = any(TORCH in row["systems"] for row in result["rows"])
    table = Table(header_style="bold")
    for head in heads + (["torch / ours"] if with_torch else []) + ["our error"]:
        is_text = head in heads[:2]
        table.add_column(escape(head), justify="left" if is_text else "right", no_wrap=is_text)
    for row, cells in zip(result["rows"], rows, strict=True):
        name, shape, *cells, best = cells
        ratio, error = row["best_peer_over_ours"], row["systems"].get(OURS, {}).get("error")
        table.add_row(
            escape(name),
            escape(shape),
            *cells,
            f"[{'green' if ratio >= 1 else 'red'}]{best}[/]" if ratio is not None else best,
            *([_ratios(_over_ours(row, TORCH))] if with_torch else []),
            "-" if error is None else f"{error:.1e}",
        )
    console.print(table)
    for remark in remarks(result):
        console.print(escape(remark), highlight=False)


def _over_ours(row: dict[str, Any], name: str) -> float | None:
    """The time of a system as a multiple of ours."""
    theirs, ours = (row["systems"].get(system, {}).get("median_ms") for system in (name, OURS))
    return theirs / ours if theirs and ours else None


def _styled(state: dict[str, Any], text: str, unit: str) -> str:
    if "median_ms" in state:
        text += f" [dim]±{duration(state['iqr_ms'], unit)}[/dim]"
    return f"[red]{text}[/red]" if state["status"] in BROKEN else text


def remarks(result: dict[str, Any]) -> list[str]:
    """Return the remarks below the table: why a time is missing, which variants were chosen, memory, facts."""
    lines: list[str] = []
    absent: dict[tuple[str, str], list[str]] = {}
    for row in result["rows"]:
        for name, state in row["systems"].items():
            if state["status"] == "absent":
                absent.setdefault((name, state["reason"]), []).append(row["name"])
            elif state["status"] in ("wrong", "failed"):
                lines.append(f"{row['name']}, {name}: {state['status']}: {state['reason']}")
            elif state["status"] == "inaccurate":
                lines.append(f"{row['name']}, {name}: the relative error {state['error']:.1e} exceeds its bound")
    for (name, reason), names in absent.items():
        where = "" if len(names) == len(result["rows"]) else f" at {', '.join(names)}"
        lines.append(f"{name}: not measured{where}: {reason}")
    for row in result["rows"]:
        if "memory_error" in row:
            lines.append(f"{row['name']}: memory not measured: {row['memory_error']}")
        chosen = [
            f"{name}: {state['variant']}, {1e3 * state['host_ms']:.0f} us on the host"
            + (f", {state['memory_bytes'] / 2**20:.1f} MiB" if "memory_bytes" in state else "")
            for name, state in row["systems"].items()
            if "median_ms" in state
        ]
        if chosen:
            lines.append(f"{row['name']}: " + "; ".join(chosen))
    lines += [f"{name}: {value}" for name, value in result.get("facts", {}).items()]
    return lines
