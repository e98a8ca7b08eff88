"""One safetensors file of many documents: values [T, d], lengths [N] (int64), ids (UTF-8 bytes of a JSON list).

Beside them, `checksums` (bytes, little-endian uint32): those of the values (`checksums.py`), compared when values are
first read, and last the CRC-32 of all the rest, which is read and compared when the file is opened. Older versions
wrote none.

Files are read, not mapped: of a mapped file that another program truncates, the next access would end the process.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import struct
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .checksums import CheckedBlocks, Sums, blocks_of
from .files import open_named, read_exactly, write_all
from .layout import DTYPES, Layout, is_finite
from .manifest import FORMAT, Entry, Manifest

__all__ = ["Content", "Shard", "bytes_of", "check_finite", "decode", "encode"]

# What safetensors calls the types.
_TYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "U8": torch.uint8,
    "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_VERIFIED_AT_A_TIME = 16 << 20
# Values are read and checked so many bytes at a time, so that they are checked while the processor's cache holds them.
_CHECKED_AT_A_TIME = 1 << 20


@dataclass(frozen=True)
class Content:
    """The documents of a file: `values_offset` is where the rows of its tokens begin, `sums` are their CRCs."""

    ids: list[str]
    lengths: np.ndarray
    layout: Layout
    tokens: int
    values_offset: int
    sums: np.ndarray | None


def encode(
    ids: Sequence[str], lengths: np.ndarray, values: Iterable[memoryview], layout: Layout
) -> Iterator[memoryview | bytes]:
    """The bytes of a safetensors file, piece by piece, so that never more than one piece is in memory.

    Parameters
    ----------
    ids, lengths
        Of the documents. Shape: [N].
    values
        The memory of their rows, as `bytes_of` gives it, in pieces.
    layout
        Of the rows. Where they hold more than the embeddings, the size of these is among the metadata.
    """
    names, tokens = json.dumps(list(ids)).encode(), int(lengths.sum())
    # Longer types first, so that each tensor is aligned to its type.
    values_begin = 8 * len(lengths)
    ids_begin = values_begin + tokens * layout.nbytes
    sums_begin = ids_begin + len(names)
    sums_bytes = 4 * blocks_of(ids_begin - values_begin) + 4
    dtype, shape = _NAMES[layout.dtype], f"[{tokens},{layout.width}]"
    size = f',"embedding_size":"{layout.size}"' if layout.quantized else ""
    text = (
        f'{{"__metadata__":{{"format":"{FORMAT}"{size}}},'
        f'"lengths":{{"dtype":"I64","shape":[{len(lengths)}],"data_offsets":[0,{values_begin}]}},'
        f'"values":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{values_begin},{ids_begin}]}},'
        f'"ids":{{"dtype":"U8","shape":[{len(names)}],"data_offsets":[{ids_begin},{sums_begin}]}},'
        f'"checksums":{{"dtype":"U8","shape":[{sums_bytes}],"data_offsets":[{sums_begin},{sums_begin + sums_bytes}]}}}}'
    ).encode()
    text += b" " * (-len(text) % 8)
    head, places, sums = struct.pack("<Q", len(text)) + text, lengths.astype("<i8").tobytes(), Sums()
    yield head
    yield places
    for piece in values:
        if len(piece):
            sums.update(piece)
            yield piece
    yield names
    found = sums.values().tobytes()
    yield found + struct.pack("<I", _crc(head, places, names, found))


def _crc(*pieces: bytes) -> int:
    return functools.reduce(lambda crc, piece: zlib.crc32(piece, crc), pieces, 0)


def decode(read: Callable[[int, int], bytes], nbytes: int) -> Content:
    """Read what `encode` wrote, all but the embeddings, and check that it is consistent.

    Parameters
    ----------
    read
        Returns so many bytes (the second argument) from a place (the first).
    nbytes
        How many bytes there are.

    Raises
    ------
    ValueError
        If they are not such a file, not a whole one, or another than was written.
    """
    if nbytes < 8:
        raise ValueError(f"it has {nbytes} bytes")
    (length,) = struct.unpack("<Q", read(0, 8))
    if length > nbytes - 8:
        raise ValueError(f"its header should have {length} bytes, the file has {nbytes}")
    head = read(0, 8 + length)
    try:
        header = json.loads(head[8:])
        found = {name: _tensor(header[name], nbytes - 8 - length) for name in ("values", "lengths", "ids")}
        # None in files of older versions.
        checksums = _tensor(header["checksums"], nbytes - 8 - length) if "checksums" in header else None
    except (KeyError, TypeError, RecursionError, ValueError) as error:
        raise ValueError(f"its header is none of safetensors with values, lengths and ids: {error!r:.200}") from None
    (dtype, shape, begin, end), (kind, _, first, last), (text, _, start, stop) = found.values()
    if len(shape) != 2 or shape[1] < 1 or dtype not in DTYPES.values() or kind != torch.int64 or text != torch.uint8:
        raise ValueError(f"its values are of type {dtype} and shape {shape}, lengths of {kind}, ids of {text}")
    layout = _layout(dtype, shape[1], header)
    offset = 8 + length
    places, names = read(offset + first, last - first), read(offset + start, stop - start)
    sums = None
    if checksums is not None:
        table = read(offset + checksums[2], checksums[3] - checksums[2])
        if len(table) != 4 * blocks_of(end - begin) + 4 or _crc(head, places, names, table[:-4]) != int.from_bytes(
            table[-4:], "little"
        ):
            raise ValueError("its header, lengths, ids or checksums have another CRC-32 than when they were written")
        sums = np.frombuffer(table[:-4], dtype="<u4")
    lengths = np.frombuffer(places, dtype="<i8").astype(np.int64)
    try:
        ids = json.loads(names)
        valid = isinstance(ids, list) and all(isinstance(id_, str) for id_ in ids)
    except (RecursionError, ValueError):
        valid = False
    if not valid:
        raise ValueError("its ids are not a list of strings")
    # In float64, which cannot wrap around, and is exact as far as a right sum goes.
    if len(ids) != len(lengths) or lengths.min(initial=0) < 0 or lengths.sum(dtype=np.float64) != shape[0]:
        raise ValueError(
            f"it has {len(ids)} ids, {len(lengths)} lengths of {lengths.sum(dtype=np.float64):.0f} tokens in all, and "
            f"values of {shape[0]} tokens; the least length is {lengths.min(initial=0)}"
        )
    return Content(ids, lengths, layout, shape[0], offset + begin, sums)


def _layout(dtype: torch.dtype, width: int, header: dict) -> Layout:
    """The layout of rows of so many elements."""
    kept_as = next(name for name, kept in DTYPES.items() if kept == dtype)
    layout = Layout(kept_as, width)
    if not layout.quantized:
        return layout
    metadata = header.get("__metadata__")
    size = metadata.get("embedding_size") if isinstance(metadata, dict) else None
    if not (isinstance(size, str) and size.isdecimal() and len(size) < 10):
        raise ValueError(f"its metadata have the embedding_size {size!r:.100}")
    layout = Layout(kept_as, int(size))
    if layout.width != width:
        raise ValueError(f"embeddings of size {size} in {kept_as} take rows of {layout.width}, its rows have {width}")
    return layout


def _tensor(described: dict, nbytes: int) -> tuple[torch.dtype, list[int], int, int]:
    """Type, shape, begin and end of a tensor in a safetensors header, whose data have `nbytes`."""
    dtype, shape, (begin, end) = _TYPES[described["dtype"]], described["shape"], described["data_offsets"]
    elements = 1
    for value in (*shape, begin, end):
        if type(value) is not int or value < 0:
            raise ValueError(f"{value!r} is no size")
    for value in shape:
        elements *= value
    if not begin <= end <= nbytes or end - begin != elements * dtype.itemsize:
        raise ValueError(f"shape {shape} of {dtype} at {begin} to {end}, of {nbytes} bytes")
    return dtype, shape, begin, end


class Shard:
    """A shard that has been opened: a file that is never changed, read on demand.

    It can be read as long as this object exists, also when a later write has deleted it from its folder.
    """

    def __init__(self, path: Path, entry: Entry, layout: Layout) -> None:
        self.path, self.entry = path, entry
        self.documents, self.rows = entry.documents, entry.tokens
        self._layout, self._offset = layout, 0
        self._checked: CheckedBlocks | None = None
        self._descriptor = open_named(path)
        weakref.finalize(self, os.close, self._descriptor)

    @classmethod
    def write(
        cls,
        path: Path,
        ids: Sequence[str],
        lengths: np.ndarray,
        values: Iterable[torch.Tensor],
        layout: Layout,
    ) -> Shard:
        """Write a new file, flush it to the disk, and open it.

        Parameters
        ----------
        ids, lengths, layout
            As `encode` takes them.
        values
            Rows of the documents' tokens, in pieces [*, width] on the CPU.
        """
        digest, nbytes, offset = hashlib.sha256(), 0, 0
        # Unbuffered: the pieces are large, and nothing is left to be written when a full disk ends it.
        with path.open("xb", buffering=0) as file:
            for i, piece in enumerate(encode(ids, lengths, map(bytes_of, values), layout)):
                digest.update(piece)
                write_all(file.fileno(), piece, nbytes)
                nbytes += len(piece)
                if i < 2:  # the header and the lengths
                    offset = nbytes
            os.fsync(file.fileno())
        shard = cls(path, Entry(path.name, len(lengths), int(lengths.sum()), nbytes, digest.hexdigest()), layout)
        shard._hold(offset, np.frombuffer(piece[:-4], dtype="<u4"))  # the last one
        return shard

    def _hold(self, offset: int, sums: np.ndarray | None) -> None:
        """Take note of where the values begin, and of their CRCs."""
        self._offset = offset
        self._checked = None if sums is None else CheckedBlocks(sums, self.rows * self._layout.nbytes)

    @classmethod
    def open(cls, path: Path, entry: Entry, manifest: Manifest) -> tuple[Shard, list[str], np.ndarray]:
        """Open the shard of `entry`, and return it with the ids and the lengths of its documents.

        Raises
        ------
        ValueError
            If the file is missing, damaged, or not what the manifest says. The message names it.
        OSError
            If it cannot be opened, as where more shards are open than the system allows. The message names it.
        """
        layout = manifest.layout
        shard = cls(path, entry, layout)
        nbytes = os.fstat(shard._descriptor).st_size
        try:
            if nbytes != entry.bytes:
                raise ValueError(f"its size is {nbytes} bytes, the manifest says {entry.bytes}")
            content = decode(lambda offset, n: bytes(read_exactly(shard._descriptor, bytearray(n), offset)), nbytes)
            found = {
                "documents": (len(content.ids), entry.documents),
                "tokens": (content.tokens, entry.tokens),
                "dtype": (content.layout.dtype, layout.dtype),
                "embedding_size": (content.layout.size, layout.size),
            }
            for key, (here, there) in found.items():
                if here != there:
                    raise ValueError(f"its {key} is {here}, the manifest says {there}")
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error}") from None
        shard._hold(content.values_offset, content.sums)
        return shard, content.ids, content.lengths

    def read_into(self, out: torch.Tensor, start: int) -> None:
        """Fill `out` [n, width] with the rows of the tokens from `start` on.

        Raises
        ------
        ValueError
            If the file has become too short, or has other values than were written, which is noticed when they are
            first read. The message names it.
        OSError
            If the disk fails. The message names the file.
        """
        begin = start * self._layout.nbytes
        end = begin + len(out) * self._layout.nbytes
        try:
            view, place = memoryview(b"") if begin == end else bytes_of(out), begin
            while place < end:
                stop = min(end, (place // _CHECKED_AT_A_TIME + 1) * _CHECKED_AT_A_TIME)
                some = read_exactly(self._descriptor, view[place - begin : stop - begin], self._offset + place)
                if self._checked is not None:
                    self._checked.check(some, place, self._values)
                place = stop
        except ValueError as error:
            raise ValueError(f"{self.path} is damaged: {error}") from None
        except OSError as error:
            raise OSError(error.errno, f"{self.path} cannot be read: {error.strerror}") from error

    def _values(self, begin: int, end: int) -> memoryview:
        """Bytes of the values, from one place to another."""
        return read_exactly(self._descriptor, bytearray(end - begin), self._offset + begin)

    def verify(self) -> None:
        """Read everything.

        Raises
        ------
        ValueError
            If the checksum is another, or a value is NaN or infinite. The message names the file.
        """
        if self.entry.sha256 is not None:
            digest, buffer = hashlib.sha256(), bytearray(_VERIFIED_AT_A_TIME)
            for start in range(0, self.entry.bytes, len(buffer)):
                view = memoryview(buffer)[: min(len(buffer), self.entry.bytes - start)]
                try:
                    digest.update(read_exactly(self._descriptor, view, start))
                except (OSError, ValueError) as error:
                    raise ValueError(f"{self.path} is damaged: {error}") from None
            if digest.hexdigest() != self.entry.sha256:
                raise ValueError(
                    f"{self.path} is damaged: its sha256 is {digest.hexdigest()}, the manifest says {self.entry.sha256}"
                )
        step = max(1, _VERIFIED_AT_A_TIME // self._layout.nbytes)
        for start in range(0, self.rows, step):
            values = torch.empty(min(step, self.rows - start), self._layout.width, dtype=self._layout.dtype)
            self.read_into(values, start)
            check_finite(values, self.path, start)


def check_finite(values: torch.Tensor, path: Path, start: int = 0) -> None:
    """Raise a ValueError that names the file and the token if one of the rows `values` is NaN or infinite."""
    finite = is_finite(values)
    if not finite.all():
        token = start + int(torch.argmin(finite.to(torch.int8)))
        raise ValueError(f"{path} holds NaN or infinite values, first in its token {token}")


def bytes_of(values: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, and of another one a copy."""
    return memoryview(values.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
