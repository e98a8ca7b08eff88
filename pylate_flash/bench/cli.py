"""``pylate-flash bench``: the command."""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import typer

from pylate_flash.bench import SUITES, load_suite, plot, report, results
from pylate_flash.bench import suite as suites
from pylate_flash.bench.protocol import QUICK, Rounds
from pylate_flash.cli.common import UserError, command, explained
from pylate_flash.cli.files import check_file, writable_folder

Dtype = Literal["bfloat16", "float16", "float32"]


def bench(
    suite: Annotated[
        str,
        typer.Argument(metavar="SUITE", help="One of these, or a Python file whose function `suite()` returns one."),
    ] = "forward",
    rows: Annotated[
        list[str] | None,
        typer.Option(help="Only these rows: comma-separated names, or repeat the option; an unknown name lists all."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="auto (the suite's device, else a GPU if there is one), cuda, cuda:1, cpu.")
    ] = "auto",
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            metavar="TYPE",
            help=f"Type of the inputs: {', '.join(get_args(Dtype))}.",
            show_default="bfloat16 on a GPU, float32 on a CPU",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="At most 10 calls instead of 50, and little tuning of peers: a quick look, not a record."
        ),
    ] = False,
    peers: Annotated[bool, typer.Option(help="Also measure the other packages that are installed.")] = True,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Also measure torch.compile (compiles for minutes).")
    ] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Also measure memory, in fresh processes.")] = False,
    json: Annotated[
        Path | None,
        typer.Option(help="Write the result after every row: to this .json file, or to a new file in this folder."),
    ] = None,
    add: Annotated[
        Path | None, typer.Option(help="Earlier result of other rows, same settings; --json also writes its rows.")
    ] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Plot the result here (.png, .svg, .pdf).")] = None,
) -> None:
    """Measure this package, its peers and plain torch on this machine, next to the hardware floor."""
    with explained(kinds=(ValueError,)):
        loaded_suite = load_suite(suite)
    torch_device = _device(device, loaded_suite)
    names = [name for item in rows or [] for name in item.split(",") if name] or rows or []
    # Its errors begin with "rows: ".
    with explained("--", kinds=(ValueError,)):
        chosen = suites.choose(loaded_suite, names)
    _check_measurable(picture, memory, torch_device)
    _check_writable("--json", json, json is not None and json.suffix == ".json")
    _check_writable("--plot", picture, True)
    earlier = _earlier(add, json)
    torch_dtype = getattr(torch, dtype) if dtype else (torch.bfloat16 if torch_device.type == "cuda" else torch.float32)
    console = report.make_console()
    options: dict[str, Any] = {"with_peers": peers, "with_compiled": compiled, "with_memory": memory, "quick": quick}
    if json:
        options["keep"] = partial(_keep, json, earlier, [row.name for row in loaded_suite.rows])
    if earlier is not None:
        options["begin"] = partial(_check_alike, earlier)
    with report.Progress(console, len(chosen), loaded_suite.unit) as progress:
        rounds = QUICK if quick else Rounds()
        result = suites.run(loaded_suite, torch_device, torch_dtype, rounds, rows=names, observer=progress, **options)
    report.show(console, loaded_suite, result)
    if json:
        console.print(f"Written to {results.place(json, result)}", highlight=False, markup=False)
    if picture:
        plot.save(loaded_suite, result, picture)
        console.print(f"Plotted to {picture}", highlight=False, markup=False)
    ours = (state for row in result["rows"] for name, state in row["systems"].items() if name.startswith(suites.OURS))
    if any(state["status"] in suites.BROKEN for state in ours):
        raise typer.Exit(1)


def _check_measurable(picture: Path | None, memory: bool, device: torch.device) -> None:
    """Raise, before anything is measured, if memory could not be measured or the picture not drawn."""
    if picture is not None and picture.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot: {picture} must end in .png, .svg or .pdf")
    if picture is not None and importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot: needs matplotlib; pip install 'pylate-flash[bench]'")
    if memory and device.type == "cpu" and sys.platform != "linux":
        raise UserError(f"--memory: on a CPU, it can be measured on Linux only, not on {sys.platform}")


def _check_writable(option: str, path: Path | None, is_file: bool) -> None:
    """Raise, before anything is measured, if the file (or the folder) of an option cannot be written."""
    if path is None:
        return
    if is_file and path.is_dir():
        raise UserError(f"{option}: {path} is a folder; expected a file")
    with writable_folder(path.parent if is_file else path, option):
        pass


def _earlier(add: Path | None, json: Path | None) -> dict[str, Any] | None:
    """Return the result to which rows are added, or None; raise a UserError if the file is not a result."""
    if add is None:
        return None
    if json is None:
        raise UserError(f"--add: {add} needs --json, to which its rows are written")
    check_file(add, "--add: ")
    with explained("--add: "):
        return results.load(add)


def _check_alike(earlier: dict[str, Any], result: dict[str, Any]) -> None:
    with explained("--add: "):
        results.check_alike(earlier, result)


def _keep(path: Path, earlier: dict[str, Any] | None, rows: list[str], result: dict[str, Any]) -> None:
    if earlier is not None:
        result = results.joined(earlier, result, rows)
    results.save(result, results.place(path, result))


def _device(name: str, suite: suites.Suite) -> torch.device:
    """Return the device of that name; raise a UserError if it does not exist or the suite does not measure it."""
    if name == "auto":
        name = suite.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:(0|[1-9][0-9]?))?", name):
        raise UserError(f"--device: {name!r} is not auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if suite.device not in (None, device.type):
        raise UserError(f"--device: the suite {suite.name!r} measures {suite.device} only, got {name!r}")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise UserError(f"--device: {name!r} is not available: torch finds no CUDA GPU")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise UserError(f"--device: {name!r} is not available: there are {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


_HELP = f"""{bench.__doc__}

A suite is a table with one shape per row:

{chr(10).join(f"- `{name}`: {about}" for name, about in SUITES.items())}

Every system is checked against float64 on the same inputs before it is timed, and systems take turns. The floor is the
time of the row's operations or bytes at the rates that a large matrix product and a large copy reach on this machine.
`ours / floor` is 1 at best; `best other / ours` is above 1 if pylate_flash is the fastest.

Exits with 1 if pylate_flash was wrong, inaccurate or failed.
"""


def main(arguments: list[str] | None = None, name: str = "python -m pylate_flash.bench") -> None:
    """Run the command with these arguments, by default those of this process."""
    application = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    application.command(
        help=_HELP,
        epilog=f"Examples: `{name} --quick` (a quick look, in minutes), `{name} training --memory --json results/`, "
        f"`{name} losses --rows batch-256,batch-1024 --no-peers`.",
    )(command(bench))
    application(arguments, prog_name=name)
