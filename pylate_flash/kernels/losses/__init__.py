"""Losses over scores [Nq, N], and the gradient of the scores.

Plain torch launches a kernel for every step of a loss, forward and backward, which on a batch of some hundred queries
takes more host time than the scores. Here, one launch computes the losses of a chunk of queries, and another their sum
and the gradient, in the layout that the backward expects; few scores take a single launch. Margin MSE uses torch, in
few steps.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ...problem import CROSS_ENTROPY, DIVERGENCE, MARGIN_MSE, Comparison, Targets
from ..launch import Region, kernel, wait_for_previous_kernel
from ..rows import BLOCK, multiplied, programs_for
from ..tables import power_of_two
from . import cross_entropy

# Float32 values per query that are saved for its gradient.
_SAVED_PER_QUERY = {CROSS_ENTROPY: 3, DIVERGENCE: 8, MARGIN_MSE: 0}


class ChunkedLoss:
    """A loss of scores [Nq, N] that arrive a chunk of queries at a time, its gradient, and its totals.

    For each chunk, with its `first` query, call `gradient`; without gradients, `compare`, and `sum` after the last. For
    a symmetric loss, call `meet` on all chunks first.

    Parameters
    ----------
    comparison, targets
        As in `ops.loss_call`, for a loss that is reduced; tensors contiguous, a teacher's scores float32.
    shape
        Nq, N and the largest number of queries in a chunk; none is 0.
    own_candidates
        Whether every query has documents of its own.
    with_slope
        Whether the loss is differentiated with respect to the temperature, a tensor.
    device
        The device of the scores.

    Attributes
    ----------
    loss, statistics, slope
        float32, of shapes [], [3] and [], filled by the last chunk: the loss, and, if requested, its statistics and its
        derivative with respect to the temperature.
    """

    def __init__(
        self,
        comparison: Comparison,
        targets: Targets,
        shape: tuple[int, int, int],
        own_candidates: bool,
        with_slope: bool,
        device: torch.device,
    ) -> None:
        self.comparison, self.targets, self.own_candidates = comparison, targets, own_candidates
        self.n_queries, self.n_documents, chunk = shape
        self.n_values = 6 if comparison.with_statistics else 2 if with_slope else 1
        count, saved = self.n_values * self.n_queries, _SAVED_PER_QUERY[comparison.kind] * chunk
        # All in one allocation; the second part is aligned to 16 bytes.
        start = -(-count // 4) * 4
        memory = torch.empty(start + saved, dtype=torch.float32, device=device)
        address = memory.data_ptr()
        self._values = Region(memory, address, count, torch.float32)
        self._saved = Region(memory, address + 4 * start, saved, torch.float32)
        # Takes a third of the host time of `new_empty(())`.
        self.loss = memory.new_empty_strided((), ())
        self.slope = memory.new_empty_strided((), ()) if with_slope else None
        self.statistics = memory.new_empty_strided((3,), (1,)) if comparison.with_statistics else None
        exclude = targets.exclude
        self._labels = targets.target, None if exclude is None else exclude.view(torch.uint8), targets.temperature
        self._scale, self._teacher_scale = 1.0 / comparison.temperature, 1.0 / comparison.teacher_temperature
        self._margin = float("-inf" if comparison.margin is None else comparison.margin)
        self._share = 1.0 / self.n_queries if comparison.loss_reduction == "mean" else 1.0
        # Padded sizes if a single program computes everything.
        padded = power_of_two(self.n_queries), power_of_two(self.n_documents)
        few = chunk == self.n_queries and padded[0] * padded[1] <= cross_entropy.WHOLE
        self._whole = padded if few and comparison.kind == CROSS_ENTROPY else ()
        self._columns = self._labelled = None
        if comparison.symmetric:
            self._columns = memory.new_empty(3, self.n_documents)
            self._labelled = self._count_labels(device)

    def _count_labels(self, device: torch.device) -> Tensor:
        """[N], float32: for each document, the number of queries that it is the label of."""
        labels, n_documents = self.targets.target, self.n_documents
        if labels is None:
            return (torch.arange(n_documents, device=device) < self.n_queries).float()
        valid = (labels >= 0) & (labels < n_documents)
        counts = torch.zeros(n_documents, dtype=torch.float32, device=device)
        # Sums of ones are exact in any order.
        return counts.index_add_(0, labels.clamp(0, n_documents - 1), valid.float())

    def meet(self, scores: Tensor, first: int) -> None:
        """Accumulate the scores of a chunk into the statistics of each document (column); chunks come in order."""
        tile = cross_entropy.TILE
        cross_entropy.columns_kernel(
            (-(-self.n_documents // tile), 1, 1),
            (scores, *self._labels, self._columns),
            (scores.shape[0], self.n_documents, first, self._scale, self._margin),
            (),
            (tile, first == 0),
            (4, 1, None),
        )

    def compare(self, scores: Tensor, first: int) -> None:
        """Write the losses of the queries from `first` on, given contiguous float32 scores [n, N]."""
        n_queries, n_documents = scores.shape
        if self._whole:
            self._compute_all(scores, None, None)
            return
        comparison, target, scale = self.comparison, self.targets.target, self._scale
        if comparison.kind == MARGIN_MSE:
            assert target is not None
            errors = _margin_errors(scores, target[first : first + n_queries])
            self._values.tensor()[first : first + n_queries] = errors.square().mean(dim=1)
            return
        block = min(cross_entropy.BLOCK, max(32, power_of_two(n_documents)))
        grid, warps = (n_queries, 1, 1), (block // 256 or 1, 1, None)
        if comparison.kind == CROSS_ENTROPY:
            cross_entropy.losses_kernel(
                grid,
                (scores, *self._labels, self._columns, self._saved, self._values),
                (n_queries, n_documents, first, self.n_queries, scale, self._margin),
                (),
                (1, block, self.own_candidates, self.n_values),
                warps,
            )
        else:
            cross_entropy.divergence_kernel(
                grid,
                (scores, target, self.targets.temperature, self._saved, self._values),
                (n_documents, first, self.n_queries, scale, self._teacher_scale),
                (),
                (block, comparison.normalize_scores, self.n_values),
                warps,
            )

    def gradient(self, scores: Tensor, first: int, counts: Tensor | None) -> Tensor:
        """Compare the chunk, and return the gradient of its scores, divided by the `counts` of each query, if given.

        If queries share documents, all scores of one document are contiguous.
        """
        n_queries, n_documents = scores.shape
        strides = (n_documents, 1) if self.own_candidates else (1, n_queries)
        grad_scores = scores.new_empty_strided(scores.shape, strides)
        last = first + n_queries == self.n_queries
        comparison, target, tile = self.comparison, self.targets.target, cross_entropy.TILE
        if self._whole:
            self._compute_all(scores, counts, grad_scores)
            return grad_scores
        self.compare(scores, first)
        if comparison.kind == MARGIN_MSE:
            assert target is not None
            errors = _margin_errors(scores, target[first : first + n_queries])
            torch.sum(errors, dim=1, out=grad_scores[:, 0])
            torch.neg(errors, out=grad_scores[:, 1:])
            if last:
                self.sum()
            grad_scores *= 2.0 * self._share / (n_documents - 1)
            return grad_scores if counts is None else grad_scores.div_(counts)
        has_teacher, totals = comparison.kind == DIVERGENCE, (self.loss, self.slope) if last else (None, None)
        statistics = self.statistics if last else None
        labels, scale = self._labels, self._scale
        if has_teacher:
            labels, scale = (target, None, None), self._teacher_scale
        inputs = scores, *labels, self._columns, self._labelled, self._saved, counts
        cross_entropy.gradient_kernel(
            (-(-n_queries // tile) * -(-n_documents // tile), 1, 1),
            (*inputs, grad_scores, self._values, *totals, statistics),
            (n_queries, n_documents, first, self.n_queries, scale, self._share),
            strides,
            (tile, cross_entropy.BLOCK, self.own_candidates, has_teacher, comparison.normalize_scores, self.n_values),
            (4, 1, None),
        )
        return grad_scores

    def _compute_all(self, scores: Tensor, counts: Tensor | None, grad_scores: Tensor | None) -> None:
        """The loss, the statistics and, if `grad_scores` is given, the gradient of few scores, by one launch."""
        n_queries, n_documents = scores.shape
        inputs = scores, *self._labels, self._columns, self._labelled, self._saved, counts
        cross_entropy.whole_kernel(
            (1, 1, 1),
            (*inputs, grad_scores, self._values, self.loss, self.slope, self.statistics),
            (n_queries, n_documents, self._scale, self._margin, self._share),
            (0, 0) if grad_scores is None else grad_scores.stride(),
            (*self._whole, cross_entropy.TILE, self.own_candidates, False, False, self.n_values),
            (8, 1, None),
        )

    def sum(self) -> None:
        """Fill the loss and the statistics after all chunks were compared, if no gradient was computed."""
        if self._whole:
            return
        cross_entropy.total_kernel(
            (1, 1, 1),
            (self._values, self.loss, self.slope, self.statistics),
            (self.n_queries, self._share),
            (),
            (self.n_values, cross_entropy.BLOCK),
            (4, 1, None),
        )


def _margin_errors(scores: Tensor, teacher: Tensor) -> Tensor:
    """Differences of the margins [n, N - 1], between document 0 and the others, from the teacher's margins."""
    return (scores[:, :1] - scores[:, 1:]) - (teacher[:, :1] - teacher[:, 1:])


