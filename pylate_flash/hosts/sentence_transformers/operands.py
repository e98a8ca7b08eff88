"""Conversion of the inputs of sentence-transformers' scoring functions to operands of the operations.

Inputs are padded batches [N, L, d] and lists of [L_i, d], tensors or arrays, with or without masks. In a batch without
a mask, tokens of zeros are padding. In a list without a mask, every token is active. A mask of a list applies to the
padded list.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...ops.checks import check_tensor
from ...ops.nonzero import nonzero_rows, nonzero_rows_of_both
from ...ops.staging import concatenate
from ...ops.tiles import sequence_blocks

# Default number of embedding elements copied at once, to be packed or moved to another device.
CHUNK_ELEMENTS = 100_000_000


class Operand(NamedTuple):
    """Queries or documents on the scoring device: [N, L, d] with a mask [N, L], or packed [T, d] with boundaries."""

    values: Tensor
    mask: Tensor | None
    # If packed: boundaries [N + 1] on the CPU, and the maximum length.
    cu_seqlens: Tensor | None = None
    longest: int | None = None
    # [N, L'], of a list: the mask before cutting it to the longest of these items; `counts` includes what lies beyond.
    given_mask: Tensor | None = None

    def flat(self) -> Operand:
        """Flatten documents [G, N, L, d] with a mask to [G * N, L, d]."""
        assert self.mask is not None
        return Operand(self.values.flatten(0, 1), self.mask.flatten(0, 1))

    def counts(self) -> Tensor:
        """Return the numbers of active tokens [N], at least 1."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens.diff().clamp(min=1).to(self.values.device, non_blocking=True)
        mask = self.mask if self.given_mask is None else self.given_mask
        assert mask is not None
        return (mask != 0).sum(dim=-1).clamp(min=1)


class Side(NamedTuple):
    """Queries or documents as passed by the caller: a batch [N, L, d], or a list of [L_i, d]."""

    name: str
    batch: Tensor | None
    sequences: list[Tensor]
    # [N]: token counts of a list. None for a batch: a compiler would treat an array as data.
    lengths: np.ndarray | None
    mask: Tensor | None
    # None for arrays.
    device: torch.device | None

    def __len__(self) -> int:
        return len(self.sequences) if self.batch is None else self.batch.shape[0]

    @property
    def packs(self) -> bool:
        """Whether it can be packed for scoring."""
        return self.batch is None and self.mask is None

    def with_mask(self, mask: Tensor) -> Side:
        """Return a copy with this mask. (`_replace` would fail: it checks `len`, which is overridden here.)"""
        return Side(self.name, self.batch, self.sequences, self.lengths, mask, self.device)

    def copied_elements(self, device: torch.device) -> np.ndarray | None:
        """Return the elements [N] copied per item to score on `device`; None if it is scored in place."""
        if self.batch is not None:
            return None if self.batch.device == device else np.full(len(self), self.batch[0].numel())
        assert self.lengths is not None
        return self.lengths * self.sequences[0].shape[-1]

    def operand(self, start: int, stop: int, device: torch.device, packed: bool) -> Operand:
        """Return items `start` to `stop` on `device`; with `packed`, a list without a mask is packed."""
        values, mask = self.batch, self.mask
        if stop - start < len(self):
            values = None if values is None else values[start:stop]
            mask = None if mask is None else mask[start:stop]
        if mask is not None:
            mask = mask.to(device)
        if values is not None:
            values = floating(values.to(device))
            return Operand(values, nonzero_rows(values) if mask is None else mask)
        assert self.lengths is not None
        lengths = self.lengths[start:stop]
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        values = floating(_concatenated(self.name, self.sequences[start:stop], start, device))
        longest = int(lengths.max())
        if packed and mask is None:
            cu_seqlens = torch.from_numpy(bounds.astype(np.int32 if bounds[-1] < 2**31 else np.int64))
            return Operand(values, None, cu_seqlens, longest)
        active = np.arange(longest) < lengths[:, None]
        rows = torch.from_numpy(np.flatnonzero(active)).to(device, non_blocking=True)
        padded = values.new_zeros(active.size, values.shape[1]).index_copy(0, rows, values)
        padded = padded.view(*active.shape, values.shape[1])
        if mask is None:
            return Operand(padded, torch.from_numpy(active).to(device, non_blocking=True))
        return Operand(padded, mask[:, :longest], given_mask=mask)


