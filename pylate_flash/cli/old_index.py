"""Convert indexes of the format before `catalog.sqlite`: a manifest, safetensors shards, a journal."""

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
from ..index.parts import SEGMENT_NAME
from ..index.store import PackedStore
from ..ops.quantization import PRECISIONS

_FORMAT, _VERSIONS = "pylate_flash.packed", range(1, 5)
_DTYPES = ("float32", "float16", "bfloat16", *PRECISIONS)
# A journal begins with two heads, of which the latest valid one counts: a sequence number, the end of the journal, how
# many of its bytes were flushed, and the sha256 of its last record.
_HEAD, _HEAD_BYTES = struct.Struct("<8sQQQ32s"), 128
# The header of a record: its length, and its sha256, chained to that of the previous record.
_RECORD, _RECORD_BYTES = struct.Struct("<Q32s"), 64
_COPIED_BYTES = 16 << 20

# Names of the files of an index.
_OF_AN_INDEX = ("catalog.sqlite*", "committed", "reserve", SEGMENT_NAME)

_Documents = tuple[list[str], np.ndarray, np.ndarray]  # ids, lengths, and the bytes of all rows


def convert(old: Path, new: Path, show_progress: bool = False) -> PackedStore:
    """Copy the documents of an index unchanged, row by row, into a new one; the old one is only read.

    The new folder must be missing or empty. It is written under a name with ".unfinished" and renamed when complete. A
    ValueError or an OSError names a file that is missing, damaged, in the way, or cannot be read or written.
    """
    manifest = _manifest(old / "manifest.json")
    layout, removed = Layout(manifest["dtype"], manifest["embedding_size"] or 0), manifest.get("removed", {})
    # A folder cannot replace a link.
    place = new.resolve()
    unfinished = place.with_name(f"{place.name}.unfinished")
    # An interrupted conversion leaves files of an index alone there; others would become part of the new index.
    others = (str(path) for path in unfinished.glob("*") if not any(map(path.match, _OF_AN_INDEX)))
    if foreign := str(unfinished) if unfinished.is_symlink() else next(others, None):
        raise ValueError(f"{foreign} is in the way, as the new index is written to {unfinished} first: move it")
    store = PackedStore(unfinished, layout.kept_as, override=True)
    for entry in tqdm(manifest["shards"], desc="Converting", unit="file", disable=not show_progress):
        documents, removed_indices = _shard(old / entry["file"], entry, layout), removed.get(entry["file"], [])
        if max(removed_indices, default=-1) >= len(documents[0]):
            raise ValueError(
                f"{old / 'manifest.json'} is damaged: of the {len(documents[0])} documents in {entry['file']} it "
                f"removes number {max(removed_indices)}"
            )
        _append(store, layout, documents, removed_indices)
    if manifest.get("journal"):
        for documents, removed_indices in _journal(
            old / manifest["journal"], layout, removed.get(manifest["journal"], [])
        ):
            _append(store, layout, documents, removed_indices)
    model = manifest.get("model") and ModelRecord.from_json(manifest["model"])
    if model and model.name is not None and model.relative is not None:
        model = replace(model, relative=_relative(model.name, model.relative, old, new))
    corpora = [(path, _relative(path, relative, old, new)) for path, relative in manifest.get("corpora", [])]
    store.note(model=model or None, corpora=tuple(corpora))
    store.close()
    os.rename(unfinished, place)
    return PackedStore(new)


def _relative(path: str, relative: str | None, old: Path, new: Path) -> str | None:
    """The recorded path (absolute and relative to `old`), relative to the new index."""
    paths = places_of(path, relative, old)
    return relative_to(next((candidate for candidate in paths if os.path.exists(candidate)), path), new)


def _manifest(path: Path) -> dict:
    try:
        record = json.loads(path.read_bytes())
        if record["format"] != _FORMAT or record["version"] not in _VERSIONS:
            raise ValueError(f"its format is {record['format']!r:.100}, version {record['version']!r:.100}")
        if "crc32" in record and record.pop("crc32") != zlib.crc32(json.dumps(record).encode()):
            raise ValueError("its CRC-32 does not match")
        # The names are used as paths, which must stay inside the folder.
        for name in (*(entry["file"] for entry in record["shards"]), record.get("journal") or "journal-00000-00000000"):
            if not re.fullmatch(r"(shard-\d{5,}-[0-9a-f]{8}\.safetensors|journal-\d{5,}-[0-9a-f]{8})", name):
                raise ValueError(f"invalid file name {name!r:.100}")
        _check_types(record)
    except KeyError as error:
        raise ValueError(f"{path} is damaged, or is not an index manifest: {error} is missing") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged, or is not an index manifest: {error}") from None
    return record


