"""Which token embeddings are other than zero: in sentence-transformers' padded batches without a mask, the others are
padding.

A reduction of torch reads them at a sixth of the rate of a copy, which takes as long as the scores of 32 queries. Both
queries and documents are read by one launch, as the host takes as long for each as the GPU for the documents.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Kernel
from .norms import row_addresses

_BLOCK_ROWS = 64


@triton.jit
def _find_nonzero(
    embeddings_ptr, nonzero_ptr, block, n_rows, n_sequences, length, stride_group, stride_sequence, stride_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """nonzero[row] for a block of the tokens [groups, sequences, length] of `embeddings`, counted as rows."""
    rows = block.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    exists = rows < n_rows
    base = embeddings_ptr + row_addresses(rows, n_sequences, length, stride_group, stride_sequence, stride_token)
    found = tl.zeros([BLOCK_ROWS], tl.int32)
    for start in tl.range(0, EMBEDDING, BLOCK_EMBEDDING):
        dims = start + tl.arange(0, BLOCK_EMBEDDING)
        mask = exists[:, None] & (dims < EMBEDDING)[None, :]
        # float32: an interpreter compares bfloat16 by its bits, in which -0 is not 0.
        values = tl.load(base[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        found |= tl.max((values != 0.0).to(tl.int32), axis=1)
    tl.store(nonzero_ptr + rows, found != 0, mask=exists)


@triton.jit(
    do_not_specialize=[
        "blocks", "n_rows", "n_sequences", "length", "more_rows", "more_sequences", "more_length"
    ]
)  # fmt: skip
def _nonzero_rows_kernel(
    embeddings_ptr, more_ptr, nonzero_ptr, more_nonzero_ptr,
    blocks, n_rows, n_sequences, length, more_rows, more_sequences, more_length,
    stride_group, stride_sequence, stride_token, more_stride_group, more_stride_sequence, more_stride_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HAS_MORE: tl.constexpr,
):  # fmt: skip
    """Of one batch by the first `blocks` programs, and with HAS_MORE of another one by the others."""
    block = tl.program_id(0)
    if HAS_MORE and block >= blocks:
        _find_nonzero(
            more_ptr, more_nonzero_ptr, block - blocks, more_rows, more_sequences, more_length, more_stride_group,
            more_stride_sequence, more_stride_token, EMBEDDING, BLOCK_EMBEDDING, BLOCK_ROWS,
        )  # fmt: skip
    if block < blocks:
        _find_nonzero(
            embeddings_ptr, nonzero_ptr, block, n_rows, n_sequences, length, stride_group, stride_sequence,
            stride_token, EMBEDDING, BLOCK_EMBEDDING, BLOCK_ROWS,
        )  # fmt: skip


_nonzero_rows = Kernel(_nonzero_rows_kernel)


def nonzero_rows(embeddings: Tensor, more: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Whether rows of `embeddings` [.., d] have an element other than zero, as NaN is, and those of `more`, if given.

    Rows are contiguous, d is not 0, and up to three dimensions come before it; both batches are of one type and d.
    """
    found, blocks, *described = _described(embeddings)
    more_found, more_blocks, *more_described = (None, 0, _NOTHING, _NOTHING) if more is None else _described(more)
    size = embeddings.shape[-1]
    _nonzero_rows(
        (blocks + more_blocks, 1, 1),
        (embeddings, more, found, more_found),
        (blocks, *described[0], *more_described[0]),
        (*described[1], *more_described[1]),
        (size, min(128, 1 << (size - 1).bit_length()), _BLOCK_ROWS, more is not None),
        (4, 3, None),
    )
    return found, more_found


_NOTHING = (0, 0, 0)


def _described(embeddings: Tensor) -> tuple[Tensor, int, tuple[int, ...], tuple[int, ...]]:
    """Memory for what is found, blocks of rows; rows, sequences and tokens of each; strides of groups to tokens."""
    *shape, _ = embeddings.shape
    # Sizes one by one, as a tuple takes the host twice as long.
    found = torch.empty(*shape, dtype=torch.bool, device=embeddings.device)
    rows = found.numel()
    sequences, length = (1, *shape)[-2:]
    return found, -(-rows // _BLOCK_ROWS), (rows, sequences, length), (0, 0, *embeddings.stride())[-4:-1]
