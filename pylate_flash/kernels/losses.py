"""Losses over scores [Nq, N], and the gradient of the scores: cross entropy and Kullback-Leibler divergence.

Both compare, query by query, q = softmax(scores / temperature) with a target p: all of it on one document, or the
softmax of a teacher's scores. Either way the gradient of a query's loss is (q - p) / temperature. Plain torch launches
a kernel for every step of it, forward and backward, which on a batch of some hundred queries takes more host time than
the scores. Here the losses are one launch, and their sum with the gradient another, which leaves the gradient in the
layout that the backward wants.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Kernel, Region
from .overlap import wait_for_previous_kernel
from .tiles import architecture, power_of_two

# Documents, or queries, that a program of the loss has in flight, and sides of a tile of the gradient. Not tuned: at
# 1024 x 1024 (32 x 180 tokens), waiting for the GPU alone, a step takes 5.40 ms with this loss, 5.42 with torch's.
_BLOCK = 1024
_TILE = 32
# Programs per multiprocessor that multiply gradients by the gradient of the loss.
_RESCALE_PROGRAMS = 4


class Comparison(NamedTuple):
    """What scores [Nq, N] are compared with, and how.

    The target is contiguous: under `divergence` a teacher's scores, float32 of the shape of the scores; else labels
    [Nq], integers, or None for document i of query i, or with `own_candidates` the first. A label out of range gives
    NaN. `reduction` over the queries is "mean" or "sum".
    """

    divergence: bool
    own_candidates: bool
    temperature: float
    reduction: str

    def share(self, n_queries: int) -> float:
        """The factor of a query's loss in the loss."""
        return 1.0 / n_queries if self.reduction == "mean" else 1.0


class Losses(NamedTuple):
    """The losses [Nq] of queries, and what the gradient wants to know of their scores (and of a teacher's)."""

    values: Region
    statistics: Region


