"""Small stores on disk, and checks of their content."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from pylate_flash.index import resident, search, store
from pylate_flash.index.catalog import Catalog
from pylate_flash.index.store import PackedStore
from pylate_flash.indexes import Flat

# Residual codes need fastkmeans, a dependency of PyLate; of the combined dtypes, one pair of each kind.
EACH_DTYPE = pytest.mark.parametrize(
    "dtype",
    sorted(
        dtype
        for dtype in store.DTYPES
        if (find_spec("fastkmeans") or "residual" not in dtype)
        and ("+" not in dtype or dtype in ("residual4+bfloat16", "uint8+float16"))
    ),
)
ROOT = Path(store.__file__).parents[2]


def documents_of(lengths: list[int], size: int = 4, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, size, generator=generator) for length in lengths]


def integers_of(lengths: list[int], size: int = 8, seed: int = 0, most: int = 2) -> list[torch.Tensor]:
    """Small integers, whose sums are exact in any order, and often tie."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-most, most + 1, (length, size), generator=generator).float() for length in lengths]


def small(folder: Path | None, memory: int | str = "auto", **options) -> Flat:
    """An index on the CPU."""
    return Flat(folder, "index", device="cpu", device_memory=memory, show_progress=False, **options)


def run_python(code: str, *arguments: object, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process that can import this package."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [*before, sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def content(path: Path) -> dict[str, torch.Tensor]:
    """Everything that a freshly opened store holds."""
    opened = PackedStore(path)
    positions = opened.positions_of(opened.ids)
    assert positions.tolist() == sorted({*positions.tolist()} - {-1})
    documents = {id_: opened.read(positions[i : i + 1]) for i, id_ in enumerate(opened.ids)}
    assert [len(document) for document in documents.values()] == opened.documents.lengths[positions].tolist()
    return documents


def assert_content(path: Path, ids: list[str], documents: list[torch.Tensor]) -> None:
    actual = content(path)
    assert list(actual) == ids
    for document, expected in zip(actual.values(), documents, strict=True):
        torch.testing.assert_close(document, expected, rtol=0, atol=0)


def change_state(path: Path, **changes: object) -> None:
    """Change the state of the index in the catalog with valid checksums, as only another program would."""
    catalog = Catalog(path, "float32")
    catalog.read()
    with closing(sqlite3.connect(catalog.path)) as connection:
        connection.execute("UPDATE state SET record = ?", (replace(catalog.state, **changes).to_json(),))  # type: ignore[arg-type]
        connection.commit()


@contextmanager
def written_by_another(path: Path) -> Iterator[None]:
    """Hold the write lock of the index in a folder, as another writing process does."""
    with closing(sqlite3.connect(path / "catalog.sqlite", isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield


def segments_in(path: Path) -> set[str]:
    return {file.name for file in path.glob("segment-*")}


def store_of_two_segments(path: Path) -> Path:
    """a and b in one segment, c in another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "SEGMENT_BYTES", 5 * 4 * 4)
        opened = PackedStore(path)
        opened.add(["a", "b"], documents_of([2, 3]))
        opened.add(["c"], documents_of([1]))
    assert len(segments_in(path)) == 2
    return path


@contextmanager
def blocks_of_bytes(nbytes: int) -> Iterator[None]:
    """Limit a search on a CPU to this many bytes of rows at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resident, "STREAMED_BYTES_CPU", nbytes)
        patch.setattr(search, "_GATHERED_BYTES_CPU", nbytes)
        yield
