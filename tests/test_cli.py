from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from pylate_flash import __version__
from pylate_flash.cli import app
from tests.tiny_demo import run_tiny_demo

COMMANDS = ("demo", "train", "evaluate", "search", "bench", "doctor")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="pylate-flash")


def succeed(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.stdout


def assert_one_clear_sentence(result: Result, *parts: object) -> None:
    """Exit code 2 and one line on stderr that holds every part; the exception was handled."""
    assert result.exit_code == 2, result.output + repr(result.exception)
    assert isinstance(result.exception, SystemExit)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("pylate-flash: ")
    for part in parts:
        assert str(part) in lines[0]


@pytest.fixture(scope="module")
def output(tiny_colbert_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a tiny demo left."""
    folder = tmp_path_factory.mktemp("demo") / "demo-output"
    run_tiny_demo(folder, tiny_colbert_path)
    return folder


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    """A small BEIR folder that a test may spoil."""
    folder = tmp_path / "beir"
    (folder / "qrels").mkdir(parents=True)
    texts = {"d1": "cats and dogs", "d2": "planes and trains", "d3": "bread and butter"}
    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"_id": id_, "title": "", "text": text}) + "\n" for id_, text in texts.items())
    )
    (folder / "queries.jsonl").write_text(json.dumps({"_id": "q1", "text": "trains"}) + "\n")
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td2\t1\n")
    return folder


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    rows = [{"query": f"question {i}", "positive": f"answer number {i}"} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Help


def test_help_names_every_command_and_every_command_explains_itself() -> None:
    overview = succeed("--help")
    for command in COMMANDS:
        assert command in overview
        assert "--help" in succeed(command, "--help") or command == "doctor"


def test_help_is_quick_because_it_imports_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from pylate_flash.cli import app; "
        "print(CliRunner().invoke(app, ['train', '--help']).exit_code, "
        "sorted({'torch', 'transformers', 'pylate', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split(maxsplit=1) == ["0", "[]\n"]


# What works


def test_train_evaluate_search(output: Path, tiny_colbert_path: str, tmp_path: Path) -> None:
    trained, index, record = tmp_path / "trained", tmp_path / "index", tmp_path / "metrics.json"
    printed = succeed(
        *("train", "--data", output / "data" / "train.jsonl", "--model", tiny_colbert_path, "--output", trained),
        *("--batch-size", 8, "--max-steps", 2, "--lr", "1e-3", "--temperature", "0.5", "--device", "cpu"),
    )
    assert "32 lines (query, positive), contrastive loss, scorer pylate_flash, cpu" in printed
    assert json.loads((trained / "config_sentence_transformers.json").read_text())["scorer"] == "pylate_flash"

    printed = succeed(
        *("evaluate", "--data", output / "data", "--model", trained, "--compare-torch", "--index", index),
        *("--json", record, "--device", "cpu"),
    )
    metrics = json.loads(record.read_text())
    assert f"{metrics['ndcg@10']:.4f}" in printed
    assert metrics["agreement"]["holds"]
    assert metrics["torch"]["map"] == pytest.approx(metrics["map"], abs=1e-4)
    assert {"ndcg@10", "map", "recall@100", "mrr@10"} <= metrics.keys()

    corpus = [json.loads(line) for line in (output / "data" / "corpus.jsonl").read_text().splitlines()]
    printed = succeed(
        "search", corpus[0]["text"], "--index", index, "--model", trained, "--data", output / "data", "-k", 2
    )
    assert printed.count("\n 2. ") == 1
    assert " 3. " not in printed
    assert any(document["_id"] in printed for document in corpus)


def test_search_finds_the_texts_beside_the_index(output: Path) -> None:
    printed = succeed(
        "search", "show a progress bar", "--index", output / "index", "--model", output / "model", "-k", 1
    )
    text = [json.loads(line) for line in (output / "data" / "corpus.jsonl").read_text().splitlines()]
    best = next(document for document in text if f"1. {document['_id']} " in printed)
    assert best["text"].split()[0] in printed


@pytest.mark.parametrize("loss", ["cached", "distillation"])
def test_train_with_the_other_losses(loss: str, tiny_colbert_path: str, pairs: Path, tmp_path: Path) -> None:
    if loss == "distillation":
        row = {"query": "q", "documents": ["one answer", "another"], "scores": [2.0, 1.0]}
        pairs.write_text((json.dumps(row) + "\n") * 4)
    succeed(
        *("train", "--data", pairs, "--model", tiny_colbert_path, "--output", tmp_path / "out", "--loss", loss),
        *("--batch-size", 4, "--mini-batch-size", 2, "--max-steps", 1, "--scorer", "torch", "--device", "cpu"),
    )
    assert json.loads((tmp_path / "out" / "config_sentence_transformers.json").read_text())["scorer"] == "torch"


def test_train_replaces_a_model_only_when_asked_to(tiny_colbert_path: str, pairs: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(tiny_colbert_path, old)
    (old / "of-the-old-model").touch()
    here = (
        "train",
        "--data",
        pairs,
        "--model",
        tiny_colbert_path,
        "--output",
        old,
        "--max-steps",
        1,
        "--device",
        "cpu",
    )
    succeed(*here, "--overwrite")
    assert not (old / "of-the-old-model").exists()
    assert (old / "modules.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "train.jsonl"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="it computes on a GPU")
@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_scorer_that_cannot_compute_here_is_one_sentence(
    command: str, beir: Path, pairs: Path, tiny_colbert_path: str, tmp_path: Path
) -> None:
    arguments = ("--data", pairs, "--output", tmp_path / "out") if command == "train" else ("--data", beir)
    result = invoke(command, *arguments, "--model", tiny_colbert_path, "--scorer", "flash")
    assert_one_clear_sentence(result, "--scorer flash cannot compute on cpu")


def test_evaluate_with_the_scorer_asked_for(beir: Path, tiny_colbert_path: str) -> None:
    arguments = ("evaluate", "--data", beir, "--model", tiny_colbert_path, "--device", "cpu")
    assert "pylate_flash" in succeed(*arguments)
    assert "│ torch" in succeed(*arguments, "--scorer", "torch")


def test_doctor_says_what_is_here_and_what_serves_what() -> None:
    printed = succeed("doctor")
    for part in (__version__, "pylate", "1.6", "float32", "bfloat16", "blocked", "maxsim_varlen", "register(): works"):
        assert part in printed


def test_bench_takes_the_options_of_the_suite() -> None:
    assert "--quick" in succeed("bench", "--help")


# What does not


@pytest.mark.parametrize("file", ["corpus.jsonl", "queries.jsonl"])
def test_evaluate_names_file_and_line(beir: Path, tiny_colbert_path: str, file: str) -> None:
    with (beir / file).open("a") as lines:
        lines.write('{"_id": "x", "text":\n')
    number = len((beir / file).read_text().splitlines())
    result = invoke("evaluate", "--data", beir, "--model", tiny_colbert_path)
    assert_one_clear_sentence(result, beir / file, f"line {number}", "not valid JSON")


def test_evaluate_names_the_line_of_a_judgement(beir: Path, tiny_colbert_path: str) -> None:
    (beir / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td9\t1\n")
    result = invoke("evaluate", "--data", beir, "--model", tiny_colbert_path)
    assert_one_clear_sentence(result, "test.tsv, line 2", "'d9'")


def test_evaluate_names_what_is_missing(beir: Path, tiny_colbert_path: str, tmp_path: Path) -> None:
    model = ("--model", tiny_colbert_path)
    assert_one_clear_sentence(invoke("evaluate", "--data", tmp_path / "none", *model), tmp_path / "none", "BEIR")
    assert_one_clear_sentence(invoke("evaluate", "--data", beir, "--split", "dev", *model), "dev", "test")
    nowhere = tmp_path / "nowhere" / "m.json"
    assert_one_clear_sentence(invoke("evaluate", "--data", beir, "--json", nowhere, *model), "--json", nowhere.parent)


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("/no/such/model", ["there is no model in '/no/such/model'"]),
        ("{folder}", ["holds no model", "modules.json"]),
        ("{folder}/beir/corpus.jsonl", ["is a file"]),
        ("no-such/name", ["'no-such/name' cannot be loaded"]),
        ("demo-output/model", ["there is no model in 'demo-output/model'", "pylate-flash demo"]),
    ],
)
def test_an_unknown_model_is_one_sentence(
    beir: Path, tmp_path: Path, model: str, parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke("evaluate", "--data", beir, "--model", model.format(folder=tmp_path))
    assert_one_clear_sentence(result, *parts)


def test_a_model_that_does_not_load_is_one_sentence(beir: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    result = invoke("evaluate", "--data", beir, "--model", tmp_path / "broken")
    assert_one_clear_sentence(result, f"the model in {tmp_path / 'broken'} cannot be loaded")


def test_evaluate_keeps_its_hands_off_other_files(beir: Path, tiny_colbert_path: str, output: Path) -> None:
    arguments = ("evaluate", "--data", beir, "--model", tiny_colbert_path, "--index")
    before = sorted(beir.rglob("*"))
    assert_one_clear_sentence(invoke(*arguments, beir), "holds files that are no index")
    assert sorted(beir.rglob("*")) == before
    assert_one_clear_sentence(invoke(*arguments, output / "index"), "--overwrite")


@pytest.mark.parametrize(
    ("line", "parts"),
    [("{", ["not valid JSON"]), ('{"query": "q"}', ["'positive' is missing"]), ("[]", ["expected a JSON object"])],
)
def test_train_names_file_and_line(
    pairs: Path, tiny_colbert_path: str, tmp_path: Path, line: str, parts: list[str]
) -> None:
    with pairs.open("a") as lines:
        lines.write(line + "\n")
    result = invoke("train", "--data", pairs, "--model", tiny_colbert_path, "--output", tmp_path / "out")
    assert_one_clear_sentence(result, f"{pairs}, line 9", *parts)
    assert not (tmp_path / "out").exists()


def test_train_checks_its_arguments_before_it_starts(pairs: Path, tiny_colbert_path: str, tmp_path: Path) -> None:
    here = ("--model", tiny_colbert_path, "--output", tmp_path / "out")
    assert_one_clear_sentence(invoke("train", "--data", tmp_path / "no.jsonl", *here), "no file", tmp_path / "no.jsonl")
    result = invoke("train", "--data", pairs, "--model", tiny_colbert_path, "--output", tmp_path)
    assert_one_clear_sentence(result, tmp_path, "holds files that are no model")
    result = invoke("train", "--data", pairs, "--model", tiny_colbert_path, "--output", tiny_colbert_path)
    assert_one_clear_sentence(result, "there is a model in", "--overwrite")
    assert_one_clear_sentence(invoke("train", "--data", pairs, *here, "--temperature", 0), "--temperature")
    assert_one_clear_sentence(invoke("train", "--data", pairs, *here, "--device", "nonsense"), "--device nonsense")
    assert not (tmp_path / "out").exists()


def test_search_names_what_is_missing(output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_one_clear_sentence(invoke("search", "x"), "no index in demo-output/index", "pylate-flash demo")
    here = ("--index", output / "index", "--model", output / "model")
    assert_one_clear_sentence(invoke("search", " ", *here), "query is empty")
    assert_one_clear_sentence(invoke("search", "x", *here, "--data", tmp_path), "no file", "corpus.jsonl")
    (tmp_path / "corpus.jsonl").write_text('{"_id": "a", "text": "b"}\nnonsense\n')
    assert_one_clear_sentence(invoke("search", "x", *here, "--data", tmp_path), "corpus.jsonl, line 2")


def test_search_with_a_damaged_index_is_one_sentence(output: Path, tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "manifest.json").write_text("{")
    result = invoke("search", "x", "--index", tmp_path / "index", "--model", output / "model")
    assert_one_clear_sentence(result, "manifest.json")


def test_demo_leaves_other_folders_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert_one_clear_sentence(invoke("demo", "--output", tmp_path), tmp_path, "not the output of an earlier demo")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_interruption_is_tidy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pylate_flash.demo.job.run", interrupt)
    result = invoke("demo", "--output", tmp_path / "out")
    assert result.exit_code == 130
    assert result.stderr == "pylate-flash: interrupted\n"


def test_the_installed_program_has_no_traceback_either(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pylate_flash.cli", "train", "--data", "no.jsonl", "--model", "m", "--output", "o"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": ""},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "pylate-flash: there is no file no.jsonl\n"
