"""Containers of tensors as safetensors files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

Container = TypeVar("Container")


def save_tensors(path: str | os.PathLike, tensors: dict[str, Tensor], kind: str) -> None:
    """Write a file, which holds at every moment what it held before, or all of this; `kind` names the container.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    place = Path(path)
    handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name[:32]}.")
    os.close(handle)
    try:
        save_file(_apart(tensors), temporary, metadata=_metadata(kind))
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


def load_tensors(path: str | os.PathLike, kind: str, what: str, make: Callable[..., Container]) -> Container:
    """What `make` makes of the tensors that `save_tensors` wrote, on the CPU; `what` it is, for the message.

    Raises
    ------
    ValueError
        If the file is damaged or of another kind, or `make` refuses what it holds. The message names it.
    OSError
        If it cannot be read.
    """
    # Safetensors has an error of its own for a folder, and for what may not be read.
    with open(path, "rb"):
        pass
    try:
        with safe_open(path, "pt") as file:
            found = file.metadata()
            if found != _metadata(kind):
                raise ValueError(f"its metadata are {found}, expected {_metadata(kind)}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        return make(**tensors)
    except (SafetensorError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no {what}: {error}") from error


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


def _metadata(kind: str) -> dict[str, str]:
    return {"format": f"pylate_flash.{kind}", "version": "1"}
