"""Which token embeddings are other than zero: in sentence-transformers' padded batches without a mask, the others are
padding.

A reduction of torch reads them at a sixth of the rate of a copy, which takes as long as the scores of 32 queries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Kernel
from .norms import launch_rows, row_addresses


@triton.jit(do_not_specialize=["n_rows", "n_sequences", "length"])
def _nonzero_rows_kernel(
    embeddings_ptr, nonzero_ptr, n_rows, n_sequences, length, stride_group, stride_sequence, stride_token,
    EMBEDDING: tl.constexpr,
    BLOCK_EMBEDDING: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """nonzero[row] for the tokens [groups, sequences, length] of `embeddings`, counted as rows."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
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


_nonzero_rows = Kernel(_nonzero_rows_kernel)


def nonzero_rows(embeddings: Tensor) -> Tensor:
    """Whether rows of `embeddings` [.., d] have an element other than zero, as NaN is. Rows are contiguous, d not 0."""
    found = torch.empty(embeddings.shape[:-1], dtype=torch.bool, device=embeddings.device)
    launch_rows(_nonzero_rows, embeddings, found)
    return found
