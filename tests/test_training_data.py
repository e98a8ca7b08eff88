from __future__ import annotations

import json
from pathlib import Path

import pytest

from pylate_flash.training_data import read_training_file

PAIR = {"query": "q", "positive": "p"}
LIST = {"query": "q", "documents": ["a", "b"], "scores": [1, 0.5]}


def write(folder: Path, *lines: object) -> Path:
    path = folder / "train.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_pairs_triples_and_lists(tmp_path: Path) -> None:
    pairs = read_training_file(write(tmp_path, {"positive": "p", "id": 3, "query": "q"}, "", PAIR))
    assert pairs.column_names == ["query", "positive"]
    assert pairs[0] == pairs[1] == PAIR
    triples = read_training_file(write(tmp_path, {**PAIR, "negative": "n"}))
    assert triples.column_names == ["query", "positive", "negative"]
    lists = read_training_file(write(tmp_path, LIST), distillation=True)
    assert lists[0] == {"query": "q", "documents": ["a", "b"], "scores": [1.0, 0.5]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"query": "q"', "not valid JSON"),
        ("[1, 2]", "expected a JSON object, found list"),
        ({"query": "q"}, "the key 'positive' is missing"),
        ({"query": "q", "positive": 3}, "'positive' must be a string, found int"),
        ({"query": " ", "positive": "p"}, "'query' must not be empty"),
        ({**PAIR, "negative": "n"}, "expected the keys of line 1, 'query', 'positive'"),
    ],
)
def test_a_malformed_pair_is_named_by_its_line(tmp_path: Path, line: object, message: str) -> None:
    path = write(tmp_path, PAIR, PAIR, line)
    with pytest.raises(ValueError, match=f"line 3.*{message}"):
        read_training_file(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (PAIR, "the key 'documents' is missing"),
        ({**LIST, "documents": "a"}, "'documents' must be a list"),
        ({**LIST, "documents": ["a", None]}, "'documents' must be a string, found NoneType"),
        ({**LIST, "scores": [1]}, "'scores' must be a list of 2 numbers"),
        ({**LIST, "scores": [1, True]}, "'scores' must be numbers, found True"),
        ({**LIST, "documents": ["a"], "scores": [1]}, "expected 2 documents, as in line 1, found 1"),
    ],
)
def test_a_malformed_list_is_named_by_its_line(tmp_path: Path, line: object, message: str) -> None:
    path = write(tmp_path, LIST, line)
    with pytest.raises(ValueError, match=f"line 2.*{message}"):
        read_training_file(path, distillation=True)


def test_an_empty_file_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected at least one line"):
        read_training_file(write(tmp_path, ""))
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"query": "caf\xe9", "positive": "p"}\n')
    with pytest.raises(ValueError, match="latin.jsonl, line 1: not valid JSON"):
        read_training_file(path)
