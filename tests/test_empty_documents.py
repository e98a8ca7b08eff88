"""Documents without tokens, where documents are ranked."""

from __future__ import annotations

from pathlib import Path

import torch

from pylate_flash.indexes import EMPTY_SCORE, Flat


def test_a_document_without_tokens_comes_after_any_other(tmp_path: Path) -> None:
    """However low the other's score, and for each way to search."""
    index = Flat(tmp_path, "index", device="cpu", show_progress=False)
    index.add_documents(["empty", "far"], [torch.empty(0, 2), torch.full((1, 2), -1e6)])
    (found,) = index(torch.ones(1, 4, 2))
    assert [result["id"] for result in found] == ["far", "empty"]
    assert [result["score"] for result in found] == [-8e6, EMPTY_SCORE]
    (found,) = index(torch.ones(1, 4, 2), subset=["empty", "far"])
    assert [result["id"] for result in found] == ["far", "empty"]
    assert torch.tensor(EMPTY_SCORE).isfinite()
