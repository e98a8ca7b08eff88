from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.tiny_demo import run_tiny_demo


@pytest.fixture(scope="session")
def output(tiny_colbert_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a tiny demo left."""
    folder = tmp_path_factory.mktemp("demo") / "demo-output"
    run_tiny_demo(folder, tiny_colbert_path)
    return folder


@pytest.fixture(scope="session")
def other_colbert_path(tiny_colbert_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of the same shape with other weights."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("other") / "colbert"
    shutil.copytree(tiny_colbert_path, folder)
    weights = folder / "1_Dense" / "model.safetensors"
    save_file({name: -tensor for name, tensor in load_file(weights).items()}, weights, metadata={"format": "pt"})
    return str(folder)


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
