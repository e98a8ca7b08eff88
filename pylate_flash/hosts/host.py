"""What `register` knows of a host: its name, the versions that it fits, and what holds and releases its routes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version


class Host(NamedTuple):
    """A library that this package serves.

    Parameters
    ----------
    name
        Of its distribution, which `register` takes.
    title
        What its users call it.
    package
        What is imported.
    extra
        The extra of this package that installs it.
    supported
        The versions that the tests run with.
    since
        The first version that has what is served. An older one, which another host may need, is no host.
    hold, release
        Route its functions to this package, and give them back.
    """

    name: str
    title: str
    package: str
    extra: str
    supported: str
    since: str
    hold: Callable[[], None]
    release: Callable[[], None]

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
        if importlib.util.find_spec(self.package) is None:
            raise ImportError(f'{self.title} is not installed: pip install "pylate-flash[{self.extra}]"')
        found = self.version()
        outside = not SpecifierSet(self.supported).contains(found, prereleases=True)
        if outside and (strict or Version(found) < Version(self.since)):
            raise ImportError(
                f"this version of pylate_flash supports {self.title} {self.supported}, and {self.title} {found} is "
                f'installed; install a supported one: pip install "{self.name}{self.supported}"'
                + (", or try it with register(strict=False)" if Version(found) >= Version(self.since) else "")
            )
