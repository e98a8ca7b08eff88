from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from pylate_flash.bench import SUITES, cli, load_suite, plot, report, results
from pylate_flash.bench import forward as forward_suite
from pylate_flash.bench import suite as suites
from pylate_flash.bench.protocol import QUICK, Rounds
from pylate_flash.bench.suite import Candidate, System
from pylate_flash.cli.common import command
from tests.cli.commands import assert_one_clear_sentence


@pytest.fixture
def invoke(tiny_suite, ceilings, monkeypatch):
    """Run the command on tiny rows, without measuring ceilings or writing 128 MB before each call."""

    def call(*arguments, systems=(), suite=None):
        monkeypatch.setattr(cli, "load_suite", lambda name: load_suite(name) and (suite or tiny_suite(*systems)))
        monkeypatch.setattr(suites, "measure_ceilings", lambda device, dtype, **options: ceilings)
        monkeypatch.setattr(cli, "QUICK", Rounds(warmup=0, repetitions=2, flush_bytes=0))
        app = typer.Typer()
        app.command("bench")(command(cli.bench))
        app.command("other")(lambda: None)
        return CliRunner().invoke(app, ["bench", *arguments])

    return call


def test_the_command_measures_prints_and_keeps(invoke, tmp_path):
    path, picture = tmp_path / "forward-here.json", tmp_path / "picture.png"
    outcome = invoke("forward", "--quick", "--device", "cpu", "--json", str(path), "--plot", str(picture))
    assert outcome.exit_code == 0, outcome.output
    result = results.load(path)
    assert [row["name"] for row in result["rows"]] == ["one", "several"]
    assert result["complete"]
    assert result["quick"]
    assert result["protocol"]["dtype"] == "float32"
    for row in result["rows"]:
        assert row["systems"]["pylate_flash"]["status"] == "ok"
        assert row["systems"]["torch"]["status"] == "ok"
        assert row["systems"]["lik"]["status"] == "absent"
        assert f"{row['name']}: preparing pylate_flash, maxsim" in outcome.output
    assert "No GPU: these are times of a CPU" in outcome.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_rows_peers_and_type_are_chosen(invoke, tmp_path):
    path = tmp_path / "forward-here.json"
    outcome = invoke(
        *("--quick", "--device", "cpu", "--no-peers", "--rows", "several", "--dtype", "bfloat16", "--json", str(path))
    )
    assert outcome.exit_code == 0, outcome.output
    result = results.load(path)
    assert [row["name"] for row in result["rows"]] == ["several"]
    assert set(result["rows"][0]["systems"]) == {"pylate_flash", "torch"}
    assert result["protocol"]["dtype"] == "bfloat16"
    assert not result["complete"]


def test_rows_are_added_to_those_of_an_earlier_run(invoke, tmp_path):
    first, both = tmp_path / "first.json", tmp_path / "both.json"
    arguments = ("--quick", "--device", "cpu", "--no-peers", "--rows")
    assert invoke(*arguments, "several", "--json", str(first)).exit_code == 0
    outcome = invoke(*arguments, "one,several", "--json", str(both))
    assert [row["name"] for row in results.load(both)["rows"]] == ["one", "several"]
    outcome = invoke(*arguments, "one", "--json", str(both), "--add", str(first))
    assert outcome.exit_code == 0, outcome.output
    result = results.load(both)
    assert [row["name"] for row in result["rows"]] == ["one", "several"]
    assert result["complete"]
    outcome = invoke(*arguments, "one", "--json", str(both), "--add", str(first), "--dtype", "bfloat16")
    assert outcome.exit_code == 2
    assert "pylate-flash: --add: protocol" in outcome.stderr
    assert "computing the reference" not in outcome.output, "it is refused before anything is measured"


