"""Shared by the commands: the terminal, error handling and exit codes, and checks before any work."""

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

from .._extras import MissingExtraError, UnwritableCacheError
from ..data.files import is_utf_8

console = Console()
"""Standard output: results only."""
notes = Console(stderr=True)
"""Standard error: progress and notes."""

TRACEBACK_VARIABLE = "PYLATE_FLASH_TRACEBACK"
UNEXPECTED = 70
"""Exit code of an unexpected error: a bug in the program, not a mistake of the user."""
READER_GONE = 141
"""Exit code if the reader of standard output has closed it, as `head` does: what a shell reports for SIGPIPE."""
_LONGEST_CAUSE = 300


class UserError(Exception):
    """An error that the user can fix: one sentence, exit code 2."""


def say(text: str) -> None:
    """Print a sentence to standard output."""
    print(_wrapped(text, console), flush=True)


def note(text: str) -> None:
    """Print a sentence to standard error, above any progress bar."""
    from tqdm import tqdm

    tqdm.write(_wrapped(text, notes), file=sys.stderr)


def _wrapped(text: str, terminal: Console) -> str:
    """Wrap a sentence to the width of a terminal without breaking words, such as paths."""
    if not terminal.is_terminal:
        return text
    return textwrap.fill(text, terminal.width, break_long_words=False, break_on_hyphens=False)


def print_any_text() -> None:
    """Print characters that the output encoding lacks as escapes, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in _LETS_PRINT:
            stream.reconfigure(errors=_LETS_PRINT[stream.errors])


def _bytes_or_escapes(error: UnicodeError) -> tuple[str | bytes, int]:
    """Encode surrogates of a file name as their original bytes, and other characters as escapes."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeEncodeError:
        return codecs.lookup_error("backslashreplace")(error)


codecs.register_error("pylate_flash", _bytes_or_escapes)
# Error handler of a stream -> its replacement; "surrogateescape" is that of standard output in the locale C.
_LETS_PRINT = {"strict": "backslashreplace", "surrogateescape": "pylate_flash"}


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Turn exceptions of a command into one line on standard error and an exit code.

    A `UserError`, a missing extra and a library whose caches cannot be written exit with 2, Ctrl-C with 130, and any
    other exception with `UNEXPECTED`; a GPU out of memory, and a disk that is full or fails (standard output included),
    with 2. A broken pipe exits with `READER_GONE`, without a line. If the environment variable `PYLATE_FLASH_TRACEBACK`
    is set, the traceback is printed before that line.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        print_any_text()
        try:
            function(*args, **kwargs)
            # Flush buffered output here, where an error can be reported. A no-op if standard output is closed.
            print(end="", flush=True)
        except (UserError, MissingExtraError, UnwritableCacheError) as error:
            _fail(" ".join(str(error).split()), 2)
        except KeyboardInterrupt:
            note("pylate-flash: interrupted")
            raise typer.Exit(130) from None
        except (BrokenPipeError, SystemExit) as error:
            # click and rich handle a broken pipe by exiting with 1.
            if not any(isinstance(one, BrokenPipeError) for one in (error, error.__context__)):
                raise
            _discard_output()
            raise typer.Exit(READER_GONE) from None
        except (typer.Exit, typer.Abort, typer.BadParameter, GeneratorExit):
            raise
        # Not only Exception: panics of Rust libraries, such as tokenizers, derive from BaseException.
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO):
                try:
                    print(end="", flush=True)
                except OSError:
                    _discard_output()
                _fail(f"reading or writing failed: {cause(error)}", 2)
            if type(error).__name__ == "OutOfMemoryError":  # torch's, matched by name without importing torch
                _fail(f"a GPU is out of memory: {cause(error)}; try a smaller --batch-size or --device cpu", 2)
            _fail(f"unexpected {cause(error, named=True)}; {TRACEBACK_VARIABLE}=1 shows where", UNEXPECTED)

    return wrapped


def _discard_output() -> None:
    """Discard buffered output, which the interpreter would flush at exit, and then change the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(sentence: str, code: int) -> NoReturn:
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exc()
    note(f"pylate-flash: {sentence}")
    raise typer.Exit(code) from None


def cause(error: BaseException, named: bool = False) -> str:
    """The message of an exception on one line of at most some 300 characters.

    Its type comes first if `named`, or if the message alone may be unclear, as for a KeyError.
    """
    text = " ".join(_message(error).split())
    if len(text) > _LONGEST_CAUSE:
        text = text[:_LONGEST_CAUSE].rsplit(" ", 1)[0] + " ..."
    if named or not text or not isinstance(error, ValueError | OSError | ImportError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text


def _message(error: BaseException) -> str:
    """The message of an exception; for an OSError without its errno."""
    if isinstance(error, OSError) and error.strerror:
        # Errors while writing to an open file have no file name.
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


@contextmanager
def explained(prefix: str = "", kinds: tuple[type[Exception], ...] = (ValueError, OSError)) -> Iterator[None]:
    """Convert errors whose message already explains a bad input to a `UserError`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"{prefix}{error.msg}") from error
    except kinds as error:
        raise UserError(f"{prefix}{_message(error)}") from error


def loading(what: str) -> None:
    """Note on standard error what is being loaded, as it takes seconds."""
    note(f"Loading {what} ...")


def be_quiet() -> None:
    """Silence the libraries' messages about loading; warnings about results are still shown."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Read by the libraries when they are imported, which takes seconds and is left to the code that needs them.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    # Python compiles files on first import, if the installer did not, and emits SyntaxWarnings then.
    warnings.simplefilter("ignore", SyntaxWarning)
    for name in ("sentence_transformers", "pylate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if "transformers" in sys.modules:
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()


def check_device(device: str | None) -> None:
    """Compute one number on the device: reject one that is missing, unknown, or cannot compute, such as "meta"."""
    import torch

    if device is None:
        return
    try:
        torch.ones(1, device=device).sum().item()
    except Exception as error:
        raise UserError(f"--device {device} cannot compute here: {cause(error)}") from error


def decoded(text: str, name: str) -> str:
    """Decode an argument's bytes as UTF-8, whatever the locale; raise a `UserError` if they are not."""
    if not is_utf_8(text):
        try:
            # Bytes that the locale's encoding cannot decode are lone surrogates.
            text = os.fsencode(text).decode("utf-8")
        except UnicodeError:
            raise UserError(f"{name} must be valid UTF-8 text, got {ascii(text)}") from None
    return text


def check_text(text: str, name: str) -> None:
    """Reject a name that libraries cannot handle: not UTF-8, or not decodable in the locale's encoding."""
    if not is_utf_8(text):
        raise UserError(
            f"{name} {decoded(text, name)!r} cannot be encoded in this locale, {sys.getfilesystemencoding()}; "
            "set the environment variable PYTHONUTF8=1 to use UTF-8"
        )
