"""The best of many scores, exactly: equal ones in the order of their columns, without a sort of all of them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..kernels.tables import BEST_MOST, BEST_SCORES, kernels_run_on

__all__ = ["joined_best", "k_best", "k_best_of_runs"]

# What one thread block of a GPU sorts in its shared memory.
_SORTED = 4096


def k_best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest scores of every row [N, columns], and their columns (int64), both [N, min(k, columns)].

    The first of equal ones comes first, and NaN before all. On a GPU, a kernel finds few of few. Others are in the `k`
    groups of neighbouring columns with the largest maxima (the first of equal ones), so only these are sorted.
    """
    columns = scores.shape[1]
    few = k <= BEST_MOST and scores.numel() <= BEST_SCORES
    if few and scores.is_cuda and kernels_run_on(scores.device, scores.dtype) is None:
        # Triton may not be there on a CPU.
        from ..kernels import best

        return best.k_best(scores, min(k, columns))
    group = max(2, _SORTED // k)
    n_groups = columns // group
    if columns <= _SORTED or n_groups <= k:
        scores, found = torch.sort(scores, dim=1, descending=True, stable=True)
        return scores[:, :k], found[:, :k]
    within = torch.arange(group, device=scores.device)
    largest = scores[:, : n_groups * group].unflatten(1, (n_groups, group)).amax(dim=2)
    chosen = k_best(largest, k)[1].sort(dim=1).values
    found = torch.add(within, chosen.unsqueeze(2), alpha=group).flatten(1)
    if n_groups * group < columns:
        # What is left at the end is no group, and is sorted with the others.
        found = torch.cat([found, within[: columns - n_groups * group].expand(len(scores), -1) + n_groups * group], 1)
    scores, order = torch.sort(scores.gather(1, found), dim=1, descending=True, stable=True)
    return scores[:, :k], found.gather(1, order[:, :k])


def joined_best(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], k: int) -> tuple[Tensor, Tensor]:
    """The `k` best of two results of `k_best`, of which the columns of the first come before those of the second."""
    scores, columns = (torch.cat(pair, dim=1) for pair in zip(first, second, strict=True))
    best, order = k_best(scores, k)
    return best, columns.gather(1, order)


def k_best_of_runs(scores: Tensor, counts: np.ndarray, k: int) -> tuple[Tensor, Tensor]:
    """As `k_best`, of each of the runs [counts[i]] that `scores` [T] consist of; a shorter one has others behind it.

    The scores and their places in `scores`, both [N, min(k, the largest count)].
    """
    if len(counts) == 1:
        return k_best(scores.unsqueeze(0), k)
    device, total = scores.device, len(scores)
    lengths = torch.from_numpy(counts).to(device, non_blocking=True)
    runs = torch.arange(len(counts), dtype=torch.int32, device=device).repeat_interleave(lengths, output_size=total)
    order = torch.sort(scores, descending=True, stable=True).indices
    order = order[torch.sort(runs[order], stable=True).indices]
    places = (lengths.cumsum(0) - lengths).unsqueeze(1) + torch.arange(min(k, int(counts.max())), device=device)
    places = order[places.clamp_(max=total - 1)]
    return scores[places], places
