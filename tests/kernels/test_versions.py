"""Differences between versions of Triton."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import triton

from pylate_flash.cli import doctor
from pylate_flash.kernels import tables, versions


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


def tools(**numbers: str) -> SimpleNamespace:
    """Triton's knobs, with versions of ptxas by their names."""
    named = {name: SimpleNamespace(path=f"/bin/{name}", version=version) for name, version in numbers.items()}
    return SimpleNamespace(nvidia=SimpleNamespace(**named))


@pytest.mark.parametrize(
    ("version", "knobs", "expected"),
    [
        ((3, 9), tools(ptxas="12.9", ptxas_blackwell="13.4"), ("/bin/ptxas", "12.9")),
        ((3, 10), tools(ptxas="12.9", ptxas_blackwell="14.0"), ("/bin/ptxas", "12.9")),
        ((3, 9), tools(ptxas="12.9", ptxas_blackwell="12.9"), None),
        ((3, 9), tools(ptxas="13.0", ptxas_blackwell="13.4"), None),
        ((3, 9), tools(ptxas_blackwell="13.4"), None),
        ((3, 8), tools(ptxas="12.8", ptxas_blackwell="13.1"), None),
    ],
    ids=["3.9", "later", "set already", "none older", "no other", "3.8 compiles for Hopper by the first"],
)
def test_the_better_ptxas(version, knobs, expected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "triton_version", lambda: version)
    monkeypatch.setattr(triton, "knobs", knobs)
    assert versions.better_ptxas() == expected


def test_the_better_ptxas_of_what_is_installed_is_a_file() -> None:
    found = versions.better_ptxas()
    assert found is None or (Path(found[0]).exists() and found[1].startswith("12."))


@pytest.mark.parametrize(("major", "named"), [(9, True), (10, False), (8, False)])
def test_doctor_names_the_better_ptxas_on_hopper_alone(major, named, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "architecture", lambda device: (major, 132))
    monkeypatch.setattr(versions, "better_ptxas", lambda: ("/bin/ptxas", "12.9"))
    printed = doctor._about_triton(torch.device("cuda"))
    assert ("TRITON_PTXAS_BLACKWELL_PATH=/bin/ptxas" in printed) is named
