"""The computation of scores and gradients on tensors: by Triton kernels, or in blocks of plain torch."""

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
    """Scores, and the argmax [documents, rows], if asked for. Only kernels take `offsets`."""
    problem = checked_problem(tensors, options, with_argmax, offsets)
    starts = None if offsets is None else offsets.starts

    def in_blocks(operands: Operands, scores: Tensor, argmax: Tensor | None) -> None:
        blocked_forward(operands, functools.partial(maxima, with_argmax=with_argmax), scores, argmax)

    saved = (-1, problem.argmax_dtype) if with_argmax else None
    return scores_by(
        problem, tensors, options, lambda *inputs: kernels().maxsim_forward(*inputs, starts), in_blocks, saved
    )


def compute_gradients(
    tensors: Tensors,
    options: Options,
    grad_scores: Tensor,
    argmax: Tensor,
    need_queries: bool,
    need_documents: bool,
) -> Gradients:
    """The gradients of queries and documents, contiguous in their type; None for one that is not needed."""
    problem, needs = checked_problem(tensors, options), (need_queries, need_documents)
    return gradients_by(
        problem, tensors, options, grad_scores, tensors[:2], needs,
        lambda grad_scores: kernels().gradients(problem, tensors, grad_scores, argmax, *needs),
        lambda operands, grad_scores: blocked_backward(operands, grad_scores, argmax, *needs),
    )  # fmt: skip


def scores_by(
    problem: Problem,
    tensors: Tensors,
    options: Options,
    by_kernels: Callable[[Problem, Tensors], tuple[Tensor, Tensor | None]],
    in_blocks: Callable[[Operands, Tensor, Tensor | None], None],
    saved: tuple[float, torch.dtype] | None,
) -> tuple[Tensor, Tensor | None]:
    """Scores, and what is saved of all documents and rows, [documents, rows].

    In blocks, that is filled with the number of `saved` first, in the type there, and scores are 0. A query or a
    document may be without tokens, or all of them.
    """
    chosen, empty = _server(problem, tensors, options)
    if chosen == "triton" and not empty:
        scores, of_rows = by_kernels(*kernels().for_kernels(problem, tensors))
    else:
        device, of_rows = problem.device, None
        if saved is not None:
            of_rows = torch.full(problem.argmax_shape, saved[0], dtype=saved[1], device=device)
        with without_autocast(device):
            operands = None if empty else operands_of(problem, tensors)
            dtype = problem.scores_dtype if operands is None else operands.dtype
            # No view of it is returned, as autograd lets nobody write into a view that its function returns.
            scores = torch.zeros(problem.scores_shape, dtype=dtype, device=device)
            if operands is not None:
                in_blocks(operands, scores, of_rows)
        scores = with_empty_score(scores.to(problem.scores_dtype), tensors, problem.empty_score)
    if options.reduction == "mean":
        # The score of an empty document is not divided.
        scores = with_empty_score(scores / active_counts(problem, tensors), tensors, options.empty_score)
    return scores, of_rows


def gradients_by(
    problem: Problem,
    tensors: Tensors,
    options: Options,
    grad_scores: Tensor,
    likes: Sequence[Tensor],
    needs: tuple[bool, ...],
    by_kernels: Callable[[Tensor], Gradients],
    in_blocks: Callable[[Operands, Tensor], Gradients],
) -> Gradients:
    """The gradients that are needed of `likes`, contiguous in their types and shapes, by that of sums over queries."""
    if options.reduction == "mean":
        grad_scores = grad_scores / active_counts(problem, tensors)
    chosen, empty = _server(problem, tensors, options)
    if chosen == "triton" and not empty:
        return by_kernels(grad_scores)
    if empty:
        gradients: Gradients = tuple([like.new_zeros(like.shape) for like in likes])
    else:
        with without_autocast(problem.device):
            gradients = in_blocks(operands_of(problem, tensors), grad_scores)
    cast = (
        gradient.to(like.dtype).view(like.shape) if need and gradient is not None else None
        for gradient, like, need in zip(gradients, likes, needs, strict=True)
    )
    return tuple(cast)


def _server(problem: Problem, tensors: Tensors, options: Options) -> tuple[str, bool]:
    """The implementation, and whether there is nothing to compute."""
    chosen = choose(options.implementation, problem.device, problem.dtype, problem.size)
    return chosen, problem.is_empty or 0 in tensors.queries.shape


@functools.cache
def kernels() -> ModuleType:
    """What computes by kernels, imported when first needed, because Triton is not everywhere."""
    from . import kernel_calls

    return kernel_calls


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Computation in the types of its tensors, which have followed autocast already."""
    # To enter autocast takes as long as a launch.
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
