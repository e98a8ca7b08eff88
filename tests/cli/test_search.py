from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import assert_one_clear_sentence, invoke, succeed


def test_search_finds_the_texts_beside_the_index(output: Path) -> None:
    printed = succeed(
        "search", "show a progress bar", "--index", output / "index", "--model", output / "model", "-k", 1
    )
    text = [json.loads(line) for line in (output / "data" / "corpus.jsonl").read_text().splitlines()]
    best = next(document for document in text if f"1. {document['_id']} " in printed)
    assert best["text"].split()[0] in printed


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
