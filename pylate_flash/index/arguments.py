"""Checks and conversions of ids, embeddings and projections in all forms that users pass."""

from __future__ import annotations

import math
import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..ops.checks import check_tensor
from .layout import Layout, is_finite
from .scorers import Queries

Embeddings = Sequence[np.ndarray | Tensor | list] | np.ndarray | Tensor


def checked_path(folder: object, name: object) -> Path | None:
    """The folder of an index, unless it is in memory; its name must be a plain path component on every system."""
    if folder is not None and not isinstance(folder, str | os.PathLike):
        raise TypeError(f"index_folder must be the path of a folder, or None, got {type(folder).__name__}")
    plain = isinstance(name, str) and name not in ("", ".", "..") and not any(c in name for c in "/\\\0")
    # On Windows, "C:" is a drive and "C:name" a file of its current folder.
    if not plain or (len(name) > 1 and name[1] == ":"):  # type: ignore[arg-type, index]
        raise ValueError(
            "index_name must be the plain name of a folder in index_folder, without separators and not '.' or '..', "
            f"got {name!r:.200}"
        )
    return None if folder is None else Path(folder) / name  # type: ignore[operator]


def ids_of(name: str, ids: object) -> list[str]:
    """Return `ids` as a list of strings; a single string is a list of one."""
    ids = ids.tolist() if isinstance(ids, np.ndarray) else ids
    if isinstance(ids, str):
        return [str(ids)]
    if not isinstance(ids, Sequence):
        raise TypeError(f"{name} must be a list of strings, got {type(ids).__name__}")
    for i, id_ in enumerate(ids):
        if not isinstance(id_, str):
            raise TypeError(f"{name}[{i}] must be a string, got {id_!r:.100} of type {type(id_).__name__}")
    return [str(id_) for id_ in ids]


def batches_of(batches: object) -> Iterator[tuple[Any, Any, Any]]:
    """Yield ids, embeddings and metadata (or None) of each batch of documents."""
    if isinstance(batches, str) or not isinstance(batches, Iterable):
        raise TypeError(
            f"without documents_embeddings, documents_ids must be an iterator of batches, got {type(batches).__name__}"
        )
    for i, batch in enumerate(batches):
        if not isinstance(batch, tuple) or len(batch) not in (2, 3) or batch[1] is None:
            raise TypeError(
                "without documents_embeddings, documents_ids must be an iterator of batches (ids, embeddings) or (ids, "
                f"embeddings, metadata), got {type(batch).__name__} for batch {i}"
            )
        yield (*batch, None) if len(batch) == 2 else batch


def check_distinct(name: str, ids: list[str]) -> None:
    if len(set(ids)) < len(ids):
        seen = set()
        for id_ in ids:
            if id_ in seen:
                raise ValueError(f"{name}: {id_!r:.100} is given twice")
            seen.add(id_)


def checked_list(name: str, values: Any, items: str) -> Any:
    """Return a list; TypeError unless it is one, or an array."""
    if isinstance(values, str | Mapping) or not isinstance(values, Sequence | np.ndarray):
        raise TypeError(f"{name} must be a list of {items}, got {type(values).__name__}")
    return values


def column_of(name: str, rows: Any, *keys: str, kind: type = Hashable) -> list[Any]:
    """The values of the first key in a list of dictionaries; TypeError unless all have all keys, with such values."""
    named = " and ".join(f'"{key}"' for key in keys)
    for i, row in enumerate(checked_list(name, rows, f"dictionaries with {named}")):
        if not isinstance(row, Mapping) or not all(key in row and isinstance(row[key], kind) for key in keys):
            strings = "strings for " if kind is str else ""
            raise TypeError(f"{name}[{i}] must be a dictionary with {strings}{named}, got {row!r:.100}")
    return [row[keys[0]] for row in rows]


