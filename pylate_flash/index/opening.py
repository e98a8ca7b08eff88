"""Opening an index: its manifest, and every file that the manifest names, checked."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .folder import Folder
from .journal import Journal
from .manifest import Manifest
from .pieces import Pieces
from .shards import Shard
from .tables import Documents

__all__ = ["open_folder"]


def open_folder(folder: Folder) -> tuple[Documents, Pieces]:
    """Read the manifest and open its files; without either, there is an empty index.

    Raises
    ------
    ValueError
        If a file is missing, damaged, or of a newer format. The message names it.
    OSError
        If a file cannot be opened. The message names it.
    """
    while True:
        content = folder.read()
        try:
            if content is None:
                folder.check_no_remains()
                return Documents(), Pieces(folder.manifest.layout, [], None)
            manifest = folder.parse(content)
            found = _open_files(folder.path, manifest)
        except (OSError, ValueError):
            # A writer may have replaced the manifest, and deleted shards, after it was read here.
            if folder.read() != content:
                continue
            raise
        folder.accept(content, manifest)
        return found


def _open_files(path: Path, manifest: Manifest) -> tuple[Documents, Pieces]:
    documents, shards, journal = Documents(), [], None
    found = (Shard.open(path / entry.file, entry, manifest) for entry in manifest.shards)
    for shard, ids, lengths in found:
        shards.append(shard)
        _extend(documents, ids, lengths, shard.path, manifest)
    if manifest.journal is not None:
        journal, ids, lengths = Journal.open(path / manifest.journal, manifest.layout)
        _extend(documents, ids, lengths, journal.path, manifest)
    return documents, Pieces(manifest.layout, shards, journal)


def _extend(documents: Documents, ids: list[str], lengths: np.ndarray, path: Path, manifest: Manifest) -> None:
    removed = manifest.removed.get(path.name, [])
    try:
        if removed and removed[-1] >= len(ids):
            raise ValueError(f"it has {len(ids)} documents, the manifest says that number {removed[-1]} was removed")
        gone = set(removed)
        documents.check_new([id_ for i, id_ in enumerate(ids) if i not in gone] if gone else ids)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    documents.extend(ids, lengths, removed)
