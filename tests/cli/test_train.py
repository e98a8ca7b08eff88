from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.commands import assert_one_clear_sentence, invoke, succeed


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
