"""`pylate-flash demo`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from .._extras import check_host, check_installed
from . import options
from .common import UserError, be_quiet, check_device, console, explained, note, say
from .models import PYLATE, check_model_name, host_of, load_model


def demo(
    output: Annotated[Path, typer.Option(help="Output folder of the demo.")] = options.DEMO_OUTPUT,
    model: Annotated[
        str | None, typer.Option(help="Encoder: a folder or a name. Default: all-MiniLM-L6-v2, from a Python package.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Train four times as long on twice the text: 6 to 20 minutes.")
    ] = False,
    device: options.Device = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Train, index, search and evaluate a ColBERT model on real text, offline, in two to four minutes on a CPU.

    The text is the documentation of the installed Python packages: the first sentence of a docstring is the query, the
    rest is the document to find. The model is evaluated before and after training, with PyLate's torch scorer and with
    this package; the two must agree. Writes `model/`, `index/`, `data/` (a BEIR folder), `results.json`, `demo.png`.
    """
    check_host("pylate", "pylate-flash demo")
    if model is None:
        # Nothing needs to be downloaded: skip requests to the hub.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    else:
        check_model_name(model)
    started = time.perf_counter()
    minutes = "6 to 20" if full else "2 to 4"
    say(f"Loading PyTorch and PyLate. The whole demo takes {minutes} minutes on two CPU cores.")
    be_quiet()
    import torch

    from ..demo import job

    for module in ("ranx", "matplotlib"):
        check_installed(module, "pylate-flash demo", "demo,eval")
    settings = job.FULL if full else job.Settings()
    check_device(device)
    encoder = None
    if model is None:
        with explained():
            job.default_model()
    else:
        if host_of(model, trust_remote_code) != PYLATE:
            raise UserError(f"the demo trains PyLate models, and {model} is a MultiVectorEncoder; choose another model")
        # Load it before preparing data, so that an unusable model fails at once; remote code does not run.
        torch.manual_seed(settings.seed)
        encoder = load_model(
            model,
            trust_remote_code=trust_remote_code,
            device=device,
            scorer="pylate_flash",
            query_length=settings.query_length,
            document_length=settings.document_length,
        )
    with explained():
        job.prepare_output(output)
    results = job.run(output, model, settings, device=device, console=console, started=started, encoder=encoder)
    if not all(agreement["holds"] for agreement in results["agreement"].values()):
        note("pylate-flash: the two scorers disagree; see results.json")
        raise typer.Exit(1)
