"""The gradient of the sets of one side: of each point by its nearest one, and by all those that it is nearest to.

A program owns a point and sums what it gets in registers, in the order of a list: the same bits every time. Of squared
distances it sums differences, which near points leave without cancellation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton.language as tl
from torch import Tensor

from ..backward.lists import rows_by_token
from ..jit import kernel
from ..launch import Kernel
from ..tables import power_of_two
from .inputs import Side, set_of

if TYPE_CHECKING:
    from ...problem import Problem

# Elements of listed points in flight in a warp, and of a point for each warp.
_IN_FLIGHT = 512
_WARP_SIZE = 256


@kernel
def _gradient_kernel(
    x_ptr, x_bounds_ptr, y_ptr, y_bounds_ptr, x_winners_ptr, x_weights_ptr, y_weights_ptr, listed_ptr, starts_ptr,
    grad_ptr,
    x_length, y_length,
    stride_x, stride_x_point, stride_y, stride_y_point,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_LISTED: tl.constexpr,
    SQUARED: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """grad[point of x], contiguous: what its winner gives by the weight of x, and those that chose it by that of y.

    Grid: a program for each of `x_length` points of every pair. `weights` [N] multiply differences x - y, if SQUARED,
    or the other point.
    """
    pair = (tl.program_id(0) // x_length).to(tl.int64)
    point = tl.program_id(0) % x_length
    x_ptr, x_count, x_start = set_of(pair, x_ptr, None, x_bounds_ptr, x_length, stride_x, stride_x_point, PACKED)
    y_ptr, _, _ = set_of(pair, y_ptr, None, y_bounds_ptr, y_length, stride_y, stride_y_point, PACKED)
    if point < x_count:
        dims = tl.arange(0, BLOCK_SIZE)
        inside = dims < SIZE
        own = tl.load(x_ptr + point.to(tl.int64) * stride_x_point + dims, mask=inside, other=0.0).to(tl.float32)
        total = tl.zeros([BLOCK_SIZE], tl.float32)
        winner = tl.load(x_winners_ptr + pair * x_length + point)
        if winner >= 0:
            other = tl.load(y_ptr + winner.to(tl.int64) * stride_y_point + dims, mask=inside, other=0.0).to(tl.float32)
            if SQUARED:
                other = own - other
            total += tl.load(x_weights_ptr + pair) * other

        starts_ptr += x_start + pair + point
        low = tl.load(starts_ptr).to(tl.int32)
        high = tl.load(starts_ptr + 1).to(tl.int32)
        if low < high:
            listed_ptr += pair * y_length
            sums = tl.zeros([BLOCK_LISTED, BLOCK_SIZE], tl.float32)
            for position in tl.range(low, high, BLOCK_LISTED):
                positions = position + tl.arange(0, BLOCK_LISTED)
                exists = positions < high
                chosen_by = tl.load(listed_ptr + positions, mask=exists, other=0).to(tl.int64)
                mask = exists[:, None] & inside[None, :]
                others = tl.load(y_ptr + chosen_by[:, None] * stride_y_point + dims[None, :], mask=mask, other=0.0)
                others = others.to(tl.float32)
                if SQUARED:
                    others = tl.where(mask, own[None, :] - others, 0.0)
                sums += others
            total += tl.load(y_weights_ptr + pair) * tl.sum(sums, axis=0)
        to = (x_start + point) * SIZE + dims
        tl.store(grad_ptr + to, total.to(grad_ptr.dtype.element_ty), mask=inside)


_gradient = Kernel(_gradient_kernel)


def chamfer_gradient(
    problem: Problem, x: Side, y: Side, winners: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], squared: bool
) -> Tensor:
    """The gradient of x, contiguous, in its type.

    `winners` are those of x [N, Lx] and of y [N, Ly], contiguous, and `weights` [N], float32, what the differences, or
    the other points, of each are multiplied by. No dimension is 0, but packed sets may be empty.
    """
    # As documents, the points of x are chosen by the rows that are those of y.
    reverse = problem._replace(
        query_length=problem.document_length,
        document_length=problem.query_length,
        n_documents=problem.n_queries if problem.packed else 1,
        n_tokens=x.points.shape[:-1].numel(),
    )
    listed, starts = rows_by_token(reverse, winners[1], x.cu_seqlens)
    grad = torch.empty_like(x.points, memory_format=torch.contiguous_format)
    block = power_of_two(problem.size)
    warps = max(1, min(8, block // _WARP_SIZE))
    _gradient(
        (problem.n_queries * problem.query_length, 1, 1),
        (x.points, x.cu_seqlens, y.points, y.cu_seqlens, winners[0], *weights, listed, starts, grad),
        (problem.query_length, problem.document_length),
        (*problem.query_strides, problem.document_strides[0], problem.document_strides[2]),
        (problem.size, block, max(1, min(32, warps * _IN_FLIGHT // block)), squared, problem.packed),
        (warps, 1, None),
    )
    return grad
