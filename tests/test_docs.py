"""The docs build without warnings, and the reference lists everything that users import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pylate_flash
from pylate_flash import beir, evaluation, indexes, losses, matches, models, negatives, rank, scores, trainer

ROOT = Path(__file__).parents[1]
REFERENCE = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "reference").glob("*.md")))


MODULES = [pylate_flash, losses, trainer, models, scores, rank, indexes, beir, matches, negatives, evaluation]


@pytest.mark.parametrize("module", MODULES)
def test_the_reference_has_what_a_module_defines(module) -> None:
    for name in module.__all__:
        value = getattr(module, name)
        if callable(value) and getattr(value, "__module__", "").startswith("pylate_flash"):
            defined = f"{module.__name__}.{name}", f"{value.__module__}.{name}", f"pylate_flash.{name}"
            assert any(f":: {known}\n" in REFERENCE for known in defined), f"{module.__name__}.{name}"


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    options = ["-W", "--keep-going", "-q", "-b", "html"]
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    completed = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert completed.returncode == 0, completed.stderr
    assert "maxsim_cross_entropy" in (tmp_path / "reference" / "operations.html").read_text(encoding="utf-8")
    assert "maxsim_kl_divergence" in (tmp_path / "guides" / "train.html").read_text(encoding="utf-8")
