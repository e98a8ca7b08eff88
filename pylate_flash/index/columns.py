"""Rows of bytes whose numbers lie apart where they are scored: those of each kind in memory of their own.

So a kernel reads them without what lies between, and 128 values of 8 bits are a line of memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Columns", "Form", "Held", "copy_rows", "packed_rows", "taken"]

# What rows are copied by: the first of which all that is said of their memory in bytes is a multiple.
_WIDE = torch.int64, torch.int32, torch.int16, torch.uint8


class Form(NamedTuple):
    """Rows of `width` bytes that hold `fields`: each from one byte to another, of a type."""

    width: int
    fields: tuple[tuple[int, int, torch.dtype], ...]

    def of(self, rows: Held) -> Columns:
        """The columns of rows, views of them if they are bytes."""
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
    """Columns [T, numbers of a row] of the fields of a form, in their order.

    To those who bring rows from one place to another it is a tensor [T, width] of bytes.
    """

    dtype = torch.uint8

    def __init__(self, form: Form, tensors: Iterable[Tensor]) -> None:
        self.form, self.tensors = form, tuple(tensors)
        self.shape, self.device = (len(self.tensors[0]), form.width), self.tensors[0].device
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, some: slice) -> Columns:
        return Columns(self.form, (tensor[some] for tensor in self.tensors))

    def element_size(self) -> int:
        return 1

    def copy_(self, rows: Held, non_blocking: bool = False) -> None:
        if isinstance(rows, Tensor):
            # In one copy.
            rows = self.form.of(rows.to(self.device, non_blocking=non_blocking))
        for to, of in zip(self.tensors, rows.tensors, strict=True):
            wide = _widest(to, of)
            to.view(wide).copy_(of.view(wide), non_blocking=non_blocking)


# Rows where they are scored, or as they are kept.
Held = Tensor | Columns


def copy_rows(to: Held, rows: Held) -> None:
    """Copy rows, whichever of the two forms either has."""
    if isinstance(rows, Columns):
        to = rows.form.of(to)
    to.copy_(rows)  # type: ignore[arg-type]


def packed_rows(form: Form, columns: Sequence[Tensor]) -> Tensor:
    """Rows [T, width] of bytes that hold these columns, and zeros where there is none."""
    rows = torch.zeros(len(columns[0]), form.width, dtype=torch.uint8, device=columns[0].device)
    copy_rows(rows, Columns(form, columns))
    return rows


def taken(rows: Held, index: Tensor) -> Held:
    """The rows at the places of `index`."""
    if isinstance(rows, Columns):
        return Columns(rows.form, (taken(tensor, index) for tensor in rows.tensors))  # type: ignore[misc]
    whole = rows.view(_widest(rows))
    # On a GPU, index_select copies an element at a time, and takes five times as long as memory does.
    return (whole[index] if rows.is_cuda else whole.index_select(0, index)).view(rows.dtype)


def _widest(*tensors: Tensor) -> torch.dtype:
    """The widest type that tensors [T, n] of one type, with rows that are contiguous, can be viewed as."""
    numbers = [number for of in tensors for number in (of.shape[1], of.stride(0), of.storage_offset())]
    said = math.gcd(*numbers) * tensors[0].element_size()
    return next(dtype for dtype in _WIDE if said % dtype.itemsize == 0)
