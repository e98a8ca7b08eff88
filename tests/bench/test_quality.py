"""The table of the cost of quantization in retrieval quality."""

from __future__ import annotations

import json

import pytest
import torch

import make_tables
import quality

WORDS = ("sort", "read", "plot", "parse", "join", "fit", "open", "close", "draw", "count")


def test_overlap_is_the_share_of_documents_that_stay():
    scores = torch.tensor([[3.0, 2.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
    best = quality.best_documents(scores, 2)
    assert best.tolist() == [[0, 1], [3, 2]]
    assert quality.overlap(best, best.flip(1)) == 1.0
    assert quality.overlap(best, torch.tensor([[0, 3], [0, 1]])) == 0.25
    assert quality.best_documents(scores, 9).shape == (2, 4)


def test_the_table_begins_with_what_retrieval_finds(tiny_colbert_path, tmp_path):
    pytest.importorskip("pylate")
    from pylate_flash import evaluation, models

    (tmp_path / "qrels").mkdir()
    documents = [
        {"_id": f"d{i}", "text": f"{first} and {second}"} for i, first in enumerate(WORDS) for second in WORDS[:3]
    ]
    documents = [{**document, "_id": f"d{i}"} for i, document in enumerate(documents)]
    queries = [{"_id": f"q{i}", "text": f"how to {word}"} for i, word in enumerate(WORDS)]
    for name, entries in (("corpus", documents), ("queries", queries)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, entries)), encoding="utf-8")
    judged = "".join(f"q{i}\td{3 * i}\t1\n" for i in range(8))
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged, encoding="utf-8")
    quality.main(tmp_path, tiny_colbert_path, tmp_path / "results" / "quality")
    rows = json.loads((tmp_path / "results" / "quality" / f"{tmp_path.name}.json").read_text(encoding="utf-8"))["rows"]
    assert [(row["documents"], row["queries"]) for row in rows] == [
        ("bfloat16", "bfloat16"), ("int8", "int8"), ("int8", "bfloat16"), ("uint8", "int8"), ("uint8", "bfloat16"),
        ("fp8", "fp8"), ("fp8", "bfloat16"), ("residual, 4 bits", "bfloat16"), ("residual, 2 bits", "bfloat16"),
    ]  # fmt: skip
    loaded = evaluation.load_beir_folder(tmp_path)
    result = evaluation.evaluate_retrieval(
        models.ColBERT(tiny_colbert_path), *loaded, k=10, metrics=["ndcg@10"], show_progress=False
    )
    # The table's embeddings are rounded to bfloat16, which may swap documents of nearly equal scores.
    assert rows[0]["ndcg@10"] == pytest.approx(result.metrics["ndcg@10"], abs=0.05)
    for row in rows:
        assert row["difference"] == row["ndcg@10"] - rows[0]["ndcg@10"]
        assert 0.7 <= row["overlap@20"] <= 1.0
        # So few tokens take less memory than centroids do.
        assert row["bytes"] < rows[0]["bytes"] or row is rows[0] or "residual" in row["documents"]
    assert rows[0]["overlap@20"] == 1.0
    table = make_tables.quality(tmp_path / "results").splitlines()
    assert table[0].startswith(tmp_path.name.capitalize())
    assert len(table) == 4 + len(rows)
    assert table[4].startswith(f"| bfloat16 | bfloat16 | 1.00 | {rows[0]['ndcg@10']:.4f} | +0.0000 | 100.0% |")
