"""Options shared by several commands, and defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

# Texts encoded at a time; mini-batch size and seed of `train`; the demo's output folder.
BATCH_SIZE = 32
MINI_BATCH_SIZE = 32
SEED = 42
DEMO_OUTPUT = Path("demo-output")

Scorer = Literal["pylate_flash", "torch", "flash", "lik", "auto"]
SCORERS = "{}, {}, {}, {} or {}".format(*get_args(Scorer))

BatchSize = Annotated[int, typer.Option(min=1, help="Texts encoded at a time.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ... Default: a GPU if there is one.")]
QueryLength = Annotated[int | None, typer.Option(min=4, help="Tokens per query. Default: the model's.")]
DocumentLength = Annotated[int | None, typer.Option(min=4, help="Maximum tokens per document. Default: the model's.")]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run code that the model contains: it can do whatever you can. Default: refuse."
    ),
]
