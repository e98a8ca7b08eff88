"""The comparison of two trainings tells equal ones from different ones, and draws both."""

from __future__ import annotations

import json
import math

import pytest
import torch

import drift
import step_memory
from make_tables import RESULTS


def test_drift_is_the_mean_absolute_difference():
    assert drift.drift([1.0, 2.0, 3.0], [1.5, 2.0, 2.0]) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="shorter|longer"):
        drift.drift([1.0], [1.0, 2.0])


@pytest.mark.parametrize("comparison", drift.Comparison)
def test_both_ways_train_alike(comparison, tiny_colbert_path, tmp_path):
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
    # Hidden states are projected and normalised to bfloat16; embeddings are rounded where PyLate's modules round them.
    assert result["mean_absolute_drift"] <= (1e-3 if comparison is drift.Comparison.scorers else 1e-2)
    assert (tmp_path / "out" / f"drift-{comparison.value}.png").stat().st_size > 1000
    assert ("step_memory" in result) == (comparison is drift.Comparison.fusion)


def test_the_memory_of_every_way_is_asked_for(monkeypatch):
    steps = []
    monkeypatch.setattr(step_memory, "measure", lambda model, step: steps.append(step) or len(steps))
    result = drift.memory_of_steps("model", drift.Training(document_length=7), [64, 256])
    assert [entry["bytes"] for entry in result] == list(range(1, 9))
    assert len({(entry["batch_size"], entry["loss"], entry["way"]) for entry in result}) == 8
    for entry, step in zip(result, steps, strict=True):
        assert (step.loss, step.batch_size, step.document_length) == (entry["loss"], entry["batch_size"], 7)
        assert step.arguments["fuse_projection"] == (entry["way"] == "hidden states")


def test_the_memory_of_a_step(tiny_colbert_path):
    """In its own process: more than two layers' activations of 32 elements, less than those of a large model."""
    step = step_memory.Step("Contrastive", {"fuse_projection": True}, batch_size=64, embedding_size=32)
    tokens = 64 * (step.query_length + step.document_length)
    assert tokens * 2 * 32 * 4 < step_memory.measure(tiny_colbert_path, step) < 1 << 29


@pytest.mark.parametrize("loss", ["Contrastive", "CachedContrastive"])
def test_a_measured_step_goes_forward_and_backward(loss, tiny_colbert_path, monkeypatch):
    backwards = []
    backward = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda value: backwards.append(value.item()) or backward(value))
    monkeypatch.setattr(step_memory.memory, "peak", lambda call, device: call() or 5)
    step = step_memory.Step(loss, {"fuse_projection": True}, batch_size=18, embedding_size=32)
    assert step_memory.measure_here(tiny_colbert_path, step) == 5
    # All texts are equal, and so are their scores.
    assert backwards == pytest.approx([math.log(18)] * 2, rel=1e-3)


@pytest.mark.parametrize("path", sorted((RESULTS / "drift").glob("*.json")), ids=lambda path: path.stem)
def test_what_is_kept_says_what_its_curves_say(path):
    stored = json.loads(path.read_text(encoding="utf-8"))
    first, second = stored["losses"].values()
    assert len(first) == stored["training"]["steps"]
    assert stored["mean_absolute_drift"] == pytest.approx(drift.drift(first, second))
    assert stored["mean_absolute_drift"] <= 1e-3
    assert path.with_suffix(".png").exists()
