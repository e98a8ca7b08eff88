"""`pylate-flash bench`: the command of `pylate_flash.bench`."""

from __future__ import annotations

import typer


def bench(context: typer.Context) -> None:
    """Measure this package, its peers and plain torch on this machine; `bench --help` lists the suites."""
    # The options are the suite's own; reading them here would import torch for every `--help`.
    from ..bench.cli import main

    main(context.args, "pylate-flash bench")
