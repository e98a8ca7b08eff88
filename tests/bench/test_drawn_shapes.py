"""Random shapes are reproducible, every variant computes what its name says, and slow ones are named."""

from __future__ import annotations

import json

import pytest
import torch

import drawn_shapes
from drawn_shapes import Limit
from pylate_flash.bench.rows import Row


def test_shapes_are_those_of_a_seed_and_within_the_bounds():
    result = drawn_shapes.draw(20, seed=3)
    assert result == drawn_shapes.draw(20, seed=3)
    assert result != drawn_shapes.draw(20, seed=4)
    assert len({row.name for row in result}) == 20
    for row in result:
        flops = row.Nq * row.Nd * row.Lq * row.Ld * row.d * 2
        assert drawn_shapes.LEAST_FLOPS < flops < drawn_shapes.MOST_FLOPS
        assert row.Nd * row.Ld * row.d * 2 < drawn_shapes.MOST_BYTES
        assert 1 <= row.shortest <= row.Ld


@pytest.mark.parametrize("size", [64, 320])
def test_ways_agree(size):
    """Up to rounding: with all tokens, with those of a mask, and with codes, which are of other documents."""
    row = Row("tiny", 3, 7, 5, 40, d=size, shortest=10)
    assert row.lengths().min() < 40
    ways = drawn_shapes.ways(row, torch.device("cpu"))
    results = {name: call() for name, call in ways.items()}
    assert ("packed 4 bits" in results) == (size == 64)
    for first, second, tolerance in (
        ("normalised", "padded", 1e-2),
        ("packed", "masked", 1e-6),
        ("int8", "padded", 2e-2),
        ("uint8", "padded", 2e-2),
        ("fp8", "padded", 5e-2),
        ("packed int8", "packed", 2e-2),
    ):
        torch.testing.assert_close(
            results[first], results[second], rtol=tolerance, atol=tolerance, msg=f"{first}, {second}"
        )
    assert not torch.equal(results["masked"], results["padded"])
    for step in ("step", "masked step", "soft step"):
        assert [gradient.shape for gradient in results[step]] == [(3, 5, size), (7, 40, size)]
    assert not results["masked step"][1][row.lengths() < 40, -1].any()


@pytest.mark.parametrize(("queries", "documents"), [(3, 7), (1, 7), (9, 4)])
def test_operations_agree(queries, documents):
    """Where they score the same pairs; a packed step has no gradient of padding."""
    row = Row("tiny", queries, documents, 6, 40, d=64, shortest=10)
    results = {name: call() for name, call in drawn_shapes.operations(row, torch.device("cpu")).items()}
    scores = results["padded"].float()
    torch.testing.assert_close(results["one query"], scores[:1])
    torch.testing.assert_close(results["float32"], scores, rtol=1e-2, atol=1e-2)
    index = torch.arange(documents)
    torch.testing.assert_close(results["pairs"].float(), scores[index % queries, index])
    own = results["own documents"]
    torch.testing.assert_close(own.flatten(), scores[torch.arange(own.numel()) // own.shape[1], index[: own.numel()]])
    torch.testing.assert_close(results["hidden"], results["projected"], rtol=1e-2, atol=1e-2)
    assert results["own packed documents"].numel() == results["packed pairs"].numel() == documents
    for name, sizes in {
        "step": [(queries, 6), (documents, 40)],
        "packed step": [(queries * 6,), (int(row.lengths().sum()),)],
        "cross entropy step": [(queries, 6), (documents, 40)],
    }.items():
        assert [gradient.shape for gradient in results[name]] == [(*size, 64) for size in sizes]


def test_limits_are_of_ways_and_floors():
    names = {name for limit in drawn_shapes.LIMITS for name in limit[:2]}
    row, device = Row("tiny", 1, 2, 3, 4, d=64, shortest=2), torch.device("cpu")
    assert names <= {*drawn_shapes.ways(row, device), *drawn_shapes.operations(row, device), "floor", "floor of a step"}


def test_what_is_beyond_a_limit_is_named(monkeypatch):
    limits = (Limit("int8", "padded", 1.1), Limit("packed", "masked", 1.2), Limit("codes", "padded", 1.0))
    monkeypatch.setattr(drawn_shapes, "LIMITS", limits)
    assert drawn_shapes.beyond({"padded": 1.0, "int8": 2.0, "packed": 1.0, "masked": 1.0}) == {"int8 / padded": 2.0}
    # No longer than a call that computes nothing.
    assert drawn_shapes.beyond({"padded": 0.001, "int8": 0.002}) == {}


def test_every_shape_is_written(tmp_path, monkeypatch, capsys, ceilings):
    monkeypatch.setattr(drawn_shapes, "measure_ceilings", lambda *_, **__: ceilings)
    monkeypatch.setattr(drawn_shapes, "LIMITS", (Limit("padded", "floor", 0.0),))
    monkeypatch.setattr(drawn_shapes, "CPU_FLOPS", 1e6)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    output = tmp_path / "out" / "drawn.json"
    drawn_shapes.main(output, shapes=2, seed=5, workers=1)
    result = json.loads(output.read_text(encoding="utf-8"))
    assert [row["name"] for row in result["rows"]] == ["drawn-5-0", "drawn-5-1"]
    printed = capsys.readouterr().out
    for row in result["rows"]:
        assert row["milliseconds"]["padded"] > 0
        assert f"{row['shape']}: padded / floor {row['beyond']['padded / floor']}" in printed
