"""What the kernels of the losses share: labels, softmaxes, tiles, and the sums of what each query leaves.

Every query leaves `N_VALUES` values, in rows [N_VALUES, Nq] of one tensor: its loss; for a learned temperature the
derivative of the loss by it; and for statistics whether its right document scores highest, that document's score, the
highest of the others, and whether there is another. Whatever chunks the queries came in, the values are summed at the
end, in one order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import Kernel
from ..overlap import wait_for_previous_kernel

# Documents, or queries, that a program of the loss has in flight, and sides of a tile of the gradient. Not tuned: at
# 1024 x 1024 (32 x 180 tokens), waiting for the GPU alone, a step takes 5.40 ms with this loss, 5.42 with torch's.
BLOCK = 1024
TILE = 32


@triton.jit
def scale_of(temperature_ptr, scale):
    """One over the temperature: of the tensor if there is one, else `scale`."""
    if temperature_ptr is not None:
        scale = 1.0 / tl.load(temperature_ptr).to(tl.float32)
    return scale


@triton.jit
def label_of(queries, exists, labels_ptr, exclude_ptr, n_documents, OWN_CANDIDATES: tl.constexpr):
    """The right documents of queries of the whole call; -1 where one is out of range, or excluded."""
    if labels_ptr is None:
        label = (queries * 0 if OWN_CANDIDATES else queries).to(tl.int64)
    else:
        label = tl.load(labels_ptr + queries, mask=exists, other=-1).to(tl.int64)
    valid = exists & (label >= 0) & (label < n_documents)
    if exclude_ptr is not None:
        valid = valid & (tl.load(exclude_ptr + queries.to(tl.int64) * n_documents + label, mask=valid, other=0) == 0)
    return tl.where(valid, label, -1)


@triton.jit
def softmax_of(values_ptr, n_documents, scale, BLOCK: tl.constexpr):
    """The largest of a row, and the logarithm of sum exp((value - largest) * scale)."""
    offsets = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in tl.range(0, n_documents, BLOCK):
        values = tl.load(values_ptr + first + offsets, mask=first + offsets < n_documents, other=float("-inf"))
        largest = tl.maximum(largest, values)
    best = tl.max(largest, axis=0)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, n_documents, BLOCK):
        values = tl.load(values_ptr + first + offsets, mask=first + offsets < n_documents, other=float("-inf"))
        # Not a number where one of the values is not, though the largest may be one.
        sums += tl.exp((values - best) * scale)
    return best, tl.log(tl.sum(sums, axis=0))


@triton.jit
def tile_of(n_queries, n_documents, TILE: tl.constexpr):
    """Queries and documents of this program's tile of [n_queries, n_documents], and which of them exist."""
    n_blocks = tl.cdiv(n_documents, TILE)
    queries = tl.program_id(0) // n_blocks * TILE + tl.arange(0, TILE)
    documents = tl.program_id(0) % n_blocks * TILE + tl.arange(0, TILE)
    query_exists = queries < n_queries
    return queries, documents, query_exists, query_exists[:, None] & (documents < n_documents)[None, :]


@triton.jit
def store_tile(
    grad, factor, counts_ptr, grad_scores_ptr, queries, documents, query_exists, exists, stride_query, stride_document
):
    """Leave grad * factor / counts, `factor` of each query, `counts` [n_queries] if there are any."""
    if counts_ptr is not None:
        factor = factor / tl.load(counts_ptr + queries, mask=query_exists, other=1.0)
    at = queries.to(tl.int64)[:, None] * stride_query + documents.to(tl.int64)[None, :] * stride_document
    tl.store(grad_scores_ptr + at, grad * factor[:, None], mask=exists)


@triton.jit
def _sum_of(values_ptr, n_queries, BLOCK: tl.constexpr):
    """The sum of values [n_queries], always in the same order."""
    offsets = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, n_queries, BLOCK):
        sums += tl.load(values_ptr + first + offsets, mask=first + offsets < n_queries, other=0.0)
    return tl.sum(sums, axis=0)


@triton.jit
def leave_totals(
    values_ptr, loss_ptr, slope_ptr, statistics_ptr, n_queries, share, N_VALUES: tl.constexpr, BLOCK: tl.constexpr
):
    """The loss, its derivative by the temperature, and statistics, from the values of all queries."""
    tl.store(loss_ptr, _sum_of(values_ptr, n_queries, BLOCK) * share)
    if slope_ptr is not None:
        tl.store(slope_ptr, _sum_of(values_ptr + n_queries, n_queries, BLOCK) * share)
    if N_VALUES > 2:
        hits = _sum_of(values_ptr + 2 * n_queries, n_queries, BLOCK)
        positives = _sum_of(values_ptr + 3 * n_queries, n_queries, BLOCK)
        hardest = _sum_of(values_ptr + 4 * n_queries, n_queries, BLOCK)
        some = _sum_of(values_ptr + 5 * n_queries, n_queries, BLOCK)
        tl.store(statistics_ptr, hits / n_queries)
        tl.store(statistics_ptr + 1, positives / n_queries)
        tl.store(statistics_ptr + 2, hardest / some)


@triton.jit(do_not_specialize=["n_queries", "share"])
def _total_kernel(
    values_ptr, loss_ptr, slope_ptr, statistics_ptr,
    n_queries, share,
    N_VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """What `leave_totals` says; one program."""
    wait_for_previous_kernel()
    leave_totals(values_ptr, loss_ptr, slope_ptr, statistics_ptr, n_queries, share, N_VALUES, BLOCK)


total = Kernel(_total_kernel, follows=True)
