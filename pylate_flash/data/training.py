"""Training files: JSON lines, checked line by line before a model is loaded."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._extras import check_installed

check_installed("datasets", __name__, "pylate", "sentence-transformers")

# isort: split
from datasets import Dataset  # noqa: E402

from .files import json_object, read_lines  # noqa: E402

_PAIR = ("query", "positive")
_NEGATIVE = re.compile(r"negative(?:_([0-9]{1,9}))?")
_DISTILLATION = ("query", "documents", "scores")
# Scores become float32, in which the difference of any two of this size is still finite.
_LARGEST_SCORE = 1e38


@dataclass(frozen=True)
class TrainingData:
    """The contents of a training file.

    Attributes
    ----------
    rows
        One column per used key: `query`, `positive` and the negatives ordered by number, or `query`, `documents` and
        `scores`.
    ignored
        Unused keys, in order of first occurrence.
    digest
        SHA-256 of the lines read, in hexadecimal digits.
    """

    rows: Dataset
    ignored: tuple[str, ...]
    digest: str

    @property
    def documents_per_query(self) -> int:
        """Number of documents per line: the positive and its negatives, or the candidates."""
        columns = self.rows.column_names
        return len(self.rows[0]["documents"]) if "documents" in columns else len(columns) - 1

    def longest(self) -> tuple[int, int]:
        """Return the lengths in characters of the longest query and the longest document."""
        query, *document_columns = (column for column in self.rows.column_names if column != "scores")
        documents = (text for column in document_columns for value in self.rows[column] for text in _texts(value))
        return max(map(len, self.rows[query])), max(map(len, documents))


def read_training_file(path: str | os.PathLike[str], distillation: bool = False) -> TrainingData:
    """Read a training file for `trainer.ColBERTTrainer` in a single sequential pass, so pipes are supported.

    It has one JSON object per line; empty lines are skipped. For the contrastive losses: `query`, `positive` and any
    number of hard negatives, `negative`, `negative_1`, `negative_2` and so on, all strings, the same keys in every
    line. For `distillation`: `query`, a string, `documents`, a list of at least two strings, and `scores`, as many
    finite numbers; every line has the same number of documents. Other keys are not used, but listed in `ignored`. A
    ValueError names the file and line of malformed input, or says that there are no lines.
    """
    path = Path(path)
    rows: list[dict[str, Any]] = []
    ignored: dict[str, None] = {}
    digest = hashlib.sha256()
    first = 0
    with path.open("rb") as file:
        for number, where, line in read_lines(file, path):
            digest.update(line.strip().encode() + b"\n")
            record = json_object(line, where)
            for key in _DISTILLATION if distillation else _PAIR:
                if key not in record:
                    raise ValueError(f"{where}: the key {key!r} is missing")
            row = _distillation_row(record, where) if distillation else _contrastive_row(record, where)
            if not rows:
                first = number
            elif row.keys() != rows[0].keys():
                raise ValueError(f"{where}: expected the keys of line {first}, {_list(rows[0])}, found {_list(row)}")
            elif distillation and len(row["documents"]) != len(rows[0]["documents"]):
                raise ValueError(
                    f"{where}: expected {len(rows[0]['documents'])} documents, as in line {first}, "
                    f"found {len(row['documents'])}"
                )
            ignored.update(dict.fromkeys(key for key in record if key not in row))
            rows.append(row)
    if not rows:
        raise ValueError(f"{path}: expected at least one line of JSON, found none")
    return TrainingData(Dataset.from_list(rows), tuple(ignored), digest.hexdigest())


def _contrastive_row(row: dict[str, Any], where: str) -> dict[str, str]:
    numbers = {key: int(match[1] or -1) for key in row if (match := _NEGATIVE.fullmatch(key))}
    row = {key: row[key] for key in (*_PAIR, *sorted(numbers, key=lambda key: (numbers[key], key)))}
    for key, value in row.items():
        _check_text(value, f"{where}: {key!r}")
    return row


def _distillation_row(row: dict[str, Any], where: str) -> dict[str, Any]:
    _check_text(row["query"], f"{where}: 'query'")
    documents, scores = row["documents"], row["scores"]
    if not isinstance(documents, list) or len(documents) < 2:
        raise ValueError(f"{where}: 'documents' must be a list of at least two strings")
    for document in documents:
        _check_text(document, f"{where}: 'documents'")
    if not isinstance(scores, list) or len(scores) != len(documents):
        raise ValueError(f"{where}: 'scores' must be a list of {len(documents)} numbers, one per document")
    for score in scores:
        if isinstance(score, bool) or not isinstance(score, int | float):
            raise ValueError(f"{where}: 'scores' must be numbers, found {score!r}")
        if not -_LARGEST_SCORE <= score <= _LARGEST_SCORE:
            shown = score if isinstance(score, float) else f"an integer of {len(str(abs(score)))} digits"
            raise ValueError(
                f"{where}: 'scores' must be finite, from {-_LARGEST_SCORE:g} to {_LARGEST_SCORE:g}, found {shown}"
            )
    return {"query": row["query"], "documents": documents, "scores": [float(score) for score in scores]}


def _check_text(value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{where} must be a string, found {type(value).__name__}")
    if not value.strip():
        raise ValueError(f"{where} must not be empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} holds an unpaired surrogate, {value[error.start]!r}, which is not text") from None


def _texts(value: str | list[str]) -> list[str]:
    return value if isinstance(value, list) else [value]


def _list(row: dict[str, Any]) -> str:
    return ", ".join(repr(key) for key in row)
