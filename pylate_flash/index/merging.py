"""Exact top-k without a full sort: equal scores keep the order of their columns."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..kernels.tables import BEST_MOST, BEST_SCORES, kernels_run_on

# Number of scores that one thread block of a GPU sorts in shared memory.
_SORTED = 4096


def k_best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest scores of every row [N, columns], and their columns (int64), both [N, min(k, columns)].

    Ties keep the order of columns, and NaN sorts first. On a GPU, a kernel handles a small `k` of few scores. Otherwise
    only the `k` groups of adjacent columns with the largest maxima (the first of equal ones) are sorted.
    """
    columns = scores.shape[1]
    small = k <= BEST_MOST and scores.numel() <= BEST_SCORES
    if small and scores.is_cuda and kernels_run_on(scores.device, scores.dtype) is None:
        # Imported here: without a GPU, Triton may not be installed.
        from ..kernels import best

        return best.k_best(scores, min(k, columns))
    group = max(2, _SORTED // k)
    n_groups = columns // group
    if columns <= _SORTED or n_groups <= k:
        scores, index = torch.sort(scores, dim=1, descending=True, stable=True)
        return scores[:, :k], index[:, :k]
    within = torch.arange(group, device=scores.device)
    largest = scores[:, : n_groups * group].unflatten(1, (n_groups, group)).amax(dim=2)
    chosen = k_best(largest, k)[1].sort(dim=1).values
    index = torch.add(within, chosen.unsqueeze(2), alpha=group).flatten(1)
    if n_groups * group < columns:
        # The columns left after the last full group are sorted as well.
        index = torch.cat([index, within[: columns - n_groups * group].expand(len(scores), -1) + n_groups * group], 1)
    scores, order = torch.sort(scores.gather(1, index), dim=1, descending=True, stable=True)
    return scores[:, :k], index.gather(1, order[:, :k])


def joined_best(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], k: int) -> tuple[Tensor, Tensor]:
    """The `k` best of two results of `k_best`; the columns of the first precede those of the second."""
    scores, columns = (torch.cat(pair, dim=1) for pair in zip(first, second, strict=True))
    best, order = k_best(scores, k)
    return best, columns.gather(1, order)


def k_best_of_runs(scores: Tensor, counts: np.ndarray, k: int) -> tuple[Tensor, Tensor]:
    """`k_best` of each of the runs of `counts` [N] scores that make up `scores` [T].

    Returns scores and their indices in `scores`, both [N, min(k, max count)]; a run shorter than `k` ends in filler.
    """
    if len(counts) == 1:
        return k_best(scores.unsqueeze(0), k)
    device, total = scores.device, len(scores)
    lengths = torch.from_numpy(counts).to(device, non_blocking=True)
    runs = torch.arange(len(counts), dtype=torch.int32, device=device).repeat_interleave(lengths, output_size=total)
    order = torch.sort(scores, descending=True, stable=True).indices
    order = order[torch.sort(runs[order], stable=True).indices]
    indices = (lengths.cumsum(0) - lengths).unsqueeze(1) + torch.arange(min(k, int(counts.max())), device=device)
    indices = order[indices.clamp_(max=total - 1)]
    return scores[indices], indices
