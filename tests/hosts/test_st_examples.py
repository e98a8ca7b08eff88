"""The example and the notebook for sentence-transformers run as they stand, with a tiny model."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pylate_flash

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "sentence_transformers_6.py"
NOTEBOOK = ROOT / "notebooks" / "sentence_transformers_6.ipynb"


def test_example(tiny_encoder_path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [EXAMPLE.name, tiny_encoder_path])
    try:
        variables = runpy.run_path(str(EXAMPLE), run_name="__main__")
    finally:
        pylate_flash.unregister()
    assert variables["ours"].shape == (40, 80)
    assert (variables["ours"] - variables["theirs"]).abs().max() < 1e-4
    assert "nDCG@10" in capsys.readouterr().out


def test_the_guides_snippet(tiny_encoder_path):
    guide = (ROOT / "docs" / "guides" / "hosts.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n([^`]*MultiVectorEncoder[^`]*)```", guide)
    variables: dict[str, object] = {}
    try:
        exec(compile(snippet.replace("demo-output/model", tiny_encoder_path), "hosts.md", "exec"), variables)
    finally:
        pylate_flash.unregister()
    assert variables["scores"].shape == (1, 1)


def test_the_snippet_of_mteb(tiny_encoder_path, tmp_path, monkeypatch):
    from tests.mteb_tasks import take_offline

    monkeypatch.chdir(tmp_path)
    documents = [{"id": "d1", "text": "the cat sleeps"}, {"id": "d2", "text": "a red river"}]
    take_offline(monkeypatch, (documents, {"q1": "a river"}, {"q1": {"d2": 1}}))
    guide = (ROOT / "docs" / "guides" / "evaluate.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n([^`]*MultiVectorEncoder[^`]*)```", guide)
    variables = {}
    exec(compile(snippet.replace("demo-output/model", tiny_encoder_path), "evaluate.md", "exec"), variables)
    assert 0 < variables["results"].task_results[0].get_score() <= 1
    assert list((tmp_path / "encoded").glob("*/*/catalog.sqlite"))


def test_notebook(tiny_encoder_path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    variables: dict[str, object] = {}
    try:
        for cell in cells:
            parameters = "parameters" in cell["metadata"].get("tags", [])
            source = f"encoder = {tiny_encoder_path!r}" if parameters else "".join(cell["source"])
            exec(compile(source, NOTEBOOK.name, "exec"), variables)
    finally:
        pylate_flash.unregister()
    printed = capsys.readouterr().out
    assert "the very same function: True" in printed
    assert "no padding has won: True and the empty one scores -1000000000.0" in printed
    assert "first by both: 20 of 20" in printed


def test_notebook_is_committed_with_outputs_and_without_machine_paths():
    text = NOTEBOOK.read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert sum(bool(cell["outputs"]) for cell in cells) == 5
    assert not any(output["output_type"] == "error" for cell in cells for output in cell["outputs"])
    assert not re.search(r"/(?:home|root|Users|tmp|work|usr)/|[A-Z]:\\\\", text)
