"""What the commands share: the terminal, tidy endings, and checks that come before any work."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer
from rich.console import Console

from .._extras import MissingExtraError
from .model_folder import check_model_folder, no_missing_weights

if TYPE_CHECKING:
    from ..models import ColBERT

console = Console()
"""Standard output: the results, and nothing else."""
notes = Console(stderr=True)
"""Standard error: progress, and what is worth knowing beside the results."""

TRACEBACK_VARIABLE = "PYLATE_FLASH_TRACEBACK"
UNEXPECTED = 70
"""Exit code of an error that the command does not know: a mistake of the program rather than of the user."""
_LONGEST_CAUSE = 300


class Scorer(str, Enum):
    """Who computes the scores."""

    pylate_flash = "pylate_flash"
    torch = "torch"
    flash = "flash"
    lik = "lik"
    auto = "auto"


TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run code that comes with the model: it can do whatever you can. Default: refuse."
    ),
]


class UserError(Exception):
    """Something that the user can put right: one sentence, exit code 2."""


def command(function: Callable[..., None]) -> Callable[..., None]:
    """End a command tidily: one line on standard error, and an exit code that says what kind of end it was.

    A `UserError`, and an extra that is not installed, exit with 2, Ctrl-C with 130, any other exception with
    `UNEXPECTED`. With the environment variable `PYLATE_FLASH_TRACEBACK` set, the traceback comes before that line.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except (UserError, MissingExtraError) as error:
            _fail(" ".join(str(error).split()), 2)
        except KeyboardInterrupt:
            print("pylate-flash: interrupted", file=sys.stderr)
            raise typer.Exit(130) from None
        except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError, SystemExit, GeneratorExit):
            raise
        # Not only Exception: the panics of libraries in Rust, such as tokenizers, are none.
        except BaseException as error:
            _fail(f"unexpected {cause(error, named=True)}; {TRACEBACK_VARIABLE}=1 shows where", UNEXPECTED)

    return wrapped


def _fail(sentence: str, code: int) -> NoReturn:
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exc()
    print(f"pylate-flash: {sentence}", file=sys.stderr)
    raise typer.Exit(code) from None


def cause(error: BaseException, named: bool = False) -> str:
    """What an exception says, on one line of at most some 300 characters.

    The name of its type comes first if it is `named`, or if the message alone may say little, as a KeyError's does.
    """
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        text = " ".join(str(error).split())
    if len(text) > _LONGEST_CAUSE:
        text = text[:_LONGEST_CAUSE].rsplit(" ", 1)[0] + " ..."
    if named or not text or not isinstance(error, ValueError | OSError | ImportError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text


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


def loading(what: str) -> None:
    """Say on standard error what is loaded, before the seconds that it takes."""
    print(f"Loading {what} ...", file=sys.stderr, flush=True)


def be_quiet() -> None:
    """Keep the libraries' notes about loading off the terminal; warnings about results still come through."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # The libraries read these when they are imported, which takes seconds and is left to whoever needs them.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    for name in ("sentence_transformers", "pylate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if "transformers" in sys.modules:
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()


def load_model(model: str, *, searching: bool = False, trust_remote_code: bool = False, **options: Any) -> ColBERT:
    """Load a model that can be used: it has been seen to encode, and its lengths are ones that its encoder allows.

    Parameters
    ----------
    model
        A folder, or a name on the model hub.
    searching
        Whether it is loaded to search or to be searched: a projection drawn at random is refused then.
    trust_remote_code
        Whether code that comes with the model may run.
    **options
        Those of `models.ColBERT`.

    Raises
    ------
    UserError
        If it cannot be loaded, whatever the loader raised, or cannot be used.
    """
    what = f"the model in {model}" if os.path.isdir(model) else f"the model {model!r}"
    if os.path.isdir(model):
        with explained(f"{what} cannot be loaded: "):
            check_model_folder(Path(model), trust_remote_code)
    from ..models import ColBERT

    with _loader_errors(model, what):
        with no_missing_weights():
            colbert = ColBERT(model, trust_remote_code=trust_remote_code, **options)
        _check_words(colbert)
    _check_lengths(colbert, what, options)
    if searching and colbert.projection_is_random:
        raise UserError(
            f"{what} is an encoder without a projection: a random one would be drawn, which finds nothing; train it "
            "first with `pylate-flash train`"
        )
    _check_encodes(colbert, what)
    return colbert


@contextmanager
def _loader_errors(model: str, what: str) -> Iterator[None]:
    """Turn whatever a loader raises about a model into a `UserError`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if "trust_remote_code" in str(error):
            text = f"{what} cannot be loaded: it comes with code of its own; --trust-remote-code runs it"
        elif "ignore_mismatched_sizes" in str(error):
            text = f"{what} cannot be loaded: its weights have other sizes than its config.json says"
        elif os.path.isdir(model) or not isinstance(error, OSError):
            text = f"{what} cannot be loaded: {cause(error)}"
        else:
            offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if _is_set(name)]
            why = (
                f"it is not in the cache, and {offline[0]} is set, so that nothing was fetched"
                if offline
                else "it could not be fetched by that name"
            )
            text = f"{what} cannot be loaded: there is no such folder, and {why}"
        raise UserError(text) from error


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE")


