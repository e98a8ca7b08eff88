"""Losses over scores [Nq, N], and the gradient of the scores: cross entropy and Kullback-Leibler divergence.

Both compare, query by query, q = softmax(scores / temperature) with a target p: all of it on one document, or the
softmax of a teacher's scores. Either way the gradient of a query's loss is (q - p) / temperature. Plain torch launches
a kernel for every step of it, forward and backward, which on a batch of some hundred queries takes more host time than
the scores. Here the loss is two launches, and the gradient one, that leaves it in the layout that `winner_lists` wants.

`bound_step` puts them between the forward and the backward of MaxSim: a training step is then one sequence of launches,
and scores and winners are scratch. At 128 x 128 (32 x 300 tokens), where a step waits for the host, it takes 0.25 ms on
an H200; with torch's loss between two operations 0.38.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .backward import add_backward, auto_backward
from .forward import Slots, add_maxsim, winners_dtype
from .gradients import Problem, Slot
from .launch import Launch, Launcher, Sequence
from .overlap import wait_for_previous_kernel
from .tiles import architecture

# Documents, or queries, that a program of the loss has in flight, and sides of a tile of the gradient. Not tuned: at
# 1024 x 1024 (32 x 180 tokens), waiting for the GPU alone, a step takes 5.40 ms with this loss, 5.42 with torch's.
_BLOCK = 1024
_TILE = 32
# Programs per multiprocessor that multiply gradients by the gradient of the loss.
_RESCALE_PROGRAMS = 4


class Comparison(NamedTuple):
    """What scores [Nq, N] are compared with, and how.

    The target is contiguous: under `divergence` a teacher's scores, float32 of the shape of the scores; else labels
    [Nq], int64, or None, not `has_target`, for document i of query i, or with `own_candidates` the first. A label out
    of range gives NaN. `reduction` over the queries is "mean", "sum" or "none".
    """

    divergence: bool
    has_target: bool
    own_candidates: bool
    temperature: float
    reduction: str

    def statistics(self, n_queries: int) -> tuple[int, int]:
        """The shape of what the gradient wants to know of the scores, and of a teacher's."""
        return 4 if self.divergence else 2, n_queries

    def share(self, n_queries: int) -> float:
        """The factor of a query's loss in the loss."""
        return 1.0 / n_queries if self.reduction == "mean" else 1.0

    def grad_strides(self, n_queries: int, n_documents: int) -> tuple[int, int]:
        """Of the gradient of the scores: with documents in common, all scores of one document lie together."""
        return (n_documents, 1) if self.own_candidates else (1, n_queries)


class Loss(NamedTuple):
    """A loss in two parts.

    `forward(scores, target)` returns the loss and statistics. `gradient(grad_loss, scores, target, statistics, counts)`
    returns the gradient of the scores, float32 [Nq, N], of which every query's is divided by its `counts`, if given.
    """

    forward: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
    gradient: Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor | None], Tensor]


class _LossSlot(IntEnum):
    SCORES = 0
    TARGET = 1
    STATISTICS = 2
    LOSS = 3