def side(name: str, embeddings: Any, mask: Any = None) -> Side:
    """Build one side of a call from the argument `name` and its mask, whose name `mask_name` derives from it.

    The embeddings are [N, L, d] or [L, d], a tensor or an array, or a list of N [L_i, d]: tensors, arrays or nested
    lists. The mask is [N, L], [1, L] or [L], a tensor or an array, or a list of N [L_i], or None, as the module
    describes it; another type raises TypeError. A shape that does not fit raises ValueError.
    """
    mask = _mask(mask_name(name), mask)
    first = embeddings[0] if isinstance(embeddings, list) and embeddings else embeddings
    device = first.device if isinstance(first, Tensor) else None
    if isinstance(embeddings, list):
        sequences = [
            tokens if isinstance(tokens, Tensor) else as_tensor(f"{name}[{i}]", tokens)
            for i, tokens in enumerate(embeddings)
        ]
        if len(sequences) == 1 and sequences[0].dim() == 2:
            # A list of one item is a batch.
            batch = sequences[0].unsqueeze(0)
            if mask is None:
                mask = torch.ones(batch.shape[:2], dtype=torch.bool, device=batch.device)
            return Side(name, batch, [], None, _fitted(name, mask, 1, batch.shape[1]), device)
        lengths = _lengths(name, sequences)
        longest = int(lengths.max(initial=0))
        return Side(name, None, sequences, lengths, _fitted(name, mask, len(sequences), longest), device)
    batch = as_tensor(name, embeddings)
    if batch.dim() == 2:
        batch = batch.unsqueeze(0)
    if batch.dim() != 3:
        raise ValueError(f"{name} must have shape [N, L, d] or [L, d], got {list(batch.shape)}")
    return Side(name, batch, [], None, _fitted(name, mask, *batch.shape[:2]), device)


def with_masks(queries: Side, documents: Side, device: torch.device) -> tuple[Side, Side]:
    """Compute the padding masks of both sides in one launch, if both are batches without a mask on `device`.

    Other batches without a mask get theirs in `Side.operand`.
    """
    for operand in (queries, documents):
        batch = operand.batch
        if batch is None or operand.mask is not None or batch.device != device or not batch.is_floating_point():
            return queries, documents
    assert queries.batch is not None
    assert documents.batch is not None
    queries_mask, documents_mask = nonzero_rows_of_both(queries.batch, documents.batch)
    return queries.with_mask(queries_mask), documents.with_mask(documents_mask)


def _fitted(name: str, mask: Tensor | None, n_items: int, width: int) -> Tensor | None:
    """Expand the mask of N items of `width` tokens, which may be one row for all, to [N, width]."""
    if mask is None or n_items == 0 or mask.shape == (n_items, width):
        return mask
    if mask.dim() not in (1, 2) or (mask.dim() == 2 and mask.shape[0] not in (1, n_items)):
        raise ValueError(f"{mask_name(name)} must have shape {[n_items, width]}, got {list(mask.shape)}")
    if mask.shape[-1] != width:
        raise ValueError(f"{mask_name(name)} covers {mask.shape[-1]} tokens, expected {width} as in {name}")
    return mask.expand(n_items, width)


