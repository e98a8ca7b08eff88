"""Compute scores and gradients of plain tensors: by Triton kernels, or in blocks of plain torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..kernels.choice import choose
from ..problem import DocumentOffsets, Options, Problem, Tensors
from .blocked import blocked_backward, blocked_forward, maxima
from .call_parts import active_counts, with_empty_score
from .checks import checked_problem
from .tiles import Operands, operands_of

Gradients = tuple[Tensor | None, ...]


def compute(
    tensors: Tensors, options: Options, with_argmax: bool, offsets: DocumentOffsets | None = None
) -> tuple[Tensor, Tensor | None]:
    """Scores and, if requested, the argmax [documents, rows]. Only kernels support `offsets`."""
    problem = checked_problem(tensors, options, with_argmax, offsets)
    starts = None if offsets is None else offsets.starts

    def in_blocks(operands: Operands, scores: Tensor, argmax: Tensor | None) -> None:
        blocked_forward(operands, functools.partial(maxima, with_argmax=with_argmax), scores, argmax)

    saved_fill = (-1, problem.argmax_dtype) if with_argmax else None
    return scores_by(
        problem, tensors, options, lambda *inputs: kernels().maxsim_forward(*inputs, starts), in_blocks, saved_fill
    )


def compute_gradients(
    tensors: Tensors,
    options: Options,
    grad_scores: Tensor,
    argmax: Tensor,
    need_queries: bool,
    need_documents: bool,
    norms: tuple[Tensor, Tensor] | None = None,
) -> Gradients:
    """The gradients of queries and documents, contiguous, of their dtype; None for one that is not needed.

    With `norms`, the inverse norms that queries and documents were multiplied by, under `normalize`, the gradients are
    those of the embeddings before that; only kernels support this.
    """
    problem, needs = checked_problem(tensors, options), (need_queries, need_documents)
    return gradients_by(
        problem, tensors, options, grad_scores, tensors[:2], needs,
        lambda grad_scores: kernels().gradients(problem, tensors, grad_scores, argmax, *needs, norms),
        lambda operands, grad_scores: blocked_backward(operands, grad_scores, argmax, *needs),
    )  # fmt: skip


def scores_by(
    problem: Problem,
    tensors: Tensors,
    options: Options,
    by_kernels: Callable[[Problem, Tensors], tuple[Tensor, Tensor | None]],
    in_blocks: Callable[[Operands, Tensor, Tensor | None], None],
    saved_fill: tuple[float, torch.dtype] | None,
) -> tuple[Tensor, Tensor | None]:
    """Scores, and the values saved for the backward, [documents, rows].

    `in_blocks` adds to scores of 0, and writes saved values to a tensor created from `saved_fill` (initial value and
    dtype). Some or all queries or documents may have no tokens.
    """
    implementation, is_empty = _server(problem, tensors, options)
    if implementation == "triton" and not is_empty:
        scores, row_values = by_kernels(*kernels().for_kernels(problem, tensors))
    else:
        device, row_values = problem.device, None
        if saved_fill is not None:
            row_values = torch.full(problem.argmax_shape, saved_fill[0], dtype=saved_fill[1], device=device)
        with without_autocast(device):
            operands = None if is_empty else operands_of(problem, tensors)
            dtype = problem.scores_dtype if operands is None else operands.dtype
            # Must not be a view: autograd forbids in-place writes to a view that a custom function returns.
            scores = torch.zeros(problem.scores_shape, dtype=dtype, device=device)
            if operands is not None:
                in_blocks(operands, scores, row_values)
        scores = with_empty_score(scores.to(problem.scores_dtype), tensors, problem.empty_score)
    if options.reduction == "mean":
        # The empty score is set again, because it must not be divided.
        scores = with_empty_score(scores / active_counts(problem, tensors), tensors, options.empty_score)
    return scores, row_values


def gradients_by(
    problem: Problem,
    tensors: Tensors,
    options: Options,
    grad_scores: Tensor,
    inputs: Sequence[Tensor],
    needs: tuple[bool, ...],
    by_kernels: Callable[[Tensor], Gradients],
    in_blocks: Callable[[Operands, Tensor], Gradients],
) -> Gradients:
    """The gradients of `inputs` that are needed, contiguous, of their dtypes and shapes, given that of the scores."""
    if options.reduction == "mean":
        grad_scores = grad_scores / active_counts(problem, tensors)
    implementation, is_empty = _server(problem, tensors, options)
    if implementation == "triton" and not is_empty:
        return by_kernels(grad_scores)
    if is_empty:
        gradients: Gradients = tuple([tensor.new_zeros(tensor.shape) for tensor in inputs])
    else:
        with without_autocast(problem.device):
            gradients = in_blocks(operands_of(problem, tensors), grad_scores)
    cast = (
        gradient.to(tensor.dtype).view(tensor.shape) if need and gradient is not None else None
        for gradient, tensor, need in zip(gradients, inputs, needs, strict=True)
    )
    return tuple(cast)


def _server(problem: Problem, tensors: Tensors, options: Options) -> tuple[str, bool]:
    """The implementation of a call, and whether there is nothing to compute."""
    implementation = choose(options.implementation, problem.device, problem.dtype, problem.size)
    return implementation, problem.is_empty or 0 in tensors.queries.shape


@functools.cache
def kernels() -> ModuleType:
    """The module of kernel calls, imported on first use, because Triton may not be installed."""
    from . import kernel_calls

    return kernel_calls


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Disable autocast: it has been applied to the inputs already."""
    # Entering autocast takes as long as a launch, so it is skipped where autocast is off.
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
