"""`manifest.json`, which says what an index consists of; checked in full before anything of it is used."""

from __future__ import annotations

import json
import platform
import re
import zlib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .layout import DTYPES, Layout
from .model_record import ModelRecord

__all__ = ["FORMAT", "FORMAT_VERSION", "Entry", "Manifest", "SHARD_NAME", "JOURNAL_NAME"]

FORMAT = "pylate_flash.packed"
# 1: no journal, no checksums, no model. 2: no embeddings in 8 bits. 3: no documents that are only marked as removed.
# What has none is written as an older version, so that a package that reads up to that takes it, and refuses another
# one by its number.
FORMAT_VERSION = 4
SHARD_NAME = re.compile(r"shard-\d{5,}-[0-9a-f]{8}\.safetensors")
JOURNAL_NAME = re.compile(r"journal-\d{5,}-[0-9a-f]{8}")


@dataclass(frozen=True)
class Entry:
    """What the manifest says about one shard; `sha256` is that of the file, None if version 1 wrote it."""

    file: str
    documents: int
    tokens: int
    bytes: int
    sha256: str | None


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`; the defaults are those of an index that has not been written yet.

    `removed` holds, for a shard or the journal, the places in it of documents that count as removed, ascending.
    `corpora` are the files and folders whose texts were added: absolute, and as seen from the index.
    """

    dtype: str = "float32"
    generation: int = 0
    embedding_size: int | None = None
    shards: tuple[Entry, ...] = ()
    journal: str | None = None
    model: ModelRecord | None = None
    created_with: dict[str, str] = field(default_factory=dict)
    removed: dict[str, list[int]] = field(default_factory=dict)
    corpora: tuple[tuple[str, str | None], ...] = ()

    @property
    def layout(self) -> Layout:
        """How embeddings are kept; of size 0 as long as nothing was added."""
        return Layout(self.dtype, self.embedding_size or 0)

    def next(self, **changes: Any) -> Manifest:
        """The manifest of the next generation."""
        from .. import __version__

        made_with = {"pylate_flash": __version__, "python": platform.python_version(), "torch": torch.__version__}
        following = replace(self, generation=self.generation + 1, created_with=made_with, **changes)
        names = {following.journal, *(entry.file for entry in following.shards)}
        following = replace(
            following, removed={name: some for name, some in following.removed.items() if name in names}
        )
        # What is empty takes embeddings of any size.
        return following if following.shards or following.journal else replace(following, embedding_size=None)

    def to_bytes(self) -> bytes:
        """As `parse` takes it."""
        record = {
            "format": FORMAT,
            "version": FORMAT_VERSION if self.removed else 3 if self.layout.quantized else 2,
            "generation": self.generation,
            "dtype": self.dtype,
            "embedding_size": self.embedding_size,
            "created_with": self.created_with,
            "model": None if self.model is None else self.model.to_json(),
            "journal": self.journal,
            "shards": [asdict(entry) for entry in self.shards],
            "removed": self.removed,
            "corpora": self.corpora,
        }
        return json.dumps({**record, "crc32": _crc(record)}).encode()

    @classmethod
    def parse(cls, content: bytes, path: Path) -> Manifest:
        """Read the content of the file `path`.

        Raises
        ------
        ValueError
            If it is no manifest, one of a newer format, or damaged. The message names the file.
        """
        try:
            record = json.loads(content)
            if record["format"] != FORMAT:
                raise ValueError(f"its format is {record['format']!r:.100}")
            version = _integer("version", record["version"], at_least=1)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is not the manifest of a pylate_flash index: {_reason(error)}") from None
        if version > FORMAT_VERSION:
            raise ValueError(
                f"{path} has format version {version}, and this pylate_flash reads up to {FORMAT_VERSION}: "
                "upgrade pylate_flash"
            )
        try:
            # Older versions wrote none.
            if "crc32" in record and record.pop("crc32") != _crc(record):
                raise ValueError("it has another CRC-32 than when it was written")
            return cls._checked(record, version)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is damaged: {_reason(error)}") from None

    @classmethod
    def _checked(cls, record: dict, version: int) -> Manifest:
        if not isinstance(record["dtype"], str) or record["dtype"] not in DTYPES:
            raise ValueError(f"unknown dtype {record['dtype']!r:.100}")
        size = record["embedding_size"]
        if not isinstance(record["shards"], list):
            raise ValueError("its shards are not a list")
        shards = tuple(_entry(entry, version) for entry in record["shards"])
        names: set[str] = set()
        for entry in shards:
            if entry.file in names:
                raise ValueError(f"it names the shard {entry.file} twice")
            names.add(entry.file)
        journal, model, made_with = None, None, record["created_with"]
        if not isinstance(made_with, dict) or not all(isinstance(value, str) for value in made_with.values()):
            raise ValueError("its created_with is not an object of strings")
        if version == 1:
            total = sum(entry.documents for entry in shards)
            if _integer("documents", record["documents"]) != total:
                raise ValueError(f"it says {record['documents']} documents, its shards {total}")
        else:
            journal = record["journal"]
            # A name is used as a path: nothing outside the folder may be named.
            if journal is not None and not (isinstance(journal, str) and JOURNAL_NAME.fullmatch(journal)):
                raise ValueError(f"bad journal name {journal!r:.100}")
            model = None if record["model"] is None else ModelRecord.from_json(record["model"])
        if size is not None or shards or journal:
            _integer("embedding_size", size, at_least=1)
        if not (shards or journal):
            # Older versions kept that of the documents that had been there.
            size = None
        generation = _integer("generation", record["generation"])
        removed = record["removed"] if version > 3 else {}
        if not isinstance(removed, dict) or not removed.keys() <= names | {journal}:
            raise ValueError(f"its removed is {removed!r:.100}, expected places of documents in its files")
        for name, places in removed.items():
            for i, place in enumerate(places):
                _integer(f"removed of {name}", place, at_least=places[i - 1] + 1 if i else 0)
        return cls(record["dtype"], generation, size, shards, journal, model, made_with, removed, _corpora(record))


def _crc(record: dict) -> int:
    """The CRC-32 of a manifest, however its JSON is laid out."""
    return zlib.crc32(json.dumps(record).encode())


def _entry(entry: object, version: int) -> Entry:
    keys = {"file", "documents", "tokens", "bytes"} | ({"sha256"} if version > 1 else set())
    if not isinstance(entry, dict) or entry.keys() != keys:
        raise ValueError(f"the entry {entry!r:.100} of a shard must have the keys {sorted(keys)}")
    name, sha256 = entry["file"], entry.get("sha256")
    # A name is used as a path: nothing outside the folder may be named.
    if not isinstance(name, str) or not SHARD_NAME.fullmatch(name):
        raise ValueError(f"bad shard name {name!r:.100}")
    if sha256 is not None and not (isinstance(sha256, str) and re.fullmatch("[0-9a-f]{64}", sha256)):
        raise ValueError(f"the sha256 of {name} is {sha256!r:.100}")
    counts = [_integer(f"{key} of {name}", entry[key]) for key in ("documents", "tokens", "bytes")]
    return Entry(name, counts[0], counts[1], counts[2], sha256)


def _corpora(record: dict) -> tuple[tuple[str, str | None], ...]:
    found = record.get("corpora", [])  # not in older versions
    if not isinstance(found, list) or not all(
        isinstance(one, list) and [type(part) for part in one] in ([str, str], [str, type(None)]) for one in found
    ):
        raise ValueError(f"its corpora are {found!r:.100}, expected pairs of paths")
    return tuple((absolute, relative) for absolute, relative in found)


def _integer(name: str, value: object, at_least: int = 0) -> int:
    # A bool is an int to Python, and no count; 2**62 leaves room for sums in int64.
    if type(value) is not int or not at_least <= value < 1 << 62:
        raise ValueError(f"its {name} is {value!r:.100}, expected an integer of at least {at_least}")
    return value


def _reason(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
