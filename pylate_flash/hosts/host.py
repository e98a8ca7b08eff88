"""What `register` knows of a host: its name, the versions that it fits, and what holds and releases its routes."""

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
    """A library that this package serves."""

    about: About  # what it is called, and the versions that the tests run with
    package: str  # what is imported
    since: str  # the first version that has what is served: an older one, which another host may need, is no host
    routes: Any  # whose `hold` routes its functions to this package, and `release` gives them back

    @property
    def name(self) -> str:
        """That of its distribution, which `register` takes."""
        return self.about.distribution

    def is_there(self) -> bool:
        """Whether it is installed, in a version that has what is served."""
        return self._is_importable() and Version(self.version()) >= Version(self.since)

    def version(self) -> str:
        """The version that was imported, or would be: importing it takes seconds.

        ImportError if it has none that can be compared, as a folder of its sources beside no installation has.
        """
        found = getattr(sys.modules.get(self.package), "__version__", None)
        try:
            found = version(self.name) if found is None else found
            Version(found)
        except (PackageNotFoundError, InvalidVersion) as error:
            raise self._unsupported("without a version" if found is None else repr(found)) from error
        return found

    def check(self, needed_by: str, strict: bool = True) -> None:
        """Raise ImportError, which says what to install, unless there is one of the versions that the tests run with.

        If not `strict`, any version will do that has what is served. `needed_by` names what needs it.
        """
        check_host(self.package, needed_by)
        title, _, extra, supported, _ = self.about
        if not self._is_importable():
            raise MissingExtraError(
                f"{needed_by} needs {title}, and {self.package} is a folder without an __init__.py here, which is no "
                f'installation: pip install "pylate-flash[{extra}]"',
                name=self.package,
            )
        found = self.version()
        has_it = Version(found) >= Version(self.since)
        if not SpecifierSet(supported).contains(found, prereleases=True) and (strict or not has_it):
            raise self._unsupported(found, ", or try this one with register(strict=False)" if has_it else "")

    def _is_importable(self) -> bool:
        """Whether there is a module: a mere folder of this name, as of a clone, is a package of nothing."""
        spec = importlib.util.find_spec(self.package)
        return spec is not None and spec.origin is not None

    def _unsupported(self, found: str, otherwise: str = "") -> ImportError:
        title, _, _, supported, _ = self.about
        return ImportError(
            f"this version of pylate_flash supports {title} {supported}, and {title} {found} is installed; install a "
            f'supported one: pip install "{self.name}{supported}"{otherwise}'
        )
