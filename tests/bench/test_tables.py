from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import make_tables as tables
import pylate_flash
from pylate_flash.bench import forward, report, results
from pylate_flash.bench.suite import System

TEXT = "# Title\n\n<!-- bench:forward:begin -->\nold\n<!-- bench:forward:end -->\n\nMore.\n"


@pytest.fixture
def invoke(tmp_path):
    app = typer.Typer()
    app.command()(tables.command)
    (tmp_path / "page.md").write_text(TEXT)
    (tmp_path / "results").mkdir()

    def call(*arguments):
        paths = ["--page", str(tmp_path / "page.md"), "--folder", str(tmp_path / "results")]
        return CliRunner().invoke(app, [*paths, *arguments])

    return call


def test_the_table_has_a_line_per_row_and_a_column_per_system(result):
    lines = tables.render(forward.suite(), result).splitlines()
    assert "NVIDIA Test Card" in lines[0]
    assert "2026-03-01" in lines[0]
    assert lines[2].startswith("| name | Nq x Nd, Lq x Ld | floor | pylate_flash | LIK 0.4.5 | FM | torch |")
    assert lines[4] == "| textual | 1 x 1000, 32 x 300 | 0.018 | **0.030** | 0.120 | - | wrong | 1.67 | 4.00 |"
    assert lines[5] == (
        "| batch-512 | 512 x 512, 32 x 180 | 0.489 | **12.35 (inaccurate)** | failed | - | 123 | 25.20 | 10.00 |"
    )
    assert len(lines) == 6
    assert len({line.count("|") for line in lines[2:]}) == 1


def test_the_unit_and_a_measured_floor_are_named(result):
    own = forward.suite()
    systems = (*own.systems[:-1], replace(own.systems[-1], yardstick=True))
    result["protocol"]["flush_bytes"] = 0
    lines = tables.render(replace(own, unit="us", systems=systems), result).splitlines()
    assert lines[0].startswith("MaxSim forward, us.")
    assert "the floor is the time of torch, measured" in lines[0]
    assert "cold cache" not in lines[0]
    assert "| 18.00 | **30.00** | 120 |" in lines[4]


def test_multiples_have_a_column_where_the_result_has_them(result):
    result["rows"][0]["multiples"] = {"torch": 2.345}
    lines = tables.render(forward.suite(), result).splitlines()
    assert lines[2].endswith("| ours / floor | ours / torch | best other / ours |")
    assert lines[4].endswith("| 1.67 | 2.35 | 4.00 |")
    assert lines[5].endswith("| 25.20 | - | 10.00 |")


def test_memory_has_a_table_of_its_own_where_it_was_measured(result):
    systems = result["rows"][1]["systems"]
    systems["pylate_flash"]["memory_bytes"] = 3 << 19
    systems["torch"]["memory_bytes"] = 250 << 20
    lines = tables.render(forward.suite(), result).splitlines()
    assert lines[6] == ""
    assert lines[7].startswith("Memory of such a call beyond its inputs")
    assert lines[8:] == [
        "",
        "| name | pylate_flash | torch |",
        "|---|---:|---:|",
        "| batch-512 | **1.5** | 250.0 |",
    ]


def test_a_cell_of_two_times_is_explained(result):
    assert report.TWO_TIMES not in tables.render(forward.suite(), result)
    result["rows"][0]["systems"]["pylate_flash"]["device_ms"] = 0.021
    table = tables.render(forward.suite(), result)
    assert report.TWO_TIMES in table
    assert "**0.030 / 0.021**" in table
    # Multiples are shown of both times, where both sides have them.
    floor, peer = result["rows"][0]["floor_ms"], result["rows"][0]["systems"]["lik"]
    assert f"| 1.67 / {0.021 / floor:.2f} | 4.00 |" in table
    peer["device_ms"] = 0.105
    assert "| 4.00 / 5.00 |" in tables.render(forward.suite(), result)
    # A yardstick does not count as another system.
    systems = (*forward.suite().systems, System("op", "op", lambda inputs: [], yardstick=True))
    result["rows"][0]["systems"]["op"] = {**peer, "device_ms": 0.001}
    assert "| 4.00 / 5.00 |" in tables.render(replace(forward.suite(), systems=systems), result)
    del result["rows"][0]["systems"]["op"]
    console = report.make_console()
    with console.capture() as shown:
        report.show(console, forward.suite(), result)
    assert "0.030 / 0.021" in shown.get()
    assert report.TWO_TIMES in " ".join(shown.get().split())


def test_the_terminal_shows_names_as_they_are_and_how_many_times_our_time_torch_takes(result):
    (row, _), own = result["rows"], forward.suite()
    row["systems"]["torch"] = {**row["systems"]["lik"], "median_ms": 0.2}
    # Text that the console would take for markup.
    row["name"], row["shape"] = "one [fast]", "1 x [/2]"
    own = replace(own, title="Mine [here]", systems=[replace(own.systems[0], title="ours [new]"), *own.systems[1:]])
    console = report.make_console()
    with console.capture() as shown:
        report.show(console, own, result)
        report.Progress(console, 1, "ms").finished(row)
    assert "torch / ours" in shown.get()
    assert "6.67" in shown.get()
    for name in ("one [fast]", "1 x [/2]", "Mine [here]", "ours [new]", "one [fast], ms: floor"):
        assert name in shown.get()


def test_a_row_without_our_time_keeps_its_columns(result):
    result["rows"][0]["systems"]["pylate_flash"] = {"status": "failed", "reason": "it raised"}
    result["rows"][0].update(best_peer_over_ours=None)
    line = tables.render(forward.suite(), result).splitlines()[4]
    assert line == "| textual | 1 x 1000, 32 x 300 | 0.018 | **failed** | 0.120 | - | wrong | - | - |"


