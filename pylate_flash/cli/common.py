"""What the commands share: the terminal, tidy endings, and checks that come before any work."""

from __future__ import annotations

import codecs
import errno
import functools
import io
import logging
import os
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console

from .._extras import MissingExtraError

console = Console()
"""Standard output: the results, and nothing else."""
notes = Console(stderr=True)
"""Standard error: progress, and what is worth knowing beside the results."""

TRACEBACK_VARIABLE = "PYLATE_FLASH_TRACEBACK"
UNEXPECTED = 70
"""Exit code of an error that the command does not know: a mistake of the program rather than of the user."""
_LONGEST_CAUSE = 300


class UserError(Exception):
    """Something that the user can put right: one sentence, exit code 2."""


def say(text: str) -> None:
    """Print a sentence of the results."""
    print(_wrapped(text, console), flush=True)


def note(text: str) -> None:
    """Print a sentence beside the results, on standard error, above a progress bar that may be there."""
    from tqdm import tqdm

    tqdm.write(_wrapped(text, notes), file=sys.stderr)


def _wrapped(text: str, terminal: Console) -> str:
    """A sentence as a terminal shows it best: on lines that end between words, of which none, as a path, is cut."""
    if not terminal.is_terminal:
        return text
    return textwrap.fill(text, terminal.width, break_long_words=False, break_on_hyphens=False)


def print_any_text() -> None:
    """Let characters that the encoding of the output lacks be printed as escapes, where they would be an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in _LETS_PRINT:
            stream.reconfigure(errors=_LETS_PRINT[stream.errors])


def _bytes_or_escapes(error: UnicodeError) -> tuple[str | bytes, int]:
    """The bytes of a file's name that Python keeps as surrogates, and of other characters their escapes."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeEncodeError:
        return codecs.lookup_error("backslashreplace")(error)


codecs.register_error("pylate_flash", _bytes_or_escapes)
# By how a stream treats what its encoding lacks: "surrogateescape" is standard output's in the locale C.
_LETS_PRINT = {"strict": "backslashreplace", "surrogateescape": "pylate_flash"}


def command(function: Callable[..., None]) -> Callable[..., None]:
    """End a command tidily: one line on standard error, and an exit code that says what kind of end it was.

    A `UserError`, and an extra that is not installed, exit with 2, Ctrl-C with 130, any other exception with
    `UNEXPECTED`; a GPU without memory, and a disk that is full or fails, also behind standard output, with 2. With the
    environment variable `PYLATE_FLASH_TRACEBACK` set, the traceback comes before that line.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        print_any_text()
        try:
            function(*args, **kwargs)
            # What is still in memory is written here, where an error can be told. A closed output takes nothing.
            print(end="", flush=True)
        except (UserError, MissingExtraError) as error:
            _fail(" ".join(str(error).split()), 2)
        except KeyboardInterrupt:
            note("pylate-flash: interrupted")
            raise typer.Exit(130) from None
        except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError, SystemExit, GeneratorExit):
            raise
        # Not only Exception: the panics of libraries in Rust, such as tokenizers, are none.
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO):
                try:
                    print(end="", flush=True)
                except OSError:
                    # Or the end of the process would try once more, and exit with a code of its own.
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                _fail(f"reading or writing failed: {cause(error)}", 2)
            if type(error).__name__ == "OutOfMemoryError":  # of torch, which need not be imported for this
                _fail(f"a GPU is out of memory: {cause(error)}; a smaller --batch-size or --device cpu may do", 2)
            _fail(f"unexpected {cause(error, named=True)}; {TRACEBACK_VARIABLE}=1 shows where", UNEXPECTED)

    return wrapped


def _fail(sentence: str, code: int) -> NoReturn:
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exc()
    note(f"pylate-flash: {sentence}")
    raise typer.Exit(code) from None


def cause(error: BaseException, named: bool = False) -> str:
    """What an exception says, on one line of at most some 300 characters.

    The name of its type comes first if it is `named`, or if the message alone may say little, as a KeyError's does.
    """
    text = " ".join(_message(error).split())
    if len(text) > _LONGEST_CAUSE:
        text = text[:_LONGEST_CAUSE].rsplit(" ", 1)[0] + " ..."
    if named or not text or not isinstance(error, ValueError | OSError | ImportError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text


def _message(error: BaseException) -> str:
    """What an exception says, without the number that the system's errors have."""
    if isinstance(error, OSError) and error.strerror:
        # No name where a file is written to that was opened before.
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


@contextmanager
def explained(prefix: str = "", kinds: tuple[type[Exception], ...] = (ValueError, OSError)) -> Iterator[None]:
    """Turn errors that already say what was wrong with an input into a `UserError`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"{prefix}{error.msg}") from error
    except kinds as error:
        raise UserError(f"{prefix}{_message(error)}") from error


def loading(what: str) -> None:
    """Say on standard error what is loaded, before the seconds that it takes."""
    note(f"Loading {what} ...")


def be_quiet() -> None:
    """Keep the libraries' notes about loading off the terminal; warnings about results still come through."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # The libraries read these when they are imported, which takes seconds and is left to whoever needs them.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    # Python compiles a library's files when they are first imported, if no installer did, and warns of what it finds.
    warnings.simplefilter("ignore", SyntaxWarning)
    for name in ("sentence_transformers", "pylate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if "transformers" in sys.modules:
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()


def check_device(device: str | None) -> None:
    """Compute one number there: a device that is missing, unknown, or computes nothing, as "meta", is refused."""
    import torch

    if device is None:
        return
    try:
        torch.ones(1, device=device).sum().item()
    except Exception as error:
        raise UserError(f"--device {device} cannot compute here: {cause(error)}") from error


def decoded(text: str, name: str) -> str:
    """The text of an argument, whose bytes are UTF-8 also where the locale is none; else a `UserError`."""
    if not _is_text(text):
        try:
            # A byte that the locale's encoding lacks is a single surrogate.
            text = os.fsencode(text).decode("utf-8")
        except UnicodeError:
            raise UserError(f"{name} must be valid UTF-8 text, got {ascii(text)}") from None
    return text


def check_text(text: str, name: str) -> None:
    """Refuse a name that libraries cannot take: no UTF-8, or in the locale's encoding no characters at all."""
    if not _is_text(text):
        raise UserError(
            f"{name} {decoded(text, name)!r} is not of the characters of this locale, {sys.getfilesystemencoding()}; "
            "the environment variable PYTHONUTF8=1 makes them those of UTF-8"
        )


def _is_text(text: str) -> bool:
    """Whether there are no single surrogates, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