@kernel(follows=True, config="block first_in_place second_in_place")
def _rescale_kernel(
    factor_ptr, first_ptr, second_ptr, first_target_ptr, second_target_ptr, n_first, n_second, config: tl.constexpr
):
    """Multiply two tensors by a factor on the device; in place, a factor of 1 is skipped."""
    wait_for_previous_kernel()
    factor = tl.load(factor_ptr)
    # The outer conditions are resolved at compile time, the inner ones at run time.
    if first_ptr is not None:  # noqa: SIM102
        if not config.first_in_place or factor != 1.0:
            multiplied(first_ptr, first_target_ptr, n_first, factor, config.block)
    if second_ptr is not None:  # noqa: SIM102
        if not config.second_in_place or factor != 1.0:
            multiplied(second_ptr, second_target_ptr, n_second, factor, config.block)


def rescale(
    factor: Tensor, first: Tensor | None, second: Tensor | None, dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[Tensor | None, Tensor | None]:
    """Multiply two contiguous tensors (None for none) by a float32 scalar, in place if they have their `dtypes`.

    In place, a factor of 1 costs next to nothing.
    """
    first_target, second_target = first, second
    if first is not None and first.dtype != dtypes[0]:
        first_target = torch.empty_like(first, dtype=dtypes[0])
    if second is not None and second.dtype != dtypes[1]:
        second_target = torch.empty_like(second, dtype=dtypes[1])
    counts = 0 if first is None else first.numel(), 0 if second is None else second.numel()
    tensors, in_place = (
        (factor, first, second, first_target, second_target),
        (first_target is first, second_target is second),
    )
    _rescale_kernel(programs_for(factor, *counts), tensors, counts, (), (BLOCK, *in_place), (4, 1, None))
    return first_target, second_target
