from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import assert_one_clear_sentence, invoke, succeed


def test_evaluate_with_the_scorer_asked_for(beir: Path, tiny_colbert_path: str) -> None:
    arguments = ("evaluate", "--data", beir, "--model", tiny_colbert_path, "--device", "cpu")
    assert "pylate_flash" in succeed(*arguments)
    assert "│ torch" in succeed(*arguments, "--scorer", "torch")


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