def blocks(sides: Sequence[Side], device: torch.device, elements: int | None) -> list[tuple[int, int]]:
    """Split sides of equal length into blocks of items that copy at most `elements` elements, or a single item."""
    costs = [operand.copied_elements(device) for operand in sides]
    copied = [cost for cost in costs if cost is not None]
    if not copied:
        return [(0, len(sides[0]))]
    bounds = np.concatenate([[0], np.sum(copied, axis=0).cumsum()])
    return sequence_blocks(bounds, CHUNK_ELEMENTS if elements is None else elements)


def mask_name(name: str) -> str:
    """Return the name of the mask of the argument `name`: `a_mask` of `a`, `queries_mask` of `queries_embeddings`."""
    return f"{name.removesuffix('_embeddings')}_mask"


def as_tensor(name: str, value: Any) -> Tensor:
    """Convert an array, a list of tensors or arrays of one shape, or nested lists of numbers to a tensor.

    Other types raise a TypeError, and unequal shapes a ValueError, which name the argument.
    """
    if isinstance(value, Tensor):
        check_tensor(name, value, otherwise=", an array, or a list of them")
        return value
    if not isinstance(value, (np.ndarray, list, tuple, numbers.Number)):
        raise TypeError(f"{name} must be a tensor, an array, or a list of them, got {type(value).__name__}")
    try:
        return _converted(value)
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name} must be a tensor, an array, or a list of them of one shape: {error}") from None


def _converted(value: Any) -> Tensor:
    if isinstance(value, np.ndarray):
        # torch warns about read-only arrays, and lacks some numpy dtypes.
        with suppress(TypeError):
            return torch.from_numpy(value if value.flags.writeable else value.copy())
        return torch.tensor(value)
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], (Tensor, np.ndarray)):
        return torch.stack([item if isinstance(item, Tensor) else _converted(item) for item in value])
    return torch.tensor(value)


def _lengths(name: str, sequences: list[Tensor]) -> np.ndarray:
    try:
        return np.array([tokens.shape[0] for tokens in sequences], dtype=np.int64)
    except IndexError:
        index = next(i for i, tokens in enumerate(sequences) if tokens.dim() == 0)
        raise ValueError(f"{name}[{index}] must have shape [L, d], got a single number") from None


def _mask(name: str, mask: Any) -> Tensor | None:
    if mask is None or isinstance(mask, Tensor):
        return mask
    if isinstance(mask, (list, tuple)):
        masks = [as_tensor(f"{name}[{i}]", item) for i, item in enumerate(mask)]
        for i, item in enumerate(masks):
            if item.dim() != 1:
                raise ValueError(f"{name}[{i}] must have shape [L], got {list(item.shape)}")
        return pad_sequence(masks, batch_first=True) if masks else torch.empty(0)
    if isinstance(mask, np.ndarray):
        return as_tensor(name, mask)
    raise TypeError(
        f"{name} must be a tensor, an array, a list of one mask per item or None, got {type(mask).__name__}"
    )


def floating(embeddings: Tensor) -> Tensor:
    """Convert embeddings to float32 unless they have a floating dtype."""
    return embeddings if embeddings.is_floating_point() else embeddings.float()


def _concatenated(name: str, sequences: list[Tensor], first_index: int, device: torch.device) -> Tensor:
    """Concatenate a list to tokens [T, d]; errors name the item."""
    try:
        values = concatenate(sequences, device)
    except (RuntimeError, IndexError) as error:
        values, cause = None, error
    if values is not None and (values.dim() == 2 or values.numel() == 0):
        return values if values.dim() == 2 else values.view(0, 1)
    size = next((tokens.shape[1] for tokens in sequences if tokens.dim() == 2), None)
    for index, tokens in enumerate(sequences, first_index):
        if tokens.dim() != 2 or tokens.shape[1] != size:
            raise ValueError(
                f"{name}[{index}] must have shape [L, d]{'' if size is None else f' with d = {size}'}, "
                f"got {list(tokens.shape)}"
            )
        if tokens.device != sequences[0].device:
            raise ValueError(f"{name} must lie on one device, got {sequences[0].device} and {tokens.device} at {index}")
    raise cause
