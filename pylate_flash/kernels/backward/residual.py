"""The gradient of the queries with residual codes: sums of argmax rows, decompressed on the fly."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ...problem import Problem, Tensors
from .. import config
from ..forward import Codes
from ..forward.codes import TYPES, decompressed
from ..launch import kernel
from ..plan_backward import residual_gradient_plan


@kernel(config="size blocks nbits block_rows dtype")
def _gradient_kernel(
    grad_scores_ptr, argmax_ptr, codes_ptr, residuals_ptr, centroids_ptr, weights_ptr, cu_seqlens_ptr, scales_ptr,
    candidates_ptr, sums_ptr,
    n_rows, query_length, n_documents, n_splits, next_query, next_document, config: tl.constexpr,
):  # fmt: skip
    """sums[split, row] = sum over the documents of a split of grad_score * document[argmax], [splits, Nq * Lq, d].

    Grid: (blocks of rows x groups, splits of the documents, parts of an embedding). `n_rows` are those of a group.
    """
    BLOCK_ROWS: tl.constexpr = config.block_rows
    BLOCK_EMBEDDING: tl.constexpr = config.blocks.first
    codec = residuals_ptr, centroids_ptr, weights_ptr
    n_blocks = tl.cdiv(n_rows, BLOCK_ROWS)
    n_groups = tl.num_programs(0) // n_blocks
    group = (tl.program_id(0) // n_blocks).to(tl.int64)
    rows = tl.program_id(0) % n_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_exists = rows < n_rows
    query = group * (n_rows // query_length) + rows // query_length
    dim = tl.program_id(2) * BLOCK_EMBEDDING
    share = tl.cdiv(n_documents, n_splits)
    first = tl.program_id(1) * share
    total = tl.zeros([BLOCK_ROWS, BLOCK_EMBEDDING], tl.float32)
    for position in tl.range(first, tl.minimum(first + share, n_documents)):
        flat_position = group * n_documents + position
        document = tl.cast(position, tl.int32)
        if candidates_ptr is not None:
            # A missing candidate has no argmax.
            document = tl.maximum(tl.load(candidates_ptr + flat_position).to(tl.int32), 0)
        argmax = tl.load(argmax_ptr + flat_position * n_rows + rows, mask=row_exists, other=-1)
        won = argmax >= 0
        tokens = tl.load(cu_seqlens_ptr + document).to(tl.int64) + argmax
        codes = tl.load(codes_ptr + tokens, mask=won, other=0).to(tl.int64)
        scale = tl.load(scales_ptr + tokens, mask=won, other=0.0)
        weight = tl.load(grad_scores_ptr + query * next_query + position * next_document, mask=won, other=0.0)
        tile = decompressed(codec, tokens, codes, scale, won, dim, config, True, config.dtype)
        total += weight[:, None] * tile.to(tl.float32)
    dims = dim + tl.arange(0, BLOCK_EMBEDDING)
    sums_row = (tl.program_id(1) * n_groups + group) * n_rows + rows
    targets = sums_ptr + sums_row[:, None] * config.size + dims[None, :]
    tl.store(targets, total, mask=row_exists[:, None] & (dims < config.size)[None, :])


def residual_backward(problem: Problem, tensors: Tensors, codes: Codes, grad_scores: Tensor, argmax: Tensor) -> Tensor:
    """The gradient of the queries [Nq, Lq, d], in their dtype, from that of the scores, float32 with any strides."""
    plan = residual_gradient_plan(problem)
    if problem.n_documents * grad_scores.stride(1) > config.INT32_MAX:
        # The kernel computes offsets of documents in 32 bits.
        grad_scores = grad_scores.contiguous()
    shape = plan.n_splits, problem.groups * problem.rows, problem.size
    # Partial sums, without the weights of the queries' mask.
    sums = torch.empty(*shape, dtype=torch.float32, device=problem.device)
    _gradient_kernel(
        (-(-problem.rows // plan.rows) * problem.groups, plan.n_splits, plan.parts),
        (grad_scores, argmax, *codes, sums),
        (problem.rows, problem.query_length, problem.n_documents, plan.n_splits, *grad_scores.stride()),
        (),
        (problem.size, plan.blocks, codes.nbits, plan.rows, TYPES[problem.dtype]),
        (4, 1, None),
    )
    total = sums.sum(dim=0).view(tensors.queries.shape)
    if problem.kind.weighted:
        assert tensors.queries_mask is not None
        total *= tensors.queries_mask.unsqueeze(-1)
    return total.to(problem.dtype)
