"""Differences between versions of Triton."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import triton

from pylate_flash.kernels import versions


@pytest.mark.parametrize(
    ("version", "expected"), [("3.6.0", (3, 6)), ("3.10.0", (3, 10)), ("3.9.0+git1a2b", (3, 9)), ("4.0.0rc1", (4, 0))]
)
def test_a_version_is_two_numbers(version: str, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    assert versions.triton_version.__wrapped__() == expected


def test_the_installed_version_is_one_that_is_tested() -> None:
    first, last = versions.TESTED
    assert first <= versions.triton_version() <= last


def test_no_version_is_installed_that_is_older_than_those_tested() -> None:
    """pip would keep an installed older Triton, with which no kernel compiles."""
    major, minor = versions.TESTED[0]
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"triton>={major}.{minor}; ' in project


@pytest.mark.parametrize(("version", "has"), [((3, 5), False), ((3, 6), True), ((3, 9), True), ((4, 0), True)])
def test_gluon_before_3_6_is_another_language(version, has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "triton_version", lambda: version)
    assert versions.has_gluon.__wrapped__() is has


def test_a_triton_without_gluon_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon.language.nvidia", None)
    assert not versions.has_gluon.__wrapped__()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"async_copy_global_to_shared": "copy"}, "copy"),
        ({"async_copy_global_to_shared": "an error", "async_load": "load"}, "load"),
        ({"async_load": "load"}, "load"),
    ],
    ids=["3.6", "3.8", "later"],
)
def test_a_copy_goes_by_the_newest_name(names: dict[str, str], expected: str) -> None:
    module = ModuleType("async_copy")
    vars(module).update(names)
    assert versions.copy_to_shared(module) == expected


@pytest.mark.parametrize(("version", "known"), [((3, 5), False), ((3, 6), True), ((3, 9), True), ((3, 10), False)])
def test_the_launcher_of_tested_versions_is_known(version, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "triton_version", lambda: version)
    assert versions.launcher_is_known() is known