def test_without_a_result_there_is_a_sentence(invoke, tmp_path):
    assert invoke().exit_code == 0
    text = (tmp_path / "page.md").read_text()
    assert "No measurement is committed yet." in text
    assert text.startswith("# Title\n\n<!-- bench:forward:begin -->\n")
    assert text.endswith("\n<!-- bench:forward:end -->\n\nMore.\n")
    assert invoke("--check").exit_code == 0


def test_check_finds_a_difference_and_writes_nothing(invoke, result, tmp_path):
    results.save(result, tmp_path / "results" / "forward-card.json")
    outcome = invoke("--check")
    assert outcome.exit_code == 1
    assert (tmp_path / "page.md").read_text() == TEXT
    assert invoke().exit_code == 0
    assert tables.render(forward.suite(), result) in (tmp_path / "page.md").read_text()
    assert invoke("--check").exit_code == 0
    results.save({**result, "date": "2026-07-01T00:00:00+00:00"}, tmp_path / "results" / "forward-new.json")
    assert invoke("--check").exit_code == 1


def test_every_suite_that_has_markers_gets_its_table(invoke, result, tmp_path):
    results.save(result, tmp_path / "results" / "forward-card.json")
    training = TEXT.replace("forward", "training")
    (tmp_path / "page.md").write_text(TEXT + training)
    assert invoke().exit_code == 0
    text = (tmp_path / "page.md").read_text()
    assert tables.render(forward.suite(), result) in text
    assert "`pylate-flash bench training --json" in text.split("training:begin")[1]
    (tmp_path / "page.md").write_text(TEXT + TEXT.replace("forward", "sideways"))
    assert "there is no 'sideways'" in invoke().output


@pytest.mark.parametrize(
    "text",
    [
        "no markers",
        "<!-- bench:forward:begin -->",
        "<!-- bench:forward:end --><!-- bench:forward:begin -->",
        TEXT + TEXT,
    ],
)
def test_missing_markers_are_an_error_in_one_sentence(invoke, tmp_path, text):
    (tmp_path / "page.md").write_text(text)
    outcome = invoke()
    assert outcome.exit_code == 2
    assert "needs one line <!-- bench:forward:begin -->" in outcome.output
    assert (tmp_path / "page.md").read_text() == text


def test_a_missing_page_and_a_broken_result_are_errors_in_one_sentence(invoke, tmp_path):
    (tmp_path / "results" / "forward-card.json").write_text("{}")
    outcome = invoke()
    assert outcome.exit_code == 2
    assert "forward-card.json" in outcome.output
    (tmp_path / "page.md").unlink()
    outcome = invoke()
    assert outcome.exit_code == 2
    assert "page.md" in outcome.output


def test_the_newest_result_worth_keeping_is_found(result, tmp_path):
    assert tables.newest("forward", tmp_path) is None
    kinds = {
        "a": {"date": "2026-04-01T00:00:00+00:00"},
        "b": {"date": "2026-03-31T23:00:00+00:00"},
        "c": {"date": "2026-05-01T00:00:00+00:00", "quick": True},
        "d": {"date": "2026-05-01T00:00:00+00:00", "complete": False},
        "e": {"date": "2026-05-01T00:00:00+00:00", "protocol": {**result["protocol"], "reduced": True}},
    }
    for name, change in kinds.items():
        results.save({**result, **change}, tmp_path / f"forward-{name}.json")
    results.save({**result, "date": "2026-06-01T00:00:00+00:00"}, tmp_path / "training-a.json")
    assert tables.newest("forward", tmp_path)["date"] == "2026-04-01T00:00:00+00:00"


def test_the_tables_of_two_collections_are_apart(tmp_path):
    row = {"documents": "bfloat16", "queries": "bfloat16", "bytes": 2, "ndcg@10": 0.5, "difference": 0.0}
    about = {"machine": {"name": "Test Card"}, "date": "2026-03-01", "rows": [{**row, "overlap@20": 1.0}]}
    (tmp_path / "quality").mkdir()
    for name in ("one", "two"):
        (tmp_path / "quality" / f"{name}.json").write_text(json.dumps({"collection": name, **about}))
    lines = tables.quality(tmp_path).splitlines()
    assert [lines.index(f"{name}, Test Card; 2026-03-01.") for name in ("One", "Two")] == [0, 6]
    assert lines[1] == lines[5] == lines[7] == ""


def test_an_incomplete_result_names_what_it_lacks(result, tmp_path):
    result["complete"] = False
    results.save(result, tmp_path / "forward-a.json")
    output = tables.newest("forward", tmp_path)
    assert output == result
    *_, empty, last = tables.render(forward.suite(), output).splitlines()
    assert empty == ""
    assert last.startswith("Not measured: long-doc, medium, visual, ")
    assert "textual" not in last


def test_every_committed_result_is_valid():
    for path in tables.RESULTS.glob("*.json"):
        results.load(path)


def test_the_committed_tables_are_those_of_the_committed_results():
    text = tables.PAGE.read_text(encoding="utf-8")
    shown = tables.suites_of(text, "benchmarks.md")
    assert all(tables.suite_of(suite).name == suite for suite in shown if suite != "quality")
    assert set(shown) == {results.load(path)["suite"] for path in tables.RESULTS.glob("*.json")} | {"quality"}
    for suite in shown:
        assert suite == "quality" or tables.newest(suite) is not None
        table = tables.table_of(suite)
        assert tables.insert(text, table, suite, "benchmarks.md") == text, "run `make bench-docs`"


def test_the_package_holds_code_only():
    """Results and pictures are in docs/."""
    package = Path(pylate_flash.__file__).parent
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.suffix for path in files} <= {".py", ".typed"}
