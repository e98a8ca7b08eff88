from __future__ import annotations

import shutil

import pytest

from tests.cli.commands import write_lines
from tests.pylate_checkpoint import WORDS


@pytest.fixture
def output(tiny_demo):
    """Output folder of a tiny demo."""
    return tiny_demo[0]


@pytest.fixture(scope="session")
def other_colbert_path(tiny_colbert_path, tmp_path_factory):
    """A model of the same shape with other weights."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("other") / "colbert"
    shutil.copytree(tiny_colbert_path, folder)
    weights = folder / "1_Dense" / "model.safetensors"
    save_file({name: -tensor for name, tensor in load_file(weights).items()}, weights, metadata={"format": "pt"})
    return str(folder)


@pytest.fixture
def beir(tmp_path):
    """A small BEIR folder that a test may modify."""
    folder = tmp_path / "beir"
    (folder / "qrels").mkdir(parents=True)
    texts = {"d1": "cats and dogs", "d2": "planes and trains", "d3": "bread and butter"}
    write_lines(folder / "corpus.jsonl", *({"_id": id_, "title": "", "text": text} for id_, text in texts.items()))
    write_lines(folder / "queries.jsonl", {"_id": "q1", "text": "trains"})
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td2\t1\n")
    return folder


@pytest.fixture
def pairs(tmp_path):
    """Eight training pairs with the vocabulary of `pylate_checkpoint`."""
    rows = ({"query": f"new {word}", "positive": f"{word} and old {word}"} for word in WORDS[:8])
    return write_lines(tmp_path / "train.jsonl", *rows)
