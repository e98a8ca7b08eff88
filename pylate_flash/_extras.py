"""The libraries that this package's extras install, and the errors for one that is missing or cannot be used.

Importing this module imports none of them.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple


class Host(NamedTuple):
    """A supported library: its title, its distribution, our extra for it, and the versions that the extra installs.

    With `by_name`, `register()` routes it only if it is named explicitly, as that changes its results.
    """

    title: str
    distribution: str
    extra: str
    supported: str
    by_name: bool = False


# By import name.
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

    `name` is the missing module.
    """


class UnwritableCacheError(RuntimeError):
    """A library that a part of this package needs cannot write its caches; the message says what to set."""


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def check_installed(module: str, needed_by: str, *extras: str, title: str | None = None) -> None:
    """Raise if a module is not installed, without importing it, which may take seconds.

    Parameters
    ----------
    module
        The import name.
    needed_by
        What needs the module, for the message.
    *extras
        The extras of this package that install it.
    title
        The library's name in the message. Default: `module`.

    Raises
    ------
    MissingExtraError
        If there is no module of this name.
    """
    if importlib.util.find_spec(module) is None:
        commands = " or ".join(f'pip install "pylate-flash[{extra}]"' for extra in extras)
        raise MissingExtraError(f"{needed_by} needs {title or module}, which is not installed: {commands}", name=module)


def check_host(module: str, needed_by: str) -> None:
    """Raise, as `check_installed` does, if a library of `HOSTS` is not installed."""
    host = HOSTS[module]
    check_installed(module, needed_by, host.extra, title=host.title)