# Fewer than of other launches are kept: these are of a temperature too, which some trainings change from step to step.
@functools.lru_cache(maxsize=256)
def bound_loss(shape: tuple[int, int], device: torch.device, comparison: Comparison) -> Loss:
    """A loss of contiguous float32 scores of this shape, no dimension of which is 0, launched on the current device."""
    each = comparison.reduction == "none"
    sequence = Sequence(len(_LossSlot))
    losses = int(_LossSlot.LOSS) if each else sequence.region(shape[0], torch.float32)
    _add_losses(sequence, shape, comparison, _LossSlot.SCORES, _LossSlot.TARGET, _LossSlot.STATISTICS, losses)
    if not each:
        total = _total.bind((1, 1, 1), (shape[0], comparison.share(shape[0])), (), (_BLOCK,), 4, num_stages=1)
        sequence.add(total, losses, _LossSlot.LOSS)
    # Whether there are counts does not change from call to call of one launch.
    launches = {counted: _bind_gradient(shape, comparison) for counted in (False, True)}
    statistics_shape, strides = comparison.statistics(shape[0]), comparison.grad_strides(*shape)
    loss_shape = shape[:1] if each else ()

    def forward(scores: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor]:
        statistics = torch.empty(statistics_shape, dtype=torch.float32, device=device)
        loss = torch.empty(loss_shape, dtype=torch.float32, device=device)
        sequence(scores, target, statistics, loss)
        return loss, statistics

    def gradient(
        grad_loss: Tensor, scores: Tensor, target: Tensor | None, statistics: Tensor, counts: Tensor | None
    ) -> Tensor:
        grad_scores = torch.empty_strided(shape, strides, dtype=torch.float32, device=device)
        launch = launches[counts is not None]
        launch(scores, target, statistics, grad_loss.contiguous(), counts, None, grad_scores, None)
        return grad_scores

    return Loss(forward, gradient)


