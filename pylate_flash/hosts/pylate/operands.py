"""Conversion of the embeddings and masks that PyLate's scoring functions accept to tensors for the operations."""

from __future__ import annotations

import functools
import logging
from contextlib import suppress
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from pylate.utils import convert_to_tensor
from torch import Tensor

from ...ops.checks import FLOATING, check_same

logger = logging.getLogger(__name__)

Embeddings = Tensor | np.ndarray | list


def left_to_pylate(queries: Tensor, documents: Tensor) -> bool:
    """Whether `"auto"` leaves these embeddings to PyLate, because the op does not support their dtype; logged once.

    TypeError if only one of the two has such a dtype: PyLate does not support that either.
    """
    unsupported = [tensor.dtype for tensor in (queries, documents) if tensor.dtype not in FLOATING]
    if len(unsupported) == 1:
        raise TypeError(
            "queries_embeddings and documents_embeddings must both be of a floating dtype, or both of an integer one, "
            f"got {queries.dtype} and {documents.dtype}"
        )
    if unsupported:
        _log_left_to_pylate(unsupported[0])
    return bool(unsupported)


@functools.cache
def _log_left_to_pylate(dtype: torch.dtype) -> None:
    logger.warning('backend "auto": PyLate scores embeddings of %s, which pylate_flash does not support', dtype)


def tensor_of(name: str, value: Any, shape: str) -> Tensor:
    """Convert `value` to a tensor as PyLate does, and check that it has as many dimensions as `shape`."""
    advice = "; pad them, for example with torch.nn.utils.rnn.pad_sequence, and mask the padding"
    tensor = _converted(name, value, shape, advice)
    if tensor is None:
        raise TypeError(f"{name} must be a tensor, an array or a list of them of shape {shape}, got {_kind(value)}")
    if tensor.dim() != shape.count(",") + 1:
        raise ValueError(f"{name} must be {shape}, got shape {list(tensor.shape)}")
    return tensor


def mask_of(name: str, value: Any) -> Tensor | None:
    """Convert a mask to a tensor; the op checks its shape."""
    if value is None:
        return None
    tensor = _converted(name, value, "one tensor")
    if tensor is None:
        raise TypeError(f"{name} must be a tensor, an array, a nested list or None, got {_kind(value)}")
    return tensor


def expanded(mask: Tensor | None, embeddings: Tensor) -> Tensor | None:
    """Broadcast a mask to embeddings [..., d], as PyLate does; a mask that does not fit is returned unchanged."""
    shape = embeddings.shape[:-1]
    if mask is None or mask.dim() != len(shape):
        return mask
    fits = all(mask_size in (1, size) for mask_size, size in zip(mask.shape, shape, strict=True))
    return mask.expand(shape) if fits else mask


def flat_mask(mask: Tensor | None, documents: Tensor) -> Tensor | None:
    """Flatten a mask [G, N, Ld] of grouped documents, or one that broadcasts to it, to [G * N, Ld]."""
    mask = expanded(mask, documents)
    if mask is None:
        return None
    if mask.shape != documents.shape[:3]:
        raise ValueError(f"documents_mask must have shape {list(documents.shape[:3])}, got {list(mask.shape)}")
    return mask.flatten(0, 1)


def _converted(name: str, value: Any, shape: str, advice: str = "") -> Tensor | None:
    """Convert `value` as PyLate does, which returns None for types that it does not know."""
    value = _numbers(name, value)
    try:
        return convert_to_tensor(value)
    except TypeError as error:
        raise TypeError(f"{name} must hold numbers of a type that torch has ({error})") from error
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{name} must be {shape}, and the items of the list do not stack into that ({error}){advice}"
        ) from error


