"""The comparison of two trainings tells equal ones from different ones, and draws both."""

from __future__ import annotations

import json

import pytest

from pylate_flash.bench import drift
from pylate_flash.bench.results import FOLDER


def test_drift_is_the_mean_absolute_difference() -> None:
    assert drift.drift([1.0, 2.0, 3.0], [1.5, 2.0, 2.0]) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="shorter|longer"):
        drift.drift([1.0], [1.0, 2.0])


@pytest.mark.parametrize("comparison", drift.Comparison)
def test_both_ways_train_alike(comparison: drift.Comparison, tiny_colbert_path, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    pairs = tmp_path / "pairs.jsonl"
    texts = ("sort a list", "read a file", "plot a curve", "parse a date", "join two tables", "fit a line")
    rows = [{"query": text, "positive": f"This function is here to {text}."} for text in texts]
    pairs.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    drift.main(comparison, tmp_path / "out", model=tiny_colbert_path, pairs=pairs, steps=4, batch_size=3)
    result = json.loads((tmp_path / "out" / f"drift-{comparison.value}.json").read_text(encoding="utf-8"))
    first, second = result["losses"].values()
    assert len(first) == len(second) == 4
    assert len(set(first)) == 4, "the model must change"
    assert result["mean_absolute_drift_of_a_repetition"] == 0.0
    # Hidden states are projected in bfloat16 and normalised in float32; embeddings are normalised in bfloat16.
    assert result["mean_absolute_drift"] <= (1e-3 if comparison is drift.Comparison.scorers else 1e-2)
    assert (tmp_path / "out" / f"drift-{comparison.value}.png").stat().st_size > 1000


@pytest.mark.parametrize("path", sorted(FOLDER.glob("drift-*.json")), ids=lambda path: path.stem)
def test_what_is_kept_says_what_its_curves_say(path) -> None:
    kept = json.loads(path.read_text(encoding="utf-8"))
    first, second = kept["losses"].values()
    assert len(first) == kept["training"]["steps"]
    assert kept["mean_absolute_drift"] == pytest.approx(drift.drift(first, second))
    assert kept["mean_absolute_drift"] <= 1e-3
    assert path.with_suffix(".png").exists()
