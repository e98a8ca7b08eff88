"""Token embeddings of many documents, packed, on disk: safetensors shards and one JSON manifest. No pickle.

    folder/
      manifest.json                    what the store holds: format version, dtype, embedding size, list of shards
      shard-00000-3f9a61c2.safetensors values [T, d], lengths [N] (int64), ids (UTF-8 bytes of a JSON list of N strings)
      lock                             held by the process that is writing; its content means nothing

A shard is never changed once written. Every write, be it an addition or a removal, first writes new shards and flushes
them to the disk, then replaces `manifest.json` in one atomic step, and only then deletes the shards that the new
manifest no longer names. A process killed at any moment therefore leaves either the state before or the state after,
and at worst some shards that no manifest names, which the next write deletes.

A removal rewrites the shards that held the removed documents. The alternative, marking them as dead, would make
removals cheaper, but leaves what was removed on the disk and makes every search walk over it.

Opened shards are memory-mapped: tokens that no search reads take no memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import filelock
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

__all__ = ["DTYPES", "PackedStore"]

FORMAT = "pylate_flash.packed"
FORMAT_VERSION = 1
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# A removal rewrites whole shards and an addition holds one in memory, so shards are kept well below the memory of a
# small machine, and large enough that a collection of millions of documents is a few thousand files.
SHARD_BYTES = 256 << 20
_SHARD_NAME = re.compile(r"shard-\d{5,}-[0-9a-f]{8}\.safetensors")


@dataclass(frozen=True)
class _Shard:
    """One opened shard: `values` [T, d] is a view of the memory-mapped file."""

    name: str
    nbytes: int
    ids: list[str]
    lengths: np.ndarray
    values: torch.Tensor

    def entry(self) -> dict[str, str | int]:
        """What the manifest says about this shard."""
        return {
            "file": self.name,
            "documents": len(self.ids),
            "tokens": self.values.shape[0],
            "bytes": self.nbytes,
        }


class PackedStore:
    """Ordered documents with their token embeddings, kept in a folder.

    Documents keep the order in which they were added, and `ids[i]`, `lengths[i]` and position `i` of :meth:`read`
    speak of the same document. Readers may be many. Writers must take turns: a second one at the same time, or one
    whose picture of the folder is out of date, gets an error and changes nothing.

    Parameters
    ----------
    path
        The folder. It is created by the first write.
    dtype
        "float32", "float16" or "bfloat16": how embeddings are kept. None: as the existing store does, or float32,
        which keeps float32 (and narrower) embeddings exactly as given.
    override
        Start from an empty store. An existing one is emptied at once; other files in the folder are left alone.

    Raises
    ------
    ValueError
        If `dtype` is not one of the three or differs from the existing store's, or if a file of the existing store is
        missing, damaged, or of a newer format.
    """

    kept_on: torch.device  # where `read` finds the embeddings

    def __init__(self, path: str | os.PathLike[str], dtype: str | None = None, override: bool = False) -> None:
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {sorted(DTYPES)}, got {dtype!r}")
        self.path = Path(path)
        self._manifest: bytes | None = None
        self._generation = 0
        self.dtype_name = dtype or "float32"
        self.embedding_size: int | None = None
        self._set_shards([])
        if override:
            self._empty()
        else:
            self._open()
            if dtype is not None and dtype != self.dtype_name:
                raise ValueError(
                    f"dtype={dtype!r} was asked for, but the index in {self.path} keeps {self.dtype_name!r}: leave "
                    "dtype out to use it as it is, or build a new index with override=True"
                )

    # Reading

    @property
    def dtype(self) -> torch.dtype:
        """The type in which embeddings are kept."""
        return DTYPES[self.dtype_name]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's embedding; 0 as long as nothing was added."""
        return (self.embedding_size or 0) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all embeddings."""
        return int(self._cu[-1]) * self.token_bytes

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, positions: np.ndarray, device: torch.device | None = None) -> torch.Tensor:
        """Return the tokens of some documents, packed.

        Parameters
        ----------
        positions
            Which documents, in the order wanted. Shape: [N], integers.
        device
            Where the result must be; None is the CPU.

        Returns
        -------
        torch.Tensor
            [T, embedding_size] in the store's dtype. A view of the stored tokens where one stretch of a shard holds
            them all, so it must not be written to.
        """
        device = device or torch.device("cpu")
        pieces = []
        # Neighbouring documents are neighbouring rows: read each run of consecutive positions at once.
        breaks = np.flatnonzero(np.diff(positions) != 1) + 1
        for first, last in zip(np.r_[0, breaks], np.r_[breaks, len(positions)], strict=True):
            if first < last:
                pieces += self._rows(int(self._cu[positions[first]]), int(self._cu[positions[last - 1] + 1]))
        if not pieces:
            return torch.empty(0, self.embedding_size or 0, dtype=self.dtype, device=device)
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).to(device)

    def keep_on(self, device: torch.device) -> None:
        """Copy every shard to `device`, from where :meth:`read` serves it until the next write."""
        if device != self.kept_on:
            self._copies = [shard.values.to(device) for shard in self._shards]
            self.kept_on = device

    def _rows(self, start: int, stop: int) -> list[torch.Tensor]:
        """Rows start..stop of all shards put end to end, as slices of shards."""
        pieces = []
        shard = int(np.searchsorted(self._shard_cu, start, side="right")) - 1
        while start < stop:
            begin, end = int(self._shard_cu[shard]), int(self._shard_cu[shard + 1])
            if start < end:
                pieces.append(self._copies[shard][start - begin : min(stop, end) - begin])
                start = min(stop, end)
            shard += 1
        return pieces

    # Writing

    def add(
        self,
        ids: Sequence[str],
        documents: Sequence[torch.Tensor],
        batch_size: int = 2000,
        show_progress: bool = False,
    ) -> None:
        """Append documents, all of them or, on an error, none.

        Parameters
        ----------
        ids
            One new, distinct id per document.
        documents
            Token embeddings, [L_i, d] of a floating dtype on any device; L_i may be 0.
        batch_size
            Documents that are converted and checked at a time.
        show_progress
            Draw a progress bar.

        Raises
        ------
        ValueError
            If d differs from the store's, or a value is NaN or infinite in the store's dtype.
        RuntimeError
            If another process is writing or has written since this store was opened.
        """
        if not documents:
            return
        size = self.embedding_size or documents[0].shape[1]
        for i, document in enumerate(documents):
            if document.shape[1] != size:
                belongs = f"the index in {self.path}" if self.embedding_size else "the first document"
                raise ValueError(
                    f"the embeddings of document {ids[i]!r} have size {document.shape[1]}, those of {belongs} {size}"
                )
        lengths = np.array([len(document) for document in documents], dtype=np.int64)
        limit = max(1, SHARD_BYTES // (size * self.dtype.itemsize))
        with (
            self._write() as shards,
            tqdm(total=len(documents), desc="Adding documents", unit="doc", disable=not show_progress) as progress,
        ):
            for start, stop in blocks(lengths, limit):
                batches = []
                for begin in range(start, stop, batch_size):
                    end = min(begin + batch_size, stop)
                    batches.append(self._convert(ids[begin:end], documents[begin:end], lengths[begin:end]))
                    progress.update(end - begin)
                shards.append(self._save(ids[start:stop], lengths[start:stop], torch.cat(batches)))
            self._commit(self._shards + shards, size)

    def remove(self, positions: np.ndarray) -> None:
        """Drop documents, all of them or, on an error, none.

        Parameters
        ----------
        positions
            Which documents. Shape: [N], integers in [0, len(self)).

        Raises
        ------
        RuntimeError
            If another process is writing or has written since this store was opened.
        """
        if not len(positions):
            return
        keep = np.ones(len(self), dtype=bool)
        keep[positions] = False
        with self._write() as shards:
            start = 0
            for shard in self._shards:
                kept = start + np.flatnonzero(keep[start : start + len(shard.ids)])
                if len(kept) == len(shard.ids):
                    shards.append(shard)
                elif len(kept):
                    shards.append(self._save([self.ids[i] for i in kept], self.lengths[kept], self.read(kept)))
                start += len(shard.ids)
            self._commit(shards, self.embedding_size)

    def _convert(self, ids: Sequence[str], documents: Sequence[torch.Tensor], lengths: np.ndarray) -> torch.Tensor:
        values = torch.cat([document.detach().to("cpu", self.dtype) for document in documents])
        finite = torch.isfinite(values).all(dim=1)
        if not finite.all():
            row = int(torch.argmin(finite.to(torch.int8)))
            document = int(np.searchsorted(np.cumsum(lengths), row, side="right"))
            raise ValueError(
                f"the embeddings of document {ids[document]!r} hold NaN or infinite values (as {self.dtype_name}), "
                f"first in token {row - int(lengths[:document].sum())}"
            )
        return values

    @contextlib.contextmanager
    def _write(self) -> Iterator[list[_Shard]]:
        """Take the turn to write, and give a list to collect the shards written.

        What a failed write leaves behind, this one or an earlier one, is deleted.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(self.path / "lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            raise RuntimeError(
                f"another process is writing to the index in {self.path}: wait until it has finished"
            ) from None
        try:
            if self._read_manifest() != self._manifest:
                raise RuntimeError(
                    f"the index in {self.path} has been written to since it was opened here (generation "
                    f"{self._generation}): open it again and repeat the change"
                )
            self._delete_orphans()
            try:
                yield []
            except BaseException:
                self._delete_orphans()
                raise
        finally:
            lock.release()

    def _save(self, ids: Sequence[str], lengths: np.ndarray, values: torch.Tensor) -> _Shard:
        """Write one shard that no manifest names yet, and open it."""
        # The random part keeps the names of a shard lost to a crash and of its successor apart.
        name = f"shard-{self._generation:05d}-{secrets.token_hex(4)}.safetensors"
        path = self.path / name
        tensors = {
            "values": values.contiguous(),
            "lengths": torch.from_numpy(np.ascontiguousarray(lengths)),
            "ids": torch.frombuffer(bytearray(json.dumps(list(ids)).encode()), dtype=torch.uint8),
        }
        save_file(tensors, path, metadata={"format": FORMAT})
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return _open_shard(path)

    def _commit(self, shards: list[_Shard], embedding_size: int | None) -> None:
        """Make `shards` the content of the store. Only here does a write take effect."""
        manifest = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "generation": self._generation + 1,
            "dtype": self.dtype_name,
            "embedding_size": embedding_size,
            "documents": sum(len(shard.ids) for shard in shards),
            "created_with": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "safetensors": version("safetensors"),
            },
            "shards": [shard.entry() for shard in shards],
        }
        content = json.dumps(manifest, indent=1).encode()
        _fsync_folder(self.path)
        temporary = self.path / "manifest.json.tmp"
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path / "manifest.json")
        self._manifest, self._generation, self.embedding_size = content, self._generation + 1, embedding_size
        _fsync_folder(self.path)
        self._set_shards(shards)
        self._delete_orphans()

    def _empty(self) -> None:
        """Start anew, whatever the folder holds, even a store that cannot be read."""
        self._manifest = self._read_manifest()
        if self._manifest is not None:
            with self._write():
                self._commit([], None)

    def _delete_orphans(self) -> None:
        """Delete the shards that the manifest on the disk does not name."""
        # Not what this object believes: a write may have been interrupted just after it took effect.
        named = set(_SHARD_NAME.findall((self._read_manifest() or b"").decode(errors="replace")))
        for path in self.path.iterdir():
            if path.name == "manifest.json.tmp" or (_SHARD_NAME.fullmatch(path.name) and path.name not in named):
                path.unlink(missing_ok=True)

    # Opening

    def _read_manifest(self) -> bytes | None:
        try:
            return (self.path / "manifest.json").read_bytes()
        except FileNotFoundError:
            return None

    def _open(self) -> None:
        """Read the manifest and open its shards."""
        while True:
            content = self._read_manifest()
            if content is None:
                return
            manifest = _parse_manifest(content, self.path / "manifest.json")
            try:
                shards = [self._open_entry(entry, manifest) for entry in manifest["shards"]]
            except ValueError:
                # A writer may have replaced the manifest, and deleted shards, after it was read here.
                if self._read_manifest() != content:
                    continue
                raise
            self._manifest, self._generation = content, manifest["generation"]
            self.dtype_name, self.embedding_size = manifest["dtype"], manifest["embedding_size"]
            self._set_shards(shards)
            return

    def _open_entry(self, entry: dict, manifest: dict) -> _Shard:
        """Open a shard and check it against what the manifest says."""
        shard = _open_shard(self.path / entry["file"])
        found = {**shard.entry(), "dtype": shard.values.dtype, "embedding_size": shard.values.shape[1]}
        wanted = {**entry, "dtype": DTYPES[manifest["dtype"]], "embedding_size": manifest["embedding_size"]}
        for key, value in wanted.items():
            if found[key] != value:
                raise ValueError(
                    f"{self.path / entry['file']} is damaged: its {key} is {found[key]}, the manifest says {value}"
                )
        return shard

    def _set_shards(self, shards: list[_Shard]) -> None:
        self._shards = shards
        self._copies = [shard.values for shard in shards]
        self.kept_on = torch.device("cpu")
        self._shard_cu = np.cumsum([0] + [shard.values.shape[0] for shard in shards])
        self.ids = [id_ for shard in shards for id_ in shard.ids]
        self.position = {id_: i for i, id_ in enumerate(self.ids)}
        self.lengths = np.concatenate([np.zeros(0, dtype=np.int64)] + [shard.lengths for shard in shards])
        self._cu = np.concatenate([[0], np.cumsum(self.lengths)])