def _check_words(colbert: ColBERT) -> None:
    """The tokenizer must have words, and the encoder an embedding of each: transformers and PyLate ask for neither."""
    added = colbert.tokenizer.get_added_vocab()
    numbers = [number for word, number in colbert.tokenizer.get_vocab().items() if word not in added]
    if not numbers:
        raise ValueError("its tokenizer has no words; are tokenizer.json or the vocabulary missing?")
    encoder: Any = colbert[0]
    rows = getattr(encoder.auto_model.get_input_embeddings(), "num_embeddings", None)
    if rows is not None and max(numbers) >= rows:
        raise ValueError(f"the number of a word in its tokenizer is {max(numbers)}, and its encoder knows {rows} words")


def _check_lengths(colbert: ColBERT, what: str, options: dict[str, Any]) -> None:
    limit = colbert.longest_input
    for name in ("query_length", "document_length"):
        value = getattr(colbert, name)
        given = options.get(name) is not None
        subject = f"--{name.replace('_', '-')} {value}" if given else f"{what}: its {name}, {value!r},"
        if not isinstance(value, int) or isinstance(value, bool) or value < 4:
            raise UserError(f"{subject} must be a whole number of at least 4")
        if limit is not None and value > limit:
            more = "" if given else f"; give a lower --{name.replace('_', '-')}"
            raise UserError(f"{subject} is more than the {limit} tokens that {what if given else 'it'} can read{more}")


def _check_encodes(colbert: ColBERT, what: str) -> None:
    """Encode a word: what does not fit together in a model, or is not finite, says so before the work starts."""
    import numpy as np

    for is_query in (True, False):
        try:
            embeddings = cast("list[Any]", colbert.encode(["a"], is_query=is_query, show_progress_bar=False))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise UserError(f"{what} cannot encode: {cause(error)}") from error
        if not np.isfinite(embeddings[0]).all():
            raise UserError(f"{what} encodes a text as NaN or infinity: its weights are broken")


def check_scorer(scorer: str | None, device: Any) -> None:
    """Score one token with it: what is not installed, or cannot compute here, says so before the work starts."""
    import torch

    from ..scores import colbert_scores

    one = torch.ones(1, 1, 16, device=device)
    try:
        colbert_scores(one, one, backend=scorer)
    except Exception as error:
        raise UserError(f"--scorer {scorer} cannot compute on {device}: {cause(error)}") from error