def test_a_wrong_result_of_ours_is_shown_kept_and_the_exit_code(invoke, tmp_path):
    wrong = System("pylate_flash", "pylate_flash", lambda inputs: [Candidate("wrong", lambda: inputs.documents.sum())])
    path = tmp_path / "forward-here.json"
    outcome = invoke("--quick", "--device", "cpu", "--json", str(path), systems=(wrong,))
    assert outcome.exit_code == 1
    assert "one, pylate_flash: wrong" in outcome.output
    assert results.load(path)["rows"][0]["systems"]["pylate_flash"]["status"] == "wrong"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["backwards"], ["suite: ", "backwards", "forward"]),
        (["--rows", "three"], ["--rows: ", "three", "several"]),
        # As from an unset variable, which does not mean all rows.
        (["--rows", ""], ["--rows: ", "several"]),
        (["--device", "abacus"], ["--device: 'abacus'"]),
        (["--device", "meta"], ["--device: 'meta'"]),
        # Torch counts 256 as 0, and has no number for the other.
        (["--device", "cuda:256"], ["--device: 'cuda:256'"]),
        (["--device", "cuda:01"], ["--device: 'cuda:01'"]),
        (["--device", "cuda:99999999999999999999"], ["--device: 'cuda:99999999999999999999'"]),
        (["--plot", "picture.docx"], ["--plot: picture.docx must end in .png, .svg or .pdf"]),
        (["--add", "first.json"], ["--add: first.json needs --json"]),
        (["--add", "nowhere.json", "--json", "result.json"], ["--add: there is no file nowhere.json"]),
        (["--add", "bad.json", "--json", "result.json"], ["--add: bad.json: not a JSON file"]),
    ],
)
def test_a_bad_argument_is_one_sentence_and_exit_code_two(invoke, arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text("{")
    assert_one_clear_sentence(invoke("--quick", *arguments), *words)


def test_the_command_itself_reports_errors_in_one_sentence(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["backwards"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("pylate-flash: suite: there is no 'backwards'")


@pytest.mark.parametrize(
    ("option", "path", "part"),
    [
        ("--json", "file", "is a file"),
        ("--json", "file/result.json", "is a file"),
        ("--json", "folder.json", "is a folder; expected a file"),
        ("--plot", "folder.png", "is a folder; expected a file"),
        ("--plot", "file/picture.png", "is a file"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_measured(invoke, tmp_path, option, path, part):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "folder.png").mkdir()
    outcome = invoke("--quick", "--device", "cpu", option, str(tmp_path / path))
    assert_one_clear_sentence(outcome, f"{option}: {tmp_path}", part)
    assert "computing the reference" not in outcome.output


def test_a_gpu_that_is_not_there_is_an_error(invoke, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    outcome = invoke("--quick", "--device", "cuda")
    assert outcome.exit_code == 2
    assert "no CUDA GPU" in outcome.output


def test_a_record_has_at_least_twenty_timed_calls():
    assert Rounds().repetitions >= 20 > QUICK.repetitions
    assert Rounds().flush_bytes == 128 * 2**20


def test_every_suite_loads_under_its_name_and_begins_with_ours():
    scripts = sorted(Path(suites.__file__).parents[2].glob("docs/benchmarks/suites/*.py"))
    assert scripts
    for name in (*SUITES, *map(str, scripts)):
        result = load_suite(name)
        assert result.name == Path(name).stem
        assert result.script == (name if Path(name) in scripts else None)
        assert result.systems[0].name == suites.OURS
        assert len({row.name for row in result.rows}) == len(result.rows)


def test_the_help_says_what_each_suite_tells_and_what_a_table_shows(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert all(f"{name}: {about.split(',')[0]}" in text for name, about in SUITES.items())
    assert "best other / ours is" in text


def test_a_suite_for_the_cpu_is_measured_there_and_nowhere_else(invoke, tiny_suite, monkeypatch, tmp_path):
    cpu_suite = replace(tiny_suite(), device="cpu")
    path = tmp_path / "here.json"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    outcome = invoke("--quick", "--device", "auto", "--no-peers", "--json", str(path), suite=cpu_suite)
    assert outcome.exit_code == 0, outcome.output
    assert results.load(path)["machine"]["device"] == "cpu"
    assert not results.load(path)["protocol"]["reduced"]
    assert "No GPU" not in outcome.output
    outcome = invoke("--quick", "--device", "cuda", suite=cpu_suite)
    assert outcome.exit_code == 2
    assert "measures cpu only" in outcome.output


def test_what_is_no_suite_is_named(tmp_path):
    with pytest.raises(ValueError, match="there is no 'backwards', expected one of forward"):
        load_suite("backwards")
    with pytest.raises(ValueError, match="there is no file .*mine.py"):
        load_suite(str(tmp_path / "mine.py"))
    (tmp_path / "mine.py").write_text("answer = 42")
    with pytest.raises(ValueError, match="mine.py has no function suite"):
        load_suite(str(tmp_path / "mine.py"))


@pytest.mark.skipif(sys.platform != "linux", reason="memory on a CPU is read from Linux's /proc")
def test_a_suite_of_a_file_is_measured_memory_too(tmp_path):
    path, output = tmp_path / "mine.py", tmp_path / "result.json"
    path.write_text(
        "from dataclasses import replace\n"
        "from pylate_flash.bench import forward\n"
        "from pylate_flash.bench.rows import Row\n"
        "def suite():\n"
        "    return replace(forward.suite(), name='mine', rows=(Row('tiny', 1, 5, 4, 7, d=16),))\n"
    )
    command = ["pylate_flash.bench", str(path), "--quick", "--device", "cpu", "--memory", "--json", str(output)]
    # Also where the plus-minus sign of a time cannot be printed.
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True, env=environment)
    (row,) = results.load(output)["rows"]
    assert row["systems"]["pylate_flash"]["memory_bytes"] >= 0
    assert results.load(output)["suite"] == "mine"


def test_remarks_say_what_the_table_cannot(result):
    result["facts"] = {"compilations over 50 shapes": 7}
    lines = report.remarks(result)
    assert "compilations over 50 shapes: 7" in lines
    assert "textual, torch: wrong: einsum: relative error 5.0e-02" in lines
    assert "batch-512, lik: failed: OutOfMemoryError: tried to allocate 3 GiB" in lines
    assert "batch-512, pylate_flash: the relative error 3.0e-04 exceeds its bound" in lines
    assert "flash_maxsim: not measured: not installed" in lines


@pytest.mark.parametrize(
    ("milliseconds", "unit", "text"),
    [(0.0226, "us", "22.60"), (0.0042, "us", "4.200"), (0.0226, "ms", "0.023"), (123.4, "ms", "123")],
)
def test_times_are_shown_in_the_unit_of_the_suite(milliseconds, unit, text):
    assert report.duration(milliseconds, unit) == text
    assert report.cell({"status": "ok", "median_ms": milliseconds}, unit) == text


def test_the_picture_of_a_suite_with_a_yardstick_has_no_roofline(result, tmp_path):
    own = forward_suite.suite()
    yardstick = replace(own, systems=(*own.systems, System("op", "op", lambda inputs: [], yardstick=True)))
    plot.save(own, result, tmp_path / "both.svg")
    plot.save(yardstick, result, tmp_path / "one.svg")
    assert "axes_2" in (tmp_path / "both.svg").read_text()
    assert "axes_2" not in (tmp_path / "one.svg").read_text()


def test_importing_needs_neither_pylate_nor_the_packages_measured():
    code = (
        "import sys; import pylate_flash.bench.cli; "
        "from pylate_flash.bench import SUITES, load_suite; [load_suite(name) for name in SUITES]; "
        "others = {'pylate', 'late_interaction_kernels', 'flash_maxsim', 'maxsim_cpu', 'matplotlib'}; "
        "sys.exit(bool(others & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="memory on a CPU is read from Linux's /proc")
def test_memory_is_that_of_a_fresh_process():
    cpu = torch.device("cpu")
    row = next(row for row in forward_suite.ROWS if row.name == "edge-48")
    row = suites.fit(forward_suite.suite(), row, cpu)
    similarities = 4 * row.Nd * row.Lq * row.Ld
    variants = {"torch": f"einsum, chunks of {row.Nd}", "pylate_flash": "maxsim"}
    taken = suites.memory_of("forward", "edge-48", variants, cpu, torch.float32)
    assert taken.keys() == variants.keys()
    # The kernel counts resident pages in batches.
    assert 0.9 * similarities < taken["torch"] < 3 * similarities


def test_memory_of_a_process_that_fails_is_an_error_with_its_reason():
    variants = {"torch": "einsum", "pylate_flash": "maxsim"}
    with pytest.raises(RuntimeError, match="no_such_type"):
        suites.memory_of("forward", "textual", variants, torch.device("cpu"), "no_such_type")
