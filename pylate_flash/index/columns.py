"""Rows of bytes that are scored in columnar form: each field (scales, offsets, values) in a tensor of its own.

So a kernel reads a field without gaps, and 128 values of 8 bits are one memory line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Element types for copies of rows: the widest one that divides their sizes, strides and offsets in bytes is used.
_WIDE = torch.int64, torch.int32, torch.int16, torch.uint8


class Form(NamedTuple):
    """Format of rows of `width` bytes that hold `fields`: each a first byte, an end byte and a dtype."""

    width: int
    fields: tuple[tuple[int, int, torch.dtype], ...]

    def of(self, rows: Held) -> Columns:
        """The columns of rows; views if the rows are bytes."""
        if isinstance(rows, Columns):
            return rows
        content = rows.view(torch.uint8)
        return Columns(self, (content[:, first:last].view(dtype) for first, last, dtype in self.fields))

    def empty(self, rows: int, device: torch.device) -> Columns:
        return Columns(
            self,
            (
                torch.empty(rows, (last - first) // dtype.itemsize, dtype=dtype, device=device)
                for first, last, dtype in self.fields
            ),
        )


class Columns:
    """Tensors [T, elements per row], one per field of a form, in their order.

    Code that copies rows may treat it as a tensor [T, width] of bytes.
    """

    dtype = torch.uint8

    def __init__(self, form: Form, tensors: Iterable[Tensor]) -> None:
        self.form, self.tensors = form, tuple(tensors)
        self.shape, self.device = (len(self.tensors[0]), form.width), self.tensors[0].device
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Columns:
        return Columns(self.form, (tensor[rows] for tensor in self.tensors))

    def element_size(self) -> int:
        return 1

    def copy_(self, rows: Held, non_blocking: bool = False) -> None:
        if isinstance(rows, Tensor):
            # One copy to the device, before the columns are split.
            rows = self.form.of(rows.to(self.device, non_blocking=non_blocking))
        for destination, source in zip(self.tensors, rows.tensors, strict=True):
            dtype = _widest(destination, source)
            destination.view(dtype).copy_(source.view(dtype), non_blocking=non_blocking)


# Rows as stored, or in the columnar form in which they are scored.
Held = Tensor | Columns


def copy_rows(out: Held, rows: Held) -> None:
    """Copy rows between tensors and columns, in any combination."""
    if isinstance(rows, Columns):
        out = rows.form.of(out)
    out.copy_(rows)  # type: ignore[arg-type]


def packed_rows(form: Form, columns: Sequence[Tensor]) -> Tensor:
    """Pack columns into rows [T, width] of bytes, with zeros between the fields."""
    rows = torch.zeros(len(columns[0]), form.width, dtype=torch.uint8, device=columns[0].device)
    copy_rows(rows, Columns(form, columns))
    return rows


def taken(rows: Held, index: Tensor) -> Held:
    """The rows at the positions of `index`."""
    if isinstance(rows, Columns):
        return Columns(rows.form, (taken(tensor, index) for tensor in rows.tensors))  # type: ignore[misc]
    wide = rows.view(_widest(rows))
    # On a GPU, index_select copies one element at a time and takes five times as long as memory bandwidth allows.
    return (wide[index] if rows.is_cuda else wide.index_select(0, index)).view(rows.dtype)


def _widest(*tensors: Tensor) -> torch.dtype:
    """The widest dtype as which tensors [T, n] of one dtype, with contiguous rows, can be viewed."""
    numbers = [number for tensor in tensors for number in (tensor.shape[1], tensor.stride(0), tensor.storage_offset())]
    granularity = math.gcd(*numbers) * tensors[0].element_size()
    return next(dtype for dtype in _WIDE if granularity % dtype.itemsize == 0)
