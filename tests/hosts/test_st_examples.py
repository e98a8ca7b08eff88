"""The example for sentence-transformers runs as it stands, with a tiny model."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import pylate_flash

EXAMPLE = Path(__file__).parents[2] / "examples" / "sentence_transformers_6.py"


def test_example(
    tiny_encoder_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [EXAMPLE.name, tiny_encoder_path])
    try:
        variables = runpy.run_path(str(EXAMPLE), run_name="__main__")
    finally:
        pylate_flash.unregister()
    assert variables["ours"].shape == (40, 80)
    assert (variables["ours"] - variables["theirs"]).abs().max() < 1e-4
    assert "nDCG@10" in capsys.readouterr().out
