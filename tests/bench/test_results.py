from __future__ import annotations

import copy
import json

import pytest
import torch

from pylate_flash.bench import results
from pylate_flash.bench.protocol import Rounds, make_stopwatch


def test_a_result_is_read_back_as_it_was_written(result, tmp_path):
    path = tmp_path / "folder" / "forward-card.json"
    results.save(result, path)
    assert results.load(path) == result
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_new_result_says_where_when_and_with_what(ceilings):
    cpu = torch.device("cpu")
    stopwatch = make_stopwatch(cpu, 64)
    created = results.make(
        "forward",
        cpu,
        torch.bfloat16,
        Rounds(3, 20, 64),
        stopwatch,
        ceilings,
        quick=False,
        retuned=True,
        reduced=False,
    )
    results.validate(created, "made")
    assert created["versions"]["torch"] == torch.__version__
    assert created["protocol"]["dtype"] == "bfloat16"
    assert created["protocol"]["repetitions"] == 20
    assert created["protocol"]["flush_bytes"] == 64
    assert created["machine"]["device"] == "cpu"
    assert not created["complete"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda result: result.pop("ceilings"), "lacks ceilings"),
        (lambda result: result.update(schema=2), "'schema' is 2"),
        (lambda result: result["rows"][0].pop("floor_ms"), "row 0: lacks floor_ms"),
        (lambda result: result["rows"][1]["systems"]["lik"].update(status="fine"), "system 'lik': status is 'fine'"),
        (lambda result: result["rows"][0]["systems"]["lik"].pop("median_ms"), "system 'lik': lacks median_ms"),
        (lambda result: result.update(rows={}), "'rows' is of type dict, expected a list"),
        (lambda result: result.update(rows=[3]), "row 0: is of type int, expected an object"),
        (lambda result: result["rows"][1].update(systems=[]), "row 1, systems: is of type list"),
        (lambda result: result["rows"][1]["systems"].update(lik=3), "system 'lik': is of type int"),
        (lambda result: result["rows"][1]["systems"]["lik"].update(status=[]), r"system 'lik': status is \[\]"),
    ],
)
def test_what_is_not_a_result_is_named(result, tmp_path, spoil, message):
    path = tmp_path / "forward-card.json"
    spoil(result)
    path.write_text(json.dumps(result))
    with pytest.raises(ValueError, match=message) as raised:
        results.load(path)
    assert str(path) in str(raised.value)


def test_what_is_not_json_is_named(tmp_path):
    path = tmp_path / "forward-card.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="not a JSON file"):
        results.load(path)


@pytest.mark.parametrize("spoil", [{"rows": [{}]}, {"ceilings": {"flops_per_second": float("nan")}}])
def test_a_write_that_fails_leaves_the_previous_file(result, tmp_path, spoil):
    path = tmp_path / "forward-card.json"
    results.save(result, path)
    with pytest.raises(ValueError, match="."):
        results.save({**result, **spoil}, path)
    assert results.load(path) == result
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_write_that_is_interrupted_leaves_the_previous_file(result, tmp_path, monkeypatch):
    path = tmp_path / "forward-card.json"
    results.save(result, path)
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        results.save({**result, "date": "2027-01-01T00:00:00+00:00"}, path)
    assert results.load(path) == result
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_folder_gets_a_file_named_by_suite_machine_and_day(result, tmp_path):
    assert results.place(tmp_path, result) == tmp_path / "forward-nvidia-test-card-2026-03-01.json"
    assert results.place(tmp_path / "mine.json", result) == tmp_path / "mine.json"


def test_rows_of_two_runs_are_one_result(result):
    earlier, later = copy.deepcopy(result), copy.deepcopy(result)
    earlier["rows"], later["rows"] = result["rows"][1:], result["rows"][:1]
    earlier["rows"].append({**result["rows"][0], "floor_ms": 5.0})
    later.update(date="2026-03-02T12:00:00+00:00", complete=False)
    names = ["textual", "batch-512"]
    output = results.joined(earlier, later, names)
    assert [row["name"] for row in output["rows"]] == names
    assert output["rows"][0]["floor_ms"] == 0.018, "what was measured again takes the place of what was there"
    assert output["complete"]
    assert output["date"] == later["date"]
    assert "facts" not in output
    assert results.joined({**earlier, "facts": {"a": 1}}, later, names)["facts"] == {"a": 1}
    assert results.joined({**earlier, "facts": {"a": 1}}, {**later, "facts": {"a": 2}}, names)["facts"] == {"a": 2}
    assert not results.joined(earlier, later, [*names, "colpali"])["complete"]


@pytest.mark.parametrize(
    ("key", "value"), [("suite", "fat"), ("machine", {"name": "another"}), ("versions", {}), ("protocol", {})]
)
def test_what_was_measured_otherwise_is_not_added(result, key, value):
    with pytest.raises(ValueError, match=f"{key}: .* in the earlier result, .* in this run; expected the same"):
        results.joined({**result, key: value}, result, ["textual"])