def blocks(lengths: np.ndarray, limit: int) -> list[tuple[int, int]]:
    """Cut a sequence of documents into stretches of at most `limit` tokens.

    A document longer than `limit` is a stretch of its own. A document counts as one token at least, so that empty ones
    cannot make a stretch of unbounded length.

    Parameters
    ----------
    lengths
        Tokens per document. Shape: [N].
    limit
        Tokens per stretch, at least 1.

    Returns
    -------
    list of (start, stop)
        They cover 0..N in order.
    """
    ends = np.cumsum(np.maximum(lengths, 1))
    stretches, start = [], 0
    while start < len(lengths):
        before = int(ends[start - 1]) if start else 0
        stop = max(int(np.searchsorted(ends, before + limit, side="right")), start + 1)
        stretches.append((start, stop))
        start = stop
    return stretches


def _parse_manifest(content: bytes, path: Path) -> dict:
    try:
        manifest = json.loads(content)
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']!r}")
        newer = manifest["version"] > FORMAT_VERSION
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the manifest of a pylate_flash index: {error!r}") from None
    if newer:
        raise ValueError(
            f"{path} has format version {manifest['version']}, and this pylate_flash reads up to {FORMAT_VERSION}: "
            "upgrade pylate_flash"
        )
    try:
        if manifest["dtype"] not in DTYPES:
            raise ValueError(f"unknown dtype {manifest['dtype']!r}")
        manifest["generation"] + 1, manifest["embedding_size"]
        for entry in manifest["shards"]:
            # A name is used as a path: nothing outside the folder may be named.
            if not _SHARD_NAME.fullmatch(entry["file"]):
                raise ValueError(f"bad shard name {entry['file']!r}")
            if entry.keys() != {"file", "documents", "tokens", "bytes"}:
                raise ValueError(f"the entry of {entry['file']} has the keys {sorted(entry)}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from None
    return manifest


def _open_shard(path: Path) -> _Shard:
    try:
        nbytes = path.stat().st_size
        with safe_open(path, framework="pt") as file:
            # The tensor is a view of the mapped file and outlives the handle.
            values, lengths, ids = (file.get_tensor(name) for name in ("values", "lengths", "ids"))
        ids = json.loads(ids.numpy().tobytes())
        if not isinstance(ids, list) or not all(isinstance(id_, str) for id_ in ids):
            raise ValueError("its ids are not a list of strings")
        lengths = lengths.numpy().copy()
    except FileNotFoundError:
        raise ValueError(f"{path} is missing, though the manifest names it") from None
    except (OSError, SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if values.ndim != 2 or len(ids) != len(lengths) or lengths.sum() != len(values) or (lengths < 0).any():
        raise ValueError(
            f"{path} is damaged: {len(ids)} ids, {len(lengths)} lengths of {lengths.sum()} tokens in all, "
            f"values of shape {tuple(values.shape)}"
        )
    return _Shard(path.name, nbytes, ids, lengths, values)


def _fsync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk, where the system can (Windows cannot open folders)."""
    if os.name == "posix":
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
