from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from pylate_flash.data.training import read_training_file

PAIR = {"query": "q", "positive": "p"}
LIST = {"query": "q", "documents": ["a", "b"], "scores": [1, 0.5]}


def write(folder: Path, *lines: object) -> Path:
    path = folder / "train.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_pairs_triples_and_lists(tmp_path: Path) -> None:
    pairs = read_training_file(write(tmp_path, {"positive": "p", "id": 3, "query": "q"}, "", PAIR)).rows
    assert pairs.column_names == ["query", "positive"]
    assert pairs[0] == pairs[1] == PAIR
    triples = read_training_file(write(tmp_path, {**PAIR, "negative": "n"})).rows
    assert triples.column_names == ["query", "positive", "negative"]
    lists = read_training_file(write(tmp_path, LIST), distillation=True)
    assert lists.rows[0] == {"query": "q", "documents": ["a", "b"], "scores": [1.0, 0.5]}
    assert lists.documents_per_query == 2


def test_hard_negatives_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    negatives = {f"negative_{number}": f"wrong {number}" for number in (10, 2, 1)}
    data = read_training_file(write(tmp_path, {**negatives, "negative": "wrong", **PAIR, "negatives": ["x"], "id": 1}))
    assert data.rows.column_names == ["query", "positive", "negative", "negative_1", "negative_2", "negative_10"]
    assert data.documents_per_query == 5
    assert data.ignored == ("negatives", "id")
    assert data.longest() == (1, len("wrong 10"))


def test_the_digest_is_that_of_the_lines(tmp_path: Path) -> None:
    digests = [read_training_file(write(tmp_path, *lines)).digest for lines in ([PAIR], [PAIR, ""], [PAIR, PAIR])]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"query": "q"', "not valid JSON"),
        ("[1, 2]", "expected a JSON object, got list"),
        ({"query": "q"}, "the key 'positive' is missing"),
        ({"query": "q", "positive": 3}, "'positive' must be a string, found int"),
        ({"query": " ", "positive": "p"}, "'query' must not be empty"),
        ({**PAIR, "negative": "n"}, "expected the keys of line 1, 'query', 'positive'"),
        ({**PAIR, "negative_2": "n"}, "expected the keys of line 1, 'query', 'positive'"),
        ({**PAIR, "negative_2": ["n"]}, "'negative_2' must be a string, found list"),
        ({**PAIR, "positive": "half \ud83d"}, r"'positive' holds an unpaired surrogate, '\\ud83d'"),
        ("[" * 200_000, "not valid JSON: nested too deeply"),
        ('{"query": ' + "1" * 5000, "not valid JSON"),
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
        ({**LIST, "documents": ["a"], "scores": [1]}, "'documents' must be a list of at least two"),
        ({**LIST, "documents": ["a", None]}, "'documents' must be a string, found NoneType"),
        ({**LIST, "scores": [1]}, "'scores' must be a list of 2 numbers"),
        ({**LIST, "scores": [1, True]}, "'scores' must be numbers, found True"),
        ({**LIST, "scores": [1, float("nan")]}, "'scores' must be finite, from -1e\\+38 to 1e\\+38, found nan"),
        ({**LIST, "scores": [1, float("-inf")]}, "'scores' must be finite.*found -inf"),
        (json.dumps(LIST).replace("0.5", "1e400"), "'scores' must be finite.*found inf"),
        ({**LIST, "scores": [1, -1e39]}, "'scores' must be finite.*found -1e\\+39"),
        ({**LIST, "scores": [1, 10**400]}, "'scores' must be finite.*found an integer of 401 digits"),
        ({**LIST, "documents": ["a", "\udc00"]}, "'documents' holds an unpaired surrogate"),
        ({**LIST, "documents": ["a"] * 3, "scores": [1] * 3}, "expected 2 documents, as in line 1, found 3"),
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
    with pytest.raises(ValueError, match="latin.jsonl, line 1: not UTF-8 text .*position 14"):
        read_training_file(path)


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    line = (json.dumps(PAIR) + "\n").encode()
    writer = threading.Thread(target=pipe.write_bytes, args=(line * 3,))
    writer.start()
    assert len(read_training_file(pipe).rows) == 3
    writer.join()
