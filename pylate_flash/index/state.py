"""What an index is, beside its documents: one row of JSON in the catalog, checked in full before anything is used."""

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

__all__ = ["FORMAT_VERSION", "IndexInfo", "State"]

FORMAT = "pylate_flash.catalog"
FORMAT_VERSION = 2


@dataclass(frozen=True)
class State:
    """The defaults are those of an index that has not been written yet."""

    dtype: str = "float32"
    embedding_size: int | None = None
    # How often the index has been written.
    generation: int = 0
    documents: int = 0
    # Numbers of documents ascend, and none is given twice.
    next_number: int = 0
    # How many rows the table of parts has, and a CRC-32 over theirs.
    parts: int = 0
    parts_crc: int = 0
    model: ModelRecord | None = None
    # The files and folders whose texts were added: absolute, and as seen from the index.
    corpora: tuple[tuple[str, str | None], ...] = ()
    # Versions of the packages that wrote last.
    created_with: dict[str, str] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """How embeddings are kept; of size 0 as long as nothing was added."""
        return _layout(self.dtype, self.embedding_size or 0)

    def next(self, **changes: Any) -> State:
        """The state of the next generation."""
        following = replace(self, generation=self.generation + 1, created_with=_versions(), **changes)
        # What is empty takes embeddings of any size.
        return following if following.parts else replace(following, embedding_size=None)

    def to_json(self) -> str:
        """As `parse` takes it."""
        model = None if self.model is None else self.model.to_json()
        text = json.dumps({"format": FORMAT, "version": FORMAT_VERSION, **vars(self), "model": model})
        return f'{text[:-1]}, "crc32": {zlib.crc32(text.encode())}}}'

    @classmethod
    def parse(cls, text: str) -> State:
        """Read what `to_json` wrote; something else, of a newer version, or damaged is a ValueError."""
        try:
            record = json.loads(text)
            if record.pop("format") != FORMAT:
                raise ValueError("it is no index of pylate_flash")
            version = record.pop("version")
            crc = record.pop("crc32")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"its state is no record of an index: {error!r:.200}") from None
        if type(version) is int and version > FORMAT_VERSION:
            raise ValueError(
                f"it has format version {version}, and this pylate_flash reads up to {FORMAT_VERSION}: upgrade "
                "pylate_flash"
            )
        try:
            if crc != zlib.crc32(json.dumps({"format": FORMAT, "version": version, **record}).encode()):
                raise ValueError("its state has another CRC-32 than when it was written")
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
    """What an index consists of.

    Attributes
    ----------
    path
        Its folder.
    documents, tokens
        How many it holds.
    bytes
        Of all its files.
    scored_bytes
        Of the rows that a search of all documents scores.
    dtype
        How embeddings are kept: the `dtype` of `indexes.Flat`.
    embedding_size
        Elements of an embedding (or of a hidden state); None if there are no documents.
    segments
        How many files hold their embeddings.
    generation
        How often it has been written.
    model
        Which model made the embeddings, as far as that was recorded.
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