def subsets_of(subset: object, queries: int) -> tuple[list[str] | None, list[Sequence[str]] | None]:
    """Return the ids to search among: those for all queries, or a list per query (ids checked later), or neither."""
    if subset is None:
        return None, None
    subset = subset.tolist() if isinstance(subset, np.ndarray) else subset
    if isinstance(subset, str) or not isinstance(subset, Sequence):
        raise TypeError(f"subset must be a list of ids or a list of such lists, got {type(subset).__name__}")
    if all(isinstance(item, str) for item in subset):
        return list(subset), None
    if any(isinstance(item, str) for item in subset):
        raise TypeError("subset must be a list of ids or a list of such lists, got a mixture of the two")
    if len(subset) != queries:
        raise ValueError(f"subset must have one list of ids per query, got {len(subset)} for {queries} queries")
    for i, ids in enumerate(subset):
        if isinstance(ids, str) or not isinstance(ids, Sequence):
            ids_of(f"subset[{i}]", ids)
    return None, list(subset)


def sequences_of(name: str, embeddings: object) -> list[Tensor]:
    """Return embeddings in any of PyLate's forms as a list of floating tensors [L_i, d]."""
    if isinstance(embeddings, (np.ndarray, Tensor)):
        if embeddings.ndim not in (2, 3):
            raise ValueError(f"{name} must have shape [L, d] or [N, L, d], got {list(embeddings.shape)}")
        embeddings = [embeddings] if embeddings.ndim == 2 else list(embeddings)
    if not isinstance(embeddings, Sequence) or isinstance(embeddings, str):
        raise TypeError(f"{name} must be a list of [L, d] arrays or tensors, got {type(embeddings).__name__}")
    return [_tensor_of(f"{name}[{i}]", item) for i, item in enumerate(embeddings)]


def checked_queries(
    queries: list[Tensor], size: int | None, path: Path, device: torch.device, dtype: torch.dtype
) -> Queries:
    """Check the sizes and values of the queries, at least one, to be scored on a device in a dtype."""
    for i, query in enumerate(queries):
        if query.shape[1] != size:
            raise ValueError(
                f"queries_embeddings[{i}] has embedding size {query.shape[1]}, expected {size} as the index in {path}"
            )
    checked = Queries([query.detach() if query.requires_grad else query for query in queries], device, dtype)
    # Checking values on a GPU would synchronize with it; there the search detects scores that are not finite.
    if device.type != "cuda":
        check_finite(checked)
    return checked


def check_finite(queries: Queries) -> None:
    """Refuse queries with NaN or infinite values in the dtype in which they are scored."""
    finite = torch.isfinite(queries.packed().values).all(dim=1)
    if not finite.all():
        i = int(np.searchsorted(queries.lengths.cumsum(), int(finite.int().argmin()), side="right"))
        raise ValueError(f"queries_embeddings[{i}] holds NaN or infinite values")


def _tensor_of(name: str, item: object) -> Tensor:
    if isinstance(item, list):
        try:
            item = np.asarray(item, dtype=np.float32)
        # NumPy raises these for rows of several lengths, strings, large integers and tensors on other devices.
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:
            raise ValueError(f"{name} must be a list of rows of numbers, all of one length: {error}") from None
    if isinstance(item, np.ndarray) and item.dtype.kind in "iufc":
        array: np.ndarray = item
        # torch warns about arrays that cannot be written to, and refuses negative strides.
        plain = array.flags.c_contiguous and array.flags.writeable
        try:
            item = torch.from_numpy(array if plain else np.require(array, requirements=["C", "W"]))
        except (TypeError, ValueError):
            raise TypeError(
                f"{name} must be of a dtype that torch supports, such as float32, in native byte order, got "
                f"{array.dtype.str!r} ({array.dtype.name})"
            ) from None
    if not isinstance(item, Tensor):
        raise TypeError(f"{name} must be an array or tensor of numbers, got {type(item).__name__}")
    check_tensor(name, item)
    if item.is_meta:
        raise ValueError(f"{name} must hold values, got a tensor on device meta")
    if not item.is_floating_point():
        raise TypeError(f"{name} must be of a floating dtype, got {item.dtype}")
    if item.ndim != 2 or item.shape[1] == 0:
        raise ValueError(f"{name} must have shape [L, d] with d of at least 1, got {list(item.shape)}")
    return item


