"""Indexes of the format before `catalog.sqlite`, read to be written anew: a manifest, safetensors shards, a journal."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from ..encoding.model_record import ModelRecord, places_of, relative_to
from ..index.layout import Layout
from ..index.store import PackedStore

__all__ = ["convert"]

_FORMAT, _VERSIONS = "pylate_flash.packed", range(1, 5)
# A journal begins with two heads, the last of which that is whole counts: a number, where the journal ends, how much of
# it was on the disk, and the sha256 of its last record.
_HEAD, _HEAD_BYTES = struct.Struct("<8sQQQ32s"), 128
# Before a record: its length, and its sha256, which goes on from that of the record before it.
_RECORD, _RECORD_BYTES = struct.Struct("<Q32s"), 64
_COPIED_BYTES = 16 << 20

_Documents = tuple[list[str], np.ndarray, np.ndarray]  # ids, lengths, and the bytes of all rows


def convert(old: Path, new: Path, show_progress: bool = False) -> PackedStore:
    """Write the documents of an index into a new one, row by row as they are; the old one is only read.

    The folder of the new one is not there or is empty. It appears when all is in it; until then it has ".unfinished" in
    its name. A ValueError or an OSError names a file that is missing, damaged, or cannot be read or written.
    """
    manifest = _manifest(old / "manifest.json")
    layout, removed = Layout(manifest["dtype"], manifest["embedding_size"] or 0), manifest.get("removed", {})
    unfinished = new.with_name(f"{new.name}.unfinished")
    store = PackedStore(unfinished, layout.kept_as, override=True)
    for entry in tqdm(manifest["shards"], desc="Converting", unit="file", disable=not show_progress):
        _append(store, layout, _shard(old / entry["file"], entry, layout), removed.get(entry["file"], []))
    if manifest.get("journal"):
        for documents, places in _journal(old / manifest["journal"], layout, removed.get(manifest["journal"], [])):
            _append(store, layout, documents, places)
    model = manifest.get("model") and ModelRecord.from_json(manifest["model"])
    if model and model.name is not None and model.relative is not None:
        model = replace(model, relative=_relative(model.name, model.relative, old, new))
    corpora = [(path, _relative(path, relative, old, new)) for path, relative in manifest.get("corpora", [])]
    store.note(model=model or None, corpora=tuple(corpora))
    store.close()
    os.rename(unfinished, new)
    return PackedStore(new)


def _relative(path: str, relative: str | None, old: Path, new: Path) -> str | None:
    """As seen from the new index, what was recorded by these two paths."""
    places = places_of(path, relative, old)
    return relative_to(next((place for place in places if os.path.exists(place)), path), new)


def _manifest(path: Path) -> dict:
    try:
        record = json.loads(path.read_bytes())
        if record["format"] != _FORMAT or record["version"] not in _VERSIONS:
            raise ValueError(f"its format is {record['format']!r:.100}, version {record['version']!r:.100}")
        if "crc32" in record and record.pop("crc32") != zlib.crc32(json.dumps(record).encode()):
            raise ValueError("it has another CRC-32 than when it was written")
        # They are used as paths: nothing outside the folder may be named.
        for name in (*(entry["file"] for entry in record["shards"]), record.get("journal") or "journal-00000-00000000"):
            if not re.fullmatch(r"(shard-\d{5,}-[0-9a-f]{8}\.safetensors|journal-\d{5,}-[0-9a-f]{8})", name):
                raise ValueError(f"bad name {name!r:.100} of a file")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged, or no manifest of an index: {error}") from None
    return record


def _append(store: PackedStore, layout: Layout, documents: _Documents, removed: list[int]) -> None:
    ids, lengths, values = documents
    live = np.ones(len(ids), dtype=bool)
    live[removed] = False
    kept = np.flatnonzero(live)
    rows = values.reshape(-1, layout.nbytes)
    begins = np.cumsum(lengths) - lengths

    def pieces(start: int, stop: int) -> Iterator[torch.Tensor]:
        places = kept[start:stop]
        for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
            begin, end = int(begins[run[0]]), int(begins[run[-1]] + lengths[run[-1]])
            for row in range(begin, max(end, begin + 1), step):
                yield torch.from_numpy(np.array(rows[row : min(row + step, end)])).view(layout.dtype)

    step = max(1, _COPIED_BYTES // layout.nbytes)
    store.append([ids[place] for place in kept.tolist()], lengths[kept], layout, pieces)


def _shard(path: Path, entry: dict, layout: Layout) -> _Documents:
    try:
        content = np.memmap(path, dtype=np.uint8, mode="r")
        digest = hashlib.sha256()
        for start in range(0, len(content), _COPIED_BYTES):
            digest.update(content[start : start + _COPIED_BYTES].data)
        # Version 1 has none.
        if entry.get("sha256") not in (None, digest.hexdigest()) or len(content) != entry["bytes"]:
            raise ValueError(f"it has {len(content)} bytes of sha256 {digest.hexdigest()}, the manifest says otherwise")
        return _decode(content, layout)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _journal(path: Path, layout: Layout, removed: list[int]) -> Iterator[tuple[_Documents, list[int]]]:
    """The documents of every addition, with the places in it of those that count as removed."""
    content = np.fromfile(path, dtype=np.uint8)
    heads = []
    for place in (0, _HEAD_BYTES):
        packed = bytes(content[place : place + _HEAD.size])
        crc = bytes(content[place + _HEAD.size : place + _HEAD.size + 4])
        if packed.startswith(b"PLFLASHJ") and crc == struct.pack("<I", zlib.crc32(packed)):
            heads.append(_HEAD.unpack(packed)[1:])
    if not heads:
        raise ValueError(f"{path} is damaged: its heads are not those of a journal")
    _, end, flushed, last = max(heads)
    # Where a head is not whole, a writer was interrupted while it replaced it: additions that are whole count.
    place, before, first, limit = 2 * _HEAD_BYTES, bytes(32), 0, end if len(heads) == 2 else len(content)
    while place < limit:
        length, digest = _RECORD.unpack(bytes(content[place : place + _RECORD.size]).ljust(_RECORD.size, b"\0"))
        payload = content[place + _RECORD_BYTES : place + _RECORD_BYTES + length]
        if not length or hashlib.sha256(before + payload.tobytes()).digest() != digest:
            break
        documents = _decode(payload, layout)
        count = len(documents[0])
        yield documents, [number - first for number in removed if first <= number < first + count]
        place, before, first = place + _RECORD_BYTES + length, digest, first + count
    if place < flushed or (place == end and before != last):
        raise ValueError(f"{path} is damaged at byte {place}: an addition is another than was written")
    if place < end:
        warnings.warn(f"{path}: its last {end - place} bytes are lost, as after a power failure", stacklevel=2)


def _decode(content: np.ndarray, layout: Layout) -> _Documents:
    """The documents of a safetensors file."""
    data = 8 + int.from_bytes(bytes(content[:8]), "little")
    header = json.loads(bytes(content[8:data]))

    def bytes_of(name: str) -> np.ndarray:
        begin, end = header[name]["data_offsets"]
        return content[data + begin : data + end]

    ids, lengths = json.loads(bytes(bytes_of("ids"))), np.frombuffer(bytes(bytes_of("lengths")), "<i8").astype(np.int64)
    values = bytes_of("values")
    if len(ids) != len(lengths) or lengths.min(initial=0) < 0 or lengths.sum() * layout.nbytes != len(values):
        raise ValueError(f"it has {len(ids)} ids, {len(lengths)} lengths and {len(values)} bytes of values")
    return ids, lengths, values