def check_model_name(model: str) -> None:
    """A folder must hold a model; what looks like a path must exist; anything else may be the name of one."""
    check_text(model, "--model")
    if os.path.isdir(model):
        if not any(os.path.isfile(os.path.join(model, name)) for name in ("modules.json", "config.json")):
            raise UserError(f"{model} holds no model: it has neither modules.json nor config.json")
    elif os.path.exists(model):
        raise UserError(f"{model} is a file; --model expects the folder of a model, or a name")
    elif (
        model.startswith((".", "/", "~"))
        or model.count("/") > 1
        or Path(model).parts[:1] == ("demo-output",)
        or not model.strip()
    ):
        hint = "; run `pylate-flash demo` first, or name one with --model" if model == "demo-output/model" else ""
        raise UserError(f"there is no model in {model!r}{hint}")


def check_installed(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise UserError(f"{module} is not installed: pip install 'pylate-flash[demo,eval]'")


def check_device(device: str | None) -> None:
    """Compute one number there: a device that is missing, unknown, or computes nothing, as "meta", is refused."""
    import torch

    if device is None:
        return
    try:
        torch.ones(1, device=device).sum().item()
    except Exception as error:
        raise UserError(f"--device {device} cannot compute here: {cause(error)}") from error


def check_text(text: str, name: str) -> None:
    """Refuse what was no UTF-8 on the command line, and single surrogates: no tokenizer takes them."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{name} must be valid UTF-8 text, got {ascii(text)}") from None


def check_file(path: Path) -> None:
    """There must be something to read, be it a file or a pipe such as /dev/fd/63, which can be read only once."""
    if os.path.isdir(path):
        raise UserError(f"{path} is a folder; name a file")
    if not os.path.exists(path):
        raise UserError(f"there is no file {path}")
    if not os.access(path, os.R_OK):
        raise UserError(f"{path} may not be read: permission denied")


def check_new_file(path: Path, option: str) -> None:
    """A file must be writable there, or in the place of what is there; nothing is left of the trial."""
    if os.path.isdir(path):
        raise UserError(f"{option}: {path} is a folder; name a file")
    if not os.path.isdir(path.parent):
        raise UserError(f"{option}: there is no folder {path.parent}")
    with explained(f"{option}: "):
        if not os.path.lexists(path):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            os.unlink(path)
        elif os.path.isfile(path):
            os.close(os.open(path, os.O_WRONLY))
        elif not os.path.exists(path):
            raise ValueError(f"{path} is a link to nothing")


def check_new_folder(path: Path, option: str) -> None:
    """A folder must be writable there, or can be made there; nothing is left of the trial."""
    missing = []
    place = path.absolute()
    while not os.path.lexists(place):
        missing.append(place)
        place = place.parent
    if not os.path.isdir(place):
        raise UserError(f"{option}: {place} is a file" + ("" if missing else "; name a folder"))
    made: list[Path] = []
    with explained(f"{option}: "):
        try:
            for folder in reversed(missing):
                folder.mkdir()
                made.append(folder)
            with tempfile.NamedTemporaryFile(dir=path, prefix=".pylate-flash-"):
                pass
        finally:
            for folder in reversed(made):
                folder.rmdir()


def write_file(path: Path, text: str, option: str) -> None:
    """Write a file so that it holds, at every moment, what it held before or all of the text."""
    with explained(f"{option}: "):
        if _is_standard_output(path):
            # Its own stream, because a second one would begin at the start of the file that it goes to.
            print(text, end="")
            return
        if os.path.exists(path) and not os.path.isfile(path):  # a pipe
            path.write_text(text, encoding="utf-8")
            return
        place = path.resolve()
        descriptor, part = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name[:32]}-")
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(part, place.stat().st_mode & 0o777 if place.exists() else 0o666 & ~mask)
            os.replace(part, place)
        except BaseException:
            os.unlink(part)
            raise


def _is_standard_output(path: Path) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(1))
    except (OSError, ValueError):
        return False
