"""Packed sequences padded to the longest, and what was padded packed again: a launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Kernel
from .tiles import power_of_two


@triton.jit(do_not_specialize=["n_sequences", "length"])
def _pad_kernel(
    packed_ptr, cu_seqlens_ptr, offsets_ptr, padded_ptr, mask_ptr, n_sequences, length, stride_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    OFFSET_UNIT: tl.constexpr,
    BACK: tl.constexpr,
):  # fmt: skip
    """padded [n_sequences, length, d] from packed [T, d], with zeros past the ends, and its mask; or BACK again.

    With an OFFSET_UNIT, sequences do not follow each other: they begin so many elements times their offset further on.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    sequence = rows // length
    token = rows % length
    exists = sequence < n_sequences
    start = tl.load(cu_seqlens_ptr + sequence, mask=exists, other=0).to(tl.int64)
    end = tl.load(cu_seqlens_ptr + sequence + 1, mask=exists, other=0).to(tl.int64)
    active = exists & (start + token < end)
    dims = tl.arange(0, BLOCK_EMBEDDING)
    first = start * stride_token
    if OFFSET_UNIT > 0:
        first = tl.load(offsets_ptr + sequence, mask=exists, other=0) * OFFSET_UNIT
    of_packed = (first + token * stride_token)[:, None] + dims[None, :]
    of_padded = rows[:, None] * EMBEDDING + dims[None, :]
    inside = (dims < EMBEDDING)[None, :]
    if BACK:
        values = tl.load(padded_ptr + of_padded, mask=active[:, None] & inside, other=0.0)
        tl.store(packed_ptr + of_packed, values, mask=active[:, None] & inside)
    else:
        values = tl.load(packed_ptr + of_packed, mask=active[:, None] & inside, other=0.0)
        tl.store(padded_ptr + of_padded, values, mask=exists[:, None] & inside)
        tl.store(mask_ptr + rows, active, mask=exists)


_pad = Kernel(_pad_kernel)


def pad(
    packed: Tensor, cu_seqlens: Tensor, length: int, offsets: Tensor | None = None, unit: int = 0
) -> tuple[Tensor, Tensor]:
    """Padded sequences [N, length, d] and their mask, bool, of `packed` [T, d] with contiguous rows and boundaries.

    With `offsets` [N], int64, they begin there, in units of `unit` elements from `packed`, as in `problem.Places`.
    """
    n_sequences, size = cu_seqlens.shape[0] - 1, packed.shape[1]
    padded = torch.empty(n_sequences, length, size, dtype=packed.dtype, device=packed.device)
    mask = torch.empty(n_sequences, length, dtype=torch.bool, device=packed.device)
    _launch((packed, cu_seqlens, offsets, padded, mask), unit, back=False)
    return padded, mask


def packed_again(padded: Tensor, cu_seqlens: Tensor, n_tokens: int) -> Tensor:
    """The packed [n_tokens, d] of contiguous padded sequences [N, length, d], which are not looked at past the ends."""
    packed = torch.empty(n_tokens, padded.shape[2], dtype=padded.dtype, device=padded.device)
    _launch((packed, cu_seqlens, None, padded, None), 0, back=True)
    return packed


def _launch(tensors: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None], unit: int, back: bool) -> None:
    packed, padded = tensors[0], tensors[3]
    n_sequences, length, size = padded.shape
    block = max(16, power_of_two(size))
    block_rows = max(1, 4096 // block)
    _pad(
        (-(-n_sequences * length // block_rows), 1, 1),
        tensors,
        (n_sequences, length),
        (packed.stride(0),),
        (size, block, block_rows, unit, back),
        (4, 1, None),
    )
