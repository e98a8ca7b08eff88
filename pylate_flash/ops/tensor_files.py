"""Containers of tensors, which know how to move to a device, and to and from safetensors files."""

from __future__ import annotations

import os
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

Container = TypeVar("Container", bound="TensorContainer")


class TensorContainer:
    """What containers share whose fields are tensors, or None."""

    # What it is, for messages.
    _what: ClassVar[str]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def to(self: Container, device: torch.device | str) -> Container:
        """The same on a device. Tensors that are there already are shared, as by `torch.Tensor.to`."""
        return type(self)(**{name: tensor.to(device) for name, tensor in self._tensors().items()})

    def save(self, path: str | os.PathLike) -> None:
        """Write a safetensors file, which holds at every moment what it held before, or all of this.

        Raises
        ------
        OSError
            If it cannot be written.
        """
        place = Path(path)
        handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name[:32]}.")
        os.close(handle)
        try:
            save_file(_apart(self._tensors()), temporary, metadata=self._metadata())
            # mkstemp makes a file that only its owner may read.
            os.chmod(temporary, 0o644)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, place)
        except BaseException as error:
            os.unlink(temporary)
            if isinstance(error, SafetensorError):
                raise OSError(f"cannot write {place}: {error}") from error
            raise

    @classmethod
    def load(cls: type[Container], path: str | os.PathLike, device: torch.device | str = "cpu") -> Container:
        """Read what `save` wrote. It is read on the CPU first, and checked.

        Raises
        ------
        ValueError
            If the file is damaged or of another kind, or its tensors do not fit together. The message names it.
        OSError
            If it cannot be read.
        """
        # Safetensors has an error of its own for a folder, and for what may not be read.
        with open(path, "rb"):
            pass
        try:
            with safe_open(path, "pt") as file:
                found = file.metadata()
                if found != cls._metadata():
                    raise ValueError(f"its metadata are {found}, expected {cls._metadata()}")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            container = cls(**tensors)
        except (SafetensorError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no {cls._what}: {error}") from error
        return container.to(device)

    @classmethod
    def _metadata(cls) -> dict[str, str]:
        return {"format": f"pylate_flash.{cls.__name__}", "version": "1"}

    def _tensors(self) -> dict[str, Tensor]:
        """By name, those that are there."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, contiguous, and no two in one memory, which safetensors refuses."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.contiguous()
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return found
