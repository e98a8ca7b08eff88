"""Containers of checked tensors that move between devices, and to and from safetensors files."""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .checks import check_beside, check_boundaries, check_detached, check_tensor, is_readable
from .packing import host_bounds

Container = TypeVar("Container", bound="TensorContainer")


class TensorContainer:
    """Base class of containers whose fields are tensors or None."""

    # Its description in messages, and the field whose device the others must match.
    _what: ClassVar[str]
    _first: ClassVar[str]

    def _check_field(
        self, name: str, dtypes: tuple[torch.dtype, ...], layouts: dict[int, str] | None = None, shape: Any = None
    ) -> None:
        """Raise TypeError or ValueError unless a field is such a tensor, on the device of the first field."""
        tensor, first = getattr(self, name), getattr(self, self._first)
        check_tensor(name, tensor, layouts)
        check_beside(name, tensor, self._first, first, dtypes, shape)
        check_detached(name, tensor)

    def _check_bounds(self, cu_seqlens: Tensor) -> None:
        """Raise unless `cu_seqlens` are boundaries of the first field [T, ...]; values are checked if readable."""
        check_boundaries("cu_seqlens", cu_seqlens)
        self._check_field("cu_seqlens", (cu_seqlens.dtype,))
        if is_readable(cu_seqlens):
            host_bounds("cu_seqlens", cu_seqlens, len(getattr(self, self._first)), self._first)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def to(self: Container, device: torch.device | str) -> Container:
        """A copy on a device. Tensors already on it are shared, as in `torch.Tensor.to`."""
        return type(self)(**{name: tensor.to(device) for name, tensor in self._tensors().items()})

    def save(self, path: str | os.PathLike) -> None:
        """Write a safetensors file atomically: at any time it holds either its old content or all of the new.

        Raises
        ------
        OSError
            If it cannot be written.
        """
        # A link stays one.
        target = Path(path).resolve()
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:32]}.")
        os.close(handle)
        try:
            save_file(_apart(self._tensors()), temporary, metadata=self._metadata())
            os.chmod(temporary, permissions_of(target))
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException as error:
            os.unlink(temporary)
            if isinstance(error, SafetensorError):
                raise OSError(f"cannot write {target}: {error}") from error
            raise

    @classmethod
    def load(cls: type[Container], path: str | os.PathLike, device: torch.device | str = "cpu") -> Container:
        """Read a file written by `save`; it is read and checked on the CPU before it moves to `device`.

        Raises
        ------
        ValueError
            If the file is cut short or of another kind, or its tensors do not match. The message names it. Values have
            no checksum.
        OSError
            If it cannot be read.
        """
        # Opening a pipe would wait for a writer.
        if stat.S_ISFIFO(os.stat(path).st_mode):
            raise ValueError(f"{path} holds no {cls._what}: it is a pipe")
        # Raises OSError for a folder or an unreadable file, for which safetensors has its own error.
        with open(path, "rb"):
            pass
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata()
                if metadata != cls._metadata():
                    raise ValueError(f"its metadata are {metadata}, expected {cls._metadata()}")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            known = {field.name: field.default is MISSING for field in fields(cls)}  # type: ignore[arg-type]
            needed = {name for name, is_needed in known.items() if is_needed}
            if not needed <= set(tensors) <= set(known):
                raise ValueError(f"its tensors are {', '.join(sorted(tensors))}, expected {', '.join(known)}")
            container = cls(**tensors)
        except (SafetensorError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no {cls._what}: {error}") from error
        return container.to(device)

    @classmethod
    def _metadata(cls) -> dict[str, str]:
        return {"format": f"pylate_flash.{cls.__name__}", "version": "1"}

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors by name, without fields that are None."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def permissions_of(target: Path) -> int:
    """The permissions of a file that replaces `target`: those that it has, or those of a new file."""
    if target.exists():
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def wide_dtype(dtype: object) -> torch.dtype:
    """The dtype in which embeddings are computed before rounding to `dtype`; TypeError if that is not floating."""
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating torch.dtype, got {dtype}")
    # 8-bit dtypes cannot be promoted.
    return torch.promote_types(dtype, torch.float32) if dtype.itemsize > 1 else torch.float32


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, contiguous, with no shared storage, which safetensors rejects."""
    apart: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.contiguous()
        address = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return apart
