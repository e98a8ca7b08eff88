"""Quality and cost of indexes in fewer bits: measurements of a small collection, their table and their picture."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("fastkmeans")

import few_bits
from tests.pylate_checkpoint import WORDS


@pytest.fixture
def collection(tmp_path):
    folder = tmp_path / "words"
    (folder / "qrels").mkdir(parents=True)
    texts = [f"{first} {second}" for first in WORDS for second in WORDS]
    for name, lines in (("corpus", texts), ("queries", WORDS[:6])):
        rows = [{"_id": f"{name}{i}", "text": text} for i, text in enumerate(lines)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    relevant = [f"queries{i}\tcorpus{i * len(WORDS)}\t1\n" for i in range(6)]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(relevant))
    return folder


def test_a_collection(collection, pylate_checkpoint, tmp_path, monkeypatch, capsys):
    out = tmp_path / "few-bits.json", tmp_path / "few-bits.png"
    monkeypatch.setattr(sys, "argv", ["few_bits.py", str(pylate_checkpoint), *map(str, out), str(collection)])
    few_bits.main()
    result = json.loads(out[0].read_text())["collections"]
    assert [(c["collection"], c["documents"], c["queries"]) for c in result] == [("words", len(WORDS) ** 2, 6)]
    rows = {row["system"]: row for row in result[0]["rows"]}
    assert rows["float32"]["exact@100"] == 1.0
    # Scoring 200 again in 16 bits covers all 169 documents.
    for dtype in few_bits.FEWER:
        assert rows[f"{dtype}, 200 again"]["exact@100"] == rows["bfloat16"]["exact@100"]
        both = rows[dtype]["bytes"] + rows["bfloat16"]["bytes"]
        assert 0 < rows[dtype]["bytes"] < rows[f"{dtype}, 200 again"]["bytes"] == pytest.approx(both)
    assert rows["residual4"]["bytes"] < rows["bfloat16"]["bytes"] < rows["float32"]["bytes"]
    assert out[1].stat().st_size > 10_000
    assert "| residual4, 200 again | " in capsys.readouterr().out