def checked_memory(device_memory: object) -> int | str:
    """Return how much device memory rows may take: bytes, or "auto"."""
    if isinstance(device_memory, str) and device_memory == "auto":
        return "auto"
    if isinstance(device_memory, bool) or not isinstance(device_memory, (int, np.integer)) or device_memory < 0:
        raise ValueError(f'device_memory must be "auto" or bytes, at least 0, got {device_memory!r:.100}')
    return int(device_memory)


def check_states(documents: list[Tensor], size: int) -> None:
    """Refuse documents that are not hidden states of the projection's input size."""
    for i, document in enumerate(documents):
        if document.shape[1] != size:
            raise ValueError(
                f"documents_embeddings[{i}] has size {document.shape[1]}, expected hidden states of size {size}, the "
                "input size of the index's projection"
            )


def check_unquantized(kept_as: object, path: Path) -> None:
    """Refuse to store hidden states in fewer than 16 bits."""
    if isinstance(kept_as, str) and Layout(kept_as, 0).quantized:
        raise ValueError(
            "projection: hidden states are stored in float32, float16 or bfloat16, but the index in "
            f"{path} stores {kept_as!r}"
        )


def linear_layer(projection: Any) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a projection, given as a model with Dense layers or as the two tensors."""
    if not isinstance(projection, (tuple, list)):
        from ..encoding.projection import dense_layers, fold_dense, normalizes

        layers = dense_layers(projection, "projection")
        if not normalizes(projection):
            raise ValueError("projection: the model does not normalise its embeddings, but the index does")
        return fold_dense(layers)
    shapes = [list(tensor.shape) if isinstance(tensor, Tensor) else tensor for tensor in projection]
    pair = len(projection) == 2 and isinstance(projection[0], Tensor) and projection[0].ndim == 2
    if not pair or not all(shapes[0]) or not (projection[1] is None or shapes[1] == shapes[0][:1]):
        raise ValueError(f"projection must be a model, or a weight [d, d_model] and a bias [d] or None, got {shapes}")
    weight, bias = projection
    for tensor in projection[: 1 if bias is None else 2]:
        if not tensor.is_floating_point() or tensor.is_meta:
            raise ValueError(
                f"projection must be of tensors that hold floating values, got {tensor.dtype} on {tensor.device}"
            )
    return weight, bias


def joined(
    ids: Sequence[str], documents: Sequence[Tensor], lengths: np.ndarray, layout: Layout, device: torch.device
) -> Tensor:
    """Pack documents [L_i, d] into rows [T, width] of a layout on a device. A single document's may share its memory.

    A value that is NaN or infinite in the stored dtype raises a ValueError.
    """
    input_dtype = layout.input_dtype
    # From another device in one copy, as each copy synchronizes with it.
    devices = {document.device for document in documents}
    cat_device = devices.pop() if len(devices) == 1 else device
    converted = [document.detach().to(cat_device, input_dtype) for document in documents]
    values = (converted[0] if len(converted) == 1 else torch.cat(converted)).to(device)
    # The sum is NaN or infinite if any value is, and is the cheapest check of all of them; but it may overflow.
    finite = math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())
    rows = layout.rows(values) if finite else values
    # Quantization may overflow: the difference of two finite values may be infinite.
    if not (finite and (not layout.quantized or is_finite(rows).all())):
        row = int(torch.argmin(is_finite(rows).to(torch.int8)))
        document = int(np.searchsorted(np.cumsum(lengths), row, side="right"))
        raise ValueError(
            f"the embeddings of document {ids[document]!r:.100} hold NaN or infinite values (as {layout.kept_as}), "
            f"first in token {row - int(lengths[:document].sum())}"
        )
    return rows
