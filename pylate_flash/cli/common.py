"""What the commands share: the terminal, tidy endings, and checks that come before any work."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from ..models import ColBERT

console = Console()


class Scorer(str, Enum):
    """Who computes the scores."""

    pylate_flash = "pylate_flash"
    torch = "torch"
    flash = "flash"
    lik = "lik"
    auto = "auto"


class UserError(Exception):
    """Something that the user can put right: one sentence, exit code 2."""


def command(function: Callable[..., None]) -> Callable[..., None]:
    """End a command tidily: a `UserError` is one line and exit code 2, Ctrl-C one line and 130."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except UserError as error:
            print(f"pylate-flash: {' '.join(str(error).split())}", file=sys.stderr)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            print("pylate-flash: interrupted", file=sys.stderr)
            raise typer.Exit(130) from None

    return wrapped


@contextmanager
def explained(prefix: str = "", kinds: tuple[type[Exception], ...] = (ValueError, OSError)) -> Iterator[None]:
    """Turn errors that already say what was wrong with an input into a `UserError`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"{prefix}{error.msg}") from error
    except kinds as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"{prefix}{text}") from error


def be_quiet() -> None:
    """Keep the libraries' notes about loading off the terminal; warnings about results still come through."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import logging as python_logging

    from datasets import disable_progress_bars
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    python_logging.getLogger("sentence_transformers").setLevel(python_logging.ERROR)
    disable_progress_bars()


def load_model(model: str, **options: Any) -> ColBERT:
    from ..models import ColBERT

    try:
        return ColBERT(model, **options)
    except (OSError, ValueError) as error:
        if Path(model).is_dir():
            raise UserError(f"the model in {model} cannot be loaded: {error}") from error
        raise UserError(
            f"the model {model!r} cannot be loaded: there is no such folder, and it could not be fetched by that name"
        ) from error


def check_scorer(scorer: str | None, device: Any) -> None:
    """Score one token with it: what is not installed, or cannot compute here, says so before the work starts."""
    import torch

    from ..scores import colbert_scores

    one = torch.ones(1, 1, 16, device=device)
    try:
        colbert_scores(one, one, backend=scorer)
    except Exception as error:
        raise UserError(f"--scorer {scorer} cannot compute on {device}: {error}") from error


def check_model_name(model: str) -> None:
    """A folder must hold a model; what looks like a path must exist; anything else may be the name of one."""
    path = Path(model)
    if path.is_dir():
        if not any((path / name).is_file() for name in ("modules.json", "config.json")):
            raise UserError(f"{model} holds no model: it has neither modules.json nor config.json")
    elif path.exists():
        raise UserError(f"{model} is a file; --model expects the folder of a model, or a name")
    elif model.startswith((".", "/", "~")) or model.count("/") > 1 or path.parts[:1] == ("demo-output",) or not model:
        hint = "; run `pylate-flash demo` first, or name one with --model" if model == "demo-output/model" else ""
        raise UserError(f"there is no model in {model!r}{hint}")


def check_installed(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise UserError(f"{module} is not installed: pip install 'pylate-flash[demo,eval]'")


def check_device(device: str | None) -> None:
    import torch

    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device}: {str(error).splitlines()[0]}") from error


def check_file(path: Path) -> None:
    if not path.is_file():
        raise UserError(f"there is no file {path}")
