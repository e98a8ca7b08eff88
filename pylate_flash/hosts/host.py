"""What `register` needs to know about a host: its name, the supported versions, and its routes."""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from .._extras import Host as About
from .._extras import MissingExtraError, check_host


class Host(NamedTuple):
    """A library that this package supports."""

    about: About  # its title, and the versions that the tests run with
    package: str  # import name
    since: str  # first version with the routed functions; an older one, which another host may need, counts as absent
    routes: Any  # `hold` routes the host's functions to this package, `release` restores them

    @property
    def name(self) -> str:
        """The name of its distribution, which `register` takes."""
        return self.about.distribution

    def is_there(self) -> bool:
        """Whether it is installed in a version that has the routed functions."""
        return self._is_importable() and Version(self.version()) >= Version(self.since)

    def version(self) -> str:
        """Return the imported version, or the one that would be imported, without importing it, which takes seconds.

        Raises ImportError if it has no valid version, such as a source folder without an installation.
        """
        installed = getattr(sys.modules.get(self.package), "__version__", None)
        try:
            installed = version(self.name) if installed is None else installed
            Version(installed)
        except (PackageNotFoundError, InvalidVersion) as error:
            raise self._unsupported("without a version" if installed is None else repr(installed)) from error
        return installed

    def check(self, needed_by: str, strict: bool = True) -> None:
        """Raise ImportError, which says what to install, unless a version that the tests run with is installed.

        If not `strict`, any version with the routed functions is accepted. `needed_by` names what needs it.
        """
        check_host(self.package, needed_by)
        title, _, extra, supported, _ = self.about
        if not self._is_importable():
            raise MissingExtraError(
                f"{needed_by} needs {title}, but {self.package} is a folder without an __init__.py here, not an "
                f'installation: pip install "pylate-flash[{extra}]"',
                name=self.package,
            )
        installed = self.version()
        is_served = Version(installed) >= Version(self.since)
        if not SpecifierSet(supported).contains(installed, prereleases=True) and (strict or not is_served):
            raise self._unsupported(installed, ", or try this one with register(strict=False)" if is_served else "")

    def _is_importable(self) -> bool:
        """Whether there is a module: a plain folder of this name, such as a clone, is an empty namespace package."""
        spec = importlib.util.find_spec(self.package)
        return spec is not None and spec.origin is not None

    def _unsupported(self, actual: str, hint: str = "") -> ImportError:
        title, _, _, supported, _ = self.about
        return ImportError(
            f"this version of pylate_flash supports {title} {supported}, but {title} {actual} is installed; install a "
            f'supported one: pip install "{self.name}{supported}"{hint}'
        )