def _check_types(record: dict) -> None:
    """Raise unless the fields of a manifest that describe its files have the types and ranges that a writer gives."""
    if record["dtype"] not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {record['dtype']!r:.100}")
    size = record["embedding_size"]
    # An index without documents has no size.
    if not _is_count(size, minimum=1) and (size is not None or record["shards"]):
        raise ValueError(f"embedding_size must be an integer of at least 1, got {size!r:.100}")
    for entry in record["shards"]:
        if not _is_count(entry["bytes"]):
            raise ValueError(f"the bytes of {entry['file']} must be an integer, got {entry['bytes']!r:.100}")
    removed = record.get("removed", {})
    if not isinstance(removed, dict) or not all(
        isinstance(indices, list) and all(map(_is_count, indices)) for indices in removed.values()
    ):
        raise ValueError(f"removed must map files to lists of integers, got {removed!r:.100}")


def _is_count(value: object, minimum: int = 0) -> bool:
    return type(value) is int and value >= minimum


def _append(store: PackedStore, layout: Layout, documents: _Documents, removed: list[int]) -> None:
    ids, lengths, values = documents
    live = np.ones(len(ids), dtype=bool)
    live[removed] = False
    live_indices = np.flatnonzero(live)
    rows = values.reshape(-1, layout.nbytes)
    starts = np.cumsum(lengths) - lengths

    def pieces(start: int, stop: int) -> Iterator[torch.Tensor]:
        indices = live_indices[start:stop]
        for run in np.split(indices, np.flatnonzero(np.diff(indices) > 1) + 1):
            begin, end = int(starts[run[0]]), int(starts[run[-1]] + lengths[run[-1]])
            for row in range(begin, end, step):
                yield torch.from_numpy(np.array(rows[row : min(row + step, end)])).view(layout.dtype)

    step = max(1, _COPIED_BYTES // layout.nbytes)
    store.append([ids[i] for i in live_indices.tolist()], lengths[live_indices], layout, pieces)


def _shard(path: Path, entry: dict, layout: Layout) -> _Documents:
    try:
        content = np.memmap(path, dtype=np.uint8, mode="r")
        digest = hashlib.sha256()
        for start in range(0, len(content), _COPIED_BYTES):
            digest.update(content[start : start + _COPIED_BYTES].data)
        # Version 1 has no sha256.
        if entry.get("sha256") not in (None, digest.hexdigest()) or len(content) != entry["bytes"]:
            raise ValueError(f"it has {len(content)} bytes and sha256 {digest.hexdigest()}, unlike the manifest")
        return _decode(content, layout)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _journal(path: Path, layout: Layout, removed: list[int]) -> Iterator[tuple[_Documents, list[int]]]:
    """Yield the documents of every addition, and the indices of removed ones in it."""
    content = np.fromfile(path, dtype=np.uint8)
    heads = []
    for offset in (0, _HEAD_BYTES):
        packed = bytes(content[offset : offset + _HEAD.size])
        crc = bytes(content[offset + _HEAD.size : offset + _HEAD.size + 4])
        if packed.startswith(b"PLFLASHJ") and crc == struct.pack("<I", zlib.crc32(packed)):
            heads.append(_HEAD.unpack(packed)[1:])
    if not heads:
        raise ValueError(f"{path} is damaged: it has no valid journal head")
    _, end, flushed, last = max(heads)
    # An invalid head means that a writer was interrupted while replacing it: read all complete additions.
    offset, before, first, limit = 2 * _HEAD_BYTES, bytes(32), 0, end if len(heads) == 2 else len(content)
    while offset < limit:
        length, digest = _RECORD.unpack(bytes(content[offset : offset + _RECORD.size]).ljust(_RECORD.size, b"\0"))
        payload = content[offset + _RECORD_BYTES : offset + _RECORD_BYTES + length]
        if not length or hashlib.sha256(before + payload.tobytes()).digest() != digest:
            break
        documents = _decode(payload, layout)
        count = len(documents[0])
        yield documents, [number - first for number in removed if first <= number < first + count]
        offset, before, first = offset + _RECORD_BYTES + length, digest, first + count
    if offset < flushed or (offset == end and before != last):
        raise ValueError(f"{path} is damaged at byte {offset}: a record does not match its checksum")
    if offset < end:
        warnings.warn(f"{path}: the last {end - offset} bytes are lost, as after a power failure", stacklevel=2)


def _decode(content: np.ndarray, layout: Layout) -> _Documents:
    """Decode the documents of a safetensors file."""
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