def _numbers(name: str, value: Any) -> Any:
    """Copy an array with negative strides, which torch rejects; return anything else unchanged."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind not in "biufc":
        raise TypeError(f"{name} must hold numbers, got an array of {value.dtype}")
    return value.copy() if min(value.strides, default=0) < 0 else value


def _from_array(name: str, array: np.ndarray) -> Tensor:
    numbers = _numbers(name, array)
    try:
        return torch.from_numpy(numbers)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must hold numbers of a type that torch has ({error})") from error


def listed(value: Any, name: str) -> Tensor | np.ndarray | list:
    """Convert an iterable that is neither a tensor nor a padded array, such as a tuple or an iterator, to a list."""
    if isinstance(value, Tensor) and value.dim() == 0:
        raise ValueError(f"{name} must have one entry per pair, got shape []")
    if isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.ndim == 3):
        return value
    try:
        return list(value)
    except TypeError as error:
        raise TypeError(f"{name} must be a tensor, an array or a list of them, got {_kind(value)}") from error


def _kind(value: Any) -> str:
    return f"list of {type(value[0]).__name__}" if isinstance(value, list) and value else type(value).__name__


def tokens_of(values: Any, name: str, *index: int) -> list[Tensor]:
    """Convert queries or documents to tensors [L, d], or [0] for an empty list; errors say `name[index...][i]`."""
    tensors = [_from_array(name, value) if isinstance(value, np.ndarray) else value for value in values]
    # Fast path: for a thousand items, checks one by one take longer than the kernel that scores them.
    if set(map(type, tensors)) == {Tensor} and set(map(Tensor.dim, tensors)) == {2}:
        return tensors
    return [_tokens(value, name, *index, i) for i, value in enumerate(tensors)]


def _tokens(value: Any, name: str, *index: int) -> Tensor:
    if isinstance(value, list):
        with suppress(RuntimeError, ValueError):  # a ragged list stays a list, and is rejected below
            value = convert_to_tensor(value)
    if isinstance(value, Tensor) and (value.dim() == 2 or value.shape == (0,)):
        return value
    got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else _kind(value)
    raise (ValueError if isinstance(value, (Tensor, list)) else TypeError)(
        f"{name}{''.join(f'[{i}]' for i in index)} must be a tensor, an array or a nested list of shape "
        f"[tokens, embedding size], got {got}"
    )


def of_one_type(queries: list[Tensor], documents: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Convert query and document tokens from `tokens_of` to [L_i, d] in their common dtype.

    Raises
    ------
    ValueError
        If the queries or the documents lie on several devices, or if there are two embedding sizes.
    """
    # Fast path for the common case: all have the same device, dtype and embedding size.
    kinds = set(map(attrgetter("device", "dtype", "shape"), (*queries, *documents)))
    if len({(device, dtype, *shape[1:]) for device, dtype, shape in kinds}) == 1 and queries[0].dim() == 2:
        return queries, documents
    dims = []
    for name, sequences in (("queries_embeddings", queries), ("documents_embeddings", documents)):
        devices = sorted(map(str, {tokens.device for tokens in sequences}))
        if len(devices) > 1:
            raise ValueError(f"{name} must lie on one device, got {' and '.join(devices)}")
        sizes = sorted({tokens.shape[1] for tokens in sequences if tokens.dim() == 2})
        if len(sizes) > 1:
            raise ValueError(f"{name} must have one embedding size, got {' and '.join(map(str, sizes))}")
        dims.append(sizes)
    # An empty list has no embedding size of its own; any will do if all are empty.
    size = next((sizes[0] for sizes in dims if sizes), 1)
    if dims[0] and dims[1] and dims[0] != dims[1]:
        raise ValueError(
            f"documents_embeddings must have the embedding size of queries_embeddings, {dims[0][0]}, got {dims[1][0]}"
        )
    dtype = _common_type(*queries, *documents)

    def alike(sequences: list[Tensor]) -> list[Tensor]:
        return [
            (tokens if tokens.dim() == 2 else tokens.new_empty(0, size)).to(dtype or tokens.dtype)
            for tokens in sequences
        ]

    return alike(queries), alike(documents)


def cu_seqlens(lengths: list[int]) -> Tensor:
    """Return the boundaries [N + 1] of sequences of these lengths in their concatenation, int32, on the CPU."""
    return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))


def promoted(queries: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    """Convert both to their common floating dtype: float16 with float32 gives float32, float16 with bfloat16 too."""
    check_same(queries, documents, same_dtype=False, names=("queries_embeddings", "documents_embeddings"))
    dtype = _common_type(queries, documents)
    return queries.to(dtype or queries.dtype), documents.to(dtype or documents.dtype)


def _common_type(*embeddings: Tensor) -> torch.dtype | None:
    """Return the promoted floating dtype of all; None if one is not floating, which the operation then rejects."""
    dtypes = {tensor.dtype for tensor in embeddings}
    return functools.reduce(torch.promote_types, dtypes) if all(dtype.is_floating_point for dtype in dtypes) else None
