"""Embeddings divided by their norms, and the gradient through that, both in place: a row is read once and written once.

What is divided by in float32 is rounded to the embeddings' type, as `torch.nn.functional.normalize` rounds it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .backward.common import through_normalized
from .launch import Kernel
from .norms import inverse_norm


@triton.jit(do_not_specialize=["n_rows"])
def _normalized_kernel(
    embeddings_ptr, normalized_ptr, scales_ptr, n_rows,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """normalized[row] = embeddings[row] * scales[row], with scales the inverse norms; both may be the same memory."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_EMBEDDING)
    mask = (rows < n_rows)[:, None] & (dims < EMBEDDING)[None, :]
    offset = rows[:, None] * EMBEDDING + dims[None, :]
    values = tl.load(embeddings_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    scale = inverse_norm(tl.sum(values * values, axis=1))
    tl.store(scales_ptr + rows, scale, mask=rows < n_rows)
    tl.store(normalized_ptr + offset, (values * scale[:, None]).to(normalized_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _through_normalized_kernel(
    grad_ptr, normalized_ptr, scales_ptr, n_rows,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """grad[row] of what is normalized to that of the embeddings."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_EMBEDDING)
    mask = (rows < n_rows)[:, None] & (dims < EMBEDDING)[None, :]
    offset = rows[:, None] * EMBEDDING + dims[None, :]
    grad = tl.load(grad_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    normalized = tl.load(normalized_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scales_ptr + rows, mask=rows < n_rows, other=1.0)
    tl.store(grad_ptr + offset, through_normalized(grad, normalized, scale).to(grad_ptr.dtype.element_ty), mask=mask)


_normalized = Kernel(_normalized_kernel)
_through_normalized = Kernel(_through_normalized_kernel)


def normalized_rows(embeddings: Tensor, out: Tensor, scales: Tensor) -> None:
    """Write the contiguous `embeddings` [.., d] over their norms to `out`, and one over the norms to `scales`.

    `out` has the type of `embeddings`, and may be them; `scales` [..] is float32. No dimension is 0.
    """
    _launch(_normalized, (embeddings, out, scales))


def through_normalized_rows(grad: Tensor, normalized: Tensor, scales: Tensor) -> None:
    """Replace `grad` of what `normalized_rows` wrote by the gradient of the embeddings that it was made of."""
    _launch(_through_normalized, (grad, normalized, scales))


def _launch(kernel: Kernel, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    rows, size = tensors[2].numel(), tensors[0].shape[-1]
    block = max(16, 1 << (size - 1).bit_length())
    block_rows = max(1, 4096 // block)
    kernel((-(-rows // block_rows), 1, 1), tensors, (rows,), (), (size, block, block_rows), (4, 1, None))
