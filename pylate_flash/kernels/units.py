"""Embeddings divided by their norms, and the gradient through that, both in place: a row is read once and written once.

What is divided by in float32 is rounded to the embeddings' type, as `torch.nn.functional.normalize` rounds it.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gradients import through_unit
from .launch import Launch, Launcher
from .norms import inverse_norm


@triton.jit(do_not_specialize=["n_rows"])
def _units_kernel(
    embeddings_ptr, units_ptr, scales_ptr, n_rows,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """units[row] = embeddings[row] * scales[row], with scales the inverse norms; both may be the same memory."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_EMBEDDING)
    mask = (rows < n_rows)[:, None] & (dims < EMBEDDING)[None, :]
    offset = rows[:, None] * EMBEDDING + dims[None, :]
    values = tl.load(embeddings_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    scale = inverse_norm(tl.sum(values * values, axis=1))
    tl.store(scales_ptr + rows, scale, mask=rows < n_rows)
    tl.store(units_ptr + offset, (values * scale[:, None]).to(units_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _through_units_kernel(
    grad_ptr, units_ptr, scales_ptr, n_rows,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """grad[row] of the units to that of the embeddings."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_EMBEDDING)
    mask = (rows < n_rows)[:, None] & (dims < EMBEDDING)[None, :]
    offset = rows[:, None] * EMBEDDING + dims[None, :]
    grad = tl.load(grad_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    units = tl.load(units_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scales_ptr + rows, mask=rows < n_rows, other=1.0)
    tl.store(grad_ptr + offset, through_unit(grad, units, scale).to(grad_ptr.dtype.element_ty), mask=mask)


_units = Launcher(_units_kernel)
_through_units = Launcher(_through_units_kernel)


def unit_rows(embeddings: Tensor, units: Tensor, scales: Tensor) -> None:
    """Write the contiguous `embeddings` [.., d] over their norms to `units`, and one over the norms to `scales`.

    `units` has the type of `embeddings`, and may be them; `scales` [..] is float32. No dimension is 0.
    """
    bound_units(embeddings.shape, embeddings.dtype, embeddings.device)(embeddings, units, scales)


def through_unit_rows(grad: Tensor, units: Tensor, scales: Tensor) -> None:
    """Replace `grad` of the `units` of `unit_rows` by the gradient of the embeddings that they were made of."""
    bound_through_units(grad.shape, grad.dtype, units.dtype, grad.device)(grad, units, scales)


@functools.lru_cache(maxsize=1024)
def bound_units(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Launch:
    """The launch of `unit_rows` for such embeddings."""
    return _bind(_units, shape)


@functools.lru_cache(maxsize=1024)
def bound_through_units(
    shape: torch.Size, dtype: torch.dtype, units_dtype: torch.dtype, device: torch.device
) -> Launch:
    """The launch of `through_unit_rows` for such gradients."""
    return _bind(_through_units, shape)


def _bind(launcher: Launcher, shape: torch.Size) -> Launch:
    rows, size = shape[:-1].numel(), shape[-1]
    block = max(16, triton.next_power_of_2(size))
    block_rows = max(1, 4096 // block)
    return launcher.bind(
        (triton.cdiv(rows, block_rows), 1, 1), (rows,), (), (size, block, block_rows), num_warps=4, num_stages=1
    )
