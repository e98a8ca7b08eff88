"""Training files: JSON lines, checked line by line before a model is loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from datasets import Dataset

__all__ = ["read_training_file"]

_CONTRASTIVE = ("query", "positive", "negative")
_DISTILLATION = ("query", "documents", "scores")


def read_training_file(path: str | os.PathLike[str], distillation: bool = False) -> Dataset:
    """Read a training file for `trainer.ColBERTTrainer`.

    Parameters
    ----------
    path
        A file with one JSON object per line; empty lines are skipped. For the contrastive losses: `query`, `positive`
        and, in every line or in none, `negative`, all strings. For distillation: `query`, a string, `documents`, a list
        of strings, and `scores`, as many numbers; every line has the same number of documents. Other keys are ignored.
    distillation
        Which of the two is expected.

    Returns
    -------
    Dataset
        One column per key, in the order above.

    Raises
    ------
    ValueError
        If a line is malformed (the message gives file and line), or the file has none.
    OSError
        If the file cannot be read.
    """
    path = Path(path)
    rows: list[dict[str, Any]] = []
    first = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            row = _row(line, where)
            row = _distillation_row(row, where) if distillation else _contrastive_row(row, where)
            if not rows:
                first = number
            elif row.keys() != rows[0].keys():
                raise ValueError(f"{where}: expected the keys of line {first}, {_list(rows[0])}, found {_list(row)}")
            elif distillation and len(row["documents"]) != len(rows[0]["documents"]):
                raise ValueError(
                    f"{where}: expected {len(rows[0]['documents'])} documents, as in line {first}, "
                    f"found {len(row['documents'])}"
                )
            rows.append(row)
    if not rows:
        raise ValueError(f"{path}: expected at least one line of JSON, found none")
    return Dataset.from_list(rows)


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:  # also what bytes that are no UTF-8 raise
        raise ValueError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, found {type(row).__name__}")
    return row


def _contrastive_row(row: dict[str, Any], where: str) -> dict[str, str]:
    for key in _CONTRASTIVE[:2]:
        if key not in row:
            raise ValueError(f"{where}: the key {key!r} is missing")
    row = {key: row[key] for key in _CONTRASTIVE if key in row}
    for key, value in row.items():
        _check_text(value, f"{where}: {key!r}")
    return row


def _distillation_row(row: dict[str, Any], where: str) -> dict[str, Any]:
    for key in _DISTILLATION:
        if key not in row:
            raise ValueError(f"{where}: the key {key!r} is missing")
    _check_text(row["query"], f"{where}: 'query'")
    documents, scores = row["documents"], row["scores"]
    if not isinstance(documents, list) or not documents:
        raise ValueError(f"{where}: 'documents' must be a list of at least one string")
    for document in documents:
        _check_text(document, f"{where}: 'documents'")
    if not isinstance(scores, list) or len(scores) != len(documents):
        raise ValueError(f"{where}: 'scores' must be a list of {len(documents)} numbers, one per document")
    for score in scores:
        if isinstance(score, bool) or not isinstance(score, int | float):
            raise ValueError(f"{where}: 'scores' must be numbers, found {score!r}")
    return {"query": row["query"], "documents": documents, "scores": [float(score) for score in scores]}


def _check_text(value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{where} must be a string, found {type(value).__name__}")
    if not value.strip():
        raise ValueError(f"{where} must not be empty")


def _list(row: dict[str, Any]) -> str:
    return ", ".join(repr(key) for key in row)
