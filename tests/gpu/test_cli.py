"""Commands on a GPU, with a checkpoint that either library loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pylate_flash.cli.models import load_model
from pylate_flash.negatives import mine_hard_negatives
from tests.cli.commands import invoke, succeed
from tests.pylate_checkpoint import WORDS

pytestmark = pytest.mark.gpu

QUERIES = [f"{WORDS[i % 6]} {WORDS[i % 5 + 7]}" for i in range(12)]
POSITIVES = [f"{WORDS[i % 6]} and {WORDS[(i + 3) % 6]} {WORDS[i % 5 + 7]}" for i in range(12)]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    rows = ({"query": query, "positive": positive} for query, positive in zip(QUERIES, POSITIVES, strict=True))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("loss", ["contrastive", "cached"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_train_in_every_precision(
    loss: str, precision: str, pylate_checkpoint: Path, pairs: Path, tmp_path: Path
) -> None:
    # Enough steps for a loss scaler that skips the first ones.
    result = invoke(
        *("train", "--data", pairs, "--model", pylate_checkpoint, "--output", tmp_path / "out", "--device", "cuda"),
        *("--loss", loss, "--precision", precision, "--batch-size", 4, "--lr", 1e-3, "--max-steps", 12),
    )
    assert result.exit_code == 0, result.output
    assert "step 1 of 12, loss " in result.stderr
    model = load_model(str(tmp_path / "out"), device="cuda")
    before = load_model(str(pylate_checkpoint), device="cuda").state_dict()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_search_and_mining_find_what_they_find_on_a_cpu(pylate_checkpoint: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"_id": f"d{i}", "text": text}) + "\n" for i, text in enumerate(dict.fromkeys(POSITIVES)))
    )
    option = ("--index", tmp_path / "index")
    succeed("index", "--data", corpus, "--model", pylate_checkpoint, *option, "--device", "cuda")
    results = [
        json.loads(succeed("search", "old cats", *option, "--device", device, "--json")) for device in ("cuda", "cpu")
    ]
    for on_gpu, on_cpu in zip(results[0]["results"], results[1]["results"], strict=True):
        assert on_gpu["score"] == pytest.approx(on_cpu["score"], rel=1e-3)
    scores = []
    for device in ("cuda", "cpu"):
        model = load_model(str(pylate_checkpoint), device=device)
        scores.append(mine_hard_negatives(model, QUERIES, POSITIVES, num_negatives=3))
    assert [row["anchor"] for row in scores[0]] == [row["anchor"] for row in scores[1]] == QUERIES
    # With random weights, few scores are so close that rounding may reorder them.
    n_equal = sum(mine == other for mine, other in zip(*scores, strict=True))
    assert n_equal >= len(QUERIES) - 2