def losses_of(scores: Tensor, target: Tensor | None, comparison: Comparison) -> Losses:
    """The losses of contiguous float32 scores [Nq, N], of which no size is 0."""
    n_queries, n_documents = scores.shape
    divergence, own_candidates, temperature, _ = comparison
    n_statistics = (4 if divergence else 2) * n_queries
    # Both in one allocation, the second from a multiple of 16 bytes on.
    start = -(-n_queries // 4) * 4
    memory = scores.new_empty(start + n_statistics)
    address = memory.data_ptr()
    values = Region(memory, address, n_queries, torch.float32)
    statistics = Region(memory, address + 4 * start, n_statistics, torch.float32)
    block = min(_BLOCK, max(32, power_of_two(n_documents)))
    _losses(
        (n_queries, 1, 1),
        (scores, target, statistics, values),
        (n_queries, n_documents, 1.0 / temperature),
        (),
        (block, divergence, own_candidates),
        (block // 256 or 1, 1, None),
    )
    return Losses(values, statistics)


def sum_of(scores: Tensor, losses: Losses, comparison: Comparison) -> Tensor:
    """The loss, a scalar."""
    loss, n_queries = _scalar(scores), scores.shape[0]
    _total((1, 1, 1), (losses.values, loss), (n_queries, comparison.share(n_queries)), (), (_BLOCK,), (4, 1, None))
    return loss


def sum_and_gradient_of(
    scores: Tensor, target: Tensor | None, losses: Losses, counts: Tensor | None, comparison: Comparison
) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient of the scores [Nq, N], of which every query's is divided by its `counts`, if given.

    Where queries have documents in common, all scores of one document lie together.
    """
    n_queries, n_documents = scores.shape
    divergence, own_candidates, temperature, _ = comparison
    strides = (n_documents, 1) if own_candidates else (1, n_queries)
    loss, grad_scores = _scalar(scores), scores.new_empty_strided(scores.shape, strides)
    scale, share = 1.0 / temperature, comparison.share(n_queries)
    _gradient(
        (-(-n_queries // _TILE) * -(-n_documents // _TILE), 1, 1),
        (scores, target, losses.statistics, counts, losses.values, grad_scores, loss),
        (n_queries, n_documents, scale, scale * share, share),
        strides,
        (_TILE, _BLOCK, divergence, own_candidates),
        (4, 1, None),
    )
    return loss, grad_scores


def _scalar(scores: Tensor) -> Tensor:
    # A third of the host time of `new_empty(())`.
    return scores.new_empty_strided((), ())


def rescale(factor: Tensor, first: Tensor | None, second: Tensor | None) -> None:
    """Multiply two contiguous tensors (None for none) by a float32 scalar; costs next to nothing where it is 1."""
    counts = (0 if first is None else first.numel(), 0 if second is None else second.numel())
    programs = min(_RESCALE_PROGRAMS * architecture(factor.device)[1], -(-max(counts) // _BLOCK)) or 1
    _rescale((programs, 1, 1), (factor, first, second), counts, (), (_BLOCK,), (4, 1, None))


@triton.jit
def _softmax_of(scores_ptr, n_documents, scale, BLOCK: tl.constexpr):
    """The largest of a row's scores, and the logarithm of sum exp((score - largest) * scale)."""
    offsets = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in tl.range(0, n_documents, BLOCK):
        scores = tl.load(scores_ptr + first + offsets, mask=first + offsets < n_documents, other=float("-inf"))
        largest = tl.maximum(largest, scores)
    best = tl.max(largest, axis=0)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, n_documents, BLOCK):
        scores = tl.load(scores_ptr + first + offsets, mask=first + offsets < n_documents, other=float("-inf"))
        # Not a number where one of the scores is not, though the largest may be one.
        sums += tl.exp((scores - best) * scale)
    return best, tl.log(tl.sum(sums, axis=0))


@triton.jit
def _label_of(query, target_ptr, n_documents, OWN_CANDIDATES: tl.constexpr):
    """The right document of a query (or of several); -1 if the label is out of range."""
    if target_ptr is None:
        label = (query * 0 if OWN_CANDIDATES else query).to(tl.int64)
    else:
        label = tl.load(target_ptr + query, mask=query >= 0, other=-1)
    return tl.where((label >= 0) & (label < n_documents), label, -1)


@triton.jit(do_not_specialize=["n_queries", "n_documents", "scale"])
def _losses_kernel(
    scores_ptr, target_ptr, statistics_ptr, losses_ptr,
    n_queries, n_documents, scale,
    BLOCK: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    OWN_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """The loss of a query, and of its scores, and a teacher's, what `_softmax_of` says; a program for each query."""
    wait_for_previous_kernel()
    query = tl.program_id(0)
    row = query.to(tl.int64) * n_documents
    best, log_sum = _softmax_of(scores_ptr + row, n_documents, scale, BLOCK)
    tl.store(statistics_ptr + query, best)
    tl.store(statistics_ptr + n_queries + query, log_sum)
    if DIVERGENCE:
        teacher_best, teacher_log_sum = _softmax_of(target_ptr + row, n_documents, 1.0, BLOCK)
        tl.store(statistics_ptr + 2 * n_queries + query, teacher_best)
        tl.store(statistics_ptr + 3 * n_queries + query, teacher_log_sum)
        terms = tl.zeros([BLOCK], tl.float32)
        for first in tl.range(0, n_documents, BLOCK):
            documents = first + tl.arange(0, BLOCK)
            exists = documents < n_documents
            scores = tl.load(scores_ptr + row + documents, mask=exists, other=0.0)
            teacher = tl.load(target_ptr + row + documents, mask=exists, other=float("-inf"))
            log_target = teacher - teacher_best - teacher_log_sum
            target = tl.exp(log_target)
            # What the teacher rules out adds nothing.
            terms += tl.where(target == 0.0, 0.0, target * (log_target - ((scores - best) * scale - log_sum)))
        tl.store(losses_ptr + query, tl.sum(terms, axis=0))
    else:
        label = _label_of(query, target_ptr, n_documents, OWN_CANDIDATES)
        score = tl.load(scores_ptr + row + label, mask=label >= 0, other=float("nan"))
        tl.store(losses_ptr + query, log_sum - (score - best) * scale)


@triton.jit
def _sum_of(losses_ptr, n_queries, BLOCK: tl.constexpr):
    """The sum of the losses [n_queries], always in the same order."""
    offsets = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, n_queries, BLOCK):
        sums += tl.load(losses_ptr + first + offsets, mask=first + offsets < n_queries, other=0.0)
    return tl.sum(sums, axis=0)


@triton.jit(do_not_specialize=["n_queries", "scale"])
def _total_kernel(losses_ptr, loss_ptr, n_queries, scale, BLOCK: tl.constexpr):
    """loss = scale * sum of the losses [n_queries]; one program."""
    wait_for_previous_kernel()
    tl.store(loss_ptr, _sum_of(losses_ptr, n_queries, BLOCK) * scale)


@triton.jit(do_not_specialize=["n_queries", "n_documents", "scale", "grad_scale", "loss_scale"])
def _gradient_kernel(
    scores_ptr, target_ptr, statistics_ptr, counts_ptr, losses_ptr, grad_scores_ptr, loss_ptr,
    n_queries, n_documents, scale, grad_scale, loss_scale,
    stride_query, stride_document,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    OWN_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """grad_scores = (softmax(scores * scale) - target) * grad_scale / counts; a program for each tile.

    `counts` may be None. The first program also leaves what `_total_kernel` would, and spares its launch.
    """
    wait_for_previous_kernel()
    if tl.program_id(0) == 0:
        tl.store(loss_ptr, _sum_of(losses_ptr, n_queries, BLOCK) * loss_scale)
    n_blocks = tl.cdiv(n_documents, TILE)
    queries = tl.program_id(0) // n_blocks * TILE + tl.arange(0, TILE)
    documents = tl.program_id(0) % n_blocks * TILE + tl.arange(0, TILE)
    query_exists = queries < n_queries
    exists = query_exists[:, None] & (documents < n_documents)[None, :]
    at = queries.to(tl.int64)[:, None] * n_documents + documents[None, :]
    scores = tl.load(scores_ptr + at, mask=exists, other=0.0)
    best = tl.load(statistics_ptr + queries, mask=query_exists, other=0.0)
    log_sum = tl.load(statistics_ptr + n_queries + queries, mask=query_exists, other=0.0)
    grad = tl.exp((scores - best[:, None]) * scale - log_sum[:, None])
    if DIVERGENCE:
        teacher = tl.load(target_ptr + at, mask=exists, other=0.0)
        best = tl.load(statistics_ptr + 2 * n_queries + queries, mask=query_exists, other=0.0)
        log_sum = tl.load(statistics_ptr + 3 * n_queries + queries, mask=query_exists, other=0.0)
        grad -= tl.exp(teacher - best[:, None] - log_sum[:, None])
    else:
        label = _label_of(tl.where(query_exists, queries, -1), target_ptr, n_documents, OWN_CANDIDATES)
        grad -= (documents[None, :] == label[:, None]).to(tl.float32)
        grad = tl.where((label >= 0)[:, None], grad, float("nan"))
    factor = tl.full([TILE], 1.0, tl.float32) * grad_scale
    if counts_ptr is not None:
        factor /= tl.load(counts_ptr + queries, mask=query_exists, other=1.0)
    to = queries.to(tl.int64)[:, None] * stride_query + documents.to(tl.int64)[None, :] * stride_document
    tl.store(grad_scores_ptr + to, grad * factor[:, None], mask=exists)


@triton.jit(do_not_specialize=["n_first", "n_second"])
def _rescale_kernel(factor_ptr, first_ptr, second_ptr, n_first, n_second, BLOCK: tl.constexpr):
    """Multiply two tensors of so many elements (0 for none) by a factor on the device, unless it is 1."""
    wait_for_previous_kernel()
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        start = tl.program_id(0).to(tl.int64) * BLOCK
        if first_ptr is not None:
            for block in tl.range(start, n_first, step):
                at = block + tl.arange(0, BLOCK)
                values = tl.load(first_ptr + at, mask=at < n_first, other=0.0)
                tl.store(first_ptr + at, (values * factor).to(first_ptr.dtype.element_ty), mask=at < n_first)
        if second_ptr is not None:
            for block in tl.range(start, n_second, step):
                at = block + tl.arange(0, BLOCK)
                values = tl.load(second_ptr + at, mask=at < n_second, other=0.0)
                tl.store(second_ptr + at, (values * factor).to(second_ptr.dtype.element_ty), mask=at < n_second)


_losses = Kernel(_losses_kernel, follows=True)
_total = Kernel(_total_kernel, follows=True)
_gradient = Kernel(_gradient_kernel, follows=True)
_rescale = Kernel(_rescale_kernel, follows=True)
