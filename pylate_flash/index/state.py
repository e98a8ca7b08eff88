"""The state of an index besides its documents: one JSON row in the catalog, validated in full before use."""

from __future__ import annotations

import functools
import json
import platform
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..encoding.model_record import ModelRecord
from .layout import DTYPES, Layout

FORMAT = "pylate_flash.catalog"
FORMAT_VERSION = 2


@dataclass(frozen=True)
class State:
    """State of an index; the defaults are those of one that has not been written yet."""

    dtype: str = "float32"
    embedding_size: int | None = None
    # Number of writes to the index.
    generation: int = 0
    documents: int = 0
    # Document numbers ascend and are never reused.
    next_number: int = 0
    # Number of rows in the table of parts, and a CRC-32 over their CRCs.
    parts: int = 0
    parts_crc: int = 0
    model: ModelRecord | None = None
    # The files and folders whose texts were added: absolute path, and path relative to the index.
    corpora: tuple[tuple[str, str | None], ...] = ()
    # Versions of the packages that wrote the index last.
    created_with: dict[str, str] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """Layout of the stored embeddings; its size is 0 until documents are added."""
        return _layout(self.dtype, self.embedding_size or 0)

    def next(self, **changes: Any) -> State:
        """The state of the next generation."""
        state = replace(self, generation=self.generation + 1, created_with=_versions(), **changes)
        # An empty index accepts embeddings of any size.
        return state if state.parts else replace(state, embedding_size=None)

    def to_json(self) -> str:
        """Serialize the state for `parse`."""
        model = None if self.model is None else self.model.to_json()
        text = json.dumps({"format": FORMAT, "version": FORMAT_VERSION, **vars(self), "model": model})
        return f'{text[:-1]}, "crc32": {zlib.crc32(text.encode())}}}'

    @classmethod
    def parse(cls, text: str) -> State:
        """Read what `to_json` wrote. Raises a ValueError if it is damaged, of a newer version, or something else."""
        try:
            record = json.loads(text)
            if record.pop("format") != FORMAT:
                raise ValueError("it is not an index of pylate_flash")
            version = record.pop("version")
            crc = record.pop("crc32")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"its state is not a valid index record: {error!r:.200}") from None
        if type(version) is int and version > FORMAT_VERSION:
            raise ValueError(
                f"it has format version {version}, but this pylate_flash reads versions up to {FORMAT_VERSION}: "
                "upgrade pylate_flash"
            )
        try:
            if crc != zlib.crc32(json.dumps({"format": FORMAT, "version": version, **record}).encode()):
                raise ValueError("the CRC-32 of its state differs from the recorded one")
            record["model"] = None if record["model"] is None else ModelRecord.from_json(record["model"])
            record["corpora"] = tuple((absolute, relative) for absolute, relative in record["corpora"])
            state = cls(**record)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(str(error)) from None
        if state.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {state.dtype!r:.100}")
        return state


@dataclass(frozen=True)
class IndexInfo:
    """Summary of an index.

    Attributes
    ----------
    path
        Its folder.
    documents, tokens
        Their numbers.
    bytes
        Total size of its files.
    scored_bytes
        Size of the rows that a search of all documents scores.
    dtype
        How embeddings are stored: the `dtype` of `indexes.Flat`.
    embedding_size
        Elements of an embedding (or of a hidden state); None if there are no documents.
    segments
        Number of files that hold the embeddings.
    generation
        Number of writes to the index.
    model
        The model that made the embeddings, if it was recorded.
    created_with
        Versions of the packages that wrote it last.
    """

    path: Path
    documents: int
    tokens: int
    bytes: int
    scored_bytes: int
    dtype: str
    embedding_size: int | None
    segments: int
    generation: int
    model: ModelRecord | None
    created_with: dict[str, str]


_layout = functools.lru_cache(Layout)


@functools.cache
def _versions() -> dict[str, str]:
    from .. import __version__

    return {"pylate_flash": __version__, "python": platform.python_version(), "torch": torch.__version__}
