"""What `register` knows of a host: its name, the versions that it fits, and what holds and releases its routes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .._extras import Host as About
from .._extras import check_host


class Host(NamedTuple):
    """A library that this package serves.

    Parameters
    ----------
    about
        What it is called, and the versions that the tests run with.
    package
        What is imported.
    since
        The first version that has what is served. An older one, which another host may need, is no host.
    hold, release
        Route its functions to this package, and give them back.
    """

    about: About
    package: str
    since: str
    hold: Callable[[], None]
    release: Callable[[], None]

    @property
    def name(self) -> str:
        """That of its distribution, which `register` takes."""
        return self.about.distribution

    def is_there(self) -> bool:
        """Whether it is installed, in a version that has what is served."""
        return importlib.util.find_spec(self.package) is not None and Version(self.version()) >= Version(self.since)

    def version(self) -> str:
        """The version that was imported, or would be: importing it takes seconds."""
        found = getattr(sys.modules.get(self.package), "__version__", None)
        return version(self.name) if found is None else found

    def check(self, strict: bool = True) -> None:
        """Raise ImportError unless it is installed, in one of the supported versions; any that has it, if not strict.

        Raises
        ------
        ImportError
            Which says what to install.
        """
        check_host(self.package, f'register("{self.name}")')
        found, (title, _, _, supported) = self.version(), self.about
        has_it = Version(found) >= Version(self.since)
        if not SpecifierSet(supported).contains(found, prereleases=True) and (strict or not has_it):
            raise ImportError(
                f"this version of pylate_flash supports {title} {supported}, and {title} {found} is installed; install "
                f'a supported one: pip install "{self.name}{supported}"'
                + (", or try this one with register(strict=False)" if has_it else "")
            )
