"""What the extras of this package install, and the error where one of it is needed and not there.

Importing this module imports none of it.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple


class Host(NamedTuple):
    """A library that is served: what it is called, its distribution, our extra of it, the versions it installs.

    With `by_name`, `register()` takes it only where it is named: what it finds is then other than before.
    """

    title: str
    distribution: str
    extra: str
    supported: str
    by_name: bool = False


# By the name that it is imported by.
HOSTS = {
    "pylate": Host("PyLate", "pylate", "pylate", ">=1.6,<1.7"),
    "sentence_transformers": Host(
        "sentence-transformers", "sentence-transformers", "sentence-transformers", ">=6.0,<7"
    ),
    "colpali_engine": Host("colpali-engine", "colpali-engine", "colpali", ">=0.3.18,<0.4"),
    "mteb": Host("mteb", "mteb", "mteb", ">=2.26,<3", by_name=True),
}


class MissingExtraError(ModuleNotFoundError):
    """A part of this package needs a library that is not installed; the message names the extra that installs it.

    `name` is the module that was looked for.
    """


def check_installed(module: str, needed_by: str, *extras: str, title: str | None = None) -> None:
    """Refuse what needs a module that is not installed. It is not imported, which may take seconds.

    Parameters
    ----------
    module
        The name that it is imported by.
    needed_by
        What needs it, for the message.
    *extras
        The extras of this package that install it.
    title
        What it is called. Default: `module`.

    Raises
    ------
    MissingExtraError
        If there is no module of this name.
    """
    if importlib.util.find_spec(module) is None:
        commands = " or ".join(f'pip install "pylate-flash[{extra}]"' for extra in extras)
        raise MissingExtraError(f"{needed_by} needs {title or module}, which is not installed: {commands}", name=module)


def check_host(module: str, needed_by: str) -> None:
    """Refuse, as `check_installed` does, what needs a library of `HOSTS` that is not installed."""
    host = HOSTS[module]
    check_installed(module, needed_by, host.extra, title=host.title)