def _add_losses(
    sequence: Sequence, shape: tuple[int, int], comparison: Comparison, scores: int, target: int, statistics: int,
    losses: int,
) -> None:  # fmt: skip
    """Add the losses of all queries and their statistics, from and to these slots."""
    block = min(_BLOCK, max(32, triton.next_power_of_2(shape[1])))
    launch = _losses.bind(
        (shape[0], 1, 1),
        (*shape, 1.0 / comparison.temperature),
        (),
        (block, comparison.divergence, comparison.own_candidates),
        max(1, block // 256),
        num_stages=1,
    )
    sequence.add(launch, scores, target, statistics, losses)


def _bind_gradient(shape: tuple[int, int], comparison: Comparison) -> Launch:
    n_queries, n_documents = shape
    scale = 1.0 / comparison.temperature
    return _gradient.bind(
        (triton.cdiv(n_queries, _TILE) * triton.cdiv(n_documents, _TILE), 1, 1),
        (
            n_queries, n_documents, int(comparison.reduction == "none"), scale, scale * comparison.share(n_queries),
            comparison.share(n_queries),
        ),
        comparison.grad_strides(*shape),
        (_TILE, _BLOCK, comparison.divergence, comparison.own_candidates),
        4,
        num_stages=1,
    )  # fmt: skip


# Of queries, documents and their masks in any view of [G, K, Ld, d], and target: the loss, and both gradients for a
# `grad_loss` of 1.
Step = Callable[
    [Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], tuple[Tensor, Tensor | None, Tensor | None]
]


@functools.lru_cache(maxsize=256)
def bound_step(
    shape: torch.Size,
    query_strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    documents_shape: tuple[int, ...],
    document_strides: tuple[int, ...],
    aligned: bool,
    has_queries_mask: bool,
    has_documents_mask: bool,
    zero_masked: bool,
    need_queries: bool,
    need_documents: bool,
    precision: str,
    comparison: Comparison,
) -> Step:
    """Scores, loss and gradients of embeddings that are not normalised.

    Embeddings and masks are as in `bound_maxsim`, `comparison.reduction` is not "none".
    """
    groups, candidates, length, size = documents_shape
    n_queries, query_length = shape[:2]
    scores_shape = n_queries, candidates
    queries_mask, documents_mask, target, loss, grad_queries, grad_documents = range(len(Slot), len(Slot) + 6)
    grad_shape = documents_shape if comparison.own_candidates else documents_shape[1:]
    problem = Problem(
        n_queries, query_length, size, groups, groups * candidates, candidates, length, groups * candidates * length,
        comparison.grad_strides(*scores_shape), query_strides, document_strides[:3], False, False, False, device, dtype,
        winners_dtype(length),
    )  # fmt: skip
    backward = auto_backward(problem)
    zeros_or_empty = torch.zeros if backward == "onehot" else torch.empty

    def allocate() -> tuple[Tensor, Tensor | None, Tensor | None]:
        return (
            torch.empty((), dtype=torch.float32, device=device),
            torch.empty(shape, dtype=dtype, device=device) if need_queries else None,
            zeros_or_empty(grad_shape, dtype=dtype, device=device) if need_documents else None,
        )

    sequence = Sequence(grad_documents + 1, Slot.QUERIES, allocate)
    sequence.same(Slot.GRAD_QUERIES, grad_queries)
    sequence.same(Slot.GRAD_DOCUMENTS, grad_documents)
    n_scores = math.prod(scores_shape)
    sequence.keep(Slot.WINNERS, n_scores * query_length, problem.winners_dtype)
    sequence.keep(Slot.GRAD_SCORES, n_scores, torch.float32)
    sequence.same(Slot.WEIGHTS, Slot.GRAD_SCORES)
    scores = sequence.region(n_scores, torch.float32)
    statistics = sequence.region(math.prod(comparison.statistics(n_queries)), torch.float32)
    losses = sequence.region(n_queries, torch.float32)
    add_maxsim(
        sequence, shape, query_strides, dtype, device, documents_shape, document_strides, aligned, has_queries_mask,
        has_documents_mask, zero_masked, precision,
        Slots(Slot.QUERIES, Slot.DOCUMENTS, queries_mask, documents_mask, Slot.NONE, scores, Slot.WINNERS),
    )  # fmt: skip
    _add_losses(sequence, scores_shape, comparison, scores, target, statistics, losses)
    sequence.add(
        _bind_gradient(scores_shape, comparison), scores, target, statistics, Slot.NONE, Slot.NONE, losses,
        Slot.GRAD_SCORES, loss,
    )  # fmt: skip
    add_backward(problem, sequence, need_queries, need_documents, backward)
    absent = (None,) * (len(Slot) - Slot.QUERIES_SCALE)

    def step(
        queries: Tensor, documents: Tensor, queries_mask: Tensor | None, documents_mask: Tensor | None,
        target: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        return sequence(None, queries, documents, *absent, queries_mask, documents_mask, target)  # type: ignore[return-value]

    return step


@functools.lru_cache(maxsize=4096)
def bound_rescale(n_first: int, n_second: int, device: torch.device) -> Launch:
    """A launch, on the current device, that multiplies two contiguous tensors by a float32 scalar of the device.

    Takes the scalar and the tensors, of so many elements; None for one of 0. Costs next to nothing where it is 1.
    """
    programs = min(_RESCALE_PROGRAMS * architecture(device)[1], triton.cdiv(max(n_first, n_second, 1), _BLOCK))
    return _rescale.bind((programs, 1, 1), (n_first, n_second), (), (_BLOCK,), 4, num_stages=1)


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


@triton.jit(do_not_specialize=["n_queries", "n_documents", "grad_stride", "scale", "grad_scale", "loss_scale"])
def _gradient_kernel(
    scores_ptr, target_ptr, statistics_ptr, grad_loss_ptr, counts_ptr, losses_ptr, grad_scores_ptr, loss_ptr,
    n_queries, n_documents, grad_stride, scale, grad_scale, loss_scale,
    stride_query, stride_document,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    OWN_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """grad_scores = (softmax(scores * scale) - target) * grad_scale * grad_loss / counts; a program for each tile.

    `grad_loss` is one number (grad_stride 0) or one for each query (1), or None for 1; `counts` may be None. Where
    `losses` are given, the first program leaves what `_total_kernel` would, and spares its launch.
    """
    wait_for_previous_kernel()
    if losses_ptr is not None:  # noqa: SIM102 (one is decided when it compiles, the other when it runs)
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
    if grad_loss_ptr is not None:
        factor *= tl.load(grad_loss_ptr + queries * grad_stride, mask=query_exists, other=0.0)
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


_losses = Launcher(_losses_kernel, follows=True)
_total = Launcher(_total_kernel, follows=True)
_gradient = Launcher(_gradient_kernel, follows=True)
_rescale = Launcher(_rescale_kernel, follows=True)
