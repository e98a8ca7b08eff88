"""The command line: `pylate-flash demo | train | mine | evaluate | index | search | bench | doctor`, a file for each.

Heavy modules are imported inside the commands, so that `--help` responds at once.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
from typing import Annotated

import typer

from .. import __version__
from . import demo, doctor, evaluate, index, mine, search, train
from .common import command

__all__ = ["app", "main"]


app = typer.Typer(
    name="pylate-flash",
    help="Score, train and retrieve with PyLate or sentence-transformers through fused, exact MaxSim.",
    epilog="Start with `pylate-flash demo`. Every command has its own help: `pylate-flash train --help`. Exit codes: "
    "0 success, 1 a check of the results failed, 2 a user error, explained in one sentence, 70 a bug in the program "
    "(PYLATE_FLASH_TRACEBACK=1 shows where), 130 interrupted, 141 the output was not read to its end, as by `head`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"pylate-flash {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The options that come before a command."""


app.command(
    epilog="Examples: `pylate-flash demo --full` (a better model), `pylate-flash demo --model my-org/my-encoder`."
)(command(demo.demo))
app.command(
    epilog="Example: `pylate-flash train --model bert-base-uncased --data train.jsonl --output my-colbert "
    "--loss cached --batch-size 1024 --mini-batch-size 32`"
)(command(train.train))
app.command(
    epilog="Example: `pylate-flash mine --data train.jsonl --model my-colbert --corpus corpus.jsonl --output "
    "mined.jsonl --relative-margin 0.05`, then `pylate-flash train --data mined.jsonl ...`"
)(command(mine.mine))
app.command(
    epilog="Example: `pylate-flash evaluate --data demo-output/data --model demo-output/model --compare-torch`"
)(command(evaluate.evaluate))
app.add_typer(index.app, name="index")
app.command(
    epilog='Examples: `pylate-flash search "read a compressed archive" -k 3` (after the demo), '
    "`pylate-flash search --queries queries.jsonl --index my-index --json > results.jsonl`"
)(command(search.search))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@command
def bench(context: typer.Context) -> None:
    """Measure this package, its peers and plain torch on this machine; `bench --help` lists the suites."""
    # Options are parsed there; declaring them here would import torch for every `--help`.
    from ..bench.cli import main

    main(context.args, "pylate-flash bench")


app.command()(command(doctor.doctor))


def main() -> None:
    """Run the command line."""
    # A closed stream is None, which has no `isatty`, and the next file opened would get its descriptor.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 -- it lives as long as the process
    atexit.register(_end)
    try:
        # `command` also covers output while options are parsed, such as `--help`.
        command(app)(prog_name="pylate-flash")
    except typer.Exit as ended:
        sys.exit(ended.exit_code)


def _end() -> None:
    """Skip the cleanup of objects at exit: registered first, this runs last of all exit handlers."""
    # At exit Python garbage-collects all objects of the libraries, which takes seconds and frees nothing.
    gc.freeze()
    # nanobind bindings, which Triton uses from 3.9 on, report leaked objects on standard error afterwards.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
