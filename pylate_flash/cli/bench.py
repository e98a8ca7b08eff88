"""`pylate-flash bench`: the commands of `pylate_flash.bench`."""

from __future__ import annotations

import typer


def bench(context: typer.Context) -> None:
    """Measure this package, its peers and plain torch on this machine; `bench --help` lists the options."""
    # The options are the suite's own; reading them here would import torch for every `--help`.
    from ..bench.cli import bench as measure

    application = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    application.command()(measure)
    application(context.args, prog_name="pylate-flash bench")
