"""Small stores on disk, and what they hold."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pylate_flash.index import journal
from pylate_flash.index.store import PackedStore


def documents_of(lengths: list[int], size: int = 4, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, size, generator=generator) for length in lengths]


def content(path: Path) -> dict[str, torch.Tensor]:
    """Everything that a freshly opened store holds."""
    opened = PackedStore(path)
    assert opened.position == {id_: i for i, id_ in enumerate(opened.ids)}
    documents = {id_: opened.read(np.array([i])) for i, id_ in enumerate(opened.ids)}
    assert [len(document) for document in documents.values()] == opened.lengths.tolist()
    return documents


def assert_content(path: Path, ids: list[str], documents: list[torch.Tensor]) -> None:
    found = content(path)
    assert list(found) == ids
    for document, expected in zip(found.values(), documents, strict=True):
        torch.testing.assert_close(document, expected, rtol=0, atol=0)


def change_manifest(path: Path, **changes: object) -> None:
    """Change entries as an older version might have written them, which wrote no checksum."""
    manifest = {**json.loads((path / "manifest.json").read_bytes()), **changes}
    manifest.pop("crc32", None)
    (path / "manifest.json").write_text(json.dumps(manifest))


def shards_in(path: Path) -> set[str]:
    return {file.name for file in path.glob("shard-*")}


def shards_named(path: Path) -> set[str]:
    return {entry["file"] for entry in json.loads((path / "manifest.json").read_bytes())["shards"]}


def store_of_two_shards(path: Path) -> Path:
    """a and b in one shard, c in another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "JOURNAL_BYTES", 0)
        opened = PackedStore(path)
        opened.add(["a", "b"], documents_of([2, 3]))
        opened.add(["c"], documents_of([1]))
    assert len(shards_in(path)) == 2
    return path
